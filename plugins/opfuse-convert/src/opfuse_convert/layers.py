"""The class of a converted module, or of one with a memory plan: a layer on its own class.

It can be removed again.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from opfuse.core.introspection import CONVERTED
from opfuse.core.settings import current
from opfuse.report.replaced_forward import KEPT_AS, MEMORY

_OWN, _BELOW = "_opfuse_forward", "_opfuse_below"
"""The names under which a layer keeps its forward, whatever a base put around it, and its class."""


def is_patched(cls: Any) -> bool:
    """Whether the forward of a class of torch is a function that torch did not write."""
    home = getattr(cls.forward, "__globals__", {}).get("__name__") or ""
    return not str(home).startswith("torch.")


def layer_in(cls: type) -> type | None:
    """The layer that a conversion put on a class, wherever it stands among its bases, or None."""
    return next((base for base in cls.__mro__ if CONVERTED in vars(base)), None)


def original_class(cls: type) -> Any:
    """The class below that layer, or the class itself."""
    layer = layer_in(cls)
    return cls if layer is None else vars(layer)[CONVERTED]


def set_class(module: nn.Module, cls: type) -> None:
    """Change the class of a module, whatever that does when an attribute is set."""
    object.__setattr__(module, "__class__", cls)


def written_forward(cls: type) -> Any:
    """The forward of a class as its author wrote it.

    A base may put a function around the forward of every subclass, as the layers of transformers
    do for checkpointing. The layer of a conversion is such a subclass, so it has that function
    around its own forward, and the same function below it is skipped.
    """
    cls = original_class(cls)
    forward, above = cls.forward, vars(layered(cls))["forward"]  # type: ignore[attr-defined]
    code = getattr(above, "__code__", None)
    if code is getattr(vars(layered(cls))[_OWN], "__code__", None):
        return forward
    while getattr(forward, "__code__", None) is code and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _before_that_of(owner: Any) -> Any:
    """A forward that looks for :data:`KEPT_AS` and :data:`MEMORY` before that of ``owner.of`` runs.

    If somebody else's was put in its place, which may call it, it is ``owner.replaced`` alone.
    """

    def converted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: Any = vars(self).get(KEPT_AS)
        is_chosen = state is not None and (
            state.in_graphs() if is_dynamo_compiling() else not is_traced()
        )
        result = state.call(self, args, kwargs) if is_chosen else NotImplemented
        if state is not None and current.values.recipe is not None:
            state.check_recipe(self, is_chosen)
        return owner.of.forward(self, *args, **kwargs) if result is NotImplemented else result

    @functools.wraps(owner.of.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if owner.replaced is not None:
            return owner.replaced(self, *args, **kwargs)
        memory: Any = vars(self).get(MEMORY)
        if memory is None:
            return converted(self, *args, **kwargs)
        return memory.call(self, converted, args, kwargs)

    return forward


# The forward that a module itself has, in place of that of its class


def functions_of(module: nn.Module) -> list[Any]:
    """The function that a module itself has as ``forward``, and those that it wraps in turn."""
    found: list[Any] = []
    function = vars(module).get("forward")
    while function is not None:
        found.append(getattr(function, "__func__", function))
        function = getattr(found[-1], "__wrapped__", None)
    return found


def reaches(module: nn.Module, function: Any) -> bool:
    """Whether a conversion can run before one of these functions.

    It can if that is the method, or a variable of one that wraps it, as of accelerate's.
    """
    return _called(module, function) is not None


def put_before(module: nn.Module, function: Any) -> None:
    """Let one of the functions of a module's own forward look for a conversion first."""
    if (called := _called(module, function)) is not None and not _is_put(called[0]):
        of = types.SimpleNamespace(forward=function)
        called[1](_before_that_of(types.SimpleNamespace(of=of, replaced=None)))


def take_away(module: nn.Module, function: Any) -> None:
    """Undo :func:`put_before`, whatever was put around it since."""
    if (called := _called(module, function)) is not None:
        called[1](function)


