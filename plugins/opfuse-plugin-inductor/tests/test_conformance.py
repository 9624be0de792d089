"""The plugin against the contract."""

import dataclasses

import pytest
from opfuse_inductor import kernels

import opfuse
from opfuse.testing import FusionSuite


@pytest.mark.costly(0.2, always=("output", "gradients"), each=10)
class TestConformance(FusionSuite):
    """Hundreds of chains: their graphs run as they were traced, since to compile each would take an hour.

    ``test_kernels.py`` does the same with a dozen chains, compiled.
    """

    plugin = "inductor"

    @classmethod
    def chains(cls, subject, device):
        """A few of those as wide as tiles, which these graphs do not have."""
        found = super().chains(subject, device)
        return found if cls.thorough else dataclasses.replace(found, tiles=found.tiles[::16])

    @pytest.fixture(autouse=True)
    def _as_traced_and_however_small(self, monkeypatch):
        """The checks share what was traced, which takes most of the time."""
        monkeypatch.setattr(kernels, "CACHE_SIZE", 1 << 16)
        with opfuse.options(
            **{"inductor.backend": "eager", "inductor.min_elements": 0, "inductor.min_passes": 0}
        ):
            yield
