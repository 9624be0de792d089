"""A norm and what modulates it: kernels, twins and the fused op against fp64, and what is kept."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch
from opfuse_triton import norms as kernels
from opfuse_triton.norms import modulation
from torch.nn import functional as F

import opfuse
from opfuse import Environment, ops
from opfuse.report.calls import saved_bytes
from opfuse.testing import assert_close, interpreter, machine, tolerance

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
runs = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETING),
    reason="no GPU, and Triton does not interpret",
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if INTERPRETING:
    interpreter.install()

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = [  # of the input, the scale and the shift
    ((2, 5, 8), (2, 1, 8), (2, 1, 8)),
    ((2, 5, 129), (129,), (2, 1, 129)),
    ((2, 5, 8), (5, 8), (2, 5, 1)),
    ((2, 3, 4, 8), (2, 1, 1, 1), ()),
    ((0, 3, 8), (0, 1, 8), (8,)),
    ((5, 8), (1, 8), (8,)),
]
NORMS = (ops.LayerNorm, ops.RMSNorm)


@pytest.fixture(autouse=True)
def _few_programs():
    """Few programs are interpreted for a GPU of four multiprocessors."""
    if not INTERPRETING:
        yield
        return
    from opfuse_triton import TARGETS, target

    with target(dataclasses.replace(TARGETS[90], multiprocessors=4)):
        yield


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@runs
@pytest.mark.costly(12)
@pytest.mark.parametrize(
    "shapes",
    [
        *SHAPES[:2],
        SHAPES[3],
        ((1, 9, 300), (1, 1, 300), (300,)),
        ((40, 8), (8,), (1,)),
        ((2, 400, 512), (2, 1, 512), (2, 1, 512)),
        ((9, 4, 8), (9, 1, 8), (8,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [kernels.LAYER, kernels.RMS])
@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_kernels_match_fp64_for_each_set_of_needed_gradients(dtype, kind, shapes):
    from opfuse_triton.norms import modulated

    norm, (of_x, *of) = kernels.Norm(kind, 1, False), shapes
    x, dy = drawn(of_x, of_x, dtype=dtype)
    factor, summand = drawn(*of)
    assert modulated.takes(x, factor, summand.shape, dy)
    given = x, factor, summand, 1e-5, norm
    y, *stats = modulated.forward(*given, dtype, True)
    doubles = [each.double() for each in given[:3]]
    exact, *exact_stats = modulation.forward(*doubles, *given[3:], torch.float64, True)
    for got, wanted in zip((y, *stats), (exact, *exact_stats), strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or assert_close(got, wanted) is None
    assert torch.equal(modulated.again(*given[:3], *stats, dtype), y)
    assert_close(modulation.again(*doubles, *exact_stats, torch.float64), exact)
    for needs in (of, (None, None), (of[0], None), (None, of[1])):
        made = modulated.backward(dy, x, factor, *stats, norm, *needs)
        of_exact = dy.double(), *doubles[:2], *exact_stats, norm, *needs
        for got, wanted in zip(made, modulation.backward(*of_exact), strict=True):
            assert (got is None) == (wanted is None)
            if got is not None:
                assert got.shape == wanted.shape
                assert_close(got, wanted)
    again = modulated.backward(dy, x, factor, *stats, norm, *of)
    over = modulated.backward(dy, x, factor, *stats, norm, *of, owns=True)
    assert over[0] is dy and all(map(torch.equal, again, over))


@runs
def test_what_the_kernels_take():
    from opfuse_triton.norms import modulated

    x, factor = drawn((2, 5, 8), (2, 1, 8))
    assert modulated.takes(x, factor) and not modulated.takes(x, factor.double())
    assert not modulated.takes(x.transpose(0, 1), drawn((8,))[0])
    assert not modulated.takes(x, drawn((5, 8))[0])  # a factor for each row
    assert not modulated.takes(x, factor, (2, 5, 1)) and not modulated.takes(x[:0], factor[:0])
    for features, takes in ((8192, True), (8208, False), (2047, True), (2049, False)):
        wide = torch.empty(4, features, device=DEVICE)
        assert modulated.takes(wide, wide[0]) == takes


def reference(norm, x, scale, shift):
    """In fp64 by PyTorch's functions."""
    function = F.layer_norm if isinstance(norm, ops.LayerNorm) else F.rms_norm
    return function(x, norm.normalized_shape, eps=norm.eps) * (1 + scale) + shift


def compare(norm, shapes, dtype, needs=(True, True, True)):
    chain = opfuse.Sequential(norm, ops.Modulate())
    pairs = [*zip(drawn(*shapes, dtype=dtype), needs, strict=True)]
    given = [tensor.requires_grad_(wanted) for tensor, wanted in pairs]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    y, expected = chain(*given), reference(norm, *exact)
    assert y.dtype is dtype and y.requires_grad == expected.requires_grad
    found = [(y, expected)]
    if y.requires_grad:
        (dy,) = drawn(y.shape, dtype=dtype)
        y.backward(dy)
        expected.backward(dy.double())
        found += [(a.grad, b.grad) for a, b in zip(given, exact, strict=True)]
    rtol, atol = tolerance(dtype)
    for got, wanted in found:
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol)


@pytest.fixture
def fuses():
    """The fusion is used, by PyTorch's operations where no kernel runs."""
    with opfuse.plugins.using("norm"), opfuse.options(prefer="memory"):
        yield


