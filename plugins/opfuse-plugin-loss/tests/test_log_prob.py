"""Log-probabilities by chunks of rows, with the linear: values, gradients, and what is kept."""

import copy

import pytest
import torch
from opfuse_loss import chunks, losses
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing.machine import is_interpreting
from opfuse.tuning.tolerance import difference

if is_interpreting():
    pytest.skip("of kernels see test_token_statistics.py", allow_module_level=True)

MANY = {
    "entropy": True,
    "logsumexp": True,
    "log_sum_squares": True,
    "top_k": 3,
    "temperature": 0.7,
    "softcap": 5.0,
}
KEPT, AGAIN = "linear+log-probability", "linear+log-probability, computed again"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_ROWS", 4)
    monkeypatch.setattr(chunks, "LOGITS", 4 * 50)


def model(bias=True, dtype=torch.float32, frozen=False, classes=50, **options):
    torch.manual_seed(0)
    linear = ops.Linear(24, classes, bias=bias, dtype=dtype)
    for param in linear.parameters():
        param.requires_grad_(not frozen)
    return opfuse.Sequential(linear, ops.TokenLogProb(**options))


def data(rows=(3, 7), dtype=torch.float32, classes=50):
    torch.manual_seed(1)
    x, tokens = torch.randn(*rows, 24, dtype=dtype), torch.randint(0, classes, rows)
    if tokens.numel() > 2:
        tokens.view(-1)[:2] = -100
    return x.requires_grad_(), tokens


def step(chain, x, tokens, prefer="speed", weights=None):
    """The floating-point outputs, and the gradients of all that needs one."""
    with opfuse.options(prefer=prefer):
        y = chain(x, tokens)
    found = [t for t in (y if isinstance(y, tuple) else (y,)) if t.is_floating_point()]
    torch.manual_seed(2)
    weights = [torch.randn(t.shape, dtype=torch.float64) for t in found]
    leaves = [x, *[p for p in chain.parameters() if p.requires_grad]]
    given = [w.to(t.dtype) for w, t in zip(weights, found, strict=True)]
    return found, torch.autograd.grad(found, leaves, given)


