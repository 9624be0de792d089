"""The fixed structure of a chain: its basic ops, the routes of extra tensors, and its widths.

It is computed once, when a fuser captures its ops. Everything that can be refused without running
is refused here. A chain is cut at ops that run through their own ``__call__``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..cast import Cast
from ..fused_op import FusedOperation
from ..fusible import FusibleOperation
from ..introspection import op_class
from ..op import WORDS, BasicOperation, kinds_of
from ..tools import wrap_call

Slot = tuple[int, int]
"""The index of an op, and that of one of its extra inputs or outputs."""


def flatten(ops: Iterable[FusibleOperation], *, expand: bool = False) -> tuple[BasicOperation, ...]:
    """The basic ops that ``ops`` are or replace.

    Args:
        ops: The ops as the user wrote them.
        expand: Add those that run around them, see :meth:`BasicOperation.surround`.
    """
    basic: list[BasicOperation] = []
    for op in ops:
        if not isinstance(op, (BasicOperation, FusedOperation)):
            raise TypeError(f"a fuser takes basic and fused ops, got {type(op).__name__}")
        name = next((name for name in ("op_forward", "op_backward") if hasattr(op, name)), None)
        if name is not None and isinstance(op, FusedOperation):
            runs = ", ".join(op_class(part).__name__ for part in op.basic_ops)
            raise TypeError(
                f"{op_class(op).__name__}.{name} would never run, since it runs as [{runs}]: "
                f"override forward, or derive from a basic op"
            )
        if isinstance(op, Cast):
            raise TypeError("only the engine puts a Cast into a chain: use Quantize instead")
        basic += op.basic_ops if isinstance(op, FusedOperation) else [op]  # type: ignore[arg-type]
    if expand:
        return tuple([each for op in basic for each in op.ops_as_run])
    return tuple(basic)


class Chain:
    """The ops of a chain, and the sources and destinations of its tensors.

    Attributes:
        written: The ops as the user wrote them, basic and fused.
        ops: The basic ops that these are or replace, and those that run around them.
        own: The indices of the ops that the user wrote, without those from ``surround``.
        title: The name of the chain in error messages.
        param_sources: ``(module, attribute)`` of every parameter, in op order.
        param_ranges: The range of parameters of each op.
        kinds: The kind of each ``(op, slot)``, see :func:`~opfuse.core.op.kinds_of`.
        external_inputs: ``(op, slot)`` of every extra input that the caller gives, in order; only
            the first of those that share a name.
        arguments: The index among these for each ``(op, slot)`` that no channel feeds.
        public_outputs: ``(op, slot)`` of every extra output that the caller gets, in order.
        sources: ``(op, slot)`` of a channel's producer, for each bound extra input.
        needs_tools: The tools without which one of its ops does not run.
        width: Last dimension of the chain's input, or None for any.
        later_widths: The same for ops whose input width is known only when the chain runs.
        widths: Last dimension on each edge, or None if the chain does not determine it.

    Args:
        ops: The ops as the user wrote them.
        part: Whether they are part of a longer chain, whose runner then passes channels on.
        is_complete: Whether ``ops`` has the surrounding ops already.
    """

    def __init__(
        self, ops: Iterable[FusibleOperation], *, part: bool = False, is_complete: bool = False
    ) -> None:
        self.written = tuple(ops)
        self.ops = flatten(self.written, expand=not is_complete)
        counted = set(flatten(self.written))
        self.own = tuple([i for i, op in enumerate(self.ops) if op in counted])
        self.title = f"chain [{', '.join(op_class(op).__name__ for op in self.written)}]"
        self.param_sources: list[tuple[nn.Module, str]] = []
        self.param_ranges: list[Slot] = []
        for op in self.ops:
            start = len(self.param_sources)
            self.param_sources += [op.param_source(name) for name in op.param_names or ()]
            self.param_ranges.append((start, len(self.param_sources)))
        self._bind_channels(part)
        self.kinds = {
            (i, k): kind for i, op in enumerate(self.ops) for k, kind in enumerate(kinds_of(op))
        }
        self._share_arguments()
        self.public_outputs = [
            (i, k)
            for i, k in self.outputs_of(0, len(self.ops))
            if part or self.ops[i]._extra_output_to_caller[k]
        ]
        self.needs_tools = sorted({tool for op in self.ops for tool in op.needs_tools})
        self.has_extras = any(op.num_extra_inputs or op.num_extra_outputs for op in self.ops)

    def _bind_channels(self, part: bool) -> None:
        """Bind extra inputs to the producers of their channels."""
        producers: dict[str, Slot] = {}
        for (i, k), channel in _bound(op._extra_output_channels for op in self.ops):
            if channel in producers:
                both = f"{self.name(producers[channel][0])} and {self.name(i)}"
                raise ValueError(f"channel {channel!r} has two producers: {both}")
            producers[channel] = (i, k)
        self.sources: dict[Slot, Slot] = {}
        for (i, k), channel in _bound(op._extra_input_channels for op in self.ops):
            if channel in producers:
                source = self.sources[i, k] = producers[channel]
                if source[0] >= i:
                    order = f"read by {self.name(i)} but written later, by {self.name(source[0])}"
                    raise ValueError(f"channel {channel!r} is {order}")
            elif not part:
                chain = " + ".join(op_class(op).__name__ for op in self.ops)
                raise ValueError(
                    f"channel {channel!r} read by {self.name(i)} has no producer in this chain, "
                    f"{chain}; a module that is not an op ends a chain, and no channel crosses it"
                )

    def kwargs_of_all(self, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keyword arguments of all ops, from those of the ops that callers count.

        Raises:
            ValueError: There are too many or too few.
        """
        if len(given) != (count := len(self.own)):
            what = f"expected keyword arguments for {count} basic ops, got {len(given)}"
            raise ValueError(f"{self.title} {what}")
        by_place = dict(zip(self.own, given, strict=True))
        return [by_place.get(i, {}) for i in range(len(self.ops))]

    def name(self, index: int) -> str:
        """The name of an op in error messages."""
        return f"op {index} ({op_class(self.ops[index]).__name__})"

    def _share_arguments(self) -> None:
        """Number the extra inputs that the caller gives; slots of one name share a number."""
        self.external_inputs: list[Slot] = []
        self.arguments: dict[Slot, int] = {}
        named: dict[str, int] = {}
        for slot in [slot for slot in self.kinds if slot not in self.sources]:
            count, name = len(self.external_inputs), self._extra_name(slot)
            number = self.arguments[slot] = count if name is None else named.setdefault(name, count)
            if number == count:
                self.external_inputs.append(slot)
            else:
                self._check_shared(self.external_inputs[number], slot)

    def _check_shared(self, first: Slot, other: Slot) -> None:
        """Refuse two inputs of one name whose ops cannot take the same tensor."""
        what = f"extra input name {self._extra_name(first)!r}"
        if self.kinds[first] != self.kinds[other]:
            demands = " but ".join(
                f"{WORDS[self.kinds[i, k]]} by {self.name(i)} as extra input {k}"
                for i, k in (first, other)
            )
            raise ValueError(f"{what} is wanted as {demands}: give them different names")
        for i, _ in (first, other):
            if getattr(self.ops[i], "in_place", False):
                raise ValueError(
                    f"{what} is read by {self.name(first[0])} and {self.name(other[0])}, and "
                    f"{self.name(i)} writes into it: pass in_place=False, or give them different "
                    f"names"
                )

    def _extra_name(self, slot: Slot) -> str | None:
        return self.ops[slot[0]].extra_input_names[slot[1]]

    def takers(self) -> list[str]:
        """For each argument its name, if it has one, and the ops that take it, for messages."""
        found: list[dict[str, None]] = [{} for _ in self.external_inputs]
        for (i, _), number in self.arguments.items():
            found[number][self.name(i)] = None
        return [
            f"{f'{name!r} of ' if (name := self._extra_name(slot)) else ''}{' and '.join(who)}"
            for slot, who in zip(self.external_inputs, found, strict=True)
        ]

    def inputs_of(self, start: int, stop: int) -> list[Slot]:
        """The extra inputs of ``ops[start:stop]``."""
        return [slot for slot in self.kinds if start <= slot[0] < stop]

    def outputs_of(self, start: int, stop: int) -> list[Slot]:
        """The extra outputs of ``ops[start:stop]``."""
        return [(i, k) for i in range(start, stop) for k in range(self.ops[i].num_extra_outputs)]

    def is_needed_after(self, slot: Slot, stop: int) -> bool:
        """Return whether the caller, or an op from ``stop`` on, uses an extra output."""
        return slot in self.public_outputs or any(
            source == slot and consumer >= stop for (consumer, _), source in self.sources.items()
        )

    # found when they are needed: a tool that knows why they do not fit refuses the chain before

    widths: Any = functools.cached_property(lambda self: self._flow[0])
    width: Any = functools.cached_property(lambda self: self._flow[1].get(0))
    later_widths: Any = functools.cached_property(
        lambda self: {i: width for i, width in self._flow[1].items() if i}
    )

    @functools.cached_property
    def _flow(self) -> tuple[list[int | None], dict[int, int]]:
        """The last dimension on each edge, and what ops demand of those that are not determined.

        The width is known (``value``), or the width at op ``anchor`` divided by ``ratio``; a demand
        then fixes the width at the anchor.
        """
        demands: dict[int, int] = {}
        known: list[tuple[int | None, int, int]] = []
        value: int | None = None
        anchor, ratio = 0, 1
        for i, op in enumerate(self.ops):
            if op.in_features is not None:
                if value is None:
                    demands[anchor] = op.in_features * ratio
                elif value != op.in_features:
                    takes = f"{self.name(i)} takes {op.in_features} features in the last dimension"
                    raise ValueError(f"{takes}, but the ops before it give {value}")
                value = op.in_features
            known.append((value, anchor, ratio))
            if op.out_features is not None:
                value = op.out_features
            elif op.feature_ratio is None:
                value, anchor, ratio = None, i + 1, 1
            elif value is None:
                ratio *= op.feature_ratio
            elif value % op.feature_ratio:
                splits = f"{self.name(i)} splits its features into {op.feature_ratio}"
                raise ValueError(f"{splits}, but gets {value} of them")
            else:
                value //= op.feature_ratio
        known.append((value, anchor, ratio))
        widths = [v if v is not None or a not in demands else demands[a] // r for v, a, r in known]
        return widths, demands


def _bound(channels: Iterable[Sequence[str | None]]) -> list[tuple[Slot, str]]:
    """The ``(op, slot)`` pairs that have a channel, each with its channel."""
    pairs = [((i, k), name) for i, of_op in enumerate(channels) for k, name in enumerate(of_op)]
    return [(slot, name) for slot, name in pairs if name is not None]


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
            stop = start + len(flatten(ops, expand=True))
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
