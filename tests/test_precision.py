"""The precision of products in fp32 is read whichever of PyTorch's settings said so."""

from __future__ import annotations

import os
import subprocess
import sys

import fusing
import pytest
import torch
from fp32 import WAYS, restored
from torch import backends

import opfuse
from opfuse import ops
from opfuse.ops.authoring import matmul_precision
from opfuse.tuning import table as tables

pytestmark = pytest.mark.alone  # of settings of PyTorch, which a plugin is told

HOMES = [
    backends,
    backends.cudnn,
    backends.cudnn.conv,
    backends.cudnn.rnn,
    backends.cuda.matmul,
    backends.mkldnn,
    backends.mkldnn.matmul,
]


def settings():
    """All that PyTorch tells, and what raises."""
    older = [
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    ]

    def told(getter):
        try:
            return getter()
        except RuntimeError as error:
            return str(error)

    return [home.fp32_precision for home in HOMES], [told(getter) for getter in older]


@pytest.fixture(params=WAYS)
def way(request):
    """One way to set it, as ``(on a CPU, on a GPU)``."""
    before = settings()
    with restored():
        *expected, act = WAYS[request.param]
        act()
        yield tuple(expected)
    assert settings() == before


def test_matmul_precision_is_read_from_each_setting(way):
    before = settings()
    assert (matmul_precision("cpu"), matmul_precision("cuda")) == way
    assert settings() == before


def test_a_plan_is_made_and_its_entries_are_of_the_precision(way, monkeypatch, register, tmp_path):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    monkeypatch.setattr(tables, "device_name", lambda kind, index: kind)
    register(forward_fusions=[fusing.FORWARD])
    chain, x = opfuse.Sequential(ops.RMSNorm(8), ops.Linear(8, 8)), torch.randn(4, 8)
    assert chain(x).shape == x.shape
    read = [tables.setting(torch.device(kind))["matmul_precision"] for kind in ("cpu", "cuda")]
    assert tuple(read) == way


@pytest.mark.costly(6)
def test_a_chain_is_planned_under_compile(way):
    """Where Dynamo traces a chain, it is planned as well."""
    chain, x = opfuse.Sequential(ops.RMSNorm(8), ops.Linear(8, 8)), torch.randn(4, 8)
    run = torch.compile(chain, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(x), chain(x))
    torch.compiler.reset()


def test_what_the_environment_says():
    """torch reads this variable when it is imported."""
    code = "from opfuse.ops.authoring import matmul_precision as p; print(p('cpu'), p('cuda'))"
    variable = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[1] == "tf32"
