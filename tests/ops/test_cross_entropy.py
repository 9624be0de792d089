"""CrossEntropy against torch and plain formulas in fp64: every option, dtype and shape, and what is refused."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops import _blocks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = [(), (1,), (3,), (127,), (2, 3), (2, 3, 2), (0,), (0, 3)]
CLASSES = 7
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 0.25, 1.5], dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignores a class": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed, ignores a class": {"label_smoothing": 0.2, "ignore_index": 2, "reduction": "sum"},
    "all smoothed": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.1},
    "capped": {"softcap": 1.5},
    "all": {
        "ignore_index": 2, "label_smoothing": 0.3, "z_loss": 0.05, "softcap": 2.0, "reduction": "none",
    },
    "weighted": {"weight": WEIGHT},
    "weighted, sum": {"weight": WEIGHT, "reduction": "sum", "ignore_index": 2},
    "weighted, none": {"weight": WEIGHT, "reduction": "none"},
    "weighted and smoothed": {"weight": WEIGHT, "label_smoothing": 0.2},
    "weighted and smoothed, none": {"weight": WEIGHT, "label_smoothing": 0.2, "reduction": "none"},
    "weighted z-loss, capped": {"weight": WEIGHT, "z_loss": 0.1, "softcap": 1.5},
    "weighted, all": {
        "weight": WEIGHT, "ignore_index": 2, "label_smoothing": 0.3, "z_loss": 0.05, "softcap": 2.0,
        "reduction": "sum",
    },
}  # fmt: skip


def formula(logits, targets, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean", weight=None):  # fmt: skip
    """Written out, differentiated by autograd."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse = torch.log(torch.exp(z).sum(-1))
    counted = targets != ignore_index
    wanted = F.one_hot(torch.where(counted, targets, 0), z.shape[-1]).to(z.dtype)
    of_row = (wanted * (1 if weight is None else weight)).sum(-1) * counted
    wanted = wanted * (1 - label_smoothing) + label_smoothing / z.shape[-1]
    wanted = wanted if weight is None else wanted * weight
    losses = (wanted * (lse.unsqueeze(-1) - z)).sum(-1) * counted + z_loss * lse**2 * of_row
    total = losses.sum()
    return {"none": losses, "sum": total, "mean": total / of_row.sum()}[reduction]


def draw(rows, classes=CLASSES, dtype=torch.float64, ignored=-100):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, classes, generator=generator, dtype=torch.float64) * 2
    targets = torch.randint(0, classes, rows, generator=generator)
    if targets.numel() > 1:
        targets.view(-1)[1] = ignored
    return x.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    for rows in ROWS:
        compare_with_formula(name, dtype, rows)


def compare_with_formula(name, dtype, rows):
    options = OPTIONS[name]
    x, targets = draw(rows, dtype=dtype, ignored=options.get("ignore_index", -100))
    op = ops.CrossEntropy(**options).set_extra_input_name(0, "targets")

    def run(x, params, targets):
        return formula(x, targets.long(), **options)

    if not targets.numel() and options.get("reduction", "mean") == "mean":
        y = op(x, targets)
        assert y.isnan() and torch.autograd.grad(y, x)[0].shape == x.shape
        return
    inputs = [x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()]
    results = [op(inputs[0], targets), run(inputs[1], {}, targets)]
    assert results[0].dtype is dtype and results[0].shape == results[1].shape
    weight = torch.randn_like(results[1]).to(dtype)
    grads = [torch.autograd.grad(y, t, weight.to(y.dtype))[0] for y, t in zip(results, inputs, strict=True)]  # fmt: skip
    assert grads[0].dtype is dtype
    tolerances = opfuse.testing.tolerance(dtype)
    for got, expected in (results, grads):
        torch.testing.assert_close(
            got.double(), expected, rtol=tolerances[0], atol=tolerances[1] * 10
        )


