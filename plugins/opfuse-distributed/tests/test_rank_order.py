"""Processes of a group that call their chains in different orders: an error on each, and no wrong number."""

from __future__ import annotations

import gloo
import order_ranks as ranks
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]


def refused(found, *texts):
    """Whether each process says in what it differs from the other; none waited for a timeout."""
    for kind, text in found:
        assert kind == "RankError", text
        assert any(each in text for each in texts), text
        assert "failed on" not in text and "did not answer" not in text, text


@pytest.mark.costly(4)
@pytest.mark.parametrize("warm", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 16)], ids=str)
@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["row", "column", "mlp", "gather", "norm"])
def test_chains_in_another_order(kind, what, sizes, warm):
    found = gloo.together(ranks.swapped, kind, sizes, warm, what)
    if kind == "norm" and what == "forward":  # which has no collective
        assert found == [("", None)] * 2
    else:
        refused(found, "differ in its place", "differ in its tensors", "differ in what its coll")


@pytest.mark.parametrize(
    "check", [ranks.copies, ranks.shared, ranks.calls_of_one, ranks.calls_apart]
)
def test_what_looks_alike(check):
    refused(gloo.together(check), "differ in its place")


def test_names_tell_chains_apart_that_were_never_called():
    refused(gloo.together(ranks.named), "differ in its ops")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", ["numbers", "dtype"])
def test_a_collective_is_compared_before_it_first_runs(what, grad):
    refused(gloo.together(ranks.hidden, what, grad), "differ in its tensors: '((torch.float")


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16)], ids=str)
@pytest.mark.parametrize("kind", ["column", "mlp"])
def test_an_error_in_a_backward_that_its_user_catches(kind, sizes):
    (first, after), (second, other) = gloo.together(ranks.lost_backward, kind, sizes)
    assert first == "RankError" and second == "ArithmeticError"
    refused([after, other], "in the backward of chain [Linear")


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", "differ in its tensors: 'shapes [(8, 4)]' against 'shapes [(12, 4)]'"),
        ("gradients", "differ in what it is called with: gradients of: nothing against the input"),
    ],
)
def test_a_known_call_and_a_new_one(what, difference):
    refused(gloo.together(ranks.old_and_new, what), difference)


def test_a_recomputation_is_no_call():
    refused(gloo.together(ranks.recomputed), "'chain [ReLU, AllReduce]' against 'chain [ReLU, ")


def test_a_pass_that_one_leaves():
    refused(gloo.together(ranks.interrupted), "'AllReduce in the forward of chain [AllReduce")


def test_a_collective_whose_size_one_has_changed():
    for *before, found in gloo.together(ranks.sizes_of_its_own):
        assert before == [("", 4)] * 2
        refused([found], "differ in its tensors: '((torch.float32, 4),)' against")


@pytest.mark.parametrize("check", [ranks.one_plans_more, ranks.group_again])
def test_what_processes_may_do(check):
    gloo.together(check)


def test_groups_that_share_processes():
    gloo.together(ranks.subgroups, size=3)


def test_steps_that_all_know_compare_nothing():
    for first, second, *others in gloo.together(ranks.compared):
        assert first > second and others == [0, 0]


def test_nothing_is_kept_for_good():
    for past, latest, orders, keys in gloo.together(ranks.kept, 8):
        assert past <= 17 and latest <= 34 and orders <= 17 and keys <= 0


# Of each kind: random programs, which one of the processes runs otherwise

SEEDS = 10  # of a case


@pytest.mark.costly(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("first", range(0, 60, SEEDS))
def test_a_random_program_that_one_runs_otherwise(first, size):
    seeds = range(first, first + SEEDS)
    answers = gloo.together(ranks.random_programs, [*seeds], True, size=size)
    for seed, *found in zip(seeds, *answers, strict=True):
        kinds, steps = program = ranks.programs(seed, 1)
        turns = [ranks.turns_of(kinds, each) for each in (steps, ranks.mutated(program, seed))]
        if turns[0] == turns[1]:
            assert found == [("", None)] * size, seed
        else:
            refused(found, " differ in ")


@pytest.mark.costly(1)
@pytest.mark.parametrize("first", range(0, 60, SEEDS))
def test_a_random_program_that_all_run(first):
    seeds = [*range(first, first + SEEDS)]
    assert gloo.together(ranks.random_programs, seeds, False) == [[("", None)] * SEEDS] * 2
