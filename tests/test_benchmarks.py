"""The benchmark harness, on tiny shapes and with made-up times; and the gates that every run of the tests passes."""

import dataclasses
import json
import pathlib
import re
import sys
import types
from collections import Counter

import fp32
import pytest
import torch
from checkout import ROOT
from rounding import RoundingPlugin, round_to

import opfuse
from benchmarks import __main__ as command
from benchmarks import (
    chains,
    from_wheels,
    measure,
    models,
    models_page,
    providers,
    report,
    retuned,
    special,
    steps,
)
from benchmarks.cases import CASES, TITLES, Case, Goal, expand, goal
from benchmarks.run import Harness, select, together
from opfuse import ops
from opfuse.ops.authoring import matmul_precision

CPU = torch.device("cpu")


def made_up(times):
    """A timer that takes times instead: for each provider in turn, one that is repeated."""
    values = iter(times)

    def make(passes):
        value = next(values)
        passes[0]()
        return lambda: value

    return make


def harness(times=(1.0,) * 9, **options):
    return Harness(CPU, {"copy_TBps": 1e-3}, rounds=3, make_timer=made_up(times), **options)


FASTER = (Goal("eager", 1.5),)


def case(chain="linear:8x16 gelu", metric="forward+backward", goals=FASTER, **options):
    return Case("C1", chain, 6, metric, goals, dtype="fp32", **options)


# Gates


@pytest.mark.parametrize("name", ["C4", "O6"])  # the first with all plugins, too
def test_each_goal_of_the_suite_is_met(name, one_thread):
    ratios = [row for each in select("cpu", [name]) for row in Harness(CPU, {}).run(each)[1]]
    missed = [row for row in ratios if command.verdict(row).startswith("MISSED")]
    assert not missed, "\n".join(command.show({"ratios": missed, "left_out": []}, 0))
    assert any(row["value"] is not None for row in ratios)


