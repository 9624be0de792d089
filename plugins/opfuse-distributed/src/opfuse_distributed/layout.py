"""Parameters that a group of processes shares: an op reads the part of its own process.

Such a parameter is a ``DTensor`` of ``torch.distributed``, or already the part of this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opfuse.core.engine.chain import Chain
from opfuse.core.errors import CallRefusedError
from opfuse.core.introspection import is_dtensor, op_class
from opfuse.core.overwriting import unseen

from .ranks import Group, run_collective


class Layout(NamedTuple):
    """The part of a parameter that each process of a group has.

    Attributes:
        group: The processes.
        dim: The dimension that is split among them; None: each has all of it.
        summed: Whether its gradient is the sum of those of all processes.
    """

    group: Group
    dim: int | None
    summed: bool = False

    @classmethod
    def summed_over(cls, group: Any) -> Layout:
        """That of a parameter that each process has as a whole, and whose gradient they add up.

        Args:
            group: The process group.
        """
        return cls(Group(group), None, summed=True)

    def part_of(self, who: str, value: Any) -> Any:
        """The part of this process, recorded by autograd: the gradient is placed like the value.

        Args:
            who: The op and its parameter, for messages.
            value: The parameter.

        Raises:
            TypeError: It is not a ``DTensor``, and the processes do not have all of it.
            ValueError: It is a ``DTensor`` that is placed in another way.
        """
        if is_dtensor(value):
            self._check(who, value)
            value = value.to_local()
        elif self.dim is not None:
            what = f"a DTensor split in dimension {self.dim}"
            raise TypeError(f"{who} expected {what}, got a {type(value).__name__}")
        if self.summed and self.group.size > 1 and value.requires_grad and torch.is_grad_enabled():
            return _SumGradients.apply(value, self.group)  # type: ignore[no-untyped-call]
        return value

    def _check(self, who: str, value: Any) -> None:
        placed = value.placements
        fits = len(placed) == 1 and (
            placed[0].is_replicate() if self.dim is None else placed[0].is_shard(self.dim)
        )
        if fits and not is_dynamo_compiling():  # the mesh of a traced tensor is a constant
            of_value = dist.get_process_group_ranks(value.device_mesh.get_group())
            fits = of_value == dist.get_process_group_ranks(self.group.given)
        if not fits:
            how = "whole on every process" if self.dim is None else f"split in dimension {self.dim}"
            what = f"a DTensor {how} of one group of {self.group.size}"
            raise ValueError(f"{who} expected {what}, got one placed as {placed}")
        if self.dim is not None and value.shape[self.dim] % self.group.size:
            what = f"a size that is a multiple of {self.group.size} in dimension {self.dim}"
            raise ValueError(f"{who} expected {what}, got shape {tuple(value.shape)}")


class _SumGradients(torch.autograd.Function):
    """Gives its input; the backward adds the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("second derivatives do not pass the sum of gradients over processes")
        total = unseen(grad)
        run_collective(ctx.group, "the sum of gradients", dist.all_reduce, total)
        return total, None


class Ends(NamedTuple):
    """How the tensors outside of an op are placed; copies of the op share it.

    Attributes:
        mesh: The ``DeviceMesh`` of the processes.
        takes: The placement of its input; None: that of the op before.
        gives: The placement of its output; None: that of the op after.
        wraps: Whether a chain that ends with it gives a ``DTensor``.
    """

    mesh: Any
    takes: Any = None
    gives: Any = None
    wraps: bool = False

    def __deepcopy__(self, memo: Any) -> Ends:
        return self


class PlacementError(CallRefusedError, ValueError):
    """Neighbours in a chain have placements that do not fit."""


def ends_of(chain: Chain) -> tuple[Ends | None, Ends | None]:
    """How the tensors outside of a chain's first and last op are placed, if that is known.

    Raises:
        PlacementError: An op takes tensors placed otherwise than the ops before give them.
    """
    ops = [chain.ops[i] for i in chain.own]
    all_ends: list[Ends | None] = [vars(op).get("_ends") for op in ops]
    giver: Any = None
    for op, ends in zip(ops, all_ends, strict=True):
        if ends and ends.takes and giver and giver[1].gives != ends.takes:
            given = f"{op_class(giver[0]).__name__} gives {giver[1].gives}"
            raise PlacementError(
                f"{chain.title}: {given}, and {op_class(op).__name__} after it is said to take "
                f"{ends.takes}: give both the same placement"
            )
        if ends or len(op.ops_as_run) > 1:
            giver = (op, ends) if ends and ends.gives else None
    return (all_ends[0], all_ends[-1]) if ops else (None, None)


def on_parts(chain: Chain, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a chain on the parts of this process, if an end of it may be a ``DTensor``."""
    first, last = ends_of(chain)
    return functools.partial(run_on_parts, run, first, last) if first or last else run


def run_on_parts(
    run: Callable[..., Any],
    first: Ends | None,
    last: Ends | None,
    input: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a chain on the parts of this process; each end of it may be a ``DTensor``.

    Args:
        run: Runs it.
        first: The ends of its first op.
        last: Those of its last op.
        input: Its input.
        *args: The other arguments.
        **kwargs: Those by name.
    """
    if is_dtensor(input):
        if first is None or first.takes is None:
            what = f"a local tensor, got a DTensor placed as {input.placements}"
            raise TypeError(f"a chain whose first op no style has split expected {what}")
        input = input.redistribute(first.mesh, [first.takes]).to_local()
    result = run(input, *args, **kwargs)
    if last is None or not last.wraps:
        return result
    from torch.distributed.tensor import DTensor

    y, *more = result if isinstance(result, tuple) else (result,)
    whole = DTensor.from_local(y, last.mesh, [last.gives], run_check=False)
    return (whole, *more) if more else whole
