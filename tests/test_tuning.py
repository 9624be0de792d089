"""Measured choice: what ``opfuse tune`` writes, and what plans make of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
import os
import random
import statistics
import subprocess
import sys
import time
import types
from typing import ClassVar

import gloo
import pytest
import torch
import toy_fusions
import toy_recipe
import tuning_ranks
from fakes import OneByOne
from tuned import Prescribed, tables_in

import opfuse
from opfuse import Fusion, ops
from opfuse.core.engine.cover import conflict
from opfuse.core.engine.facts import Candidate
from opfuse.core.environment import device_name
from opfuse.core.records import FusionSource, Precedence
from opfuse.ops import GELU, Identity, ReLU, SiLU
from opfuse.tuning import parts, timing, trial
from opfuse.tuning import table as tables
from opfuse.tuning.choosing import Measurements
from opfuse.tuning.table import Measurement
from opfuse.tuning.timing import compare, interval

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A folder of its own for the tables."""
    with tables_in(tmp_path / "tables"):
        yield tmp_path / "tables"


@pytest.fixture
def quick(monkeypatch):
    """Fewer turns, since here a fusion is clearly slower or clearly not."""
    monkeypatch.setattr(timing, "TURNS", 5)
    monkeypatch.setattr(trial, "LEAST", 0.0)
    monkeypatch.setattr(timing, "_FEW_TURNS", 5)


def named(name, **attributes):
    return type(name, (OneByOne,), {"calls": [], **attributes})


def spin(seconds):
    """Use that much time of the processor."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Slow(OneByOne):
    """Right, and slow."""

    calls: ClassVar = []

    def fuser_forward(self, *args, **kwargs):
        spin(0.002)
        return super().fuser_forward(*args, **kwargs)


class SlowBackward(Slow):
    """Right, and slow in the backward."""

    fuser_forward = OneByOne.fuser_forward

    def fuser_backward(self, *args, **kwargs):
        spin(0.002)
        return super().fuser_backward(*args, **kwargs)


class Wrong(Slow):
    """Wrong by 4 %."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        y, extras = OneByOne.fuser_forward(self, basic_op_ctxs, input_, **kwargs)
        return y * 1.04, extras


class WrongGradient(Slow):
    """Gives another gradient than the ops."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        dx, *others = super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)
        return 1.04 * dx, *others


class Traceable(opfuse.FusedOperation):
    """Its ops one by one, in what torch.compile can trace."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return self.run_separately(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        return self.run_separately_backward(basic_op_ctxs, grad_output, **given)


class WrongTraced(Traceable):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        return 1.04 * y, extras


class Raising(Slow):
    def fuser_forward(self, *args, **kwargs):
        raise RuntimeError("no such kernel")


