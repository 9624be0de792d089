"""A linear and its loss as one op: where it is used, what it computes when, what it keeps and holds."""

from __future__ import annotations

import weakref

import pytest
import torch
from opfuse_loss import chunks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse import ops
from opfuse.ops import _blocks
from opfuse.report.calls import saved_bytes
from opfuse.testing import recipes
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="PyTorch's operations are tested here")
ROWS, WIDTH, CLASSES = 32, 6, 40
WEIGHT = torch.linspace(0, 2, CLASSES)
CHUNK = 5
PRODUCTS = {"aten.mm.default", "aten.addmm_.default", "aten.addmm.default", "aten.linear.default"}


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setattr(chunks, "LEAST_ROWS", CHUNK)
    monkeypatch.setattr(chunks, "MOST_ROWS", CHUNK)
    monkeypatch.setattr(chunks, "LOGITS", 1)
    monkeypatch.setattr(_blocks, "LEAST", 0)
    monkeypatch.setattr(_blocks, "BLOCK", 2 * CLASSES)
    monkeypatch.setattr(chunks, "CLASSES", 16)
    with opfuse.plugins.using("loss"):
        yield


def head(*before, dtype=torch.float32, bias=False, classes=CLASSES, **options):
    torch.manual_seed(0)
    linear = ops.Linear(WIDTH, classes, bias=bias)
    return opfuse.Sequential(*before, linear, ops.CrossEntropy(**options)).to(dtype)


def batch(dtype=torch.float32, rows=(ROWS,), classes=CLASSES):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, rows, generator=generator)
    targets.view(-1)[1::7] = -100
    return x, targets


def fusions(chain, *inputs):
    """The fusions of the forward."""
    steps = opfuse.explain(chain, *inputs).to_dict()["forward"]
    return [step["fusion"] for step in steps if step["fusion"]]


def why(chain, *inputs):
    return " ".join(opfuse.explain(chain, *inputs).details.split())


def grads(chain, x, targets, weight=1.0):
    y = chain(x, targets)
    wanted = [t for t in (x, *chain.parameters()) if t.requires_grad]
    return torch.autograd.grad(y, wanted, torch.full_like(y, weight))


def truth(chain, x, targets, weight=1.0):
    """The gradients of the separate ops in fp64."""
    with opfuse.plugins.using(""):
        wide = chain.double()
        found = grads(wide, x.detach().double().requires_grad_(x.requires_grad), targets, weight)
    return found


class Watch(TorchDispatchMode):
    """The largest tensor made, how many products were run, and the most memory held at once."""

    keeps_no_tensors = True

    def __init__(self):
        super().__init__()
        self.largest = self.products = self.held = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}  # fmt: skip
        result = func(*args, **(kwargs or {}))
        self.products += str(func) in PRODUCTS or "_linear_pointwise" in str(func)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, tensor.numel())
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size):
        self.held -= size


# Where it is used


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_used_in_training_for_a_mean_and_a_sum(reduction, bias):
    chain = head(bias=bias, reduction=reduction)
    assert fusions(chain, *batch()) == ["linear+loss"]
    with torch.no_grad():
        assert fusions(chain, *batch()) == ["linear+loss"]


def test_a_loss_per_row_is_computed_again_where_that_is_wanted():
    chain = head(reduction="none")
    assert "linear+loss" not in str(fusions(chain, *batch()))
    assert "is known in the backward only" in why(chain, *batch())
    with opfuse.options(prefer="memory"):
        assert fusions(chain, *batch()) == ["linear+loss, computed again"]
    with torch.no_grad():
        assert fusions(chain, *batch()) == ["linear+loss"]


def test_outside_of_training_no_gradient_is_computed_before_it_is_asked_for():
    chain = head().eval()
    assert "outside of training no gradient is computed" in why(chain, *batch())
    with opfuse.options(prefer="memory"):
        assert fusions(chain, *batch()) == ["linear+loss, computed again"]
    with torch.no_grad():
        assert fusions(chain, *batch()) == ["linear+loss"]


def test_few_rows_are_fused_only_if_the_weight_is_frozen():
    chain, few = head(), batch(rows=(WIDTH,))
    assert f"for at most {WIDTH} rows the gradient of the weight" in why(chain, *few)
    half = head(dtype=torch.bfloat16)
    assert f"for at most {2 * WIDTH} rows" in why(half, *batch(torch.bfloat16, (8,)))
    chain[0].weight.requires_grad_(False)
    assert fusions(chain, *few) == ["linear+loss"]


