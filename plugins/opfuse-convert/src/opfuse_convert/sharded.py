"""Gathers parameters that FSDP2 has sharded, while a conversion looks at them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import nn

from opfuse.core.isolation import sharded_classes


def gathered(model: nn.Module) -> Generator[tuple[str, nn.Module]]:
    """``model.named_modules()``, each module while the parameters around it are whole.

    The parameters of a module that ``fully_shard`` was applied to are gathered before it, and
    sharded again after all modules below it. So at most one module per level is whole at a time.
    This is a collective: all ranks must convert alike.
    """
    around: list[tuple[str, Any]] = []
    try:
        for name, module in model.named_modules():
            while around and not name.startswith(around[-1][0]):
                around.pop()[1].reshard()
            if isinstance(module, sharded_classes()):
                module.unshard()
                around.append((f"{name}." if name else "", module))
            yield name, module
    finally:
        for _, module in reversed(around):
            module.reshard()