class Thrifty(opfuse.FusedOperation):
    """A joint fusion that keeps its input alone, and computes the rest again."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        spin(0.002)
        basic_op_ctxs[0].save_for_backward(input_)
        gelu, silu = self.basic_ops
        return silu.value(gelu.value(input_)), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        gelu, silu = self.basic_ops
        return grad_output * silu.derivative(gelu.value(x)) * gelu.derivative(x), [(), ()], [(), ()]


def pair(build=None, **kwargs):
    return Fusion([GELU, SiLU], build or named("Pair"), **kwargs)


def chain():
    return opfuse.Sequential(GELU(), SiLU())


def tensor(*shape):
    return torch.randn(*(shape or (16, 32)), requires_grad=True)


def taken(model, x, passes="forward"):
    """The fusions of a pass, by name."""
    steps = opfuse.explain(model, x).calls[0].plan
    return [step.fusion for step in getattr(steps, passes) if step.fusion]


def reasons(model, x):
    return {r.fusion: r.reason for r in opfuse.explain(model, x).calls[0].plan.refused}


def content(folder):
    (path,) = folder.glob("*.json")
    return path, json.loads(path.read_text())


# Measured


@pytest.mark.parametrize(
    "build, passes, sentence",
    [
        (Wrong, "forward", "measured here, it differs from the separate ops: the output is wrong"),
        (
            WrongGradient,
            "backward",
            "measured here, it differs from the separate ops: the gradient of the input is wrong",
        ),
        (
            WrongGradient,
            "joint",
            "measured here, it differs from the separate ops: the gradient of the input is wrong",
        ),
        (Raising, "forward", "measured here, it raises RuntimeError: no such kernel"),
        (Slow, "forward", "measured here, it has 0."),
        (SlowBackward, "backward", "measured here, it has 0."),
        (Slow, "joint", "measured here, it has 0."),
    ],
)
def test_a_wrong_one_and_a_slow_one_are_refused(register, quick, build, passes, sentence):
    register(**{f"{passes}_fusions": [pair(build)]})
    model, x = chain(), tensor()
    if build is not Raising:
        assert build.__name__ in str(opfuse.explain(model, x))
    report = opfuse.tune(model, x)
    assert reasons(model, x)[build.__name__].startswith(sentence)
    assert not taken(model, x) and not taken(model, x, "backward")
    (result,) = report.results
    assert (bool(report.wrong), bool(report.slower)) == (
        bool(result.found.wrong),
        not result.found.wrong,
    )
    kind = "refused as wrong" if report.wrong else "refused as slower here, worst 0."
    assert f"1 fusion {kind}" in str(report)
    assert model(x).shape == x.shape  # runs separately


def test_a_right_one_is_taken_and_its_speed_is_told(register, quick):
    register(forward_fusions=[pair(Wrong), Fusion([GELU, SiLU], named("Right"), name="right")])
    model, x = chain(), tensor()
    with Prescribed(right=1.5, Wrong=Measurement(0, 0, 0, wrong="differs")):
        opfuse.tune(model, x)
    assert taken(model, x) == ["right"]
    assert "GELU + SiLU: measured here: 1.50x the speed of the separate ops" in str(
        opfuse.explain(model, x)
    )


def test_what_draws_random_numbers_is_not_compared(register, quick):
    register(forward_fusions=[Fusion([ops.Dropout], named("Drawing"))])
    model, x = opfuse.Sequential(ops.Dropout(0.5)), tensor()
    state = torch.get_rng_state()
    report = opfuse.tune(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    (result,) = report.results
    assert (result.found.wrong, result.found.compared) == ("", False)
    assert "values not compared: its ops draw random numbers" in " ".join(report.details.split())


def test_ops_that_never_give_the_same_twice_are_compared(register, quick):
    """Such as sums by atomics on a GPU."""

    class Unsteady(Identity):
        calls = 0

        def op_forward(self, ctx, input_):
            Unsteady.calls += 1
            return input_ * (1 + 1e-7 * (Unsteady.calls % 5))

    register(
        forward_fusions=[Fusion([Unsteady], named("Wrong", fuser_forward=Wrong.fuser_forward))]
    )
    report = opfuse.tune(opfuse.Sequential(Unsteady()), torch.randn(16, 32))
    assert len(report.wrong) == 1 and report.wrong[0].found.compared


class WritesInput(Slow):
    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        result = OneByOne.fuser_forward(self, basic_op_ctxs, input_, **kwargs)
        input_.detach().mul_(1.5)
        return result


class WritesGradient(Slow):
    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        result = super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)
        grad_output.mul_(1.5)
        return result


class Widens(Slow):
    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        y, extras = OneByOne.fuser_forward(self, basic_op_ctxs, input_, **kwargs)
        return y.double(), extras


class RaisesLater(Slow):
    """From the fourth call on, as where memory was given back."""

    left = 3

    def fuser_forward(self, *args, **kwargs):
        RaisesLater.left -= 1
        if RaisesLater.left < 0:
            raise RuntimeError("no longer")
        return OneByOne.fuser_forward(self, *args, **kwargs)


@pytest.mark.parametrize(
    "build, passes, sentence",
    [
        (WritesInput, "forward", "changes the input, which it does not own"),
        (WritesGradient, "backward", "changes the gradient that arrives, which it does not own"),
        (Widens, "forward", "the output has dtype torch.float64 instead of torch.float32"),
        (RaisesLater, "forward", "raises RuntimeError: no longer"),
    ],
)
def test_more_that_is_wrong(register, quick, build, passes, sentence):
    register(**{f"{passes}_fusions": [pair(build)]})
    model, x = chain(), tensor()
    before = x.detach().clone()
    report = opfuse.tune(model, x)
    assert sentence in " ".join(str(report).split()) and report.wrong
    assert torch.equal(x, before), "what the user gave stays as it is"


def test_a_fusion_that_writes_into_a_parameter(register, quick):
    class WritesBias(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **given):
            result = self.run_separately(basic_op_ctxs, input_, **given)
            basic_op_ctxs[1].params[0].detach().add_(1.0)
            return result

    register(forward_fusions=[Fusion([ops.BasicLinear, ops.Bias], WritesBias)])
    model, x = opfuse.Sequential(ops.Linear(8, 8)), tensor(4, 8)
    before = model[0].bias.detach().clone()
    said = " ".join(str(opfuse.tune(model, x)).split())
    assert "changes op 1 (Bias).bias, which it does not own" in said
    assert torch.equal(model[0].bias, before)


@pytest.mark.parametrize("layout", ["expanded", "sliced", "transposed"])
def test_it_measures_the_layout_that_comes(register, quick, layout):
    register(forward_fusions=[pair()])
    x = {
        "expanded": torch.randn(8).expand(4, 8),
        "sliced": torch.randn(4, 16)[:, ::2],
        "transposed": torch.randn(8, 4).t(),
    }[layout]
    with torch.no_grad():
        (result,) = opfuse.tune(chain(), x).results
    assert not result.shape.contiguous and not result.found.wrong


def test_gradients_are_compared_where_the_model_turns_them_on(register, quick):
    register(backward_fusions=[pair(WrongGradient)])
    model, x = chain(), tensor()

    def calls(x):
        with torch.enable_grad():
            return model(x)

    with torch.no_grad():
        assert opfuse.tune(calls, x).wrong


def test_wrong_stays_until_the_same_rows_are_right(register, quick):
    class UpTo4(Slow):
        """Right where the rows are a multiple of four."""

        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            y, extras = OneByOne.fuser_forward(self, basic_op_ctxs, input_, **kwargs)
            y = y.clone()
            y[len(y) // 4 * 4 :] = 7.0
            return y, extras

    register(forward_fusions=[pair(UpTo4)])
    model = chain()
    assert opfuse.tune(model, tensor(7, 8)).wrong
    opfuse.tune(model, tensor(4, 8))
    assert not taken(model, tensor(7, 8)) and not taken(model, tensor(4, 8))


def test_a_number_of_another_package_is_a_constant(register, quick):
    numpy = pytest.importorskip("numpy")

    class Leaky(ops.ReLU):
        def __init__(self, slope):
            super().__init__()
            self.slope = slope

    register(forward_fusions=[Fusion([Leaky], named("Pair"))])
    for slope in (numpy.float32(0.1), {"k": 1}):
        with Prescribed(Pair=0.5):
            opfuse.tune(opfuse.Sequential(Leaky(slope)), tensor())
    assert taken(opfuse.Sequential(Leaky({"k": 2})), tensor()), "another constant"
    assert not taken(opfuse.Sequential(Leaky({"k": 1})), tensor())


def test_buffers_of_ops_stay_as_they_are(register, quick):
    class Counts(Identity):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def op_forward(self, ctx, input_):
            self.calls += 1
            return input_ * 1.0

    register(forward_fusions=[Fusion([Counts], named("Pair"))])
    model = opfuse.Sequential(Counts())
    opfuse.tune(model, tensor())
    assert model[0].calls == 0


@pytest.mark.parametrize(
    "place, value",
    [
        ("found speed", 10**400), ("found speed", float("nan")), ("found speed", -3),
        ("found speed", True), ("found wrong", 5), ("found configuration", "abc"),
        ("found seconds", 10**400), ("subject plugin", 5), ("subject plugin", ["a"]),
        ("subject plugin", {"a": 1}), ("subject plugin", [["a"], 1]), ("found rows", "many"),
    ],
)  # fmt: skip
def test_what_nobody_measures_is_no_table(register, quick, folder, place, value):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=1.5):
        opfuse.tune(model, x)
    path, table = content(folder)
    of, name = place.split()
    table["entries"][0][of][name] = value
    path.write_text(json.dumps(table))
    tables.reload()
    with pytest.warns(opfuse.TuningWarning, match="is not a tuning table.*delete it"):
        model(x)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    register, quick, monkeypatch, tmp_path
):
    register(forward_fusions=[pair()])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path / "file"))
    with pytest.raises(OSError):
        opfuse.tune(chain(), tensor(), progress=lambda *unused: pytest.fail("it measures"))


def test_an_interrupt_keeps_what_is_known(register, quick, folder):
    register(forward_fusions=[pair(), pair(Wrong)])

    def stop(done, of, what):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opfuse.tune(chain(), tensor(), progress=stop)
    assert len(content(folder)[1]["entries"]) == 1


ADDING = """
import pathlib, sys
from opfuse.tuning.job import add
first = int(sys.argv[2])
for number in range(first, first + 20):
    found = {"speed": 1.0, "noise": 0.0, "seconds": 0.0, "wrong": "", "rows": number}
    subject = {"plugin": None, "fusion": str(number)}
    row = {"setting": {"torch": "0"}, "subject": subject, "shape": [1, 1, True], "found": found}
    add(pathlib.Path(sys.argv[1]), [row])
