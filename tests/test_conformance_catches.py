"""The conformance suite catches each of many wrong plugins by the intended check, and says what is wrong."""

import re

import faulty
import pytest
import torch

from opfuse import testing


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_failure(subject, **given):
    """What the suite reports first."""
    chains = testing.make_chains(subject, **given)
    assert chains.all, chains.declined
    for check in testing.CHECKS.values():
        outcome = testing.run_all(check, chains)
        if outcome.failure is not None:
            return outcome
    return None


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_wrong_fusions(name, register):
    fault = faulty.FAULTS[name]
    register(name="faulty", **{f"{fault.kind}_fusions": [fault.make()]})
    (subject,) = testing.subjects("faulty")
    outcome = first_failure(subject, examples=fault.examples)
    assert outcome is not None, "not caught"
    assert outcome.check == fault.check, str(outcome)
    assert re.search(fault.says, str(outcome)), str(outcome)
    assert f"fails the check '{fault.check}'" in str(outcome) and subject.name in str(outcome)


def test_there_are_enough_of_them():
    assert len(faulty.FAULTS) + len(faulty.DISTRIBUTIONS) >= 25
