"""Parameters that live quantized, under the recipes of this plugin: exact codes, training, ranks."""

import copy
import io
import pathlib
import re
import subprocess
import sys

import numpy as np
import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse import QuantizerRole, ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE

sys.path.append(str(pathlib.Path(__file__).parent))
import exact  # from the folder just added

FP32_MAX = exact.FP32_MAX
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "margin": fp8.DelayedScaling(margin=2, amax_compute_algo="most_recent", amax_history_len=1),
    "current": fp8.Float8CurrentScaling(),
    "current2": fp8.Float8CurrentScaling(use_power_2_scales=True),
    "block": fp8.Float8BlockScaling(),
    "block32": fp8.Float8BlockScaling(use_f32_scales=True),
    "rows": fp8.Float8BlockScaling(w_block_scaling_dim=1),
    "mx": fp8.MXFP8BlockScaling(),
    "mx2d": fp8.MXFP8BlockScaling(enable_2d_quantization=True),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)
STATELESS = [name for name, recipe in RECIPES.items() if type(recipe) is not fp8.DelayedScaling]


def chain(recipe=None, dtype=torch.float32, seed=0, widths=(64, 96)):
    torch.manual_seed(seed)
    inner, outer = widths
    with opfuse.quantized_model_init(recipe is not None, recipe, True):
        return opfuse.Sequential(
            ops.Linear(inner, outer, dtype=dtype), ops.GELU(), ops.Linear(outer, inner, dtype=dtype)
        )


def batch(seed=1, rows=32, dtype=torch.float32):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(model):
    return [p.view(torch.uint8).clone() for i in (0, 2) for p in model[i].weight.tensors()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def code_bytes(part):
    return part.view(torch.uint8).numpy()


# Codes, looked up in numpy


def check_codes(name, param, values, first):
    """Codes and scales of both copies, against numpy; a delayed scale follows the first values too."""
    recipe, made = RECIPES[name], param.quantized
    for way, matrix in (("rowwise", values), ("columnwise", values.t())):
        matrix = matrix.float().numpy()
        found = code_bytes(getattr(made, f"{way}_data"))
        if name in ("mx", "mx2d"):
            want, exponents = exact.by_mx(matrix, exact.E4M3, 32 if name == "mx2d" else 1)
            np.testing.assert_array_equal(code_bytes(getattr(made, f"{way}_scale_inv")), exponents)
        elif name in ("block", "block32", "rows"):
            block = (1, 128) if name == "rows" else (128, 128)
            power_of_2 = name != "block32"
            want, inverse = exact.by_blocks(matrix, block, exact.E4M3, power_of_2, FP32_MAX)
            scales = getattr(made, f"{way}_scale_inv").numpy()
            scales = scales.T if name == "rows" else scales[:, : inverse.shape[1]]
            np.testing.assert_array_equal(scales, inverse)
        else:
            scale = exact.scale(exact.amax(matrix), exact.E4M3, power_of_2=name == "current2")
            if name in ("delayed", "margin"):
                known = [values] if name == "margin" else [first, values]  # margin: the most recent
                most = max(exact.amax(known_of.float().numpy()) for known_of in known)
                scale = exact.scale(most, exact.E4M3)
                scale = scale / np.float32(2**recipe.margin)
            want = exact.cast(matrix, scale, exact.E4M3)
            assert made.scale_inv.numpy()[0] == np.float32(1) / scale
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 127), (127, 3), (129, 257), (32, 64), (64, 1056)], ids=str
)
@each_recipe
def test_codes_are_exact_when_built_and_after_a_step(name, shape):
    if name.startswith("mx") and (shape[0] % 32 or shape[1] % 32):
        with pytest.raises(ValueError, match="MXFP8 expected a multiple of 32"):
            with opfuse.quantized_model_init(recipe=RECIPES[name]):
                ops.BasicLinear(shape[1], shape[0])
        return
    torch.manual_seed(0)
    with opfuse.quantized_model_init(RECIPES[name], preserve_high_precision_init_val=True):
        param = ops.BasicLinear(shape[1], shape[0]).weight
    first = param.get_high_precision_init_val()
    check_codes(name, param, first, first)
    plain = torch.nn.Parameter(param.detach() + 0)
    plain.grad = torch.randn(shape)
    param.grad = plain.grad.clone()
    for weights in (param, plain):
        torch.optim.SGD([weights], lr=0.05).step()
    check_codes(name, param, plain.detach(), first)


