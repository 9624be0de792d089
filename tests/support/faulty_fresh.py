"""A second set of wrong fusions along the same axes, written like the first before the kit was looked at.

It counts how well the kit does on faults that it was not made for, so nobody adds to the kit because of one of these.
"""

from __future__ import annotations

import functools

import torch
from faults import (
    after_another_call,
    after_fewer_rows,
    as_if_contiguous,
    collect,
    differ,
    disturbed,
    leave_numbers,
    rows,
    run,
    unlike,
)
from right import BiasActivationGrad, BiasGelu, L2Forward, LayerNormForward, Pointwise, flat, wide
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    GELU,
    QGELU,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    GatedActivation,
    L2Normalization,
    LayerNorm,
    SiLU,
    SwiGLU,
)

FAULTS = []
fault = functools.partial(collect, FAULTS)


@fault("widths", "forward", (LayerNorm,), lambda n: [LayerNorm(n)])
class MaskedLanesCount(LayerNormForward):
    """From 513 features on the variance is divided by the size of the block, the power of two above them."""

    def variance(self, x, mean, dims):
        n = self.basic_ops[0].weight.numel()
        block = 1 << (n - 1).bit_length() if n > 512 else max(n, 1)
        return (x - mean).square().sum(dims, keepdim=True) / block

    @staticmethod
    def shows(fault):
        wrong, right = [
            unlike(fault, fault.chain(n), rows(4, n), torch.linspace(-1, 1, n).expand(4, n))
            for n in (1536, 2048)
        ]
        return wrong and not right


@fault("rows", "forward", (L2Normalization,), lambda n: [L2Normalization()])
class RowInOneByte(L2Forward):
    """The statistics are stored under the low byte of the row's number: those of row 256 are row 0's."""

    def stored(self, rstd):
        rows = torch.arange(rstd.numel(), device=rstd.device) % 256
        return rstd.reshape(-1)[rows].reshape(rstd.shape)

    @staticmethod
    def shows(fault):
        grad = torch.linspace(0, 1, 8).expand(257, 8)
        return unlike(fault, fault.chain(8), rows(257, 8), grad) and not unlike(
            fault, fault.chain(8), rows(256, 8), grad[1:]
        )


@fault("layouts", "forward", (BasicLinear, Bias), lambda n: [BasicLinear(n, n), Bias(n)])
class BiasOfStrideOne(opfuse.FusedOperation):
    """The bias is read as if its elements lay side by side."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        bias = as_if_contiguous(basic_op_ctxs[1].params[0]).to(x.dtype)
        return F.linear(x, weight, bias), [(), ()]

    @staticmethod
    def shows(fault):
        chain = fault.chain(8)
        chain[1].bias = torch.nn.Parameter(torch.randn(8, 2)[:, 0])
        return unlike(fault, chain, rows(4, 8))


@fault("caches", "forward", (BasicLinear,), lambda n: [BasicLinear(n, n)])
class PackedForInference(opfuse.FusedOperation):
    """Without gradients the weight is packed once, until its address or its version is another."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        if basic_op_ctxs[0].requires_grad or weight.is_inference():
            return F.linear(x, weight), [()]
        (param,) = basic_op_ctxs[0].params
        key = param.data_ptr(), -1 if param.is_inference() else param._version, weight.dtype
        if getattr(self, "key", None) != key:
            self.key, self.packed = key, weight.detach().clone()
        return F.linear(x, self.packed), [()]

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8, requires_grad=False)
        with fault.on(), torch.no_grad():
            chain(x)
            chain[0].weight.data.mul_(2.0)  # so do FSDP's gather and fused optimizers
            return differ([chain(x)], [F.linear(x, chain[0].weight)])


@fault("state", "joint", (Bias, GELU), lambda n: [Bias(n), GELU()])
class StackOfCalls(BiasGelu):
    """Calls push what their backward needs, and the backward pops: right only from the last to the first."""

    def keep(self, bias, act, hidden):
        if bias.requires_grad or act.requires_grad:
            self.__dict__.setdefault("stack", []).append(hidden)

    def kept(self, bias, act):
        return self.stack.pop()

    @staticmethod
    def shows(fault):
        return after_another_call(fault)


@fault("generator", "forward", (Bias, Dropout), lambda n: [Bias(n), Dropout(0.5)])
class DrawsInEval(opfuse.FusedOperation):
    """The mask is drawn before it is asked whether anything is dropped: the next op draws other numbers."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        ctx, dropout = basic_op_ctxs[1], self.basic_ops[1]
        hidden = input_ + basic_op_ctxs[0].params[0].to(input_.dtype)
        y, mask = torch.native_dropout(hidden, dropout.p, True)
        if not dropout.training or not dropout.p:
            y, mask = hidden, None
        leave_numbers(ctx, dropout)
        if ctx.requires_grad:
            ctx.save_for_backward(mask if ctx.input_requires_grad else None)
        return y, [(), ()]

    @staticmethod
    def shows(fault):
        chain = fault.chain(8).eval()
        before = torch.get_rng_state()
        with fault.on():
            chain(rows(4, 8))
        return not torch.equal(before, torch.get_rng_state())


@fault("half", "backward", (GELU,), lambda n: [GELU()])
class SquareOfHalf(opfuse.FusedOperation):
    """The derivative's square is taken in half precision: 0 times infinity above 255, in fp16."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        if x is None:
            return None, [()], [()]
        v = wide(x)
        square = (x * x).to(v.dtype)
        t = torch.tanh(v * (0.7978845608028654 + 0.035677408136300125 * square))
        inner = 0.7978845608028654 + 0.10703222440890037 * square
        slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * inner
        return (grad_output.to(v.dtype) * slope).to(x.dtype), [()], [()]

    @staticmethod
    def shows(fault):
        x = torch.linspace(-1000, 1000, 64).half().requires_grad_()
        return unlike(fault, fault.chain(64), x)


