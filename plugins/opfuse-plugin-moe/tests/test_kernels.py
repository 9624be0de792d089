"""The kernels against fp64, compiled for GPUs that need not be there, and their bytes counted.

Without a GPU they run in a process with ``TRITON_INTERPRET=1``, and are compiled in one without.
"""

import dataclasses

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter, machine

pytest.importorskip("triton")
from ledger import assert_predicted
from opfuse_moe import conditions, groups
from opfuse_moe.cases import CASES
from opfuse_moe.conditions import PREDICTED
from opfuse_moe.kernels import library
from opfuse_triton import TARGETS, functions_of, recording, target
from opfuse_triton.floor import assert_floor
from opfuse_triton.recorded import record
from opfuse_triton.resources import read_resources

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [[1], [5, 0, 66, 1], [0, 0, 3, 0, 0], [0, 127]]
BY_NAME = {case.name: case for case in CASES}

needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETING, reason="no GPU, and Triton does not interpret"
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
        dx = library.product(dy, matrices.transposed(), ends)
        assert_close(dx, torch.cat(grouped(lambda dy, w: dy @ w, sizes, dy, of=(w,))))


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
        assert_close(dw, torch.stack(grouped(lambda dy, x: dy.T @ x, sizes, dy, x)))
        assert all(not dw[i].any() for i, size in enumerate(sizes) if not size)
        assert torch.equal(dw, library.weight_grads(dy, x, ends))
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
    "its gradient": WIDE,
    "gradient of the matrices": {"depth": 64, "features": 64},
    "gradient of the biases": WIDE,
    "grouped product + SwiGLU": TALL,
    "its gradient + that of SwiGLU": WIDE,
}


@pytest.mark.skipif(not INTERPRETING, reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_tensor_is_read_and_written_once_where_one_column_of_tiles_has_all(case):
    """With more columns each reads the rows again. Matrices of groups without rows are not read."""
    shape = {"groups": 5, "rows": 131, **ONE_COLUMN[case.name]}
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
