"""Grouped products of FP8 codes by ``torch.nn.functional.scaled_grouped_mm``.

Nothing uses it before ``opfuse tune`` has measured it on your GPU. It takes a scale for each row
and for each column, which here are those of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse import Environment

CONFIGURATION = {"library": "torch"}
"""What ``opfuse tune`` measures beside the configurations of the kernels."""


def may_take(env: Environment) -> bool:
    """Whether it multiplies codes here: FP8 on Hopper and Blackwell, in bf16."""
    is_new = env.capability is not None and env.capability >= (9, 0) and not torch.version.hip
    has_it = hasattr(F, "scaled_grouped_mm")  # as of torch 2.12
    return is_new and has_it and env.recipe is not None and env.dtype is torch.bfloat16


def takes(rows: Tensor, codes: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether it takes these codes: E4M3, and sizes that 16 divides."""
    is_e4m3 = all(t.dtype is torch.float8_e4m3fn for t in (rows, *codes))
    sizes = [*codes[0].shape, rows.stride(0)]
    fits = rows.stride(1) == 1 and not any(size % 16 for size in sizes)
    return dtype is torch.bfloat16 and is_e4m3 and fits


def coded_product(
    rows: tuple[Tensor, Tensor], matrices: Tensor, inverses: Tensor, ends: Tensor, *, exact: bool
) -> Tensor:
    """``x_i @ matrix_i.T`` for each group, in bf16.

    Args:
        rows: The codes ``(rows, depth)``, and what those of each group are multiplied by: fp32.
        matrices: The codes ``(groups, features, depth)``.
        inverses: What those of each matrix are multiplied by.
        ends: The end of each group, int32.
        exact: Whether a Hopper GPU adds up in fp32; else it may do so in fewer bits.
    """
    (x, scales), (groups, features, _) = rows, matrices.shape
    places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    group = torch.bucketize(places, ends, right=True).clamp(max=groups - 1)
    of_columns = inverses[:, None].expand(groups, features).contiguous()
    kind = F.ScalingType.RowWise  # type: ignore[attr-defined]
    scaling = scales[group], kind, of_columns, kind
    return F.scaled_grouped_mm(
        x, matrices.mT, *scaling, offs=ends, output_dtype=torch.bfloat16, use_fast_accum=not exact
    )
