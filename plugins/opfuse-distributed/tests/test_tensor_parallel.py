"""Tensor and sequence parallelism between processes over gloo."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import gloo
import pytest
import tensor_parallel as ranks
import torch
import torch.distributed as dist
from opfuse_distributed import agreement
from opfuse_distributed.agreement import reported
from torch.utils.checkpoint import _StopRecomputationError

from opfuse import ops

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2,), (4, 3), (2, 1, 3), (0, 2)], ids=str)
def test_a_layer_equals_the_whole_one(mode, sequence, bias, shape):
    gloo.together(ranks.one_layer, mode, sequence, bias, shape)


@pytest.mark.parametrize("what", ["", "a copy", "a hook", "a checkpoint"])
@pytest.mark.parametrize("sequence", [False, True])
def test_an_mlp_equals_the_whole_one(sequence, what):
    gloo.together(ranks.mlp, sequence, what)


@pytest.mark.parametrize("sequence", [False, True])
def test_linears_side_by_side(sequence):
    gloo.together(ranks.side_by_side, sequence)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ([[2, 0, 3, 1], [1, 4, 0, 2]], "uneven"),
        ([[0, 0, 0, 0], [1, 2, 1, 1]], "one has no rows"),
        ([[3, 2, 0, 0], [1, 1, 0, 0]], "one gets none"),
    ],
)
def test_experts_of_other_processes(sizes, name):
    gloo.together(ranks.experts, sizes, name)


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"ignore_index": 7, "reduction": "sum"},
        {"label_smoothing": 0.1, "reduction": "none"},
        {"z_loss": 0.01, "softcap": 5.0},
        {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "ignore_index": 3},
        {"weight": [0.5, 2.0] * 5, "ignore_index": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_loss_over_classes_of_several_processes(numbers, dtype, sequence):
    gloo.together(ranks.loss, numbers, dtype, sequence, sequence, False)


def test_smoothed_class_weights_over_classes_of_several_processes():
    numbers = {"weight": [0.5, 2.0] * 5, "label_smoothing": 0.1}
    for said in gloo.together(ranks.refused_loss, numbers):
        assert said[0] == "NotImplementedError"
        assert "class weights and label smoothing together are for CrossEntropy" in said[1]


LOG_PROBS = {
    "plain": {},
    "some": {"entropy": True, "temperature": 0.7, "ignore_index": 7},
    "top": {"top_k": 7},  # more than a process has
    "all": {
        "entropy": True, "logsumexp": True, "log_sum_squares": True, "top_k": 3, "softcap": 3.0
    },
}  # fmt: skip


@pytest.mark.parametrize("numbers", LOG_PROBS.values(), ids=LOG_PROBS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sequence", [False, True])
def test_log_probabilities_over_classes_of_several_processes(numbers, dtype, sequence):
    gloo.together(ranks.log_probs, numbers, dtype, sequence, sequence, False, False)


@pytest.mark.parametrize(
    "check", [ranks.kept, ranks.sent, ranks.arguments, ranks.trackers, ranks.strangers]
)
def test_a_single_thing(check):
    gloo.together(check)


def test_a_first_call_that_is_traced():
    with contextlib.closing(gloo.Team()) as team:  # whose group nothing has used
        for number, each in enumerate(itertools.product(["column", "row"], [False, True])):
            answers = team.run(ranks.compiled, *each, number > 0)
            assert answers == [(True, None)] * 2, (each, answers)


@pytest.mark.parametrize("wrong", [False, True])
def test_tuning_together(tmp_path, wrong):
    first, second = gloo.together(ranks.tuned, str(tmp_path), wrong)
    assert first == second
    assert ("differs from the separate ops" in first[2]) == wrong and (first[0] > 0) != wrong


def test_uneven_rows_are_refused_alike():
    for first, second in gloo.together(ranks.uneven):
        kind, text = first
        assert kind == "RankError" and second[0] == kind
        assert (
            "rank 0 and rank 1 differ in its tensors: 'shapes [(5, 3)]' against 'shapes [(6, 3)]'"
            in text
        )
        assert "[(4, 3)]' against 'shapes [(3, 3)]" in second[1]


@pytest.mark.parametrize(
    ("run", "difference"),
    [
        (ranks.other_options, "differ in the options: prefer: 'speed' against 'memory'"),
        (ranks.other_version, "differ in the plugins: opfuse-plugin-nothing: 0.0 against 0.1"),
        (
            ranks.other_ops,
            "differ in what runs: 'chain [AllReduce]' against 'chain [AllReduce, GELU]'",
        ),
        (ranks.frozen_on_one, "differ in what it is called with: gradients"),
        (ranks.extra_input_on_one, "differ in what it is called with: gradients"),
        (
            ranks.other_width,
            "collectives take: op 1 (ReduceScatter): 4 features, dim 0 against 6 features, dim 0",
        ),
        (ranks.other_dim, "op 0 (AllGather): any features, dim 0 against any features, dim 1"),
    ],
)
def test_processes_that_run_different_things(run, difference):
    for kind, text in gloo.together(run):
        assert kind == "RankError" and difference in text


def test_processes_with_other_tuning_tables(tmp_path):
    for kind, text in gloo.together(ranks.other_table, str(tmp_path)):
        assert kind == "RankError" and "differ in the tuning tables: cpu: none against" in text


def test_an_error_that_all_raise_is_raised():
    for kind, text in gloo.together(ranks.same_error):
        assert kind == "ValueError" and "expected 4 features" in text


def test_an_error_that_all_raise_behind_a_collective():
    found = gloo.together(ranks.same_error_behind_a_collective)
    assert found == [("ArithmeticError", "no luck")] * 2


def test_an_error_that_is_raised_again_is_told_again():
    found = gloo.together(ranks.the_same_error_twice)
    assert found == [[("ArithmeticError", "no luck")] * 2] * 2


@pytest.mark.parametrize("how", ["in an op", "in its arguments"])
def test_one_that_fails_while_the_other_compares(how):
    (first, after), (second, other) = gloo.together(ranks.one_fails_while_the_other_compares, how)
    assert first[0] == ("ArithmeticError" if how == "in an op" else "ValueError")
    assert second[0] == "RankError" and "rank 1 stopped: chain [RaisesOnce, Linear" in second[1]
    assert after == other == [6, 5, 2, 7]  # nothing that was compared before is read


def test_one_that_plans_again():
    assert gloo.together(ranks.one_plans_again) == [[2.0, 2.0]] * 2


# Of these the group is out of step behind them, so that each has processes of its own


def answers(worker, *args):
    """What ``worker`` returns in two processes of its own; None from one that ended."""
    with contextlib.closing(gloo.Team(seconds=10)) as team:
        return [answer and answer[1] for answer in team.run(worker, *args)]


def test_one_that_raises():
    (first, again), (second, _) = answers(ranks.one_raises)
    title = "chain [Raises, AllReduce]"
    assert second == (
        "RankError",
        f"{title}, op 0 (Raises) on rank 1 raised ArithmeticError: no luck",
    )
    assert first[1] == f"{title}, op 1 (AllReduce): rank 0 stopped: {second[1]}"
    assert "cannot be used after a failure" in again[1]


def test_one_that_raises_in_its_backward():
    first, second = answers(ranks.one_raises_backward)
    who = "chain [CopyToTensorParallelRegion, RaisesBackward], op 1 (RaisesBackward) on rank 1"
    assert second == ("ArithmeticError", "no luck")
    assert f"rank 0 stopped: {who} raised ArithmeticError: no luck" in first[1]
    assert "op 0 (CopyToTensorParallelRegion): rank 0" in first[1]


def test_one_that_calls_with_another_shape():
    first, second = answers(ranks.another_call)
    what = "rank 0 and rank 1 differ in its tensors: 'shapes [(2,)]' against 'shapes [(3,)]'"
    assert f"op 0 (AllReduce): rank 0 waits in AllReduce; {what}" in first[1]
    assert "rank 1 stopped" in second[1] and first[0] == second[0] == "RankError"


@pytest.mark.costly(1)
@pytest.mark.parametrize("cls", [ops.AllReduce, ops.AllGather, ops.ReduceScatter])
def test_one_that_dies(cls):
    first, second = answers(ranks.one_dies, cls)
    name = cls.__name__
    assert second is None
    assert first[0] == "RankError" and f"chain [{name}], op 0 ({name})" in first[1]
    assert "failed on rank 0" in first[1] and "rank 1 did not answer" in first[1]


@pytest.mark.parametrize("build", [ops.BasicLinear, ops.Linear])
def test_arguments_that_need_no_group(build):
    with pytest.raises(RuntimeError, match="needs torch.distributed.init_process_group"):
        build(2, 2, tensor_parallel_mode="column")
    with pytest.raises(ValueError, match='None, "column" or "row" as tensor_parallel_mode, got'):
        build(2, 2, tensor_parallel_mode="both")
    with pytest.raises(TypeError, match="a bool as sequence_parallel"):
        build(2, 2, sequence_parallel=1)
    with pytest.raises(TypeError, match="a function as rng_state_tracker_function"):
        build(2, 2, rng_state_tracker_function=3)
    assert build(2, 2, sequence_parallel=True).tensor_parallel_mode is None
    with pytest.raises(RuntimeError, match="needs torch.distributed.init_process_group"):
        ops.Bias(2, tensor_parallel=True)
    assert torch.equal(ops.Bias(2)(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("error, told", [(ValueError, 1), (_StopRecomputationError, 0)])
def test_the_end_of_a_recomputation_is_no_failure(error, told, monkeypatch):
    said = []
    talk = SimpleNamespace(
        me="rank 0", broken="", failures=0, failed=lambda why, unfinished: said.append(why)
    )
    chain = SimpleNamespace(title="chain")
    monkeypatch.setattr(agreement, "groups_of", lambda chain: [SimpleNamespace(talk=talk)])
    with pytest.raises(error), reported(chain):
        raise error
    assert len(said) == told
