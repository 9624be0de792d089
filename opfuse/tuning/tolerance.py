"""The tolerances per dtype, and the comparison with fp64."""

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
    *((3,), (), (1,), (63,), (64,), (65,), (127,), (129,), (192,), (255,), (257,)),
    *((2, 3), (3, 3), (2, 1, 3), (2, 16), (5, 51), (0,), (2, 0)),
)
"""Leading dimensions worth testing.

They make inputs of one to four dimensions. Their row counts are those of tiles, one more, one less,
and none.
"""

MORE_ROWS: tuple[tuple[int, ...], ...] = (
    *((count,) for count in (31, 33, 511, 513, 1023, 1025, 2047, 4097)),
    (3, 43),
)
"""More of them, for a longer test."""


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
    roundings: float = 1,
    atol: float | None = None,
) -> str | None:
    """Describe what is wrong with ``got``, as a sentence, or None.

    Args:
        got: The tensor to judge.
        expected: The truth, in fp64.
        rounded: The same from the separate ops in the dtype of ``got``: twice their own error is
            allowed.
        dtype: The dtype it was computed in; default: that of ``got``.
        gemm: It comes out of a matrix product.
        roundings: Number of roundings that the relative tolerance covers.
        atol: The absolute tolerance; default: that of the dtype.
    """
    if got.shape != expected.shape:
        return f"has shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if not got.numel():
        return None
    # a GPU computes in fp64, and many numbers would take long to come from it
    here = got.device if got.device.type == "cuda" else torch.device("cpu")
    got, expected = got.detach().to(here).double(), expected.detach().to(here).double()
    rounded = None if rounded is None else rounded.detach().to(here)
    for kind, find in (("NaN", torch.isnan), ("inf", torch.isinf)):
        mine, there = find(got), find(expected if rounded is None else rounded)
        if not torch.equal(mine, there):
            return f"is {kind} in {int(mine.sum())} places, expected in {int(there.sum())}"
    finite = got.isfinite() & expected.isfinite()
    got, expected = torch.where(finite, got, 0.0), torch.where(finite, expected, 0.0)
    rtol, usual = tolerance(dtype or torch.float64, gemm=gemm)
    largest = expected.abs().max().item()
    allowed = (usual if atol is None else atol) + rtol * largest * roundings
    if rounded is not None:
        own = torch.where(finite, rounded.double(), 0.0) - expected
        allowed = max(allowed, 2 * own.abs().max().item())
    error = (got - expected).abs()
    worst = error.max().item()
    if worst <= allowed:
        return None
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    value, truth = got[place].item(), expected[place].item()
    return (
        f"is wrong by {worst:.3g}, {allowed:.3g} is allowed: "
        f"{value:.6g} instead of {truth:.6g} at {place}"
    )


ENOUGH = 256
"""How many errors say something together."""


def skew(got: Tensor, expected: Tensor, rounded: Tensor) -> str | None:
    """Describe what is wrong with all half-precision errors taken together, or return None.

    Each error may be within the dtype's tolerance while all have one sign, as in a kernel that
    truncates, or while small numbers have errors as large as large numbers. Errors are measured in
    units of the separate ops', and of the roundings to the dtype: by their mean, with their sign
    and towards zero, and by their root mean square in each eighth of the numbers by magnitude.

    Args:
        got: The tensor to judge, in half precision.
        expected: The truth, in fp64.
        rounded: The same from the separate ops.
    """
    got, expected, own = (t.detach().cpu().double().flatten() for t in (got, expected, rounded))
    finite = got.isfinite() & own.isfinite() & (expected.abs() < torch.finfo(rounded.dtype).max)
    got, expected, own = got[finite], expected[finite], own[finite]
    if got.numel() < ENOUGH:
        return None
    # a rounding is off by 0.29 of a last place at random, which is 0.72 eps of a number on average
    rounding = 0.2 * torch.finfo(rounded.dtype).eps
    least = torch.finfo(rounded.dtype).smallest_normal * rounding
    got, own = got - expected, own - expected
    unit = max(_rms(own), rounding * _rms(expected), least)
    for what, sign in (("too large", 1.0), ("away from zero", expected.sign())):
        mean, other = ((sign * errors).mean().item() for errors in (got, own))
        if abs(mean) > 2 * abs(other) + (0.5 + 5 / got.numel() ** 0.5) * unit:
            return (
                f"is {what} by {mean:.3g} on average, where errors of the separate ops are "
                f"{other:.3g} on average and {_rms(own):.3g} in size: truncated?"
            )
    order = expected.abs().argsort()
    for number, part in enumerate(order.tensor_split(8)):
        allowed = 8 * max(_rms(own[part]), rounding * _rms(expected[part]), 0.05 * unit)
        if (error := _rms(got[part])) > allowed:
            return (
                f"has errors of {error:.3g} in the numbers up to "
                f"{expected[part[-1]].abs().item():.3g}, eighth {number + 1} by magnitude, "
                f"{allowed:.3g} is allowed: the separate ops' are {_rms(own[part]):.3g}"
            )
    return None


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def code_steps(got: Tensor, expected: Tensor) -> Tensor:
    """How many codes lie between two tensors of codes, such as fp8 values, element by element."""
    if got.dtype.itemsize > 1 or not got.dtype.is_floating_point:
        return (got.double() - expected.double()).abs()
    codes = [codes.view(torch.uint8).short() for codes in (got, expected)]
    sign = 256 if got.dtype is torch.float8_e8m0fnu else 128  # that has none
    if got.dtype is torch.float4_e2m1fn_x2:
        codes, sign = [torch.stack([both & 15, both >> 4]) for both in codes], 8
    one, other = (torch.where(code >= sign, sign - code, code) for code in codes)
    return (one - other).abs()


def assert_close(
    got: Tensor, expected: Tensor, *, gemm: bool = False, what: str = "the result"
) -> None:
    """Compare a result with the truth in fp64, at the tolerance of its dtype; for tests of kernels.

    Args:
        got: The result of a kernel.
        expected: The same from fp64 arithmetic on the same values.
        gemm: It comes out of a matrix product.
        what: Its name in the message.

    Raises:
        AssertionError: They differ by more than the dtype allows, or in shape, NaN or inf.
    """
    problem = difference(got, expected, dtype=got.dtype, gemm=gemm)
    if problem is not None:
        raise AssertionError(f"{what} ({got.dtype}) {problem}")
