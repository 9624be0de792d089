"""The suite for fusions with collectives, that a plugin's tests subclass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from opfuse.core.options import options
from opfuse.testing.cases import Subject, offered
from opfuse.testing.failures import Declined, Failure
from opfuse.testing.processes import registered_module
from opfuse.testing.report import judge
from opfuse.testing.suite import Suite

from .gloo_ranks import check_on_gloo, describe
from .rank_checks import CHECKS, Trial
from .sharded import LAYERS, ShardedLayer


class DistributedSuite(Suite):
    """Tests fusions with collectives on layers that are split among the ranks of a group.

    Subclass it in the plugin's tests, under a name that pytest collects::

        from opfuse_distributed.testing import DistributedSuite

        class TestOverlap(DistributedSuite):
            plugin = "overlap"

    All fusions of the plugin are in force together. The ranks are threads of this process, whose
    collectives come as late as they may; one test runs in two processes over gloo. A layer that no
    fusion takes is skipped, with the reason that the fusion gives.

    Attributes:
        plugin: As for :class:`FusionSuite`.
        layers: The layers: :data:`opfuse_distributed.testing.LAYERS` and your own, each a
            :class:`opfuse_distributed.testing.ShardedLayer`.
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
        known = {f"{layer.name}: {name}" for layer in self.layers for name in (*CHECKS, "gloo")}
        problem = f"plugin {self.plugin!r} offers no fusion, or is not installed"
        problems = [] if offered(self.plugin) else [problem]
        for name in [name for name in self.limits if name not in known | {*CHECKS, "gloo"}]:
            what = "neither a check nor '<layer>: <check>'"
            problems.append(f"limits names {name!r}, which is {what}")
        reasons = {layer.name: str(self._found(layer, "plan")) for layer in self.layers}
        first = [self._found(layer, name) for name in ("plan", "casts") for layer in self.layers]
        if not problems and all(isinstance(found, Declined) for found in first):
            each = "\n".join(f"{name}: {reason}" for name, reason in reasons.items())
            problems.append(f"no layer is fused:\n{each}")
        judge({}, (), "\n".join(problems) or None)

    def _found(self, layer: ShardedLayer, check: str) -> Declined | Failure | None:
        """What a check says of a layer."""
        return _tried(tuple(offered(self.plugin)), layer, check, repr(self.options))

    def test_layer(self, layer: ShardedLayer, rank_check: str) -> None:
        """One check on one layer; skipped where no fusion takes it."""
        found = None if rank_check == "casts" else self._found(layer, "plan")
        if isinstance(found, Failure) and rank_check != "plan":
            pytest.skip("not checked, since 'plan' fails: fix that first")
        found = found or self._found(layer, rank_check)
        if isinstance(found, Declined):
            pytest.skip(str(found))
        who = f"plugin {self.plugin!r} fails the check {rank_check!r} on layer {layer.name!r}"
        problem = f"{who}: {found}" if found else None
        judge(self.limits, (rank_check, f"{layer.name}: {rank_check}"), problem)

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


@functools.lru_cache(maxsize=1024)
def _tried(
    fusions: tuple[Subject, ...], layer: ShardedLayer, name: str, options_in_force: str
) -> Declined | Failure | None:
    try:
        CHECKS[name](Trial(fusions, layer))
    except (Declined, Failure) as problem:
        return problem
    return None
