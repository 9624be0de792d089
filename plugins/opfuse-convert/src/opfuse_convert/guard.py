"""Checks at every call, also of a compiled graph, that a module is as when it was converted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

from opfuse.core.introspection import hook_dicts, hook_kinds, is_dtensor, op_class
from opfuse.core.settings import Settings, current
from opfuse.report.isolation import isolated

from .converter import Conversion
from .grammar import MISSING, Attributes, Place, key_place
from .grammar.table import is_same
from .layers import is_patched
from .parallel import is_placed

_PLAIN = {Tensor, nn.Parameter}


class Guard:
    """The state of a module that must not change for its chain to run.

    Args:
        module: The module.
        made: The conversion with the chain, which says what that depends on.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module, made: Conversion) -> None:
        self.module, self._splits, reads = module, made.splits, made.reads
        self._called = made.called
        children = [(name, module.get_submodule(name)) for name in reads if name]
        everyone = [("", module), *children]
        self._classes = [(name, of, type(of), op_class(of)) for name, of in everyone]
        self._methods = [(cls, cls.forward, cls.__call__) for *_, cls in self._classes]
        # the hooks of the style that split a module are there, and no others
        known = {name: _hooks(of) for name, of in children if name in made.splits}
        hooked = [each for each in children if each[0] not in made.called]
        self._hooked = [(name, of, vars(of), known.get(name)) for name, of in hooked]
        self._calls = bool(children)
        own = [*_of_children(module, reads), *_of_constants(module, made.constants)]
        self._once = {place.key: place for place in (*own, *made.places)}
        self._places = [(p.where.get, p.name, p.value, p) for p in self._once.values()]
        every: Any = made.chain.modules()
        pairs = [(op, name) for op in every for name in getattr(op, "params_apart", ())]
        self._apart = {op.param_source(name)[0] for op, name in pairs}
        self._params: list[tuple[str, Any, dict[str, Any], str, Any]] = []
        for name, of in everyone if "" in reads else children:
            shapes = {key: getattr(param, "shape", None) for key, param in of._parameters.items()}
            shapes |= made.shapes if not name else {}  # these differ from the present ones
            self._params += [(name, of, vars(of), key, shapes[key]) for key in of._parameters]

    def parameters(self) -> tuple[Any, ...]:
        """For each parameter its dtype and whether it needs a gradient; True for a missing one.

        The third says whether the dtype may be another than that of the rest.
        """
        found: list[Any] = []
        for _, of, attributes, key, _ in self._params:
            param = attributes["_parameters"].get(key)
            found.append(param is None or (param.dtype, param.requires_grad, of in self._apart))
        return tuple(found)

    def placements(self) -> tuple[Any, ...]:
        """Where the parameters are split among processes, to be compared."""
        found = [(i, of._parameters.get(key)) for i, (_, of, _, key, _) in enumerate(self._params)]
        return tuple([(i, param.placements) for i, param in found if is_dtensor(param)])

    def why_not(self) -> str:
        """Describe what has changed, as a sentence; ``""``: nothing."""
        if self._calls and (
            everywhere._global_forward_hooks
            or everywhere._global_forward_pre_hooks
            or everywhere._global_backward_hooks
            or everywhere._global_backward_pre_hooks
        ):
            return "there are hooks on every module"
        for name, of, cls, written in self._classes:
            if type(of) is not cls and op_class(of) is not written:
                return f"{name or 'it'} is a {op_class(of).__name__} now"
        for name, of, attributes, known in self._hooked:
            if known is not None:
                if _hooks(of) != known:
                    return f"{name} has {hook_kinds(of) or 'no'} hooks beside those of its style"
            elif (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ):
                return f"{name} has {hook_kinds(of)} hooks"
        for cls, forward, call in self._methods:
            if cls.forward is not forward or cls.__call__ is not call:
                return f"{cls.__name__} got another forward"
        for get, name, value, place in self._places:
            now = get(name, MISSING)
            if now is not value and not is_same(now, value):
                return place.change()
        return self._of_parameters()

    def depends_on(self, owner: Any, name: str) -> bool:
        """Whether something was looked up under this name in the attributes of an object."""
        wanted = id(getattr(owner, "__dict__", None)), name
        return any(key[1:] == wanted for key in self._once)

    def _of_parameters(self) -> str:
        """Describe a change of the parameters, as a sentence, or ``""``."""
        for name, of, attributes, key, there in self._params:
            param = attributes["_parameters"].get(key)
            if key in attributes:
                return f"{name or 'it'} has another {key} in front of its parameter"
            if param is None and there is not None and parametrize.is_parametrized(of, key):
                continue  # looking at it computes it
            shape, what = getattr(param, "shape", None), f"{name}.{key}".lstrip(".")
            if shape is None or there is None:
                if shape is not there:
                    return f"{what} {'is gone' if shape is None else 'was added'}"
            elif name in self._splits:
                if not is_placed(self._splits[name], key, param):
                    return f"{what} is not split as it was"
            elif type(param) not in _PLAIN and name not in self._called:
                return f"{what} is a {type(param).__name__}"
            elif shape != there:
                return f"{what} has shape {tuple(shape)} instead of {tuple(there)}"
        return ""


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module's call, to be compared."""
    return [tuple(hooks.values()) for hooks in hook_dicts(module)]


