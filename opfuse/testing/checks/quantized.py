"""Checks of casts, of recomputed outputs, and of a chain under a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.fusion import Fusion
from ...core.quantization import QuantizedTensor
from ...ops import Cast
from ..cases import Case, is_cast
from ..failures import Declined, Failure, saying
from ..generate import Chains, matched
from ..recipes import variants
from ..reference import compare_codes, compare_results
from ..running import RunResult, backward, both, forward, fused, one_by_one, separate, watched
from ..scenarios import MANY_ROWS, check, covered, followed
from ..tensors import same_bits
from .leavings import aliases


def _casts_its_result(case: Case) -> bool:
    return is_cast(case.ops[0 if case.subject.passes == "backward" else -1])


def _casting(chains: Chains) -> Iterator[Case]:
    """Chains in which the fusion casts its result, in every dtype, and with every usage."""
    yield from filter(_casts_its_result, chains.all)
    for case in filter(_casts_its_result, chains.plain):
        yield case.with_(rows=MANY_ROWS, dtype=torch.bfloat16)
        yield from (one for one in covered(case) if not one.checkpointed)


@check(_casting)
def codes(case: Case) -> None:
    """Where it casts its result: the codes and scales of the separate ops, for each usage."""
    given: tuple[list[Any], list[Any]] = [], []
    for one, found in zip((case, one_by_one(case)), given, strict=True):
        ends = [_at_end(found, place) for place in (-1, 0)]
        with watched(*ends):
            fused(one, grads=case.subject.passes != "forward")
    for (cast, made), (_, expected) in zip(*given, strict=True):
        if not isinstance(made, QuantizedTensor):
            hint = "give ctx.quantizer(y, ctx.usage) of the cast's context"
            raise Failure(f"it gives a plain tensor where its pattern has a Cast: {hint}")
        if not made.usage.covers(cast.usage):
            raise Failure(f"what it casts is good for {made.usage}, {cast.usage} is asked for")
        state = {name: getattr(cast.quantizer, name) for name in cast.quantizer.state_names}
        for name, tensor in zip(made.tensor_names, made.tensors(), strict=True):
            for other in aliases(tensor, state):
                what = f"shares memory with the state {other!r} of the quantizer"
                raise Failure(f"the {name} of what it casts {what}, which changes: copy it")
        compare_codes(case, "what it casts", made, expected)


def _at_end(found: list[Any], place: int) -> Any:
    def look(op: Any, ctxs: Any, x: Any, result: Any) -> None:
        if isinstance(op.basic_ops[place], Cast):
            found.append((op.basic_ops[place], result[0]))

    return look


def _followed(chains: Chains) -> Iterator[Case]:
    for case in chains.plain:
        case = followed(case)
        yield case
        yield case.with_(rows=(2, 5), dtype=torch.bfloat16)
        yield case.with_(autocast=torch.bfloat16)
        yield case.with_(rows=MANY_ROWS)
    yield from chains.quantized


@check(_followed, passes=("forward", "joint"))
def recompute(case: Case) -> None:
    """If a fused op computes its output again for the next op, gradients are and stay right."""
    fusion = case.subject.fusion
    if not isinstance(fusion, Fusion) or not fusion.build(matched(case)).recomputes:
        raise Declined("it does not compute its output again")
    if case.recipe is None:
        _lets_go_only_if_asked(case.with_(after=()))
    truth = separate(case, torch.float64)
    made: list[list[Tensor | None]] = []

    def keep(op: Any, ctxs: Any, x: Any, result: Any) -> None:
        made.append(_parts(result[0]))

    def again(op: Any, ctxs: Any, x: Any, result: Any) -> None:
        for one, first in zip(_parts(result), made[-1], strict=True):
            if case.recipe and one is not None and first is not None and not same_bits(one, first):
                what = "what it computes again and casts is not bit by bit what it was"
                raise Failure(f"{what}: use ctx.quantizer.requantize and the scales that are saved")

    def step() -> tuple[list[RunResult], dict[str, Tensor]]:
        result, results = forward(case), []
        for retain in (True, False):
            results.append(dataclasses.replace(backward(case, result, retain_graph=retain)))
        return results, _states(result.built.chain)

    with watched(keep, None, again):
        (results, mine), (others, other) = both(case, step)
    for got, expected in zip(results, others, strict=True):  # a scale may have moved between them
        compare_results(case, got, expected, expected if case.recipe else truth)
    _compare_states(mine, other, "after a backward that computes again")


def _lets_go_only_if_asked(case: Case) -> None:
    def look(op: Any, ctxs: Any, x: Any, result: Any) -> None:
        if ctxs[0].recomputable_output is not None:
            raise Failure("it leaves recomputable_output where no later op would do without")

    with watched(look):
        fused(case, grads=False)


def _parts(tensor: Any) -> list[Tensor | None]:
    parts = tensor.tensors() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return [part if part is None else part.detach().clone() for part in parts]


def _under_recipes(chains: Chains) -> Iterator[Case]:
    for case in chains.quantized:
        assert case.recipe is not None
        yield from (case.with_(recipe=recipe) for recipe in variants(case.recipe))


@check(_under_recipes)
def recipe(case: Case) -> None:
    """Under a recipe, three steps give what the separate ops give, and the same state."""

    def step() -> tuple[list[RunResult], dict[str, Tensor]]:
        built, results = case.build(), []
        for _ in range(3):
            results.append(backward(case, forward(case, built=built)))
            built.leaves["input"].data.mul_(1.5)
        return results, _states(built.chain)

    (got, mine), (expected, other) = both(case, step)
    for number, (one, result) in enumerate(zip(got, expected, strict=True), 1):
        with saying(f"in step {number} under {case.recipe}, "):
            compare_results(case, one, result, result)
    _compare_states(mine, other, f"after three steps under {case.recipe}")


def _states(chain: nn.Module) -> dict[str, Tensor]:
    """The state of the quantizers of a chain."""
    found = {name: t for name, t in chain.state_dict().items() if ".quantizers." in name}
    return {name: t.clone() for name, t in found.items() if not name.endswith(".recipe")}


def _compare_states(got: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> None:
    for name, other in expected.items():
        if name not in got or not torch.allclose(got[name], other, rtol=1e-5, atol=0.0):
            values = " instead of ".join(str(v.tolist()) for v in (got[name], other))
            hint = "cast what the separate ops cast, once, and let nothing else be recorded"
            raise Failure(f"{when}, the quantizer state {name} is {values}: {hint}")
