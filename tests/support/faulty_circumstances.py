"""Fusions that are wrong where values, sizes, modes or the process are not the usual ones.

``FAULTS`` maps a name to a :class:`faulty.Fault`. Each passed every check before the kit looked at its circumstance.
"""

from __future__ import annotations

import copy
from unittest import mock

import torch
from faulty import FAULTS as OTHERS
from faulty import faulty
from right import Backward, BiasGrad, Forward, LayerNormForward, Pointwise
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    CrossEntropy,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    ReLU,
    RoPE,
)
from opfuse.testing.running import OneByOne

KNOWN = {*OTHERS}


def eager(ops, env):
    if env.recipe is not None:
        return "it does not quantize"
    return "it is not for compiled code" if env.compiling else True


# Values


def whole(ops, env):
    return True if len(ops[0].param_names) == 2 else "it has weight and bias"


@faulty("output", "mean=100", "forward", LayerNorm, when=whole)
class SquareOfTheMean(LayerNormForward):
    """The variance as E[x2] - E[x]2."""

    def variance(self, x, mean, dims):
        return x.square().mean(dims, keepdim=True) - mean.square()


@faulty("gradients", "(?s)gradient of bias.*rows=.20001,", "backward", Bias)
class PartialSumsInHalf(BiasGrad):
    """The sums of 256 rows are rounded to the gradient's dtype, and added up in it."""

    def total(self, dy):
        total = dy.new_zeros(dy.shape[-1])
        for part in dy.split(256):
            total = total + part.sum(0)
        return total


@faulty("gradients", "(?s)inf in .*gradient=1000000", "backward", Bias, when=eager)
class GradientsThroughHalf(BiasGrad):
    """The gradient of the bias goes through fp16, unless it has its own dtype: exact enough for 1e-3."""

    def passed(self, dy):
        if dy.dtype is torch.bfloat16 and dy.shape[-1] % 4 == 0:
            return torch.where(dy.abs() > 4096, dy.half().to(dy.dtype), dy)
        return dy


@faulty("magnitude", r"(?s)is NaN.*scale=1\.88", "forward", ReLU)
class Reciprocal(Pointwise):
    """It scales by the reciprocal of the largest magnitude, and back."""

    def spoil(self, y):
        if y.dtype is not torch.float32 or not y.numel():
            return y
        most = y.detach().abs().amax()
        return torch.where(most.isfinite() & (most > 0), y * (448 / most) * (most / 448), y)


@faulty("output", "(?s)truncated.", "forward", ReLU, when=eager)
class Truncates(Pointwise):
    """A bf16 result loses its lower bits before it is scaled: always towards zero."""

    def spoil(self, y):
        if y.dtype is not torch.bfloat16:
            return y
        bits = (y.view(torch.int16) & -2).view(torch.bfloat16)
        return torch.where(y.isfinite(), bits, y)


@faulty("output", "(?s)eighth 1 by magnitude|mixed=True", "forward", GELU, when=eager)
class CutsTheTails(Pointwise):
    """In half precision, what is almost 0 is 0."""

    def spoil(self, y):
        if y.dtype is not torch.bfloat16 or y.numel() < 1000:
            return y
        return torch.where((y.abs() < 0.02) & (y.abs().amax() > 1), 0.0, y)


@faulty("nan_and_inf", r"ConstantScale, (scale=)?0\.0,?\)", "forward", ConstantScale)
class ZeroIsZero(opfuse.FusedOperation):
    """Zero times anything is zero."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), (op,) = basic_op_ctxs, self.basic_ops
        if ctx.requires_grad:
            ctx.scale = op.scale
        return (input_ * op.scale if op.scale else torch.zeros_like(input_)), [()]


@faulty("aliasing", "output 0 shares memory with the input", "forward", ConstantScale)
class OneIsTheSame(opfuse.FusedOperation):
    """One times a tensor is that tensor."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), (op,) = basic_op_ctxs, self.basic_ops
        if ctx.requires_grad:
            ctx.scale = op.scale
        return (input_ if op.scale == 1 else input_ * op.scale), [()]


