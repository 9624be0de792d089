"""Checks of the numbers: outputs, gradients, what is saved, NaN, and the same every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.quantization import QuantizedTensor
from ...ops import Cast
from ..cases import Case, subjects
from ..generate import Chains
from ..reference import compare, compare_codes, compare_grads, compare_outputs, compare_results
from ..running import (
    Declined,
    Failure,
    RunResult,
    backward,
    both,
    forward,
    fused,
    one_by_one,
    only,
    references,
    saying,
    watched,
)
from .registry import (
    MANY_ROWS,
    check,
    evaluating,
    frozen,
    joined,
    keeping_weights,
    long_sums,
    numbered,
    numeric,
    surrounded,
)


@check(numeric)
def output(case: Case) -> None:
    """All outputs, against the separate ops in fp64, at the tolerance of the dtype."""
    expected = references(case)
    compare_outputs(case, fused(case, grads=False), *expected)


def _with_shapes(case: Case) -> Case:
    """The case with a fusion whose backward checks the shapes of gradients.

    It raises where a gradient has another shape than its parameter.
    """

    def look(op: Any, ctxs: Any, dy: Tensor, result: Any) -> None:
        for basic, _, name, grad in _param_grads(op, ctxs, result):
            if grad.shape != basic.read_parameter(name).shape:
                wrong = f"{tuple(grad.shape)} for {name} of {type(basic).__name__}"
                raise Failure(
                    f"its backward returns a gradient of shape {wrong}, which autograd must add up"
                )

    return watched(case, None, look)


def _param_grads(op: Any, ctxs: Any, result: Any) -> Iterator[tuple[Any, bool, str, Tensor]]:
    """The gradients of parameters that a backward gave: op, whether it needs it, name, tensor."""
    for basic, ctx, grads in zip(op.basic_ops, ctxs, result[1], strict=True):
        # the core insists on the number
        each = zip(ctx.param_requires_grad, basic.param_names, grads or (), strict=False)
        yield from ((basic, *found) for found in each if found[-1] is not None)


def _saving(chains: Chains) -> Iterator[Case]:
    yield from chains.all
    yield from evaluating(chains)
    yield from frozen(chains, every_rank=False)
    for case in chains.plain:
        yield case.with_(autocast=torch.bfloat16)
        yield from keeping_weights(case)
        yield case.with_(rows=(2, 3), dtype=torch.bfloat16)
        yield case.with_(rows=(5,), layout="strided")
        yield case.with_(rows=MANY_ROWS)
    yield from chains.quantized


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


def aliases(tensor: Any, known: Mapping[str, Any]) -> list[str]:
    """The names of the known tensors, quantized or not, that share memory with this one."""
    memory = memory_of(tensor)
    return [name for name, other in known.items() if memory & memory_of(other)]


def memory_of(tensor: Any) -> set[int]:
    """The storages of a tensor, quantized or not; of anything else there are none."""
    parts = tensor.tensors() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return {t.untyped_storage()._cdata for t in parts if isinstance(t, Tensor) and t.numel()}


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


def _differentiable(chains: Chains) -> Iterator[Case]:
    yield from numeric(chains)
    for case in chains.plain:
        half = case.with_(dtype=torch.bfloat16)
        yield from (one.with_(gradient=1e6) for one in (case, half))
        yield from long_sums(case)
    yield from map(joined, chains.plain)
    forks = [case for case in chains.plain if any(op.cls.num_extra_outputs for op in case.ops)]
    yield from (case.with_(hidden=True) for case in forks)


@check(_differentiable)
def gradients(case: Case) -> None:
    """The gradients of input, parameters and extra inputs, against the separate ops in fp64."""
    expected = references(case)
    got = fused(_with_shapes(case))
    compare_grads(case, got, *expected)
    if len(got.outputs) > 1:
        got = fused(case, only_main=True)
        with saying("where no extra output is used, "):
            compare_grads(case, got, *references(case, only_main=True))


@check(frozen)
def requires_grad(case: Case) -> None:
    """Whichever leaves need a gradient get the right one, and no other work is done."""
    expected = references(case)
    needless: list[str] = []

    def look(op: Any, ctxs: Any, dy: Tensor, result: Any) -> None:
        for basic, needs, name, _ in _param_grads(op, ctxs, result):
            if not needs:
                needless.append(f"{name} of {type(basic).__name__}")

    got = fused(watched(case, None, look))
    compare_results(case, got, *expected)
    if needless:
        raise Failure(f"it computes the gradient of {needless[0]}, which needs none")


@check(surrounded)
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


def _plain_and_numbered(chains: Chains) -> Iterator[Case]:
    yield from chains.plain
    yield from numbered(chains)


@check(_plain_and_numbered)
def nan_and_inf(case: Case) -> None:
    """NaN and infinity appear where the separate ops give them."""
    case = case.with_(rows=(4,))

    def step() -> RunResult:
        built = case.build()
        for row, column, value in ((0, 0, torch.nan), (1, 0, torch.inf), (2, -1, -torch.inf)):
            built.leaves["input"].data[row, column] = value
        return backward(case, forward(case, built=built))

    got, expected = both(case, step)
    compare_results(case, got, expected, expected)


def _near_the_ends(chains: Chains) -> Iterator[Case]:
    for case in chains.all if chains.thorough else chains.plain:
        for scale in (500.0, 2.0**-9):
            yield case.with_(dtype=torch.float16, scale=scale)
            yield case.with_(autocast=torch.float16, scale=scale)
            yield case.with_(dtype=torch.bfloat16, scale=scale)


@check(_near_the_ends)
def magnitude(case: Case) -> None:
    """Half precision, large and small numbers: finite where the separate ops are, and as exact."""
    expected = references(case)
    got = fused(case)
    hint = "; do what leaves the range of half precision in fp32"
    with saying(f"with inputs around {case.scale:g}, ", hint):
        compare_results(case, *_where_finite(case, got, *expected))


def _where_finite(case: Case, *results: RunResult) -> Iterator[RunResult]:
    """The results, 0 where the separate ops' leave the dtype's range, or nearly do.

    There no result is right.
    """
    _, expected, truth = results
    largest = 0.9 * torch.finfo(case.compute_dtype).max

    def clear(tensor: Tensor | None, other: Tensor | None, true: Tensor | None) -> Tensor | None:
        if tensor is None or other is None or true is None or tensor.shape != other.shape:
            return tensor
        inside = other.isfinite() & (other.abs() < largest) & (true.abs() < largest)
        return torch.where(inside, tensor, 0.0)

    for result in results:
        pairs = zip(result.outputs, expected.outputs, truth.outputs, strict=True)
        grads = {n: clear(g, expected.grads[n], truth.grads[n]) for n, g in result.grads.items()}
        outputs: Any = tuple(clear(*three) for three in pairs)
        yield dataclasses.replace(result, outputs=outputs, grads=grads)
