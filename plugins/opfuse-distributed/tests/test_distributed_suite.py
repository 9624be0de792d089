"""The suite for fusions with collectives: right ones pass, and each fault is found as recorded."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import communicating
import faulty_distributed
import pytest
import torch
import torch.distributed as dist
from opfuse_distributed import testing as rank_kit
from opfuse_distributed.testing import gloo_ranks, simulated

import opfuse
from opfuse import ops, testing

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
]
CAUGHT = json.loads(
    (pathlib.Path(__file__).parents[3] / "tests" / "faults_caught.json").read_text()
)
LAYERS = {layer.name: layer for layer in rank_kit.LAYERS}


@pytest.mark.costly(0.3)
class TestRight(rank_kit.DistributedSuite):
    """Right fusions raise no alarm."""

    plugin = "right"

    @pytest.fixture(autouse=True)
    def _offered(self):
        record = opfuse.plugins.register(communicating, name="right")
        yield
        opfuse.plugins.remove(record)

    def test_layer(self, layer, rank_check):
        try:
            super().test_layer(layer, rank_check)
        except pytest.skip.Exception as skipped:
            assert "the separate ops raise" not in str(skipped)
            raise


@pytest.mark.parametrize("fault", faulty_distributed.FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_caught(fault):
    layer, _, check = CAUGHT["distributed"]["found"][fault.name]["caught by"].rpartition("-")
    trial = rank_kit.Trial([testing.Subject("faulty", "joint", fault.fusion)], LAYERS[layer])
    with pytest.raises(testing.Failure):
        rank_kit.CHECKS[check](trial)


def test_how_many_faults_are_caught():
    counts = {label: (record["caught"], record["faults"]) for label, record in CAUGHT.items()}
    assert counts["distributed before"] == (27, len(faulty_distributed.FAULTS))
    assert counts["distributed"] == (28, 28)


MINE_FIRST = """
import opfuse
from communicating import fusion_of
from faulty_distributed import MineFirst


@opfuse.hookimpl
def opfuse_joint_fusions():
    return [fusion_of(MineFirst)]
"""


@pytest.mark.xdist_group("gloo")
def test_a_fault_between_processes(tmp_path, monkeypatch, no_plugins):
    (tmp_path / "mine_first.py").write_text(MINE_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    opfuse.plugins.register(importlib.import_module("mine_first"), name="mine")
    with pytest.raises(testing.Failure, match="over gloo, on rank 0: column, rows split: Failure"):
        gloo_ranks.check_on_gloo("mine", [LAYERS["column, rows split"]], {})


# The suite as pytest runs it

SUITES = """
import communicating
import opfuse
from opfuse import ops
from opfuse_distributed.testing import LAYERS, DistributedSuite, ShardedLayer

opfuse.plugins.register(communicating, name="right")


def mine(split):
    return [ops.LayerNorm(6), ops.BasicLinear(6, 6, **split("column"))]


class Small(DistributedSuite):
    plugin = "right"
    layers = (ShardedLayer("mine", mine, 6, gives="features"), LAYERS[6])


class TestLimits(Small):
    limits = {"frozen": "it cannot", "mine: values": "neither", "yours: values": "no such layer"}
    test_gloo = None


class TestAbsent(Small):
    plugin = "absent"


class TestNothing(Small):
    layers = (LAYERS[6],)
    test_gloo = None