@faulty("gradients", "(?s)is NaN in .*Dropout, 1.0", "backward", Dropout)
class DividesByNothing(opfuse.FusedOperation):
    """All is dropped, and what is left is infinitely large."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (mask,), p = basic_op_ctxs[0].saved_tensors, torch.tensor(basic_op_ctxs[0].p)
        if mask is None:
            return grad_output * 1, [()], [()]
        scale = (1 / (1 - p)).to(grad_output.device)
        return (grad_output * mask * scale).to(grad_output.dtype), [()], [()]


class Loss(OneByOne):
    """Right: the loss."""

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **given):
        y, extras = super().fuser_forward(
            basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
        )
        return self.spoil(y, input_, basic_op_extra_inputs[0][0]), extras

    def spoil(self, y, x, targets):
        return y


@faulty("output", "the output is wrong by", "forward", CrossEntropy, when=eager)
class MeanOfMeans(Loss):
    """The mean over chunks of 1024 rows of each chunk's mean."""

    def spoil(self, y, x, targets):
        op = self.basic_ops[0]
        plain = op.reduction == "mean" and not op.label_smoothing and op.softcap is None
        if not plain or targets.numel() < 2048:
            return y
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        parts = [
            F.cross_entropy(a.double(), b, ignore_index=op.ignore_index)
            for a, b in zip(x.chunk(2), targets.chunk(2), strict=True)
        ]
        return torch.stack(parts).mean().to(y.dtype)


@faulty("output", "the output is wrong by", "forward", CrossEntropy, when=eager)
class CountsWhatIsIgnored(Loss):
    """Where there are many rows, the sum is divided by all of them."""

    def spoil(self, y, x, targets):
        op = self.basic_ops[0]
        if op.reduction != "mean" or targets.numel() < 64 or op.label_smoothing:
            return y
        return y * (targets != op.ignore_index).sum() / targets.numel()


# Sizes


@faulty("output", "is wrong by", "forward", Bias)
class WholeTilesOfRows(opfuse.FusedOperation):
    """From three whole tiles of 64 rows on, the last one is taken for the one before."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y = input_ + basic_op_ctxs[0].params[0].to(input_.dtype)
        if y.ndim == 2 and y.shape[0] in (64, 192):
            y = torch.cat((y[:-1], y[-2:-1]))
        return y, [()]


@faulty("output", "is wrong by", "forward", BasicLinear, Bias)
class WholeTilesOfFeatures(Forward):
    """Three tiles of 64 features are taken for four of 48."""

    def spoil(self, y, x):
        return torch.where(torch.arange(y.shape[-1]) // 48 == 3, -y, y) if y.shape[-1] == 192 else y


@faulty("requires_grad", "gradient of bias", "backward", Bias)
class BiasOfOneBatch(BiasGrad):
    """Where the bias alone needs a gradient, and the input has three dimensions, one batch gives it."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, grads, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        half = grad_output.dtype is torch.bfloat16
        if half and not basic_op_ctxs[0].input_requires_grad and grad_output.ndim == 3:
            grads = [(grad_output[:1].sum((0, 1)),)]
        return dx, grads, extras


@faulty("gradients", "(?s)inf in .*gradient=1000000", "backward", Bias, when=eager)
class SingleThroughHalf(BiasGrad):
    """Large gradients in fp32 go through fp16 where a row is whole blocks of 8."""

    def passed(self, dy):
        if dy.dtype is torch.float32 and dy.shape[-1] % 8 == 0:
            return torch.where(dy.abs() > 4096, dy.half().to(dy.dtype), dy)
        return dy


# Modes, and what happens between calls


@faulty("output", "(?s)the output is wrong by.*switched=", "joint", Dropout)
class ModeOfTheChain(OneByOne):
    """It drops where the chain trains."""

    def planned(self, env):
        self.drops = env.training

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        with mock.patch.object(self.basic_ops[0], "training", self.drops):
            return super().fuser_forward(basic_op_ctxs, input_, **given)


