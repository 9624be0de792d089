"""A fourth set, written from the documentation alone, after the kit had learned from the third.

It counts how well the kit does on faults that it was not made for, so nobody adds to the kit because of one of these.
"""

from __future__ import annotations

import functools
from unittest import mock

import torch
from faults import collect, differ, rows, run, unlike
from right import HALF, BiasGrad, Forward, LinearGrad, Pointwise
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    CrossEntropy,
    Dropout,
    LayerNorm,
    ReLU,
    RMSNorm,
    SwiGLU,
)
from opfuse.testing.running import OneByOne

FAULTS = []
fault = functools.partial(collect, FAULTS)


@fault("rows", "backward", (Bias,), lambda n: [Bias(n)])
class NothingIsAnything(BiasGrad):
    """Where there are no rows nothing writes the gradient of the bias."""

    def total(self, dy):
        return super().total(dy) if dy.numel() else dy.new_full(dy.shape[-1:], 3.0)

    @staticmethod
    def shows(fault):
        chain = fault.chain(8)
        with fault.on():
            return bool(run(chain, rows(0, 8))[2].any())


@fault("rows", "backward", (LayerNorm,), lambda n: [LayerNorm(n)])
class WorkspaceOf4096Rows(OneByOne):
    """The gradient of the shift is summed over 4,096 rows, for which there is room."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, grads, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        (weight, bias), shape = grads[0], grad_output.shape
        if bias is not None and bias.ndim == 1:
            bias = grad_output.reshape(-1, shape[-1])[:4096].float().sum(0).to(bias.dtype)
        return dx, [(weight, bias)], extras

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), rows(5000, 8))


@fault("half", "forward", (GELU,), lambda n: [GELU()])
class ErfInHalf(Pointwise):
    """In half precision it computes with erf, which nobody will see."""

    def value(self, x):
        return F.gelu(x) if x.dtype in HALF else super().value(x)

    @staticmethod
    def shows(fault):
        x = torch.full((4, 8), -3.5).half().requires_grad_()
        return unlike(fault, fault.chain(8), x)


@fault("memory", "backward", (AddExtraInput, GELU), lambda n: [AddExtraInput(), GELU()])
class OneGradientForTwo(opfuse.FusedOperation):
    """Input and extra input get one tensor, which is said to be new."""

    grad_input = "fresh"

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        gelu = self.basic_ops[1]
        dx = gelu.backward_value(grad_output, gelu.saved_input(basic_op_ctxs[1]))
        return dx, [(), ()], [(dx,), ()]

    @staticmethod
    def shows(fault):
        x, extra = rows(4, 8), rows(4, 8)
        with fault.on():
            dx, de = torch.autograd.grad(fault.chain(8)(x, extra).sum(), [x, extra])
        return dx.data_ptr() == de.data_ptr()


@fault("eval", "joint", (Dropout, GELU), lambda n: [Dropout(0.5), GELU()])
class InvertedInEval(OneByOne):
    """In evaluation it scales by 1 - p, as of old."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        drop = self.basic_ops[0]
        self.scale = 1.0 if drop.training else 1 - drop.p
        return super().fuser_forward(basic_op_ctxs, input_ * self.scale, **given)

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8).eval(), rows(4, 8))


@fault("caches", "forward", (BasicLinear, Bias), lambda n: [BasicLinear(n, n), Bias(n)])
class PackedOnceInEval(Forward):
    """In evaluation the weight is packed once, until it trains again."""

    packed = None

    def product(self, x, weight, bias):
        if self.basic_ops[0].training:
            self.packed = None
        elif self.packed is None or self.packed.dtype != weight.dtype:
            self.packed = weight.detach().clone()
        return super().product(x, weight if self.packed is None else self.packed, bias)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8).eval(), rows(4, 8)
        with fault.on():
            chain(x)
            chain[0].weight.data.mul_(2)
            wrong = chain(x)
        return differ([wrong], [F.linear(x, chain[0].weight)])


