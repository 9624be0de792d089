"""Activations that are computed again in the backward, so that no linear keeps their output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation


class RecomputedActivation(FusedOperation):
    """An activation whose output, after a cast, is computed and cast again in the backward.

    From its input as it was saved: to the same bits, unless ``cache_quantized_input`` saved codes.
    """

    recomputes = True

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        act: Any = self.basic_ops[0]
        (ctx,) = basic_op_ctxs
        y = act.op_forward(ctx, input_)
        if ctx.may_recompute and ctx.input_requires_grad:  # and so the input is saved
            ctx.recomputable_output = y
        return y, ((),)

    def fuser_recompute(self, basic_op_ctxs: Any) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        act: Any = self.basic_ops[0]
        (ctx,) = basic_op_ctxs
        if "numbers" in act.context_names:
            act = act.with_numbers(ctx.numbers)
        return act.forward_value(act.saved_input(ctx))  # type: ignore[no-any-return]


def recomputes(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: where something is kept that can be computed again."""
    (act,) = ops
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    if not act.deterministic:
        who = type(act).__name__
        return f"{who} does not declare itself deterministic, and would be computed again"
    if env.compiling:
        return "torch.compile merges what is computed twice, so that nothing less would be kept"
    return True


def is_asked_for(ops: Any, env: Environment) -> bool | str:
    """The same of an activation that is asked to keep less, whatever it takes."""
    if not ops[0].cache_quantized_input:
        return f"{type(ops[0]).__name__} does not have cache_quantized_input=True"
    return recomputes(ops, env)


# the priority: fusions that are faster, and keep as little, go first
_EACH: Any = {"priority": -150, "needs": ("recipe",)}

FORWARD = [
    Fusion(
        (Subclasses(Activation),),
        RecomputedActivation,
        recomputes,
        0.0,
        name="recomputed activation",
        declares=("trades_time",),
        **_EACH,
    ),
    Fusion(
        (Subclasses(Activation),),
        RecomputedActivation,
        is_asked_for,
        0.0,
        name="recomputed from codes",
        **_EACH,
    ),
]
