"""Random forwards: a converted copy gives what the original gives, before and after what they read changes."""

import fuzz_convert
import pytest

from opfuse.testing import FusionSuite

PARTS = range(1, 4 if FusionSuite.thorough else 2)
PROGRAMS = 100 if FusionSuite.thorough else 50
ONCE = [pytest.param(part, marks=pytest.mark.alone) for part in PARTS]
"""Only one part runs with every plugin, too: a fused op's output may be another kind of tensor."""


@pytest.mark.parametrize("part", [0, *ONCE])
def test_converted_and_original_are_the_same(part):
    tally = fuzz_convert.fuzz(2026, range(100 * part, 100 * part + PROGRAMS))
    print(tally)
    assert tally.chained >= 0.6
    assert tally.altered >= 0.5
    assert not tally.mismatches