@pytest.mark.costly(12)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fused_op_matches_fp64(fuses, dtype, cls, shapes):
    compare(cls(shapes[0][-1], elementwise_affine=False), shapes, dtype)


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("needs", [*itertools.product((True, False), repeat=3)], ids=str)
def test_each_set_of_gradients(fuses, needs, cls):
    compare(cls(8, elementwise_affine=False), SHAPES[0], torch.float64, needs)


@pytest.mark.parametrize("cls", NORMS)
def test_operands_that_are_not_contiguous(fuses, cls):
    norm = cls(8, elementwise_affine=False)
    x, both = drawn((5, 2, 8), (2, 1, 16))
    scale, shift = both.chunk(2, -1)
    chain = opfuse.Sequential(norm, ops.Modulate())
    given = [t.detach().requires_grad_() for t in (x.transpose(0, 1), scale, shift)]
    y = chain(*given)
    y.sum().backward()  # an expanded gradient
    exact = [t.detach().double().requires_grad_() for t in given]
    reference(norm, *exact).sum().backward()
    for got, wanted in zip(given, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


def test_the_ops_say_what_is_wrong(fuses):
    chain = opfuse.Sequential(ops.LayerNorm(8, elementwise_affine=False), ops.Modulate())
    with pytest.raises(ValueError, match="Modulate expected a scale that broadcasts"):
        chain(*drawn((2, 5, 8), (3, 1, 8), (8,)))
    with pytest.raises(ValueError, match="8"):
        chain(*drawn((2, 5, 9), (9,), (9,)))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(fuses, autocast):
    norm = ops.LayerNorm(8, elementwise_affine=False)
    chain, found = opfuse.Sequential(norm, ops.Modulate()), []
    for fusing in ("norm", ""):
        x, *both = drawn(*SHAPES[0])
        given = [x.to(autocast).requires_grad_(), *[t.requires_grad_() for t in both]]
        with torch.autocast(DEVICE, autocast), opfuse.plugins.using(fusing):
            y = chain(*given)
        y.square().sum().backward()
        found.append([y.detach(), *[each.grad for each in given]])
    for got, wanted in zip(*found, strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_the_input_and_its_statistics_are_kept():
    """Neither the output of the norm nor what a linear after it would keep is."""
    chain = opfuse.Sequential(
        ops.LayerNorm(64, elementwise_affine=False, device=DEVICE),
        ops.Modulate(),
        ops.Linear(64, 8, device=DEVICE),
    )
    x, scale, shift = [t.requires_grad_() for t in drawn((2, 16, 64), (2, 1, 64), (2, 1, 64))]
    kept = {}
    for prefer, fusing in (("memory", "norm"), ("speed", "")):
        with opfuse.plugins.using(fusing), opfuse.options(prefer=prefer):
            kept[prefer] = saved_bytes(lambda: chain(x, scale, shift))
    whole, row, small, weight = x.nbytes, 2 * 2 * 16 * 4, scale.nbytes, 8 * 64 * 4
    assert kept["speed"] == 3 * whole + row + small + weight
    assert kept["memory"] == whole + row + 2 * small + weight  # the shift, too, to compute it again


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_gets_its_input_again(cls, dtype):
    norm, linear = cls(8, elementwise_affine=False), ops.Linear(8, 3, device=DEVICE, dtype=dtype)
    chain, found = opfuse.Sequential(norm, ops.Modulate(), linear), []
    for fusing in ("norm", ""):
        chain.zero_grad()
        given = [t.requires_grad_() for t in drawn(*SHAPES[0], dtype=dtype)]
        with opfuse.plugins.using(fusing), opfuse.options(prefer="memory"):
            y = chain(*given)
        y.square().sum().backward()
        found.append([y.detach(), *[t.grad for t in (*given, *linear.parameters())]])
    rtol, atol = tolerance(dtype)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=8 * rtol, atol=8 * max(atol, rtol))


def test_no_gradient_keeps_nothing(fuses):
    chain = opfuse.Sequential(ops.LayerNorm(8, elementwise_affine=False), ops.Modulate())
    given = drawn(*SHAPES[0])
    with torch.no_grad():
        y = chain(*given)
    assert not y.requires_grad
    torch.testing.assert_close(y, reference(chain[0], *given))


def test_what_the_conditions_say():
    from opfuse_norm.modulated import JOINT

    by_kernels, without = JOINT
    cuda = Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    cpu = cuda._replace(device=torch.device("cpu"), capability=None)
    chain = ops.LayerNorm(64, elementwise_affine=False), ops.Modulate()
    deep = ops.LayerNorm((4, 64), elementwise_affine=False), ops.Modulate()
    assert by_kernels.when((ops.RMSNorm(64), ops.Modulate()), cuda).startswith("the norm has a w")
    assert by_kernels.when(chain, cuda) is True
    assert by_kernels.when(deep, cuda).endswith("and the norm has several")
    assert "torch.compile makes a kernel" in by_kernels.when(chain, cuda._replace(compiling=True))
    assert without.when(chain, cuda) == "its kernels keep as little, and take less time"
    if not INTERPRETING:
        assert by_kernels.when(chain, cpu) == "its kernels run on a GPU, and this is cpu"
        assert without.when(chain, cpu) is True
        assert without.when(chain, cpu._replace(requires_grad=False)).startswith("no backward")
