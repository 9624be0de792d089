"""What every fusion must hold, checked by opfuse on cases that it makes from the patterns.

Without a GPU, Liger's kernels run in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest.
"""

import pytest

from opfuse.testing import FusionSuite


@pytest.mark.costly(0.12, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "liger"
    most_rows = 16  # Liger starts a program for each row
