"""Norms that are modulated: each group of rows has a factor and a summand of its own.

A group is a run of rows, such as the tokens of one image. The kernels are those of norms, with a
weight and a bias for each group: a program has rows of one, so that the gradients of its factor and
summand stay in registers, and the partial sums of its programs are added up in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opfuse_triton import Config, Kernel, Target, cdiv, current_target, next_power_of_2
from opfuse_triton.sums import sum_strips

from ..calls import are_plain
from . import LAYER, MOST_ROWS, Norm
from .backward import PARTIAL, PROGRAMS, REGISTERS, norm_backward
from .forward import norm_forward
from .modulation import Forward, Gradients, Shape, groups_of, rows_in_groups


def _tile(features: int) -> tuple[dict[str, Any], int]:
    """A tile of 4096 numbers or one row, and its warps, with 16 numbers per thread.

    Half as many, if each has its own address.
    """
    block, share = max(4, next_power_of_2(features)), 8 if features % 16 else 16
    rows = max(1, 256 * share // block)
    return {"ROWS": rows, "BLOCK": block}, max(1, min(rows * block // share // 32, 16))


def _forward_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    constants, warps = _tile(facts["features"])
    return [Config(constants, each) for each in dict.fromkeys((warps, max(1, warps // 2)))]


def _backward_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    constants, warps = _tile(facts["features"])
    numbers = constants["ROWS"] * constants["BLOCK"]
    most = max(1, min(PROGRAMS, REGISTERS[target.backend] // (8 * 4 * numbers)))
    counts = dict.fromkeys((most, 1, 2, PROGRAMS))
    # from the cache, so that the factor takes no registers meanwhile
    constants["PREFETCH"] = False
    return [Config({**constants, "PROGRAMS": count}, warps) for count in counts]


FORWARD = Kernel(norm_forward, _forward_configs)
BACKWARD = Kernel(norm_backward, _backward_configs)


MOST_FEATURES = 8192
"""The widest row that the kernels take: the registers of one program hold it."""

LEAST_ROWS = 4
"""The fewest rows of a group: the factor and the summand are copied for the kernels, in fp32."""


def takes(x: Tensor, factor: Tensor, *others: Tensor | Shape | None) -> bool:
    """Whether the kernels take these tensors.

    Args:
        x: The input.
        factor: The factor.
        *others: The gradient of the output; the shapes of the summand, or of what is wanted.
    """
    tensors = [each for each in others if isinstance(each, Tensor)]
    if factor.dtype is not torch.float32 or not are_plain(x, *tensors):
        return False
    shapes = [each for each in others if each is not None and not isinstance(each, Tensor)]
    rows = rows_in_groups(x, groups_of(x.shape, factor.shape, *shapes))
    features = x.shape[-1]
    # if not every row begins at a multiple of 16 bytes, each number has its own address
    most = MOST_FEATURES if features % 16 == 0 else MOST_FEATURES // 4
    return rows >= LEAST_ROWS and features <= most and x.numel() <= features * MOST_ROWS


def forward(
    x: Tensor,
    factor: Tensor,
    summand: Tensor,
    eps: float,
    norm: Norm,
    dtype: torch.dtype,
    save: bool,
) -> Forward:
    """Launch :func:`opfuse_triton.norms.modulation.forward`; factor and summand are in fp32.

    Args:
        x: As there, contiguous and with elements.
        factor: As there.
        summand: See ``factor``.
        eps: See ``factor``.
        norm: See ``factor``.
        dtype: See ``factor``.
        save: See ``factor``.
    """
    mean = rstd = None
    if save:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        mean = torch.empty_like(rstd) if norm.kind == LAYER else None
    return _launch(x, factor, summand, mean, rstd, dtype, eps, KIND=norm.kind), mean, rstd


def again(
    x: Tensor, factor: Tensor, summand: Tensor, mean: Tensor | None, rstd: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launch :func:`opfuse_triton.norms.modulation.again`.

    Args:
        x: As for :func:`forward`, and all others as there.
        factor: See ``x``.
        summand: See ``x``.
        mean: See ``x``.
        rstd: See ``x``.
        dtype: See ``x``.
    """
    return _launch(x, factor, summand, mean, rstd, dtype, 0.0, KIND="", GIVEN=True)


