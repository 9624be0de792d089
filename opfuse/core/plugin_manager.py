"""Plugins: found by entry-point metadata, imported at first need, isolated from each other.

Reading metadata imports nothing and happens once, at the end of ``import opfuse``. The first plan
(or listing) imports the plugins that are not blocked, one by one in sorted order. If the metadata,
import, registration or a hook of a plugin fails, opfuse issues a :class:`opfuse.PluginWarning` and
lists the plugin as ``failed``; with ``OPFUSE_STRICT=1`` it raises instead. An error inside a
running kernel is never caught.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pluggy

from . import hookspecs, records
from .errors import CallRefusedError, PluginWarning
from .fusion import PASSES, Fusion, FusionLike
from .quantization import Recipe
from .records import (
    EntryPoints,
    FusionSource,
    PluginFilter,
    PluginRecord,
    Precedence,
    is_strict,
    normalize,
)
from .settings import CORE_OPTIONS, current


@dataclasses.dataclass(frozen=True, eq=False)
class Registration:
    """Handle of a fusion registered in code."""

    manager: PluginManager
    source: FusionSource

    def unregister(self) -> None:
        """Remove the fusion. A second call has no effect."""
        with self.manager._lock:
            if self in self.manager._registered:
                self.manager._registered.remove(self)
            self.manager.changed()


class PluginManager:
    """Every plugin of this process, and every fusion registered in code."""

    def __init__(self) -> None:
        self.generation = 0
        self.records: list[PluginRecord] = []
        self.tools: list[PluginRecord] = []
        self._registered: list[Registration] = []
        self._sources: dict[str | None, tuple[FusionSource, ...]] = {}
        self._tools: dict[str | None, Sequence[PluginRecord]] = {}
        self.fusers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that live
        # what other packages add to opfuse, and which ones to install for what is not there
        self.entry_points: EntryPoints = defaultdict(dict)
        self.packages: Mapping[str, str] = {}
        self._warned: set[str] = set()
        self._pluggy = pluggy.PluginManager("opfuse")
        self._pluggy.add_hookspecs(hookspecs)
        self._lock = threading.RLock()

    def discover(self, packages: Mapping[str, str] | None = None) -> None:
        """Add what is installed; imports nothing of it.

        Args:
            packages: The package that gives an attribute, a command or a recipe, for errors.
        """
        found, self.entry_points = records.installed_plugins()
        known = sorted([*self.records, *self.tools, *found], key=lambda record: record.key)
        self.records = [record for record in known if not record.is_tool]
        self.tools = [record for record in known if record.is_tool]
        self.packages = packages or {}

    def give(self, group: str, name: str) -> Any:
        """What another package adds to a part of opfuse, imported at its first use.

        Args:
            group: The group of its entry point, ``"opfuse.attributes"`` or ``"opfuse.ops"``.
            name: Its name.

        Raises:
            ImportError: The package that has it is not installed.
            AttributeError: No package is known to have it.
        """
        if entry := self.entry_points[group].get(name):
            return entry.load()
        where = "opfuse" if group == "opfuse.attributes" else group
        if why := self.why_missing(f"{where}.{name}"):
            raise ImportError(why)
        raise AttributeError(f"module {where!r} has no attribute {name!r}")

    def why_missing(self, name: str, package: str = "") -> str:
        """The sentence for what needs a package that is not installed; ``""``: none has it.

        Args:
            name: An attribute or a command, or what needs the package.
            package: The package; by default the one that is known to have ``name``.
        """
        package = package or self.packages.get(name, "")
        needs = f"{name} needs the package {package}, which is not installed"
        return f"{needs}: python -m pip install {package}" if package else ""

    def register(
        self,
        plugin: Any,
        *,
        name: str,
        distribution: str = "registered in code",
        version: str = "0",
        tool: bool = False,
    ) -> PluginRecord:
        """Add a plugin object that is not installed (a notebook's, a test's).

        Args:
            plugin: A module or an object with functions marked :data:`opfuse.hookimpl`.
            name: Its name in selections.
            distribution: What it belongs to, for messages.
            version: The version of that.
            tool: Whether it is a tool, see :mod:`opfuse.core.hookspecs`.

        Raises:
            TypeError: ``plugin`` is no module or object with hooks, or ``name`` no string.
        """
        records.check_plugin(plugin)
        if not isinstance(name, str):
            raise TypeError(
                f"opfuse.plugins.register expected a string as the plugin's name, got {name!r}"
            )
        with self._lock:
            group = hookspecs.TOOLS if tool else hookspecs.GROUP
            record = PluginRecord(name, distribution, version, group, load=lambda: plugin)
            listed = "tools" if tool else "records"
            setattr(self, listed, sorted([*getattr(self, listed), record], key=lambda r: r.key))
            self._capture_again(record)
            self.changed()
        return record

    def remove(self, record: PluginRecord) -> None:
        """Forget a plugin that :meth:`register` added."""
        with self._lock:
            self.records = [other for other in self.records if other is not record]
            self.tools = [other for other in self.tools if other is not record]
            if record.plugin is not None:
                self._pluggy.unregister(record.plugin)
                record.plugin = None
            self._capture_again(record)
            self.changed()

    def _capture_again(self, record: PluginRecord) -> None:
        """Let a tool that comes or goes be asked about the chains that exist."""
        for fuser in [*self.fusers] if record.is_tool else ():
            fuser.holder.key = ()

    @contextlib.contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """A block in which some attributes have other values, for tests."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        self.changed()
        try:
            yield
        finally:
            vars(self).update(before)
            self.changed()

    def changed(self) -> None:
        """Invalidate every plan."""
        self._sources, self._tools = {}, {}
        self.generation += 1  # last: a reader of the new number sees the new fusions

    # Loading

    def active(self, text: str | None) -> list[PluginRecord]:
        """The plugins of a selection, loaded, sorted or in the order of the user's list."""
        selection = PluginFilter.parse(text)
        with self._lock:
            for name in selection.only or selection.blocked:
                if not any(each.answers_to(name) for each in (*self.records, *self.tools)):
                    what = f"OPFUSE_PLUGINS names {name!r}, but no such plugin is installed, or yet"
                    self.warn_once(name, f"{what} registered in code")
            loaded = self._loaded(self.records, selection)
            self._warn_of_namesakes(loaded)
            return loaded

    def active_tools(self, text: str | None) -> Sequence[PluginRecord]:
        """The tools that a selection does not switch off, loaded and sorted; cached."""
        found = self._tools.get(text)
        if found is None:
            with self._lock:
                found = self._tools[text] = self._loaded(self.tools, PluginFilter.parse(text))
        return found

    def _loaded(
        self, records: Sequence[PluginRecord], selection: PluginFilter
    ) -> list[PluginRecord]:
        """Those of some plugins that a selection has and that can be loaded, in its order."""
        chosen = [record for record in records if selection.position(record) is not None]
        chosen.sort(key=selection.position)  # type: ignore[arg-type]  # stable: sorted order inside one position
        for record in chosen:
            if record.state == "found":
                self._add_hookspecs()
                self._load(record)
        return [record for record in chosen if record.state == "loaded"]

    def _warn_of_namesakes(self, loaded: list[PluginRecord]) -> None:
        first: dict[str, PluginRecord] = {}
        for record in loaded:
            other = first.setdefault(normalize(record.name), record)
            if normalize(other.distribution) != normalize(record.distribution):
                who = f"both {other.distribution} and {record.distribution}"
                text = f"{who} have a plugin named {record.name!r}, and both are in use; "
                text += f"OPFUSE_PLUGINS=-{record.distribution} turns one off"
                self.warn_once(who, text)

    def warn_once(self, subject: str, text: str) -> None:
        """Issue a :class:`PluginWarning`, unless there was one about this subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(PluginWarning(text), stacklevel=3)

    def _add_hookspecs(self) -> None:
        """Add the hooks that other packages declare, before the first plugin is registered."""
        waiting = self.entry_points["opfuse.hookspecs"]
        while waiting:
            _, entry = waiting.popitem()
            try:
                self._pluggy.add_hookspecs(entry.load())
            except Exception as error:
                if is_strict():
                    raise
                who = f"the hooks {entry.value} of {entry.dist.name} {entry.dist.version}"
                text = f"{who} are not known: {type(error).__name__}: {error}. Everything else "
                text += "works without them; OPFUSE_STRICT=1 raises this."
                warnings.warn(PluginWarning(text), stacklevel=3)

    def _load(self, record: PluginRecord) -> None:
        # a plugin that plans while it is imported does not load itself again
        record.state = "loading"
        stage = "import" if record.broken is None else "metadata"
        try:
            if record.broken is not None:
                raise record.broken
            assert record.load is not None
            plugin = record.load()
            stage = "registration"
            self._register_hooks(record, plugin)
            stage = "hook call"
            self._read_hooks(record)
            record.state = "loaded"
        except BaseException as error:
            if record.plugin is not None:
                self._pluggy.unregister(record.plugin)
                record.plugin, record.hooks, record.fusions = None, (), ()
                record.options = {}
            if not isinstance(error, (Exception, SystemExit)):  # interrupted: next time again
                record.state = "found"
                raise
            self._fail(record, stage, error)

    def _register_hooks(self, record: PluginRecord, plugin: Any) -> None:
        """Register a plugin with pluggy; refuse one registered before, and unknown hooks."""
        records.check_plugin(plugin)
        for other in (*self.records, *self.tools):
            if other.plugin is plugin:
                raise ValueError(
                    f"it is the plugin {other.name!r} ({other.distribution}), which is loaded "
                    f"already"
                )
        name = f"{record.distribution}:{record.name}"
        name += f"#{id(record)}" if self._pluggy.has_plugin(name) else ""
        self._pluggy.register(plugin, name=name)
        record.plugin = plugin
        callers = self._pluggy.get_hookcallers(plugin) or []
        for caller in callers:
            mine = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
            if not caller.has_spec() and not all(impl.optionalhook for impl in mine):
                hooks = vars(self._pluggy.hook).values()
                known = ", ".join(sorted(hook.name for hook in hooks if hook.has_spec()))
                raise TypeError(
                    f"unknown hook {caller.name}; {hookspecs.GROUP} has {known}; mark one of a "
                    f"package that may be missing with optionalhook=True"
                )
            for impl in mine:
                records.check_hookimpl(caller.name, impl)
        record.hooks = tuple(sorted(caller.name for caller in callers if caller.has_spec()))
        records.check_hooks(record)

    def _read_hooks(self, record: PluginRecord) -> None:
        """Call the hooks of a plugin that are called once."""
        record.fusions = tuple(
            (passes, fusion) for passes in PASSES for fusion in self._fusions(record, passes)
        )
        for recipes in self._call(record, "opfuse_recipes"):
            record.recipes.update(records.checked_recipes(recipes))
        for options in self._call(record, "opfuse_options"):
            record.options.update(records.checked_options(record, options))
        for name in record.options if record.is_tool else ():
            owners = [other.name for other in self.tools if name in other.options]
            package = self.packages.get(f"option {name}", record.distribution)
            if normalize(package) != normalize(record.distribution) or name in CORE_OPTIONS:
                owners = [package, *owners]
            if len(owners) > 1:
                raise ValueError(f"the option {name!r} is of {' and of '.join(owners)}")

    def _call(self, record: PluginRecord, hook: str, **kwargs: Any) -> Iterator[Any]:
        caller = getattr(self._pluggy.hook, hook, None)  # None: no plugin has it, nor a package
        for impl in caller.get_hookimpls() if caller is not None else ():
            if impl.plugin is record.plugin:
                yield impl.function(*[kwargs[name] for name in impl.argnames])

    def _fusions(self, record: PluginRecord, passes: str) -> Iterator[FusionLike]:
        hook = f"opfuse_{passes}_fusions"
        for result in self._call(record, hook):
            if not isinstance(result, (list, tuple)):
                raise TypeError(f"{hook} must return a list of Fusion, got {type(result).__name__}")
            for fusion in result:
                if not isinstance(fusion, Fusion) and not callable(fusion):
                    got = type(fusion).__name__
                    raise TypeError(f"{hook} must return a list of Fusion, one item is {got}")
                yield fusion

    def _fail(self, record: PluginRecord, stage: str, error: BaseException) -> None:
        record.state = "failed"
        record.error = f"{stage}: {type(error).__name__}: {error}"
        if is_strict():
            raise error
        who = f"opfuse plugin {record.name!r} ({record.distribution} {record.version})"
        how = f"OPFUSE_PLUGINS=-{record.name} silences this, OPFUSE_STRICT=1 raises it"
        text = f"{who} failed at {record.error}. Everything else works without it; {how}."
        warnings.warn(PluginWarning(text), stacklevel=3)

    # Contributions of plugins

    def sources(self, text: str | None) -> tuple[FusionSource, ...]:
        """The fusions of a selection and all those registered in code; cached."""
        found = self._sources.get(text)
        if found is None:
            with self._lock:
                selection = PluginFilter.parse(text)
                sources = [registration.source for registration in self._registered]
                for record in self.active(text):
                    index = selection.position(record) if selection.only is not None else None
                    who = record.distribution, record.version
                    for passes, fusion in record.fusions:
                        order = _precedence(index, fusion)
                        sources.append(FusionSource(passes, fusion, *who, order))
                found = self._sources[text] = tuple(sources)
        return found

    def recipes(self) -> dict[str, type[Recipe]]:
        """The recipes of the active plugins by name; of two with one name, the first plugin's."""
        return dict(ChainMap(*(record.recipes for record in self.active(current.selection))))

    def ask(
        self, record: PluginRecord, hook: str, wanted: type, *, each: bool = False, **given: Any
    ) -> Any:
        """Return a plugin's answer to a hook; None if it gives none.

        A plugin that raises, or returns another type, fails and is not asked again.

        Args:
            record: The plugin.
            hook: The hook.
            wanted: The class of the answer.
            each: Whether the answer is a list of such items.
            **given: The arguments of the hook.
        """
        kind = f"list of {wanted.__name__}" if each else wanted.__name__
        try:
            for answer in self._call(record, hook, **given):
                items = answer if each and isinstance(answer, (list, tuple)) else [answer]
                wrong = [item for item in items if not isinstance(item, wanted)]
                if answer is not None and (wrong or (each and items is not answer)):
                    got = wrong[0] if wrong else answer
                    raise TypeError(f"{hook} must return a {kind}, got {type(got).__name__}")
                if answer is not None:
                    return answer
        except (CallRefusedError, Warning):  # a warning that the user made an error
            raise
        except Exception as error:
            self._fail(record, "hook call", error)
            self.changed()
        return None

    def register_fusion(self, passes: str, fusion: FusionLike, prepend: bool) -> Registration:
        """Add a fusion in code; it is active whichever plugins are selected."""
        if not isinstance(fusion, Fusion) and not callable(fusion):
            raise TypeError(
                f"expected a Fusion or a function (ops, *, recipe) -> ops, got {fusion!r}"
            )
        with self._lock:
            order = Precedence(1, -self.generation) if prepend else _precedence(None, fusion)
            registration = Registration(self, FusionSource(passes, fusion, None, None, order))
            self._registered.append(registration)
            self.changed()
        return registration


def _precedence(index: int | None, fusion: FusionLike) -> Precedence:
    """That of a fusion whose plugin has this place in the user's list; None: it is not in it."""
    priority = -fusion.priority if isinstance(fusion, Fusion) else 0
    return Precedence(2, 0, priority) if index is None else Precedence(0, index, priority)
