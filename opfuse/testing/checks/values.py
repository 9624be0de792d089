"""Checks of the numbers: outputs, gradients, what is saved, NaN, and the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.context_managers import _CORE_OPTIONS, options
from ...core.quantization import QuantizedTensor
from ...ops import Cast
from ..cases import Case, subjects
from ..failures import Declined, Failure, blamed, saying
from ..generate import Chains, fitted
from ..reference import compare, compare_codes, compare_results
from ..running import (
    RunResult,
    backward,
    both,
    forward,
    fused,
    one_by_one,
    only,
    references,
    watched,
)
from .leavings import aliases, other_settings, unchanged_settings
from .observed import observed
from .registry import check, exact, numbered, plain, scenarios


@check(exact)
def output(case: Case) -> None:
    """All outputs, against the separate ops in fp64, at the tolerance of the dtype."""
    observed(case, "output")


@check(exact)
def strides(case: Case) -> None:
    """Outputs lie in memory as the separate ops' do."""
    observed(case, "strides")


def _is_usual(case: Case) -> bool:
    return not case.varied and case.rows in ((3,), (case.least,))


@check(scenarios)
def settings(case: Case) -> None:
    """A call leaves torch's settings as they were, whatever those were, and its ops' attributes."""
    observed(case, "settings")
    if not _is_usual(case):
        return
    with other_settings() as was, only(case.subject):
        result = forward(case)
        unchanged_settings(was, "forward")
        backward(case, result)
        unchanged_settings(was, "backward")


@check(scenarios)
def unmodified_inputs(case: Case) -> None:
    """The forward leaves inputs and parameters as they are, unless the op says in-place.

    That holds where no gradient is needed, too.
    """
    observed(case, "unmodified_inputs")


@check(scenarios)
def unmodified_gradients(case: Case) -> None:
    """The backward changes no incoming gradient, saved tensor, output, input or parameter."""
    observed(case, "unmodified_gradients")
    if "debug" in _CORE_OPTIONS and _is_usual(case):  # what is between two steps, too
        with only(case.subject), options(debug=True), blamed():
            backward(case, forward(case))


@check(scenarios)
def aliasing(case: Case) -> None:
    """Outputs and gradients share memory only as the separate ops' do, and never across calls."""
    observed(case, "aliasing")


@check(scenarios, passes=("backward", "joint"))
def grad_input(case: Case) -> None:
    """The gradient that the backward returns shares memory only as ``grad_input`` declares."""
    observed(case, "grad_input")


@check(scenarios)
def generator(case: Case) -> None:
    """Numbers drawn after its forward or backward are those drawn after the separate ops."""
    observed(case, "generator")


@check(scenarios)
def repeatable(case: Case) -> None:
    """The same chain gives bitwise the same twice, and the right thing in every call."""
    observed(case, "repeatable")


@check(lambda chains: [case for case in scenarios(chains) if case.autocast])
def autocast(case: Case) -> None:
    """Under autocast: the dtypes of the separate ops, and their values."""
    observed(case, "output", "gradients")


@check(lambda chains: [c for c in scenarios(chains) if c.scale != 1 and not c.autocast])
def magnitude(case: Case) -> None:
    """Large and small numbers: finite where the separate ops are, and as exact."""
    hint = "; do what leaves the range of half precision in fp32"
    with saying(f"with inputs around {case.scale:g}, ", hint):
        observed(case, "output", "gradients")


def _saving(chains: Chains) -> list[Case]:
    varied = [case for case in scenarios(chains) if case.varied]
    return [*chains.all, *varied, *chains.quantized]


@check(_saving, passes=("forward",))
def saved_state(case: Case) -> None:
    """A forward leaves in contexts what the ops would: names, order, values, dtypes, aliases."""
    left = []
    for one in (case, one_by_one(case)):
        kept = Kept()
        result = fused(watched(one, kept), grads=False)
        own = [*result.built.chain][len(case.before) : len(case.chain_ops) - len(case.after)]
        left.append(kept.of(own, len(case.ops)))
    for number, (got, expected) in enumerate(zip(*left, strict=True)):
        who = f"op {number} ({case.ops[number].cls.__name__})"
        _compare_context(case, who, got, expected)


