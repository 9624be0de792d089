"""``opfuse freeze`` lists what decides numbers; ``options(locked=PATH)`` refuses anything else."""

import contextlib
import json
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from fakes import make_plugin
from fp32 import restored
from opfuse_reproducible import lock

import opfuse
from opfuse import ops
from opfuse.cli import commands as cli
from opfuse.core import plugins
from opfuse.core.quantization import Recipe
from opfuse.tuning import table as tables
from opfuse.tuning.causes import causes


@pytest.fixture
def path(tmp_path, no_plugins):
    """What ``opfuse freeze > PATH`` writes here."""
    path = tmp_path / "numbers.json"
    path.write_text(opfuse.freeze())
    return path


@contextlib.contextmanager
def changed(get, set_, value):
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def refused(path, match):
    with pytest.raises(opfuse.LockError, match=match) as info, opfuse.options(locked=path):
        pass
    assert str(path) in str(info.value) and "run `opfuse freeze` again" in str(info.value)


def test_it_lists_what_decides_numbers(no_plugins):
    with opfuse.options(prefer="memory"):
        found = json.loads(opfuse.freeze())
        assert found == json.loads(json.dumps(lock.deciding()))
        assert found.items() >= causes().items()  # what plans depend on is part of it
    assert found["torch"] == torch.__version__ and found["opfuse"] == opfuse.__version__
    assert found["the options"] == {"prefer": "'memory'"}
    assert found["the cpu"]["threads"] == torch.get_num_threads()
    assert torch.backends.cpu.get_cpu_capability() in found["the cpu"]["device"]
    assert found["the cpu"]["matmul_precision"] == "ieee"
    assert found["deterministic algorithms"] is False and found["the recipe"] is None


def test_the_command_prints_it():
    result = CliRunner().invoke(cli.main, ["freeze"])
    assert result.exit_code == 0 and json.loads(result.stdout) == json.loads(opfuse.freeze())


def test_the_same_runs(path):
    op, x = ops.Linear(4, 4), torch.randn(3, 4)
    expected = op(x)
    with opfuse.options(locked=path):
        assert torch.equal(op(x), expected) and torch.equal(op(x), expected)
        with torch.no_grad():
            assert torch.equal(opfuse.Sequential(op)(x), expected)
    with opfuse.options(locked=str(path)):
        op(x).sum().backward()
    assert op.weight.grad is not None


def test_threads(path):
    there = torch.get_num_threads()
    with changed(torch.get_num_threads, torch.set_num_threads, there + 1):
        refused(path, f"the cpu: threads: {there} against {there + 1} here")
        with opfuse.options(locked=path_of_now(path)):
            pass


def path_of_now(path):
    other = path.with_name("now.json")
    other.write_text(opfuse.freeze())
    return other


def test_threads_and_precision_that_change_in_the_block(path):
    """Each call compares them, also of a chain that was planned before."""
    op, x, there = ops.GELU(), torch.randn(3, 4), torch.get_num_threads()
    with opfuse.options(locked=path):
        op(x)
        with changed(torch.get_num_threads, torch.set_num_threads, there + 1):
            with pytest.raises(opfuse.LockError, match="the cpu: threads"):
                op(x)
        op(x)
        with restored():
            torch.set_float32_matmul_precision("medium")
            with pytest.raises(opfuse.LockError, match="matmul_precision: ieee against bf16 here"):
                op(x)
        op(x)


def test_the_precision_of_products(path):
    with restored():
        torch.set_float32_matmul_precision("medium")
        refused(path, "the cpu: matmul_precision: ieee against bf16 here")


def test_deterministic_algorithms(path):
    op = ops.GELU()
    with opfuse.options(locked=path):
        op(torch.ones(2))
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(
                opfuse.LockError, match="deterministic algorithms: False against True"
            ):
                op(torch.ones(2))
            refused(path, "deterministic algorithms: False against True here")
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_capability_of_the_cpu(tmp_path):
    """In another process, which PyTorch tells to use no AVX."""
    code = "import opfuse; print(opfuse.freeze())"
    texts = []
    for capability in ("default", None):
        given = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        env = {**lock.os.environ, "OPFUSE_PLUGINS": "", "OPFUSE_TUNING": "", **given}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    slow, here = [json.loads(text)["the cpu"]["device"] for text in texts]
    assert slow.endswith(("DEFAULT", "NO AVX")) and slow != here
    path = tmp_path / "numbers.json"
    path.write_text(texts[0])
    with plugins.isolated(), plugins.using(""):
        refused(path, f"the cpu: device: .* against {re.escape(here)} here")


def test_the_version_of_a_plugin(tmp_path, register):
    path = tmp_path / "numbers.json"
    record = register(make_plugin(), version="1.0")
    path.write_text(opfuse.freeze())
    with opfuse.options(locked=path):
        ops.GELU()(torch.ones(2))
    plugins.remove(record)
    register(make_plugin(), version="1.1")
    refused(path, "the plugins: opfuse-plugin-test: 1.0 against 1.1 here")


