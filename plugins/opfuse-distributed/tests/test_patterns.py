"""The declared patterns: a fusion of somebody's takes them in the chain of a split layer."""

import pytest
import torch
import torch.distributed as dist
from fakes import registered
from opfuse_distributed.patterns import REDUCE_ADD_NORM
from opfuse_distributed.testing import simulated

import opfuse
from opfuse import ops

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


class ReduceAddNorm(opfuse.FusedOperation):
    """In the place of a kernel: the ops, one after the other."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        ReduceAddNorm.calls += 1
        return self.run_separately(basic_op_ctxs, input_, **given)


def layer(norm, sequence, **bias):
    """The last linear of a layer, its residual, and the norm and linear of the next layer."""
    split = {"tensor_parallel_group": dist.group.WORLD, "sequence_parallel": sequence}
    row = ops.BasicLinear(8, 6, tensor_parallel_mode="row", **split)
    column = ops.BasicLinear(6, 4, tensor_parallel_mode="column", **split)
    biases = [ops.Bias(6)] if bias["bias"] else []
    return opfuse.Sequential(
        row, *biases, ops.AddExtraInput(), ops.MakeExtraOutput(), norm(6), column
    )


def step(norm, sequence, bias):
    generator = torch.Generator().manual_seed(0)  # threads share the default one
    chain = layer(norm, sequence, bias=bias)
    for param in chain.parameters():
        param.data.normal_(generator=generator)
    x = torch.randn(6, 4, generator=generator).requires_grad_()
    rows = 3 if sequence else 6
    residual = torch.randn(rows, 6, generator=generator).requires_grad_()
    y, residual_out = chain(x, residual)
    (y.square().sum() + residual_out.sum()).backward()
    grads = [x.grad, residual.grad, *[param.grad for param in chain.parameters()]]
    return [each.detach() for each in (y, residual_out, *grads)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_a_fusion_takes_the_end_of_a_layer_with_the_next_norm(norm, sequence, bias):
    def worker(rank):
        with opfuse.plugins.using(""):
            return step(norm, sequence, bias)

    expected = simulated.simulate(2, worker)
    ReduceAddNorm.calls = 0
    with registered("forward", opfuse.Fusion(REDUCE_ADD_NORM, ReduceAddNorm)):
        found = simulated.simulate(2, worker)
    assert ReduceAddNorm.calls == 2  # once on each process
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.error is None, theirs.error
        torch.testing.assert_close(mine.value, theirs.value)
