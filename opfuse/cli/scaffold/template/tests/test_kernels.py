"""The kernel and its twin against fp64, and the kernel compiled for GPUs that need not be there.

``python -m pytest`` tests the twin, or the kernel where there is a GPU; with
``TRITON_INTERPRET=1`` it tests the kernel on a CPU, which needs Triton and numpy.
"""

import pytest
import torch
from opfuse_NAME import kernels

from opfuse import ops
from opfuse.testing import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not kernels.is_interpreted() else "cpu"
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Steep(ops.SiLU):
    """What is derived from a known activation may compute something else."""

    def value(self, x):
        return 2 * super().value(x)

    def derivative(self, x):
        return 2 * super().derivative(x)


ACTIVATIONS = [
    ops.ReLU(),
    ops.SiLU(),
    ops.GELU(),
    ops.GELU(approximate="none"),
    ops.QGELU(),
    Steep(),
]
KNOWN = [*kernels.FORMS, None, None]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if kernels.is_interpreted():
    interpreter.install()  # exact for bf16, which Triton's own is not


def arguments(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, bias = (
        torch.randn(s, generator=generator).mul(2).to(DEVICE, dtype) for s in (shape, shape[-1:])
    )
    return x, bias


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 129), (33, 512), (5, 700), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_values(dtype, shape, activation, keep):
    x, bias = arguments(shape, dtype)
    y, hidden = kernels.bias_activation(
        x, bias, activation, kernels.known(activation), dtype=dtype, keep=keep
    )
    expected = (x + bias).double()  # rounded to the dtype, as between separate ops
    torch.testing.assert_close(
        y.double(), activation.value(expected), rtol=ROUNDING[dtype], atol=1e-6
    )
    assert (y.dtype, hidden is None) == (dtype, not keep)
    if keep:
        assert torch.equal(hidden.double(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_nan_and_large_values_come_through(activation):
    # no infinity: torch's own GELU(approximate="none") of it is NaN in fp32 on some CPUs
    x = torch.tensor([[float("nan"), 1e38, 1e30, -1e30]], device=DEVICE)
    bias, name = torch.zeros(4, device=DEVICE), kernels.known(activation)
    y, _ = kernels.bias_activation(x, bias, activation, name, dtype=x.dtype, keep=False)
    torch.testing.assert_close(y, activation.value(x), equal_nan=True)


@pytest.mark.skipif(
    DEVICE == "cpu" and not kernels.is_interpreted(), reason="no GPU, and Triton does not interpret"
)
def test_the_kernel_takes_what_it_can():
    x, bias = arguments((4, 8), torch.float32)

    def taken(x, bias, dtype=torch.float32):
        return kernels.runs_on_triton(x, bias, dtype)

    assert taken(x, bias) and taken(x, bias.bfloat16())
    assert not taken(x.t().contiguous().t(), bias)
    assert not taken(x.double(), bias, dtype=torch.float64)
    assert not taken(x, bias, dtype=torch.bfloat16)


def test_the_kernel_stands_for_what_it_computes():
    assert [kernels.known(activation) for activation in ACTIVATIONS] == KNOWN


@pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")
@pytest.mark.skipif(
    kernels.is_interpreted(), reason="a process that interprets kernels cannot compile them"
)
@pytest.mark.parametrize("activation", kernels.FORMS)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles(capability, activation, monkeypatch, tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # what it is anyway; unset, Triton 3.9 warns
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    constants = {"ACTIVATION": activation, "KEEP": True, "HEIGHT": 8, "WIDTH": 512}
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "hidden_ptr"), "*bf16") | {"bias_ptr": "*fp32"}
    types = pointers | {"rows": "i32", "features": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernels._kernel.arg_names}
    source = ASTSource(kernels._kernel, signature, constants)
    compiled = kernels.triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]
