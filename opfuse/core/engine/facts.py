"""What a plan is made from: steps, the casts on the edges of a chain, and everything else.

Edge ``i`` is the input of op ``i``, and edge ``n`` the output of the last one. The forward carries
values along it, the backward their gradients. Positions on the way are counted in half steps: edge
``i`` is at ``2 * i``, op ``i`` at ``2 * i + 1``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..cast import Cast, Quantize
from ..environment import Environment
from ..fusible import declared
from ..hookspecs import Run
from ..introspection import op_class
from ..op import BasicOperation
from ..quantization import BOTH, Quantizer, Recipe
from ..quantization.names import first_match, why_unquantized
from ..records import PluginRecord
from ..settings import Settings, current
from ..tools import wrap
from .chain import Chain

Shapes = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]


class Recompute(NamedTuple):
    """How the input of an op is computed again instead of being kept.

    Attributes:
        step: The step before it, in the forward.
        run: The ``fuser_recompute`` of that step.
        place: Index of the input among the op's saved tensors.
        cast: The cast to repeat, if it is a step of its own.
    """

    step: Step
    run: Callable[..., Any]
    place: int
    cast: Any


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One call of one op, for the range of a chain that it replaces: ops and casts on their edges.

    Attributes:
        begin, end: The range in half steps, see :mod:`opfuse.core.engine.facts`; casts have a place
            there too.
        matched: The basic ops and the casts, in the order of the forward.
        source: The :class:`~opfuse.core.records.FusionSource` of a fused op; None for another op.
        benefit: Number of tensor reads and writes that a fusion saves.
        env: The environment that was passed to a fusion.
        op: The basic op, the cast, or the fused op; None: it is not built yet.
        note: Further remarks for reports.
        start, stop: The range of basic ops; empty for a cast, whose edge is both.
        has_extras: Whether one of the basic ops has extra tensors.
        cast_places: Where in ``matched`` casts are, the last one first.
    """

    begin: int
    end: int
    matched: tuple[BasicOperation, ...]
    source: Any = None
    benefit: float = 0.0
    env: Any = None
    op: Any = None
    note: str = ""
    start: int = dataclasses.field(init=False)
    stop: int = dataclasses.field(init=False)
    has_extras: bool = dataclasses.field(init=False)
    cast_places: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start, self.stop = self.begin // 2, self.end // 2
        places = reversed(range(len(self.matched)))
        self.cast_places = tuple([p for p in places if isinstance(self.matched[p], Cast)])
        self.has_extras = any(op.num_extra_inputs or op.num_extra_outputs for op in self.matched)

    @classmethod
    def alone(cls, op: BasicOperation, place: int) -> Step:
        """A step of an op, or of a cast, by itself."""
        return cls(place, place + 1, (op,), op=op)

    @property
    def indexed_ops(self) -> list[tuple[int, BasicOperation]]:
        """Its ops, each with its index, and its casts, each with its edge."""
        found, index = [], self.start
        for op in self.matched:
            found.append((index, op))
            index += not isinstance(op, Cast)
        return found

    @property
    def casts(self) -> list[tuple[int, Cast]]:
        """Its casts, each with its edge."""
        return [(edge, op) for edge, op in self.indexed_ops if isinstance(op, Cast)]

    @property
    def title(self) -> str:
        """The names of its ops and casts."""
        return " + ".join(op_class(op).__name__ for op in self.matched)

    @property
    def passes(self) -> str:
        """The pass that it replaces; ``"joint"`` for an op that is not fused."""
        return str(self.source.passes) if self.source else "joint"

    def remark(self, text: str) -> None:
        """Put a remark before those that it has."""
        self.note = "; ".join(filter(None, (text, self.note)))

    def separate(self, pass_name: str, last: int | None = None) -> list[Step]:
        """The steps of its ops and casts, in the order of a pass.

        Args:
            pass_name: ``"forward"`` or ``"backward"``.
            last: The last op that takes part; None: all do.
        """
        found = [
            Step.alone(op, 2 * i + (not isinstance(op, Cast)))
            for i, op in self.indexed_ops
            if last is None or i <= last
        ]
        return found if pass_name == "forward" else found[::-1]


