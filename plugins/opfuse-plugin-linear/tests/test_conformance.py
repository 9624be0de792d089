"""The plugin against the contract."""

import opfuse_linear.conditions
import pytest

from opfuse import testing
from opfuse.ops import libraries
from opfuse.testing import FusionSuite
from opfuse.testing.machine import is_interpreting

TRITON = "forward", "linear+bias+activation"
"""The fusion whose product a kernel can compute."""


def as_large_as_the_matrices(target, facts):
    """A configuration for the interpreter: few programs, no larger than what they multiply."""
    from opfuse_triton import Config

    sizes = ("BLOCK_M", "rows", 128), ("BLOCK_N", "features", 512), ("BLOCK_K", "depth", 512)
    tile = {name: min(max(16, 1 << (facts[of] - 1).bit_length()), most) for name, of, most in sizes}
    return [Config({**tile, "GROUP": 8, "PARTS": 2})]


@pytest.mark.costly(0.12, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "linear"
    most_rows = 8  # other tests have products of more

    @pytest.fixture(autouse=True)
    def _even_where_it_does_not_pay(self, monkeypatch):
        """A backward fusion that brings nothing on this CPU must give the right numbers all the same."""
        monkeypatch.setattr(opfuse_linear.conditions, "adds_nothing", lambda env: False)

    @pytest.fixture(autouse=True)
    def _interpreted_in_large_tiles(self, monkeypatch, request):
        """In the interpreter only what launches kernels, with few programs that do much."""
        if not is_interpreting():
            yield
            return
        params = getattr(getattr(request.node, "callspec", None), "params", {})
        subject = params.get("subject")
        if "plugin_check" in params or (subject and (subject.passes, subject.name) != TRITON):
            pytest.skip("it launches no kernel")
        from opfuse_linear import gemm

        monkeypatch.setattr(gemm.KERNEL, "_configs", as_large_as_the_matrices)
        yield


ELSEWHERE = ("output", "gradients", "aliasing", "grad_input", "unmodified_gradients", "nan_and_inf")


@pytest.mark.costly(2)
@pytest.mark.skipif(is_interpreting(), reason="it launches no kernel")
@pytest.mark.parametrize(
    ("passes", "name"),
    [
        ("forward", "linear"),
        ("forward", "linear+bias+add"),
        ("forward", "linear+scale+add"),
        ("backward", "linear+bias+activation"),
        ("backward", "linear+scale"),
        ("backward", "linear+add"),
    ],
)
def test_as_on_a_gpu_and_on_other_cpus(monkeypatch, passes, name):
    """The library that is the slower one here, and the scale of linear + scale in each product."""
    worth = libraries.is_worth_it
    monkeypatch.setattr(libraries, "is_worth_it", lambda dtype: not worth(dtype))
    monkeypatch.setattr(opfuse_linear.conditions, "scales_gradient", lambda env: False)
    monkeypatch.setattr(opfuse_linear.conditions, "adds_nothing", lambda env: False)
    subject = testing.find("linear", passes, name)
    chains = testing.make_chains(subject)
    for check in map(testing.CHECKS.get, ELSEWHERE):
        if passes in check.passes:
            outcome = testing.run_all(check, chains)
            assert outcome.failure is None and outcome.ran, str(outcome)
