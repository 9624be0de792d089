"""An activation whose output is computed again in the backward, so that no linear keeps it.

Where PyTorch has one kernel for the activation, that costs less than a hundredth of the products
beside it in fp32 on a CPU. In half precision, where the products are faster, it is more. Other
activations are compiled, or are part of a fusion of the whole MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf, Optional, has_same_math
from opfuse.ops import GELU, Dropout, SiLU

from .fused import Ctxs


class RecomputedActivation(FusedOperation):
    """An activation, and a dropout that drops nothing, such as one of a probability of 0.

    The backward computes the output again from the input of the activation.
    """

    recomputes = True
    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._ops: tuple[Any, ...] = tuple(basic_ops)  # looking up a module's attributes is slow
        self._no_extras = ((),) * len(basic_ops)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctx: Any = basic_op_ctxs[0]
        y = value = self._ops[0].op_forward(ctx, input_)
        for drop, of_drop in zip(self._ops[1:], basic_op_ctxs[1:], strict=True):
            y = drop.op_forward(of_drop, y)
        # its probability may have changed since the plan was made
        if y is value and ctx.may_recompute and ctx.to_save and ctx.to_save[0] is not None:
            ctx.recomputable_output = y
        return y, self._no_extras

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        return self._ops[0].forward_value(basic_op_ctxs[0].saved_tensors[0])  # type: ignore[no-any-return]

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        dx: Any = grad_output
        for op, ctx in zip(self._ops[::-1], basic_op_ctxs[::-1], strict=True):
            dx = None if dx is None else op.op_backward(ctx, dx)[0]
        return dx, self._no_extras, self._no_extras


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if env.options.get("mlp.keep_activation", False):
        return "the option mlp.keep_activation keeps it"
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    if env.device.type != "cpu":
        return "computing it again was measured on CPUs only"
    if env.compiling:
        return "torch.compile merges what is computed twice, so that nothing less would be kept"
    asked_for = env.options.get("prefer") == "memory" or env.measured is not None
    if env.dtype in (torch.bfloat16, torch.float16) and not asked_for:
        return 'in half precision it takes time: see opfuse tune, or prefer="memory"'
    if env.recipe is not None:
        return f"{type(env.recipe).__name__} quantizes what a linear keeps"
    act, *drops = ops
    if any(drop.training and drop.p for drop in drops):
        return "what a dropout has drawn is not computed again here"
    if act.cache_quantized_input:
        return "its input is kept in FP8, from which its output would be computed again"
    by_erf = has_same_math(act, GELU) and act.approximate == "none"
    if not by_erf and not has_same_math(act, SiLU):
        return "PyTorch has no fast kernel for it"
    return True


JOINT = [
    Fusion(
        (OneOf(GELU, SiLU), Optional(Dropout)),
        RecomputedActivation,
        _pays,
        benefit=1,
        priority=-150,  # a kernel goes first
        name="recomputed activation",
    )
]
