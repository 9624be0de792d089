"""Cuts a chain at ops that run through their own ``__call__``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..fusible import FusibleOperation
from ..introspection import op_class
from ..op import BasicOperation
from .chain import Chain, Slot, flatten


class Part(NamedTuple):
    """A part of a cut chain.

    Attributes:
        run: A fuser, or the op that runs through its own ``__call__``.
        call: What calls it.
        start, stop: Range of its basic ops in the chain.
        inputs: The chain's slots of the extra inputs that it takes.
        outputs: The slots of the extra outputs that it returns.
    """

    run: Callable[..., Any]
    call: Callable[..., Any]
    start: int
    stop: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


class Cut:
    """A chain that is cut at some of its ops.

    Args:
        parts: The parts, which run one after the other.
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def run(self, fuser: Any, input: Tensor, extra_inputs: Sequence[Tensor], kwargs: Any) -> Any:
        """Run the parts; channels between them carry tensors and gradients."""
        chain: Chain = fuser._chain
        x: Any = input
        given = {slot: extra_inputs[number] for slot, number in chain.arguments.items()}
        made: dict[Slot, Any] = {}
        for run, call, start, stop, inputs, outputs in self.parts:
            extras = [given[s] if s in given else made[chain.sources[s]] for s in inputs]
            here: dict[str, Any] = {}
            if kwargs is not None and any(kwargs[start:stop]):
                own = [kwargs[i] for i in chain.own if start <= i < stop]
                here = own[0] if isinstance(run, BasicOperation) else {"basic_op_kwargs": own}
            result = call(x, *extras, **here)
            x, *more = result if isinstance(result, tuple) else (result,)
            if len(more) != len(outputs):
                who = op_class(run).__name__ if isinstance(run, nn.Module) else "part of the chain"
                wanted = f"its output and {len(outputs)} extra outputs"
                raise RuntimeError(f"{who} must give {wanted}, gave {len(more)}")
            made.update(zip(outputs, more, strict=True))
        public = [made[slot] for slot in chain.public_outputs]
        return (x, *public) if public else x


def cut(
    ops: Sequence[FusibleOperation],
    chain: Chain,
    apart: Sequence[FusibleOperation],
    fuser: Callable[[Sequence[FusibleOperation]], Callable[..., Any]],
    wrap: Callable[..., Callable[..., Any]],
) -> Cut:
    """Cut a chain at some of its ops.

    Args:
        ops: The chain, as the user wrote it.
        chain: Its structure.
        apart: The ops, or their basic ops, that run through their own ``__call__``.
        fuser: Creates the fuser of a run between them.
        wrap: Makes what calls such an op.
    """
    single: list[FusibleOperation] = []
    for op in ops:
        single += [op] if op in apart or isinstance(op, BasicOperation) else flatten([op])
    runs: list[Any] = []
    for alone, group in groupby(single, lambda op: op in apart):
        run = list(group)
        runs += [(op, [op]) for op in run] if alone else [(fuser(run), run)]
    parts, start = [], 0
    for run, of_run in runs:
        stop = start + len(flatten(of_run, surrounded=True))
        inputs = _taken(chain, start, stop)
        outputs = [
            (i, k) for i in range(start, stop) for k in range(chain.ops[i].num_extra_outputs)
        ]
        call = wrap(run, module=run) if run in apart else run
        parts.append(Part(run, call, start, stop, tuple(inputs), tuple(outputs)))
        start = stop
    return Cut(tuple(parts))


def _taken(chain: Chain, start: int, stop: int) -> list[Slot]:
    """The extra inputs that a part takes; only the first of those that share a name."""
    taken: dict[Any, Slot] = {}
    for slot in [slot for slot in chain.kinds if start <= slot[0] < stop]:
        if slot in chain.arguments or chain.sources[slot][0] < start:
            taken.setdefault(chain.arguments.get(slot, slot), slot)
    return list(taken.values())
