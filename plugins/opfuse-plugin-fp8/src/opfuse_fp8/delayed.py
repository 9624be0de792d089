"""The state of delayed quantizers, which advances in one buffer, however many there are.

The buffer has a row for each quantizer, and the tensors of its state are views of that row: by
name, shape and dtype they are what they were. Once in a buffer they stay where they are, so a CUDA
graph finds them. A tensor that was replaced, as when a model moves to another device, is no view
of it any more: :func:`update_delayed` notices, and makes a new buffer for its quantizer. It moves
no tensor that a graph's capture may have seen: its values are copied out and back at each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from opfuse_distributed.ranks import Group, start_collective
from opfuse_triton import kernels_run
from torch import Tensor

from opfuse import Quantizer
from opfuse.ops.authoring import is_captured

from . import casts
from .quantizers import DelayedQuantizer

_NAMES = *DelayedQuantizer.state_names, "infinite"
MOST_SELECTIONS = 64
"""How many selections of its rows a buffer remembers."""


def update_delayed(quantizers: Sequence[Quantizer], group: Any) -> None:
    """Advance quantizers by one step, with one collective.

    Args:
        quantizers: Those of a block, each a :class:`DelayedQuantizer`.
        group: The process group over which the largest magnitudes are taken, or None.

    Raises:
        TypeError: One is of another kind, whose state would never advance, or has a method
            ``advance`` of its own, which nothing calls.
    """
    delayed: dict[DelayedQuantizer, None] = {}
    for quantizer in quantizers:
        if not isinstance(quantizer, DelayedQuantizer):
            raise TypeError(
                f"expected quantizers with state to be a DelayedQuantizer, which this recipe "
                f"advances, got {type(quantizer).__name__}: derive from it, or write a recipe"
            )
        if hasattr(type(quantizer), "advance") or "advance" in vars(quantizer):
            raise TypeError(
                f"expected a DelayedQuantizer whose scales this recipe computes, and "
                f"{type(quantizer).__name__} has its own advance(), which nothing calls: write a "
                "recipe whose update calls it"
            )
        delayed[quantizer] = None
    if group is not None and delayed:
        _reduce([quantizer.amax for quantizer in delayed], group)
    rows, others = held(delayed)
    loose: dict[Any, list[DelayedQuantizer]] = {}
    for quantizer in others:
        device, length = quantizer.amax.device, len(quantizer.amax_history)
        kind = device, length, quantizer.most_recent, quantizer.is_fixed()
        loose.setdefault(kind, []).append(quantizer)
    for found in loose.values():
        ScaleBuffer(found).take_in(found)
    for buffer, used in rows.items():
        buffer.advance(used)


def _reduce(amaxes: Sequence[Tensor], group: Any) -> None:
    """Take the largest magnitudes over a group, in their order."""
    all_of_them = torch.cat([amax.to(amaxes[0].device) for amax in amaxes])
    maximum = torch.distributed.ReduceOp.MAX
    all_reduce = torch.distributed.all_reduce
    start_collective(Group(group), "the maxima", all_reduce, all_of_them, maximum).wait()
    torch._foreach_copy_(list(amaxes), list(all_of_them.split(1)))


def _tensor(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; a CUDA graph that is captured can fill tensors, and not copy to them."""
    with torch.inference_mode(False):
        if not is_captured(device):
            return torch.tensor(numbers, dtype=dtype, device=device)
        return torch.cat([torch.full((1,), each, dtype=dtype, device=device) for each in numbers])


