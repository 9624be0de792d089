"""Fusions that are wrong only where two circumstances meet, or in what few callers look at.

``FAULTS`` maps a name to the pass, the fusion and the check that must catch it.
"""

import torch
from chains import Joint
from faulty import Backward, Forward, Pointwise

import opfuse
from opfuse import ops
from opfuse.ops import GELU, AddExtraInput, BasicLinear, Bias, ClampedSwiGLU, ConstantScale, SiLU

FAULTS = {}


def fault(check, kind, *pattern, **given):
    def add(cls):
        FAULTS[cls.__name__] = kind, opfuse.Fusion(pattern, cls, name=cls.__name__, **given), check
        return cls

    return add


def rows_of(x):
    return x.numel() // max(1, x.shape[-1]) if x.ndim else 1


def is_turned(x):
    return x.ndim > 1 and x.stride(-1) != 1 and x.shape[-1] > 1


@fault("gradients|requires_grad|autocast|magnitude", "backward", BasicLinear, Bias)
class FrozenWeightInHalf(Backward):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output)
        frozen = not basic_op_ctxs[0].param_requires_grad[0]
        is_wrong = frozen and dx is not None and dx.dtype is torch.float16
        return (1.5 * dx if is_wrong else dx), params, extras


@fault("output|requires_grad|magnitude|autocast", "joint", GELU, AddExtraInput)
class HalfExtraOfAFrozenInput(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        extra = basic_op_extra_inputs[1][0]
        given = {"basic_op_extra_inputs": basic_op_extra_inputs}
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        frozen = basic_op_ctxs[1].requires_grad and not basic_op_ctxs[0].input_requires_grad
        return (1.25 * y if frozen and extra.dtype is torch.float16 else y), extras


@fault("orders", "forward", GELU)
class SecondEvaluationAfterTraining(Pointwise):
    trained, count = False, 0

    def spoil(self, y):
        cls = SecondEvaluationAfterTraining
        if self.basic_ops[0].training:
            cls.trained = True
        elif cls.trained:
            cls.count += 1
        return 1.3 * y if cls.trained and cls.count % 2 and not self.basic_ops[0].training else y


@fault("output|magnitude|autocast", "forward", GELU)
class OddRowsTurned(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (1.2 * y if rows_of(input_) % 16 and is_turned(input_) else y), extras


@fault("errors", "forward", GELU)
class LeavesAModeAfterAnError(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        was = torch.is_anomaly_enabled()
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        result = super().fuser_forward(basic_op_ctxs, input_)
        torch.autograd.set_detect_anomaly(was)
        return result


@fault("keeps_numbers", "joint", ops.ReLU)
class ReadsTheModeInItsBackward(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        result = super().fuser_forward(basic_op_ctxs, input_, **given)
        basic_op_ctxs[0].trained = self.basic_ops[0].training
        return result

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        changed = self.basic_ops[0].training != basic_op_ctxs[0].trained
        return (2 * dx if changed and dx is not None else dx), params, extras


@fault("main_grad", "backward", BasicLinear, Bias)
class AddsWhereItShouldReplace(Backward):
    adds_to_sum = True

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output)
        total = basic_op_ctxs[0].grad_sum
        if total is not None and params[0][0] is not None:
            total[0].add_(params[0][0].to(total[0].dtype))
            params = [(total[0],), params[1]]
        return dx, params, extras


@fault("magnitude|autocast", "forward", Bias)
class DoublesOnTheWay(opfuse.FusedOperation):
    """What is halved again overflows above 32768 in half precision."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias = basic_op_ctxs[0].params[0].to(input_.dtype)
        return (2 * input_ + 2 * bias) / 2, [()]


@fault("compile", "forward", BasicLinear, Bias)
class OtherwiseWhereItIsCompiled(Forward):
    def spoil(self, y, x):
        return y + 1 if torch.compiler.is_compiling() and x.ndim > 2 else y


@fault("strides", "forward", GELU)
class LaysItsResultOutAnew(Pointwise):
    def spoil(self, y):
        return y.contiguous()


@fault("output", "forward", ClampedSwiGLU)
class TwoNumbersHaveAWayOfTheirOwn(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = self.run_separately(basic_op_ctxs, input_, **given)
        (op,) = self.basic_ops
        return (1.5 * y if (op.alpha, op.glu_linear_offset) == (1.0, 0.0) else y), extras

    kwarg_names = None


def many(matched, env):
    return True if env.rows is None or env.rows >= 64 else "it takes 64 rows or more"


@fault("output|magnitude|autocast", "forward", SiLU, when=many, needs_rows=True)
class ManyRowsTurned(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (1.2 * y if is_turned(input_) else y), extras


@fault("repeatable|output", "joint", ConstantScale)
class OtherwiseWithoutGradients(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        return (y if basic_op_ctxs[0].requires_grad or input_.ndim < 3 else 1.1 * y), extras
