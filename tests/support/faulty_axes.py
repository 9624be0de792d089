"""Wrong fusions along the axes that decide about silent errors, written from the documentation of the contracts alone.

Each is right where a first look would find it, and each has a script, ``shows``, that shows it wrong without the kit.
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
    only_there,
    rows,
    unlike,
)
from right import (
    BiasActivationGrad,
    BiasGelu,
    Forward,
    L2Forward,
    LinearGrad,
    Pointwise,
    RMSNormForward,
    flat,
)
from torch.nn import functional as F

import opfuse
from opfuse.ops import GELU, Activation, BasicLinear, Bias, Dropout, L2Normalization, ReLU, RMSNorm

FAULTS = []
fault = functools.partial(collect, FAULTS)


def linear(n):
    return [BasicLinear(n, n), Bias(n)]


def bias_relu(n):
    return [Bias(n), ReLU()]


@fault("widths", "forward", (RMSNorm,), lambda n: [RMSNorm(n)])
class OneBlockOf1024(RMSNormForward):
    """The mean square is taken over one block of 1024 features; what is beyond them is masked."""

    def mean_square(self, x, input_):
        (norm,) = self.basic_ops
        return x[..., :1024].square().sum(norm._dims, keepdim=True) / norm.weight.numel()

    @staticmethod
    def shows(fault):
        return only_there(fault, (4, 1536), (4, 1024))


@fault("widths", "backward", (Bias, ReLU), bias_relu)
class WholeTilesOf512(BiasActivationGrad):
    """From 512 features on the gradient of the bias is summed in tiles of 512; the last one only if it is full."""

    def total(self, dx):
        whole = dx.shape[-1] // 512 * 512 or dx.shape[-1]
        return F.pad(dx[:, :whole].sum(0), (0, dx.shape[-1] - whole))

    @staticmethod
    def shows(fault):
        return only_there(fault, (4, 768), (4, 1024))


@fault("rows", "backward", (Bias, ReLU), bias_relu)
class TileOfOneRow(BiasActivationGrad):
    """The number of tiles of 64 rows is rounded by 62, so that a last tile of one row is left out."""

    def total(self, dx):
        tiles = max((dx.shape[0] + 62) // 64, 1)
        return dx[: tiles * 64].sum(0)

    @staticmethod
    def shows(fault):
        return only_there(fault, (129, 8), (128, 8))


@fault("rows", "forward", (L2Normalization,), lambda n: [L2Normalization()])
class FullTilesGoAnotherWay(L2Forward):
    """One row less than two tiles of 128 is taken for two tiles: the last row starts one row early."""

    def rstd(self, x):
        rstd = super().rstd(x)
        early = x.ndim > 1 and x.shape[-2] % 256 == 255
        return torch.cat((rstd[..., :-1, :], rstd[..., -2:-1, :]), -2) if early else rstd

    @staticmethod
    def shows(fault):
        return only_there(fault, (255, 8), (128, 8))


@fault("layouts", "forward", (BasicLinear, Bias), linear)
class WeightByItsPointer(Forward):
    """The weight is read as if it were contiguous."""

    def product(self, x, weight, bias):
        return F.linear(x, as_if_contiguous(weight).to(x.dtype), bias)

    @staticmethod
    def shows(fault):
        chain = fault.chain(8)
        chain[0].weight = torch.nn.Parameter(torch.randn(8, 8).t())
        return unlike(fault, chain, rows(4, 8))


@fault("layouts", "backward", (Bias, ReLU), bias_relu)
class TransposedGradient(BiasActivationGrad):
    """A gradient that overlaps nowhere is read by its pointer."""

    def grad(self, grad_output):
        return grad_output if 0 in grad_output.stride() else as_if_contiguous(grad_output)

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), rows(8, 8), torch.randn(8, 8).t())


@fault("layouts", "backward", (Bias, ReLU), bias_relu)
class ExpandedGradient(BiasActivationGrad):
    """The gradient of a sum is one number in memory, and read as if it were all of them."""

    def grad(self, grad_output):
        return as_if_contiguous(grad_output) if 0 in grad_output.stride() else grad_output

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), rows(4, 8), torch.ones(()).expand(4, 8))


@fault("caches", "forward", (BasicLinear, Bias), linear)
class CachedById(Forward):
    """The weight is transposed once, for as long as the parameter is the same object."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        key = id(basic_op_ctxs[0].params[0]), basic_op_ctxs[0].dtype or input_.dtype
        if getattr(self, "key", None) != key:
            self.key, self.kept = key, basic_op_ctxs[0].params[0].detach().to(key[1]).clone()
        return super().fuser_forward(basic_op_ctxs, input_)

    def product(self, x, weight, bias):
        return F.linear(x, self.kept, bias)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        with fault.on():
            chain(x).square().sum().backward()
            torch.optim.SGD(chain.parameters(), lr=1.0).step()
            fused = chain(x)
        with opfuse.plugins.using(""):
            return differ([fused], [chain(x)])


