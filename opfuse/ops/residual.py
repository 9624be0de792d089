"""Ops that join, fork and swap: AddExtraInput, MakeExtraOutput, SwapExtraInput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.op_context import AllGrads, OperationContext, Outputs
from ._common import ExtraTensorOperation, expected, shows
from ._samples import samples
from .arithmetic import added


class _JoinOrFork(ExtraTensorOperation):
    """The base of both ops: they save nothing, and may work in place."""

    saved_names = ()
    feature_ratio = 1
    keeps_rows = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        # it is the forward that writes into those
        self.differentiable = not (in_place and self.num_extra_inputs)
        self.batch_invariant = ("rows", "exact") if self.differentiable else ()

    extra_repr = shows("in_place")


class AddExtraInput(_JoinOrFork):
    """``y = extra + x``: adds an extra input of the same shape, such as a residual branch.

    The operands' order decides the strides of the sum where theirs differ: the first one's count.

    Args:
        in_place: Add into the memory of the extra input and return that; the caller must not use
            its tensor afterwards. The sum is rounded to the extra input's dtype, as by
            ``Tensor.add_``. A leaf that requires grad is written into as well: it is what a stage
            of a pipeline receives, and its gradient is that of the sum. An extra input out of a
            channel belongs to the chain and is left alone, and so is every one while
            ``torch.compile`` traces, or while a mode may hold it: see
            :func:`opfuse.ops.authoring.may_write`.

    Attributes:
        input_first: Whether the sum is ``x + extra`` instead.

    Raises:
        ValueError: In a call, shapes that differ.
        RuntimeError: In a call with ``in_place``, an extra input that is a Parameter or a view of
            one, which every later call would find changed; and one of integers.
    """

    num_extra_inputs = 1
    params_in_compute_dtype = True
    sample_inputs = samples({}, {"in_place": True})
    input_first = False

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The sum; saves nothing."""
        ((extra,),) = basic_op_extra_inputs
        if self.check_extra(basic_op_ctxs[0], extra, input_.shape):
            return added(extra.detach(), input_), [()]
        return self.sum(input_, extra), [()]

    def sum(self, x: Tensor, extra: Tensor) -> Tensor:
        """A new tensor with the sum, in the operands' order; for fusions too."""
        return x + extra if self.input_first else extra + x

    def check_extra(self, ctx: OperationContext, extra: Tensor, shape: Sequence[int]) -> bool:
        """Refuse an extra input that is not of ``shape``, the input's; for fusions too.

        Returns:
            Whether the sum goes into the memory of ``extra``.
        """
        if extra.shape != shape:
            what = f"an extra input of shape {tuple(shape)}, the input's"
            raise ValueError(expected(self, what, tuple(extra.shape)))
        into = self.in_place and self._extra_input_channels[0] is None
        if not into or torch.compiler.is_compiling():
            return False
        if isinstance(extra, nn.Parameter) or isinstance(extra._base, nn.Parameter):
            who = f"{type(self).__name__}(in_place=True) got a Parameter, or a view of one"
            why = "as extra input, and must not write into it: pass in_place=False, or a copy"
            raise RuntimeError(f"{who}, {why}")
        return True

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> AllGrads:
        """Both gradients are ``grad_output`` itself."""
        return grad_output, [()], [(grad_output,)]


class MakeExtraOutput(_JoinOrFork):
    """``y = x``, and ``x`` once more as an extra output, such as the start of a residual branch.

    Both outputs share the memory of the input.

    Args:
        in_place: Let the backward add into an incoming gradient that has no other owner, instead of
            allocating.
    """

    num_extra_outputs = 1
    grad_input = "same"

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **_: Any) -> Outputs:
        """The input twice, as two tensor objects.

        An autograd function must not return one object twice.
        """
        return input_, [(input_.view_as(input_),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The sum of both gradients; None for the extra output's means zero."""
        ((grad_extra,),) = basic_op_grad_extra_outputs
        if grad_extra is None:
            return grad_output, [()], [()]
        dtype = grad_output.dtype
        holds_the_sum = torch.promote_types(dtype, grad_extra.dtype) is dtype
        if self.in_place and basic_op_ctxs[0].owns_grad_output and holds_the_sum:
            return added(grad_output, grad_extra), [()], [()]
        return grad_output + grad_extra, [()], [()]


class SwapExtraInput(ExtraTensorOperation):
    """``y = extra``, and ``x`` as an extra output: a chain goes on with another tensor.

    So one chain can rotate queries and keys: the keys come in, are rotated and swapped for the
    queries. Both outputs share the memory of what came in; neither shape has to fit the other.
    """

    num_extra_inputs = 1
    num_extra_outputs = 1
    saved_names = ()
    context_names = ("like",)
    batch_invariant = ("exact",)
    differentiable = True

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """Both tensors, as objects of their own; leaves what the input was like."""
        (ctx,), ((extra,),) = basic_op_ctxs, basic_op_extra_inputs
        if ctx.requires_grad:
            ctx.like = input_.shape, input_.dtype, input_.device
        return extra.view_as(extra), [(input_.view_as(input_),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """Both gradients, swapped; None for the extra output's means zero."""
        (ctx,), ((grad_extra,),) = basic_op_ctxs, basic_op_grad_extra_outputs
        if grad_extra is None:
            shape, dtype, device = ctx.like
            grad_extra = torch.zeros(shape, dtype=dtype, device=device)
        return grad_extra, [()], [(grad_output,)]