def _launch(
    x: Tensor, factor: Tensor, summand: Tensor, mean: Tensor | None, rstd: Tensor | None,
    dtype: torch.dtype, eps: float, KIND: str, GIVEN: bool = False,
) -> Tensor:  # fmt: skip
    groups = groups_of(x.shape, factor.shape, summand.shape)
    rows, y = rows_in_groups(x, groups), torch.empty_like(x, dtype=dtype)
    vectors = [_for_groups(each, x.shape, groups) for each in (factor, summand)]
    count = math.prod(groups)
    FORWARD.launch(
        lambda config: (count * cdiv(rows, config["ROWS"]),),
        *(x, None, *vectors, y, None, mean, rstd, None),
        *(rows, x.shape[-1], count, eps, 0.0, 1.0),
        KIND=KIND,
        ZERO_CENTERED=False,
        GIVEN=GIVEN,
    )
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    factor: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    of_factor: Shape | None,
    of_summand: Shape | None,
    owns: bool = False,
) -> Gradients:
    """Launch :func:`opfuse_triton.norms.modulation.backward`; the factor is in fp32.

    Args:
        dy: As there, contiguous and with elements.
        x: See ``dy``.
        factor: As there.
        mean: See ``factor``.
        rstd: See ``factor``.
        norm: See ``factor``.
        of_factor: See ``factor``.
        of_summand: See ``factor``.
        owns: See ``factor``.
    """
    shape, wanted = x.shape, [of_factor, of_summand]
    sums = sum(each is not None for each in wanted)
    groups = groups_of(shape, factor.shape, *filter(None, wanted))
    rows, count, features = rows_in_groups(x, groups), math.prod(groups), shape[-1]
    target = current_target(x.device)
    dx = dy if owns and dy.dtype is x.dtype else torch.empty_like(x)
    config = BACKWARD.pick(target, {"features": features, "x_ptr": x.dtype, "dy_ptr": dy.dtype})
    tiles = cdiv(rows, config["ROWS"])
    if sums:  # their bytes are few beside the others
        moved = rows * (dy.dtype.itemsize + 2 * x.dtype.itemsize)
        most = max(1, int(PARTIAL * moved / (2 * 4 * sums)))
        tiles = min(tiles, most, max(1, cdiv(target.multiprocessors * config["PROGRAMS"], count)))
    partial = x.new_empty((sums, tiles, count, features), dtype=torch.float32)
    strips = iter(partial)
    to = [None if each is None else next(strips) for each in wanted]
    given = dy, x, _for_groups(factor, shape, groups), mean, rstd, None, dx, *to
    BACKWARD.launch(
        (count * tiles,), *given, rows, features, count,
        config=config, KIND=norm.kind, ZERO_CENTERED=False,
    )  # fmt: skip
    if sums:
        made = partial.new_empty((sums, count, features)) if tiles > 1 else partial[:, 0]
        if tiles > 1:
            sum_strips(partial.view(sums, tiles, -1).squeeze(0), *made)
        made = made.view(sums, *groups, *(1,) * (len(shape) - 1 - len(groups)), features)
        strips = iter(made)
    found = [None if each is None else next(strips).sum_to_size(each) for each in wanted]
    return dx, found[0], found[1]


def _for_groups(tensor: Tensor, shape: Shape, groups: Shape) -> Tensor:
    """A row for each group, of what is broadcast to a shape."""
    rows = *groups, *(1,) * (len(shape) - 1 - len(groups)), shape[-1]
    return tensor.expand(rows).reshape(-1, shape[-1]).contiguous()
