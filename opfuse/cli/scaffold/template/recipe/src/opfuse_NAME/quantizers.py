"""The quantizer: it casts one tensor of an op."""

from __future__ import annotations

from typing import Any

import torch
from opfuse import Quantizer
from opfuse.core.quantization.formats import ScaledTensor
from torch import Tensor


class Int8Quantizer(Quantizer):
    """Codes from -127 to 127, and the scale that they are multiplied by."""

    def quantize(self, tensor: Tensor, usage: Any, out: Any = None) -> Any:
        """The copies that ``usage`` asks for, in the memory of ``out`` if it is there."""
        x = tensor.detach().float().contiguous()
        largest = x.abs().amax() if x.numel() else x.new_zeros(())
        # a tensor of zeros has the scale 1; NaN and infinities go into the scale, int8 has none
        scale = torch.where(largest == 0, 1.0, largest / 127).reshape(1)
        codes = (x / scale).nan_to_num().round().clamp(-127, 127).to(torch.int8)
        columns = codes.shape[-1] if codes.ndim else 1
        rowwise = codes if usage.rowwise else None
        columnwise = codes.reshape(-1, columns).t().contiguous() if usage.columnwise else None
        made = ScaledTensor(tensor.shape, tensor.dtype, self, rowwise, columnwise, scale)
        if out is None:
            return made
        for there, new in zip(out.tensors(), made.tensors(), strict=True):
            if there is not None:
                there.copy_(new)
        return out
