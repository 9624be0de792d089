"""What ``assert_floor`` counts and refuses. What needs the interpreter runs with ``TRITON_INTERPRET=1``."""

import dataclasses
import importlib.util

import pytest
import torch

from opfuse.testing.machine import is_interpreting

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton_toys as toys
from opfuse_triton import Config, Kernel, KernelCase, Operand
from opfuse_triton.floor import assert_floor, count_bytes

pytestmark = [
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]

interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
loops = pytest.mark.skipif(
    triton.__version__.startswith("3.6."),
    reason="its interpreter has no loop over a number that is known at run time",
)
SMALL = {"rows": 3, "features": 1000}


HISTOGRAM = Kernel(toys.atomic_kernel, [Config({"BLOCK": 64})])
DOUBLE = Kernel(toys.descriptor_kernel, [Config({"BM": 8, "BN": 16})])


def run_histogram(x):
    y = x.new_zeros(9)
    HISTOGRAM.launch((2,), x, y, x.numel())
    return y


def run_double(x):
    y = torch.empty_like(x)
    DOUBLE.launch((2, 2), x, y, *x.shape)
    return y


@interpreted
def test_each_access_counts_what_its_mask_lets_through():
    # x and y in bf16, the factor once per program: 3000 elements are 2 blocks of 2048
    assert count_bytes(toys.SCALE, SMALL) == {"full": 12000, "vector": 8, "partial": 0}


@interpreted
def test_descriptors_are_counted_to_the_edge():
    tensors = {name: Operand((10, 24), torch.float32, output=name == "y") for name in "xy"}
    case = KernelCase("double", run_double, lambda: tensors, [], [{}])
    assert count_bytes(case, {}) == {"full": 2 * 960, "vector": 0, "partial": 0}
    assert_floor(case)


@interpreted
def test_atomics_read_and_write():
    """An address counts once in an access; what PyTorch fills with zeros is written, too."""
    tensors = {
        "x": Operand((100,), torch.float32),
        "y": Operand((9,), torch.float32, "vector", output=True),
    }
    case = KernelCase("histogram", run_histogram, lambda: tensors, [], [{}])
    # per program 8 different addresses of the sums, and one that is exchanged
    assert count_bytes(case, {}) == {"full": 400, "vector": 36 + 2 * 2 * 36, "partial": 0}


@interpreted
@loops
def test_operations_around_the_kernel_count():
    # 16 rows of 128 columns in bf16; 16 partial sums each written, and read by torch's sum
    moved = count_bytes(toys.SUMS, toys.SUMS.small[0])
    assert moved == {"full": 16 * 128 * 2, "vector": 512, "partial": 2 * 16 * 512}


@interpreted
def test_a_pass_before_or_behind_the_kernel_is_seen():
    behind = dataclasses.replace(toys.SCALE, run=lambda x, s: toys.SCALE.run(x, s).mul_(1))
    with pytest.raises(AssertionError, match="scale at rows=3 features=1000 moves 2.000 times"):
        assert_floor(behind)
    before = dataclasses.replace(toys.SCALE, run=lambda x, s: toys.SCALE.run(x.clone(), s))
    with pytest.raises(AssertionError, match="for sm_80: partial sums are 1.000 of the bytes"):
        assert_floor(before)


@interpreted
@loops
def test_the_floor_is_asserted():
    assert_floor(toys.SCALE)
    assert_floor(toys.SUMS)
    with pytest.raises(
        AssertionError, match=r"twice at rows=3 features=2048 moves 1.500 times the"
    ):
        assert_floor(toys.ALL_TWICE)
    with pytest.raises(
        AssertionError,
        match=r"many sums at rows=8192 features=4096 for sm_80: partial sums are 4.000 of the bytes",
    ):
        assert_floor(toys.MANY_SUMS)
    assert_floor(toys.MANY_SUMS, partial=4)


@interpreted
def test_counting_leaves_the_interpreter_as_it_was():
    from triton.runtime import interpreter

    owners = [type(interpreter.interpreter_builder), interpreter.GridExecutor]
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError):
        count_bytes(toys.SCALE, SMALL, lambda x, s: 1 / 0)
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.skipif(is_interpreting(), reason="in the interpreter it is counted")
def test_counting_needs_the_interpreter():
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        assert_floor(toys.SCALE)
