"""The suite that a plugin's tests subclass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from ..core.quantization import Recipe
from . import interpreter
from .cases import Op, Subject, subjects
from .checks import CHECKS, DEPENDENT, ROOTS
from .failures import Failure
from .generate import Chains, make_chains
from .machine import Tier, is_interpreting, rows_by_grid, tiers
from .processes import PLUGIN_CHECKS, registered_module
from .report import Outcome, judge, run_all
from .running import alone, holding


class Suite:
    """The base of the kit's suites, by which a collected test is known as one of theirs."""


class FusionSuite(Suite):
    """Tests every fusion of a plugin against the contract.

    Subclass it in the plugin's tests, under a name that pytest collects::

        from opfuse.testing import FusionSuite

        class TestConformance(FusionSuite):
            plugin = "linear"

    Attributes:
        plugin: Name of the plugin's entry point, or the name it is registered by in code before
            tests are collected: ``opfuse.plugins.register(my_fusions, name="mine")``.
        limits: What the plugin cannot do, and why: check -> reason, or ``"fusion: check"`` ->
            reason. Checks are the names in ``testing.CHECKS``, and of the plugin as a whole
            ``"entry_point"``, ``"imports"`` and ``"processes"``; a fusion's is that in a report. A
            limit that is not one, because the check passes with ``thorough`` too, is a failure.
            Dropout is compared for the same seed: a fusion that draws otherwise than torch declares
            ``"output"`` and ``"gradients"`` here. Its other calls are then compared with its own
            lone ones.
        inexact: Fusions that cast, and whose kernels may differ in the last bit: name -> reason. In
            their casts one code in 1000 may be one step off; all other fusions give the codes of
            the separate ops.
        makers: How to make ops in another way than ``sample_inputs`` of their class, or their
            constructor, says: class -> function of the input's features that gives an :class:`Op`,
            or several. Fusions of collectives are tested if these are among them, for a group of
            one process that your tests initialize.
        examples: For a fusion that is a plain function, which has no pattern: its name -> chains,
            each a list of :class:`Op`.
        recipes: The recipes that its fusions are tested under; None: those of the plugin, with
            their defaults, and of the kit.
        most_rows: The largest number of rows in the tier ``interpret``; None: as many as start a
            few hundred programs of its kernels.
        most_cases: So many cases of each check run, the same ones each time, unless ``thorough``;
            None: all.
        thorough: Test more widths, rows, layouts and combinations of frozen leaves, which takes
            about twice as long; default: True if the environment has ``OPFUSE_THOROUGH=1``.
    """

    plugin: ClassVar[str] = ""
    limits: ClassVar[Mapping[str, str]] = {}
    inexact: ClassVar[Mapping[str, str]] = {}
    makers: ClassVar[Mapping[type, Callable[[int], Any]]] = {}
    examples: ClassVar[Mapping[str, Sequence[Sequence[Op]]]] = {}
    recipes: ClassVar[Sequence[Recipe] | None] = None
    most_rows: ClassVar[int | None] = None
    most_cases: ClassVar[int | None] = None
    thorough: ClassVar[bool] = os.environ.get("OPFUSE_THOROUGH", "") not in ("", "0")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per check of the plugin, per tier, and per fusion and check."""
        names = metafunc.fixturenames
        if "plugin_check" in names:
            metafunc.parametrize("plugin_check", PLUGIN_CHECKS)
        if "skipped_tier" in names:
            metafunc.parametrize("skipped_tier", tiers(), ids=lambda tier: tier.name)
        if "fusion_check" in names:
            runnable = [tier for tier in tiers() if not tier.reason]
            found = subjects(self.plugin, self.makers)
            params = [
                (tier, subject, name)
                for tier in runnable
                for subject in found
                for name, check in CHECKS.items()
                if subject.passes in check.passes and not (check.slow and tier.name == "interpret")
            ]
            ids = [f"{tier.name}-{of.passes} {of.name}-{name}" for tier, of, name in params]
            metafunc.parametrize(("tier", "subject", "fusion_check"), params, ids=ids)

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def test_plugin(self, plugin_check: str) -> None:
        """The plugin as it is installed, in fresh processes; registered in code, it has less."""
        module = registered_module(self.plugin)
        if module is not None and (plugin_check == "entry_point" or not module):
            what = "is registered in code" + ("" if module else ", and no module")
            pytest.skip(f"plugin {self.plugin!r} {what}: no other process finds it")
        chains = [self.chains(subject, "cpu") for subject in subjects(self.plugin, self.makers)]
        cases = [case for of_fusion in chains for case in of_fusion.plain]
        problem = None
        try:
            PLUGIN_CHECKS[plugin_check](self.plugin, cases)
        except Failure as failure:
            problem = f"plugin {self.plugin!r} fails the check {plugin_check!r}: {failure}"
        judge(self.limits, (plugin_check,), problem)

    def test_tier(self, skipped_tier: Tier) -> None:
        """Skip the tiers that cannot run here, with the reason."""
        if skipped_tier.reason:
            pytest.skip(f"{skipped_tier.name}: {skipped_tier.reason}")

    def test_offers_something(self) -> None:
        """There are fusions to test, and the limits name fusions and checks that exist."""
        found = subjects(self.plugin, self.makers)
        known = {f"{subject.name}: {name}" for subject in found for name in CHECKS}
        known |= {*CHECKS, *PLUGIN_CHECKS}
        problem = f"plugin {self.plugin!r} offers no fusion, or is not installed"
        problems = [] if found else [problem]
        for name in [name for name in self.limits if name not in known]:
            what = "neither a check nor '<fusion>: <check>'"
            problems.append(f"limits names {name!r}, which is {what}")
        for name in {*self.inexact} - {subject.name for subject in found}:
            problems.append(f"inexact names {name!r}, which is not a fusion")
        judge({}, (), "\n".join(problems) or None)

    def test_fusion(self, tier: Tier, subject: Subject, fusion_check: str) -> None:
        """One check on every case it is for; skipped where it fails as what it rests on does."""
        if tier.name == "interpret":
            interpreter.install()
        names = (fusion_check, f"{subject.name}: {fusion_check}")
        limited = any(name in self.limits for name in names)
        roots = {*ROOTS, *(f"{subject.name}: {root}" for root in ROOTS)} & {*self.limits}
        itself = bool(roots) and fusion_check in DEPENDENT.difference(ROOTS)
        with holding(alone, "itself" if itself else alone.get()):
            outcome = self.check(subject, fusion_check, tier.device)
            if limited and outcome.ran and outcome.failure is None and not self.thorough:
                every = self._make(subject, tier.device, thorough=True)  # whichever mode this is
                outcome = run_all(CHECKS[fusion_check], every)
        problem = None if outcome.failure is None else str(outcome)
        if problem and not limited and (root := self._failing(tier, subject, fusion_check)):
            pytest.skip(f"it fails, and so does {root!r}: fix that first")
        judge(self.limits, names, problem, passed=outcome.ran > 0)
        if not outcome.ran:
            pytest.skip("; ".join(outcome.declined) or "there is no case for this check")

    def _failing(self, tier: Tier, subject: Subject, name: str) -> str | None:
        """A failing check that another one rests on, unless that is declared as a limit."""
        for root in itertools.takewhile(lambda root: root != name, ROOTS):
            limited = {root, f"{subject.name}: {root}"} & {*self.limits}
            if name in DEPENDENT and subject.passes in CHECKS[root].passes and not limited:
                if self.check(subject, root, tier.device).failure is not None:
                    return root
        return None

    def check(self, subject: Subject, name: str, device: str = "cpu") -> Outcome:
        """Run one check on one fusion."""
        chains = self.chains(subject, device)
        if not chains.all:
            reasons = "; ".join(dict.fromkeys(chains.declined.values()))
            reasons = reasons or "tell how with `examples`"
            problem = f"no chain can be made for fusion {subject.name!r}: {reasons}"
            if chains.elsewhere or name != next(iter(CHECKS)):  # say it only once
                pytest.skip(problem + "; on a GPU it would be used" * chains.elsewhere)
            return Outcome(name, 0, failure=problem)
        return run_all(CHECKS[name], chains)

    @classmethod
    @functools.cache
    def chains(cls, subject: Subject, device: str) -> Chains:
        """The chains that a fusion is tested on."""
        return cls._make(subject, device, cls.thorough)

    @classmethod
    def _make(cls, subject: Subject, device: str, thorough: bool) -> Chains:
        own = subject._replace(inexact=subject.name in cls.inexact)
        examples = cls.examples.get(subject.name, ())
        made = make_chains(own, device, cls.makers, examples, thorough, cls.recipes)
        rows = (cls.most_rows or rows_by_grid(made)) if is_interpreting() else None
        cases = None if thorough else cls.most_cases
        return dataclasses.replace(made, most_rows=rows, most_cases=cases)
