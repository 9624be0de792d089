"""Fixtures of the core's tests."""

import os

import pytest
import torch
from fakes import fused, no_plugins, one_thread, register  # noqa: F401

os.environ["OPFUSE_TUNING"] = ""  # what was measured on this machine decides nothing in tests


@pytest.fixture(autouse=True)
def compiles_afresh():
    """No test sees what another one compiled, nor where it broke a graph."""
    torch._dynamo.reset()
