"""Helpers for plugin authors, in addition to the classes of the contract.

Attributes:
    ModuleCache: Values derived from a module: dropped, never copied, when the module is copied or
        pickled.
    add_product: Adds a product of matrices to a sum, by the product itself where that is possible.
    adds_itself: Whether it is.
    is_captured: Whether what runs on a device now is captured into a CUDA graph.
    ParamSource: The place of a parameter that another module holds, for
        ``BasicOperation.read_parameters``.
    matmul_precision: How PyTorch multiplies fp32 matrices on a kind of device.
    op_class: The class of an op as its author wrote it.
    saved_bytes: Number of bytes that a forward keeps for its backward.
    wide: The dtype that the built-in ops compute in, for an input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .fusible import ParamSource
from .introspection import op_class
from .op_context import ModuleCache
from .precision import add_product, adds_itself, matmul_precision, wide
from .settings import is_captured

__all__ = [
    "ModuleCache",
    "ParamSource",
    "add_product",
    "adds_itself",
    "is_captured",
    "matmul_precision",
    "op_class",
    "saved_bytes",
    "wide",
]


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
