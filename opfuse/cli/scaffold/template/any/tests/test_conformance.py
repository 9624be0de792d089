"""opfuse's own checks of every fusion, on cases that it makes from the patterns."""

from opfuse.testing import FusionSuite


class TestConformance(FusionSuite):
    plugin = "NAME"
