"""The kernels of NVFP4, and those that swizzle scales: the reference to the bit.

``TRITON_INTERPRET=1 python -m pytest`` runs the kernels on a CPU.
"""

import functools

import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import conditions, fused, twins
from opfuse_fp8.twins import Into

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from opfuse_fp8 import formulas, library
from opfuse_fp8.kernels import launch_nvfp4
from opfuse_quantized.swizzle import unswizzled
from opfuse_triton import recording

GPU = torch.cuda.is_available() and not is_interpreting()
DEVICE = "cuda" if GPU else "cpu"
computes = pytest.mark.skipif(
    not (GPU or is_interpreting()), reason="no GPU, and Triton does not interpret"
)
# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if is_interpreting():
    interpreter.install()  # exact for bf16 and fp8, which Triton's own is not

SIGNS = 0xD7E8
FP4 = {
    "plain": fp8.NVFP4Quantizer,
    "mixed": functools.partial(fp8.NVFP4Quantizer, signs=SIGNS),
    "16 x 16": functools.partial(fp8.NVFP4Quantizer, square=True),
    "drawn": lambda: fp8.StochasticNVFP4Quantizer(signs=SIGNS, device=DEVICE),
}
MX = functools.partial(fp8.MXQuantizer, torch.float8_e4m3fn, swizzles=True)


def bits(tensor):
    """As integers; of NaN among scales without the sign, which no format promises."""
    if tensor.dtype == torch.float32:
        return tensor.view(torch.int32)
    codes = tensor.view(torch.uint8)
    return codes & 0x7F if tensor.dtype == torch.float8_e4m3fn else codes


def assert_same(got, expected):
    assert type(got) is type(expected) and got.copies == expected.copies
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    for name, mine, other in zip(got.tensor_names, got.tensors(), expected.tensors(), strict=True):
        if mine is not None:
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
            assert torch.equal(bits(mine), bits(other)), name


