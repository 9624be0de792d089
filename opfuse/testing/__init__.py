"""The conformance kit: tests of a plugin against the contract.

``FusionSuite`` and ``QuantizerSuite`` are for the plugin's tests, and the
parts are for tests of kernels.

Not imported by opfuse itself, but for the tool :mod:`opfuse.testing.debug`. Needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kit import *  # noqa: F403


def __getattr__(name: str) -> Any:
    kit = importlib.import_module(".kit", __name__)  # sets its modules here
    return globals()[name] if name in globals() else getattr(kit, name)
