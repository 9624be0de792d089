"""GroupedLinear under every recipe: one BasicLinear per group is the reference, to the bit."""

import contextlib
import copy
import dataclasses

import opfuse_fp8
import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops

NVFP4 = opfuse_fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = {
    "fp8-delayed": opfuse_fp8.DelayedScaling(amax_history_len=3),
    "fp8-current": opfuse_fp8.Float8CurrentScaling(),
    "fp8-block": opfuse_fp8.Float8BlockScaling(),
    "mxfp8": opfuse_fp8.MXFP8BlockScaling(),
    "nvfp4": NVFP4,
}
every_recipe = pytest.mark.parametrize("name", RECIPES)
OVERRIDES = "high_precision", "dequantized"  # which the recipe of delayed scaling refuses
CASES = [(name, None) for name in RECIPES]
CASES += [(name, override) for name in [*RECIPES][1:] for override in OVERRIDES]
MULTIPLES = {"mxfp8": 32, "nvfp4": 16}


def padded(part, multiple):
    return nn.functional.pad(part, (0, 0, 0, -len(part) % multiple))


@pytest.mark.parametrize(("name", "override"), CASES)
@pytest.mark.parametrize("sizes", [(32, 0, 64, 96), (1, 33, 0, 7), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_is_a_linear(name, sizes, dtype, override):
    """Rows that a format cannot take are filled up with zeros, which change no other number."""
    recipe = RECIPES[name]
    recipe = dataclasses.replace(recipe, backward_override=override)
    multiple = MULTIPLES.get(name, 1) if override is None else 1
    op = ops.GroupedLinear(4, 128, 96, bias=False, dtype=dtype)
    apart = [ops.BasicLinear(128, 96, dtype=dtype) for _ in sizes]
    for i, one in enumerate(apart):
        one.weight.data.copy_(op.get_parameter(f"weight{i}").detach())
    x = torch.randn(sum(sizes), 128, dtype=dtype, requires_grad=True)
    parts = [padded(p.detach(), multiple).requires_grad_() for p in x.split(sizes)]
    for _ in range(2):
        for tensor in (x, *parts, *op.parameters(), *[one.weight for one in apart]):
            tensor.grad = None
        with opfuse.autocast(recipe):
            y = op(x, torch.tensor(sizes))
            ys = [one(part) for one, part in zip(apart, parts, strict=True)]
        cut = [part[:size] for part, size in zip(ys, sizes, strict=True)]
        assert torch.equal(y, torch.cat(cut))
        dy = torch.randn(y.shape).to(dtype)
        y.backward(dy)
        for part, of_group in zip(ys, dy.split(sizes), strict=True):
            part.backward(padded(of_group, multiple))
        dx = [part.grad[:size] for part, size in zip(parts, sizes, strict=True)]
        assert torch.equal(x.grad, torch.cat(dx))
        for i, one in enumerate(apart):
            assert torch.equal(op.get_parameter(f"weight{i}").grad, one.weight.grad)


@every_recipe
def test_held_weights_are_used_as_they_are(name):
    recipe, sizes = RECIPES[name], torch.tensor([2, 3])
    with opfuse.quantized_model_init(recipe):
        op = ops.GroupedLinear(2, 128, 96)
    cast = ops.GroupedLinear(2, 128, 96)
    values = {k: v.detach() for k, v in op.named_parameters()}
    cast.load_state_dict({k: v.dequantize() if "weight" in k else v for k, v in values.items()})
    x, results = torch.randn(5, 128), []
    told = pytest.warns(UserWarning, match="none was restored in GroupedLinear")
    loads = told if name == "fp8-delayed" else contextlib.nullcontext()
    for each, block in ((op, contextlib.nullcontext()), (cast, loads)):
        given = x.clone().requires_grad_()
        with block, opfuse.autocast(recipe):
            y = each(given, sizes)
        y.sum().backward()
        results.append((y, given.grad, each.weight1.grad))
    for one, other in zip(*results, strict=True):
        error = (one - other).norm() / other.norm()
        assert error < (0.08 if name == "fp8-delayed" else 1e-6)  # whose first scale is 1 here


def test_roles_that_a_custom_recipe_sees():
    seen = []

    def factory(role):
        seen.append(role)
        return opfuse_fp8.IdentityQuantizer()

    recipe = opfuse_fp8.CustomRecipe(factory, name="grouped-roles")
    op, sizes = ops.GroupedLinear(2, 128, 96, name="experts"), torch.tensor([2, 3])
    x = torch.randn(5, 128)
    with opfuse.autocast(recipe):
        y = op(x, sizes)
    torch.testing.assert_close(y, op(x, sizes))
    kinds = ["input", "weight", "input", "weight", "grad_output", "grad_output"]
    assert [role.tensor_type for role in seen] == kinds
    assert {(role.module_type, role.name) for role in seen} == {("linear", "experts")}


def test_sizes_that_no_zeros_can_mend():
    op = ops.GroupedLinear(2, 100, 96, name="experts")
    with opfuse.autocast(RECIPES["mxfp8"]):
        with pytest.raises(
            ValueError, match="multiple of 32 columns, got the input of linear 'exp"
        ):
            op(torch.randn(5, 100), torch.tensor([2, 3]))


def test_stochastic_rounding_trains_and_resumes():
    recipe, sizes = opfuse_fp8.NVFP4BlockScaling(), torch.tensor([5, 16])
    torch.manual_seed(0)
    op, x = ops.GroupedLinear(2, 128, 96), torch.randn(21, 128)

    def step(of):
        of.zero_grad()
        with opfuse.autocast(recipe):
            y = of(x, sizes)
        y.square().sum().backward()
        return of.weight0.grad.clone()

    step(op)
    twin = ops.GroupedLinear(2, 128, 96)
    twin.load_state_dict(copy.deepcopy(op.state_dict()))
    first = step(op)
    assert torch.equal(first, step(twin)) and first.isfinite().all()
