"""Fusions that are wrong, each in one way, and which check must say so in which words.

``FAULTS`` maps a name to a :class:`Fault`; ``faulty_values`` adds to it. Those that need a process of their own are in
``test_conformance_catches``, as files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from chains import Forwarding
from right import Backward, BiasGrad, Forward, Pointwise, Recomputing
from torch.nn import functional as F

import opfuse
from opfuse.core.fusion import Fusion, Optional, Subclasses
from opfuse.ops import (
    GELU,
    Activation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    ReLU,
    SiLU,
)
from opfuse.testing import Op


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong fusion, made again by ``make``; ``says`` is a pattern that the message of ``check`` must match."""

    check: str
    says: str
    kind: str
    make: Callable[[], Any]
    examples: tuple[Any, ...] = ()


FAULTS: dict[str, Fault] = {}


def faulty(check, says, kind, *pattern, when=None, examples=(), **given):
    """Register a fused op class, or a function that makes one, as a fault."""

    def add(cls):
        make = (
            (lambda: cls)
            if kind == "function"
            else lambda: Fusion(pattern, cls, when, name=cls.__name__, **given)
        )
        FAULTS[cls.__name__] = Fault(
            check, says, "forward" if kind == "function" else kind, make, examples
        )
        return cls

    return add


# What is saved


