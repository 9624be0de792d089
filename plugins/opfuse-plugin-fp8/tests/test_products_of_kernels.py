"""Products of what kernels cast: the kernels are interpreted, and a stand-in for a GPU's product reads the codes."""

import copy
import pathlib
import sys

import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import direct, gemm, hardware, twins
from opfuse_fp8.together import as_one

import opfuse
from opfuse import ops
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

if not is_interpreting():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from opfuse_fp8 import library  # which imports Triton
from opfuse_fp8.kernels import launch_nvfp4
from test_products import data, linears, on_a_gpu, run  # from the folder just added

interpreter.install()
# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
gpu = pytest.fixture(on_a_gpu)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_kernels_cast_linears_side_by_side_into_one_tensor(gpu, monkeypatch, recipe):
    """So that no codes are copied, and all bits are those of codes that are."""
    sizes, results = (128, 256, 96), []
    torch.manual_seed(0)
    linears = [ops.Linear(160, size, bias=False) for size in sizes]
    model = opfuse.Sequential(ops.ParallelLinear(linears)).to(torch.bfloat16)
    x, dy = data((32, 160), sum(sizes), torch.bfloat16)
    monkeypatch.setattr(hardware, "scales_rows", lambda here: True)
    for kernels in (True, False):
        found = []
        monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer, k=kernels: k)
        watched = lambda codes, found=found: found.append(as_one(codes)) or found[-1]  # noqa: E731
        monkeypatch.setattr(gemm, "as_one", watched)
        results.append(run(copy.deepcopy(model), x, dy, recipe))
        assert [whole is not None for whole in found] == [kernels]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("cls", [fp8.DelayedScaling, fp8.Float8CurrentScaling])
def test_weights_with_one_scale_are_one_operand(gpu, monkeypatch, cls):
    """To the bit of what PyTorch's operations cast: the whole in its rows, and in its columns."""
    sizes, results, recipe = (128, 256, 128), [], cls(shared_weight_scale=True)
    torch.manual_seed(0)
    linears = [ops.Linear(160, size, bias=False) for size in sizes]
    model = opfuse.Sequential(ops.ParallelLinear(linears)).to(torch.bfloat16)
    x, dy = data((32, 160), sum(sizes), torch.bfloat16)
    for kernels in (True, False):
        monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer, k=kernels: k)
        chain = copy.deepcopy(model)
        results.append([*run(chain, x, dy, recipe), *run(chain, x, dy, recipe)])
        assert len(gpu.calls) == 10 and not gpu.strided
        gpu.calls.clear()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["linear", "parallel"])
def test_products_of_nvfp4_read_what_the_kernels_write(gpu, monkeypatch, kind):
    """Forward and backward, to the bit of those of PyTorch's operations."""
    x, dy = data((48, 80), 64 if kind == "linear" else 128, torch.bfloat16)
    results, launches = [], []
    launch = launch_nvfp4.CAST.launch
    watched = lambda *args, **given: launches.append(given) or launch(*args, **given)  # noqa: E731
    monkeypatch.setattr(launch_nvfp4.CAST, "launch", watched)
    for kernels in (True, False):
        monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer, k=kernels: k)
        monkeypatch.setattr(library, "cast", library.cast if kernels else twins.cast)
        results.append(run(linears(kind, 80, 64, False, torch.bfloat16), x, dy, "nvfp4"))
    assert all(map(torch.equal, *results))
    assert [given["SWIZZLED"] for given in launches] == [True] * (3 if kind == "linear" else 4)
