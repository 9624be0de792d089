"""Dropouts: what is drawn, and that every cut of a chain draws the same."""

import importlib.util
import itertools

import pytest
import torch
from opfuse_triton import norms as kernels
from opfuse_triton.norms import drop as philox
from opfuse_triton.norms import twins
from opfuse_triton.norms.drop import Drop
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import Environment, ops
from opfuse.testing import assert_close, interpreter, machine

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
runs = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETING),
    reason="no GPU, and Triton does not interpret",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
]

if INTERPRETING:
    interpreter.install()


def drop_of(p=0.3, seed=0x123456789ABCDEF):
    return Drop(torch.tensor([seed], device=DEVICE), p)


@pytest.fixture
def twins_run():
    """On a CPU PyTorch's operations take the place of the kernels, unless Triton interprets."""
    with opfuse.options(**{"norm.twins": True}), opfuse.plugins.using("norm"):
        yield


# What is drawn


def test_numbers_are_independent():
    """Their mean, and the correlations of neighbours, in a row and across rows and seeds."""
    shape, p = torch.Size((512, 1024)), 0.25
    first, other = (philox.factors(shape, drop_of(p, seed)).cpu() > 0 for seed in (7, 8))
    sigma = (p * (1 - p) / shape.numel()) ** 0.5
    assert abs(first.double().mean() - (1 - p)) < 4 * sigma
    assert abs(first.double().mean(0) - (1 - p)).max() < 5.5 * (p * (1 - p) / 512) ** 0.5
    x, y = (kept.double() - (1 - p) for kept in (first, other))
    pairs = [(x[:, n:], x[:, :-n]) for n in (1, 2, 3, 4, 128)]
    pairs += [(x[n:], x[:-n]) for n in (1, 2, 32)] + [(x, y)]
    for a, b in pairs:
        assert abs((a * b).mean() / (p * (1 - p))) < 5 / a.numel() ** 0.5


@runs
@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_the_kernel_draws_what_the_twin_draws(dtype):
    from opfuse_triton import TARGETS
    from opfuse_triton.norms import dropout, library

    for shape in ((1,), (2, 3, 130), (5, 2), (1, 5001), (9, 64)):
        x, extra = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
        for added in (None, extra, extra.float()):
            facts = {"features": shape[-1]}
            for config in (None, dropout.KERNEL.candidates(TARGETS[90], facts)[-1]):
                made = library.dropout(x, added, drop_of(), config)
                assert torch.equal(made, philox.dropout(x, added, drop_of()))
    x[0, :2] = torch.tensor([torch.inf, torch.nan])
    assert torch.equal(
        library.dropout(x, None, drop_of()).isnan(), philox.dropout(x, None, drop_of()).isnan()
    )
    assert library.dropout(x[:0], None, drop_of()).shape == (0, 64)


@runs
@pytest.mark.parametrize("kind", [kernels.RMS, kernels.LAYER])
@pytest.mark.parametrize("shape", [(3, 3), (5, 127), (1, 20001)], ids=str)
def test_the_norms_kernel_draws_the_same(shape, kind):
    from opfuse_triton.norms import library

    for dtype in kernels.DTYPES:
        x, extra = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
        weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
        given = x, extra, weight, None, 1e-5, kernels.Norm(kind, 1, False), None, True, True
        y, total, _, rstd = library.forward(*given, drop=drop_of())
        assert torch.equal(total, philox.dropout(x, extra, drop_of()))
        wide = total.double(), None, weight.double(), *given[3:]
        expected = twins.forward(*wide)
        assert_close(y, expected[0])
        assert_close(rstd, expected[3])


# The fusions


def chain(*of, width=24, p=0.4, norm=ops.RMSNorm, in_place=False):
    made = {
        "dropout": lambda: ops.Dropout(p),
        "add": lambda: ops.AddExtraInput(in_place=in_place),
        "fork": lambda: ops.MakeExtraOutput(),
        "norm": lambda: norm(width, device=DEVICE),
    }
    return opfuse.Sequential(*[made[name]() for name in of])


