"""Tuning on a GPU: what is drawn, computed, captured and timed, and in which order, by a fake clock."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from fake_gpu import FakeGPU
from tuned import tables_in

import opfuse
from opfuse import Fusion
from opfuse.ops import Dropout, Identity
from opfuse.tuning import measuring
from opfuse.tuning.clock import GPUClock, capture
from opfuse.tuning.reference import Reference


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with tables_in(tmp_path):
        yield


@pytest.fixture
def gpu():
    with FakeGPU() as fake:
        yield fake


class Doubled(Identity):
    """An op that takes the GPU 30 us, and the host 100."""

    gpu, host = 30e-6, 100e-6
    fake = None

    def op_forward(self, ctx, input_):
        self.fake.spend(self.gpu, self.host)
        if input_.dtype is torch.float64:
            self.fake.did.append(("fp64",))
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        self.fake.spend(self.gpu, self.host)
        return 2 * grad_output, ()


class Four(opfuse.FusedOperation):
    """Two of them, in half the time on the GPU, and as long on the host."""

    gpu, host = 30e-6, 200e-6
    seen = ()

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        op = self.basic_ops[0]
        op.fake.spend(self.gpu, self.host)
        op.fake.did.append((type(self).__name__, input_.data_ptr()))
        return self.computed(input_), [(), ()]

    def computed(self, x):
        return 4 * x

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        op = self.basic_ops[0]
        op.fake.spend(self.gpu, self.host)
        return self.computed(grad_output), [(), ()], [(), ()]


def chain(gpu):
    model = opfuse.Sequential(Doubled(), Doubled())
    for op in model:
        op.fake = gpu
    return model


def tuned(gpu, x=None, model=None):
    x = torch.randn(16, 8, requires_grad=True) if x is None else x
    report = opfuse.tune(model or chain(gpu), x)
    return report.results[0] if len(report.results) == 1 else report


def of(build, **more):
    return Fusion([Doubled, Doubled], build, **more)


def test_all_is_made_once_and_in_order(register, gpu):
    """Two candidates of the same ops, one with three configurations, forward and backward."""

    class Configured(Four):
        def configurations(self, env):
            return [{"block": block} for block in (1, 2, 3)]

        def planned(self, env):
            block = (env.configuration or {}).get("block", 1)
            self.gpu = 30e-6 / block

    register(joint_fusions=[of(Four), of(Configured)])
    report = tuned(gpu)
    assert [result.found.speed for result in report.results] == pytest.approx([2.0, 6.0])
    assert report.results[1].found.configuration == {"block": 3}
    assert not report.wrong and gpu.told("draw") == 1
    assert gpu.told("fp64") == 2, "two ops, once"
    # each comparison captures two ways, first once and then for a millisecond
    assert gpu.told("capture") == 2 * 2 * (1 + 4)


def test_values_come_before_time(register, gpu):
    register(joint_fusions=[of(Four)])
    tuned(gpu)
    order = [(name, len([*group])) for name, group in itertools.groupby(d[0] for d in gpu.did)]
    sets = 8  # of 1 kB, in a cache of 4
    assert order == [
        ("draw", 1),
        ("Four", 3),  # the same bits?
        ("fp64", 2),
        ("Four", 1),  # compiles
        ("events", 3),  # of the separate ops twice, of the fused op twice
        ("Four", sets),
        ("events", 1),
        ("Four", sets),
        ("capture", 1),  # the separate ops once, which gives the time, then for a millisecond
        ("replay", 1),
        ("capture", 2),
        ("Four", sets),
        ("replay", 1),
        ("capture", 1),
        ("Four", sets),
        ("replay", 2 * 8),  # turns, and it is clear who is faster
        ("Four", 1),  # the bytes that it keeps
    ]
    took = {sets * 120e-6: 2, sets * 60e-6: 3}
    assert [d for d in gpu.did if d[0] == "capture"] == [
        *(("capture", sets, times) for most in took.values() for times in (1, most))
    ]


@pytest.mark.parametrize("passes, each", [("forward", 1), ("backward", 1), ("joint", 2)])
def test_each_pass_is_timed_without_the_host(register, gpu, passes, each):
    """The host takes as long for both: eager calls would say 1.0."""
    register(**{f"{passes}_fusions": [of(Four)]})
    found = tuned(gpu).found
    assert (found.speed, found.noise) == (pytest.approx(2.0), pytest.approx(0.0))
    assert found.seconds == pytest.approx(each * 30e-6)


def test_inputs_are_taken_in_turns(register, gpu):
    class Noted(Four):
        pass

    register(forward_fusions=[of(Noted)])
    with torch.no_grad():
        tuned(gpu, torch.randn(16, 8))
    addresses = [did[1] for did in gpu.did if did[0] == "Noted"]
    assert len({*addresses}) == GPUClock.sets(gpu, 16 * 8 * 4) == 16
    last = addresses[-17:-1]
    assert len({*last}) == 16, "a capture has each once"
    assert GPUClock.sets(gpu, 10**6) == 1


def test_calls_above_a_millisecond_are_timed_by_events(register, gpu, monkeypatch):
    monkeypatch.setattr(Doubled, "gpu", 2e-3)
    monkeypatch.setattr(Four, "gpu", 3e-3)
    register(forward_fusions=[of(Four)])
    result = tuned(gpu)
    assert not gpu.told("capture") and not result.eager
    assert result.found.speed == pytest.approx(4 / 3)


def test_slow_launches_are_no_long_call(register, gpu, monkeypatch):
    monkeypatch.setattr(Doubled, "host", 2e-3)
    register(forward_fusions=[of(Four)])
    assert tuned(gpu).found.speed == pytest.approx(2.0) and gpu.told("capture")


def test_what_cannot_be_captured_is_timed_with_the_host_and_the_report_says_so(register, gpu):
    gpu.waits = True
    register(forward_fusions=[of(Four)])
    model, x = chain(gpu), torch.randn(16, 8)
    report = opfuse.tune(model, x)
    (result,) = report.results
    assert result.found.speed == pytest.approx(1.0), "both wait for the host"
    said = " ".join(report.details.split())
    assert "1 fusion timed with the host, since no CUDA graph holds them." in said
    assert "no CUDA graph holds it: called a synchronizing CUDA operation" in said
    assert report.to_dict()["results"][0]["eager"] == "called a synchronizing CUDA operation"


class Unsteady(Four):
    """Another last bit each time."""

    numbers = itertools.count()

    def computed(self, x):
        return 4 * x * (1 + 1e-7 * (next(self.numbers) % 3))


def test_other_bits_each_time_refuse_a_fusion(register, gpu):
    register(forward_fusions=[of(Unsteady)])
    (result,) = opfuse.tune(chain(gpu), torch.randn(16, 8)).results
    assert result.found.wrong == "differs between 3 runs on the same input"


def test_other_bits_do_not_refuse_a_fusion_of_such_ops(register, gpu):
    class Rough(Doubled):
        numbers = itertools.count()

        def op_forward(self, ctx, input_):
            return 2 * input_ * (1 + 1e-7 * (next(self.numbers) % 4))

    register(forward_fusions=[Fusion([Rough, Rough], Unsteady)])
    model = opfuse.Sequential(Rough(), Rough())
    model[0].fake = model[1].fake = gpu
    assert not tuned(gpu, model=model).found.wrong


def test_random_numbers_are_no_other_bits(register, gpu):
    class Drawing(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * torch.empty_like(input_).uniform_(generator=self.own), [(), ()]

        own = torch.Generator()

    register(forward_fusions=[Fusion([Dropout], Drawing)])
    with torch.no_grad():
        result = tuned(gpu, torch.randn(16, 8), opfuse.Sequential(Dropout(0.5)))
    assert not result.found.wrong and not result.found.compared


def test_one_that_writes_into_its_input_spoils_nothing_for_the_next(register, gpu):
    class Writes(Four):
        """Only where it is timed: the first three calls compare."""

        calls = 0

        def computed(self, x):
            y = 4 * x
            Writes.calls += 1
            if Writes.calls > 3:
                x.detach().mul_(1.5)
            return y

    register(forward_fusions=[of(Writes), of(Four)])
    wrong, right = opfuse.tune(chain(gpu), torch.randn(16, 8)).results
    assert wrong.found.wrong == "changes the input, which it does not own"
    assert not right.found.wrong and gpu.told("fp64") == 2


def test_the_reference_is_freed_after_its_last_candidate(register, gpu):
    """Two groups of ops: what the first needed is gone when the second is measured."""
    alive, most = set(), []

    class Counted(Reference):
        def __init__(self, *given):
            alive.add(id(self))
            super().__init__(*given)
            most.append(len(alive))

        def __del__(self):
            alive.discard(id(self))

    register(forward_fusions=[of(Four), of(Four, name="again"), Fusion([Doubled] * 3, Four)])
    model = opfuse.Sequential(Doubled(), Doubled(), Doubled())
    for op in model:
        op.fake = gpu
    with mock.patch.object(measuring, "Reference", Counted):
        opfuse.tune(model, torch.randn(16, 8))
    assert most and max(most) == 1


def test_what_waits_for_the_gpu_is_never_captured(monkeypatch):
    """It runs twice before, the second time where PyTorch refuses to wait; then all is as before."""
    modes, calls = ["warn"], []
    cuda = mock.MagicMock()
    cuda.set_sync_debug_mode = modes.append
    cuda.get_sync_debug_mode = lambda: modes[-1]
    monkeypatch.setattr(torch, "cuda", cuda)

    def waits():
        calls.append(modes[-1])
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture([waits], 3)
    assert calls == ["default", "error"] and modes[-1] == "warn"
    assert not cuda.graph.called
    event = cuda.Event.return_value
    event.elapsed_time.return_value = 6.0
    calls.clear()
    replay = capture([lambda: calls.append(1), lambda: calls.append(2)], 3)
    assert calls == 5 * [1, 2] and cuda.graph.call_count == 1 and modes[-1] == "warn"
    assert replay() == pytest.approx(1e-3)