def calls_of(step):
    """How many functions of Python, and of C, run in a step that ran before."""
    for _ in range(3):
        step()
    counts = Counter()
    sys.setprofile(lambda frame, event, arg: counts.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


@pytest.mark.parametrize("count", [1, 4, 20])
def test_the_python_of_a_chain_is_bounded(count, no_plugins):
    """O1 and O2 as counts, which no machine changes: what the fuser adds to a chain, and to each op of it."""
    chain, grad = opfuse.Sequential(*[ops.Identity() for _ in range(count)]), torch.ones(4, 16)
    x, leaf = torch.randn(4, 16), torch.randn(4, 16, requires_grad=True)
    python, c = calls_of(lambda: chain(x))
    assert python <= 13 + count and c <= 17 + count  # 3 to compare modules by identity
    python, c = calls_of(lambda: chain(leaf).backward(grad))
    assert python <= 42 + 2 * count and c <= 57 + count


# Cases and chains


def test_every_goal_has_a_case_and_a_title():
    assert {name for each in CASES for name in each.ids} == set(TITLES)


def test_nothing_is_measured_twice():
    measured = [(each.name, each.special, suite) for each in CASES for suite in each.suites]
    assert len(set(measured)) == len(measured)


def test_the_quick_suite_measures_what_matters_first_and_tunes_nothing():
    quick, full = select("gpu-quick"), select("gpu-full")
    order = list(dict.fromkeys(each.id for each in quick))
    norms_and_casts = [f"M{number}" for number in range(5, 12)]
    assert order[:13] == [*norms_and_casts, "M1", "M2", "M3", "M4", "F1", "F3"]
    assert {"P1", "G7", "G2", "O4"} <= set(order[13:])
    versus = {goal.versus for each in quick for goal in each.goals}
    assert {
        "liger",
        "compile",
        "te",
        "torchao",
        "library",
    } <= versus and "compile-max" not in versus
    assert "compile-max" in {goal.versus for each in full for goal in each.goals}
    assert {each.name for each in quick} < {each.name for each in full}
    assert "G3" in {name for each in quick for name in each.ids}  # still against the library


def test_the_script_of_the_wheelhouse_installs_without_a_network_and_measures(tmp_path):
    names = "opfuse-0.1.0", "opfuse_plugin_norm-0.1.0", "click-8.5.1", "liger_kernel-0.8.5"
    for name in names:
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    others, own, measuring = from_wheels.commands(tmp_path, ["norm", "--budget", "90"])
    assert others[-2:] == ["click", "liger_kernel"] and "--find-links" in others
    assert [pathlib.Path(wheel).name.partition("-")[0] for wheel in own[-2:]] == [
        "opfuse",
        "opfuse_plugin_norm",
    ]
    assert {"--no-index", "--no-deps"} <= set(others) & set(own)
    assert measuring[1:] == ["-m", "opfuse_triton", "gpu", "norm", "--budget", "90"]
    with pytest.raises(SystemExit, match="has no wheel of opfuse"):
        from_wheels.commands(tmp_path / "nothing", [])


# What each id is held to: provider, goal, stretch, bound, in the order of the table


def test_alternatives_in_a_line_expand_and_goals_parse():
    assert list(expand("a{1,2} {x,y}")) == ["a1 x", "a2 y"]
    assert list(expand("[a,b] {1,2}")) == ["a 1", "a 2", "b 1", "b 2"]
    assert goal("x.y<1:2//3@Z") == Goal("y", 0.5, None, 3.0, "x", cost=True, id="Z")
    with pytest.raises(ValueError, match="expected a goal such as"):
        goal("eager~1")


def small(chain):
    def shrink(part):
        name, _, sizes = part.partition(":")
        return (
            name
            + ":" * bool(sizes)
            + "x".join(str(max(2, int(n) // 32)) for n in sizes.split("x") if n)
        )

    return " ".join(shrink(part) for part in chain.split())


@pytest.mark.parametrize("chain", sorted({small(each.chain) for each in CASES if each.chain}))
@pytest.mark.parametrize("name", ["eager", "opfuse-off", "opfuse"])
def test_a_provider_computes_the_chain(chain, name):
    casts = chain.endswith(("cast", "castt"))
    if (casts or chain.startswith("product")) and name != "eager":
        pytest.skip("needs a recipe")
    work = chains.Work(chain, 16, 32, "fp32", CPU)
    built = providers.PROVIDERS[name](work, case(chain, unfused=True))
    with measure.around(built, "inference" if casts else "forward"):
        results = work.results(built.model, built.params, work.inputs[0], not casts)
    assert chains.error(results, work.reference(not casts)) < (0.1 if casts else 1e-4)


def test_widths_and_flops_follow_from_the_chain():
    chain = "matmul:8x32 swiglu matmul:16x8"
    assert chains.widths(chain, 0) == [8, 32, 16, 8]
    assert chains.widths("swiglu", 12) == [12, 6]
    assert chains.widths("add fork rmsnorm:4", 0) == [4, 4, 4, 4]
    assert chains.flops(chain, 3, "forward") == 2 * 3 * (8 * 32 + 16 * 8)
    assert chains.flops(chain, 3, "forward+backward") == 3 * chains.flops(chain, 3, "forward")


def test_what_is_unwritten_missing_or_broadcast_is_wrong():
    ones = torch.ones(4, 4, dtype=torch.float64)
    assert chains.error([ones, ones], [ones]) == 0
    assert chains.error([ones * 1.5], [ones]) == pytest.approx(0.5)
    for results in ([ones], [ones[:1], ones], [ones * torch.nan, ones]):
        assert chains.error(results, [ones, ones]) == float("inf")


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    work = chains.Work("linear:8x16 gelu linear:16x8", 4, 0, "fp32", CPU)
    assert measure.saved_bytes(providers.eager(work, None), work.inputs[0]) == 4 * 4 * (8 + 16 + 16)
    work = chains.Work("swiglu", 4, 8, "fp32", CPU)
    assert measure.saved_bytes(providers.eager(work, None), work.inputs[0]) == 4 * 4 * (8 + 4)


# What a ratio is


def test_a_ratio_says_how_many_times_faster(no_plugins, register, fused):
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear, ops.Bias), fused())])
    rows, ratios = harness([1.0, 2.0, 3.0, 1.0]).run(
        case(goals=(Goal("eager", 1.5), Goal("eager", 0.5, cost=True)))
    )
    assert {row["provider"]: row["median_us"] for row in rows} == {
        "opfuse": 1,
        "opfuse-off": 2,
        "eager": 3,
    }
    assert [(row["value"], row["pass"]) for row in ratios] == [
        (3.0, True),
        (pytest.approx(1 / 3), True),
    ]
    assert ratios[0]["noise"] == 0 and ratios[0]["beyond_noise"]
    assert rows[0]["rel_err"] < 1e-5 and rows[0]["config"]["fused"] == ["forward Fused"]


