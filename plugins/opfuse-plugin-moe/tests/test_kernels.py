"""The kernels against fp64, compiled for GPUs that need not be there, and their bytes counted.

Without a GPU they run in a process with ``TRITON_INTERPRET=1``, and are compiled in one without.
"""

import dataclasses
import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import opfuse
from opfuse import ops, testing
from opfuse.core.quantization import BOTH, Quantizer
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops.row_groups import cast_each
from opfuse.testing import assert_close, interpreter, machine
from opfuse.testing.recipes import offered

pytest.importorskip("triton")
from ledger import assert_predicted
from opfuse_moe import conditions, groups
from opfuse_moe.cases import CASES, multiplies_codes, multiplies_mx
from opfuse_moe.conditions import PREDICTED
from opfuse_moe.kernels import library
from opfuse_triton import TARGETS, Kernel, current_target, functions_of, recording, target
from opfuse_triton.floor import assert_floor
from opfuse_triton.recorded import record
from opfuse_triton.resources import read_resources

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [[1], [5, 0, 66, 1], [0, 0, 3, 0, 0], [0, 127]]
BY_NAME = {case.name: case for case in CASES}

needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETING, reason="no GPU, and Triton does not interpret"
)
needs_codes = pytest.mark.skipif(
    not INTERPRETING
    and (DEVICE == "cpu" or not multiplies_codes(current_target(torch.device(DEVICE)))),
    reason="no GPU that multiplies FP8 codes, and Triton does not interpret",
)
needs_blocks = pytest.mark.skipif(
    not INTERPRETING
    and (DEVICE == "cpu" or not multiplies_mx(current_target(torch.device(DEVICE)))),
    reason="no GPU that multiplies MX blocks, and Triton does not interpret",
)
needs_compiler = pytest.mark.skipif(
    INTERPRETING, reason="a process that interprets kernels cannot compile them"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if INTERPRETING:
    interpreter.install()


@pytest.fixture(autouse=True)
def _few_programs():
    """Few programs are interpreted for a GPU of one multiprocessor."""
    if not INTERPRETING:
        yield
        return
    with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
        yield


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


def ends_of(sizes):
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def grouped(function, sizes, *tensors, of=()):
    """A function of each group's rows, and of what each group has of ``of``, in fp64."""
    parts = [tensor.double().split(sizes) for tensor in tensors]
    return [function(*given) for given in zip(*parts, *[each.double() for each in of], strict=True)]


@needs_kernels
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "one tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_match_fp64(dtype, listed):
    for sizes, (depth, features) in zip(
        SIZES, [(33, 50), (64, 136), (1, 3), (129, 1)], strict=True
    ):
        count, rows = len(sizes), sum(sizes)
        x, dy, w, bias, scales = drawn(
            *((rows, depth), (rows, features), (count, features, depth)),
            *((count, features), (rows,)),
            dtype=dtype,
        )
        ends = ends_of(sizes)
        separate = [each.clone() for each in w]
        matrices = library.matrices_of(separate if listed else w)
        assert (matrices.table is not None) == (listed and count > 1)
        y = library.product(x, matrices, ends, bias.unbind())
        exact = grouped(lambda x, w, b: x @ w.T + b, sizes, x, of=(w, bias))
        assert_close(y, torch.cat(exact))
        y = library.product(x, matrices, ends, bias.unbind(), scales)
        exact = grouped(lambda x, s, w, b: x @ w.T + b * s[:, None], sizes, x, scales, of=(w, bias))
        assert_close(y, torch.cat(exact))
        turned = library.matrices_of(w.mT.contiguous().mT)  # no copy of these either
        assert turned.strides == (1, features) or 1 in w.shape[1:]
        assert torch.equal(library.product(x, turned, ends, bias.unbind(), scales), y)
        dx = library.product(dy, matrices.transposed(), ends)
        assert_close(dx, torch.cat(grouped(lambda dy, w: dy @ w, sizes, dy, of=(w,))))


LAYOUTS = {
    "one tensor": lambda whole: whole,
    "in a row": lambda whole: [*whole],
    "apart": lambda whole: [each.clone() for each in whole],
    "unaligned": lambda whole: [
        torch.cat([each.new_zeros(1), each.flatten()])[1:].view(each.shape) for each in whole
    ],
    "the first is frozen": lambda whole: [None, *[each.clone() for each in whole[1:]]],
}


_APART = "apart", "unaligned"


def assert_added(add, exact, sizes):
    """Products are added to sums in fp32, wherever these are; or they replace them."""
    for adds, (name, place) in itertools.product((True, False), LAYOUTS.items()):
        whole = torch.full(exact.shape, 1.5 if adds else torch.nan, device=DEVICE)
        frozen = name == "the first is frozen"
        if frozen and len(sizes) == 1:
            continue
        sums = place(whole)
        into = library.sums_of(sums)
        assert (into.table is not None) == (frozen or (len(sizes) > 1 and name in _APART))
        add(into, adds=adds)
        for total, wanted, size in [*zip(sums, exact, sizes, strict=True)][frozen:]:
            assert_close(total, wanted + 1.5 * adds)
            assert size or total.eq(1.5 if adds else 0).all()


def test_what_no_kernel_adds_to():
    """Nothing is copied: a copy would get the sum in place of ``main_grad``."""
    whole = torch.zeros(3, 4, 5, device=DEVICE)
    assert library.sums_of(whole).first is whole
    assert library.sums_of([*whole]).first.data_ptr() == whole.data_ptr()
    for refused in (
        whole.bfloat16(),
        [*whole.double()],
        whole.mT,
        whole[:, :, :3],
        whole[:1].expand(3, 4, 5),
        [*whole.mT],
        [whole[0], whole[1], whole[0]],
        [whole[0], whole.view(-1)[10:30].view(4, 5)],
        [None, whole[1], whole[1]],
    ):
        assert library.sums_of(refused) is None


class Cast(Quantizer):
    """Divides by the largest magnitude."""

    def __init__(self, dtype):
        self.dtype = dtype

    def quantize(self, tensor, usage, out=None):
        scale = tensor.abs().amax().reshape(1) if tensor.numel() else tensor.new_ones(1)
        return ScaledTensor(tensor.shape, tensor.dtype, self, (tensor / scale).to(self.dtype),
                            None, scale)  # fmt: skip


def coded(*shape, dtype=E4M3):
    (values,) = drawn(shape)
    return values.to(dtype)


@needs_codes
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_products_of_codes_match_fp64(dtypes):
    for sizes, (depth, features) in zip(
        SIZES, [(33, 50), (64, 136), (16, 3), (129, 1)], strict=True
    ):
        count = len(sizes)
        x, w = (
            coded(sum(sizes), depth, dtype=dtypes[0]),
            coded(count, features, depth, dtype=dtypes[1]),
        )
        bias, *inverses = drawn((count, features), (count,), (count,))
        apart = [each.clone() for each in w]
        for matrices in (library.matrices_of(w.unbind()), library.matrices_of(apart)):
            assert (matrices.table is not None) == (matrices.first is apart[0] and count > 1)
            given = (x, inverses[0]), matrices, inverses[1], ends_of(sizes)
            for out, biases in ((torch.float32, bias.unbind()), (torch.bfloat16, ())):
                y = library.coded_product(*given, out, biases)
                exact = grouped(lambda x, w: x @ w.T, sizes, x, of=(w,))
                each = zip(
                    exact, *inverses, bias if biases else torch.zeros_like(bias), strict=True
                )
                exact = torch.cat([y * (a * b).double() + c.double() for y, a, b, c in each])
                assert_close(y, exact)


@needs_codes
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E4M3)], ids=str)
def test_gradients_of_codes_match_fp64(dtypes):
    for sizes, (depth, features) in zip(
        SIZES, [(33, 50), (64, 136), (16, 3), (129, 1)], strict=True
    ):
        count, ends = len(sizes), ends_of(sizes)
        tensors = drawn((sum(sizes), features), (sum(sizes), depth), (count, depth, features))
        each = [Cast(dtype) for dtype in dtypes]
        dy, x = [
            cast_each(t, ends, BOTH, [one] * count)
            for t, one in zip(tensors[:2], each, strict=True)
        ]
        values = [t.dequantize() for t in (dy, x)]
        (inverse,) = drawn((count,))
        w = tensors[2].to(E4M3)
        given = (dy.rowwise_data, dy.scale_inv), library.matrices_of(w), inverse, ends
        dx = library.coded_product(*given, torch.float32, exact=True)
        exact = grouped(lambda dy, w: dy @ w.T, sizes, values[0], of=(w,))
        assert_close(dx, torch.cat([y * a.double() for y, a in zip(exact, inverse, strict=True)]))
        pairs = [library.Scaled(t.columnwise_data, t.scale_inv) for t in (dy, x)]
        dw = library.coded_weight_grads(*pairs, ends, (sum(sizes), features, depth), torch.float32)
        exact = torch.stack(grouped(lambda dy, x: dy.T @ x, sizes, *values))
        assert_close(dw, exact)
        assert all(not dw[i].any() for i, size in enumerate(sizes) if not size)
        given = *pairs, ends, (sum(sizes), features, depth)
        assert_added(partial(library.add_coded_weight_grads, *given), exact, sizes)


