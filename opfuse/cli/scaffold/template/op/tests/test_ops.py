"""Compares the op with its formula in fp64, and looks at what is fused."""

import opfuse
import pytest
import torch
from opfuse.ops import AddExtraInput

from opfuse_NAME.ops import LayerScale


def drawn(shape, dtype):
    torch.manual_seed(0)
    chain = opfuse.Sequential(LayerScale(shape[-1], factor=0.5).to(dtype))
    torch.nn.init.normal_(chain[0].weight)
    return chain, torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 5, 127), (0, 4)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_values_and_gradients_match_fp64(dtype, shape):
    chain, x, dy = drawn(shape, dtype)
    y = chain(x)
    y.backward(dy)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, chain[0].weight))
    exact_y = exact_x * exact_weight * 0.5
    exact_y.backward(dy.double())
    pairs = (y, exact_y), (x.grad, exact_x.grad), (chain[0].weight.grad, exact_weight.grad)
    rtol, atol = opfuse.testing.tolerance(dtype)
    for got, expected in pairs:
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol)


def test_only_what_needs_a_gradient_is_saved():
    for of_x in (True, False):
        chain, x, dy = drawn((3, 5), torch.float32)
        x.requires_grad_(of_x)
        chain[0].weight.requires_grad_(not of_x)
        chain(x).backward(dy)
        assert (x.grad is not None, chain[0].weight.grad is not None) == (of_x, not of_x)


def test_a_backward_uses_the_factor_of_its_forward():
    chain, x, dy = drawn((3, 5), torch.float32)
    y = chain(x)
    chain[0].factor = 2.0
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy * chain[0].weight * 0.5)


def test_the_residual_add_is_fused():
    chain = opfuse.Sequential(LayerScale(5), AddExtraInput())
    x = torch.randn(3, 5)
    report = str(opfuse.explain(chain, x, x))
    assert "LayerScale + AddExtraInput  fused by scale+add" in report
