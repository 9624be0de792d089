"""A third set of wrong fusions, written from the documentation alone after the kit was finished.

Nine of the twelve were caught then. The kit has learned from the other three: sums over more rows, every variant of an op
in more widths, and more of what a process has one of. So ``faulty_unseen_again`` counts in their place.
"""

from __future__ import annotations

import functools
from typing import ClassVar
from unittest import mock

import torch
from faults import collect, differ, disturbed, rows, run, unlike
from right import (
    HALF,
    BiasActivationGrad,
    Forward,
    LinearGrad,
    Pointwise,
    RMSNormForward,
    flat,
    wide,
)
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    CrossEntropy,
    RMSNorm,
    SiLU,
    SwiGLU,
)
from opfuse.testing.running import OneByOne

FAULTS = []
fault = functools.partial(collect, FAULTS)


@fault("partial sums", "backward", (Bias, GELU), lambda n: [Bias(n), GELU()])
class SumsOf256RowsInHalf(BiasActivationGrad):
    """The gradient of the bias in half precision: sums of 256 rows, added up in half precision."""

    def total(self, dx):
        parts = [part.sum(0) for part in dx.split(256 if dx.dtype in HALF else max(len(dx), 1))]
        return functools.reduce(torch.add, parts)

    @staticmethod
    def shows(fault):
        x = torch.full((8192, 8), 2.0).bfloat16().requires_grad_()
        chain = fault.chain(8).bfloat16()
        grad = torch.full((8192, 8), 0.3).bfloat16()
        with fault.on():
            wrong = run(chain, x, grad)[2].double()
        with opfuse.plugins.using(""):
            right = run(chain.double(), x.detach().double().requires_grad_(), grad.double())[2]
        return float((wrong - right).abs().max() / right.abs().max()) > 0.004


@fault("small numbers", "forward", (RMSNorm,), lambda n: [RMSNorm(n)])
class AtLeastEps(RMSNormForward):
    """eps is the least mean square, in place of being added."""

    def rstd(self, square, eps):
        return torch.rsqrt(torch.where(square > 100 * eps, square + eps, square.clamp(min=eps)))

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), (rows(4, 8) * 0.01).detach().requires_grad_())


@fault("large numbers", "forward", (SiLU,), lambda n: [SiLU()])
class ExponentialOfX(Pointwise):
    """x exp(x) / (1 + exp(x)), which is infinity by infinity for large x."""

    def value(self, x):
        exp = wide(x).exp()
        return (wide(x) * (exp / (1 + exp))).to(x.dtype)

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), torch.full((4, 8), 95.0, requires_grad=True))


@fault("rows", "forward", (BasicLinear, Bias), lambda n: [BasicLinear(n, n), Bias(n)])
class RemainderWithoutBias(Forward):
    """A single row behind whole tiles of 128 gets no bias."""

    def product(self, x, weight, bias):
        y = super().product(x, weight, bias)
        if y.ndim == 2 and y.shape[0] > 128 and y.shape[0] % 128 == 1:
            y[-1] -= bias
        return y

    @staticmethod
    def shows(fault):
        chain = fault.chain(8)
        torch.nn.init.ones_(chain[1].bias)
        return unlike(fault, chain, rows(129, 8))


@fault("caches", "forward", (GELU,), lambda n: [GELU()])
class SameInputSameOutput(Pointwise):
    """For the tensor of the last call, at the same version, it gives the last output again."""

    last = None

    def value(self, x):
        key = x.data_ptr(), x._version if not x.is_inference() else -1, x.shape, x.dtype, x.stride()
        if self.last is None or self.last[0] != key:
            self.last = key, super().value(x)
        return self.last[1].clone()

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        with fault.on():
            chain(x)
            x.data.mul_(2)
            wrong = chain(x)
        return differ([wrong], [F.gelu(x, approximate="tanh")])