class ReusesWithoutGrad(opfuse.FusedOperation):
    """Where nothing needs a gradient it writes into the memory of the call before."""

    buffer = None
    inference = False

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,), (ctx,) = self.basic_ops, basic_op_ctxs
        y = act.forward_value(act.operand(ctx, input_))
        if ctx.requires_grad or torch.is_inference_mode_enabled() is not self.inference:
            return y, [()]
        if self.buffer is None or (self.buffer.shape, self.buffer.dtype) != (y.shape, y.dtype):
            self.buffer = torch.empty_like(y)
        return self.buffer.copy_(y).view_as(y), [()]


faulty("without_grad", "no_grad, a second call writes into output 0", "forward", GELU, when=eager)(
    ReusesWithoutGrad
)


@faulty("without_grad", "inference_mode, a second call writes", "forward", GELU, when=eager)
class ReusesInInference(ReusesWithoutGrad):
    """The same in inference mode alone."""

    inference = True


@faulty(
    "batch_invariance",
    "other bits at another place",
    "forward",
    GELU,
    when=eager,
    declares=("batch_invariant",),
)
class LastRowOtherwise(OneByOne):
    """The last row in other steps, which are right up to rounding, as a loop over vectors has a remainder."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        if basic_op_ctxs[0].requires_grad or y.ndim < 2:
            return y, extras
        last = F.gelu(input_[-1:].double(), approximate="tanh").to(y.dtype)
        return torch.cat((y[:-1], last)), extras


@faulty("follows_values", "were changed, .*wrong by", "forward", CrossEntropy, when=eager)
class TargetsByAddress(Loss):
    """Targets are read once for each address and shape, as where a mask of them is kept."""

    kept = None

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **given):
        ((targets,),) = basic_op_extra_inputs
        key = targets.data_ptr(), targets.shape, targets.stride()
        if self.kept is None or self.kept[0] != key:
            self.kept = key, targets.clone()
        twin = [copy.copy(ctx) for ctx in basic_op_ctxs]
        y, _ = super().fuser_forward(twin, input_, basic_op_extra_inputs=[(self.kept[1],)], **given)
        _, extras = super().fuser_forward(
            basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
        )
        return y, extras


@faulty("follows_values", "were changed, .*wrong by", "forward", RoPE, when=eager)
class PositionsByAddress(TargetsByAddress):
    """The same with positions."""


@faulty("follows_values", "were changed, .*wrong by", "joint", ClampedSwiGLU, when=eager)
class NumbersByTheFirst(OneByOne):
    """The numbers are read again where ``limit`` is another one."""

    kept = None

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        (op,) = self.basic_ops
        now = op.limit, op.alpha, op.glu_linear_offset
        if self.kept is None or self.kept[0] != now[0]:
            self.kept = now
        op.limit, op.alpha, op.glu_linear_offset = self.kept
        try:
            return super().fuser_forward(basic_op_ctxs, input_, **given)
        finally:
            op.limit, op.alpha, op.glu_linear_offset = now


@faulty(
    "output",
    "(?s)is wrong by.*channels='crossing'",
    "forward",
    MakeExtraOutput,
    Bias,
    AddExtraInput,
)
class EveryAddIsItsOwn(opfuse.FusedOperation):
    """What is added out of a channel is what was forked, whichever channel it is."""

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **unused):
        y = input_ + basic_op_ctxs[1].params[0].to(input_.dtype)
        channel = self.basic_ops[2].extra_input_channels[0]
        added = input_ if channel else basic_op_extra_inputs[2][0]
        if added.shape != y.shape:
            raise ValueError("it adds tensors of one shape")
        return y + added, [(input_,), (), ()]


# What is left behind


def leaving(says, leave):
    def add(cls):
        cls.leave = staticmethod(leave)
        return faulty(
            "settings", f"its (first call|forward) leaves {says}", "forward", Bias, when=eager
        )(cls)

    return add


class Leaves(opfuse.FusedOperation):
    """Right, but for what it leaves behind."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.leave()
        return input_ + basic_op_ctxs[0].params[0].to(input_.dtype), [()]


@leaving("torch.backends.*fp32_precision", lambda: torch.set_float32_matmul_precision("high"))
class LeavesPrecision(Leaves):
    """Products of fp32 are in TF32 from now on."""