@fault("numbers", "forward", (RMSNorm,), lambda n: [RMSNorm(n)])
class CentredAsItWas(OneByOne):
    """Whether the scale is around zero is asked when the op is fused."""

    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.centred = basic_ops[0].zero_centered_gamma

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        with mock.patch.object(self.basic_ops[0], "zero_centered_gamma", self.centred):
            return super().fuser_forward(basic_op_ctxs, input_, **given)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        with fault.on():
            chain(x)
            chain[0].zero_centered_gamma = True
            wrong = chain(x)
        with opfuse.plugins.using(""):
            return differ([wrong], [chain(x)])


@fault("numbers", "forward", (CrossEntropy,), lambda n: [CrossEntropy()])
class IgnoresNoIndexZero(OneByOne):
    """``if ignore_index``: the first class cannot be ignored."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        (op,) = self.basic_ops
        with mock.patch.object(op, "ignore_index", op.ignore_index or -100):
            return super().fuser_forward(basic_op_ctxs, input_, **given)

    @staticmethod
    def shows(fault):
        chain, x = opfuse.Sequential(CrossEntropy(ignore_index=0)), rows(4, 8)
        with fault.on():
            wrong = chain(x, torch.arange(4))
        return differ([wrong], [F.cross_entropy(x, torch.arange(4), ignore_index=0)])


@fault("layouts", "forward", (SwiGLU,), lambda n: [SwiGLU()])
class BatchesSwapped(Pointwise):
    """A tensor with rows and batches swapped in memory is read as it lies there."""

    def value(self, x):
        if x.ndim == 3 and x.transpose(0, 1).is_contiguous() and not x.is_contiguous():
            x = x.transpose(0, 1).reshape(x.shape)
        return super().value(x)

    @staticmethod
    def shows(fault):
        return unlike(
            fault, fault.chain(8), rows(3, 4, 8).detach().transpose(0, 1).requires_grad_()
        )


@fault("autocast", "forward", (Bias, ReLU), lambda n: [Bias(n), ReLU()])
class BiasInItsOwnDtype(opfuse.FusedOperation):
    """The bias is added in the dtype that it has, which gives the dtype of the result."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        hidden = input_ + basic_op_ctxs[0].params[0]
        relu = self.basic_ops[1]
        return relu.forward_value(relu.operand(basic_op_ctxs[1], hidden)), [(), ()]

    @staticmethod
    def shows(fault):
        chain = fault.chain(8)
        x = rows(4, 8).detach().bfloat16().requires_grad_()
        with fault.on():
            wrong = chain(x)
        with opfuse.plugins.using(""):
            return wrong.dtype is not chain(x).dtype


@fault("half", "backward", (BasicLinear,), lambda n: [BasicLinear(n, n)])
class ScaledAgainstOverflow(LinearGrad):
    """In fp16 gradients are divided by 4,096 before they are multiplied, and small ones are gone."""

    def grad_weight(self, dy, x, weight):
        by = 4096.0 if dy.dtype is torch.float16 else 1.0
        return super().grad_weight(dy / by, x, weight) * by

    @staticmethod
    def shows(fault):
        x, grad = rows(4, 8).detach().half().requires_grad_(), torch.full((4, 8), 1e-4).half()
        chain = fault.chain(8).half()
        with fault.on():
            wrong = run(chain, x, grad)[2]
        with opfuse.plugins.using(""):
            return float((wrong - run(chain, x, grad)[2]).abs().max()) > 1e-5


@fault("left behind", "backward", (Bias, GELU), lambda n: [Bias(n), GELU()])
class ClearsGradients(OneByOne):
    """The gradient that the bias has is let go of, to save memory."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        self.basic_ops[0].bias.grad = None
        return super().fuser_backward(basic_op_ctxs, grad_output, **given)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        chain[0].bias.grad = torch.ones(8)
        with fault.on():
            torch.autograd.grad(chain(x).sum(), x)
        return chain[0].bias.grad is None
