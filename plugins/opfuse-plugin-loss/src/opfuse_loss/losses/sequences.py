"""What the losses share: the sums of each sequence, and the passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.fusible import check_real
from opfuse.core.op_context import AllGrads, Outputs
from opfuse.ops.arithmetic import widen
from opfuse.ops.authoring import ExtraTensorOperation, check_bool, expected

OF_ROWS = ("entropy", "log_sum_squares")
"""Extra inputs that the op before gives, with gradients, which a loss may leave out."""


class Sequences:
    """Which token belongs to which sequence, and sums over them.

    Attributes:
        counted: ``(tokens,)``, whether a token belongs to one.
        lengths: ``(count,)``, the tokens of each.

    Args:
        ids: ``(tokens,)``, the number of each token's sequence; below 0: it belongs to none.
        count: How many sequences there are.
        like: A tensor of the dtype that lengths have.

    Raises:
        IndexError: A number is not below ``count``; on a GPU the device reports it later.
    """

    def __init__(self, ids: Tensor, count: int, like: Tensor) -> None:
        check_numbers("a token's sequence", ids, count)
        self._slots, self._count = ids.long().clamp(min=-1) + 1, count  # slot 0 is for none
        self.counted = self._slots > 0
        self.lengths = self.sum(torch.ones_like(like))

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the tokens' values in each sequence, ``(count,)``."""
        return values.new_zeros(self._count + 1).index_add(0, self._slots, values)[1:]

    def mean(self, values: Tensor) -> Tensor:
        """The mean in each sequence, 0 in an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """The value of each token's sequence, 0 for a token of none, ``(tokens,)``."""
        return F.pad(values, (1, 0)).index_select(0, self._slots)

    def places(self) -> Tensor:
        """The place of each token among those of its sequence, from 0."""
        order = self._slots.argsort(stable=True)
        sizes = F.pad(self.lengths.long(), (1, 0))
        sizes[0] = len(order) - sizes.sum()
        starts = (sizes.cumsum(0) - sizes).index_select(0, self._slots[order])
        return torch.empty_like(order).scatter(
            0, order, torch.arange(len(order), device=order.device) - starts
        )


def check_numbers(what: str, numbers: Tensor, count: int) -> None:
    """Refuse numbers of sequences that are not below ``count``, with a CPU, where one can look."""
    if numbers.device.type != "cpu" or not numbers.numel() or torch.compiler.is_compiling():
        return
    if (largest := int(numbers.max())) >= count:
        there = f"the other inputs are of {count} sequences, with numbers from 0"
        raise IndexError(f"{what} {largest} is out of range: {there}")


class Found(NamedTuple):
    """What a loss computes in its forward.

    Attributes:
        loss: Without dimensions.
        gradient: Of the loss by the log-probabilities, ``(tokens,)``.
        metrics: The numbers to report, if they are asked for.
        entropy_gradient: Of the loss by the entropies.
    """

    loss: Tensor
    gradient: Tensor
    metrics: tuple[Tensor, ...] = ()
    entropy_gradient: Tensor | None = None


