"""Every Python block of the README and the documentation runs, and the tables name what exists.

The blocks of one file run in order in one namespace. A block that begins with a file name (``# name.py``) is also a
module that later blocks may import, and a ``text`` block right behind a block is what it prints.
"""

import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import opfuse
from opfuse import testing
from opfuse.core import hookspecs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
QUOTE = re.compile(r"^```{literalinclude} (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(r"\bOPFUSE_[A-Z_]*[A-Z]")


def files(page):
    """The blocks of a page that are files, by name."""
    found = {}
    for _, code, _ in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name := re.match(r"# (\w+\.\w+)\n", code):
            found[name[1]] = code
    return found


@pytest.fixture
def nothing_installed():
    with opfuse.plugins.isolated():
        yield


def test_what_pages_quote_is_there():
    quotes = [
        (page.parent / path, options)
        for page in PAGES
        for path, options in QUOTE.findall(page.read_text(encoding="utf-8"))
    ]
    assert quotes
    for path, options in quotes:
        text = path.read_text(encoding="utf-8")
        for option, marker in re.findall(r":([a-z-]+): (.*)", options):
            assert marker in text or option == "language", (path, marker)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_blocks_of_a_page_run(page, nothing_installed, tmp_path, monkeypatch):
    if page.name == "triton.md":
        pytest.importorskip("triton")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, code in files(page).items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    namespace = {"__name__": "__main__"}
    try:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            language, code, output = match.groups()
            if language != "python":
                continue
            torch.manual_seed(0)
            line = text.count("\n", 0, match.start()) + 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
            if output is not None:
                assert printed.getvalue().rstrip() == output.rstrip(), f"{page.name}:{line}"
    finally:
        for name in files(page):
            sys.modules.pop(name.removesuffix(".py"), None)


KERNEL = """
x = torch.randn(6, 10)
for same in (x, x[1:5, 2:9], x[:1].expand(6, 10), x.t(), x[:, ::2], x[:0]):
    torch.testing.assert_close(activate(opfuse.ops.SiLU(), same), torch.nn.functional.silu(same))
"""


def test_the_kernel_of_the_page_takes_any_layout(tmp_path):
    pytest.importorskip("triton")
    code = BLOCK.search((ROOT / "docs" / "triton.md").read_text(encoding="utf-8"))[2]
    code = code.replace("target.multiprocessors", "1")
    (tmp_path / "kernel.py").write_text(code + KERNEL, encoding="utf-8")
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "kernel.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.alone
def test_the_tests_of_a_recipe_pass_without_an_installed_plugin(tmp_path):
    """As a reader runs them who made the two files of the page."""
    for name, code in files(ROOT / "docs" / "write-a-recipe.md").items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "shapes"]
    ran = subprocess.run([*command, "test_int8.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_plugin_loads_and_changes_no_answer(nothing_installed, tmp_path, monkeypatch):
    written = files(ROOT / "README.md")
    project = tomllib.loads(written.pop("pyproject.toml"))
    ((name, code),) = written.items()
    (tmp_path / name).write_text(code, encoding="utf-8")
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"] == [name]
    ((entry_point, module),) = project["project"]["entry-points"][hookspecs.GROUP].items()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20

    monkeypatch.syspath_prepend(tmp_path)
    record = opfuse.plugins.register(importlib.import_module(module), name=entry_point)
    chain = opfuse.Sequential(opfuse.ops.Linear(8, 16), opfuse.ops.GELU(), opfuse.ops.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    results = []
    for selection in ("", entry_point):
        with opfuse.plugins.using(selection):
            y = chain(x)
            plan = str(opfuse.explain(chain, x))
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, *chain.parameters()])))
        assert ("LinearBias" in plan) == bool(selection)
    opfuse.plugins.remove(record)
    sys.modules.pop(module)
    torch.testing.assert_close(*results)


def test_the_plugin_is_found_by_its_entry_point(tmp_path):
    written = files(ROOT / "README.md")
    project = tomllib.loads(written.pop("pyproject.toml"))["project"]
    for name, code in written.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "OPFUSE_PLUGINS": "addmm"}
    command = [sys.executable, "-m", "opfuse", "plugins", "--json"]
    listed = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    states = {row["distribution"]: row["state"] for row in json.loads(listed.stdout)}
    assert states[project["name"]] == "loaded"


