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


class TestFusions(FusionSuite):
    """Under one recipe with state; ``test_fused.py`` compares the codes of all quantizers."""

    plugin = "fp8"
    recipes = (fp8.DelayedScaling(),)
    most_rows = 300  # a tile takes the interpreter milliseconds

    @classmethod
    def chains(cls, subject, device):
        """A few of the activations: the other plugins' tests have them all."""
        found = super().chains(subject, device)
        return dataclasses.replace(found, all=found.all[:: 1 + len(found.all) // 8])

    @pytest.fixture(autouse=True)
    def _twins(self, request):
        """The twins on a CPU, the kernels where they are interpreted; the twins refuse nothing."""
        wanted = not is_interpreting() and not request.node.name.endswith("-refusals]")
        with opfuse.options(**{"fp8.twins": wanted}):
            yield