def test_the_noise_is_also_that_of_the_other(no_plugins):
    def make(passes):
        # the first one warms up
        values = iter([1.0] * 9 if len(made) != 1 else [9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        made.append(1)
        return lambda: next(values)

    made = []
    each = case("identity", "inference", (Goal("eager", 1.5, subject="opfuse-off"),), width=4)
    (row,) = Harness(CPU, {}, rounds=5, make_timer=make).run(each)[1]
    assert row["value"] == 3 and row["noise"] == pytest.approx((1 / 2 - 1 / 4) / 2 * 3)
    assert row["pass"] and row["beyond_noise"]


def test_a_share_of_the_bandwidth(register, fused):
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear, ops.Bias), fused())])
    goal = (Goal("sol", 0.9),)
    (row,) = harness([2.0, 1.0, 1.0, 2.0]).run(
        case(metric="forward", goals=goal, element_bytes=500)
    )[1]
    assert (row["value"], row["pass"]) == (pytest.approx(6 * 16 * 500 / 2e-6 / 1e9), True)


def test_a_share_of_the_products_that_a_provider_makes():
    found = Harness(CPU, {"fp8_TF": 4.0, "bf16_TF": 2.0, "fp32_TF": 1.0})
    quantized = Case("F3", "matmul:100x100", 50, "inference", recipe="DelayedScaling")
    plain = dataclasses.replace(quantized, recipe="", dtype="fp32")
    for each, name, share in (
        (quantized, "opfuse", 0.25),
        (quantized, "te", 0.25),
        (quantized, "eager", 0.5),
        (plain, "eager", 1.0),
        (plain, "eager-medium", 0.5),
    ):
        assert found._shares(each, name, [1.0])["flops_share"] == pytest.approx(share)


@pytest.mark.parametrize("way", fp32.WAYS)
def test_medium_precision_is_for_a_block(way):
    with fp32.restored():
        *before, act = fp32.WAYS[way]
        act()
        with providers._medium():
            assert [matmul_precision(kind) for kind in ("cpu", "cuda")] == ["bf16", "tf32"]
        assert [matmul_precision(kind) for kind in ("cpu", "cuda")] == before


def test_what_is_not_built_has_no_pass_and_counts_once_it_is(register, fused):
    each = case("rmsnorm:8")
    rows, (row,) = harness().run(each)
    assert row["pass"] is None and row["value"] is None and row["reason"].startswith("not built")
    assert {row["provider"]: row["status"] for row in rows}["eager"] == "ok"
    register(backward_fusions=[opfuse.Fusion((ops.RMSNorm,), fused())])
    assert harness().run(each)[1][0]["pass"] is False
    # it fuses the other pass
    assert harness().run(case("rmsnorm:8", "forward"))[1][0]["pass"] is None


def test_a_wrong_answer_is_not_timed(register):
    class Wrong(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * 2, [()]

    register(forward_fusions=[opfuse.Fusion((ops.Identity,), Wrong)])
    rows, (row,) = harness().run(case("identity", "inference", width=4))
    assert rows[0]["status"].startswith("wrong answer") and rows[0]["median_us"] is None
    assert row["pass"] is False and row["value"] is None


def test_the_answer_that_is_checked_is_that_of_the_pass_that_is_timed(register):
    class WrongInTraining(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * (2 if basic_op_ctxs[0].requires_grad else 1), [()]

    register(forward_fusions=[opfuse.Fusion((ops.Identity,), WrongInTraining)])
    for metric, right in (("inference", True), ("forward", False)):
        rows, (row,) = harness().run(case("identity", metric, width=4))
        assert rows[0]["status"].startswith("ok" if right else "wrong answer")
        assert (row["value"] is not None) == right


def test_a_wrong_gradient_in_place_is_not_timed(register):
    class Wrong(opfuse.FusedOperation):
        factor = 1.0

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            gelu = basic_op_ctxs[1]
            z = gelu.saved_tensors[0]
            dx = torch.ops.aten.gelu_backward(grad_output, z, approximate="tanh")
            return dx, [(dx.sum(0) * self.factor,), ()], [(), ()]

    register(backward_fusions=[opfuse.Fusion((ops.Bias, ops.GELU), Wrong)])
    each = case("bias:8 gelu", "backward in place", special="in_place", rounds=2)
    assert harness().run(each)[1][0]["value"] is not None
    Wrong.factor = 1.5
    (row,) = harness().run(each)[1]
    assert row["pass"] is False and row["value"] is None
    assert "wrong answer: relative error" in row["reason"]


def test_a_product_is_of_tensors_that_are_quantized_already(register, fused):
    each = case(
        "product:8x16", "inference", (Goal("eager", 1.0),), recipe="Rounding", tolerance=1e-5
    )
    assert harness().run(each)[1][0]["reason"] == "not built: no plugin offers the recipe Rounding"
    register(RoundingPlugin())
    assert harness().run(each)[1][0]["reason"] == "not built: no plugin fuses anything here"
    multiply = fused("Multiply")
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear,), multiply)])
    rows, (row,) = harness([1.0, 2.0, 1.0]).run(dataclasses.replace(each, tolerance=0.5))
    assert rows[0]["rel_err"] < 1e-6 and row["value"] == 2
    assert "forward Multiply" in rows[0]["config"]["fused"]
    work = chains.Work(each.chain, 6, 0, "fp32", CPU)
    torch.testing.assert_close(
        providers.with_opfuse(work, each).reference[0].float(),
        round_to(work.inputs[0][0]) @ round_to(work.params[0]).t(),
    )


