"""How close is close enough: the tolerances per dtype, and the comparison with fp64."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float8_e4m3fn: (0.125, 0.0675),
    torch.float8_e5m2: (0.25, 0.125),
}
"""``(rtol, atol)`` per dtype.

The relative one is held against the largest value, since most results are sums.
"""

ROWS: tuple[tuple[int, ...], ...] = (
    *((3,), (), (1,), (63,), (65,), (127,), (129,), (255,), (257,)),
    *((2, 3), (2, 1, 3), (2, 16), (5, 51), (0,), (2, 0)),
)
"""Leading dimensions worth testing.

They are of inputs of one to four dimensions, with row counts beside those of tiles, and no rows.
"""

MORE_ROWS: tuple[tuple[int, ...], ...] = (
    (31,),
    (33,),
    (511,),
    (513,),
    (1023,),
    (1025,),
    (2047,),
    (4097,),
    (3, 43),
)
"""More of them, if you have the time."""


def tolerance(dtype: torch.dtype, *, gemm: bool = False) -> tuple[float, float]:
    """``(rtol, atol)`` of a dtype; fp32 matrix products may have been done in TF32."""
    return TOLERANCES[torch.float16 if gemm and dtype is torch.float32 else dtype]


def difference(
    got: Tensor,
    expected: Tensor,
    *,
    rounded: Tensor | None = None,
    dtype: torch.dtype | None = None,
    gemm: bool = False,
    roundings: int = 1,
) -> str | None:
    """What is wrong with ``got``, as a sentence, or None.

    Args:
        got: The tensor to judge.
        expected: The truth, in fp64.
        rounded: The same from the separate ops in the dtype of ``got``: twice their own error is
            allowed.
        dtype: The dtype it was computed in; default: that of ``got``.
        gemm: Whether it comes out of a matrix product.
        roundings: How many roundings the relative tolerance is for.
    """
    if got.shape != expected.shape:
        return f"has shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if not got.numel():
        return None
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    for kind, find in (("NaN", torch.isnan), ("inf", torch.isinf)):
        here, there = find(got), find(expected)
        if rounded is not None:
            there = find(rounded.detach().cpu())
        if not torch.equal(here, there):
            return f"is {kind} in {int(here.sum())} places instead of {int(there.sum())}"
    finite = got.isfinite() & expected.isfinite()
    got, expected = torch.where(finite, got, 0.0), torch.where(finite, expected, 0.0)
    rtol, atol = tolerance(dtype or torch.float64, gemm=gemm)
    largest = expected.abs().max().item()
    allowed = atol + rtol * largest * roundings
    if rounded is not None:
        own = torch.where(finite, rounded.detach().cpu().double(), 0.0) - expected
        allowed = max(allowed, 2 * own.abs().max().item())
    error = (got - expected).abs()
    worst = error.max().item()
    if worst <= allowed:
        return None
    where = tuple(torch.unravel_index(error.argmax(), error.shape))
    place = tuple(int(i) for i in where)
    value, truth = got[place].item(), expected[place].item()
    return (
        f"is wrong by {worst:.3g}, {allowed:.3g} is allowed: "
        f"{value:.6g} instead of {truth:.6g} at {place}"
    )


def code_steps(got: Tensor, expected: Tensor) -> Tensor:
    """How many codes lie between two tensors of codes, such as fp8 values, element by element."""
    if got.dtype.itemsize > 1 or not got.dtype.is_floating_point:
        return (got.double() - expected.double()).abs()
    codes = [codes.view(torch.uint8).short() for codes in (got, expected)]
    sign = 128
    if got.dtype is torch.float4_e2m1fn_x2:
        codes, sign = [torch.stack([both & 15, both >> 4]) for both in codes], 8
    one, other = (torch.where(code >= sign, sign - code, code) for code in codes)
    return (one - other).abs()


def assert_close(
    got: Tensor, expected: Tensor, *, gemm: bool = False, what: str = "the result"
) -> None:
    """Hold a result against the truth in fp64, at the tolerance of its dtype; for tests of kernels.

    Args:
        got: What a kernel gave.
        expected: The same from fp64 arithmetic on the same values.
        gemm: Whether it comes out of a matrix product.
        what: What it is, for the message.

    Raises:
        AssertionError: They differ by more than the dtype allows, or in shape, NaN or inf.
    """
    problem = difference(got, expected, dtype=got.dtype, gemm=gemm)
    if problem is not None:
        raise AssertionError(f"{what} ({got.dtype}) {problem}")
