"""``opfuse check-plugin``: what it finds in a distribution, and what it runs, in processes of its own."""

import contextlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import textwrap

import pytest
from click.testing import CliRunner

import opfuse
from opfuse import Fusion, OneOf, OneOrMore, Optional, Subclasses, ops
from opfuse.cli import check_plugin as checking
from opfuse.cli import commands as cli
from opfuse.cli import declared, scaffold
from opfuse.core.records import installed_plugins

pytestmark = pytest.mark.alone

ROOT = pathlib.Path(__file__).parents[1]

METADATA = """\
Metadata-Version: 2.4
Name: opfuse-plugin-pair
Version: 0.3.0
Summary: Two ops at once
License-Expression: MIT
Requires-Python: >=3.10
Requires-Dist: opfuse>=0.1,<0.2
Requires-Dist: triton>=3.6; extra == 'triton'
Project-URL: Homepage, https://pair.example/
"""

PLUGIN = """
import opfuse
from opfuse.ops import GELU, Bias

class Pair(opfuse.FusedOperation):
    factor = 1.0

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extra = self.run_separately(basic_op_ctxs, input_, **given)
        return y * self.factor if self.factor != 1 else y, extra

@opfuse.hookimpl
def opfuse_forward_fusions():
    return [opfuse.Fusion((Bias, GELU), Pair, name="pair", when=lambda ops, env: not_on_gpu(env))]

def not_on_gpu(env):
    return True if env.device.type == "cpu" else "it was written for a CPU"
"""

SUITE = """
from opfuse.testing import FusionSuite

class TestConformance(FusionSuite):
    plugin = "pair"
    limits = dict.fromkeys(("output", "gradients"), "it is five percent off")
    most_cases = 12

def test_of_something_else():
    raise AssertionError("it is no suite")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution for the processes that a test starts; gives the folder."""

    def write(plugin=PLUGIN, described=METADATA, group="opfuse.v1", name="opfuse_plugin_pair"):
        info = tmp_path / f"{name}-0.3.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(described)
        (info / "entry_points.txt").write_text(f"[{group}]\npair = a_pair\n")
        (tmp_path / "a_pair.py").write_text(plugin)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return write


@contextlib.contextmanager
def alone():
    """The distribution that ``install`` wrote is all that is loaded."""
    records = [record for record in installed_plugins()[0] if record.name == "pair"]
    with opfuse.plugins.isolated():
        opfuse.plugins.manager.records = records
        try:
            yield
        finally:
            sys.modules.pop("a_pair", None)


def check(*arguments, status=0):
    """Run the command, whose suite is a process; returns stdout."""
    with alone():
        done = CliRunner().invoke(cli.main, ["check-plugin", "opfuse-plugin-pair", *arguments])
    assert done.exit_code == status, done.output
    return done.stdout


def described():
    """What is declared by the distribution that ``install`` wrote."""
    with alone():
        return declared.describe(importlib.metadata.distribution("opfuse-plugin-pair"))


# The whole command


def test_a_plugin_that_is_right(install):
    install()
    report = json.loads(check("--quick", "--json"))
    assert report["failures"] == [] and report["contract"] == "opfuse.v1"
    assert report["requires"]["opfuse"] == ">=0.1,<0.2" and report["requires"]["triton"] == ">=3.6"
    assert report["requires"]["torch"] == ">=2.11" and report["homepage"] == "https://pair.example/"
    ((fusion,),) = [plugin["fusions"] for plugin in report["plugins"]]
    assert (fusion["name"], fusion["pass"], fusion["pattern"]) == ("pair", "forward", "Bias + GELU")
    cpu, cuda = fusion["used"]["cpu"], fusion["used"]["cuda"]
    assert cpu["asked"] == cpu["used"] > 0 and cuda["used"] == 0
    assert cuda["refusals"] == ["it was written for a CPU"]
    assert fusion["checks"] == {"passed": 3, "failed": {}, "limits": {}, "skipped": {}}
    assert report["conformance"]["checks"] == "runs, output, gradients"
    assert report["conformance"]["suite"] == "as it comes" and report["hardware"] == []


