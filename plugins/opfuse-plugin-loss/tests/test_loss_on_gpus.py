"""A linear and its loss as a GPU runs them: launches and bytes, and what adds up the products."""

from __future__ import annotations

import collections

import pytest
import torch
from adding import Library, asked_again  # noqa: F401
from opfuse_loss import chunks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse import ops
from opfuse.ops import arithmetic as precision
from opfuse.ops.cross_entropy import LossNumbers

FREE = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh")
ROWS, FEATURES, CLASSES = 16384, 4096, 131072


class Launches(TorchDispatchMode):
    """What a GPU would launch for PyTorch's operations, and the bytes that each kind moves."""

    keeps_no_tensors = True

    def __init__(self):
        super().__init__()
        self.count, self.bytes = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            self.count[str(func)] += 1
            self.bytes[name] += sum(t.nbytes for t in tensors)
        return result


@pytest.mark.parametrize(("again", "kernels", "most"), [(False, 8, 52), (True, 16, 68)])
def test_launches_at_the_size_of_a_language_model(again, kernels, most):
    triton = pytest.importorskip("opfuse_triton")
    pytest.importorskip("triton")
    from opfuse_loss.fused import LinearLoss, LinearLossAgain

    if torch.__version__ < "2.12":
        pytest.skip("addmm(out_dtype=...) of this torch knows no meta tensors")
    linear = ops.BasicLinear(FEATURES, CLASSES, device="meta", dtype=torch.bfloat16)
    fused = (LinearLossAgain if again else LinearLoss)([linear, ops.CrossEntropy()])
    fused.planned(opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16))
    x = torch.empty(ROWS, FEATURES, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    ctxs = [opfuse.OperationContext() for _ in range(2)]
    ctxs[0].params, ctxs[0].param_requires_grad = (linear.weight.detach(),), (True,)
    with torch.no_grad(), triton.recording(90) as launched, Launches() as seen:
        y, _ = fused.fuser_forward(ctxs, x, basic_op_extra_inputs=[(), (targets,)])
        for ctx in ctxs:
            ctx.saved_tensors = ctx.to_save
        fused.fuser_backward(ctxs, y)
    assert len(launched) == kernels and seen.count.total() + len(launched) <= most
    products = [seen.count[f"aten.{name}"] for name in ("mm.default", "addmm.dtype_out", "mm.dtype_out")]  # fmt: skip
    assert products == [kernels, 8, 8]
    # nothing is added but by products, nothing copied, and each gradient is scaled once
    assert not {"add", "add_", "copy_"} & seen.bytes.keys()
    gradients = 6 * (ROWS + CLASSES) * FEATURES  # read in fp32, written in half precision
    scaling = seen.bytes["_to_copy" if again else "mul"]
    assert gradients <= scaling < 1.001 * gradients
    # the gradient of the weight goes through memory once a chunk, each way
    weight, logits = 4 * CLASSES * FEATURES, 2 * ROWS * CLASSES
    assert seen.bytes["addmm"] == 2 * 8 * weight + logits + 2 * ROWS * FEATURES


@pytest.mark.parametrize("frozen", [False, True])
def test_launches_of_log_probabilities(frozen):
    triton = pytest.importorskip("opfuse_triton")
    pytest.importorskip("triton")
    from opfuse_loss import log_prob

    if torch.__version__ < "2.12":
        pytest.skip("addmm(out_dtype=...) of this torch knows no meta tensors")
    linear = ops.BasicLinear(FEATURES, CLASSES, device="meta", dtype=torch.bfloat16)
    chain = [linear.requires_grad_(not frozen), ops.TokenLogProb(entropy=not frozen)]
    fused = log_prob.LinearLogProb(chain)
    fused.planned(opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16))
    x = torch.empty(ROWS, FEATURES, dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(ROWS, dtype=torch.int64, device="meta")
    ctxs = [opfuse.OperationContext() for _ in range(2)]
    ctxs[0].params, ctxs[0].param_requires_grad = (linear.weight.detach(),), (not frozen,)
    with torch.no_grad(), triton.recording(90) as launched, Launches() as seen:
        y, (_, extras) = fused.fuser_forward(ctxs, x, basic_op_extra_inputs=[(), (tokens,)])
        for ctx in ctxs:
            ctx.saved_tensors = ctx.to_save
        fused.fuser_backward(ctxs, y, basic_op_grad_extra_outputs=((), extras))
    assert len(launched) == 16  # of eight chunks the statistics and the gradient
    products = [seen.count[f"aten.{name}"] for name in ("mm.default", "addmm.dtype_out", "mm.dtype_out")]  # fmt: skip
    assert products == ([8, 0, 8] if frozen else [16, 8, 8])
    assert not {"add", "add_", "copy_"} & seen.bytes.keys()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_fp32_of_a_library_that_adds_and_of_one_that_does_not(monkeypatch, dtype, adds):
    for name, value in (("LEAST_ROWS", 16), ("MOST_ROWS", 16), ("LOGITS", 1), ("CLASSES", 24)):
        monkeypatch.setattr(chunks, name, value)
    torch.manual_seed(0)
    x, weight = torch.randn(50, 32).to(dtype), torch.randn(64, 32).to(dtype)
    targets, weights = torch.randint(64, (50,)), torch.rand(50)
    given = targets, weights.double(), LossNumbers(), (True, True, True)
    losses, exact = chunks.gradients(x.double(), weight.double(), None, *given)
    with Library(adds) as library:
        found, sums = chunks.gradients(x, weight, None, targets, weights, *given[2:])
    assert library.calls == (9 if adds else 0)  # of four chunks, and the first question
    torch.testing.assert_close(found.double(), losses, rtol=2e-2, atol=2e-2)
    for name in ("dx", "dw", "db"):
        got, expected = getattr(sums, name), getattr(exact, name)
        assert got.dtype is torch.float32
        assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("adds", [True, False])
def test_a_product_is_added_to_a_sum(adds, beta):
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        total = torch.full((3, 4), torch.nan if beta == 0 else 2.0, dtype=dtype)
        with Library(adds) as library:
            precision.add_product(total, a, b, beta=beta)
        assert library.calls == (2 if adds and dtype is torch.float32 else 0)
        precision._library_adds.cache_clear()
        expected = 2.0 * beta + a.double() @ b.double()
        torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=5e-2)
