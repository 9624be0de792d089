"""Comparing a fused run with the separate ops, and with the truth in fp64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor
from ..tuning.comparing import problem_of
from ..tuning.tolerance import TOLERANCES, code_steps, difference, skew
from .cases import Case
from .failures import Failure
from .running import RunResult


def compare_outputs(case: Case, got: RunResult, expected: RunResult, truth: RunResult) -> None:
    """Compare outputs with the truth, at the tolerance of the dtype, and their graphs.

    Raises:
        Failure: Another number of outputs, another dtype, device or shape, wrong values, or an
            autograd graph where the separate ops have none.
    """
    if len(got.outputs) != len(expected.outputs):
        raise Failure(f"it gives {len(got.outputs)} outputs instead of {len(expected.outputs)}")
    for number, y in enumerate(got.outputs):
        what = f"extra output {number - 1}" if number else "the output"
        compare(case, what, y, expected.outputs[number], truth.outputs[number])
        if (y.grad_fn is None) != (expected.outputs[number].grad_fn is None):
            has = "no" if y.grad_fn is None else "an"
            raise Failure(f"{what} has {has} autograd graph, unlike the separate ops'")


def compare_grads(case: Case, got: RunResult, expected: RunResult, truth: RunResult) -> None:
    """Compare every gradient with the truth.

    Raises:
        Failure: A gradient is missing, or wrong.
    """
    for name, grad in got.grads.items():
        what = f"the gradient of {describe(case, name)}"
        terms = math.prod(case.rows) if "." in name else 1
        compare(case, what, grad, expected.grads[name], truth.grads[name], terms)


def compare_results(case: Case, got: RunResult, expected: RunResult, truth: RunResult) -> None:
    """Compare outputs and gradients."""
    compare_outputs(case, got, expected, truth)
    compare_grads(case, got, expected, truth)


def compare_strides(got: RunResult, expected: RunResult) -> None:
    """Compare the order in memory of the dimensions of outputs.

    Raises:
        Failure: It is another. A copy in place of a view is as good: that is a matter of aliasing.
    """
    for number, (y, other) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        what = f"extra output {number - 1}" if number else "the output"
        orders = [sorted(range(t.ndim), key=lambda d, t=t: -t.stride(d)) for t in (y, other)]  # type: ignore[misc]
        orders = [[dim for dim in order if y.shape[dim] > 1] for order in orders]
        differ = y.numel() and orders[0] != orders[1] and 0 not in other.stride()
        # one that keeps the order of an input, where the separate ops do not, is as good
        usual = all(x.is_contiguous() for x in got.given) or not other.is_contiguous()
        if differ and usual:
            raise Failure(f"{what} has strides {y.stride()} instead of {other.stride()}")


def where_finite(case: Case, *results: RunResult) -> Iterator[RunResult]:
    """The results, 0 where the separate ops' leave the dtype's range, or nearly do.

    There no result is right.
    """
    _, expected, truth = results
    largest = 0.9 * torch.finfo(case.compute_dtype).max

    def clear(tensor: Tensor | None, other: Tensor | None, true: Tensor | None) -> Tensor | None:
        if tensor is None or other is None or true is None or tensor.shape != other.shape:
            return tensor
        inside = other.isfinite() & (other.abs() < largest) & (true.abs() < largest)
        return tensor if inside.all() else torch.where(inside, tensor, 0.0)

    for result in results:
        pairs = zip(result.outputs, expected.outputs, truth.outputs)  # noqa: B905  # compared later
        grads = {n: clear(g, expected.grads[n], truth.grads[n]) for n, g in result.grads.items()}
        outputs: Any = tuple(clear(*three) for three in pairs)
        outputs += result.outputs[len(outputs) :]
        yield dataclasses.replace(result, outputs=outputs, grads=grads)


def compare(
    case: Case,
    what: str,
    got: Tensor | None,
    expected: Tensor | None,
    truth: Tensor | None,
    terms: int = 1,
) -> None:
    """Compare one tensor with the separate ops' and with the truth.

    It must have the dtype and the device of the separate ops'. Each of its numbers may be a sum of
    ``terms`` over rows, in any order: n roundings at random err by the square root of n.

    Raises:
        Failure: They differ.
    """
    if problem := problem_of(what, got, expected, values=False):
        raise Failure(problem)
    if got is None or expected is None or truth is None:
        return
    # each op of a chain rounds its result, those around the fused one too
    dtype, around = case.compute_dtype, case.before or case.after
    roundings = 2.0 if dtype is torch.float16 or (dtype is torch.bfloat16 and around) else 1.0
    if case.positive and dtype is torch.bfloat16:  # of one sign, so that nothing cancels
        roundings = 0.5
    if dtype is torch.float32:
        rounding = torch.finfo(dtype).eps / TOLERANCES[dtype][0]
        roundings = max(roundings, 2 * rounding * terms**0.5)
    if case.recipe is not None and (case.subject.inexact or dtype.itemsize < 4):
        dtype = torch.float8_e4m3fn  # a different last bit may have become a different code
    # tiny numbers are not as good as 0
    atol = min(torch.finfo(dtype).tiny, TOLERANCES[dtype][1]) if case.mixed else None
    wrong = difference(
        got, truth, rounded=expected, dtype=dtype, gemm=case.gemm, roundings=roundings, atol=atol
    )
    half = got.dtype.itemsize == 2 and truth.dtype is torch.float64
    # tiny numbers have few bits, and a sum behind may leave little but errors
    if wrong is None and half and not (case.mixed or around):
        wrong = skew(got, truth, expected)
    if wrong is not None:
        hint = "; each read of a parameter gives another value: take those in ctx.params"
        raise Failure(f"{what} {wrong}{hint if case.parametrized else ''}")


MOST_CODES = 1e-3
"""The share of codes that may be one step off, where the subject is declared to be inexact."""


def compare_codes(case: Case, what: str, got: Any, expected: QuantizedTensor) -> None:
    """Compare a quantized tensor with the separate ops': the same format, codes and scales.

    Raises:
        Failure: They differ.
    """
    if type(got) is not type(expected):
        names = [type(tensor).__name__ for tensor in (got, expected)]
        raise Failure(f"{what} is a {names[0]} instead of a {names[1]}")
    if not got.usage.covers(expected.copies):
        raise Failure(f"{what} is good for {got.usage} instead of {expected.copies}")
    scales_first = sorted(expected.tensor_names, key=lambda name: name in expected.data_names)
    for name in scales_first:
        mine, other = got.without_padding(name), expected.without_padding(name)
        if mine is None or other is None:
            continue
        if mine.dtype != other.dtype:
            raise Failure(f"{what}: {name} has dtype {mine.dtype} instead of {other.dtype}")
        if name in expected.data_names:
            _compare_data(case, f"{what}: {name}", mine, other)
            continue
        error = (mine.float() - other.float()).abs().nan_to_num()
        if (error > (1e-6 if case.subject.inexact else 0) * other.float().abs()).any():
            place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            how = f"{what}: {name} is {mine[place].item():.8g} instead"
            raise Failure(f"{how} of {other[place].item():.8g} at {place}")
    for usage in (ROWWISE, COLUMNWISE):  # one copy may serve as the other
        if expected.copies.covers(usage) and not got.copies.covers(usage):
            if not torch.equal(got.dequantize(usage), expected.dequantize(usage)):
                raise Failure(f"{what} represents other values, read for {usage}")


def _compare_data(case: Case, what: str, got: Tensor, expected: Tensor) -> None:
    steps = code_steps(got, expected)
    count = int((steps > 0).sum())
    if not count:
        return
    share, most = count / steps.numel(), int(steps.max())
    found = f"{count} of {steps.numel()} codes differ ({100 * share:.2g} %), by up to {most} steps"
    if not case.subject.inexact:
        how = f"{what}: {found};"
        raise Failure(f"{how} round where the separate ops round, or declare it in `inexact`")
    if most > 1 or (share > MOST_CODES and count > 1):
        raise Failure(f"{what}: {found}; {MOST_CODES:.1%} by one step are allowed to be inexact")
    print(f"{case.subject.name}: {found}")


def describe(case: Case, leaf: str) -> str:
    """A leaf as messages call it: ``bias of op 1 (Bias)``."""
    if leaf == "input" or leaf.startswith("extra "):
        return "the input" if leaf == "input" else leaf.replace("extra", "extra input")
    number, _, name = leaf.partition(".")
    op = case.chain_ops[int(number)]
    return f"{name} of op {number} ({op.cls.__name__})"