class ScaleBuffer:
    """The state of several quantizers, one row each.

    Args:
        quantizers: Quantizers on one device, with histories of one length and kind.

    Attributes:
        scales: ``(n,)``, fp32, each at a multiple of 16 bytes, as a tensor of its own would be.
        amaxes: Likewise.
        histories: ``(n, length)``, fp32.
        counts: ``(n,)``, int32: how often the largest magnitude was infinite.
        facts: ``(n, 3)``, fp32: the largest number of the dtype, ``2^margin``, and 1 for a
            quantizer of gradients.
    """

    def __init__(self, quantizers: Sequence[DelayedQuantizer]) -> None:
        device, states = quantizers[0].amax.device, _states(quantizers)
        self._settings = [(q.dtype, q.margin, q.is_grad, q.most_recent) for q in quantizers]
        facts: list[float] = []
        for dtype, margin, is_grad, _ in self._settings:
            facts += [torch.finfo(dtype).max, 2.0**margin, float(is_grad)]
        self._most_recent = quantizers[0].most_recent
        self._selections: dict[tuple[int, ...], Tensor] = {}
        self._captured: list[Tensor] = []
        self.facts = _tensor(facts, torch.float32, device).view(-1, 3)
        with torch.inference_mode(False), torch.no_grad():
            room = torch.zeros(len(quantizers), 2, 4, dtype=torch.float32, device=device)
            self.scales, self.amaxes = room[:, 0, 0], room[:, 1, 0]
            self.scales.copy_(torch.cat(states[0]))
            self.amaxes.copy_(torch.cat(states[1]))
            self.histories = torch.stack(states[2])
            self.counts = torch.cat([count.to(device) for count in states[3]])
            rows = zip(room, self.histories, self.counts.unsqueeze(1), strict=True)
            # with a storage of its own, each tensor is a whole entry of a state dict
            apart = torch.from_dlpack if device.type in ("cpu", "cuda") else torch.Tensor.detach
            self._views = [tuple(map(apart, (*each[:, :1], *others))) for each, *others in rows]

    def take_in(self, quantizers: Sequence[DelayedQuantizer]) -> None:
        """Advance the quantizers of this buffer, and make their tensors views of it.

        Tensors that a CUDA graph reads where they are stay there.

        Args:
            quantizers: Those that it was made of, all of them with such tensors or none.
        """
        self.advance(range(len(quantizers)))
        if quantizers[0].is_fixed():
            for old, new in zip(_states(quantizers), zip(*self._views, strict=True), strict=True):
                torch._foreach_copy_(old, list(new))
            return
        for row, quantizer in enumerate(quantizers):
            quantizer._shared, quantizer._fixed = (self, row), self._views[row][:3]
            for name, view in zip(_NAMES, self._views[row], strict=True):
                setattr(quantizer, name, view)

    def advance(self, rows: Sequence[int]) -> None:
        """Take in the largest magnitudes of a step, compute the next scales, clear the records.

        The formula is Transformer Engine's ``_default_sf_compute``. Nothing is read by the host.

        Args:
            rows: Those of the quantizers that advance; the others stay as they are.
        """
        chosen = None if len(rows) == len(self._views) else self._selection(tuple(rows))
        run = advance
        if kernels_run(self.scales.device):
            from .kernels.scales import advance as run
        state = self.scales, self.amaxes, self.histories, self.counts
        run(*state, self.facts, chosen, most_recent=self._most_recent)

    def _selection(self, rows: tuple[int, ...]) -> Tensor:
        """The rows as a tensor, int64; one that a CUDA graph reads is kept."""
        device, found = self.scales.device, self._selections.pop(rows, None)
        capturing = is_captured(device)
        if found is None:
            found = _tensor(rows, torch.int64, device)
            if capturing:  # it has its numbers only once the graph is replayed
                self._captured.append(found)
                return found
            if len(self._selections) >= MOST_SELECTIONS:
                del self._selections[next(iter(self._selections))]
        self._selections[rows] = found  # the last in their order
        if capturing:
            self._captured.append(found)
        return found


def held(
    quantizers: Iterable[DelayedQuantizer],
) -> tuple[dict[ScaleBuffer, list[int]], list[DelayedQuantizer]]:
    """The rows of buffers that are the state of quantizers and advance as it should; the others."""
    rows: dict[ScaleBuffer, list[int]] = {}
    loose: list[DelayedQuantizer] = []
    for quantizer in quantizers:
        if quantizer._shared is not None:
            buffer, row = quantizer._shared
            scale, amax, history, _ = buffer._views[row]
            same = quantizer.scale is scale and quantizer.amax is amax
            settings = quantizer.dtype, quantizer.margin, quantizer.is_grad, quantizer.most_recent
            if same and quantizer.amax_history is history and settings == buffer._settings[row]:
                rows.setdefault(buffer, []).append(row)
                continue
        loose.append(quantizer)
    return rows, loose


def _states(quantizers: Sequence[DelayedQuantizer]) -> list[list[Tensor]]:
    """The tensors of each name, of all quantizers."""
    return [[getattr(quantizer, name) for quantizer in quantizers] for name in _NAMES]


def advance(
    scales: Tensor,
    amaxes: Tensor,
    histories: Tensor,
    counts: Tensor,
    facts: Tensor,
    rows: Tensor | None,
    *,
    most_recent: bool,
) -> None:
    """Advance rows of a :class:`ScaleBuffer` in place, by a fixed number of operations.

    A row whose largest magnitude is -1 rolls with 0 if it is of a forward, and stays if it is of a
    gradient.

    Args:
        scales: See :class:`ScaleBuffer`.
        amaxes: See there. They become -1.
        histories: See there.
        counts: See there.
        facts: See there.
        rows: The rows that advance, int64; None: all.
        most_recent: Whether the latest row of a history counts alone.
    """
    state = scales, amaxes, histories, counts
    given = state if rows is None else [tensor.index_select(0, rows) for tensor in state]
    scale, amax, history, count = given
    most, power, is_grad = (facts if rows is None else facts.index_select(0, rows)).unbind(1)
    amax = torch.where(is_grad > 0, amax, amax.clamp(min=0))
    arrived, past = amax >= 0, history[:, 1:]
    largest = amax if most_recent or not past.numel() else torch.maximum(amax, past.amax(1))
    found = most / largest / power
    found = torch.where(found.isinf(), torch.full_like(found, casts.FP32_MAX), found)
    found = torch.where((largest > 0) & largest.isfinite(), found, scale)
    rolled = torch.cat([torch.zeros_like(amax)[:, None], past[:, 1:], amax[:, None]], 1)
    made = (
        torch.where(arrived, found, scale),
        torch.full_like(amax, -1),
        torch.where(arrived[:, None], rolled[:, : history.shape[1]], history),
        count + amax.isinf(),
    )
    for into, new in zip(state, made, strict=True):
        into.copy_(new) if rows is None else into.index_copy_(0, rows, new)
