"""Bytes of PyTorch's operations: each reads its operands and writes its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .recorded import storage_of

_FREE = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh", "set_")
_WRITE_ONLY = ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros")


class TorchBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, counts the bytes that PyTorch's operations move. Views move none.

    Attributes:
        moved: Bytes read and written, by the storage of the tensor
            (:func:`opfuse_triton.recorded.storage_of`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: Counter[int] = Counter()
        self._kept: list[torch.Tensor] = []  # no two storages then have the same address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(_FREE):
            self._add(tree_leaves((args[1:] if name in _WRITE_ONLY else args, kwargs)))
            self._add(tree_leaves(result))
        return result

    def _add(self, values: Iterable[Any]) -> None:
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                own = torch.Size(size if stride else 1 for size, stride in sizes).numel()
                self.moved[storage_of(tensor)] += (own if tensor.numel() else 0) * tensor.itemsize
                self._kept.append(tensor)
