"""Records of plugins and their fusions, and the user's selection among them."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import hookspecs
from .errors import PluginWarning
from .fusion import PASSES, FusionLike, fusion_name
from .quantization import Recipe
from .settings import Option

if sys.version_info >= (3, 12):
    import importlib.metadata as metadata
else:
    import importlib_metadata as metadata


def is_strict() -> bool:
    """Return whether a failing plugin raises instead of warning (``OPFUSE_STRICT``)."""
    return os.environ.get("OPFUSE_STRICT", "") not in ("", "0")


@functools.cache
def normalize(name: str) -> str:
    """Return a distribution name as packaging tools compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclasses.dataclass
class PluginRecord:
    """One plugin in any state.

    ``state`` is ``found`` until it is needed, then ``loaded`` or ``failed``; ``incompatible`` if it
    belongs to another contract version. Whether it is blocked depends on the selection in force.
    """

    name: str
    distribution: str
    version: str
    group: str = hookspecs.GROUP
    load: Callable[[], Any] | None = None
    broken: Exception | None = None
    state: str = "found"
    error: str | None = None
    plugin: Any = None
    hooks: tuple[str, ...] = ()
    fusions: tuple[tuple[str, FusionLike], ...] = ()
    recipes: dict[str, type[Recipe]] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    module: str = ""

    @property
    def is_tool(self) -> bool:
        """Whether it is a tool, which a list of plugins leaves alone."""
        return self.group.startswith("opfuse.tools.")

    @property
    def names(self) -> tuple[str, ...]:
        """Its entry points: several if a distribution names one module several times."""
        return self.name, *self.aliases

    def answers_to(self, name: str) -> bool:
        """Return whether a name means this plugin; case, ``-``, ``_`` and ``.`` do not matter."""
        return normalize(name) in map(normalize, (*self.names, self.distribution))

    @property
    def key(self) -> tuple[str, str]:
        """The sort key of plugins."""
        return self.name, normalize(self.distribution)


class Precedence(NamedTuple):
    """The order in which fusions choose: the smallest first.

    Attributes:
        kind: 0: the user listed its plugin; 1: registered with ``prepend=True``; 2: any other.
        order: The place in that list; or minus the generation of the registration, so that the
            latest chooses first.
        priority: Minus the priority of the fusion.
    """

    kind: int
    order: int = 0
    priority: int = 0


class FusionSource(NamedTuple):
    """A fusion with its plugin, its pass and its precedence."""

    passes: str
    fusion: FusionLike
    distribution: str | None
    version: str | None
    precedence: Precedence

    @property
    def order(self) -> tuple[Precedence, int]:
        """The sort key: joint fusions choose first among those of one precedence."""
        return self.precedence, PASSES.index(self.passes)

    @property
    def name(self) -> str:
        """The fusion's name in reports."""
        return fusion_name(self.fusion)

    def warn(self, what: str) -> str:
        """Warn that the fusion misbehaved while planning; return ``what``. The chain still runs."""
        warnings.warn(PluginWarning(f"{self.full_name} is not used: {what}"), stacklevel=2)
        return what

    @property
    def full_name(self) -> str:
        """The fusion and its plugin, for messages."""
        if not self.distribution:
            return f"fusion {self.name} (registered in code)"
        return f"fusion {self.name} (plugin {self.distribution} {self.version})"


class PluginFilter(NamedTuple):
    """A parsed ``OPFUSE_PLUGINS``: all but ``blocked``, or the list ``only`` in order."""

    only: tuple[str, ...] | None
    blocked: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> PluginFilter:
        """Parse a selection.

        None: all. Empty: none. ``a,b``: these, in this precedence. ``-a``: all but a.

        Raises:
            ValueError: The two forms are mixed.
        """
        if text is None:
            return cls(None)
        if not isinstance(text, str):
            raise TypeError(
                f"expected plugins as one string, such as 'a,b' or '-a', or None, got {text!r}"
            )
        names = [part.strip() for part in text.split(",") if part.strip()]
        blocked = tuple(name[1:].strip() for name in names if name.startswith("-"))
        if blocked and len(blocked) != len(names):
            raise ValueError(
                f"OPFUSE_PLUGINS={text!r} mixes names to use and names to block: give 'a,b' or "
                f"'-a,-b'"
            )
        return cls(None, blocked) if blocked else cls(tuple(names))

    def position(self, record: PluginRecord) -> int | None:
        """A selected plugin's index in the user's list, 0 without a list; None: blocked."""
        if self.only is None or record.is_tool:
            return None if any(record.answers_to(name) for name in self.blocked) else 0
        return next((i for i, name in enumerate(self.only) if record.answers_to(name)), None)


def check_plugin(plugin: Any) -> None:
    """Refuse objects that cannot be plugins."""
    if plugin is None or isinstance(plugin, (str, bytes, bool, int, float)):
        raise TypeError(
            f"expected a plugin, such as a module with functions marked opfuse.hookimpl, got "
            f"{plugin!r}"
        )


