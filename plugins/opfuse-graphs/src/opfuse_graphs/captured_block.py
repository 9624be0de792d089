"""What a recipe is told of a part of a step that a CUDA graph captures."""

from __future__ import annotations

from opfuse.recipes.scale_update import Block, Pass


class CapturedBlock(Block):
    """Around a part of a step that a CUDA graph captures; no scale advances at its end.

    Each replay adds what ran to the blocks in which it is replayed: its scales advance with those
    of the whole step.

    Attributes:
        forward: What ran, as arguments of :meth:`begin`.
        backward: What its backward ran, each as :meth:`begin_backward` takes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[tuple[Pass, bool]] = []
        self.backward: list[Pass] = []

    def begin(self, part: Pass, records: bool) -> None:
        """Note that a chain runs under a recipe."""
        super().begin(part, records)
        self.forward.append((part, records))

    def begin_backward(self, part: Pass) -> None:
        """Note that its backward runs."""
        self.backward.append(part)

    def discard(self) -> None:
        """Discard the records of both passes, since a capture is no step."""
        self.end(failed=True)
        for part in self.backward:
            for op in part.chain.ops:
                for quantizer in op._quantizers.of_mode(op, part.recipe, "backward"):
                    quantizer.discard()
