"""The state of delayed quantizers, which advances in one buffer, however many there are.

The buffer has a row for each quantizer, and the tensors of its state are views of that row: by
name, shape and dtype they are what they were. Once in a buffer they stay where they are, so a CUDA
graph finds them. A tensor that was replaced, as when a model moves to another device, is no view
of it any more: :func:`update_delayed` notices, and makes a new buffer for its quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import why_no_kernel
from torch import Tensor

from opfuse import Quantizer

from . import casts
from .quantizers import DelayedQuantizer

MOST_SELECTIONS = 64
"""How many selections of its rows a buffer remembers."""


def update_delayed(quantizers: Sequence[Quantizer], group: Any) -> None:
    """Advance quantizers by one step, with one collective.

    Args:
        quantizers: Those of a block, each a :class:`DelayedQuantizer`.
        group: The process group over which the largest magnitudes are taken, or None.

    Raises:
        TypeError: One is of another kind, whose state would never advance.
        RuntimeError: A CUDA graph is captured before the first step.
    """
    delayed: dict[DelayedQuantizer, None] = {}
    for quantizer in quantizers:
        if not isinstance(quantizer, DelayedQuantizer):
            raise TypeError(
                f"expected quantizers with state to be a DelayedQuantizer, which this recipe "
                f"advances, got {type(quantizer).__name__}: derive from it, or write a recipe"
            )
        delayed[quantizer] = None
    if group is not None and delayed:
        _reduce([quantizer.amax for quantizer in delayed], group)
    _gather(quantizer for quantizer in delayed if not ScaleBuffer.holds(quantizer))
    rows: dict[ScaleBuffer, list[int]] = {}
    for quantizer in delayed:
        buffer, row = quantizer._shared
        rows.setdefault(buffer, []).append(row)
    for buffer, used in rows.items():
        buffer.advance(used)


def _reduce(amaxes: Sequence[Tensor], group: Any) -> None:
    """Take the largest magnitudes over a group, in their order."""
    all_of_them = torch.cat([amax.to(amaxes[0].device) for amax in amaxes])
    torch.distributed.all_reduce(all_of_them, torch.distributed.ReduceOp.MAX, group)
    torch._foreach_copy_(list(amaxes), list(all_of_them.split(1)))


def _gather(quantizers: Any) -> None:
    """Put quantizers that are in no buffer into one, or into one for each kind of history."""
    kinds: dict[Any, list[DelayedQuantizer]] = {}
    for quantizer in quantizers:
        kind = quantizer.amax.device, len(quantizer.amax_history), quantizer.most_recent
        kinds.setdefault(kind, []).append(quantizer)
    for (device, *_), found in kinds.items():
        if _is_captured(device):
            raise RuntimeError(
                f"expected delayed scales that have advanced before, since a CUDA graph is being "
                f"captured, got {len(found)} new ones or ones that were replaced: run one step "
                f"before the capture"
            )
        ScaleBuffer(found)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ScaleBuffer:
    """The state of several quantizers, one row each; their own tensors become views of it.

    Args:
        quantizers: Quantizers on one device, with histories of one length and kind.

    Attributes:
        scales: ``(n,)``, fp32, each at a multiple of 16 bytes, as a tensor of its own would be.
        amaxes: Likewise.
        histories: ``(n, length)``, fp32.
        facts: ``(n, 3)``, fp32: the largest number of the dtype, ``2^margin``, and 1 for a
            quantizer of gradients.
    """

    def __init__(self, quantizers: Sequence[DelayedQuantizer]) -> None:
        first, names = quantizers[0], DelayedQuantizer.state_names
        states = [[getattr(quantizer, name) for quantizer in quantizers] for name in names]
        self._settings = [_settings(quantizer) for quantizer in quantizers]
        facts = [
            [torch.finfo(dtype).max, 2.0**margin, float(is_grad)]
            for dtype, margin, is_grad, _ in self._settings
        ]
        self._most_recent = first.most_recent
        self._selections: dict[tuple[int, ...], Tensor] = {}
        self._captured: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            self.facts = torch.tensor(facts, dtype=torch.float32, device=first.amax.device)
            room = torch.zeros(len(quantizers), 2, 4, dtype=torch.float32, device=first.amax.device)
            self.scales, self.amaxes = room[:, 0, 0], room[:, 1, 0]
            self.scales.copy_(torch.cat(states[0]))
            self.amaxes.copy_(torch.cat(states[1]))
            self.histories = torch.stack(states[2])
            self._views = [
                (*each[:, :1], past) for each, past in zip(room, self.histories, strict=True)
            ]
        for row, quantizer in enumerate(quantizers):
            quantizer._shared = self, row
            for name, view in zip(names, self._views[row], strict=True):
                setattr(quantizer, name, view)

    @staticmethod
    def holds(quantizer: DelayedQuantizer) -> bool:
        """Whether the state of a quantizer is a row of a buffer, which advances as it should."""
        if quantizer._shared is None:
            return False
        buffer, row = quantizer._shared
        scale, amax, history = buffer._views[row]
        same = quantizer.scale is scale and quantizer.amax is amax
        same = same and quantizer.amax_history is history
        return same and _settings(quantizer) == buffer._settings[row]

    def advance(self, rows: Sequence[int]) -> None:
        """Take in the largest magnitudes of a step, compute the next scales, clear the records.

        The formula is Transformer Engine's ``_default_sf_compute``. Nothing is read by the host.

        Args:
            rows: Those of the quantizers that advance; the others stay as they are.
        """
        chosen = None if len(rows) == len(self._views) else self._selection(tuple(rows))
        run = advance
        if not why_no_kernel(self.scales.device):
            from .kernels.scales import advance as run
        state = self.scales, self.amaxes, self.histories
        run(*state, self.facts, chosen, most_recent=self._most_recent)

    def _selection(self, rows: tuple[int, ...]) -> Tensor:
        """The rows as a tensor, int64; one that a CUDA graph reads is kept."""
        device, found = self.scales.device, self._selections.pop(rows, None)
        if found is None:
            with torch.inference_mode(False):
                found = torch.tensor(rows, device=device)
            if len(self._selections) >= MOST_SELECTIONS:
                del self._selections[next(iter(self._selections))]
        self._selections[rows] = found  # the last in their order
        if _is_captured(device):
            self._captured.append(found)
        return found


def _settings(quantizer: DelayedQuantizer) -> tuple[torch.dtype, int, bool, bool]:
    return quantizer.dtype, quantizer.margin, quantizer.is_grad, quantizer.most_recent


def advance(
    scales: Tensor,
    amaxes: Tensor,
    histories: Tensor,
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
        facts: See there.
        rows: The rows that advance, int64; None: all.
        most_recent: Whether the latest row of a history counts alone.
    """
    state = scales, amaxes, histories
    given = state if rows is None else [tensor.index_select(0, rows) for tensor in state]
    scale, amax, history = given
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
    )
    for into, new in zip(state, made, strict=True):
        into.copy_(new) if rows is None else into.index_copy_(0, rows, new)
