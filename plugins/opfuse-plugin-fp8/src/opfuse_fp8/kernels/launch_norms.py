"""Launches the kernels of norms that end with a cast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opfuse_triton import Config, Kernel, Target, cdiv, current_target, next_power_of_2

from opfuse.core.quantization import BOTH, COLUMNWISE
from opfuse.ops import LayerNorm

from ..conditions import has_blocks, takes
from ..twins import Into, Normalized
from . import norms, tiles
from .launch import Casting, format_of


def _row_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """A tile of whole rows, with about 16 numbers per thread."""
    block = max(tiles.LEAST, next_power_of_2(facts["features"]))
    rows = max(1, min(4096 // block, 32))
    threads = 64 if target.backend == "hip" else 32
    warps = max(1, min(rows * block // 16 // threads, 16))
    return [Config({"BLOCK_ROWS": rows, "BLOCK_COLUMNS": block}, warps)]


ROWS = Kernel(norms.norm_rows, _row_configs)
TILES = Kernel(norms.norm_tiles, tiles.configs)
TRANSPOSE = Kernel(
    norms.transpose_codes, [Config({"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 64}, 4)], tiles.grid
)


def takes_two_reads(into: Into) -> bool:
    """Whether tiles read the input once more than the statistics do."""
    form = format_of(into.quantizer)
    return form == "square" or (form in ("block", "mx", "swizzled mx") and into.usage.columnwise)


def norm(
    op: Any, tensors: Sequence[Any], dtype: torch.dtype | None, keep: bool, save: bool, into: Into
) -> Normalized | None:
    """A norm of the last dimension, quantized; None: no kernel takes the tensors.

    A sum is rounded to its dtype before it is normalized.

    Args:
        op: The norm.
        tensors: The input ``(..., features)``; what is added to it, in the same shape; the weight
            ``(features,)``; the bias of a LayerNorm, likewise. All but the first may be None.
        dtype: What the output is rounded to before it is cast; None: the dtype of what is
            normalized.
        keep: Whether the sum is wanted.
        save: Whether the statistics are.
        into: What the output is cast into, by a quantizer that the kernels know.
    """
    x, extra, weight, bias = tensors
    if not (takes(*tensors) and has_blocks(into, x.shape)):
        return None
    summed = x.dtype if extra is None else torch.promote_types(x.dtype, extra.dtype)
    twice, usage = takes_two_reads(into), into.usage
    transposes = format_of(into.quantizer) == "tensor" and usage.columnwise
    into = into._replace(usage=BOTH) if transposes else into
    casting = Casting(into, x.shape, dtype or summed, x.device)
    total = torch.empty_like(x, dtype=summed) if extra is not None and (keep or twice) else None
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if save or twice else None
    mean = torch.empty_like(rstd) if rstd is not None and isinstance(op, LayerNorm) else None
    _launch_rows(op, (*tensors, total, mean, rstd), casting, twice, transposes)
    if twice:
        _launch_tiles(op, (x if total is None else total, weight, bias, mean, rstd), casting)
    made = casting.made()
    if transposes and not usage.rowwise:
        made = made.only(COLUMNWISE)
    statistics = (mean, rstd) if save else (None, None)
    return Normalized(made, total if keep else None, *statistics, casting.values)


def _launch_rows(
    op: Any, tensors: tuple[Any, ...], casting: Casting, twice: bool, transposes: bool
) -> None:
    x, rows, features = tensors[0], casting.rows, casting.columns
    config = ROWS.pick(current_target(x.device), {"features": features})
    count = cdiv(rows, config["BLOCK_ROWS"])
    pointers: Any = (None,) * 7
    constants = {**casting.constants, "FORMAT": "statistics"}
    if not twice:
        pointers, constants = casting.pointers, casting.constants
    row, column = pointers[1], pointers[3]
    ROWS.launch(
        (count,),
        *(*tensors, *pointers[:3], None, *pointers[4:], rows, features, op.eps),
        config=config,
        KIND="layer" if isinstance(op, LayerNorm) else "rms",
        ZERO_CENTERED=op.zero_centered_gamma,
        **constants,
    )
    if transposes:
        TRANSPOSE.launch(None, row, column, rows, features)


def _launch_tiles(op: Any, tensors: tuple[Any, ...], casting: Casting) -> None:
    rows, features = casting.rows, casting.columns
    for usage in casting.passes(tensors[0]):
        facts = {**casting.facts(usage), "features": features}
        config = TILES.pick(current_target(tensors[0].device), facts)
        _, *pointers, _, _ = casting.pointers_of(usage)
        TILES.launch(
            tiles.grid(rows, features, config),
            *(*tensors, *pointers, rows, features),
            config=config,
            ZERO_CENTERED=op.zero_centered_gamma,
            **casting.constants,
        )