def test_recomputing_is_seen_by_what_is_saved(register, fused):
    each = case("swiglu matmul:8x2", "backward", (Goal("eager", 1.3),), recompute=True)
    register(backward_fusions=[opfuse.Fusion((ops.SwiGLU,), fused())])
    assert harness().run(each)[1][0]["reason"].startswith("not built: it saves more than its input")
    assert harness().run(dataclasses.replace(each, chain="swiglu", width=8))[1][0]["value"] == 1


def test_a_peer_that_fails_or_is_missing_is_skipped_with_a_reason(no_plugins, monkeypatch):
    def fails(work, case):
        raise RuntimeError("0 active drivers")

    monkeypatch.setitem(providers.PROVIDERS, "compile", fails)
    goals = tuple(
        Goal(name, 1.0, subject="opfuse-off")
        for name in ("compile", "liger", "te", "compile-max", "library")
    )
    ratios = harness().run(case("linear:8x8", goals=goals))[1]
    assert [row["pass"] for row in ratios] == [None] * 5
    assert all(row["reason"].startswith(row["den"]) for row in ratios)
    assert "0 active drivers" in ratios[0]["reason"]


@pytest.mark.parametrize("fails, who", [(5, "opfuse-off"), (6, "eager"), (8, "opfuse-off")])
def test_what_fails_while_it_is_timed_leaves_the_others_alone(no_plugins, fails, who):
    taken = []  # four turns a round, the last one "again"

    def make(passes):
        def sample():
            taken.append(1)
            if len(taken) == fails:
                raise RuntimeError("an illegal memory access")
            return 2.0

        return sample

    goals = (Goal("eager", 1.0, subject="opfuse-off"), Goal("bare", 1.0, subject="eager"))
    rows, ratios = Harness(CPU, {}, rounds=5, make_timer=make).run(
        case("identity", "inference", goals, width=4)
    )
    status = {row["provider"]: row["status"] for row in rows}
    assert status.pop(who) == "failed: RuntimeError: an illegal memory access"
    assert set(status.values()) == {"ok"} and ratios[0]["value"] is None
    if who == "opfuse-off":  # who was to tell the noise is gone, so nobody knows it
        assert ratios[0]["pass"] is False
        assert ratios[1]["value"] == 1 and ratios[1]["noise"] is ratios[1]["beyond_noise"] is None


def test_a_case_that_breaks_is_told_and_the_others_are_kept(monkeypatch, tmp_path, one_thread):
    pytest.importorskip("tqdm")
    out, seen = tmp_path / "run.json", []

    def broken(self, backward):
        seen.append(len(report.load(out)["cases"]))  # there before the next one begins
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(chains.Work, "reference", broken)
    arguments = ["--suite", "cpu", "--ids", "O6,P1", "--no-ceilings", "--out", str(out)]
    assert command.main(arguments) == 0
    reasons = [row["reason"] for row in report.load(out)["ratios"]]
    assert seen == [1] and reasons == ["", "failed: RuntimeError: CUDA error"]


def test_peak_memory_is_of_a_call_with_the_plugins_of_its_provider(register, fused, monkeypatch):
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear, ops.Bias), fused())])
    selections = []

    def peak(step, device):
        selections.append(opfuse.core.settings.current.selection)
        return 100 * len(selections)

    monkeypatch.setattr(measure, "peak_bytes", peak)
    (row,) = harness().run(case(metric="peak bytes", goals=(Goal("eager", 0.5, cost=True),)))[1]
    assert selections == [None, "", None] and row["pass"]
    assert row["value"] == pytest.approx(1 / 3)


def test_noise_is_a_provider_against_itself():
    assert measure.noise([1.0] * 5, [1.0] * 5) == 0
    assert measure.noise([1.0, 1.1, 0.9, 1.2, 0.8], [1.0] * 5) == pytest.approx(0.1)
    assert measure.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("threads, clock", [(1, "process_time"), (2, "perf_counter")])
def test_the_clock_of_a_cpu(monkeypatch, threads, clock):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name in ("process_time", "perf_counter"):
        ticks = iter(range(9))
        monkeypatch.setattr(
            measure.time, name, lambda ticks=ticks, name=name: next(ticks) * (1 + (name == clock))
        )
    assert measure.cpu_timer([lambda: None])() == 2e6


