"""The casts on the edges of a chain, found before fusions are chosen.

Edge ``i`` is the input of op ``i``, and edge ``n`` the output of the last one. The forward carries
values along it, the backward their gradients. Positions on the way are counted in half steps: edge
``i`` is at ``2 * i``, op ``i`` at ``2 * i + 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..cast import Cast, place_quantize
from ..environment import Environment
from ..op import BasicOperation
from ..quantization import Quantizer, Recipe
from ..quantization.names import why_unquantized
from ..settings import current
from .chain import Chain


class Needs(NamedTuple):
    """Which gradients a program computes.

    Attributes:
        recorded: Whether grad mode is on.
        first_backward: The first op that takes part in the backward; the number of ops if none
            does.
        inputs: For each op, whether the gradient of its input is needed.
        params: For each op, whether the gradient of each of its parameters is needed.
    """

    recorded: bool
    first_backward: int
    inputs: tuple[bool, ...]
    params: tuple[tuple[bool, ...], ...]


class View(NamedTuple):
    """The ops of a chain as the fusions of a pass see them, casts included.

    Attributes:
        ops: The ops, in the order of the forward.
        places: The position of each, in half steps.
    """

    ops: tuple[BasicOperation, ...]
    places: tuple[int, ...]


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

    def view(self, ops: Sequence[BasicOperation], pass_name: str) -> View:
        """The ops and casts that a pass runs; for ``"joint"``, the ops alone."""
        casts = {} if pass_name == "joint" else getattr(self, pass_name)
        placed: dict[int, BasicOperation] = {2 * i + 1: op for i, op in enumerate(ops)}
        placed |= {2 * edge: cast for edge, cast in casts.items()}
        places = sorted(placed)
        return View(tuple([placed[place] for place in places]), tuple(places))

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


def find_edges(chain: Chain, env: Environment, needs: Needs, off: str = "") -> Edges:
    """Ask each op for the quantizers of its input and of its output's gradient.

    Args:
        chain: The chain.
        env: The environment of the plan.
        needs: The gradients that it computes.
        off: Why no plugin serves the recipe in force, or ``""``.
    """
    unquantized = why_unquantized(chain.ops, current.skip, off)
    serving = [op._quantizers.serving(op, env.recipe, needs.recorded) for op in chain.ops]
    if env.recipe is None:
        return Edges({}, {}, serving, unquantized if off else {})
    quantized_backward = env.recipe.backward_override is None
    forward: dict[int, Cast] = {}
    backward: dict[int, Cast] = {}
    for i, op in enumerate(chain.ops):
        dgrad, wgrad = needs.inputs[i], any(needs.params[i])
        if (quantizer := op.get_input_quantizer()) is not None:
            usage = op.get_usage("input", dgrad=dgrad, wgrad=wgrad, backward=quantized_backward)
            forward[i] = Cast(_as_recorded(quantizer, needs), usage)
        if i < needs.first_backward or not quantized_backward:
            continue
        if (quantizer := op.get_grad_output_quantizer()) is not None:
            usage = op.get_usage("grad_output", dgrad=dgrad, wgrad=wgrad)
            if any(usage):
                backward[i + 1] = Cast(_as_recorded(quantizer, needs), usage)
    both = needs.recorded and not env.compiling
    facts = place_quantize(chain.ops, forward, backward, env.row_alignment if both else None)
    return Edges(forward, backward, serving, unquantized, facts)


def _as_recorded(quantizer: Quantizer, needs: Needs) -> Quantizer:
    return quantizer if needs.recorded else quantizer.unrecorded()
