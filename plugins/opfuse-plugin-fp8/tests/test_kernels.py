"""The fused casts: codes and scales to the bit, values against fp64, and what they record.

``python -m pytest`` runs the twins; ``TRITON_INTERPRET=1 python -m pytest`` the kernels, on a CPU.
"""

import functools
import itertools
from types import SimpleNamespace

import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import casts
from opfuse_fp8.twins import Into

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE
from opfuse.testing import assert_close, interpreter
from opfuse.testing.machine import is_interpreting
from opfuse.tuning.tolerance import code_steps

pytest.importorskip("triton")

import compiled
import triton
import triton.language as tl
from opfuse_fp8 import (
    cases,
    conditions,
    direct,
    formulas,
    fused,
    fused_norms,
    library,
    together,
    twins,
)
from opfuse_fp8.gemm import GemmOperand
from opfuse_fp8.kernels import device, launch, launch_norms, tiles
from opfuse_triton import TARGETS, Kernel, Predicted, recording

GPU = torch.cuda.is_available() and not is_interpreting()
DEVICE = "cuda" if GPU else "cpu"
computes = pytest.mark.skipif(
    not (GPU or is_interpreting()), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if is_interpreting():
    interpreter.install()  # exact for bf16 and fp8, which Triton's own is not

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZERS = {
    "delayed": lambda dtype: fp8.DelayedQuantizer(dtype, device=DEVICE),
    "current": fp8.CurrentQuantizer,
    "current, power of 2": lambda dtype: fp8.CurrentQuantizer(dtype, power_of_2=True),
    "1 x 128": lambda dtype: fp8.BlockQuantizer(dtype, (1, 128)),
    "1 x 128, any scale": lambda dtype: fp8.BlockQuantizer(dtype, (1, 128), power_of_2=False),
    "128 x 128": lambda dtype: fp8.BlockQuantizer(dtype, (128, 128)),
    "MX": fp8.MXQuantizer,
}
every = pytest.mark.parametrize("form", QUANTIZERS)


@triton.jit
def soft_step(x, slope):
    return x * tl.sigmoid(slope * x)


@triton.jit
def soft_step_derivative(x, slope):
    s = tl.sigmoid(slope * x)
    return s + slope * x * s * (1 - s)


class SoftStep(ops.Activation):
    """An activation of another package, with a number of its own."""

    slope = 2.0
    number_names = ("slope",)

    def value(self, x):
        return x * torch.sigmoid(self.slope * x)

    def derivative(self, x):
        s = torch.sigmoid(self.slope * x)
        return s + self.slope * x * s * (1 - s)

    def device_functions(self):
        return soft_step, soft_step_derivative


ACTS = {
    "GELU": ops.GELU,
    "SReLU": ops.SReLU,
    "SwiGLU": ops.SwiGLU,
    "SwiGLU by 1": functools.partial(ops.SwiGLU, glu_interleave_size=1),
    "SwiGLU by 32": functools.partial(ops.SwiGLU, glu_interleave_size=32),
    "SiTUGLU": functools.partial(ops.SiTUGLU, beta1=2.0, beta2=3.0),
    "another package's": SoftStep,
}


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def quantizer_of(form, dtype=E4M3):
    quantizer = QUANTIZERS[form](dtype)
    if isinstance(quantizer, fp8.DelayedQuantizer):
        quantizer.scale.fill_(37.3)
    return quantizer


def assert_same(got, expected):
    """The same tensors to the bit, of a NaN whatever its sign."""
    assert type(got) is type(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    for name, mine, other in zip(got.tensor_names, got.tensors(), expected.tensors(), strict=True):
        assert (mine is None) == (other is None), name
        if mine is None:
            continue
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        wide = [t if t.dtype == torch.float32 else t.view(torch.uint8) for t in (mine, other)]
        if mine.dtype in (E4M3, E5M2):
            wide = [
                torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8)) for t in (mine, other)
            ]
        assert torch.equal(*wide), name


# Codes and scales


@computes
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_device_functions_are_those_of_the_quantizers(dtype, power_of_2):
    """For every bfloat16, and for fp32 numbers all over the range."""

    every_bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    sample = torch.arange(0, 1 << 32, 65521 * 5).to(torch.int32).view(torch.float32)
    x = torch.cat([every_bf16.float(), sample]).to(DEVICE)
    mantissa, most = (3, 448.0) if dtype is E4M3 else (2, 57344.0)
    amax = torch.where(x.isnan(), 0.0, x.abs())
    for scale in (1.0, 3.7, 2.0**-127, 1e20):
        given = torch.tensor([scale], device=DEVICE)
        codes, exponents = (torch.empty_like(x, dtype=torch.uint8) for _ in range(2))
        scales, inverses = torch.empty_like(x), torch.empty_like(x)
        count = x.numel()
        probe[(triton.cdiv(count, 65536),)](
            x, given, codes, scales, inverses, exponents, count,
            MANTISSA=mantissa, POWER_OF_2=power_of_2, BLOCK=65536,
        )  # fmt: skip
        expected = casts.cast(x, given, dtype)
        both = [
            torch.where(expected.float().isnan(), 0, c) for c in (codes, expected.view(codes.dtype))
        ]
        assert torch.equal(*both)
        assert torch.equal(codes.view(dtype).float().isnan(), expected.float().isnan())
        wanted = casts.scale_of(amax, most, power_of_2=power_of_2, if_infinite=casts.FP32_MAX)
        assert torch.equal(scales, wanted)
        assert torch.equal(inverses, wanted.reciprocal())
        assert torch.equal(exponents, casts.e8m0_of(amax, dtype))