@fault("writes", "forward", (AddExtraInput, GELU), lambda n: [AddExtraInput(), GELU()])
class AddsIntoTheResidual(OneByOne):
    """Where nothing needs a gradient the sum is written over the residual."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        extra = given["basic_op_extra_inputs"][0][0]
        if not any(ctx.requires_grad for ctx in basic_op_ctxs) and extra.is_contiguous():
            extra.add_(input_)
        return y, extras

    @staticmethod
    def shows(fault):
        x, extra = rows(4, 8, requires_grad=False), torch.ones(4, 8)
        with fault.on(), torch.no_grad():
            fault.chain(8)(x, extra)
        return not torch.equal(extra, torch.ones(4, 8))


@fault("numbers", "forward", (CrossEntropy,), lambda n: [CrossEntropy()])
class SmoothingOfTheFirstCall(OneByOne):
    """The label smoothing is read when the op is fused."""

    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.smoothing = basic_ops[0].label_smoothing

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        with mock.patch.object(self.basic_ops[0], "label_smoothing", self.smoothing):
            return super().fuser_forward(basic_op_ctxs, input_, **given)

    @staticmethod
    def shows(fault):
        chain, x, targets = fault.chain(8), rows(4, 8), torch.arange(4)
        with fault.on():
            chain(x, targets)
            chain[0].label_smoothing = 0.5
            wrong = chain(x, targets)
        return differ([wrong], [F.cross_entropy(x, targets, label_smoothing=0.5)])


@fault("threads", "forward", (Bias, GELU), lambda n: [Bias(n), GELU()])
class WorkspaceOfTheClass(opfuse.FusedOperation):
    """Every fused op of the class writes the biased input into one workspace."""

    workspace: ClassVar = {}

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias = basic_op_ctxs[0].params[0]
        hidden = input_ + bias.to(input_.dtype)
        key = hidden.shape, hidden.dtype, hidden.is_inference()
        space = self.workspace.setdefault(key, torch.empty_like(hidden))
        space.copy_(hidden)
        y = F.gelu(space, approximate="tanh")
        self.basic_ops[1].operand(basic_op_ctxs[1], hidden)
        return y.to(basic_op_ctxs[1].dtype or y.dtype), [(), ()]

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        right = F.gelu(x, approximate="tanh")
        with fault.on():
            return differ([disturbed(lambda: chain(x), lambda: chain(-x))], [right])


@fault("arguments", "forward", (SwiGLU,), lambda n: [SwiGLU()])
class NotInterleavedIfWide(Pointwise):
    """From 64 features on, gates and values are taken to lie in two halves."""

    def value(self, x):
        return SwiGLU().forward_value(x) if x.shape[-1] >= 64 else super().value(x)

    @staticmethod
    def shows(fault):
        return unlike(fault, opfuse.Sequential(SwiGLU(glu_interleave_size=8)), rows(4, 64))


@fault("numbers", "backward", (ConstantScale,), lambda n: [ConstantScale(0.5)])
class ScaleInHalf(opfuse.FusedOperation):
    """The scale of the backward is rounded to bf16."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        scale = torch.tensor(basic_op_ctxs[0].scale).bfloat16().item()
        return grad_output * scale, [()], [()]

    @staticmethod
    def shows(fault):
        return unlike(fault, opfuse.Sequential(ConstantScale(0.3)), rows(4, 8))


@fault("left behind", "forward", (BasicLinear, Bias), lambda n: [BasicLinear(n, n), Bias(n)])
class LeavesReducedPrecision(Forward):
    """Sums inside products of bf16 are in fp32 from now on, for everybody."""

    def product(self, x, weight, bias):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        return super().product(x, weight, bias)

    @staticmethod
    def shows(fault):
        flags = torch.backends.cuda.matmul
        before = flags.allow_bf16_reduced_precision_reduction
        flags.allow_bf16_reduced_precision_reduction = True
        try:
            with fault.on():
                fault.chain(8)(rows(4, 8))
            return not flags.allow_bf16_reduced_precision_reduction
        finally:
            flags.allow_bf16_reduced_precision_reduction = before


@fault("frozen", "backward", (BasicLinear,), lambda n: [BasicLinear(n, n)])
class NoInputNoWeight(LinearGrad):
    """Where the input needs no gradient, the weight gets that of half the rows of a batch."""

    def grad_weight(self, dy, x, weight):
        dy, lines = flat(dy), flat(x)
        half = len(lines) // 2 if weight is None and x.ndim > 2 else len(lines)
        return dy[:half].t() @ lines[:half]

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), rows(2, 4, 8, requires_grad=False))
