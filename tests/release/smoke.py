"""What the README promises, of a package that pip installed by its name: python smoke.py NAME.

Your model uses the plugin once it is installed, ``opfuse.explain`` names it, and without it the
same model gives the same answer. Nothing else of this repository is there.
"""

import importlib.metadata
import json
import subprocess
import sys
import warnings

import torch

import opfuse
from opfuse import ops

NAME = sys.argv[1]
SHORT = NAME.removeprefix("opfuse-plugin-")
FUSES_HERE = {"linear": {}, "mlp": {"prefer": "memory"}}
"""Plugins that fuse the README's chain on a CPU without Triton, and the options they need."""
SAYS_WHY_NOT = ("activation", "inductor", "liger", "norm")
"""Plugins that find ops to fuse in it, and refuse this machine or this size."""


def command(*arguments):
    """What ``python -m opfuse`` prints."""
    ran = [sys.executable, "-m", "opfuse", *arguments]
    return subprocess.run(ran, check=True, capture_output=True, text=True).stdout


def step(chain, x):
    """The output and all gradients of a chain."""
    y = chain(x)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *chain.parameters()])]


def block():
    """The chain of the README."""
    return opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(64),
        ops.Linear(64, 256),
        ops.GELU(),
        ops.Linear(256, 64),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def check_installation():
    """The package is there in its version, and comes from the environment alone."""
    assert opfuse.__file__.startswith(sys.prefix), f"{opfuse.__file__} is not what pip installed"
    rows = json.loads(command("plugins", "--json"))
    states = {row["distribution"]: (row["version"], row["state"]) for row in rows}
    version = importlib.metadata.version(NAME)
    assert states.pop("opfuse") == (opfuse.__version__, "loaded")  # its tools
    is_listed = NAME != SHORT or NAME in ("opfuse-distributed", "opfuse-reproducible")
    assert not is_listed or states.pop(NAME) == (version, "loaded"), states
    assert set(states) <= {"opfuse-distributed"}, states  # what a package needs
    assert f"opfuse {opfuse.__version__}" in command("doctor")


def check_answers():
    """The answer is that of the separate ops; the plugin is named, with what it does or why not."""
    chain, x = block(), torch.randn(32, 64, requires_grad=True)
    with opfuse.options(**FUSES_HERE.get(SHORT, {})):
        given = step(chain, x)
        report = opfuse.explain(chain, x)
    with opfuse.plugins.using(""):
        torch.testing.assert_close(given, step(chain, x))
    plan = report.to_dict()
    fused = {each["distribution"] for each in plan["forward"] + plan["backward"] if each["fusion"]}
    assert fused == ({NAME} if SHORT in FUSES_HERE else set()), report
    assert (NAME in str(report)) == (SHORT in FUSES_HERE or SHORT in SAYS_WHY_NOT), report


def check_recipe():
    """A step of training under a recipe of the plugin multiplies quantized tensors."""
    chain, x = opfuse.Sequential(ops.Linear(64, 64)), torch.randn(32, 64, requires_grad=True)
    plain = step(chain, x)
    for name in ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"):
        with opfuse.autocast(recipe=name):
            quantized = step(chain, x)
        for ours, exact in zip(quantized, plain, strict=True):
            error = float((ours - exact).norm() / exact.norm())
            assert 0 < error < 0.3, f"{name}: an error of {error}"


def check_loss():
    """A head and its loss are one op of the plugin, with the answers of the separate ops."""
    chain = opfuse.Sequential(ops.Linear(16, 48), ops.CrossEntropy())
    x, targets = torch.randn(128, 16, requires_grad=True), torch.randint(48, (128,))
    found = []
    for plugins in (SHORT, ""):
        with opfuse.plugins.using(plugins):
            loss = chain(x, targets)
            found.append([loss, *torch.autograd.grad(loss, [x, *chain.parameters()])])
            fused = [
                step["fusion"] for step in opfuse.explain(chain, x, targets).to_dict()["forward"]
            ]
        assert fused == (["linear+loss"] if plugins else [None] * 3), fused
    torch.testing.assert_close(*found)


def check_conversion():
    """A model is converted in place, and gives what it gave."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    holder, x = torch.nn.ModuleList([model]), torch.randn(4, 8)
    expected = model(x)
    report = str(opfuse.convert(holder))
    torch.testing.assert_close(model(x), expected)
    assert "Sequential" in report, report


def check_rows():
    """A row has the same bits, alone or in a batch."""
    chain, x = block(), torch.randn(32, 64)
    with torch.no_grad(), opfuse.options(invariant="batch"):
        assert chain(x)[:1].equal(chain(x[:1]))


def check_memory():
    """A model keeps no more than half of what it kept, and its gradients stay."""
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU()) for _ in range(4)]
    layers = [torch.nn.Sequential(layer, torch.nn.Linear(16, 8)) for layer in layers]
    model, x = torch.nn.Sequential(*layers), torch.randn(32, 8, requires_grad=True)
    exact = step(model, x)
    plan = opfuse.plan_memory(model, x, budget=0.5, measure=False)
    assert plan.kept <= plan.budget, plan
    torch.testing.assert_close(step(model, x), exact)


warnings.simplefilter("error")
torch.manual_seed(0)
check_installation()
check_answers()
if SHORT == "fp8":
    check_recipe()
if SHORT == "loss":
    check_loss()
if NAME == "opfuse-convert":
    check_conversion()
if NAME == "opfuse-reproducible":
    check_rows()
if NAME == "opfuse-memory":
    check_memory()
print(
    f"{NAME} {importlib.metadata.version(NAME)}: installed by its name, and does what it promises"
)
