"""SwapExtraInput: values, gradients where one of the outputs is not used, widths, compiled."""

import pytest
import torch

import opfuse
from opfuse import ops


def chain_of(first=6, second=4):
    """The first tensor through one linear, then the second through another."""
    torch.manual_seed(0)
    return opfuse.Sequential(ops.Linear(first, 8), ops.SwapExtraInput(), ops.Linear(second, 3))


def tensors(requires=(True, True)):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator).requires_grad_(needs)
        for shape, needs in zip([(5, 6), (2, 3, 4)], requires, strict=True)
    ]


def expected(chain, x, extra):
    first, _, last = chain
    linear = torch.nn.functional.linear
    return linear(extra, last.weight, last.bias), linear(x, first.weight, first.bias)


USED, REQUIRES = ["both", "main", "extra"], [(True, True), (True, False), (False, True)]
COMPILED = [("both", REQUIRES[0]), *zip(USED, [REQUIRES[1], REQUIRES[2], REQUIRES[1]], strict=True)]
"""Each value of both: which gradients are asked for is autograd's matter by then."""


@pytest.mark.parametrize(
    ("used", "requires", "compiled"),
    [
        *((used, requires, False) for used in USED for requires in REQUIRES),
        *((used, requires, True) for used, requires in COMPILED),
    ],
)
def test_values_and_gradients(used, requires, compiled):
    chain, given = chain_of(), tensors(requires)
    run = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    wanted = [t for t in (*given, *chain.parameters()) if t.requires_grad]
    results = []
    for outputs in (run(*given), expected(chain, *given)):
        some = {"both": outputs, "main": outputs[:1], "extra": outputs[1:]}[used]
        loss = sum([t.sin().sum() for t in some])
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        zeros = [
            torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)
        ]
        results.append([*outputs, *zeros])
    torch.testing.assert_close(*results)


def test_a_frozen_first_part():
    chain, given = chain_of(), tensors((False, True))
    chain[0].requires_grad_(False)
    y, extra = chain(*given)
    assert y.requires_grad and extra.shape == (5, 8)
    y.sum().backward()
    assert given[1].grad is not None and chain[2].weight.grad is not None


def test_a_tensor_out_of_a_channel():
    """The input itself comes back, after its first copy has gone through a linear."""
    chain = opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "kept", output_to_caller=False),
        ops.Linear(6, 8),
        ops.SwapExtraInput().set_extra_input_channel(0, "kept"),
        ops.GELU(),
    )
    x = tensors()[0]
    y, first = chain(x)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(first, torch.nn.functional.linear(x, chain[1].weight, chain[1].bias))
    (y.sum() + first.sum()).backward()
    assert x.grad is not None
