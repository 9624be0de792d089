"""What is kept for the backward, and calls that the fused op does not take."""

import opfuse
import pytest
import torch
from opfuse.ops import RMSNorm, SiLU
from opfuse.report.calls import saved_bytes


class Tagged(torch.Tensor):
    """A subclass, which may compute something else."""


def drawn(subclass=torch.Tensor):
    torch.manual_seed(0)
    x = torch.randn(32, 64).as_subclass(subclass).requires_grad_()
    return opfuse.Sequential(RMSNorm(64), SiLU()), x


def gradients(chain, x):
    return torch.autograd.grad(chain(x).square().sum(), [x, *chain.parameters()])


@pytest.fixture(autouse=True)
def memory():
    with opfuse.options(prefer="memory"):
        yield


def test_it_is_used():
    assert "RMSNorm + SiLU  fused by rmsnorm+activation" in str(opfuse.explain(*drawn()))


def test_it_keeps_the_input_of_the_activation_no_longer():
    chain, x = drawn()
    fused = saved_bytes(lambda: chain(x))
    with opfuse.plugins.using(""):
        assert saved_bytes(lambda: chain(x)) - fused == x.nbytes


@pytest.mark.parametrize("subclass", [torch.Tensor, Tagged])
def test_the_gradients_are_those_of_the_ops(subclass):
    got = gradients(*drawn(subclass))
    with opfuse.plugins.using(""):
        torch.testing.assert_close(got, gradients(*drawn(subclass)))