"""


def test_two_processes_lose_nothing(tmp_path):
    path = tmp_path / "table.json"
    command = [sys.executable, "-c", ADDING, str(path)]
    started = [subprocess.Popen([*command, str(20 * number)]) for number in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    assert len(tables.read_rows(path)) == 40


def test_memory_that_is_short_says_nothing_about_a_fusion(register, quick, folder):
    class Greedy(Slow):
        def fuser_forward(self, *args, **kwargs):
            raise torch.OutOfMemoryError("64 GiB are not there")

    register(forward_fusions=[pair(Greedy)])
    report = opfuse.tune(chain(), tensor())
    assert not report.results and "64 GiB are not there" in str(report)
    assert content(folder)[1]["entries"] == []


def test_nothing_of_the_model_changes(register, quick):
    register(
        forward_fusions=[Fusion([ops.BasicLinear, ops.Bias], named("Whole"))],
        backward_fusions=[Fusion([ops.BasicLinear, ops.Bias], named("Back"))],
    )
    torch.manual_seed(0)
    model, x = opfuse.Sequential(ops.Linear(8, 8), GELU(), ops.Linear(8, 8)), tensor(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = opfuse.tune(model, x)
    assert len(report.results) == 4 - 2, "what is alike is measured once"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.grad is None and all(param.grad is None for param in model.parameters())


def test_extras_channels_and_keyword_arguments(register, quick):
    class Times(ops.Identity):
        """Times a number that the call gives."""

        def op_forward(self, ctx, input_, factor=1.0):
            ctx.factor = factor
            return input_ * factor

        def op_backward(self, ctx, grad_output):
            return grad_output * ctx.factor, ()

        saved_names, context_names = None, ()

    everything = named("Everything", kwarg_names=None)
    register(
        forward_fusions=[
            Fusion([ops.MakeExtraOutput, ops.Linear(2, 2).basic_ops[0].__class__], everything),
            Fusion([GELU, ops.AddExtraInput], named("Added")),
            Fusion([Times, ops.AddExtraInput], named("Named", kwarg_names=("factor",))),
        ]
    )
    out, add, times, last = ops.MakeExtraOutput(), ops.AddExtraInput(), Times(), ops.AddExtraInput()
    out.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    model = opfuse.Sequential(out, ops.Linear(8, 8, bias=False), GELU(), add, times, last)
    x, extra = tensor(4, 8), tensor(4, 8)
    report = opfuse.tune(model, x, extra, op_kwargs={times: {"factor": 3.0}})
    assert sorted(result.fusion for result in report.results) == ["Added", "Everything", "Named"]
    assert not report.wrong, str(report)


def test_tuning_under_autocast_records_both_dtypes(register, quick):
    register(forward_fusions=[Fusion([ops.BasicLinear, ops.Bias, GELU], named("Half"))])
    model, x = opfuse.Sequential(ops.Linear(8, 8), GELU()), tensor(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        report = opfuse.tune(model, x)
        assert not report.wrong
        with Prescribed(Half=1.5):
            opfuse.tune(model, x)
        assert taken(model, x) == ["Half"]
    _, table = content(tables.directory())
    (row,) = table["entries"]
    assert row["subject"]["dtype"] == ["torch.bfloat16", "torch.float32"]
    assert row["subject"]["params"] == [[[[8, 8], "torch.float32"]], [[[8], "torch.float32"]], []]


def test_under_a_recipe_that_has_state(quick):
    with opfuse.plugins.isolated():
        opfuse.plugins.register(toy_recipe, name="toy-recipe")
        opfuse.plugins.register(toy_fusions, name="toy-fusions")
        alone = opfuse.register_forward_fusion(Fusion([ops.Cast], named("CastAlone")))
        model = opfuse.Sequential(ops.Linear(8, 8), GELU(), ops.Linear(8, 8))
        x = tensor(4, 8)

        def step(action):
            with opfuse.autocast("delayed-int8"):
                return action()

        step(lambda: model(x)).sum().backward()
        step(lambda: model(x)).sum().backward()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(KeyError), opfuse.autocast("delayed-int8"):
            report = opfuse.tune(model, x)
            raise KeyError  # what the model itself records is dropped
        found = {(result.fusion, result.passes) for result in report.results}
        assert found == {
            ("GELUCast", "forward"),
            ("GELUBiasGradCast", "backward"),
            ("CastAlone", "forward"),
        }
        assert not report.wrong, str(report)
        assert {n: v.tolist() for n, v in state.items()} == {
            name: value.tolist() for name, value in model.state_dict().items()
        }
        alone.unregister()


def test_the_faster_configuration_is_found_and_told(register, quick):
    planned = []

    class Either(OneByOne):
        calls: ClassVar = []

        def configurations(self, env):
            return [{"pause": 0.004}, {"pause": 0.0}]

        def planned(self, env):
            planned.append(env.configuration)
            self.pause = (env.configuration or {"pause": 0.004})["pause"]

        def fuser_forward(self, *args, **kwargs):
            spin(self.pause)
            return args[1], [()]

    class Sleeping(Identity):
        def op_forward(self, ctx, input_):
            spin(0.001)
            return input_

    register(forward_fusions=[Fusion([Sleeping], Either)])
    model, x = opfuse.Sequential(Sleeping()), tensor()
    model(x)
    assert planned == [None]
    report = opfuse.tune(model, x)
    assert report.results[0].found.configuration == {"pause": 0.0}
    planned.clear()
    model(x)
    assert planned == [{"pause": 0.0}] and taken(model, x) == ["Either"]


def test_a_configuration_that_raises_is_left_out(register, quick):
    class Either(OneByOne):
        calls: ClassVar = []

        def configurations(self, env):
            return [{"room": False}, {"room": True}]

        def planned(self, env):
            self.room = (env.configuration or {"room": None})["room"]

        def fuser_forward(self, *args, **kwargs):
            if self.room is False:
                raise RuntimeError("out of shared memory")
            spin(0.0 if self.room else 0.004)
            return args[1], [()]

    class Sleeping(Identity):
        def op_forward(self, ctx, input_):
            spin(0.001)
            return input_

    register(forward_fusions=[Fusion([Sleeping], Either)])
    report = opfuse.tune(opfuse.Sequential(Sleeping()), tensor())
    assert (report.results[0].found.wrong, report.results[0].found.configuration) == (
        "",
        {"room": True},
    )


def test_ops_that_do_not_run_by_themselves_are_no_fault_of_a_fusion(register, quick, folder):
    class Twice(Identity):
        """Runs once more and then never again."""

        runs = 1

        def op_forward(self, ctx, input_):
            Twice.runs -= 1
            if Twice.runs < 0:
                raise RuntimeError("its weights were given back")
            return input_ * 1.0

    register(forward_fusions=[Fusion([Twice], named("Pair"))])
    model, x = opfuse.Sequential(Twice()), tensor()
    report = opfuse.tune(model, x)
    assert not report.results and "its weights were given back" in str(report)
    assert report.to_dict()["unmeasured"] == list(report.unmeasured)
    assert content(folder)[1]["entries"] == [], "nothing is known of the fusion"


def test_what_an_op_writes_in_place_is_a_copy(register, quick):
    register(forward_fusions=[Fusion([GELU, ops.AddExtraInput], named("Added"))])
    model = opfuse.Sequential(GELU(), ops.AddExtraInput(in_place=True))
    x, extra = torch.randn(4, 8), torch.randn(4, 8)
    before, expected = extra.clone(), torch.nn.functional.gelu(x, approximate="tanh") + extra
    report = opfuse.tune(model, x, extra)
    assert [result.found.wrong for result in report.results] == [""]
    torch.testing.assert_close(extra, expected)  # written by the one call of the model
    assert not torch.equal(extra, before)


def test_hooks_integers_and_rows_of_groups(register, quick):
    register(
        forward_fusions=[
            Fusion([ops.GroupedLinear], named("Grouped")),
            Fusion([GELU], named("Alone")),
        ]
    )
    grouped, act = ops.GroupedLinear(2, 8, 8), GELU()
    act.register_forward_hook(lambda *args: None)
    model = opfuse.Sequential(grouped, act, GELU())
    report = opfuse.tune(model, torch.randn(6, 8), torch.tensor([2, 4]))
    assert sorted(result.fusion for result in report.results) == ["Alone", "Grouped"]
    assert not report.wrong, str(report)


# Memory for time


def test_a_trade_waits_for_the_option_and_for_bytes(register, quick):
    register(joint_fusions=[pair(Thrifty, declares=("trades_time",))])
    model, x = chain(), tensor(64, 256)
    wish = 'which prefer="memory" asks for'
    assert not taken(model, x) and wish in reasons(model, x)["Thrifty"]
    with opfuse.options(prefer="memory"):
        assert taken(model, x) == ["Thrifty"]
        report = opfuse.tune(model, x)
    (result,) = report.results
    assert result.found.saved_bytes == 64 * 256 * 4 and result.found.speed < 0.99
    with opfuse.options(prefer="memory"):
        assert taken(model, x) == ["Thrifty"]
    assert not taken(model, x)
    assert reasons(model, x)["Thrifty"].startswith("measured here, it has 0.")
    assert wish in reasons(model, x)["Thrifty"]


def test_a_trade_that_saves_nothing_or_costs_nothing(register):
    register(joint_fusions=[pair(declares=("trades_time",))])
    model, x = chain(), tensor()
    with Prescribed(Pair=Measurement(0.9, 0, -1e-4, saved_bytes=0)):
        opfuse.tune(model, x)
    with opfuse.options(prefer="memory"):
        assert not taken(model, x)
    with Prescribed(Pair=Measurement(1.1, 0, 1e-4, saved_bytes=10)):
        opfuse.tune(model, x)
    assert taken(model, x) == ["Pair"]


def test_memory_comes_first_where_it_is_preferred(register):
    register(
        joint_fusions=[
            pair(named("Fast"), name="fast"),
            pair(named("Small"), name="small", benefit=1),
        ]
    )
    model, x = chain(), tensor()
    with Prescribed(
        fast=Measurement(2.0, 0, 1e-3), small=Measurement(1.1, 0, 1e-4, saved_bytes=100)
    ):
        opfuse.tune(model, x)
    assert taken(model, x) == ["fast"]
    with opfuse.options(prefer="memory"):
        assert taken(model, x) == ["small"]


@pytest.mark.parametrize("left", [1.5, 0.96], ids=["faster", "less slow"])
@pytest.mark.parametrize("right, expected", [(40, ["left", "right"]), (39, ["large"])])
def test_a_slower_trade_gives_way_to_others_that_save_as_much(register, right, expected, left):
    three = [GELU, SiLU, ReLU]
    register(
        joint_fusions=[
            Fusion(three, named("Large"), name="large", declares=("trades_time",)),
            Fusion(three[:2], named("Left"), name="left", priority=-100, declares=("trades_time",)),
            Fusion(three[2:], named("Right"), name="right", priority=-100),
        ]
    )
    model, x = opfuse.Sequential(*[cls() for cls in three]), tensor()
    found = {
        "large": Measurement(0.9, 0, -1e-4, saved_bytes=100),
        "left": Measurement(left, 0, 1e-4 if left > 1 else -1e-5, saved_bytes=60),
        "right": Measurement(1.5, 0, 1e-4, saved_bytes=right),
    }
    with Prescribed(**found), opfuse.options(prefer="memory"):
        opfuse.tune(model, x)
    assert taken(model, x) == (["left", "right"] if left > 1 else ["right"])
    with opfuse.options(prefer="memory"):
        assert taken(model, x) == expected
        assert ("other fusions of these ops are faster together" in str(reasons(model, x))) == (
            expected != ["large"]
        )
        new = Fusion(three[1:], named("New"), name="new", priority=-100)
        late = opfuse.register_forward_backward_fusion(new)
        assert taken(model, x) == ["large"], "one of them is not measured: precedence counts"
        late.unregister()


@pytest.mark.parametrize(
    ("saved", "speed", "noise", "used"),
    [
        *[(0, 1.0, 0.0, True), (0, 0.985, 0.0, True), (0, 0.975, 0.0, False)],
        (0, 0.975, 0.2, False),  # noise is no excuse
        *[(8, 0.975, 0.0, True), (8, 0.965, 0.0, False), (8, 0.95, 0.05, True)],
        *[(-8, 1.01, 0.0, False), (-8, 1.03, 0.0, True), (-8, 1.03, 0.05, False)],
    ],
)
def test_a_tie_in_time_goes_to_fewer_bytes(register, saved, speed, noise, used):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=Measurement(speed, noise, 0.0, saved_bytes=saved)):
        opfuse.tune(model, x)
    assert taken(model, x) == ["Pair"] * used
    assert used or ("keeps more" in reasons(model, x)["Pair"]) == (saved < 0)


def test_a_difference_within_the_errors_keeps_what_is_declared(register):
    names = ("first", "later")
    register(
        forward_fusions=[
            Fusion([GELU, SiLU], named("First"), name="first", benefit=5),
            Fusion([SiLU, ReLU], named("Later"), name="later", benefit=1),
        ]
    )
    model, x = opfuse.Sequential(GELU(), SiLU(), ReLU()), tensor()

    def tuned(*rows):
        found = {
            name: Measurement(1.1, 0.01, seconds, saved_bytes=saved, took=1e-3)
            for name, (seconds, saved) in zip(names, rows, strict=True)
        }
        with Prescribed(**found):
            opfuse.tune(model, x)
        return taken(model, x), reasons(model, x)

    chosen, why = tuned((100e-6, 0), (110e-6, 0))
    assert chosen == ["first"] and "saves 5 tensor reads and writes against 1" in why["later"]
    assert tuned((100e-6, 0), (130e-6, 0))[0] == ["first"], "not measured in turns"
    chosen, why = tuned((100e-6, 0), (200e-6, 0))
    assert chosen == ["later"] and "saves 200 us a call against 100 us" in why["first"]
    chosen, why = tuned((110e-6, 0), (100e-6, 8))
    assert chosen == ["later"] and "saves 8 bytes a call against 0 bytes" in why["first"]
    assert tuned((200e-6, 0), (100e-6, 8))[0] == ["first"]
    assert tuned((100e-6, -8), (95e-6, 0))[0] == ["later"]
    with opfuse.options(prefer="memory"):
        assert tuned((200e-6, 0), (100e-6, 8))[0] == ["later"]


# Which set is taken


def test_the_time_that_is_saved_decides_where_all_are_measured(register):
    register(
        forward_fusions=[
            Fusion([GELU, SiLU], named("Left"), name="left", benefit=100),
            Fusion([SiLU, ReLU], named("Right"), name="right", benefit=1),
        ]
    )
    model, x = opfuse.Sequential(GELU(), SiLU(), ReLU()), tensor()
    assert taken(model, x) == ["left"]
    with Prescribed(left=1.1, right=2.0):
        opfuse.tune(model, x)
    assert taken(model, x) == ["right"]
    assert reasons(model, x)["left"] == (
        "overlaps right of opfuse-plugin-test, which saves 500 us a call against 91 us, measured here"
    )
    late = opfuse.register_forward_fusion(Fusion([GELU, SiLU], named("New"), name="new", benefit=2))
    assert taken(model, x) == ["left"], "one of them is not measured: the benefits count"
    late.unregister()


def test_a_faster_fusion_does_not_overrule_priority(register):
    register(
        forward_fusions=[
            pair(named("Preferred"), name="preferred", priority=1),
            pair(named("Faster"), name="faster"),
        ]
    )
    model, x = chain(), tensor()
    with Prescribed(preferred=1.0, faster=3.0):
        opfuse.tune(model, x)
    assert taken(model, x) == ["preferred"]


def test_a_tie_in_what_was_measured_is_no_larger_benefit():
    """The set was chosen by measurements, so a smaller benefit is not what the report may name."""
    facts = types.SimpleNamespace(env=types.SimpleNamespace(options={}))
    known, candidates = Measurements(facts, tables.NO_TABLE), []
    for name, start, stop, benefit in (("l", 0, 2, 4), ("v", 0, 1, 1), ("w", 1, 2, 1)):
        fusion = Fusion([GELU], OneByOne, name=name)
        source = FusionSource("forward", fusion, "plugin-x", "1", Precedence(2))
        matched = (GELU(),) * (stop - start)
        candidates.append(Candidate(2 * start + 1, 2 * stop, matched, source, benefit))
    for each, seconds in zip(candidates, (10e-6, 5e-6, 6e-6), strict=True):
        known.found[each] = types.SimpleNamespace(seconds=seconds, saved_bytes=0.0, error=2e-6)
    loser, *winners = candidates
    why, plugin = conflict(loser, winners, known.explain)
    assert plugin == "plugin-x"
    assert why == (
        "overlaps v of plugin-x, which is in a set of fusions that is better, measured here"
    )
    known.found[winners[1]].seconds = 20e-6
    why, _ = conflict(loser, winners, known.explain)
    assert why == "overlaps v of plugin-x, which saves 25 us a call against 10 us, measured here"


@pytest.mark.parametrize("forward, backward, joint", [(2.0, 2.0, False), (1.2, 1.2, True)])
def test_a_joint_fusion_against_one_of_each_pass(register, forward, backward, joint):
    fusion = pair(named("Pair"), name="pair")
    register(joint_fusions=[fusion], forward_fusions=[fusion], backward_fusions=[fusion])
    model, x = chain(), tensor()
    with Prescribed(pair_joint=1.9, pair_forward=forward, pair_backward=backward):
        opfuse.tune(model, x)
    plan = opfuse.explain(model, x).calls[0].plan
    refused = [refusal.passes for refusal in plan.refused]
    assert refused == (["forward", "backward"] if joint else ["joint"])
    if not joint:
        assert plan.refused[0].reason == (
            "the forward and backward fusions of these ops are faster together, measured here"
        )


# What an entry counts for


def test_an_entry_is_of_its_number_of_rows(register):
    register(forward_fusions=[pair()])
    model = chain()
    with Prescribed(Pair=0.5):
        opfuse.tune(model, tensor(16, 8))
    assert [taken(model, tensor(rows, 8)) for rows in (15, 16, 31, 32)] == [
        ["Pair"],
        [],
        [],
        ["Pair"],
    ]
    assert taken(model, tensor(16, 16)) == ["Pair"], "of another width"
    assert taken(model, tensor(16, 8).double().detach()) == ["Pair"], "of another dtype"
    with torch.no_grad():
        assert taken(model, tensor(16, 8)) == ["Pair"], "without a backward"
    assert taken(model, tensor(8, 16).t()) == ["Pair"], "not contiguous"
    made = opfuse.Sequential(GELU(approximate="none"), SiLU())
    assert taken(made, tensor(16, 8)) == ["Pair"], "another constant"


def test_behind_an_op_that_changes_rows_all_entries_must_agree(register):
    register(forward_fusions=[pair()])
    model, x = opfuse.Sequential(ops.Reshape((-1, 8)), GELU(), SiLU()), tensor(8, 8)
    with Prescribed(Pair=0.5):
        opfuse.tune(model, x)
    assert taken(model, x) == [] and taken(model, tensor(64)) == [], "whatever comes in"
    with Prescribed(Pair=1.5):
        opfuse.tune(model, tensor(32, 8))
    assert taken(model, x) == taken(model, tensor(32, 8)) == ["Pair"], "as if nothing was measured"
    assert "measured" not in str(opfuse.explain(model, x))
    with Prescribed(Pair=1.4):
        opfuse.tune(model, x)
    assert "measured here: 1.50x" in str(opfuse.explain(model, x))


def test_an_entry_of_eager_calls_does_not_count_for_compiled_ones(register):
    pairs = []
    register(
        forward_fusions=[
            pair(when=lambda ops, env: pairs.append((env.compiling, env.measured)) or True)
        ]
    )
    model, x = chain(), tensor()
    with Prescribed(Pair=1.5):
        opfuse.tune(model, x)
    model(x)
    torch.compile(model, backend="eager", fullgraph=True)(x)
    assert pairs[-2:] == [(False, 1.5), (True, None)]
    with Prescribed(Pair=1.25):
        opfuse.tune(torch.compile(model, backend="eager"), x, compiled=True)
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(x)
    assert pairs[-1] == (True, 1.25)
    model(x)
    assert pairs[-1] == (False, 1.5)


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_candidates_are_measured_and_checked(register, quick, monkeypatch, grad):
    monkeypatch.setattr(parts, "BACKEND", "aot_eager")
    linear_gelu = [ops.BasicLinear, ops.Bias, GELU]
    register(
        forward_fusions=[Fusion(linear_gelu, Traceable), Fusion([GELU, SiLU], WrongTraced)],
        backward_fusions=[Fusion(linear_gelu, Traceable, name="Back")],
    )
    model = opfuse.Sequential(ops.Linear(8, 8), GELU(), SiLU())
    with torch.set_grad_enabled(grad):
        report = opfuse.tune(model, torch.randn(16, 8), compiled=True)
    names = ["Back", "Traceable", "WrongTraced"]
    assert sorted(result.fusion for result in report.results) == (names if grad else names[1:])
    assert [result.fusion for result in report.wrong] == ["WrongTraced"], report.details
    assert "differs from the separate ops" in report.wrong[0].found.wrong


def test_a_table_that_changes_makes_new_plans_and_compiled_code(register):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    generation = opfuse.plugins.manager.generation
    first = opfuse.explain(model, x).calls[0].plan
    with Prescribed(Pair=0.5):
        opfuse.tune(model, x)
    second = opfuse.explain(model, x).calls[0].plan
    assert opfuse.plugins.manager.generation > generation
    assert (first.table, bool(second.table)) == ("", True)
    assert first.digest() != second.digest() == opfuse.explain(model, x).calls[0].plan.digest()


@pytest.mark.parametrize(
    "text, expected", [("opfuse-plugin-test", []), ("-tuning", ["Pair"]), (None, [])]
)
def test_a_minus_switches_tables_off_and_a_list_does_not(register, text, expected):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=0.5):
        opfuse.tune(model, x)
    with opfuse.plugins.using(text):
        assert taken(model, x) == expected
        assert bool(opfuse.explain(model, x).calls[0].plan.table) == (not expected)


def test_what_an_author_is_told(register):
    told = []
    register(
        forward_fusions=[
            Fusion(
                [ops.BasicLinear, ops.Bias],
                named("Told"),
                lambda ops, env: told.append(env) or bool(env.measured) or "a guess",
            )
        ]
    )
    model, x = opfuse.Sequential(ops.Linear(8, 4)), tensor(4, 8)
    assert not taken(model, x)
    assert told[0].measured is None
    assert told[0].device_name == device_name("cpu") and told[0].architecture is None
    assert told[0].multiprocessors == torch.get_num_threads()
    with Prescribed() as prescribed:
        opfuse.tune(model, x)
    assert prescribed.asked == ["Told forward"], "a guess does not keep it from being measured"
    assert taken(model, x) == ["Told"]
    assert [env.measured for env in told] == [None, None, math.inf, 1.0]


# Files


def test_the_table_has_an_entry_for_each_measurement(register, folder):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=1.25):
        report = opfuse.tune(model, x)
    path, table = content(folder)
    assert report.path == path and str(path) in str(report)
    (row,) = table["entries"]
    assert row["setting"]["torch"] == torch.__version__
    assert row["setting"]["threads"] == torch.get_num_threads()
    assert row["subject"]["plugin"] == ["opfuse-plugin-test", "1.0"]
    assert row["subject"]["fusion"] == "Pair" and row["found"]["speed"] == 1.25
    with Prescribed(Pair=1.5):
        opfuse.tune(model, x)
        opfuse.tune(model, tensor(64, 32))
    _, table = content(folder)
    assert [row["shape"][0] for row in table["entries"]] == [16, 64]
    assert table["entries"][0]["found"]["speed"] == 1.5, "the newer one replaces the older one"


def test_another_version_of_a_plugin_is_ignored_with_a_sentence(register, folder):
    record = register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=0.5):
        opfuse.tune(model, x)
    assert not taken(model, x)
    record.version = "1.1"
    tables.reload()
    sentence = "has entries of opfuse-plugin-test 1.0, 1.1 is here: they are not used"
    with pytest.warns(opfuse.TuningWarning, match=sentence):
        assert taken(model, x) == ["Pair"]
    with Prescribed(Pair=0.5):
        opfuse.tune(model, x)
    assert not taken(model, x)
    assert len(content(folder)[1]["entries"]) == 1, "those of the other version are gone"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 0, "entries": []}',
        '{"format": 1, "entries": [{"shape": [1, null, true]}]}',
    ],
)
def test_a_corrupt_file_is_named_and_the_run_goes_on(register, folder, text, monkeypatch):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    path = tables.path_for(CPU)
    folder.mkdir()
    path.write_text(text)
    with pytest.warns(opfuse.TuningWarning, match=f"{path.name} is not a tuning table"):
        assert taken(model, x) == ["Pair"]
    assert taken(model, x) == ["Pair"], "said once"
    with pytest.raises(ValueError, match=f"{path.name} is not a tuning table"):
        opfuse.tune(model, x)
    assert path.read_text() == text, "not overwritten"
    monkeypatch.setenv("OPFUSE_STRICT", "1")
    tables.reload()
    with pytest.raises(opfuse.TuningWarning, match="is not a tuning table"):
        model(x)


@pytest.mark.parametrize("name, value", [("saved_by_speed", ""), ("took", math.nan), ("took", -1)])
def test_what_no_tuning_writes_is_refused(register, folder, name, value):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor()
    with Prescribed(Pair=1.5):
        opfuse.tune(model, x)
    path, data = content(folder)
    data["entries"][0]["found"][name] = value
    path.write_text(json.dumps(data))
    tables.reload()
    with pytest.warns(opfuse.TuningWarning, match=f"{name} is "):
        model(x)


def test_tables_that_decide_differently_differ(register, folder):
    register(forward_fusions=[pair()])
    digests = set()
    for found in (
        Measurement(0.9799, 0.0, 0.0),
        Measurement(0.98, 0.0, 0.0),
        Measurement(0.98, 0.1, 0.0),
        Measurement(0.98, 0.0, 0.0, saved_bytes=8),
    ):
        with Prescribed(Pair=found):
            opfuse.tune(chain(), tensor())
        digests.add(tables.table_for(CPU).digest)
    assert len(digests) == 4


def test_an_empty_opfuse_tuning_writes_no_table(register, monkeypatch):
    register(forward_fusions=[pair()])
    monkeypatch.setenv("OPFUSE_TUNING", "")
    assert tables.directory() is None
    model, x = chain(), tensor()
    with Prescribed(Pair=0.5):
        report = opfuse.tune(model, x)
    assert taken(model, x) == ["Pair"] and "Not written: OPFUSE_TUNING is empty" in str(report)
    monkeypatch.delenv("OPFUSE_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere/cache")
    assert str(tables.directory()) == os.path.join("/nowhere/cache", "opfuse", "tuning")


def test_two_ranks_with_different_tables(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    gloo.apart(tuning_ranks.worker, tmp_path)


def test_check_ranks_needs_a_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        opfuse.check_ranks()


# Timing


def test_the_interval_is_of_the_median():
    assert interval([float(n) for n in range(1, 21)]) == (6.0, 10.5, 15.0)
    assert interval([1.0]) == (1.0, 1.0, 1.0)


class Drifting:
    """A clock on which everything takes longer from round to round; functions give seconds."""

    def __init__(self):
        self.called = 0

    def around(self):
        return contextlib.nullcontext()

    def samplers(self, ways):
        def sample(way):
            self.called += 1
            return way() * (1 + (self.called - 1) // len(ways))

        return [functools.partial(sample, way) for (way,) in ways], ""


def test_rounds_compare_ways_while_the_clock_drifts(monkeypatch):
    monkeypatch.setattr(timing.Clock, "of", lambda device: Drifting())
    found = timing.in_rounds([lambda: 1.0, lambda: 2.0, lambda: 0.5], CPU)
    assert [(each.speed, each.noise) for each in found] == [(1.0, 0.0), (0.5, 0.0), (2.0, 0.0)]
    assert found[1].second == 2 * found[1].first == 4 * found[2].second


def test_rounds_of_slow_ways_end(monkeypatch):
    clock, drawn = Drifting(), random.Random(0)
    monkeypatch.setattr(timing.Clock, "of", lambda device: clock)
    found = timing.in_rounds([lambda: 4.0, lambda: drawn.uniform(0.1, 10)], CPU)
    assert found[1].noise > timing.MOST_NOISE and clock.called == 2 * timing._FEW_TURNS


MEASURED = [  # speed, and whether bytes are saved: what a Llama and a BERT in bf16 have
    *[(3.2, 1), (0.98, 1), (2.6, 1), (3.3, 1), (1.8, 1), (1.01, 0), (0.89, 1), (1.56, -1)],
    *[(0.71, 1), (1.06, 1), (1.08, 1), (0.97, 0), (0.72, 1), (1.06, 0), (0.86, 1), (0.99, 0)],
    *[(1.19, 0), (1.0, 0), (1.0, 0), (0.95, 1), (0.8, 1), (0.97, 0), (0.63, -1), (0.82, -1)],
    *[(0.953, 1), (0.91, -1), (1.01, 0), (0.98, 1), (0.95, 0), (0.9, 1), (0.98, 1), (0.99, 1)],
    *[(0.99, 1), (0.985, 1), (1.0, 1), (1.05, 0), (1.1, 1), (0.93, 0), (1.02, 0), (1.4, 0)],
]


class Noisy(Drifting):
    """A clock of one process: it finds every function slower or faster, and samples are noisy."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def samplers(self, ways):
        def sample(way, factor):
            outlier = 1.3 if self.random.random() < 0.05 else 1.0
            return way() * factor * outlier * math.exp(self.random.gauss(0, 0.03))

        found = [(way, math.exp(self.random.gauss(0, 0.004))) for (way,) in ways]
        return [functools.partial(sample, *each) for each in found], ""


