"""Quantize: asks for a cast at its place in the chain."""

from __future__ import annotations

from collections.abc import Sequence

from .cast import Cast
from .fusible import declared
from .identity import PassThrough
from .introspection import op_class
from .op import BasicOperation
from .quantization import BOTH, QuantizerRole


class Quantize(PassThrough):
    """Quantizes a tensor under a recipe; without one it is the identity.

    Any shape is accepted and kept. The op only declares its quantizers. The cast is on its edge,
    where fusions can take it, or is a step of its own. Next to an op that quantizes, it leaves the
    cast to that op.

    A chain that ends with it returns a :class:`~opfuse.core.quantization.QuantizedActivation`; one
    that begins with it and quantizes in backward returns such a gradient. A chain whose first op
    quantizes its input takes the codes as they are, if it would make the same itself.
    ``torch.compile`` gets their values.

    Args:
        forward: Quantize the tensor in forward.
        backward: Quantize the gradient in backward.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._enabled = {"forward": bool(forward), "backward": bool(backward)}

    def extra_repr(self) -> str:
        """The passes in which it quantizes."""
        return ", ".join(f"{mode}={enabled}" for mode, enabled in self._enabled.items())

    def num_quantizers(self, mode: str) -> int:
        """One for each pass in which it quantizes."""
        return int(self._enabled.get(mode, False))

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """The role of an input, or of the gradient of an output."""
        tensor = "input" if mode == "forward" else "grad_output"
        role = QuantizerRole("quantize", tensor, self.name)
        return [role] * self.num_quantizers(mode)


def place_quantize(
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
