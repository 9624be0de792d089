"""Collectives over a process group: AllGather, AllReduce, ReduceScatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.op import BasicOperation
from ..core.op_context import OperationContext, Unread
from ._common import OpGrads, expected, shows


class _Collective(BasicOperation):
    """The base of the collectives: it has a process group, and saves nothing."""

    saved_names = ()
    grad_input = "same"
    _there: Callable[[Tensor], Tensor]
    _back: Callable[[Tensor], Tensor]

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            needed = "torch.distributed.init_process_group to be called first"
            raise RuntimeError(f"{type(self).__name__} needs {needed}")
        self.process_group = process_group
        self.process_group_size = dist.get_world_size(process_group)

    extra_repr = shows("process_group_size")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """Run the collective on the input; save nothing."""
        return input_ if self.process_group_size == 1 else self._there(input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Run the adjoint collective on the gradient."""
        return grad_output if self.process_group_size == 1 else self._back(grad_output), ()

    def _all_gather(self, tensor: Tensor) -> Tensor:
        self._check_dimensions(tensor)
        gathered = tensor.new_empty((self.process_group_size * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.process_group)
        return gathered

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        size = self.process_group_size
        self._check_dimensions(tensor)
        if tensor.shape[0] % size:
            what = f"a multiple of {size}, the number of processes, in dimension 0"
            raise ValueError(expected(self, what, f"shape {tuple(tensor.shape)}"))
        part = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(part, tensor.contiguous(), group=self.process_group)
        return part

    def _check_dimensions(self, tensor: Tensor) -> None:
        if not tensor.ndim:
            raise ValueError(expected(self, "a tensor with at least one dimension", "a scalar"))


class AllGather(_Collective):
    """Joins the tensors of all processes along dimension 0, in rank order.

    Takes ``(n, ...)`` and returns ``(size * n, ...)``; every process must give the same shape. The
    backward is a reduce-scatter.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    _there = _Collective._all_gather
    _back = _Collective._reduce_scatter


class ReduceScatter(_Collective):
    """Adds the tensors of all processes and gives each its part along dimension 0, in rank order.

    Takes ``(size * n, ...)`` and returns ``(n, ...)``. The backward is an all-gather.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: In a call, a dimension 0 that is not a multiple of the number of processes.
    """

    _there = _Collective._reduce_scatter
    _back = _Collective._all_gather


class AllReduce(_Collective):
    """Adds the tensors of all processes; every process gets the sum.

    Any shape is accepted and kept. What follows is the same on every process, and so is its
    gradient: the backward passes the gradient on unchanged.

    Args:
        process_group: The processes; default: all.
        reduce_in_backward: Accepted for Transformer Engine's signature, where it has no effect
            either.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    feature_ratio = 1
    keeps_rows = True

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def _there(self, tensor: Tensor) -> Tensor:
        y = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=self.process_group)
        return y

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor
