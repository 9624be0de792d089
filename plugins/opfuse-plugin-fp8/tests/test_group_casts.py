"""Groups of rows that are cast at once: the codes, scales and records of each group by itself."""

import opfuse_fp8 as fp8
import pytest
import torch

from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from opfuse_fp8 import direct
from opfuse_triton import recording

GPU = torch.cuda.is_available() and not is_interpreting()
DEVICE = "cuda" if GPU else "cpu"
computes = pytest.mark.skipif(
    not (GPU or is_interpreting()), reason="no GPU, and Triton does not interpret"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [[5, 0, 66, 1], [0, 0, 3, 0, 0], [130], [0, 16, 32]]
KINDS = {
    "delayed": lambda dtype: fp8.DelayedQuantizer(dtype, device=DEVICE),
    "current": fp8.CurrentQuantizer,
    "current, power of 2": lambda dtype: fp8.CurrentQuantizer(dtype, power_of_2=True),
}
every = pytest.mark.parametrize("kind", KINDS)


def quantizers(kind, dtype, count):
    """One of each group; delayed ones have scales of their own."""
    made = [KINDS[kind](dtype) for _ in range(count)]
    for i, each in enumerate(made):
        if kind == "delayed":
            each.scale.fill_(1.5 + i)
    return made


def drawn(sizes, features, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), features, generator=generator).to(DEVICE, dtype) * 300
    x[0, 0], x[-1, -1] = float("nan"), float("inf")
    return x, torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def same(one, other):
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def compare(made, sizes, x, each):
    """A group has what its quantizer makes of its rows alone."""
    alone = [q.reference(part, ROWWISE) for q, part in zip(each, x.split(sizes), strict=True)]
    same(made.scale_inv, torch.cat([one.scale_inv for one in alone]))
    for usage in (ROWWISE, COLUMNWISE):
        for cut, one in zip(made.only(usage).cut(sizes, each), alone, strict=True):
            same(cut.dequantize(usage), one.dequantize())


@pytest.mark.costly(24)
@computes
@every
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("features", [33, 64, 144])
def test_the_kernel_casts_each_group_as_its_quantizer_does(
    kind, dtype, sizes, features, monkeypatch
):
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    x, ends = drawn(sizes, features)
    own, apart = quantizers(kind, dtype, len(sizes)), quantizers(kind, dtype, len(sizes))
    made = direct.cast_groups(x, ends, BOTH, own)
    assert made.rowwise_data.dtype is dtype and made.only(COLUMNWISE).rowwise_data is None
    compare(made, sizes, x, apart)
    for one, other in zip(own, apart, strict=True):
        for name in one.state_names:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    rowwise = direct.cast_groups(x, ends, ROWWISE, own)
    assert rowwise.columnwise_data is None
    same(rowwise.rowwise_data, made.rowwise_data)


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype, monkeypatch):
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    x, ends = drawn([3, 0, 40], 80, dtype)
    own = quantizers("current", E4M3, 3)
    compare(direct.cast_groups(x.view(43, 5, 16), ends * 5, BOTH, own), [15, 0, 200],
            x.view(-1, 16), own)  # fmt: skip


@pytest.mark.costly(6)
@computes
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("features", [32, 160])
def test_blocks_end_where_a_group_ends(dtype, sizes, features, monkeypatch):
    """A group has the copies of its rows alone, filled up with zeros to whole blocks."""
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    x, ends = drawn(sizes, features)
    each = [fp8.MXQuantizer(dtype, swizzles=bool(features % 64)) for _ in sizes]
    plain = fp8.MXQuantizer(dtype)
    made = each[0].quantize_groups(x, ends, BOTH, each)
    for part, cut in zip(x.split(sizes), made.cut(sizes, each), strict=True):
        alone = plain.reference(torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 32)), BOTH)
        assert cut.shape == alone.shape and not cut.swizzled
        for name in ("rowwise_data", "columnwise_data", "columnwise_scale_inv"):
            same(getattr(cut, name), getattr(alone, name))
        same(cut.rowwise_scale_inv[: len(part)], alone.rowwise_scale_inv[: len(part)])
    for usage in (ROWWISE, COLUMNWISE):
        one = each[0].quantize_groups(x, ends, usage, each)
        assert one.usage == usage
        same(one.dequantize(usage), made.dequantize(usage))
    alone = each[0].quantize_groups(x, ends, ROWWISE, each).cut(sizes, each)
    assert [len(cut.rowwise_data) for cut in alone] == sizes


