"""Fused ops as they are written for Transformer Engine: what they leave in contexts, and how they call basic ops."""

from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops


@pytest.fixture
def fusing():
    """Registers forward fusions the way te.ops does, as functions; unregisters them."""
    handles = []

    def register(fused_class, *classes, kind="forward"):
        def fuse(given, **unused):
            out, rest = [], list(given)
            while rest:
                run = rest[: len(classes)]
                if [type(op) for op in run] == [*classes]:
                    out.append(fused_class(run))
                    rest = rest[len(classes) :]
                else:
                    out.append(rest.pop(0))
            return out

        handles.append(getattr(opfuse, f"register_{kind}_fusion")(fuse))

    yield register
    for handle in handles:
        handle.unregister()


class Axpy(opfuse.FusedOperation):
    """As the guide of Transformer Engine has it: leaves nothing, its backward being that of the ops."""

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **unused):
        scale, _ = self.basic_ops
        return scale.scale * input_ + basic_op_extra_inputs[1][0], [(), ()]


class LinearSiLU(opfuse.FusedOperation):
    """As a test of Transformer Engine has it: writes on the contexts what te.ops reads there."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear, silu = basic_op_ctxs
        weight = self.basic_ops[0].weight
        y = F.linear(input_, weight)
        linear.save_for_backward(input_, weight)
        linear.with_quantized_compute = False
        linear.input_quantizer = linear.weight_quantizer = linear.grad_output_quantizer = None
        linear.dtype, linear.weight_requires_grad = weight.dtype, True
        linear.input_requires_grad = True  # even where it is not
        silu.save_for_backward(y)
        silu.dtype, silu.prev_op_grad_output_quantizer = weight.dtype, None
        return F.silu(y), [(), ()]


def grads(function, x, *more):
    x = x.detach().requires_grad_()
    return [x, *torch.autograd.grad(function(x).square().sum(), [x, *more])]


def fused(chain):
    (fuser,) = chain._module_groups
    return [type(step.op).__name__ for step in fuser._last[1].forward]


@pytest.mark.alone
def test_one_that_leaves_nothing(fusing, no_plugins):
    fusing(Axpy, ops.ConstantScale, ops.AddExtraInput)
    chain = opfuse.Sequential(ops.ConstantScale(3.0), ops.AddExtraInput())
    extra = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        x, *got = grads(lambda x: chain(x, extra), torch.randn(4, 8), extra)
        _, *expected = grads(lambda x: 3 * x + extra, x, extra)
        torch.testing.assert_close(got, expected)
    assert fused(chain) == ["Axpy"]
    x = torch.randn(4, 8, requires_grad=True)
    y = chain(x, extra)
    chain[0].scale = 5.0  # set since: the backward uses the forward's
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((4, 8), 3.0))


@pytest.mark.alone
def test_one_that_leaves_nothing_compiled(fusing, no_plugins):
    fusing(Axpy, ops.ConstantScale, ops.AddExtraInput)
    chain = opfuse.Sequential(ops.ConstantScale(3.0), ops.AddExtraInput(), ops.GELU())
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    extra, x = torch.randn(2, 4, 8)
    got, expected = (grads(lambda x, c=c: c(x, extra), x)[1] for c in (compiled, chain))
    torch.testing.assert_close(got, expected)
    assert fused(chain)[0] == "Axpy"


@pytest.mark.alone
def test_one_that_writes_what_the_ops_do_not_declare(fusing, no_plugins):
    fusing(LinearSiLU, ops.BasicLinear, ops.SiLU)
    linear = ops.Linear(8, 8, bias=False)
    chain = opfuse.Sequential(linear, ops.SiLU())
    for _ in range(3):
        x, *got = grads(chain, torch.randn(4, 8), linear.weight)
        _, *expected = grads(lambda x: F.silu(F.linear(x, linear.weight)), x, linear.weight)
        torch.testing.assert_close(got, expected)
    x = torch.randn(4, 8)  # needs no gradient, whatever the fused op wrote
    (got,) = torch.autograd.grad(chain(x).sum(), linear.weight)
    (expected,) = torch.autograd.grad(F.silu(F.linear(x, linear.weight)).sum(), linear.weight)
    torch.testing.assert_close(got, expected)
    assert fused(chain) == ["LinearSiLU"]


class Numbers(opfuse.FusedOperation):
    """Looks at what it finds in the contexts, and leaves another scale than the op has."""

    seen: ClassVar[dict] = {}

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        for op, ctx in zip(self.basic_ops, basic_op_ctxs, strict=True):
            if op.context_names and ctx.requires_grad:
                kind = type(op).__name__
                self.seen[kind] = {n: getattr(ctx, n, None) for n in op.context_names}
        x, given = self.run_separately(
            basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs
        )
        if type(self.basic_ops[0]) is ops.ConstantScale and basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].scale = 7.0
        return x, given


@pytest.mark.alone
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ops.ConstantScale(3.0), {"scale": 3.0}),
        (ops.Dropout(0.25), {"p": 0.25}),
        (ops.LayerNorm(8, zero_centered_gamma=True), {"zero_centered_gamma": True}),
        (ops.RMSNorm(8), {"zero_centered_gamma": False}),
        (ops.ClampedSwiGLU(limit=2.0), None),
        (ops.ScaledSwiGLU(), None),
        (ops.Reshape((-1, 4)), {"input_shape": None}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_are_there_before_a_fused_forward(op, expected, fusing, no_plugins):
    fusing(Numbers, type(op), ops.Identity)
    chain = opfuse.Sequential(op, ops.Identity())
    extras = [torch.ones(4)] * op.num_extra_inputs
    Numbers.seen.clear()
    y = chain(torch.randn(4, 8, requires_grad=True), *extras)
    found = Numbers.seen[type(op).__name__]
    if expected is None:
        assert found.pop("scales_requires_grad", None) is None  # a call makes that
        expected = {"numbers": op.numbers_of()}
    assert found == expected and fused(chain) == ["Numbers"]
    y.sum().backward()


@pytest.mark.alone
def test_a_fused_forward_may_leave_another_number(fusing, no_plugins):
    fusing(Numbers, ops.ConstantScale, ops.Identity)
    x = torch.randn(4, 8, requires_grad=True)
    opfuse.Sequential(ops.ConstantScale(3.0), ops.Identity())(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4, 8), 7.0))


QUANTIZERS = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
PLAIN = [
    ops.BasicLinear(8, 8),
    ops.Bias(8),
    ops.ConstantScale(2.0),
    ops.Dropout(0.0),
    ops.GELU(),
    ops.SwiGLU(),
    ops.Identity(),
    ops.LayerNorm(8),
    ops.L2Normalization(),
    ops.Quantize(),
    ops.Reshape((-1, 8)),
    ops.RMSNorm(8),
]


class Calls(opfuse.FusedOperation):
    """Calls ``op_forward`` as te.ops does, by name or by place."""

    by_name = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x = input_
        for op, ctx in zip(self.basic_ops, basic_op_ctxs, strict=True):
            x = (
                op.op_forward(ctx, x, **QUANTIZERS)
                if self.by_name
                else op.op_forward(ctx, x, None, None)
            )
        return x, [(), ()]


@pytest.mark.alone
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("op", PLAIN, ids=lambda op: type(op).__name__)
def test_every_op_takes_the_quantizers_of_a_fused_op(op, by_name, fusing, no_plugins, monkeypatch):
    monkeypatch.setattr(Calls, "by_name", by_name)
    fusing(Calls, type(op), ops.Identity)
    chain = opfuse.Sequential(op, ops.Identity())
    x = torch.randn(4, 8)
    got = grads(chain, x)[1]
    assert fused(chain) == ["Calls"]
    torch.testing.assert_close(got, grads(op, x)[1])


def test_a_call_gives_no_quantizers():
    with pytest.raises(TypeError, match="next_op_input_quantizer"):
        ops.GELU()(torch.randn(2), next_op_input_quantizer=None)
