"""Products by quack-kernels: what is asked of them, and where."""

import math
import sys

import fake_quack
import pytest
import torch

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_linear import by_quack, choice, fused  # noqa: E402
from opfuse_triton import target  # noqa: E402

import opfuse  # noqa: E402
from opfuse import ops  # noqa: E402

ACTIVATIONS = {"GELU": ops.GELU(), "ReLU": ops.ReLU(), "SReLU": ops.SReLU()}


def environment(**changes):
    base = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, measured=1.2)
    return base._replace(**changes)


@pytest.fixture(autouse=True)
def quack(monkeypatch):
    fake_quack.install(monkeypatch)


def trained(chain, x, dy):
    for tensor in (x, *chain.parameters()):
        tensor.grad = None
    y = chain(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad for p in chain.parameters()]]


def plan_as_on_a_gpu(monkeypatch, **changes):
    """Let plans on this CPU be made as on a GPU where these fusions were measured."""
    env = environment(**changes)
    for cls in (fused.ForwardLinearBiasActivation, by_quack.BackwardActivationLinear):
        planned = cls.planned
        how = lambda self, found, planned=planned: planned(self, env)  # noqa: E731
        monkeypatch.setattr(cls, "planned", how)


def count_calls(monkeypatch):
    """The names of the products of quack, as they are called."""
    called, module = [], sys.modules["quack.gemm_interface"]
    for name in ("gemm_act", "gemm_dact"):
        real = getattr(module, name)

        def call(*args, real=real, name=name, **kwargs):
            called.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)
    return called


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (16,)])
def test_both_products_compute_what_the_ops_do(name, bias, shape, monkeypatch):
    torch.manual_seed(0)
    act, dtype = ACTIVATIONS[name], torch.bfloat16
    chain = opfuse.Sequential(ops.Linear(16, 24, bias=bias), act, ops.Linear(24, 8, bias=False)).to(
        dtype
    )
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    dy = torch.randn(*shape[:-1], 8, dtype=dtype)
    with opfuse.plugins.using(""):
        expected = trained(chain, x, dy)
    called = count_calls(monkeypatch)
    plan_as_on_a_gpu(monkeypatch, configuration=by_quack.CONFIGURATION)
    forward = (ops.BasicLinear, ops.Bias, type(act)) if bias else (ops.BasicLinear, type(act))
    pairs = [
        opfuse.register_forward_fusion(
            opfuse.Fusion(forward, fused.ForwardLinearBiasActivation), prepend=True
        ),
        opfuse.register_backward_fusion(
            opfuse.Fusion((type(act), ops.BasicLinear), by_quack.BackwardActivationLinear),
            prepend=True,
        ),
    ]
    try:
        with opfuse.plugins.using(""):
            got = trained(chain, x, dy)
    finally:
        for pair in pairs:
            pair.unregister()
    assert called == ["gemm_act", "gemm_dact"]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_tune_measures_it_beside_the_triton_product():
    chain = ops.BasicLinear(16, 24), ops.GELU()
    env = environment(measured=math.inf)
    with target(90):
        offered = choice.configurations(chain, env)
    assert offered[-1] == by_quack.CONFIGURATION and len(offered) <= 8
    chosen = environment(configuration=by_quack.CONFIGURATION)
    assert choice.refusal(chain, chosen) == ""
    assert isinstance(choice.product(chain, chosen), by_quack.Product)


def test_a_table_of_a_machine_with_it_names_the_library_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(by_quack, "is_installed", lambda: False)
    chain, chosen = (
        (ops.BasicLinear(16, 24), ops.GELU()),
        environment(configuration=by_quack.CONFIGURATION),
    )
    assert "found no Triton product faster" in choice.refusal(chain, chosen)
    assert by_quack.backward_fusions() == []


@pytest.mark.parametrize(
    ("said", "act", "changes"),
    [
        ("", ops.GELU(), {}),
        ("Hopper or Blackwell", ops.GELU(), {"capability": (8, 0)}),
        ("Hopper or Blackwell", ops.GELU(), {"capability": None}),
        ("plain tensors of half precision", ops.GELU(), {"dtype": torch.float32}),
        ("plain tensors of half precision", ops.GELU(), {"compiling": True}),
        ("do not take this GELU", ops.GELU(approximate="none"), {}),
        ("do not take this SwiGLU", ops.SwiGLU(), {}),
    ],
)
def test_each_refusal_gives_its_reason(said, act, changes):
    assert said in by_quack.why_not(act, environment(**changes))
    assert bool(said) is bool(by_quack.why_not(act, environment(**changes)))


def test_the_backward_is_taken_only_where_it_was_measured():
    chain = ops.GELU(), ops.BasicLinear(16, 24)
    assert by_quack.pays(chain, environment()) is True
    assert "has not measured" in by_quack.pays(chain, environment(measured=None))
    (fusion,) = by_quack.backward_fusions()
    assert fusion.name == "activation+linear by quack"
