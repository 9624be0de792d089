"""Restores a model after a measurement to its state before the forward."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core.fusible import FusibleOperation
from ..core.sequential import Sequential

_CONTAINERS = (
    *(dict, collections.OrderedDict, collections.defaultdict, collections.Counter),
    *(list, set, collections.deque),
)
_STRANGERS = {"torch", "triton", *sys.stdlib_module_names}
"""Packages whose objects are not restored: their attributes are not a model's."""
_MODULE, _OBJECT, _OP = "module", "object", "op"
"""The owner of an attribute: of an object, other objects do not count, of an op no containers."""


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restore a model at the end of a ``with`` block.

    That is: parameters, buffers, gradients, the attributes of modules, and the tensors, arrays and
    random number generators in them. Lists, tuples, dicts, sets and deques among the attributes
    are followed to any depth, modules in them too, objects of other classes to their own
    attributes. The generators of Python and NumPy are as they were.

    All tensors are copied, so memory for a second model is needed. A copy is written back only
    where values differ. What is not restored: attributes of classes, globals, what is inside
    objects in objects, objects of PyTorch's or Python's own classes, sparse tensors, and
    attributes that opfuse's ops set.

    Args:
        model: A module, a method of an object, or an object that can be called.
    """
    kept = _Kept(getattr(model, "__self__", model))
    numpy: Any = sys.modules.get("numpy.random")
    with contextlib.ExitStack() as stack:
        stack.callback(kept.restore)
        stack.callback(random.setstate, random.getstate())
        if numpy:
            stack.callback(numpy.set_state, numpy.get_state())
        yield


class _Kept:
    """The objects reachable from an object, and how each is restored."""

    def __init__(self, owner: Any) -> None:
        self._seen: dict[int, Any] = {}  # alive, or ids come again
        self._parts: list[Callable[[], object]] = []
        self._values: list[Callable[[], object]] = []
        self._keep(owner)

    def restore(self) -> None:
        """Attributes and members first, then the values of those that were there."""
        with torch.no_grad():
            for restore in (*self._parts, *self._values):
                restore()

    def _keep(self, owner: Any) -> None:
        """Keep an object and all that it holds."""
        todo = [(owner, _MODULE)]
        while todo:
            value, of = todo.pop()
            if id(value) in self._seen or isinstance(value, (str, bytes, int, float, type)):
                continue
            if restore := _restoring(value):
                self._values.append(restore)
                leaf = isinstance(value, Tensor) and value.is_leaf
                todo += [(value.grad, _OP)] if leaf else []
            elif of is _OP:
                continue
            elif isinstance(value, nn.Module):
                if isinstance(value, _sharded()):
                    value.reshard()
                    self._parts.append(value.reshard)
                inner = [*value.parameters(False), *value.buffers(False), *value.children()]
                engine = isinstance(value, (FusibleOperation, Sequential))
                held = vars(value).values() if engine else self._members(vars(value))
                todo += [(member, _MODULE) for member in inner]
                todo += [(member, _OP if engine else _MODULE) for member in held]
            elif type(value) in _CONTAINERS or isinstance(value, tuple):
                todo += [(member, of) for member in self._members(value)]
            elif of is _MODULE and _is_plain(value):
                todo += [(member, _OBJECT) for member in self._members(vars(value))]
            self._seen[id(value)] = value

    def _members(self, value: Any) -> Iterable[Any]:
        """The content of a container, which is restored too."""
        if isinstance(value, tuple):
            return value
        content = dict(value) if isinstance(value, dict) else list(value)
        self._parts.append(lambda: _refill(value, content))
        return content.values() if isinstance(content, dict) else content


def _sharded() -> tuple[Any, ...]:
    """The class of modules of FSDP2, which have other parameters until they are sharded again."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule,) if hasattr(fsdp, "FSDPModule") else ()


def _is_plain(value: Any) -> bool:
    """Return whether an object is of a class that the model's author wrote."""
    known = isinstance(value, types.SimpleNamespace)
    package = type(value).__module__.partition(".")[0]
    stranger = package in _STRANGERS or package.startswith("opfuse")
    return (known or not stranger) and isinstance(getattr(value, "__dict__", None), dict)


def _refill(value: Any, content: Any) -> None:
    """Give a container the very members that it had, in order, if it has others."""
    now, before = (
        [member for pair in of.items() for member in pair] if isinstance(of, dict) else [*of]
        for of in (value, content)
    )
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return
    value.clear()
    value.update(content) if isinstance(value, (dict, set)) else value.extend(content)


def _restoring(value: Any) -> Callable[[], object] | None:
    """The function that restores a tensor, an array or a generator; None for anything else."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable:
            return lambda: None
        return partial(numpy.copyto, value, value.copy())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    bits = getattr(value, "bit_generator", value)
    if isinstance(value, numpy.random.Generator) or isinstance(bits, numpy.random.BitGenerator):
        return partial(setattr, bits, "state", bits.state)
    return None


def _tensor(tensor: Tensor) -> Callable[[], object]:
    """The function that restores a tensor's values, memory, gradient and ``requires_grad``.

    One of a class of its own, such as a DTensor, is restored in its parts: no rank waits for
    another. One without values, on the meta device or not yet made, has none to restore.
    """
    if is_lazy(tensor):
        return lambda: None
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
            if not torch.equal(part, copy):
                with torch.inference_mode(part.is_inference()):
                    part.copy_(copy)
                if memory is None:  # the whole tensor has a version too
                    torch.autograd.graph.increment_version(tensor)
        if leaf:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != needs:
                tensor.requires_grad_(needs)

    return restore


def _shares(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether a tensor is still a view of that memory, of the same form."""
    if (tensor.shape, tensor.dtype, tensor.device) != (memory.shape, memory.dtype, memory.device):
        return False
    return memory.layout is not torch.strided or (
        tensor.data_ptr() == memory.data_ptr() and tensor.stride() == memory.stride()
    )


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