Candidate = Step
"""A step that may be chosen: a place where a fusion fits."""


class Needs(NamedTuple):
    """Which gradients a program computes.

    Attributes:
        grad_mode: Whether grad mode is on.
        first_backward: The first op that takes part in the backward; the number of ops if none
            does.
        inputs: For each op, whether the gradient of its input is needed.
        params: For each op, whether the gradient of each of its parameters is needed.
    """

    grad_mode: bool
    first_backward: int
    inputs: tuple[bool, ...]
    params: tuple[tuple[bool, ...], ...]


class Edges(NamedTuple):
    """The casts that a recipe asks for.

    Attributes:
        forward: The casts of the forward, by edge.
        backward: The casts of the backward.
        quantizers: The quantizers of each op, by name.
        unquantized: By position, why an op that you would expect to be quantized is not.
        row_facts: The facts about the number of rows that the casts depend on.
    """

    forward: Mapping[int, Cast] = {}
    backward: Mapping[int, Cast] = {}
    quantizers: Sequence[Mapping[str, Quantizer]] = ()
    unquantized: Mapping[int, str] = {}
    row_facts: tuple[str, ...] = ()

    def recipe_of(self, recipe: Recipe | None, start: int, stop: int) -> Recipe | None:
        """The recipe for ``ops[start:stop]``; None if it skips all that it would quantize."""
        left = any(start <= i < stop for i in self.unquantized)
        return None if left and not any(self.quantizers[start:stop]) else recipe

    def view(self, ops: Sequence[BasicOperation], pass_name: str) -> dict[int, BasicOperation]:
        """The ops and casts that a pass runs, by place in half steps; ``"joint"``: ops alone."""
        casts = {} if pass_name == "joint" else getattr(self, pass_name)
        placed: dict[int, BasicOperation] = {2 * i + 1: op for i, op in enumerate(ops)}
        placed |= {2 * edge: cast for edge, cast in casts.items()}
        return dict(sorted(placed.items()))

    def between(self, passes: str, start: int, stop: int) -> str:
        """Describe the casts of a pass between the ops of ``ops[start:stop]``; ``""``: none."""
        for edge in range(start + 1, stop):
            if passes != "backward" and edge in self.forward:
                return f"the input of op {edge} is cast by {_by(self.forward[edge])}"
            if passes != "forward" and edge in self.backward:
                by = _by(self.backward[edge])
                return f"the gradient of the output of op {edge - 1} is cast by {by}"
        return ""


def _by(cast: Cast) -> str:
    return type(cast.quantizer).__name__


def edges_of(
    chain: Chain, env: Environment, needs: Needs, settings: Settings, off: str = ""
) -> Edges:
    """Create the quantizers of the ops, and ask each op which ones its tensors need.

    Args:
        chain: The chain.
        env: The environment of the plan.
        needs: The gradients that it computes.
        settings: Those of the plan. Ops read the recipe there; none is in force in a trace.
        off: Why no plugin serves the recipe, or ``""``.
    """
    known = {"environment": env, "is_recording": needs.grad_mode, "quantizers": {}}
    with current.temporarily(values=settings, **known):
        for op in chain.ops:
            skipped = first_match(op.name, settings.skip)
            op.reset_recipe_state(recipe=None if skipped else env.recipe)
        unquantized = why_unquantized(chain.ops, current.skip, off)
        quantizers = [op._quantizers.in_force(op, env.recipe, needs.grad_mode) for op in chain.ops]
        current.quantizers = dict(zip(chain.ops, quantizers, strict=True))
        if env.recipe is None:
            return Edges({}, {}, quantizers, unquantized if off else {})
        quantized_backward = env.recipe.backward_override is None
        forward: dict[int, Cast] = {}
        backward: dict[int, Cast] = {}
        for i, op in enumerate(chain.ops):
            dgrad, wgrad = needs.inputs[i], any(needs.params[i])
            if (quantizer := op.get_input_quantizer()) is not None:
                usage = op.get_usage("input", dgrad=dgrad, wgrad=wgrad, backward=quantized_backward)
                forward[i] = Cast(quantizer, usage)
            if i < needs.first_backward or not quantized_backward:
                continue
            if (quantizer := op.get_grad_output_quantizer()) is not None:
                usage = op.get_usage("grad_output", dgrad=dgrad, wgrad=wgrad)
                if any(usage):
                    backward[i + 1] = Cast(quantizer, usage)
        both = needs.grad_mode and not env.compiling
        facts = _place_quantize(chain.ops, forward, backward, env.row_alignment if both else None)
        return Edges(forward, backward, quantizers, unquantized, facts)


