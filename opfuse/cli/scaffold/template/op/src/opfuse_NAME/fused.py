"""The fused op, and its pattern."""

from __future__ import annotations

from typing import Any

import torch
from opfuse import FusedOperation, Fusion, OperationContext
from opfuse.ops import AddExtraInput
from opfuse.ops.authoring import cast, widen
from torch import Tensor

from .ops import LayerScale


class ScaleAdd(FusedOperation):
    """LayerScale + AddExtraInput: the scaled branch is not written before it is added."""

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **given: Any
    ) -> tuple[Tensor, Any]:
        """The sum, and no extra outputs. Leaves for the backward what the ops would."""
        scale, add = self.basic_ops
        ctx, add_ctx = basic_op_ctxs
        ((extra,),) = given["basic_op_extra_inputs"][1:]
        in_place = add.check_extra(add_ctx, extra, input_.shape)
        if in_place or extra.stride() != input_.stride():  # the sum would have other strides
            return self.run_separately(basic_op_ctxs, input_, **given)
        x = scale.operand(ctx, input_)
        (weight,) = ctx.params
        factors = widen(x), cast(weight, widen(x).dtype)
        y = torch.addcmul(widen(extra), *factors, value=scale.factor)
        return cast(y, torch.promote_types(x.dtype, extra.dtype)), [(), ()]


FORWARD = [Fusion((LayerScale, AddExtraInput), ScaleAdd, name="scale+add")]
