"""Products in the faster of a CPU's libraries: which it is, and that both give the same.

More products are in the tests of opfuse-plugin-linear.
"""

import pathlib

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.ops import libraries
from opfuse.testing import tolerance


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 1024])
def test_each_library_gives_the_product(rows, dtype, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 32).to(dtype), torch.randn(48, 32).to(dtype)
    added = torch.randn(48) if bias else None
    expected = x.double() @ weight.double().T + (added.to(dtype).double() if bias else 0.0)
    for onednn in (True, False, None):
        got = libraries.linear(x, weight, added, onednn)
        assert got.dtype is dtype
        error = (got.double() - expected).abs().max()
        assert error <= tolerance(dtype, gemm=True)[0] * expected.abs().max()


def test_tune_measures_both_on_a_cpu():
    fused = libraries.Products([ops.BasicLinear(4, 4)])
    cpu = opfuse.Environment(torch.device("cpu"), None, torch.float32)
    assert fused.configurations(cpu) == [{"onednn": True}, {"onednn": False}]
    for changes in (
        {"dtype": torch.float64},
        {"compiling": True},
        {"device": torch.device("cuda")},
    ):
        assert not fused.configurations(cpu._replace(**changes))
    for configuration in (None, {"onednn": True}, {"onednn": False}):
        fused.planned(cpu._replace(configuration=configuration))
        assert fused._onednn is (configuration and configuration["onednn"])


@pytest.mark.parametrize(
    "machine, available, cpuinfo, processor, expected",
    [
        ("x86_64", True, "vendor_id : AuthenticAMD", "", True),
        ("x86_64", True, "vendor_id : GenuineIntel", "AuthenticAMD", False),
        ("AMD64", True, None, "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", True),
        ("AMD64", True, None, "Intel64 Family 6 Model 158 Stepping 10, GenuineIntel", False),
        ("x86_64", True, None, "", False),
        ("x86_64", False, "vendor_id : AuthenticAMD", "", False),
        ("arm64", True, None, "arm", False),
        ("aarch64", True, "vendor_id : AuthenticAMD", "", False),
    ],
)
def test_onednn_is_faster_on_amd_with_avx512(
    monkeypatch, machine, available, cpuinfo, processor, expected
):
    def read_text(self, **kwargs):
        assert str(self) == str(pathlib.Path("/proc/cpuinfo"))
        if cpuinfo is None:
            raise FileNotFoundError(self)
        return cpuinfo

    monkeypatch.setattr(libraries.platform, "machine", lambda: machine)
    monkeypatch.setattr(libraries.platform, "processor", lambda: processor)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    for capability, faster in (("AVX512", expected), ("AVX2", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert libraries.onednn_is_faster.__wrapped__() is faster
