"""The loss of a student that learns from the logits of a teacher."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.op_context import AllGrads, Outputs
from opfuse.ops.authoring import ExtraTensorOperation, expected, rows_of, shows, widen

from .sequences import check_choice, check_range


class Teacher(NamedTuple):
    """What the teacher's logits are computed from, and the numbers of a :class:`Distillation`.

    Attributes:
        hidden: The input of the teacher's head, ``(rows, features)``.
        head: The weight of its head, ``(classes, features)``.
        beta, temperature, reduction: See the op.
        ignore_index: What is no row's number.
        label_smoothing, weight: None, as :class:`~opfuse.ops.cross_entropy.LossNumbers` has them.
    """

    hidden: Tensor
    head: Tensor
    beta: float
    temperature: float
    reduction: str
    ignore_index: int = -1
    label_smoothing: float = 0.0
    weight: None = None

    def compare(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of some rows, and its gradient by the student's logits, in fp32.

        With the student's probabilities ``p``, the teacher's ``q``, and ``m = beta q + (1 - beta)
        p``, the gradient of ``beta KL(q || m) + (1 - beta) KL(p || m)`` is ``p (g - sum(p g))``
        with ``g = (1 - beta) log(p / m)``.

        Args:
            logits: The student's, ``(rows, classes)``.
            rows: The numbers of these rows among those of ``hidden``.
        """
        beta, hidden = self.beta, self.hidden.index_select(0, rows)
        theirs = F.linear(hidden, self.head.to(hidden.dtype))
        log_p, log_q = (
            torch.log_softmax(widen(each) / self.temperature, -1) for each in (logits, theirs)
        )
        log_q = log_q.to(log_p.dtype)
        p, q = log_p.exp(), log_q.exp()
        if beta == 0:
            return (q * (log_q - log_p)).sum(-1), (p - q) / self.temperature
        if beta == 1:
            g = log_p - log_q
            loss = (p * g).sum(-1)
        else:
            log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
            g = (1 - beta) * (log_p - log_m)
            loss = beta * (q * (log_q - log_m)).sum(-1) + (p * g).sum(-1)
        return loss, p * (g - (p * g).sum(-1, keepdim=True)) / self.temperature