def run(model, x, *extras, seed=5):
    torch.manual_seed(seed)
    leaves = [t.clone().requires_grad_() for t in (x, *extras)]
    out = model(*leaves)
    given = out if isinstance(out, tuple) else (out,)
    torch.manual_seed(9)
    sum((y * torch.randn_like(y)).sum() for y in given).backward()
    return [*given, *[leaf.grad for leaf in leaves], *[p.grad for p in model.parameters()]]


NAMES = ("dropout", "add", "fork", "norm")


@pytest.mark.parametrize(
    "norm, dtype", [(ops.RMSNorm, torch.bfloat16), (ops.LayerNorm, torch.float32)], ids=str
)
def test_every_cut_draws_the_same(twins_run, dtype, norm):
    x, extra = (torch.randn(2, 7, 24, device=DEVICE).to(dtype) for _ in range(2))
    whole = chain(*NAMES, norm=norm)
    plan = " ".join(str(opfuse.explain(whole, x.requires_grad_(), extra)).split())
    assert plan.count("MakeExtraOutput + " + norm.__name__ + " fused by dropout+add+norm") == 2
    results = run(whole, x.detach(), extra)
    for parts in ((1, 4), (2, 4)):
        torch.manual_seed(5)
        before, after = chain(*NAMES[: parts[0]]), chain(*NAMES[parts[0] : parts[1]], norm=norm)
        leaves = [t.detach().clone().requires_grad_() for t in (x, extra)]
        inner = before(leaves[0], *([] if parts[0] == 1 else [leaves[1]]))
        given = after(inner, *([leaves[1]] if parts[0] == 1 else []))
        torch.manual_seed(9)
        sum((y * torch.randn_like(y)).sum() for y in given).backward()
        others = [*given, *[leaf.grad for leaf in leaves]]
        for one, other in zip(results, others, strict=False):
            assert_close(one, other.double())


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_a_norm_that_is_not_used_spoils_no_gradient(twins_run, norm):
    """Rows that are not finite would give NaN by a gradient of zeros."""
    x, extra = torch.randn(2, 5, 24, device=DEVICE), torch.randn(2, 5, 24, device=DEVICE)
    extra[0, 0, 0], extra[1, 1, 1] = torch.inf, torch.nan
    grads = []
    for fused in (True, False):
        model = chain(*NAMES, norm=norm) if fused else chain(*NAMES[:3])
        torch.manual_seed(5)
        leaves = [t.clone().requires_grad_() for t in (x, extra)]
        model(*leaves)[-1].backward(x)
        grads.append([leaf.grad for leaf in leaves])
        assert all(param.grad is None for param in model.parameters())
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other) and other.isfinite().all() and one.any()


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[:2], NAMES, ("dropout", "add", "norm")])
def test_gradients_match_fp64_of_the_same_mask(twins_run, names):
    x, extra = torch.randn(2, 5, 24, device=DEVICE), torch.randn(2, 5, 24, device=DEVICE)
    model = chain(*names)
    extras = [extra] if "add" in names else []
    got = run(model, x, *extras)
    torch.manual_seed(5)
    factors = philox.factors(x.shape, Drop(philox.draw_seed(x.device), 0.4)).double()
    leaves = [t.double().requires_grad_() for t in (x, *extras)]
    total = leaves[0] * factors
    total = total + leaves[1] if extras else total
    given = [total]
    if "norm" in names:
        y = torch.nn.functional.rms_norm(total, (24,), eps=1e-5)
        given = [y, total] if "fork" in names else [y]
    torch.manual_seed(9)
    sum((y * torch.randn_like(y, dtype=torch.float32)).sum() for y in given).backward()
    for one, other in zip(got, [*given, *[leaf.grad for leaf in leaves]], strict=False):
        assert_close(one, other.double())


def test_a_checkpoint_computes_the_same_and_a_seed_is_all_that_is_kept(twins_run):
    x, extra = torch.randn(6, 24, device=DEVICE), torch.randn(6, 24, device=DEVICE)
    model = chain(*NAMES[:2])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        plain = run(model, x, extra)
    assert [t.numel() for t in kept if t.dtype in (torch.int64, torch.bool)] == [1]
    again = _checkpointed(model, x, extra)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def _checkpointed(model, *given):
    class Checkpointed(torch.nn.Module):
        def forward(self, *given):
            return checkpoint(model, *given, use_reentrant=False, preserve_rng_state=True)

    return run(Checkpointed(), *given)


