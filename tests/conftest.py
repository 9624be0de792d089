"""Fixtures, and what no plugin changes."""

import os

import pytest
import torch
from fixtures import fused, no_plugins, register  # noqa: F401

os.environ["OPFUSE_TUNING"] = ""  # what was measured on this machine decides nothing in tests


@pytest.fixture(autouse=True)
def compiles_afresh():
    """No test sees what another one compiled, nor where it broke a graph."""
    torch._dynamo.reset()


HIDING = {"no_plugins", "register", "nothing_installed", "rounding"}
"""Fixtures with which no installed plugin is on: none is, or only what the test registers."""


def pytest_collection_modifyitems(items):
    """What hides the installed plugins gives the same with them: it is left out where all of them are there."""
    for item in items:
        if not HIDING.isdisjoint(item.fixturenames):
            item.add_marker("alone")
