"""Casts that no fusion took, as those of weights: by the kernels where these run.

Importing this imports no Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from opfuse_triton import kernels_run
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from opfuse.core.quantization import QuantizedTensor

from .conditions import PLAIN, of_quantizer
from .twins import Into


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
    return kernels_run(x.device) and not of_quantizer(quantizer, alone=True)
