"""What a chain keeps for its backward under a recipe, and what it costs in precision."""

import copy

import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.core.quantization import ROWWISE
from opfuse.report.calls import saved_bytes

RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8")
WIDTH, INNER, ROWS = 256, 704, 128
TWINS = pytest.mark.parametrize("twins", [False, True], ids=["separate", "twins"])
"""Whether the twins of the kernels cast, in one fused op with what is before or behind the cast."""

BF16 = 2 * (WIDTH + 2 * INNER)
"""Bytes per row that an MLP keeps in bf16 where the activation's output is computed again."""


def mlp(first="linear", width=WIDTH, inner=INNER, **of_activation):
    torch.manual_seed(0)
    if first == "linear":
        before = ops.Linear(width, 2 * inner, bias=False)
    else:
        names = ("gate", "up")
        before = ops.ParallelLinear({n: ops.Linear(width, inner, bias=False) for n in names})
    act = ops.SwiGLU(**of_activation)
    return opfuse.Sequential(before, act, ops.Linear(inner, width, bias=False)).bfloat16()


def batch(rows, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator).bfloat16().requires_grad_()


def call(model, x, recipe):
    if recipe is None:
        return model(x)
    with opfuse.autocast(recipe):
        return model(x)


def kept(model, recipe, rows=ROWS, width=WIDTH):
    """Bytes per row that a call keeps, and bytes that do not depend on the rows: copies of weights."""
    few, many = (
        saved_bytes(lambda n=n: call(model, batch(n, width), recipe), model.parameters())
        for n in (rows, 2 * rows)
    )
    return (many - few) / rows, 2 * few - many


@TWINS
@pytest.mark.parametrize("first", ["linear", "side by side"])
def test_a_recipe_and_its_options_halve_what_is_kept(first, twins):
    casts = {"fp8.twins": twins}
    with opfuse.plugins.using("fp8"), opfuse.options(prefer="memory", **casts):
        of_rows, of_weights = kept(mlp(first), "fp8-current")
        assert of_rows == WIDTH + 4 * INNER and of_rows <= 0.95 * BF16
        weights = sum(param.numel() for param in mlp(first).parameters())
        assert weights < of_weights < weights + 64  # a byte each, and a scale for each tensor
    with opfuse.plugins.using("fp8"), opfuse.options(**casts):  # who asks for less asks once
        of_rows, _ = kept(mlp(first, cache_quantized_input=True), "fp8-current")
        assert of_rows == WIDTH + 2 * INNER and of_rows <= 0.55 * BF16


@TWINS
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_each_recipe_keeps(recipe, twins):
    """Scales of blocks come on top; those that a cast again needs are kept."""
    extra, casts = {"fp8-block": 4 / 128, "mxfp8": 1 / 32}.get(recipe, 0), {"fp8.twins": twins}
    with opfuse.plugins.using("fp8"), opfuse.options(prefer="memory", **casts):
        of_rows, _ = kept(mlp(), recipe)
        less, _ = kept(mlp(cache_quantized_input=True), recipe)
    scales = extra * (WIDTH + INNER)
    assert of_rows == WIDTH + 4 * INNER + scales and less == of_rows - 2 * INNER
    with opfuse.plugins.using("fp8"), opfuse.options(**casts):
        more, _ = kept(mlp(), recipe)
    assert more == of_rows + INNER  # the codes of the activation's output


def installed(name):
    return any(record.name == name for record in opfuse.plugins.manager.records)


@pytest.mark.parametrize("plugin, options", [("mlp", {"prefer": "memory"}), ("inductor", {})])
def test_like_is_compared_with_like(plugin, options):
    """With a plugin that computes again in bf16: what that keeps, and what a recipe keeps with it."""
    if not installed(plugin):
        pytest.skip(f"opfuse-plugin-{plugin} is not installed")
    with opfuse.plugins.using(f"fp8,{plugin}"), opfuse.options(**options):
        assert kept(mlp(), None) == (BF16, 0)
        of_rows, _ = kept(mlp(), "fp8-current")
        less, _ = kept(mlp(cache_quantized_input=True), "fp8-current")
    assert of_rows <= 0.95 * BF16 and less <= 0.55 * BF16


def test_an_mlp_of_real_width_keeps_less_than_in_bf16():
    width, inner = 1024, 2816
    with opfuse.plugins.using("fp8"), opfuse.options(prefer="memory"):
        of_rows, _ = kept(mlp(width=width, inner=inner), "fp8-current", 16, width)
        cached = mlp(width=width, inner=inner, cache_quantized_input=True)
        less, _ = kept(cached, "fp8-current", 16, width)
    in_bf16 = 2 * (width + 2 * inner)
    assert of_rows <= 0.95 * in_bf16 and less <= 0.55 * in_bf16


