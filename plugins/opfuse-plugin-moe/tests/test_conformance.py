"""The plugin against the contract; where Triton interprets, with the kernels."""

import dataclasses
from unittest import mock

import pytest

from opfuse.ops import GroupedLinear
from opfuse.testing import FusionSuite, Op, generate, machine


def as_large_as_the_matrices(rows, target, facts):
    """A configuration for the interpreter: few programs, no larger than what they multiply."""
    from opfuse_triton import Config

    sizes = ("BLOCK_M", "rows", 128), ("BLOCK_N", "features", 512), ("BLOCK_K", "depth", 512)
    known = [(name, facts.get(of, 64), most) for name, of, most in sizes]
    return [Config({n: min(max(16, 1 << (size - 1).bit_length()), m) for n, size, m in known})]


def two_groups(width):
    """As few as there can be; ``test_kernels`` has more, and empty ones."""
    return Op(GroupedLinear, 2, width, width + width // 2)


@pytest.mark.costly(0.25, always=("output", "gradients"), each=16)
class TestConformance(FusionSuite):
    plugin = "moe"
    most_rows = 8
    makers = {GroupedLinear: two_groups} if machine.is_interpreting() else {}
    limits = (
        {
            f"{name}: aliasing": "the gradients of all groups are one tensor, as torch's are on a GPU"
            for name in ("grouped gradients", "activation+grouped gradients")
        }
        if machine.is_interpreting()
        else {}
    )

    @classmethod
    def chains(cls, subject, device):
        """Where kernels are interpreted, few: ``test_kernels`` has shapes and dtypes."""
        if cls.thorough or not machine.is_interpreting():
            return super().chains(subject, device)
        with mock.patch.multiple(generate, TILES=(), WIDTHS_OF_MODELS=()):
            found = super().chains(subject, device)
        few = {"all": (*found.plain, found.all[-1]), "quantized": found.quantized[:1]}
        return dataclasses.replace(found, **few)

    @pytest.fixture(autouse=True)
    def _few_programs(self, request, monkeypatch):
        """On a GPU of one multiprocessor, few programs are interpreted."""
        if not machine.is_interpreting():
            yield
            return
        if request.node.originalname == "test_plugin":
            pytest.skip("its processes do not interpret: the other tier has run them")
        from opfuse_moe.kernels import tiles

        params = getattr(getattr(request.node, "callspec", None), "params", {})
        alone = "subject" in params and "activation" not in params["subject"].name
        if alone and params["fusion_check"] in ("condition", "requires_grad"):
            pytest.skip("as with an activation, which is tested")
        from opfuse_triton import TARGETS, target

        monkeypatch.setattr(tiles, "_fitting", as_large_as_the_matrices)
        with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
            yield


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
