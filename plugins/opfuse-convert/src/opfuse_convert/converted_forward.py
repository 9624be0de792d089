"""The chain in place of one module's forward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from opfuse import BasicOperation
from opfuse.core.introspection import hook_dicts, op_class
from opfuse.core.overwriting import without_modes
from opfuse.core.plugins import manager
from opfuse.core.settings import current
from opfuse.ops import LayerNorm
from opfuse.report.replaced_forward import KEPT_AS, MEMORY, ReplacedForward, replaced_forwards
from opfuse.tuning.table import Measurement

from . import choosing
from .building import follow
from .converter import Conversion, Converter
from .guard import Guard, Watch, calm
from .layers import is_there
from .making import built, checked
from .parallel import localized
from .site import Site, watched_elsewhere

_BUILDING = threading.RLock()


class ConvertedForward(ReplacedForward):
    """The chain in place of one module's forward, with the checks whether it may run.

    Attributes:
        choice: The choice between the two by measurements.
    """

    _title = ""
    _placed: Any = ()  # where the parameters are split among processes
    _own: Any = None  # the forward that the module itself has
    _quantizes = False  # whether its chain does under a recipe
    _unquantized = ""  # why no recipe quantizes the products of an op of its chain
    _lends: Any = None  # the site and thread whose next call gives its output to a chain alone
    _alone: Any = None  # the same for this call
    _is_stale = False  # they were split otherwise since the chain was made

    def __init__(self, converter: Converter, plugin: Any, conversion: Conversion | None) -> None:
        self._converter, self.plugin, self._conversion = converter, plugin, conversion
        self._guard: Guard | None = None
        self._further: list[ConvertedForward] = []  # each with one of the other chains
        self._told_of_recipe = False
        self.choice = choosing.MeasuredChoice(converter.name, plugin)

    @property
    def chain(self) -> nn.Sequential | None:
        """The chain; None in a copy until its first call."""
        return None if self._conversion is None else self._conversion.chain

    @property
    def chains(self) -> Sequence[Any]:
        """That chain, and those of other statements."""
        return self.chain, *[each.chain for each in self._further]

    @property
    def reason(self) -> str:
        """See :attr:`opfuse.report.replaced_forward.ReplacedForward.reason`."""
        return next(filter(None, [self.fallback, *[each.fallback for each in self._further]]), "")

    @property
    def is_out_of_date(self) -> bool:
        """Whether the module has changed since, so that its own forward runs."""
        if self._guard is None:
            return False
        module, function = self._guard.module, self.function
        hidden = vars(module).get("forward") != self._own if function is None else False
        if hidden or not (function is None or is_there(module, function)):
            return True
        with localized(self._guard.module, self.is_inside):
            return bool(self._guard.why_not())

    @property
    def is_inside(self) -> bool:
        """Whether a style has put another forward around the module's own, see ``Conversion``."""
        return self._conversion is not None and bool(self._conversion.shapes)

    @property
    def function(self) -> Any:
        """The function that it is for, if that is not the class's forward; see ``Conversion``."""
        return None if self._conversion is None else self._conversion.function

    def again(self, memo: dict[int, Any]) -> ConvertedForward:
        """The same for a copy of the module, whose chain is made at its first call."""
        made = ConvertedForward(self._converter, self.plugin, None)
        made._quantizes, made._unquantized = self._quantizes, self._unquantized
        return self.copied(made, memo)

    @without_modes()
    def seal(self, module: nn.Module) -> None:
        """Guard the present state of the module."""
        assert self._conversion is not None
        self._guard = Guard(module, self._conversion)
        changed = functools.partial(self._changed, self._guard, self._conversion.call)
        self._watch = Watch(self._guard, changed)
        self._title = choosing.title_of(self._converter.name, module)
        self._placed = self._guard.placements()
        self._own = vars(module).get("forward")
        every: Any = self.chain.modules()  # type: ignore[union-attr]
        ops = [op for op in every if isinstance(op, BasicOperation)]
        self._quantizes = any(op.num_quantizers("forward") for op in ops)
        self._unquantized = next((op.unquantized for op in ops if op.unquantized), "")
        of_call = getattr(self._conversion.call, "further", ())
        self._further = [ConvertedForward(self._converter, self.plugin, each) for each in of_call]
        for each in self._further:
            each.seal(module)

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's forward through the chain, or NotImplemented."""
        if self.off or (is_dynamo_compiling() and _refused_in_graph(self, module)):
            return NotImplemented
        if self._guard is None and not self._made(module):
            return NotImplemented
        assert self._guard is not None and self._conversion is not None
        if self._guard.module is not module:  # a replica of it, with other parameters
            return NotImplemented
        if self._is_stale and not is_dynamo_compiling():
            self._make_again(module)
        for each in (self, *self._further):
            each._alone, each._lends = each._lends, None
        forward = self._conversion.call
        if isinstance(forward, Site):
            if not is_dynamo_compiling() and (why := forward.change()):
                self._say(why)
                return NotImplemented
            if facts := forward.facts(args, kwargs):
                forward = self._for_these(module, forward, facts)
            self._say("its forward did not reach the statements that the chain replaces")
            for each in self._further:
                each._say("")
            return forward.forward(module, *args, **kwargs)
        if not is_dynamo_compiling() and (why := self._guard.why_not()):
            self._refuse(why)
            return NotImplemented
        if not is_dynamo_compiling():
            self.fallback = ""
        run = functools.partial(self._run, module)
        result = forward(module, run, *args, **kwargs)
        why = getattr(forward, "why", "")
        if result is NotImplemented:
            why = why or "it was called in a way that the chain does not take"
        if why:
            self._say(why)
        return result

    def at_site(self, site: Site, module: nn.Module, values: Sequence[Any]) -> Any:
        """Compute the results of some statements of a rewritten forward by the chain, or None."""
        made: Any = self._conversion
        if self.off or made is None or self._guard is None or self._guard.module is not module:
            return None
        if made.call is not site:
            other = self._with(site)
            return None if other is None else other.at_site(site, module, values)
        given = site.taken(values)
        why = site.refusal(values) or self._changed_or_refused(module, *given)
        if why:
            self._refuse(why)
            return None
        follow(site.dropouts)
        if not is_dynamo_compiling():
            self.fallback = ""
        run = self._through_chain
        if not is_dynamo_compiling() and self._alone == (site, threading.get_ident()):
            run = self._through_inner if isinstance(made.chain[-1], LayerNorm) else run
        return site.results(values, run(module, given))

    # Whether a chain of the module around this one alone takes the output of a chain

    def vouches(self, site: Site, module: nn.Module) -> bool:
        """Whether nothing but the chain of a site gets what that is about to take."""
        of = self._with(site)
        guard = None if of is None or self.off else of._guard
        if guard is None or guard.module is not module:
            return False
        return not (site.change() or guard.why_not() or watched_elsewhere())

    def lent(self, module: nn.Module, item: int, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and note that nobody writes to an item of its result."""
        own = "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
        own |= MEMORY in vars(module) or module._compiled_call_impl is not None
        if self._guard is None:  # in the first call of a copy, which is to give what the next gives
            self._made(module)
        chains = () if own or any(hook_dicts(module)) else (self, *self._further)
        for each in chains:
            site = each._conversion and each._conversion.call
            is_one = getattr(site, "returned", None) == item
            each._lends = (site, threading.get_ident()) if is_one else None
        try:
            return module(*args, **kwargs)
        finally:
            for each in chains:
                each._lends = None

    def _through_inner(self, module: nn.Module, given: Any) -> Any:
        """The chain, whose output a chain alone takes: a norm at its end may keep that."""
        of_norm = vars(self._conversion.chain[-1])  # type: ignore[union-attr]
        of_norm["is_inner"] = threading.get_ident()
        try:
            return self._through_chain(module, given)
        finally:
            of_norm["is_inner"] = False

    def _with(self, site: Site) -> ConvertedForward | None:
        """This one, or the one for a further chain, whichever has a site."""
        every = [each for each in (self, *self._further) if each._conversion is not None]
        return next((each for each in every if each._conversion.call is site), None)  # type: ignore[union-attr]

    def _changed_or_refused(self, module: nn.Module, *given: Any) -> str:
        """Return why the chain must not run for these values, or ``""``."""
        why = self._refusal(module, *given)
        if why and not current.recorders:
            return why
        if is_dynamo_compiling():  # the call may have begun in another graph
            changed = _refused_in_graph(self, module)
        else:
            changed = self._guard.why_not() or watched_elsewhere()  # type: ignore[union-attr]
        if not changed:
            self._record(module, given)
        return changed or why

    def _changed(self, guard: Guard, call: Any) -> str:
        """Describe a change since a guard was made, as a sentence, or ``""``."""
        if self._guard is not guard:
            return "it has another chain"
        return (call.change() if isinstance(call, Site) else "") or guard.why_not()

    def refusal_in_graph(self, module: nn.Module) -> str:
        """Return why a graph of ``torch.compile`` cannot have the chain, or ``""``; untraced."""
        if self._guard is not None or self._made(module):
            self.fallback = self._watch.refusal()
        return self.fallback

    def _say(self, why: str) -> None:
        """Note why the module's own forward runs; in a trace, which has no side effects, do not."""
        if not is_dynamo_compiling():
            self.fallback = why

    def _refuse(self, why: str) -> None:
        """Note why the module's own forward runs, and whether there may be another chain for it."""
        self._say(why)
        if not is_dynamo_compiling():
            placed = self._guard.placements()  # type: ignore[union-attr]
            self._is_stale, self._placed = placed != self._placed, placed

    def check_recipe(self, module: nn.Module, chosen: bool) -> None:
        """Warn once if the recipe in force quantizes nothing in the module, nor in a part of it.

        If an op of its chain has products that no recipe quantizes, warn once of all such ops.

        Args:
            module: The module, which was called.
            chosen: Whether its chain was to run; otherwise a trace or a transform sees its forward.
        """
        recipe = type(current.values.recipe).__name__
        if is_dynamo_compiling():
            if self._quantizes and not chosen:
                _warn_of_graph(recipe)
            return
        if self._unquantized:
            why = self._unquantized.removeprefix("not quantized: ")
            text = f"{recipe} does not quantize every linear layer of a converted model: {why}"
            manager.warn_once(text, text)
        why = self.fallback if chosen else "a trace or a transform sees it"
        if why and not self._told_of_recipe:
            self._told_of_recipe = True
            every = [each for _, _, each in replaced_forwards(module)]
            if [each for each in every if getattr(each, "_quantizes", False)] == [self]:
                who = f"a converted {op_class(module).__name__} runs its own forward"
                text = f"{who}, in which {recipe} quantizes nothing: {why}"
                manager.warn_once(text, text)

    def _make_again(self, module: nn.Module) -> None:
        """Make the chain for parameters that have been split among processes since, if possible."""
        self._is_stale = False
        with _BUILDING, calm(module):
            made = built(self._converter, module)
            made = made if isinstance(made, str) else checked(module, made, made.probed)
        if not isinstance(made, str):
            self._take(module, made)

    def _take(self, module: nn.Module, made: Conversion) -> None:
        """Change to another conversion, whose chain gets the state of the quantizers."""
        before = self._ops()
        self._conversion = made
        self.choice = choosing.MeasuredChoice(self._converter.name, self.plugin)
        for _, op in self._ops() if before else ():
            op._prepared = before[0][1]._prepared
        self.settle(module)
        self.seal(module)

    def _for_these(self, module: nn.Module, site: Site, facts: dict[str, Any]) -> Site:
        """Change to a chain for arguments like those of a call, if possible; return its site."""
        with _BUILDING, calm(module):
            made = site.again(facts)
            made = made if isinstance(made, str) else checked(module, made, made.probed)
        if isinstance(made, str):
            return site
        self._take(module, made)
        new: Any = made.call
        new.settled = True
        return new  # type: ignore[no-any-return]

    def _refusal(self, module: nn.Module, x: Any, *extras: Any) -> str:
        """Return why the module's own operations are to run in the chain's place, or ``""``."""
        if is_dynamo_compiling():
            return self.why_not_in_graph(module, x, *extras)
        params = self._guard.parameters()  # type: ignore[union-attr]
        chain: Any = self._conversion.chain  # type: ignore[union-attr]
        return self.choice.refusal(module, params, chain, x, *extras)

    def _record(self, module: nn.Module, given: Any) -> None:
        for recorder in current.recorders:
            recorder.replaced(self, module, given)

    def _run(self, module: nn.Module, x: Any, *extras: Any) -> Any:
        """The chain, or the module's own operations in its place."""
        made: Any = self._conversion
        if made.separate is not None:
            why = self._refusal(module, x, *extras)
            if current.recorders:
                self._record(module, (x, *extras))
            self._say(why)
            if why:
                return made.separate(module, x, *extras)
        return self._through_chain(module, (x, *extras))

    def _through_chain(self, module: nn.Module, given: Any) -> Any:
        """Run the chain, as a memory plan says."""
        made: Any = self._conversion
        is_first = vars(module).get(KEPT_AS) is self  # a plan for memory is for that one
        memory = vars(module).get(MEMORY) if is_first else None
        if memory is None:
            return made.chain(*given)

        def run(*given: Any) -> Any:  # in a backward again, after forwards in other modes
            follow(getattr(made.call, "dropouts", ()))
            return made.chain(*given)

        return memory.call_chain(module, made.chain, run, given)

    def in_graphs(self) -> bool:
        """Whether graphs of ``torch.compile`` may have the chain: it is asked for, or measured."""
        if choosing.wants_chains_in_graphs(current.values):
            return True
        # under a recipe nothing was measured, and what is exported runs elsewhere
        plain = current.values.recipe is None and not torch.compiler.is_exporting()
        plain = plain and not torch._C._are_functorch_transforms_active()
        return plain and choosing.is_known_in_graphs(self._title, manager.generation)

    def why_not_in_graph(self, module: nn.Module, x: Any, *extras: Any) -> str:
        """Return why graphs of ``torch.compile`` do not have the chain for an input, or ``""``."""
        why = choosing.fits(self._guard.parameters(), self.chain, x, *extras)  # type: ignore[union-attr]
        if why or choosing.wants_chains_in_graphs(current.values):
            return why
        given = self.choice, module, self.chain, manager.generation, *choosing.Kind.of(x, True)
        return "" if choosing.is_faster_in_graph(*given) else "no chain was measured to be faster"

    def own_operations(self, module: nn.Module, *given: Any) -> Any:
        """The conversion's ``separate``."""
        made: Any = self._conversion
        return made.separate(module, *given)

    def subject(self, module: nn.Module, x: Any, compiled: bool) -> dict[str, Any]:
        """See :meth:`opfuse_convert.choosing.MeasuredChoice.subject`."""
        return self.choice.subject(module, self.chain, choosing.Kind.of(x, compiled))

    def declines(self, found: Measurement, compiled: bool) -> bool:
        """Whether the module's own operations run, by what was measured."""
        if compiled:
            return not choosing.pays_in_graph(found)
        return bool(found.refusal(trades_time=True, prefer="speed"))

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Those of the module that the chain can read."""
        assert self._conversion is not None
        parts = [module.get_submodule(name) for name in self._conversion.reads if name]
        own = module.parameters(recurse=False) if "" in self._conversion.reads else ()
        return [*dict.fromkeys([*own, *[p for part in parts for p in part.parameters()]])]

    def _made(self, module: nn.Module) -> bool:
        """Make the chain of a copy, and return whether that is possible."""
        with _BUILDING:
            if self._conversion is None:
                with calm(module):
                    made = built(self._converter, module)
                if isinstance(made, str):
                    self.fallback = made
                    return False
                self._take(module, made)
            elif self._guard is None:
                self.seal(module)
        return True


def _refused_in_graph(state: ConvertedForward, module: nn.Module) -> str:
    return state.refusal_in_graph(module)


def _warn_of_graph(recipe: str) -> None:
    """Warn once; by the recipe alone, so that modules of one class are compiled once."""
    text = (
        f"torch.compile traces the own forwards of converted modules, in which {recipe} quantizes "
        f"nothing: opfuse.options(chains_under_compile=True) puts their chains into graphs"
    )
    manager.warn_once(text, text)


_refused_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
_warn_of_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
