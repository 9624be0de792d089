"""Tools in use: what they wrap, their options, and what is refused without them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from .hookspecs import Run
from .plugins import manager
from .records import PluginFilter, PluginRecord, check_option
from .settings import CORE_OPTIONS, Option, Options, current


def wrap(tools: Iterable[PluginRecord], hook: str, run: Run, **given: Any) -> Run:
    """What tools make of a function; the first of them is the innermost.

    Args:
        tools: The tools.
        hook: One of their hooks.
        run: The function.
        **given: The other arguments of the hook.

    Raises:
        CallRefusedError: A tool refuses what would run.
    """
    for record in [r for r in tools if hook in r.hooks and r.state == "loaded"]:
        run = manager.ask(record, hook, Callable, run=run, **given) or run  # type: ignore[arg-type]
    return run


def wrap_call(
    run: Callable[..., Any], *, chain: Any = None, module: nn.Module | None = None
) -> Callable[..., Any]:
    """What tools make of the calls of a chain, or of a module between chains."""
    wrapped = Wrapped("opfuse_wrap_call", run, chain=chain, module=module)
    active = manager.active_tools(current.selection)
    waiting = [r for r in manager.tools if r not in active and r.state in ("found", "loaded")]
    return wrapped if waiting or wrapped.choose() is not run else run  # they may be switched on


class Wrapped:
    """Calls what the tools make of a function that the selection in force does not switch off.

    Args:
        hook: One of their hooks.
        run: The function.
        **given: The other arguments of the hook.
    """

    def __init__(self, hook: str, run: Callable[..., Any], **given: Any) -> None:
        self._hook, self._run, self._given = hook, run, given
        self._latest = run  # which a graph has
        self._made: dict[str | None, tuple[Any, Callable[..., Any]]] = {}  # by selection

    def choose(self) -> Callable[..., Any]:
        """What the tools in use make of it; they are asked again after one comes or goes."""
        tools = manager.active_tools(selection := current.selection)
        made = self._made.get(selection)
        if made is None or made[0] is not tools:
            made = tools, wrap(tools, self._hook, self._run, **self._given)
            self._made[selection] = made
        self._latest = made[1]
        return made[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; a graph is made anew where the selection is another."""
        run = self._latest if is_dynamo_compiling() else self.choose()
        return run(*args, **kwargs)


def require(tool: str, who: str, text: str | None) -> None:
    """Refuse what needs a tool that is not in use.

    Args:
        tool: Its name, or that of its package.
        who: What needs it, for messages.
        text: The selection of plugins.

    Raises:
        ImportError: Its package is not installed.
        RuntimeError: It is switched off, or failed.
    """
    answering = [record for record in manager.tools if record.answers_to(tool)]
    for record in [record for record in answering if record not in manager.active_tools(text)]:
        why = record.error or f"the selection of plugins {text!r} switches it off"
        raise RuntimeError(f"{who} needs the tool {record.name}: {why}")
    if not answering:
        raise ImportError(manager.why_missing(who, manager.packages.get(f"tool {tool}", tool)))


def tool_option(name: str, text: str | None) -> Option:
    """An option with a plain name, which a tool declares.

    Raises:
        ValueError: No tool has it.
        ImportError: The package of its tool is not installed.
        RuntimeError: Its tool is switched off, or failed.
    """
    active = manager.active_tools(text)
    for record in active:
        if (option := record.options.get(name)) is not None:
            return option  # type: ignore[no-any-return]
    if tool := manager.packages.get(what := f"option {name}"):
        require(tool, what, text)
    known = sorted([*CORE_OPTIONS, *(name for record in active for name in record.options)])
    off = [f"{r.name} ({r.error or 'switched off'})" for r in manager.tools if r not in active]
    more = f"; these tools are not in use: {', '.join(off)}" if off else ""
    raise ValueError(
        f"unknown option {name!r}: known are {known}, a plugin's option is named "
        f"'<plugin>.<option>'{more}"
    )


def check_options(given: Options, text: str | None) -> None:
    """Refuse unknown options and wrong types; warn of options that belong to no plugin.

    Raises:
        ValueError: The plugin has no option of this name, or the option takes other values.
        TypeError: The type differs from that of the default.
    """
    selection = PluginFilter.parse(text)
    loaded = [record for record in manager.records if record.state == "loaded"]
    active = [record for record in loaded if selection.position(record) is not None]
    for name, value in given:
        if "." not in name:
            if name not in CORE_OPTIONS:
                tool_option(name, text)
            continue
        owner = name.partition(".")[0]
        owners = [record for record in active if owner in record.names]
        known = dict(ChainMap(*[record.options for record in reversed(owners)]))
        if owners and name not in known:
            raise ValueError(
                f"unknown option {name!r}: the plugin {owner} has {', '.join(known) or 'none'}"
            )
        check_option(owner, name, value, known.get(name))
        if not any(owner in record.names for record in manager.records):
            manager.warn_once(name, f"option {name!r}: no plugin {owner} is installed")
