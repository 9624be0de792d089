"""What PyTorch has set as the default dtype changes no digit of an op whose tensors have theirs."""

from __future__ import annotations

import contextlib

import pytest
import torch

import opfuse
from opfuse import ops

WIDTH, ROWS, CLASSES = 16, 32, 24
NUMBERS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
CHAINS = {
    "norms": lambda d: [ops.LayerNorm(WIDTH, dtype=d), ops.L2Normalization(), ops.RMSNorm(WIDTH, dtype=d)],
    "gated": lambda d: [ops.Linear(WIDTH, 2 * WIDTH, dtype=d), ops.SwiGLU()],
    "scaled": lambda d: [ops.Linear(WIDTH, WIDTH, dtype=d), ops.GELU(), ops.ConstantScale(0.3)],
    "dropout": lambda d: [ops.Dropout(0.3)],
    **{
        f"loss {reduction} {numbers}": lambda d, reduction=reduction, numbers=numbers: [
            ops.Linear(WIDTH, CLASSES, dtype=d),
            ops.CrossEntropy(reduction=reduction, **numbers),
        ]
        for reduction in ("mean", "sum", "none")
        for numbers in ({}, NUMBERS)
    },
}  # fmt: skip


@contextlib.contextmanager
def default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def results(name, dtype, of_default):
    torch.manual_seed(0)
    chain = opfuse.Sequential(*CHAINS[name](dtype))
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, CLASSES, (ROWS,)).masked_fill(torch.arange(ROWS) % 5 == 0, -100)
    with default(of_default):
        y = chain(x, *[targets] * name.startswith("loss"))
        y.sum().backward()
    return [y, x.grad, *[param.grad for param in chain.parameters()]]


@pytest.mark.parametrize("of_default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_the_default_dtype_changes_no_digit(name, dtype, of_default):
    expected = results(name, dtype, torch.float32)
    for got, want in zip(results(name, dtype, of_default), expected, strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