def test_each_round_measures_every_sampler_in_turn():
    order = []
    samplers = {
        name: (lambda name=name: order.append(name) or 1.0, torch.no_grad) for name in "abc"
    }
    measure.sample_rounds(samplers, 2, 1)
    assert "".join(order) == "abc" * 3


def test_several_ratios_are_judged_by_their_geometric_mean():
    rows = [{"id": "G1", "value": value} for value in (0.9, 1.1)]
    assert together(rows)[0]["value"] == pytest.approx(0.99**0.5) and together(rows)[0]["pass"]
    assert together([*rows, {"id": "G1", "value": None}])[0]["pass"] is None
    assert together([]) == []


# What is no timed pass


@pytest.mark.parametrize("backward", [False, True])
def test_one_step_of_a_plan_alone(no_plugins, backward):
    work = chains.Work("linear:4x8 gelu", 3, 0, "fp32", CPU)
    model = work.fill(opfuse.Sequential(ops.Linear(4, 8), ops.GELU()))
    step, quantizer, _ = steps.alone(model, work.inputs[0], ops.GELU, backward=backward)
    z = (
        torch.randn(3, 8)
        if not backward
        else torch.nn.functional.linear(work.inputs[0][0], *work.params).detach()
    )
    gelu = torch.nn.functional.gelu(z.requires_grad_(), approximate="tanh")
    assert quantizer is None
    if not backward:
        return torch.testing.assert_close(step(z), gelu)
    torch.testing.assert_close(
        step(work.grads[0])[0], torch.autograd.grad(gelu, z, work.grads[0])[0]
    )


def test_hook_calls_are_seen(register, monkeypatch):
    goals, options = (Goal("self", 0, cost=True),), {"special": "hook_calls", "unfused": True}
    each = case("linear:4x4", "hook calls", goals, **options)
    assert special.hook_calls(each, CPU) == {"opfuse": [0]}
    forward = opfuse.Sequential.forward

    def calling(self, *inputs):
        opfuse.plugins.manager._pluggy.hook.opfuse_forward_fusions()
        return forward(self, *inputs)

    monkeypatch.setattr(opfuse.Sequential, "forward", calling)
    (row,) = harness().run(each)[1]
    assert (row["value"], row["pass"]) == (3, False)


def test_saved_bytes_that_are_not_declared_are_seen(no_plugins, monkeypatch):
    (each, *_) = select("cpu", ["C4"])
    found = special.saved_as_planned(each, CPU)
    assert found["opfuse-off"] == found["plan"]
    monkeypatch.setattr(ops.Bias, "saved_names", ("input",))
    (fuser,) = opfuse.Sequential(ops.Bias(4))._module_groups
    assert special.declared_bytes(fuser, chains.Work("bias:4", 2, 0, "fp32", CPU)) == 32


# The command line and the reports


def test_the_budget_leaves_out_what_comes_last(capsys, one_thread):
    pytest.importorskip("tqdm")
    arguments = "--suite cpu --ids C4 --budget 1e-9 --no-ceilings --check".split()
    assert command.main(arguments) == 1
    told = capsys.readouterr().out
    assert "left out 5 cases" in told and "no goal was checked" in told


