"""GroupedLinear under a recipe: one BasicLinear per group under the same recipe as reference."""

import contextlib
import copy

import pytest
import torch
from opfuse_quantized import QuantizedWeight
from torch import nn
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops, testing
from opfuse.testing.recipes import offered

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
RECIPES = [testing.PerTensor(), testing.PerBlock(), testing.Delayed()]
recipe_of_each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
SIZES = {
    "uneven": (1, 33, 2, 128),
    "empty groups": (0, 7, 0, 2),
    "one row": (0, 1, 0, 0),
    "nothing": (0, 0, 0, 0),
}


@pytest.fixture(autouse=True)
def recipes():
    with offered(), opfuse.plugins.using("opfuse-testing"):
        yield


def linears(op):
    """The groups of an op as linears by themselves, of the same values, and their biases."""
    made = []
    for i in range(op.num_groups):
        one = ops.BasicLinear(op.in_features, op.out_features, dtype=op.weight0.dtype)
        weight = op.get_parameter(f"weight{i}")
        one.weight.data.copy_(weight.detach())
        one.weight.requires_grad_(weight.requires_grad)
        made.append(one)
    return made


def parts(x, sizes):
    """The rows of each group as leaves by themselves."""
    found = [part.clone() for part in x.detach().split(list(sizes))]
    return [part.requires_grad_(x.requires_grad) for part in found]


