"""LowRankLinear against plain formulas in fp64, with dropout, reading other modules, and refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    op = ops.LowRankLinear(5, 7, 2, scaling=1.5, dtype=dtype, **options)
    nn.init.normal_(op.lora_b)
    return op


@pytest.mark.parametrize("rows", [(), (1,), (3,), (127,), (2, 3), (0,), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "trained", ["weight lora_a lora_b", "lora_a lora_b", "lora_a", "lora_b", ""]
)
def test_values_and_gradients(trained, dtype, rows):
    op = make(dtype)
    for name, param in op.named_parameters():
        param.requires_grad_(name in trained.split())
    x = torch.randn(*rows, 5).to(dtype)
    x = (x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x).requires_grad_()
    y = op(x)
    leaves = [x, *[param for param in op.parameters() if param.requires_grad]]
    dy = torch.randn(y.shape).to(dtype)
    wide = {name: param.detach().double() for name, param in op.named_parameters()}
    wide = {name: value.requires_grad_() for name, value in wide.items()}
    exact = x.detach().double().requires_grad_()
    expected = F.linear(exact, wide["weight"]) + 1.5 * F.linear(
        F.linear(exact, wide["lora_a"]), wide["lora_b"]
    )
    mine = [exact, *[wide[name] for name in wide if name in trained.split()]]
    wanted = [expected, *torch.autograd.grad(expected, mine, dy.double())]
    assert y.dtype is dtype
    for got, value in zip([y, *torch.autograd.grad(y, leaves, dy)], wanted, strict=True):
        size = value.abs().max().clamp(min=1) if value.numel() else 1
        assert ((got.double() - value).abs() <= LIMITS[dtype] * size).all()


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_is_before_the_adapter_only(p):
    op, x = make(dropout=p), torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    y = op(x)
    torch.manual_seed(3)
    _, mask = torch.native_dropout(x.detach(), p, True)
    keep = mask * (1 / (1 - p) if p < 1 else 0.0)
    expected = F.linear(x, op.weight) + 1.5 * F.linear(F.linear(x * keep, op.lora_a), op.lora_b)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    leaves = [x, *op.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy)
    )
    op.eval()
    torch.testing.assert_close(op(x), make()(x))


def test_gradients_of_gradients_and_autocast():
    op, x = make(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with opfuse.options(double_backward=True):
        assert torch.autograd.gradgradcheck(op, (x,))
    op, x = make(torch.float32), torch.randn(3, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), op(x), atol=0.05, rtol=0.05)
    grads = torch.autograd.grad(y.sum(), [x, *op.parameters()])
    wanted = torch.autograd.grad(op(x).sum(), [x, *op.parameters()])
    assert all(grad.dtype is torch.float32 for grad in grads)
    torch.testing.assert_close(grads, wanted, atol=0.1, rtol=0.05)


def test_a_new_one_is_the_linear_alone():
    op = ops.LowRankLinear(5, 7, 2)
    x = torch.randn(3, 5)
    torch.testing.assert_close(op(x), F.linear(x, op.weight))
    assert op.lora_a.abs().sum() > 0
    assert "rank=2, scaling=1.0, dropout=0.0" in repr(op)


def test_it_reads_other_modules():
    base, a, b = nn.Linear(5, 7), nn.Linear(5, 2, bias=False), nn.Linear(2, 7, bias=False)
    op = ops.LowRankLinear.reading(base, a, b, scaling=2.0, name="head")
    chain = opfuse.Sequential(op, ops.Bias.reading(base))
    assert not list(chain.parameters()) and op.name == "head"
    x = torch.randn(3, 5)
    y = chain(x)
    torch.testing.assert_close(y, base(x) + 2 * b(a(x)))
    y.sum().backward()
    assert all(param.grad is not None for each in (base, a, b) for param in each.parameters())
    b.weight = nn.Parameter(torch.zeros(7, 2))
    torch.testing.assert_close(chain(x), base(x))


@pytest.mark.parametrize(
    ("error", "said", "make"),
    [
        (ValueError, "a rank of at least 1", lambda: ops.LowRankLinear(5, 7, 0)),
        (ValueError, "dropout between 0 and 1", lambda: ops.LowRankLinear(5, 7, 2, dropout=1.5)),
        (TypeError, "scaling", lambda: ops.LowRankLinear(5, 7, 2, scaling="1")),
        (
            ValueError,
            r"matrices of \(3, 5\) and \(7, 3\) beside a weight of \(7, 5\)",
            lambda: ops.LowRankLinear.reading(nn.Linear(5, 7), nn.Linear(5, 3), nn.Linear(2, 7)),
        ),
    ],
)
def test_what_is_refused(error, said, make):
    with pytest.raises(error, match=f"LowRankLinear.*{said}"):
        make()
