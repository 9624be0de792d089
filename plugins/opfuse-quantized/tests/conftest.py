"""Fixtures of the tests of this toolkit."""

import os

from fakes import fused, no_plugins, register  # noqa: F401

os.environ["OPFUSE_TUNING"] = ""  # what was measured on this machine decides nothing in tests