def scaled(*shape, dtype=E4M3):
    """Codes with powers of two, and the values."""
    codes = coded(*shape, dtype=dtype)
    powers = drawn((*shape[:-1], shape[-1] // 32))[0].mul(3).round().exp2().to(E8M0)
    values = codes.double().unflatten(-1, (-1, 32)) * powers.double()[..., None]
    return library.Scaled(codes, powers), values.flatten(-2)


@needs_blocks
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_products_of_blocks_match_fp64(dtypes):
    for sizes, (depth, features) in zip(
        SIZES, [(32, 50), (64, 136), (160, 3), (288, 1)], strict=True
    ):
        count, ends = len(sizes), ends_of(sizes)
        (x, rows), (w, matrices) = [
            scaled(*shape, dtype=dtype)
            for shape, dtype in zip(
                [(sum(sizes), depth), (count, features, depth)], dtypes, strict=True
            )
        ]
        (bias,) = drawn((count, features))
        for out, biases in ((torch.float32, bias.unbind()), (torch.bfloat16, ())):
            y = library.scaled_product(x, w, ends, out, biases)
            added = bias if biases else torch.zeros_like(bias)
            exact = grouped(lambda x, w, b: x @ w.T + b, sizes, rows, of=(matrices, added))
            assert_close(y, torch.cat(exact))


@needs_blocks
def test_gradients_of_blocks_match_fp64():
    for sizes, (depth, features) in zip(
        SIZES, [(32, 50), (64, 136), (160, 3), (288, 1)], strict=True
    ):
        blocks, made, values = [-(-size // 32) for size in sizes], [], []
        for width, dtype in ((features, E5M2), (depth, E4M3)):
            parts = [scaled(width, 32 * n, dtype=dtype) for n in blocks]
            for (codes, _), size in zip([part for part, _ in parts], sizes, strict=True):
                codes.view(torch.uint8)[:, size:] = 0  # what fills a group up
            of_each = [
                (one.codes.double().unflatten(-1, (-1, 32)) * one.scales.double()[..., None])
                for one, _ in parts
            ]
            values.append([each.flatten(-2) for each in of_each])
            codes, powers = [
                torch.cat([t.reshape(-1).view(torch.uint8) for t in each])
                for each in zip(*[one for one, _ in parts], strict=True)
            ]
            made.append(library.Scaled(codes.view(dtype), powers.view(E8M0)))
        given = *made, ends_of(sizes), (sum(sizes), features, depth)
        dw = library.coded_weight_grads(*given, torch.float32)
        exact = torch.stack([dy @ x.T for dy, x in zip(*values, strict=True)])
        assert_close(dw, exact)
        assert_added(partial(library.add_coded_weight_grads, *given), exact, sizes)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_parameters_match_fp64(dtype):
    for sizes, (depth, features) in zip(
        SIZES, [(33, 50), (64, 136), (1, 3), (129, 1)], strict=True
    ):
        rows = sum(sizes)
        x, dy, scales = drawn((rows, depth), (rows, features), (rows,), dtype=dtype)
        ends = ends_of(sizes)
        dw = library.weight_grads(dy, x, ends)
        exact = torch.stack(grouped(lambda dy, x: dy.T @ x, sizes, dy, x))
        assert_close(dw, exact)
        assert all(not dw[i].any() for i, size in enumerate(sizes) if not size)
        assert torch.equal(dw, library.weight_grads(dy, x, ends))
        assert_added(partial(library.add_weight_grads, dy, x, ends), exact, sizes)
        sums = library.row_sums(dy, ends, scales)
        exact = grouped(lambda dy, s: (dy * s[:, None]).sum(0), sizes, dy, scales)
        assert_close(sums, torch.stack(exact))
        assert_close(
            library.row_sums(dy[:, :1].expand_as(dy), ends)[:, 0], library.row_sums(dy, ends)[:, 0]
        )


@needs_kernels
@pytest.mark.parametrize(
    "op",
    [ops.SwiGLU(), ops.SwiGLU(glu_interleave_size=8), ops.ClampedSwiGLU(limit=1.0), ops.SReLU()],
    ids=["swiglu", "interleaved", "clamped", "one half"],
)
def test_activations_around_a_product_match_fp64(op):
    sizes, dtype = [5, 0, 66, 1], torch.float32
    rows, count, inner = sum(sizes), len(sizes), 24
    wide = inner * (2 if op.gated else 1)
    x, w, bias, scales, down, dy = drawn(
        *((rows, 33), (count, wide, 33), (count, wide), (rows,), (count, 20, inner), (rows, 20)),
        dtype=dtype,
    )
    functions, ends = functions_of(op), ends_of(sizes)
    interleaved = getattr(op, "glu_interleave_size", None) or 0
    numbers = functions.numbers(op.numbers_of())
    activation = library.Activation(functions, numbers, interleaved, scales)
    given = library.matrices_of(w), ends, activation, bias.unbind()
    y, hidden = library.activated(x, *given, keep=True)
    exact = grouped(lambda x, w, b: x @ w.T + b, sizes, x, of=(w, bias))
    exact = torch.cat(exact)
    assert_close(hidden, exact)
    assert_close(y, op.forward_value(exact) * scales.double()[:, None])
    alone, nothing = library.activated(x, *given)
    assert nothing is None and torch.equal(alone, y)

    of_hidden, of_scales = library.gradients(
        dy, library.matrices_of(down), ends, activation, hidden, with_scales=True
    )
    gradient = torch.cat(grouped(lambda dy, w: dy @ w, sizes, dy, of=(down,)))
    wanted = op.backward_value(gradient * scales.double()[:, None], hidden.double())
    assert_close(of_hidden, wanted)
    assert_close(of_scales, (op.forward_value(hidden.double()) * gradient).sum(-1))


@needs_kernels
def test_ends_that_are_wrong_reach_no_other_memory():
    """They are an error of the device; until it is seen, no row outside of the tensors is read."""
    x, w = drawn((4, 16), (3, 16, 16))
    y = library.product(x, library.matrices_of(w), torch.tensor([-7, 90, 2], device=DEVICE).int())
    assert_close(y, x.double() @ w[1].double().T)


@needs_kernels
def test_experts_are_fused_in_both_passes():
    linear, down = ops.GroupedLinear(3, 16, 32), ops.GroupedLinear(3, 16, 8, bias=False)
    chain = opfuse.Sequential(linear, ops.ScaledSwiGLU(), down).to(DEVICE)
    for op in (linear, down):
        op.set_extra_input_name(0, "split_sizes")
    x = torch.randn(9, 16, device=DEVICE, requires_grad=True)
    scales = torch.rand(9, device=DEVICE, requires_grad=True)
    given, found = (x, torch.tensor([4, 0, 5], device=DEVICE), scales), []
    for plugins, count in (
        ("moe", "forward 2 fused, 0 separate; backward 2 fused, 0 separate"),
        ("", ""),
    ):
        with opfuse.plugins.using(plugins):
            y = chain(*given)
            y.sum().backward()
            assert count in str(opfuse.explain(chain, *given))
        found.append([y, x.grad, scales.grad, *[p.grad for p in chain.parameters()]])
        x.grad = scales.grad = None
        chain.zero_grad()
    for one, other in zip(*found, strict=True):
        assert_close(one, other.double())


WIDE = {"depth": 32, "features": 1024}
TALL = {"depth": 1024, "features": 64}
ONE_COLUMN = {
    "grouped product": TALL,
    "grouped product of a list": TALL,
    "grouped product of a list, with biases": TALL,
    "grouped product of codes": TALL,
    "its gradient": WIDE,
    "gradient of the matrices": {"depth": 64, "features": 64},
    "gradient of the matrices, added": {"depth": 64, "features": 64},
    "its gradient of codes": WIDE,
    "gradient of the matrices, of codes": {"depth": 64, "features": 64},
    "gradient of the matrices, of codes, added": {"depth": 64, "features": 64},
    "grouped product of MX codes": TALL,
    "its gradient of MX codes": WIDE,
    "gradient of the matrices, of MX codes": {"depth": 64, "features": 64},
    "gradient of the matrices, of MX codes, added": {"depth": 64, "features": 64},
    "gradient of the biases": WIDE,
    "grouped product + SwiGLU": TALL,
    "its gradient + that of SwiGLU": WIDE,
}


@pytest.mark.skipif(not INTERPRETING, reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_tensor_is_read_and_written_once_where_one_column_of_tiles_has_all(case):
    """With more columns each reads the rows again. Matrices of groups without rows are not read."""
    shape = {"groups": 5, "rows": 131, **ONE_COLUMN[case.name]}
    if case.name.startswith("gradient of the matrices, of"):
        shape["rows"] = 160  # groups of whole blocks
    assert_floor(dataclasses.replace(case, small=[shape]))


# Without a GPU


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90], ids=str)
def test_the_one_that_takes_most_registers_compiles(arch, monkeypatch, tmp_path):
    """``python -m opfuse_triton check moe`` compiles all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = BY_NAME["its gradient + that of SwiGLU"]
    (launch, *_) = record(case, case.shapes[0], arch).launches
    found = read_resources(launch.compile())
    assert not found.spilled and found.shared <= launch.target.shared_memory


@needs_codes
@pytest.mark.parametrize("stacked", [True, False], ids=["one tensor", "a list"])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("input",)], ids=str)
def test_codes_are_multiplied_in_both_passes(stacked, frozen, monkeypatch):
    """By a launch for each product, with the results of the op alone."""

    if stacked:
        held = torch.nn.Module()
        held.weight = torch.nn.Parameter(torch.randn(3, 32, 48, device=DEVICE))
        op = ops.GroupedLinear.reading(held, "weight")
    else:
        held = op = ops.GroupedLinear(3, 48, 32, device=DEVICE)
    for name, param in held.named_parameters():
        param.requires_grad_(not ("weight" in name and "weight" in frozen))
    sizes = torch.tensor([5, 0, 20], device=DEVICE)
    launched, found = Counter(), []
    launch = Kernel.launch
    monkeypatch.setattr(Kernel, "launch", lambda self, *given, **more: (
        launched.update([self.name]), launch(self, *given, **more))[1])  # fmt: skip
    for plugins in ("moe,opfuse-testing", "opfuse-testing"):
        x = drawn((25, 48))[0].requires_grad_("input" not in frozen)
        held.zero_grad()
        with offered(), opfuse.plugins.using(plugins), opfuse.autocast(testing.PerTensor()):
            y = op(x, sizes)
            y.backward(drawn(y.shape)[0])  # the same for both, so that its codes are
        found.append([y, x.grad, *[p.grad for p in held.parameters()]])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other.double())
    wanted = {"grouped_product": 1 + ("input" not in frozen)}
    wanted |= {} if "weight" in frozen else {"grouped_coded_wgrad": 1}
    assert {k: n for k, n in launched.items() if k != "group_sums"} == wanted


@needs_compiler
def test_nothing_reads_the_sizes_on_the_host():
    """A meta tensor has no values that could be read."""
    from opfuse_moe.groups import DeviceGroups, Maker

    x, sizes = torch.empty(8, 16, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    weights = [torch.empty(32, 16, device="meta")] * 3
    with recording(90) as launches:
        groups = Maker(DeviceGroups, weights)(x, sizes, (16, 32))
        y = groups.products(x, weights, ())
        groups.input_grads(y, weights)
        groups.weight_grads(y, x, [True] * 3)
        groups.row_sums(y, [True] * 3)
    assert len(launches) == 4


@pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")
def test_predictions_are_those_of_the_model():
    assert_predicted(PREDICTED, CASES)


@needs_compiler
def test_what_gains_little_waits_until_it_is_measured():
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    linear = ops.GroupedLinear(2, 16, 32, device="meta")
    said = conditions.alone((linear,), cuda)
    assert "not measured on this GPU" in said and "1.07x" in said
    assert "1.00x" in conditions.backward_alone((linear,), cuda)
    assert conditions.alone((linear,), cuda._replace(measured=1.0)) is True
    assert conditions.activated((linear, ops.ScaledSwiGLU()), cuda) is True


def test_more_rows_than_32_bits_hold_go_to_the_op():
    sizes = torch.empty(2, dtype=torch.int64, device="meta")
    for rows, taken in ((groups.MOST_ROWS, True), (groups.MOST_ROWS + 1, False)):
        x = torch.empty(rows, 16, dtype=torch.bfloat16, device="meta")
        assert groups._takes(x, sizes, (16, 16), ()) is taken


class Table:
    """A table on a GPU that is not there."""

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_the_memory_of_a_table_waits_for_each_stream_that_reads_it(monkeypatch):
    key, table = ((0, 64), torch.device("cuda", 1)), Table()
    monkeypatch.setattr(library, "_TABLES", {key: table})
    monkeypatch.setattr(library, "_CAPTURED", {})
    for stream in ("main", "side"):
        with monkeypatch.context() as patch:
            patch.setattr(library, "is_captured", lambda device: False)
            patch.setattr(torch.cuda, "current_stream", lambda device: (stream, device))  # noqa: B023
            assert library._table(*key) is table
    assert table.streams == [("main", key[1]), ("side", key[1])]
    with monkeypatch.context() as patch:
        patch.setattr(library, "is_captured", lambda device: True)
        assert library._table(*key) is table
        assert library._table((0, 65), key[1]) is None
    library._TABLES.clear()
    assert library._table(*key) is table  # what a graph reads stays


class Whole(Cast):
    """A quantizer that casts groups at once, as those with one scale do."""

    def quantize_groups(self, tensor, ends, usage, quantizers):
        return cast_each(tensor, ends, usage, quantizers)


class Blocks(Whole):
    """One whose groups are filled up, as those with MX blocks do."""

    row_multiple = 32


@needs_compiler
@pytest.mark.parametrize(
    ("quantizer", "where", "said"),
    [
        (Whole, {"capability": (9, 0), "architecture": "sm_90"}, ""),
        (Whole, {"capability": (8, 0), "architecture": "sm_80"}, "needs compute capability 8.9"),
        (Whole, {"architecture": "gfx950"}, ""),
        (Whole, {"architecture": "gfx942"}, "does not multiply the FP8 codes of the OCP"),
        (Whole, {"capability": (9, 0), "options": {"fp8.products": "emulated"}}, "are emulated"),
        (
            Whole,
            {"capability": (9, 0), "recipe": testing.PerTensor(backward_override="dequantized")},
            "override",
        ),
        (Cast, {"capability": (9, 0)}, "quantizers of PerTensor do not cast groups at once"),
        (Blocks, {"capability": (10, 0), "architecture": "sm_100"}, ""),
        (Blocks, {"capability": (9, 0), "architecture": "sm_90"}, "on sm_100 and gfx950"),
    ],
)
def test_where_codes_are_multiplied(quantizer, where, said):
    linear = SimpleNamespace(
        num_groups=2, is_stacked=False, get_quantizer=lambda mode, index: quantizer(E4M3)
    )
    env = opfuse.Environment(torch.device("cuda"), None, torch.bfloat16)
    env = env._replace(**{"recipe": testing.PerTensor(), **where})
    for condition in (conditions.alone, conditions.backward_alone):
        found = condition((linear,), env)
        assert found is True if not said else said in found