@computes
@pytest.mark.parametrize("kind", ["current", "MX"])
def test_ends_that_are_wrong_reach_no_other_memory(kind, monkeypatch):
    """They are an error of the device; until it is seen, groups may overlap."""
    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    x, _ = drawn([64], 32)
    ends = torch.tensor([64, -64, 64, 0, 90], device=DEVICE).int()
    each = [fp8.CurrentQuantizer(E4M3) if kind == "current" else fp8.MXQuantizer(E4M3)] * 5
    memory, empty = [], torch.empty

    def guarded(size, *, dtype, device):
        whole = empty(1 << 15, dtype=dtype, device=device)
        whole.view(torch.uint8).fill_(77)
        memory.append((whole, torch.Size([size] if isinstance(size, int) else size).numel()))
        return whole[: memory[-1][1]].view(size)

    monkeypatch.setattr(torch, "empty", guarded)
    each[0].quantize_groups(x, ends, BOTH, each)
    assert len(memory) >= 3
    for whole, count in memory:
        assert (whole[count:].view(torch.uint8) == 77).all()


def test_blocks_are_not_cast_at_once_without_kernels():
    x, ends = drawn([5, 20], 64)
    for made in (
        [fp8.MXQuantizer(E4M3), fp8.MXQuantizer(E4M3)],
        [fp8.MXQuantizer(E4M3, square=True)] * 2,
    ):
        assert made[0].quantize_groups(x, ends, ROWWISE, made) is None
    assert not fp8.MXQuantizer(E4M3, square=True).casts_groups


@every
def test_without_kernels_each_is_cast_by_itself(kind):
    sizes = [5, 0, 20]
    x, ends = drawn(sizes, 48)
    own, apart = quantizers(kind, E4M3, 3), quantizers(kind, E4M3, 3)
    compare(own[0].quantize_groups(x, ends, BOTH, own), sizes, x, apart)
    assert all(torch.equal(*pair) for pair in zip(
        [getattr(q, n) for q in own for n in q.state_names],
        [getattr(q, n) for q in apart for n in q.state_names], strict=True,
    ))  # fmt: skip


def test_quantizers_that_cast_in_other_ways_refuse():
    class Own(fp8.DelayedQuantizer):
        """It may cast as it likes."""

    x, ends = drawn([5, 20], 48)
    for pair in (
        [fp8.CurrentQuantizer(E4M3), fp8.CurrentQuantizer(E5M2)],
        [fp8.CurrentQuantizer(E4M3), fp8.CurrentQuantizer(E4M3, power_of_2=True)],
        [fp8.CurrentQuantizer(E4M3), fp8.DelayedQuantizer(E4M3)],
        [fp8.DelayedQuantizer(E4M3), Own(E4M3)],
        [Own(E4M3), Own(E4M3)],
        [fp8.MXQuantizer(E4M3), fp8.MXQuantizer(E5M2)],
    ):
        assert pair[0].quantize_groups(x, ends, ROWWISE, pair) is None
        assert all(bool(q.amax == -1) for q in pair if hasattr(q, "amax"))


def test_many_groups_are_one_launch():
    """Besides what joins their scales; a meta tensor has no values that a host could read."""
    x = torch.empty(4096, 256, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(64, dtype=torch.int32, device="meta")
    each = [fp8.DelayedQuantizer(E4M3, device="meta") for _ in range(64)]
    with recording(90) as launches:
        made = each[0].quantize_groups(x, ends, BOTH, each)
    assert len(launches) == 1 and made.columnwise_data is not None
