"""Fixtures of the tests of what gives the same numbers again."""

import os

from fakes import fused, no_plugins, register  # noqa: F401

os.environ["OPFUSE_TUNING"] = ""  # what was measured on this machine decides nothing in tests