def test_two_tunings_of_a_noisy_machine_choose_the_same(monkeypatch):
    choices = []
    for process in range(8):
        clock = Noisy(process)
        monkeypatch.setattr(timing.Clock, "of", lambda device, clock=clock: clock)
        rows = [
            (compare(lambda: 1e-3, lambda s=speed: 1e-3 / s, CPU), saved)
            for speed, saved in MEASURED
        ]
        found = [Measurement(t.speed, t.noise, 0.0, saved) for t, saved in rows]
        choices.append([not m.refusal(trades_time=False, prefer="speed") for m in found])
        used = [speed for (speed, _), use in zip(MEASURED, choices[-1], strict=True) if use]
        assert min(used) >= 0.95  # no time is lost for sure
    pairs = itertools.combinations(choices, 2)
    shares = [sum(map(operator.eq, *both)) / len(MEASURED) for both in pairs]
    assert statistics.mean(shares) >= 0.95, shares


def test_two_ways_are_told_apart():
    found = compare(lambda: spin(0.004), lambda: spin(0.002), CPU)
    assert 1.2 < found.speed < 3 and found.first > found.second


def test_one_way_against_itself_is_not_refused(register, quick):
    register(forward_fusions=[pair()])
    model, x = chain(), tensor(512, 512)
    report = opfuse.tune(model, x)
    assert 0.5 < report.results[0].found.speed < 2, str(report)


