"""The suite for fusions with collectives, that a plugin's tests subclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from ..core.context_managers import options
from .cases import offered
from .failures import Declined, Failure
from .gloo_ranks import check_on_gloo, describe
from .processes import registered_module
from .rank_checks import CHECKS, Trial, plan
from .report import judge
from .sharded import LAYERS, ShardedLayer


class DistributedSuite:
    """Tests fusions with collectives on layers that are split among the ranks of a group.

    Subclass it in the plugin's tests, under a name that pytest collects::

        from opfuse.testing import DistributedSuite

        class TestOverlap(DistributedSuite):
            plugin = "overlap"

    All fusions of the plugin are in force together. The ranks are threads of this process, whose
    collectives come as late as they may; one test runs in two processes over gloo. A layer that no
    fusion takes is skipped, with the reason that the fusion gives.

    Attributes:
        plugin: As for :class:`FusionSuite`.
        layers: The layers: :data:`opfuse.testing.LAYERS` and your own, each a
            :class:`opfuse.testing.ShardedLayer`.
        options: Options of the plugin that are in force, such as ``{"overlap.use": "always"}``.
        limits: What the plugin cannot do, and why: check -> reason, or ``"layer: check"`` ->
            reason. Checks are the names in ``testing.RANK_CHECKS``, and ``"gloo"``. A limit that is
            not one, because the check passes, is a failure.
    """

    plugin: ClassVar[str] = ""
    layers: ClassVar[Sequence[ShardedLayer]] = LAYERS
    options: ClassVar[Mapping[str, Any]] = {}
    limits: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per layer and check."""
        if "rank_check" in metafunc.fixturenames:
            pairs = [(layer, name) for layer in self.layers for name in CHECKS]
            ids = [f"{layer.name}-{name}" for layer, name in pairs]
            metafunc.parametrize(("layer", "rank_check"), pairs, ids=ids)

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        if not (dist.is_available() and dist.is_gloo_available()):
            pytest.skip("this torch has no torch.distributed with gloo")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with options(**self.options):
            yield
        torch.set_num_threads(threads)

    def test_takes_something(self) -> None:
        """The plugin offers fusions, one takes a layer, and limits name what there is."""
        if not offered(self.plugin):
            pytest.fail(f"plugin {self.plugin!r} offers no fusion, or is not installed", False)
        names = {layer.name for layer in self.layers}
        for limit in self.limits:
            layer, _, check = limit.rpartition(": ")
            if check not in (*CHECKS, "gloo") or (layer and layer not in names):
                what = "neither a check nor '<layer>: <check>'"
                pytest.fail(f"limits names {limit!r}, which is {what}", False)
        reasons = {layer.name: self._declined(layer, "plan") for layer in self.layers}
        under_a_recipe = (self._declined(layer, "casts") for layer in self.layers)
        if all(reasons.values()) and all(under_a_recipe):
            each = "\n".join(f"{name}: {reason}" for name, reason in reasons.items())
            pytest.fail(f"no layer is fused:\n{each}", False)

    def _declined(self, layer: ShardedLayer, name: str) -> str:
        """Why no fusion takes a layer; "" if one does, or fails there."""
        try:
            CHECKS[name](Trial(offered(self.plugin), layer))
        except Declined as reason:
            return str(reason)
        except Failure:
            pass
        return ""

    def test_layer(self, layer: ShardedLayer, rank_check: str) -> None:
        """One check on one layer; skipped where no fusion takes it."""
        problem = None
        try:
            if rank_check not in ("plan", "casts"):  # those say themselves what is not taken
                self._take(layer)
            CHECKS[rank_check](Trial(offered(self.plugin), layer))
        except Declined as reason:
            pytest.skip(str(reason))
        except Failure as failure:
            who = f"plugin {self.plugin!r} fails the check {rank_check!r} on layer {layer.name!r}"
            problem = f"{who}: {failure}"
        judge(self.limits, (rank_check, f"{layer.name}: {rank_check}"), problem)

    _plans: ClassVar[dict[ShardedLayer, Exception | None]] = {}
    """What came of the check of plans, by layer; each class has its own."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls._plans = {}

    def _take(self, layer: ShardedLayer) -> None:
        """Skip a layer that no fusion takes, or of which ranks have different plans."""
        if layer not in self._plans:
            self._plans[layer] = None
            try:
                plan(Trial(offered(self.plugin), layer))
            except (Declined, Failure) as problem:
                self._plans[layer] = problem
        found = self._plans[layer]
        if isinstance(found, Failure):
            pytest.skip("not checked, since 'plan' fails: fix that first")
        if found is not None:
            raise found

    @pytest.mark.xdist_group("gloo")
    def test_gloo(self) -> None:
        """The layers in two processes over gloo: collectives come in one order on both."""
        if registered_module(self.plugin) == "":
            what = "is registered in code, and no module: no other process finds it"
            pytest.skip(f"plugin {self.plugin!r} {what}")
        if not offered(self.plugin):
            pytest.skip(f"plugin {self.plugin!r} offers no fusion")
        try:
            describe(self.layers, self.options)
        except ValueError as error:
            pytest.skip(f"another process cannot build the layers: {error}")
        problem = None
        try:
            check_on_gloo(self.plugin, self.layers, self.options)
        except Failure as failure:
            problem = f"plugin {self.plugin!r} fails {failure}"
        judge(self.limits, ("gloo",), problem)
