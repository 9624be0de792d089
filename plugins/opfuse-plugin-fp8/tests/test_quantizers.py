"""The quantizers against the contract."""

import opfuse_fp8 as fp8
import torch

from opfuse.testing import QuantizerSuite


def e4m3(role):
    """A quantizer for any role."""
    return fp8.CurrentQuantizer(torch.float8_e4m3fn)


class TestTensors(QuantizerSuite):
    """E5M2 has two bits of mantissa."""

    recipes = (
        fp8.DelayedScaling(),
        fp8.DelayedScaling(margin=2, amax_history_len=1, amax_compute_algo="most_recent"),
        fp8.Float8CurrentScaling(),
        fp8.Float8CurrentScaling(use_power_2_scales=True),
    )
    rtol = 2**-3


class TestBlocks(QuantizerSuite):
    recipes = (
        fp8.Float8BlockScaling(),
        fp8.Float8BlockScaling(use_f32_scales=True),
        fp8.MXFP8BlockScaling(),
        fp8.MXFP8BlockScaling(enable_2d_quantization=True),
        fp8.CustomRecipe(e4m3, name="e4m3 for all"),
    )


class TestFP4(QuantizerSuite):
    """One bit of mantissa: between 4 and 6 a value may be a sixth of the largest one off."""

    recipes = (
        fp8.NVFP4BlockScaling(disable_stochastic_rounding=True),
        fp8.NVFP4BlockScaling(
            disable_rht=True, disable_2d_quantization=True, disable_stochastic_rounding=True
        ),
    )
    rtol = 2**-2
    atol = 2**-3


class TestDrawnFP4(QuantizerSuite):
    """Rounded away from the nearest, a value may be twice as far off."""

    recipes = (fp8.NVFP4BlockScaling(), fp8.NVFP4BlockScaling(disable_rht=True))
    rtol = 2**-2
    atol = 2**-2
