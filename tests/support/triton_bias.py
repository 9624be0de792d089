"""A plugin with one Triton kernel, bias + activation, and its torch twin for devices without Triton."""

from __future__ import annotations

import os

import torch

import opfuse
from opfuse.ops import GELU, Bias, ReLU

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMS = {GELU: 0, ReLU: 1}


class BiasActivation(opfuse.FusedOperation):
    """The sum is kept for the backward, rounded, and the activation is that of the rounded sum."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias, ctx = basic_op_ctxs[0].params[0], basic_op_ctxs[1]
        if input_.is_cuda or INTERPRETED:
            from triton_bias_kernel import bias_activation  # imports triton
        else:
            bias_activation = twin
        hidden, y = bias_activation(
            input_, bias, ctx.dtype or input_.dtype, FORMS[type(self.basic_ops[1])]
        )
        self.basic_ops[1].operand(ctx, hidden)
        return y, [(), ()]


def twin(x, bias, dtype, form):
    """``(sum, result)``, as the kernel rounds them."""
    hidden = (x + bias).to(x.dtype).to(dtype)
    wide = hidden.float()
    y = torch.nn.functional.gelu(wide, approximate="tanh") if form == 0 else wide.relu()
    return hidden, y.to(dtype)


def has_a_kernel(ops, env):
    if env.dtype is torch.float64:
        return "the kernel computes in fp32, which is not enough for fp64"
    if getattr(ops[1], "approximate", "tanh") != "tanh":
        return "the kernel has the form of GELU by tanh"
    return True


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [
        opfuse.Fusion(
            (Bias, opfuse.OneOf(GELU, ReLU)), BiasActivation, has_a_kernel, name="bias+activation"
        )
    ]
