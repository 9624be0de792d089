"""The README's code, and the example as a user's shell runs it."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "examples" / "finetune_llama.py"
README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [(), ("--lora",), ("--bf16",)], ids=" ".join)
def test_finetune_llama_lowers_the_loss(options):
    pytest.importorskip("accelerate")
    if options == ("--lora",):
        pytest.importorskip("peft")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OPFUSE_PLUGINS": "transformers,linear,loss"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.search(r"loss: (\S+) at first, (\S+) after 20 steps", result.stdout)
    first, last = map(float, found.groups())
    assert last < first - (0.3 if options == ("--lora",) else 1)
    ran, of = re.search(r"chains ran in (\d+) of (\d+)", result.stdout).groups()
    assert int(ran) == int(of) - 2  # both attentions
    # with adapters in the MLP, the sum before the norm leaves what could be a layer's chain
    norms_alone = options == ("--lora",)
    assert ("LlamaRMSNorm x 5" if norms_alone else "LlamaDecoderLayer x 2") in result.stdout


def test_the_readme_example_prints_what_it_shows():
    blocks = README.read_text(encoding="utf-8").split("```")[1::2]
    (code,) = [block.partition("\n")[2] for block in blocks if block.startswith("python")]
    (expected,) = [block.partition("\n")[2] for block in blocks if block.startswith("text")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == expected
