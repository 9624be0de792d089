"""The wrong fusions that the conformance kit is measured with are wrong, and each shows it in a few lines."""

import faulty_axes
import faulty_fresh
import faulty_unseen
import faulty_unseen_again
import pytest
from faults import plain

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "fault",
    [*faulty_axes.FAULTS, *faulty_fresh.FAULTS, *faulty_unseen.FAULTS, *faulty_unseen_again.FAULTS],
    ids=lambda fault: fault.name,
)
def test_a_fault_is_right_at_first_sight_and_shows_where_its_script_looks(no_plugins, fault):
    # a first look is at training, and gives no extra inputs
    if fault.axis != "eval" and not sum(op.num_extra_inputs for op in fault.chain(8)):
        assert plain(fault)
    assert fault.shows(fault)
