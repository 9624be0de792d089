"""Tensors that leave a chain quantized: what torch makes of them, and who takes their codes."""

import copy
import io
import pickle

import pytest
import torch
from opfuse_quantized import QuantizedActivation
from rounding import Rounding, rounding  # noqa: F401

import opfuse
from opfuse import ops, testing
from opfuse.core.quantization import BOTH, QuantizedTensor
from opfuse.ops import Cast
from opfuse.testing import recipes
from opfuse.testing.running import OneByOne

STEP, LEVELS = Rounding(), Rounding(levels=8)


def quantized(forward=True, backward=False, recipe=STEP, shape=(3, 4), op=None):
    """The input of a chain that only quantizes, and its output."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with opfuse.autocast(recipe):
        return x, opfuse.Sequential(op or ops.Quantize(forward, backward))(x)


def values_of(x):
    return (x.detach() / 0.25).round() * 0.25


@pytest.fixture
def casts(monkeypatch):
    """The shapes of what any quantizer casts."""
    from rounding import RoundingQuantizer

    seen, real = [], RoundingQuantizer.quantize

    def quantize(self, tensor, usage, out=None):
        seen.append((self.role.module_type, self.role.tensor_type))
        return real(self, tensor, usage, out)

    monkeypatch.setattr(RoundingQuantizer, "quantize", quantize)
    return seen


# What leaves


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_what_leaves_behind_quantize(forward, backward):
    x, y = quantized(forward, backward)
    dy = torch.randn(3, 4)
    y.backward(dy)
    assert (type(y) is QuantizedActivation) == forward
    assert (type(x.grad) is QuantizedActivation) == backward
    assert torch.equal(y, values_of(x) if forward else x)
    assert torch.equal(x.grad, values_of(dy) if backward else dy)
    if forward:
        assert isinstance(y.quantized, QuantizedTensor) and y.recipe is STEP
        assert y.quantized.copies == BOTH and y.requires_grad
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)


def test_only_a_recipe_that_casts_gives_one():
    x = torch.randn(3, 4)
    chain = opfuse.Sequential(ops.Quantize())
    assert type(chain(x)) is torch.Tensor
    with opfuse.autocast(False, recipe=STEP, calibrating=True):
        assert type(chain(x)) is torch.Tensor
    with opfuse.autocast(STEP):
        assert type(opfuse.Sequential(ops.Quantize(), ops.Identity())(x)) is torch.Tensor
        assert type(opfuse.Sequential(ops.Quantize(False))(x)) is torch.Tensor
        torch.compiler.reset()  # what other tests compiled counts for the limit of recompiling
        assert type(torch.compile(chain, backend="eager", fullgraph=True)(x)) is torch.Tensor
        with torch.no_grad():
            made = chain(x)
    assert type(made) is QuantizedActivation and not made.quantized.copies.columnwise


def test_both_copies_where_the_rows_allow_them(monkeypatch):
    from rounding import RoundingQuantizer

    monkeypatch.setattr(RoundingQuantizer, "row_multiple", 4)
    chain = opfuse.Sequential(ops.GELU(), ops.Quantize())
    for rows, both in ((8, True), (6, False), (12, True)):
        with opfuse.autocast(STEP):
            y = chain(torch.randn(rows, 4, requires_grad=True))
        assert y.quantized.copies == (True, both)


# Who takes it


def chain_of(*last):
    torch.manual_seed(0)
    return opfuse.Sequential(ops.BasicLinear(4, 4), ops.GELU(), *last)


def step(chain, x, dy, recipe=STEP):
    """The output, and the gradient of the weight."""
    with opfuse.autocast(recipe is not None, recipe=recipe or STEP):
        y = chain(x)
    y.backward(dy)
    return y.detach(), chain[0].weight.grad


def test_a_chain_takes_codes_as_they_are(casts, recipe=LEVELS):
    x, y = quantized(recipe=recipe)
    casts.clear()
    got = step(chain_of(), y, dy := torch.randn(3, 4), recipe)
    assert ("linear", "input") not in casts and ("linear", "weight") in casts
    assert x.grad is not None
    whole = opfuse.Sequential(ops.Quantize(), *chain_of())
    leaf = x.detach().requires_grad_()
    with opfuse.autocast(recipe):
        z = whole(leaf)
    z.backward(dy)
    want = z.detach(), whole[1].weight.grad
    assert all(map(torch.equal, got, want)) and torch.equal(leaf.grad, x.grad)


def test_a_chain_takes_a_gradient_as_it_is(casts, recipe=LEVELS):
    last = opfuse.Sequential(ops.Quantize(False, True), ops.GELU())
    x = torch.randn(3, 4)
    chain = opfuse.Sequential(ops.GELU(), ops.BasicLinear(4, 4))
    with opfuse.autocast(recipe):
        y = chain(x)
        z = last(y)
    kinds = []
    y.register_hook(lambda grad: kinds.append(type(grad)))
    casts.clear()
    z.sum().backward()
    assert kinds == [QuantizedActivation]
    assert casts == [("quantize", "grad_output")]


@pytest.mark.parametrize("fused", ["forward", "backward"])
@pytest.mark.parametrize("pattern", ["one", "two"])
def test_a_fused_op_that_would_cast_gives_way(casts, fused, pattern):
    """It would cast the values of codes; without it they are taken, and the numbers are the same."""
    patterns = {"one": (Cast,), "two": (Cast, ops.BasicLinear)}
    if fused == "backward":
        patterns = {"one": (Cast,), "two": (ops.GELU, ops.BasicLinear, Cast)}
    y, (x, z), results = quantized(recipe=LEVELS)[1].detach(), quantized(False, True, LEVELS), []
    z.backward(torch.randn(3, 4))
    dy = x.grad
    for fusion in (None, opfuse.Fusion(patterns[pattern], OneByOne)):
        torch.manual_seed(0)
        chain = opfuse.Sequential(ops.BasicLinear(4, 4), ops.GELU(), ops.BasicLinear(4, 4))
        handles = []
        if fusion is not None:
            handles = [getattr(opfuse, f"register_{fused}_fusion")(fusion)]
        step(chain, y.dequantize(), dy.dequantize(), LEVELS)
        fuser = next(iter(chain._module_groups))
        names = [type(step.op).__name__ for step in getattr(fuser._last[1], fused)]
        assert ("OneByOne" in names) == (fusion is not None)
        chain[0].weight.grad = None
        casts.clear()
        results.append(step(chain, y, dy, LEVELS))
        assert casts.count(("linear", "input")) == 1  # of the second linear
        assert casts.count(("linear", "grad_output")) == 1  # of the first one
        for handle in handles:
            handle.unregister()
    assert all(map(torch.equal, *results))


def test_others_get_the_values(casts):
    """Without a recipe, under another one, behind an op that does not quantize, in another format."""
    _, y = quantized(shape=(3, 4))
    values, dy = y.detach().dequantize(), torch.randn(3, 4)
    for recipe in (None, LEVELS, Rounding(step=0.5)):
        got = step(chain_of(), y.detach(), dy, recipe)
        assert all(map(torch.equal, got, step(chain_of(), values, dy, recipe)))
    casts.clear()
    step(chain_of(), y.detach(), dy, LEVELS)
    assert ("linear", "input") in casts
    norm = opfuse.Sequential(ops.RMSNorm(4))
    with opfuse.autocast(STEP):
        assert torch.equal(norm(y), norm(values))


@pytest.mark.parametrize("grad", [True, False])
def test_a_copy_that_is_missing_is_cast_from_the_values(grad):
    """A forward with gradients reads the other copy too, which is quantized apart."""
    recipe = testing.PerBlock()
    with recipes.offered(), opfuse.plugins.using(recipes.NAME):
        with torch.no_grad():
            _, y = quantized(recipe=recipe)
        assert y.quantized.copies == (True, False)
        codes = y.quantized
        entered = []
        chain = chain_of()
        forward = chain[0].op_forward
        chain[0].op_forward = lambda ctx, x, *args: (entered.append(x), forward(ctx, x, *args))[1]
        with torch.set_grad_enabled(grad), opfuse.autocast(recipe):
            z = chain(y)
            assert torch.equal(z, chain_of()(y.dequantize()))
    assert (entered[0].rowwise_data is codes.rowwise_data) != grad


def test_extra_tensors_are_plain():
    _, y = quantized()
    values = y.detach().dequantize()
    x = torch.randn(3, 4)
    for in_place in (False, True):
        add = opfuse.Sequential(ops.AddExtraInput(in_place=in_place))
        assert torch.equal(add(x, y), x + values)
    assert torch.equal(y.detach(), values)
    fork = opfuse.Sequential(ops.MakeExtraOutput(), ops.GELU())
    leaf = x.clone().requires_grad_()
    _, extra = fork(leaf)
    extra.backward(y.detach())
    assert torch.equal(leaf.grad, values)


def test_second_derivatives_pass_it_where_no_recipe_is():
    x, y = quantized()
    with opfuse.options(double_backward=True):
        z = opfuse.Sequential(ops.GELU())(y)
    (grad,) = torch.autograd.grad(z.sum(), y, create_graph=True)
    grad.sum().backward()
    assert x.grad is not None


# As a tensor


def test_operations_of_torch_see_the_values():
    x, y = quantized()
    values = y.dequantize().detach()
    for fn in (
        lambda t: t + 1, torch.sum, lambda t: t.to(torch.float64), lambda t: t.reshape(-1),
        lambda t: torch.cat([t, t]), lambda t: t[0], torch.nn.functional.gelu, lambda t: t @ t.t(),
    ):  # fmt: skip
        got = fn(y)
        assert type(got) is torch.Tensor and torch.equal(got, fn(values))
    (y * y).sum().backward()
    assert torch.equal(x.grad, 2 * values)
    assert y.detach().tolist() == values.tolist() and (y.detach().numpy() == values.numpy()).all()
    assert torch.equal(y.dequantize(torch.float64), y.to(torch.float64))


def test_its_numbers_in_another_dtype_are_those_of_its_own():
    x = torch.randn(3, 4).bfloat16().requires_grad_()
    with opfuse.autocast(Rounding(step=0.3)):
        y = opfuse.Sequential(ops.Quantize())(x)
    assert torch.equal(y.to(torch.float64), y.dequantize().double())
    assert torch.equal(y.dequantize(torch.float64), y.dequantize().double())


def test_aliases_lose_the_quantized_form_after_a_write_and_copies_keep_it():
    _, y = quantized()
    y = y.detach()
    alias, copied = y.detach(), y.clone()
    assert alias.quantized is y.quantized is copied.quantized
    y.add_(1)
    assert torch.equal(alias, copied + 1) and alias.quantized is None is y.quantized
    assert copied.quantized is not None
    for again in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied)), _saved(copied)):
        assert type(again) is torch.Tensor and torch.equal(again, copied)


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_into_a_view_is_there(inference):
    for write in (lambda t: t.view(-1)[0].fill_(7), lambda t: t[0, :1].fill_(7),
                  lambda t: t.__setitem__((0, 0), 7), lambda t: t.data.view(-1)[:1].fill_(7)):  # fmt: skip
        _, y = quantized()
        y, before = y.detach(), y.detach().dequantize()
        with torch.inference_mode(inference):
            write(y)
        assert y[0, 0] == 7 and torch.equal(y.view(-1)[1:], before.view(-1)[1:])


def test_codes_that_somebody_saved_survive_a_write():
    _, y = quantized()
    chain, twin = chain_of(), chain_of()
    with opfuse.autocast(STEP):
        z, want = chain(y.detach()), twin(y.detach())
    y.detach().zero_()
    z.sum().backward()
    want.sum().backward()
    assert torch.equal(chain[0].weight.grad, twin[0].weight.grad) and twin[0].weight.grad.any()
    squared = y.square()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_gradients_add_up_unquantized():
    x, y = quantized(False, True)
    dy = torch.full((3, 4), 0.26)
    y.backward(dy)
    with opfuse.autocast(STEP):
        again = opfuse.Sequential(ops.Quantize(False, True))(x)
    again.backward(torch.full((3, 4), 0.1))
    assert torch.equal(x.grad, torch.full((3, 4), 0.25))
    x.grad = x.grad.clone()
    y = x * torch.full((3, 4), 0.1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 0.25) + 0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_takes_it(backend):
    _, y = quantized()
    compiled = torch.compile(lambda t: (t * 2).sum(), backend=backend)
    assert torch.equal(compiled(y), (y.dequantize() * 2).sum())