def special(dtype, rows, columns):
    """Numbers of all sizes, with zeros, infinities and NaN, and blocks of nothing else."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-30, 14, x.shape, generator=generator)
    x[0], x[:, 0] = 0.0, -0.0
    x[1, 3::40], x[-1, 5::70] = torch.inf, -torch.inf
    x[2, ::3] = torch.nan
    x[rows // 2 :] *= torch.finfo(dtype).tiny * 8
    return x.to(DEVICE, dtype)


BF16 = torch.bfloat16
KINDS = [*[(kind, BF16) for kind in FP4], ("mixed", torch.float32), ("mixed", torch.float16)]


@computes
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_nvfp4_is_the_reference(kind, dtype):
    """Codes, scales and state, of every copy; what is drawn follows the seed and the steps."""
    torch.manual_seed(2**40 + 11)
    x = torch.randn(2, 1, 16, 48).to(DEVICE, dtype)
    given = [(special(dtype, 80, 96), BOTH), (x, ROWWISE), (x, COLUMNWISE)]
    if kind == "mixed":
        given += [(x[0] * one, BOTH) for one in (0.0, torch.nan, torch.finfo(dtype).max)]
    for step, (values, usage) in enumerate(given):
        quantizer, other = FP4[kind](), FP4[kind]()
        for one in (quantizer, other):
            for name in one.state_names[1:2]:
                getattr(one, name).fill_(step)
        assert_same(library.cast(values, Into(quantizer, usage)), other.reference(values, usage))
        for name in quantizer.state_names:
            assert torch.equal(getattr(quantizer, name), getattr(other, name)), name


@computes
def test_nvfp4_takes_any_layout_and_leaves_the_rest_to_the_reference():
    quantizer = fp8.NVFP4Quantizer(signs=SIGNS)
    x = torch.randn(64, 48).to(DEVICE)
    odd = torch.randn(7, 32).to(DEVICE)
    for one, usage in ((x.t(), BOTH), (x[::2], BOTH), (odd, ROWWISE), (odd[0], ROWWISE)):
        assert_same(library.cast(one, Into(quantizer, usage)), quantizer.reference(one, usage))
    for one in (x.double(), x[:0]):
        assert_same(library.cast(one, Into(quantizer, BOTH)), quantizer.reference(one, BOTH))
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        library.cast(odd, Into(quantizer, BOTH))
    square = fp8.NVFP4Quantizer(square=True)
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        library.cast(odd, Into(square, ROWWISE))


@computes
def test_swizzled_scales_are_the_reference():
    """Alone, after activations and in a backward, where a tile juts out and where none does."""
    for rows, columns in ((160, 192), (128, 256)):
        x = special(BF16, rows, columns)
        made = library.cast(x, Into(MX(), BOTH))
        assert made.swizzled
        assert_same(made, MX().reference(x, BOTH))
        plain = fp8.MXQuantizer(torch.float8_e4m3fn).reference(x, BOTH)
        for usage in (ROWWISE, COLUMNWISE):
            assert torch.equal(*[t.dequantize(usage).nan_to_num(0) for t in (made, plain)])
    numbers = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)).to(DEVICE, BF16)
    for op in (ops.ReLU(), ops.ReGLU()):
        formula, into = formulas.formula_of(op), Into(MX(), BOTH)
        y = op.forward_value(numbers)
        got, _ = library.activation(formula, op, numbers, None, BF16, False, into)
        assert_same(got, MX().reference(y, BOTH))
        got, _ = library.gradient(formula, op, (), y * 0.5, numbers, False, into)
        assert_same(got, MX().reference(op.backward_value(y * 0.5, numbers), BOTH))


@pytest.mark.costly(3)
@computes
@pytest.mark.parametrize("kind", FP4)
def test_swizzled_scales_of_nvfp4_are_the_reference(kind):
    """And, in tiles, those of the plain layout; what fills up a tile is zero."""
    sizes = [(80, 96), (144, 208), (16, 16)]
    for x, usage in [(special(BF16, *size), BOTH) for size in sizes] + [
        (special(BF16, 128, 64), ROWWISE), (special(BF16, 64, 128), COLUMNWISE)
    ]:  # fmt: skip
        torch.manual_seed(11)
        plain, quantizer, other = FP4[kind](), FP4[kind](), FP4[kind]()
        quantizer.swizzles = other.swizzles = True
        made = library.cast(x, Into(quantizer, usage))
        assert made.swizzled
        assert_same(made, other.reference(x, usage))
        expected = library.cast(x, Into(plain, usage))
        for name, mine, its in zip(
            made.tensor_names, made.tensors(), expected.tensors(), strict=True
        ):
            if mine is None or not name.endswith("wise_scale_inv"):
                assert mine is its is None or torch.equal(bits(mine), bits(its)), name
                continue
            assert torch.equal(bits(unswizzled(mine, *its.shape)), bits(its)), name
            filled = bits(mine).count_nonzero() - bits(its).count_nonzero()
            assert filled == 0 and mine.numel() % 512 == 0, name


@computes
def test_a_chain_casts_to_nvfp4_by_the_kernels(monkeypatch):
    """The plan says so, and two steps are those of the reference, to the bit."""

    def steps():
        torch.manual_seed(5)
        model = opfuse.Sequential(ops.Linear(32, 48), ops.ReLU(), ops.Linear(48, 16)).to(DEVICE)
        x, made = torch.randn(16, 32, device=DEVICE, requires_grad=True), []
        for _ in range(2):
            with opfuse.plugins.using("fp8"), opfuse.autocast("nvfp4"):
                y = model(x)
            made += [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
        with opfuse.plugins.using("fp8"), opfuse.autocast("nvfp4"):
            return " ".join(str(opfuse.explain(model, x)).split()), made

    text, by_kernels = steps()
    assert "Cast[NVFP4Quantizer] fused by cast" in text and "it is cast alone" in text
    monkeypatch.setattr(library, "cast", twins.cast)
    _, reference = steps()
    assert all(torch.equal(*pair) for pair in zip(by_kernels, reference, strict=True))


def test_programs_hold_whole_blocks_and_pass_32_bits():
    """Launches for a GPU: tiles of whole blocks; two maxima if the columnwise copy is mixed."""
    x = torch.empty(1 << 19, 1 << 13, dtype=torch.bfloat16, device="meta")
    for usage, count in ((BOTH, 2), (ROWWISE, 1), (COLUMNWISE, 1)):
        with recording(100) as launches:
            made = launch_nvfp4.cast(x, Into(fp8.NVFP4Quantizer(signs=SIGNS), usage))
        assert made.copies == usage
        amax, cast = launches
        assert amax.args[1].numel() == count
        for one in (amax, cast):
            tile = one.config["BLOCK_ROWS"], one.config["BLOCK_COLUMNS"]
            assert not (tile[0] % 16 or tile[1] % 16)
            assert one.grid[0] * tile[0] * tile[1] == 1 << 32


def env(**given):
    facts = {"device": torch.device("cuda"), "capability": (10, 0), "dtype": torch.bfloat16}
    return opfuse.Environment(**{**facts, **given})


@pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
def test_where_nvfp4_is_cast_by_kernels():
    """Alone, on every GPU that has Triton; not compiled on a CPU, and not for a subclass."""
    quantizer = fp8.StochasticNVFP4Quantizer()
    (alone,) = [fusion for fusion in fused.FORWARD if fusion.name == "cast"]
    for capability in ((8, 0), (9, 0), (10, 0)):
        assert alone.when([ops.Cast(quantizer, ROWWISE)], env(capability=capability)) is True
    assert "cast alone" in conditions.runs(quantizer, env(), name="cast+bias")
    assert "cast alone" in conditions.runs(quantizer, env(), ops.GELU(), "activation+cast")
    assert "float64" in conditions.runs(quantizer, env(dtype=torch.float64))
    cpu = {"device": torch.device("cpu"), "capability": None, "measured": 2.0}
    assert "cast alone" in conditions.runs(quantizer, env(**cpu))

    class Own(fp8.NVFP4Quantizer):
        pass

    assert "this is a Own" in conditions.runs(Own(), env())
    chooses = fp8.NVFP4Quantizer(four_over_six="MAE")
    assert "at 4 or 6" in conditions.runs(chooses, env())
    assert not conditions.of_quantizer(quantizer, alone=True)
