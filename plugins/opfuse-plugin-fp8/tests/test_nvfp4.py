"""NVFP4: codes and scales against numpy, to the bit; products; what is drawn; what is refused."""

import io
import itertools
import pathlib
import sys

import numpy as np
import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_quantized.hadamard import mixed, unmixed

import opfuse
from opfuse import QuantizerRole, ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import exact  # from the folder just added
import exact_nvfp4 as nv
from test_casts import DTYPES, ROLES, USAGES, as_numpy, tensors

SIGNS = 0xD7E8
PLAIN = fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)
OPTIONS = ("disable_rht", "disable_2d_quantization")


def quantizer(recipe, role="input", name=""):
    return fp8.make(recipe, QuantizerRole("linear", role, name), None)


def rounded_to(dtype):
    """Brings float32 to a dtype and back, in numpy where it has the dtype."""
    if dtype == torch.bfloat16:
        return lambda values: torch.from_numpy(values).bfloat16().float().numpy()
    return lambda values: values.astype(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32)  # fmt: skip


def expected(recipe, role, x, seed=0, step=0):
    """The copies of numpy."""
    matrix, weight = as_numpy(x), role == "weight"
    tall = 16 if weight and not recipe.disable_2d_quantization else 1
    turned = matrix.T
    if not weight and not recipe.disable_rht:
        turned = nv.transformed(
            turned,
            np.float32(min(torch.finfo(x.dtype).max, float(exact.FP32_MAX))),
            rounded_to(x.dtype),
        )
    copies = []
    for which, source in enumerate((matrix, turned)):
        draw = None
        if role == "grad_output" and not recipe.disable_stochastic_rounding:
            draw = nv.draws(source.shape, seed, step, which)
        at_4 = role != "grad_output" and recipe.nvfp4_4over6 in ("all", f"{role}s")
        less = recipe.nvfp4_4over6_e4m3_use_256 in ("all", f"{role}s")
        four = recipe.nvfp4_4over6_err_mode if at_4 else None
        copies.append(nv.quantized(source, tall, draw, four, 256 if at_4 and less else 448))
    return copies


def compare(made, copies):
    for way, (codes, scales, decode) in zip(("rowwise", "columnwise"), copies, strict=True):
        data = getattr(made, f"{way}_data")
        if data is None:
            continue
        got = data.view(torch.uint8).reshape(codes.shape[0], -1).numpy()
        found = getattr(made, f"{way}_scale_inv").view(torch.uint8).numpy()
        np.testing.assert_array_equal(nv.unpacked(got), codes)
        np.testing.assert_array_equal(found & 0x7F, scales)  # NaN has a sign
        assert getattr(made, f"{way}_tensor_scale_inv").item() == decode


