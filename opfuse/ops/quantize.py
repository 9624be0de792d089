"""Quantize: asks for a cast at its place in the chain."""

from __future__ import annotations

from ..quantization import QuantizerRole
from ._common import PassThrough


class Quantize(PassThrough):
    """Quantizes what passes, under a recipe; without one it is the identity.

    Takes and gives any shape. The op only declares what it wants. The cast stands on its edge, for
    fusions to take, or is a step of its own. Next to an op that quantizes, it leaves the cast to
    that op.

    Args:
        forward: Quantize the tensor in forward.
        backward: Quantize the gradient in backward.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._enabled = {"forward": bool(forward), "backward": bool(backward)}

    def extra_repr(self) -> str:
        """Which passes it quantizes in."""
        return ", ".join(f"{mode}={enabled}" for mode, enabled in self._enabled.items())

    def num_quantizers(self, mode: str) -> int:
        """One for each pass it quantizes in."""
        return int(self._enabled.get(mode, False))

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """An input, or the gradient of an output."""
        tensor = "input" if mode == "forward" else "grad_output"
        role = QuantizerRole("quantize", tensor, self.name)
        return [role] * self.num_quantizers(mode)
