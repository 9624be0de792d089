"""Rotations by given cosines and sines, of one tensor or of two that are swapped, compiled.

PyTorch's operations go over a tensor a dozen times. A function reads it once, and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opfuse import Fusion
from opfuse.ops import ApplyRoPE, SwapExtraInput
from opfuse.ops.rope import Rotation, rotated

from .fused import has_rows, matrix
from .loss import Arrays, Compiled, pays
from .tracing import Spec


class CompiledRotation(Compiled):
    """Rotations, forward and backward, with the numbers of the op.

    Small inputs, and those that no kernel takes, go through the ops, as if there were no fusion.
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
        extras, last = basic_op_extra_inputs, basic_op_ctxs[-1]
        swapped = extras[1] if len(extras) > 1 else ()
        given = [*zip((input_, *swapped), self._parts[::2], extras[::2], strict=True)]
        small = input_.numel() < max(self._min_elements, 1)
        if small or not all(_fits(*each, recorded=last.requires_grad) for each in given):
            return self.run_separately(basic_op_ctxs, input_, basic_op_extra_inputs=extras)
        made = [self._turned(op.rotation, x, tables) for x, op, tables in given]
        if last.requires_grad:
            last.to_save = [table for tables in extras[::2] for table in tables]
            last.turned = [
                (op.rotation, y.shape, y.dtype) for y, (_, op, _) in zip(made, given, strict=True)
            ]
        *others, y = made
        return y, [(), *[part for other in others for part in ((other,), ())]]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Any]],
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        extra, last = basic_op_grad_extra_outputs, basic_op_ctxs[-1]
        if getattr(last, "turned", None) is None:
            return self.run_separately_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=extra
            )
        saved = last.saved_tensors
        dys = [*(extra[1] if len(extra) > 1 else ()), grad_output]
        found = []
        for number, (dy, (rotation, shape, dtype)) in enumerate(zip(dys, last.turned, strict=True)):
            if dy is None:
                found.append(grad_output.new_zeros(shape, dtype=dtype))
            else:
                tables = saved[2 * number : 2 * number + 2]
                found.append(self._turned(rotation, dy, tables, back=True))
        dx, *others = found
        none = (None, None)
        return dx, [()] * len(extra), [none, *[part for each in others for part in ((each,), none)]]

    def _turned(
        self, rotation: Rotation, x: Tensor, tables: Sequence[Tensor], *, back: bool = False
    ) -> Tensor:
        """A tensor rotated, or its gradient rotated back."""
        (*lead, heads, size), rows = x.shape, x.shape[:-2].numel()
        flat = [matrix(x.reshape(rows, heads * size), rows)]
        flat += [matrix(table.expand(*lead, table.shape[-1]), rows) for table in tables]
        specs = [Spec(each.dtype, each.shape[-1]) for each in flat]
        kernel = self.made(
            "backward" if back else "forward", _turn, (rotation, heads, back), specs, x.device
        )
        return kernel(flat, rows)[0].view(x.shape)  # type: ignore[no-any-return]


def _turn(how: tuple[Rotation, int, bool], x: Tensor, cos: Tensor, sin: Tensor) -> Arrays:
    rotation, heads, back = how
    cos, sin = ApplyRoPE._turns((cos, sin), rotation, x.dtype)
    by_heads = x.view(x.shape[0], heads, -1)
    return {"y": rotated(by_heads, cos, sin, rotation, back=back).flatten(1)}


def _fits(x: Tensor, op: ApplyRoPE, tables: Sequence[Tensor], *, recorded: bool) -> bool:
    """Whether a kernel takes a tensor and its tables, and the op would refuse nothing."""
    if {type(x), *map(type, tables)} != {Tensor} or x.ndim < 3 or x.shape[-1] != op.head_dim:
        return False
    lead, widths = x.shape[:-2], ((op.rotary_dim,), (op.rotary_dim // 2,))
    return (
        op.rotary_dim > 0
        and has_rows(x)
        and all(
            table.shape[-1:] in widths
            and table.ndim <= len(lead) + 1
            and all(a in (1, b) for a, b in zip(table.shape[-2::-1], lead[::-1], strict=False))
            and not (recorded and table.requires_grad)
            for table in tables
        )
    )


def _benefit(ops: Sequence[Any], env: Any) -> float:
    """Additional passes over memory of the separate ops: a rotation takes 12."""
    return 12.0 * (1 + len(ops) // 2)


JOINT = [
    Fusion(
        pattern,
        CompiledRotation,
        pays,
        _benefit,
        priority=-100,
        name=f"compiled rotation{of}",
        needs_rows=True,
    )
    for pattern, of in (
        ((ApplyRoPE,), ""),
        ((ApplyRoPE, SwapExtraInput, ApplyRoPE), " of two tensors"),
    )
]
