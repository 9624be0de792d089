"""Comparing a fused run with the separate ops, and with the truth in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import Case
from .running import Failure, Result
from .tolerance import difference


def compare_outputs(case: Case, got: Result, expected: Result, truth: Result) -> None:
    """Hold outputs against the truth, at the tolerance of the dtype.

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
            raise Failure(
                f"{what} has {'no' if y.grad_fn is None else 'an'} autograd graph, "
                "unlike the separate ops'"
            )


def compare_grads(case: Case, got: Result, expected: Result, truth: Result) -> None:
    """Hold every gradient against the truth.

    Raises:
        Failure: A gradient is missing, or wrong.
    """
    for name, grad in got.grads.items():
        compare(
            case,
            f"the gradient of {describe(case, name)}",
            grad,
            expected.grads[name],
            truth.grads[name],
        )


def compare_results(case: Case, got: Result, expected: Result, truth: Result) -> None:
    """Both of these."""
    compare_outputs(case, got, expected, truth)
    compare_grads(case, got, expected, truth)


def compare(
    case: Case, what: str, got: Tensor | None, expected: Tensor | None, truth: Tensor | None
) -> None:
    """Hold one tensor against the separate ops' and the truth.

    It must have the dtype and the device of the separate ops'.

    Raises:
        Failure: They differ.
    """
    if got is None or expected is None or truth is None:
        if (got is None) != (expected is None):
            raise Failure(
                f"{what} is {'None' if got is None else 'a tensor'}, the separate ops' is not"
            )
        return
    for attribute in ("dtype", "device"):
        if getattr(got, attribute) != getattr(expected, attribute):
            raise Failure(
                f"{what} has {attribute} {getattr(got, attribute)} "
                f"instead of {getattr(expected, attribute)}"
            )
    # each op of a chain rounds its result
    roundings = 2 if case.compute_dtype is torch.float16 else 1
    problem = difference(
        got, truth, rounded=expected, dtype=case.compute_dtype, gemm=case.gemm, roundings=roundings
    )
    if problem is not None:
        raise Failure(f"{what} {problem}")


def describe(case: Case, leaf: str) -> str:
    """A leaf as messages call it: ``bias of op 1 (Bias)``."""
    if leaf == "input" or leaf.startswith("extra "):
        return "the input" if leaf == "input" else leaf.replace("extra", "extra input")
    number, _, name = leaf.partition(".")
    op = (*case.before, *case.ops, *case.after)[int(number)]
    return f"{name} of op {number} ({op.cls.__name__})"
