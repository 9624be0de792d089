"""Distillation: its values against TRL's and torch's, gradients, dtypes, shapes, what is refused."""

import os
import re
import warnings

import pytest
import torch
from opfuse_loss import chunks, losses
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.testing.machine import is_interpreting

if is_interpreting():
    pytest.skip("they launch no kernel", allow_module_level=True)

BETAS = [0.0, 0.3, 0.5, 1.0]
CLASSES, FEATURES = 7, 5


@pytest.fixture(autouse=True)
def ops_alone(request):
    with opfuse.plugins.using("loss" if "fused" in request.node.name else ""):
        yield


def draw(lead=(2, 4), dtype=torch.float64, seed=0):
    """Logits of a student, hidden states and head of a teacher, and targets, a third ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, CLASSES, lead, generator=generator)
    targets.view(-1)[: targets.numel() // 3] = -100
    x = (2 * normal(*lead, CLASSES)).requires_grad_()
    return x, normal(*lead, FEATURES), normal(CLASSES, FEATURES), targets


def expected(x, hidden, weight, targets, beta, temperature, reduction):
    """The definition, with torch's KL divergence, and autograd's gradient."""
    s, t = (torch.log_softmax(z / temperature, -1) for z in (x, hidden @ weight.t()))
    if beta in (0, 1):
        rows = F.kl_div(*((s, t) if beta == 0 else (t, s)), log_target=True, reduction="none")
    else:
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        of_teacher = F.kl_div(m, t, log_target=True, reduction="none")
        rows = beta * of_teacher + (1 - beta) * F.kl_div(m, s, log_target=True, reduction="none")
    counted = targets != -100
    rows = torch.where(counted, rows.sum(-1), 0.0)
    if reduction == "none":
        return rows
    return rows.sum() / (counted.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_its_definition(beta, temperature, reduction):
    x, *given = draw()
    op = losses.Distillation(beta=beta, temperature=temperature, reduction=reduction)
    mine, theirs = op(x, *given), expected(x, *given, beta, temperature, reduction)
    torch.testing.assert_close(mine, theirs)
    weights = torch.linspace(-1, 2, mine.numel(), dtype=torch.float64).view_as(mine)
    for one, other in zip(
        torch.autograd.grad(mine, x, weights), torch.autograd.grad(theirs, x, weights), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(lambda x: op(x, *given), x)


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_that_of_trl(beta):
    with warnings.catch_warnings():  # of the libraries among themselves
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        gkd = pytest.importorskip("trl.experimental.gkd", reason="it is compared with TRL's")
    x, hidden, weight, targets = draw()
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        x, hidden @ weight.t(), targets, beta=beta, temperature=1.5
    )
    mine = losses.Distillation(beta=beta, temperature=1.5)(x, hidden, weight, targets)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_half_precision_is_computed_in_fp32(beta, dtype):
    x, hidden, weight, targets = draw(dtype=dtype)
    op = losses.Distillation(beta=beta)
    exact = x.detach().double().requires_grad_()
    # the teacher's logits have the dtype of the teacher
    theirs = F.linear(hidden, weight).double(), torch.eye(CLASSES, dtype=torch.float64), targets
    mine, reference = op(x, hidden, weight, targets), op(exact, *theirs)
    assert mine.dtype is torch.float32
    torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-5)
    (dx,), (of_exact,) = torch.autograd.grad(mine, x), torch.autograd.grad(reference, exact)
    rtol, atol = opfuse.testing.tolerance(dtype)
    assert dx.dtype is dtype
    torch.testing.assert_close(dx.double(), of_exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lead", [(), (1,), (3,), (127,), (0,), (2, 3, 5)], ids=str)
def test_shapes(lead):
    x, hidden, weight, targets = draw(lead)
    op = losses.Distillation(reduction="none")
    mine = op(x, hidden, weight, targets)
    assert mine.shape == lead
    torch.testing.assert_close(mine, expected(x, hidden, weight, targets, 0.5, 1.0, "none"))
    (dx,) = torch.autograd.grad(mine.sum(), x)
    assert dx.shape == x.shape and dx[targets == -100].eq(0).all()


def test_rows_that_do_not_count_may_be_anything():
    x, hidden, weight, targets = draw()
    op = losses.Distillation()
    out = targets == -100
    mine, spoilt = op(x, hidden, weight, targets), x.detach().clone()
    spoilt[out], hidden[out] = float("nan"), float("inf")
    again = op(spoilt.requires_grad_(), hidden, weight, targets)
    torch.testing.assert_close(again, mine)
    torch.testing.assert_close(torch.autograd.grad(again, spoilt), torch.autograd.grad(mine, x))
    none = torch.full_like(targets, -100)
    assert op(x, hidden, weight, none).isnan()
    assert torch.autograd.grad(op(x, hidden, weight, none), x)[0].eq(0).all()


def test_behind_a_linear_under_autocast_and_twice_differentiated():
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(6, CLASSES), losses.Distillation(beta=0.2))
    _, hidden, weight, targets = draw((9,), torch.float32)
    x = torch.randn(9, 6, requires_grad=True)
    plain = chain(x, hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        cast = chain(x, hidden, weight, targets)
    assert cast.dtype is torch.float32
    torch.testing.assert_close(cast, plain, rtol=2e-2, atol=2e-2)
    with opfuse.options(double_backward=True):
        (dx,) = torch.autograd.grad(chain(x, hidden, weight, targets), x, create_graph=True)
    torch.testing.assert_close(dx, torch.autograd.grad(plain, x)[0])
    dx.square().sum().backward()
    assert chain[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: losses.Distillation(beta=1.5), ValueError, "beta in [0, 1], got 1.5"),
        (lambda: losses.Distillation(temperature=0), ValueError, "temperature in (0, inf)"),
        (lambda: losses.Distillation(reduction="batch"), ValueError, "one of mean, sum, none"),
        (lambda: losses.Distillation(ignore_index=0.5), TypeError, "whole number as ignore_index"),
    ],
)
def test_what_it_refuses_when_it_is_made(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h, w, t: (h[:1], w, t), "hidden of shape (2, 4, 5) for logits of shape (2, 4, 7)"),
        (lambda h, w, t: (h, w[:3], t), "weight of shape (7, 5) for logits of shape (2, 4, 7)"),
        (lambda h, w, t: (h, w, t[0]), "targets of shape (2, 4) for logits of shape (2, 4, 7)"),
        (lambda h, w, t: (h, w.requires_grad_(), t), "weight that requires no grad"),
    ],
)
def test_what_it_refuses_in_a_call(change, text):
    x, *given = draw()
    with pytest.raises(ValueError, match=re.escape(text)):
        losses.Distillation()(x, *change(*given))


# Behind a linear, by chunks of rows


def chain_of(bias=True, **given):
    torch.manual_seed(0)
    return opfuse.Sequential(ops.Linear(6, CLASSES, bias=bias), losses.Distillation(**given))


def step(chain, x, given, **autocast):
    """The loss and all gradients, for a gradient of the loss that is not 1."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        loss = chain(x, *given)
    leaves = [leaf for leaf in (x, *chain.parameters()) if leaf.requires_grad]
    return [loss, *torch.autograd.grad(loss, leaves, torch.tensor(0.7, dtype=loss.dtype))]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_fused_by_chunks_it_gives_the_same(beta, bias, frozen, dtype, monkeypatch):
    monkeypatch.setattr(chunks, "rows_of_chunk", lambda *_, **__: 5)
    chain = chain_of(bias, beta=beta, temperature=1.7, reduction="sum" if bias else "mean")
    chain = chain.to(dtype)
    if frozen is not None:
        [*chain.parameters()][frozen * bias].requires_grad_(False)
    x = torch.randn(127, 6).to(dtype)
    _, *given = draw((127,), dtype)
    plan = str(opfuse.explain(chain, x.requires_grad_(), *given))
    assert "linear+distillation" in plan
    with opfuse.plugins.using(""):
        expected = step(chain, x, given)
    eps = torch.finfo(dtype).eps * (4 if dtype.itemsize < 4 else 64)  # sums of many rows
    for mine, theirs in zip(step(chain, x, given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=eps * theirs.abs().max().item())
    loss = chain(x, *given)
    with torch.no_grad():
        torch.testing.assert_close(chain(x, *given), loss)


def test_fused_under_autocast_and_without_rows_that_count():
    chain, x = chain_of(beta=0.4), torch.randn(9, 6)
    _, *given = draw((9,), torch.float32)
    with opfuse.plugins.using(""):
        expected = step(chain, x, given, dtype=torch.bfloat16)
    for mine, theirs in zip(step(chain, x, given, dtype=torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    given[2] = torch.full_like(given[2], -100)
    loss, *grads = step(chain, x, given)
    assert loss.isnan() and all(grad.eq(0).all() for grad in grads)


def test_fused_it_holds_no_logits_of_all_rows(monkeypatch):
    monkeypatch.setattr(chunks, "rows_of_chunk", lambda *_, **__: 8)
    chain = opfuse.Sequential(ops.Linear(6, 300, bias=False), losses.Distillation())
    x = torch.randn(64, 6, requires_grad=True)
    given = torch.randn(64, 5), torch.randn(300, 5), torch.zeros(64, dtype=torch.int64)
    with Largest() as largest:
        chain(x, *given).backward()
    assert largest.numel < 64 * 300


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that an operation gives."""

    keeps_no_tensors = True
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def test_fused_the_loss_of_each_row_runs_one_by_one():
    chain, x = chain_of(reduction="none"), torch.randn(9, 6, requires_grad=True)
    _, *given = draw((9,), torch.float32)
    assert "known in the backward only" in opfuse.explain(chain, x, *given).details
    assert chain(x, *given).shape == (9,)