@triton.jit
def probe(
    x_ptr, scale_ptr, codes_ptr, scales_ptr, inverses_ptr, exponents_ptr, count,
    MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, inside, 0.0)
    codes = device.codes_of(x, tl.load(scale_ptr), MANTISSA)
    tl.store(codes_ptr + at, codes, inside)
    amax = tl.where(x == x, tl.abs(x), 0.0)
    scale = device.scale_of(amax, MANTISSA, POWER_OF_2, 3.4028234663852886e38)
    tl.store(scales_ptr + at, scale, inside)
    tl.store(inverses_ptr + at, device.inverse_of(scale, POWER_OF_2), inside)
    tl.store(exponents_ptr + at, device.exponent_of(amax, MANTISSA).to(tl.uint8), inside)


def special(dtype, rows, columns):
    """Numbers of all sizes, with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-30, 14, x.shape, generator=generator)
    x[0], x[:, 0] = 0.0, -0.0
    x[1, 3::40], x[-1, 5::70] = torch.inf, -torch.inf
    x[2, ::3] = torch.nan
    x[rows // 2 :] *= torch.finfo(dtype).tiny * 8
    return x.to(DEVICE, dtype)


@computes
@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_alone_is_the_quantizers(form, dtype):
    x = special(dtype, 160, 192)
    for usage, codes in ((ROWWISE, E4M3), (COLUMNWISE, E5M2), (BOTH, E4M3), (BOTH, E5M2)):
        quantizer, other = quantizer_of(form, codes), quantizer_of(form, codes)
        assert_same(library.cast(x, Into(quantizer, usage)), other.reference(x, usage))
        for name in quantizer.state_names:
            assert torch.equal(getattr(quantizer, name), getattr(other, name)), name


@computes
@pytest.mark.parametrize("name", ["dtype", "power_of_2", "block", "swizzles"])
def test_what_changes_of_a_quantizer_changes_its_next_cast(name):
    """Nothing that is remembered of casts is of a quantizer as it was."""
    change = {"dtype": E5M2, "power_of_2": True, "block": (128, 128), "swizzles": True}
    form = {"block": "1 x 128", "swizzles": "MX"}.get(name, "current")
    x = special(torch.bfloat16, 160, 192)
    one, other = quantizer_of(form), quantizer_of(form)
    library.cast(x, Into(one, BOTH))
    for quantizer in (one, other):
        setattr(quantizer, name, change[name])
    assert_same(library.cast(x, Into(one, BOTH)), other.reference(x, BOTH))


@computes
def test_a_kernel_that_reads_a_state_notes_that_a_graph_captures_it(monkeypatch):
    quantizer, x = quantizer_of("delayed"), drawn((32, 64), dtype=torch.bfloat16)[0]
    made = library.cast(x, Into(quantizer, BOTH))
    assert not quantizer.is_fixed()
    with monkeypatch.context() as patch:
        patch.setattr(fp8.quantizers, "is_captured", lambda device: True)
        library.cast(x, Into(quantizer, BOTH, made))  # with the scale that it had
    assert not quantizer.is_fixed()
    with monkeypatch.context() as patch:
        patch.setattr(fp8.quantizers, "is_captured", lambda device: True)
        library.cast(x, Into(quantizer.unrecorded(), BOTH))
    assert quantizer.is_fixed()


SHAPES = [(1,), (127,), (1, 1), (3, 127), (129, 130), (2, 3, 64), (2, 1, 3, 40), (3, 1536)]


@computes
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (8, 0), ()], ids=str)
def test_casts_of_any_shape_match_the_quantizer(shape):
    x = drawn(shape, dtype=torch.bfloat16)[0]
    for form in ("delayed", "current", "1 x 128", "128 x 128"):
        made = library.cast(x, Into(quantizer_of(form), BOTH))
        assert_same(made, quantizer_of(form).reference(x, BOTH))
        if form in ("delayed", "1 x 128") and x.ndim and x.numel():
            dx, sums = library.gradient(
                launch.IDENTITY, None, None, x, None, True, Into(quantizer_of(form, E5M2), BOTH)
            )
            assert_same(dx, quantizer_of(form, E5M2).reference(x, BOTH))
            assert_close(sums, x.double().reshape(-1, shape[-1]).sum(0))


@computes
def test_noncontiguous_tensors_cast_to_the_same_codes():
    """What is not contiguous is copied first, as the separate ops do."""
    x = drawn((64, 96), dtype=torch.bfloat16)[0]
    for tensor in (x.t(), x[:, ::2], x[:1].expand(64, 96)):
        made = library.cast(tensor, Into(quantizer_of("current"), BOTH))
        assert_same(made, quantizer_of("current").reference(tensor, BOTH))


WEIGHTS = {
    "fp8-delayed": fp8.DelayedScaling(),
    "fp8-current": fp8.Float8CurrentScaling(use_power_2_scales=True),
    "fp8-block": fp8.Float8BlockScaling(),
    "mxfp8": fp8.MXFP8BlockScaling(),
    "nvfp4": fp8.NVFP4BlockScaling(),
}


def everywhere(x, quantizer):
    return not conditions.of_quantizer(quantizer, alone=True)


def nowhere(x, quantizer):
    return False


@computes
@pytest.mark.parametrize("recipe", WEIGHTS)
def test_a_weight_is_cast_by_one_kernel_as_by_the_reference(recipe, monkeypatch):
    """Of any layout, also empty; what is recorded is the same, and into a given tensor."""
    names = []
    launched = Kernel.launch
    record = lambda self, *args, **given: (names.append(self.name), launched(self, *args, **given))  # noqa: E731
    monkeypatch.setattr(Kernel, "launch", record)
    monkeypatch.setattr(direct, "by_kernels", everywhere)
    made = {"fp8-delayed": 1, "fp8-current": 2, "fp8-block": 1, "mxfp8": 1, "nvfp4": 2}[recipe]
    x = special(torch.bfloat16, 96, 160)
    for weight in (x, torch.nn.Parameter(x.float()), x.t(), x[:, ::5], x[:0]):
        role = opfuse.QuantizerRole("linear", "weight")
        quantizer, other = (fp8.make(WEIGHTS[recipe], role, DEVICE) for _ in range(2))
        for usage in (ROWWISE, BOTH):
            names.clear()
            got, expected = quantizer.quantize(weight, usage), other.reference(weight, usage)
            assert len(names) == (made if weight.numel() else 0), names
            assert_same(got, expected)
            assert got.quantizer is quantizer
            for name in quantizer.state_names:
                assert torch.equal(getattr(quantizer, name), getattr(other, name)), name
            out = other.reference(torch.zeros_like(weight), usage)
            assert quantizer.quantize(weight, usage, out) is out
            assert_same(out, expected)
            if recipe == "fp8-delayed":
                quantizer.discard()
                assert_same(quantizer.requantize(weight, got.without_data(), usage), expected)
                assert quantizer.amax.item() == -1
                quantizer.quantize(weight, usage)


@computes
@pytest.mark.parametrize("recipe", WEIGHTS)
def test_ops_that_nothing_fuses_cast_by_kernels_as_by_the_reference(recipe, monkeypatch):
    """Three steps to the bit, and the state: a largest magnitude that counted twice would show."""
    x, found = drawn((64, 64), dtype=torch.bfloat16)[0], []
    for where in (everywhere, nowhere):
        monkeypatch.setattr(direct, "by_kernels", where)
        with opfuse.options(fusion_limit=0):
            found.append(trained(mlp(ops.SwiGLU), x, WEIGHTS[recipe], steps=3))
    (mine, state), (other, expected) = found
    assert all(map(torch.equal, mine, other))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@computes
@every
def test_weights_side_by_side_are_cast_into_one_tensor(form):
    """The operand of one product is that of codes that are put together, and copies none."""
    weights = [t.to(torch.bfloat16) for t in drawn((128, 64), (256, 64), (128, 64))]
    some, others = ([quantizer_of(form) for _ in weights] for _ in range(2))
    whole = [q.reference(w, BOTH) for w, q in zip(weights, others, strict=True)]
    with together.side_by_side(some, [len(weight) for weight in weights]):
        library.cast(weights[0], Into(quantizer_of(form), BOTH))  # of another tensor
        parts = [library.cast(w, Into(q, BOTH)) for w, q in zip(weights, some, strict=True)]
        again = library.cast(weights[0], Into(some[0], BOTH))  # as if two weights had one quantizer
    for got, expected in zip((*parts, again), (*whole, whole[0]), strict=True):
        assert_same(got, expected)
    got, expected = (
        GemmOperand.stacked([GemmOperand.of(t, ROWWISE) for t in made]) for made in (parts, whole)
    )
    assert got.data.data_ptr() == parts[0].rowwise_data.data_ptr()
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.scale.float(), expected.scale.float())
    codes = [part.rowwise_data for part in parts]
    for apart in (codes[::-1], codes[::2], [codes[0], whole[1].rowwise_data]):
        assert together.as_one(apart) is None


def parts_of(sizes, columns, dtype):
    """Matrices of different magnitudes, each in memory of its own."""
    drawn_ = drawn(*[(size, columns) for size in sizes])
    return [(t * 10**i).to(dtype) for i, t in enumerate(drawn_)]


@computes
@pytest.mark.parametrize("usage", [BOTH, ROWWISE, COLUMNWISE], ids=["both", "rows", "columns"])
@pytest.mark.parametrize("codes", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("form", ["delayed", "current", "current, power of 2"])
def test_weights_that_are_one_are_cast_where_they_are(form, codes, usage, monkeypatch):
    """A launch for each part, and one more with current scales; to the bit of the whole, and its state."""
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    launched, launch_ = [], launch.FORWARD.launch
    watched = lambda *args, **given: launched.append(given["FORMAT"]) or launch_(*args, **given)  # noqa: E731
    monkeypatch.setattr(launch.FORWARD, "launch", watched)
    mine, other = (QUANTIZERS[form](codes) for _ in range(2))
    for dtype, sizes, columns in (
        (torch.bfloat16, (128, 256, 128), 64),
        (torch.float16, (256, 128), 48),
        (torch.float32, (128, 384), 16),
        (torch.bfloat16, (128,), 32),
    ):
        parts = parts_of(sizes, columns, dtype)
        launched.clear()
        made = mine.quantize_parts(parts, usage)
        passes = ["none", "amax"] if form != "delayed" else ["tensor"]
        assert launched == [name for name in passes for _ in sizes]
        whole = other.reference(torch.cat(parts), usage)
        assert_same(made, whole)
        assert made.quantizer is mine and made.shape == (sum(sizes), columns)
        if form == "delayed":
            assert torch.equal(mine.amax, other.amax) and torch.equal(made.scale, whole.scale)


@computes
@pytest.mark.parametrize("form", ["delayed", "current"])
def test_parts_that_are_no_whole_tiles_are_put_together_first(form, monkeypatch):
    """So are those of two dtypes, strided ones, and those at an odd place; the bits are the same."""
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    mine, other = (QUANTIZERS[form](E4M3) for _ in range(2))
    casts, place = [], launch.PartsCasting.__init__
    watched = lambda *given: casts.append(given) or place(*given)  # noqa: E731
    monkeypatch.setattr(launch.PartsCasting, "__init__", watched)
    one, two = parts_of((128, 128), 64, torch.bfloat16)
    odd = torch.empty(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64).copy_(two)
    for parts in (
        parts_of((128, 96), 64, torch.bfloat16),
        parts_of((5, 3, 1), 7, torch.float32),
        parts_of((128, 128), 40, torch.float32),
        [one, two.float()],
        [one, two.t().contiguous().t()],
        [one, odd],
        [one[:0], two[:0]],
    ):
        assert_same(mine.quantize_parts(parts, BOTH), other.reference(torch.cat(parts), BOTH))
    assert not casts
    mine.quantize_parts([one, two], BOTH)
    assert len(casts) == 1


def test_the_height_of_every_tile_divides_what_parts_are_whole_in():
    """Else a launch of a part would write rows of the next."""
    for target in TARGETS.values():
        for rows, features, column in itertools.product(
            (128, 256, 4096), (1, 7, 16, 64, 4096), (None, torch.uint8)
        ):
            for form in ("tensor", "amax", *["none"] * (column is None)):
                for unaligned in (False, True):
                    facts = {
                        "FORMAT": form,
                        "column_ptr": column,
                        "rows": rows,
                        "features": features,
                    }
                    facts |= {"unaligned": unaligned, **launch.IDENTITY.forward}
                    (config,) = tiles.configs(target, facts)
                    assert tiles.HIGHEST % config["BLOCK_ROWS"] == 0


def test_where_a_cast_that_nothing_fuses_is_a_kernel():
    """On a GPU, and where launches are recorded; never on a CPU, of a subclass, or transformed."""
    quantizer, seen = fp8.CurrentQuantizer(E4M3), []
    assert not direct.by_kernels(torch.ones(2, 2), quantizer)
    x = torch.empty(64, 64, device="meta")
    assert not direct.by_kernels(x, quantizer)
    with recording(90) as launches:
        assert not direct.by_kernels(torch.ones(2, 2), quantizer)
        assert not direct.by_kernels(x.as_subclass(type("Own", (torch.Tensor,), {})), quantizer)
        assert not direct.by_kernels(x, Own(E4M3))
        assert not direct.by_kernels(x, fp8.MXQuantizer(E4M3, square=True))
        torch.func.vmap(lambda t: seen.append(direct.by_kernels(t, quantizer)) or t)(x)
        assert seen == [False]
        made = quantizer.quantize(torch.nn.Parameter(x), BOTH)
        quantizer.quantize(x.double(), BOTH)
    assert [launch.kernel.name for launch in launches] == ["cast_forward"] * 2
    assert made.quantizer is quantizer and made.rowwise_data.is_meta


def values_of(call, dtype, device):
    """What a kernel computes before it casts."""
    values = []
    original = launch.Casting.made

    def made(self):
        values.append(self.values)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Casting, "made", made)
        call(fp8.CurrentQuantizer(E4M3))
    return values[0]


def assert_few_steps(got, expected, name):
    """Codes at most one step off, in at most one of a thousand; says how many."""
    count = total = 0
    for field in (name for name in got.data_names if getattr(got, name) is not None):
        steps = code_steps(getattr(got, field), getattr(expected, field))
        assert steps.max() <= 1
        count, total = count + int((steps > 0).sum()), total + steps.numel()
    print(f"{name}: {count} of {total} codes are one step off")
    assert count <= max(1, 1e-3 * total)


def forms_for(name, dtype):
    """Every quantizer for two activations, and few for the others, which use the same code."""
    if name in ("GELU", "SwiGLU") and dtype is torch.bfloat16:
        return [*((form, BOTH) for form in QUANTIZERS), ("1 x 128", ROWWISE), ("MX", ROWWISE)]
    return [("delayed", BOTH), ("1 x 128" if dtype is torch.float16 else "MX", BOTH)]


@computes
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in ACTS]
    + [(name, dtype) for name in ("GELU", "SwiGLU") for dtype in DTYPES[::2]],
    ids=str,
)
def test_activation_kernels_cast_the_values_that_they_write(name, dtype):
    """The codes are those of the values that the same kernel writes, and the values are right."""
    op = ACTS[name]()
    x, bias = drawn((96, 128 * op.feature_ratio), (128 * op.feature_ratio,), dtype=dtype)
    formula = formulas.formula_of(op)

    def run(quantizer, usage=BOTH, again=None):
        given = formula, op, x, bias, dtype, True, Into(quantizer, usage, again)
        made, kept = library.activation(*given)
        assert torch.equal(kept, (x.float() + bias.float()).to(dtype))
        return made

    values = values_of(run, dtype, x.device)
    hidden = (x.float() + bias.float()).to(dtype)
    separate = op.forward_value(hidden)
    close_to(values, separate, true_value(op, hidden.double()))
    for form, usage in forms_for(name, dtype):
        quantizer = quantizer_of(form)
        made = run(quantizer, usage)
        assert_same(made, quantizer_of(form).reference(values, usage))
        if usage is BOTH:
            assert_few_steps(made, quantizer_of(form).reference(separate, usage), f"{name}, {form}")
            quantizer.discard()
            assert_same(run(quantizer, usage, made.without_data()), made)
            assert all(
                (getattr(quantizer, pending) == -1).all() for pending in quantizer.pending_names
            )


@computes
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in ACTS]
    + [(name, dtype) for name in ("GELU", "SwiGLU") for dtype in DTYPES[::2]],
    ids=str,
)
def test_gradient_kernels_cast_the_values_that_they_write(name, dtype):
    op = ACTS[name]()
    x, dy = drawn((96, 128 * op.feature_ratio), (96, 128), dtype=dtype)
    formula, numbers = formulas.formula_of(op), op.numbers_of()

    def run(quantizer, usage=BOTH, sums=True):
        return library.gradient(formula, op, numbers, dy, x, sums, Into(quantizer, usage))

    values, separate = values_of(run, dtype, x.device), op.backward_value(dy, x)
    truth = true_gradient(op, dy.double(), x.double())
    close_to(values, separate, truth)
    for form, usage in forms_for(name, dtype):
        made, sums = run(quantizer_of(form, E5M2), usage)
        assert_same(made, quantizer_of(form, E5M2).reference(values, usage))
        assert_close(sums, truth.sum(0))
        if usage is BOTH:
            expected = quantizer_of(form, E5M2).reference(separate, usage)
            assert_few_steps(made, expected, f"{name} backward, {form}")
    assert run(quantizer_of("MX"), BOTH, False)[1] is None


def true_value(op, x):
    if not op.gated:
        return op.value(x)
    a, b = op.split(x)
    return op.value(a) * op.linear_value(b)


def true_gradient(op, dy, x):
    if not op.gated:
        return dy * op.derivative(x)
    a, b = op.split(x)
    slope = op.linear_derivative(b)
    db = op.value(a) * dy * (1 if slope is None else slope)
    return op.join(op.derivative(a) * dy * op.linear_value(b), db)


def close_to(got, separate, truth):
    """Within the tolerance, or within twice the error of the separate operations."""
    own = (separate.double() - truth).abs().max()
    if (got.double() - truth).abs().max() > 2 * own:
        assert_close(got, truth)


# Norms


NORMS = {
    "RMSNorm": ops.RMSNorm,
    "RMSNorm, zero-centered": functools.partial(ops.RMSNorm, zero_centered_gamma=True),
    "LayerNorm": ops.LayerNorm,
    "LayerNorm without parameters": functools.partial(ops.LayerNorm, elementwise_affine=False),
}


@computes
@pytest.mark.parametrize(
    ("name", "added"),
    [*((name, "") for name in NORMS), ("RMSNorm", "added"), ("LayerNorm", "of another dtype")],
    ids=str,
)
def test_norm_kernels_cast_the_values_that_they_write(name, added):
    dtype = torch.bfloat16
    op = NORMS[name](192, device=DEVICE)
    x, extra, weight, bias = drawn((2, 32, 192), (2, 32, 192), (192,), (192,), dtype=dtype)
    extra = None if not added else extra.float() if "another" in added else extra
    given = (weight, bias)[: len(list(op.parameters()))]
    weight, bias = (*given, None, None)[:2]
    tensors = x, extra, weight, bias

    def run(quantizer, usage=BOTH):
        into = Into(quantizer, usage)
        made = launch_norms.norm(op, tensors, dtype, extra is not None, True, into)
        results.append(made)
        return made.output

    results = []
    values = values_of(run, dtype, x.device)
    total = x if extra is None else x + extra
    if extra is not None:
        assert torch.equal(results[0].total, total)
    truth, mean, rstd = true_norm(op, total.double(), weight, bias)
    assert_close(values, truth)
    assert_close(results[0].rstd, rstd)
    if isinstance(op, ops.LayerNorm):
        assert_close(results[0].mean, mean)
    wanted = [*((form, BOTH) for form in QUANTIZERS), ("1 x 128", ROWWISE), ("MX", ROWWISE)]
    for form, usage in [*wanted, ("delayed", COLUMNWISE), ("delayed", ROWWISE)]:
        quantizer, other = quantizer_of(form), quantizer_of(form)
        made, expected = run(quantizer, usage), other.reference(values, usage)
        if form in ("128 x 128", "1 x 128", "1 x 128, any scale", "MX"):
            assert_few_steps(made, expected, f"{name}, {form}")  # another kernel than for values
        else:
            assert_same(made, expected)
        for state in quantizer.state_names:
            assert torch.equal(getattr(quantizer, state), getattr(other, state))


def true_norm(op, x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    centered = x - mean if isinstance(op, ops.LayerNorm) else x
    rstd = (centered.square().mean(-1, keepdim=True) + op.eps).rsqrt()
    y = centered * rstd
    if weight is not None:
        y = y * (weight.double() + (1 if op.zero_centered_gamma else 0))
    return y if bias is None else y + bias.double(), mean, rstd


# Plans


class Again(opfuse.FusedOperation):
    """An activation that is computed again in the backward, as other plugins do it."""

    recomputes = True
    times = 0

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y = self.basic_ops[0].op_forward(basic_op_ctxs[0], input_)
        if basic_op_ctxs[0].may_recompute:
            basic_op_ctxs[0].recomputable_output = y
        return y, [()]

    def fuser_recompute(self, basic_op_ctxs):
        Again.times += 1
        (x,) = basic_op_ctxs[0].saved_tensors
        return self.basic_ops[0].forward_value(x)


def mlp(act=ops.GELU, width=64, norm=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    hidden = 2 * width
    chain = [ops.Linear(width, hidden * act().feature_ratio), act(), ops.Linear(hidden, width)]
    return opfuse.Sequential(*([norm(width)] if norm else []), *chain).to(DEVICE, dtype)


def trained(chain, x, recipe, steps=2):
    """What some steps give: outputs, gradients, and the state of quantizers."""
    leaf, results = x.clone().requires_grad_(), []
    weight = torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x).to(x.dtype)
    for _ in range(steps):
        with opfuse.autocast(recipe):
            y = chain(leaf)
        (y * weight).sum().backward()
        results.append(y.detach())
    grads = [leaf.grad, *(p.grad for p in chain.parameters())]
    state = {k: v for k, v in chain.state_dict().items() if "quantizers" in k}
    return results + grads, state


def fusions_of(chain, x, recipe, **options):
    with opfuse.autocast(recipe), opfuse.options(**options):
        row = opfuse.explain(chain, x.clone().requires_grad_()).to_dict()
    steps = [[step["fusion"] for step in row[name]] for name in ("forward", "backward")]
    return steps, {step["reason"] for step in row["refused"]}


RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8")


@pytest.fixture
def alone():
    with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.twins": not computing()}):
        yield


def computing():
    return GPU or is_interpreting()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("act", [ops.GELU, ops.SwiGLU])
def test_a_model_gives_what_the_separate_ops_give(act, recipe):
    x = drawn((64, 64), dtype=torch.bfloat16)[0]
    (forward, backward), _ = fusions_of(mlp(act, norm=ops.RMSNorm), x, recipe)
    assert {"norm+cast", "activation+cast"} <= {*forward}
    assert {"cast+bias", "cast+activation"} <= {*backward}
    got, state = trained(mlp(act, norm=ops.RMSNorm), x, recipe)
    with opfuse.options(fusion_limit=0):
        expected, other = trained(mlp(act, norm=ops.RMSNorm), x, recipe)
    for one, two in zip(got, expected, strict=True):
        if computing():
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)
        else:
            assert torch.equal(one, two)
    assert state.keys() == other.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=0)


@pytest.fixture
def twins_wanted():
    """Without a list of plugins, which would come before what is registered."""
    with opfuse.options(**{"fp8.twins": not computing()}):
        yield


@pytest.mark.usefixtures("twins_wanted")
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_another_fusion_computes_again_is_not_kept(recipe):
    x = drawn((64, 64), dtype=torch.bfloat16)[0]
    expected, state = trained(mlp(), x, recipe)
    fusion = opfuse.Fusion((ops.GELU,), Again, name="again")
    handle = opfuse.register_forward_fusion(fusion, prepend=True)
    try:
        (forward, _), _ = fusions_of(mlp(), x, recipe)
        assert "again" in forward and "cast" in forward
        before = Again.times
        got, other = trained(mlp(), x, recipe)
    finally:
        handle.unregister()
    assert Again.times == before + 2
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)
    for name, value in state.items():
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_computed_again_where_memory_is_preferred(recipe):
    x = drawn((64, 64), dtype=torch.bfloat16)[0]
    saved, results = [], []
    for prefer in ("speed", "memory"):
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            opfuse.options(prefer=prefer),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            results.append(trained(mlp(), x, recipe, steps=1))
        saved.append(sum(sizes.values()))
    codes = 64 * 128
    assert saved[0] - saved[1] >= codes
    (one, state), (two, other) = results
    assert all(map(torch.equal, one, two))
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("act", [ops.GELU, ops.SwiGLU])
def test_a_cast_input_is_read(act):
    """In the backward, and to compute codes again; ``test_memory.py`` holds the twins to the bits."""
    x = drawn((64, 64), dtype=torch.bfloat16)[0]
    got, _ = trained(mlp(functools.partial(act, cache_quantized_input=True)), x, "fp8-current")
    expected, _ = trained(mlp(act), x, "fp8-current")
    for one, two in zip(got, expected, strict=True):
        assert (one.float() - two.float()).norm() <= 0.09 * two.float().norm()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recipe", RECIPES[:1])
def test_nothing_is_recorded_without_grad_mode(recipe):
    x, chain = drawn((64, 64), dtype=torch.bfloat16)[0], mlp(norm=ops.LayerNorm)
    _, before = trained(chain, x, recipe)
    with torch.no_grad(), opfuse.autocast(recipe):
        chain(1000 * x)
    after = {k: v for k, v in chain.state_dict().items() if "quantizers" in k}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("alone")
def test_activation_checkpointing_counts_once():
    from torch.utils.checkpoint import checkpoint

    x = drawn((64, 64), dtype=torch.bfloat16)[0]
    states = []
    for checkpointing in (False, True):
        chain, leaf = mlp(), x.clone().requires_grad_()
        for _ in range(2):
            with opfuse.autocast("fp8-delayed"):
                more = {"use_reentrant": False, "context_fn": opfuse.checkpoint_contexts}
                call = functools.partial(checkpoint, chain, **more)
                (call if checkpointing else chain)(leaf).sum().backward()
        states.append({k: v for k, v in chain.state_dict().items() if "quantizers" in k})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# Where the kernels are not used


def reasons(recipe, chain=None, x=None, **options):
    with opfuse.plugins.using("fp8"):
        given = drawn((64, 64), dtype=torch.bfloat16)[0] if x is None else x
        (forward, backward), why = fusions_of(chain or mlp(), given, recipe, **options)
    return {*filter(None, forward + backward)}, " ".join(why)


def test_where_no_kernel_runs_nothing_is_fused_unless_the_twins_are_wanted():
    x = torch.randn(64, 64, dtype=torch.float64)
    chain = mlp(dtype=torch.float64).cpu()
    names, why = reasons("fp8-current", chain, x)
    assert not names
    assert ("float64" if computing() and not GPU else "this is cpu") in why
    assert reasons("fp8-current", chain, x, **{"fp8.twins": True})[0]


class Own(fp8.CurrentQuantizer):
    """A quantizer that overrides something."""


def own(role):
    return Own(E4M3)


def of_squares(role):
    return fp8.MXQuantizer(E4M3, square=True)


def test_other_quantizers_are_left_alone():
    recipe = fp8.CustomRecipe(own, name="own for the tests of kernels")
    names, why = reasons(recipe, **{"fp8.twins": True})
    assert not names and "this is a Own" in why
    recipe = fp8.CustomRecipe(of_squares, name="squares for the tests of kernels")
    names, why = reasons(recipe, **{"fp8.twins": True})
    assert not names and "32 x 32 share one" in why


def test_gated_gradients_have_no_square_blocks():
    recipe = fp8.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2)
    names, why = reasons(recipe, mlp(ops.SwiGLU), **{"fp8.twins": True})
    assert "cast+activation" not in names and "a gated gradient has two halves" in why
    assert "cast+activation" in reasons(recipe, **{"fp8.twins": True})[0]


@computes
def test_activations_and_norms_that_the_kernels_do_not_take():
    act = functools.partial(ops.SwiGLU, glu_interleave_size=3)
    x = drawn((64, 96), dtype=torch.bfloat16)[0]
    names, why = reasons("fp8-current", mlp(act, 96), x)
    assert "activation+cast" not in names and "a power of two up to 64" in why
    norm = functools.partial(lambda width: ops.RMSNorm((64, width)))
    names, why = reasons("fp8-current", mlp(norm=norm))
    assert "norm+cast" not in names and "normalize one dimension" in why


@compiles
@pytest.mark.parametrize("adds", [False, True], ids=["norm+cast", "add+norm+cast"])
def test_norms_that_are_too_wide_for_registers(adds):
    """``test_conformance.py`` declares that as a limit: no width of the kit is as large."""
    name = "add+norm+cast" if adds else "norm+cast"
    for width, fits in ((16384, True), (16400, False)):
        norm = ops.RMSNorm(width), ops.Linear(width, 16)
        chain = opfuse.Sequential(*([ops.AddExtraInput()] if adds else []), *norm)
        given = [torch.ones(16, width) for _ in range(1 + adds)]
        with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.twins": True}):
            with opfuse.autocast("fp8-current"):
                row = opfuse.explain(chain, *given).to_dict()
        sentence = "its kernels keep rows in registers, up to 16384 features, and these are 16400"
        assert (sentence in {each["reason"] for each in row["refused"]}) == (not fits)
        assert (name in {each["fusion"] for each in row["forward"]}) == fits


# Without a GPU

EACH_KERNEL = (
    "cast, 1 x 128",
    "cast + bias + GELU, current",
    "cast + SwiGLU, MX",
    "RMSNorm + cast, delayed",
    "LayerNorm + cast, MX",
    "delayed scales",
    "cast, NVFP4 drawn",
    "cast of groups, current",
    "cast of groups, MX",
)


@compiles
@pytest.mark.parametrize("name", EACH_KERNEL)
def test_it_compiles_for_every_target(name, monkeypatch, tmp_path):
    from opfuse_triton.checking import check_case

    if name != "delayed scales":
        compiled.skip_if_reported("fp8")
    (number,) = [i for i, case in enumerate(cases.CASES) if case.name == name]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for arch in TARGETS:
        rows = check_case("fp8", "opfuse_fp8.cases:CASES", number, arch)
        assert rows and not [sentence for row in rows for sentence in row.refusals]


@pytest.mark.costly(20)
@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_byte_is_moved_as_often_as_it_has_to_be(case):
    from opfuse_triton.floor import assert_floor

    assert_floor(case, partial=0.05)


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_predictions_are_those_of_the_model(monkeypatch):
    """The separate ops cast by a kernel, too, which a case of its own counts."""
    from ledger.entries import estimate
    from ledger.predicted import separate_seconds

    monkeypatch.setattr(twins, "cast", lambda x, into: SimpleNamespace(tensors=tuple))
    named, target = {case.name: case for case in cases.CASES}, TARGETS[90]
    for predicted, (name,) in conditions.PREDICTED.fusions.values():
        found = []
        for shape in named[name].shapes:
            own, alone = (estimate(named[n], shape, target, 4) for n in (name, "cast, current"))
            apart = separate_seconds(named[name], shape, target) + alone.seconds
            found.append(apart / own.seconds)
        assert min(found) == pytest.approx(predicted, rel=0.05), name


@compiles
def test_a_cast_asks_whether_it_pays_on_a_gpu_where_it_was_not_measured(monkeypatch):
    given = {"dtype": torch.bfloat16, "capability": (9, 0), "options": {}}
    env = opfuse.Environment(torch.device("cuda"), **given)
    cast, made = ops.Cast(fp8.CurrentQuantizer(E4M3), BOTH), {}
    norm, fusions = ops.RMSNorm(64), [*fused.FORWARD, *fused.BACKWARD, *fused_norms.FORWARD]
    for predicted in (1.09, 1.11):
        speeds = {name: (predicted, ()) for name in conditions.PREDICTED.fusions}
        monkeypatch.setattr(conditions, "PREDICTED", Predicted("fp8", speeds))
        for fusion in fusions:
            first = ops.GELU() if "activation" in fusion.name else ops.Bias(64)
            matched = {"cast": (cast,), "norm+cast": (norm, cast)}.get(fusion.name, (first, cast))
            matched = (ops.AddExtraInput(), norm, cast) if "add" in fusion.name else matched
            made[fusion.name, predicted] = fusion.when(matched, env)
        measured = opfuse.Environment(torch.device("cuda"), **given, measured=1.0)
        assert fusions[0].when((cast,), measured) is True
    assert {name for name, _ in made} == {*conditions.PREDICTED.fusions, "cast"}
    for (name, predicted), answer in made.items():
        pays = name == "cast" or predicted > 1.1  # a cast alone is the same kernel without a fusion
        assert answer is True if pays else "would be 1.09x as fast" in answer


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_a_history_is_read_and_written_once():
    from opfuse_triton.floor import count_bytes

    (case,) = [case for case in cases.CASES if case.name == "delayed scales"]
    (shape,) = case.small
    moved = count_bytes(case, shape)
    assert 1 <= moved["vector"] / case.floor_bytes(shape) <= 1.02 and not moved["partial"]


def test_floors_say_what_has_to_be_read_twice():
    """Current scaling knows its scale late; a columnwise copy of a norm needs the statistics."""
    floors = {case.name: case.floor_bytes(case.shapes[0]) for case in cases.CASES}
    full = 8192 * 4096
    assert floors["cast, delayed"] == full * (2 + 1 + 1)
    assert floors["cast, current"] == full * (2 + 2 + 1 + 1)
    assert floors["cast, NVFP4"] == full * (2 + 2 + 0.5 + 0.5)
    assert floors["cast, 1 x 128"] == floors["cast, MX"] == floors["cast, delayed"]
    assert floors["RMSNorm + cast, delayed"] == full * (2 + 1 + 1 + 1)
    assert floors["RMSNorm + cast, MX"] == full * (2 + 2 + 1 + 1)


def test_rows_and_features_may_pass_32_bits():
    """The row is of 64 bits before anything is multiplied by it."""
    (case,) = [case for case in cases.CASES if case.name == "cast, delayed"]
    with recording(90) as launches:
        case.run(**case.inputs({"rows": 1 << 20, "features": 1 << 14}))
    config = launches[0].config
    assert launches[0].grid[0] * config["BLOCK_ROWS"] * config["BLOCK_COLUMNS"] == 1 << 34
    assert tiles.grid(1 << 20, 1 << 14, config) == launches[0].grid


@computes
def test_state_on_another_device_than_the_values_is_refused():
    x, moved = torch.randn(16, 32), fp8.DelayedQuantizer(E4M3)
    scales = moved.quantize(x, BOTH)
    scales.scale = scales.scale.to("meta")
    with pytest.raises(RuntimeError, match=r"its scale of the earlier cast is, got some on cpu"):
        library.cast(x, Into(moved, BOTH, scales))
    elsewhere = fp8.DelayedQuantizer(E4M3, device="meta")
    for quantizer in (
        *(elsewhere, elsewhere.unrecorded()),
        fp8.nvfp4.StochasticNVFP4Quantizer(device="meta"),
    ):
        with pytest.raises(RuntimeError, match=r"expected values on meta.*got some on cpu: move"):
            library.cast(x, Into(quantizer, BOTH))
