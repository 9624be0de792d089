"""The conformance suite catches each of many wrong plugins by the intended check, and says what is wrong."""

import json
import os
import pathlib
import re
import subprocess
import sys

import faulty
import faulty_axes
import faulty_casts  # adds to the faults
import faulty_circumstances
import faulty_fresh
import faulty_products
import faulty_unseen_again
import faulty_values  # noqa: F401  # adds to the faults
import ordinary
import pytest
import right
import sound
import torch

import opfuse
from opfuse import testing
from opfuse.testing.processes import PLUGIN_CHECKS

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("one_thread")]


def first_failure(subject, **given):
    """What the suite reports first."""
    chains = testing.make_chains(subject, **given)
    assert chains.all, chains.declined
    for check in testing.CHECKS.values():
        outcome = testing.run_all(check, chains) if subject.passes in check.passes else None
        if outcome is not None and outcome.failure is not None:
            return outcome
    return None


@pytest.mark.costly(8)
@pytest.mark.parametrize("name", faulty_circumstances.FAULTS)
def test_wrong_in_some_circumstances(name, no_plugins):
    fault = faulty_circumstances.FAULTS[name]
    subject = testing.Subject("faulty", fault.kind, fault.make())
    outcome = testing.run_all(testing.CHECKS[fault.check], testing.make_chains(subject))
    assert re.search(fault.says, str(outcome)) and outcome.failure, str(outcome)


@pytest.mark.costly(25)
@pytest.mark.parametrize("name", faulty.FAULTS)
def test_each_wrong_fusion_fails_its_check(name, register):
    fault = faulty.FAULTS[name]
    register(name="faulty", **{f"{fault.kind}_fusions": [fault.make()]})
    (subject,) = testing.subjects("faulty")
    if testing.FusionSuite.thorough:  # no earlier check either
        outcome = first_failure(subject, examples=fault.examples)
        assert outcome is not None and outcome.check == fault.check, str(outcome)
    else:
        chains = testing.make_chains(subject, examples=fault.examples)
        assert chains.all, chains.declined
        outcome = testing.run_all(testing.CHECKS[fault.check], chains)
    assert outcome.failure is not None, "not caught"
    assert re.search(fault.says, str(outcome)), str(outcome)
    assert f"fails the check '{fault.check}'" in str(outcome) and subject.name in str(outcome)


def test_a_sound_recomputation_passes(register):
    register(name="faulty", forward_fusions=[opfuse.Fusion((opfuse.ops.GELU,), right.Recomputing)])
    (subject,) = testing.subjects("faulty")
    assert first_failure(subject) is None


@pytest.mark.costly(1)
@pytest.mark.parametrize(("number", "name"), list(enumerate(faulty_casts.SOUND)))
def test_sound_fusions_with_casts(number, name, register):
    """Those of casts under all recipes; every check under one recipe for the first, or for all."""
    passes, fusion = faulty_casts.SOUND[name]
    register(name="faulty", **{f"{passes}_fusions": [fusion]})
    (subject,) = testing.subjects("faulty")
    recipes = testing.recipes.recipes_for("faulty")
    assert len(recipes) == 3
    if number == 0 or testing.FusionSuite.thorough:
        assert first_failure(subject, recipes=[recipes[number % 3]]) is None
    chains = testing.make_chains(subject)
    for check in ("codes", "recipe"):
        assert testing.run_all(testing.CHECKS[check], chains).failure is None