def test_where_it_is_not_used_and_why():
    chain, (x, targets) = head(), batch()
    with recipes.offered(), opfuse.plugins.using(f"loss,{recipes.NAME}"):
        with opfuse.autocast(recipes.PerTensor()):
            assert "cast by _PerTensor, and this fusion does not cast" in why(chain, x, targets)
        with opfuse.autocast(recipes.PerTensor(backward_override="high_precision")):
            assert fusions(chain, x, targets) == []
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, targets), chain(x, targets))
    for got, expected in zip(grads(compiled, x, targets), grads(chain, x, targets), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_are_factors_of_rows_but_for_what_smoothing_spreads(reduction, prefer):
    """Whatever is set after the plan was made, the numbers are those of torch."""
    chain, (x, targets) = head(weight=WEIGHT, reduction=reduction), batch()
    fused = reduction == "mean" or prefer == "memory"
    changes = ((0.0, WEIGHT), (0.2, WEIGHT), (0.2, None), (0.2, WEIGHT), (0.0, WEIGHT))
    for smoothing, weight in changes:
        chain[1].label_smoothing, chain[1].weight = smoothing, weight
        both = smoothing and weight is not None
        with opfuse.options(prefer=prefer):
            assert bool(fusions(chain, x, targets)) is bool(fused and not both)
            if both:
                assert "what label smoothing spreads has class weights" in why(chain, x, targets)
            y = chain(x, targets)
        logits = torch.nn.functional.linear(x, chain[0].weight)
        expected = torch.nn.functional.cross_entropy(logits, targets, weight, label_smoothing=smoothing, reduction=reduction)  # fmt: skip
        torch.testing.assert_close(y, expected)
        leaves, dy = (x, *chain.parameters()), torch.linspace(0.5, 1.5, y.numel()).view(y.shape)
        for got, want in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):  # fmt: skip
            torch.testing.assert_close(got, want)


# When gradients are computed


def products(chain, x, targets, backward=True):
    """How many products the forward runs, and the backward."""
    with Watch() as first:
        y = chain(x, targets)
    with Watch() as second:
        if backward:
            y.sum().backward()
    return first.products, second.products


def test_gradients_are_computed_in_the_forward_only_in_training_with_grad():
    x, targets = batch()
    count = -(-ROWS // CHUNK)
    assert products(head(), x, targets) == (3 * count, 0)
    with torch.no_grad():
        assert products(head(), x, targets, backward=False) == (count, 0)
    assert products(head(), x.detach(), targets) == (2 * count, 0)
    with opfuse.options(prefer="memory"):
        assert products(head(reduction="none"), x, targets) == (count, 3 * count)
        assert products(head().eval(), x, targets) == (count, 3 * count)


def test_a_frozen_head_has_no_gradient_of_its_weight():
    chain, (x, targets) = head(bias=True), batch()
    chain[0].weight.requires_grad_(False)
    assert products(chain, x, targets)[0] == 2 * -(-ROWS // CHUNK)
    assert chain[0].weight.grad is None and chain[0].bias.grad is not None
    chain[0].bias.requires_grad_(False)
    kept = saved_bytes(lambda: chain(x, targets), [*chain.parameters()])
    assert kept == x.nbytes + 4  # the gradient of the input, and a number to scale it by
    for got, expected in zip(grads(chain, x, targets), truth(chain, x, targets), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


# What is held, and what is kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_never_are_all_logits_there(reduction, dtype):
    x, targets = batch(dtype)
    chain = head(bias=True, dtype=dtype, reduction=reduction)
    with opfuse.options(prefer="memory"), Watch() as watch:
        chain(x, targets).sum().backward()
    assert watch.largest == max(CHUNK * CLASSES, WIDTH * CLASSES)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_peak_is_far_below_that_of_the_separate_ops(reduction):
    x, targets = batch(rows=(256,), classes=400)
    chain = head(classes=400, reduction=reduction)
    peaks = []
    for plugins in ("loss", ""):
        chain.zero_grad()
        with opfuse.plugins.using(plugins), opfuse.options(prefer="memory"), Watch() as watch:
            chain(x, targets).sum().backward()
        peaks.append(watch.peak - chain[0].weight.nbytes)
    assert peaks[0] < 0.1 * peaks[1]


def test_the_fused_loss_keeps_no_logits():
    x, targets = batch()
    chain = head(bias=True)
    params = sum(param.nbytes for param in chain.parameters())
    kept = saved_bytes(lambda: chain(x, targets), [*chain.parameters(), x, targets])
    assert kept == params + x.nbytes + 4
    chain = head(bias=True, reduction="none")
    with opfuse.options(prefer="memory"):
        kept = saved_bytes(lambda: chain(x, targets), [*chain.parameters(), x, targets])
    assert kept == 0


# The numbers


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 3, "label_smoothing": 0.2, "z_loss": 0.05, "softcap": 2.0},
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "reduction": "none"},
        {"weight": WEIGHT},
        {"weight": WEIGHT, "reduction": "sum", "z_loss": 0.05, "softcap": 5.0, "ignore_index": 3},
        {"weight": WEIGHT, "reduction": "none"},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)  # fmt: skip
