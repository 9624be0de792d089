"""A plugin that was built for the first contract, and is never changed, works with this opfuse.

``tests/frozen`` is what pip unpacks from its wheel. Its RECORD has the hash of each file, and this
file has the hash of RECORD. If a test here fails, change opfuse, not the plugin: what breaks it
breaks the plugins of others. A change that cannot be avoided opens another group.
"""

import base64
import hashlib
import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import opfuse
from opfuse import ops, testing
from opfuse.core import hookspecs

FROZEN = pathlib.Path(__file__).parent / "frozen"
INFO = FROZEN / "opfuse_frozen_v1-1.0.0.dist-info"
RECORD = "08238e6791fbf101bb5c155bdaae31d48b63ee8a92c67bc88d164609b943411b"


@pytest.fixture
def plugin(register, monkeypatch):
    """The plugin alone, as its entry point names it."""
    monkeypatch.syspath_prepend(FROZEN)
    (line,) = [at for at in (INFO / "entry_points.txt").read_text().splitlines() if "=" in at]
    name, _, module = line.partition(" = ")
    loaded = importlib.import_module(module)
    register(loaded, name=name, distribution="opfuse-frozen-v1", version="1.0.0")
    yield loaded
    del sys.modules[module]


def make_chain():
    """Ops that every fusion of the plugin finds."""
    torch.manual_seed(0)
    return opfuse.Sequential(
        ops.Linear(8, 16),
        ops.ReLU(),
        ops.ConstantScale(2.0),
        ops.ConstantScale(0.25),
        ops.Linear(16, 8),
    )


def results(chain, x, **context):
    with opfuse.autocast(**context) if context else opfuse.options():
        y = chain(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *chain.parameters()])


def largest(tensor):
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def fusions(plan, which):
    return [step["fusion"] for step in plan.to_dict()[which] if step["fusion"]]


def test_nobody_changed_it():
    assert hashlib.sha256((INFO / "RECORD").read_bytes()).hexdigest() == RECORD
    rows = [line.split(",") for line in (INFO / "RECORD").read_text().splitlines()]
    assert {name for name, *_ in rows} == {
        path.relative_to(FROZEN).as_posix()
        for path in FROZEN.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name, value, size in rows:
        if value:
            data = (FROZEN / name).read_bytes()
            made = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (value, int(size)) == (f"sha256={made}", len(data)), f"{name} was changed"


def test_it_is_of_the_contract_of_today():
    """Once there is another group, this one is still served; see the page on versioning."""
    assert f"[{hookspecs.GROUP}]" == (INFO / "entry_points.txt").read_text().splitlines()[0]


def test_it_is_found_and_loaded_as_an_installed_package(tmp_path):
    path = os.pathsep.join([str(FROZEN), *(entry for entry in sys.path if entry)])
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "OPFUSE_PLUGINS": "frozen_v1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-W", "error", "-m", "opfuse", "plugins", "--json"]
    ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (row,) = [row for row in json.loads(ran.stdout) if row["distribution"] == "opfuse-frozen-v1"]
    assert (row["name"], row["version"], row["state"]) == ("frozen_v1", "1.0.0", "loaded")
    assert {hook.removeprefix("opfuse_") for hook in row["hooks"]} == {
        "forward_fusions",
        "backward_fusions",
        "joint_fusions",
        "recipes",
        "options",
        "quantizer",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 127])
def test_its_fusions_run_and_give_the_numbers_of_the_ops(plugin, rows, dtype):
    chain = make_chain().to(dtype)
    x = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    fused, plan = results(chain, x), opfuse.explain(chain, x)
    assert fusions(plan, "forward") == ["FrozenBiasReLU", "FrozenTwiceScaled", "FrozenLinearBias"]
    assert fusions(plan, "backward") == ["FrozenTwiceScaled", "FrozenBiasReLUGrad"]
    with opfuse.plugins.using(""):
        separate = results(chain, x)
    reference = make_chain().to(torch.float64)
    exact = results(reference, x.detach().double().requires_grad_())
    for ours, theirs, wanted in zip(fused, separate, exact, strict=True):
        size, error = largest(wanted), largest(theirs - wanted)
        assert largest(ours - wanted) <= 2 * error + 4 * torch.finfo(dtype).eps * size
        assert ours.dtype is theirs.dtype is dtype


def without_cached(check):
    """The cases of a check but those of inputs kept in FP8: the kit has tried them only since."""

    def is_cached(op):
        return dict(op.kwargs).get("cache_quantized_input", False)

    return lambda chains: [
        case for case in check.cases(chains) if not any(map(is_cached, case.ops))
    ]


@pytest.mark.parametrize("passes, count", [("forward", 2), ("backward", 1), ("joint", 1)])
def test_the_kit_accepts_its_fusions(plugin, passes, count):
    found = getattr(plugin, f"opfuse_{passes}_fusions")()
    assert len(found) == count
    for fusion in found:
        chains = testing.make_chains(testing.Subject("frozen_v1", passes, fusion))
        for check in map(testing.CHECKS.get, ("saved_state", "output", "gradients")):
            if passes in check.passes:
                outcome = testing.run_all(check._replace(cases=without_cached(check)), chains)
                assert outcome.failure is None and outcome.ran, str(outcome)


def test_its_conditions_and_its_option_are_asked(plugin):
    chain, x = make_chain(), torch.randn(4, 8, requires_grad=True)
    results(chain, x)
    with opfuse.options(**{"frozen_v1.off": True}):
        plan = opfuse.explain(chain, x)
    assert fusions(plan, "forward") == ["FrozenTwiceScaled"]
    assert "frozen_v1.off turns it off" in str(plan)


def test_its_quantizer_casts_inputs_weights_and_gradients(plugin):
    chain, x = make_chain(), torch.randn(32, 8, requires_grad=True)
    exact, quantized = results(chain, x), results(chain, x, recipe="frozen-int8")
    coarse = results(chain, x, recipe=plugin.FrozenInt8(levels=7))
    for ours, wanted, worse in zip(quantized, exact, coarse, strict=True):
        error = ((ours - wanted).norm() / wanted.norm()).item()
        assert 1e-4 < error < 0.05, error
        assert (worse - wanted).norm() > 4 * (ours - wanted).norm()
