"""``opfuse.watch_quantization``, and what ``explain`` says about quantized tensors."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import registered
from opfuse_quantized.formats import MXTensor, NVFP4Tensor
from torch import nn

import opfuse
from opfuse import ops, testing
from opfuse.core.quantization import COLUMNWISE, ROWWISE
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.testing.recipes import offered


@pytest.fixture(autouse=True)
def recipes():
    with offered(), opfuse.plugins.using("opfuse-testing"):
        yield


def model():
    torch.manual_seed(0)
    made = nn.Sequential(opfuse.Sequential(ops.Linear(128, 128), ops.ReLU(), ops.Linear(128, 128)))
    x = torch.randn(32, 128)
    x[0, :4] = torch.tensor([1000.0, 440.0, 1e-4, 0.0])  # too large, just not, to zero, zero
    return opfuse.assign_names(made), x.requires_grad_()


def test_casts_range_and_underflow_of_each_tensor_are_recorded():
    made, x = model()
    with opfuse.watch_quantization() as seen:
        for _ in range(2):
            with opfuse.autocast(testing.Delayed()):
                y = made(x)
            y.sum().backward()
    tensors = ("input", "weight", "grad_output")
    assert {*seen.tensors} == {f"0.{i} {tensor}" for i in (0, 2) for tensor in tensors}
    found = seen.tensors["0.0 input"]
    # the first step has scale 1, the second that of the first's largest value
    assert (found.casts, found.values, found.amax) == (2, 2 * x.numel(), 1000.0)
    small = (x != 0) & (x.abs() <= 2.0**-10)  # half of the least number of E4M3
    scaled = x.detach() * (torch.tensor(448.0) / 1000)
    small_later = (scaled != 0) & (scaled.abs() <= 2.0**-10)
    assert found.underflow == int(small.sum() + small_later.sum()) >= 2
    assert (found.saturated, found.not_finite) == (1, 0)
    assert 0.1 < found.error < 0.9
    assert 0 < seen.tensors["0.2 weight"].error < 0.05


def test_the_report_has_a_line_for_each_tensor():
    made, x = model()
    x.data[1, 0], x.data[1, 1] = torch.inf, torch.nan
    with opfuse.watch_quantization() as seen, opfuse.autocast(testing.PerBlock()):
        made(x)
    assert seen.tensors["0.0 input"].not_finite == 2
    header, *lines = str(seen).splitlines()
    columns = ["TENSOR", "FORMAT", "CASTS", "AMAX", "TO", "ZERO", "SATURATED", "NOT", "FINITE"]
    assert header.split() == [*columns, "ERROR"] and len(lines) == 4
    assert lines[0].startswith("0.0 input ") and " 1e+03 " in lines[0] and " 0.05% " in lines[0]
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["0.0 input"]["casts"] == 1 and data["0.0 weight"]["saturated"] == 0
    with opfuse.watch_quantization() as seen:
        made(x)
    assert str(seen).startswith("Nothing was recorded")


@pytest.mark.parametrize("name", ["PerTensor", "PerBlock", "Delayed"])
@pytest.mark.parametrize("inside", [False, True])
def test_watching_changes_no_value_or_state(name, inside):
    """Values, gradients and state are those without the block, in either nesting."""
    (one, x), (other, z) = model(), model()
    recipe = getattr(testing, name)()
    for _ in range(3):
        with opfuse.autocast(recipe):
            y = one(x)
        y.square().sum().backward()
        first, second = opfuse.watch_quantization(), opfuse.autocast(recipe)
        with second if inside else first, first if inside else second:
            again = other(z)
        again.square().sum().backward()
        assert torch.equal(y, again)
    torch.testing.assert_close(z.grad, x.grad, rtol=0, atol=0)
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(v, w) for (a, v), (b, w) in pairs)


def test_a_fused_cast_is_a_step_of_its_own_there():
    class Writes(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            relu, cast = basic_op_ctxs
            y = self.basic_ops[0].forward_value(self.basic_ops[0].operand(relu, input_))
            return cast.quantizer(y, cast.usage), [(), ()]

    def when(ops_, env):
        kind = type(ops_[1].quantizer).__name__
        return kind == "_PerTensor" or f"it knows no {kind}"

    made, x = model()
    fusion = opfuse.Fusion((ops.ReLU, ops.Cast), Writes, when=when, name="relu+cast")
    with registered("forward", fusion):
        with opfuse.autocast(testing.PerTensor()):
            report = opfuse.explain(made, x)
            with opfuse.watch_quantization() as seen:
                watched = opfuse.explain(made, x)
    where = {row["tensor"] + row["op"]: row["where"] for row in rows(report)}
    assert where["input0.2: BasicLinear"] == "fused into relu+cast"
    where = {row["tensor"] + row["op"]: row["where"] for row in rows(watched)}
    assert where["input0.2: BasicLinear"] == "a step of its own"
    assert "it knows no WatchedQuantizer" in str(watched) and "0.2 input" in seen.tensors


def rows(report):
    return report.to_dict()["quantized"][0]["tensors"]


def test_compiled_code_is_refused():
    made, x = model()
    run = torch.compile(made, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sees nothing of code that torch.compile compiles"):
        with opfuse.autocast(testing.PerTensor()), opfuse.watch_quantization():
            run(x)
    # on Python 3.10 Dynamo hides the sentence
    with pytest.raises(Exception, match="cannot be traced|Observed exception"):
        torch.compile(watched, backend="eager", fullgraph=True)(x)


def watched(x):
    with opfuse.watch_quantization():
        return x + 1


@pytest.mark.parametrize("usage", [ROWWISE, COLUMNWISE])
def test_the_largest_number_of_every_format(usage):
    from opfuse_quantized.watching import _limit

    fp8, scale = torch.zeros(32, 64).to(torch.float8_e4m3fn), torch.full((1,), 0.5)
    turned = fp8.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    given = torch.Size((32, 64)), torch.float32, None
    made = ScaledTensor(*given, fp8, turned, scale)
    assert _limit(made, usage).unique().tolist() == [224.0]
    two = [torch.full(s, 129, dtype=torch.uint8) for s in ((32, 2), (64, 1))]
    row, column = [exponents.view(torch.float8_e8m0fnu) for exponents in two]
    assert _limit(MXTensor(*given, fp8, row, turned, column), usage).unique().tolist() == [1792.0]
    packed = [
        torch.zeros(s, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for s in ((32, 32), (64, 16))
    ]
    small = [torch.ones(s).to(torch.float8_e4m3fn) for s in ((32, 4), (64, 2))]
    made = NVFP4Tensor(*given, packed[0], small[0], packed[1], small[1], scale, scale)
    assert _limit(made, usage).unique().tolist() == [3.0]


# explain


def test_explain_lists_what_is_quantized():
    made, x = model()
    with opfuse.autocast(testing.PerTensor(), skip=["0.2"]):
        report = opfuse.explain(made, x)
    (found,) = report.to_dict()["quantized"]
    assert (found["recipe"], found["products"], found["quantized"]) == ("PerTensor", 6, 3)
    assert [(row["tensor"], row["usage"], row["where"]) for row in found["tensors"]] == [
        ("input", "rowwise and columnwise", "a step of its own"),
        ("weight", "rowwise and columnwise", "the op itself"),
        ("grad_output", "rowwise and columnwise", "a step of its own"),
    ]
    assert "quantized by PerTensor: 3 of 6 products of linear ops" in str(report)
    assert "0.0: BasicLinear  grad_output  _PerTensor" in report.details
    with opfuse.autocast(testing.PerTensor()), torch.no_grad():
        (found,) = opfuse.explain(made, x).to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (2, 2)
    assert [row["usage"] for row in found["tensors"]] == ["rowwise"] * 4
    assert opfuse.explain(made, x).to_dict()["quantized"] == []


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_explain_counts_a_backward_that_is_not_quantized(override):
    made, x = model()
    with opfuse.autocast(testing.PerTensor(backward_override=override)):
        (found,) = opfuse.explain(made, x).to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (6, 2)
    assert {row["tensor"] for row in found["tensors"]} == {"input", "weight"}


def test_explain_counts_the_products_of_each_group():
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.GroupedLinear(2, 128, 128, bias=False), ops.Linear(128, 8))
    with opfuse.autocast(testing.PerTensor()):
        report = opfuse.explain(chain, torch.randn(4, 128), torch.tensor([1, 3]))
    (found,) = report.to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (7, 7)


def test_explain_counts_no_product_where_nothing_is_cast():
    made, x = model()
    with opfuse.autocast(False, calibrating=True, recipe=testing.Delayed()):
        (found,) = opfuse.explain(made, x).to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (6, 0)


def test_explain_counts_the_products_of_each_weight():
    chain = opfuse.Sequential(ops.ParallelLinear([ops.Linear(128, 128) for _ in range(2)]))
    with opfuse.autocast(testing.PerTensor()):
        report = opfuse.explain(chain, torch.randn(4, 128, requires_grad=True))
    (found,) = report.to_dict()["quantized"]
    assert (found["products"], found["quantized"]) == (6, 6)


def test_a_block_in_a_block_tells_both_and_recipes_have_rows_of_their_own():
    made, x = model()
    with opfuse.watch_quantization() as outer:
        with opfuse.watch_quantization() as inner, opfuse.autocast(testing.PerTensor()):
            made(x)
        assert outer.to_dict() == inner.to_dict() != {}
        with opfuse.autocast(testing.PerBlock()):
            made(x)
    assert (
        outer.tensors["0.0 input"].casts == 1 and outer.tensors["0.0 input, _PerBlock"].casts == 1
    )


def test_mixed_values_are_compared_with_mixed_ones():
    """The columnwise copy of NVFP4 may hold each 16 rows times an orthogonal matrix."""
    from opfuse_quantized.hadamard import mixed
    from opfuse_quantized.watching import _as_cast

    torch.manual_seed(0)
    x, scale = torch.randn(32, 4, dtype=torch.float64), torch.full((1,), 1.0)
    codes = torch.full((4, 16), 0x22, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # ones
    small = torch.ones(4, 2).to(torch.float8_e4m3fn)
    given = torch.Size((32, 4)), torch.float32, None, None, None, codes, small, None, scale
    made = NVFP4Tensor(*given, columnwise_signs=0xD7E8)
    turned, plain = _as_cast(x, made, COLUMNWISE)
    torch.testing.assert_close(turned, mixed(x.t().contiguous(), 0xD7E8).t())
    assert plain.dequantize(COLUMNWISE).unique().tolist() == [1.0]