def _place_quantize(
    ops: Sequence[BasicOperation],
    forward: dict[int, Cast],
    backward: dict[int, Cast],
    row_alignment: int | None,
) -> tuple[str, ...]:
    """Leave the casts of ``Quantize`` to its neighbours, or make both copies at chain ends.

    Args:
        ops: The ops of a chain.
        forward: The casts of the forward, by edge.
        backward: The casts of the backward.
        row_alignment: As in :class:`opfuse.Environment`; None: not for training.

    Returns:
        The facts about the number of rows that the casts depend on.
    """
    for i, op in enumerate(ops):
        if op_class(op) is Quantize and i + 1 in forward:
            forward.pop(i, None)
        if op_class(op) is Quantize and i in backward:
            backward.pop(i + 1, None)
    keeps_rows, facts = all(declared(op, "keeps_rows") for op in ops), set()
    for casts, edge, i in ((forward, len(ops) - 1, -1), (backward, 1, 0)):
        if row_alignment is None or edge not in casts or op_class(ops[i]) is not Quantize:
            continue
        quantizer = casts[edge].quantizer
        if (row_alignment if keeps_rows else 1) % quantizer.row_multiple == 0:
            casts[edge] = Cast(quantizer, BOTH)
        if keeps_rows and quantizer.row_multiple > 1:
            facts.add("row_alignment")
    return tuple(facts)


class ToolFacts(ABC):
    """What a tool knows of the candidates of one plan, beyond what they declare.

    Attributes:
        digest: A hash of it, which joins the plan, or ``""``.
    """

    digest: str = ""

    @abstractmethod
    def fields(self, candidate: Candidate, read: Callable[[str], Any]) -> Mapping[str, Any] | None:
        """Fields of the :class:`Environment` of a candidate; None: nothing is known of it.

        They are asked for once, before its condition. If a tool knows a candidate, its
        declaration ``trades_time`` does not count: the tool refuses it where it is too slow.

        Args:
            candidate: The candidate. Reports tell its ``remark``.
            read: Gives ``"rows"``, ``"features"`` or ``"contiguous"`` of its input, or None where
                that is not known. The plan is then for such inputs alone.
        """


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that a plan of a chain is made from.

    Attributes:
        chain: The chain.
        env: The environment of the plan.
        needs: The gradients that it computes.
        edges: The casts of each pass.
        params: Shape and dtype of the parameters of each op.
        kwargs: Names of the keyword arguments given to each op.
        autocast: The dtype that autocast asks for, or None.
        input_dtype: The dtype of the chain's input, which autocast may cast.
        tools: The tools that wrap what runs.
        needs_tools: Those without which it must not run, besides those that its ops need.
        tool_facts: What they know of candidates.
    """

    chain: Chain
    env: Environment
    needs: Needs
    edges: Edges
    params: Shapes
    kwargs: Sequence[tuple[str, ...]]
    autocast: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    tools: Sequence[PluginRecord] = ()
    needs_tools: Sequence[str] = ()
    tool_facts: Sequence[ToolFacts] = ()

    def check_tools(self) -> None:
        """Refuse to go on without a tool that failed, if something was asked of it.

        Raises:
            RuntimeError: An option in force is of it, or an op needs it.
        """
        for record in [record for record in self.tools if record.state == "failed"]:
            asked = [name for name in record.options if name in self.env.options]
            if asked or record.name in (*self.chain.needs_tools, *self.needs_tools):
                who = f"option {asked[0]}" if asked else self.chain.title
                raise RuntimeError(f"{who} needs the tool {record.name}: {record.error}")

    def wrap(self, hook: str, run: Run, **given: Any) -> Run:
        """What the tools make of a function; see :func:`opfuse.core.tools.wrap`."""
        return wrap(self.tools, hook, run, facts=self, **given)
