"""The example, as a user's shell runs it, with tiny settings."""

import ast
import contextlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch
import toy_fusions
import toy_recipe

import opfuse

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "train_lm.py"
TINY = ["--batch", "4", "--context", "32", "--width", "64", "--layers", "2"]
MISSING = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]


def has(name):
    """Whether a plugin of this repository is installed."""
    return importlib.util.find_spec(f"opfuse_{name}") is not None


needs_extras = pytest.mark.skipif(
    bool(MISSING), reason=f"the example needs {', '.join(MISSING)}: opfuse[examples]"
)


def example(*options, **environment):
    """Run it in a new process, whatever plugins are selected for this one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OPFUSE_")}
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**environ, **environment},
    )


def same(one, other):
    """Bit for bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def numbers(output, title):
    """The cells of a row of the table."""
    (cells,) = re.findall(rf"^{re.escape(title)} +(.+)$", output, re.MULTILINE)
    return [float(cell.replace(",", "")) for cell in cells.split()]


@needs_extras
@pytest.mark.alone
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_train_as_one():
    script = SCRIPT.with_name("train_tensor_parallel.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    sizes = ["--steps", "4", "--batch", "2", "--context", "16", "--layers", "1"]
    environ = {**os.environ, "OPFUSE_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, *sizes],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env=environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("on two processes") == 4 and "The losses agree" in done.stdout


@needs_extras
def test_report(tmp_path):
    result = example(*TINY, "--steps", 16, "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr

    assert "16/16" in result.stderr and "Warning" not in result.stderr
    said = re.findall(r"^\[ *\d+ s\] (\w+)", result.stdout, re.MULTILINE)
    assert said == ["Loading", "Reading", "Training", "Computing"]
    assert "calls of fusible ops: forward " in result.stdout
    assert re.search(r"A sample of the fused run\n\nThe .{50}", result.stdout, re.DOTALL)
    fused, unfused = numbers(result.stdout, "validation loss, nats per byte")
    assert 1 < fused < 5 and fused == pytest.approx(unfused, rel=0.01)
    assert all(number > 0 for number in numbers(result.stdout, "training, tokens per second"))
    assert len(numbers(result.stdout, "the first step, seconds")) == 2
    kept, all_ = numbers(result.stdout, "saved activations, bytes")
    assert 100_000 < kept and (kept < 0.7 * all_ if has("mlp") else kept == all_)
    # what compiles has tests of its own, and a first run does not wait for it
    assert ("--plugins all" in result.stdout) == has("inductor")
    assert "compiled" not in result.stdout.partition("A sample")[0]
    assert "Fused and unfused losses agree." in result.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "fusible ops" in (tmp_path / "plan.txt").read_text(encoding="utf-8")


@needs_extras
@pytest.mark.costly(0)  # below it is tested under a recipe
def test_exact_resume(tmp_path):
    whole, half, resumed = (tmp_path / f"{name}.pt" for name in ("whole", "half", "resumed"))
    for options in (
        [*TINY, "--steps", 16, "--save", whole],
        [*TINY, "--steps", 8, "--save", half],
        ["--steps", 8, "--resume", half, "--save", resumed],
    ):
        result = example(*options, "--out", tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    expected, got = (torch.load(path, weights_only=True) for path in (whole, resumed))
    assert len(expected["runs"]["fused"]["losses"]) == 16
    assert not same(expected, torch.load(half, weights_only=True))
    assert same(expected, got)


@needs_extras
@pytest.mark.alone  # it says which plugins are on
def test_without_a_plugin_in_use(tmp_path):
    options = [*TINY, "--steps", 1, "--skip-unfused", "--out", tmp_path]
    result = example(*options, "--plugins", "")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "fusible ops: forward 0 fused, " in result.stdout and "Nothing is fused: " in result.stdout
    )
    assert "agree" not in result.stdout
    assert len(numbers(result.stdout, "saved activations, bytes")) == 1


@needs_extras
def test_a_recipe_beside_bf16(tmp_path):
    pytest.importorskip("opfuse_fp8", reason="the recipes are those of opfuse-plugin-fp8")
    how = ["--recipe", "fp8-delayed", "--out", tmp_path]
    tiny = [*TINY, *how]
    result = example(*tiny, "--steps", 4, "--save", tmp_path / "whole.pt")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "quantized by DelayedScaling: 24 of 27 products of linear ops" in result.stdout
    assert "The validation losses with and without fp8-delayed are close: " in result.stdout
    quantized, bf16 = numbers(result.stdout, "validation loss, nats per byte")
    assert quantized != bf16 and quantized == pytest.approx(bf16, rel=0.01)
    assert example(*tiny, "--steps", 2, "--save", tmp_path / "half.pt").returncode == 0
    more = [*how, "--resume", tmp_path / "half.pt"]
    result = example(*more, "--steps", 2, "--save", tmp_path / "resumed.pt")
    assert result.returncode == 0, result.stdout + result.stderr
    expected, got = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed")
    )
    assert same(expected, got)
    refused = example("--resume", tmp_path / "half.pt", "--out", tmp_path)
    assert refused.returncode == 2
    assert "holds no fused run, only fp8-delayed, bf16: see --skip-unfused" in refused.stderr


@needs_extras
def test_a_recipe_that_nobody_offers(tmp_path):
    if importlib.util.find_spec("opfuse_fp8"):
        pytest.skip("opfuse-plugin-fp8 offers it here")
    result = example(*TINY, "--recipe", "nvfp4", "--out", tmp_path)
    assert result.returncode == 2 and "no plugin offers a recipe 'nvfp4'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.alone  # it ends before it looks for one
def test_missing_package_is_one_line(tmp_path):
    tmp_path.joinpath("matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    result = example(PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr == 'This example needs matplotlib: pip install "opfuse[examples]"\n'


WRONG = """
import opfuse
from opfuse.ops import BasicLinear, Bias


class Forgetful(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        return x @ weight.T, [(), ()]


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [opfuse.Fusion((BasicLinear, Bias), Forgetful)]
"""


@needs_extras
@pytest.mark.alone  # it says which plugins are on
def test_a_wrong_plugin_makes_the_example_fail(tmp_path):
    installed = tmp_path / "opfuse_plugin_wrong-1.0.dist-info"
    installed.mkdir()
    installed.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: opfuse-plugin-wrong\nVersion: 1.0\n"
    )
    installed.joinpath("entry_points.txt").write_text("[opfuse.v1]\nwrong = opfuse_wrong\n")
    tmp_path.joinpath("opfuse_wrong.py").write_text(WRONG)
    options = [*TINY, "--steps", 2, "--plugins", "wrong", "--out", tmp_path]
    result = example(*options, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "opfuse-plugin-wrong 1.0" in result.stdout and "losses DO NOT AGREE" in result.stdout


def as_module():
    """The script, imported."""
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@needs_extras
@pytest.mark.alone  # it computes with made-up seconds
@pytest.mark.parametrize(
    "first, later, kept, said",
    [
        (
            9.0,
            1.0,
            50,
            ["learns the same, keeps less memory", "is faster", "8 steps win that back"],
        ),
        (9.0, 2.5, 100, ["keeps as much memory", "is slower", "no step wins that back"]),
        (1.5, 2.0, 50, ["0.50 of the bytes", "is as fast", "1.00 times its tokens"]),
    ],
)
def test_the_last_lines_say_what_was_gained(first, later, kept, said, capsys):
    script, runs = as_module(), {}
    for name, seconds in (("fused", [first] + 9 * [later]), ("unfused", [1.0] + 9 * [2.0])):
        runs[name] = script.Run.__new__(script.Run)
        runs[name].seconds, runs[name].recipe = seconds, None
        runs[name].args = types.SimpleNamespace(batch=2, context=3)
    script.gained(runs, [kept, 100], True, "loaded")
    told = capsys.readouterr().out
    assert all(each in told for each in said) and ("longer" in told) == (first == 9.0)
    assert "--plugins all" not in told
    script.gained(runs, [kept, 100], False, "blocked")
    told = capsys.readouterr().out
    assert "DOES NOT LEARN THE SAME" in told and "add: --plugins all --prefer speed" in told


@needs_extras
def test_docstrings_come_in_the_order_of_a_walk():
    """Recorded losses are of this text."""
    script, tree = as_module(), ast.parse(pathlib.Path(contextlib.__file__).read_bytes())
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    walked = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    assert len(walked) > 50 and list(script.documented(tree)) == walked


def trained(script, plugins, steps=6):
    """The losses of a short training under a recipe, the weights after it, and what ran."""
    torch.manual_seed(0)
    model = opfuse.assign_names(script.LanguageModel(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    losses, tokens = [], torch.randint(256, (4, 33))
    with opfuse.plugins.using(plugins):
        for _ in range(steps):
            with opfuse.autocast("delayed-int8"):
                logits = model(tokens[:, :-1])
            loss = script.loss_of(logits, tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with opfuse.autocast("delayed-int8"):
            report = opfuse.explain(model, tokens[:, :-1])
    return losses, model.state_dict(), report


@needs_extras
@pytest.mark.alone  # it says which plugins are on
def test_it_trains_under_a_recipe_with_fused_casts_to_the_last_bit():
    """The recipe is one plugin's, the fusions with casts are another one's."""
    script = as_module()
    records = [
        opfuse.plugins.register(toy_recipe, name="toy-recipe"),
        opfuse.plugins.register(toy_fusions, name="toy-fusions"),
    ]
    try:
        losses, weights, report = trained(script, "toy-recipe")
        fused_losses, fused_weights, fused_report = trained(script, "toy-recipe,toy-fusions")
    finally:
        for record in records:
            opfuse.plugins.remove(record)
    assert losses == fused_losses and losses[-1] < losses[0]
    assert same(dict(weights), dict(fused_weights))
    assert "GELU + Cast[Int8Quantizer]" in str(fused_report)
    assert "Cast[Int8Quantizer] + Bias + GELU" in str(fused_report)
    for which in ("forward", "backward"):
        found = [row["fusion"] for row in fused_report.to_dict()[which] if row["fusion"]]
        assert len(found) == 2 and not any(r["fusion"] for r in report.to_dict()[which])
