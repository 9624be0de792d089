"""The Triton kernels, their configurations, and the functions that launch them.

A program rotates some heads of some tokens, of the queries or of the keys, and finds the angles
once for all of these heads. Only this file imports Triton.
"""
# ruff: noqa: ANN202, C901  # kernels take what they are given; their branches are constants

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, Target, cdiv, current_target, next_power_of_2
from opfuse_triton.sums import sum_strips
from torch import Tensor

from .layouts import Angles, Heads, layout_of

PROGRAMS = 4
"""Programs of a backward on each multiprocessor, as many as registers hold on an H100."""


@triton.jit
def _pairs(x_ptr, at, some, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """The two numbers of each pair, at the offsets where heads begin."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(x_ptr + at + column, some & (column < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = some & (column < HALF)
        a = tl.load(x_ptr + at + column, inside, other=0.0)
        b = tl.load(x_ptr + at + HALF + column, inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    y_ptr, at, a, b, some, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    """The inverse of :func:`_pairs`."""
    a, b = a.to(y_ptr.dtype.element_ty), b.to(y_ptr.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK))
        tl.store(y_ptr + at + column, both, some & (column < 2 * HALF))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = some & (column < HALF)
        tl.store(y_ptr + at + column, a, inside)
        tl.store(y_ptr + at + HALF + column, b, inside)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, frequencies_ptr, token, some, inner, period, stride,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of both numbers of each pair: read, or of positions times frequencies."""
    row = token // inner % period
    pair = tl.arange(0, BLOCK)[None, :]
    if frequencies_ptr is None and WHOLE:
        cos, cos_b = _pairs(cos_ptr, row * stride, some, HALF, INTERLEAVED, BLOCK)
        sin, sin_b = _pairs(sin_ptr, row * stride, some, HALF, INTERLEAVED, BLOCK)
    elif frequencies_ptr is None:
        at, inside = row * stride + pair, some & (pair < HALF)
        cos = tl.load(cos_ptr + at, inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, inside, other=0.0).to(tl.float32)
        cos_b, sin_b = cos, sin
    else:
        position = tl.load(cos_ptr + row, some, other=0).to(tl.float32)
        angle = position * tl.load(frequencies_ptr + pair, pair < HALF, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        cos_b, sin_b = cos, sin
    return cos, sin, cos_b, sin_b


@triton.jit
def _scale(
    weight_ptr, ZERO_CENTERED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The factors of a norm: of both numbers of each pair, and of the features that stay."""
    begin = tl.zeros((1, 1), tl.int32)
    a, b = _pairs(weight_ptr, begin, begin == 0, HALF, INTERLEAVED, BLOCK)
    column = 2 * HALF + tl.arange(0, REST)[None, :]
    rest = tl.load(weight_ptr + column, column < DIM, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        a, b, rest = a + 1.0, b + 1.0, rest + 1.0
    return a, b, rest


@triton.jit
def _rotate(
    x_ptr, y_ptr, weight_ptr, rstd_ptr, token, some, group, heads, by_token, by_head, eps,
    cos, sin, cos_b, sin_b,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, MOVES: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Some heads of one tensor. The features that are not rotated are written if ``MOVES``."""
    if weight_ptr is not None:
        of_a, of_b, of_rest = _scale(
            weight_ptr, ZERO_CENTERED, DIM, HALF, INTERLEAVED, BLOCK, REST
        )  # fmt: skip
    column = 2 * HALF + tl.arange(0, REST)[None, :]
    for i in range(HEADS):
        head = group * HEADS + i + tl.zeros((1, 1), tl.int32)
        inside = some & (head < heads)
        at, to = token * by_token + head * by_head, (token * heads + head) * DIM
        a, b = _pairs(x_ptr, at, inside, HALF, INTERLEAVED, BLOCK)
        if MOVES:
            rest = tl.load(x_ptr + at + column, inside & (column < DIM), other=0.0).to(tl.float32)
        if NORM is not None:
            square = tl.sum(a * a + b * b, 1, keep_dims=True)
            if MOVES:
                square += tl.sum(rest * rest, 1, keep_dims=True)
            if NORM == "rms":
                square = square / DIM
            rstd = tl.rsqrt(square + eps)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + token * heads + head, rstd, inside)
            a, b = a * rstd, b * rstd
            if weight_ptr is not None:
                a, b = a * of_a, b * of_b
            a = a.to(y_ptr.dtype.element_ty).to(tl.float32)
            b = b.to(y_ptr.dtype.element_ty).to(tl.float32)
            if MOVES:
                rest *= rstd
                if weight_ptr is not None:
                    rest *= of_rest
        turned = a * cos - b * sin
        _store_pairs(y_ptr, to, turned, b * cos_b + a * sin_b, inside, HALF, INTERLEAVED, BLOCK)
        if MOVES:
            tl.store(
                y_ptr + to + column, rest.to(y_ptr.dtype.element_ty), inside & (column < DIM)
            )  # fmt: skip


@triton.jit
def rope_kernel(
    q_ptr, q_out_ptr, q_weight_ptr, q_rstd_ptr, q_heads, q_by_token, q_by_head, q_eps,
    k_ptr, k_out_ptr, k_weight_ptr, k_rstd_ptr, k_heads, k_by_token, k_by_head, k_eps,
    cos_ptr, sin_ptr, frequencies_ptr, tokens, inner, period, stride,
    Q_NORM: tl.constexpr, Q_ZERO_CENTERED: tl.constexpr, Q_MOVES: tl.constexpr,
    K_NORM: tl.constexpr, K_ZERO_CENTERED: tl.constexpr, K_MOVES: tl.constexpr,
    BACK: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Queries and keys, normalized if there is a norm, and rotated; with ``BACK``, rotated back."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    some = token < tokens
    cos, sin, cos_b, sin_b = _angles(
        cos_ptr, sin_ptr, frequencies_ptr, token, some, inner, period, stride,
        HALF, INTERLEAVED, WHOLE, BLOCK,
    )  # fmt: skip
    if BACK:
        sin, sin_b = -sin_b, -sin
    group, groups = tl.program_id(1), tl.cdiv(q_heads, HEADS)
    if group < groups:
        _rotate(
            q_ptr, q_out_ptr, q_weight_ptr, q_rstd_ptr, token, some, group, q_heads,
            q_by_token, q_by_head, q_eps, cos, sin, cos_b, sin_b,
            Q_NORM, Q_ZERO_CENTERED, Q_MOVES, DIM, HALF, INTERLEAVED, HEADS, BLOCK, REST,
        )  # fmt: skip
    elif k_ptr is not None:
        _rotate(
            k_ptr, k_out_ptr, k_weight_ptr, k_rstd_ptr, token, some, group - groups, k_heads,
            k_by_token, k_by_head, k_eps, cos, sin, cos_b, sin_b,
            K_NORM, K_ZERO_CENTERED, K_MOVES, DIM, HALF, INTERLEAVED, HEADS, BLOCK, REST,
        )  # fmt: skip


@triton.jit
def _gradient(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, rstd_ptr, sums_ptr, group, heads, by_token, by_head,
    cos_ptr, sin_ptr, frequencies_ptr, tokens, inner, period, stride,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some heads of one tensor: rotated back, then through its norm if there is one."""
    if weight_ptr is not None:
        of_a, of_b, of_rest = _scale(
            weight_ptr, ZERO_CENTERED, DIM, HALF, INTERLEAVED, BLOCK, REST
        )  # fmt: skip
    total_a = tl.zeros((TOKENS, BLOCK), tl.float32)
    total_b = tl.zeros((TOKENS, BLOCK), tl.float32)
    total_rest = tl.zeros((TOKENS, REST), tl.float32)
    column = 2 * HALF + tl.arange(0, REST)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = (tile + tl.zeros((1, 1), tl.int64)) * TOKENS + tl.arange(0, TOKENS)[:, None]
        some = token < tokens
        cos, sin, cos_b, sin_b = _angles(
            cos_ptr, sin_ptr, frequencies_ptr, token, some, inner, period, stride,
            HALF, INTERLEAVED, WHOLE, BLOCK,
        )  # fmt: skip
        for i in tl.range(0, HEADS, num_stages=STAGES):
            head = group * HEADS + i + tl.zeros((1, 1), tl.int32)
            inside = some & (head < heads)
            to = (token * heads + head) * DIM
            dy_a, dy_b = _pairs(dy_ptr, to, inside, HALF, INTERLEAVED, BLOCK)
            a, b = dy_a * cos + dy_b * sin_b, dy_b * cos_b - dy_a * sin
            if 2 * HALF < DIM:
                there = inside & (column < DIM)
                rest = tl.load(dy_ptr + to + column, there, other=0.0).to(tl.float32)
            if NORM is not None:
                at = token * by_token + head * by_head
                # rounded, as between the separate ops
                a = a.to(dy_ptr.dtype.element_ty).to(tl.float32)
                b = b.to(dy_ptr.dtype.element_ty).to(tl.float32)
                rstd = tl.load(rstd_ptr + token * heads + head, inside, other=0.0)
                n_a, n_b = _pairs(x_ptr, at, inside, HALF, INTERLEAVED, BLOCK)
                n_a, n_b = n_a * rstd, n_b * rstd
                if sums_ptr is not None:
                    total_a += a * n_a
                    total_b += b * n_b
                if weight_ptr is not None:
                    a, b = a * of_a, b * of_b
                product = tl.sum(a * n_a + b * n_b, 1, keep_dims=True)
                if 2 * HALF < DIM:
                    n_rest = tl.load(x_ptr + at + column, there, other=0.0).to(tl.float32) * rstd
                    if sums_ptr is not None:
                        total_rest += rest * n_rest
                    if weight_ptr is not None:
                        rest *= of_rest
                    product += tl.sum(rest * n_rest, 1, keep_dims=True)
                if NORM == "rms":
                    product = product / DIM
                a, b = (a - n_a * product) * rstd, (b - n_b * product) * rstd
                if 2 * HALF < DIM:
                    rest = (rest - n_rest * product) * rstd
            if dx_ptr is not None:
                _store_pairs(dx_ptr, to, a, b, inside, HALF, INTERLEAVED, BLOCK)
                if 2 * HALF < DIM:
                    tl.store(dx_ptr + to + column, rest.to(dx_ptr.dtype.element_ty), there)
    if sums_ptr is not None:
        groups = tl.cdiv(heads, HEADS)
        strip = (tl.program_id(0).to(tl.int64) * groups + group) * DIM + tl.zeros((1, 1), tl.int64)
        one = strip >= 0
        of_a = tl.sum(total_a, 0, keep_dims=True)
        of_b = tl.sum(total_b, 0, keep_dims=True)
        _store_pairs(sums_ptr, strip, of_a, of_b, one, HALF, INTERLEAVED, BLOCK)
        if 2 * HALF < DIM:
            tl.store(sums_ptr + strip + column, tl.sum(total_rest, 0, keep_dims=True), column < DIM)


@triton.jit
def rope_norm_backward_kernel(
    q_dy_ptr, q_ptr, q_dx_ptr, q_weight_ptr, q_rstd_ptr, q_sums_ptr, q_heads, q_by_token, q_by_head,
    k_dy_ptr, k_ptr, k_dx_ptr, k_weight_ptr, k_rstd_ptr, k_sums_ptr, k_heads, k_by_token, k_by_head,
    cos_ptr, sin_ptr, frequencies_ptr, tokens, inner, period, stride,
    Q_NORM: tl.constexpr, Q_ZERO_CENTERED: tl.constexpr,
    K_NORM: tl.constexpr, K_ZERO_CENTERED: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys before their norms, and sums for those of the weights.

    A program takes every so many tiles of tokens, and leaves one sum for all of them.
    """
    group, groups = tl.program_id(1), tl.cdiv(q_heads, HEADS)
    if group < groups:
        _gradient(
            q_dy_ptr, q_ptr, q_dx_ptr, q_weight_ptr, q_rstd_ptr, q_sums_ptr, group,
            q_heads, q_by_token, q_by_head,
            cos_ptr, sin_ptr, frequencies_ptr, tokens, inner, period, stride,
            Q_NORM, Q_ZERO_CENTERED, DIM, HALF, INTERLEAVED, WHOLE,
            TOKENS, HEADS, BLOCK, REST, STAGES,
        )  # fmt: skip
    elif k_dy_ptr is not None:
        _gradient(
            k_dy_ptr, k_ptr, k_dx_ptr, k_weight_ptr, k_rstd_ptr, k_sums_ptr, group - groups,
            k_heads, k_by_token, k_by_head,
            cos_ptr, sin_ptr, frequencies_ptr, tokens, inner, period, stride,
            K_NORM, K_ZERO_CENTERED, DIM, HALF, INTERLEAVED, WHOLE,
            TOKENS, HEADS, BLOCK, REST, STAGES,
        )  # fmt: skip


def _tiles(target: Target, facts: Mapping[str, Any]) -> list[tuple[dict[str, int], int]]:
    """Tiles with as many heads as still leave programs for every place, and their warps."""
    block = next_power_of_2(facts["HALF"])
    rest = next_power_of_2(max(facts["DIM"] - 2 * facts["HALF"], 1))
    heads = facts["q_heads"] + facts["k_heads"]
    found = []
    for pairs, warps in ((1024, 4), (2048, 4), (512, 2)):
        tokens = max(1, min(pairs // block, next_power_of_2(facts["tokens"])))
        spare = cdiv(facts["tokens"], tokens) * heads // (8 * target.multiprocessors)
        together = 1 << (max(1, min(8, spare)).bit_length() - 1)
        tile = {"TOKENS": tokens, "HEADS": together, "BLOCK": block, "REST": rest}
        found.append((tile, _warps(target, warps)))
    return found


def _warps(target: Target, warps: int) -> int:
    """As many warps of 32 threads; of 64 there are half as many."""
    return warps // 2 if target.backend == "hip" else warps


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    return list(dict.fromkeys([Config(*given) for given in _tiles(target, facts)]))


def _backward_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """One that prefetches nothing; with 3 stages a head is loaded while another is computed."""
    (tile, warps), *_ = _tiles(target, facts)
    return [Config({**tile, "STAGES": stages}, warps) for stages in (1, 3)]


ROPE = Kernel(rope_kernel, _configs)
NORM_BACKWARD = Kernel(rope_norm_backward_kernel, _backward_configs)


_layout_of: Any = layout_of  # of tensors that `takes` has looked at, which have one


def _constants(given: Sequence[Heads], angles: Angles) -> dict[str, Any]:
    first, last = given[0], given[-1]
    return {
        "Q_NORM": first.norm,
        "Q_ZERO_CENTERED": first.zero_centered,
        "K_NORM": last.norm if len(given) > 1 else None,
        "K_ZERO_CENTERED": last.zero_centered,
        "DIM": first.x.shape[-1],
        "HALF": angles.half,
        "INTERLEAVED": angles.interleaved,
        "WHOLE": angles.whole,
    }


def forward(
    given: Sequence[Heads],
    angles: Angles,
    back: bool = False,
    config: Config | Mapping[str, Any] | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """Launch :func:`opfuse_rope.twins.forward`.

    Args:
        given: As there, of tensors that :func:`opfuse_rope.layouts.takes`.
        angles: As there.
        back: As there.
        config: The configuration; None: the first.
    """
    made: list[tuple[Tensor, Tensor | None]] = []
    args: list[Any] = []
    moves, heads, tokens = [], [], 0
    partly = 2 * angles.half < given[0].x.shape[-1]
    for one in given:
        tokens, count, *strides = _layout_of(one.x.shape, one.x.stride())
        heads.append(count)
        y = one.x.new_empty(one.x.shape, dtype=one.dtype) if one.into is None else one.into
        rstd = None
        if one.saves:
            rstd = one.x.new_empty((*one.x.shape[:-1], 1), dtype=torch.float32)
        args += [one.x, y, one.weight, rstd, count, *strides, one.eps]
        made.append((y, rstd))
        moves.append(partly and y is not one.x)
    if len(given) == 1:
        args += [None, None, None, None, 0, 0, 0, 0.0]

    def grid(config: Config) -> tuple[int, int]:
        tile, groups = config.constants, 0
        for count in heads:
            groups += -(-count // tile["HEADS"])
        return -(-tokens // tile["TOKENS"]), groups

    stride = angles.cos.stride(0) if angles.frequencies is None else 1
    ROPE.launch(
        grid,
        *(*args, *angles[:3], tokens, *angles[3:5], stride),
        config=config,
        BACK=back,
        Q_MOVES=moves[0],
        K_MOVES=moves[-1],
        **_constants(given, angles),
    )
    return made


def norm_backward(
    given: Sequence[Heads],
    grads: Sequence[Tensor],
    angles: Angles,
    config: Config | Mapping[str, Any] | None = None,
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Launch :func:`opfuse_rope.twins.norm_backward`.

    Args:
        given: As there, of tensors that :func:`opfuse_rope.layouts.takes`.
        grads: As there, contiguous.
        angles: As there.
        config: The configuration; None: the first.
    """
    constants, layouts = (
        _constants(given, angles),
        [_layout_of(one.x.shape, one.x.stride()) for one in given],
    )
    tokens, heads = layouts[0].tokens, [layout.heads for layout in layouts]
    target = current_target(given[0].x.device)
    if config is None:
        facts = {**constants, "q_heads": heads[0], "k_heads": sum(heads[1:]), "tokens": tokens}
        config = NORM_BACKWARD.pick(target, facts)
    elif not isinstance(config, Config):
        config = Config(**config)
    groups = [cdiv(count, config["HEADS"]) for count in heads]
    programs = cdiv(PROGRAMS * target.multiprocessors, sum(groups))
    programs = min(programs, cdiv(tokens, config["TOKENS"]))
    made: list[tuple[Tensor | None, Tensor | None]] = []
    args: list[Any] = []
    for one, dy, count, (_, *layout) in zip(given, grads, groups, layouts, strict=True):
        dx = sums = None
        if one.needs[0]:
            dx = one.x.new_empty(one.x.shape) if one.into is None else one.into
        if one.needs[1]:
            shape = programs * count, one.x.shape[-1]
            sums = one.x.new_empty(shape, dtype=torch.float32)
        args += [dy, one.x, dx, one.weight, one.rstd, sums, *layout]
        made.append((dx, sums))
    if len(given) == 1:
        args += [None, None, None, None, None, None, 0, 0, 0]
    stride = angles.cos.stride(0) if angles.frequencies is None else 1
    NORM_BACKWARD.launch(
        (programs, sum(groups)),
        *(*args, *angles[:3], tokens, *angles[3:5], stride),
        config=config,
        **constants,
    )
    return [
        (dx, None if sums is None else sum_strips(sums, _like_weight(one)))
        for (dx, sums), one in zip(made, given, strict=True)
    ]


def _like_weight(one: Heads) -> Tensor:
    """Memory for the gradient of a weight, which is not there if only its gradient is wanted."""
    dtype = torch.float32 if one.weight is None else one.weight.dtype
    return one.x.new_empty(one.x.shape[-1:], dtype=dtype)