def _of_children(module: nn.Module, reads: Sequence[str]) -> Iterator[Place]:
    """The places that a call of a module's children depends on, apart from their classes."""
    for name in filter(None, reads):
        above, _, key = name.rpartition(".")
        holder: Any = module.get_submodule(above)._modules
        own = vars(holder[key])
        yield Place(holder, key, holder[key], name)
        yield Place(own, "forward", own.get("forward", MISSING), f"the forward of {name}")
        compiled = own.get("_compiled_call_impl", MISSING)
        yield Place(own, "_compiled_call_impl", compiled, f"the compiled call of {name}")
    for name in dict.fromkeys(["", *reads]):
        if isinstance(of := module.get_submodule(name), (nn.Sequential, nn.ModuleList)):
            yield key_place(of._modules, f"the order of what is in {name or 'it'}")


def _of_constants(module: nn.Module, constants: Sequence[tuple[str, str]]) -> Iterator[Place]:
    """The places of attributes of modules."""
    for name, path in constants:
        owner: Any = module.get_submodule(name)
        for part in path.split("."):
            value, what = getattr(owner, part, MISSING), f"{part} of {_named(owner)}"
            yield Place(Attributes(owner), part, value, what)
            owner = value


def _named(owner: Any) -> str:
    return op_class(owner).__name__ if isinstance(owner, nn.Module) else type(owner).__name__


@contextlib.contextmanager
def calm(module: nn.Module) -> Iterator[None]:
    """An isolated block that builds a chain as outside of any call, without a recipe or autocast.

    If a parametrization of a parameter is run, its state is put back.
    """
    values = current.values
    options = tuple([pair for pair in values.options if pair[0] not in ("invariant", "locked")])
    # not by attribute: a module may have a __getattr__ of its own
    computed = [each._modules.get("parametrizations") for each in module.modules()]
    with isolated(*filter(None, computed)), contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        kinds = {"cpu", *[param.device.type for param in module.parameters()]}
        for kind in filter(torch.amp.is_autocast_available, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        settings = Settings(options, values.selection)
        stack.enter_context(current.temporarily(values=settings, recorders=()))
        yield


def unreadable(module: nn.Module, reads: Sequence[str], splits: Collection[str] = ()) -> str:
    """Return why a chain cannot read the parameters of a module's children; ``""``: it can.

    Args:
        module: The module.
        reads: The names of the children.
        splits: The names of those that are known to be split among processes.
    """
    for name in reads:
        child = module.get_submodule(name)
        if (cls := op_class(child)).__module__.startswith("torch.nn.") and is_patched(cls):
            return f"{cls.__name__} got another forward"
        for key, param in child._parameters.items():
            if param is not None and type(param) not in _PLAIN and name not in splits:
                return f"{name or 'its'} {key} is a {type(param).__name__}"
            if param is not None and not param.is_floating_point():
                return f"{name or 'its'} {key} is of {param.dtype}"
        if any(hook_dicts(child)) and name and name not in splits:
            return f"{name} has {hook_kinds(child)} hooks"
    return ""


UNGUARDED = "this version of PyTorch cannot ask at each call whether a graph still holds"


class Watch:
    """Asks a module's guard while Dynamo traces, and at each call of the graph.

    Dynamo guards what a trace reads. A trace with a chain does not read what the chain depends on:
    the statements that it replaces, the code and defaults of functions, attributes of classes and
    variables of closures. So the answer of the eager guard becomes a guard of the graph. If that is
    impossible, the module's own forward is traced, which is always right.

    Args:
        guard: The guard of the module.
        change: ``change()`` describes what has changed, as a sentence; ``""``: nothing.
    """

    def __init__(self, guard: Guard, change: Callable[[], str]) -> None:
        self._guard, self._change = guard, change
        self._ask = functools.partial(_ask, change)  # one object: a graph asks once

    def refusal(self) -> str:
        """Return why the graph that Dynamo traces must not have the chain, or ``""``."""
        if why := self._change():
            return why
        try:
            from torch._dynamo.guards import install_guard
            from torch._dynamo.source import GlobalStateSource

            if self._is_set_in_trace():
                return "its forward sets what the chain depends on"
            install_guard(GlobalStateSource().make_guard(self._ask))
        except (ImportError, AttributeError, AssertionError):
            return UNGUARDED
        return ""

    def _is_set_in_trace(self) -> bool:
        """Whether the trace sets an attribute that the chain depends on."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracing: Any = InstructionTranslator.current_tx()
        return any(
            self._guard.depends_on(getattr(of, "value", None), name)
            for of, names in tracing.output.side_effects.store_attr_mutations.items()
            for name in names
        )


def _ask(change: Callable[[], str], builder: Any, guard: Any) -> None:
    """Let the graph hold as long as nothing has changed."""
    given: Any = lambda unused: not change(), ["opfuse: the modules are as they were"]
    builder.guard_manager.root.add_lambda_guard(*given, None)
