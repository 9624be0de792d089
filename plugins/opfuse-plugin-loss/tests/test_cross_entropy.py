"""Cross entropy alone, by kernels: against fp64, with every option, and the bytes that it moves."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops.cross_entropy import LossNumbers
from opfuse.report.calls import saved_bytes
from opfuse.testing import assert_close, interpreter, recipes

pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_loss import cases, cross_entropy
from opfuse_loss.kernels import softmax
from opfuse_triton import Config, current_target, is_interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"reduction": "sum", "ignore_index": 2, "label_smoothing": 0.2},
    {"reduction": "none", "z_loss": 0.05, "softcap": 2.0},
    {"ignore_index": 0, "label_smoothing": 1.0, "z_loss": 0.01, "softcap": 5.0},
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreting(), reason="no GPU, and Triton does not interpret"
)

if is_interpreting():
    interpreter.install()


def batch(dtype, shape, ignored=-100, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator).to(DEVICE)
    targets.view(-1)[1::3] = ignored
    return logits.requires_grad_(), targets


def both(chain, logits, targets):
    """Output and gradient, by the fusion and in fp64 without it."""
    found = []
    for plugins, given in (("loss", logits), ("", logits.detach().double().requires_grad_())):
        with opfuse.plugins.using(plugins):
            y = chain(given, targets)
        grad = torch.linspace(0.5, 1.5, y.numel(), device=DEVICE, dtype=y.dtype).view(y.shape)
        found.append((y.detach(), *torch.autograd.grad(y, given, grad)))
    return found


@runs
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_output_and_gradient_match_fp64(dtype, options, weighted):
    for shape in ((3,), (1, 1), (3, 129), (2, 2, 5000)):
        chain = opfuse.Sequential(ops.CrossEntropy(**options)).to(DEVICE)
        if weighted:
            chain[0].weight = torch.linspace(0.5, 2, shape[-1], device=DEVICE)
        logits, targets = batch(dtype, shape, options.get("ignore_index", -100))
        (y, grad), (exact, wanted) = both(chain, logits, targets)
        assert y.dtype is grad.dtype is dtype and grad.shape == shape
        assert_close(y, exact)
        assert_close(grad, wanted)


@runs
def test_logits_of_any_strides_and_none():
    chain = opfuse.Sequential(ops.CrossEntropy(reduction="sum"))
    whole, targets = batch(torch.float32, (6, 40))
    whole = whole.detach()
    for logits in (whole[:, 3:], whole[::2], whole.t()[:6], whole[:, ::2], whole[:1].expand(4, 40)):
        given = targets[: len(logits)].clamp(max=logits.shape[1] - 1)
        before = whole.clone()
        (y, grad), (exact, wanted) = both(chain, logits.detach().requires_grad_(), given)
        assert_close(y, exact)
        assert_close(grad, wanted)
        assert torch.equal(whole, before)
    empty, none = torch.empty(0, 7, device=DEVICE, requires_grad=True), targets[:0]
    (y, grad), _ = both(chain, empty, none)
    assert y == 0 and grad.shape == (0, 7)


@runs
def test_what_is_not_finite_is_as_the_op_gives_it():
    logits, targets = batch(torch.float32, (7, 9000), scale=0.0)
    targets[:] = 7
    with torch.no_grad():
        logits[0, :8000] = -torch.inf  # all of the first block
        logits[1, 8500], logits[2, 5], logits[3, 8999] = torch.inf, torch.nan, torch.nan
        logits[4] = -torch.inf
        logits[5], logits[5, 8998] = -300.0, 300.0
        targets[0], targets[3] = 8500, -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        chain = opfuse.Sequential(ops.CrossEntropy(reduction="none", **options))
        (y, grad), (exact, wanted) = both(chain, logits, targets)
        torch.testing.assert_close(y.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), wanted, equal_nan=True, rtol=1e-4, atol=1e-6)


@runs
def test_every_configuration_gives_the_same():
    logits, targets = batch(torch.bfloat16, (3, 5000))
    numbers = LossNumbers(label_smoothing=0.1, z_loss=0.1, softcap=5.0)
    found = softmax.LOSS.candidates(current_target(torch.device(DEVICE)), {"classes": 5000})
    results = []
    for config in map(lambda given: Config(**given), found):
        losses, sums = softmax.row_losses(logits.detach(), targets, numbers, keep=True, config=config)  # fmt: skip
        weights = torch.where(targets < 0, 0.0, 0.5)
        grad = softmax.row_gradients(logits.detach(), targets, weights, sums, numbers, config)
        results.append((losses, grad))
    assert len(results) > 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@runs
def test_it_keeps_two_numbers_a_row_overwrites_nothing_and_runs_twice():
    chain = opfuse.Sequential(ops.CrossEntropy())
    logits, targets = batch(torch.float32, (6, 300))
    before = logits.detach().clone()
    with opfuse.plugins.using("loss"):
        kept = saved_bytes(lambda: chain(logits, targets), [logits, targets])
        assert kept == 2 * 4 * 6
        y = chain(logits, targets)
        first = torch.autograd.grad(y, logits, torch.tensor(1.0, device=DEVICE), retain_graph=True)
        second = torch.autograd.grad(y, logits, torch.tensor(2.0, device=DEVICE))
        torch.testing.assert_close(2 * first[0], second[0])
        with torch.no_grad():
            assert saved_bytes(lambda: chain(logits, targets)) == 0
            torch.testing.assert_close(chain(logits, targets), y.detach())
        with pytest.raises(IndexError if DEVICE == "cpu" else RuntimeError, match="out of bounds"):
            chain(logits, targets.clamp(min=300)).item()
        wide = logits.detach().double().requires_grad_()  # which no kernel takes
        fused = cross_entropy.LossByKernel([chain[0]])
        ctx = opfuse.OperationContext()
        loss, _ = fused.fuser_forward([ctx], wide, basic_op_extra_inputs=[(targets,)])
        ctx.saved_tensors = ctx.to_save
        grad = fused.fuser_backward([ctx], torch.ones_like(loss))[0]
        torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(wide, targets), wide)[0])  # fmt: skip
    assert torch.equal(logits, before)


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
def test_logits_are_read_twice_and_their_gradient_written_once():
    from ledger import counting

    for case in cases.CASES[-2:]:
        for shape in case.small:
            given = case.inputs(shape, "cpu")
            with counting() as launches:
                case.run(**given)
            forward, backward = launches
            size, rows = given["logits"].nbytes, shape["rows"]
            target = given["logits"].itemsize  # of each row, the logit of its target once more
            programs = backward.total_programs
            assert sum(forward.total("read").values()) == size + (8 + target) * rows
            assert sum(forward.total("written").values()) == 12 * rows
            assert sum(backward.total("read").values()) == size + 20 * programs
            assert sum(backward.total("written").values()) == size


def test_where_it_is_used():
    (fusion,) = cross_entropy.JOINT
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    chain = (ops.CrossEntropy(),)
    assert fusion.when(chain, cuda) is True and not fusion.declares
    for said, changes in (
        ("run on a GPU, and this is mps", {"device": torch.device("mps")}),
        ("takes no float64", {"dtype": torch.float64}),
        ("compute capability 8.0", {"capability": (7, 5)}),
        ("the compiler fuses the loss", {"compiling": True}),
    ):
        assert said in fusion.when(chain, cuda._replace(**changes))
    if not is_interpreting():
        assert "run on a GPU, and this is cpu" in fusion.when(
            chain, cuda._replace(device=torch.device("cpu"))
        )


@runs
def test_a_linear_before_it_is_taken_too_where_memory_is_preferred():
    chain = opfuse.Sequential(ops.Linear(4, 60), ops.CrossEntropy()).to(DEVICE)
    x = torch.randn(12, 4, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 60, (12,), device=DEVICE)
    for prefer, expected in (("speed", "cross entropy"), ("memory", "linear+loss, on a GPU")):
        with opfuse.plugins.using("loss"), opfuse.options(prefer=prefer):
            steps = opfuse.explain(chain, x, targets).to_dict()["forward"]
        assert expected in [step["fusion"] for step in steps]
    with recipes.offered(), opfuse.plugins.using(f"loss,{recipes.NAME}"):
        with opfuse.autocast(recipes.PerTensor()):
            assert "cross entropy" in str(opfuse.explain(chain, x, targets).to_dict()["forward"])
