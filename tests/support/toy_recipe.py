"""A recipe as a plugin writes it: int8, one scale per tensor that follows from earlier steps."""

import dataclasses

import torch

import opfuse
from opfuse.core.quantization import nothing_recorded
from opfuse.core.quantization.formats import ScaledTensor


@dataclasses.dataclass(frozen=True)
class DelayedInt8(opfuse.Recipe):
    decay: float = 0.9

    def update(self, quantizers, group):
        amaxes = torch.cat([quantizer.amax for quantizer in quantizers])
        if group is not None:
            torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
        for quantizer, amax in zip(quantizers, amaxes, strict=True):
            if amax > 0:
                decayed = quantizer.scale * self.decay
                quantizer.scale.copy_(torch.maximum(decayed, amax / 127))
            quantizer.discard()


class Int8Quantizer(opfuse.Quantizer):
    state_names = ("scale", "amax")
    pending_names = ("amax",)

    def __init__(self, device):
        self.scale = torch.full((1,), 1 / 127, device=device)
        self.amax = nothing_recorded(device)

    def quantize(self, tensor, usage, out=None):
        if tensor.numel():
            torch.maximum(self.amax, tensor.abs().max().float(), out=self.amax)
        return self.with_scale(tensor, usage, self.scale.clone())

    def requantize(self, tensor, scales, usage):
        return self.with_scale(tensor, usage, scales.scale_inv)

    def with_scale(self, tensor, usage, scale):
        data = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
        copies = {"rowwise_data": data} if usage.rowwise else {}
        if usage.columnwise:
            copies["columnwise_data"] = data.flatten(0, -2).t().contiguous()
        return ScaledTensor(tensor.shape, tensor.dtype, self, scale_inv=scale, **copies)


@opfuse.hookimpl
def opfuse_recipes():
    return {"delayed-int8": DelayedInt8}


@opfuse.hookimpl
def opfuse_quantizer(recipe, role, env):
    return Int8Quantizer(env.device) if isinstance(recipe, DelayedInt8) else None
