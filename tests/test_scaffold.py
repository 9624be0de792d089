"""``opfuse new``: what it writes works as it is, and the plugins of this repository have its shape."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import opfuse
from opfuse.cli import commands as cli
from opfuse.cli import scaffold
from opfuse.testing import FusionSuite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.alone

ROOT = pathlib.Path(__file__).parents[1]
IN_TREE = sorted(path.parent for path in ROOT.glob("plugins/opfuse-plugin-*/pyproject.toml"))

TOOLKITS = (
    "opfuse",
    "opfuse-triton",
    "opfuse-convert",
    "opfuse-memory",
    "opfuse-graphs",
    "opfuse-quantized",
    "opfuse-distributed",
    "opfuse-reproducible",
)
DEPENDENCIES = {f"{name}>=0.1,<0.2" for name in TOOLKITS}


def new(*arguments):
    result = CliRunner().invoke(cli.main, ["new", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def files(folder):
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        path.as_posix()
        for path in found
        if not {"__pycache__", "dist", ".pytest_cache"} & set(path.parts)
    }


# Writing

COMMON = {
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".github/workflows/check.yml"),
    *("src/opfuse_NAME/__init__.py", "src/opfuse_NAME/py.typed", "tests/test_conformance.py"),
}
KERNELS = {f"src/opfuse_NAME/{name}.py" for name in ("fused", "kernels", "cases")}
FILES = {
    "forward": KERNELS | {"tests/test_kernels.py"},
    "backward": KERNELS | {"tests/test_kernels.py"},
    "joint": {"src/opfuse_NAME/fused.py", "tests/test_fused.py"},
    "op": {"src/opfuse_NAME/fused.py", "src/opfuse_NAME/ops.py", "tests/test_ops.py"},
    "recipe": {
        *("src/opfuse_NAME/recipes.py", "src/opfuse_NAME/quantizers.py", "tests/test_training.py")
    },
}
"""Of each kind, what it has in addition to those of any."""
HAVE_KERNELS = "forward", "backward"


@pytest.mark.parametrize("kind", [None, *scaffold.KINDS])
@pytest.mark.parametrize(
    "name, short, module", [("mine", "mine", "mine"), ("opfuse-plugin-a-b2", "a-b2", "a_b2")]
)
def test_new_writes_these_files(name, short, module, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = new(name, *(() if kind is None else ("--kind", kind)))
    kind = kind or "forward"  # the default
    assert (result.exit_code, result.stderr) == (0, "")
    folder = tmp_path / f"opfuse-plugin-{short}"
    assert result.stdout.startswith(f"Wrote {folder.name}.")
    expected = {path.replace("NAME", module) for path in COMMON | FILES[kind]}
    assert files(folder) == expected
    text = {path: (folder / path).read_text(encoding="utf-8") for path in files(folder)}
    left = re.compile(r"NAME|DESCRIPTION|^(#|<!--) (all|only )", re.MULTILINE)
    assert not [path for path in text if path != "LICENSE" and left.search(text[path])]
    project = tomllib.loads(text["pyproject.toml"])["project"]
    assert project["name"] == f"opfuse-plugin-{short}"
    assert project["description"] == scaffold.KINDS[kind].description
    points = {"opfuse.v1": {short: f"opfuse_{module}"}}
    if kind in HAVE_KERNELS:
        points["opfuse_triton.cases"] = {short: f"opfuse_{module}.cases:CASES"}
        assert f"from opfuse_{module} import kernels" in text["tests/test_kernels.py"]
    assert project["entry-points"] == points
    assert project["optional-dependencies"]["test"] == ["opfuse[testing]"]
    of_toolkit = [path for path in text if "opfuse_triton" in text[path] or "triton]" in text[path]]
    assert bool(of_toolkit) == (kind in HAVE_KERNELS)
    if kind != "recipe":
        assert f'plugin = "{short}"' in text["tests/test_conformance.py"]
    for path in text:
        if path.endswith(".py"):
            compile(text[path], path, "exec")


def test_a_kind_that_is_none(tmp_path):
    result = new("mine", "--kind", "optimizer", "--into", str(tmp_path))
    assert result.exit_code == 2 and "'forward', 'joint', 'backward'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_into_names_the_folder_to_write_in(tmp_path):
    assert new("mine", "--into", str(tmp_path / "a" / "b")).exit_code == 0
    assert (tmp_path / "a" / "b" / "opfuse-plugin-mine" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    "name",
    ["", "Mine", "1st", "a--b", "a-", "-a", "a_b", "a.b", "ä", "opfuse-plugin-", "a/b", "a b"],
)
def test_names_that_do_not_do(name, tmp_path):
    result = new("--into", str(tmp_path), "--", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"Error: {name!r} cannot be the name of a plugin; expected "
        "lower-case letters and digits, beginning with a letter, words joined by single hyphens, such as 'fast-gelu'"
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fast-gelu", "gelu"])
def test_the_name_of_an_installed_plugin(name, tmp_path, register):
    register(name="gelu", distribution="opfuse_plugin_fast.gelu", version="0.3")
    result = new(name, "--into", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"Error: a plugin called {name!r} is installed already, by opfuse_plugin_fast.gelu 0.3: choose another name"
    ]
    assert not list(tmp_path.iterdir())


def test_new_overwrites_nothing(tmp_path):
    folder = tmp_path / "opfuse-plugin-mine"
    folder.mkdir()
    result = new("mine", "--into", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"Error: {folder} exists already, and nothing is overwritten"
    ]
    assert not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    result = new("mine", "--into", str(tmp_path / "file"))
    assert (
        result.exit_code == 2
        and result.stderr.startswith("Error: ")
        and len(result.stderr.splitlines()) == 1
    )


# As a package


def put_in_place(name, root, kind="forward"):
    """The folder of a generated plugin, and an environment with it installed, by pip, and no other plugin used."""
    # to look for the module pip changes distutils
    have = {dist.name for dist in importlib.metadata.distributions()}
    if not {"pip", "hatchling", "opfuse-triton"} <= have:
        pytest.skip("without pip, hatchling and opfuse-triton nothing can be installed")
    folder, site = scaffold.write(name, root, kind), root / "site"
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(folder)]
    subprocess.run(command, check=True, cwd=root)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPFUSE_", "TRITON_"))
    }
    path = os.pathsep.join([str(site), *(entry for entry in sys.path if entry)])
    return folder, {**environment, "PYTHONPATH": path, "OPFUSE_PLUGINS": name}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A plugin of the default kind."""
    return put_in_place("out-of-the-box", tmp_path_factory.mktemp("new"))


