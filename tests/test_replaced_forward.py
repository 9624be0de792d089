"""A conversion that is not opfuse's own: explain, tune and assign_names know it by the protocol alone."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.core.settings import current
from opfuse.report.replaced_forward import KEPT_AS, ReplacedForward


class Replaced(ReplacedForward):
    """The chain of a Block, and its own operations."""

    plugin = "opfuse-conversion-of-mine", "1.0"

    def __init__(self, block):
        self._chain = opfuse.Sequential(
            ops.BasicLinear.reading(block.fc), ops.Bias.reading(block.fc), ops.ReLU()
        )

    @property
    def chain(self):
        return self._chain

    def own_operations(self, module, *given):
        return F.relu(F.linear(*given, module.fc.weight, module.fc.bias))

    def parameters(self, module):
        return [*module.fc.parameters()]

    def subject(self, module, x, compiled):
        return {"plugin": [*self.plugin], "fusion": "mine", "pass": "whole", "dtype": str(x.dtype)}

    def declines(self, found, compiled):
        return found.speed < 0.99


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        replaced = vars(self)[KEPT_AS]
        for recorder in current.recorders:
            recorder.replaced(replaced, self, (x,))
        return (
            self.own_operations_of(replaced, x)
            if replaced.off or replaced.fallback
            else replaced.chain(x)
        )

    def own_operations_of(self, replaced, x):
        return replaced.own_operations(self, x)


@pytest.fixture
def model(no_plugins, monkeypatch):
    opfuse.plugins.listing(tools=True)  # adds the hooks of opfuse-convert, if it is installed
    monkeypatch.setitem(sys.modules, "opfuse_convert", None)  # nothing here may need it
    model = nn.Sequential(Block(), Block())
    for block in model:
        vars(block)[KEPT_AS] = Replaced(block)
    return model


def test_explain_names_the_module_and_says_why_its_own_forward_ran(model):
    x = torch.randn(4, 16)
    calls = opfuse.explain(model, x).calls
    assert [(call.path, call.owner) for call in calls] == [("0", "Block"), ("1", "Block")]
    vars(model[1])[KEPT_AS].fallback = "it is Tuesday"
    explanation = opfuse.explain(model, x)
    assert explanation.own == (("1", "Block", "it is Tuesday"),) and "it is Tuesday" in str(
        explanation
    )


def test_assign_names_calls_its_ops_like_what_they_read(model):
    opfuse.assign_names(model)
    names = [op.name for op in vars(model[1])[KEPT_AS].chain]
    assert names[:2] == ["1.fc", "1.fc"] and names[2] == "1"


def test_tune_measures_both_ways(model, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    (found,) = [
        r
        for r in opfuse.tune(model, torch.randn(64, 16, requires_grad=True)).results
        if r.passes == "whole"
    ]
    assert found.distribution == "opfuse-conversion-of-mine" and found.basic_ops == (
        "BasicLinear",
        "Bias",
        "ReLU",
    )
    assert not found.found.wrong and found.found.speed > 0
    assert not any(vars(block)[KEPT_AS].off for block in model)


def test_tune_finds_a_chain_that_is_wrong(model, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    vars(model[0])[KEPT_AS]._chain[2] = ops.SiLU()
    assert "differs from the module" in str(opfuse.tune(model[0], torch.randn(64, 16)).results[-1])
