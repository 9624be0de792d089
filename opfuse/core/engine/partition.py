"""Cuts a chain at ops that run through their own ``__call__``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..fusible import FusibleOperation
from ..introspection import op_class
from ..op import BasicOperation
from ..tools import wrap_call
from .chain import Chain, Slot, flatten


class Part(NamedTuple):
    """A part of a cut chain.

    Attributes:
        run: A fuser, or the op that runs through its own ``__call__``.
        call: What calls it.
        own: Those of its ops that callers count, by their index in the chain.
        inputs: The chain's slots of the extra inputs that it takes.
        outputs: The slots of the extra outputs that it returns.
    """

    run: Any
    call: Callable[..., Any]
    own: Sequence[int]
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]


class Cut(NamedTuple):
    """A chain that is cut at some of its ops: the parts, which run one after the other."""

    parts: Sequence[Part]

    def run(self, fuser: Any, input: Tensor, extra_inputs: Sequence[Tensor], kwargs: Any) -> Any:
        """Run the parts; channels between them carry tensors and gradients."""
        chain: Chain = fuser._chain
        x: Any = input
        given = {slot: extra_inputs[number] for slot, number in chain.arguments.items()}
        made: dict[Slot, Any] = {}
        for run, call, own, inputs, outputs in self.parts:
            extras = [given[s] if s in given else made[chain.sources[s]] for s in inputs]
            keywords: dict[str, Any] = {}
            if kwargs is not None and any(of_ops := [kwargs[i] for i in own]):
                is_op = isinstance(run, BasicOperation)
                keywords = of_ops[0] if is_op else {"basic_op_kwargs": of_ops}
            result = call(x, *extras, **keywords)
            x, *more = result if isinstance(result, tuple) else (result,)
            if len(more) != len(outputs):
                who = op_class(run).__name__ if isinstance(run, nn.Module) else "part of the chain"
                wanted = f"its output and {len(outputs)} extra outputs"
                raise RuntimeError(f"{who} must give {wanted}, gave {len(more)}")
            made.update(zip(outputs, more, strict=True))
        public = [made[slot] for slot in chain.public_outputs]
        return (x, *public) if public else x


def cut(fuser: Any, apart: Sequence[FusibleOperation]) -> Cut:
    """Cut a chain at some of its ops.

    Args:
        fuser: The fuser of the chain.
        apart: The ops, or their basic ops, that run through their own ``__call__``.
    """
    chain: Chain = fuser._chain
    single: list[FusibleOperation] = []
    for op in fuser.ops:
        single += [op] if op in apart or isinstance(op, BasicOperation) else flatten([op])
    parts: list[Part] = []
    start = 0
    for alone, group in groupby(single, lambda op: op in apart):
        between = list(group)
        for ops in [[op] for op in between] if alone else [between]:
            run: Any = ops[0] if alone else type(fuser)(ops, part=True)
            stop = start + len(flatten(ops, surrounded=True))
            call = wrap_call(run, module=run) if alone else run
            own = [i for i in chain.own if start <= i < stop]
            inputs, outputs = _taken(chain, start, stop), chain.outputs_of(start, stop)
            parts.append(Part(run, call, own, inputs, outputs))
            start = stop
    return Cut(parts)


def _taken(chain: Chain, start: int, stop: int) -> list[Slot]:
    """The extra inputs that a part takes; only the first of those that share a name."""
    taken: dict[Any, Slot] = {}
    for slot in chain.inputs_of(start, stop):
        if slot in chain.arguments or chain.sources[slot][0] < start:
            taken.setdefault(chain.arguments.get(slot, slot), slot)
    return list(taken.values())
