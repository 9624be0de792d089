"""Compares the kernel with fp64, compiles it for GPUs that need not be there, counts its bytes.

``python -m pytest`` compiles it, and runs it where there is a GPU. With ``TRITON_INTERPRET=1`` it
runs on a CPU, and what it moves is counted.
"""

import pytest
import torch
from opfuse import ops
from opfuse.testing import interpreter

pytest.importorskip("triton", reason="Triton is not installed: there is only the twin")

from opfuse_triton import is_interpreting
from opfuse_triton.checking import check
from opfuse_triton.floor import assert_floor

from opfuse_NAME import kernels
from opfuse_NAME.cases import CASES

DEVICE = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreting(), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="a process that interprets cannot compile")

if is_interpreting():
    interpreter.install()  # exact for bf16, which Triton's own is not


ACTIVATIONS = [ops.ReLU(), ops.SiLU(), ops.GELU(), ops.GELU(approximate="none")]


# only forward
@runs
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 129), (33, 512), (5, 700)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_values_match_fp64(dtype, shape, activation, keep):
    generator = torch.Generator().manual_seed(0)
    x, bias = (
        torch.randn(s, generator=generator).mul(2).to(DEVICE, dtype) for s in (shape, shape[-1:])
    )
    functions = kernels.functions_for(activation)
    numbers = functions.numbers(activation.numbers_of())
    y, hidden = kernels.bias_activation(x, bias, functions, numbers, keep)
    expected = (x + bias).double()  # rounded to the dtype, as between separate ops
    rtol = ROUNDING[dtype]
    torch.testing.assert_close(y.double(), activation.value(expected), rtol=rtol, atol=1e-6)
    assert (y.dtype, hidden is None) == (dtype, not keep)
    assert not keep or torch.equal(hidden.double(), expected)


# only backward
@runs
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 129), (300, 40), (5, 700)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_gradients_match_fp64(dtype, shape, activation, needs):
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    functions = kernels.functions_for(activation)
    numbers = functions.numbers(activation.numbers_of())
    dx, dbias = kernels.bias_activation_grad(dy, x, functions, numbers, *needs)
    assert (dx is not None, dbias is not None) == needs
    expected = dy.double() * activation.derivative(x.double())
    rtol = ROUNDING[dtype]
    if dx is not None:
        assert dx.dtype is dtype
        torch.testing.assert_close(dx.double(), expected, rtol=rtol, atol=1e-6)
    if dbias is not None:
        rows = expected.reshape(-1, shape[-1])
        wrong = (dbias.double() - rows.sum(0)).abs()
        assert (wrong <= rtol * rows.abs().sum(0) + 1e-5).all()


# all
@runs
def test_the_kernel_takes_what_it_can():
    x, other = torch.ones(4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    assert kernels.takes(x, other, x.dtype) and kernels.takes(x, other.bfloat16(), x.dtype)
    for wrong in (x.t().contiguous().t(), x.double(), x[:0]):
        assert not kernels.takes(wrong, other, wrong.dtype)
    assert not kernels.takes(x, other, torch.bfloat16)


@compiles
def test_the_kernel_compiles_for_every_gpu():
    rows = check("opfuse_NAME.cases:CASES")
    assert rows and not [sentence for row in rows for sentence in row.refusals]


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_moves_twice(case):
    assert_floor(case)
