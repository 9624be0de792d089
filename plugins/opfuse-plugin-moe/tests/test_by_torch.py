"""Grouped products of codes by PyTorch's own function, which needs a GPU: here one stands for it."""

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import testing
from opfuse.testing import assert_close

pytest.importorskip("triton")
from opfuse_moe import by_torch, fused
from opfuse_moe.groups import DeviceGroups, configured
from opfuse_triton import target

from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops import GroupedLinear
from opfuse.ops.row_groups import GroupedTensor

pytestmark = pytest.mark.skipif(
    not hasattr(F, "scaled_grouped_mm"), reason="this torch has no scaled_grouped_mm"
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES, DEPTH, FEATURES = (5, 0, 19, 8), 32, 48


def grouped_mm(a, b, of_rows, kind_a, of_columns, kind_b, *, offs, output_dtype, use_fast_accum):
    """The documented arithmetic: each code times the scale of its row, or of its column."""
    row_wise = F.ScalingType.RowWise
    assert kind_a is kind_b is row_wise and offs.dtype is torch.int32
    assert a.stride(1) == 1 and b.stride(1) == 1, "rows, and columns of the second, lie together"
    assert of_rows.shape == a.shape[:1] and of_columns.shape == (b.shape[0], b.shape[2])
    assert of_rows.dtype is of_columns.dtype is torch.float32 and of_columns.is_contiguous()
    wide, y, start = a.double() * of_rows[:, None].double(), [], 0
    for matrix, columns, end in zip(b.double(), of_columns.double(), offs.tolist(), strict=True):
        y.append(wide[start:end] @ (matrix * columns))
        start = end
    return torch.cat(y).to(output_dtype)


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(
        F, "scaled_grouped_mm", lambda *a, **k: (found.append(k), grouped_mm(*a, **k))[1]
    )
    return found


def operands(dtype=E4M3, depth=DEPTH):
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    x = torch.randn(sum(SIZES), depth, generator=generator).to(dtype)
    scales = torch.rand(len(SIZES), generator=generator) + 0.5
    rows = GroupedTensor(x.shape, torch.bfloat16, None, x, None, scales, ends)
    weights = []
    for _ in SIZES:
        w = torch.randn(FEATURES, depth, generator=generator).to(E4M3)
        inverse = torch.rand(1, generator=generator) + 0.5
        weights.append(ScaledTensor(w.shape, torch.bfloat16, None, w, None, inverse))
    return rows, weights, ends


def test_it_is_given_the_scales_of_rows_and_columns(calls):
    rows, weights, ends = operands()
    groups = DeviceGroups(torch.tensor(SIZES), None, ends)
    groups.by_torch = True
    y = groups.coded_products(rows, weights, (), torch.bfloat16)
    parts = zip(rows.dequantize().double().split(SIZES), weights, strict=True)
    exact = torch.cat([x @ w.dequantize().double().T for x, w in parts])
    assert [call["use_fast_accum"] for call in calls] == [True]
    assert_close(y, exact)


@pytest.mark.parametrize(
    "given", [dict(dtype=E5M2), dict(depth=24)], ids=["codes of gradients", "a size that is odd"]
)
def test_other_codes_are_left_to_the_kernels(given):
    rows, weights, _ = operands(**given)
    codes = [weight.rowwise_data for weight in weights]
    assert not by_torch.takes(rows.rowwise_data, codes, torch.bfloat16)


def test_it_gives_bf16_alone():
    rows, weights, _ = operands()
    codes = [weight.rowwise_data for weight in weights]
    assert by_torch.takes(rows.rowwise_data, codes, torch.bfloat16)
    assert not by_torch.takes(rows.rowwise_data, codes, torch.float32)


def test_tune_measures_it_where_it_may_run():
    op = fused.ForwardGrouped([GroupedLinear(4, DEPTH, FEATURES)])
    env = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, testing.PerTensor())
    with target(90):
        offered = op.configurations(env)
        assert offered[-1] == by_torch.CONFIGURATION and len(offered) <= 8
        for change in (
            {"capability": (8, 9)}, {"recipe": None}, {"dtype": torch.float32},
        ):  # fmt: skip
            assert by_torch.CONFIGURATION not in op.configurations(env._replace(**change))
    assert configured(by_torch.CONFIGURATION) is None
    op.planned(env._replace(configuration=by_torch.CONFIGURATION))
    assert op._how == {"config": None, "by_torch": True}
    op.planned(env)
    assert op._how == {"config": None, "by_torch": False}
