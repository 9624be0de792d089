"""Casts that no fusion took, as those of weights: by the kernels where these run.

Importing this imports no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import kernels_run
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.ops.row_groups import RowGroups

from .conditions import DTYPES, PLAIN, of_kind
from .quantizers import DelayedQuantizer, MXQuantizer
from .twins import Into

MOST_GROUPS = 1024
"""Groups whose ends a program looks through at once."""


def cast(x: Tensor, into: Into) -> QuantizedTensor | None:
    """A cast by the kernels; None: they do not run there.

    Args:
        x: The values.
        into: The target of the cast.
    """
    if not by_kernels(x, into.quantizer):
        return None
    from . import library

    with torch.no_grad():
        return library.cast(x, into)


def cast_parts(parts: Sequence[Tensor], into: Into) -> QuantizedTensor | None:
    """Matrices as the rows of one, cast where they are; None: the kernels do not.

    Args:
        parts: The matrices.
        into: The target of the cast.
    """
    if not all([by_kernels(part, into.quantizer) for part in parts]):
        return None
    from . import library

    with torch.no_grad():
        return library.cast_parts(parts, into)


def cast_groups(
    x: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Any]
) -> RowGroups | None:
    """Groups of rows cast by one kernel; None: it does not run there.

    Args:
        x: The values.
        ends: The row at which each group ends.
        usage: The copies that are needed.
        quantizers: The quantizer of each group: alike, with a scale per tensor or MX blocks.
    """
    first = quantizers[0]
    if not by_kernels(x, first) or x.dtype not in DTYPES or not x.numel():
        return None
    if len(quantizers) > MOST_GROUPS:
        return None
    from .kernels import launch_groups

    with torch.no_grad():
        x, scales = x.detach().contiguous(), None
        if isinstance(first, MXQuantizer):
            return launch_groups.cast_mx(x, ends, usage, first)
        if isinstance(first, DelayedQuantizer):
            scales = torch.cat([quantizer.scale for quantizer in quantizers])
        made, amax = launch_groups.cast(x, ends, usage, first, scales)
        if scales is not None:
            torch._foreach_maximum_([each.amax for each in quantizers], list(amax.split(1)))
    return made


def by_kernels(x: Tensor, quantizer: Any) -> bool:
    """Whether the kernels cast a tensor: on a GPU with Triton, outside of transforms.

    Args:
        x: The values.
        quantizer: The quantizer.
    """
    if x.device.type == "cpu" or type(x) not in PLAIN or is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    kind = type(quantizer), getattr(quantizer, "dtype", None), quantizer.square
    return kernels_run(x.device) and not of_kind(*kind, bool(quantizer.four_over_six), True)