@pytest.mark.parametrize("in_many, taken", [(0.95, 0.95), (1.01, 1.03)])
def test_many_turns_decide_whether_a_forward_slows_its_backward(
    register, monkeypatch, in_many, taken
):
    speeds, asked = iter([1.03, 0.95, in_many]), []

    def found(first, second, device, **how):
        asked.append(how)
        return timing.Timing(next(speeds), 0.01, 1e-3, 1e-3)

    monkeypatch.setattr(trial, "compare", found)
    register(forward_fusions=[pair()])
    report = opfuse.tune(chain(), tensor(4, 8))
    assert report.results[0].found.speed == taken, str(report)
    long = {"least": timing.LEAST}
    assert asked == [long, {"most": timing.TURNS}, long]


# Reports


def test_the_report_counts_good_slow_and_wrong_fusions(register):
    fusions = [pair(named(name), name=name) for name in ("good", "slow", "wrong")]
    register(forward_fusions=fusions)
    model, x = chain(), tensor()
    asked = []
    wrong = Measurement(0, 0, 0, wrong="differs from the separate ops: the output is wrong by 4e-2")
    with Prescribed(good=1.5, slow=0.91, wrong=wrong):
        report = opfuse.tune(model, x, progress=lambda *told: asked.append(told))
    assert " ".join(str(report).split()).startswith(
        "3 runs; 1 fusion refused as slower here, worst 0.91x; 1 fusion refused as wrong; 1 fusion "
        "no slower than the separate ops, best 1.50x."
    )
    assert wrong.wrong in " ".join(str(report).split())
    assert (
        "slow, opfuse-plugin-test, on GELU + SiLU at 16 rows: 0.91x +-0.00, not used"
        in " ".join(report.details.split())
    )
    assert json.loads(json.dumps(report.to_dict()))["results"][1]["found"]["speed"] == 0.91
    assert asked == [(0, 3, "good"), (1, 3, "slow"), (2, 3, "wrong"), (3, 3, "")]
    with opfuse.plugins.using(""):
        assert str(opfuse.tune(model, x)).startswith("Nothing to measure")


