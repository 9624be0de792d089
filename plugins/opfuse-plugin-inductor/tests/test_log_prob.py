"""Compiled log-probabilities, as Inductor compiles them or as they were traced, against fp64."""

import pytest
import torch
from opfuse_inductor import kernels

import opfuse
from opfuse import ops
from opfuse.core.plugins import using

SMALL = {"inductor.min_elements": 0}
TRACED = {**SMALL, "inductor.backend": "eager"}
EVERYTHING = {"entropy": True, "logsumexp": True, "log_sum_squares": True}
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 2},
    "cooled": {"temperature": 0.7, "softcap": 3.0},
    "entropy": {"entropy": True},
    "logsumexp": {"logsumexp": True, "temperature": 1.5},
    "squares": {"log_sum_squares": True, "softcap": 5.0},
    "everything": {**EVERYTHING, "temperature": 0.8, "softcap": 4.0},
}


@pytest.fixture(autouse=True)
def _alone():
    torch.manual_seed(0)
    with using("inductor"):
        yield


def exact(x, tokens, *, temperature=1.0, softcap=None, ignore_index=-100, entropy=False,
          logsumexp=False, log_sum_squares=False):  # fmt: skip
    """The outputs, written out in fp64."""
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    lse = (z / temperature).logsumexp(-1)
    log_p = z / temperature - lse[..., None]
    counted = tokens != ignore_index
    places = torch.where(counted, tokens, 0).long()[..., None]
    found = [log_p.gather(-1, places)[..., 0] * counted]
    found += [-(log_p.exp() * log_p).sum(-1)] * entropy + [lse] * logsumexp
    return found + [(2 * log_p).logsumexp(-1)] * log_sum_squares


def outputs(op, x, tokens, options):
    chain = opfuse.Sequential(op)
    with opfuse.options(**options):
        (call,) = opfuse.explain(chain, x, tokens).calls
        assert [step.fusion for step in call.plan.forward] == ["compiled log-probabilities"]
        y = chain(x, tokens)
    return list(y) if isinstance(y, tuple) else [y]


def compare(name, x, tokens, options=TRACED, which=None):
    """All outputs; and the gradient of all, or of one of them alone."""
    x = x.detach().requires_grad_()
    wide = x.detach().double().requires_grad_()
    got = outputs(ops.TokenLogProb(**OPTIONS[name]), x, tokens, options)
    want = exact(wide, tokens, **OPTIONS[name])
    near = {torch.float32: 1e-5, torch.float64: 1e-12}.get(x.dtype, 1e-2)
    of = torch.float64 if x.dtype is torch.float64 else torch.float32
    for y, truth in zip(got, want, strict=True):
        assert y.dtype is of
        torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)
    chosen = slice(None) if which is None else slice(which, which + 1)
    weights = [torch.randn(y.shape) for y in got[chosen]]
    grads = [
        torch.autograd.grad(
            given[chosen], into, [w.to(y) for w, y in zip(weights, given[chosen], strict=True)]
        )[0]
        for given, into in ((got, x), (want, wide))
    ]
    assert grads[0].dtype is x.dtype
    atol = near * float(grads[1].abs().max())
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=near, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    tokens = torch.randint(0, 7, (3, 5))
    tokens[1, 2:4] = OPTIONS[name].get("ignore_index", -100)
    compare(name, torch.randn(3, 5, 7).to(dtype) * 3, tokens)


@pytest.mark.parametrize("which", range(4))
def test_a_gradient_of_one_output_alone(which):
    compare("everything", torch.randn(6, 9) * 3, torch.randint(0, 9, (6,)), which=which)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.bfloat16), ("everything", torch.float32)], ids=str
)
def test_they_match_compiled_for_many_classes(name, dtype):
    tokens = torch.randint(0, 1000, (130,))
    tokens[5] = -100
    compare(name, torch.randn(130, 1000).to(dtype) * 3, tokens, SMALL)


def test_impossible_tokens_have_no_share():
    x, tokens = torch.randn(4, 9), torch.tensor([0, 1, 2, 0])
    x[:, 3:], x[3, 1:] = -torch.inf, -torch.inf
    x.requires_grad_()
    y, entropy, lse, squares = outputs(ops.TokenLogProb(**EVERYTHING), x, tokens, TRACED)
    want = exact(x.detach()[:, :3].double(), tokens)
    torch.testing.assert_close(y[:3].double(), want[0][:3])
    assert y[3] == 0 == entropy[3] == squares[3] and lse[3] == x[3, 0]
    (dx,) = torch.autograd.grad([y.sum(), 5 * entropy.sum(), squares.sum()], x)
    assert dx.isfinite().all() and dx[:, 3:].eq(0).all() and dx[3].eq(0).all()