def check_hookimpl(hook: str, impl: Any) -> None:
    """Refuse features of pluggy that opfuse does not support."""
    unsupported = ("tryfirst", "trylast", "wrapper", "hookwrapper")
    if asked := [name for name in unsupported if getattr(impl, name)]:
        why = "opfuse calls plugins one by one, in the order of the selection"
        raise TypeError(f"{hook} is marked {' and '.join(asked)}, which has no effect: {why}")


def check_option(owner: str, name: str, value: Any, default: Any) -> None:
    """Refuse a value of another type than the default, or one that is not in the tuple.

    A default of None accepts any value.
    """
    who = f"option {name!r} of the plugin {owner}: expected"
    accepted = (int, float) if type(default) is float else (type(default),)
    if isinstance(default, tuple):
        if value not in default:
            raise ValueError(f"{who} {' or '.join(map(repr, default))}, got {value!r}")
    elif default is not None and type(value) not in accepted:
        raise TypeError(f"{who} {type(default).__name__} such as {default!r}, got {value!r}")


def check_hooks(record: PluginRecord) -> None:
    """Refuse a tool that offers fusions, which a selection could not choose among."""
    of_tools = "opfuse_wrap_", "opfuse_facts"
    wrong = [hook for hook in record.hooks if hook.startswith(of_tools) != record.is_tool]
    if wrong := [hook for hook in wrong if hook != "opfuse_options"]:
        group = hookspecs.GROUP if record.is_tool else hookspecs.TOOLS
        raise TypeError(f"{' and '.join(wrong)}: give it an entry point in group {group} for that")


def checked_options(record: PluginRecord, options: Any) -> dict[str, Any]:
    """Return the answer of ``opfuse_options`` after checking it."""
    entries = options.items() if isinstance(options, dict) else [("", None)]
    if record.is_tool:
        fits = all(str(name).isidentifier() and isinstance(o, Option) for name, o in entries)
    else:
        fits = all(str(name).partition(".")[0] in record.names for name, _ in entries)
    if not fits:
        wanted = "plain names to Option" if record.is_tool else f"'{record.name}.<option>'"
        raise TypeError(f"opfuse_options must return a dict of {wanted}, got {options!r}")
    return options  # type: ignore[no-any-return]


def checked_recipes(recipes: Any) -> dict[str, type[Recipe]]:
    """Return the answer of ``opfuse_recipes`` after checking it."""
    if not isinstance(recipes, dict):
        got = type(recipes).__name__
        raise TypeError(f"opfuse_recipes must return a dict of Recipe subclasses, got {got}")
    for name, recipe in recipes.items():
        if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
            raise TypeError(f"opfuse_recipes: {name!r} must be a Recipe subclass, got {recipe!r}")
    return recipes


# The installed plugins, found by their entry points; none is imported


EntryPoints = defaultdict[str, dict[str, Any]]
"""Entry points by group and name; of two with one name, the first that was found."""


def installed_plugins() -> tuple[list[PluginRecord], EntryPoints]:
    """The plugins of all distributions, and the entry points of the other groups ``opfuse.*``.

    Plugins have groups ``opfuse.v*``, and tools ``opfuse.tools.v*``. A distribution whose metadata
    cannot be read becomes a plugin that is ``broken``: a warning says so when plugins are needed,
    unless it is blocked.
    """
    found: list[PluginRecord] = []
    others: EntryPoints = defaultdict(dict)
    seen: set[str] = set()
    for dist in metadata.distributions():
        name, version = str(getattr(dist, "_path", "unknown")).rpartition(os.sep)[2], "unknown"
        try:
            if "opfuse." not in (dist.read_text("entry_points.txt") or ""):
                continue
            given = dist.metadata  # parsed at each access
            name, version = given["Name"] or name, given["Version"] or version
            if normalize(name) not in seen:  # otherwise an earlier entry of sys.path shadows it
                seen.add(normalize(name))
                found += _plugins_of(dist, name, version, others)
        except Exception as error:
            found.append(PluginRecord(name, name, version, broken=error))
    return found, others


def _plugins_of(dist: Any, name: str, version: str, others: EntryPoints) -> Iterator[PluginRecord]:
    """The plugins of one distribution: one for each module that its entry points name."""
    known: dict[tuple[str, str], PluginRecord] = {}
    for ep in sorted(ep for ep in dist.entry_points if ep.group.startswith("opfuse.")):
        if not re.fullmatch(r"opfuse\.(tools\.)?v\d+", ep.group):
            others[ep.group].setdefault(ep.name, ep)
            continue
        if (ep.group, ep.value) in known:
            known[ep.group, ep.value].aliases += (ep.name,)
            continue
        record = PluginRecord(ep.name, name, version, ep.group, ep.load, module=ep.module)
        known[ep.group, ep.value] = record
        spoken = hookspecs.TOOLS if record.is_tool else hookspecs.GROUP
        if ep.group != spoken:
            record.state = "incompatible"
            record.error = f"written for {ep.group}, this opfuse speaks {spoken}"
    yield from known.values()