def test_everything_that_is_wrong_is_on_the_list(install):
    wrong = PLUGIN.replace("factor = 1.0", "factor = 1.05").replace(
        "import opfuse\n", "import opfuse, triton\n", 1
    )
    if importlib.util.find_spec("triton") is None:
        wrong = wrong.replace(", triton", "")
    lines = METADATA.replace("License-Expression: MIT\n", "").replace(">=0.1,<0.2", ">=0.1")
    install(wrong, lines)
    out = check("--quick", status=1)
    _, _, failed = out.partition(" failed:\n")
    assert "- metadata: there is no licence" in failed
    assert "expected a range of opfuse with both ends" in failed
    assert "- forward pair: output: forward fusion 'pair'" in failed and "testing.run(" in failed
    assert ("imports triton" in failed) == (", triton" in wrong)
    assert out.count("\n- ") == 3 + (", triton" in wrong)


def test_its_own_suites_with_their_limits_and_nothing_else_of_its_tests(install):
    """A limit is shown; what the suite changes is named."""
    folder = install(PLUGIN.replace("factor = 1.0", "factor = 1.05"))
    (folder / "tests").mkdir()
    (folder / "tests" / "test_conformance.py").write_text(SUITE)
    given = "--quick", "--tests", str(folder / "tests")
    report = json.loads(check(*given, "--json"))
    (fusion,) = report["plugins"][0]["fusions"]
    limits = fusion["checks"]["limits"]  # gradients of what reads its output are off, too
    assert limits == dict.fromkeys(("output", "gradients"), "it is five percent off")
    assert report["conformance"]["changes"] == {"TestConformance": ["limits", "most_cases"]}
    text = "\n".join(checking.as_text(report))
    assert (
        "limit: output: it is five percent off" in text
        and "which changes limits, most_cases" in text
    )
    assert fusion["checks"]["passed"] == 1 and report["failures"] == []


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ("def test_nothing():\n    pass\n", "no FusionSuite of this plugin"),
        ("import no_such_module\n", "test_conformance.py cannot be collected: "),
        ("import os\nos._exit(3)\n", "the conformance suite ended with status 3"),
        (
            textwrap.dedent("""
            from opfuse.testing import FusionSuite

            class TestConformance(FusionSuite):
                plugin = "pair"

                def pytest_generate_tests(self, metafunc):
                    super().pytest_generate_tests(metafunc)
                    for call in list(metafunc._calls):
                        if call.params.get("fusion_check") == "gradients":
                            metafunc._calls.remove(call)
            """),
            "the tests leave out gradients; a limit would give a reason",
        ),
    ],
    ids=["no suite", "no module", "it ends", "left out"],
)
@pytest.mark.costly(1)
def test_tests_that_do_not_test(install, suite, said):
    folder = install()
    (folder / "test_conformance.py").write_text(suite)
    tests = "--tests", str(folder / "test_conformance.py")
    report = json.loads(check("--quick", *tests, "--json", status=1))
    assert any(said in failure for failure in report["failures"]), report["failures"]


