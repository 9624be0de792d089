"""Linear layers: ``BasicLinear``, ``Bias``, and ``Linear`` that puts them behind one name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..op import BasicOperation, FusedOperation, OperationContext
from ..quantization import Quantizer, QuantizerRole, dequantize

class BasicLinear(BasicOperation):
    saved_names = ("input", "weight")
    grad_input = "fresh"
    differentiable = True
    params_in_compute_dtype = True

    def __init__(self, in_features, out_features, *, device=None, dtype=None):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        (weight,) = ctx.params
        dtype = ctx.dtype
        x = input_ if input_.dtype is dtype else input_.to(dtype)
        w = weight if weight.dtype is dtype else weight.to(dtype)
        if ctx.requires_grad:
            ctx.save_for_backward(x if ctx.param_requires_grad[0] else None, w if ctx.input_requires_grad else None)
            ctx.weight_dtype = weight.dtype
        return F.linear(x, w)

    def op_backward(self, ctx, grad_output):
        x, w = ctx.saved_tensors
        dx = (grad_output.mm(w) if grad_output.ndim==2 else grad_output@w) if w is not None else None
        dw = None
        if x is not None:
            if x.ndim != 2:
                x=x.reshape(-1, x.shape[-1]); grad_output=grad_output.reshape(-1, grad_output.shape[-1])
            dw = grad_output.t().mm(x)
        return dx, (dw,)


class Bias(BasicOperation):
    grad_input = "same"
    differentiable = True
    saved_names = ()
    def __init__(self, size, *, device=None, dtype=None):
        super().__init__()
        self.in_features = self.out_features = size
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ + ctx.params[0]

    def op_backward(self, ctx, grad_output):
        return grad_output, (grad_output.sum(0) if grad_output.ndim==2 else grad_output.sum(tuple(range(grad_output.ndim-1))) if ctx.param_requires_grad[0] else None,)


class GELU(BasicOperation):
    feature_ratio=1
    saved_names=("input",)
    differentiable=True
    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        if ctx.requires_grad: ctx.save_for_backward(input_)
        return F.gelu(input_, approximate="tanh")
    def op_backward(self, ctx, dy):
        return torch.ops.aten.gelu_backward.default(dy, ctx.saved_tensors[0], approximate="tanh"), ()


class Identity(BasicOperation):
    saved_names=()
    grad_input = "same"
    differentiable = True
    feature_ratio=1
    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_
    def op_backward(self, ctx, dy):
        return dy, ()


class Linear(FusedOperation):
    def __init__(self, in_features, out_features, *, bias=True, device=None, dtype=None):
        linear = BasicLinear(in_features, out_features, device=device, dtype=dtype)
        ops = [linear]
        if bias: ops.append(Bias(out_features, device=device, dtype=dtype))
        super().__init__(ops)
        for op in ops: op.lend_parameters(self)