def test_a_plugin_that_is_turned_off(tmp_path, register):
    path = tmp_path / "numbers.json"
    register(make_plugin())
    path.write_text(opfuse.freeze())
    with opfuse.options(locked=path), plugins.using("-test"):
        with pytest.raises(
            opfuse.LockError, match="the plugins: opfuse-plugin-test: 1.0 against none"
        ):
            ops.GELU()(torch.ones(2))


def test_a_tuning_table(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    cpu = torch.device("cpu")
    subject = {"plugin": None, "fusion": "a", "pass": "joint"}
    found = {"speed": 2.0, "noise": 0.1, "seconds": 1e-6}
    row = {
        "subject": subject,
        "setting": tables.setting(cpu),
        "shape": [1, 2, True],
        "found": found,
    }
    content = {"format": tables.FORMAT, "entries": [row]}
    tables.path_for(cpu).write_text(json.dumps(content))
    tables.reload()
    try:
        refused(path, "the tuning tables: cpu: none against [0-9a-f]{16} here")
        locked = path_of_now(path)
        with opfuse.options(locked=locked):
            pass
        found["speed"] = 2.5
        tables.path_for(cpu).write_text(json.dumps(content))
        tables.reload()
        refused(locked, "the tuning tables: cpu: [0-9a-f]{16} against [0-9a-f]{16} here")
    finally:
        monkeypatch.undo()
        tables.reload()


def test_the_configurations_of_kernels(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    name = tables.setting(torch.device("cpu"))["device"]
    tables.kernels_path(name).write_text("{}")
    refused(path, "the kernels' configurations: cpu: none against [0-9a-f]{16} here")


def test_options_are_compared_when_a_plan_is_made(path):
    with opfuse.options(locked=path), opfuse.options(prefer="memory"):
        with pytest.raises(
            opfuse.LockError, match="the options: prefer: none against 'memory' here"
        ):
            ops.GELU()(torch.ones(2))
    with opfuse.options(prefer="memory"):
        locked = path_of_now(path)
    with opfuse.options(prefer="memory", locked=locked):
        ops.GELU()(torch.ones(2))
    with opfuse.options(locked=locked):
        with pytest.raises(opfuse.LockError, match="prefer: 'memory' against none here"):
            ops.GELU()(torch.ones(2))


def test_autocast_is_compared_when_a_plan_is_made(path, tmp_path):
    chain, x = opfuse.Sequential(ops.Linear(8, 8)), torch.randn(4, 8)
    with opfuse.options(locked=path):
        chain(x)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(opfuse.LockError, match="torch.autocast: cpu: none against"):
                chain(x)
        chain(x)
    with torch.autocast("cpu", torch.bfloat16):
        path.write_text(opfuse.freeze())
        with opfuse.options(locked=path):
            chain(x)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_denormal_numbers(path):
    torch.set_flush_denormal(True)
    try:
        refused(path, "other switches: denormal numbers on the cpu: True against False")
    finally:
        torch.set_flush_denormal(False)


def test_the_recipe(tmp_path, register):
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Own(Recipe):
        number: int = 1

    register(make_plugin(recipes={"own": Own}))
    path = tmp_path / "numbers.json"
    with opfuse.autocast(Own(1)):
        path.write_text(opfuse.freeze())
    with opfuse.options(locked=path):
        with opfuse.autocast(Own(1)):
            ops.GELU()(torch.ones(2))
        with opfuse.autocast(Own(2)), pytest.raises(opfuse.LockError, match="the recipe: "):
            ops.GELU()(torch.ones(2))
        with pytest.raises(opfuse.LockError, match="the recipe: "):
            ops.GELU()(torch.ones(2))


def test_the_environment_of_libraries(path, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    refused(path, "the environment: MKL_CBWR: none against COMPATIBLE here")


def test_with_the_bits_of_rows(path):
    op, x = ops.GELU(), torch.randn(70, 4)
    with opfuse.options(invariant="batch"):
        locked = path_of_now(path)
    with torch.no_grad(), opfuse.options(locked=locked, invariant="batch"):
        assert torch.equal(op(x[3]), op(x)[3])
    with torch.no_grad(), opfuse.options(locked=path, invariant="batch"):
        with pytest.raises(opfuse.LockError, match="invariant: none against 'batch' here"):
            op(x)


def test_a_block_that_was_refused_leaves_no_settings(path):
    with changed(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1):
        refused(path, "threads")
    assert "locked" not in dict(opfuse.core.settings.current.options)


def test_a_file_that_is_no_lock(tmp_path):
    path = tmp_path / "other.json"
    for text in ("", "[]", "{}", '{"torch": 1}', "\x00"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a file that `opfuse freeze` wrote"):
            opfuse.options(locked=path)
    with pytest.raises(ValueError, match="expected the path of a file .* got its text"):
        opfuse.options(locked=opfuse.freeze())
    with pytest.raises(OSError, match="missing.json"):
        opfuse.options(locked=tmp_path / "missing.json")
    with pytest.raises(TypeError, match="PathLike"):
        opfuse.options(locked=3)


def test_of_a_newer_opfuse_that_lists_more(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "the moon": "full"}))
    refused(path, "the moon: 'full' against 'nothing' here")
