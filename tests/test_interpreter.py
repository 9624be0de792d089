"""Triton's interpreter, made exact for bf16 and fp8, and the suite on a plugin with a Triton kernel.

Everything here that needs Triton runs in a process with ``TRITON_INTERPRET=1``; the last test starts that process.
"""

import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import torch

from opfuse.testing import FusionSuite, interpreter, tiers
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.alone

HERE = pathlib.Path(__file__)
has_triton = importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(
    not (has_triton and is_interpreting()), reason="needs Triton and TRITON_INTERPRET=1"
)
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
CASTS = [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float32), (torch.float8_e5m2, torch.float32), (torch.float8_e4m3fn, torch.bfloat16),
]  # fmt: skip


@pytest.fixture(params=["exact", "raw"])
def exact(request, monkeypatch):
    """Whether the interpreter is made exact; Triton's own methods come back after the test."""
    inner, builder = importlib.import_module("triton.runtime.interpreter"), interpreter._builder()
    for owner, name in ((inner, "_patch_lang"), *((builder, name) for name in interpreter.METHODS)):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    if request.param == "exact":
        interpreter.install()
    return request.param == "exact"


def values(dtype):
    """Every value of a dtype of 8 or 16 bits; many of fp32, with ties between two bf16."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    ties = (
        (torch.arange(0, 65536, 2, dtype=torch.int64) * 65536 + 32768)
        .to(torch.int32)
        .view(torch.float32)
    )
    return torch.cat([ties, torch.randn(32768, generator=torch.Generator().manual_seed(0)) * 100])


def same(got, expected):
    got, expected = got.float(), expected.float()
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts_are_exact_once_the_interpreter_is_patched(exact):
    import triton_probes

    agree = {}
    for source, target in CASTS:
        x = values(source)
        x = x[x.float().isfinite()] if target in FP8 else x
        got = triton_probes.cast(x, target)
        wide = x.float().clamp(-FP8[target], FP8[target]) if target in FP8 else x.float()
        agree[source, target] = same(got, wide.to(target))
    if exact:
        assert all(agree.values()), agree
    else:
        message = "Triton's interpreter casts exactly now: opfuse/testing/interpreter.py can go"
        assert not all(agree.values()), message


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sums_and_products_in_bf16(exact):
    import triton_probes

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).bfloat16() for _ in range(2))
    agree = [same(triton_probes.add(a, b), a + b), same(triton_probes.less(a, b), (a < b).float())]
    product = triton_probes.dot(a, b).double()
    agree.append(bool((product - a.double() @ b.double()).abs().max() < 1e-4))
    assert all(agree) == exact, agree


@interpreted
def test_the_language_is_prepared_once_for_a_launch(exact):
    """Triton does it again for each of the three functions that the kernel calls."""
    import triton_probes

    inner = importlib.import_module("triton.runtime.interpreter")
    with mock.patch.object(inner, "_patch_lang_core", wraps=inner._patch_lang_core) as prepared:
        y = triton_probes.plus_three(torch.zeros(16))
        once = prepared.call_count
        assert torch.equal(triton_probes.plus_three(y), torch.full((16,), 6.0))
    assert y.tolist() == [3.0] * 16
    assert (once, prepared.call_count) == ((1, 2) if exact else (4, 8))


@interpreted
def test_installing_twice_replaces_once(exact):
    methods = [getattr(interpreter._builder(), name) for name in interpreter.METHODS]
    assert all((method.__module__ == interpreter.__name__) == exact for method in methods)
    if exact:
        interpreter.install()
        assert methods == [getattr(interpreter._builder(), name) for name in interpreter.METHODS]


def test_tiers_say_why_they_cannot_run():
    reasons = {tier.name: tier.reason for tier in tiers()}
    assert set(reasons) == {"reference", "interpret", "gpu"} and "\n" not in "".join(
        reasons.values()
    )
    assert [name for name, reason in reasons.items() if not reason]
    if not has_triton:
        assert reasons["interpret"] == "triton is not installed"
    elif not is_interpreting():
        assert "TRITON_INTERPRET=1 python -m pytest" in reasons["interpret"]


SUITE = """
from opfuse.testing import FusionSuite

class TestConformance(FusionSuite):
    plugin = "triton_bias"
"""


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
@pytest.mark.skipif(is_interpreting(), reason="this is the process that the test would start")
@pytest.mark.costly(0)  # as a plugin that `opfuse new` writes does
def test_a_triton_plugin_passes_conformance_in_the_interpreter(tmp_path):
    support = HERE.parent / "support"
    info = tmp_path / "opfuse_plugin_triton_bias-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: opfuse-plugin-triton-bias\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[opfuse.v1]\ntriton_bias = triton_bias\n")
    (tmp_path / "test_conformance.py").write_text(SUITE)
    path = os.pathsep.join([str(tmp_path), str(support), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "error", "-p", "no:cacheprovider"]
    few = [] if FusionSuite.thorough else ["-k", "not test_fusion or output or gradients"]
    command += [
        *few,
        "-c",
        str(HERE.parent.parent / "pyproject.toml"),
        f"--rootdir={tmp_path}",
        str(HERE),
        "test_conformance.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "passed" in done.stdout and "reference: TRITON_INTERPRET is set" in done.stdout
