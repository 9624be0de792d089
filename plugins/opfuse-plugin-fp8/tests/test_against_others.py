"""Casts against those of PyTorch, ml_dtypes and torchao, where they define the same thing."""

import warnings

import numpy as np
import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import casts

from opfuse import QuantizerRole
from opfuse.core.quantization import ROWWISE

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)
WHY_ML_DTYPES = "ml_dtypes is not installed: an independent cast of numpy, compared where it is"
WHY_TORCHAO = "torchao is not installed: a peer whose casts are compared where it is"


def every(dtype):
    """Every number of a 16 bit dtype."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return codes[codes.isfinite()]


def within(x, most):
    return x[x.abs() <= most]


def quantizer(recipe, role="input"):
    return fp8.make(recipe, QuantizerRole("linear", role), None)


# PyTorch


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("dtype", FP8)
def test_every_half_as_torch_casts_it(dtype, source):
    """In range; beyond it torch's versions differ, and a quantizer saturates."""
    x = within(every(source), torch.finfo(dtype).max)
    got = casts.cast(x, torch.ones(1), dtype)
    assert torch.equal(got.view(torch.uint8), x.to(dtype).view(torch.uint8))
    assert len(x) > 30000


def test_every_scale_of_mx_as_torch_reads_it():
    """A power of two for each exponent but 255, whose inverse is what values are multiplied by."""
    exponent = torch.arange(255, dtype=torch.uint8)
    scale = exponent.view(torch.float8_e8m0fnu).double()
    assert torch.equal(scale, torch.exp2(exponent.double() - 127))
    assert torch.equal(casts.e8m0_scale(exponent).double(), 1 / scale)


@pytest.mark.parametrize("dtype", FP8)
def test_scales_of_mx_cover_their_block(dtype):
    """As PyTorch's own cast to E8M0 has it where the wanted scale is a power of two."""
    wanted = torch.exp2(torch.arange(-120.0, 110.0))
    exponent = casts.e8m0_of(wanted * torch.finfo(dtype).max, dtype)
    assert torch.equal(exponent, wanted.to(torch.float8_e8m0fnu).view(torch.uint8))


# ml_dtypes


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("dtype", FP8)
def test_every_half_as_ml_dtypes_casts_it(dtype, source):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason=WHY_ML_DTYPES)
    x = within(every(source), torch.finfo(dtype).max)
    name = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}[dtype]
    expected = x.float().numpy().astype(getattr(ml_dtypes, name)).view(np.uint8)
    got = casts.cast(x, torch.ones(1), dtype)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("source", HALVES)
def test_every_half_in_fp4_as_ml_dtypes_casts_it(source):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason=WHY_ML_DTYPES)
    x = within(every(source), 6)
    x = x.float()
    codes = fp8.NVFP4Quantizer()._codes(x.abs(), 0) | x.signbit().to(torch.uint8) << 3
    expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(codes.numpy(), expected)


def test_every_scale_of_mx_as_ml_dtypes_reads_it():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason=WHY_ML_DTYPES)
    exponent = np.arange(255, dtype=np.uint8)
    scale = exponent.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    found = casts.e8m0_scale(torch.from_numpy(exponent)).double().numpy()
    np.testing.assert_array_equal(found, 1 / scale)


# torchao


def torchao(name):
    """One of its modules, which warns of extensions that are not built for this torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"torchao.{name}", reason=WHY_TORCHAO)


def draw(dtype, rows=64, columns=256):
    """Values of many magnitudes, none of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x = x * 2.0 ** torch.randint(-6, 6, x.shape, generator=generator)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_current_scaling_as_torchao_has_it(role, power_of_2, dtype):
    utils = torchao("float8.float8_utils")
    x = draw(dtype)
    recipe = fp8.Float8CurrentScaling(use_power_2_scales=power_of_2)
    made = quantizer(recipe, role).quantize(x, ROWWISE)
    code = made.rowwise_data.dtype
    scale = utils.tensor_to_scale(x, code, round_scales_to_power_of_2=power_of_2)
    expected = utils.to_fp8_saturated(x.float() * scale, code)
    assert made.scale_inv.item() == scale.reciprocal().item()
    assert torch.equal(made.rowwise_data.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_mx_as_torchao_has_it(role, dtype):
    """In the mode that rounds the exponent up."""
    mx = torchao("prototype.mx_formats.mx_tensor")
    x = draw(dtype)
    recipe = fp8.MXFP8BlockScaling(fp8_format=fp8.Format.HYBRID)
    made = quantizer(recipe, role).quantize(x, ROWWISE)
    mode = mx.ScaleCalculationMode.RCEIL
    scale, data = mx.to_mx(x, made.rowwise_data.dtype, 32, mode)
    found = made.rowwise_scale_inv.view(torch.uint8)
    assert torch.equal(found, scale.view(torch.uint8).view(found.shape))
    assert torch.equal(made.rowwise_data.view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_as_torchao_has_it(dtype):
    """To the bit where scales are powers of two.

    Elsewhere it divides in another order: the scales of blocks may be a step off, and with them
    the codes.
    """
    peer = torchao("prototype.mx_formats.nvfp4_tensor")
    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(-24, 25, (64, 256), generator=generator) / 4.0
    exact[:, ::16] = 6.0
    exact = exact * 448 / 2**6
    for x, most in ((exact.to(dtype), 0.0), (draw(dtype), 2e-3)):
        made = quantizer(fp8.NVFP4BlockScaling()).quantize(x, ROWWISE)
        over_all = peer.per_tensor_amax_to_scale(x.abs().amax().reshape(1))
        scale, data = peer.nvfp4_quantize(x, per_tensor_scale=over_all)
        torch.testing.assert_close(made.rowwise_tensor_scale_inv, over_all, rtol=1e-6, atol=0)
        found = made.rowwise_scale_inv
        scales = (
            found.float() != scale.view(torch.float8_e4m3fn).float().view(found.shape)
        ).float()
        codes = (made.rowwise_data.view(torch.uint8) != data.view(torch.uint8)).float()
        assert scales.mean() <= most and codes.mean() <= most, (scales.mean(), codes.mean())
