"""Collectives over a process group: gather, scatter, reduce, and their adjoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from opfuse.core.op import BasicOperation
from opfuse.core.op_context import OperationContext, Unread
from opfuse.core.overwriting import unseen
from opfuse.core.settings import current
from opfuse.ops.authoring import OpGrads, check_size, expected

from .ranks import Group, gather_into, run_collective, scatter_into


class WithProcessGroup(BasicOperation):
    """An op with collectives over a process group.

    Attributes:
        collective_group: The group. Its processes compare what they run.
        uneven_rows: Whether they may have different numbers of rows.

    Args:
        process_group: The processes; None: all.
        **given: Arguments of another base.
    """

    needs_tools = ("distributed",)
    uneven_rows: ClassVar[bool] = False

    def __init__(self, process_group: Any = None, **given: Any) -> None:
        super().__init__(**given)
        if not (dist.is_available() and dist.is_initialized()):
            needed = "torch.distributed.init_process_group to be called first"
            raise RuntimeError(f"{type(self).__name__} needs {needed}")
        self.collective_group = self._group = Group(process_group)
        self.process_group_size = self._group.size

    @property
    def process_group(self) -> Any:
        """The process group; None: all processes."""
        return self._group.given

    def extra_repr(self) -> str:
        """What another base shows, and the number of processes."""
        shown = super().extra_repr(), f"process_group_size={self.process_group_size}"
        return ", ".join(filter(None, shown))

    def report(self, ctx: Any, forward: float, backward: float) -> None:
        """Tell reports what this process sends, by the algorithms of a ring; for fusions too.

        Args:
            ctx: The context of the op.
            forward: Bytes in the forward.
            backward: Bytes in the backward, if there is one.
        """
        for recorder in current.recorders if self.process_group_size > 1 else ():
            recorder.sends(self, int(forward), int(backward) if ctx.requires_grad else 0)


class _Collective(WithProcessGroup):
    """The base of the collectives that take and give one tensor; it saves nothing.

    Collectives that split or join take the dimension, ``dim``.
    """

    saved_names: ClassVar[tuple[str, ...] | None] = ()
    grad_input = "same"
    dim = 0
    _there: Callable[[Tensor], Tensor]
    _back: Callable[[Tensor], Tensor]
    # bytes that a process sends there and back, over those of its input
    _ratios: ClassVar[Any]

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """Run the collective on the input."""
        if current.recorders:
            there, back = type(self)._ratios(self.process_group_size)
            self.report(ctx, there * input_.nbytes, back * input_.nbytes)
        return input_ if self.process_group_size == 1 else self._there(input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Run the adjoint collective on the gradient."""
        return grad_output if self.process_group_size == 1 else self._back(grad_output), ()

    def _run(self, start: Callable[..., Any], *tensors: Tensor) -> None:
        run_collective(self._group, type(self).__name__, start, *tensors)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        self._check_dimensions(tensor)
        size, part = self.process_group_size, tensor.movedim(self.dim, 0).contiguous()
        gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
        self._run(gather_into, gathered, part)
        return gathered.movedim(0, self.dim).contiguous()

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        size = self.process_group_size
        self._check_dimensions(tensor)
        if tensor.shape[self.dim] % size:
            what = f"a multiple of {size}, the number of processes, in dimension {self.dim}"
            raise ValueError(expected(self, what, f"shape {tuple(tensor.shape)}"))
        whole = tensor.movedim(self.dim, 0).contiguous()
        part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
        self._run(scatter_into, part, whole)
        return part.movedim(0, self.dim).contiguous()

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        total = unseen(tensor)
        self._run(dist.all_reduce, total)
        return total

    def _unchanged(self, tensor: Tensor) -> Tensor:
        return tensor

    def _check_dimensions(self, tensor: Tensor) -> None:
        if tensor.ndim <= self.dim:
            needed = f"at least {self.dim + 1} dimensions" if self.dim else "at least one dimension"
            got = f"shape {tuple(tensor.shape)}" if tensor.ndim else "a scalar"
            raise ValueError(expected(self, f"a tensor with {needed}", got))


class AllGather(_Collective):
    """Joins the tensors of all processes along a dimension, in rank order.

    Takes ``(n, ...)`` and returns ``(size * n, ...)``; every process must give the same shape. The
    backward is a reduce-scatter. The next op need not keep the result for its backward, if it saves
    it as its input: it is gathered again from the part of this process.

    Args:
        process_group: The processes; default: all.
        dim: The dimension, not the last one.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; in a call, processes whose shapes
            differ.
        TypeError, ValueError: ``dim`` is not a whole number of at least 0.
    """

    saved_names = ("input",)
    recomputes = True
    _ratios = staticmethod(lambda size: (size - 1, size - 1))
    _there = _Collective._all_gather
    _back = _Collective._reduce_scatter

    def __init__(self, process_group: Any = None, dim: int = 0) -> None:
        super().__init__(process_group)
        self.dim = check_size(self, "dim", dim)

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The joined tensor; saves ``(input,)``, or None if it is not gathered again."""
        y = super().op_forward(ctx, input_)
        again = ctx.may_recompute and ctx.requires_grad and y is not input_
        if again:
            self.report(ctx, 0, (self.process_group_size - 1) * input_.nbytes)
        if ctx.requires_grad:
            ctx.save_for_backward(input_ if again else None)
        if again:
            ctx.recomputable_output = y
        return y

    op_backward = _Collective.op_backward

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """Gather again; see :meth:`opfuse.FusibleOperation.fuser_recompute`."""
        (part,) = basic_op_ctxs[0].saved_tensors
        return self._all_gather(part)


class ReduceScatter(_Collective):
    """Adds the tensors of all processes and gives each its part of a dimension, in rank order.

    Takes ``(size * n, ...)`` and returns ``(n, ...)``. The backward is an all-gather.

    Args:
        process_group: The processes; default: all.
        dim: The dimension, not the last one.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; in a call, processes whose shapes
            differ.
        TypeError: ``dim`` is not a whole number.
        ValueError: ``dim`` is negative; in a call, its size is not a multiple of the number of
            processes.
    """

    _ratios = staticmethod(lambda size: ((size - 1) / size,) * 2)
    _there = _Collective._reduce_scatter
    _back = _Collective._all_gather

    def __init__(self, process_group: Any = None, dim: int = 0) -> None:
        super().__init__(process_group)
        self.dim = check_size(self, "dim", dim)


class AllReduce(_Collective):
    """Adds the tensors of all processes; every process gets the sum.

    Any shape is accepted and kept. What follows is the same on every process, and so is its
    gradient: the backward passes the gradient on unchanged.

    Args:
        process_group: The processes; default: all.
        reduce_in_backward: Accepted for Transformer Engine's signature, where it has no effect
            either.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; in a call, processes whose shapes
            differ.
    """

    feature_ratio = 1
    keeps_rows = True
    _ratios = staticmethod(lambda size: (2 * (size - 1) / size, 0))
    _there = _Collective._all_reduce
    _back = _Collective._unchanged

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward


class CopyToTensorParallelRegion(_Collective):
    """Gives its input; the backward adds the gradients of all processes.

    For an input that is the same on every process, before ops of which each process has a part:
    each then has a part of the gradient too. Megatron-LM calls it
    ``copy_to_tensor_model_parallel_region``.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; in a call, processes whose shapes
            differ.
    """

    feature_ratio = 1
    keeps_rows = True
    _ratios = staticmethod(lambda size: (0, 2 * (size - 1) / size))
    _there = _Collective._unchanged
    _back = _Collective._all_reduce
