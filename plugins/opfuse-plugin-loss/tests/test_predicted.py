"""The speeds that fusions are predicted to have on GPUs: none of these waits for a measurement."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from ledger import assert_predicted
from opfuse_loss import cases
from opfuse_loss.conditions import PREDICTED


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_predictions_are_those_of_the_model():
    assert_predicted(PREDICTED, cases.CASES)


def test_what_is_predicted_to_gain_much_does_not_wait():
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    assert not [name for name in PREDICTED.fusions if PREDICTED.why_not(name, cuda)]
