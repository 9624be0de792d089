"""Small fusions for the core's own tests, so that they need no plugin: forward, backward and joint."""

from __future__ import annotations

import contextlib

from fakes import registered
from right import Forward, flat
from torch.nn import functional as F

import opfuse
from opfuse.ops import GELU, Activation, BasicLinear, Bias


class LinearBias(Forward):
    """Forward of linear + bias; leaves what BasicLinear leaves."""


class ActivationBias(opfuse.FusedOperation):
    """Backward of bias + activation, in place where the chain owns the gradient."""

    grad_input = "fresh"

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        bias, act = basic_op_ctxs
        dx, _ = self.basic_ops[1].op_backward(act, grad_output)
        db = flat(dx).sum(0) if bias.param_requires_grad[0] else None
        return dx, [(db,), ()], [(), ()]


class JointLinearGelu(opfuse.FusedOperation):
    """Both passes of linear + bias + GELU; keeps everything on its first context, in an order of its own."""

    grad_input = "fresh"

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        ctx = basic_op_ctxs[0]
        dtype = ctx.dtype or input_.dtype
        x, weight, bias = (t.to(dtype) for t in (input_, *ctx.params, *basic_op_ctxs[1].params))
        hidden = F.linear(x, weight, bias)
        basic_op_ctxs[2].save_for_backward(weight, hidden, x)
        return F.gelu(hidden, approximate="tanh"), [(), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        weight, hidden, x = basic_op_ctxs[2].saved_tensors
        dh = self.basic_ops[2].backward_value(grad_output, hidden)
        rows = flat(dh)
        grads = [(rows.t().mm(flat(x)),), (rows.sum(0),), ()]
        return dh @ weight, grads, [(), (), ()]


FORWARD = opfuse.Fusion((BasicLinear, Bias), LinearBias)
BACKWARD = opfuse.Fusion((Bias, opfuse.Subclasses(Activation)), ActivationBias)
JOINT = opfuse.Fusion((BasicLinear, Bias, GELU), JointLinearGelu, priority=1)
VARIANTS = {
    "unfused": (),
    "fused": (("forward", FORWARD), ("backward", BACKWARD)),
    "joint": (("joint", JOINT),),
}


@contextlib.contextmanager
def fusions(variant):
    """Exactly the fusions of a variant: no plugin, and these registered in code."""
    with contextlib.ExitStack() as stack:
        for pair in VARIANTS[variant]:
            stack.enter_context(registered(*pair))
        stack.enter_context(opfuse.plugins.using(""))
        yield