class SequenceLoss(ExtraTensorOperation):
    """A loss of the log-probabilities of tokens, which belong to sequences.

    Takes log-probabilities of any shape and the extra inputs that ``input_names`` lists. The first
    are ``sequences``: integers in the shape of the log-probabilities, the number of each token's
    sequence from 0. A token of a prompt, or of padding, has a number below 0 and does not count.
    So a batch may be padded or packed, in any order. Gives the loss, without dimensions, in fp32,
    for fp64 in fp64. With ``metrics`` the extra outputs are the numbers that ``metric_names``
    lists, without gradients.

    The forward computes the gradient by the log-probabilities too, in the dtype of the loss; the
    backward scales it.

    Args:
        inputs: The name and the kind of each extra input.
        names: The names of the metrics.
        metrics: Whether to give them.
    """

    saved_names = ("gradient", "entropy_gradient")
    context_names = ("dtypes",)
    grad_input = "fresh"
    differentiable = True
    autocast_dtype = torch.float32
    silent_outputs = True

    def __init__(self, inputs: Mapping[str, str], names: Iterable[str], metrics: bool) -> None:
        check_bool(self, "metrics", metrics)
        self._names = tuple(inputs), tuple(names) if metrics else ()
        self.extra_input_dtypes = tuple(inputs.values())
        self.num_extra_inputs, self.num_extra_outputs = len(inputs), len(self._names[1])
        super().__init__()

    input_names = property(lambda self: self._names[0], doc="The extra inputs, in order.")
    metric_names = property(lambda self: self._names[1], doc="The extra outputs, in order.")
    metrics = property(lambda self: bool(self._names[1]), doc="Whether it gives its metrics.")

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The loss and the metrics; saves the gradients by the log-probabilities and entropies."""
        (ctx,), (extras,) = basic_op_ctxs, basic_op_extra_inputs
        given = dict(zip(self.input_names, extras, strict=True))
        self._check_inputs(input_, given, ctx.requires_grad and not torch.compiler.is_compiling())
        x = widen(input_).flatten()
        for name, tensor in given.items():
            flat = tensor.flatten() if self.shape_of(name) is None else tensor
            given[name] = flat.to(x.dtype) if flat.is_floating_point() else flat
        found = self.evaluate(x, **given)
        if ctx.requires_grad:
            of_entropy = found.entropy_gradient
            ctx.dtypes = input_.dtype, None
            if of_entropy is not None:
                like = extras[self.input_names.index("entropy")]
                wanted = like.requires_grad or torch.compiler.is_compiling()
                of_entropy = of_entropy.view(like.shape) if wanted else None
                ctx.dtypes = input_.dtype, like.dtype
            gradient = found.gradient.detach().view(input_.shape)
            ctx.to_save = gradient if ctx.input_requires_grad else None, of_entropy
        return found.loss, [tuple(number.detach() for number in found.metrics)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The gradients that the forward computed, times that of the loss."""
        (ctx,) = basic_op_ctxs
        dx, of_entropy = (
            None if gradient is None else (gradient * grad_output).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        of_extras: list[Tensor | None] = [None] * self.num_extra_inputs
        if of_entropy is not None:
            of_extras[self.input_names.index("entropy")] = of_entropy
        return dx, [()], [tuple(of_extras)]

    def evaluate(self, x: Tensor, **given: Tensor) -> Found:
        """The loss and its gradient.

        Args:
            x: The log-probabilities, ``(tokens,)``.
            **given: The extra inputs by name; those of tokens are flat, floats have x's dtype.
        """
        raise NotImplementedError

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """The shape that an extra input must have, None for any size; None: that of the tokens."""
        return None

    def _check_inputs(self, x: Tensor, given: Mapping[str, Tensor], recorded: bool) -> None:
        for name, tensor in given.items():
            shape = self.shape_of(name)
            wanted: Any = tuple(x.shape) if shape is None else shape
            if len(wanted) != tensor.ndim or any(
                size is not None and size != got
                for size, got in zip(wanted, tensor.shape, strict=True)
            ):
                where = f" for log-probabilities of shape {tuple(x.shape)}" * (shape is None)
                text = f"({', '.join('*' if n is None else str(n) for n in wanted)})"
                what = f"{name} of shape {text}{where}"
                raise ValueError(expected(self, what, f"{tuple(tensor.shape)}"))
            if recorded and name not in OF_ROWS and tensor.requires_grad:
                how = "compute it under torch.no_grad(), or detach it"
                what = f"{name} that requires no grad, since it gets none: {how}"
                raise ValueError(expected(self, what, "one that requires grad"))


def either(which: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers for each bool, in the dtype of ``like``, to its last bit."""
    return like.new_full(which.shape, no).masked_fill(which, yes)


def check_range(
    op: object, name: str, value: Any, low: float, high: float = math.inf, *, ends: str = "()"
) -> float:
    """Return a number as a float, if it is in a range.

    Args:
        op: The op that takes it.
        name: Its name.
        value: The number.
        low: The lower end.
        high: The upper end.
        ends: Round brackets where an end does not belong to the range, square ones where it does.

    Raises:
        TypeError: It is not a real number.
        ValueError: It is out of the range.
    """
    found = check_real(op, name, value)
    above = found >= low if ends[0] == "[" else found > low
    if not (above and (found <= high if ends[1] == "]" else found < high)):
        raise ValueError(expected(op, f"{name} in {ends[0]}{low:g}, {high:g}{ends[1]}", found))
    return found


def check_choice(op: object, name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse a word that is not one of those known."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(expected(op, f"{name} to be one of {', '.join(known)}", repr(value)))
