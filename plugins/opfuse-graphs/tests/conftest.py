"""Fixtures of the tests of plans."""

import os

from fakes import fused, no_plugins, register  # noqa: F401

os.environ["OPFUSE_TUNING"] = ""  # what was measured on this machine decides nothing in tests
