"""The gradient of an activation in the product after it: against fp64, its bytes, where it is used."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from opfuse_linear import activation_gradient, products, tiles
from opfuse_triton import TARGETS, functions_of, recording, target

interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DTYPES = torch.float32, torch.bfloat16, torch.float16
ACTS = ops.GELU(approximate="none"), ops.SiLU(), ops.SReLU(), ops.SwiGLU(), ops.SiTUGLU()
NAME = "activation+linear"

if is_interpreting():
    interpreter.install()


class Softsign(ops.Activation):
    def value(self, x):
        return x / (1 + x.abs())

    def derivative(self, x):
        return (1 + x.abs()).square().reciprocal()


def draw(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def truth(act, dy, weight, hidden):
    x = hidden.double().requires_grad_()
    (dx,) = torch.autograd.grad(act.forward_value(x), x, dy.double() @ weight.double())
    return dx


@interpreted
@pytest.mark.parametrize("sizes", [(3, 40, 64), (130, 64, 136), (65, 77, 50)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_and_sums_match_fp64(dtype, sizes):
    rows, outputs, features = sizes
    dy, weight, both = draw(dtype, (rows, outputs), (outputs, features), (rows, 2 * features))
    for act in ACTS if rows == 3 else (ACTS[0], ACTS[3]):
        hidden, functions = both[:, : act.feature_ratio * features].contiguous(), functions_of(act)
        given = dy, weight, hidden, functions, functions.numbers(act.numbers_of())
        dx, db = products.activation_gradient(*given, sums=True)
        exact = truth(act, dy, weight, hidden)
        assert_close(dx, exact, gemm=True)
        torch.testing.assert_close(db, dx.float().sum(0).to(dtype), rtol=2e-2, atol=1e-3)
        again, nothing = products.activation_gradient(*given)
        assert nothing is None and torch.equal(again, dx)


@interpreted
@pytest.mark.parametrize("act", [ACTS[1], ACTS[3]], ids=["one half", "two"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_configuration_gives_the_same(arch, act):
    width = 144 * act.feature_ratio
    dy, weight, hidden = draw(torch.bfloat16, (130, 80), (80, 144), (130, width))
    exact, functions = truth(act, dy, weight, hidden), functions_of(act)
    with target(arch):
        offered = products.configurations(
            dy.device, dy.dtype, (130, 144, 80), gated=False, functions=functions, turned=True
        )
        assert len(offered) > 1
        for config in offered:
            assert config["constants"]["BLOCK_M"] >= tiles.LEAST_HEIGHT
            dx, db = products.activation_gradient(
                dy, weight, hidden, functions, sums=True, config=config
            )
            assert_close(dx, exact, gemm=True)
            torch.testing.assert_close(db, dx.float().sum(0).bfloat16(), rtol=2e-2, atol=1e-2)


@interpreted
def test_layouts():
    dy, weight, hidden = draw(torch.float32, (2, 5, 2, 24), (24, 40), (2, 5, 40))
    for given in (weight, weight.t().contiguous().t()):
        for grad in (
            dy[:, :, 1],
            dy[:, :, :1].contiguous()[:, :, 0],
            dy[:1, :1, 0].expand(2, 5, 24),
        ):
            dx, db = products.activation_gradient(
                grad, given, hidden, functions_of(ACTS[1]), sums=True
            )
            assert dx.shape == hidden.shape and dx.is_contiguous()
            exact = truth(ACTS[1], grad, given, hidden)
            assert_close(dx, exact, gemm=True)
            assert_close(db, exact.sum((0, 1)), gemm=True)


@pytest.mark.skipif(is_interpreting(), reason="a process that interprets records nothing")
def test_tma_takes_the_weight_as_it_is():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    functions = functions_of(ACTS[0])
    for given, name, turned in (
        ((meta(512, 128), meta(128, 256), meta(512, 256)), "gemm_by_tiles", True),
        ((meta(512, 127), meta(127, 256), meta(512, 256)), "gemm_by_pointers", None),
        ([meta(64, 64, dtype=torch.float32)] * 3, "gemm_by_pointers", None),
    ):
        with recording(90) as launches:
            products.activation_gradient(*given, functions, sums=True)
        (launch,) = launches
        assert launch.kernel.name == name and launch.constants.get("TURNED") is turned
        partial = launch.arguments["partial"]
        assert len(partial) * tiles.LEAST_HEIGHT >= len(given[0])


@interpreted
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "before"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [ops.GELU(), ops.SwiGLU()], ids=["one half", "two"])
def test_a_chain_launches_it(monkeypatch, act, bias, frozen):
    torch.manual_seed(0)
    chain = opfuse.Sequential(
        ops.Linear(12, 24, bias=bias), act, ops.Linear(24 // act.feature_ratio, 8)
    )
    if frozen == "weight":
        chain[2].weight.requires_grad_(False)
    elif frozen == "bias" and bias:
        chain[0].bias.requires_grad_(False)
    elif frozen == "before":
        chain[0].requires_grad_(False)
    x = torch.randn(2, 5, 12, requires_grad=frozen != "before")
    seen, run = [], products.activation_gradient
    monkeypatch.setattr(products, "activation_gradient", lambda *a, **k: seen.append(k) or run(*a, **k))  # fmt: skip
    wanted = [t for t in (x, *chain.parameters()) if t.requires_grad]
    with opfuse.plugins.using("linear"):
        got = torch.autograd.grad(chain(x).square().sum(), wanted)
    with opfuse.plugins.using(""):
        expected = torch.autograd.grad(chain(x).square().sum(), wanted)
    assert len(seen) == (frozen != "before")
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_where_it_is_used_and_why_not():
    (fusion,) = activation_gradient.BACKWARD
    linear = ops.BasicLinear(16, 24)
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    measured = cuda._replace(measured=1.2)
    assert "it was not measured on this GPU" in fusion.when((ACTS[0], linear), cuda)
    assert fusion.when((ACTS[0], linear), measured) is True
    for said, chain, changes in (
        ("under torch.compile", (ACTS[0], linear), {"compiling": True}),
        ("takes no float64", (ACTS[0], linear), {"dtype": torch.float64}),
        ("one after the other", (ops.SwiGLU(glu_interleave_size=8), linear), {}),
        ("has no device functions", (Softsign(), linear), {}),
    ):
        assert said in fusion.when(chain, measured._replace(**changes))
    for arch in TARGETS:
        with target(arch):
            found = fusion.build((ACTS[0], linear)).configurations(measured)
        assert 1 <= len(found) <= 8