def test_gradients_match_fp64(dtype, options, prefer):
    x, targets = batch(dtype, (4, 8))
    targets[2, 3] = options.get("ignore_index", -100)
    targets[targets == -100] = options.get("ignore_index", -100)
    chain = head(bias=True, dtype=dtype, **options)
    with opfuse.options(prefer=prefer):
        got = grads(chain, x, targets, 0.75)
    assert all(grad.dtype is dtype for grad in got) and got[0].shape == x.shape
    rtol, atol = opfuse.testing.tolerance(dtype, gemm=True)
    for grad, expected in zip(got, truth(chain, x, targets, 0.75), strict=True):
        worst = (grad.double() - expected).abs().max() / expected.abs().max()
        assert worst <= 2 * rtol + atol


def test_fp16_with_a_scaled_loss_does_not_underflow():
    """A class in thousands has a gradient that fp16 rounds to zero, unless it is scaled first."""
    classes, scale = 4096, 2.0**15  # as the loss in fp16 takes
    x, targets = batch(torch.float16, (64,), classes)
    chain = head(dtype=torch.float16, classes=classes)
    with torch.no_grad():
        chain[0].weight.mul_(0.01)
    got = [grad.double() / scale for grad in grads(chain, x, targets, scale)]
    expected = truth(chain, x, targets)
    for grad, wanted in zip(got, expected, strict=True):
        assert (grad == 0).sum() <= (wanted.abs() < 1e-9).sum()
        rows = (grad - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)
        assert rows.max() < 2e-2


@pytest.mark.parametrize("options", [{"weight": 150 * WEIGHT}, {"z_loss": 1.0}], ids=["weight", "z_loss"])  # fmt: skip
def test_fp16_with_large_factors_of_rows_does_not_overflow(options):
    """A gradient that is scaled, so that it does not underflow, is also multiplied by these."""
    x, targets = batch(torch.float16)
    chain = head(dtype=torch.float16, **options)
    assert fusions(chain, x, targets) == ["linear+loss"]
    with torch.no_grad():
        chain[0].weight.mul_(20)  # so that a logsumexp is more than 32
    for grad, wanted in zip(grads(chain, x, targets), truth(chain, x, targets), strict=True):
        assert (grad.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_two_backwards_give_the_same_and_overwrite_nothing():
    x, targets = batch()
    chain = head(bias=True)
    y, kept = None, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = chain(x, targets)
    before = [tensor.clone() for tensor in kept]
    leaves = [x, *chain.parameters()]
    first = torch.autograd.grad(y, leaves, torch.tensor(2.0), retain_graph=True)
    second = torch.autograd.grad(y, leaves, torch.tensor(4.0))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, other)
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_gradient_of_the_weight_stays_in_fp32(dtype, prefer):
    x, targets = batch()
    chain = head(bias=True)
    results = []
    for plugins in ("loss", ""):
        with opfuse.plugins.using(plugins), opfuse.options(prefer=prefer):
            with torch.autocast("cpu", dtype):
                y = chain(x, targets)
            results.append([y, *torch.autograd.grad(y, [x, *chain.parameters()])])
    for got, expected in zip(*results, strict=True):
        assert got.dtype is expected.dtype is torch.float32
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def test_ignoring_all_rows_gives_nan_and_zero_gradients():
    x, targets = batch()
    targets[:] = -100
    y = head()(x, targets)
    assert y.isnan()
    assert torch.autograd.grad(y, x)[0].eq(0).all()


def test_the_fused_loss_works_between_other_ops():
    x, targets = batch(rows=(4, 8))
    chain = head(ops.RMSNorm(WIDTH))
    chain.append(ops.ConstantScale(0.5))
    assert fusions(chain, x, targets) == ["linear+loss"]
    logits = F.linear(F.rms_norm(x, (WIDTH,), chain[0].weight, 1e-5), chain[1].weight)
    expected = 0.5 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(chain(x, targets), expected)
    leaves = [x, *chain.parameters()]
    wanted = torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(torch.autograd.grad(chain(x, targets), leaves), wanted)


def test_targets_that_are_refused():
    x, targets = batch()
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        head()(x, targets.clamp(min=CLASSES))
    with pytest.raises(ValueError, match=r"expected targets of shape \(32,\) for logits of shape \(32, 40\)"):  # fmt: skip
        head()(x, targets[:-1])


def test_the_number_of_rows_of_a_chunk(monkeypatch):
    monkeypatch.undo()
    assert chunks.rows_of_chunk(128 * 1024, 64) == chunks.LEAST_ROWS
    assert chunks.rows_of_chunk(128 * 1024, 256) == 256
    assert chunks.rows_of_chunk(128 * 1024, 4096) == chunks.MOST_ROWS
    assert chunks.rows_of_chunk(1024, 256) * 1024 == chunks.LOGITS
    assert chunks.rows_of_chunk(0, 8) > 0
