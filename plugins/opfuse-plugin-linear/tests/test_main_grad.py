"""The fusions of the backward add a weight's gradient to its ``main_grad`` by their product."""

from __future__ import annotations

import opfuse_linear.conditions
import pytest
import torch
from adding import Library, asked_again  # noqa: F401

import opfuse
from opfuse import ops
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="it launches no kernel")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("around", ["nothing", "activation", "scale", "add"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_backward_adds_once(monkeypatch, dtype, around, apart):
    monkeypatch.setattr(opfuse_linear.conditions, "adds_nothing", lambda env: False)
    monkeypatch.setattr(opfuse_linear.conditions, "scales_gradient", lambda env: apart)
    torch.manual_seed(0)
    linear = ops.BasicLinear(64, 40, accumulate_into_main_grad=True, dtype=dtype)
    after = {"activation": [ops.ReLU()], "scale": [ops.ConstantScale(-0.5)]}.get(around, [])
    before = [ops.MakeExtraOutput()] if around == "add" else []
    chain = opfuse.Sequential(*before, linear, *after)
    x = torch.randn(3, 5, 64).to(dtype).requires_grad_()
    found = []
    for plugins, adds in (("linear", True), ("linear", False), ("", False)):
        linear.weight.main_grad = torch.ones(40, 64)
        with opfuse.plugins.using(plugins), Library(adds) as library:
            out = chain(x)
            total = sum(y.float().sum() for y in out) if around == "add" else out.float().sum()
            total.backward()
            steps = opfuse.explain(chain, x).to_dict()["backward"]
        assert bool([step for step in steps if step["fusion"]]) == bool(plugins)
        if dtype is torch.bfloat16:
            assert bool(library.calls) == adds
        opfuse.ops.arithmetic._library_adds.cache_clear()
        found.append(linear.weight.main_grad)
    for got in found[:2]:
        torch.testing.assert_close(got, found[2], rtol=2e-2, atol=6e-2)