@pytest.mark.parametrize("name", [name for name, of in OPTIONS.items() if not {"z_loss", "softcap"} & {*of}])  # fmt: skip
def test_options_mean_what_they_mean_in_torch(name):
    options = OPTIONS[name]
    x, targets = draw((5,), ignored=options.get("ignore_index", -100))
    got, expected = ops.CrossEntropy(**options)(x, targets), F.cross_entropy(x, targets, **options)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, x, weight), torch.autograd.grad(expected, x, weight)
    )


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_of_no_rows_is_nan_and_its_gradient_zero_as_in_torch(smoothing, weight):
    x, targets = draw((4,))
    targets[:] = -100
    for made in (ops.CrossEntropy, nn.CrossEntropyLoss):
        loss = made(label_smoothing=smoothing, weight=weight)
        y = loss(x, targets)
        assert y.isnan()
        assert torch.autograd.grad(y, x)[0].eq(0).all()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_computing_some_rows_at_a_time_gives_the_same(monkeypatch, name, dtype):
    """As many classes are computed on a CPU: some rows at a time."""
    options = OPTIONS[name]
    x, targets = draw((2, 4), dtype=dtype, ignored=options.get("ignore_index", -100))
    op = ops.CrossEntropy(**options)
    results = []
    for block in (None, 3 * CLASSES):
        if block is not None:
            monkeypatch.setattr(_blocks, "LEAST", 0)
            monkeypatch.setattr(_blocks, "BLOCK", block)
        y = op(x, targets)
        results.append([y, *torch.autograd.grad(y, x, torch.ones_like(y))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_derivatives(name):
    options = OPTIONS[name]
    x, targets = draw((3,), ignored=options.get("ignore_index", -100))
    chain = opfuse.Sequential(ops.CrossEntropy(**options))
    assert torch.autograd.gradcheck(lambda x: chain(x, targets), x)

    def second(y):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with opfuse.options(double_backward=True):
        got = second(chain(x, targets))
    torch.testing.assert_close(got, second(formula(x, targets, **options)))


@pytest.mark.parametrize("name", OPTIONS)
def test_two_backwards_and_no_grad(name):
    x, targets = draw((3,), ignored=OPTIONS[name].get("ignore_index", -100))
    op = ops.CrossEntropy(**OPTIONS[name])
    y = op(x, targets)
    weight = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, x, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(op(x, targets), y) and not op(x, targets).requires_grad
    detached = op(x.detach(), targets)
    assert torch.equal(detached, y) and not detached.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_fp32_from_the_logits_as_they_come(dtype):
    x, targets = draw((4,), dtype=dtype)
    op = ops.CrossEntropy()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = op(x, targets), F.cross_entropy(x, targets)
    assert got.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(y, x)[0] for y in (got, expected)]
    assert grads[0].dtype is dtype
    torch.testing.assert_close(*grads)


@pytest.mark.costly(4)
@pytest.mark.parametrize(  # autocast changes nothing in the loss, whatever its options
    ("name", "autocast"),
    [*((name, number % 2 == 0) for number, name in enumerate(OPTIONS)), ("all", True)],
)
def test_a_compiled_loss_matches_eager(name, autocast):
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = torch.linspace(0, 2, 11)
    x, targets = draw((2, 3), 8, torch.float32, options.get("ignore_index", -100))
    chain = opfuse.Sequential(ops.Linear(8, 11), ops.CrossEntropy(**options))
    results = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(x, targets)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *chain.parameters()])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_integers_of_every_kind(dtype):
    x, targets = draw((3,))
    targets[1] = 0
    assert torch.equal(ops.CrossEntropy()(x, targets.to(dtype)), ops.CrossEntropy()(x, targets))


def test_an_unsigned_class_is_not_the_one_that_is_ignored():
    x, targets = torch.randn(3, 200, requires_grad=True), torch.tensor([156, 3, 199])
    pairs = []  # as unsigned bytes, 156 is -100
    for given in (targets, targets.to(torch.uint8)):
        loss = ops.CrossEntropy()(x, given)
        pairs.append([loss, *torch.autograd.grad(loss, x)])
    torch.testing.assert_close(*pairs, rtol=0, atol=0)
    assert pairs[0][1].any(-1).all()


def test_a_chain_ends_in_it_and_goes_on_behind_it():
    x, targets = draw((2, 3), 8, torch.float32)
    chain = opfuse.Sequential(ops.RMSNorm(8), ops.Linear(8, 5), ops.CrossEntropy(), ops.ConstantScale(0.5))  # fmt: skip
    targets = targets.clamp(max=4)
    y = chain(x, targets)
    norm, linear = chain[0], chain[1]
    logits = F.linear(F.rms_norm(x, (8,), norm.weight, 1e-5), linear.weight, linear.bias)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * 0.5
    torch.testing.assert_close(y, expected)
    leaves = [x, *chain.parameters()]
    torch.testing.assert_close(torch.autograd.grad(y, leaves), torch.autograd.grad(expected, leaves))  # fmt: skip
    assert "CrossEntropy" in str(opfuse.explain(chain, x, targets))


