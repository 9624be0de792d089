"""The benchmark harness, on tiny shapes and with made-up times; and the gates that every run of the tests passes."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import types
from collections import Counter

import fp32
import pytest
import torch
from fakes import make_plugin
from rounding import RoundingPlugin, round_to

import opfuse
from opfuse import ops
from opfuse.core.authoring import matmul_precision

ROOT = pathlib.Path(__file__).parents[1]


def _package():
    """The package by its path: the checkout must not be on ``sys.path``, where it would hide the installed opfuse."""
    place = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["benchmarks"])


_package()
from benchmarks import __main__ as command  # noqa: E402
from benchmarks import chains, measure, models, models_page, providers, report, special, steps  # noqa: E402
from benchmarks.cases import CASES, TITLES, Case, Goal, expand, goal  # noqa: E402
from benchmarks.run import Harness, select, together  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("name", ["O6", "C4"])
def test_gate(name, one_thread):
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
    assert python <= 13 + count and c <= 14 + count
    python, c = calls_of(lambda: chain(leaf).backward(grad))
    assert python <= 42 + 2 * count and c <= 54 + count


# Cases and chains


def test_every_goal_has_a_case_and_a_title():
    have = {name for each in CASES for name in each.ids}
    assert have == set(TITLES) and have == {*NUMBERS, "L1", "L2", "L3"}


def test_nothing_is_measured_twice():
    measured = [(each.name, each.special, suite) for each in CASES for suite in each.suites]
    assert len(set(measured)) == len(measured)


# What each id is held to: provider, goal, stretch, bound, in the order of the table
NUMBERS = {
    "M1": ["sol>0.92/0.97/1", "eager>1.8//2"],
    "M2": ["sol>0.88/0.93/1", "eager>1.22//1.33"],
    "M3": ["sol>0.92/0.97/1", "eager>1.55//1.67", "liger>1"],
    "M4": ["sol>0.88/0.93/1", "eager>1.55//1.8", "liger>1", "eager>1.3//1.5"],
    "M5": ["sol>0.92/0.96/1", "compile>1"] * 3,
    "M6": ["sol>0.85/0.9/1", "liger>2/3/3.5", "compile>0.97"] * 3,
    "M7": ["sol>0.9/0.95/1", "eager>1.15//1.25"] * 3,
    "M8": ["sol>0.85/0.9/1", "eager>1.35//1.5"] * 3,
    "M9": ["sol>0.9/0.94/1", "torchao>1", "sol>0.85/0.9/1", "torchao>1"] * 2,
    "M10": ["sol>0.85/0.9/1", "separate>1.7//2"],
    "M11": ["sol>0.85/0.9/1", "sol>0.8/0.87/1"],
    "G1": ["eager>0.9/0.95"] * 34,
    "G2": [
        "eager>1.05/1.08/1.1",
        "eager>1.12/1.16/1.19",
        "eager>1.22/1.3/1.38",
        "eager>1.28/1.4/1.51",
    ],
    "G3": ["compile-max>1", "library>0.97", *["compile-max>1/1.05", "library>0.97/1.05"] * 3],
    "G4": [
        "eager>1.03/1.04/1.05",
        "eager>1.07/1.08/1.1",
        "eager>1.14/1.144/1.18",
        "eager>1.18/1.176/1.22",
    ],
    "G5": ["eager>1.07/1.11/1.14", "eager>1.02/1.03/1.04"],
    "G6": [
        "eager>1.06/1.1/1.12",
        "liger>1.02/1.05/1.07",
        "eager>1.14/1.2/1.24",
        "liger>1.06/1.1/1.14",
    ],
    "G7": ["eager>1.03/1.05/1.075", "liger>1/1.02/1.043", "compile>0.99/1.01"],
    "G8": ["eager>1.12/1.2/1.3", "liger>1.03/1.08/1.17", "compile>1.02"],
    "G9": ["eager>1.08/1.13/1.2", "eager>1.1/1.17/1.27"],
    "F1": ["library>0.95/1"] * 2,
    "F2": ["library>0.75/0.85/1.5"] * 7,
    "F3": ["eager>1.5/1.56/1.62", "eager>1.25/1.29/1.33", "eager>1.42/1.48/1.55"],
    "F4": ["torchao>1.03/1.08", "torchao-rowwise>1.03/1.08"],
    "F5": ["te>0.97/1.02"] * 3,
    "F6": ["eager>0.8/0.95"],
    "P1": ["eager<0.55/0.5/0.53", "liger<0.72//0.7", "eager<0.55/0.5/0.53"],
    "P2": ["eager<0.75/0.65"],
    "O1": ["opfuse-off.bare<12:4.3/9:4.3/1", "opfuse-off.bare<28:17/23:17/1"],
    "O2": [
        "eager<1.25/1.05/1.04",
        "opfuse-off.eager<1.7",
        "eager<1.15/1/0.96",
        "opfuse-off.eager<1.4",
    ],
    "O3": ["te<0.6/0.4"] * 4,
    "O4": ["self<5/3.5/2.2"],
    "O5": ["self=1"] * 21,
    "O6": ["self<0"],
    "O7": ["self<0.5/0.3", "self<15/8"],
    "C1": [
        *["eager>2/2.1/2.1", "eager-medium>1/1.05/1.06", "compile>0.99/1.02"] * 2,
        *["eager>1/1.1/1.12", "compile>0.99/1.02"] * 2,
    ],
    "C2": ["eager>2.3/2.6/2.6", "eager>2.3/2.7/2.7"],
    "C3": [
        "eager>6/10/12.9",
        "compile>1",
        "eager>5/6/6.2",
        "compile>1",
        "eager>2.2/2.5/2.5",
        "compile>1",
    ],
    "C4": ["opfuse-off.plan=1", "fused-plan=1"] * 5,
}
ROWS = {
    "G1": {8192, 50432, 16384, 15872},
    "F1": {4096, 8192},
    "F2": {16640, 8192},
    "F6": {4096},
    "C1": {1024, 4096},
}
ROWS |= {
    "G2": {8192, 50432, 16384},
    "G3": {8192, 50432, 16384},
    "G4": {8192, 50432, 16384},
    "G9": {50432, 16384},
}
ROWS |= {
    "G8": {16384},
    "C2": {4096},
    "C3": {4096},
    "O1": {4},
    "O2": {4},
    "O3": {4},
    "O6": {4},
    "P1": {8192, 128},
}
PASSES = {
    "M1 M3 M5 M7 M9 M10 G1 G2 G3 G5 G6 F1 F2 F6": "inference",
    "M2 M4 M6 M8": "backward",
    "G4": "forward",
}
PASSES |= {
    "G7 G8 G9 F3 F4 F5 C1 C3": "forward+backward",
    "P1 C4": "saved bytes",
    "P2": "peak bytes",
}


def named(each):
    return [(found.id or each.id, each, found) for found in each.goals]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_table_of_goals(name):
    held = [(each, found) for case_ in CASES for id_, each, found in named(case_) if id_ == name]
    for (_, found), text in zip(held, NUMBERS[name], strict=True):
        wanted = goal(text)
        values = [(getattr(found, at), getattr(wanted, at)) for at in ("goal", "stretch", "bound")]
        assert all(a == b if a is None else a == pytest.approx(b) for a, b in values)
        which = [
            (found.subject, found.versus, found.cost, found.exact) for found in (found, wanted)
        ]
        assert which[0] == which[1]
    if name[0] in "MGFC" and name != "C4":
        assert {each.rows for each, _ in held} == ROWS.get(name, {8192})
    assert all(
        name not in ids.split() or {each.metric for each, _ in held} == {metric}
        for ids, metric in PASSES.items()
    )


def test_lines_with_alternatives():
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


def test_widths_and_flops():
    chain = "matmul:8x32 swiglu matmul:16x8"
    assert chains.widths(chain, 0) == [8, 32, 16, 8]
    assert chains.widths("swiglu", 12) == [12, 6]
    assert chains.widths("add fork rmsnorm:4", 0) == [4, 4, 4, 4]
    assert chains.flops(chain, 3, "forward") == 2 * 3 * (8 * 32 + 16 * 8)
    assert chains.flops(chain, 3, "forward+backward") == 3 * chains.flops(chain, 3, "forward")


def test_an_unwritten_output_shows():
    good = torch.ones(4, dtype=torch.float64)
    assert chains.error([torch.full((4,), torch.nan)], [good]) == float("inf")
    assert chains.error([good * 1.5], [good]) == pytest.approx(0.5)


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
    each = Case("F3", "matmul:100x100", 50, "inference", recipe="DelayedScaling")
    share = {
        name: found._shares(each, name, [1.0])["flops_share"] for name in ("opfuse", "te", "eager")
    }
    assert share == {
        "opfuse": pytest.approx(0.25),
        "te": pytest.approx(0.25),
        "eager": pytest.approx(0.5),
    }
    each = dataclasses.replace(each, recipe="", dtype="fp32")
    share = {
        name: found._shares(each, name, [1.0])["flops_share"] for name in ("eager", "eager-medium")
    }
    assert share == {"eager": pytest.approx(1.0), "eager-medium": pytest.approx(0.5)}


@pytest.mark.parametrize("way", fp32.WAYS)
def test_medium_precision_is_for_a_block(way):
    with fp32.restored():
        *before, act = fp32.WAYS[way]
        act()
        with providers._medium():
            assert [matmul_precision(kind) for kind in ("cpu", "cuda")] == ["bf16", "tf32"]
        assert [matmul_precision(kind) for kind in ("cpu", "cuda")] == before


def test_special_cases_are_of_the_providers_asked_for(monkeypatch):
    monkeypatch.setattr(special, "hook_calls", lambda *given: pytest.fail("not asked for"))
    each = case(
        "linear:4x4", "hook calls", goals=(Goal("self", 0, cost=True),), special="hook_calls"
    )
    assert harness(providers=["eager"]).run(each)[1][0]["reason"] == "not asked for"


def test_probes_keep_every_shape(monkeypatch, tmp_path):
    main, out = importlib.import_module("benchmarks.probes.__main__"), tmp_path / "probes.json"

    def probe(size):
        if size == 2:
            raise KeyboardInterrupt  # as if the kernel hung
        return [{"us": size}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(main, "about", lambda *given: {})
    monkeypatch.setattr(main, "ceilings", lambda device: {})
    monkeypatch.setitem(main.PROBES, "fp8", (probe, [(1,), (2,)]))
    with pytest.raises(KeyboardInterrupt):
        main.main(["fp8", "--out", str(out)])
    assert json.loads(out.read_text())["fp8"] == [{"shape": [1], "us": 1}]


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
        assert (
            rows[0]["status"].startswith("ok" if right else "wrong answer")
            and (row["value"] is not None) == right
        )


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
    assert (
        row["pass"] is False
        and row["value"] is None
        and "wrong answer: relative error" in row["reason"]
    )


def test_what_is_missing_or_broadcast_is_wrong():
    ones = torch.ones(4, 4, dtype=torch.float64)
    assert chains.error([ones, ones], [ones]) == 0
    assert chains.error([ones], [ones, ones]) == chains.error([ones[:1]], [ones]) == float("inf")


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
    assert (
        rows[0]["rel_err"] < 1e-6
        and row["value"] == 2
        and "forward Multiply" in rows[0]["config"]["fused"]
    )
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


def test_blocks_of_fp8_stand_for_what_they_were():
    x = torch.randn(256, 384)
    for rows in (1, 128):
        y, scale = providers.blocks(x, rows)
        assert (
            scale.shape == (256 // rows, 3)
            and chains.error([providers.unblocked(y, scale)], [x]) < 0.04
        )


def test_a_launcher_counts_once_a_plugin_has_one(register):
    with pytest.raises(providers.NotBuilt, match="no plugin has a launcher"):
        special.launch(case(), CPU)
    plugin = make_plugin()
    plugin.launcher = lambda kernel: kernel
    register(plugin)
    with pytest.raises(providers.Skip, match="a launch needs a GPU"):
        special.launch(case(), CPU)
    assert len(measure.launch_us(lambda: None, calls=2, samples=3)) == 3


def test_past_the_deadline_nothing_is_built(no_plugins):
    goals = (Goal("eager", 1.0, subject="opfuse-off"),)
    rows, (row,) = harness(deadline=0.0).run(case(goals=goals))
    assert {each["status"] for each in rows} == {"skipped: the budget is spent"} and row[
        "pass"
    ] is None
    samplers = {"a": (lambda: 1.0, torch.no_grad)}
    assert len(measure.sample_rounds(samplers, 9, 1, deadline=0.0)["a"]) == 5


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
    assert status.pop(who) == "failed: RuntimeError: an illegal memory access" and set(
        status.values()
    ) == {"ok"}
    assert ratios[0]["value"] is None
    if who == "opfuse-off":  # who was to tell the noise is gone, so nobody knows it
        assert ratios[0]["pass"] is False
        assert (ratios[1]["value"], ratios[1]["noise"], ratios[1]["beyond_noise"]) == (
            1.0,
            None,
            None,
        )
        lines = [
            report.table(ratios[1:])[-1],
            command.show({"ratios": ratios, "left_out": []}, 0)[1],
        ]
        assert "±" not in "".join(lines)


def test_a_case_that_breaks_is_told_and_the_others_are_kept(monkeypatch, tmp_path):
    pytest.importorskip("tqdm")
    threads, out, seen = torch.get_num_threads(), tmp_path / "run.json", []

    def broken(self, backward):
        seen.append(len(report.load(out)["cases"]))  # there before the next one begins
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(chains.Work, "reference", broken)
    arguments = ["--suite", "cpu", "--ids", "O6,P1", "--no-ceilings", "--out", str(out)]
    assert command.main(arguments) == 0
    torch.set_num_threads(threads)
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
    assert selections == [None, "", None] and (row["value"], row["pass"]) == (
        pytest.approx(1 / 3),
        True,
    )


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


def test_numbers_are_rounded_to_fp8_as_a_cast_does():
    y = measure.rounded(torch.randn(64, 64, dtype=torch.bfloat16) / 90).float()
    assert y.abs().max() == 448 and (y == 0).float().mean() < 1e-2


def test_rounds_take_turns():
    order = []
    samplers = {
        name: (lambda name=name: order.append(name) or 1.0, torch.no_grad) for name in "abc"
    }
    measure.sample_rounds(samplers, 2, 1)
    assert "".join(order) == "abc" * 3


def test_the_geometric_mean():
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
    each = case(
        "linear:4x4",
        "hook calls",
        goals=(Goal("self", 0, cost=True),),
        special="hook_calls",
        unfused=True,
    )
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
    assert (
        special.saved_as_planned(each, CPU)["opfuse-off"]
        == special.saved_as_planned(each, CPU)["plan"]
    )
    monkeypatch.setattr(ops.Bias, "saved_names", ("input",))
    assert special.declared_bytes(opfuse.Sequential(ops.Bias(4))._module_groups[0], chains.Work("bias:4", 2, 0, "fp32", CPU)) == 32  # fmt: skip


@pytest.mark.parametrize("name", ["captured", "cold_start", "launch"])
def test_what_needs_a_gpu_says_so(name):
    with pytest.raises(providers.Skip):
        getattr(special, name)(case(), CPU)


class FakeCuda:
    """As much of ``torch.cuda`` as a capture needs, and a log of what was asked of it."""

    def __init__(self, monkeypatch, milliseconds=1.0):
        self.log, fake = [], self
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.log.append)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

        class Event:
            def __init__(self, enable_timing):
                self.record = self.synchronize = lambda: None

            def elapsed_time(self, other):
                return milliseconds

        monkeypatch.setattr(torch.cuda, "Event", Event)
        self.replay = lambda: fake.log.append("replay")

    @contextlib.contextmanager
    def graph(self, graph, stream):
        assert graph is self and stream == "stream"
        self.log.append("capture")
        yield
        self.log.append("captured")


def test_a_capture_rotates_over_the_inputs(monkeypatch):
    fake = FakeCuda(monkeypatch, milliseconds=2.0)
    replay = measure.capture([lambda name=name: fake.log.append(name) for name in "ab"], calls=5)
    modes, calls = ["default", "a", "b", "error", "a", "b", "default"], ["a", "b"] * 3
    assert fake.log == [*modes, "capture", *calls, "captured", "default"]
    assert replay() == pytest.approx(2000 / 6) and fake.log[-2:] == ["replay", "replay"]


def test_what_waits_for_the_gpu_is_not_captured(monkeypatch):
    fake = FakeCuda(monkeypatch)

    def step():
        if fake.log[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert measure.capture([step]) is None
    assert fake.log == ["default", "error", "default"]


@pytest.mark.parametrize("kept", [0, 1 << 21])
def test_a_chain_is_captured_whole_and_keeps_what_it_declares(monkeypatch, kept):
    FakeCuda(monkeypatch)
    allocated = iter([0, 4 * 6 * 16 + kept])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    each = case("linear:8x16 gelu", "captured", unfused=True)
    monkeypatch.setattr(special, "Work", lambda *args: pretend(each))
    device = types.SimpleNamespace(type="cuda")
    assert special.captured(each, device) == {"opfuse": [1.0 if not kept else 0]}


def pretend(each):
    """Work on a CPU for a provider that runs on a GPU only."""

    class OnGpu(chains.Work):
        fill = lambda self, model: opened(self.device, lambda: chains.Work.fill(self, model))  # noqa: E731
        reference = lambda self, backward: opened(  # noqa: E731
            self.device, lambda: chains.Work.reference(self, backward)
        )

    class Device:
        type = "cuda"

    def opened(device, call):
        work.device = CPU
        try:
            return call()
        finally:
            work.device = device

    work = OnGpu(each.chain, each.rows, each.width, each.dtype, CPU)
    work.device = Device()
    return work


def answer(work, built, metric="inference"):
    with measure.around(built, metric):
        results = work.results(built.model, built.params, work.inputs[0], metric != "inference")
    return chains.error(results, built.reference or work.reference(metric != "inference"))


def test_transformer_engine_by_its_names(monkeypatch, no_plugins):
    """Its ops are named and called like those of opfuse, which stand in for them."""
    used = []

    @contextlib.contextmanager
    def autocast(enabled=True, recipe=None):
        used.append(type(recipe).__name__)
        yield

    te = types.SimpleNamespace(ops=ops, autocast=autocast)
    ops_module = types.SimpleNamespace(
        **{name: getattr(ops, name) for name in ops.__all__}, Sequential=opfuse.Sequential
    )
    recipes = types.SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
    modules = {"": types.SimpleNamespace(pytorch=te), ".pytorch": te, ".pytorch.ops": ops_module}
    modules |= {".common": types.SimpleNamespace(recipe=recipes), ".common.recipe": recipes}
    te.ops = ops_module
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    monkeypatch.setattr(providers, "need", lambda module: None)
    each = case("rmsnorm:8 matmul:8x32 swiglu matmul:16x8", recipe="DelayedScaling")
    work = pretend(each)
    assert answer(work, providers.te(work, each), "forward+backward") < 1e-4 and used == [
        "DelayedScaling"
    ]
    each = case("linear:8x8 gelu", "forward")
    assert answer(pretend(each), providers.te(pretend(each), each)) < 1e-4


def test_the_library_by_hand():
    each = case("linear:16x32 gelu", "inference")
    work = chains.Work(each.chain, 6, 0, "bf16", CPU)
    assert answer(work, providers.library(work, each)) < 2e-2
    each = Case("F1", "product:256x128", 64, "inference", recipe="DelayedScaling")
    work = pretend(each)
    assert answer(work, providers.library(work, each)) < 2e-2
    each = dataclasses.replace(each, id="F2", recipe="Float8BlockScaling")
    built, seen = None, []
    scaled = torch.nn.functional.scaled_mm

    def scaled_mm(x, w, scale_x, kind, scale_w, other, output_dtype):
        seen.append(
            (
                kind.name,
                other.name,
                scale_x.shape,
                scale_x.stride(),
                scale_w.shape,
                scale_w.stride(),
            )
        )
        return (
            providers.unblocked(x, scale_x)
            .matmul(providers.unblocked(w.t(), scale_w.t()).t())
            .to(output_dtype)
        )

    try:
        torch.nn.functional.scaled_mm = scaled_mm
        built = providers.library(work, each)
        assert answer(work, built) < 2e-2
    finally:
        torch.nn.functional.scaled_mm = scaled
    assert seen == [("BlockWise1x128", "BlockWise128x128", (64, 2), (1, 64), (2, 1), (1, 2))]


def test_the_strongest_compilation_has_options_that_exist(monkeypatch):
    monkeypatch.setattr(providers, "_tuned", set())
    for i in range(6):
        each = case(f"linear:8x{8 + i} gelu", "inference")
        if i < providers.MAX_TUNED:
            options = providers.compile_max(pretend(each), each).config["options"]
            assert options["max_autotune"] and options["triton.enable_persistent_tma_matmul"]
        else:
            with pytest.raises(providers.Skip, match="tunes at most 4"):
                providers.compile_max(pretend(each), each)


@pytest.mark.parametrize(
    "chain", ["rmsnorm:16", "swiglu", "add fork rmsnorm:16", "matmul:16x64 swiglu matmul:32x16"]
)
def test_liger_takes_what_it_is_given(monkeypatch, chain):
    pytest.importorskip("liger_kernel")
    taken = []

    def apply(function):
        def call(*args):
            inspect.signature(function.forward).bind(None, *args)
            taken.append(function.__name__)
            name, (x, *rest) = function.__name__, args
            if "GateUp" in name:
                return chains.SwiGLU()(x)
            x = x + rest.pop(0) if "Add" in name else x
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], rest[0], 1e-5)
            assert args[-1] is False  # or its backward would overwrite a gradient
            return (y, x) if "Add" in name else y

        return call

    for module in ("rms_norm", "swiglu", "fused_add_rms_norm"):
        found = vars(importlib.import_module(f"liger_kernel.ops.{module}"))
        for function in [
            each
            for name, each in found.items()
            if name.startswith("Liger") and hasattr(each, "apply")
        ]:
            monkeypatch.setattr(function, "apply", apply(function))
    each = case(chain, width=32 if chain == "swiglu" else 0)
    work = pretend(each)
    assert answer(work, providers.liger(work, each), "forward+backward") < 1e-4 and taken


@pytest.mark.parametrize("chain", ["cast", "castt"])
def test_torchao_casts(monkeypatch, chain):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    each = Case("M9", chain, 8, "inference", width=32, recipe="DelayedScaling")
    work = chains.Work(chain, 8, 32, "bf16", CPU)
    assert answer(work, providers.torchao(work, each)) < 0.05
    y, *rest = providers.torchao(work, each).model(*work.inputs[0])
    assert y.dtype is torch.float8_e4m3fn and len(rest) == len(chain) - 3
    torch.testing.assert_close(y.float() / rest[-1], work.inputs[0][0].float(), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_training(monkeypatch, recipe):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    each = Case(
        "F3", "matmul:16x64 swiglu matmul:32x16", 8, "forward", recipe="Float8CurrentScaling"
    )
    model = providers.torchao(chains.Work(each.chain, 8, 0, "bf16", CPU), each, recipe).model
    assert [type(part).__name__ for part in model] == ["Float8Linear", "SwiGLU", "Float8Linear"]


@pytest.mark.parametrize("milliseconds", [5.0, 0.5, 0.01])
def test_the_gpu_timer_replays_short_calls(monkeypatch, milliseconds):
    class Testing:
        do_bench = staticmethod(lambda step, warmup, rep, return_mode: milliseconds)

    monkeypatch.setitem(sys.modules, "triton", Testing)
    monkeypatch.setitem(sys.modules, "triton.testing", Testing)
    monkeypatch.setattr(measure, "capture", lambda passes: lambda: 7.0)
    # launches may be the time
    assert measure.cuda_timer([lambda: None])() == (5000.0 if milliseconds == 5 else 7.0)
    monkeypatch.setattr(measure, "capture", lambda passes: None)  # it waits for the GPU
    assert measure.cuda_timer([lambda: None])() == milliseconds * 1000


# The command line and the reports


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    pytest.importorskip("tqdm")
    path = tmp_path_factory.mktemp("runs") / "run.json"
    arguments = [
        "--suite",
        "cpu",
        "--ids",
        "O6,P1",
        "--rounds",
        "2",
        "--no-ceilings",
        "--out",
        str(path),
    ]
    threads = torch.get_num_threads()
    assert command.main(arguments) == 0
    torch.set_num_threads(threads)
    return path


def test_a_run_is_one_file(run_file):
    run = json.loads(run_file.read_text())
    assert {
        "schema",
        "git_sha",
        "dirty",
        "time",
        "host",
        "gpu",
        "versions",
        "ceilings",
        "cases",
        "ratios",
    } <= set(run)
    assert {"id", "num", "den", "value", "noise", "goal", "stretch", "bound", "pass"} <= set(
        run["ratios"][0]
    )
    assert {"id", "shape", "dtype", "provider", "metric", "status"} <= set(run["cases"][0])


def test_the_budget_leaves_out_what_comes_last(capsys):
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    assert command.main(["--suite", "cpu", "--ids", "C4", "--budget", "1e-9", "--no-ceilings"]) == 0
    assert "left out 5 cases" in capsys.readouterr().out
    assert (
        command.main(
            ["--suite", "cpu", "--ids", "C4", "--budget", "1e-9", "--no-ceilings", "--check"]
        )
        == 1
    )
    torch.set_num_threads(threads)
    assert "no goal was checked" in capsys.readouterr().out


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
        (
            "--suite cpu --providers eager,nobody",
            "--providers: expected some of opfuse, .*; got nobody",
        ),
        ("--suite cpu --budget 0", "expected a number above 0, got 0"),
        ("--suite cpu --rounds 1.5", "expected a whole number above 0, got 1.5"),
        (
            "--suite cpu --out nowhere/run.json",
            "--out: expected a file in a folder that exists, got nowhere/run.json",
        ),
        ("--suite cpu --out folder", "--out: expected a file in a folder that exists, got folder"),
        ("compare only.json", "usage: python -m benchmarks compare BEFORE.json AFTER.json"),
        (
            "compare gone.json gone.json",
            "expected what python -m benchmarks --out FILE wrote, got gone.json: .*No such",
        ),
        ("compare broken.json broken.json", "got broken.json: Expecting property name"),
        ("compare other.json other.json", "got other.json: no ratios in it"),
        ("compare part.json part.json", "got part.json: no ratios in it"),
        ("compare empty.json empty.json", "empty.json and empty.json have no ratio in common"),
        (
            "report folder",
            "expected a folder with what python -m benchmarks --out FILE wrote, got folder",
        ),
    ],
)
def test_what_cannot_be_done_is_told(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in {
        "broken": "{",
        "other": "[1]",
        "empty": json.dumps(EMPTY),
        "part": '{"ratios": []}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    told = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert re.search(message, told.replace("\n", " ")) and "Traceback" not in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", ["--suite gpu-quick", "probes"])
def test_a_missing_gpu_is_told(arguments, capsys):
    main = (
        importlib.import_module("benchmarks.probes.__main__").main
        if arguments == "probes"
        else command.main
    )
    with pytest.raises(SystemExit):
        main([] if arguments == "probes" else arguments.split())
    assert "CUDA GPU, and there is none" in capsys.readouterr().err


def test_an_interrupt_keeps_what_there_is(monkeypatch, capsys, tmp_path):
    pytest.importorskip("tqdm")
    run, threads = Harness.run, torch.get_num_threads()

    def interrupted(self, case):
        if case.chain.startswith("rmsnorm"):
            raise KeyboardInterrupt
        return run(self, case)

    monkeypatch.setattr(Harness, "run", interrupted)
    out = tmp_path / "run.json"
    arguments = [
        "--suite",
        "cpu",
        "--ids",
        "C4",
        "--no-ceilings",
        "--allocators",
        "--out",
        str(out),
    ]
    assert command.main(arguments) == 130  # and nothing is measured a second time
    torch.set_num_threads(threads)
    assert "left out 4 cases" in capsys.readouterr().out and len(report.load(out)["ratios"]) == 2


def test_both_allocators(tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    started = []
    monkeypatch.setattr(
        command.subprocess, "run", lambda *args, **options: started.append((args, options)) or DONE
    )
    DONE = types.SimpleNamespace(returncode=0, stdout="")
    arguments = [
        "--suite",
        "cpu",
        "--ids",
        "O6",
        "--no-ceilings",
        "--allocators",
        "--out",
        str(tmp_path / "run.json"),
    ]
    threads = torch.get_num_threads()
    assert command.main(arguments) == 0
    torch.set_num_threads(threads)
    (again,), options = started[-1]
    assert again[-2:] == ["--out", str(tmp_path / "run-tuned.json")] and "--allocators" not in again
    assert command.TUNED.items() <= options["env"].items()


def test_a_missed_goal_fails_the_check():
    row = {"pass": False, "value": 1.3, "goal": 1.15, "cost": True, "reason": "", "exact": False}
    assert command.verdict(row) == "MISSED" and command.verdict(row, 0.2) == "met"
    assert command.verdict(row | {"value": 0.9, "goal": 1.0, "cost": False}, 0.2) == "met"
    assert (
        command.verdict(row | {"value": 1.5, "goal": 1.0, "cost": False, "exact": True}, 0.2)
        == "MISSED"
    )
    assert (
        command.verdict(row | {"pass": None, "value": None, "reason": "not built: x"})
        == "not built: x"
    )


def test_outside_of_a_checkout_nobody_knows_the_commit(monkeypatch, tmp_path):
    record = importlib.import_module("benchmarks.record")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # it may be inside of one
    run = record.about("cpu", CPU) | {"command": ""}
    assert run["git_sha"] == "" and run["dirty"] is None
    assert "at an unknown commit" in report.where(run)


def test_an_unknown_id_is_told():
    with pytest.raises(ValueError, match="expected ids of C1, .*; got M99"):
        select("cpu", ["M99"])
    with pytest.raises(ValueError, match="M1: not in the suite cpu, which has C1, "):
        select("cpu", ["M1", "O1"])


ROW = {
    "id": "C1",
    "case": "x",
    "num": "opfuse",
    "den": "eager",
    "metric": "forward",
    "cost": False,
    "noise": 0.01,
}
ROW |= {
    "goal": 1.0,
    "exact": False,
    "reason": "",
    "bound": None,
    "pass": True,
    "beyond_noise": True,
    "value": 1.0,
}


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


def test_the_noise_is_a_share_of_the_ratio(monkeypatch):
    row = ROW | {"value": 8.0, "noise": 0.05}
    assert (
        "| 8 ± 5 % |" in report.table([row])[-1]
        and "8.000   ±5.0%" in command.show({"ratios": [row], "left_out": []}, 0)[0]
    )
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axis = pyplot.figure().add_subplot()
    drawn = []
    monkeypatch.setattr(
        axis, "barh", lambda at, values, xerr, **style: drawn.append((values, xerr))
    )
    report.bars(axis, [row], "")
    assert drawn == [([8.0 - 1], [pytest.approx(0.4)])]


def test_compare_tells_other_machines_and_what_one_run_has_alone(tmp_path, capsys):
    (tmp_path / "a").write_text(json.dumps(EMPTY | {"ratios": [ROW]}))
    other = {
        "host": HOST["host"] | {"threads": 2, "allocator": "tuned"},
        "ratios": [ROW, ROW | {"id": "C2"}],
    }
    (tmp_path / "b").write_text(json.dumps(EMPTY | other))
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "of different machines or settings: c, 1 thread(s); torch 2"
    assert second.strip() == "and: c, 2 thread(s); allocator tuned; torch 2"
    assert last == "1 ratios are in one of the two only"


def test_a_report_leaves_out_what_is_no_run(run_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "run.json").write_text(run_file.read_text())
    (tmp_path / "probes.json").write_text(json.dumps(HOST | {"schema": 2, "gemm": []}))
    assert command.main(["report", str(tmp_path)]) == 0
    assert "probes.json: no ratios in it" in capsys.readouterr().err
    assert (
        "## run" in (tmp_path / "report.md").read_text()
        and "probes" not in (tmp_path / "report.md").read_text()
    )


def test_a_report_has_tables_and_plots(run_file):
    pytest.importorskip("matplotlib")
    assert command.main(["report", str(run_file.parent)]) == 0
    text = (run_file.parent / "report.md").read_text()
    assert ("| P1 |" in text and "report-run-P.svg" in text) or "not built" in text
    assert "<table>" in (run_file.parent / "report.html").read_text()


def test_a_partial_run_hides_nothing(tmp_path, monkeypatch):
    row = {"id": "C2", "num": "opfuse", "den": "eager", "metric": "backward"}
    runs = {
        "old": {
            "time": "2026-01-01",
            "suite": "cpu",
            "ratios": [{**row, "case": name, "value": 1} for name in "ab"],
        },
        "new": {"time": "2026-01-02", "suite": "cpu", "ratios": [{**row, "case": "b", "value": 2}]},
        "gpu": {
            "time": "2026-01-03",
            "suite": "gpu-quick",
            "ratios": [{**row, "case": "b", "value": 3}],
        },
        "older": {
            "time": "2025-01-01",
            "suite": "cpu",
            "ratios": [{**row, "case": "a", "value": 4}],
        },
        "tuned": {
            "time": "2024-01-01",
            "suite": "cpu",
            "ratios": [{**row, "case": "a", "value": 5}],
        },
    }
    for name, run in runs.items():
        run["host"] = {"allocator": "tuned" if name == "tuned" else "default"}
        run["cases"] = [
            {"id": "C2", "case": each["case"], "of": each["value"]} for each in run["ratios"]
        ]
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
    states = [line.split(" | ")[-1] for line in report.alone(rows)[2:]]
    assert states == ["met |", "too noisy |", "too noisy |"]
    assert report.pictured([{"ratios": [row | {"id": "C1"} for row in rows]}]) == [
        rows[0] | {"id": "C1"}
    ]
    assert report.percent(1.3) == "130 %" and report.percent(0.00056) == "0.056 %"


def test_the_page_is_current():
    text, fingerprint = report.written(report.committed())
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == text, (
        "run python -m benchmarks page"
    )
    assert fingerprint in (ROOT / "docs" / "performance.svg").read_text(encoding="utf-8")


@pytest.mark.alone
def test_the_probes_compile_without_a_gpu(monkeypatch):
    pytest.importorskip("triton")
    probes, ahead = (importlib.import_module(f"benchmarks.probes{name}") for name in ("", ".ahead"))
    monkeypatch.setattr(ahead, "CONFIGS", probes.CONFIGS[3:4])
    made = {
        (row["kernel"], row.get("fp8"), row.get("SAVE"), row.get("h")): row
        for row in ahead.compile_all(90)
    }
    stored = made["gemm", False, True, None]
    assert (
        stored["HGMMA"] > 0 == stored["HMMA"]
        and stored["UTMALDG"] > 0
        and stored["shared"] <= 232448
    )
    assert made["gemm", True, None, None]["QGMMA"] > 0
    assert all(made["norm_backward", None, None, h]["STL"] == 0 for h in (2048, 4096, 8192))
    assert made["nothing", None, None, None]["reg"] > 0


def test_a_probe_that_fails_says_why():
    main = importlib.import_module("benchmarks.probes.__main__")
    (row,) = main.attempted(lambda m: 1 / m, (0,))
    assert row == {"failed": "ZeroDivisionError: division by zero"}
    wrong = (
        main.tried(lambda: (lambda: None, torch.zeros(2)), torch.ones(2))
        if torch.cuda.is_available()
        else None
    )
    assert wrong is None or wrong["failed"] == "relative error 1.0e+00"


# Models


@pytest.mark.filterwarnings("ignore:::transformers")
@pytest.mark.parametrize("way", ["tune", "converted", "memory"])
def test_one_way_of_a_model_against_eager(monkeypatch, one_thread, tmp_path, way):
    pytest.importorskip("transformers")
    from opfuse.tuning import timing

    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    for name, size in {"WIDTH": 64, "TOKENS": 16, "VOCABULARY": 128, "LAYERS": 1}.items():
        monkeypatch.setattr(models, name, size)
    monkeypatch.setattr(timing, "compare", lambda *ways, **_: timing.Timing(1.5, 0.0, 3.0, 2.0))
    given = types.SimpleNamespace(models="gpt2", dtypes="bf16", threads=1, part=way)
    row = models.run(given)
    if way == "tune":
        assert row["tuned"] >= 0
        return
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
    assert "| Llama, bf16 | 100\u00a0ms, 10\u00a0MB | 1.25, 0.50 | 1.25, 0.20 |  |" in table
    assert "| Llama, bf16 | 7 of 9 | 9 of 9 | it is slower |" in models_page.shares(rows)
    page = "a\n<!-- models: speed -->\nold\n<!-- end of speed -->\nb"
    assert models_page.replaced(page, "speed", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="once in the page, got 0"):
        models_page.replaced("", "speed", "new")


def test_the_pages_have_the_committed_numbers_of_models():
    path = ROOT / "benchmarks" / "results" / "cpu-models.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {"index.md": models_page.speeds(rows), "bring-your-model.md": models_page.shares(rows)}
    for page, table in found.items():
        assert table in (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert {(row["model"], row["dtype"], row["way"]) for row in rows} == {
        (model, dtype, way)
        for model in models.MODELS
        for dtype in models.DTYPES
        for way in models.WAYS
    }
