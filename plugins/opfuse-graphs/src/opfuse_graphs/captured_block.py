"""What a recipe is told of a part of a step that a CUDA graph captures."""

from __future__ import annotations

from typing import Any

from opfuse import Recipe
from opfuse.recipes.scale_update import Block


class CapturedBlock(Block):
    """Around a part of a step that a CUDA graph captures; no scale advances at its end.

    Each replay adds what ran to the blocks in which it is replayed: its scales advance with those
    of the whole step.

    Attributes:
        forward: What ran, as arguments of :meth:`begin`.
        backward: What its backward ran, as arguments of :meth:`begin_backward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[tuple[Any, ...]] = []
        self.backward: list[tuple[Any, ...]] = []

    def begin(self, recipe: Recipe, chain: Any, env: Any, records: bool) -> None:
        """Note that a chain runs under a recipe."""
        super().begin(recipe, chain, env, records)
        self.forward.append((recipe, chain, env, records))

    def begin_backward(self, recipe: Recipe, chain: Any, env: Any) -> None:
        """Note that its backward runs."""
        self.backward.append((recipe, chain, env))

    def discard(self) -> None:
        """Discard the records of both passes, since a capture is no step."""
        self.end(failed=True)
        for recipe, chain, _ in self.backward:
            for op in chain.ops:
                for quantizer in op._quantizers.of_mode(op, recipe, "backward"):
                    quantizer.discard()
