"""Linear + loss with the classes split among processes over gloo, chunk by chunk."""

from __future__ import annotations

import gloo
import pytest
import tensor_parallel
import torch
import torch.distributed as dist
from opfuse_distributed.testing import simulated
from opfuse_loss import chunks

import opfuse
from opfuse import ops

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]


@pytest.mark.costly(4)
@pytest.mark.parametrize(
    "numbers",
    [
        {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "ignore_index": 3},
        {"reduction": "sum"},
        {"weight": [0.5, 2.0] * 5, "z_loss": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_split_loss(numbers, dtype, sequence):
    gloo.together(tensor_parallel.loss, numbers, dtype, sequence, not sequence, True)


@pytest.mark.costly(6)
@pytest.mark.parametrize(
    "numbers",
    [
        {"ignore_index": 3, "softcap": 3.0},
        {
            "entropy": True,
            "logsumexp": True,
            "log_sum_squares": True,
            "top_k": 3,
            "temperature": 0.7,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_split_log_probabilities(numbers, dtype, sequence, frozen):
    gloo.together(tensor_parallel.log_probs, numbers, dtype, sequence, not sequence, frozen, True)


ALL = {"entropy": True, "logsumexp": True, "log_sum_squares": True, "top_k": 5}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("numbers", [{}, ALL], ids=["alone", "all outputs"])
@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_of_several_ranks_take_two_or_three_collectives(monkeypatch, frozen, numbers, size):
    monkeypatch.setattr(chunks, "LEAST_ROWS", 8)
    monkeypatch.setattr(chunks, "LOGITS", 1)
    torch.manual_seed(0)
    weight, x = torch.randn(12, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    tokens = torch.randint(12, (20,))
    tokens[5], finite = -100, torch.ones(20, dtype=torch.bool)
    if frozen:  # all of a weight's gradient would be NaN
        x[3], x[4, 0], finite[3:5] = torch.inf, torch.nan, False
    steps = [torch.linspace(-1, 1, 20, dtype=torch.float64)] * 4 + [torch.ones(20, 5).double()]

    def step(head, op):
        head.weight.data.copy_(weight.chunk(12 // head.weight.shape[0])[rank_of(head)])
        head.weight.requires_grad_(not frozen)
        chain, leaf = opfuse.Sequential(head, op), x.clone().requires_grad_()
        with opfuse.options(prefer="memory"):
            y = chain(leaf, tokens)
        y = y if isinstance(y, tuple) else (y,)
        real = [t for t in y if t.is_floating_point()]
        leaves = [leaf] if frozen else [leaf, head.weight]
        return [*y, *torch.autograd.grad(real, leaves, steps[: len(real)])]

    def rank_of(head):
        return dist.get_rank() if head.weight.shape[0] < 12 else 0

    def worker(rank):
        head = ops.BasicLinear(6, 12, dtype=torch.float64, tensor_parallel_mode="column")
        return step(head, ops.VocabParallelTokenLogProb(**numbers))

    with opfuse.plugins.using(""):
        expected = step(ops.BasicLinear(6, 12, dtype=torch.float64), ops.TokenLogProb(**numbers))
    for plugins, each in (("loss", 3), ("", 1)):
        with opfuse.plugins.using(plugins):
            answers = simulated.simulate(size, worker)
        for number, answer in enumerate(answers):
            assert answer.error is None, answer.error
            counted = [call.kind for call in answer.calls]
            in_rows = [kind for kind in counted if "gather" in kind or "reduce" in kind]
            # for each chunk; and the sum of the gradient of the input over ranks
            assert len(in_rows) == (each * (3 if numbers else 2) + 1 if size > 1 else 0), counted
            found, wanted = list(answer.value), list(expected)
            if not frozen:
                wanted[-1] = wanted[-1].chunk(size)[number]
            for got, value in zip(found, wanted, strict=True):
                if got.is_floating_point():
                    torch.testing.assert_close(got, value, equal_nan=True)
                else:
                    assert torch.equal(got[finite], value[finite])
