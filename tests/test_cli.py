"""The command line, as a user's shell runs it."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner
from fakes import OneByOne
from tuned import Prescribed

import opfuse
from opfuse import Fusion
from opfuse.cli import commands as cli
from opfuse.core import plugins, settings
from opfuse.core.environment import device_name
from opfuse.ops import GELU
from opfuse.tuning import table as tables
from opfuse.tuning.table import Measurement


class Pair(OneByOne):
    calls: ClassVar = []


def pair(name="pair"):
    return Fusion([GELU, GELU], Pair, name=name)


MODELS = """
    import sys
    import torch
    import opfuse
    from opfuse.ops import GELU

    print("noise on stdout")
    chain = opfuse.Sequential(GELU(), GELU())
    ready = chain, torch.ones(2, 3)
    number = 3
    nothing = ()

    class Inner:
        ready = ready

    class NeedsInput(torch.nn.Module):
        def forward(self, x):
            return x

    needs_input = NeedsInput()

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = opfuse.Sequential(GELU(), GELU())
            self.plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())

        def forward(self, *, ids):
            return self.plain(self.chain(ids))

    by_name = Named(), {"ids": torch.ones(2, 3)}

    def plain():
        layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        return torch.nn.Sequential(*layers), torch.ones(2, 4)

    def build():
        print("more noise")
        return [chain, torch.ones(2, 3, requires_grad=True)]

    def build_of(width):
        return chain, torch.ones(width)

    def function():
        return lambda x: chain(x), torch.ones(2)

    def broken():
        raise KeyError("mine")
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder to run in, with a module of models of a name of its own."""
    name = f"models_{abs(hash(str(tmp_path)))}"
    tmp_path.joinpath(f"{name}.py").write_text(textwrap.dedent(MODELS))
    tmp_path.joinpath(f"{name}_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def call(*arguments):
    result = CliRunner().invoke(cli.main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# plugins


def test_plugins_lists_them_as_json(register):
    register(
        name="b",
        distribution="dist-b",
        version="2",
        forward_fusions=[pair("f"), pair("g")],
        joint_fusions=[pair("f")],
    )
    register(name="a", distribution="dist-a", recipes={})
    result = call("plugins", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    keys = ["name", "distribution", "version", "state", "hooks", "fusions", "priorities", "error"]
    rows = json.loads(result.stdout)
    tools = plugins.listing(tools=True)
    assert rows == plugins.listing() + tools and tools[0]["name"] == "autocast"
    rows = rows[: -len(tools)]
    assert [list(row) for row in rows] == [keys, keys]
    assert rows[1]["fusions"] == {"f": ["joint", "forward"], "g": ["forward"]}


def test_plugins_as_a_table(register):
    fusions = [
        pair(name) for name in ("linear+bias", "linear+bias+activation", "linear+bias+activation")
    ]
    fusions[0] = dataclasses.replace(fusions[0], priority=-100)
    register(
        name="linear",
        distribution="opfuse-plugin-linear",
        version="0.1.0",
        forward_fusions=fusions,
        backward_fusions=fusions[1:],
    )
    register(name="norm", distribution="opfuse-plugin-norm", version="1.0")
    record = register(name="broken", distribution="opfuse-plugin-broken", version="0.0.1")
    record.load = lambda: 1 / 0
    record = register(name="next", distribution="opfuse-plugin-next", version="2.0")
    record.state, record.error = (
        "incompatible",
        "written for opfuse.v2, this opfuse speaks opfuse.v1",
    )
    with plugins.using("-norm"):
        result = call("plugins")
    assert result.exit_code == 0
    assert result.stdout.partition("\n\n")[0].splitlines() == [
        "PLUGIN  DISTRIBUTION                STATE         FUSIONS",
        "broken  opfuse-plugin-broken 0.0.1  failed        -",
        "    import: ZeroDivisionError: division by zero",
        "linear  opfuse-plugin-linear 0.1.0  loaded        linear+bias (forward, priority -100),",
        "                                                  linear+bias+activation (forward, backward)",
        "next    opfuse-plugin-next 2.0      incompatible  -",
        "    written for opfuse.v2, this opfuse speaks opfuse.v1",
        "norm    opfuse-plugin-norm 1.0      blocked       -",
    ]
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "Warning: opfuse plugin 'broken' (opfuse-plugin-broken 0.0.1) failed at import: "
    )


@pytest.mark.usefixtures("register")
def test_plugins_says_when_none_is_installed():
    assert (
        call("plugins").stdout.splitlines()[0] == "No plugins are installed: every op runs unfused."
    )
    assert json.loads(call("plugins", "--json").stdout) == plugins.listing(tools=True)


def test_what_a_plugin_prints_is_not_on_stdout(register):
    def forward_fusions():
        print("hello from a plugin")
        return []

    register(forward_fusions=forward_fusions)
    result = call("plugins", "--json")
    assert json.loads(result.stdout) == plugins.listing() + plugins.listing(tools=True)
    assert "hello from a plugin" in result.stderr


def test_strict_mode_exits_with_each_plugin_error(register, monkeypatch):
    for name in "ab":
        record = register(name=name)
        record.load = lambda name=name: {}[name]
    register(name="c")
    monkeypatch.setenv("OPFUSE_STRICT", "1")
    result = call("plugins", "--json")
    assert result.exit_code == 1
    states = [row["state"] for row in json.loads(result.stdout)]
    assert states[:3] == ["failed", "failed", "loaded"] and {*states[3:]} == {"loaded"}
    assert result.stderr.splitlines() == ["Error: KeyError: 'a'", "Error: KeyError: 'b'"]
    with plugins.using("c"):
        assert call("plugins").exit_code == 1  # listed as failed from before
    for record in plugins.manager.records:
        record.state, record.error = "loaded", None
    assert call("plugins").exit_code == 0


@pytest.mark.parametrize("command", [("plugins", "--json"), ("plugins",), ("explain", "x:y")])
def test_a_malformed_selection_is_an_error(command, monkeypatch):
    monkeypatch.setattr(settings.current, "values", settings.Settings((), "a,-b"))
    result = call(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "Error: OPFUSE_PLUGINS='a,-b' mixes names to use and names to block: give 'a,b' or '-a,-b'"
    ]


# explain


@pytest.mark.parametrize("target", ["ready", "build", "Inner.ready", "function"])
def test_explain_prints_the_plan(register, models, target):
    register(forward_fusions=[pair()])
    result = call("explain", f"{models}:{target}")
    assert result.exit_code == 0
    assert "noise on stdout" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("1 call of fusible ops: forward 1 fused, 0 separate; backward 0 ")
    assert "    GELU + GELU  fused by pair, opfuse-plugin-test 1.0" in lines
    lines = call("explain", f"{models}:{target}", "--details").stdout.splitlines()
    fused = "    GELU + GELU  fused by pair as Pair, opfuse-plugin-test 1.0"
    assert fused in [line.partition(";")[0] for line in lines]


def test_explain_prints_the_plan_as_json(register, models):
    register(forward_fusions=[pair()])
    result = call("explain", f"{models}:build", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    chain = opfuse.Sequential(GELU(), GELU())
    assert data == opfuse.explain(chain, torch.ones(2, 3, requires_grad=True)).to_dict()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "nowhere_at_all:x",
            "cannot load 'nowhere_at_all:x': ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("{}_broken:x", "cannot load '{}_broken:x': ZeroDivisionError: division by zero"),
        ("{}", "expected MODULE:OBJECT, got '{}'"),
        ("{}:", "expected MODULE:OBJECT, got '{}:'"),
        (":x", "expected MODULE:OBJECT, got ':x'"),
        (
            "{}:missing",
            "cannot load '{}:missing': AttributeError: module '{}' has no attribute 'missing'",
        ),
        (
            "{}:Inner.missing",
            "cannot load '{}:Inner.missing': AttributeError: type object 'Inner' has no attribute 'missing'",
        ),
        ("{}:number", "{}:number must give (model, input, ...), got (int)"),
        ("{}:nothing", "{}:nothing must give (model, input, ...), got ()"),
        ("{}:sys", "{}:sys must give (model, input, ...), got (module)"),
        (
            "{}:build_of",
            "{}:build_of() raised TypeError: build_of() missing 1 required positional argument: 'width'",
        ),
        (
            "{}:needs_input",
            "{}:needs_input: NeedsInput without an input raised TypeError: "
            "NeedsInput.forward() missing 1 required positional argument: 'x'",
        ),
        (
            "{}:chain",
            "{}:chain: Sequential without an input raised TypeError: "
            "Sequential.forward() missing 1 required positional argument: 'input'",
        ),
    ],
)
def test_what_explain_cannot_find(no_plugins, models, target, text):
    result = call("explain", target.format(models))
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line for line in result.stderr.splitlines() if "noise" not in line] == [
        "Error: " + text.replace("{}", models)
    ]


def test_an_error_of_the_model_is_one_line(no_plugins, models):
    result = call("explain", f"{models}:broken")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{models}:broken() raised KeyError" in result.stderr


# tune


def test_tune_prints_and_checks_its_measurements(register, models, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path / "tables"))
    register(forward_fusions=[pair("good"), pair("bad")])
    wrong = Measurement(0, 0, 0, wrong="differs from the separate ops")
    with Prescribed(good=1.5, bad=wrong):
        told = call("tune", f"{models}:build")
        assert told.exit_code == 0 and "noise" in told.stderr and "noise" not in told.stdout
        assert told.stdout.startswith("2 runs; 1 fusion refused as wrong; 1 fusion no slower than")
        assert "good" not in told.stdout
        assert "good" in call("tune", f"{models}:build", "--details").stdout
        checked = call("tune", f"{models}:build", "--check")
        assert (checked.exit_code, checked.stdout) == (1, told.stdout)
        found = json.loads(call("tune", f"{models}:build", "--json").stdout)
        assert [row["fusion"] for row in found["results"]] == ["good", "bad"]
        call("tune", f"{models}:build", "--no-grad")
        call("tune", f"{models}:build", "--compiled")
    rows = json.loads(next((tmp_path / "tables").glob("*.json")).read_text())["entries"]
    kinds = [(row["subject"]["grads"][0], row["subject"]["mode"][2]) for row in rows]
    assert sorted(set(kinds)) == [(False, False), (True, False), (True, True)]
    with Prescribed(1.0):
        assert call("tune", f"{models}:build", "--check").exit_code == 0
    tables.reload()


def test_the_commands_take_inputs_by_name(register, models, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path / "tables"))
    register(forward_fusions=[pair("good")])
    assert "good" in call("explain", f"{models}:by_name").stdout
    with Prescribed(good=1.5):
        assert call("tune", f"{models}:by_name").stdout.startswith("1 run; 1 fusion no slower")
    tables.reload()
    told = call("convert", f"{models}:by_name").stdout
    assert "Sequential x 1 -> " in told and "kept for the backward" in told


def test_tune_refuses_a_file_that_is_no_table(register, models, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    register(forward_fusions=[pair()])
    path = tables.path_for(torch.device("cpu"))
    path.write_text("{")
    with pytest.warns(opfuse.TuningWarning):
        result = call("tune", f"{models}:build")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(
        f"Error: {models}:build: ValueError: {path} is"
    )
    tables.reload()


# The command itself


# doctor


@dataclasses.dataclass(frozen=True)
class Plain(opfuse.Recipe):
    """Says nothing of itself."""


@dataclasses.dataclass(frozen=True)
class Picky(opfuse.Recipe):
    """Says where it runs."""

    @classmethod
    def support(cls, device):
        return "cannot run", f"there is no product of four bits on {device.type}"


class Recipes:
    """A plugin that offers both."""

    @opfuse.hookimpl
    def opfuse_recipes(self):
        return {"plain": Plain, "picky": Picky}


def test_doctor_reports_plugins_devices_and_recipes(register, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    kernels = tables.kernels_path(device_name("cpu"))
    kernels.write_text("{}")
    tables.reload()
    record = plugins.register(Recipes(), name="many", distribution="many-recipes", version="2")
    try:
        text, data = call("doctor").stdout, call("doctor", "--json").stdout
    finally:
        plugins.remove(record)
        tables.reload()
    assert text.startswith(f"opfuse {opfuse.__version__}, python 3") and "many-recipes 2" in text
    assert "plugins: many (loaded)" in text and f"{torch.get_num_threads()} threads" in text
    assert f"no entry, in {tmp_path}" in " ".join(text.split())
    assert f"configurations of kernels: {kernels}" in " ".join(text.split())
    assert "  picky  cannot run: there is no product of four bits on cpu\n" in text
    assert "  plain  emulated: it brings no products of its own\n" in text
    found = json.loads(data)
    assert found["devices"][0]["recipes"]["picky"]["runs"] == "cannot run" and not found["errors"]


def test_doctor_tells_of_plugins_that_fail(register, monkeypatch):
    record = register(name="broken")
    record.load = lambda: {}["missing"]
    result = call("doctor")
    assert "Warning: " in result.stderr
    assert (result.exit_code, "broken (failed)" in result.stdout) == (0, True)
    assert "broken: " in result.stdout and "no plugin in use offers one" in result.stdout
    monkeypatch.setenv("OPFUSE_STRICT", "1")
    assert call("doctor").exit_code == 1


def test_help_and_version_exit_with_success():
    for arguments in ((), ("--help",)):
        result = call(*arguments)
        assert result.exit_code == 0
        assert {"plugins", "explain", "tune", "new"} <= set(result.stdout.split())
    assert call("--version").stdout == f"opfuse {opfuse.__version__}\n"
    for command in ("plugins", "explain", "tune", "new"):
        assert call(command, "--help").exit_code == 0
    assert call("unknown").exit_code == 2


@pytest.mark.alone  # each of its processes says which plugins are on
def test_the_commands_run_as_processes(tmp_path):
    tmp_path.joinpath("here.py").write_text(textwrap.dedent(MODELS))
    info = tmp_path / "opfuse_plugin_bad-0.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: opfuse-plugin-bad\nVersion: 0.1\n"
    )
    info.joinpath("entry_points.txt").write_text("[opfuse.v1]\nbad-for-test = bad_for_test\n")
    script = "import sys; sys.argv[0] = 'opfuse'; from opfuse.cli.commands import main; main()"
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPFUSE_")}
    env["PYTHONPATH"] = str(tmp_path)

    def run(*command, **environ):
        folder, path = tmp_path, [sys.executable, *command]
        return subprocess.run(
            path, env=env | environ, cwd=folder, capture_output=True, text=True, timeout=60
        )

    alone = {"OPFUSE_PLUGINS": "bad-for-test"}
    listed = run("-m", "opfuse", "plugins", "--json", **alone)
    (row,) = [row for row in json.loads(listed.stdout) if row["name"] == "bad-for-test"]
    assert (listed.returncode, row["state"]) == (0, "failed")
    (line,) = listed.stderr.splitlines()
    assert line.startswith(
        "Warning: opfuse plugin 'bad-for-test' (opfuse-plugin-bad 0.1) failed at import: ModuleNotF"
    )
    strict = run("-c", script, "plugins", "--json", OPFUSE_STRICT="1", **alone)
    assert strict.returncode == 1
    assert json.loads(strict.stdout) == json.loads(listed.stdout)
    env["PYTHONSAFEPATH"] = "1"  # a console script does not have the current directory on its path
    del env["PYTHONPATH"]
    explained = run("-c", script, "explain", "here:ready", OPFUSE_PLUGINS="")
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.startswith("1 call of fusible ops")
    malformed = run("-m", "opfuse", "plugins", OPFUSE_PLUGINS="a,-b")
    assert (malformed.returncode, len(malformed.stderr.splitlines()), malformed.stdout) == (
        2,
        1,
        "",
    )


def test_convert_shows_what_it_would_do(models):
    result = call("convert", f"{models}:plain")
    assert "Sequential x 1 -> BasicLinear Bias ReLU BasicLinear Bias" in result.stdout
    assert "kept for the backward" in result.stdout and "noise" not in result.stdout
    report = json.loads(call("convert", f"{models}:plain", "--json").stdout)
    assert report["converted"][0]["cls"] == "Sequential"
    for option in ("--only", "--skip"):
        refused = call("convert", f"{models}:plain", option, "nothing")
        assert refused.exit_code and "matches no module" in refused.stderr
    assert "converted: nothing" in call("convert", f"{models}:needs_input", "--verify").stdout


def test_the_command_of_a_package_that_is_not_installed_says_which(monkeypatch):
    monkeypatch.setitem(cli.manager.entry_points, cli.GROUP, {})
    result = CliRunner().invoke(cli.main, ["convert", "a:b"])
    assert result.exit_code == 2 and "needs the package opfuse-convert" in result.output
    assert "No such command 'nothing'" in CliRunner().invoke(cli.main, ["nothing"]).output