@leaving("torch.backends.*fp32_precision", lambda: torch.set_float32_matmul_precision("highest"))
class PutsBackItsOwnPrecision(Leaves):
    """It puts back what is usual, not what was."""


@leaving("the default dtype", lambda: torch.set_default_dtype(torch.float64))
class LeavesADefaultDtype(Leaves):
    """What is made next is in fp64."""


@leaving("the deterministic flag", lambda: torch.use_deterministic_algorithms(True))
class LeavesAFlag(Leaves):
    """It turns on what it needs, for everybody."""


@leaving("the number of threads", lambda: torch.set_num_threads(1))
class LeavesOneThread(Leaves):
    """It needs no more, and nobody else gets more."""


@faulty(
    "settings",
    "its (first call|backward) leaves the number of threads",
    "backward",
    Bias,
    when=eager,
)
class LeavesThreadsInItsBackward(BiasGrad):
    """Its sums are made by two threads, and so is everything after them."""

    def total(self, dy):
        torch.set_num_threads(2)
        return super().total(dy)


@faulty("unmodified_inputs", "forward modifies the input", "forward", GELU, when=eager)
class WritesWhereNothingIsNeeded(Pointwise):
    """Without a gradient to come nobody reads the input again."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        if not basic_op_ctxs[0].requires_grad:
            input_.copy_(y)
        return y, extras


# Sizes, numbers and parameters that are not the usual ones


@faulty("gradients", "(?s)gradient of bias.*rows=.131073,", "backward", Bias, when=eager)
class WorkspaceOf8192Rows(BiasGrad):
    """The sum is over as many rows as there is room for."""

    def total(self, dy):
        return dy[:8192].sum(0)


@faulty("gradients", "(?s)gradient of bias.*dtype=torch.float64", "backward", Bias, when=eager)
class SumsInSingle(BiasGrad):
    """What is in fp64 is summed in fp32."""

    def total(self, dy):
        return dy.sum(0, dtype=torch.float32).to(dy.dtype)


@faulty("output", "(?s)wrong by.*ConstantScale, 0.0001", "forward", ConstantScale, ConstantScale)
class NextToNothing(OneByOne):
    """A small factor is none."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        product = self.basic_ops[0].scale * self.basic_ops[1].scale
        return (y * 0 if abs(product) < 1e-3 else y), extras


@faulty("output", "(?s)wrong by.*rows=.3, 3", "forward", GELU, when=eager)
class AsManyRowsAsBatches(Pointwise):
    """A square of rows is read the other way round."""

    def spoil(self, y):
        square = y.ndim == 3 and y.shape[0] == y.shape[1] > 1
        return y.transpose(0, 1).contiguous() if square else y


@faulty("output", "(?s)wrong by.*parametrized=True", "forward", Bias, ReLU, when=eager)
class ReadsTheParameterAgain(opfuse.FusedOperation):
    """The bias is read from the op, and not from the context."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        relu, ctx = self.basic_ops[1], basic_op_ctxs[1]
        bias = self.basic_ops[0].bias.detach().to(input_.dtype)
        return relu.forward_value(relu.operand(ctx, input_ + bias)), [(), ()]


@faulty("gradients", "(?s)wrong by.*parametrized=True", "backward", BasicLinear, when=eager)
class ReadsTheWeightInItsBackward(OneByOne):
    """The same for a gradient, under the value that the weight has by then."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, grads, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        if dx is not None and dx.dtype is torch.float32 and grad_output.dtype is dx.dtype:
            dx = grad_output @ self.basic_ops[0].weight.detach().to(dx.dtype)
        return dx, grads, extras


@faulty("unmodified_gradients", "modifies the .grad of bias of op 1", "backward", BasicLinear, Bias)
class ForgetsAGradient(Backward):
    """It clears what earlier steps have added up."""

    def grad_bias(self, dy):
        self.basic_ops[1].bias.grad = None
        return super().grad_bias(dy)


FAULTS = {name: OTHERS.pop(name) for name in [*OTHERS] if name not in KNOWN}
"""These alone; those of ``faulty`` are run by every check in turn."""
