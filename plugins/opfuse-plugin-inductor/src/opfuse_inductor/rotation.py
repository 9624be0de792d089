"""Rotations by given cosines and sines, compiled.

PyTorch's operations go over a tensor a dozen times. A function reads it once, and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opfuse import Fusion
from opfuse.ops import ApplyRoPE
from opfuse.ops.rope import Rotation, rotated

from .fused import has_rows, matrix
from .loss import Arrays, Compiled, pays
from .tracing import Spec


class CompiledRotation(Compiled):
    """A rotation, forward and backward, with the numbers of the op.

    Small inputs, and those that no kernel takes, go through the op, as if there were no fusion.
    """

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Any]],
        **unused: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (op,), (ctx,), (tables,) = self._parts, basic_op_ctxs, basic_op_extra_inputs
        small = input_.numel() < max(self._min_elements, 1)
        if small or not _fits(input_, op, tables, recorded=ctx.requires_grad):
            return self.run_separately(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs
            )
        if ctx.requires_grad:
            ctx.turned, ctx.to_save = op.rotation, tables if ctx.input_requires_grad else ()
        return self._turned(op.rotation, input_, tables, "forward"), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Any]],
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (ctx,) = basic_op_ctxs
        rotation = getattr(ctx, "turned", None)
        if rotation is None:
            return self.run_separately_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )
        saved = ctx.saved_tensors
        dx = self._turned(rotation, grad_output, saved, "backward") if saved else None
        return dx, [()], [(None, None)]

    def _turned(self, rotation: Rotation, x: Tensor, tables: Sequence[Any], way: str) -> Tensor:
        """A tensor rotated, or a gradient rotated back."""
        (*lead, heads, size), rows = x.shape, x.shape[:-2].numel()
        flat = [matrix(x.reshape(rows, heads * size), rows)]
        flat += [matrix(table.expand(*lead, table.shape[-1]), rows) for table in tables]
        specs = [Spec(each.dtype, each.shape[-1]) for each in flat]
        kernel = self.made(way, _turn, (rotation, heads, way == "backward"), specs, x.device)
        return kernel(flat, rows)[0].view(x.shape)  # type: ignore[no-any-return]


def _turn(how: tuple[Rotation, int, bool], x: Tensor, cos: Tensor, sin: Tensor) -> Arrays:
    rotation, heads, back = how
    cos, sin = ApplyRoPE._turns((cos, sin), rotation, x.dtype)
    by_heads = x.view(x.shape[0], heads, -1)
    return {"y": rotated(by_heads, cos, sin, rotation, back=back).flatten(1)}


def _fits(x: Tensor, op: ApplyRoPE, tables: Sequence[Any], *, recorded: bool) -> bool:
    """Whether a kernel takes a tensor and its tables, and the op would refuse nothing."""
    if {type(x), *map(type, tables)} != {Tensor} or x.ndim < 3 or x.shape[-1] != op.head_dim:
        return False
    lead, widths = x.shape[:-2], ((op.rotary_dim,), (op.rotary_dim // 2,))
    for table in tables:
        pairs = zip(table.shape[-2::-1], lead[::-1], strict=False)
        broadcasts = table.ndim <= x.ndim - 1 and all(a in (1, b) for a, b in pairs)
        if table.shape[-1:] not in widths or not broadcasts or (recorded and table.requires_grad):
            return False
    return op.rotary_dim > 0 and has_rows(x)


_NAME = "compiled rotation"
JOINT = [Fusion((ApplyRoPE,), CompiledRotation, pays, 12, -100, _NAME, needs=("rows",))]