@fault("caches", "forward", (BasicLinear, Bias), linear)
class CachedByVersion(CachedById):
    """The same, and renewed when the parameter's version counter moves."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (weight,) = basic_op_ctxs[0].params
        if getattr(self, "version", None) != (weight.data_ptr(), weight._version):
            self.version, self.key = (weight.data_ptr(), weight._version), None
        return super().fuser_forward(basic_op_ctxs, input_)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        with fault.on():
            chain(x).square().sum().backward()
            torch.optim.SGD(chain.parameters(), lr=1.0, fused=True).step()
            fused = chain(x)
        with opfuse.plugins.using(""):
            return differ([fused], [chain(x)])


@fault("state", "joint", (Bias, GELU), lambda n: [Bias(n), GELU()])
class KeptOnTheOp(BiasGelu):
    """What the backward needs is an attribute of the fused op: that of the latest call."""

    def keep(self, bias, act, hidden):
        self.hidden = hidden

    def kept(self, bias, act):
        return self.hidden

    @staticmethod
    def shows(fault):
        return after_another_call(fault)


@fault("state", "forward", (GELU,), lambda n: [GELU()])
class SavedBesideItsVersion(Pointwise):
    """It saves another tensor over the input's memory, whose version does not move when the input is changed."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return super().fuser_forward(basic_op_ctxs, input_.data)

    @staticmethod
    def shows(fault):
        chain, leaf = fault.chain(8), rows(4, 8)
        x = leaf * 1
        with fault.on():
            y = chain(x)
            with torch.no_grad():
                x.zero_()
            y.sum().backward()  # without the fusion: "modified by an inplace operation"
        return differ(
            [leaf.grad], torch.autograd.grad(F.gelu(leaf, approximate="tanh").sum(), leaf)
        )


@fault("generator", "joint", (Bias, Dropout), lambda n: [Bias(n), Dropout(0.5)])
class SeedsInItsBackward(opfuse.FusedOperation):
    """The backward seeds the generator, so that it rounds the same way every time; every step then draws the same."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        hidden, dropout = input_ + basic_op_ctxs[0].params[0].to(input_.dtype), self.basic_ops[1]
        y, mask = hidden, None
        if dropout.training and dropout.p:
            y, mask = torch.native_dropout(hidden, dropout.p, True)
        if any(ctx.requires_grad for ctx in basic_op_ctxs):
            self.scale = 1 / (1 - dropout.p)
            basic_op_ctxs[0].save_for_backward(mask)
        return y, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        torch.manual_seed(1234)
        bias, (mask,) = basic_op_ctxs[0], basic_op_ctxs[0].saved_tensors
        dx = grad_output if mask is None else grad_output * mask * self.scale
        return dx, [(flat(dx).sum(0) if bias.param_requires_grad[0] else None,), ()], [(), ()]

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(8), rows(4, 8)
        with fault.on():
            y = chain(x)
            before = torch.get_rng_state()
            y.sum().backward()
        return not torch.equal(before, torch.get_rng_state())  # a backward draws nothing


@fault("half", "forward", (RMSNorm,), lambda n: [RMSNorm(n)])
class SquaresInHalf(RMSNormForward):
    """The squares are taken in the input's own dtype: in fp16 those of numbers above 255 are infinite."""

    def mean_square(self, x, input_):
        return input_.square().to(x.dtype).mean(self.basic_ops[0]._dims, keepdim=True)

    @staticmethod
    def shows(fault):
        return unlike(fault, fault.chain(8), (rows(4, 8) * 500).half().detach().requires_grad_())


