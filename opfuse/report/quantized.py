"""The tensors that a plan quantizes, with place and quantizer, and the products that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.quantization.quantizer import same_quantizer
from ..core.quantization.state import living_weights, quantizer_names
from .lines import table


@dataclasses.dataclass(frozen=True)
class QuantizedRow:
    """One tensor that a plan quantizes.

    Attributes:
        op: The class of the op that reads it, and its name.
        tensor: ``"input"``, ``"weight"`` or ``"grad_output"``.
        format: The format it is cast to, as described by its quantizer.
        usage: The copies that are made: ``"rowwise"``, ``"columnwise"`` or both.
        quantizer: The class of the quantizer.
        where: The step that casts it.
        remark: What was wrong with the values cast so far, see :meth:`opfuse.Quantizer.remark`.
    """

    op: str
    tensor: str
    format: str
    usage: str
    quantizer: str
    where: str
    remark: str = ""


class Quantized(NamedTuple):
    """The effect of a recipe on a chain.

    Attributes:
        recipe: The recipe; ``""`` without one.
        products: Number of matrix products of the linear ops, in both passes.
        quantized: Number of these that have quantized operands.
        tensors: The tensors.
    """

    recipe: str = ""
    products: int = 0
    quantized: int = 0
    tensors: tuple[QuantizedRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able data."""
        return self._asdict() | {"tensors": [dataclasses.asdict(row) for row in self.tensors]}

    def lines(self) -> list[str]:
        """The products, and a line for each tensor; nothing without a recipe."""
        if not self.recipe or not (self.products or self.tensors):
            return []
        rows = []
        for row in self.tensors:  # the steps say more about the quantizer
            usage = row.usage.replace("rowwise and columnwise", "both copies")
            rows.append((row.op, row.tensor, row.format, usage, row.where))
        share = f"{self.quantized} of {self.products} products of linear ops"
        found = [f"  {row.op} {row.tensor}: {row.remark}" for row in self.tensors if row.remark]
        lines = [f"  {line}" for line in table(rows)]
        return [f"quantized by {self.recipe}: {share}", *lines, *found]


def total(parts: Sequence[Quantized]) -> Quantized:
    """All together; of their tensors those that there is a remark on."""
    recipes = {part.recipe for part in parts if part.recipe}
    recipe = "several recipes" if len(recipes) > 1 else "".join(recipes)
    rows = tuple(dict.fromkeys(row for p in parts for row in p.tensors if row.remark))
    return Quantized(recipe, sum(p.products for p in parts), sum(p.quantized for p in parts), rows)


def quantized_by(program: Any) -> Quantized:
    """The effect of a program's recipe on its chain."""
    recipe = program.env.recipe
    if recipe is None:
        return Quantized()
    quantizers, needs = program.facts.edges.quantizers, program.facts.needs
    products, rows = list[bool](), list[QuantizedRow]()
    backward = recipe.backward_override is None
    for i, op in enumerate(program.chain.ops):
        given = {"dgrad": needs.inputs[i], "wgrad": any(needs.params[i]), "backward": backward}
        if op.param_names and (op.num_quantizers("backward") or getattr(op, "unquantized", "")):
            products += _products(op, quantizers[i], **given)
        if quantizers[i]:
            rows += _rows(program, i, op, given)
    return Quantized(type(recipe).__name__, len(products), sum(products), tuple(rows))


def _products(op: Any, quantizers: Any, dgrad: bool, wgrad: bool, backward: bool) -> list[bool]:
    """For each product of a linear op whether both of its operands are quantized."""
    names = {*quantizer_names(op, "forward"), *quantizer_names(op, "backward")}
    casts = {name for name, quantizer in quantizers.items() if quantizer.quantizes}
    found = []
    for weight in [name for name in names if name.startswith("weight")] or [""]:
        # each weight has its own input, or all share one
        number = weight.removeprefix("weight")
        pair = [name + number * (name + number in names) for name in ("input", "grad_output")]
        x, dy = [name in casts for name in pair]
        found.append(x and weight in casts)
        found += [backward and dy and weight in casts] * dgrad
        found += [backward and dy and x] * wgrad
    return found


def _rows(program: Any, i: int, op: Any, given: dict[str, bool]) -> list[QuantizedRow]:
    """The tensors that an op quantizes; ``given`` as for ``get_usage``."""
    edges, rows = program.facts.edges, []
    lives, forward = living_weights(op), quantizer_names(op, "forward")
    for name, quantizer in edges.quantizers[i].items():
        if name in forward:
            cast, steps, edge = edges.forward.get(i), program.forward, i
        else:
            cast, steps, edge = edges.backward.get(i + 1), program.backward, i + 1
        if cast is not None and same_quantizer(cast.quantizer, quantizer):
            usage, where = cast.usage, _step(steps, edge)
        else:
            usage = op.get_usage(name, **given)
            where = "lives quantized" if name in lives else "the op itself"
        if any(usage) and (name in forward or given["backward"]):
            copies = " and ".join(way for way, used in usage._asdict().items() if used)
            who = f"{op.name}: {type(op).__name__}" if op.name else type(op).__name__
            by = type(quantizer).__name__
            what = quantizer.describe(), copies, by, where, quantizer.remark()
            rows.append(QuantizedRow(who, name, *what))
    return rows


def _step(steps: Any, edge: int) -> str:
    """Which step of a pass casts on an edge."""
    for step in steps:
        if edge in [at for at, _ in step.casts]:
            return f"fused into {step.source.name}" if step.source else "a step of its own"
    return "nobody"
