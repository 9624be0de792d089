"""Linears side by side whose weights have one scale: what is computed, how exactly, and what a checkpoint has."""

import copy
import io
import json
import pathlib
import sys
import warnings

import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_products import DTYPES, check, data, on_a_gpu, stands_for  # from the folder just added

gpu = pytest.fixture(on_a_gpu)
RECIPES = {"fp8-delayed": fp8.DelayedScaling, "fp8-current": fp8.Float8CurrentScaling}
of_both = pytest.mark.parametrize("recipe", RECIPES)
MODES = "native", "emulated"
SIZES = (48, 16, 32)


def qkv(inputs=40, sizes=SIZES, *, bias=False, dtype=torch.bfloat16, magnitudes=(1, 1, 1)):
    torch.manual_seed(0)
    linears = {
        name: ops.Linear(inputs, size, bias=bias and name != "k")
        for name, size in zip("qkv", sizes, strict=False)
    }
    with torch.no_grad():
        for linear, factor in zip(linears.values(), magnitudes, strict=False):
            linear.weight.mul_(factor)
    return opfuse.Sequential(ops.ParallelLinear(linears)).to(dtype)


def weights_of(model):
    return [param for name, param in model.named_parameters() if name.endswith("weight")]


def step(model, x, dy, recipe, mode="native", selection="fp8", **given):
    """Output and gradients: of the input, of the weights, of the biases."""
    leaf = x.clone().requires_grad_()
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    params = [param for param in (*weights_of(model), *biases) if param.requires_grad]
    with opfuse.plugins.using(selection), opfuse.options(**{"fp8.products": mode}):
        with opfuse.autocast(recipe, **given):
            y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *params], dy)]