def is_there(module: nn.Module, function: Any) -> bool:
    """Whether :func:`put_before` is in force."""
    return (called := _called(module, function)) is not None and _is_put(called[0])


def _called(module: nn.Module, function: Any) -> tuple[Any, Callable[[Any], None]] | None:
    """What is called for a function: that or what was put before it, and how to change that."""
    method: Any = vars(module).get("forward")
    if getattr(method, "__self__", None) is module and _is_of(method.__func__, function):
        own = vars(module)
        return method.__func__, lambda new: own.update(forward=types.MethodType(new, module))
    for around in functions_of(module):
        for cell in getattr(around, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty one
                if _is_of(held := cell.cell_contents, function):
                    return held, functools.partial(setattr, cell, "cell_contents")
    return None


def _is_of(held: Any, function: Any) -> bool:
    return held is function or (_is_put(held) and held.__wrapped__ is function)


def _is_put(held: Any) -> bool:
    """Whether a function is one of :func:`put_before`; what wraps it does not have its code."""
    code = getattr(held, "__code__", None)
    return code is not None and any(code is each for each in _before_that_of.__code__.co_consts)


def layered(cls: Any) -> Any:
    """A subclass of the same name whose forward looks for :data:`KEPT_AS` and :data:`MEMORY`.

    What is set on it is set on the class itself, as if it was not there. A forward that was set so
    is that of both, and gets a layer of its own.
    """
    return _layered(cls, cls.forward)


@functools.lru_cache(maxsize=1024)
def _layered(cls: Any, forward: Any) -> Any:
    below = types.SimpleNamespace(of=cls, replaced=None)
    forward = _before_that_of(below)
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"__reduce_ex__": _reduce_ex, "__deepcopy__": _deepcopy, _OWN: forward}
    body |= {"_save_to_state_dict": _save, "_load_from_state_dict": _load, "_apply": _apply}
    of: Any = type(cls)
    made: Any = _metaclass(of)(cls.__name__, (cls,), body | {"forward": forward})
    below.own = vars(made)["forward"]
    type.__setattr__(made, _BELOW, below)
    type.__setattr__(made, CONVERTED, cls)
    return made


@functools.lru_cache(maxsize=64)
def _metaclass(of: Any) -> Any:
    """A class of layers: what is set on one, or deleted, is that of the class below."""

    class Layer(of):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: Any) -> None:
            below = vars(cls).get(_BELOW)
            if below is None:  # it is being made, or was derived from one
                super().__setattr__(name, value)
            elif name == "forward":
                _set_forward(cls, below, value)
            else:
                setattr(below.of, name, value)

        def __delattr__(cls, name: str) -> None:
            below = vars(cls).get(_BELOW)
            super().__delattr__(name) if below is None else delattr(below.of, name)

    return Layer


def _set_forward(layer: type, below: Any, forward: Any) -> None:
    """Give a class another forward, which may call the present one, or that of its layer again."""
    replaced = below.replaced or below.of.forward
    if forward is below.own:
        below.of.forward, below.replaced = replaced, None
        type.__setattr__(layer, "forward", forward)
        return
    below.of.forward, below.replaced = forward, replaced
    if "forward" in vars(layer):
        type.__delattr__(layer, "forward")


