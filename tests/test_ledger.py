"""The bytes that ``python -m benchmarks.ledger`` counts, against those counted by hand.

What needs the interpreter runs in a process with ``TRITON_INTERPRET=1``; the last test starts that process.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from opfuse.testing.machine import is_interpreting

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl
import triton_toys as toys
from ledger import Moved, count_separate, count_small, counting, estimate, estimate_peer
from ledger.model import LaunchWork, launch_seconds
from ledger.predicted import assert_predicted, case_seconds, predicted_speed, separate_seconds
from opfuse_triton import TARGETS, Config, Kernel, KernelCase, Operand, Predicted
from opfuse_triton.recorded import storage_of
from opfuse_triton.targets import LATENCY

pytestmark = [
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]

HERE = pathlib.Path(__file__)
ROOT = HERE.parents[1]
interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
loops = pytest.mark.skipif(
    triton.__version__.startswith("3.6."),
    reason="its interpreter has no loop over a number that is known at run time",
)
compiled = pytest.mark.skipif(is_interpreting(), reason="starts processes that interpret")
SMALL = {"rows": 3, "features": 1000}


@triton.jit
def twice_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0), 0)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) - total, mask=i < n)


@triton.jit
def broadcast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + rows * BLOCK + columns, tl.load(x_ptr + rows * 0 + columns))


@triton.jit
def first_rows_kernel(x_ptr, count_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(count_ptr)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=inside), mask=inside)


def counted(kernel, grid, *args, sample=None, **constants):
    """The count of one launch, and its totals in the order of the tensors."""
    with counting(sample) as launches:
        kernel[grid](*args, **constants)
    (launch,) = launches
    keys = [storage_of(arg) for arg in args if isinstance(arg, torch.Tensor)]
    read, written = launch.total("read"), launch.total("written")
    return launch, [read.get(key, 0) for key in keys], [written.get(key, 0) for key in keys]


@interpreted
def test_masked_elements_move_no_bytes():
    x, s, y = torch.randn(3000).bfloat16(), torch.ones(1), torch.empty(3000).bfloat16()
    launch, read, written = counted(toys.scale_kernel, (3,), x, s, y, 3000, BLOCK=1024)
    assert torch.equal(x, y)
    assert read == [6000, 3 * 4, 0] and written == [0, 0, 6000]
    assert [program.moved for program in launch.programs] == [4100, 4100, 2 * 2 * 952 + 4]
    assert [program.in_flight for program in launch.programs] == [2052, 2052, 1908]
    assert (launch.grid, launch.total_programs) == ((3, 1, 1), 3)


@interpreted
def test_what_is_read_twice_counts_twice():
    x, y = torch.randn(1000), torch.empty(1000)
    launch, read, written = counted(twice_kernel, (1,), x, y, 1000, BLOCK=1024)
    assert (read, written) == ([8000, 0], [0, 4000])
    again = launch.programs[0].again
    assert again == {storage_of(x): 2, storage_of(y): 1}


@interpreted
def test_descriptors_are_counted_to_the_edge():
    x, y = torch.randn(10, 24), torch.empty(10, 24)
    _, read, written = counted(toys.descriptor_kernel, (2, 2), x, y, 10, 24, BM=8, BN=16)
    assert torch.equal(y, 2 * x) and (read, written) == ([960, 0], [0, 960])


@interpreted
def test_atomics_read_and_write():
    x, y = torch.ones(100), torch.zeros(9)
    launch, read, written = counted(toys.atomic_kernel, (2,), x, y, 100, BLOCK=64)
    # per program 8 different addresses of the sums, and one that is exchanged
    assert (read, written) == ([400, 2 * 36], [0, 2 * 36])
    assert y.tolist() == [13.0] * 4 + [12.0] * 4 + [1.0]
    # 64 numbers and 8 sums before the first store, 1 number behind it
    assert launch.programs[0].in_flight == pytest.approx((288**2 + 4**2) / 292)


@interpreted
def test_an_address_counts_once_in_an_access():
    x, y = torch.randn(64), torch.empty(4, 64)
    _, read, written = counted(broadcast_kernel, (1,), x, y, BLOCK=64)
    assert torch.equal(y, x.expand(4, 64)) and (read, written) == ([256, 0], [0, 1024])


@interpreted
def test_views_of_one_tensor_are_one():
    memory = torch.randn(2, 1000).bfloat16()
    launch, read, written = counted(
        toys.scale_kernel, (1,), memory[0], torch.ones(1), memory[1], 1000, BLOCK=1024
    )
    assert read[0] == written[0] == read[2] == 2000
    assert launch.programs[0].again[storage_of(memory)] == 1


@interpreted
def test_what_is_overwritten_is_moved_once():
    x = torch.randn(1000).bfloat16()
    launch, read, written = counted(toys.scale_kernel, (1,), x, torch.ones(1), x, 1000, BLOCK=1024)
    assert read[0] == written[0] == 2000 and launch.programs[0].again[storage_of(x)] == 1


@interpreted
@loops
def test_products_count_two_operations_each():
    a, b, c = torch.randn(64, 128), torch.randn(32, 128), torch.empty(64, 32)
    tiles = {"BM": 32, "BN": 32, "BK": 32}
    launch, read, _ = counted(toys.gemm_kernel, (2, 1), a, b, c, 64, 32, 128, **tiles)
    torch.testing.assert_close(c, a @ b.T)
    assert sum(program.flops for program in launch.programs) == 2 * 64 * 32 * 128
    assert read == [a.nbytes, 2 * b.nbytes, 0]
    assert launch.programs[0].in_flight == 2 * 32 * 32 * 4  # a tile of each, then the product


@interpreted
def test_some_programs_stand_for_all():
    x, y = torch.randn(64 * 1024).bfloat16(), torch.zeros(64 * 1024).bfloat16()
    given = (x, torch.ones(1), y, x.numel())
    launch, read, _ = counted(toys.scale_kernel, (64,), *given, sample=5, BLOCK=1024)
    assert len(launch.programs) == 5 and launch.total_programs == 64
    assert read == [x.nbytes, 64 * 4, 0]
    blocks = (y.view(64, 1024) == x.view(64, 1024)).all(1).nonzero().flatten().tolist()
    assert blocks == [0, 21, 41, 62, 63]  # the first of three shares, and the last two
    assert launch.stands_for == [pytest.approx(62 / 3)] * 3 + [1, 1]


@interpreted
def test_a_launch_may_have_no_program():
    x = torch.empty(0)
    launch, read, _ = counted(toys.scale_kernel, (0, 2), x, torch.ones(1), x, 0, BLOCK=1024)
    assert (launch.grid, launch.programs, read) == ((0, 2, 1), [], [0, 0, 0])


@interpreted
def test_counting_leaves_the_interpreter_as_it_was():
    from triton.runtime import interpreter

    owners = [type(interpreter.interpreter_builder), interpreter.GridExecutor, interpreter]
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), counting():
        raise ZeroDivisionError
    count_small(toys.SCALE, SMALL, toys.SCALE.peers["another"])
    assert [dict(vars(owner)) for owner in owners] == before
    assert toys.rsqrt.__module__.endswith("libdevice")


@interpreted
@loops
def test_a_case_at_its_small_shape():
    # x and y in bf16, the factor once per program: 3000 elements are 2 blocks of 2048
    assert count_small(toys.SCALE, SMALL) == Moved(full=12000, vector=8)
    # 16 rows of 128 columns in bf16; 16 partial sums each written, and read by torch's sum
    moved = count_small(toys.SUMS, toys.SUMS.small[0])
    assert moved == Moved(full=16 * 128 * 2, vector=512, partial=2 * 16 * 512)


@interpreted
def test_kernels_of_other_packages_are_counted():
    assert count_small(toys.SCALE, SMALL, toys.SCALE.peers["another"]) == Moved(full=12000)
    with pytest.raises(ImportError):
        count_small(toys.SCALE, SMALL, toys.SCALE.peers["absent"])


@interpreted
def test_kernels_of_other_packages_are_told_which_gpu_they_are_on():
    """Also that what they fill before is counted, and that nothing stays pretended."""

    def peer(x, s):
        assert x.device.type == "cuda" and torch.empty(1, device=x.device).device.type == "cuda"
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
        y = torch.zeros_like(x)
        toys.scale_kernel[(programs,)](x, s, y, x.numel(), BLOCK=1024, num_warps=8)
        return y

    target = TARGETS["gfx942"]
    entry = estimate_peer(toys.SCALE, toys.REAL, target, peer)
    (launch,) = entry.launches
    assert (launch.programs, launch.longest) == (304, 1)
    assert launch.moved == Moved(full=304 * 1024 * 4, vector=304 * 4)
    assert entry.host == Moved(full=8192 * 4096 * 2)
    assert torch.ones(1).device.type == "cpu"


@interpreted
@loops
def test_a_case_at_a_real_shape():
    target = TARGETS[90]
    entry = estimate(toys.SUMS, toys.REAL, target)
    (launch,) = entry.launches
    assert (launch.programs, launch.longest, launch.again) == (64, 1, 1)
    assert launch.moved == Moved(full=8192 * 4096 * 2, partial=64 * 4096 * 4)
    assert entry.host == Moved(vector=4096 * 4, partial=64 * 4096 * 4)
    assert entry.moved == launch.moved + entry.host
    assert entry.floor_seconds == 8192 * 4096 * 2 / target.bandwidth
    # 64 programs hold 128 rows each: too few in flight, however fast the memory is
    assert entry.seconds > entry.floor_seconds


@interpreted
@loops
def test_programs_with_more_work_are_seen():
    uneven = KernelCase(
        "uneven", toys.summed(64), toys.sums_of, [{"rows": 65, "features": 1024}], []
    )
    (launch,) = estimate(uneven, uneven.shapes[0], TARGETS[90], sample=64).launches
    assert launch.longest == pytest.approx((2 * 2048 + 4096) / (65 * 2048 / 64 + 4096))


@interpreted
def test_values_that_a_case_draws_are_there_at_real_shapes():
    """They may say how much work there is: here, how many numbers are copied."""
    kernel = Kernel(first_rows_kernel, [Config({"BLOCK": 1024})])

    def copied(x, count):
        y = torch.empty_like(x)
        kernel.launch((1,), x, count, y)
        return y

    def tensors(n):
        x, count = Operand((n,), torch.bfloat16), Operand((1,), torch.int64, "vector")
        return {"x": x, "count": count, "y": replace(x, output=True)}

    def draw(n):
        return {"count": torch.tensor([n // 4], dtype=torch.int32)}

    def peer(x, count):
        y = torch.empty_like(x)
        first_rows_kernel[(1,)](x, count, y, BLOCK=1024)
        return y

    case = KernelCase("first", copied, tensors, [{"n": 1000}], [], draw=draw)
    (launch,) = estimate(case, {"n": 1000}, TARGETS[90]).launches
    assert launch.moved == Moved(full=2 * 2 * 250, vector=8)
    (launch,) = estimate_peer(case, {"n": 1000}, TARGETS[90], peer).launches
    assert launch.moved == Moved(full=2 * 2 * 250, vector=8)


@interpreted
def test_a_grouped_product_takes_the_time_of_its_operations():
    def product(x, w, ends):
        return torch.nn.functional.grouped_mm(x, w, offs=ends)

    def tensors(rows):
        of_x, of_w = Operand((rows, 4096), torch.bfloat16), (4, 4096, 4096)
        ends = Operand((4,), torch.int32, "vector")
        return {"x": of_x, "w": Operand(of_w, torch.bfloat16), "ends": ends}

    case = KernelCase("grouped", product, tensors, [], [], separate=product)
    seconds = separate_seconds(case, {"rows": 65536}, TARGETS[90])
    assert seconds == 2 * 65536 * 4096 * 4096 / TARGETS[90].flops


@interpreted
@loops
def test_a_product_is_not_held_to_its_floor_by_the_model():
    target = TARGETS[90]
    entry = estimate(toys.PRODUCT_CASE, toys.PRODUCT, target, sample=3)
    (launch,) = entry.launches
    assert launch.flops == 2 * 4096 * 4096 * 1024
    assert launch.moved.full == 2 * (32 * 2 * 4096 * 1024 + 4096 * 4096)
    assert entry.floor_seconds == launch.flops / target.flops


@interpreted
def test_what_happens_only_at_real_shapes_is_seen():
    """A row of 1000 is one block, and the compiler may keep it; one of 4096 is read twice."""
    once = KernelCase("once", toys.TWICE.run, toys.one_to_one, [toys.REAL], [])
    (launch,) = estimate(once, toys.REAL, TARGETS[80], sample=4).launches
    assert launch.again == 2


@compiled
def test_counting_needs_the_interpreter():
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), counting():
        pass


def test_bytes_of_separate_operations_are_counted():
    # bf16 to fp32, times the factor, to bf16
    elements = 3 * 1000
    assert count_separate(toys.SCALE, SMALL) == elements * (2 + 4 + 4 + 4 + 4 + 2) + 4
    assert count_separate(toys.SUMS, SMALL) is None

    def separate(x, s):
        y = x.view(-1)[: x.shape[1]].expand(3, -1)  # views move nothing
        z = torch.empty_like(x).copy_(y)  # reads one row, writes three
        return z.add_(1)

    case = KernelCase("a", toys.SCALE.run, toys.rows_of, [], [], separate=separate)
    assert count_separate(case, SMALL) == 2000 + 6000 + 2 * 6000
    given = KernelCase(
        "a", toys.SCALE.run, toys.rows_of, [], [], separate=lambda x, s: 3 * x.nbytes
    )
    assert count_separate(given, SMALL) == 18000


def test_the_model_of_the_time_takes_the_slowest_limit():
    target = TARGETS[90]
    many = LaunchWork(
        programs=100_000, warps=4, dram=1e9, average=1e4, longest=1e4, in_flight=8192, flops=0
    )
    assert launch_seconds(target, many) == 1e9 / target.bandwidth
    few = many._replace(programs=10, average=1e8, longest=1e8)
    assert launch_seconds(target, few) == pytest.approx(1e9 / (10 * 8192 / LATENCY))
    # one program does half of all: the others do not help it
    uneven = few._replace(longest=5e8)
    assert launch_seconds(target, uneven) == pytest.approx(5e8 / (8192 / LATENCY))
    product = many._replace(flops=1e15)
    assert launch_seconds(target, product) == 1e15 / target.flops
    # its tiles come from the cache
    assert launch_seconds(target, uneven._replace(flops=1.0)) == 1e9 / target.bandwidth


@interpreted
def test_a_speed_is_predicted_against_each_separate_operation():
    target, shape = TARGETS[90], {"rows": 8192, "features": 4096}
    case = replace(toys.SCALE, shapes=[shape])
    separate = separate_seconds(case, shape, target)
    assert separate == pytest.approx(5 * case.floor_bytes(shape) / target.bandwidth)
    speed = separate / estimate(case, shape, target).seconds
    assert predicted_speed(case, target) == speed == pytest.approx(5, rel=0.01)
    with pytest.raises(ValueError, match="scale has no separate operations"):
        predicted_speed(replace(case, separate=None), target)
    assert_predicted(Predicted("toys", {"scale": (5.0, ["scale"])}), [case])
    with pytest.raises(AssertionError, match="predicts 4.50x of scale, and the model 5.0"):
        assert_predicted(Predicted("toys", {"scale": (4.5, ["scale"])}), [case])
    # of a product the model says nothing: it takes its operations, or its floor
    product = replace(case, gemms=("scale_kernel",), flops=lambda **shape: 10**15)
    assert case_seconds(product, shape, target, 3) == 1e15 / target.flops


def test_a_separate_product_takes_its_bytes_or_its_operations():
    target, rows = TARGETS[90], 8192

    def separate(x, s):
        return (x @ x.t()).relu_()

    case = replace(toys.SCALE, separate=separate)
    for features, flops_first in ((16, False), (8192, True)):
        shape = {"rows": rows, "features": features}
        bytes_ = 2 * (2 * rows * features + rows * rows)
        flops = 2 * rows * rows * features
        product = max(bytes_ / target.bandwidth, flops / target.flops)
        assert (product == flops / target.flops) == flops_first
        relu = 4 * rows * rows / target.bandwidth
        assert separate_seconds(case, shape, target) == pytest.approx(product + relu, rel=0.01)


def start(*arguments, cwd, **variables):
    folders = ROOT / "tests" / "support", ROOT / "benchmarks"
    path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@compiled
def test_the_ledger_command_prints_ratios_to_the_floor(tmp_path):
    done = start("ledger", "triton_toys:SOUND", "--target", "sm_90", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:7] == [
        "triton_toys:SOUND: scale",
        "  rows=3 features=1000: every program counted, over the floor of 12,000 bytes",
        "                      full  vectors  partial",
        "    opfuse           1.000    0.001    0.000",
        "    separate ops     5.000  in all",
        "    another          1.000    0.000    0.000",
        "    absent          not installed",
    ]
    row = next(line for line in lines if line.startswith("    sm_90   scale_kernel"))
    assert re.fullmatch(
        r" +sm_90 +scale_kernel +16,384 +1.00 +1.000 +0.000 +0.000 +40.1 +100%", row
    )
    assert "    over the separate ops*: sm_90 5.00x" in lines
    assert lines[-2].startswith("* a model, not measured: ") and max(map(len, lines)) <= 100


@compiled
def test_this_file_passes_in_the_interpreter(tmp_path):
    config = ROOT / "pyproject.toml"
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-c", str(config)]
    done = start("pytest", *options, str(HERE), cwd=tmp_path, TRITON_INTERPRET="1")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d\d passed, \d skipped", done.stdout)
