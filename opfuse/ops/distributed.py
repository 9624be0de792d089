"""Collectives over a process group: AllGather, AllReduce, ReduceScatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..op import BasicOperation, OperationContext
from ._common import Grads


class _Collective(BasicOperation):
    """What the collectives share: the process group, and that nothing is saved."""

    saved_names = ()
    grad_input = "same"

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{type(self).__name__} needs an initialised process group: "
                "call torch.distributed.init_process_group first"
            )
        self.process_group = process_group
        self.process_group_size = dist.get_world_size(process_group)

    def extra_repr(self) -> str:
        """How many processes take part."""
        return f"process_group_size={self.process_group_size}"


class AllGather(_Collective):
    """Joins the tensors of all processes along dimension 0, in rank order.

    Takes ``(n, ...)`` and gives ``(size * n, ...)``; every process must give the same shape. The backward is a
    reduce-scatter.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The joined tensor; saves nothing."""
        return _all_gather(self, input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """This process's part of the sum of the gradients of all."""
        return _reduce_scatter(self, grad_output), ()


class ReduceScatter(_Collective):
    """Adds the tensors of all processes and gives each its part along dimension 0, in rank order.

    Takes ``(size * n, ...)`` and gives ``(n, ...)``. The backward is an all-gather.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: In a call, a dimension 0 that is not a multiple of the number of processes.
    """

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """This process's part of the sum; saves nothing."""
        return _reduce_scatter(self, input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """The gradients of all parts, joined."""
        return _all_gather(self, grad_output), ()


class AllReduce(_Collective):
    """Adds the tensors of all processes; every process gets the sum.

    Takes and gives any shape. What follows is the same on every process, and so is its gradient: the backward
    passes the gradient on as it is.

    Args:
        process_group: The processes; default: all.
        reduce_in_backward: Accepted for Transformer Engine's signature, where it has no effect either.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    feature_ratio = 1

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The sum; saves nothing."""
        if self.process_group_size == 1:
            return input_
        y = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=self.process_group)
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """``dx = dy``."""
        return grad_output, ()


def _all_gather(op: _Collective, tensor: Tensor) -> Tensor:
    if op.process_group_size == 1:
        return tensor
    _check_dimensions(op, tensor)
    gathered = tensor.new_empty((op.process_group_size * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=op.process_group)
    return gathered


def _reduce_scatter(op: _Collective, tensor: Tensor) -> Tensor:
    size = op.process_group_size
    if size == 1:
        return tensor
    _check_dimensions(op, tensor)
    if tensor.shape[0] % size:
        raise ValueError(
            f"{type(op).__name__} expected a multiple of {size}, the number of processes, in dimension 0, "
            f"got shape {tuple(tensor.shape)}"
        )
    part = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    dist.reduce_scatter_tensor(part, tensor.contiguous(), group=op.process_group)
    return part


def _check_dimensions(op: _Collective, tensor: Tensor) -> None:
    if not tensor.ndim:
        raise ValueError(f"{type(op).__name__} expected a tensor with at least one dimension, got a scalar")
