"""Codes and scales of every recipe against numpy, to the bit."""

import pathlib
import sys

import numpy as np
import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import casts

from opfuse import QuantizerRole
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import exact  # from the folder just added

NAMES = {torch.float8_e4m3fn: exact.E4M3, torch.float8_e5m2: exact.E5M2}
ROLES = {kind: QuantizerRole("linear", kind) for kind in ("input", "weight", "grad_output")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
USAGES = (ROWWISE, COLUMNWISE, BOTH)


def tensors(dtype, rows=64, columns=96):
    """Tensors of every kind, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    info = torch.finfo(dtype)
    wide = dtype == torch.float64
    fp32 = torch.finfo(torch.float32) if wide else info  # in which scales are computed
    one_hot = torch.zeros(rows, columns)
    one_hot[1, 37] = -2.5
    spread = x * 2.0 ** torch.randint(-12, 12, x.shape, generator=generator)
    special = x.clone()
    special[1, 5], special[-1, -7], special[rows // 2, 0] = torch.inf, -torch.inf, torch.nan
    nan = x.clone()
    nan[::7, ::5] = torch.nan
    found = {
        "random": x,
        "spread": spread,
        "zeros": torch.zeros(rows, columns),
        "minus zeros": -torch.zeros(rows, columns),
        "one hot": one_hot,
        "huge": x.clamp(-1, 1).to(dtype) * info.max,
        "tiny": x * fp32.tiny,
        "subnormal": x.sign() * fp32.smallest_normal / 16,
        "inf and NaN": special,
        "NaN": nan,
        "all NaN": torch.full((rows, columns), torch.nan),
        "all inf": torch.full((rows, columns), torch.inf),
    }
    if wide:  # beyond fp32, and finite; next to what fp32 holds
        found["too large"] = x.double() * 10.0 ** torch.randint(
            30, 42, x.shape, generator=generator
        )
        found["too large"][0, 1], found["too large"][2, 3] = torch.inf, torch.nan
        found["edge"] = x.double().sign() * torch.finfo(torch.float32).max * (1 + 1e-9)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def as_numpy(tensor):
    return (
        exact.in_fp32(tensor.numpy()) if tensor.dtype == torch.float64 else tensor.float().numpy()
    )


def bits(tensor):
    """Codes as bytes. A NaN has a sign, which no format promises."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    codes = tensor.view(torch.uint8).numpy().copy()
    name = NAMES.get(tensor.dtype)
    if name:
        first = 0x7F if name == exact.E4M3 else 0x7D
        codes[(codes & 0x7F) >= first] = exact.NAN[name]
    return codes


def unsigned_nan(codes, name):
    codes = codes.copy()
    codes[(codes & 0x7F) >= (0x7F if name == exact.E4M3 else 0x7D)] = exact.NAN[name]
    return codes


def quantized(recipe, role, tensor, usage):
    quantizer = fp8.make(recipe, ROLES[role], tensor.device)
    made = quantizer.quantize(tensor, usage)
    assert made.copies == usage and (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    return made


def compare(made, name, rowwise, columnwise):
    """A tensor's copies with the codes and scales of numpy."""
    for way, expected in (("rowwise", rowwise), ("columnwise", columnwise)):
        data = getattr(made, f"{way}_data")
        if data is None:
            continue
        codes, scales = expected
        np.testing.assert_array_equal(bits(data), unsigned_nan(codes, name))
        if scales is not None:
            np.testing.assert_array_equal(bits(getattr(made, f"{way}_scale_inv")), scales)


@pytest.mark.parametrize("name", list(NAMES.values()))
def test_the_table_holds_every_code(name):
    dtype = {value: key for key, value in NAMES.items()}[name]
    table = exact.positive_values(name)
    codes = torch.arange(len(table), dtype=torch.uint8).view(dtype)
    assert codes.double().tolist() == table.tolist()


@pytest.mark.parametrize("dtype", NAMES)
def test_rounding_of_values_between_codes(dtype):
    """Every code, the middle of each pair, its neighbours, and what is beyond; as torch casts."""
    table = exact.positive_values(NAMES[dtype])
    middles = (table[1:] + table[:-1]) / 2
    points = np.concatenate([table, middles]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, 1e9)])
    points = np.concatenate([points, -points]).astype(np.float32)
    x = torch.from_numpy(points)
    got = casts.cast(x, torch.ones(1), dtype)
    np.testing.assert_array_equal(bits(got), exact.cast(points, 1.0, NAMES[dtype]))
    inside = x.abs() <= torch.finfo(dtype).max
    assert torch.equal(got[inside].view(torch.uint8), x.to(dtype)[inside].view(torch.uint8))
    beyond = casts.cast(torch.tensor([1e30, -1e30]), torch.ones(1), dtype).float()
    assert beyond.tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_current_scaling_gives_the_exact_codes_and_scale(role, power_of_2, dtype):
    recipe = fp8.Float8CurrentScaling(use_power_2_scales=power_of_2)
    name = exact.E5M2 if role == "grad_output" else exact.E4M3
    for kind, x in tensors(dtype).items():
        values = as_numpy(x)
        scale = exact.scale(exact.amax(values), name, power_of_2)
        codes = exact.cast(values, scale, name)
        for usage in USAGES:
            made = quantized(recipe, role, x, usage)
            assert made.scale_inv.item() == np.float32(1) / scale, kind
            compare(made, name, (codes, None), (codes.T, None))