def same(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        assert one.dtype is other.dtype and torch.equal(one, other)


def check(op, recipe, sizes, x, steps=1, autocast=False):
    """Output and every gradient, to the bit; the op has no biases."""
    apart, xs = linears(op), parts(x, sizes)
    for _ in range(steps):
        for tensor in (x, *xs, *op.parameters(), *[one.weight for one in apart]):
            tensor.grad = None
        with opfuse.autocast(recipe), torch.autocast("cpu", BF16, enabled=autocast):
            y = op(x, torch.tensor(sizes))
            ys = [one(part) for one, part in zip(apart, xs, strict=True)]
        same(y, torch.cat(ys))
        if not y.requires_grad:
            continue
        grad = torch.randn(y.shape).to(y.dtype)
        y.backward(grad)
        for of_group, dy in zip(ys, grad.split(list(sizes)), strict=True):
            if of_group.requires_grad:
                of_group.backward(dy)
        if x.requires_grad:
            same(x.grad, torch.cat([part.grad for part in xs]))
        for i, one in enumerate(apart):
            same(op.get_parameter(f"weight{i}").grad, one.weight.grad)
    return apart


def op_of(sizes=(1, 33, 2, 128), features=(128, 256), bias=False, **options):
    torch.manual_seed(0)
    return ops.GroupedLinear(len(sizes), *features, bias=bias, **options)


@recipe_of_each
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_each_group_is_a_linear(recipe, sizes, dtype):
    op = op_of(sizes, dtype=dtype)
    check(op, recipe, sizes, torch.randn(sum(sizes), 128, dtype=dtype, requires_grad=True), steps=3)


@recipe_of_each
def test_the_products_are_quantized(recipe):
    """Not those of plain weights, and near them."""
    op, x, sizes = op_of(bias=True), torch.randn(164, 128), torch.tensor([1, 33, 2, 128])
    plain = op(x, sizes)
    with opfuse.autocast(recipe):
        y = op(x, sizes)
    assert not torch.equal(y, plain)
    error = (y - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert error < 0.1


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@recipe_of_each
def test_a_backward_override_matches_separate_layers(recipe, override):
    recipe = type(recipe)(backward_override=override)
    sizes = (1, 33, 0, 4)
    check(op_of(sizes), recipe, sizes, torch.randn(38, 128, requires_grad=True))


@pytest.mark.parametrize("frozen", [(0,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("override", [None, "dequantized"])  # cast at once, or one by one
def test_frozen_weights_match_separate_layers(frozen, needs_input, override):
    sizes = (1, 33, 0, 4)
    op = op_of(sizes)
    for i in frozen:
        op.get_parameter(f"weight{i}").requires_grad_(False)
    recipe = testing.PerTensor(backward_override=override)
    check(op, recipe, sizes, torch.randn(38, 128, requires_grad=needs_input))


def test_one_group_and_autocast():
    x = torch.randn(5, 128, requires_grad=True)
    check(op_of((5,)), RECIPES[1], (5,), x)
    check(op_of((2, 3)), RECIPES[1], (2, 3), x, autocast=True)


def test_rows_of_more_dimensions():
    op, x = op_of((2, 3)), torch.randn(5, 2, 4, 128)
    grads, ys = [], []
    for shape, sizes in ((x.shape, [2, 3]), ((40, 128), [16, 24])):
        given = x.view(shape).clone().requires_grad_()
        with opfuse.autocast(RECIPES[0]):
            y = op(given, torch.tensor(sizes))
        y.sum().backward()
        ys.append(y.view(40, 256))
        grads.append(given.grad.view(40, 128))
    same(*ys)
    same(*grads)


def test_biases_are_added_before_rounding_and_their_gradients_are_not_quantized():
    sizes = (3, 0, 4)
    op = op_of(sizes, bias=True, dtype=BF16)
    bare = op_of(sizes, dtype=BF16)
    bare.load_state_dict({n: t for n, t in op.state_dict().items() if "weight" in n})
    x = torch.randn(7, 128, dtype=BF16)
    with opfuse.autocast(RECIPES[0]):
        y, plain = op(x, torch.tensor(sizes)), bare(x, torch.tensor(sizes))
    biases = torch.stack([op.bias0, op.bias1, op.bias2])[torch.tensor([0] * 3 + [2] * 4)]
    torch.testing.assert_close(y.double(), plain.double() + biases.double(), atol=0.02, rtol=0.01)
    grad = torch.randn(y.shape).to(BF16)
    y.backward(grad)
    same(op.bias0.grad, grad[:3].sum(0))
    assert not op.bias1.grad.any()


def test_skip_names_an_op_that_stays_unquantized():
    op, x, sizes = op_of((2, 3)), torch.randn(5, 128), torch.tensor([2, 3])
    model = opfuse.assign_names(nn.ModuleDict({"experts": opfuse.Sequential(op)}))
    with opfuse.autocast(RECIPES[0], skip=["experts"]):
        same(model["experts"](x, sizes), op(x, sizes))
        report = opfuse.explain(model["experts"], x, sizes)
    assert "not quantized: skip names it, by 'experts'" in str(report)
    plain = op(x, sizes)
    with opfuse.autocast(RECIPES[0], skip=["experts"]):
        same(op(x, sizes), plain)


def test_each_group_has_its_own_quantizers():
    op = ops.GroupedLinear(3, 8, 8, name="experts")
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (6, 3)
    roles = op.get_quantizer_roles("forward")
    assert [role.tensor_type for role in roles] == ["input", "weight"] * 3
    assert [role.tensor_type for role in op.get_quantizer_roles("backward")] == ["grad_output"] * 3
    assert {(role.module_type, role.name) for role in roles} == {("linear", "experts")}


def test_explain_lists_the_tensors_of_each_group():
    chain = opfuse.Sequential(op_of((2, 3)), ops.Linear(256, 8))
    x, sizes = torch.randn(5, 128, requires_grad=True), torch.tensor([2, 3])
    with opfuse.autocast(RECIPES[0]):
        report = opfuse.explain(chain, x, sizes)
    (found,) = report.to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (9, 9)
    rows = [row for row in found["tensors"] if row["op"].endswith("GroupedLinear")]
    kinds = ("input", "weight", "grad_output")
    assert {row["tensor"] for row in rows} == {f"{kind}{i}" for kind in kinds for i in (0, 1)}
    assert {row["where"] for row in rows} == {"the op itself"}


# State


def test_quantizer_state_of_each_group_is_saved_and_loaded():
    sizes, x = (2, 3), torch.randn(5, 128, requires_grad=True)
    op, recipe = op_of(sizes), RECIPES[2]
    apart = check(op, recipe, sizes, x, steps=2)
    saved = op.state_dict()
    (place,) = {key.rpartition(".recipe")[0] for key in saved if key.endswith(".recipe")}
    of_linear = [k.removeprefix(f"{place}.input.") for k in apart[0].state_dict() if ".input" in k]
    assert of_linear
    for i in range(2):
        alone = apart[i].state_dict()
        for kind in ("input", "weight", "grad_output"):
            for name in of_linear:
                same(saved[f"{place}.{kind}{i}.{name}"], alone[f"{place}.{kind}.{name}"])
    twin = op_of(sizes)
    twin.load_state_dict(copy.deepcopy(saved))
    with opfuse.autocast(recipe), torch.no_grad():
        same(twin(x, torch.tensor(sizes)), op(x, torch.tensor(sizes)))


def test_cached_weights_are_cast_once():

    sizes, x = torch.tensor([2, 3]), torch.randn(5, 128)
    module = nn.Module()
    module.matrices = nn.Parameter(torch.randn(2, 16, 128))
    several, one = op_of((2, 3)), ops.GroupedLinear.reading(module, "matrices")
    for op, weights in ((several, several.parameters()), (one, module.parameters())):
        with opfuse.watch_quantization() as seen:
            for how in ("fresh", "cached", "cached"):
                with opfuse.autocast(RECIPES[0], weights=how):
                    y = op(x, sizes)
        casts = {name: record.casts for name, record in seen.tensors.items()}
        assert [casts[f"GroupedLinear weight{i}"] for i in (0, 1)] == [1, 1]
        assert casts["GroupedLinear input0"] == 3
        with torch.no_grad():
            for weight in weights:
                weight.mul_(2)
        with opfuse.autocast(RECIPES[0], weights="cached"):
            torch.testing.assert_close(op(x, sizes), 2 * y)  # they changed: cast again


@recipe_of_each
@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_live_quantized(recipe, count):
    sizes = [3, 2][:count]
    x = torch.randn(sum(sizes), 128, requires_grad=True)
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe):
        op = ops.GroupedLinear(count, 128, 256, bias=False)
    held = [op.get_parameter(f"weight{i}") for i in range(count)]
    assert {type(weight) for weight in held} == {QuantizedWeight}
    plain = op_of(sizes)
    plain.load_state_dict({f"weight{i}": w.detach().dequantize() for i, w in enumerate(held)})
    same(op(x, torch.tensor(sizes)), plain(x, torch.tensor(sizes)))
    with opfuse.watch_quantization() as seen, opfuse.autocast(recipe):
        y = op(x, torch.tensor(sizes))
    y.sum().backward()
    assert not [name for name in seen.tensors if "weight" in name]
    apart, saved = [], op.state_dict()
    for i in range(count):
        with opfuse.quantized_model_init(recipe):
            one = ops.BasicLinear(128, 256)
        names = {key: key.replace(f"weight{i}", "weight") for key in saved}
        mine = {
            n: saved[k] for k, n in names.items() if f"weight{i}" in k and "quantizers" not in k
        }
        one.load_state_dict(mine)
        same(one.weight.detach().dequantize(), held[i].detach().dequantize())
        apart.append(one)
    told = pytest.warns(UserWarning, match="none was restored in BasicLinear")
    with told if op._quantizers.has_state else contextlib.nullcontext(), opfuse.autocast(recipe):
        same(y, torch.cat([one(p) for one, p in zip(apart, x.split(sizes), strict=True)]))


@recipe_of_each
def test_checkpointing_gives_the_same_bits(recipe):
    sizes, results = torch.tensor([2, 3]), []
    x = torch.randn(5, 128)
    for recomputes in (False, True):
        op, given = op_of((2, 3)), x.clone().requires_grad_()
        for _ in range(2):
            given.grad = None
            op.zero_grad()
            with opfuse.autocast(recipe):
                if recomputes:
                    how = dict(use_reentrant=False, context_fn=opfuse.checkpoint_contexts)
                    y = checkpoint(op, given, sizes, **how)
                else:
                    y = op(given, sizes)
            y.square().sum().backward()
        results.append([y, given.grad, *[p.grad for p in op.parameters()]])
        results[-1] += [t for k, t in op.state_dict().items() if k.startswith("quantizers.")]
    for one, other in zip(*results, strict=True):
        same(one, other)


@recipe_of_each
def test_one_parameter_of_all_groups(recipe):
    sizes, x = (2, 0, 3), torch.randn(5, 128)
    op, module, results = op_of(sizes), nn.Module(), []
    module.matrices = nn.Parameter(torch.stack([*op.parameters()]).detach())
    one = ops.GroupedLinear.reading(module, "matrices")
    for each in (op, one):
        given = x.clone().requires_grad_()
        with opfuse.autocast(recipe):
            y = each(given, torch.tensor(sizes))
        y.square().sum().backward()
        results.append((y, given.grad))
    for pair in zip(*results, strict=True):
        same(*pair)
    same(module.matrices.grad, torch.stack([p.grad for p in op.parameters()]))
    single = nn.Module()
    single.matrices = nn.Parameter(op.weight0.detach()[None])
    with opfuse.autocast(recipe):
        alone = ops.GroupedLinear.reading(single, "matrices")(x, torch.tensor([5]))
        linear = linears(op)[0](x)
    same(alone, linear)


def test_calibrating_and_without_a_backward():
    op, x, sizes = op_of((2, 3)), torch.randn(5, 128), torch.tensor([2, 3])
    with opfuse.autocast(False, calibrating=True, recipe=RECIPES[2]):
        y = op(x, sizes)
    torch.testing.assert_close(y, op(x, sizes))
    with torch.inference_mode(), opfuse.autocast(RECIPES[2]):
        z = op(x, sizes)
    with torch.no_grad(), opfuse.autocast(RECIPES[2]):
        same(op(x, sizes), z)


def test_compile_breaks_the_graph():
    op, x, sizes = op_of((2, 3)), torch.randn(5, 128), torch.tensor([2, 3])
    chain = opfuse.Sequential(ops.SiLU(), op)

    def run(x, sizes):
        with opfuse.autocast(RECIPES[0]):
            return chain(x, sizes)

    same(torch.compile(run, backend="aot_eager")(x, sizes), run(x, sizes))


def test_sizes_without_values_are_refused():
    op = ops.GroupedLinear(2, 128, 128, device="meta")
    x, sizes = torch.empty(5, 128, device="meta"), torch.zeros(2, dtype=int, device="meta")
    with opfuse.autocast(RECIPES[0]), pytest.raises(RuntimeError, match="split_sizes that have"):
        op(x, sizes)
    op = op_of((2, 3))
    with opfuse.autocast(RECIPES[0]), pytest.raises(ValueError, match="sum up to the rows"):
        op(torch.randn(5, 128), torch.tensor([2, 2]))
