"""Cuts a chain at ops that run through their own ``__call__``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..fusible import FusibleOperation
from ..introspection import op_class
from ..op import BasicOperation
from ..settings import current
from .chain import Chain, Slot, flatten


class Part(NamedTuple):
    """A part of a cut chain.

    Attributes:
        run: A fuser, or the op that runs through its own ``__call__``.
        start, stop: Range of its basic ops in the chain.
        inputs: The chain's slots of the extra inputs that it takes.
        outputs: The slots of the extra outputs that it returns.
    """

    run: Callable[..., Any]
    start: int
    stop: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


class Cut(NamedTuple):
    """Replaces the program of a chain that is cut."""

    parts: tuple[Part, ...]
    row_facts: tuple[str, ...] = ()
    rows: tuple[Any, ...] = ()
    is_plain: bool = False
    recipe: Any = None


def cut(
    ops: Sequence[FusibleOperation],
    chain: Chain,
    apart: Sequence[FusibleOperation],
    fuser: Callable[[Sequence[FusibleOperation]], Callable[..., Any]],
) -> Cut:
    """Cut a chain at some of its ops.

    Args:
        ops: The chain, as the user wrote it.
        chain: Its structure.
        apart: The ops, or their basic ops, that run through their own ``__call__``.
        fuser: Creates the fuser of a run between them.
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
        parts.append(Part(run, start, stop, tuple(inputs), tuple(outputs)))
        start = stop
    return Cut(tuple(parts))


def _taken(chain: Chain, start: int, stop: int) -> list[Slot]:
    """The extra inputs that a part takes; only the first of those that share a name."""
    taken: dict[Any, Slot] = {}
    for slot in [slot for slot in chain.kinds if start <= slot[0] < stop]:
        if slot in chain.arguments or chain.sources[slot][0] < start:
            taken.setdefault(chain.arguments.get(slot, slot), slot)
    return list(taken.values())


def run_parts(
    program: Any,
    fuser: Any,
    input: Tensor,
    tensors: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Sequence[dict[str, Any]] | None,
) -> Any:
    """Run a :class:`Cut`, or blocks of rows; a parameter is read once, which may change a state.

    Args:
        program: The one or the other.
        fuser: The fuser of the whole chain.
        input: Its input.
        tensors: The parameters that its parts take, too.
        extra_inputs: The extra inputs that no channel feeds.
        kwargs: Keyword arguments per basic op, or None.
    """
    cut = isinstance(program, Cut)
    run = partial(run_cut, program, fuser._chain) if cut else partial(program.run, fuser)
    if is_dynamo_compiling():
        return run(input, extra_inputs, kwargs)
    pairs = zip(fuser._params, tensors, strict=False)
    with current.temporarily(given={(module, name): t for (_, module, name), t in pairs}):
        return run(input, extra_inputs, kwargs)


def run_cut(
    cut: Cut,
    chain: Chain,
    input: Tensor,
    extra_inputs: Sequence[Tensor],
    kwargs: Sequence[dict[str, Any]] | None,
) -> Any:
    """Run the parts one after the other; channels between them carry tensors and gradients.

    Args:
        cut: The parts.
        chain: The whole chain.
        input: Input of the first part.
        extra_inputs: The extra inputs that no channel feeds.
        kwargs: Keyword arguments per basic op, or None.
    """
    x: Any = input
    given = {slot: extra_inputs[number] for slot, number in chain.arguments.items()}
    made: dict[Slot, Any] = {}
    for run, start, stop, inputs, outputs in cut.parts:
        extras = [given[slot] if slot in given else made[chain.sources[slot]] for slot in inputs]
        here: dict[str, Any] = {}
        if kwargs is not None and any(kwargs[start:stop]):
            own = [kwargs[i] for i in chain.own if start <= i < stop]
            here = own[0] if isinstance(run, BasicOperation) else {"basic_op_kwargs": own}
        result = run(x, *extras, **here)
        x, *more = result if isinstance(result, tuple) else (result,)
        if len(more) != len(outputs):
            who = op_class(run).__name__ if isinstance(run, nn.Module) else "a part of the chain"
            wanted = f"its output and {len(outputs)} extra outputs"
            raise RuntimeError(f"{who} must give {wanted}, gave {len(more)}")
        made.update(zip(outputs, more, strict=True))
    public = [made[slot] for slot in chain.public_outputs]
    return (x, *public) if public else x
