"""Recomputation by ``torch.utils.checkpoint``, under the settings and scales of the forward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from ..core.engine.chain import Chain
from ..core.engine.fuser import OperationFuser
from ..core.engine.program import Program
from ..core.overwriting import put_back, unseen
from ..core.quantization import Quantizer, WeightCache
from ..core.settings import Recorder, current


def checkpoint_frames() -> int:
    """The number of ``torch.utils.checkpoint`` frames around this call."""
    count, frame = 0, sys._getframe().f_back
    while frame is not None:
        count += frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        frame = frame.f_back
    return count


def check_checkpoint(program: Program) -> None:
    """Refuse a recipe in a checkpoint that would recompute without it, or with other scales."""
    recorders = current.recorders
    restoring = recorders and any([isinstance(recorder, _Restoring) for recorder in recorders])
    if restoring or not (depth := checkpoint_frames()):
        return
    if depth != current.checkpoints:
        raise RuntimeError(
            "a chain under a recipe inside of torch.utils.checkpoint: the recomputation would not "
            "know the recipe; pass use_reentrant=False, context_fn=opfuse.checkpoint_contexts"
        )
    if program.advances and program.grad_mode:
        raise RuntimeError(
            f"autocast of {program.recipe}, which has state, inside of torch.utils.checkpoint: the "
            f"recomputation would use other scales, and cannot update them; put autocast around "
            f"checkpoint, or use_reentrant=False with context_fn=opfuse.checkpoint_contexts"
        )


class _State(NamedTuple):
    """What the ops of a chain keep from one call to the next, as it was at one time.

    Attributes:
        quantizers: The tensors of their quantizers, with the values.
        casts: The casts of their weights.
    """

    quantizers: list[tuple[Quantizer, str, Tensor]]
    casts: list[tuple[WeightCache, Any]]

    @classmethod
    def of(cls, chain: Chain) -> _State:
        """That of the ops of a chain now."""
        ops, recipe = chain.ops, current.recipe
        quantizers = [q for op in ops for q in op._quantizers.of_mode(op, recipe, "forward")]
        named = [(q, name) for q in quantizers for name in q.state_names]
        values = [(q, name, unseen(getattr(q, name))) for q, name in named]
        return cls(values, [(op._weights, op._weights.entries()) for op in ops])

    def put_back(self) -> None:
        """Restore it."""
        for quantizer, name, value in self.quantizers:
            put_back(getattr(quantizer, name), value)
        for cache, entries in self.casts:
            cache.put_back(entries)


class _Restoring(Recorder):
    """Restores the settings where a forward is computed again."""


class _CheckpointedForward(_Restoring):
    """Active in a checkpointed forward; records the state that each chain starts from."""

    def __init__(self) -> None:
        self.settings, self.weights = current.values, current.weights
        self.states: list[_State] = []

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the state of the chain."""
        self.states.append(_State.of(fuser._chain))


class _Recomputation(_Restoring):
    """Active in the recomputation; restores the forward's settings and each chain's state.

    Outer recorders, and the block around the backward, are told nothing: those of the forward were.
    """

    def __init__(self, forward: _CheckpointedForward) -> None:
        self._forward = forward
        self._after: list[_State] = []

    def __enter__(self) -> _Recomputation:
        super().__enter__()
        current.recorders = (self,)
        self._settings = current.values, current.weights, current.block
        current.values, current.weights = self._forward.settings, self._forward.weights
        current.block = None
        self._states = iter(self._forward.states)
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        current.values, current.weights, current.block = self._settings
        while self._after:
            self._after.pop().put_back()

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Restore the state that the chain started from.

        Raises:
            RuntimeError: The forward ran fewer chains.
        """
        if (state := next(self._states, None)) is None:
            raise RuntimeError(
                f"{fuser._chain.title} runs where a forward is computed again, and did not run in "
                f"that forward: what it depends on, such as a hook, was changed before the backward"
            )
        self._after.append(_State.of(fuser._chain))
        state.put_back()


@contextlib.contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def checkpoint_contexts(
    context_fn: Callable[[], Iterable[AbstractContextManager[Any]]] | None = None,
) -> tuple[AbstractContextManager[Any], ...]:
    """A ``context_fn`` for ``torch.utils.checkpoint``: recompute under the settings of the forward.

    The recomputation runs after the ``with`` blocks around the forward have ended (and on a GPU in
    another thread). Without this function it would run without the recipe and update quantizer
    state a second time. A chain under a recipe inside ``torch.utils.checkpoint`` therefore raises
    without it.

    Args:
        context_fn: Another such function, which applies as well; None: none does. With
            ``functools.partial`` it may be one of selective checkpointing.

    Raises:
        ValueError: ``context_fn`` does not return two contexts.
    """
    forward = _CheckpointedForward()
    pair = forward, _Recomputation(forward)
    if context_fn is None:
        return pair
    if len(others := tuple(context_fn())) != 2:
        what = "context_fn must return two contexts, those of the forward and of the recomputation"
        raise ValueError(f"opfuse.checkpoint_contexts: {what}, it returned {len(others)}")
    return tuple(_together(*both) for both in zip(pair, others, strict=True))
