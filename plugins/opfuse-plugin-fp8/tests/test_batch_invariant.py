"""Recipes under ``options(invariant="batch")``: blocks in one row keep its bits, others are refused."""

import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse import ops

PROMISED = {"mxfp8": fp8.MXFP8BlockScaling(), "fp8-block": fp8.Float8BlockScaling()}
REFUSED = [
    fp8.DelayedScaling(),
    fp8.Float8CurrentScaling(),
    fp8.NVFP4BlockScaling(),
    fp8.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
]


def chain(dtype):
    torch.manual_seed(0)
    linears = ops.Linear(96, 256, dtype=dtype), ops.Linear(128, 64, dtype=dtype)
    return opfuse.Sequential(ops.RMSNorm(96, dtype=dtype), linears[0], ops.SwiGLU(), linears[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", PROMISED.values(), ids=PROMISED)
def test_a_row_keeps_its_bits(recipe, dtype):
    model, x = chain(dtype), torch.randn(67, 96).to(dtype)
    x[3] *= 100  # whoever casts several rows at once sees it
    with torch.no_grad(), opfuse.autocast(recipe):
        with opfuse.options(invariant="batch"):
            y = model(x)
            for i in (0, 3, 66):
                assert torch.equal(model(x[i]), y[i])
            assert torch.equal(model(x.flip(0)), y.flip(0))
        eps = torch.finfo(dtype).eps
        # a sum in another order may round a value to the next code
        torch.testing.assert_close(y, model(x), rtol=0, atol=y.abs().max().item() * max(eps, 0.05))


@pytest.mark.parametrize("recipe", REFUSED, ids=lambda recipe: type(recipe).__name__)
def test_scales_of_several_rows_are_refused(recipe):
    model, who = chain(torch.float32), type(recipe).__name__
    with torch.no_grad(), opfuse.autocast(recipe), opfuse.options(invariant="batch"):
        with pytest.raises(RuntimeError, match=f"{who} does not promise that it casts a row by"):
            model(torch.randn(3, 96))
