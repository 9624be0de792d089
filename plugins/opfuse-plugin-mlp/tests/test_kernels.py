"""The kernel against fp64, compiled for GPUs that need not be there, and counted."""

import pytest
import torch
from opfuse_mlp import formulas, fused

from opfuse import ops
from opfuse.testing import CubicActivation, assert_close, interpreter

pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_mlp import cases, kernels
from opfuse_triton import TARGETS, DeviceFunctions, functions_of, is_interpreting
from opfuse_triton.checking import check
from opfuse_triton.floor import assert_floor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 129), (129, 127), (2, 4096), (0, 8))
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


def gradients(op, config=None):
    size = getattr(op, "glu_interleave_size", None) or 0
    return kernels.Gradients(functions_of(op), size, config)


@runs
@pytest.mark.parametrize("op", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_and_recomputed_values_match_fp64(dtype, op):
    for shape in SHAPES:
        dy, z = arguments(op, shape, dtype)
        truth = formulas.gradients(op, dy.double(), z.double(), True)
        alone, nothing = gradients(op)(dy, z, op.numbers_of(), False)
        dz, y = gradients(op)(dy, z, op.numbers_of(), True)
        assert nothing is None and torch.equal(alone, dz) and y is dy
        for got, expected in zip((dz, y), truth, strict=True):
            assert got.dtype is dtype
            assert_close(got, expected, what=f"{op} at {shape}")


@runs
@pytest.mark.parametrize("op", ACTIVATIONS[:5:4], ids=str)
def test_every_configuration_gives_the_same(op):
    from opfuse_triton import Config

    dy, z = arguments(op, (9, 200), torch.bfloat16)
    expected = kernels.launch(dy, z, None, functions_of(op))
    found = kernels.candidates(torch.device(DEVICE), 200)
    assert 1 < len(found) <= 8
    for config in found:
        assert torch.equal(gradients(op, Config(**config))(dy, z, (), False)[0], expected)


@runs
def test_numbers_of_the_forward_count():
    op = ops.ClampedSwiGLU(limit=0.5)
    numbers, (dy, z) = op.numbers_of(), arguments(op, (4, 8), torch.float32)
    op.limit = 2.0
    dz, _ = gradients(op)(dy, z, numbers, False)
    assert_close(dz, formulas.gradients(op.with_numbers(numbers), dy.double(), z.double(), 0)[0])


@runs
@pytest.mark.parametrize(
    ("op", "with_output"), [(ACTIVATIONS[1], True), (ACTIVATIONS[3], False)], ids=str
)
def test_the_operation_for_compilers(op, with_output):
    dy, z = arguments(op, (4, 8), torch.float32)
    by_kernel = gradients(op)
    expected = by_kernel(dy.clone(), z, op.numbers_of(), with_output)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(dy, z):
        return by_kernel(dy * 1, z, op.numbers_of(), with_output)

    for got, want in zip(compiled(dy, z), expected, strict=True):
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want))
    numbers = by_kernel._functions.numbers(op.numbers_of())
    given = dy, z, by_kernel._name, numbers, by_kernel._interleaved, with_output
    torch.library.opcheck(torch.ops.opfuse_mlp.gradients.default, given)


def test_the_kernel_takes_what_it_can():
    class Wrapped(torch.Tensor):
        pass

    x = torch.zeros(4, 8)
    assert fused._takes(x, x.bfloat16())
    for other in (x.t(), x.double(), x.as_subclass(Wrapped)):
        assert not fused._takes(x, other) and not fused._takes(other, x)


def test_two_functions_of_one_name_are_told_apart():
    def made():
        @kernels.triton.jit
        def value(x):
            return x

        return DeviceFunctions(value, value)

    one, other = made(), made()
    names = [kernels.Gradients(functions, 0)._name for functions in (one, other, one)]
    assert names[0] == names[2] != names[1]
    assert [kernels._FUNCTIONS[name] for name in names] == [one, other, one]


@compiles
def test_the_kernels_compile_for_every_target():
    rows = check("opfuse_mlp.cases:CASES")
    assert not [sentence for row in rows for sentence in row.refusals]
    assert {row.target for row in rows} == {str(target) for target in TARGETS.values()}


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_it_reads_and_writes_each_tensor_once(case):
    assert_floor(case)


def test_what_has_no_functions():
    assert functions_of(CubicActivation()) is None
