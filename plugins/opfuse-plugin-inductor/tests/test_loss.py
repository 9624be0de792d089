"""The compiled loss, as Inductor compiles it or as it was traced, against PyTorch in fp64."""

import copy

import pytest
import torch
from opfuse_inductor import kernels
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.core.plugins import using

SMALL = {"inductor.min_elements": 0}
TRACED = {**SMALL, "inductor.backend": "eager"}
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 0.25, 1.5], dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 2},
    "smooth": {"label_smoothing": 0.1, "reduction": "sum"},
    "z": {"z_loss": 0.01},
    "capped": {"softcap": 3.0, "label_smoothing": 0.2},
    "none": {"reduction": "none", "z_loss": 0.1, "softcap": 5.0},
    "weighted": {"weight": WEIGHT, "ignore_index": 2},
    "weighted and smooth": {"weight": WEIGHT, "label_smoothing": 0.1, "reduction": "none"},
}


@pytest.fixture(autouse=True)
def _alone():
    torch.manual_seed(0)
    with using("inductor"):
        yield


def exact(x, targets, z_loss=0.0, softcap=None, reduction="mean", **given):
    """The loss and the gradient of the logits, in fp64."""
    x = x.detach().double().requires_grad_()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    flat, rows = targets.flatten().long(), z.flatten(0, -2)
    loss = F.cross_entropy(rows, flat, reduction="none", **given)
    counted = flat != given.get("ignore_index", -100)
    loss = loss + torch.where(counted, z_loss * rows.logsumexp(-1).square(), 0.0)
    weight = given.get("weight")
    of_row = counted if weight is None else weight[flat.where(counted, 0)] * counted
    loss = {"mean": loss.sum() / of_row.sum(), "sum": loss.sum(), "none": loss.view(targets.shape)}
    (grad,) = torch.autograd.grad(loss[reduction].sum() * 2, x)
    return loss[reduction].detach(), grad


def found(op, x, targets, options=TRACED):
    chain, x = opfuse.Sequential(op), x.detach().requires_grad_()
    with opfuse.options(**options):
        (call,) = opfuse.explain(chain, x, targets).calls
        assert [step.fusion for step in call.plan.forward] == ["compiled loss"]
        loss = chain(x, targets)
        (grad,) = torch.autograd.grad(loss.sum() * 2, x)
    return loss.detach(), grad


def compare(name, x, targets, options=TRACED, tolerance=1e-5):
    wanted = exact(x, targets, **OPTIONS[name])
    results = found(ops.CrossEntropy(**OPTIONS[name]), x, targets, options)
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype is x.dtype
        near = {torch.float32: tolerance, torch.float64: 1e-12}.get(x.dtype, 1e-2)
        torch.testing.assert_close(
            got.double(), want, rtol=near, atol=near * float(want.abs().max())
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    targets = torch.randint(0, 7, (3, 5))
    targets[1, 2:4] = OPTIONS[name].get("ignore_index", -100)
    compare(name, torch.randn(3, 5, 7).to(dtype) * 3, targets)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.bfloat16), ("capped", torch.float32)], ids=str
)
def test_the_loss_compiled_for_many_classes_matches_torch(name, dtype):
    targets = torch.randint(0, 1000, (130,))
    targets[5] = -100
    compare(name, torch.randn(130, 1000).to(dtype) * 3, targets, SMALL)


def test_large_logits_lose_no_digits():
    x = torch.randn(9, 50) * 3
    targets = x.argmax(-1)
    x[range(9), targets] += 6
    compare("plain", x + 4096, targets, tolerance=1e-3)  # of losses of 0.01, where 4096 has 5e-4
    compare("plain", x - 4096, targets, tolerance=1e-3)


def test_smoothing_loses_no_digits_to_an_offset_and_does_not_overflow():
    x, targets = torch.randn(4, 500), torch.randint(0, 500, (4,))
    op = ops.CrossEntropy(label_smoothing=0.1)
    want = exact(x, targets, label_smoothing=0.1)[0]
    for offset, near in ((1e4, 1e-3), (-1e4, 1e-3)):  # 1e4 has digits of 1e-3 in fp32
        torch.testing.assert_close(
            found(op, x + offset, targets)[0].double(), want, rtol=0, atol=near
        )
    assert found(op, torch.full((4, 500), 1e37), targets)[0].isfinite()


