"""The quantizers and the fusions against the contract."""

import dataclasses

import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse.testing import FusionSuite, QuantizerSuite
from opfuse.testing.machine import is_interpreting


NUMBERS = ("codes", "output", "gradients", "saved_state", "recipe", "magnitude", "nan_and_inf")
OF_NUMBERS = tuple(f"-{check}]" for check in (*NUMBERS, "autocast", "unmodified_inputs", "errors"))
"""The checks that look at what kernels compute."""


class Casts(FusionSuite):
    """Cases for casts, under one recipe; ``test_kernels.py`` compares the codes of all."""

    plugin = "fp8"
    recipes = (fp8.DelayedScaling(),)
    most_rows = 300  # a tile takes the interpreter milliseconds

    @classmethod
    def chains(cls, subject, device):
        """A few of the activations; one structure where the interpreter takes seconds for each."""
        found = super().chains(subject._replace(inexact=subject.name in INEXACT), device)
        some = found.all[:: 1 + len(found.all) // (2 if is_interpreting() else 8)]
        if not is_interpreting():
            return dataclasses.replace(found, all=some)
        one = {"plain": found.plain[:1], "models": found.models[:1]}
        return dataclasses.replace(found, all=some, **one, residual=found.residual[:1])


INEXACT = dict.fromkeys(
    ("activation+cast", "norm+cast", "add+norm+cast", "cast+activation"),
    "device functions are torch's but for the last bit",
)


class TestConformance(FusionSuite):
    """Products under every recipe, casts under one."""

    plugin = "fp8"
    inexact = INEXACT

    @classmethod
    def chains(cls, subject, device):
        """See :class:`Casts`."""
        suite = Casts if "cast" in subject.name else super()
        return suite.chains(subject, device)

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, request):
        """Products run in FP8 on a CPU too, and twins stand in; there alone they refuse nothing."""
        name = request.node.name
        if is_interpreting() and not ("cast" in name and name.endswith(OF_NUMBERS)):
            pytest.skip("it says nothing of a kernel: it runs where nothing is interpreted")
        refusing = name.endswith("-refusals]")
        products, twins = "auto" if refusing else "native", not is_interpreting() and not refusing
        with opfuse.options(**{"fp8.products": products, "fp8.twins": twins}):
            yield


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