@each_recipe
def test_a_byte_for_each_element_of_each_copy(name):
    torch.manual_seed(0)
    with opfuse.quantized_model_init(RECIPES[name]):
        param = ops.BasicLinear(1024, 1024).weight
    scales = {"mx": 1 / 32, "mx2d": 1 / 32, "rows": 4 / 128}.get(name, 0.001)
    size = sum(part.untyped_storage().nbytes() for part in param.tensors())
    assert 2 * param.numel() < size <= 2 * param.numel() * (1 + scales)


def test_nobody_finite_is_lost_and_what_is_not_finite_stays():
    with opfuse.quantized_model_init(fp8.Float8BlockScaling()):
        param = ops.BasicLinear(256, 256).weight
    values = torch.randn(256, 256)
    values[0, 0], values[200, 3] = torch.nan, torch.inf
    with torch.no_grad():
        param.copy_(values)
    got = param.detach().dequantize()
    assert got[0, 0].isnan() and got[200, 3].isnan() and got.isfinite().sum() == 256 * 256 - 2


# Training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_recipe
def test_a_step_is_that_of_unquantized_weights(name, dtype):
    recipe = RECIPES[name]
    model, twin, x = chain(recipe, dtype), chain(dtype=dtype), batch(dtype=dtype)
    for i in (0, 2):  # a scale that follows from earlier steps has seen the weight
        op = twin[i].basic_ops[0]
        op._quantizers.use(op, recipe)
        quantizer = op._quantizers.of(recipe)["weight"]
        if quantizer.state_names:
            quantizer.quantize(op.weight.detach(), opfuse.core.quantization.BOTH)
            recipe.update([quantizer], None)
    found = []
    for m in (model, twin):
        leaf = x.clone().requires_grad_()
        with opfuse.autocast(recipe):
            y = m(leaf)
        y.float().square().sum().backward()
        found.append([y.detach(), leaf.grad, *[p.grad for p in m.parameters()]])
    assert same(*found)
    assert all(p.grad.dtype == dtype for p in model.parameters())


@each_recipe
def test_products_are_those_of_what_the_codes_stand_for(name):
    recipe = RECIPES[name]
    with opfuse.quantized_model_init(recipe):
        model = opfuse.Sequential(ops.BasicLinear(64, 96))
    weight, x = model[0].weight, batch().requires_grad_()
    quantizer = fp8.make(recipe, QuantizerRole("linear", "input"), None)
    wide = quantizer.quantize(x.detach(), BOTH)
    with opfuse.autocast(recipe):
        y = model(x)
    want = wide.dequantize(ROWWISE).double() @ weight.quantized.dequantize(ROWWISE).double().t()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    dy = torch.randn(32, 96)
    quantizer = fp8.make(recipe, QuantizerRole("linear", "grad_output"), None)
    grad = quantizer.quantize(dy, BOTH)
    y.backward(dy)
    dx = grad.dequantize(ROWWISE).double() @ weight.quantized.dequantize(COLUMNWISE).double()
    dw = grad.dequantize(COLUMNWISE).double().t() @ wide.dequantize(COLUMNWISE).double()
    torch.testing.assert_close(x.grad.double(), dx, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), dw, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", STATELESS)
def test_master_weights_train_as_an_unquantized_model_does(name):
    recipe = RECIPES[name]
    model, twin = chain(recipe), chain()
    params = [*model.parameters()]
    masters = []
    for param in params:
        kept = hasattr(param, "get_high_precision_init_val")
        value = param.get_high_precision_init_val() if kept else param.detach()
        masters.append(torch.nn.Parameter(value.clone()))
    ours, theirs = (torch.optim.AdamW(p, lr=1e-2) for p in (masters, [*twin.parameters()]))
    losses = {id(model): [], id(twin): []}
    for seed in range(6):
        for m, optimizer in ((model, ours), (twin, theirs)):
            with opfuse.autocast(recipe):
                loss = (m(batch(seed)) - batch(seed)).square().mean()
            m.zero_grad()
            loss.backward()
            for master, param in zip(masters, params, strict=True) if m is model else ():
                master.grad = param.grad
            optimizer.step()
            losses[id(m)].append(loss.item())
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
    assert losses[id(model)] == losses[id(twin)]
    assert losses[id(model)][-1] < losses[id(model)][0]