def expected(recipe, model, x, dy):
    """In fp64, of the values of the codes of the input, of all weights as one, and of the gradient."""
    weights = weights_of(model)
    sizes = [len(weight) for weight in weights]
    (xr, xc), (dr, dc), (wr, wc) = (
        [t.reshape(-1, t.shape[-1]) for t in stands_for(recipe, role, tensor)]
        for role, tensor in (
            ("input", x),
            ("grad_output", dy),
            ("weight", torch.cat([weight.detach() for weight in weights])),
        )
    )
    named, plain = (
        dict(model.named_parameters()),
        dy.double().reshape(-1, sum(sizes)).split(sizes, 1),
    )
    biases = [
        named.get(name.replace("weight", "bias")) for name in named if name.endswith("weight")
    ]
    sums = [0 if bias is None else bias.detach().double() for bias in biases]
    parts = [p + b for p, b in zip((xr @ wr.T).split(sizes, 1), sums, strict=True)]
    y, dx = torch.cat(parts, 1).view(dy.shape), (dr @ wc).view(x.shape)
    dw = (dc.T @ xc).split(sizes)
    return y, dx, dw, [d.sum(0) for d, b in zip(plain, biases, strict=True) if b is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@of_both
def test_the_weights_are_cast_as_one(recipe, bias, dtype):
    """By products of codes, and those that are emulated; odd shapes too."""
    known = RECIPES[recipe](shared_weight_scale=True)
    for shape in ((3, 7), (1, 7), (127, 33), (2, 3, 7), (7,), (0, 7), (64, 40)):
        sizes = SIZES if shape[-1] == 40 else (5, 1, 3)
        x, dy = data(shape, sum(sizes), dtype)
        for mode in MODES:
            magnitudes = (1, 8, 0.1)
            model = qkv(shape[-1], sizes, bias=bias, dtype=dtype, magnitudes=magnitudes)
            right = expected(known, model, x, dy)
            check(step(model, x, dy, known, mode), right, dtype, 128)


@of_both
def test_in_fp64_and_under_autocast(recipe):
    known = RECIPES[recipe](shared_weight_scale=True)
    model = qkv(dtype=torch.float64)
    x, dy = data((24, 40), sum(SIZES), torch.float64)
    got, (y, dx, dw, _) = step(model, x, dy, known), expected(known, model, x, dy)
    for mine, right in zip(got, (y, dx, *dw), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    model = qkv(dtype=torch.float32)
    x, dy = x.float().t().contiguous().t(), dy.bfloat16()  # not contiguous
    for mode in MODES:
        with torch.autocast("cpu", torch.bfloat16):
            got = step(copy.deepcopy(model), x, dy, known, mode)
        assert [t.dtype for t in got] == [torch.bfloat16, *[torch.float32] * 4]
        y, dx, dw, _ = expected(known, model, x, dy)
        for mine, right in zip(got, (y, dx, *dw), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=2**-7, atol=2**-6)


@of_both
def test_a_product_for_the_output_and_one_for_the_gradient_of_the_input(gpu, recipe):
    """With one scale of each operand; with biases too. Without the option each weight has its own."""
    for bias in (False, True):
        model = qkv(160, bias=bias)
        x, dy = data((64, 160), sum(SIZES), torch.bfloat16)
        known = RECIPES[recipe](shared_weight_scale=True)
        right = expected(known, model, x, dy)
        gpu.calls.clear()
        check(step(model, x, dy, known), right, torch.bfloat16, 512)
        fast = [call[-1] for call in gpu.calls]
        assert fast == [True, False, False, False, False] and gpu.strided == 0
        assert {kind for call in gpu.calls for kind in call[:2]} == {
            torch.nn.functional.ScalingType.TensorWise
        }
        gpu.calls.clear()
        step(qkv(160, bias=bias), x, dy, RECIPES[recipe]())
        assert len(gpu.calls) == 9
        gpu.strided = 0


@pytest.mark.parametrize("frozen", ["q.weight", "k.weight v.weight", "q.weight k.weight v.weight"])
@of_both
def test_frozen_weights(recipe, frozen):
    known = RECIPES[recipe](shared_weight_scale=True)
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    for mode in MODES:
        model = qkv()
        y, dx, dw, _ = expected(known, model, x, dy)
        kept = []
        for (name, param), right in zip(model[0].named_parameters(), dw, strict=True):
            param.requires_grad_(name not in frozen)
            kept += [right] * (name not in frozen)
        check(step(model, x, dy, known, mode), (y, dx, kept, ()), torch.bfloat16, 128)


@of_both
def test_an_evaluation_and_steps_that_follow(recipe):
    """Grad mode off records nothing; what is watched has the same bits, and its name."""
    known = RECIPES[recipe](shared_weight_scale=True)
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    model = qkv(magnitudes=(1, 8, 0.1))
    step(model, x, dy, known)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = copy.deepcopy(model)
    with torch.no_grad(), opfuse.plugins.using("fp8"), opfuse.autocast(known):
        y = model(x)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    got = step(model, x, dy, known, "emulated")
    assert torch.equal(y, got[0])
    with opfuse.watch_quantization() as seen:
        watched = step(other, x, dy, known, "emulated")
    assert all(map(torch.equal, got, watched))
    assert [name.split()[-1] for name in seen.tensors] == ["input", "weight0", "grad_output"]
    assert seen.tensors["ParallelLinear weight0"].values == 40 * sum(SIZES)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_that_is_not_quantized(override):
    known = fp8.Float8CurrentScaling(shared_weight_scale=True, backward_override=override)
    x, dy = data((24, 40), sum(SIZES), torch.float32)
    for mode in MODES:
        model = qkv(dtype=torch.float32, magnitudes=(1, 8, 0.1))
        weight, source = torch.cat([w.detach() for w in weights_of(model)]), x
        y, *_ = expected(known, model, x, dy)
        if override == "dequantized":
            source, weight = (
                stands_for(known, role, tensor)[0]
                for role, tensor in (("input", x), ("weight", weight))
            )
        dx, dw = dy.double() @ weight.double(), (dy.double().t() @ source.double()).split(SIZES)
        for mine, right in zip(step(model, x, dy, known, mode), (y, dx, *dw), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)


def error(mine, truth):
    return ((mine.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize(
    "magnitudes, most",
    [
        ((1, 1, 1), 1.02),
        ((1, 8, 0.1), 1.05),
        ((1, 0.1, 0.01), 1.05),  # a scale for each may suit one a bit better by chance
        ((1, 1e-3, 1e-3), 1.05),
        ((1, 1e-4, 1e-4), 1.1),
        ((1, 1e-5, 1e-5), 6),
        ((1, 1e-6, 1e-6), None),
    ],
    ids=str,
)
@of_both
def test_errors_at_real_widths_beside_those_of_a_scale_for_each(recipe, magnitudes, most):
    """Against fp64: as large while E4M3 has its bits, then larger; None: the small weights become 0."""
    sizes, found = (1024, 256, 256), []
    x, dy = data((64, 1024), sum(sizes), torch.bfloat16)
    for shared in (False, True):
        model = qkv(1024, sizes, magnitudes=magnitudes)
        for _ in range(2):  # delayed scales are 1 in the first
            y, dx, *_ = step(model, x, dy, RECIPES[recipe](shared_weight_scale=shared))
        weights = [weight.detach().double() for weight in weights_of(model)]
        truth = [x.double() @ weight.t() for weight in weights]
        errors = [error(a, b) for a, b in zip(y.split(sizes, 1), truth, strict=True)]
        grads = dy.double().split(sizes, 1)
        errors.append(error(dx, sum(d @ w for d, w in zip(grads, weights, strict=True))))
        found.append(errors)
    apart, together = found
    assert max(apart) < 0.065 and together[0] < 0.04 and together[3] < 0.065
    if most is None:
        assert together[1] == together[2] == 1
    else:
        assert all(b <= most * a for a, b in zip(apart, together, strict=True)), found


def saved(model):
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    return torch.load(memory)


def test_a_checkpoint_has_the_state_of_all_weights_by_their_names():
    """It resumes to the bit; and the largest magnitude is that of all."""
    known = fp8.DelayedScaling(shared_weight_scale=True, amax_history_len=4)
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    model = qkv(magnitudes=(1, 8, 0.1))
    for _ in range(3):
        step(model, x, dy, known)
    state = saved(model)
    found = {name.split(".", 3)[-1]: value for name, value in state.items() if "quantizers" in name}
    names = ("input", "weight0", "weight1", "weight2", "grad_output")
    assert found.keys() == {
        "recipe",
        *[f"{n}.{s}" for n in names for s in ("scale", "amax", "amax_history")],
    }
    largest = max(weight.detach().abs().max() for weight in weights_of(model)).float()
    for i in range(3):
        assert torch.equal(found[f"weight{i}.amax_history"], torch.tensor([0, *[largest] * 3]))
        assert found[f"weight{i}.scale"] == 448 / largest
    fresh = qkv()
    fresh.load_state_dict(state)
    assert all(map(torch.equal, step(fresh, x, dy, known), step(model, x, dy, known)))
    again = copy.deepcopy(model)
    again.load_state_dict(state)  # into quantizers that are there
    fresh.load_state_dict(state)
    assert all(map(torch.equal, step(again, x, dy, known), step(fresh, x, dy, known)))
    quantizers = again[0]._quantizers.of(known)
    assert quantizers["weight0"] is quantizers["weight1"] is quantizers["weight2"]


@pytest.mark.parametrize("of", [False, True])
def test_state_of_the_other_way_waits_and_says_so(of):
    known = [fp8.DelayedScaling(shared_weight_scale=way) for way in (of, not of)]
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    model, other = qkv(), qkv()
    step(model, x, dy, known[0])
    other.load_state_dict(saved(model))
    has, wants = (
        ('"shared_weight_scale": true', "{[^{]*")
        if of
        else ("{[^{]*", '.*"shared_weight_scale": true')
    )
    with pytest.warns(
        UserWarning, match=f"has quantizer state for .*{has}.*and none for .*{wants}"
    ):
        step(other, x, dy, known[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # here it is used
        assert all(map(torch.equal, step(other, x, dy, known[0]), step(model, x, dy, known[0])))


@pytest.mark.parametrize("cls", RECIPES.values())
def test_a_checkpoint_without_the_option_is_what_it_was_before(cls):
    assert "shared" not in cls().to_json() and cls() == cls(shared_weight_scale=False)
    assert json.loads(cls(shared_weight_scale=True).to_json())["shared_weight_scale"] is True
    assert cls().to_json("name") == cls(shared_weight_scale=False).to_json("name")
    with pytest.raises(TypeError, match="shared_weight_scale: expected True or False, got 1"):
        cls(shared_weight_scale=1)
    for other in (fp8.Float8BlockScaling, fp8.MXFP8BlockScaling, fp8.NVFP4BlockScaling):
        with pytest.raises(TypeError, match="shared_weight_scale"):
            other(shared_weight_scale=True)


@of_both
def test_the_whole_is_used_again_while_no_weight_changes(recipe, monkeypatch):
    known, casts = RECIPES[recipe](shared_weight_scale=True), []
    cls = fp8.DelayedQuantizer if "delayed" in recipe else fp8.CurrentQuantizer
    plain = cls.quantize_parts
    watched = lambda *given: casts.append(given[1:]) or plain(*given)  # noqa: E731
    monkeypatch.setattr(cls, "quantize_parts", watched)
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    model = qkv()
    first = step(model, x, dy, known, weights="cached")
    again = step(model, x, dy, known, weights="cached")
    assert len(casts) == 1 and casts[0][1] == BOTH
    assert recipe == "fp8-delayed" or all(map(torch.equal, first, again))
    with torch.no_grad():
        weights_of(model)[1].mul_(2)
    changed = step(model, x, dy, known, weights="cached")
    assert len(casts) == 2
    fresh = step(model, x, dy, known)
    assert len(casts) == 3 and (recipe == "fp8-delayed" or all(map(torch.equal, changed, fresh)))


@of_both
def test_only_the_weights_of_linears_side_by_side_share(recipe):
    known = RECIPES[recipe](shared_weight_scale=True)
    grouped = ops.GroupedLinear(3, 32, 16)
    model = torch.nn.ModuleList([grouped, ops.Quantize(True, True), qkv(32)])
    x = torch.randn(48, 32)
    with opfuse.plugins.using("fp8"), opfuse.autocast(known):
        opfuse.Sequential(grouped)(x, torch.tensor([16, 16, 16]))
        opfuse.Sequential(model[1])(x)
        model[2](x.bfloat16())
    distinct = [
        len({*map(id, op._quantizers.of(known).values())})
        for op in (grouped, model[1], model[2][0])
    ]
    assert distinct == [9, len(model[1]._quantizers.of(known)), 3]


def test_quantized_parameters_keep_their_own_scales():
    known = fp8.Float8CurrentScaling(shared_weight_scale=True)
    with opfuse.quantized_model_init(recipe=known):
        model = qkv(magnitudes=(1, 1, 1))
    x, dy = data((24, 40), sum(SIZES), torch.bfloat16)
    got = step(model, x, dy, known)
    weights = [weight.detach().dequantize().double() for weight in weights_of(model)]
    xr, _ = stands_for(known, "input", x)
    right = torch.cat([xr @ weight.t() for weight in weights], 1)
    torch.testing.assert_close(got[0].double(), right, rtol=2**-7, atol=2**-7)


def test_calibration_finds_the_scale_of_all():
    known = fp8.DelayedScaling(shared_weight_scale=True)
    model = qkv(magnitudes=(1, 8, 0.1))
    x, _ = data((24, 40), sum(SIZES), torch.bfloat16)
    with opfuse.plugins.using("fp8"), torch.no_grad():
        with opfuse.autocast(enabled=False, calibrating=True, recipe=known):
            model(x)
    largest = max(weight.detach().abs().max() for weight in weights_of(model)).float()
    assert model[0]._quantizers.of(known)["weight2"].scale == 448 / largest


def test_compiled_it_gives_the_same_bits():
    torch._dynamo.reset()
    known = fp8.Float8CurrentScaling(shared_weight_scale=True)
    model = qkv(32, bias=True, dtype=torch.float32)
    x, dy = data((24, 32), sum(SIZES), torch.float32)
    right = step(model, x, dy, known)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.products": "native"}):
        with opfuse.autocast(known):
            y = compiled(leaf)
        (dx,) = torch.autograd.grad(y, [leaf], dy)
    assert torch.equal(y, right[0]) and torch.equal(dx, right[1])