def python(installed, *arguments, **environment):
    folder, env = installed
    command = [sys.executable, *arguments]
    result = subprocess.run(
        command, env=env | environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_is_found_and_fuses(installed):
    rows = json.loads(python(installed, "-m", "opfuse", "plugins", "--json"))
    tools = {row["name"] for row in opfuse.plugins.listing(tools=True)}
    (row,) = [row for row in rows if row["state"] != "blocked" and row["name"] not in tools]
    expected = {
        "name": "out-of-the-box",
        "distribution": "opfuse-plugin-out-of-the-box",
        "version": "0.1.0",
    }
    assert row == {
        **expected,
        **{
            "state": "loaded",
            "hooks": ["opfuse_forward_fusions"],
            "fusions": {"bias+activation": ["forward"]},
            "priorities": {},
            "error": None,
        },
    }
    (installed[0] / "model.py").write_text(
        "import torch, opfuse\n"
        "chain = opfuse.Sequential(opfuse.ops.Linear(4, 4), opfuse.ops.SiLU()), torch.ones(2, 4)\n"
    )
    report = python(installed, "-m", "opfuse", "explain", "model:chain")
    line = "Bias + SiLU  fused by bias+activation, opfuse-plugin-out-of-the-box 0.1.0"
    assert line in report


RUN = """
import sys
import pytest
from opfuse.testing import FusionSuite
FusionSuite.most_cases = 12  # of each check; opfuse check-plugin runs all
sys.exit(pytest.main(sys.argv[1:]))
"""
TESTS = "-c", RUN, "-W", "error", "-p", "no:cacheprovider", "-rs", "tests"
FEW = [] if FusionSuite.thorough else ["-k", "not test_fusion or pattern or output or gradients"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def test_the_tests_of_a_new_plugin_pass(installed):
    """The kernel compiles, and without a GPU the twin is what runs."""
    out = python(installed, *TESTS, *FEW)
    assert " passed" in out and " failed" not in out


@pytest.mark.costly(0)
def test_it_passes_the_check_for_the_index(installed):
    name = "opfuse-plugin-out-of-the-box"
    out = python(installed, "-m", "opfuse", "check-plugin", name, "--quick", "--tests", "tests")
    assert "forward bias+activation: Bias + any Activation" in out and "checks: 3 passed" in out
    assert out.endswith("Nothing failed.\n")


@pytest.mark.costly(1)
@pytest.mark.parametrize("kind", [kind for kind in scaffold.KINDS if kind != "forward"])
def test_a_plugin_of_another_kind_passes_its_tests_and_the_check_for_the_index(kind, tmp_path):
    """Unchanged, its description included."""
    name = f"out-of-{kind}"
    its = put_in_place(name, tmp_path, kind)
    apart = "--ignore=tests/test_conformance.py"  # the check runs it
    out = python(its, *TESTS, apart)
    assert " passed" in out and " failed" not in out
    arguments = f"opfuse-plugin-{name}", "--quick", "--tests", "tests", "--json"
    report = json.loads(python(its, "-m", "opfuse", "check-plugin", *arguments))
    assert report["failures"] == [] and report["summary"] == scaffold.KINDS[kind].description
    (plugin,) = report["plugins"]
    if kind == "recipe":
        assert plugin["recipes"] == ["out-of-recipe"] and report["conformance"]["rest"]["passed"]
        return
    (fusion,) = plugin["fusions"]
    assert fusion["name"] == scaffold.KINDS[kind].offers and fusion["checks"]["passed"] == 3


WRONG = {
    "forward": ("fused.py", "hidden = (x + bias)", "hidden = (x + 1.01 * bias)", "output"),
    "joint": ("fused.py", "weight + 1 if ctx.zero_centered_gamma else weight", "weight", "gradients"),
    "backward": ("fused.py", ".sum(0, dtype=", ".mean(0, dtype=", "gradients"),
    "op": ("fused.py", "value=scale.factor", "value=1.01 * scale.factor", "output"),
    "recipe": ("quantizers.py", "torch.where(largest == 0, 1.0, largest / 127)", "largest / 127", "zeros"),
}  # fmt: skip
"""Of each kind a change of one line, and a check that finds it."""


@pytest.mark.costly(1)
@pytest.mark.parametrize("kind", WRONG)
def test_a_line_that_is_wrong_fails(kind, tmp_path):
    """What the tests of a new plugin say of it is not empty."""
    folder, environment = put_in_place("wrong", tmp_path, kind)
    file, old, new_line, check = WRONG[kind]
    source = tmp_path / "site" / "opfuse_wrong" / file
    text = source.read_text(encoding="utf-8")
    assert text.count(old) == 1
    source.write_text(text.replace(old, new_line), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *TESTS[2:-1],
        "-k",
        check,
        "tests/test_conformance.py",
    ]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    failed = re.findall(r"^_+ TestConformance\.test_(.*) _+$", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and failed and all(check in name for name in failed), done.stdout


@pytest.mark.costly(0)
@needs_triton
@pytest.mark.parametrize("kind", ["backward"])
def test_the_kernel_of_another_kind_passes_its_tests_interpreted(kind, tmp_path):
    out = python(put_in_place("interpreted", tmp_path, kind), *TESTS, *FEW, TRITON_INTERPRET="1")
    assert " passed" in out and "no GPU, and Triton does not interpret" not in out


@needs_triton
def test_its_kernel_passes_them_interpreted(installed):
    """But for what looks at the plugin and at patterns, in which no kernel runs."""
    few = "-k", "not test_plugin and (not test_fusion or output or gradients)"
    out = python(installed, *TESTS, *(few if FEW else ()), TRITON_INTERPRET="1")
    assert (
        " passed" in out
        and "no GPU, and Triton does not interpret" not in out
        and "bytes are counted in Triton's interpreter" not in out
    )


WITHOUT_TRITON = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name == "triton" else find(name, *rest)
)
"""


@pytest.mark.costly(0)
def test_its_twin_passes_them_without_triton(installed, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    path = os.pathsep.join([str(tmp_path), installed[1]["PYTHONPATH"]])
    few = "-k", "not test_fusion or output or gradients"
    out = python(installed, *TESTS, *few, PYTHONPATH=path)
    assert " passed" in out and "Triton is not installed: there is only the twin" in out


@needs_triton
def test_the_activation_of_another_package_gets_its_kernel(installed):
    """Also that a class that computes something else does not, and that the cases are found."""
    code = """
import opfuse, torch
from opfuse_out_of_the_box import kernels
from opfuse_triton.recorded import case_lists, load_cases
from triton_activation import LeakyGLU, LeakyReLU

class Steep(opfuse.ops.SiLU):
    def value(self, x):
        return 2 * super().value(x)

assert [kernels.functions_for(op) for op in (Steep(), LeakyGLU())] == [None, None]
seen, launch = [], kernels.KERNEL.launch
kernels.KERNEL.launch = lambda *args, **constants: (seen.append(constants), launch(*args, **constants))
bias, leaky, x = opfuse.ops.Bias(8), LeakyReLU(), torch.randn(3, 8)
torch.nn.init.normal_(bias.bias)
y = opfuse.Sequential(bias, leaky)(x)
torch.testing.assert_close(y, leaky.value(x + bias.bias))
assert [constants["VALUE"].__name__ for constants in seen] == ["leaky"]
(where,) = case_lists("out-of-the-box").values()
assert [case.name for case in load_cases(where)] == ["bias + GELU"]
"""
    support = str(ROOT / "tests" / "support")
    path = os.pathsep.join([support, installed[1]["PYTHONPATH"]])
    python(installed, "-c", code, PYTHONPATH=path, TRITON_INTERPRET="1")


# The same shape everywhere


def structure(value):
    """Tables of tables, down to what is given."""
    return (
        {key: structure(inner) for key, inner in value.items()}
        if isinstance(value, dict)
        else type(value)
    )


@pytest.mark.parametrize("folder", IN_TREE, ids=lambda folder: folder.name)
def test_the_plugins_here_have_the_generated_shape(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(opfuse.plugins.manager, "records", [])
    written = scaffold.write(folder.name, tmp_path)
    extra = files(folder) - files(written)
    generated, ours = (
        tomllib.loads((at / "pyproject.toml").read_text()) for at in (written, folder)
    )
    has_cases = "opfuse_triton.cases" in ours["project"]["entry-points"]
    missing = () if has_cases else ("/cases.py",)  # its kernels are another package's
    here = ("check.yml",)  # this repository has workflows of its own
    if not any("_fusions" in path.read_text() for path in folder.glob("src/*/__init__.py")):
        missing = "/cases.py", "/fused.py", "/kernels.py", "tests/test_kernels.py"
    written_files = {path for path in files(written) if not path.endswith((*missing, *here))}
    cases = "".join(path.read_text() for path in folder.glob("src/*/cases.py"))
    for path in written_files - files(folder):
        # kernels that fill more than a file have a folder; those that others use are the toolkit's
        assert path.endswith("/kernels.py"), path
        of_toolkit = re.search(r"from opfuse_triton\.\w+ import", cases)
        assert path[:-3] + "/__init__.py" in files(folder) or of_toolkit, path
    module = min((path for path in files(folder) if path.endswith("__init__.py")), key=len)
    inside = module.removesuffix("__init__.py")
    assert all(path.startswith(("tests/", inside)) for path in extra), extra
    assert (
        (folder / "LICENSE").read_bytes()
        == (written / "LICENSE").read_bytes()
        == (ROOT / "LICENSE").read_bytes()
    )

    for key in ("authors", "keywords", "classifiers", "urls"):  # a published package needs them
        ours["project"].pop(key)
    for project in (ours["project"], generated["project"]):
        project.pop("optional-dependencies", None)  # each has its own
    ours["project"]["entry-points"].pop("opfuse.attributes", None)  # a plugin may add some
    if not has_cases:
        del generated["project"]["entry-points"]["opfuse_triton.cases"]
        generated["project"]["dependencies"].remove("opfuse-triton>=0.1,<0.2")
    assert structure(ours) == structure(generated)
    needed = ours["project"].pop("dependencies")  # the toolkits, too, where it uses them
    assert set(generated["project"].pop("dependencies")) <= set(needed) <= DEPENDENCIES
    for key in ("readme", "license", "license-files", "requires-python", "entry-points"):
        assert ours["project"][key] == generated["project"][key], key
    assert {**ours, "project": None} == {**generated, "project": None}

    assert len([line for line in (folder / module).read_text().splitlines() if line.strip()]) <= 40


@pytest.mark.parametrize("kind", scaffold.KINDS)
def test_the_template_depends_on_this_opfuse(kind):
    template = (scaffold.TEMPLATE / "any" / "pyproject.toml").read_text()
    project = tomllib.loads(scaffold.fill(template, "mine", kind))["project"]
    major, minor, _ = opfuse.__version__.split(".")
    bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
    toolkit = [f"opfuse-triton{bounds}"] if kind in HAVE_KERNELS else []
    assert project["dependencies"] == [f"opfuse{bounds}", *toolkit]
