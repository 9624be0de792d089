"""The page and the example that need this plugin run as they are shown."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from opfuse.testing.machine import is_interpreting

ROOT = pathlib.Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(is_interpreting(), reason="it launches no kernel")


def test_the_page_on_preferences_and_rewards(capsys):
    text = (ROOT / "docs" / "train-with-rewards.md").read_text(encoding="utf-8")
    first, *blocks = re.findall(
        r"^```py\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", text, re.DOTALL | re.MULTILINE
    )
    assert "GRPOTrainer(model, ...)" in first[0] and len(blocks) > 3
    namespace = {}
    for code, output in blocks:
        torch.manual_seed(0)
        exec(code, namespace)
        assert capsys.readouterr().out == output


@pytest.mark.costly(1)
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the model is one of transformers"
)
@pytest.mark.parametrize("dtype, apart", [("float64", 1e-12), ("float32", 1e-4)])
def test_grpo_with_chains_gives_the_rewards_and_the_curve_of_eager_pytorch(dtype, apart):
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "train_grpo.py")]
    sizes = ["--steps", "4", "--dtype", dtype]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[float(cell) for cell in line.split()] for line in done.stdout.splitlines()[1:5]]
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    assert all(row[1] == row[3] and abs(row[2] - row[4]) < 1e-4 for row in rows)
    assert len({row[2] for row in rows}) == 4  # it learns, so the losses differ
    (most,) = re.findall(r"rewards: the same; losses: at most (\S+) apart", done.stdout)
    assert float(most) < apart