class KeepsItsOutput(opfuse.FusedOperation):
    """As the ReLU of the op does."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y = input_.relu()
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(y)
        return y, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * (basic_op_ctxs[0].saved_tensors[0] > 0), [()], [()]


def test_an_output_that_is_saved_is_released(no_plugins):
    fusion = opfuse.Fusion([opfuse.ops.ReLU], KeepsItsOutput)
    chains = testing.make_chains(testing.Subject("sound", "joint", fusion))
    outcome = testing.run_all(testing.CHECKS["released"], chains)
    assert outcome.ran and outcome.failure is None, outcome.failure


def plain_case(name):
    fault = faulty.FAULTS[name]
    subject = testing.find("faulty", fault.kind, name)
    return testing.make_chains(subject).plain[0]


def test_a_check_that_an_earlier_one_would_spare(register):
    name = "SaysNoWithoutAReason"
    fault = faulty.FAULTS[name]
    register(name="faulty", **{f"{fault.kind}_fusions": [fault.make()]})
    with pytest.raises(testing.Failure):
        testing.run("pattern", plain_case(name))


def test_a_sound_fusion_beside_a_wrong_one(register):
    faults = [faulty.FAULTS[name] for name in ("DoublesAGradient", "IsWrongInHalfPrecision")]
    sound_one = opfuse.Fusion(
        [opfuse.ops.BasicLinear, opfuse.ops.Bias], right.Forward, name="sound"
    )
    register(
        name="faulty",
        backward_fusions=[faults[0].make()],
        forward_fusions=[faults[1].make(), sound_one],
    )
    case = testing.make_chains(testing.find("faulty", "forward", "sound")).plain[0]
    testing.run("gradients", case)
    with pytest.raises(testing.Failure, match="weight of op 0 .* is wrong by"):
        testing.run("together", case)


@pytest.mark.costly(5)
@pytest.mark.parametrize("name", faulty_products.FAULTS)
def test_wrong_where_two_circumstances_meet(name, no_plugins):
    kind, fusion, checks = faulty_products.FAULTS[name]
    chains = testing.make_chains(testing.Subject("faulty", kind, fusion))
    assert chains.all, chains.declined
    outcomes = [testing.run_all(testing.CHECKS[check], chains) for check in checks.split("|")]
    assert any(outcome.failure for outcome in outcomes), "not caught"


def never(matched, env):
    return "it takes only prime numbers of rows"


def on_a_gpu(matched, env):
    return True if env.device.type == "cuda" else "it has a kernel for GPUs alone"


@pytest.mark.parametrize(("when", "says"), [(never, "prime numbers"), (on_a_gpu, "on a GPU")])
def test_a_fusion_without_a_case(when, says, no_plugins):
    fusion = opfuse.Fusion([opfuse.ops.GELU], right.Pointwise, when, name="untested")
    subject, suite = testing.Subject("faulty", "forward", fusion), testing.FusionSuite()
    if when is never:  # once, and the other checks are skipped
        outcome = suite.check(subject, next(iter(testing.CHECKS)))
        assert says in str(outcome) and outcome.failure and not outcome.ran
    with pytest.raises(pytest.skip.Exception, match=says):
        suite.check(subject, "output")


CAUGHT = json.loads((pathlib.Path(__file__).parent / "faults_caught.json").read_text())


@pytest.mark.costly(5)
@pytest.mark.parametrize("fault", faulty_axes.FAULTS, ids=lambda fault: fault.name)
def test_wrong_along_an_axis(no_plugins, fault):
    subject = testing.Subject("faulty", fault.kind, fault.fusion)
    recorded = CAUGHT["after"]["found"][fault.name]["caught by"]
    outcome = testing.run_all(testing.CHECKS[recorded], testing.make_chains(subject))
    assert outcome.failure is not None, "not caught"


def test_threads_see_each_other(no_plugins):
    (fault,) = (fault for fault in faulty_axes.FAULTS if fault.axis == "threads")
    subject = testing.Subject("faulty", fault.kind, fault.fusion)
    with pytest.raises(
        testing.Failure, match="called from two threads, the output .*; keep nothing of a call"
    ):
        testing.run("threads", testing.make_chains(subject).plain[0])


def test_how_many_faults_are_caught():
    axes = {fault.axis for fault in faulty_axes.FAULTS}
    assert len(axes) == 12 and axes == {fault.axis for fault in faulty_fresh.FAULTS}
    counts = {label: (record["caught"], record["faults"]) for label, record in CAUGHT.items()}
    assert (
        counts["after"][0] == counts["after"][1] == counts["before"][1] == len(faulty_axes.FAULTS)
    )
    assert (
        counts["fresh"][1] == len(faulty_fresh.FAULTS) >= 12
        and counts["fresh"][0] >= 0.8 * counts["fresh"][1]
    )
    assert counts["unseen again"][1] == len(faulty_unseen_again.FAULTS) == 12
    assert counts["unseen again"][0] >= 10 and counts["unseen"] == (12, 12)


def test_every_check_is_seen_to_fail():
    seen = {fault.check for fault in faulty.FAULTS.values()} | {"pattern", "together", "threads"}
    seen |= {fault.check for fault in faulty_circumstances.FAULTS.values()}
    seen |= {entry["caught by"] for entry in CAUGHT["after"]["found"].values()}
    seen |= {check for _, _, check in faulty_products.FAULTS.values() if "|" not in check}
    assert seen == set(testing.CHECKS)
    assert {check for check, *_ in DISTRIBUTIONS.values()} == set(PLUGIN_CHECKS)


@pytest.mark.costly(1)
@pytest.mark.parametrize("seed", [1, 7, 19])  # forward, backward, joint
def test_sound_random_fusions_raise_no_alarm(seed, register):
    found = sound.report(seed)
    assert found["cases"] > 100 and not found["alarms"], "\n\n".join(found["alarms"])


@pytest.mark.parametrize(
    ("seed", "check"),
    [
        (10, "follows_values"),
        (66, "output"),
        (48, "output"),
        (17, "keeps_numbers"),
        (37, "nan_and_inf"),
        (21, "magnitude"),
        (86, "autocast"),
        (5, "compile"),
    ],
    ids=[
        "its input",
        "by feature",
        "an op that takes and gives an extra tensor",
        "how many extra tensors",
        "zeros times what is not finite",
        "two roundings of one number",
        "a result that no arithmetic made",
        "statistics of a compiled norm",
    ],
)
def test_no_false_alarm_of_what_was_one(seed, check):
    found = sound.report(seed, [check])
    assert found["cases"] and not found["alarms"], "\n\n".join(found["alarms"])


def test_more_seeds_were_checked():
    record = json.loads((pathlib.Path(__file__).parent / "false_alarms.json").read_text())
    assert record["seeds"] >= 200 and record["false alarms"] == []
    assert record["checks"] == list(testing.CHECKS)
    assert set(record["ordinary"]) == set(ordinary.FUSIONS) and len(ordinary.FUSIONS) == 6
    assert all(one["cases"] > 100 and not one["alarms"] for one in record["ordinary"].values())


@pytest.mark.parametrize("name", ordinary.FUSIONS)
def test_an_ordinary_condition_is_fine(name):
    found = sound.look(*ordinary.FUSIONS[name], ["condition", "pattern"])
    assert found["cases"] and not found["alarms"], "\n\n".join(found["alarms"])


# What only shows in a process of its own

_FUSION = """
class Gelu(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,) = self.basic_ops
        return act.forward_value(act.operand(basic_op_ctxs[0], input_)), [()]


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [opfuse.Fusion([opfuse.ops.GELU], Gelu)]
"""

SOUND = "import opfuse, torch\n" + _FUSION
"""A sound plugin, as one module."""

FUNCTION = """
import opfuse