@fault(
    "half",
    "forward",
    (ConstantScale, BasicLinear),
    lambda n: [ConstantScale(0.125), BasicLinear(n, n)],
)
class ScaledAfterTheProduct(opfuse.FusedOperation):
    """The scale is applied to the product, which may be beyond fp16 where the scaled input's is not."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        scale, ctx = self.basic_ops[0].scale, basic_op_ctxs[1]
        leave_numbers(basic_op_ctxs[0], self.basic_ops[0])
        scaled, weight = BasicLinear.operands(ctx, input_ * scale)
        x = input_.to(scaled.dtype)
        return F.linear(x, weight) * scale, [(), ()]

    @staticmethod
    def shows(fault):
        chain = fault.chain(64)
        with torch.no_grad():
            chain[1].weight.fill_(1.0)
        return unlike(fault, chain.half(), torch.full((4, 64), 2000.0).half().requires_grad_())


@fault("eval", "backward", (Bias, SiLU), lambda n: [Bias(n), SiLU()])
class NothingToTrainInEval(BiasActivationGrad):
    """In evaluation parameters get no gradient, though somebody trains a prompt or a bias like that."""

    def total(self, dx):
        return super().total(dx) if self.basic_ops[0].training else None

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8).eval(), rows(4, 8))


@fault("threads", "backward", (Bias, SiLU), lambda n: [Bias(n), SiLU()])
class SumInASharedBuffer(opfuse.FusedOperation):
    """The gradient of the bias is summed up in a buffer of the op, and copied out of it."""

    buffer = None

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        bias, act = basic_op_ctxs
        dx = self.basic_ops[1].backward_value(grad_output, act.saved_tensors[0])
        db = None
        if bias.param_requires_grad[0]:
            if self.buffer is None or self.buffer.dtype is not dx.dtype:
                self.buffer = dx.new_empty(dx.shape[-1])
            torch.sum(flat(dx), 0, out=self.buffer)
            db = self.buffer.clone()
        return dx, [(db,), ()], [(), ()]

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(64), rows(4, 64)
        with opfuse.plugins.using(""):
            right = run(chain, x)
        with fault.on():
            return differ(disturbed(lambda: run(chain, x), lambda: run(chain, -x)), right)


@fault("larger", "forward", (Bias, QGELU), lambda n: [Bias(n), QGELU()])
class RowsOfTheFirstCall(opfuse.FusedOperation):
    """The grid is that of the first call, 16 rows at least; what lies beyond keeps its input."""

    rows = None

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        act = self.basic_ops[1]
        x = act.operand(basic_op_ctxs[1], input_ + basic_op_ctxs[0].params[0].to(input_.dtype))
        lines = flat(x) if x.numel() else x
        self.rows = self.rows or max(lines.shape[0], 16)
        y = torch.cat((act.forward_value(lines[: self.rows]), lines[self.rows :]))
        return y.reshape(x.shape), [(), ()]

    @staticmethod
    def shows(fault):
        return after_fewer_rows(fault)


@fault("frozen", "backward", (BasicLinear, Bias), lambda n: [BasicLinear(n, n), Bias(n)])
class FrozenBiasTurnsTheBatch(opfuse.FusedOperation):
    """Where the bias is frozen, and the weight is not, a batch of sequences is taken for a sequence of batches."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, bias = basic_op_ctxs
        dx, grads = self.basic_ops[0].op_backward(linear, grad_output)
        frozen = not bias.param_requires_grad[0]
        if frozen and linear.param_requires_grad[0] and dx is not None and dx.ndim == 3:
            dx = dx.transpose(0, 1).reshape(dx.shape)
        return dx, [grads, (None if frozen else flat(grad_output).sum(0),)], [(), ()]

    @staticmethod
    def shows(fault):
        chain, grad = fault.chain(8), torch.randn(3, 4, 8)
        trained = unlike(fault, chain, rows(3, 4, 8), grad)
        chain[1].bias.requires_grad_(False)
        return unlike(fault, chain, rows(3, 4, 8), grad) and not trained


@fault("subclasses", "forward", (opfuse.Subclasses(GatedActivation),), lambda n: [SwiGLU()])
class LinearHalfAsItIs(Pointwise):
    """The gate multiplies the other half itself, whatever the class makes of that half first."""

    def value(self, x):
        (act,) = self.basic_ops
        a, b = act.split(wide(x))
        return (act.value(a) * b).to(x.dtype)

    @staticmethod
    def shows(fault):
        class Shifted(SwiGLU):
            def linear_value(self, b):
                return b + 1

        return unlike(fault, opfuse.Sequential(Shifted()), rows(4, 8))
