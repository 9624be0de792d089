"""The speeds that fusions are predicted to have on GPUs, and what waits for a measurement."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from ledger import assert_predicted
from opfuse_linear import cases, choice, conditions
from opfuse_linear.choice import PREDICTED
from opfuse_triton import Predicted


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_predictions_are_those_of_the_model():
    assert_predicted(PREDICTED, cases.CASES)


def test_what_is_predicted_to_gain_little_waits_until_it_is_measured(monkeypatch):
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    (name,) = PREDICTED.fusions
    chain = ops.BasicLinear(16, 24, device="meta"), ops.Bias(24), ops.SiLU()
    assert choice.refusal(chain, cuda) == PREDICTED.why_not(name, cuda) != ""
    assert choice.product(chain, cuda) is None
    assert "it was not measured" in conditions.activation_fits(chain, cuda)
    # one that python -m opfuse_triton gpu measured to be faster is used without opfuse tune
    monkeypatch.setattr(choice, "PREDICTED", Predicted("linear", {name: (1.2, ())}))
    assert not choice.refusal(chain, cuda) and choice.product(chain, cuda) is not None
    assert choice.product(chain, cuda._replace(measured=1.2)) is None  # it is the library
