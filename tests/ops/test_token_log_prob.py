"""TokenLogProb against plain formulas in fp64: every output, dtype and shape, and what is refused."""

import re

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops import _blocks, cross_entropy
from opfuse.ops.token_log_prob import row_log_probs, row_logit_gradients

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = [(), (1,), (3,), (127,), (2, 3), (2, 3, 2), (0,), (0, 3)]
CLASSES = 7
OPTIONS = {
    "plain": {},
    "cooled": {"temperature": 0.7},
    "capped": {"softcap": 1.5},
    "ignores a class": {"ignore_index": 2},
    "entropy": {"entropy": True, "temperature": 1.3},
    "logsumexp": {"logsumexp": True},
    "squares": {"log_sum_squares": True, "temperature": 0.7},
    "top": {"top_k": 3},
    "all": {
        "temperature": 0.8, "softcap": 2.0, "ignore_index": 2, "entropy": True, "logsumexp": True,
        "log_sum_squares": True, "top_k": 7,
    },
}  # fmt: skip


def formula(
    logits, tokens, *, temperature=1.0, softcap=None, ignore_index=-100, entropy=False,
    logsumexp=False, log_sum_squares=False, top_k=0,
):  # fmt: skip
    """Written out, differentiated by autograd."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    z = z / temperature
    lse = torch.log(torch.exp(z).sum(-1))
    counted = tokens != ignore_index
    chosen = (z * F.one_hot(torch.where(counted, tokens, 0), z.shape[-1])).sum(-1)
    p = torch.exp(z - lse[..., None])
    found = [(chosen - lse) * counted]
    found += [-(p * (z - lse[..., None])).sum(-1)] * entropy + [lse] * logsumexp
    found += [p.square().sum(-1).log()] * log_sum_squares
    if top_k:
        values, top = (z - lse[..., None]).topk(top_k, -1)
        found += [top, values]
    return found


def draw(rows, classes=CLASSES, dtype=torch.float64, ignored=-100):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, classes, generator=generator, dtype=torch.float64) * 2
    tokens = torch.randint(0, classes, rows, generator=generator)
    if tokens.numel() > 1:
        tokens.view(-1)[1] = ignored
    return x.to(dtype).requires_grad_(), tokens


def outputs(op, x, tokens):
    given = opfuse.Sequential(op)(x, tokens)
    return list(given) if isinstance(given, tuple) else [given]


def differentiable(tensors):
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    for rows in ROWS:
        compare_with_formula(name, dtype, rows)


def compare_with_formula(name, dtype, rows):
    options = OPTIONS[name]
    x, tokens = draw(rows, dtype=dtype, ignored=options.get("ignore_index", -100))
    exact = x.detach().double().requires_grad_()
    got, expected = (
        outputs(ops.TokenLogProb(**options), x, tokens),
        formula(exact, tokens, **options),
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for mine, other in zip(got, expected, strict=True):
        assert mine.shape == other.shape
        assert mine.dtype is (torch.int64 if mine.dtype is torch.int64 else wide)
        if mine.is_floating_point():  # equal logits may come in another order
            torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=2e-6)
    weights = [torch.randn_like(each) for each in differentiable(expected)]
    narrow = [w.to(y.dtype) for w, y in zip(weights, differentiable(got), strict=True)]
    (dx,) = torch.autograd.grad(differentiable(got), x, narrow)
    (reference,) = torch.autograd.grad(differentiable(expected), exact, weights)
    assert dx.dtype is dtype
    rtol, atol = opfuse.testing.tolerance(dtype)
    torch.testing.assert_close(dx.double(), reference, rtol=rtol, atol=10 * atol)


@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_derivatives(name):
    options = OPTIONS[name]
    x, tokens = draw((3,), ignored=options.get("ignore_index", -100))
    op = ops.TokenLogProb(**options)
    assert torch.autograd.gradcheck(lambda x: tuple(differentiable(outputs(op, x, tokens))), x)

    def second(found):
        total = sum(each.square().sum() for each in differentiable(found))
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with opfuse.options(double_backward=True):
        got = second(outputs(op, x, tokens))
    torch.testing.assert_close(got, second(formula(x, tokens, **options)))


@pytest.mark.parametrize("which", range(5))
def test_a_gradient_of_one_output_alone(which):
    options = OPTIONS["all"]
    x, tokens = draw((2, 3), ignored=2)
    got = differentiable(outputs(ops.TokenLogProb(**options), x, tokens))[which]
    expected = differentiable(formula(x, tokens, **options))[which]
    weight = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, x, weight), torch.autograd.grad(expected, x, weight)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_computing_some_rows_at_a_time_gives_the_same(monkeypatch, name):
    """As many classes are computed on a CPU."""
    options = OPTIONS[name]
    x, tokens = draw((2, 4), dtype=torch.bfloat16, ignored=options.get("ignore_index", -100))
    op, results = ops.TokenLogProb(**options), []
    for block in (None, 3 * CLASSES):
        if block is not None:
            monkeypatch.setattr(_blocks, "LEAST", 0)
            monkeypatch.setattr(_blocks, "BLOCK", block)
        found = outputs(op, x, tokens)
        ones = [torch.ones_like(each) for each in differentiable(found)]
        results.append([*found, *torch.autograd.grad(differentiable(found), x, ones)])
        of_rows = [torch.ones_like(each.flatten(0, 1)) for each in differentiable(found)]
        given = x.detach().clone().view(8, -1), tokens.flatten(), of_rows, op.numbers_of()
        results[-1].append(row_logit_gradients(*given, in_place=True))
        assert results[-1][-1] is given[0]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    [
        ops.TokenLogProb(),
        ops.TokenLogProb(entropy=True),
        ops.TokenLogProb(entropy=True, softcap=3.0, temperature=2.0),
        ops.CrossEntropy(softcap=3.0, label_smoothing=0.1),
    ],
    ids=str,
)
def test_the_temporaries_of_all_parts_are_made_once(monkeypatch, op, dtype):
    """Freed memory may go back to the system; clearing it for each part takes longer than a part."""
    rows, classes, part = 64, 1024, 4
    monkeypatch.setattr(_blocks, "LEAST", 0)
    monkeypatch.setattr(_blocks, "BLOCK", part * classes)
    x = torch.randn(rows, classes).to(dtype).requires_grad_()
    tokens = torch.randint(0, classes, (rows,))
    with torch.profiler.profile(profile_memory=True) as profile:
        y = outputs(op, x, tokens)
        torch.autograd.grad(y, x, [torch.ones_like(each) for each in y])
    least = part * classes * dtype.itemsize
    made = [event.name for event in profile.events() if event.self_cpu_memory_usage >= least]
    assert 3 <= len(made) <= 4  # temporaries of each pass, the gradient, and what it is made of


def test_the_gradient_of_a_top_token_goes_to_that_token():
    """Logits that differ by a rounding error have one order in both passes, with any other output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 6, generator=generator)
    x[:, 3:] = torch.nextafter(x[:, :3], torch.full((), torch.inf))
    x.requires_grad_()
    for options in ({}, {"entropy": True}, {"entropy": True, "temperature": 0.7}):
        op = ops.TokenLogProb(top_k=6, **options)
        *_, top, values = outputs(op, x, torch.zeros(512).long())
        for k in range(6):
            (dx,) = torch.autograd.grad(values[:, k].sum(), x, retain_graph=True)
            assert torch.equal(dx.argmax(-1), top[:, k])


