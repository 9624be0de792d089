"""The kernels of log-probabilities: against fp64, with every output, compiled, and their bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from opfuse_loss import chunks

import opfuse
from opfuse import ops
from opfuse.ops.token_log_prob import TokenNumbers, row_logit_gradients
from opfuse.report.calls import saved_bytes
from opfuse.testing import assert_close, interpreter
from opfuse.tuning.tolerance import difference

pytest.importorskip("triton", reason="Triton is not installed")

import compiled
from opfuse_loss import cases, log_prob, token_log_prob
from opfuse_loss.kernels import token_statistics
from opfuse_triton import TARGETS, Config, current_target, is_interpreting
from opfuse_triton.checking import check_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = {"entropy": True, "logsumexp": True, "log_sum_squares": True}
OPTIONS = (
    {},
    {"ignore_index": 2, "temperature": 0.5, "entropy": True},
    {"softcap": 2.0, "logsumexp": True},
    {"log_sum_squares": True},
    {**ALL, "ignore_index": 0, "temperature": 1.7, "softcap": 5.0},
)
CASES = [case for case in cases.CASES if case.name.startswith(("statistics", "log-prob"))]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreting(), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="a process that interprets cannot compile")

if is_interpreting():
    interpreter.install()


def batch(dtype, shape, ignored=-100, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)
    tokens = torch.randint(0, shape[-1], shape[:-1], generator=generator).to(DEVICE)
    tokens.view(-1)[1::3] = ignored
    return logits.requires_grad_(), tokens


def both(chain, logits, tokens):
    """Outputs and gradient, by the fusion and in fp64 without it."""
    found = []
    for plugins, given in (("loss", logits), ("", logits.detach().double().requires_grad_())):
        with opfuse.plugins.using(plugins):
            y = chain(given, tokens)
        y = y if isinstance(y, tuple) else (y,)
        steps = [torch.linspace(-0.5, 1.5, t.numel(), device=DEVICE).to(t.dtype) for t in y]
        grads = [step.view(t.shape) for step, t in zip(steps, y, strict=True)]
        found.append((*[t.detach() for t in y], *torch.autograd.grad(y, given, grads)))
    return found


@runs
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_match_fp64(dtype, options):
    chain = opfuse.Sequential(ops.TokenLogProb(**options))
    for shape in ((3,), (1, 1), (3, 129), (2, 2, 5000)):
        logits, tokens = batch(dtype, shape, options.get("ignore_index", -100))
        with opfuse.plugins.using("loss"):
            assert "log-probabilities" in str(opfuse.explain(chain, logits, tokens))
        (*outputs, grad), (*exact, wanted) = both(chain, logits, tokens)
        assert all(y.dtype is torch.float32 and y.shape == shape[:-1] for y in outputs)
        assert grad.dtype is dtype and grad.shape == shape
        for y, expected in zip(outputs, exact, strict=True):
            assert_close(y, expected)
        assert_close(grad, wanted)


@runs
def test_the_gradient_of_any_outputs():
    numbers = TokenNumbers(0.8, 4.0, **ALL)
    logits, tokens = batch(torch.float32, (5, 300))
    exact = logits.detach().double()
    _, kept = token_statistics.row_statistics(logits.detach(), tokens, numbers, keep=True)
    for given in itertools.product((False, True), repeat=4):
        grads = [torch.linspace(-1, 1, 5, device=DEVICE) if each else None for each in given]
        overwritten = logits.detach().clone()
        for out in (None, overwritten):
            got = token_statistics.row_gradients(overwritten, tokens, grads, kept, numbers, out)
            wide = [None if grad is None else grad.double() for grad in grads]
            assert_close(got, row_logit_gradients(exact, tokens, wide, numbers))
        assert got is overwritten


@runs
def test_logits_of_any_strides_and_none():
    chain = opfuse.Sequential(ops.TokenLogProb(**ALL))
    whole, tokens = batch(torch.float32, (6, 40))
    whole = whole.detach()
    for logits in (whole[:, 3:], whole[::2], whole.t()[:6], whole[:, ::2], whole[:1].expand(4, 40)):
        given = tokens[: len(logits)].clamp(max=logits.shape[1] - 1)
        before = whole.clone()
        for got, wanted in zip(*both(chain, logits.detach().requires_grad_(), given), strict=True):
            assert_close(got, wanted)
        assert torch.equal(whole, before)
    for shape in ((0, 7), (2, 0)):
        empty = torch.empty(shape, device=DEVICE, requires_grad=True)
        for got, wanted in zip(*both(chain, empty, tokens.new_full(shape[:1], -100)), strict=True):
            assert got.shape == wanted.shape
            torch.testing.assert_close(got.double(), wanted.double())


@runs
def test_what_is_not_finite_is_as_the_op_gives_it():
    logits, tokens = batch(torch.float32, (7, 9000), scale=0.0)
    tokens[:] = 7
    with torch.no_grad():
        logits[0, :8000] = -torch.inf  # all of the first block
        logits[1, 8500], logits[2, 5], logits[3, 8999] = torch.inf, torch.nan, torch.nan
        logits[4] = -torch.inf
        logits[5], logits[5, 8998] = -300.0, 300.0
        tokens[0], tokens[3] = 8500, -100
    for options in ({}, ALL):
        chain = opfuse.Sequential(ops.TokenLogProb(**options))
        for got, wanted in zip(*both(chain, logits, tokens), strict=True):
            torch.testing.assert_close(got.double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@runs
def test_every_configuration_gives_the_same():
    logits, tokens = batch(torch.bfloat16, (3, 5000))
    numbers = TokenNumbers(softcap=5.0, **ALL)
    kernel = token_statistics.STATISTICS
    found = kernel.candidates(current_target(torch.device(DEVICE)), {"classes": 5000})
    results, given = [], logits.detach()
    for config in map(lambda each: Config(**each), found):
        values, kept = token_statistics.row_statistics(given, tokens, numbers, True, config)
        ones = [torch.ones_like(value) for value in values]
        grad = token_statistics.row_gradients(given, tokens, ones, kept, numbers, config=config)
        results.append((*values, grad))
    assert len(results) > 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@runs
def test_it_keeps_few_numbers_a_row_overwrites_nothing_and_runs_twice():
    logits, tokens = batch(torch.float32, (6, 300))
    before = logits.detach().clone()
    for options, kept in (({}, 2), ({"logsumexp": True}, 2), ({"entropy": True}, 3), (ALL, 4)):
        chain = opfuse.Sequential(ops.TokenLogProb(**options))
        with opfuse.plugins.using("loss"):
            bytes_ = saved_bytes(lambda chain=chain: chain(logits, tokens), [logits, tokens])
            assert bytes_ == kept * 4 * 6
            found = chain(logits, tokens)
            y = found[0] if options else found
            first = torch.autograd.grad(y.sum(), logits, retain_graph=True)
            second = torch.autograd.grad(2 * y.sum(), logits)
            torch.testing.assert_close(2 * first[0], second[0])
            with torch.no_grad():
                assert saved_bytes(lambda chain=chain: chain(logits, tokens)) == 0
            with pytest.raises(IndexError if DEVICE == "cpu" else RuntimeError, match="out of bou"):
                chain(logits, tokens.clamp(min=300))[0].sum().item()
    assert torch.equal(logits, before)


@pytest.mark.costly(4)
@runs
@pytest.mark.parametrize("options", [{}, {**ALL, "softcap": 3.0, "temperature": 0.8}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_with_the_linear_by_chunks(monkeypatch, frozen, dtype, options):
    seen = []
    for kernel in (token_statistics.STATISTICS, token_statistics.GRADIENT):
        launch = kernel.launch
        monkeypatch.setattr(kernel, "launch", lambda *a, of=launch, **k: seen.append(1) or of(*a, **k))  # fmt: skip
    monkeypatch.setattr(chunks, "LOGITS", 1)
    monkeypatch.setattr(chunks, "LEAST_ROWS", 64)
    chain = opfuse.Sequential(ops.Linear(4, 60), ops.TokenLogProb(**options)).to(DEVICE, dtype)
    chain.requires_grad_(not frozen)
    x = torch.randn(130, 4, device=DEVICE, dtype=dtype, requires_grad=True)
    tokens = torch.randint(0, 60, (130,), device=DEVICE)
    tokens[:3] = -100
    wide = opfuse.Sequential(ops.Linear(4, 60), ops.TokenLogProb(**options)).to(DEVICE).double()
    wide.load_state_dict(chain.state_dict())
    results = []
    for plugins, model, given in (
        ("loss", chain, x),
        ("", wide.requires_grad_(not frozen), x.detach().double().requires_grad_()),
        ("", chain, x),
    ):
        with opfuse.plugins.using(plugins), opfuse.options(prefer="memory"):
            y = model(given, tokens)
        y = y if isinstance(y, tuple) else (y,)
        leaves = [given, *[param for param in model.parameters() if not frozen]]
        steps = [torch.linspace(-1, 1, 130, device=DEVICE, dtype=t.dtype) for t in y]
        results.append([*y, *torch.autograd.grad(y, leaves, steps)])
    assert len(seen) == 2 * (1 if DEVICE == "cuda" else 3)  # for each chunk
    for got, expected, separate in zip(*results, strict=True):
        assert not difference(got, expected, rounded=separate, dtype=dtype, gemm=True)


@pytest.mark.costly(1)
@compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_the_kernels_compile_for_the_architecture(arch):
    if arch != next(iter(TARGETS)):
        compiled.skip_if_reported("loss")
    places = [cases.CASES.index(case) for case in CASES if case.name.endswith("all outputs")]
    rows = [row for n in places for row in check_case("loss", "opfuse_loss.cases:CASES", n, arch)]
    assert {row.kernel for row in rows} == {"statistics_kernel", "log_prob_gradient_kernel"}
    assert not [sentence for row in rows for sentence in row.refusals]


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_read_once_a_kernel_and_their_gradient_written_once(case):
    from ledger import counting

    for shape in case.small:
        given = case.inputs(shape, "cpu")
        with counting() as launches:
            case.run(**given)
        size, rows = given["logits"].nbytes, shape["rows"]
        forward, *backward = launches
        assert sum(forward.total("read").values()) == size + 8 * rows
        assert sum(forward.total("written").values()) <= 32 * rows
        assert len(backward) == case.name.startswith("log-prob")
        for launch in backward:
            assert size < sum(launch.total("read").values()) <= size + 40 * launch.total_programs
            assert sum(launch.total("written").values()) == size


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("run on a GPU, and this is mps", {"device": torch.device("mps")}),
        ("takes no float64", {"dtype": torch.float64}),
        ("compute capability 8.0", {"capability": (7, 5)}),
        ("under torch.compile", {"compiling": True}),
    ],
)
def test_where_it_cannot_run_on_a_gpu_the_fusions_decline(said, changes):
    env = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    linear = ops.BasicLinear(8, 16).requires_grad_(False)
    chain = linear, ops.TokenLogProb()
    for fusion, given in (
        *[(each, chain) for each in log_prob.JOINT[1:]],
        (token_log_prob.JOINT[0], chain[1:]),
    ):
        assert fusion.when(given, env) is True
        assert said in fusion.when(given, env._replace(**changes))
        top = *given[:-1], ops.TokenLogProb(top_k=2)
        assert fusion.when(top, env) is not True
    assert "no top tokens" in token_log_prob.JOINT[0].when(top, env)


def test_on_a_gpu_the_linear_is_taken_only_where_memory_is_preferred_or_it_was_measured():
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    kept, on_gpu, again = log_prob.JOINT
    for frozen in (False, True):
        chain = ops.BasicLinear(8, 16).requires_grad_(not frozen), ops.TokenLogProb()
        taken = [fusion for fusion in log_prob.JOINT if fusion.when(chain, cuda) is True]
        assert taken == ([on_gpu, again] if frozen else [again])
        assert "trades time for memory" in kept.when(chain, cuda)
    assert ["trades_time" in each.declares for each in (on_gpu, again, kept)] == [True, True, False]
    assert "trades_time" not in token_log_prob.JOINT[0].declares