def nothing(ops, *, recipe):
    return ops


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [nothing]
"""
"""A plugin with a fusion function, which has no pattern."""

# name -> check, message, entry points, module
DISTRIBUTIONS: dict[str, tuple[str, str, str, str]] = {
    "imports_triton": (
        "imports",
        "imports triton",
        "opfuse.v1",
        "import opfuse, triton\n" + _FUSION,
    ),
    "wrong_group": (
        "entry_point",
        "is in group opfuse.v2",
        "opfuse.v2",
        "import opfuse\n" + _FUSION,
    ),
    "does_not_import": (
        "entry_point",
        "does not load: import: ZeroDivisionError",
        "opfuse.v1",
        "1 / 0",
    ),
    "unknown_hook": (
        "entry_point",
        "unknown hook opfuse_sideways_fusions",
        "opfuse.v1",
        "import opfuse\n" + _FUSION.replace("forward_fusions", "sideways_fusions"),
    ),
    "hash_order": (
        "processes",
        "two processes plan the same chain differently",
        "opfuse.v1",
        "import opfuse\n"
        + _FUSION.replace(
            "[opfuse.ops.GELU], Gelu)", "[opfuse.ops.GELU], Gelu, name=f'gelu {hash(chr(97))}')"
        ),
    ),
}
"""Faults of an installed plugin."""


def install(folder, name, group, module):
    """A distribution with one entry point and one module, as pip would leave it."""
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    info = folder / f"opfuse_plugin_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: opfuse-plugin-{name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")


@pytest.mark.costly(2)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_wrong_distribution_fails_its_check(name, tmp_path, monkeypatch):
    check, says, group, module = DISTRIBUTIONS[name]
    install(tmp_path, name, group, module)
    (tmp_path / "triton.py").write_text("")  # it need not be installed to be imported
    monkeypatch.syspath_prepend(tmp_path)
    subject = testing.Subject(
        name, "forward", opfuse.Fusion([opfuse.ops.GELU], opfuse.FusedOperation)
    )
    with pytest.raises(testing.Failure, match=says):
        PLUGIN_CHECKS[check](name, [testing.Case(subject, (testing.Op(opfuse.ops.GELU),))])


def test_a_sound_distribution_passes(tmp_path, monkeypatch):
    install(tmp_path, "sound", "opfuse.v1", SOUND)
    monkeypatch.syspath_prepend(tmp_path)
    subject = testing.Subject(
        "sound", "forward", opfuse.Fusion([opfuse.ops.GELU], opfuse.FusedOperation)
    )
    for check in PLUGIN_CHECKS.values():
        check("sound", [testing.Case(subject, (testing.Op(opfuse.ops.GELU),))])
    with pytest.raises(
        testing.Failure, match="no installed distribution has an entry point 'absent'"
    ):
        PLUGIN_CHECKS["entry_point"]("absent", [])


# The suite as pytest runs it

SUITES = """
import coded
import opfuse
from opfuse import ops
from opfuse.testing import FusionSuite, Op


