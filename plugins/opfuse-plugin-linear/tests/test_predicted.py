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
    waiting = {name for name in PREDICTED.fusions if PREDICTED.why_not(name, cuda)}
    assert waiting == {*PREDICTED.fusions}
    linear = ops.BasicLinear(16, 24, device="meta")
    both = ops.ParallelLinear([linear, linear])
    chains = {
        "linear+bias+activation": (linear, ops.Bias(24), ops.SiLU()),
        "parallel linear+activation": (both, ops.SwiGLU()),
        "linear+bias+add": (linear, ops.AddExtraInput()),
        "linear+scale+add": (linear, ops.ConstantScale(2.0), ops.AddExtraInput()),
    }
    for name, chain in chains.items():
        assert choice.refusal(chain, cuda) == PREDICTED.why_not(name, cuda)
        assert choice.product(chain, cuda) is None
    assert "it was not measured" in conditions.activation_fits((linear, ops.SiLU()), cuda)
    # one that python -m opfuse_triton gpu measured to be faster is used without opfuse tune
    fast = Predicted("linear", {name: (1.2, ()) for name in PREDICTED.fusions})
    monkeypatch.setattr(choice, "PREDICTED", fast)
    for chain in chains.values():
        assert not choice.refusal(chain, cuda) and choice.product(chain, cuda) is not None
        assert choice.product(chain, cuda._replace(measured=1.2)) is None  # it is the library