def module_of_docs(name):
    """A module of the folder docs, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def generated():
    """What docs/generate.py writes, by name."""
    return module_of_docs("generate").generated()


@pytest.mark.parametrize(
    "name",
    [
        *("hooks.md", "contracts.md", "from-te-ops.md", "checks.md"),
        *("plan.svg", "architecture.svg", "kernels.svg", "memory.svg"),
    ],
)
def test_what_is_generated_is_current(name):
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if name == "memory.svg" and pinned[1] not in torch.__version__:
        pytest.skip("what torch counts as operations differs between its versions")
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generated()[name], (
        "run docs/generate.py"
    )


def test_every_check_of_the_kit_has_a_usual_cause():
    """And each cause is that of a check: docs/checks.py."""
    page = module_of_docs("checks")
    names = [name for found in page.checks() for name, _ in found]
    assert sorted(page.CAUSES) == sorted(names)
    assert all(page.CAUSES.values())


def test_the_table_of_names_knows_every_op():
    """A name on it is one of te.ops, and one only here is told as such."""
    page = (ROOT / "docs" / "from-te-ops.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (absent|`[\w.]+`) \|", page, re.MULTILINE))
    (new,) = re.findall(r"^Only opfuse has these, .*?: (.*)\.$", page, re.MULTILINE)
    assert {*rows, *re.findall(r"`(\w+)`", new)} >= set(opfuse.ops.__all__)
    absent = {name for name, where in rows.items() if where == "absent"}
    assert absent == {"fused", "is_op_fuser_grouped_tensor_path_supported"}
    for name in set(rows) - absent:
        path = rows[name].strip("`").split(".")[1:]
        assert functools.reduce(getattr, path, opfuse).__name__ == name


def run_blocks(page):
    """What the blocks of Python of a page define."""
    namespace = {}
    pattern = BLOCK.pattern.replace(r"(\w+)", "(python)", 1)
    for _, code, _ in re.findall(pattern, page.read_text(encoding="utf-8"), BLOCK.flags):
        exec(code, namespace)
    return namespace


@pytest.mark.parametrize("passes", ["forward", "backward", "joint"])
def test_the_fusions_of_the_hooks_page_give_the_right_numbers(passes, nothing_installed):
    (fusion,) = run_blocks(ROOT / "docs" / "hooks.md")[f"opfuse_{passes}_fusions"]()
    chains = testing.make_chains(testing.Subject("example", passes, fusion))
    for check in ("saved_state", "output", "gradients", "autocast"):
        if passes in testing.CHECKS[check].passes:
            outcome = testing.run_all(testing.CHECKS[check], chains)
            assert outcome.failure is None and outcome.ran, str(outcome)


def test_the_fused_op_that_adds_to_a_sum_does_so_and_is_right(nothing_installed):
    """That of write-a-plugin; without its declaration it gets no sum, and the numbers are the same."""
    adding = run_blocks(ROOT / "docs" / "write-a-plugin.md")["LinearGrad"]
    fusion, offered, totals = opfuse.Fusion((opfuse.ops.BasicLinear,), adding), [], []
    chains = testing.make_chains(testing.Subject("example", "backward", fusion))
    for check in ("gradients", "main_grad", "grad_input"):
        outcome = testing.run_all(testing.CHECKS[check], chains)
        assert outcome.failure is None and outcome.ran, str(outcome)

    class Noting(adding):
        def fuser_backward(self, basic_op_ctxs, *args, **given):
            offered.append(basic_op_ctxs[0].grad_sum is not None)
            return super().fuser_backward(basic_op_ctxs, *args, **given)

    for declares in (True, False):
        fused = type("Fused", (Noting,), {"adds_to_sum": declares})
        handle = opfuse.register_backward_fusion(opfuse.Fusion((opfuse.ops.BasicLinear,), fused))
        torch.manual_seed(0)
        linear = opfuse.ops.BasicLinear(8, 8, accumulate_into_main_grad=True)
        linear.weight.main_grad = torch.ones(8, 8)
        opfuse.Sequential(linear)(torch.randn(4, 8)).sum().backward()
        totals.append(linear.weight.main_grad)
        handle.unregister()
    assert offered == [True, False]
    torch.testing.assert_close(*totals)


def test_the_hooks_page_has_every_hook_and_its_examples_hold(nothing_installed):
    page = ROOT / "docs" / "hooks.md"
    names = [name for name in vars(hookspecs) if name.startswith("opfuse_")]
    assert re.findall(r"^## (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE) == names
    namespace = run_blocks(page)
    ops, x = opfuse.ops, torch.randn(4, 8, requires_grad=True)
    chain = opfuse.Sequential(
        ops.Linear(8, 8), ops.ReLU(), ops.ConstantScale(2.0), ops.ConstantScale(3.0)
    )

    def results(recipe):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = chain(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *chain.parameters()])

    separate = results(None)
    for tool in (False, True):
        of_tools = "opfuse_wrap_", "opfuse_facts"
        given = [name for name in names if name.startswith(of_tools) is tool]
        plugin = type("Plugin", (), {name: staticmethod(namespace[name]) for name in given})()
        opfuse.plugins.register(plugin, name="example", tool=tool)
    chain = opfuse.Sequential(*chain)  # a call is wrapped when its chain is captured
    torch.testing.assert_close(results(None), separate)
    (call,) = opfuse.explain(chain, x).calls
    assert (call.plan.table, call.plan.forward[1].note) == ("of Tuesday", "as fast on Tuesday")
    plan = opfuse.explain(chain, x).to_dict()
    assert [s["fusion"] for s in plan["forward"]] == [None, "BiasReLU", "TwiceScaled"]
    assert [s["fusion"] for s in plan["backward"]] == ["TwiceScaled", "BiasReLUGrad", None]
    coarse = results(opfuse.plugins.recipes()["rounding"](step=0.5))
    assert not torch.equal(coarse[0], separate[0])
    torch.testing.assert_close(coarse[0], separate[0], atol=30.0, rtol=0.0)
    assert len(namespace["counts"]) == 1 and namespace["seconds"]["BiasReLUGrad"] > 0.0


def test_every_environment_variable_has_its_row():
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(OPFUSE_\w+)` \|", text, re.MULTILINE))
    package = pathlib.Path(opfuse.__file__).parent
    read = {
        name
        for file in package.rglob("*.py")
        for name in VARIABLE.findall(file.read_text(encoding="utf-8"))
    }
    assert rows == read
