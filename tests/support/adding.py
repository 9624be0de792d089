"""A library that adds products of half precision up in fp32, as those of GPUs do."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.ops import arithmetic as precision

aten = torch.ops.aten


class Library(TorchDispatchMode):
    """A library that adds products of half precision up in fp32, or refuses to."""

    keeps_no_tensors = True

    def __init__(self, adds=True):
        super().__init__()
        self.adds, self.calls = adds, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (aten.addmm.dtype_out, aten.mm.dtype_out):
            return func(*args, **(kwargs or {}))
        if not self.adds:
            raise RuntimeError("self and mat2 must have the same dtype")
        *total, a, b, dtype = args
        assert a.dtype is b.dtype and dtype is torch.float32 and kwargs["out"].dtype is dtype
        self.calls += 1
        product = a.float() @ b.float() * kwargs.get("alpha", 1)
        if total and kwargs.get("beta", 1):
            product += total[0] * kwargs.get("beta", 1)
        return kwargs["out"].copy_(product)


@pytest.fixture(autouse=True)
def asked_again():
    """What the library of this device can do is not known yet, and not afterwards."""
    precision._library_adds.cache_clear()
    yield
    precision._library_adds.cache_clear()