@pytest.mark.costly(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_codes_and_scales_are_exact_for_each_option(role, dtype):
    """Of every kind of tensor, for the options that its role knows."""
    off = [(False, False), (True, True)]
    for options, (kind, x) in itertools.product(off, tensors(dtype, 32, 48).items()):
        recipe = fp8.NVFP4BlockScaling(
            **dict(zip(OPTIONS, options, strict=True)), disable_stochastic_rounding=True
        )
        copies = expected(recipe, role, x)
        for usage in USAGES:
            made = quantizer(recipe, role).quantize(x, usage)
            assert made.copies == usage and (made.shape, made.dtype) == (x.shape, dtype), kind
            compare(made, copies)


@pytest.mark.costly(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_four_over_six_is_exact(mode, dtype):
    """Of weights and inputs, in squares and rows, with both limits of the scales."""
    for where, less in (("all", "all"), ("all", "none"), ("weights", "all")):
        recipe = fp8.NVFP4BlockScaling(
            disable_rht=True, nvfp4_4over6=where, nvfp4_4over6_err_mode=mode,
            nvfp4_4over6_e4m3_use_256=less, disable_stochastic_rounding=True,
        )  # fmt: skip
        for kind, x in tensors(dtype, 16, 48).items():
            for role in ("weight",) if where == "weights" else ("input", "weight"):
                made = quantizer(recipe, role).quantize(x, BOTH)
                assert made.dequantize().shape == x.shape, kind
                compare(made, expected(recipe, role, x))


def test_four_over_six_has_the_lower_error():
    """More than a fifth of the blocks of random numbers is nearer at 4; gradients never choose."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    plain = dict(disable_rht=True, disable_stochastic_rounding=True)
    recipe = fp8.NVFP4BlockScaling(**plain, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE")
    same = fp8.NVFP4BlockScaling(
        **plain, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", nvfp4_4over6_e4m3_use_256="none"
    )
    errors = {}
    for how in (fp8.NVFP4BlockScaling(**plain), recipe, same):
        made = quantizer(how).quantize(x, ROWWISE)
        errors[how] = (made.dequantize() - x).square().mean().item()
        scaled = made.rowwise_data.view(torch.uint8)
        at_4 = ((scaled & 7).maximum(scaled >> 4 & 7).view(64, 4, 8).amax(-1) == 6).float().mean()
        assert (at_4 > 0.2) == (how.nvfp4_4over6 == "all"), how
        assert type(quantizer(how, "grad_output")) is fp8.NVFP4Quantizer
        assert quantizer(how, "grad_output").four_over_six is None
    plain_error, *others = errors.values()
    assert max(others) < 0.9 * plain_error


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_gives_exact_codes_for_a_seed(dtype):
    """To the bit as well: seed, step and shape decide what is drawn."""
    torch.manual_seed(2**40 + 7)
    made = quantizer(fp8.NVFP4BlockScaling(), "grad_output")
    for step in range(2):
        for kind, x in tensors(dtype, 16, 48).items():
            copies = expected(fp8.NVFP4BlockScaling(), "grad_output", x, 2**40 + 7, step)
            compare(made.quantize(x, BOTH), copies)
            assert made.step.item() == step, kind
        fp8.NVFP4BlockScaling().update([made], None)


def test_what_the_values_are():
    """Every code, the middle of each pair, and its neighbours; ties go to the even code."""
    middles = (nv.MAGNITUDES[1:] + nv.MAGNITUDES[:-1]) / 2
    points = np.concatenate([nv.MAGNITUDES, middles]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, 9)])
    points = np.minimum(np.concatenate([points, -points]), 6)
    x = torch.zeros(len(points) // 15 + 1, 16)
    x[:, 0] = 6  # so that every scale of a block is 448, and that of the tensor 1 / 448
    for place, point in enumerate(points):
        x[place // 15, 1 + place % 15] = float(point)
    made = quantizer(PLAIN).quantize(x, ROWWISE)
    assert (made.rowwise_scale_inv.float() == 448).all()
    table = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    got = made.dequantize()
    for value, even in table.items():
        found = got[x.abs() == value].abs()
        assert found.numel() and torch.allclose(found, torch.tensor(even)), value
    compare(made, expected(PLAIN, "input", x)[:1] * 2)


def test_the_mean_over_steps_is_the_value():
    """Stochastic rounding has no bias; rounding to the nearest has."""
    x = torch.full((16, 16), -0.3)
    x[:, 0] = 6.0  # so that the values around -0.3 are 0 and -0.5
    recipe, means = fp8.NVFP4BlockScaling(), {}
    for how in (PLAIN, recipe):
        made, total = quantizer(how, "grad_output"), 0.0
        for _ in range(200):
            total += made.quantize(x, ROWWISE).dequantize()[:, 1:].mean().item()
            recipe.update([made] if made.pending_names else [], None)
        means[how] = total / 200
    assert means[PLAIN] == pytest.approx(-0.5)
    assert abs(means[recipe] + 0.3) < 0.006  # 48,000 draws: 5 standard deviations


@pytest.mark.parametrize("usage", [ROWWISE, COLUMNWISE], ids=["rowwise", "columnwise"])
def test_the_error_of_a_gradient_averages_out(usage):
    """Also through the transform; what stays is the rounding of the scales of blocks."""
    dy = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    recipe, left = fp8.NVFP4BlockScaling(), {}
    for how in (PLAIN, recipe):
        made = quantizer(how, "grad_output")
        errors = []
        for _ in range(100):
            errors.append(made.quantize(dy, usage).dequantize(usage) - dy)
            recipe.update([made] if made.pending_names else [], None)
        left[how] = torch.stack(errors).mean(0).norm() / errors[0].norm()
    assert left[PLAIN] == pytest.approx(1, abs=1e-5) and left[recipe] < 0.2


def test_every_draw_is_its_own():
    """Places, steps, copies, seeds, layers and shapes differ; draws are spread over [0, 1)."""

    def stream(seed=1, steps=0, name="", which=0, shape=(64, 64)):
        torch.manual_seed(seed)
        made = fp8.StochasticNVFP4Quantizer(name=name)
        made.step += steps
        return made._drawn(torch.zeros(shape), which)

    streams = [stream(), stream(2), stream(steps=1), stream(name="fc1"), stream(name="fc2")]
    streams += [stream(which=1), stream(shape=(32, 128))]
    for one, other in itertools.combinations(streams, 2):
        correlation = torch.corrcoef(torch.stack([one.view(-1), other.view(-1)]))[0, 1]
        assert abs(correlation) < 0.08  # 5 standard deviations of 4096 values
    for draws in streams:
        assert 0 <= draws.min() and draws.max() < 1 and draws.unique().numel() > 4090
        counts = torch.histc(draws, 16, 0, 1)
        assert ((counts - 256).abs() < 80).all()


def test_the_hadamard_transform_is_orthogonal_and_undone_exactly():
    """It is the matrix of the definition, orthogonal, and undone exactly."""
    h = nv.hadamard()
    assert (h @ h.T == 16 * np.eye(16)).all()
    matrix = torch.from_numpy(np.diag(nv.SIGNS) @ h / 4)
    torch.testing.assert_close(mixed(torch.eye(16), SIGNS), matrix, rtol=0, atol=0)
    torch.testing.assert_close(unmixed(torch.eye(16), SIGNS), matrix.t(), rtol=0, atol=0)
    codes = torch.from_numpy(nv.values(np.random.default_rng(0).integers(0, 16, (3, 2, 64))))
    assert torch.equal(unmixed(mixed(codes, SIGNS), SIGNS), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_transformed_copy_stands_for(dtype):
    """Its values in the original space, and the product of two is that of their codes."""
    x, dy = (torch.randn(64, 32).to(dtype) for _ in range(2))
    copies = [expected(PLAIN, "input", tensor)[1] for tensor in (dy, x)]
    got = [quantizer(PLAIN).quantize(tensor, COLUMNWISE) for tensor in (dy, x)]
    for made, (codes, scales, decode) in zip(got, copies, strict=True):
        assert made.columnwise_signs == SIGNS
        wide = nv.values(codes) * np.repeat(nv.E4M3[scales], 16, 1)
        values = torch.from_numpy(nv.untransformed(wide)) * float(decode)
        assert torch.equal(made.dequantize(COLUMNWISE), values.float().t().to(dtype))
    if dtype == torch.float32:
        product = (
            got[0].dequantize(COLUMNWISE).t().double() @ got[1].dequantize(COLUMNWISE).double()
        )
        torch.testing.assert_close(product, torch.from_numpy(nv.block_product(*copies)), rtol=1e-6, atol=1e-6)  # fmt: skip


def coarse(rows, columns, seed):
    """Numbers of which every product and sum is exact in float32."""
    generator = np.random.default_rng(seed)
    x = generator.choice([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0], (rows, columns)).astype(np.float32)
    x[:, ::16], x[::16] = 2.0, 2.0
    return torch.from_numpy(x * 2688 / 4096)  # the amax is 2688 * 2^-11: scales are powers of two


@pytest.mark.parametrize("shape", [(16, 32, 48), (64, 64, 16)])
def test_a_linear_to_the_bit(shape):
    """Where every partial sum is exact, output and gradients are those of a GEMM over the codes."""
    rows, inputs, outputs = shape
    recipe = fp8.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)
    x, w, dy = coarse(rows, inputs, 0), coarse(outputs, inputs, 1), coarse(rows, outputs, 2)
    op = ops.BasicLinear(inputs, outputs)
    with torch.no_grad():
        op.weight.copy_(w)
    copies = {role: expected(recipe, role, tensor) for role, tensor in (("input", x), ("weight", w), ("grad_output", dy))}  # fmt: skip
    x.requires_grad_()
    with opfuse.autocast(recipe):
        y = op(x)
    dx, dw = torch.autograd.grad(y, [x, op.weight], dy)
    products = (("input", 0, "weight", 0), ("grad_output", 0, "weight", 1), ("grad_output", 1, "input", 1))  # fmt: skip
    for got, (one, way, other, way2) in zip((y, dx, dw), products, strict=True):
        exactly = nv.block_product(copies[one][way], copies[other][way2])
        assert (exactly.astype(np.float32) == exactly).all()
        np.testing.assert_array_equal(got.detach().numpy(), exactly)


def test_a_linear_as_the_hardware_has_it():
    """Random numbers, every technique on, gradients drawn: products of codes, block by block."""
    torch.manual_seed(11)
    rows, inputs, outputs = 64, 96, 1024
    op, x, dy = ops.BasicLinear(inputs, outputs), torch.randn(64, 96), torch.randn(64, 1024)
    recipe = fp8.NVFP4BlockScaling()
    copies = {
        "input": expected(recipe, "input", x),
        "weight": expected(recipe, "weight", op.weight.detach()),
        "grad_output": expected(recipe, "grad_output", dy, 11),
    }
    assert (x.shape, dy.shape) == ((rows, inputs), (rows, outputs))
    x.requires_grad_()
    with opfuse.autocast(recipe):
        y = op(x)
    dx, dw = torch.autograd.grad(y, [x, op.weight], dy)
    products = (("input", 0, "weight", 0), ("grad_output", 0, "weight", 1), ("grad_output", 1, "input", 1))  # fmt: skip
    for got, (one, way, other, way2) in zip((y, dx, dw), products, strict=True):
        right = torch.from_numpy(nv.block_product(copies[one][way], copies[other][way2]))
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())  # fmt: skip


def test_a_weight_has_the_same_values_in_both_copies():
    made = quantizer(fp8.NVFP4BlockScaling(), "weight").quantize(torch.randn(48, 32), BOTH)
    assert torch.equal(made.dequantize(ROWWISE), made.dequantize(COLUMNWISE))
    assert made.columnwise_signs is None


def test_codes_do_not_depend_on_shape_or_layout():
    """One to four dimensions, not contiguous, empty; the codes are those of the matrix."""
    x = torch.randn(2, 32, 64)
    for role in ROLES:
        matrix = quantizer(PLAIN, role).quantize(x.reshape(64, 64), BOTH)
        for same in (x, x.view(2, 2, 16, 64), x.transpose(0, 1).contiguous().transpose(0, 1)):
            got = quantizer(PLAIN, role).quantize(same, BOTH)
            for one, other in zip(got.tensors(), matrix.tensors(), strict=True):
                assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
        empty = quantizer(PLAIN, role).quantize(torch.empty(0, 64), BOTH)
        assert empty.dequantize().shape == empty.dequantize(COLUMNWISE).shape == (0, 64)
    assert quantizer(PLAIN).quantize(torch.randn(32), ROWWISE).dequantize().shape == (32,)


def test_the_default_dtype_does_not_matter():
    x = torch.randn(16, 32)
    before = quantizer(fp8.NVFP4BlockScaling(), "grad_output").quantize(x, BOTH)
    torch.set_default_dtype(torch.float64)
    try:
        after = quantizer(fp8.NVFP4BlockScaling(), "grad_output").quantize(x, BOTH)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(before.tensors(), after.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("role, usage, shape, says", [
    ("input", ROWWISE, (16, 40), r"the input of linear 'fc1' to have a multiple of 16 columns.*\(16, 40\), which has 40.*to 48 columns"),
    ("input", COLUMNWISE, (2, 7, 32), r"multiple of 16 rows.*\(2, 7, 32\), which has 14: .*to 16 rows"),
    ("weight", ROWWISE, (24, 32), r"the weight of linear 'fc1'.* 16 rows.*which has 24"),
    ("grad_output", BOTH, (16, 8), r"grad_output of linear 'fc1'.*16 columns"),
])  # fmt: skip
def test_what_it_cannot_cut(role, usage, shape, says):
    made = quantizer(fp8.NVFP4BlockScaling(), role, "fc1")
    with pytest.raises(ValueError, match=says):
        made.quantize(torch.randn(shape), usage)
    if made.state_names:
        assert made.arrived == -1, "what is refused was recorded"


def test_rows_that_no_product_sums_over_may_be_any():
    assert quantizer(PLAIN).quantize(torch.randn(7, 32), ROWWISE).rowwise_data.shape == (7, 16)


def test_a_place_of_another_layout_is_refused():
    """Transformed values do not go where nothing says that they are."""
    x = torch.randn(16, 32)
    plain = quantizer(fp8.NVFP4BlockScaling(disable_rht=True))
    with pytest.raises(ValueError, match=r"out=.*expected a place for"):
        quantizer(PLAIN).quantize(x, BOTH, plain.quantize(x, BOTH))


@pytest.mark.parametrize("given, error, says", [
    (dict(disable_rth=True), TypeError, "unexpected keyword argument 'disable_rth'"),
    (dict(disable_rht=1), TypeError, "disable_rht: expected True or False, got 1"),
    (dict(row_scaled_activation=True), ValueError, "none for a row"),
    (dict(nvfp4_4over6="inputs"), ValueError, "expected 'none' or 'weights' or .*got 'inputs'"),
    (dict(nvfp4_4over6="all"), ValueError, "disable_rht=True with 'all'"),
    (dict(nvfp4_4over6="weights", nvfp4_4over6_err_mode="mse"), ValueError, "'MAE' or 'MSE'"),
    (dict(nvfp4_4over6_err_mode="MSE"), ValueError, "nothing without nvfp4_4over6"),
    (dict(nvfp4_4over6_e4m3_use_256="none"), ValueError, "expected all, got none"),
    (dict(fp4_format=fp8.Format.E4M3), ValueError, "fp4_format: expected Format.E2M1"),
    (dict(fp4_format="E2M1"), TypeError, "expected Format.E2M1, got"),
    (dict(fp8_format=fp8.Format.HYBRID), ValueError, "scales of blocks are E4M3"),
    (dict(fp8_format=fp8.Format.E2M1), ValueError, "expected an FP8 format"),
    (dict(fp8_dpa=True), ValueError, "no op; expected False"),
    (dict(backward_override="none"), ValueError, "backward_override must be one of"),
])  # fmt: skip
def test_what_is_no_recipe(given, error, says):
    with pytest.raises(error, match=says):
        fp8.NVFP4BlockScaling(**given)


def test_other_recipes_refuse_fp4():
    with pytest.raises(ValueError, match=r"fp8_format: expected an FP8 format, got Format.E2M1"):
        fp8.Float8CurrentScaling(fp8_format=fp8.Format.E2M1)
    with pytest.raises(ValueError, match=r"expected signs=None with square=True"):
        fp8.NVFP4Quantizer(square=True, signs=SIGNS)
    with pytest.raises(ValueError, match=r"expected four_over_six=None, 'MAE' or 'MSE', got True"):
        fp8.NVFP4Quantizer(four_over_six=True)
    with pytest.raises(ValueError, match=r"448, or 256 with four_over_six, got 256"):
        fp8.NVFP4Quantizer(most_of_scales=256)


# In chains


def chain(seed=0):
    torch.manual_seed(seed)
    return opfuse.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 64))


def step(model, x, recipe="nvfp4", again=False):
    leaf = x.clone().requires_grad_()
    with opfuse.autocast(recipe):
        if again:
            y = torch.utils.checkpoint.checkpoint(
                model, leaf, use_reentrant=False, context_fn=opfuse.checkpoint_contexts
            )
        else:
            y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def batch(seed):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def test_each_step_draws_anew_and_a_checkpoint_draws_the_same():
    """Also in a process with another seed; only tensors and bytes are saved."""
    model = chain()
    first = step(model, batch(0))
    assert not same(first[1:], step(model, batch(0))[1:]), "two steps round alike"
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = chain(seed=5)
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3):
        assert same(step(model, batch(seed)), step(other, batch(seed)))
    assert same(step(chain(), batch(0)), first), "one seed gives one training"


def test_what_differs_in_its_last_bit_is_rounded_alike():
    """As the output of a fusion does: codes change where a value is at its threshold only."""
    dy = torch.randn(64, 64)
    near = torch.nextafter(dy, torch.full_like(dy, torch.inf))
    made = quantizer(fp8.NVFP4BlockScaling(), "grad_output")
    one, other = (made.quantize(tensor, BOTH).dequantize() for tensor in (dy, near))
    assert (one != 0).any() and ((one - other).abs() > 1e-5).float().mean() < 1e-3


def test_layers_with_names_draw_numbers_of_their_own():
    model = opfuse.assign_names(chain())
    step(model, batch(0))
    state = model.state_dict()
    seeds = [value.item() for key, value in state.items() if key.endswith("seed")]
    assert len(seeds) == len(set(seeds)) == 2


def test_recomputation_and_other_random_numbers_change_nothing():
    """Neither activation checkpointing nor draws of torch's own generator move a bit."""
    runs = []
    for again in (False, True):
        model = chain()
        runs.append([])
        for seed in range(3):
            torch.rand(1 + again)
            runs[-1] += step(model, batch(seed), again=again)
        runs[-1] += [v for k, v in model.state_dict().items() if "quantizers" in k]
    assert same(*runs)


def test_torchs_generator_is_left_alone():
    model = chain()
    before = torch.get_rng_state()
    step(model, batch(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_makes_steps_repeatable(override):
    """Nothing is drawn, since no gradient is quantized."""
    model, recipe = chain(), fp8.NVFP4BlockScaling(backward_override=override)
    assert same(step(model, batch(0), recipe), step(model, batch(0), recipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_of_torch_autocast(dtype):
    model = chain()
    with torch.autocast("cpu", dtype):
        found = step(model, batch(0))
    plain = step(chain(), batch(0), fp8.NVFP4BlockScaling(disable_stochastic_rounding=True))
    assert found[0].dtype == dtype
    for got, near in zip(found, plain, strict=True):
        assert (got.float() - near).norm() < 0.4 * near.norm()


def test_frozen_parameters_and_no_grad():
    model = chain()
    model[0].weight.requires_grad_(False)
    leaf = batch(0).requires_grad_()
    with opfuse.autocast("nvfp4"):
        y = model(leaf)
    y.sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    with torch.no_grad(), opfuse.autocast("nvfp4"):
        assert torch.equal(model(leaf), y)


def test_compiled_without_stochastic_rounding():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = opfuse.Sequential(ops.BasicLinear(64, 64))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with opfuse.plugins.using("fp8"):
        assert same(step(compiled, batch(0), PLAIN), step(model, batch(0), PLAIN))
        with pytest.raises(Exception, match=r"advances once per step"):
            step(compiled, batch(0), fp8.NVFP4BlockScaling())


def drawn_for_all(role):
    return fp8.StochasticNVFP4Quantizer()


def test_in_a_recipe_of_ones_own():
    """It counts steps there too, next to delayed scales."""
    recipe = fp8.CustomRecipe(drawn_for_all, name="all drawn")
    made = [fp8.StochasticNVFP4Quantizer(), fp8.DelayedQuantizer(torch.float8_e4m3fn)]
    made[0].quantize(torch.randn(16, 16), BOTH)
    recipe.update(made, None)
    assert made[0].step == 1 and made[0].arrived == -1
    recipe.update(made, None)
    assert made[0].step == 1, "a step without a cast is counted"
    step(chain(), batch(0), recipe)


def test_fused_and_separate_steps_agree():
    """With every plugin that is installed, over three steps: rounded alike, up to single codes."""
    runs = []
    for selection in (None, "fp8"):
        model = chain()
        with opfuse.plugins.using(selection):
            runs.append([step(model, batch(seed)) for seed in range(3)])
    for fused, separate in zip(*runs, strict=True):
        for got, expected in zip(fused, separate, strict=True):
            assert (got - expected).norm() <= 0.05 * expected.norm()


def test_an_overflow_reaches_the_grad_scaler():
    """A block with infinity becomes NaN, and the step is skipped."""
    model = chain()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    optimizer, skipped = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(25):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16), opfuse.autocast("nvfp4"):
            y = model(batch(0))
        scaler.scale(y.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(same(before, model.parameters()))
        assert all(param.isfinite().all() for param in model.parameters())
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)


def test_a_regression_trains_nearly_as_far_as_unquantized():
    """A small regression gets nearly as far as without quantization."""
    losses = {}
    for recipe in (None, "nvfp4"):
        model = chain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        target = torch.tanh(batch(7) @ torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) / 8)  # fmt: skip
        for _ in range(60):
            with opfuse.autocast(recipe) if recipe else opfuse.autocast(False):
                loss = (model(batch(7)) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[recipe] = loss.item()
    assert losses[None] < losses["nvfp4"] + 1e-3 and losses["nvfp4"] < 0.15 * target.square().mean()


def test_exact_has_the_scales_of_the_format():
    """The table of the reference is that of torch."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(codes.double().numpy(), nv.E4M3)
    assert exact.E4M3 == "e4m3"
