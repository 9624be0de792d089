"""The conformance kit: tests of a plugin against the contract.

``FusionSuite`` and ``QuantizerSuite`` are for the plugin's tests, and the
parts are for tests of kernels.

Not imported by opfuse itself, but for the tool :mod:`opfuse.testing.debug`. Needs pytest.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kit import *  # noqa: F403


def __getattr__(name: str) -> Any:
    where = f"{__name__}.{name}"
    if importlib.util.find_spec(where):  # a module, which must not need the others
        return importlib.import_module(where)
    return getattr(importlib.import_module(f"{__name__}.kit"), name)
