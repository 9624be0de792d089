"""The chain in place of one module's forward, and how it is made."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from opfuse.core.environment import Environment
from opfuse.core.introspection import op_class
from opfuse.core.plugins import manager
from opfuse.core.replaced_forward import ReplacedForward
from opfuse.core.settings import current
from opfuse.core.tuning_table import Measurement

from .building import follow
from .choosing import (
    Kind,
    MeasuredChoice,
    fits,
    is_faster_in_graph,
    is_known_in_graphs,
    pays_in_graph,
    subject,
    title_of,
)
from .converter import Conversion, Converter
from .grammar import table
from .guard import Guard, calm, unreadable
from .in_graphs import Watch
from .layers import original_class
from .site import Site, watched_elsewhere
from .verifying import compare

_BUILDING = threading.RLock()


class ConvertedForward(ReplacedForward):
    """The chain in place of one module's forward, and whether it may run.

    Attributes:
        choice: Which of the two it is where both can run.
    """

    _title = ""

    def __init__(self, converter: Converter, plugin: Any, conversion: Conversion | None) -> None:
        self._converter, self._plugin, self._conversion = converter, plugin, conversion
        self._guard: Guard | None = None
        self.choice = MeasuredChoice(converter.name, plugin)
        self.plugin = plugin

    @property
    def chain(self) -> nn.Sequential | None:
        """The chain; None in a copy until its first call."""
        return None if self._conversion is None else self._conversion.chain

    @property
    def is_out_of_date(self) -> bool:
        """Whether the module has changed since, so that its own forward runs."""
        return self._guard is not None and bool(self._guard.why_not())

    def again(self) -> ConvertedForward:
        """The same for a copy of the module, made when it is called first."""
        return ConvertedForward(self._converter, self._plugin, None)

    def seal(self, module: nn.Module) -> None:
        """From now on, what the module is like must not change."""
        assert self._conversion is not None
        of = self._conversion
        self._guard = Guard(module, of.reads, of.constants, of.places)
        self._watch = Watch(self._guard, functools.partial(self._changed, self._guard, of.call))
        self._title = title_of(self._converter.name, module)

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's forward through the chain, or NotImplemented."""
        if self.off or (is_dynamo_compiling() and _refused_in_graph(self, module)):
            return NotImplemented
        if self._guard is None and not self._made(module):
            return NotImplemented
        assert self._guard is not None and self._conversion is not None
        if self._guard.module is not module:  # a replica of it, with other parameters
            return NotImplemented
        forward = self._conversion.call
        if isinstance(forward, Site):
            if not is_dynamo_compiling() and (why := forward.change()):
                self._say(why)
                return NotImplemented
            if facts := forward.facts(args, kwargs):
                forward = self._for_these(module, forward, facts)
            self._say("its forward did not come to what the chain stands for")
            return forward.forward(module, *args, **kwargs)
        if not is_dynamo_compiling() and (why := self._guard.why_not()):
            self._say(why)
            return NotImplemented
        self._say("")
        run = functools.partial(self._run, module)
        result = forward(module, run, *args, **kwargs)
        if result is NotImplemented:
            why = getattr(forward, "why", "")
            self._say(why or "it was called in a way that the chain does not take")
        return result

    def at_site(self, site: Site, module: nn.Module, values: Sequence[Any]) -> Any:
        """What some statements of a rewritten forward compute, through the chain, or None."""
        made: Any = self._conversion
        if self.off or made is None or made.call is not site or self._guard is None:
            return None
        if self._guard.module is not module:
            return None
        entering, given = site.split(values)
        why = site.refusal(values) or self._changed_or_refused(module, *given)
        if why:
            self._say(why)
            return None
        follow(site.dropouts)
        self._say("")
        return site.results(entering, made.chain(*given))

    def _changed_or_refused(self, module: nn.Module, *given: Any) -> str:
        """Return why the chain must not run for these values, or ``""``; what is known first."""
        why = self._refusal(module, *given)
        if why and current.recorder is None:
            return why
        if is_dynamo_compiling():  # this may be another graph than that of the call's begin
            changed = _refused_in_graph(self, module)
        else:
            changed = self._guard.why_not() or watched_elsewhere()  # type: ignore[union-attr]
        if not changed:
            self._record(module, given)
        return changed or why

    def _changed(self, guard: Guard, call: Any) -> str:
        """What has changed since a guard was made, as a sentence, or ``""``."""
        if self._guard is not guard:
            return "it has another chain"
        return (call.change() if isinstance(call, Site) else "") or guard.why_not()

    def refusal_in_graph(self, module: nn.Module) -> str:
        """Why a graph of ``torch.compile`` cannot have the chain, or ``""``; not to be traced."""
        if self._guard is not None or self._made(module):
            self.fallback = self._watch.refusal()
        return self.fallback

    def _say(self, why: str) -> None:
        """Note why the module's own forward runs; traces are to have no side effects."""
        if not is_dynamo_compiling():
            self.fallback = why

    def _for_these(self, module: nn.Module, site: Site, facts: dict[str, Any]) -> Site:
        """The site of a chain for arguments like those of a call, from now on, if there is one."""
        with _BUILDING, calm(module):
            made = site.again(facts)
            made = made if isinstance(made, str) else checked(module, made, made.probed)
        if isinstance(made, str):
            return site
        self._conversion, self.choice = made, MeasuredChoice(self._converter.name, self._plugin)
        self.seal(module)
        new: Any = made.call
        new.settled = True
        return new  # type: ignore[no-any-return]

    def _refusal(self, module: nn.Module, x: Any, *extras: Any) -> str:
        """Return why the module's own operations are to run in the chain's place, or ``""``."""
        made: Any = self._conversion
        if is_dynamo_compiling():
            why = self.why_not_in_graph(module, x, *extras)
        else:
            params = self._guard.parameters()  # type: ignore[union-attr]
            why = self.choice.refusal(module, params, made.chain, x, *extras)
        return why

    def _record(self, module: nn.Module, given: Any) -> None:
        if (recorder := current.recorder) is not None:
            recorder.replaced(self, module, given)

    def _run(self, module: nn.Module, x: Any, *extras: Any) -> Any:
        """The chain, or the module's own operations in its place."""
        made: Any = self._conversion
        if made.separate is not None:
            why = self._refusal(module, x, *extras)
            self._record(module, (x, *extras))
            self._say(why)
            if why:
                return made.separate(module, x, *extras)
        return made.chain(x, *extras)

    def in_graphs(self) -> bool:
        """Whether graphs of ``torch.compile`` may have the chain: it is asked for, or measured."""
        if _chains_in_graphs(current.values):
            return True
        # under a recipe nothing was measured, and what is exported runs elsewhere
        plain = current.values.recipe is None and not torch.compiler.is_exporting()
        plain = plain and not torch._C._are_functorch_transforms_active()
        return plain and is_known_in_graphs(self._title, manager.generation)

    def why_not_in_graph(self, module: nn.Module, x: Any, *extras: Any) -> str:
        """Return why graphs of ``torch.compile`` do not have the chain for an input, or ``""``."""
        made: Any = self._conversion
        why = fits(self._guard.parameters(), made.chain, x, *extras)  # type: ignore[union-attr]
        if why or _chains_in_graphs(current.values):
            return why
        given = self.choice, module, made.chain, manager.generation, *Kind.of(x, True)
        return "" if is_faster_in_graph(*given) else "no chain was measured to be faster"

    def own_operations(self, module: nn.Module, *given: Any) -> Any:
        """The conversion's ``separate``."""
        made: Any = self._conversion
        return made.separate(module, *given)

    def subject(self, module: nn.Module, x: Any, compiled: bool) -> dict[str, Any]:
        """The subject of an entry, from :func:`opfuse_convert.choosing.subject`."""
        return subject(*self.choice.of, module, self.chain, Kind.of(x, compiled))

    def gives_way(self, found: Measurement, compiled: bool) -> bool:
        """Whether the module's own operations run, by what was measured."""
        if compiled:
            return not pays_in_graph(found)
        return bool(found.refusal(trades_time=True, prefer="speed"))

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Those of the module that the chain can read."""
        assert self._conversion is not None
        parts = [module.get_submodule(name) for name in self._conversion.reads if name]
        own = module.parameters(recurse=False) if "" in self._conversion.reads else ()
        return [*dict.fromkeys([*own, *[p for part in parts for p in part.parameters()]])]

    def _made(self, module: nn.Module) -> bool:
        """Make the chain of a copy; whether that is possible."""
        with _BUILDING:
            if self._conversion is None:
                made = built(self._converter, module)
                if isinstance(made, str):
                    self.fallback = made
                    return False
                self._conversion = made
            if self._guard is None:
                self.seal(module)
        return True


def _refused_in_graph(state: ConvertedForward, module: nn.Module) -> str:
    return state.refusal_in_graph(module)


_refused_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked(module: nn.Module, made: Conversion, verify: bool) -> Conversion | str:
    """A conversion, or a sentence that says why its chain cannot stand for a module.

    Args:
        module: The module.
        made: The conversion.
        verify: Whether to compare values and gradients.
    """
    if why := unreadable(module, made.reads):
        return why
    try:
        why = _compared(module, made) if verify else ""
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        why = f"comparing raised {type(error).__name__}: {text}"
    return f"the chain differs from the module: {why}" if why else made


def alike(module: nn.Module, made: Conversion) -> Any:
    """What two conversions have in common of which one need be compared."""
    everyone = [module, *[module.get_submodule(name) for name in made.reads if name]]
    values = [sorted(_numbers_of(each).items()) for each in everyone]
    shapes = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    ops = tuple(op_class(op) for op in made.chain)
    return op_class(module), ops, tuple(made.reads), repr(values), shapes


def _numbers_of(module: nn.Module) -> dict[str, str]:
    """The plain attributes of a module, private ones too, as text."""
    return {k: repr(v) for k, v in vars(module).items() if table.is_plain(v)}


def _compared(module: nn.Module, made: Conversion) -> str:
    """How a chain differs from the module; see :func:`compare`."""
    if made.separate is None:
        forward = original_class(type(module)).forward
        own = functools.partial(forward, module)
        return compare(module, made.chain, own, functools.partial(made.call, module, made.chain))
    own = functools.partial(made.separate, module)
    ops: Any = made.chain
    kinds = [
        op.extra_input_dtypes[k] if op.extra_input_dtypes else ""
        for op in ops
        for k, channel in enumerate(op.extra_input_channels)
        if channel is None
    ]
    return compare(module, made.chain, own, made.chain, kinds)


def built(converter: Converter, module: nn.Module) -> Conversion | str:
    """Build the conversion of a module by a converter."""
    if why := _unfit(type(module)):
        return why
    param = next(module.parameters(), None)
    device, dtype = (
        (torch.device("cpu"), torch.get_default_dtype())
        if param is None
        else (param.device, param.dtype)
    )
    env = Environment(device, None, dtype, training=module.training, options=dict(current.options))
    try:
        with calm(module):
            made = converter.build(module, env)
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        return f"{converter.name} raised {type(error).__name__}: {text}"
    return made


def _unfit(cls: type) -> str:
    """Return why no subclass of a class may be made, or ``""``."""
    if issubclass(cls, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        return "its parameters are made at the first call"
    for base in cls.__mro__:
        known = base.__module__.partition(".")[0] in ("torch", "transformers", "builtins", "typing")
        if "__init_subclass__" in vars(base) and not known:
            return f"{base.__name__}.__init_subclass__ would see the class that a conversion makes"
    return ""


def _chains_in_graphs(values: Any) -> bool:
    """Whether the user wants chains in graphs of ``torch.compile``."""
    return ("chains_under_compile", True) in values.options
