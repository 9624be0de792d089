"""The fusions against the contract."""

import dataclasses
from typing import ClassVar

import opfuse_fp8 as fp8
import pytest
from opfuse_fp8 import delayed

import opfuse
from opfuse.testing import FusionSuite, Op
from opfuse.testing.machine import is_interpreting

if is_interpreting():
    from opfuse_fp8.kernels import scales

NUMBERS = ("codes", "output", "gradients", "saved_state", "recipe", "magnitude", "nan_and_inf")
OF_NUMBERS = (*NUMBERS, "autocast", "unmodified_inputs", "errors")
"""The checks that look at what kernels compute."""


INEXACT = dict.fromkeys(
    ("activation+cast", "norm+cast", "add+norm+cast", "cast+activation"),
    "device functions are torch's but for the last bit",
)


class Casts(FusionSuite):
    """Cases for casts, under one recipe; ``test_kernels.py`` compares the codes of all."""

    plugin = "fp8"
    inexact = INEXACT
    recipes = (fp8.DelayedScaling(),)
    most_rows = 300  # a tile takes the interpreter milliseconds

    @classmethod
    def chains(cls, subject, device):
        """A few of the activations and places; where each takes the interpreter seconds, one structure.

        Widths of real models say more of kernels than of twins, which are PyTorch's operations.
        """
        found = super().chains(subject, device)
        some = found.all[:: 1 + len(found.all) // (2 if is_interpreting() else 8)]
        if not is_interpreting():
            few = {"models": found.models[::3], "residual": found.residual[::4]}
            return dataclasses.replace(found, all=some, **few)
        one = {"plain": found.plain[:1], "models": found.models[:1]}
        return dataclasses.replace(found, all=some, **one, residual=found.residual[:1])


@pytest.mark.costly(0.06, always=("output", "gradients"), each=8)
class TestConformance(FusionSuite):
    """Products under every recipe, casts under one."""

    plugin = "fp8"
    inexact = INEXACT
    examples: ClassVar = {
        "recomputed from codes": [[Op(opfuse.ops.GELU, cache_quantized_input=True)]]
    }
    limits: ClassVar = dict.fromkeys(
        ("recomputed from codes: gradients", "recomputed from codes: recompute"),
        "what the next linear keeps is computed from codes",
    )

    @classmethod
    def chains(cls, subject, device):
        """See :class:`Casts`. Made where nothing is refused, whichever check asks first."""
        with opfuse.options(**{"fp8.products": "native", "fp8.twins": not is_interpreting()}):
            if "cast" in subject.name:
                return Casts.chains(subject, device)
            return super().chains(subject, device)

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, request, monkeypatch):
        """Products run in FP8 on a CPU too, and twins stand in; scales advance in PyTorch."""
        if is_interpreting():
            name, _, check = request.node.name.rpartition("-")
            if not ("cast" in name and check.rstrip("]") in OF_NUMBERS):
                pytest.skip("it says nothing of a kernel: it runs where nothing is interpreted")
            # test_delayed.py compares its kernel, which would run after each of thousands of calls
            monkeypatch.setattr(scales, "advance", delayed.advance)
        with opfuse.options(**{"fp8.products": "native", "fp8.twins": not is_interpreting()}):
            yield