def test_infinite_logits_are_as_torch_has_them():
    x = torch.tensor([[1.0, torch.inf, 0.0], [-torch.inf] * 3, [1.0, 2.0, 3.0]])
    options = {"logsumexp": True}
    y, lse = outputs(ops.TokenLogProb(**options), x, torch.tensor([0, 1, 2]), TRACED)
    assert y[:2].isnan().all() and lse.tolist()[:2] == [torch.inf, -torch.inf]
    torch.testing.assert_close(y[2], x[2].log_softmax(-1)[2])


def test_large_logits_lose_no_digits():
    x, tokens = torch.randn(9, 50), torch.randint(0, 50, (9,))
    near = dict(rtol=0, atol=1e-3)  # 4096 has digits of 5e-4
    op = ops.TokenLogProb(entropy=True)
    for offset in (4096, -4096):
        got = outputs(op, x + offset, tokens, TRACED)
        for y, truth in zip(got, exact(x.double(), tokens, entropy=True), strict=True):
            torch.testing.assert_close(y.double(), truth, **near)


@pytest.mark.parametrize("options", [TRACED, SMALL], ids=["traced", "compiled"])
def test_a_token_that_is_no_class_is_refused_as_by_the_op(options):
    tokens = torch.tensor([0, 6, 7, -100])
    for plugins in ("inductor", ""):
        with using(plugins), opfuse.options(**options):
            with pytest.raises(IndexError, match="Target 7 is out of bounds"):
                opfuse.Sequential(ops.TokenLogProb())(torch.randn(4, 7), tokens)


def test_the_backward_uses_the_numbers_of_its_forward():
    op, x, tokens = ops.TokenLogProb(temperature=2.0), torch.randn(4, 7), torch.tensor([1, 2, 3, 4])
    x.requires_grad_()
    (y,) = outputs(op, x, tokens, TRACED)
    op.temperature, op.softcap, op.ignore_index = 1.0, 0.5, 1
    (grad,) = torch.autograd.grad(y.sum(), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact(wide, tokens, temperature=2.0)[0].sum(), wide)
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-6)


def test_what_it_takes_and_what_it_keeps():
    """What is not contiguous, other integers, and two numbers of each row beside the entropy."""
    compare("entropy", torch.randn(7, 6).t(), torch.randint(0, 7, (12,), dtype=torch.int32)[::2])
    x, tokens, kept = torch.randn(6, 7, requires_grad=True), torch.zeros(6).long(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        outputs(ops.TokenLogProb(entropy=True), x, tokens, TRACED)
    assert sorted(t.numel() for t in kept[-5:]) == [6, 6, 6, 6, 42]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_the_caller_may_overwrite_the_outputs():
    x, tokens = torch.randn(6, 7, requires_grad=True), torch.randint(0, 7, (6,))
    y, *others = outputs(ops.TokenLogProb(**EVERYTHING), x, tokens, TRACED)
    total = y.sum() + sum(each.sum() for each in others)
    for each in (y, *others):
        each.detach().zero_()
    (grad,) = torch.autograd.grad(total, x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(
        sum(each.sum() for each in exact(wide, tokens, **EVERYTHING)), wide
    )
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-5)


def test_top_tokens_and_small_logits_are_declined(monkeypatch):
    monkeypatch.setattr(kernels.CompiledKernel, "__call__", None)
    x, tokens = torch.randn(4, 7), torch.zeros(4).long()
    with opfuse.options(**TRACED):
        chain = opfuse.Sequential(ops.TokenLogProb(top_k=2))
        assert "its functions give no top tokens" in str(opfuse.explain(chain, x, tokens).details)
        chain(x, tokens)
        for rows in (0, 1):  # these go through the op
            opfuse.Sequential(ops.TokenLogProb())(x[:rows], tokens[:rows])
    chain = opfuse.Sequential(ops.BasicLinear(8, 7), ops.TokenLogProb())
    (call,) = opfuse.explain(chain, torch.randn(4, 8), tokens).calls
    assert any("the separate ops are as fast" in refused.reason for refused in call.plan.refused)