@fault("half", "forward", (BasicLinear, Bias), linear)
class EveryHalfIsBfloat16(Forward):
    """Under autocast half precision is taken for bf16, and a result in fp16 has seen bf16."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (y.bfloat16().to(y.dtype) if basic_op_ctxs[0].dtype is torch.float16 else y), extras

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(64), rows(64, 64)
        with torch.autocast("cpu", torch.float16), fault.on():
            fused = chain(x)
        error = (fused - F.linear(x, chain[0].weight)).abs().max()
        with torch.autocast("cpu", torch.float16), opfuse.plugins.using(""):
            return error > 3 * (chain(x) - F.linear(x, chain[0].weight)).abs().max()


@fault("eval", "forward", (BasicLinear, Bias), linear)
class RoundedInEval(Forward):
    """In evaluation the weight is rounded to bf16, which is good enough there."""

    def product(self, x, weight, bias):
        rounded = weight if self.basic_ops[0].training else weight.bfloat16().to(weight.dtype)
        return super().product(x, rounded, bias)

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(64).eval(), rows(4, 64)
        with fault.on():
            fused = chain(x)
        return differ([fused], [F.linear(x, chain[0].weight)], 1e-4)


@fault("threads", "forward", (BasicLinear, Bias), linear)
class OperandsOnTheOp(opfuse.FusedOperation):
    """The operands are attributes of the fused op for the time of the call: another thread's call replaces them."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.held = BasicLinear.operands(basic_op_ctxs[0], input_)
        self.y = F.linear(*self.held)
        return self.y + basic_op_ctxs[1].params[0].to(self.y.dtype), [(), ()]

    @staticmethod
    def shows(fault):
        chain, x = fault.chain(64), rows(4, 64)
        right = F.linear(x, chain[0].weight)
        with fault.on():
            got = disturbed(lambda: chain(x), lambda: chain(-x))
        return differ([got], [right])


@fault("larger", "backward", (Bias, ReLU), bias_relu)
class WorkspaceOfTheFirstCall(BiasActivationGrad):
    """The partial sums, of 32 rows each, have as much room as the first call needed."""

    def total(self, dx):
        parts = -(-dx.shape[0] // 32)
        if getattr(self, "parts", None) is None:
            self.parts = parts
        return sum((part.sum(0) for part in dx.split(32)[: self.parts]), dx.new_zeros(dx.shape[-1]))

    @staticmethod
    def shows(fault):
        return after_fewer_rows(fault)


@fault("frozen", "backward", (BasicLinear,), lambda n: [BasicLinear(n, n)])
class OneBatchOfThree(LinearGrad):
    """Where only the weight needs a gradient, and the input has three dimensions, one batch gives it."""

    def grad_weight(self, dy, x, weight):
        if weight is None and x.ndim == 3 and x.shape[0]:
            return torch.bmm(dy.mT, x)[0]
        return super().grad_weight(dy, x, weight)

    @staticmethod
    def shows(fault):
        frozen, needed = rows(3, 4, 8, requires_grad=False), rows(3, 4, 8)
        return unlike(fault, fault.chain(8), frozen) and not unlike(fault, fault.chain(8), needed)


@fault("subclasses", "forward", (Bias, opfuse.Subclasses(Activation)), lambda n: [Bias(n), GELU()])
class EveryGeluIsGelu(opfuse.FusedOperation):
    """Whatever is derived from GELU is computed as GELU; every other activation computes itself."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (_, act), (bias_ctx, ctx) = self.basic_ops, basic_op_ctxs
        x = act.operand(ctx, input_ + bias_ctx.params[0].to(input_.dtype))
        return F.gelu(x, approximate="tanh") if isinstance(act, GELU) else act.forward_value(x), [
            (),
            (),
        ]

    @staticmethod
    def shows(fault):
        class ErfGELU(GELU):
            def forward_value(self, x):
                return 2 * F.gelu(x)

            def backward_value(self, grad_output, x, *, out=None):
                return 2 * torch.ops.aten.gelu_backward(grad_output, x)

        return unlike(fault, opfuse.Sequential(Bias(8), ErfGELU()), rows(4, 8))