@each_recipe
def test_a_run_goes_on_to_the_bit(name):
    recipe = RECIPES[name]

    def train(model, optimizer, seeds):
        for seed in seeds:
            with opfuse.autocast(recipe):
                y = model(batch(seed))
            optimizer.zero_grad()
            (y - batch(seed)).square().sum().backward()
            optimizer.step()

    model = chain(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    state, of_optimizer = torch.load(file, weights_only=True)
    again = chain(recipe, seed=9)
    restored = torch.optim.AdamW(again.parameters(), lr=0.02)
    again.load_state_dict(state)
    restored.load_state_dict(of_optimizer)
    assert same(codes(again), codes(model))
    train(model, optimizer, range(2, 5))
    train(again, restored, range(2, 5))
    assert same(codes(again), codes(model))
    one, other = model.state_dict(), again.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_delayed_weight_follows_its_maxima():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    model = chain(recipe)
    param, quantizer = model[0].weight, model[0].weight.quantizer
    first = param.get_high_precision_init_val().abs().max()
    assert torch.allclose(param.scale_inv, first.reshape(1) / 448)  # the codes fit the values
    assert quantizer.scale == 1 and quantizer.amax == first
    scales = []
    for factor in (1, 2, 1, 1, 1):
        with torch.no_grad():
            param.mul_(factor)
        with opfuse.autocast(recipe):
            model(batch())
        scales.append(quantizer.scale.item())
    assert model[0].basic_ops[0]._quantizers.of(recipe)["weight"] is quantizer
    assert scales[1] == pytest.approx(scales[0] / 2, rel=0.1)
    # what was twice as large was not saturated; then nothing is cast, the history empties, and the
    # scale stays
    assert quantizer.amax_history.max() == pytest.approx(2 * first.item(), rel=0.1)
    assert param.detach().dequantize().abs().max() == pytest.approx(2 * first.item(), rel=0.1)
    param.requires_grad_(False)
    for _ in range(3):
        with opfuse.autocast(recipe):
            model(batch())
    assert scales[-1] == quantizer.scale.item()


def test_a_custom_recipe_by_name():
    def factory(role):
        last = role.name == "head" and role.tensor_type == "weight"
        return fp8.IdentityQuantizer() if last else fp8.CurrentQuantizer(torch.float8_e4m3fn)

    recipe = fp8.CustomRecipe(factory, name="parameters: all but the head")
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe):
        model = opfuse.Sequential(
            ops.BasicLinear(64, 64), ops.BasicLinear(64, 64, name="head", dtype=torch.float32)
        )
    assert model[0].weight.rowwise_data.dtype == torch.float8_e4m3fn
    assert model[1].weight.rowwise_data.dtype == torch.float32
    with opfuse.autocast(recipe):
        model(batch()).sum().backward()
    assert model[1].weight.grad is not None


def test_another_recipe_is_refused_by_name():
    model = chain(fp8.Float8CurrentScaling())
    expected = "quantized by another recipe: it lives as Float8CurrentScaling.* is DelayedScaling"
    with pytest.raises(RuntimeError, match=expected), opfuse.autocast():
        model(batch())
    with opfuse.autocast("fp8-current"):  # the same, by name
        model(batch())
    assert model(batch()).isfinite().all()
    with opfuse.quantized_model_init():
        assert ops.BasicLinear(4, 4).weight.recipe == fp8.DelayedScaling()


# Ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
def test_quantized_parameters_train_under_fsdp2_and_ddp(tmp_path):
    script = pathlib.Path(__file__).with_name("parameters_on_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "group")]
    started = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][-3000:] + said[1][-3000:]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), fp8.NVFP4BlockScaling()], ids=repr)
def test_a_report_leaves_them_as_they_are(recipe):
    model = chain(recipe)
    before = codes(model)
    with opfuse.autocast(recipe):
        assert "Linear" in str(opfuse.explain(model, batch()))
    assert same(codes(model), before)


def test_copies_of_a_model_have_quantizers_of_their_own():
    model = chain(RECIPES["delayed"])
    with opfuse.autocast(RECIPES["delayed"]):
        model(batch())
    twin = copy.deepcopy(model)
    before = codes(model)
    with torch.no_grad():
        twin[0].weight.mul_(8)
    assert twin[0].weight.quantizer.amax > 4 * model[0].weight.quantizer.amax
    assert same(codes(model), before)


def test_the_blocks_of_the_page_run_as_written(capsys):
    """Its blocks need this plugin, so they run here."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "quantized-parameters.md"
    text, namespace = page.read_text(encoding="utf-8"), {}
    blocks = re.findall(r"^```(py|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["py", "text", "py"]
    torch.manual_seed(0)
    for kind, block in blocks:
        if kind == "py":
            exec(block, namespace)
        else:
            assert capsys.readouterr().out == block
    model, masters = namespace["model"], namespace["masters"]
    assert not torch.equal(model[0].weight.detach() + 0, masters[0].detach())
    torch.testing.assert_close(
        model[0].weight.detach() + 0, masters[0].detach(), rtol=0.07, atol=1e-3
    )