def test_frozen_inputs_no_grad_and_a_second_backward(twins_run):
    x, extra = torch.randn(6, 24, device=DEVICE), torch.randn(6, 24, device=DEVICE)
    model = chain(*NAMES[:2])
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            y = model(x, extra)
        leaf = extra.clone().requires_grad_()
        torch.manual_seed(seed)
        out = model(x, leaf)
        assert torch.equal(out, y)
        out.sum().backward()
        assert torch.equal(leaf.grad, torch.ones_like(leaf))
    given = x.clone().requires_grad_()
    out = model(given, leaf).sum()
    (one,) = torch.autograd.grad(out, given, retain_graph=True)
    (two,) = torch.autograd.grad(out, given)
    assert torch.equal(one, two) and 0 < (one == 0).sum() < one.numel()


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[:2], NAMES])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_probability_that_becomes_0_or_1(twins_run, names, p):
    x, extra = torch.randn(6, 24, device=DEVICE), torch.randn(6, 24, device=DEVICE)
    model = chain(*names)
    extras = [extra] if len(names) > 1 else []
    run(model, x, *extras)
    model[0].p = p
    model.zero_grad()
    got = run(model, x, *extras)
    with opfuse.plugins.using(""):
        model.zero_grad()
        expected = run(model, x, *extras)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_in_place_the_sum_goes_into_the_extra_input(twins_run):
    x, extra = torch.randn(6, 24, device=DEVICE), torch.randn(6, 24, device=DEVICE)
    for names in (NAMES[:2], NAMES):
        expected = run(chain(*names), x, extra)[0]
        model, into = chain(*names, in_place=True), extra.clone()
        torch.manual_seed(5)
        made = model(x, into)
        torch.testing.assert_close(made[0] if isinstance(made, tuple) else made, expected)
        assert not torch.equal(into, extra)


def test_what_they_refuse():
    from opfuse_norm import drops

    cpu = Environment(torch.device("cpu"), None, torch.float32)
    cuda = Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    (alone, add, norm), drop = drops.JOINT, ops.Dropout(0.1)
    given = drop, ops.AddExtraInput(), ops.RMSNorm(64, device="meta")
    if not INTERPRETING:
        assert "this is cpu" in alone.when(given[:1], cpu)
    if importlib.util.find_spec("triton"):
        for fusion, count in ((alone, 1), (add, 2), (norm, 3)):
            assert fusion.when(given[:count], cuda) is True
    assert "float64" in alone.when(given[:1], cuda._replace(dtype=torch.float64))
    assert "torch.compile" in alone.when(given[:1], cuda._replace(compiling=True))
    assert alone.when((ops.Dropout(0.0),), cuda) == "nothing is drawn"
    assert alone.when((ops.Dropout(0.1).eval(),), cuda) == "nothing is drawn"
    several = *given[:2], ops.RMSNorm((4, 8), device="meta")
    assert "along the last dimension" in norm.when(several, cuda)


LAYOUTS = {
    "contiguous": torch.randn,
    "rows swapped": lambda a, b, c: torch.randn(b, a, c).transpose(0, 1),
    "half": lambda a, b, c: torch.randn(a, b, 2 * c)[..., :c],
    "expanded": lambda a, b, c: torch.randn(1, b, c).expand(a, b, c),
}


@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, LAYOUTS)], ids=", ".join)
@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("names", ["drop add", "add norm", "drop add fork norm", "add fork norm"])
def test_results_have_the_strides_of_the_separate_ops(twins_run, names, input_first, layouts):
    of = {"drop": ops.Dropout(0.4), "add": ops.AddExtraInput(), "fork": ops.MakeExtraOutput()}
    of["norm"] = ops.RMSNorm(8)
    of["add"].input_first, of["norm"].dense = input_first, False
    model = opfuse.Sequential(*[of[name] for name in names.split()])
    given = [LAYOUTS[each](4, 3, 8).requires_grad_() for each in layouts]
    found = []
    for plugins in ("norm", ""):
        with opfuse.plugins.using(plugins):
            result = model(*given)
        found.append([y.stride() for y in (result if isinstance(result, tuple) else (result,))])
    assert found[0] == found[1]
