"""Checks of the declaration: the pattern, the condition, the plan."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ... import ops as built_in
from ...core.environment import Environment
from ...core.fusion import Fusion
from ...core.op import BasicOperation
from ...core.quantization import Recipe
from ..cases import Case, Op, is_cast
from ..failures import Declined, Failure, blamed, saying
from ..generate import DTYPES, Chains, environment, matched
from ..reference import compare_results
from ..running import Plans, backward, forward, fused, only, references
from ..scenarios import check, choices, plain


@check(lambda chains: chains.all)
def pattern(case: Case) -> None:
    """The fusion is used for every chain of its own pattern, or says why not."""
    with only(case.subject), Plans() as plans:
        try:
            forward(case)
        except Exception:
            if not plans.plans:
                raise
    plans.require(case)


def _asked(chains: Chains) -> Iterator[Case]:
    """The plain chains, and each with one flag of an op reversed, where the op takes that."""
    for case in chains.plain:
        yield case
        for number, op in enumerate(case.ops):
            for name, values in () if op.via or is_cast(op) else choices(op):
                for value in values[1:] if isinstance(values[0], bool) else ():
                    one = _with_op(case, number, op.with_(**{name: value}))
                    with contextlib.suppress(Exception):  # a flag may need more than a flag
                        matched(one)
                        yield one


@check(_asked)
def condition(case: Case) -> None:
    """``when`` gives True or a sentence, ``benefit`` a number, anywhere and from metadata alone.

    Asked again, they say the same, of any flags of the ops.
    """
    for device in ("meta", case.device):
        with torch.device(device):  # also what an op reads from another module
            ops = matched(case)
        for env in environments(case.device, case.recipe):
            hint = "; it must not read the data of parameters" * (device == "meta")
            answers = [_ask(case, ops, env, hint) for _ in range(2)]
            if answers[0] != answers[1]:
                raise Failure(f"its condition says {answers[0]!r}, then {answers[1]!r} in {env}")


def _ask(case: Case, ops: tuple[BasicOperation, ...], env: Environment, hint: str = "") -> Any:
    """The answer of a fusion's condition for a chain, and its benefit."""
    fusion = case.subject.fusion
    if not isinstance(fusion, Fusion):
        return None
    try:
        answer = True if fusion.when is None else fusion.when(ops, env)
        benefit = fusion.benefit_of(ops, env)
    except Exception as error:
        if env.device.type not in ("cpu", *["cuda"] * torch.cuda.is_available()):
            return None
        what = f"{type(error).__name__}: {error}"
        raise Failure(f"its condition raised {what} in {env}{hint}") from error
    if answer is not True and not (isinstance(answer, str) and " " in answer.strip()):
        raise Failure(f"its condition returned {answer!r} instead of True or a sentence in {env}")
    if isinstance(benefit, bool) or not isinstance(benefit, (int, float)):
        raise Failure(f"its benefit is {benefit!r} instead of a number in {env}")
    return answer, benefit


class ProbeRecipe(Recipe):
    """A recipe that no plugin knows."""


def environments(device: str, recipe: Recipe | None = None) -> Iterator[Environment]:
    """Environments that differ in everything a condition may look at."""
    gpus = [("cuda", capability) for capability in ((7, 5), (8, 0), (9, 0), (10, 0))]
    places: Any = [("cpu", None), ("mps", None), *gpus, ("meta", None)]
    for (name, capability), dtype in itertools.product(places, DTYPES):
        env = environment(device, dtype=dtype)
        env = env._replace(device=torch.device(name), capability=capability)
        kept = ProbeRecipe(backward_override="high_precision")
        yield from (env._replace(recipe=one) for one in (recipe, ProbeRecipe(), kept))
        yield env._replace(row_alignment=16, rows=1 << 16, features=4096)
        yield env._replace(rows=0, features=1)
        yield from (env._replace(training=False, requires_grad=needs) for needs in (False, True))
        yield from (env._replace(deterministic=True), env._replace(compiling=True))


@check(plain)
def neighbours(case: Case) -> None:
    """With one op derived, missing or added, a chain still gives what its separate ops give."""
    for number, op in enumerate(case.ops):
        for what, cls in () if is_cast(op) else _overriding(op.cls):
            what = f"its pattern with a subclass of {op.cls.__name__} that overrides {what}"
            hint = "; ask opfuse.has_same_math(op, cls) before you replace a class by name"
            with saying(hint=hint):
                _unlike(_with_op(case, number, op.with_(cls)), what)
        if len(case.ops) > 1:
            _unlike(_with_op(case, number), f"its pattern without {op.cls.__name__}")
        more = _with_op(case, number, Op(built_in.ConstantScale, 3.0), op)
        _unlike(more, f"its pattern with a ConstantScale before {op.cls.__name__}")


def _with_op(case: Case, number: int, *others: Op) -> Case:
    """The case with other ops in place of one op."""
    return case.with_(ops=(*case.ops[:number], *others, *case.ops[number + 1 :]))


def _overriding(cls: Any) -> Iterator[tuple[str, type]]:
    """Classes derived from that of an op, each with two methods that give twice as much."""
    pairs = [("fuser_forward", "fuser_backward")]
    if issubclass(cls, built_in.Activation):
        pairs += [("value", "derivative"), ("forward_value", "backward_value")]
        pairs += [("op_forward", "op_backward")]
    if issubclass(cls, built_in.GatedActivation):
        pairs += [("linear_value", "linear_derivative")]
    for names in pairs:
        title = f"Own{names[0].title().replace('_', '')}{cls.__name__}"
        yield " and ".join(names), type(title, (cls,), {name: _twice(cls, name) for name in names})


def _twice(cls: type, name: str) -> Any:
    """A method that gives twice as much as that of a class; of several results, the first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        result = getattr(cls, name)(self, *args, **kwargs)
        if result is None:  # a derivative that is 1 everywhere
            return torch.full_like(args[0], 2.0)
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = first if first is None else 2 * first
        return (first, *rest) if rest else first if out is None else out.copy_(first)

    return method


def _unlike(case: Case, what: str) -> None:
    try:
        expected = references(case)
    except Declined:  # widths that do not fit
        return
    with saying(f"for {what}: "), only(case.subject), blamed():
        compare_results(case, backward(case, forward(case)), *expected)


@check(lambda chains: chains.all)
def runs(case: Case) -> None:
    """The forward runs without an error."""
    fused(case, grads=False)
