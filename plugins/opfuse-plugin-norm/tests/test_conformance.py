"""The plugin against the contract: with the twins, and in Triton's interpreter with the kernels."""

import dataclasses

import pytest
import torch
from opfuse_triton.norms import drop as philox
from opfuse_triton.norms.drop import Drop

import opfuse
from opfuse.testing import FusionSuite, machine

_torchs_dropout = torch.native_dropout


def _drawn(x, p, train):
    """torch's dropout, with the numbers that the fusions draw for the same state of the generator."""
    if not (train and 0 < p < 1):
        return _torchs_dropout(x, p, train)
    factors = philox.factors(x.shape, Drop(philox.draw_seed(x.device), p))
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * factors).to(x.dtype), factors > 0


@pytest.mark.costly(0.15, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "norm"

    @pytest.fixture(autouse=True)
    def _where_no_kernel_runs(self, request, monkeypatch):
        """Twins stand in for the kernels; on a GPU of one multiprocessor, few programs are interpreted."""
        monkeypatch.setattr(torch, "native_dropout", _drawn)
        if not machine.is_interpreting():
            with opfuse.options(**{"norm.twins": True, "norm.by_output": "always"}):
                yield
            return
        if request.node.originalname == "test_plugin":
            pytest.skip("its processes do not interpret: the other tier has run them")
        from opfuse_triton import TARGETS, target

        with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
            yield


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