class Kept:
    """Keeps what is in each context, and what each saved tensor is an alias of.

    It is called after the forward of each fused op.
    """

    def __init__(self) -> None:
        self._left: list[tuple[Any, list[dict[str, Any]]]] = []

    def of(self, own: Sequence[Any], count: int) -> list[dict[str, Any]]:
        """The entries of a chain's own ops and casts, without those of other matches around it.

        Raises:
            Declined: Other fused ops replace them, or theirs replaces ops around the chain, too.
        """
        found: list[dict[str, Any]] = []
        for basic, left in self._left:
            mine = {any(op is one for one in own) for op in basic if not isinstance(op, Cast)}
            found += left if False not in mine else []
            if mine == {True, False}:
                raise Declined("it takes ops around its chain, too")
        if len(found) != count:
            raise Declined("it does not replace the whole chain")
        return found

    def __call__(self, op: Any, ctxs: Any, x: Tensor, result: Any) -> None:
        """Keep what a fused op left."""
        y, extras = result
        known = {"the input": x, "the output": y}
        for number, (ctx, outputs) in enumerate(zip(ctxs, extras, strict=True)):
            known |= {f"parameter {k} of op {number}": t for k, t in enumerate(ctx.params)}
            known |= {f"extra output {k} of op {number}": t for k, t in enumerate(outputs)}
        left: list[dict[str, Any]] = []
        for basic, ctx in zip(op.basic_ops, ctxs, strict=True):
            saved = ctx.to_save
            names = basic.saved_names or tuple(f"tensor {k}" for k in range(len(saved or ())))
            either = getattr(basic, "saves_output", False)  # a fused op may save the input
            if either and saved is not None:
                saved = tuple([t if t is None else basic.forward_value(t) for t in saved])
            entry = {"needed": ctx.requires_grad, "saved": saved, "names": names}
            entry["aliases"] = [[] if either else aliases(t, known) for t in saved or ()]
            names = () if isinstance(basic, Cast) else basic.context_names
            entry["context"] = {name: getattr(ctx, name, None) for name in names}
            left.append(entry)
        self._left.append((op.basic_ops, left))


def _compare_context(case: Case, who: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    if not got["needed"]:
        if got["saved"] is not None:
            raise Failure(f"it saves tensors for {who}, which takes no part in the backward")
        return
    counts = [len(entry["saved"] or ()) for entry in (got, expected)]
    if counts[0] != counts[1]:
        names = ", ".join(expected["names"])
        raise Failure(f"it saves {counts[0]} tensors for {who} instead of {counts[1]}: {names}")
    for k, name in enumerate(expected["names"]):
        mine, other = got["saved"][k], expected["saved"][k]
        what = f"what it saves as {name!r} for {who}"
        if mine is None or other is None:
            if other is not None:
                raise Failure(f"{what} is None, although a gradient needs it")
            if mine is not None:
                raise Failure(f"{what} is a tensor, although no gradient needs it")
            continue
        if mine.dtype != other.dtype:
            raise Failure(f"{what} has dtype {mine.dtype} instead of {other.dtype}")
        if mine.shape != other.shape:
            raise Failure(f"{what} has shape {(*mine.shape,)} instead of {(*other.shape,)}")
        shared = [" and ".join(each["aliases"][k]) or "nothing" for each in (got, expected)]
        if shared[0] != shared[1]:
            raise Failure(f"{what} shares memory with {shared[0]}, the basic op's with {shared[1]}")
        if isinstance(other, QuantizedTensor):
            compare_codes(case, what, mine, other)
        elif not (other.dtype.is_floating_point or other.is_complex()):  # on the host or not
            compare(case, what, mine.to(other.device), other, other)
        else:
            compare(case, what, mine, other, other)
    for name, value in expected["context"].items():
        if got["context"][name] != value:
            raise Failure(
                f"it leaves {name}={got['context'][name]!r} in the context of {who} "
                f"instead of {value!r}"
            )


@check(exact)
def gradients(case: Case) -> None:
    """The gradients of input, parameters and extra inputs, against the separate ops in fp64."""
    observed(case, "gradients")


@check(lambda chains: [case for case in exact(chains) if case.frozen])
def requires_grad(case: Case) -> None:
    """Whichever leaves need a gradient get the right one, and no other work is done."""
    observed(case, "requires_grad", "output", "gradients")


@check(plain)
def together(case: Case) -> None:
    """With every fusion of its plugin at once, the numbers are right too."""
    offered = subjects(case.subject.plugin)
    every = [subject for subject in offered if subject.fusion is not case.subject.fusion]
    if not every:
        raise Declined("its plugin offers no other fusion")
    for dtype in (case.dtype, torch.bfloat16) if case.recipe is None else (torch.float64,):
        case = case.with_(dtype=dtype)
        expected = references(case)
        with only(case.subject, *every):
            compare_results(case, backward(case, forward(case)), *expected)


@check(lambda chains: [*chains.plain, *numbered(chains)])
def nan_and_inf(case: Case) -> None:
    """NaN and infinity appear where the separate ops give them."""
    case = fitted(case.with_(rows=(4,)))

    def step() -> RunResult:
        built = case.build()
        for row, column, value in ((0, 0, torch.nan), (1, 0, torch.inf), (2, -1, -torch.inf)):
            built.leaves["input"].data[row, column] = value
        return backward(case, forward(case, built=built))

    got, expected = both(case, step)
    compare_results(case, got, expected, expected)
