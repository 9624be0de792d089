"""Chains of ops under torch.compile without a graph break: the same values and gradients."""

import functools

import pytest
import torch
from activations import ELEMENTWISE, GATED, SCALED

import opfuse
from opfuse import ops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own


@pytest.fixture
def compiler():
    """``torch.compile``, which refuses to break a graph."""
    return functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


CHAINS = {
    "mlp": lambda: [
        ops.LayerNorm(8),
        ops.Linear(8, 16),
        ops.GELU(),
        ops.Linear(16, 8),
        ops.Dropout(0.0),
    ],
    "swiglu": lambda: [
        ops.RMSNorm(8),
        ops.Linear(8, 16, bias=False),
        ops.SwiGLU(),
        ops.ConstantScale(2.0),
    ],
    "activations": lambda: [*[cls() for cls in ELEMENTWISE[1:]], ops.L2Normalization(), ops.GELU()],
    **{cls.__name__: functools.partial(lambda cls: [cls()], cls) for cls in GATED},
    "gated": lambda: [
        ops.SiTUGLU(glu_interleave_size=2),
        ops.ClampedSwiGLU(),
        ops.Reshape((-1,)),
        ops.Identity(),
    ],
}


EITHER = [(name, number % 2 == 0) for number, name in enumerate(CHAINS)]
"""What autocast changes is the engine's, so it is on for every other chain, and both ways where there are linears."""


@pytest.mark.costly(6)
@pytest.mark.parametrize(("name", "autocast"), [*EITHER, ("mlp", False), ("swiglu", True)])
def test_compiled_chains_match_eager(compiler, name, autocast):
    chain = opfuse.Sequential(*CHAINS[name]())
    compiled = compiler(chain)
    x = torch.randn(3, 8)

    def run(function):
        leaf = x.clone().requires_grad_()
        chain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(leaf)
        y.float().square().sum().backward()
        return y.detach(), leaf.grad, *[param.grad for param in chain.parameters()]

    for got, wanted in zip(run(compiled), run(chain), strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_layer_norm_in_half_precision_matches_eager(compiler, dtype):
    """Torch's kernel on the CPU gives statistics of another dtype than it says while it is traced."""
    chain = opfuse.Sequential(ops.LayerNorm(8, dtype=dtype))
    x, compiled = torch.randn(3, 8, dtype=dtype), compiler(chain)
    results = []
    for function in (chain, compiled):
        leaf = x.clone().requires_grad_()
        chain.zero_grad()
        y = function(leaf)
        y.float().square().sum().backward()
        results.append((y.detach(), leaf.grad, chain[0].weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.costly(2)
@pytest.mark.parametrize("op", SCALED)
def test_compiled_scaled_activations_match_eager(compiler, op):
    chain = opfuse.Sequential(ops.Identity(), op())
    compiled = compiler(chain)
    for scales_require_grad in (True, False):
        results = []
        for function in (chain, compiled):
            torch.manual_seed(0)
            x, scales = (
                torch.randn(3, 8, requires_grad=True),
                torch.randn(3, requires_grad=scales_require_grad),
            )
            y = function(x, scales)
            y.sum().backward()
            results.append((y.detach(), x.grad, scales.grad))
        torch.testing.assert_close(results[0], results[1])


def test_compiled_extra_outputs_and_inputs_match_eager(compiler):
    chain = opfuse.Sequential(ops.MakeExtraOutput(), ops.Linear(4, 4), ops.AddExtraInput())
    chain[0].set_extra_output_channel(0, "x", output_to_caller=False)
    chain[2].set_extra_input_channel(0, "x")
    compiled = compiler(chain)
    results = []
    for function in (chain, compiled):
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        y = function(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1])


def test_second_derivatives_in_a_graph():
    chain = opfuse.Sequential(ops.Linear(8, 8), ops.GELU(), ops.RMSNorm(8))
    x = torch.randn(3, 8, requires_grad=True)
    found = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="eager")):
        with opfuse.options(double_backward=True):
            y = function(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((y, first, second))
    torch.testing.assert_close(*found)


def test_the_gradient_of_relu_in_front_of_a_product_of_another_layout():
    x = torch.randn(1, 3, 64, 3).transpose(-1, -2).requires_grad_()
    chain = opfuse.Sequential(ops.ReLU(), ops.Linear(64, 8))
    (expected,) = torch.autograd.grad(chain(x).sum(), x)
    (got,) = torch.autograd.grad(torch.compile(chain, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(got, expected)
