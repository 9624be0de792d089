"""What is said under a torch that lacks something, and what the sessions for other versions forgive."""

import warnings

import pytest
import torch
from known_limits import LIMITS, reason_for
from torch.torch_version import TorchVersion

import opfuse
from opfuse.core import fusible


@pytest.fixture
def old_dynamo(monkeypatch):
    """As with torch 2.11, whose Dynamo cannot trace a chain."""
    monkeypatch.setattr(fusible, "_COMPILING_NEEDS_TORCH_2_12", "which torch 2.12 and newer take")


@pytest.mark.parametrize("part", ["chain", "op"])
def test_where_dynamo_is_too_old_a_chain_runs_in_eager_mode(old_dynamo, no_plugins, part):
    op = opfuse.ops.Linear(4, 4)
    module = opfuse.Sequential(op, opfuse.ops.GELU()) if part == "chain" else op
    x = torch.randn(3, 4, requires_grad=True)
    expected = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own, where it gives up
        y = torch.compile(module, backend="eager")(x)
    results = [torch.autograd.grad(each.sum(), [x, *module.parameters()]) for each in (y, expected)]
    torch.testing.assert_close((y, *results[0]), (expected, *results[1]))


def test_where_no_graph_may_break_the_error_says_so(old_dynamo, no_plugins):
    chain = opfuse.Sequential(opfuse.ops.Linear(4, 4))
    with pytest.raises(Exception, match="torch 2.12 and newer") as caught:
        torch.compile(chain, backend="eager", fullgraph=True)(torch.randn(3, 4))
    assert reason_for(str(caught.value), TorchVersion("2.11.0"))


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit[1][:20])
def test_a_limit_forgives_one_reason_in_old_versions_only(limit):
    before, text, reason = limit
    broken = "E   " + text.replace(" ", "\nE   ", 1).replace("E   ", "") + " and more"
    old, new = TorchVersion("2.11.0+cu130"), TorchVersion(".".join(map(str, before)) + ".0")
    assert reason in reason_for(broken, old)
    assert reason_for(broken, new) is None and reason_for("assert 1 == 2", old) is None
