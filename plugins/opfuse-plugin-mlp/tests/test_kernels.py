"""The kernel against fp64, compiled for GPUs that need not be there, and counted."""

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter

pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_mlp import cases
from opfuse_triton import TARGETS, is_interpreting, norms
from opfuse_triton.checking import check
from opfuse_triton.elementwise import formulas, kernels, library, twins
from opfuse_triton.floor import assert_floor
from opfuse_triton.norms import library as norm_library
from opfuse_triton.norms import twins as norm_twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 129), (65, 127), (0, 8))
ACTIVATIONS = (
    ops.SwiGLU(),
    ops.SwiGLU(glu_interleave_size=1),
    ops.SiTUGLU(beta1=2.0),
    ops.ClampedSwiGLU(limit=0.5),
    ops.GELU(),
    ops.SReLU(),
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreting(), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="a process that interprets cannot compile")

if is_interpreting():
    interpreter.install()  # exact for bf16, which Triton's own is not


def arguments(op, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = shape, (shape[0], shape[1] * op.feature_ratio)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


def gradients(op, dy, z, *needs, owns=False, config=None):
    by_kernel = library.LibraryActivation(op, formulas.formula_of(op), config)
    return by_kernel.backward(op.numbers_of(), dy, z, *needs, owns=owns)


@runs
@pytest.mark.parametrize("op", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_sums_and_outputs_again_match_fp64(dtype, op):
    for shape in SHAPES:
        dy, z = arguments(op, shape, dtype)
        truth = twins.backward(op, op.numbers_of(), dy.double(), z.double(), True, True, True)
        alone, *nothing = gradients(op, dy, z, True, False, False)
        owned = dy.clone()
        made = gradients(op, owned, z, True, True, True, owns=True)
        assert nothing == [None, None] and torch.equal(alone, made[0])
        assert made[2].data_ptr() == owned.data_ptr() or not dy.numel()
        for got, expected, name in zip(made, truth, ("dz", "sums", "y"), strict=True):
            assert got.dtype is dtype
            assert_close(got, expected, what=f"{name} of {op} at {shape}", gemm=name == "sums")


@runs
@pytest.mark.parametrize("op", ACTIVATIONS, ids=str)
def test_the_output_again_has_the_bits_of_the_forward(op):
    dy, z = arguments(op, (9, 96), torch.bfloat16)
    y, _ = library.LibraryActivation(op, formulas.formula_of(op)).forward(
        z, None, None, z.dtype, False
    )
    assert torch.equal(gradients(op, dy, z, True, False, True)[2], y)


@runs
@pytest.mark.parametrize("op", ACTIVATIONS[:5:4], ids=str)
def test_every_configuration_gives_the_same(op):
    from opfuse_triton import Config, current_target

    dy, z = arguments(op, (9, 200), torch.bfloat16)
    expected = gradients(op, dy, z, True, False, True)
    target = current_target(torch.device(DEVICE))
    found = kernels.candidates("backward", formulas.formula_of(op), z.shape[1], target)
    assert 1 < len(found) <= 8
    for config in found:
        made = gradients(op, dy, z, True, False, True, config=Config(**config))
        assert torch.equal(made[0], expected[0]) and torch.equal(made[2], expected[2])


@runs
@pytest.mark.parametrize("kind", [norms.RMS, norms.LAYER])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_again_matches_fp64_and_its_forward(dtype, kind):
    norm = norms.Norm(kind, 1, kind == norms.RMS)
    for rows, features in ((1, 1), (3, 127), (2, 1), (9, 3000), (2, 17000)):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, features, generator=generator).to(DEVICE, dtype)
        weight, bias = torch.randn(2, features, generator=generator).to(DEVICE, dtype)
        bias = bias if kind == norms.LAYER else None
        y, _, *stats = norm_library.forward(x, None, weight, bias, 1e-5, norm, None, True, True)
        again = norm_library.again(x, weight, bias, *stats, norm, None)
        wide = [t if t is None else t.double() for t in (x, weight, bias, *stats)]
        assert_close(again, norm_twins.again(*wide, norm, None), what=f"{rows} x {features}")
        torch.testing.assert_close(again, y)


@runs
def test_in_graphs_they_are_operations():
    x, weight = torch.randn(4, 8), torch.randn(8)
    given = x, weight, None, None, torch.rand(4, 1), norms.RMS, 1, False, torch.bfloat16
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.opfuse_triton.norm_again.default, given, test_utils=checks)


def launches_of(chain, x, monkeypatch):
    """The names of the kernels that a forward and a backward launch, in their order."""
    from opfuse_triton.kernels import Kernel

    names, launch = [], Kernel.launch

    def watched(self, *args, **more):
        names.append(self.name)
        return launch(self, *args, **more)

    monkeypatch.setattr(Kernel, "launch", watched)
    with opfuse.options(prefer="memory"), opfuse.plugins.using("mlp"):
        y = chain(x)
        names.append("backward:")
        y.backward(torch.ones_like(y))
    return names


@runs
def test_what_it_computes_around_the_products_is_kernels(monkeypatch):
    """All but the products, and the sum for the last bias."""
    norm, first, last = ops.RMSNorm(16), ops.Linear(16, 64), ops.Linear(32, 16)
    chain = opfuse.Sequential(norm, first, ops.SwiGLU(), last).to(DEVICE)
    x = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    assert launches_of(chain, x, monkeypatch) == [
        *("norm_forward", "activation_forward_kernel", "backward:"),
        *("activation_backward_kernel", "norm_forward", "norm_backward", "column_sums"),
    ]


@compiles
def test_the_kernels_compile_for_every_target():
    rows = check("opfuse_mlp.cases:CASES")
    assert not [sentence for row in rows for sentence in row.refusals]
    assert {row.target for row in rows} == {str(target) for target in TARGETS.values()}


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_it_reads_and_writes_each_tensor_once(case):
    assert_floor(case)
