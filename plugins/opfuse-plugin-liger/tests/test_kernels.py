"""Liger's kernels as this plugin calls them, against fp64; and when it does not call them."""

import pytest
import torch
from opfuse_liger import kernels
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.testing import assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHY = kernels.unavailable(DEVICE)
runs = pytest.mark.skipif(bool(WHY), reason=WHY or "it runs")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def tensors(*shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(DEVICE, dtype) for tensor in drawn]


def truth(function, *given):
    """The output and the gradients in fp64, for a gradient of ones and twos."""
    wide = [tensor.double().requires_grad_() for tensor in given]
    outputs = function(*wide)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.full_like(y, k + 1.0) for k, y in enumerate(outputs)]
    return outputs, torch.autograd.grad(outputs, wide, weights)


@runs
@pytest.mark.parametrize("shape", [(3, 127), (2, 2, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_their_gradients_match_fp64(dtype, shape):
    x, extra, weight, bias = tensors(shape, shape, shape[-1:], shape[-1:], dtype=dtype)
    before = [tensor.clone() for tensor in (x, extra, weight, bias)]
    ones = torch.ones_like(x)

    (y,), grads = truth(lambda x, w: F.rms_norm(x, w.shape, 1 + w, 1e-5), x, weight)
    got, rstd = kernels.rms_norm(x, weight, 1e-5, 1.0)
    of = kernels.rms_norm_grads(ones, x, weight, rstd, 1.0, (True,))
    for mine, exact in zip((got, *of), (y, *grads), strict=True):
        assert_close(mine, exact, gemm=True)

    (y,), grads = truth(lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), x, weight, bias)
    got, mean, rstd = kernels.layer_norm(x, weight, bias, 1e-5)
    of = kernels.layer_norm_grads(ones, x, weight, mean, rstd, (True, True))
    for mine, exact in zip((got, *of), (y, *grads), strict=True):
        assert_close(mine, exact, gemm=True)

    added = x + extra  # rounded, as between the ops
    outputs, grads = truth(lambda s, w: (F.rms_norm(s, w.shape, w, 1e-5), s * 1), added, weight)
    got, total, rstd = kernels.add_rms_norm(x, extra, weight, 1e-5, 0.0)
    of = kernels.rms_norm_grads(ones, 2 * ones, total, weight, rstd, 0.0, (True,))
    for mine, exact in zip((got, total, *of), (*outputs, *grads), strict=True):
        assert_close(mine, exact, gemm=True)
    unchanged = zip((x, extra, weight, bias), before, strict=True)
    assert all(torch.equal(tensor, value) for tensor, value in unchanged)


@runs
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_activations_and_their_gradients_match_fp64(dtype, name):
    (x,) = tensors((3, 2 * 129), dtype=dtype)
    before = x.clone()
    gate = F.silu if name == "swiglu" else lambda a: F.gelu(a, approximate="tanh")

    def gated(x):
        a, b = x.chunk(2, -1)
        return gate(a) * b

    (y,), (dx,) = truth(gated, x)
    assert_close(getattr(kernels, name)(x), y, gemm=True)
    assert_close(getattr(kernels, f"{name}_grads")(torch.ones_like(y).to(dtype), x), dx, gemm=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "op, x, sentence",
    [
        (ops.RMSNorm(8), torch.randn(2, 8, dtype=torch.float64), "torch.float64"),
        (ops.RMSNorm((2, 4)), torch.randn(3, 2, 4), "normalize one dimension"),
        (ops.LayerNorm(8, zero_centered_gamma=True), torch.randn(2, 8), "not centered at zero"),
        (ops.SwiGLU(glu_interleave_size=2), torch.randn(2, 8), "halves that are contiguous"),
    ],
    ids=["fp64", "two dimensions", "centered", "interleaved"],
)
def test_unsupported_ops_and_inputs_are_declined_with_a_reason(op, x, sentence):
    with opfuse.plugins.using("liger"):
        plan = opfuse.explain(opfuse.Sequential(op), x).calls[0].plan
    assert not any(step.fusion for step in plan.forward)
    reasons = " ".join(refusal.reason for refusal in plan.refused)
    assert sentence in reasons or (WHY and WHY in reasons), reasons


@runs
@pytest.mark.parametrize(
    "norm, size", [(ops.LayerNorm(8, bias=False), 8), (ops.LayerNorm(8), 8), (ops.RMSNorm(8), 1)]
)
def test_other_parameters_are_left_to_the_ops(norm, size):
    norm.weight = torch.nn.Parameter(torch.full((size,), 2.0))
    model, found = opfuse.Sequential(norm), []
    for selection in ("liger", ""):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with opfuse.plugins.using(selection):
            y = model(x)
            found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