def step(model, x, recipe, **options):
    leaf = x.detach().clone().requires_grad_()
    with opfuse.plugins.using("fp8"), opfuse.options(**options):
        y = call(model, leaf, recipe)
        grads = torch.autograd.grad(y.float().square().sum(), [leaf, *model.parameters()])
    return [y.detach(), *grads]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_computed_again_has_the_same_bits(recipe):
    runs = []
    for prefer in ("speed", "memory"):
        model = mlp()
        runs.append([step(model, batch(rows), recipe, prefer=prefer) for rows in (64, 32)])
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_less_precise_gradients_and_the_same_output(recipe):
    plain = step(mlp(), batch(64), recipe)
    less = step(mlp(cache_quantized_input=True), batch(64), recipe)
    assert torch.equal(plain[0], less[0])
    for got, right in zip(less[1:], plain[1:], strict=True):
        error = (got.float() - right.float()).norm() / right.float().norm()
        assert error < 0.09  # the cast input, and codes of gradients that fall to the other side


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_casts_read_a_cast_input_as_the_separate_ops_do(recipe, prefer):
    """Behind a bias, a gate and a change of dtype, in both directions."""
    torch.manual_seed(0)
    model = opfuse.Sequential(
        ops.Linear(64, 128),
        ops.GELU(cache_quantized_input=True),
        ops.Linear(128, 256, bias=False),
        ops.ClampedSwiGLU(limit=0.5, cache_quantized_input=True),
        ops.Linear(128, 32),
    )
    x = torch.randn(32, 64)
    results = []
    for twins in (True, False):
        call_with = {"prefer": prefer, "fp8.twins": twins}
        with opfuse.plugins.using("fp8"), opfuse.options(**call_with), opfuse.autocast(recipe):
            row = opfuse.explain(model, x.requires_grad_()).to_dict()
        fused = {step["fusion"] for name in ("forward", "backward") for step in row[name]}
        assert ({"activation+cast", "cast+activation"} <= fused) == twins
        results.append(step(copy.deepcopy(model), x, recipe, **call_with))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("op", [ops.GELU, ops.SiLU, ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_that_at_the_cast_input(op, dtype):
    """As Transformer Engine casts it: E4M3, one scale, whatever the recipe; odd shapes too."""
    for shape in ((3, 10), (1, 2), (127, 6), (0, 4), (2, 3, 8), (4,)):
        x = torch.randn(shape).to(dtype).requires_grad_()
        quantizer = fp8.CurrentQuantizer(torch.float8_e4m3fn)
        at = quantizer.quantize(x, ROWWISE).dequantize().requires_grad_()
        dy = torch.randn_like(op()(x))
        with opfuse.plugins.using("fp8"):
            (right,) = torch.autograd.grad(op()(at), at, dy)
            (got,) = torch.autograd.grad(op(cache_quantized_input=True)(x), x, dy)
            with opfuse.autocast("mxfp8"):
                y = op(cache_quantized_input=True)(x)
            (again,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(got, right) and torch.equal(again, right)


def test_nothing_is_cast_where_nothing_is_kept():
    x = torch.randn(4, 8)
    op = ops.GELU(cache_quantized_input=True)
    with opfuse.plugins.using("fp8"):
        assert saved_bytes(lambda: op(x)) == 0
        x.requires_grad_()
        assert saved_bytes(lambda: op(x)) == 4 * 8 + 4
        with torch.no_grad():
            assert saved_bytes(lambda: op(x)) == 0


def test_where_the_plugin_is_off_the_input_is_kept_as_it_is():
    fp8.opfuse_recipes()
    x, op = torch.randn(4, 8, requires_grad=True), ops.GELU(cache_quantized_input=True)
    opfuse.autocast("fp8-current")  # it is loaded
    with opfuse.plugins.using("-fp8"), pytest.warns(opfuse.PluginWarning, match="fp8 is off"):
        opfuse.plugins.manager._warned.clear()
        assert saved_bytes(lambda: op(x)) == 4 * 4 * 8


def test_a_compiled_model_gives_the_same_loss_and_close_gradients():
    torch._dynamo.reset()
    model, x = mlp(cache_quantized_input=True), batch(32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    recipe = fp8.Float8CurrentScaling()
    got, right = step(compiled, x, recipe), step(model, x, recipe)
    assert torch.equal(got[0], right[0])
    for one, other in zip(got[1:], right[1:], strict=True):  # here it keeps the linear's input
        assert (one.float() - other.float()).norm() <= 0.06 * other.float().norm()
