"""Modulate: values and gradients for every shape that broadcasts, and what it refuses."""

import pytest
import torch

import opfuse
from opfuse import ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # of the input, the scale and the shift
    "for all rows": ((2, 3, 5), (5,), (5,)),
    "for each batch": ((2, 3, 5), (2, 1, 5), (2, 1, 5)),
    "for each token": ((2, 3, 5), (3, 5), (1, 3, 5)),
    "for each row": ((2, 3, 5), (2, 3, 1), (2, 3, 5)),
    "one number": ((2, 3, 5), (), (1, 1, 1)),
    "two images": ((2, 3, 4, 5), (2, 1, 1, 5), (4, 1)),
    "a vector": ((7,), (7,), (1,)),
    "no rows": ((0, 3, 5), (0, 1, 5), (5,)),
    "no features": ((2, 0), (0,), (2, 1)),
}


def reference(x, params, scale, shift):
    return x * (1 + scale) + shift


def drawn(shapes, dtype=torch.float64, needs=(True, True, True)):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(wanted) for tensor, wanted in zip(made, needs, strict=True)]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_scales_and_shifts(compare, dtype, shapes):
    compare(ops.Modulate(), reference, *drawn(shapes, dtype))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)], ids=str)
def test_only_the_gradients_that_are_wanted(compare, needs):
    compare(ops.Modulate(), reference, *drawn(SHAPES["for each batch"], needs=map(bool, needs)))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_in_a_chain_after_a_norm(near, grad_mode):
    chain = opfuse.Sequential(
        ops.LayerNorm(5, elementwise_affine=False), ops.Modulate(), ops.GELU()
    )
    found = []
    for function in (
        chain,
        lambda x, *both: torch.nn.functional.gelu(
            reference(torch.nn.functional.layer_norm(x, (5,)), {}, *both), approximate="tanh"
        ),
    ):
        given = drawn(SHAPES["for each batch"])
        with torch.set_grad_enabled(grad_mode):
            y = function(*given)
        if grad_mode:
            y.square().sum().backward()
        found.append([y, *[tensor.grad for tensor in given]])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted, torch.float64)


def test_operands_that_are_not_contiguous(compare):
    x, both = torch.randn(3, 2, 5).transpose(0, 1), torch.randn(2, 1, 10)
    scale, shift = both.chunk(2, -1)
    compare(ops.Modulate(), reference, *[t.detach().requires_grad_() for t in (x, scale, shift)])


def test_under_autocast_the_dtypes_are_promoted():
    x = torch.randn(2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    both = [torch.randn(2, 1, 5, requires_grad=True) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        y = opfuse.Sequential(ops.Modulate())(x, *both)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, reference(x, {}, *both))
    y.square().sum().backward()
    assert [t.grad.dtype for t in (x, *both)] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("shape", [(2, 5), (4, 3, 5), (1, 2, 3, 5), (2, 3, 6), (0,)], ids=str)
def test_an_extra_input_that_would_enlarge_the_input_is_refused(shape, place):
    given = [torch.randn(5), torch.randn(5)]
    given[place] = torch.randn(shape)
    name = ("scale", "shift")[place]
    with pytest.raises(ValueError, match=rf"Modulate expected a {name} that broadcasts to shape "):
        opfuse.Sequential(ops.Modulate())(torch.randn(2, 3, 5), *given)


def test_a_single_row_is_not_enlarged_either():
    with pytest.raises(ValueError, match=r"to shape \(1, 5\), the input's, got \(3, 5\)"):
        opfuse.Sequential(ops.Modulate())(torch.randn(1, 5), torch.randn(3, 5), torch.randn(5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_is_refused_outside_of_autocast(dtype):
    with pytest.raises(TypeError, match="Modulate"):
        opfuse.Sequential(ops.Modulate())(
            torch.randn(2, 5), torch.randn(5, dtype=dtype), torch.randn(5)
        )


def test_second_derivatives(near):
    given = drawn(SHAPES["for each batch"])
    with opfuse.options(double_backward=True):
        y = opfuse.Sequential(ops.Modulate())(*given)
        first = torch.autograd.grad(y.pow(3).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    y = reference(given[0], {}, *given[1:])
    first = torch.autograd.grad(y.pow(3).sum(), given, create_graph=True)
    for got, wanted in zip(
        second, torch.autograd.grad(sum(g.square().sum() for g in first), given), strict=True
    ):
        near(got, wanted, torch.float64)


def test_in_a_graph_of_torch_compile():
    chain, found = opfuse.Sequential(ops.Modulate()), []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        given = drawn(SHAPES["for each batch"], torch.float32)
        y = function(*given)
        y.square().sum().backward()
        found.append([y.detach(), *[tensor.grad for tensor in given]])
    torch.testing.assert_close(*found)
