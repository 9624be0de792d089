"""A third party's activation in the kernels of three plugins, in Triton's interpreter.

``tests/test_third_party.py`` runs this in a process with ``TRITON_INTERPRET=1``.
"""

import dataclasses
from types import MappingProxyType

import opfuse_linear.gemm
import pytest
import softsign
import torch
from opfuse_triton.elementwise import kernels

import opfuse
from opfuse import ops
from opfuse.testing import FusionSuite, Op

WIDTH, ROWS = 32, 6


def steps(chain, x, passes):
    return [step["fusion"] for step in opfuse.explain(chain, x).to_dict()[passes]]


def launches(monkeypatch, module, name):
    """The functions of the activations that the launches of a host function take."""
    seen, original = [], getattr(module, name)

    def watched(*given, **more):
        values = [*given, *more.values()]
        seen.extend(v for v in values if hasattr(v, "derivative") or hasattr(v, "functions"))
        return original(*given, **more)

    monkeypatch.setattr(module, name, watched)
    return seen


def compare(chain, x):
    """Output and every gradient, fused and not."""
    results = []
    for selection in (None, ""):
        with opfuse.plugins.using(selection):
            leaf = x.clone().requires_grad_()
            y = chain(leaf)
            results.append([y, *torch.autograd.grad(y.sin().sum(), [leaf, *chain.parameters()])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def value_of(found):
    return getattr(found, "functions", found).value


def test_in_the_epilogue_of_a_product(monkeypatch):
    chain, x = (
        opfuse.Sequential(ops.Linear(WIDTH, 48), softsign.Softsign()),
        torch.randn(ROWS, WIDTH),
    )
    assert steps(chain, x, "forward") == ["linear+bias+activation"]
    seen = launches(monkeypatch, opfuse_linear.gemm, "multiply")
    compare(chain, x)
    assert [value_of(found) for found in seen] == [softsign.value_on_gpu]


def test_in_the_gradients_of_activation_and_bias(monkeypatch):
    chain = opfuse.Sequential(ops.Bias(WIDTH), softsign.Softsign())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert steps(chain, x, "backward") == ["bias+activation"]
    seen = launches(monkeypatch, kernels, "backward")
    compare(chain, x.detach())
    assert [value_of(found) for found in seen] == [softsign.value_on_gpu]


def test_an_mlp_kernel_takes_the_value_of_the_op(monkeypatch):
    chain = opfuse.Sequential(ops.Linear(WIDTH, 64), softsign.Softsign(), ops.Linear(64, WIDTH))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with opfuse.options(prefer="memory"):
        assert steps(chain, x, "forward") == steps(chain, x, "backward") == ["mlp"]
        seen = launches(monkeypatch, kernels, "backward")
        compare(chain, x.detach())
    assert [value_of(found) for found in seen] == [softsign.value_on_gpu]


class Conformance(FusionSuite):
    """The kit, with this activation wherever a pattern takes any: the longest chain in all circumstances.

    The plugins' own tests have the other chains.
    """

    makers = MappingProxyType({ops.Activation: lambda features: [Op(softsign.Softsign)]})
    fusions = ()
    most_cases = 12
    test_plugin = None  # of a plugin alone

    @classmethod
    def chains(cls, subject, device):
        if (subject.passes, subject.name) not in cls.fusions:
            pytest.skip("another fusion, or one that does not pay here, whatever the activation")
        found = super().chains(subject, device)
        longest = max(found.plain, key=lambda case: len(case.ops))
        assert softsign.Softsign in [op.cls for op in longest.ops]
        alike = [case for case in found.all if case.ops == longest.ops]
        some = dataclasses.replace(found, plain=(longest,), all=tuple(alike), models=())
        return dataclasses.replace(some, quantized=found.quantized[:1])


class TestLinear(Conformance):
    plugin, fusions = "linear", (("forward", "linear+bias+activation"),)


class TestActivation(Conformance):
    plugin = "activation"
    fusions = ("backward", "bias+activation"), ("forward", "activation")


class TestMLP(Conformance):
    plugin, fusions = "mlp", (("joint", "mlp"),)