def _save(self: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Add the state of the chain to the module's own."""
    below: Any = super(layer_in(type(self)), self)
    below._save_to_state_dict(destination, prefix, keep_vars)
    if (state := vars(self).get(KEPT_AS)) is not None:
        state.save(destination, prefix, keep_vars)


def _load(self: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
    """Give the chain its state, and the module its own."""
    if (state := vars(self).get(KEPT_AS)) is not None:
        state.load(state_dict, prefix)
    below: Any = super(layer_in(type(self)), self)
    below._load_from_state_dict(state_dict, prefix, *args)


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Move the state of the chain with the module."""
    below: Any = super(layer_in(type(self)), self)
    below._apply(fn, recurse)
    if (state := vars(self).get(KEPT_AS)) is not None:
        state.apply(fn)
    return self


def is_traced() -> bool:
    """Whether a trace or transform other than ``torch.compile``'s is under way.

    It must see the module's own forward. ``torch.compile`` may trace this function alone, where it
    gave up on the caller.
    """
    return not is_dynamo_compiling() and (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        or torch._C._are_functorch_transforms_active()
    )


@contextlib.contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """A block in which a module is without its :data:`KEPT_AS` and :data:`MEMORY`."""
    own = vars(module)
    states = {name: own.pop(name) for name in (KEPT_AS, MEMORY) if name in own}
    try:
        yield
    finally:
        own.update(states)


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """Reduce to the class below, so that a pickle loads without opfuse."""
    warn_lost([self], "a pickle, or a copy by copy.copy,")
    return _reduced(self, protocol)


def warn_lost(modules: Iterable[nn.Module], who: str) -> None:
    """Warn that the state of the chains of modules is lost, if there is any."""
    states = [vars(module)[KEPT_AS] for module in modules if KEPT_AS in vars(module)]
    if any(state.has_state for state in states):
        ops = [op for state in states for op in state.chain or () if op._quantizers.has_state]
        names = ", ".join(dict.fromkeys(op.name or type(op).__name__ for op in ops))
        warnings.warn(
            f"{who} leaves out the state of the recipe, such as scales, of the converted "
            f"{names or 'modules'}: only the state_dict() of the converted model has it",
            stacklevel=3,
        )


def _reduced(self: nn.Module, protocol: Any) -> Any:
    layer: Any = layer_in(type(self))
    with _plain(self):
        made, args, *rest = super(layer, self).__reduce_ex__(max(protocol, 2))
        if rest and isinstance(rest[0], dict):  # the module gets its state back
            rest[0] = dict(rest[0])
    below = without_layer(type(self))
    plain = made is copyreg.__newobj__ and args == (type(self),)  # type: ignore[attr-defined]
    if plain:  # pickle insists on the class itself
        return (copyreg._reconstructor, (below, object, None), *rest)  # type: ignore[attr-defined]
    return (made, tuple(below if arg is type(self) else arg for arg in args), *rest)


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A converted copy, whose chain reads the copy's children."""
    caller = sys._getframe(1)
    asked = caller.f_locals.get("x") if caller.f_code is copy.deepcopy.__code__ else self
    if asked is not self:  # a wrapper that gives its module's attributes for its own, as PEFT's do
        return copy._reconstruct(asked, memo, *asked.__reduce_ex__(4))  # type: ignore
    layer: Any = layer_in(type(self))
    states = {name: vars(self)[name] for name in (KEPT_AS, MEMORY) if name in vars(self)}
    inherited: Any = getattr(super(layer, self), "__deepcopy__", None)
    if inherited is not None:
        with _plain(self):
            twin = inherited(memo)
    else:
        twin = copy._reconstruct(self, memo, *_reduced(self, 4))  # type: ignore[attr-defined]
    if layer_in(type(twin)) is None:
        set_class(twin, type(self))
    vars(twin).update({name: state.again(memo) for name, state in states.items()})
    return twin  # type: ignore[no-any-return]


def without_layer(cls: type) -> type:
    """A class without the layer of a conversion.

    Classes that others, such as torch, derived from the layer are derived again.

    Raises:
        RuntimeError: One of them has methods that name their class, which only its author can move.
    """
    layer = layer_in(cls)
    if layer is None:
        return cls
    if cls is layer:
        return original_class(cls)  # type: ignore[no-any-return]
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    for name, value in body.items():
        if "__class__" in getattr(getattr(value, "__code__", None), "co_freevars", ()):
            raise RuntimeError(
                f"{cls.__name__} was put around the class of a converted module, and its {name} "
                f"uses super(): undo that first, then revert"
            )
    bases = tuple(without_layer(base) if layer in base.__mro__ else base for base in cls.__bases__)
    return type(original_class(cls))(cls.__name__, bases, body)  # type: ignore[no-any-return]
