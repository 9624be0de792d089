"""With the README's plugin and a broken one installed: the one is used, the other is a warning."""

import json
import subprocess
import sys
import warnings

import torch

import opfuse
from opfuse import ops

assert not {"opfuse_addmm", "opfuse_broken"} & set(sys.modules), (
    "importing opfuse imports no plugin"
)
chain = opfuse.Sequential(ops.Linear(8, 8), ops.GELU())
x = torch.randn(4, 8, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y = chain(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
(warning,) = [w for w in caught if issubclass(w.category, opfuse.PluginWarning)]
for part in (
    "broken",
    "opfuse-plugin-broken 0.3.1",
    "this plugin cannot be imported",
    "OPFUSE_PLUGINS=-broken",
):
    assert part in str(warning.message), warning.message

steps = opfuse.explain(chain, x).to_dict()["forward"]
fused = [(s["fusion"], s["distribution"], s["version"]) for s in steps if s["fusion"]]
assert fused == [("LinearBias", "opfuse-plugin-addmm", "0.1.0")], fused

with opfuse.plugins.using(""):
    plain = chain(x)
torch.testing.assert_close(y, plain)
torch.testing.assert_close(grad, torch.autograd.grad(plain.sum(), x)[0])

listing = subprocess.run(
    [sys.executable, "-m", "opfuse", "plugins", "--json"],
    capture_output=True,
    text=True,
    check=True,
)
rows = [row for row in json.loads(listing.stdout) if row["distribution"] != "opfuse"]  # its tools
states = {row["name"]: row["state"] for row in rows}
assert states == {"addmm": "loaded", "broken": "failed"}, states
print("a stranger's plugin is used, a broken one changes nothing but a warning")
