"""opfuse's own checks of every fusion, on cases that it makes from the patterns."""

import pytest

import opfuse
from opfuse.testing import FusionSuite
from opfuse.testing.machine import is_interpreting


@pytest.mark.costly(0.15, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "activation"

    @pytest.fixture(autouse=True)
    def _twins(self):
        """The twins on a CPU, the kernels where they are interpreted."""
        with opfuse.options(**{"activation.twins": not is_interpreting()}):
            yield