def test_other_outputs_change_no_bit_of_a_log_probability():
    x, tokens = draw((64,), 1000, torch.float32)
    alone = outputs(ops.TokenLogProb(), x, tokens)[0]
    others = ops.TokenLogProb(entropy=True, logsumexp=True, log_sum_squares=True, top_k=2)
    assert torch.equal(alone, outputs(others, x, tokens)[0])
    assert torch.equal(alone, x.log_softmax(-1)[range(64), tokens.clamp(0)] * (tokens >= 0))


def test_many_logits_elsewhere_are_computed_in_large_parts(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_MOST_ELSEWHERE", 100)
    logits, grad = torch.empty(64, 40, device="meta"), torch.empty(64, device="meta")
    given = logits, torch.empty(64, device="meta").long()
    assert [len(part) for _, part in cross_entropy.parts(logits)] == [2] * 32
    numbers = ops.TokenLogProb().numbers_of()
    assert row_log_probs(*given, numbers)[0].shape == (64,)
    for in_place in (False, True):
        dx = row_logit_gradients(*given, [grad], numbers, in_place=in_place)
        assert dx.shape == logits.shape and (dx is logits) == in_place


def test_rows_that_are_all_ignored():
    x, tokens = draw((4,))
    tokens[:] = -100
    y, entropy = outputs(ops.TokenLogProb(entropy=True), x, tokens)
    assert y.eq(0).all() and entropy.gt(0).all()
    assert torch.autograd.grad(y.sum(), x)[0].eq(0).all()


def test_one_class_is_certain():
    x, tokens = draw((3,), 1, ignored=0)
    y, entropy, lse = outputs(ops.TokenLogProb(entropy=True, logsumexp=True), x, tokens)
    assert y.eq(0).all() and entropy.eq(0).all() and torch.equal(lse, x[:, 0])
    (dx,) = torch.autograd.grad([y.sum(), entropy.sum()], x)
    assert dx.eq(0).all()


def test_impossible_tokens_have_no_share_of_the_entropy():
    x, tokens = draw((3,))
    x = x.detach()
    x[:, 3:], tokens[:] = -torch.inf, torch.tensor([0, 1, 5])
    x.requires_grad_()
    y, entropy = outputs(ops.TokenLogProb(entropy=True), x, tokens)
    few = x.detach()[:, :3]
    assert y[2] == -torch.inf
    expected = torch.distributions.Categorical(logits=few).entropy()
    torch.testing.assert_close(entropy, expected)
    (dx,) = torch.autograd.grad([y[:2].sum(), entropy.sum()], x)
    assert dx.isfinite().all() and dx[:, 3:].eq(0).all()


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("factor", [1.0, -3.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [-torch.inf, "the least finite number"])
def test_masked_classes_have_no_gradient_of_the_entropy(masked, dtype, factor, squares):
    """The product of 0 and a large finite number is finite, and with a factor it is not."""
    x, tokens = draw((6,), 1000, dtype=dtype)
    x = x.detach()
    x[..., ::3] = torch.finfo(dtype).min if isinstance(masked, str) else masked
    x.requires_grad_()
    _, entropy, *others = outputs(
        ops.TokenLogProb(entropy=True, log_sum_squares=squares), x, tokens
    )
    of_all = factor * entropy.sum() + sum(each.sum() for each in others)
    (dx,) = torch.autograd.grad(of_all, x)
    few = torch.arange(1000) % 3 > 0
    exact = x.detach()[..., few].double().requires_grad_()
    log_p = exact.log_softmax(-1)
    of_exact = factor * -(log_p.exp() * log_p).sum() + squares * (2 * log_p).logsumexp(-1).sum()
    (expected,) = torch.autograd.grad(of_exact, exact)
    assert dx[..., ~few].eq(0).all()
    scale = expected.abs().max().item() * torch.finfo(dtype).eps * 64
    torch.testing.assert_close(dx[..., few].double(), expected, rtol=0, atol=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_takes_the_logits_as_they_come(dtype):
    x, tokens = draw((4,), dtype=dtype)
    op = ops.TokenLogProb()
    with torch.autocast("cpu", torch.bfloat16):
        got = op(x, tokens)
    assert got.dtype is torch.float32 and torch.equal(got, op(x, tokens))
    assert torch.autograd.grad(got.sum(), x)[0].dtype is dtype


@pytest.mark.costly(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_it_matches_eager(name):
    options = OPTIONS[name]
    x, tokens = draw((2, 3), 8, torch.float32, options.get("ignore_index", -100))
    chain = opfuse.Sequential(ops.Linear(8, 11), ops.TokenLogProb(**options))
    results = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        found = function(x, tokens)
        found = list(found) if isinstance(found, tuple) else [found]
        total = sum(each.sum() for each in differentiable(found))
        results.append([*found, *torch.autograd.grad(total, [x, *chain.parameters()])])
    torch.testing.assert_close(*results)


def test_the_backward_uses_the_numbers_of_its_forward():
    x, tokens = draw((3,))
    op = ops.TokenLogProb(temperature=0.5, softcap=2.0)
    expected = torch.autograd.grad(op(x, tokens).sum(), x)
    y = op(x, tokens)
    op.temperature, op.softcap = 1.0, None
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)
    torch.testing.assert_close(op(x, tokens), formula(x, tokens)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "expected a finite temperature above 0, got 0.0"),
        ({"temperature": float("inf")}, ValueError, "expected a finite temperature above 0"),
        ({"temperature": None}, TypeError, "expected a real number as temperature"),
        ({"softcap": -1.0}, ValueError, "expected a finite softcap above 0, got -1.0"),
        ({"ignore_index": 1.5}, TypeError, "expected a whole number as ignore_index, got 1.5"),
        ({"entropy": 1}, TypeError, "expected a bool as entropy, got 1"),
        ({"top_k": -1}, ValueError, "expected top_k of at least 0, got -1"),
    ],
)
def test_numbers_that_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.TokenLogProb(**options)


def test_what_it_gives_cannot_change_later():
    op = ops.TokenLogProb(entropy=True)
    with pytest.raises(AttributeError):
        op.entropy = False
    assert op.num_extra_outputs == 1 and ops.TokenLogProb().num_extra_outputs == 0


def test_tokens_that_are_refused():
    x, tokens = draw((2, 3))
    with pytest.raises(TypeError, match="expected an integer tensor, got torch.float32"):
        ops.TokenLogProb()(x, tokens.float())
    with pytest.raises(
        ValueError, match=r"tokens of shape \(2, 3\) for logits of shape \(2, 3, 7\), got \(6,\)"
    ):
        ops.TokenLogProb()(x, tokens.flatten())
    with pytest.raises(ValueError, match="expected at least 8 classes, as top_k, got 7"):
        ops.TokenLogProb(top_k=8)(x, tokens)
    tokens[0, 0] = 7
    with pytest.raises(IndexError, match="out of bounds"):
        ops.TokenLogProb()(x, tokens)