def test_conditions_are_asked_where_nothing_is_interpreted(install, monkeypatch):
    """A user's process is no interpreter: what its condition says there is of no use to them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = install("import os\n" + PLUGIN.replace("when=lambda ops, env: not_on_gpu(env)", WHEN))
    (folder / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    found = checking.run_suite(["pair"], str(folder / "test_nothing.py"), quick=True)
    ((of,),) = [found["fusions"]]
    assert of["used"]["cpu"]["refusals"] == ["nothing is interpreted"]


WHEN = "when=lambda ops, env: os.environ.get('TRITON_INTERPRET') or 'nothing is interpreted'"


def test_a_plugin_that_does_not_load(install):
    install("raise OSError('no disk')\n")
    report = json.loads(check("--quick", "--json", status=1))
    assert any("does not load: import: OSError: no disk" in each for each in report["failures"])


# What is declared


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Summary: Two ops at once\n", "", "metadata: there is no Summary (description in"),
        ("Requires-Python: >=3.10\n", "", "metadata: there is no Requires-Python"),
        ("opfuse>=0.1,<0.2", "opfuse", "expected a range of opfuse with both ends"),
        ("opfuse>=0.1,<0.2", "opfuse>=0.2,<0.3", "it takes opfuse >=0.2,<0.3, and 0.1"),
        ("triton>=3.6; extra == 'triton'", "torch<2", "it takes torch >=2.11,<2, and"),
    ],
)
def test_metadata(install, old, new, said):
    assert old in METADATA
    install(described=METADATA.replace(old, new))
    (failure,) = described()["failures"]
    assert said in failure


@pytest.mark.parametrize("kind", scaffold.KINDS)
def test_the_description_of_what_a_new_plugin_no_longer_offers(install, kind):
    """It is right until its author puts another fusion, or recipe, in the place of the example."""
    own = scaffold.KINDS[kind]
    install(described=METADATA.replace("Two ops at once", own.description))
    (failure,) = described()["failures"]
    assert failure.startswith(f"metadata: the description is that of `opfuse new` for {own.offers}")


def test_an_entry_point_of_another_contract(install):
    install(group="opfuse.v2")
    report = described()
    assert report["plugins"] == [] and report["failures"] == [
        "it has no entry point in group opfuse.v1, whose hooks this opfuse calls; of others: "
        "opfuse.v2"
    ]


def test_a_plugin_without_hooks(install):
    install(plugin="")
    assert described()["failures"] == ["plugin pair implements no hook"]


def test_patterns_in_words():
    pattern = [Optional(ops.RMSNorm), OneOf(ops.Bias, Subclasses(ops.Activation))]
    fusion = Fusion([*pattern, OneOrMore(ops.Dropout)], opfuse.FusedOperation, name="any")
    fusions = fusion, lambda ops, *, recipe: ops
    words = [declared._fusion("forward", each)["pattern"] for each in fusions]
    assert words == ["[RMSNorm] + Bias or any Activation + (Dropout)...", "decided by a function"]


# What ran on hardware


def report_of(*names):
    plugins = [{"name": name, "fusions": []} for name in names]
    return {"plugins": plugins, "hardware": [], "failures": []}


ROWS = [
    {"plugin": "norm", "part": "forward", "wrong": []},
    {"plugin": "norm", "part": "forward: rows=8", "wrong": [], "seconds": 1e-5},
    {"plugin": "mlp", "part": "forward", "wrong": ["it differs by 3"]},
]


def record(path, device="A GPU", rows=ROWS):
    host = {"device": device, "torch": "2.13.0", "triton": "3.6.0"}
    path.write_text(json.dumps({"host": host, "rows": rows}))
    return path


def test_a_record_of_hardware(tmp_path):
    path, report = record(tmp_path / "gpu.json"), report_of("norm")
    checking.add_hardware(report, checking._record(path))
    (one,) = report["hardware"]
    assert one["device"] == "A GPU" and one["by"] == "1 kernel case compared, 1 timed"
    assert (one["torch"], one["triton"], one["wrong"], report["failures"]) == (
        *("2.13.0", "3.6.0"),
        *([], []),
    )
    wrong = report_of("mlp")
    checking.add_hardware(wrong, checking._record(path))
    assert wrong["failures"] == ["on A GPU: forward: it differs by 3"]


def test_no_record_of_hardware(tmp_path):
    """Of another plugin, or of the interpreter."""
    for name, device in (("rope", "A GPU"), ("norm", "interpreter")):
        report = report_of(name)
        path = record(tmp_path / "gpu.json", device)
        checking.add_hardware(report, checking._record(path))
        assert report["hardware"] == []


# Mistakes in what is asked for


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["opfuse-plugin-nowhere"], "no distribution 'opfuse-plugin-nowhere' is installed"),
        (["opfuse", "--tests", "nowhere"], "Path 'nowhere' does not exist"),
        (["opfuse", "--results", __file__], "expected a report of python -m opfuse_triton gpu"),
    ],
)
def test_mistakes(arguments, said):
    result = CliRunner().invoke(cli.main, ["check-plugin", *arguments])
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr


# As text


def test_lines_fit_a_terminal():
    paths = sorted(ROOT.glob("docs/plugin-index/*.json"))
    assert paths
    for path in paths:
        for line in checking.as_text(json.loads(path.read_text(encoding="utf-8"))):
            assert len(line) <= 80, line
