"""Random forwards: a converted copy gives what the original gives, before and after what they read changes."""

import fuzz_convert
import pytest

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("part", range(4))
def test_converted_and_original_are_the_same(part):
    tally = fuzz_convert.fuzz(2026, range(150 * part, 150 * part + 150))
    print(tally)
    assert tally.chained >= 0.6
    assert tally.altered >= 0.5
    assert not tally.mismatches
