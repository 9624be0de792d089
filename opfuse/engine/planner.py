"""From the key of a call to its program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..environment import Environment
from ..op import FusedOperation
from ..plugins import manager
from ..records import FusionSource
from ..settings import current
from .chain import Chain
from .checks import check_attributes, check_kwargs, check_tensors
from .choose import Choice, check_expansion, choose
from .program import Program, compile_program
from .step import Step

Key = tuple[Any, ...]
"""What a plan depends on: which tensors need gradients (None: grad mode is off), dtype, device,
autocast's dtype, who trains, generation of the plugins, changes of ops, deterministic algorithms,
compiling, names of keyword arguments, dtypes and devices of extra inputs, settings.
"""

_Excluded = frozenset[tuple[Any, int, int]]


def rows_of(facts: tuple[str, ...], input: Tensor | None) -> tuple[Any, ...]:
    """Facts about the number of rows, as :class:`Environment` names them."""
    alignment, floor = 1, None
    if input is not None:
        rows = input.shape[:-1].numel()
        alignment, floor = math.gcd(rows, 16), rows and 1 << rows.bit_length() - 1
    return tuple([alignment if fact == "row_alignment" else floor for fact in facts])


def make_program(chain: Chain, owner: nn.Module | None, key: Key, input: Tensor | None) -> Program:
    """Make the program for a key.

    Args:
        chain: The chain.
        owner: The op whose own call this is, if it is one.
        key: See :data:`Key`.
        input: The input, for its number of rows; None while tracing.
    """
    grads, dtype, device, autocast, *_, kwargs, extras, settings = key
    check_tensors(chain, owner, dtype, device, autocast, extras or ())
    check_kwargs(chain, kwargs)
    env = _environment(key, input)
    grads = grads or (False,) * (1 + len(chain.param_sources))
    given: dict[str, Any] = dict(
        first_backward=_first_backward(chain, env, grads), kwargs=kwargs or ((),) * len(chain.ops)
    )
    before = current.values
    current.values = settings  # ops are asked for quantizers; not in force while tracing
    try:
        for i, op in enumerate(chain.ops):
            op.reset_recipe_state(recipe=env.recipe)
            if env.requires_grad and not env.options.get("double_backward"):
                check_attributes(chain, i)
        sources = () if env.options.get("double_backward") else manager.sources(settings[1])
        manager.check_options(settings[0], settings[1])
        choice = _build(chain, env, sources, given)
        return compile_program(chain, choice, env, autocast, grads=grads, **given)
    finally:
        current.values = before


def _environment(key: Key, input: Tensor | None) -> Environment:
    """What a key says about where the plan is made for."""
    grads, dtype, device, autocast, training, *_, deterministic, compiling, _, _, settings = key
    return Environment(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=autocast or dtype,
        recipe=settings[2],
        training=any(training),
        requires_grad=grads is not None and any(grads),
        **{fact: rows_of((fact,), input)[0] for fact in ("row_alignment", "rows")},
        deterministic=deterministic,
        options=dict(settings[0]),
        compiling=compiling,
    )


def _build(
    chain: Chain, env: Environment, sources: Sequence[FusionSource], given: dict[str, Any]
) -> Choice:
    """Choose fusions and build their ops; choose again without those whose build fails."""
    excluded: _Excluded = frozenset()
    while True:
        choice = choose(chain.ops, sources, env, excluded=excluded, widths=chain.widths, **given)
        built: list[Step] = []
        for step in choice.taken:
            fused = _built(chain, step, env)
            if fused is None:
                excluded |= {(step.source, step.start, step.stop)}
                break
            built.append(dataclasses.replace(step, op=fused))
        else:
            return dataclasses.replace(choice, taken=tuple(built))


def _built(chain: Chain, step: Step, env: Environment) -> Any:
    """The fused op of a step; None, after a warning, if its author's code fails."""
    ops, fused = chain.ops[step.start : step.stop], step.op
    try:
        if fused is None:
            fused = step.source.fusion.build(ops)
        if isinstance(fused, FusedOperation):
            fused.planned(env)
    except Exception as error:
        what = "build" if fused is None else "planned"
        step.source.warn(f"its {what} raised {type(error).__name__}: {error}")
        return None
    check_expansion(step.source, fused, ops)
    return fused


def _first_backward(chain: Chain, env: Environment, grads: tuple[bool, ...]) -> int:
    """The first op that takes part in the backward; the number of ops if none does."""
    if not env.requires_grad:
        return len(chain.ops)
    if grads[0]:
        return 0
    count = 1 + len(chain.param_sources)
    params, extras = grads[1:count], grads[count:]
    wanting = {i for (i, _), wants in zip(chain.external_inputs, extras, strict=True) if wants}
    wanting |= {i for i, (first, last) in enumerate(chain.param_ranges) if any(params[first:last])}
    return min(wanting)
