"""The quantizers and the fusions against the contract."""

import dataclasses

import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse.testing import FusionSuite, QuantizerSuite
from opfuse.testing.machine import is_interpreting


def e4m3(role):
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


NUMBERS = ("codes", "output", "gradients", "saved_state", "recipe", "magnitude", "nan_and_inf")
OF_NUMBERS = tuple(f"-{check}]" for check in (*NUMBERS, "autocast", "unmodified_inputs", "errors"))
"""The checks that look at what kernels compute."""


class TestFusions(FusionSuite):
    """Under one recipe with state; ``test_kernels.py`` compares the codes of all quantizers."""

    plugin = "fp8"
    recipes = (fp8.DelayedScaling(),)
    inexact = dict.fromkeys(
        ("activation+cast", "norm+cast", "add+norm+cast", "cast+activation"),
        "device functions are torch's but for the last bit",
    )
    most_rows = 300  # a tile takes the interpreter milliseconds

    @classmethod
    def chains(cls, subject, device):
        """A few of the activations; one structure where the interpreter takes seconds for each."""
        found = super().chains(subject, device)
        some = found.all[:: 1 + len(found.all) // (2 if is_interpreting() else 8)]
        if not is_interpreting():
            return dataclasses.replace(found, all=some)
        one = {"plain": found.plain[:1], "models": found.models[:1]}
        return dataclasses.replace(found, all=some, **one, residual=found.residual[:1])

    @pytest.fixture(autouse=True)
    def _twins(self, request):
        """The twins on a CPU, the kernels where they are interpreted; the twins refuse nothing."""
        if is_interpreting() and not request.node.name.endswith(OF_NUMBERS):
            pytest.skip("it says nothing of a kernel: it runs where nothing is interpreted")
        wanted = not is_interpreting() and not request.node.name.endswith("-refusals]")
        with opfuse.options(**{"fp8.twins": wanted}):
            yield
