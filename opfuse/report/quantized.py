"""The tensors that a plan quantizes, with place and quantizer, and the products that read them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..core.quantization.formats import Usage
from ..core.quantization.quantizer import same_quantizer
from ..core.quantization.state import living_weights, quantizer_names


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
    """

    op: str
    tensor: str
    format: str
    usage: str
    quantizer: str
    where: str

    def cells(self) -> tuple[str, ...]:
        """What a table says; of the quantizer the steps say more."""
        both = self.usage.replace("rowwise and columnwise", "both copies")
        return self.op, self.tensor, self.format, both, self.where


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

    def __add__(self, other: Any) -> Quantized:
        """Both together, their tensors left out."""
        recipe = self.recipe if self.recipe == other.recipe else "several recipes"
        if not (self.recipe and other.recipe):
            recipe = self.recipe or other.recipe
        counts = self.products + other.products, self.quantized + other.quantized
        return Quantized(recipe, *counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able data."""
        return self._asdict() | {"tensors": [dataclasses.asdict(row) for row in self.tensors]}

    def lines(self, *, full: bool) -> list[str]:
        """What reports say; nothing without a recipe.

        Args:
            full: Whether to list the tensors.
        """
        if not self.recipe or not (self.products or self.tensors):
            return []
        share = f"{self.quantized} of {self.products} products of linear ops"
        lines = [f"quantized by {self.recipe}: {share}"]
        rows = [row.cells() for row in self.tensors] if full else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        return lines


def quantized_by(program: Any) -> Quantized:
    """The effect of a program's recipe on its chain."""
    recipe = program.env.recipe
    if recipe is None:
        return Quantized()
    edges, needs = program.measurements.edges, program.measurements.needs
    backward = recipe.backward_override is None
    products = quantized = 0
    rows: list[QuantizedRow] = []
    for i, op in enumerate(program.chain.ops):
        if not op.param_names or not op.num_quantizers("backward"):
            rows += _rows(program, i, op) if edges.quantizers[i] else []
            continue
        of_op = _products(op, edges.quantizers[i], needs.inputs[i], any(needs.params[i]), backward)
        products, quantized = products + len(of_op), quantized + sum(of_op)
        rows += _rows(program, i, op)
    return Quantized(type(recipe).__name__, products, quantized, tuple(rows))


def _products(op: Any, quantizers: Any, dgrad: bool, wgrad: bool, backward: bool) -> list[bool]:
    """For each product of a linear op whether both of its operands are quantized."""
    names = {*quantizer_names(op, "forward"), *quantizer_names(op, "backward")}
    casts = {name for name, quantizer in quantizers.items() if quantizer.quantizes}
    found = []
    for weight in [name for name in names if name.startswith("weight")] or [""]:
        # each weight has an input of its own, or all have one
        number = weight.removeprefix("weight")
        pair = [name + number * (name + number in names) for name in ("input", "grad_output")]
        x, dy = [name in casts for name in pair]
        found.append(x and weight in casts)
        found += [backward and dy and weight in casts] * dgrad
        found += [backward and dy and x] * wgrad
    return found


def _rows(program: Any, i: int, op: Any) -> list[QuantizedRow]:
    """The tensors that an op quantizes."""
    edges, needs = program.measurements.edges, program.measurements.needs
    backward = program.env.recipe.backward_override is None
    rows, lives, forward = [], living_weights(op), quantizer_names(op, "forward")
    for name, quantizer in edges.quantizers[i].items():
        is_forward = name in forward
        casts, edge = (edges.forward, i) if is_forward else (edges.backward, i + 1)
        cast, where = casts.get(edge), "the op itself"
        if cast is not None and same_quantizer(cast.quantizer, quantizer):
            usage = cast.usage
            where = _step(program.forward if is_forward else program.backward, edge)
        else:
            given = dict(dgrad=needs.inputs[i], wgrad=any(needs.params[i]), backward=backward)
            usage = op.get_usage(name, **given)
            where = "lives quantized" if name in lives else where
        if any(usage) and (is_forward or backward):
            who = f"{op.name}: {type(op).__name__}" if op.name else type(op).__name__
            by = type(quantizer).__name__
            rows.append(QuantizedRow(who, name, quantizer.describe(), _words(usage), by, where))
    return rows


def _step(steps: Any, edge: int) -> str:
    """Which step of a pass casts on an edge."""
    for step in steps:
        if edge in [at for at, _ in step.casts]:
            return f"fused into {step.source.name}" if step.source else "a step of its own"
    return "nobody"


def _words(usage: Usage) -> str:
    return " and ".join(way for way, used in usage._asdict().items() if used)