@faulty("saved_state", r"'input' for op 2 \(GELU\) is wrong by", "forward", BasicLinear, Bias, GELU)
class SavesTheWrongTensor(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        product = F.linear(x, weight)
        hidden = product + basic_op_ctxs[1].params[0].to(x.dtype)
        self.basic_ops[2].operand(basic_op_ctxs[2], product)
        return F.gelu(hidden, approximate="tanh"), [(), (), ()]


@faulty("recompute", "gradient", "forward", GELU)
class RecomputesWhatItGot(Recomputing):
    def again(self, x):
        return x


@faulty("recompute", "must be a matrix", "forward", GELU)
class RecomputesInRows(Recomputing):
    def again(self, x):
        return super().again(x).flatten()


@faulty("recompute", "where no later op would do without", "forward", GELU)
class LetsGoUnasked(Pointwise):
    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        basic_op_ctxs[0].recomputable_output = y
        return y, extras

    def fuser_recompute(self, basic_op_ctxs):
        return self.basic_ops[0].forward_value(*basic_op_ctxs[0].saved_tensors)


@faulty(
    "saved_state",
    r"saves as 'input' for op 0 \(BasicLinear\) has shape \(12, 8\)",
    "forward",
    BasicLinear,
    Bias,
)
class SavesInAnotherOrder(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        result = super().fuser_forward(basic_op_ctxs, input_)
        basic_op_ctxs[0].to_save = basic_op_ctxs[0].to_save and basic_op_ctxs[0].to_save[::-1]
        return result


@faulty("saved_state", "what it saves as 'weight' for op 0", "forward", BasicLinear, Bias)
class SavesWhatNobodyNeeds(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        result = super().fuser_forward(basic_op_ctxs, input_)
        if basic_op_ctxs[0].requires_grad:
            x = input_.to(basic_op_ctxs[0].dtype or input_.dtype)
            basic_op_ctxs[0].save_for_backward(x, basic_op_ctxs[0].params[0].to(x.dtype))
        return result


@faulty(
    "saved_state",
    "'input' for op 0 .* has dtype torch.float32 instead of torch.bfloat16",
    "forward",
    ReLU,
)
class SavesInAnotherDtype(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        result = super().fuser_forward(basic_op_ctxs, input_)
        if basic_op_ctxs[0].to_save is not None:
            basic_op_ctxs[0].to_save = tuple(
                t.float() if isinstance(t, torch.Tensor) else t for t in basic_op_ctxs[0].to_save
            )
        return result


@faulty("saved_state", "shares memory with the output", "forward", BasicLinear, SiLU)
class SavesInTheMemoryOfItsOutput(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        hidden = F.linear(x, weight)
        hidden, y = torch.stack(
            [hidden, F.silu(hidden)]
        ).unbind()  # both are there for as long as one is
        self.basic_ops[1].operand(basic_op_ctxs[1], hidden)
        return y, [(), ()]


@faulty(
    "saved_state", "saves tensors for op 0 .*, which takes no part", "forward", BasicLinear, Bias
)
class SavesBeforeTheFirstGradient(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        result = super().fuser_forward(basic_op_ctxs, input_)
        if not basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(None, None)
        return result


@faulty(
    "saved_bytes",
    "it keeps .* bytes for the backward, the separate ops keep",
    "joint",
    BasicLinear,
    Bias,
)
class KeepsTooMuch(Forwarding):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        result = super().fuser_forward(basic_op_ctxs, input_, **given)
        if basic_op_ctxs[0].requires_grad and isinstance(input_, torch.Tensor):
            basic_op_ctxs[1].save_for_backward(input_.repeat(4, *[1] * (input_.ndim - 1)))
        return result


@faulty("without_grad", "under no_grad, it saves tensors", "joint", BasicLinear, Bias)
class SavesWithoutGrad(Forwarding):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        result = super().fuser_forward(basic_op_ctxs, input_, **given)
        if not basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, None)
        return result


# Numbers


@faulty(
    "gradients",
    r"the gradient of weight of op 0 \(BasicLinear\) is wrong by",
    "backward",
    BasicLinear,
    Bias,
)
class DoublesAGradient(Backward):
    def grad_weight(self, dy, x):
        return 2 * (dy.t() @ x)


@faulty(
    "main_grad",
    r"with accumulate_into_main_grad=True, the gradient of weight of op 0 \(BasicLinear\) is wrong by",
    "backward",
    BasicLinear,
    Bias,
)
class AddsToMainGradItself(Backward):
    def grad_weight(self, dy, x):
        grad = dy.t() @ x
        if self.basic_ops[0].accumulates_grads:
            self.basic_ops[0].weight.main_grad.add_(grad)
        return grad


@faulty(
    "gradients",
    r"its backward returns a gradient of shape \(3, 12\) for bias of Bias",
    "backward",
    BasicLinear,
    Bias,
)
class SumsOneDimensionOnly(Backward):
    def grad_bias(self, dy):
        return dy.sum(0) if dy.ndim > 1 else dy.clone()


@faulty(
    "requires_grad",
    "it computes the gradient of bias of Bias, which needs none",
    "backward",
    BasicLinear,
    Bias,
)
class IgnoresWhatNeedsAGradient(Backward):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, (dw, _), extras = super().fuser_backward(basic_op_ctxs, grad_output)
        return dx, [dw, (self.grad_bias(grad_output),)], extras


@faulty(
    "requires_grad",
    "fuser_backward gave None as the gradient of its input",
    "backward",
    BasicLinear,
    Bias,
)
class ForgetsTheInputOfAFrozenWeight(Backward):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, grads, extras = super().fuser_backward(basic_op_ctxs, grad_output)
        return (dx if basic_op_ctxs[0].param_requires_grad[0] else None), grads, extras


@faulty("runs", "gave None for extra output 0", "forward", MakeExtraOutput, BasicLinear)
class DropsAnExtraOutput(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[1], input_)
        return F.linear(x, weight), [(None,), ()]


@faulty("output", "extra output 0 is wrong by", "forward", MakeExtraOutput, ConstantScale)
class GivesTheWrongExtraOutput(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        basic_op_ctxs[1].scale = self.basic_ops[1].scale
        y = input_ * self.basic_ops[1].scale
        return y, [(y.clone(),), ()]


@faulty(
    "gradients", "the gradient of the input is wrong by", "backward", MakeExtraOutput, ConstantScale
)
class DropsTheGradientOfAnExtraOutput(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * basic_op_ctxs[1].scale, [(), ()], [(), ()]


@faulty("gradients", "raised .*NoneType", "backward", MakeExtraOutput, ConstantScale)
class NeedsTheGradientOfAnExtraOutput(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ((extra,), _) = basic_op_grad_extra_outputs
        return extra + grad_output * basic_op_ctxs[1].scale, [(), ()], [(), ()]


@faulty("output", "(?s)the output is (wrong by|NaN in).*layout='", "forward", GELU)
class IgnoresStrides(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.basic_ops[0].operand(basic_op_ctxs[0], input_)
        dense = torch.as_strided(input_, input_.shape, torch.empty(input_.shape).stride())
        return F.gelu(dense, approximate=self.basic_ops[0].approximate), [()]


@faulty("gradients", "(?s)is (wrong by|NaN in).*layout='", "backward", GELU)
class IgnoresStridesOfTheGradient(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (gelu,), (ctx,) = self.basic_ops, basic_op_ctxs
        strides = torch.empty(grad_output.shape).stride()
        dense = torch.as_strided(grad_output, grad_output.shape, strides)
        return gelu.backward_value(dense, gelu.saved_input(ctx)), [()], [()]


@faulty("output", r"(?s)wrong by.*rows=\((63|65|127|129|255|257),\)", "forward", BasicLinear, Bias)
class LeavesTheLastRow(Forward):
    def spoil(self, y, x):
        y[128:] = y[64:127] = 0
        return y


@faulty("output", r"(?s)wrong by.*BasicLinear, 15, ", "forward", BasicLinear, Bias)
class LeavesOddFeatures(Forward):
    def spoil(self, y, x):
        if x.shape[-1] % 2:
            y = y - x[..., -1:]
        return y


@faulty("output", "(?s)wrong by.*dtype=torch.bfloat16", "forward", GELU)
class IsWrongInHalfPrecision(Pointwise):
    def spoil(self, y):
        return y * 1.05 if y.dtype is torch.bfloat16 else y


@faulty("output", "the output has dtype torch.float32 instead of torch.bfloat16", "forward", GELU)
class GivesAnotherDtype(Pointwise):
    def spoil(self, y):
        return y.float() if y.dtype is torch.bfloat16 else y


@faulty(
    "output",
    r"(?s)the output is wrong by.*ops=\(testing.Op\(ops.BasicLinear, 8, 12\), testing.Op",
    "forward",
    BasicLinear,
    Subclasses(Activation),
)
class TakesEveryActivationForGELU(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        act = self.basic_ops[1]
        hidden = act.operand(basic_op_ctxs[1], F.linear(x, weight))
        y = act.forward_value(hidden) if act.gated else F.gelu(hidden, approximate="tanh")
        return y, [(), ()]


@faulty("output", "wrong by", "forward", BasicLinear, Optional(Bias), GELU)
class ForgetsTheOptionalBias(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        y = F.linear(x, weight)
        self.basic_ops[-1].operand(
            basic_op_ctxs[-1], y + (basic_op_ctxs[1].params[0] if len(basic_op_ctxs) > 2 else 0)
        )
        return F.gelu(y, approximate="tanh"), [()] * len(basic_op_ctxs)


class _LinearGelu(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        hidden = self.basic_ops[1].operand(basic_op_ctxs[1], F.linear(x, weight))
        return F.gelu(hidden, approximate="tanh"), [(), ()]


@faulty(
    "neighbours",
    "its pattern with a subclass of BasicLinear .*wrong by",
    "function",
    examples=([Op(BasicLinear, 8, 12), Op(GELU)],),
)
def looks_at_classes_only(ops, *, recipe):
    """A fusion function that asks with isinstance."""
    if len(ops) == 2 and isinstance(ops[0], BasicLinear) and isinstance(ops[1], GELU):
        return [_LinearGelu(ops)]
    return ops


@faulty("repeatable", "in call 2, the output is wrong by", "forward", GELU)
class IsWrongTheSecondTime(Pointwise):
    calls = 0

    def spoil(self, y):
        self.calls += 1
        return y + 1 if self.calls == 2 else y


@faulty("repeatable", "differs in its last bits between call 1 and call", "forward", GELU)
class IsNotDeterministic(Pointwise):
    calls = 0

    def spoil(self, y):
        self.calls += 1
        moves = self.calls % 2 and y.dtype is torch.float32
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if moves else y


@faulty("nan_and_inf", "the output is NaN in 0 places", "forward", ReLU)
class SwallowsNaN(Pointwise):
    def spoil(self, y):
        return torch.where(y > 0, y, 0)


@faulty(
    "autocast", "the output has dtype torch.float32 instead of torch.bfloat16", "joint", BasicLinear
)
class IgnoresAutocast(Forwarding):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        basic_op_ctxs[0].dtype = None
        return super().fuser_forward(basic_op_ctxs, input_, **given)


@faulty("recipe", "in step 1 under .* the output is wrong by", "forward", BasicLinear, Bias)
class IgnoresTheRecipe(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        if basic_op_ctxs[0].quantizers:
            x = input_.dequantize() if hasattr(input_, "quantizer") else input_
            y = F.linear(x, basic_op_ctxs[0].params[0]) + 0.01
        return y, extras


# Memory


@faulty("unmodified_inputs", "its forward modifies the input", "forward", ConstantScale, ReLU)
class WritesIntoItsInput(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        basic_op_ctxs[0].scale = self.basic_ops[0].scale
        scaled = input_.mul_(self.basic_ops[0].scale)
        act = self.basic_ops[1]
        return act.forward_value(act.operand(basic_op_ctxs[1], scaled)), [(), ()]


@faulty(
    "saved_state",
    r"(?s)'weight' for op 0 \(BasicLinear\) has dtype torch.bfloat16 .*prefer='memory'",
    "forward",
    BasicLinear,
    Bias,
)
class KeepsTheCastOfAWeight(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear, bias = basic_op_ctxs
        dtype = linear.dtype or input_.dtype
        x, weight = input_.to(dtype), linear.params[0].to(dtype)
        if linear.requires_grad:
            wgrad, dgrad = linear.param_requires_grad[0], linear.input_requires_grad
            linear.save_for_backward(x if wgrad else None, weight if dgrad else None)
        return F.linear(x, weight, bias.params[0].to(dtype)), [(), ()]


@faulty("autocast", r"(?s)it raised RuntimeError.*prefer='memory'", "backward", BasicLinear, Bias)
class TakesASavedWeightForCast(Backward):
    def saved_operands(self, ctx):
        return ctx.saved_tensors


@faulty("held_results", "it writes into a result of aten.mm", "forward", BasicLinear, Bias)
class AddsIntoTheProduct(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        (bias,) = basic_op_ctxs[1].params
        return torch.nn.functional.linear(x, weight).add_(bias), [(), ()]


@faulty("unmodified_gradients", "its backward modifies the incoming gradient", "backward", GELU)
class WritesIntoAnyGradient(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        return self.basic_ops[0].backward_value(grad_output.clone(), x, out=grad_output), [()], [()]


@faulty("unmodified_gradients", "its backward modifies saved tensor", "backward", BasicLinear, GELU)
class WritesIntoWhatWasSaved(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (hidden,), (x, weight) = basic_op_ctxs[1].saved_tensors, basic_op_ctxs[0].saved_tensors
        dy = self.basic_ops[1].backward_value(grad_output.to(hidden.dtype), hidden)
        hidden.copy_(dy)
        rows = hidden.reshape(-1, dy.shape[-1])
        dw = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        return (None if weight is None else hidden @ weight), [(dw,), ()], [(), ()]


@faulty("aliasing", "output 0 shares memory with output 0 of an earlier call", "forward", GELU)
class ReusesItsOutput(Pointwise):
    buffers: ClassVar[dict] = {}

    def spoil(self, y):
        return self.buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@faulty(
    "aliasing",
    r"(?s)gradient of 1.bias shares memory with incoming gradient 0.*rows=\(\)",
    "backward",
    BasicLinear,
    Bias,
)
class GivesTheGradientItselfForOneRow(Backward):
    def grad_bias(self, dy):
        return dy if dy.ndim == 1 else super().grad_bias(dy)


@faulty("grad_input", "declares grad_input='fresh', but returns grad_output", "backward", Bias)
class ClaimsAFreshGradient(BiasGrad):
    grad_input = "fresh"


@faulty(
    "released",
    "the input is still referenced, by .* after the chain is gone",
    "forward",
    BasicLinear,
    Bias,
)
class KeepsItsInput(Forward):
    kept: ClassVar[list] = []

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.kept.append(input_)
        return super().fuser_forward(basic_op_ctxs, input_)


# Planning


@faulty(
    "condition",
    "its condition returned False instead of True or a sentence",
    "forward",
    GELU,
    when=lambda ops, env: False,
)
class SaysNoWithoutAReason(Pointwise):
    pass


@faulty(
    "condition",
    "its condition raised ZeroDivisionError",
    "forward",
    GELU,
    when=lambda ops, env: 1 / 0,
)
class FailsInItsCondition(Pointwise):
    pass


def _reads(ops, env):
    return True if ops[0].weight.isinf().sum().item() < 1e9 else "the weight is too large"


@faulty(
    "condition", "must not read the data of parameters", "forward", BasicLinear, Bias, when=_reads
)
class ReadsDataToPlan(Forward):
    pass


def _no_cached_input(ops, env):
    return not ops[0].cache_quantized_input


@faulty(
    "condition",
    "returned False instead of True or a sentence",
    "forward",
    GELU,
    when=_no_cached_input,
)
class RefusesWithoutASentence(Pointwise):
    pass


_planned: list = []


def _every_other_time(ops, env):
    _planned.append(1)
    return True if len(_planned) % 2 else "it was not its turn"


@faulty("condition", "says .*, then", "forward", GELU, when=_every_other_time)
class DependsOnWhatWasPlannedBefore(Pointwise):
    pass


@faulty(
    "unmodified_inputs",
    r"(?s)its forward modifies the input.*channels='residual'",
    "forward",
    BasicLinear,
    AddExtraInput,
)
class WritesIntoAChannel(opfuse.FusedOperation):
    """Writes into any extra input, though one out of a channel is still needed."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        ((), (extra,)) = basic_op_extra_inputs
        y = F.linear(x, weight)
        self.basic_ops[1].check_extra(basic_op_ctxs[1], extra, y.shape)
        return (extra.detach().add_(y) if self.basic_ops[1].in_place else extra + y), [(), ()]


# Around


@faulty(
    "errors",
    "an error raised inside its operation .* does not reach the caller",
    "forward",
    BasicLinear,
    Bias,
)
class SwallowsErrors(Forward):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        try:
            return super().fuser_forward(basic_op_ctxs, input_)
        except RuntimeError:
            return self.run_separately(basic_op_ctxs, input_, basic_op_extra_inputs=[(), ()])


@faulty(
    "errors",
    "an error raised inside its operation .* does not reach the caller",
    "backward",
    BasicLinear,
    Bias,
)
class SwallowsErrorsOfItsBackward(Backward):
    def grad_input_of(self, dy, weight):
        try:
            return dy @ weight
        except RuntimeError:
            return torch.einsum("...o,oi->...i", dy, weight)


@faulty(
    "errors",
    "extra input 0 with one row is accepted, where the separate ops raise ValueError",
    "forward",
    BasicLinear,
    AddExtraInput,
)
class BroadcastsAnExtraInput(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        ((), (extra,)) = basic_op_extra_inputs
        y = F.linear(x, weight)
        if self.basic_ops[1].check_extra(basic_op_ctxs[1], extra, extra.shape):
            return extra.detach().add_(y), [(), ()]
        return y + extra, [(), ()]


@faulty("host_reads", r"_local_scalar_dense.* no CUDA graph can hold", "forward", GELU)
class ReadsDataToRun(Pointwise):
    def spoil(self, y):
        return y + 0 if y.numel() and y.detach().sum().item() > 0 else y


@faulty("compile", "it raised .*", "forward", GELU)
class CannotBeTraced(Pointwise):
    def spoil(self, y):
        torch._dynamo.graph_break()
        return y


@torch.library.custom_op("opfuse_faulty::gelu", mutates_args=())
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh").contiguous()


@_gelu.register_fake
def _(x):
    return x.new_empty((*x.shape, 1))


def _by_tanh(ops, env):
    return True if ops[0].approximate == "tanh" else "it has the form by tanh alone"


@faulty("opcheck", "opcheck of opfuse_faulty.gelu", "forward", GELU, when=_by_tanh)
class HasAWrongFake(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return _gelu(self.basic_ops[0].operand(basic_op_ctxs[0], input_)), [()]
