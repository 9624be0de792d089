"""The plugin against the contract: with the twins, and in Triton's interpreter with the kernels."""

import dataclasses

import pytest

import opfuse
from opfuse.testing import FusionSuite, machine


@pytest.mark.costly(0.15, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "rope"
    most_rows = 8

    @classmethod
    def chains(cls, subject, device):
        """The shortest and the longest, and one more like the longest; thorough: all."""
        found = super().chains(subject, device)
        if cls.thorough:
            return found
        shortest, *_, longest = sorted(found.plain, key=lambda case: len(case.ops))
        alike = [c for c in found.all if [o.cls for o in c.ops] == [o.cls for o in longest.ops]]
        few = {"plain": (shortest, longest), "all": tuple(dict.fromkeys([longest, *alike[:1]]))}
        few |= {"models": found.models[-1:], "quantized": found.quantized[:1]}
        if machine.is_interpreting():
            few |= {"plain": (longest,), "all": (longest,), "models": ()}
        return dataclasses.replace(found, **few)

    @pytest.fixture(autouse=True)
    def _where_no_kernel_runs(self, request):
        """Twins stand in for the kernels."""
        if machine.is_interpreting() and request.node.originalname == "test_plugin":
            pytest.skip("its processes do not interpret: the other tier has run them")
        with opfuse.options(**{"rope.twins": not machine.is_interpreting()}):
            yield


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