@pytest.mark.costly(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f32_scales", [False, True])
@pytest.mark.parametrize("role", ["input", "weight"])  # gradients have an input's blocks
def test_block_scaling_gives_the_exact_codes_and_scales(role, f32_scales, dtype):
    recipe = fp8.Float8BlockScaling(use_f32_scales=f32_scales)
    block = (128, 128) if role == "weight" else (1, 128)
    for rows, columns in ((37, 256), (131, 130), (3, 40)):
        for x in tensors(dtype, rows, columns).values():
            values = as_numpy(x)
            copies = []
            for matrix in (values, values.T):
                rule = not f32_scales, min(torch.finfo(dtype).max, float(exact.FP32_MAX))
                codes, inverse = exact.by_blocks(matrix, block, exact.E4M3, *rule)
                if block == (1, 128):
                    inverse = inverse.T
                else:
                    inverse = np.pad(inverse, ((0, 0), (0, -inverse.shape[1] % 4)))
                copies.append((codes, inverse))
            for usage in USAGES:
                compare(quantized(recipe, role, x, usage), exact.E4M3, *copies)


@pytest.mark.costly(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("square", [False, True])
def test_mx_scaling_gives_the_exact_codes_and_scales(square, role, dtype):
    hybrid = role == "grad_output"
    fmt = fp8.Format.HYBRID if hybrid else fp8.Format.E4M3
    recipe = fp8.MXFP8BlockScaling(fp8_format=fmt, enable_2d_quantization=square)
    name = exact.E5M2 if hybrid else exact.E4M3
    tall = 32 if square and role == "weight" else 1
    for x in tensors(dtype, 64, 96).values():
        values = as_numpy(x)
        copies = [exact.by_mx(matrix, name, tall) for matrix in (values, values.T)]
        for usage in USAGES:
            compare(quantized(recipe, role, x, usage), name, *copies)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-block", "mxfp8"])
def test_codes_do_not_depend_on_shape_or_layout(recipe):
    """Other than matrices, not contiguous, empty; the codes are those of the matrix."""
    made = opfuse_recipe(recipe)
    x = torch.randn(2, 32, 64)
    for role in ROLES:
        matrix = quantized(made, role, x.reshape(64, 64), BOTH)
        for same in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            got = quantized(made, role, same, BOTH)
            for one, other in zip(got.tensors(), matrix.tensors(), strict=True):
                assert bits(one.reshape(-1)).tolist() == bits(other.reshape(-1)).tolist()
        empty = quantized(made, role, torch.empty(0, 64), BOTH)
        assert empty.dequantize().shape == (0, 64)


def opfuse_recipe(name):
    return fp8.opfuse_recipes()[name]()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("usage", USAGES)
def test_into_a_given_tensor(recipe, usage):
    made = opfuse_recipe(recipe)
    x = torch.randn(64, 128)
    out = quantized(made, "input", torch.zeros(64, 128), usage)
    quantizer = fp8.make(made, ROLES["input"], x.device)
    expected = [
        None if t is None else bits(t).copy() for t in quantizer.quantize(x, usage).tensors()
    ]
    assert quantizer.quantize(x, usage, out) is out
    for got, right in zip(out.tensors(), expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            np.testing.assert_array_equal(bits(got), right)
    with pytest.raises(ValueError, match=r"out=.*expected a place for"):
        quantizer.quantize(x[:32], usage, out)


def test_mx_refuses_what_it_cannot_cut():
    with pytest.raises(ValueError, match=r"multiple of 32 rows.*\(7, 64\).*to 32 rows"):
        quantized(opfuse_recipe("mxfp8"), "input", torch.randn(7, 64), BOTH)
    with pytest.raises(ValueError, match=r"multiple of 32 columns.*\(32, 50\).*to 64 columns"):
        quantized(opfuse_recipe("mxfp8"), "input", torch.randn(32, 50), ROWWISE)
