"""What a fusion is worth on a GPU before it is measured. Importing this imports no Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from opfuse import Environment

PAYS = 1.1
"""A fusion that ``opfuse tune`` has not measured is used on a GPU where it is this much faster: as
measured by ``python -m opfuse_triton gpu`` there, or else by the model."""


@dataclass(frozen=True)
class Predicted:
    """How fast the fusions of a plugin are on a GPU by a model, until they are measured there.

    Attributes:
        plugin: The name under which the plugin has its cases.
        fusions: By a name of your choice, the lowest speed over the real shapes of the fusion's
            cases, relative to the separate ops (1.0); and the names of these cases.
    """

    plugin: str
    fusions: Mapping[str, tuple[float, Sequence[str]]]

    def why_not(self, name: str, env: Environment) -> str:
        """Return why a fusion waits on a GPU until it is measured, as a sentence; ``""`` if not.

        Where ``opfuse tune`` measured it, that decides alone. Where ``python -m opfuse_triton gpu``
        measured some of its cases, the lowest speed there takes the place of the predicted one.

        Args:
            name: One of ``fusions``.
            env: What the fusion's ``when`` was given. On other devices than CUDA nothing waits.
        """
        if env.device.type != "cuda" or env.measured is not None:
            return ""
        predicted, cases = self.fusions[name]
        measured = _measured(env.device, [f"{self.plugin}: {case}" for case in cases])
        if (predicted if measured is None else measured) >= PAYS:
            return ""
        if measured is not None:
            what = f"measured by opfuse_triton gpu: {measured:.2f}x"
            return f"{what} the speed of the separate ops; opfuse tune measures it in this chain"
        return (
            f"it was not measured on this GPU, and by a model of its bytes and products it would "
            f"be {predicted:.2f}x as fast as the separate ops: opfuse tune measures it"
        )


def _measured(device: torch.device, cases: Sequence[str]) -> float | None:
    """The lowest speed of cases that was measured on this GPU; None: none was."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    from .config_tables import lowest_speed
    from .targets import current_target

    return lowest_speed(current_target(device).name, cases)
