"""Helpers for plugin authors, in addition to the classes of the contract.

Attributes:
    ModuleCache: Values derived from a module: dropped, never copied, when the module is copied or
        pickled.
    add_product: Adds a product of matrices to a sum, by the product itself where that is possible.
    added: A sum, written into its first part if it may be.
    adds_itself: Whether it is.
    is_captured: Whether what runs on a device now is captured into a CUDA graph.
    ParamSource: The place of a parameter that another module holds, for
        ``BasicOperation.read_parameters``.
    may_write: Whether results of torch's operations may be overwritten. They may not while a
        ``TorchDispatchMode`` or a ``TorchFunctionMode`` is active, which may hold them; but if its
        class declares ``keeps_no_tensors = True``, as one that only counts does.
    matmul_precision: How PyTorch multiplies fp32 matrices on a kind of device.
    op_class: The class of an op as its author wrote it.
    plan_of: The plan of a call of a chain, which is not run.
    reusable: The ``out`` of an operation that may overwrite a result, or None.
    saved_bytes: Number of bytes that a forward keeps for its backward.
    wide: The dtype that the built-in ops compute in, for an input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .engine.fuser import key_of
from .fusible import ParamSource
from .introspection import hook_dicts, op_class, standing_for
from .op_context import ModuleCache
from .overwriting import added, may_write, reusable
from .precision import add_product, adds_itself, matmul_precision, wide
from .settings import current, is_captured

if TYPE_CHECKING:
    from .engine.plan import FusionPlan

__all__ = [
    "ModuleCache",
    "ParamSource",
    "add_product",
    "added",
    "adds_itself",
    "is_captured",
    "matmul_precision",
    "may_write",
    "op_class",
    "plan_of",
    "reusable",
    "saved_bytes",
    "wide",
]


def plan_of(chain: Any, input: Tensor, *extra_inputs: Tensor) -> FusionPlan | None:
    """Return the plan of a call of a chain, under the present settings, and do not run it.

    Args:
        chain: An :class:`opfuse.Sequential` of fusible ops.
        input: Its input.
        *extra_inputs: Its extra inputs.

    Returns:
        The plan; None: the call would run in parts, because of hooks or of what is not fusible.
    """
    fuser, *others = chain._module_groups
    units = getattr(fuser, "_units", ())
    if others or not units or any(any(hook_dicts(unit)) for unit in units):
        return None
    owners = () if fuser._owner is None else (fuser._owner,)
    training = [unit.training for unit in (*units, *owners)]
    params = {
        (module, name): standing_for(module, name)
        if attributes is vars(module)
        else module.read_parameter(name, standing_for)
        for attributes, module, name in fuser._params
    }
    with current.temporarily(given=params):
        tensors = fuser._tensors(input, extra_inputs)
    key = key_of(input, tensors, extra_inputs, None, training)
    return fuser.program_for(key, input, tensors).plan  # type: ignore[no-any-return]


def saved_bytes(forward: Callable[[], Any], apart_from: Iterable[Tensor] = ()) -> int:
    """Return the number of bytes that a forward keeps for its backward, each storage once.

    Args:
        forward: Runs it; its result stays alive until all is counted.
        apart_from: Tensors whose memory does not count, such as parameters.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        kept.update((s._cdata, s.nbytes()) for s in _storages(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    for storage in [s for tensor in apart_from for s in _storages(tensor)]:
        kept.pop(storage._cdata, None)
    del result
    return sum(kept.values())


def _storages(tensor: Any) -> Iterator[Any]:
    """The storages of a tensor: those inside a subclass around others, such as a ``DTensor``."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.untyped_storage()
        return
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    for part in [part for part in parts if isinstance(part, Tensor)]:  # or it is a mesh
        yield from _storages(part)
