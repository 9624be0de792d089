"""What every fusion must hold, checked by opfuse on cases that it makes from the patterns."""

from opfuse.testing import FusionSuite


class TestConformance(FusionSuite):
    plugin = "NAME"