def test_infinite_logits_are_as_in_torch():
    x, targets = draw((4,))
    x = x.detach()
    x[0, (targets[0] + 1) % CLASSES], x[2, targets[2]] = -torch.inf, -torch.inf
    targets[1] = 3
    losses = ops.CrossEntropy(reduction="none")(x.requires_grad_(), targets)
    assert losses[2].isinf()
    torch.testing.assert_close(losses, F.cross_entropy(x, targets, reduction="none"))
    (got,) = torch.autograd.grad(losses[:2].sum(), x)
    assert got[:2].isfinite().all()


def test_the_backward_uses_the_numbers_of_its_forward():
    x, targets = draw((3,))
    op = ops.CrossEntropy(z_loss=0.1, softcap=2.0)
    expected = torch.autograd.grad(op(x, targets), x)
    y = op(x, targets)
    op.z_loss, op.softcap, op.reduction = 0.0, None, "sum"
    torch.testing.assert_close(torch.autograd.grad(y, x), expected)
    torch.testing.assert_close(op(x, targets), F.cross_entropy(x, targets, reduction="sum"))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_are_a_buffer(smoothing):
    """As in torch: it is saved, moved and set, and one that is set is used at once."""
    x, targets = draw((5,))
    loss, theirs = ops.CrossEntropy(label_smoothing=smoothing), nn.CrossEntropyLoss(label_smoothing=smoothing)  # fmt: skip
    chain = opfuse.Sequential(ops.ConstantScale(1.0), loss)
    torch.testing.assert_close(chain(x, targets), theirs(x, targets))
    assert not chain.state_dict()
    for weight in (WEIGHT, WEIGHT * 2 + 1, None, WEIGHT):
        loss.weight = theirs.weight = weight
        y, expected = chain(x, targets), theirs(x, targets)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y, x), torch.autograd.grad(expected, x))
    assert chain.state_dict().keys() == {"1.weight"}
    fresh = ops.CrossEntropy(weight=torch.ones(CLASSES))
    fresh.load_state_dict(loss.state_dict())
    assert torch.equal(fresh.weight, WEIGHT.float())
    listed = ops.CrossEntropy(weight=WEIGHT.tolist(), label_smoothing=smoothing).double()
    torch.testing.assert_close(listed(x, targets), loss(x, targets))
    y, expected = loss(x, targets), torch.autograd.grad(loss(x, targets), x)
    loss.weight = None
    torch.testing.assert_close(torch.autograd.grad(y, x), expected)


@pytest.mark.parametrize("wrong", [torch.ones(CLASSES - 1), torch.ones(CLASSES + 1), torch.ones(1, CLASSES)])  # fmt: skip
def test_class_weights_of_another_shape(wrong):
    x, targets = draw((3,))
    with pytest.raises(ValueError, match=re.escape(f"expected weight of shape (7,), got {tuple(wrong.shape)}")):  # fmt: skip
        ops.CrossEntropy(weight=wrong)(x, targets)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ignore_index": 1.5}, TypeError, "expected a whole number as ignore_index, got 1.5"),
        ({"reduction": "max"}, ValueError, "expected 'mean', 'sum' or 'none' as reduction"),
        ({"label_smoothing": 1.1}, ValueError, "expected label_smoothing between 0 and 1, got 1.1"),
        ({"label_smoothing": "x"}, TypeError, "expected a real number as label_smoothing"),
        ({"z_loss": -1}, ValueError, "expected z_loss of at least 0, got -1.0"),
        ({"softcap": 0}, ValueError, "expected a softcap above 0, or None, got 0.0"),
        ({"softcap": torch.ones(())}, TypeError, "a Tensor, whose gradient would be lost"),
    ],
)
def test_numbers_that_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.CrossEntropy(**options)
    op, (name, value) = ops.CrossEntropy(), *options.items()
    before = op.numbers_of()
    with pytest.raises(error, match=re.escape(message)):
        setattr(op, name, value)
    assert op.numbers_of() == before


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_that_are_refused(reduction):
    x, targets = draw((2, 3))
    op = ops.CrossEntropy(reduction=reduction)
    with pytest.raises(TypeError, match="expected an integer tensor, got torch.float32"):
        op(x, targets.float())
    with pytest.raises(ValueError, match=r"targets of shape \(2, 3\) for logits of shape \(2, 3, 7\), got \(6,\)"):  # fmt: skip
        op(x, targets.flatten())
    for wrong in (CLASSES, -1):
        targets[0, 2] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            op(x, targets)