"""


def test_the_suite_under_pytest(tmp_path):
    (tmp_path / "test_suites.py").write_text(SUITES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_suites.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    failed = set(re.findall(r"^FAILED test_suites.py::(\S+(?: \S+\])?)", done.stdout, re.MULTILINE))
    assert {name for name in failed if name.startswith("TestLimits")} == {
        "TestLimits::test_takes_something",
        "TestLimits::test_layer[mine-frozen]",
        "TestLimits::test_layer[mine-values]",
    }, done.stdout
    assert "limits names 'yours: values', which is neither" in done.stdout
    assert "limits declares 'frozen' (it cannot), but it works" in done.stdout
    assert {name for name in failed if name.startswith("TestAbsent")} == {
        "TestAbsent::test_takes_something"
    }
    assert "TestNothing::test_takes_something" in failed
    assert "gate and up: no fusion has a pattern that is in its chain" in done.stdout


# What the simulated ranks notice


def run(worker, size=2):
    """What the ranks returned, or raised, and their collectives."""
    return simulated.simulate(size, worker)


def test_ranks_compute_what_processes_do():
    # torch 2.13 renamed it
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def worker(rank):
        x = torch.arange(3.0) + 10 * rank.number
        y = [ops.AllReduce()(x), ops.AllGather()(x), ops.ReduceScatter()(x)]
        part, total = torch.empty(1), torch.empty(3)
        scatter(part, x)
        lists = [torch.empty(1) for _ in range(3)]
        dist.all_to_all(lists, [*x.split(1)])
        shared = x.clone()
        dist.broadcast(shared, 1)
        largest = x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_to_all_single(total, x)
        parts = [torch.empty(3) for _ in range(3)]
        dist.all_gather(parts, x)
        dist.barrier()
        return [*y, part, torch.cat(lists), shared, largest, total, torch.stack(parts)]

    answers = run(worker, 3)
    xs = [torch.arange(3.0) + 10 * number for number in range(3)]
    for number, answer in enumerate(answers):
        assert answer.error is None, answer.error
        mine = torch.stack([x[number] for x in xs])
        of_sum = sum(xs)[number : number + 1]
        expected = [sum(xs), torch.cat(xs), of_sum, of_sum, mine, xs[1], xs[2], mine]
        for got, wanted in zip(answer.value, [*expected, torch.stack(xs)], strict=True):
            assert torch.equal(got, wanted)
        assert len(answer.calls) == 10
        sent = {call.kind: call.sent for call in reversed(answer.calls)}
        assert (sent["all_reduce"], sent["all_gather"], sent["reduce_scatter"]) == (16, 24, 8)


def test_ranks_send_to_each_other():
    def worker(rank):
        x, y = torch.full((2,), float(rank.number)), torch.empty(2)
        after, before = (rank.number + 1) % 3, (rank.number - 1) % 3
        messages = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return y

    for number, answer in enumerate(run(worker, 3)):
        assert torch.equal(answer.value, torch.full((2,), (number - 1.0) % 3))
        assert all(call.waited and not call.changed for call in answer.calls)


def test_groups_of_some_ranks():
    def worker(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        return ops.AllReduce(groups[rank.number % 2])(torch.ones(2))

    assert [answer.value[0].item() for answer in run(worker, 3)] == [2, 1, 2]


def test_nothing_is_there_before_it_is_waited_for():
    def worker(rank):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        before = x.clone()
        work.wait()
        return before, x

    for answer in run(worker):
        assert answer.value[0].isnan().all() and torch.equal(answer.value[1], torch.full((2,), 2.0))


def test_other_collectives_on_other_ranks():
    def worker(rank):
        x = torch.ones(2 + rank.number)
        dist.all_reduce(x)

    assert "rank 1 started all_reduce torch.float32 (3,), this one" in str(run(worker)[0].error)

    def another(rank):
        if rank.number:
            dist.all_gather_object([None, None], 1)
        else:
            dist.all_reduce(torch.ones(2))

    assert "rank 1 started all_gather" in str(run(another)[0].error)


def test_a_rank_that_ended():
    answers = run(lambda rank: rank.number or dist.all_reduce(torch.ones(2)))
    assert "all_reduce: rank 1 ended, and never started it" in str(answers[0].error)
    assert answers[1].value == 1


def test_nothing_is_left_behind():
    run(lambda rank: dist.get_rank())
    assert not dist.is_initialized()


# Layers of an author


def declared_wrong(split):
    return [ops.Linear(12, 6, **split("column"))]


def never_split(split):
    return [ops.Linear(12, 6)]


def test_a_layer_that_is_declared_wrong():
    fusions = [testing.Subject("right", "joint", communicating.opfuse_joint_fusions()[0])]
    layer = rank_kit.ShardedLayer("wrong", declared_wrong, takes="whole", gives="whole")
    with pytest.raises(testing.Failure, match="its declaration is wrong, or the separate ops are"):
        rank_kit.CHECKS["plan"](rank_kit.Trial(fusions, layer))
    layer = rank_kit.ShardedLayer("never split", never_split)
    with pytest.raises(testing.Declined, match="no fusion has a pattern that is in its chain"):
        rank_kit.CHECKS["plan"](rank_kit.Trial(fusions, layer))