class Distillation(ExtraTensorOperation):
    """The divergence of a student's classes from those of a teacher, row by row.

    Takes the student's logits ``(..., classes)``. Extra inputs: ``hidden (..., features)``, the
    input of the teacher's head; ``weight (classes, features)``, the weight of that head; and
    ``targets``, integers ``(...)``, of which only ``ignore_index`` is read. So no logits of the
    teacher are kept, and behind a linear none of the student's either. The teacher gets no
    gradient. It computes in fp32, and gives the loss in fp32, for fp64 in fp64.

    With the probabilities ``p`` of the student and ``q`` of the teacher, both of logits divided by
    the temperature, and ``m = beta q + (1 - beta) p``, the loss of a row is ``beta KL(q || m) + (1
    - beta) KL(p || m)``: the generalized Jensen-Shannon divergence (arXiv:2306.13649). With
    ``beta=0`` it is the forward ``KL(q || p)`` (Hinton et al. 2015), with ``beta=1`` the reverse
    ``KL(p || q)`` (arXiv:2306.08543). It is not multiplied by the square of the temperature.

    Args:
        beta: See above.
        temperature: What logits are divided by.
        ignore_index: Rows with this target do not count.
        reduction: ``"mean"`` over the rows that count, NaN over none; ``"sum"``; or ``"none"``, the
            loss of each row in the shape of the targets.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range; in a call, extra inputs of another shape, or a teacher
            that requires grad.
    """

    num_extra_inputs = 3
    extra_input_dtypes = ("floating", "floating", "integer")
    saved_names = ("gradient",)
    context_names = ("input_dtype",)
    grad_input = "fresh"
    differentiable = True
    autocast_dtype = torch.float32
    real_numbers = ("beta", "temperature")

    def __init__(
        self,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.beta, self.temperature = beta, temperature
        self.ignore_index, self.reduction = ignore_index, reduction

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "beta":
            check_range(self, name, value, 0, 1, ends="[]")
        elif name == "temperature":
            check_range(self, name, value, 0)
        elif name == "reduction":
            check_choice(self, name, value, ("mean", "sum", "none"))
        elif name == "ignore_index" and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(expected(self, "a whole number as ignore_index", repr(value)))
        super().__setattr__(name, value)

    extra_repr = shows("beta", "temperature", "ignore_index", "reduction")

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        return [op(cls), op(cls, beta=0.0, temperature=2.0), op(cls, beta=1.0, reduction="none")]

    def sample_extra_inputs(
        self, shape: tuple[int, ...], generator: torch.Generator
    ) -> list[Tensor]:
        """The extra inputs of tests: a teacher of 3 features, and a third of rows ignored."""
        places = torch.arange(torch.Size(shape[:-1]).numel()).view(shape[:-1])
        targets = torch.where(places < places.numel() // 3, self.ignore_index, 0)
        hidden = torch.randn((*shape[:-1], 3), generator=generator)
        return [hidden, torch.randn((shape[-1], 3), generator=generator), targets]

    def teacher(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, shape: torch.Size, recorded: bool
    ) -> Teacher:
        """The teacher of the rows of logits of a shape; for fusions too.

        Raises:
            ValueError: As for the class.
        """
        lead, features = shape[:-1], hidden.shape[-1:]
        wanted = {"targets": (targets, lead), "hidden": (hidden, (*lead, *features))}
        wanted["weight"] = weight, (*shape[-1:], *features)
        for name, (tensor, size) in wanted.items():
            if not shape or not features or tuple(tensor.shape) != tuple(size):
                what = f"{name} of shape {tuple(size)} for logits of shape {tuple(shape)}"
                raise ValueError(expected(self, what, f"{tuple(tensor.shape)}"))
            if recorded and tensor.requires_grad and not torch.compiler.is_compiling():
                what = f"{name} that requires no grad, since a teacher gets none: detach it"
                raise ValueError(expected(self, what, "one that requires grad"))
        return Teacher(rows_of(hidden), weight, self.beta, self.temperature, self.reduction)

    def counts(self, targets: Tensor) -> Tensor:
        """Which rows count, ``(rows,)``."""
        return targets.flatten().long() != self.ignore_index

    def reduced(self, losses: Tensor, targets: Tensor) -> Tensor:
        """The result, from the loss of each row."""
        losses = torch.where(counted := self.counts(targets), losses, 0.0)
        if self.reduction == "none":
            return losses.view(targets.shape)
        return losses.sum() / counted.sum() if self.reduction == "mean" else losses.sum()

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The loss; saves its gradient by the logits."""
        (ctx,), ((hidden, weight, targets),) = basic_op_ctxs, basic_op_extra_inputs
        teacher = self.teacher(hidden, weight, targets, input_.shape, ctx.requires_grad)
        x = rows_of(input_)
        losses, gradient = teacher.compare(x, torch.arange(len(x), device=x.device))
        if ctx.requires_grad:
            counted = self.counts(targets)
            if self.reduction == "mean":
                gradient = gradient / counted.sum().clamp(min=1)
            gradient = torch.where(counted.unsqueeze(-1), gradient.detach(), 0.0)
            gradient = gradient.view(input_.shape)
            ctx.input_dtype = input_.dtype
            ctx.to_save = (gradient if ctx.input_requires_grad else None,)
        return self.reduced(losses, targets), [()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The gradient that the forward computed, times that of the loss."""
        (ctx,) = basic_op_ctxs
        (gradient,) = ctx.saved_tensors
        if gradient is None:
            return None, [()], [(None,) * 3]
        grad = grad_output.unsqueeze(-1) if grad_output.ndim else grad_output
        return (gradient * grad).to(ctx.input_dtype), [()], [(None,) * 3]