def test_a_negative_view_and_another_default_device():
    x, targets = torch.randn(4, 7), torch.tensor([1, 2, 3, 4])
    with torch.device("meta"):
        compare("plain", torch._neg_view(x), targets)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int16])
def test_targets_of_other_integers(kind):
    compare("plain", torch.randn(4, 200), torch.tensor([156, 3, 199, 0]).to(kind))


@pytest.mark.parametrize("wrong", [7, -1, -99])
@pytest.mark.parametrize("options", [TRACED, SMALL], ids=["traced", "compiled"])
def test_a_target_that_is_no_class_is_refused_as_by_the_op(wrong, options):
    op, targets = ops.CrossEntropy(), torch.tensor([0, 6, wrong, -100])
    for plugins in ("inductor", ""):
        with using(plugins), opfuse.options(**options):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                opfuse.Sequential(op)(torch.randn(4, 7), targets)


def test_rows_that_are_all_ignored():
    x, targets = torch.randn(4, 7), torch.full((4,), -100)
    loss, grad = found(ops.CrossEntropy(), x, targets)
    assert loss.isnan() and not grad.any()
    loss, grad = found(ops.CrossEntropy(reduction="none"), x, targets)
    assert not loss.any() and not grad.any()


def test_it_takes_what_is_not_contiguous_and_keeps_what_the_op_keeps():
    x, targets = torch.randn(7, 6).t(), torch.randint(0, 7, (12,))[::2]
    compare("plain", x, targets)
    chain, kept = opfuse.Sequential(ops.CrossEntropy()), []
    x = torch.randn(6, 7, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, opfuse.options(**TRACED):
        chain(x, targets)
    assert sorted(t.numel() for t in kept) == [6, 6, 6, 42]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_the_backward_uses_the_numbers_of_its_forward():
    op, x, targets = ops.CrossEntropy(softcap=3.0), torch.randn(4, 7), torch.tensor([1, 2, 3, 4])
    x.requires_grad_()
    with opfuse.options(**TRACED):
        loss = opfuse.Sequential(op)(x, targets)
    op.softcap, op.z_loss, op.reduction = None, 1.0, "sum"
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(
        grad.double() * 2, exact(x, targets, softcap=3.0)[1], rtol=1e-5, atol=1e-6
    )


def test_without_a_backward_one_function_is_made(monkeypatch):
    made = []
    trace = kernels.trace
    monkeypatch.setattr(
        kernels, "trace", lambda *given, **how: made.append(1) or trace(*given, **how)
    )
    with opfuse.options(**TRACED):
        chain = opfuse.Sequential(ops.CrossEntropy(label_smoothing=0.015625))
        for rows in (4, 9):
            chain(torch.randn(rows, 11), torch.zeros(rows, dtype=torch.long))
        assert len(made) == 1
        twin = copy.deepcopy(chain)
        twin(torch.randn(4, 11, requires_grad=True), torch.zeros(4, dtype=torch.long)).backward()
    assert len(made) == 2


def test_a_schedule_of_numbers_stops_compiling(monkeypatch):
    made = []
    trace = kernels.trace
    monkeypatch.setattr(
        kernels, "trace", lambda *given, **how: made.append(1) or trace(*given, **how)
    )
    op, x, targets = ops.CrossEntropy(), torch.randn(4, 13), torch.tensor([1, 2, 3, 4])
    chain = opfuse.Sequential(op)
    with opfuse.options(**TRACED):
        for step in range(20):
            op.label_smoothing = step / 1024
            want = F.cross_entropy(x, targets, label_smoothing=op.label_smoothing)
            torch.testing.assert_close(chain(x, targets), want)
        assert 0 < len(made) <= 8


@pytest.mark.parametrize("rows", [0, 1])
def test_one_row_or_none_goes_through_the_op(rows, monkeypatch):
    monkeypatch.setattr(kernels.CompiledKernel, "__call__", None)
    with opfuse.options(**TRACED):
        loss = opfuse.Sequential(ops.CrossEntropy())(torch.randn(rows, 7), torch.ones(rows).long())
    assert loss.isnan() == (rows == 0)


def test_small_logits_are_declined_while_planning():
    chain = opfuse.Sequential(ops.BasicLinear(8, 7), ops.CrossEntropy())
    (call,) = opfuse.explain(chain, torch.randn(4, 8), torch.ones(4).long()).calls
    assert call.plan.forward[-1].fusion is None
    assert any("the separate ops are as fast" in refused.reason for refused in call.plan.refused)
