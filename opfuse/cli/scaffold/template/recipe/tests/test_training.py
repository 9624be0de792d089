"""A chain trains under the recipe nearly as without it."""

import opfuse
import torch
from opfuse.ops import GELU, Linear


def losses(recipe):
    torch.manual_seed(0)
    model = opfuse.Sequential(Linear(32, 64), GELU(), Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(64, 32), torch.randn(64, 16)
    found = []
    for _ in range(10):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def test_the_loss_is_near_that_without_the_recipe():
    plain, quantized = losses(None), losses("NAME")
    assert not torch.equal(plain, quantized)
    torch.testing.assert_close(quantized, plain, rtol=0.01, atol=0)


def test_every_product_is_quantized():
    model = opfuse.Sequential(Linear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    with opfuse.autocast("NAME"):
        report = str(opfuse.explain(model, x))
    assert "quantized by Int8: 3 of 3 products of linear ops" in report
