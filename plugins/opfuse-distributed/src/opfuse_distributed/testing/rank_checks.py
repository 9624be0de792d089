"""Checks of fusions with collectives, on simulated ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opfuse import ops
from opfuse.core.sequential import Sequential
from opfuse.testing import recipes
from opfuse.testing.cases import Subject
from opfuse.testing.failures import Declined, Failure, saying
from opfuse.testing.running import Plans, only
from opfuse.tuning.tolerance import difference

from ..ranks import RankError
from .sharded import Circumstances, Shard, ShardedLayer, Step

Answers = list[Any]


class Trial:
    """Some fusions, and the layer that they are tested with.

    Args:
        fusions: The fusions, which are in force together.
        layer: The layer.
    """

    def __init__(self, fusions: Sequence[Subject], layer: ShardedLayer) -> None:
        self.fusions, self.layer = tuple(fusions), layer
        self.names = {subject.name for subject in fusions}

    def given(self, **changes: Any) -> Circumstances:
        """Circumstances, the first row counts of the layer if no others are named."""
        return Circumstances(self.layer, **{"rows": self.layer.row_counts()[0], **changes})

    def run(self, given: Circumstances, worker: Callable[..., Any], *args: Any) -> Answers:
        """What each rank answered with the fusions; none raised, and all waited."""
        answers = _answers(given, self.fusions, worker, *args)
        for number, answer in enumerate(answers):
            if answer.error is not None:
                problem = f"{type(answer.error).__name__}: {answer.error}"
                raise Failure(f"rank {number} raises {problem}") from answer.error
            for call in answer.calls:
                if not call.waited:
                    raise Failure(f"rank {number} starts {call.kind} and does not wait for it")
                if call.changed:
                    what = f"changes what {call.kind} sends, before it waits for that"
                    raise Failure(f"rank {number} {what}")
        return answers

    def compare(self, given: Circumstances) -> None:
        """One step with the fusions is that of the whole layer, and no more is sent.

        Raises:
            Failure: It is not.
            Declined: The separate ops do not take it.
        """
        with saying(hint=f"\nwith {given}"):
            expected = separately(given)
            got = self.run(given, _step)
            compare_steps(given, [a.value for a in got], [a.value for a in expected], whole(given))
            _compare_traffic(given, got, expected)


def _answers(
    given: Circumstances, fusions: Sequence[Subject], worker: Callable[..., Any], *args: Any
) -> Answers:
    # torch built without torch.distributed has no process group to derive from
    from .simulated import simulate

    with only(*fusions):
        return simulate(given.size, worker, given, *args)


def _step(rank: Any, given: Circumstances) -> Step:
    return Shard(given, rank.number).step(rank.calls)


@functools.lru_cache(maxsize=4096)
def separately(given: Circumstances, worker: Callable[..., Any] = _step) -> Answers:
    """What each rank answers without a fusion.

    Raises:
        Declined: The separate ops do not take it.
    """
    answers = _answers(given, (), worker)
    for error in filter(None, [answer.error for answer in answers]):
        raise Declined(f"the separate ops raise {type(error).__name__}: {error}") from error
    return answers


@functools.lru_cache(maxsize=4096)
def whole(given: Circumstances) -> Step:
    """What the whole layer computes, in fp64."""
    with only():
        return Shard(given.with_(checkpoint=False, recipe=None), None, torch.float64).step()


def parts_of(
    given: Circumstances, name: str, tensors: Sequence[Tensor], shape: Sequence[int]
) -> list[Tensor]:
    """What ranks have of a gradient, as gradients of the whole layer, which has that shape."""
    layer = given.layer
    if name == "input":
        return [*tensors] if layer.takes == "whole" else [layer.joined(tensors, layer.takes)]
    dims = [d for d in range(len(shape)) if tensors[0].shape[d] != shape[d]]
    if dims:
        return [torch.cat([*tensors], dims[0])]
    if layer.sequence and name not in layer.summed:  # each has that of its rows
        return [torch.stack([*tensors]).double().sum(0)]
    return [*tensors]


def compare_steps(
    given: Circumstances, got: Sequence[Step], expected: Sequence[Step], truth: Step
) -> None:
    """Compare the steps of all ranks with those of the separate ops, and of the whole layer.

    Raises:
        Failure: They differ.
    """
    layer = given.layer
    outputs = [[step.output for step in steps] for steps in (got, expected)]
    is_whole = layer.gives == "whole"
    joined = [[*ys] if is_whole else [layer.joined(ys, layer.gives)] for ys in outputs]
    _compare(given, "the output", joined, truth.output, outputs)
    for name, true in truth.grads.items():
        grads: Any = [[step.grads.get(name) for step in steps] for steps in (got, expected)]
        what = f"the gradient of {name}"
        for rank, (mine, other) in enumerate(zip(*grads, strict=True)):
            if (mine is None) != (other is None):
                kind = "None" if mine is None else "a tensor"
                raise Failure(f"{what} is {kind} on rank {rank}, the separate ops' is not")
        if true is not None and grads[0][0] is not None:
            joined = [parts_of(given, name, of, true.shape) for of in grads]
            _compare(given, what, joined, true, grads)


def _compare(
    given: Circumstances,
    what: str,
    joined: Sequence[Sequence[Tensor]],
    truth: Tensor,
    parts: Sequence[Sequence[Tensor]],
) -> None:
    for rank, (mine, other) in enumerate(zip(*parts, strict=True)):
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            pair = f"{mine.dtype} {tuple(mine.shape)} instead of {other.dtype} {tuple(other.shape)}"
            raise Failure(f"{what} on rank {rank} is {pair}")
    dtype, (got, expected) = given.autocast or given.dtype, joined
    for number, (mine, other) in enumerate(zip(got, expected, strict=True)):
        where = f" on rank {number}" if len(got) > 1 else ""
        # a product in pieces rounds elsewhere
        rounded = None if dtype is torch.float64 else other
        if problem := difference(mine, truth, rounded=rounded, dtype=dtype, roundings=2):
            raise Failure(f"{what}{where} {problem}")
        if not torch.equal(mine, got[0]) and torch.equal(other, expected[0]):
            raise Failure(f"{what} is not the same on rank 0 and{where}, bit by bit")


def _compare_traffic(given: Circumstances, got: Answers, expected: Answers) -> None:
    """No more bytes than the separate ops send, and no reduction in fewer bits.

    Bytes that are not kept for the backward may be sent again.
    """
    for number, (mine, other) in enumerate(zip(got, expected, strict=True)):
        sent = [sum(call.sent for call in answer.calls) for answer in (mine, other)]
        if sent[0] > sent[1] + max(0, other.value.saved - mine.value.saved):
            raise Failure(f"rank {number} sends {sent[0]} bytes, with the separate ops {sent[1]}")
        for passes in PASSES:
            calls = [_calls_in(passes, answer) for answer in (mine, other)]
            bits = [[call.dtype.itemsize * 8 for call in of if call.reduces] for of in calls]
            if all(bits) and min(bits[0]) < min(bits[1]):
                what = f"reduces in {min(bits[0])} bits, with the separate ops in {min(bits[1])}"
                raise Failure(f"in its {passes} rank {number} {what}")


PASSES = ("forward", "backward")


def _calls_in(passes: str, answer: Any) -> Sequence[Any]:
    """The collectives of one pass of a step."""
    sent: int = answer.value.sent
    return answer.calls[:sent] if passes == "forward" else answer.calls[sent:]  # type: ignore[no-any-return]


# The checks


def plan(trial: Trial) -> None:
    """A fusion is taken on every rank, in every pass that it is for.

    Raises:
        Declined: None is, with the reason.
    """
    given = trial.given()
    expected = [answer.value for answer in separately(given)]
    with saying("its declaration is wrong, or the separate ops are: without a fusion "):
        compare_steps(given, expected, expected, whole(given))
    answers = trial.run(given, _plans)
    taken = [_taken(trial, answer.value) for answer in answers]
    if taken[0] != taken[-1] or len({*map(tuple, taken)}) > 1:
        raise Failure(f"ranks take different fusions: {' against '.join(map(str, taken))}")
    if not taken[0]:
        every = [refusal for found in answers[0].value for refusal in found.refused]
        refused = [refusal.reason for refusal in every if refusal.fusion in trial.names]
        raise Declined(refused[0] if refused else "no fusion has a pattern that is in its chain")


def _plans(rank: Any, given: Circumstances) -> Any:
    with Plans() as plans:
        Shard(given, rank.number).step()
    return plans.plans


def _taken(trial: Trial, plans: Sequence[Any]) -> list[str]:
    """The names of the fusions that are in the passes that they are for."""
    found = set()
    for each in plans:
        here = {way: {step.fusion for step in getattr(each, way)} for way in PASSES}
        here["joint"] = here["forward"] & here["backward"]
        found |= {s.name for s in trial.fusions if s.name in here[s.passes]}
    return sorted(found)


def values(trial: Trial) -> None:
    """Output and gradients are those of the whole layer, for any rows, dtype, mode and ranks."""
    for rows in trial.layer.row_counts():
        trial.compare(trial.given(rows=rows))
    trial.compare(trial.given(size=3))
    for dtype in (torch.float32, torch.bfloat16):
        trial.compare(trial.given(dtype=dtype))
    trial.compare(trial.given(dtype=torch.float32, autocast=torch.bfloat16))
    for size in (2, 3):  # a large bias is added once
        trial.compare(trial.given(size=size, bias=1000.0))
    for mode in ("no_grad", "inference"):
        trial.compare(trial.given(mode=mode))


def frozen(trial: Trial) -> None:
    """Whichever leaves need a gradient get the right one, and nothing is sent for the others."""
    names = ["input", *Shard(trial.given()).names]
    sets = [(name,) for name in names] + [tuple(n for n in names if n != kept) for kept in names]
    for chosen in dict.fromkeys([*sets, tuple(names), tuple(names[1:])]):
        trial.compare(trial.given(frozen=chosen))


def calls(trial: Trial) -> None:
    """Calls between a forward and its backward, of other shapes and numbers, disturb nothing."""
    given = trial.given()
    larger = tuple(2 * n + 1 for n in given.rows)
    each = [given, given.with_(rows=larger), given.with_(seed=7), given, given.with_(seed=9)]
    expected = [[a.value for a in separately(one)] for one in each]
    answers = trial.run(given, _interleaved, each)
    with saying("with other calls before its backward, ", f"\nwith {given}"):
        for number, one in enumerate(each):
            steps = [answer.value[number] for answer in answers]
            compare_steps(one, steps, expected[number], whole(one))


def _interleaved(rank: Any, given: Circumstances, each: Sequence[Circumstances]) -> list[Step]:
    first = Shard(given, rank.number)
    shards = [first]
    for one in each[1:]:
        shard = Shard(one, rank.number)
        shard.chain, shard.params = first.chain, first.params
        shards.append(shard)
    outputs = [shard.forward() for shard in shards]
    pairs = [*zip(shards, outputs, strict=True)]
    grads = [shard.backward(y) for shard, y in reversed(pairs)][::-1]
    return [Step(y.detach(), grad) for y, grad in zip(outputs, grads, strict=True)]


def memory(trial: Trial) -> None:
    """It keeps no more bytes than the separate ops, and is right under checkpoint."""
    given = trial.given()
    expected, got = separately(given), trial.run(given, _step)
    for rank, (mine, other) in enumerate(zip(got, expected, strict=True)):
        saved = mine.value.saved, other.value.saved
        if saved[0] > saved[1]:
            what = f"keeps {saved[0]} bytes for its backward, the separate ops {saved[1]}"
            raise Failure(f"rank {rank} {what}")
    trial.compare(trial.given(checkpoint=True))


class _Raises(ops.Identity):
    """Raises on the last rank, in its forward or its backward."""

    saved_names = ()
    grad_input = "same"

    def __init__(self, passes: str) -> None:
        super().__init__()
        self.passes = passes

    def _given(self, tensor: Tensor, passes: str) -> Tensor:
        if passes == self.passes and dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("raised by the conformance kit")
        return tensor

    def op_forward(self, ctx: Any, input_: Tensor, *unread: Any) -> Tensor:
        """Raise, or give the input."""
        return self._given(input_, "forward")

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        """Raise, or give the gradient."""
        return self._given(grad_output, "backward"), ()


def errors(trial: Trial) -> None:
    """If one rank raises, the others end with a RankError, and nothing is swallowed."""
    given = trial.given()
    for passes in PASSES:
        if not _calls_in(passes, separately(given)[0]):
            continue  # nobody waits for another one there
        answers = _answers(given, trial.fusions, _with_error, passes)
        for rank, answer in enumerate(answers):
            right: Any = (ArithmeticError, RankError) if rank == given.size - 1 else RankError
            if not isinstance(answer.error, right):
                got = "goes on" if answer.error is None else f"raises {answer.error!r}"
                who = f"where rank {given.size - 1} raises in its {passes}, rank {rank}"
                how = "start collectives with opfuse_distributed.ranks.start_collective"
                raise Failure(f"{who} {got} instead of raising a RankError; {how}")


def _with_error(rank: Any, given: Circumstances, passes: str) -> None:
    shard = Shard(given, rank.number)
    around = _Raises("")
    own = [*shard.chain]
    shard.chain = Sequential(*([around, *own] if passes == "forward" else [*own, around]))
    shard.backward(shard.forward())  # the collectives of a first call are compared before they run
    around.passes = passes
    y = shard.forward()
    if passes == "backward":
        shard.backward(y)


def casts(trial: Trial) -> None:
    """Under a recipe, codes are those of the cast of what is gathered.

    Raises:
        Declined: No fusion is used under a recipe.
    """
    ran, reasons = 0, []
    for recipe in (recipes.PerTensor(), recipes.PerBlock()):
        # one code is a sixteenth or more away from the next
        given = trial.given(dtype=torch.float32, recipe=recipe)
        try:
            expected = [answer.value for answer in separately(given)]
            answers = trial.run(given, _plans)
            if not _taken(trial, answers[0].value):
                raise Declined(f"no fusion is used under {recipe!r}")
        except Declined as reason:
            reasons.append(str(reason))
            continue
        got = [answer.value for answer in trial.run(given, _step)]
        ran += 1
        with saying(f"under {recipe!r} "):
            _compare_codes(got, expected)
    if not ran:
        raise Declined("; ".join(dict.fromkeys(reasons)))


def _compare_codes(got: Sequence[Step], expected: Sequence[Step]) -> None:
    how: Any = dict(dtype=torch.float32, roundings=4)
    for mine, other in zip(got, expected, strict=True):
        given = [{**of.grads, "the output": of.output} for of in (mine, other)]
        for what, one in given[0].items():
            two = given[1][what]
            if one is None or two is None:
                problem = None if one is two else "is None, or the separate ops' is"
            else:
                problem = difference(one, two.double(), **how)
            if problem:
                raise Failure(f"{what} {problem}: other codes?")


_EACH = plan, values, frozen, calls, memory, errors, casts
CHECKS: dict[str, Callable[[Trial], None]] = {check.__name__: check for check in _EACH}
"""The checks by name; the others rest on the first."""