def test_a_step_that_falls_back_is_counted(register):
    register(forward_fusions=[pair(named("Twin", fallback="Triton has no driver here"))])
    text = str(opfuse.explain(chain(), tensor()))
    assert text.startswith(
        "1 call of fusible ops: forward 1 fused (1 by fallback), 0 separate; backward 0 fused, 2"
    )
    assert "by PyTorch's operations: Triton has no driver here" in " ".join(text.split())


def test_each_fused_step_has_a_range_in_the_profiler(register):
    register(forward_fusions=[pair()], backward_fusions=[pair(named("Back"))])
    model, x = chain(), tensor()
    expected = model(x)
    with torch.profiler.profile() as profile:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    names = {event.name for event in profile.events()}
    assert {
        "Pair of opfuse-plugin-test, forward: GELU + SiLU",
        "Back of opfuse-plugin-test, backward: GELU + SiLU",
    } <= names


def test_a_fused_op_is_told_what_its_condition_was_told(register):
    told = []

    class Told(OneByOne):
        calls: ClassVar = []

        def planned(self, env):
            told.append(env)

    fusion = Fusion(
        [ops.BasicLinear], Told, lambda ops, env: told.append(env) or True, needs=("rows",)
    )
    register(forward_fusions=[fusion])
    opfuse.Sequential(GELU(), ops.Linear(8, 4))(torch.randn(5, 8))
    asked, again, planned = told
    assert (asked.rows, again.rows, planned.rows) == (None, 4, 4) and planned == again
    assert planned.features == 8


def test_traced_code_is_told_that_tune_is_not_for_it():
    def step(x):
        return opfuse.tune(ops.GELU(), x)

    with pytest.raises(Exception, match=r"opfuse\.tune cannot be traced by torch\.compile"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