@pytest.mark.parametrize("rows", [(1,), (3,), (3, 7), (2, 1, 9), (0,), (130,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{}, MANY], ids=["alone", "all outputs"])
def test_it_is_what_the_separate_ops_give_in_fp64(options, frozen, bias, dtype, rows):
    if options and dtype.itemsize == 2:  # rounded logits may have another order
        options = {**options, "top_k": 0}
    chain, (x, tokens) = model(bias, dtype, frozen, **options), data(rows, dtype)
    exact, wide = copy.deepcopy(chain).double(), x.detach().double().requires_grad_()
    with opfuse.plugins.using(""):
        expected, separate = step(exact, wide, tokens), step(chain, x, tokens)
    with opfuse.plugins.using("loss"):
        name = KEPT if frozen and not options else AGAIN
        with opfuse.options(prefer="memory"):
            assert name in " ".join(str(opfuse.explain(chain, x, tokens)).split())
        got = step(chain, x, tokens, "memory")
    for mine, other, own in zip(got, expected, separate, strict=True):
        for a, b, c in zip(mine, other, own, strict=True):
            # as near as the separate ops, which round the same logits
            assert not difference(a, b, rounded=c, dtype=dtype, gemm=True)


def test_what_is_kept_has_no_logits():
    x, tokens = data((64, 4), classes=4096)
    for frozen in (True, False):
        chain = model(False, frozen=frozen, classes=4096)
        with opfuse.plugins.using("loss"), opfuse.options(prefer="memory"):
            kept = saved_bytes(lambda chain=chain: chain(x, tokens), chain.parameters())
        # the input, or its gradient, and the tokens
        assert kept == x.nbytes + tokens.nbytes
    with opfuse.plugins.using(""):
        assert saved_bytes(lambda: chain(x, tokens), chain.parameters()) > 256 * 4096 * 4


def test_thawed_after_a_plan_it_computes_the_logits_again():
    chain, (x, tokens) = model(frozen=True), data()
    with opfuse.plugins.using("loss"):
        step(chain, x, tokens)
        for param in chain.parameters():
            param.requires_grad_()
        _, (dx, *of_params) = step(chain, x, tokens, "memory")
    with opfuse.plugins.using(""):
        _, expected = step(chain, x, tokens)
    torch.testing.assert_close((dx, *of_params), expected)


@pytest.mark.parametrize("make", [ops.BasicLinear, ops.LowRankLinear])
def test_nothing_but_the_bias_is_trained(make):
    linear = make(24, 50, *([2] if make is ops.LowRankLinear else [])).requires_grad_(False)
    chain, (x, tokens) = opfuse.Sequential(linear, ops.Bias(50), ops.TokenLogProb()), data()
    results = []
    for plugins in ("", "loss"):
        with opfuse.plugins.using(plugins), opfuse.options(prefer="memory"):
            y = chain(x.detach(), tokens)
            results.append([y, *torch.autograd.grad(y.sum(), chain[1].bias)])
    torch.testing.assert_close(*results)


def test_a_policy_and_its_reference_in_one_step():
    """The ratio of a trained head to a frozen one, as DPO and GRPO have it."""
    policy, reference = model(), model(frozen=True)
    x, tokens = data()
    for chain in (policy, reference):
        with torch.no_grad():
            for param in chain.parameters():
                param.add_(torch.randn_like(param), alpha=0.1)

    def loss():
        with torch.no_grad():
            base = reference(x, tokens)
        return -F.logsigmoid(0.1 * (policy(x, tokens) - base).sum(-1)).mean()

    results = []
    for plugins in ("", "loss"):
        with opfuse.plugins.using(plugins), opfuse.options(prefer="memory"):
            value = loss()
            results.append([value, *torch.autograd.grad(value, [x, *policy.parameters()])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_behind_it_in_the_same_chain(frozen, entropy):
    """GRPO with a reference, with the entropy by a channel out of the fused step."""
    loss = losses.GRPO(beta=0.1, entropy_coef=0.2 * entropy, metrics=True)
    linear, rows = model(frozen=frozen, dtype=torch.float64, entropy=entropy)
    if entropy:
        rows.set_extra_output_channel(0, "entropy", output_to_caller=False)
        loss.set_extra_input_channel(loss.input_names.index("entropy"), "entropy")
    chain, (x, tokens) = opfuse.Sequential(linear, rows, loss), data(dtype=torch.float64)
    sequences = torch.arange(3)[:, None].where(tokens >= 0, -1)
    reference = -4 + torch.rand(tokens.shape, dtype=torch.float64)
    given = x, tokens, sequences, torch.tensor([1.0, -0.5, 0.3]), reference
    leaves = [x, *[p for p in chain.parameters() if p.requires_grad]]
    results = []
    for plugins in ("", "loss"):
        with opfuse.plugins.using(plugins), opfuse.options(prefer="memory"):
            found = chain(*given)
            results.append([*found, *torch.autograd.grad(found[0], leaves)])
            report = " ".join(str(opfuse.explain(chain, *given)).split())
            name = KEPT if frozen and not entropy else AGAIN
            assert (f"{name}" in report) == bool(plugins) and "GRPO" in report
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointed_and_without_grad(frozen):
    chain, (x, tokens) = model(frozen=frozen), data()
    with opfuse.plugins.using("loss"), opfuse.options(prefer="memory"):
        y = chain(x, tokens)
        expected = torch.autograd.grad(y.sum(), x)
        again = torch.utils.checkpoint.checkpoint(chain, x, tokens, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(again.sum(), x), expected)
        with torch.no_grad():
            torch.testing.assert_close(chain(x, tokens), y.detach())


def test_rows_that_are_all_ignored_and_tokens_that_are_no_class():
    chain, (x, tokens) = model(), data()
    with opfuse.plugins.using("loss"), opfuse.options(prefer="memory"):
        found, grads = step(chain, x, torch.full_like(tokens, -100))
        assert all(t.eq(0).all() for t in (*found, *grads))
        tokens[1, 1] = 50
        with pytest.raises(IndexError, match="out of bounds"):
            chain(x, tokens)
