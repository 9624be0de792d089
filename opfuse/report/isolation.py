"""Runs code of a model so that nobody notices it: neither the caller's modes nor the model.

Whatever runs or reads a model beside the user's own calls does so in one of these blocks.
"""

from __future__ import annotations

import array
import collections
import contextlib
import inspect
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core.fusible import FusibleOperation
from ..core.introspection import CONVERTED, is_dtensor
from ..core.overwriting import without_modes
from ..core.quantization import Quantizer
from ..core.quantization.state import QuantizerStates
from ..core.settings import is_captured
from .replaced_forward import KEPT_AS, MEMORY, ReplacedForward

_CONTAINERS = (
    *(dict, collections.OrderedDict, collections.defaultdict, collections.Counter),
    *(list, set, collections.deque),
)
_STRANGERS = {"torch", "triton", *sys.stdlib_module_names}
"""Packages whose objects are not restored: their attributes are not a model's."""
_MODULE, _OBJECT, _OP, _CLASS, _GRADIENT = "module", "object", "op", "class", "gradient"
"""The owner of an attribute: of an object or a class, other objects do not count."""

_HOOKS = {*vars(nn.Module())} - {"_buffers", "_modules", "_parameters"}
"""Attributes of each module that a forward does not change."""


@contextlib.contextmanager
def isolated(*owners: Any, who: str = "") -> Iterator[None]:
    """Run code of models in a ``with`` block, and put everything back at its end.

    Modes, hooks on saved tensors and a cache of parametrizations that the caller has in force do
    not see the block. Put back are: parameters, buffers, gradients, the attributes of modules and
    of their classes, and the tensors, arrays and random number generators in them, with the state
    of quantizers. Lists, tuples, dicts, sets and deques among the attributes are followed to any
    depth, modules in them too, objects of other classes to their own attributes. The generators of
    PyTorch, Python and NumPy are as they were, and those in variables that methods use.

    All tensors are copied, so memory for a second model is needed. A copy is written back only
    where values differ. What is not restored: globals and variables of outer functions other than
    generators, what is inside objects in objects, objects of PyTorch's or Python's own classes such
    as iterators, sparse tensors, and attributes that opfuse's ops set.

    Args:
        *owners: Modules, methods of objects, functions, or objects that can be called.
        who: The function that the user called, for which modules of FSDP2 are sharded; ``""``:
            they stay as they are.

    Raises:
        RuntimeError: The user called it in code that ``torch.compile`` or ``torch.export`` traces.
    """
    if who and torch.compiler.is_compiling():
        raise RuntimeError(
            f"{who} cannot be traced by torch.compile or torch.export: call it outside"
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with without_modes(), torch.random.fork_rng(devices):
        held = [v for _, v in reachable(owners) if who and isinstance(v, sharded_classes())]
        for module in held:
            module.reshard()
        values = [value for _, value in reachable(owners)]  # sharded ones have other parameters
        restores = [module.reshard for module in held]
        restores += [value.restoring() for value in values if isinstance(value, ReplacedForward)]
        restores += [partial(_refill, v, of) for v in values if (of := _content_of(v)) is not None]
        restores += filter(None, map(_restoring, values))  # those of the members that were there
        try:
            yield
        finally:
            with torch.no_grad():
                for restore in restores:
                    restore()


# What a run of a model may change


Thing = tuple[str, Any]
"""The dotted name of a tensor, a container, a generator or a class, and it."""


def reachable(owners: Iterable[Any], *, deep: bool = False) -> list[Thing]:
    """What the code of objects may change, each once.

    Args:
        owners: The objects.
        deep: Whether it is to be compared, not restored. All global variables that code uses and
            objects in objects are among it then, else generators of random numbers; gradients and
            the state of quantizers are not.
    """
    generators = {"Python's random numbers": random.getstate.__self__}  # type: ignore[attr-defined]
    if numpy := sys.modules.get("numpy.random"):
        generators["NumPy's random numbers"] = numpy.get_state.__self__
    found = {id(each): (name, each) for name, each in generators.items()}
    todo = [("", each, _MODULE) for owner in owners for each in _roots(owner)]
    while todo:
        name, value, of = todo.pop()
        is_plain = isinstance(value, (str, bytes, int, float, *[type] * (of is not _CLASS)))
        is_state = of is _GRADIENT or isinstance(value, QuantizerStates)
        if id(value) not in found and not is_plain and not (deep and is_state):
            found[id(value)] = name, value  # so it is alive, or ids come again
            todo += _inside(name, value, of, deep)
    return list(found.values())


def _roots(owner: Any) -> list[Any]:
    """The modules that a function uses, or the object itself."""
    if isinstance(owner, partial):
        return [root for each in (owner.func, *owner.args) for root in _roots(each)]
    if not isinstance(owner, types.FunctionType):
        return [owner if isinstance(owner, nn.Module) else getattr(owner, "__self__", owner)]
    with contextlib.suppress(ValueError):  # a variable that has no value yet
        used = inspect.getclosurevars(owner)
        held = (*used.nonlocals.values(), *used.globals.values())
        return [each for each in held if isinstance(each, nn.Module)]
    return []


def _inside(prefix: str, value: Any, of: str, deep: bool) -> list[tuple[str, Any, str]]:
    """What an object holds, with its names and the kind of its owner."""

    def members(held: Any, kind: str) -> list[tuple[str, Any, str]]:
        pairs = held.items() if hasattr(held, "items") else enumerate(held)
        pairs = [(key, each) for key, each in pairs if key != MEMORY]
        return [(f"{prefix}.{key}".lstrip("."), each, kind) for key, each in pairs]

    if (called := _function_of(value)) is not None:
        parts = [(prefix, each, _OBJECT) for each in called if each is not value]
        used = [] if parts else [pair for pair in _used(value).items() if deep or _access(pair[1])]
        return parts or [(f"{name} of {prefix}", each, _OBJECT) for name, each in used]
    if isinstance(value, Tensor):
        return [(f"{prefix}.grad", value.grad, _GRADIENT)] if value.is_leaf else []
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return members(value, of)
    if of is _CLASS:
        return members(_attributes(value), _OBJECT)
    if isinstance(value, (QuantizerStates, Quantizer, ReplacedForward)):
        of_chain = value.states() if isinstance(value, ReplacedForward) else [vars(value)]
        return members(of_chain, _OP)
    if isinstance(value, nn.Module):
        held = value._modules, value._buffers, value._parameters
        if isinstance(value, FusibleOperation) or hasattr(type(value), "_module_groups"):
            own = Tensor, torch.Generator, QuantizerStates  # other attributes are the engine's
            values = [each for of_kind in held for each in members(of_kind, _MODULE)]
            return values + [each for each in members(vars(value), _OP) if isinstance(each[1], own)]
        classes = [cls for cls in type(value).__mro__ if not _is_strange(cls)]
        found = [(f"class {cls.__name__}", cls, _CLASS) for cls in classes]
        return [*found, *[(prefix, each, _MODULE) for each in (vars(value), *held)]]
    is_followed = of is _MODULE or deep
    found = members(_content_of(value) or {}, _OBJECT) if is_followed else []
    return [*found, (prefix, vars(value), _OBJECT)] if is_followed and _is_plain(value) else found


def _function_of(value: Any) -> list[Any] | None:
    """The functions that an attribute calls, or the function itself; None: none of an author's."""
    if isinstance(value, types.FunctionType):
        return None if _is_of_strangers(value.__module__ or "") else [value]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    is_one = isinstance(value, (classmethod, staticmethod, types.MethodType, cached_property))
    if not is_one and type(value).__name__ != "_lru_cache_wrapper":
        return None
    return [getattr(value, name, None) for name in ("__func__", "__wrapped__", "func")]


def _used(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function uses and others hold: those of its cells, and global ones."""
    of: dict[str, Any] = function.__globals__
    found = {name: of[name] for name in _names(function.__code__) if name in of}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # one that has no value yet
            found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}


@cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The names in a function's code, and in the functions in it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _attributes(cls: type) -> dict[str, Any]:
    """The attributes of a class that are not Python's."""
    return {name: value for name, value in vars(cls).items() if not name.startswith(("__", "_abc"))}


def _is_strange(cls: type) -> bool:
    return _is_of_strangers(cls.__module__) or CONVERTED in vars(cls)


def _is_of_strangers(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _STRANGERS or package.startswith("opfuse")


def _is_plain(value: Any) -> bool:
    """Return whether an object is of a class that the model's author wrote."""
    known = isinstance(value, types.SimpleNamespace) or not _is_strange(type(value))
    return known and isinstance(getattr(value, "__dict__", None), dict)


def sharded_classes() -> Any:
    """The classes of modules of FSDP2, which have other parameters until they are sharded again."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


# Comparing


class Traces:
    """Finds what calls of a module leave behind, which a second call would do again.

    Each call is compared by the versions of tensors and by attributes. The first one, and the first
    after an attribute has changed, is also compared by values, since not all that writes into a
    tensor counts a version. The state of quantizers does not count: the engine knows second calls.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._marked: list[Thing] = []
        self._containers: list[tuple[str, Any, dict[Any, Any]]] = []

    def begin(self) -> Callable[[], str]:
        """Begin a call; the result says at its end what it has changed, by name, or ``""``."""
        copies: list[tuple[str, Tensor, Tensor]] = []
        if not self._containers or _changed(self._containers):
            things = reachable([self._module], deep=True)
            self._marked = [t for t in things if _mark_of(t[1])]
            held = [t for t in things if t[0].rpartition(".")[2] not in _HOOKS]
            self._containers = [(*t, of) for t in held if (of := _compared(t[1])) is not None]
            for name, value in things:
                if isinstance(value, Tensor) and not is_captured(value.device):
                    copies += [(name, part, part.clone()) for part in _parts(value)]
        containers = self._containers
        marks = [(name, value, _mark_of(value)) for name, value in self._marked]
        advances = [name for name, value, _ in marks if isinstance(value, Iterator)]

        def change() -> str:
            names = [name for name, value, mark in marks if _mark_of(value) != mark]
            names += filter(None, [_changed(containers)])
            names += [name for name, part, copy in copies if not is_equal(part, copy)]
            return "".join([*names, *advances][:1])

        return change


def _changed(containers: Iterable[tuple[str, Any, dict[Any, Any]]]) -> str:
    """The name of the first member of containers that is another one, or ``""``."""
    for name, value, old in containers:
        new: Any = _compared(value)
        if new.keys() == old.keys() and all(map(operator.is_, new.values(), map(old.get, new))):
            continue
        for key in [key for key in {**old, **new} if key not in (KEPT_AS, MEMORY)]:
            one, other = old.get(key, containers), new.get(key, containers)
            plain = isinstance(one, (bool, int, float, str, bytes)) and type(one) is type(other)
            gathered = is_dtensor(one) != is_dtensor(other)  # by FSDP2, or sharded again
            if not (one is other or (plain and one == other) or gathered):
                if isinstance(value, types.FunctionType):
                    return f"{key} of {name}"
                return f"{name}.{key}".lstrip(".") if isinstance(value, (dict, type)) else name
    return ""


def _compared(value: Any) -> dict[Any, Any] | None:
    """What is compared of an object: the members of a container, of any class, or attributes."""
    if (content := _content_of(value)) is not None:
        return content
    if isinstance(value, types.FunctionType):
        return _used(value)
    if isinstance(value, (bytearray, array.array)):
        return {"": bytes(value)}
    if isinstance(value, (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return dict(value.items() if hasattr(value, "items") else enumerate(value))
    return None


def _mark_of(value: Any) -> Any:
    """What tells that a tensor, an array or a generator was changed."""
    if isinstance(value, Tensor):
        if value.is_inference() or is_lazy(value):
            return None
        return value._version, value.data_ptr() if type(value) in (Tensor, nn.Parameter) else 0
    if isinstance(value, Iterator):
        return True  # nothing tells whether it has advanced
    if (access := _access(value)) is None:
        return None
    state = access[0]()
    if isinstance(state, tuple):  # of numbers, or arrays of them
        return [part.tobytes() if hasattr(part, "tobytes") else part for part in state]
    return state.tolist() if hasattr(state, "tolist") else repr(state)


# Putting back


def _content_of(value: Any) -> dict[Any, Any] | None:
    """The members of a container, the attributes of a class, or those of an object in slots."""
    if isinstance(value, type):
        return _attributes(value)
    if isinstance(value, QuantizerStates):
        return dict.fromkeys(value._by_recipe)
    if type(value) not in _CONTAINERS:
        classes = [cls for cls in type(value).__mro__ if not _is_strange(cls)]
        pairs = [pair for cls in classes for pair in _attributes(cls).items()]
        slots = [name for name, slot in pairs if isinstance(slot, types.MemberDescriptorType)]
        return {n: getattr(value, n) for n in slots if hasattr(value, n)} if slots else None
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def _refill(value: Any, content: dict[Any, Any]) -> None:
    """Give a container the very members that it had, in order, if it has others."""
    now: Any = _content_of(value)
    if [*now] == [*content] and all(now[key] is content[key] for key in now):
        return
    if isinstance(value, QuantizerStates):
        FusibleOperation.changes += 1  # plans have quantizers that are put away
    elif type(value) not in _CONTAINERS:
        for name in now.keys() - content.keys():
            delattr(value, name)
        for name in [name for name in content if now.get(name, now) is not content[name]]:
            setattr(value, name, content[name])
    else:
        value.clear()
        members = content if isinstance(value, dict) else content.values()
        value.update(members) if isinstance(value, (dict, set)) else value.extend(members)


def _restoring(value: Any) -> Callable[[], object] | None:
    """The function that restores a tensor, an array or a generator; None for anything else."""
    if is_lazy(value) or isinstance(value, LazyModuleMixin):
        return partial(_unmake, value, type(value))
    if isinstance(value, Tensor):
        return _tensor(value)
    access = _access(value)
    return access and partial(access[1], access[0]())


def _unmake(value: Any, cls: type) -> None:
    """Let the next call make a lazy module or a tensor of one, again if one has made it."""
    if isinstance(value, Tensor) and not is_lazy(value):
        value.grad, value.data = None, value.new_empty(0)
    value.__class__ = cls


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How the state of an array or a generator is read and written; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return (value.copy, partial(numpy.copyto, value)) if value.flags.writeable else None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if isinstance(bits, numpy.random.BitGenerator):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def _tensor(tensor: Tensor) -> Callable[[], object]:
    """The function that restores a tensor's values, memory, gradient and ``requires_grad``.

    One of a class of its own, such as a DTensor, is restored in its parts: no rank waits for
    another. One without values, on the meta device, has none to restore.
    """
    parts = [*_parts(tensor)]
    copies = [part.clone() for part in parts]
    memory = tensor.data if type(tensor) in (Tensor, nn.Parameter) else None
    leaf, needs = tensor.is_leaf, tensor.requires_grad
    grad = tensor.grad if leaf else None

    def restore() -> None:
        if memory is not None and not _shares(tensor, memory):
            tensor.data = memory
            torch.autograd.graph.increment_version(tensor)
        for part, copy in zip(parts, copies, strict=True):
            if not is_equal(part, copy):
                with torch.inference_mode(part.is_inference()):
                    part.copy_(copy)
                if memory is None:  # the whole tensor has a version too
                    torch.autograd.graph.increment_version(tensor)
        if leaf and tensor.grad is not grad:
            tensor.grad = grad
        if leaf and tensor.requires_grad != needs:
            tensor.requires_grad_(needs)

    return restore


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same; NaN is NaN, and codes of a byte are compared as bytes."""
    if one.is_floating_point() and one.dtype.itemsize == 1:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    may_be_nan = one.is_floating_point() and one.shape == other.shape
    return torch.equal(one, other) or (
        may_be_nan and torch.allclose(one, other, 0.0, 0.0, equal_nan=True)
    )


def _shares(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether a tensor is still a view of that memory, of the same form."""

    def form(of: Tensor) -> tuple[Any, ...]:
        where = (of.data_ptr(), of.stride()) if memory.layout is torch.strided else ()
        return of.shape, of.dtype, of.device, where

    return form(tensor) == form(memory)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The dense tensors that a tensor is made of, each element once."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in inner:  # among them may be the mesh of a DTensor
            yield from _parts(part) if isinstance(part, Tensor) else ()
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        once = [slice(0, 1) if not step else slice(None) for step in tensor.stride()]
        part = tensor.detach()[tuple(once)]
        if part.untyped_storage().nbytes():  # it may have been freed, as a sharded one's is
            yield part
