"""Expert parallelism: TokenDispatch and TokenCombine send rows to their experts and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opfuse.core.op_context import AllGrads, Outputs
from opfuse.ops.arithmetic import reusable
from opfuse.ops.authoring import ExtraTensorOperation, check_size, expected, shows

from .collectives import WithProcessGroup
from .ranks import run_collective


class _Exchange(WithProcessGroup, ExtraTensorOperation):
    """The base of both: rows go to the processes of their experts, or come back.

    ``routes`` has shape ``(2, processes, experts of a process)`` and tells how many rows this
    process sends to each expert, and how many each of its experts gets from each process.
    """

    num_extra_inputs = 1
    extra_input_dtypes = ("integer",)
    saved_names = ("routes",)
    feature_ratio = 1
    uneven_rows = True

    def _send(self, x: Tensor, routes: Tensor) -> Tensor:
        """Rows in the order of all experts, to their processes; there sorted by expert."""
        came = self._all_to_all(x, *routes.sum(-1).unbind())
        return came.index_select(0, _by_expert(routes[1]).to(came.device))

    def _return(self, y: Tensor, routes: Tensor) -> Tensor:
        """The inverse of :meth:`_send`."""
        order, place = _by_expert(routes[1]).to(y.device), torch.empty_like(y)
        came = torch.index_copy(place, 0, order, y, out=reusable(place, y))
        return self._all_to_all(came, *routes.flip(0).sum(-1).unbind())

    def _all_to_all(self, x: Tensor, sent: Tensor, got: Tensor) -> Tensor:
        """Rows to each process, ``sent[i]`` of them, and from each, ``got[i]``."""
        if self.process_group_size == 1:
            return x
        y = x.new_empty((int(got.sum()), *x.shape[1:]))
        sizes = got.tolist(), sent.tolist()
        run_collective(
            self._group, type(self).__name__, dist.all_to_all_single, y, x.contiguous(), *sizes
        )
        return y

    def _report(self, ctx: Any, x: Tensor, routes: Tensor) -> None:
        rank = dist.get_rank(self.process_group)
        away = routes.sum((1, 2)) - routes[:, rank].sum(-1)
        of_row = x[:1].nbytes
        self.report(ctx, int(away[0]) * of_row, int(away[1]) * of_row)

    def _check_rows(self, x: Tensor, rows: int, what: str) -> None:
        if not x.ndim or x.shape[0] != rows:
            raise ValueError(expected(self, f"{rows} rows, as {what} say", f"{tuple(x.shape)}"))


class TokenDispatch(_Exchange):
    """Sends each row to the process that has its expert, by an all-to-all.

    Each process has the experts of its part of ``0, 1, ..., num_groups - 1``, in rank order. Takes
    ``(rows, ...)`` sorted by expert, and one extra input ``split_sizes``: integers of shape
    ``(num_groups,)``, the number of rows of each expert. Gives the rows of all processes for the
    experts of this one, sorted by expert, then by process. The first extra output are their split
    sizes, of shape ``(num_groups / processes,)``, which :class:`GroupedLinear` takes; the second is
    what :class:`TokenCombine` takes to send them back. The backward sends the gradients back. The
    host reads the sizes.

    Args:
        num_groups: Number of experts, of all processes together.
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        TypeError: ``num_groups`` is not a whole number; in a call, ``split_sizes`` that are not
            integers.
        ValueError: ``num_groups`` does not divide by the number of processes; in a call,
            ``split_sizes`` of another shape, or that do not sum up to the rows.
    """

    num_extra_outputs = 2

    def __init__(self, num_groups: int, process_group: Any = None) -> None:
        super().__init__(process_group)
        self.num_groups = check_size(self, "num_groups", num_groups)
        if not self.num_groups or self.num_groups % self.process_group_size:
            what = (
                f"num_groups to be a multiple of {self.process_group_size}, the number of processes"
            )
            raise ValueError(expected(self, what, self.num_groups))

    extra_repr = shows("num_groups", "process_group_size")

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The rows, their split sizes, and the routes, which it saves too."""
        (ctx,), ((split_sizes,),) = basic_op_ctxs, basic_op_extra_inputs
        if split_sizes.shape != (self.num_groups,):
            what = f"split_sizes of shape ({self.num_groups},)"
            raise ValueError(expected(self, what, tuple(split_sizes.shape)))
        sizes = split_sizes.to("cpu", torch.int64)
        if sizes.numel() and int(sizes.min()) < 0:
            raise ValueError(expected(self, "split_sizes of at least 0", sizes.tolist()))
        self._check_rows(input_, int(sizes.sum()), "the split sizes")
        sent = sizes.reshape(self.process_group_size, -1)
        got = sent
        if self.process_group_size > 1:
            # a backend that moves tensors of the device alone does not move those of the host
            mine = sent.to(input_.device)
            theirs = torch.empty_like(mine)
            run_collective(self._group, type(self).__name__, dist.all_to_all_single, theirs, mine)
            got = theirs.cpu()
        routes = torch.stack([sent, got])
        self._report(ctx, input_, routes)
        if ctx.requires_grad:
            ctx.save_for_backward(routes)
        return self._send(input_, routes), [(got.sum(0).to(split_sizes), routes)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The gradients, sent back."""
        (routes,) = basic_op_ctxs[0].saved_tensors
        return self._return(grad_output, routes), [()], [(None,)]


class TokenCombine(_Exchange):
    """Sends rows back to the processes and places that :class:`TokenDispatch` took them from.

    Its extra input is the second extra output of that op.

    Args:
        process_group: The processes; default: all.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: In a call, another number of rows than came, or routes of another group.
    """

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The rows; saves the routes."""
        (ctx,), ((routes,),) = basic_op_ctxs, basic_op_extra_inputs
        if routes.ndim != 3 or routes.shape[:2] != (2, self.process_group_size):
            what = f"routes of a TokenDispatch among {self.process_group_size} processes"
            raise ValueError(expected(self, what, f"shape {tuple(routes.shape)}"))
        routes = routes.cpu()
        self._check_rows(input_, int(routes[1].sum()), "the routes")
        self._report(ctx, input_, routes.flip(0))
        if ctx.requires_grad:
            ctx.save_for_backward(routes)
        return self._return(input_, routes), [()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The gradients, sent to the experts."""
        (routes,) = basic_op_ctxs[0].saved_tensors
        return self._send(grad_output, routes), [()], [(None,)]


def _by_expert(got: Tensor) -> Tensor:
    """The place of each row among those that came, sorted by expert; they came by process."""
    experts = torch.arange(got.shape[1]).repeat(got.shape[0])
    return experts.repeat_interleave(got.flatten()).argsort(stable=True)
