"""The kernels against fp64, compiled for GPUs that need not be there, and their bytes counted.

Without a GPU they run in a process with ``TRITON_INTERPRET=1``, and are compiled in one without.
"""

import dataclasses

import pytest
import torch
from opfuse_norm import fused
from opfuse_triton import norms as kernels
from opfuse_triton.norms import twins

from opfuse.testing import assert_close, interpreter, machine

pytest.importorskip("triton")
import ledger
from opfuse_norm.cases import CASES
from opfuse_triton import TARGETS, target
from opfuse_triton.floor import assert_floor, count_bytes
from opfuse_triton.norms import backward as backward_kernels
from opfuse_triton.norms import forward as forward_kernels
from opfuse_triton.norms import library
from opfuse_triton.recorded import record
from opfuse_triton.resources import read_resources

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
KINDS = (kernels.RMS, kernels.LAYER, kernels.L2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1,), (1, 1), (3, 127), (2, 3, 129), (129, 64), (1, 2, 2, 768), (2, 5120)]
WIDE = [(3, 20001), (5, 4099)]  # of numbers that are not aligned, a program holds fewer

needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETING, reason="no GPU, and Triton does not interpret"
)
needs_interpreter = pytest.mark.skipif(
    not INTERPRETING, reason="bytes are counted in the interpreter"
)
needs_compiler = pytest.mark.skipif(
    INTERPRETING, reason="a process that interprets kernels cannot compile them"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if INTERPRETING:
    interpreter.install()


@pytest.fixture(autouse=True)
def _few_programs(request):
    """Few programs are interpreted for a GPU of one multiprocessor."""
    if INTERPRETING and "case" not in request.fixturenames:
        with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
            yield
    else:
        yield


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


def parameters(kind, features, dtype=torch.float32):
    weight, bias = drawn((features,), (features,), dtype=dtype)
    return (None if kind == kernels.L2 else weight, bias if kind == kernels.LAYER else None)


def doubled(*tensors):
    return [tensor if tensor is None else tensor.double() for tensor in tensors]


def compare(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


@needs_kernels
@pytest.mark.parametrize("shapes", [SHAPES, WIDE], ids=["whole", "wide"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_matches_fp64_with_and_without_an_addition(dtype, kind, shapes):
    norm = kernels.Norm(kind, 1, kind == kernels.RMS)
    for shape in shapes:
        x, extra = drawn(shape, shape, dtype=dtype)
        given = parameters(kind, shape[-1], dtype)
        for added in (None, extra):
            total = x if added is None else x + added
            made = forward_kernels.forward(x, added, *given, 1e-5, norm, None, True, True)
            inner = total.double(), None, *doubled(*given)
            y, _, mean, rstd = twins.forward(*inner, 1e-5, norm, None, False, True)
            compare(made, (y, None if added is None else total.double(), mean, rstd))
            assert made[0].dtype is dtype and made[3].dtype is torch.float32
            assert added is None or torch.equal(made[1], total)


@needs_kernels
@pytest.mark.parametrize("shapes", [SHAPES, WIDE], ids=["whole", "wide"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_matches_fp64_for_each_set_of_needed_gradients(dtype, kind, shapes):
    norm = kernels.Norm(kind, 1, kind == kernels.RMS)
    for number, shape in enumerate(shapes):
        dy, x, extra = drawn(shape, shape, shape, dtype=dtype)
        weight, bias = parameters(kind, shape[-1], dtype)
        stats = forward_kernels.forward(x, None, weight, bias, 1e-5, norm, None, True, True)[2:]
        everything = True, weight is not None, bias is not None
        given = dy, x, weight, *stats
        for needs in dict.fromkeys((everything, (True, False, False), (False, *everything[1:]))):
            added = extra if needs[0] and number % 2 else None
            if any(needs):
                made = backward_kernels.backward(*given, added, norm, needs)
                assert needs[1:] == (made[1] is not None, made[2] is not None)
                compare(made, twins.backward(*doubled(*given, added), norm, needs))


@needs_kernels
def test_input_addition_weight_and_output_may_differ_in_dtype():
    """The input, what is added, the weight and the output may each have a dtype of their own."""
    norm = kernels.Norm(kernels.RMS, 1, False)
    (x,), (extra,) = drawn((5, 96), dtype=torch.bfloat16), drawn((5, 96))
    weight, _ = parameters(kernels.RMS, 96, torch.float16)
    given = x, extra, weight, None, 1e-5, norm, torch.float16, True, True
    y, total, _, rstd = forward_kernels.forward(*given)
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    assert torch.equal(total, x + extra)
    expected = twins.forward(total.double(), None, *doubled(weight, None), *given[4:])
    assert_close(y, expected[0].double())
    dx, dw, _ = backward_kernels.backward(
        y, total, weight, None, rstd, x, norm, (True, True, False)
    )
    assert (dx.dtype, dw.dtype) == (torch.float32, torch.float16)
    wide = twins.backward(*doubled(y, total, weight, None, rstd, x), norm, (True, True, False))
    compare((dx, dw), wide[:2])


@needs_kernels
def test_several_dimensions_are_normalized_together():
    norm = kernels.Norm(kernels.LAYER, 2, False)
    x, weight, bias = drawn((3, 4, 33), (4, 33), (4, 33))
    y, _, mean, rstd = forward_kernels.forward(x, None, weight, bias, 1e-5, norm, None, True, True)
    assert mean.shape == rstd.shape == (3, 1, 1)
    expected = torch.nn.functional.layer_norm(*doubled(x)[:1], (4, 33), *doubled(weight, bias))
    assert_close(y, expected)
    given = y, x, weight, mean, rstd, None
    made = backward_kernels.backward(*given, norm, (True, True, True))
    compare(made, twins.backward(*doubled(*given), norm, (True, True, True)))


@needs_kernels
def test_a_mean_far_from_zero():
    """The variance is that of the differences, also where a row is read by blocks."""
    for shape in ((3, 1024), (2, 20001)):
        x = drawn(shape)[0] + 1000
        norm = kernels.Norm(kernels.LAYER, 1, False)
        y, *_ = forward_kernels.forward(x, None, None, None, 1e-5, norm, None, True, True)
        expected = torch.nn.functional.layer_norm(x.double(), shape[-1:])
        assert (y.double() - expected).abs().max() < 1e-3


@needs_kernels
@pytest.mark.parametrize("features", [96, 9000])
def test_the_gradient_may_overwrite_the_incoming_one(features):
    norm, needs = kernels.Norm(kernels.RMS, 1, False), (True, True, False)
    dy, x, extra = drawn((7, features), (7, features), (7, features))
    weight, _ = parameters(kernels.RMS, features)
    rstd = twins.forward(x, None, weight, None, 1e-5, norm, None, False, True)[3]
    expected = backward_kernels.backward(dy, x, weight, None, rstd, extra, norm, needs)
    again = backward_kernels.backward(dy, x, weight, None, rstd, extra, norm, needs)
    assert all(torch.equal(*pair) for pair in zip(expected[:2], again[:2], strict=True))
    dx, dw, _ = backward_kernels.backward(dy, x, weight, None, rstd, extra, norm, needs, owns=True)
    assert dx.data_ptr() == dy.data_ptr()
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])


class Mine(torch.Tensor):
    pass


def test_what_the_kernels_take():
    norm = kernels.Norm(kernels.RMS, 1, False)
    x, weight = drawn((4, 8), (8,))
    assert library.takes(norm, x, weight, None)
    assert library.takes(norm, x, torch.nn.Parameter(weight.bfloat16()))
    for other in (x.t().contiguous().t(), x.double(), x[:0], x.as_subclass(Mine), x.to("meta")):
        assert not library.takes(norm, other, weight)
    assert not library.takes(norm, x.new_empty(1, kernels.MOST_FEATURES + 1))


@needs_kernels
def test_what_they_do_not_take_goes_to_the_twins():
    norm = kernels.Norm(kernels.RMS, 1, False)
    x, weight = drawn((8, 6), (8,))
    for given in (x.t(), x.t().contiguous().as_subclass(Mine), x.new_empty(0, 8)):
        y, *_ = library.forward(given, None, weight, None, 1e-5, norm, None, False, False)
        expected = torch.nn.functional.rms_norm(given, (8,), weight, 1e-5)
        assert type(y) is type(given) and torch.allclose(y, expected, atol=1e-6)


@needs_kernels
def test_every_configuration_gives_the_same():
    norm, needs = kernels.Norm(kernels.RMS, 1, False), (True, True, False)
    dy, x = drawn((33, 100), (33, 100))
    weight, _ = parameters(kernels.RMS, 100)
    device = torch.device(DEVICE)
    for config in library.candidates("forward", device, 100, kernels.RMS, x.dtype):
        given = x, None, weight, None, 1e-5, norm, None, False, True
        y, _, _, rstd = forward_kernels.forward(*given, config=config)
        assert_close(y, twins.forward(*doubled(*given[:4]), *given[4:])[0])
    offered = library.candidates("backward", device, 100, kernels.RMS, x.dtype)
    assert 1 < len(offered) <= 8
    for config in offered:
        given = dy, x, weight, None, rstd, None
        made = backward_kernels.backward(*given, norm, needs, config=config)
        compare(made, twins.backward(*doubled(*given), norm, needs))


# Without a GPU


def test_the_number_of_programs_is_a_configuration():
    """Programs are as many as keep the memory busy by what they prefetch, on an H100 here."""
    on, given = TARGETS[90], {"dy_ptr": torch.bfloat16, "x_ptr": torch.bfloat16, "KIND": "rms"}
    kernel = backward_kernels.WHOLE_KERNEL
    for features, programs in ((2048, 2), (4096, 2), (8192, 1)):
        assert kernel.pick(on, given | {"features": features})["PROGRAMS"] == programs
    offered = [config["constants"] for config in kernel.candidates(on, given | {"features": 2048})]
    assert {constants["PROGRAMS"] for constants in offered if constants["PREFETCH"]} == {1, 2, 4}
    # what prefetches nothing: as many as registers hold
    assert kernel.pick(on, given | {"features": 2049})["PROGRAMS"] == 2
    (case,) = [case for case in CASES if case.name == "RMSNorm backward + add"]
    for config in kernel.candidates(on, given | {"features": 2048}):
        with kernel.pinned(config):
            launch, sums = record(case, case.shapes[0], on).launches
        count = config["constants"]["PROGRAMS"] * on.multiprocessors
        assert launch.grid == (count,) and sums.arguments["strips"] == count


HEAVY = [
    case for case in CASES if "add" in case.name or "Layer" in case.name or "wide" in case.name
]


@pytest.mark.costly(2)
@needs_compiler
@pytest.mark.parametrize("arch", TARGETS, ids=str)
def test_they_compile_without_spills(arch, monkeypatch, tmp_path):
    """Those that take most registers; ``python -m opfuse_triton check norm`` compiles all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = set()
    for case in HEAVY:
        for shape, dtype, offset in [*case.compiled()][-2:]:
            for launch in record(case, shape, arch, None, dtype, offset).launches:
                key = launch.kernel.name, launch.constants.get("KIND")
                if key not in seen:
                    seen.add(key)
                    found = read_resources(launch.compile())
                    assert not found.spilled and found.shared <= launch.target.shared_memory
    assert {name for name, _ in seen} >= {"norm_forward", "norm_backward", "column_sums"}


@needs_interpreter
@pytest.mark.parametrize("case", [case for case in CASES if case.small], ids=lambda case: case.name)
def test_they_move_no_more_than_they_have_to(case):
    """Two at a width of models: ``python -m benchmarks.ledger norm`` shows the others."""
    two = case.name in ("RMSNorm backward", "LayerNorm backward")
    width = [{"rows": 3, "features": 4096}] if two else []
    assert_floor(dataclasses.replace(case, small=[*case.small[:1], *width]))


@needs_interpreter
@pytest.mark.parametrize("name, most", [("forward", 1.51), ("backward", 1.68)])
def test_wide_rows_are_read_twice(name, most):
    (case,) = [case for case in CASES if "wide" in case.name and name in case.name]
    shape = {"rows": 3, "features": 20000}
    assert 1.1 < count_bytes(case, shape)["full"] / case.floor_bytes(shape) < most


@pytest.mark.costly(1)
@needs_interpreter
@pytest.mark.parametrize(
    "name", ["RMSNorm backward", "RMSNorm backward + add", "LayerNorm backward"]
)
def test_they_take_no_longer_than_ligers_kernels(name):
    """By the ledger's model; the forward kernels move the same bytes as Liger's.

    Liger runs one program per multiprocessor. Where that leaves too little in flight there are more
    here, and each reads the weight.
    """
    pytest.importorskip("liger_kernel")
    (case,) = [case for case in CASES if case.name == name]
    shape, on = {"rows": 8192, "features": 4096}, TARGETS[90]
    ours = ledger.estimate(case, shape, on, sample=8)
    theirs = ledger.estimate_peer(case, shape, on, case.peers["liger-kernel"], sample=8)
    assert ours.seconds <= 1.01 * theirs.seconds
    moved = [entry.moved.full + entry.moved.vector for entry in (ours, theirs)]
    assert moved[0] <= 1.01 * moved[1]


@needs_interpreter
def test_predictions_are_those_of_the_model():
    ledger.assert_predicted(fused.PREDICTED, CASES)


@needs_interpreter
@pytest.mark.parametrize("name", ["RMSNorm forward", "RMSNorm backward"])
def test_offsets_beyond_32_bits(name):
    """The last program finds the end of 2^32 numbers."""
    (case,) = [case for case in CASES if case.name == name]
    shape = {"rows": 1 << 21, "features": 2048}
    on = dataclasses.replace(TARGETS[90], multiprocessors=1 << 16)  # programs of few rows
    entry = ledger.estimate(case, shape, on, sample=3)
    assert 0.99 < entry.moved.full / case.floor_bytes(shape) < 1.01