class TestSound(FusionSuite):
    plugin = "sound"


class TestLimits(FusionSuite):
    plugin = "sound"
    limits = {"gradients": "it cannot", "Gelu: output": "neither can it this", "Gelu: outptu": "misspelt"}


class TestFaulty(FusionSuite):
    plugin = "faulty"
    limits = {"nan_and_inf": "it clears NaN away"}


class TestAbsent(FusionSuite):
    plugin = "absent"


class TestFunction(FusionSuite):
    plugin = "function"


opfuse.plugins.register(coded, name="coded")
opfuse.plugins.register(coded.Offers(), name="object")


class TestCoded(FusionSuite):
    plugin = "coded"


class TestObject(FusionSuite):
    plugin = "object"
"""

OFFERS = """

class Offers:
    @opfuse.hookimpl
    def opfuse_forward_fusions(self):
        return opfuse_forward_fusions()
"""


def test_the_suite_under_pytest(tmp_path):
    install(tmp_path, "sound", "opfuse.v1", SOUND)
    install(
        tmp_path,
        "faulty",
        "opfuse.v1",
        SOUND.replace("act.forward_value(", "2 * torch.nan_to_num("),
    )
    install(tmp_path, "function", "opfuse.v1", FUNCTION)
    (tmp_path / "coded.py").write_text(SOUND + OFFERS)
    (tmp_path / "test_suites.py").write_text(SUITES)
    warnings = "error\n    ignore:Guards may run slower:RuntimeWarning"  # on Python 3.13.0
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = {warnings}\n")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }
    environ["OPFUSE_FUSION_LIMIT"] = "0"  # no check is about that
    # the checks of a plugin start processes; of a fusion only those run that are asserted
    once = "not test_plugin or TestSound or TestAbsent or TestCoded or TestObject"
    few = "not test_fusion or output or condition or Gelu-gradients or nan_and_inf"
    once = f"({once}) and ({few})"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:logging",
        "-k",
        once,
        "test_suites.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    lines = re.findall(r"^(PASSED|FAILED|SKIPPED).*", done.stdout, re.MULTILINE)
    assert len(lines) > 40, done.stdout + done.stderr

    def state(test):
        """The state of a test, from the summary."""
        return re.search(
            rf"^(PASSED|FAILED) test_suites.py::{re.escape(test)}(?: - (.*))?$",
            done.stdout,
            re.MULTILINE,
        )

    fusion = "test_fusion[reference-forward Gelu-"
    failed = set(
        re.findall(r"^FAILED test_suites.py::(Test\w+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    )
    well = ("TestSound", "TestCoded", "TestObject")
    assert not [name for name in failed if name.startswith(well)], done.stdout
    assert state("TestCoded::test_plugin[processes]").group(1) == "PASSED"
    assert "'coded' is registered in code: no other process finds it" in done.stdout
    assert "'object' is registered in code, and no module: no other" in done.stdout
    assert {name for name in failed if name.startswith("TestLimits")} == {
        f"TestLimits::{fusion}gradients]",
        f"TestLimits::{fusion}output]",
        "TestLimits::test_offers_something",
    }
    assert "limits declares 'gradients' (it cannot), but it works" in done.stdout
    assert "limits names 'Gelu: outptu', which is neither" in done.stdout
    assert (
        f"TestFaulty::{fusion}output]" in failed
        and f"TestFaulty::{fusion}nan_and_inf]" not in failed
    )
    assert "declared limit: it clears NaN away" in done.stdout
    assert {name for name in failed if name.startswith("TestFaulty")} == {
        f"TestFaulty::{fusion}output]"  # one cause, one failure
    }
    assert "it fails, and so does 'output': fix that first" in done.stdout
    assert [name for name in failed if name.startswith("TestFunction")] == [
        "TestFunction::test_fusion[reference-forward nothing-condition]"
    ]
    assert "no chain can be made for fusion 'nothing': tell how with `examples`" in done.stdout
    assert {"TestAbsent::test_offers_something", "TestAbsent::test_plugin[entry_point]"} <= failed
    assert "gpu: torch finds no CUDA device" in done.stdout or torch.cuda.is_available()

    text = done.stdout[done.stdout.index("fails the check 'output'") :]
    snippet = text[text.index("import torch") :].split("____")[0]
    again = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert "Failure: the output is wrong by" in again.stderr, snippet