HOST = {
    "host": {"cpu": "c", "threads": 1, "load": 0.0},
    "versions": {"torch": "2", "opfuse": "1", "plugins": {}},
}
EMPTY = HOST | {"schema": 2, "gpu": None, "cases": [], "ratios": []}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--suite cpu --ids M99", "--ids: expected ids of C1, .*; got M99"),
        ("--suite cpu --ids O1,M1", "--ids: M1: not in the suite cpu, which has C1, "),
        ("--suite cpu --providers nobody", "--providers: expected some of opfuse, .*; got nobody"),
        ("compare gone.json gone.json", "got gone.json: .*No such"),
        ("compare broken.json broken.json", "got broken.json: Expecting property name"),
        ("compare part.json part.json", "got part.json: no ratios in it"),
        ("compare empty.json empty.json", "empty.json and empty.json have no ratio in common"),
    ],
)
def test_what_says_nothing_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = {"broken": "{", "empty": json.dumps(EMPTY), "part": '{"ratios": []}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    told = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert re.search(message, told.replace("\n", " "))


def test_a_missed_goal_fails_the_check():
    row = {"pass": False, "value": 1.3, "goal": 1.15, "cost": True, "reason": "", "exact": False}
    assert command.verdict(row) == "MISSED" and command.verdict(row, 0.2) == "met"
    gain = row | {"value": 0.9, "goal": 1.0, "cost": False}
    assert command.verdict(gain, 0.2) == "met"
    assert command.verdict(gain | {"value": 1.5, "exact": True}, 0.2) == "MISSED"
    unknown = row | {"pass": None, "value": None, "reason": "not built: x"}
    assert command.verdict(unknown) == "not built: x"


ROW = dict(id="C1", case="x", num="opfuse", den="eager", metric="forward", cost=False, noise=0.01)
ROW |= dict(goal=1.0, exact=False, reason="", bound=None, beyond_noise=True, value=1.0)
ROW["pass"] = True


@pytest.mark.parametrize(
    "about, before, after, told",
    [
        ({}, 1.5, 1.2, "   1.500   1.200  -20.0%  WORSE"),
        ({}, 1.0, 1.03, "   1.000   1.030   +3.0%"),
        ({"cost": True}, 1.5, 1.2, "-20.0%  better"),
        # hook calls
        ({"cost": True, "goal": 0, "noise": 0.0}, 0, 3, "   0.000   3.000      +3  WORSE"),
        ({"exact": True, "noise": 0.0}, 1.0, 1.1, "+10.0%  WORSE"),
        ({"exact": True, "noise": 0.0}, 0.9, 1.0, "+11.1%  better"),
        ({"reason": "wrong answer"}, 1.5, None, "   1.500                  after: wrong answer"),
    ],
)
def test_compare_tells_what_became_worse(about, before, after, told, tmp_path, capsys):
    for name, value in (("a", before), ("b", after)):
        (tmp_path / name).write_text(
            json.dumps(EMPTY | {"ratios": [ROW | about | {"value": value}]})
        )
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.endswith(told + "\n")


@pytest.mark.parametrize(
    "value, passed, noise, told",
    [
        (1.05, True, 0.05, "met, within the noise"),
        (1.15, True, 0.05, "met"),
        (0.95, False, 0.05, "missed, within the noise"),
        (0.85, False, 0.05, "**missed**"),
        (1.0, True, 0.0, "met"),
        (1.0, True, None, "met"),
    ],
)
def test_a_verdict_that_noise_could_turn_says_so(value, passed, noise, told):
    row = ROW | {"value": value, "pass": passed, "noise": noise}
    assert report.table([row])[-1].endswith(f"| {told} |")
    (line,) = command.show({"ratios": [row], "left_out": []}, 0.0)
    assert line.lower().endswith(told.replace("*", ""))


def test_compare_tells_other_machines_and_what_one_run_has_alone(tmp_path, capsys):
    host = HOST["host"] | {"threads": 2, "allocator": "tuned"}
    (tmp_path / "a").write_text(json.dumps(EMPTY | {"ratios": [ROW]}))
    other = EMPTY | {"host": host, "ratios": [ROW, ROW | {"id": "C2"}]}
    (tmp_path / "b").write_text(json.dumps(other))
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "of different machines or settings: c, 1 thread(s); torch 2"
    assert second.strip() == "and: c, 2 thread(s); allocator tuned; torch 2"
    assert last == "1 ratios are in one of the two only"


def test_a_partial_run_hides_nothing(monkeypatch):
    runs = {}
    for name, time, suite, cases, value in (
        ("old", "2026-01-01", "cpu", "ab", 1),
        ("new", "2026-01-02", "cpu", "b", 2),
        ("gpu", "2026-01-03", "gpu-quick", "b", 3),
        ("older", "2025-01-01", "cpu", "a", 4),
        ("tuned", "2024-01-01", "cpu", "a", 5),
    ):
        row = {"id": "C2", "num": "opfuse", "den": "eager", "metric": "backward", "value": value}
        runs[name] = {
            "time": time,
            "suite": suite,
            "host": {"allocator": "tuned" if name == "tuned" else "default"},
            "ratios": [row | {"case": case} for case in cases],
            "cases": [{"id": "C2", "case": case, "of": value} for case in cases],
        }
    monkeypatch.setattr(report, "runs_in", lambda folder: runs)
    found = report.committed()
    assert [[(r["case"], r["value"]) for r in run["ratios"]] for run in found] == [
        [("b", 3)],
        [("b", 2)],
        [("a", 1)],
        [("a; tuned allocator", 5)],
    ]
    assert [[c["of"] for c in run["cases"]] for run in found] == [[3], [2], [1], [5]]


def test_what_is_too_noisy_is_neither_met_nor_missed():
    rows = [
        ROW | {"id": "L3", "value": value, "pass": passed, "noise": noise, "goal": 0.97}
        for value, passed, noise in ((1.0, True, 0.01), (0.5, False, 0.3), (15.3, True, 1.3))
    ]
    ((missed, line),) = report.swarms(rows)
    assert missed == 0 and "3 cases, 2 of them too noisy to say; median 1, worst 1" in line
    for row, size in zip(rows, ("4x8", "6x8", "9x8"), strict=True):
        over = {"opfuse-off / eager": row["value"], "opfuse-off / hand": 1.25}
        row |= {"case": f"forward, gelu, fp32 of {size}", "beside": over}
    missed = rows[0] | {"case": "forward, norm:8, fp32 of 6", "pass": False, "goal": 0.8}
    assert report.alone([*rows, missed]) == [
        "| op | forward, fp32 of 4x8 | forward, fp32 of 6x8 | forward, fp32 of 9x8 |",
        "|---|---|---|---|",
        "| gelu | 1.00/1.25 | (0.50/1.25) | (15.30/1.25) |",
        "| norm |  | **1.00/1.25** ≥0.8 |  |",
    ]
    assert report.pictured([{"ratios": [row | {"id": "C1"} for row in rows]}]) == [
        rows[0] | {"id": "C1"}
    ]
    assert report.percent(1.3) == "130 %" and report.percent(0.00056) == "0.056 %"


def test_a_case_is_named_once_and_under_its_machine():
    others = ({"den": "compile"}, {"case": "y; tuned allocator"}, {"case": "y; A GPU"})
    lines = report.tables([ROW, *(ROW | other for other in others)])
    first, second = [line for line in lines if "C1" in line][:2]
    assert first.startswith("| x | C1 | eager |") and second.startswith("|  | C1 | compile |")
    machines = [line for line in lines if line.startswith("**")]
    assert machines == ["**CPU**", "**CPU, tuned allocator**", "**A GPU**"]
    assert sum(line.startswith("| y |") for line in lines) == 2


def test_the_page_is_current():
    text, fingerprint = report.written(report.committed())
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == text, (
        "run python -m benchmarks page"
    )
    assert fingerprint in (ROOT / "docs" / "performance.svg").read_text(encoding="utf-8")


# Models


@pytest.mark.filterwarnings("ignore:::transformers")
@pytest.mark.parametrize("way", ["converted", "memory"])
def test_one_way_of_a_model_against_eager(monkeypatch, one_thread, tmp_path, way):
    pytest.importorskip("transformers")
    from opfuse.tuning import timing

    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    for name, size in {"WIDTH": 64, "TOKENS": 16, "VOCABULARY": 128, "LAYERS": 1}.items():
        monkeypatch.setattr(models, name, size)
    found = [timing.Timing(1.0, 0.0, 3.0, 3.0), timing.Timing(1.5, 0.0, 3.0, 2.0)]
    monkeypatch.setattr(timing, "in_rounds", lambda ways, device: found)
    given = types.SimpleNamespace(models="gpt2", dtypes="bf16", threads=1, part=way)
    (row,) = models.run(given)
    assert row["way"] == way
    assert (row["speed"], row["ms"], row["eager_ms"]) == (1.5, 2e3, 3e3)
    assert 0 < row["saved_mb"] < row["eager_mb"] and row["first_s"] > 0
    assert row["as_chains"] == row["modules"] > 0 == len(row["own_forward"])


def a_row(way="converted", **changed):
    row = {"model": "llama", "dtype": "bf16", "way": way, "speed": 1.25, "saved_mb": 5.0}
    row |= {"eager_mb": 10.0, "eager_ms": 100.4, "modules": 11, "as_chains": 7}
    return row | {"own_forward": [models_page.APART, "it is slower"]} | changed


def test_the_tables_of_models():
    rows = [a_row(), a_row("memory", saved_mb=2.0, as_chains=9, own_forward=[models_page.APART])]
    table = models_page.speeds(rows)
    assert "| Llama, bf16 | 100\u00a0ms | 1.25 | 1.25 |  |" in table
    assert "| Llama, bf16 | 10\u00a0MB | 0.50 | 0.20 |  |" in table
    assert "| Llama | 1.50x | 1.25x | 0.50x | 1.10x | 0.60x |" in models_page.summary(
        [a_row(), a_row(dtype="fp32", speed=1.5), a_row("compile", speed=1.1, saved_mb=6.0)]
    )
    assert "| Llama, bf16 | 7 of 9 | 9 of 9 | it is slower |" in models_page.shares(rows)
    page = "a\n<!-- models: speed -->\nold\n<!-- end of speed -->\nb"
    assert models_page.replaced(page, "speed", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="once in the page, got 0"):
        models_page.replaced("", "speed", "new")


def test_the_pages_have_the_committed_numbers_of_models():
    path = ROOT / "benchmarks" / "results" / "cpu-models.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {"index.md": models_page.summary(rows), "models.md": models_page.speeds(rows)}
    found["bring-your-model.md"] = models_page.shares(rows)
    for page, table in found.items():
        assert table in (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert {(row["model"], row["dtype"], row["way"]) for row in rows} == {
        (model, dtype, way)
        for model in models.MODELS
        for dtype in models.DTYPES
        for way in models.WAYS
    }


def test_the_page_of_budgets_has_the_committed_numbers():
    path = ROOT / "benchmarks" / "results" / "cpu-budgets.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "memory-budget.md").read_text(encoding="utf-8")
    assert models_page.budgets(rows) in page
    found = models_page.grouped(rows)
    assert {*found} == {(m, d) for m in models.MODELS for d in ("bf16", "autocast")}
    for dtype in ("bf16", "autocast"):  # the goal is at most 3 of 25
        plans = [(ways, way) for (_, d), ways in found.items() if d == dtype for way in ways]
        plans = [pair for pair in plans if pair[1] in models_page.BUDGETS]
        assert len(plans) == 25
        beaten = sum(models_page.beaten(*pair) > 0 for pair in plans)
        assert beaten <= 3 or f"{beaten} of 25 plans in {dtype}" in page


def test_a_budget_that_is_better_in_both_has_a_star():
    budget = {"model": "llama", "dtype": "bf16", "eager_mb": 10.0, "noise": 0.01}
    ways = {}
    for place, (plan, other) in enumerate(models_page.BUDGETS.items()):
        ways[plan] = budget | {"way": plan, "speed": 1.0, "saved_mb": 5.0}
        ways[other] = budget | {"way": other, "speed": 0.9, "saved_mb": 4.0 + place}
    ways["compile-1"] = budget | {"way": "compile-1", "speed": 1.2, "saved_mb": 6.0}
    table = models_page.budgets(list(ways.values()))
    assert "| 1.00, 0.50 |" in table and "*" not in table
    ways["compile-0.5"] |= {"speed": 1.01, "saved_mb": 4.9}
    assert "1.00, 0.50* |" in models_page.budgets(list(ways.values()))
    ways["compile-0.5"] |= {"speed": 1.03}
    assert "1.00, 0.50** |" in models_page.budgets(list(ways.values()))


def test_tunings_agree_in_a_share_of_what_they_chose():
    entry = {"times": 0.98, "noise": 0.02, "us": -1.0, "saved": 8, "configuration": None}
    tunings = [
        {"entries": {"a": entry | {"speed": use, "memory": True}, "b": entry | {"speed": 1} | both}}
        | {p: {"speed": 1.0, "noise": 0.01, "kept": 0.5, "runs": [f"x{use}"]} for p in both}
        for use in (True, False)
        for both in [{"speed": True, "memory": True}]
    ]
    text = retuned.told({"model": "llama", "dtype": "bf16", "tunings": tunings})
    assert "speed: two tunings agree in 50.0% of 2 entries" in text
    assert "memory: two tunings agree in 100.0% of 2 entries" in text
    assert text.count("differs: a, saves 8: 0.980+-0.020 used, 0.980+-0.020 refused") == 1
    assert "1 of 2: xTrue" in text


# The cost of the batch-invariant mode


def test_what_the_page_says_of_the_bits_in_every_batch_was_measured():
    text = (ROOT / "benchmarks" / "results" / "cpu-invariant.json").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "same-numbers.md").read_text(encoding="utf-8")
    record = json.loads(text)
    assert record["threads"] == 1 and "family" in record["cpu"] and len(record["rows"]) == 12
    for row in record["rows"]:
        count, alone = row["rows"], row["of_64_rows_alone_differ"]
        times = f"{row['plain_ms']:.1f} | {row['invariant_ms']:.1f} | {row['ratio']:.2f}"
        assert f"| {row['dtype']} | {count} | {times} | {alone} of {min(count, 64)} |" in page


def test_its_command_measures_both_sides(tmp_path, monkeypatch, capsys, no_plugins):
    from benchmarks import invariant

    out, threads = tmp_path / "out.json", torch.get_num_threads()
    given = ["--hidden", "8", "--rows", "2,65", "--dtypes", "float32", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["invariant.py", *given, "--out", str(out)])
    try:
        invariant.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["rows"] for row in rows] == [2, 65]
    assert all(row["plain_ms"] >= 0 and row["invariant_ms"] > 0 for row in rows)
    assert f"rows {rows[1]['rows']}" in capsys.readouterr().out
