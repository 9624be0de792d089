"""A linear with an adapter and log-probabilities by chunks: values, gradients, and what is kept."""

import copy

import pytest
import torch
from opfuse_loss import chunks

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing import FusionSuite, interpreter
from opfuse.testing.machine import is_interpreting
from opfuse.tuning.tolerance import difference

KEPT, AGAIN = "linear+log-probability, low rank", "linear+log-probability, low rank, computed again"
MANY = {"entropy": True, "logsumexp": True, "log_sum_squares": True, "temperature": 0.7}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_ROWS", 16)
    monkeypatch.setattr(chunks, "LOGITS", 1)


def model(bias, dtype=torch.float32, trained=("lora_a", "lora_b"), dropout=0.0, **options):
    torch.manual_seed(0)
    linear = ops.LowRankLinear(24, 50, 3, scaling=0.5, dropout=dropout, dtype=dtype)
    torch.nn.init.normal_(linear.lora_b)
    layers = [linear, *([ops.Bias(50, dtype=dtype)] if bias else [])]
    chain = opfuse.Sequential(*layers, ops.TokenLogProb(**options))
    for name, param in chain.named_parameters():
        param.requires_grad_(name.rpartition(".")[2] in trained)
    return chain


def step(chain, x, tokens, prefer="speed"):
    torch.manual_seed(5)  # of the dropout
    with opfuse.options(prefer=prefer):
        y = chain(x, tokens)
    y = y if isinstance(y, tuple) else (y,)
    steps = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in y]
    leaves = [x, *[param for param in chain.parameters() if param.requires_grad]]
    return [*y, *torch.autograd.grad(y, leaves, steps)]


# a mask that is drawn in fp64 is another one
DTYPES = [(dtype, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
DTYPES += [(torch.float64, 0.0), (torch.float64, 0.3)]
TRAINED = ("lora_a", "lora_b"), ("weight", "lora_a", "lora_b", "bias"), ("lora_b",), ("weight",), ()


@pytest.mark.costly(80)
@pytest.mark.parametrize("rows", [(3, 7), (130,), (0,)], ids=str)
@pytest.mark.parametrize(("dtype", "dropout"), DTYPES, ids=str)
@pytest.mark.parametrize("trained", TRAINED, ids=str)
@pytest.mark.parametrize("options", [{}, MANY], ids=["alone", "all outputs"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_what_the_separate_ops_give_in_fp64(dropout, bias, options, trained, dtype, rows):
    fewer = is_interpreting() and not FusionSuite.thorough
    if fewer and (bool(options) == bias or rows == (3, 7)):
        pytest.skip("the interpreter takes a second for each: a third of them do")
    chain = model(bias, dtype, trained, dropout, **options)
    x = torch.randn(*rows, 24, dtype=torch.float64).to(dtype).requires_grad_()
    tokens = torch.randint(0, 50, rows)
    tokens.view(-1)[:2] = -100
    exact, wide = copy.deepcopy(chain).double(), x.detach().double().requires_grad_()
    with opfuse.plugins.using(""):
        expected, separate = step(exact, wide, tokens), step(chain, x, tokens)
    with opfuse.plugins.using("loss"):
        frozen = not any(param.requires_grad for param in chain.parameters())
        with opfuse.options(prefer="memory"):
            report = " ".join(str(opfuse.explain(chain, x, tokens)).split())
        assert (KEPT if frozen and not options else AGAIN) in report
        got = step(chain, x, tokens, "memory")
    for mine, value, rounded in zip(got, expected, separate, strict=True):
        assert not difference(mine, value, rounded=rounded, dtype=dtype, gemm=True)


def test_no_logits_are_kept():
    chain, x, tokens = model(True), torch.randn(64, 24, requires_grad=True), torch.arange(64) % 50
    with opfuse.plugins.using("loss"), opfuse.options(prefer="memory"):
        kept = saved_bytes(lambda: chain(x, tokens), chain.parameters())
    per_row = 4 * 4 if is_interpreting() else 0  # of kernels, at most
    assert x.nbytes < kept <= x.nbytes + tokens.nbytes + 64 * (3 * 4 + per_row)
