"""The benchmark harness, on tiny shapes and with made-up times; and the gates that every run of the tests passes."""

import importlib.util
import json
import pathlib
import sys

import pytest
import torch

import opfuse
from opfuse import ops

ROOT = pathlib.Path(__file__).parents[1]
SLACK = 0.25


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
from benchmarks import chains, measure, providers, report, special, steps  # noqa: E402
from benchmarks.cases import CASES, TITLES, Case, Goal  # noqa: E402
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


@pytest.mark.parametrize("name", ["O1", "O2", "O6", "C4"])
def test_gate(name, one_thread):
    for _ in range(3):  # what else the machine does must not count
        ratios = []
        for each in select("cpu", [name]):
            ratios += Harness(CPU, {}, rounds=15).run(each)[1]
        missed = [
            row for row in ratios if command.verdict(row, SLACK if name in ("O1", "O2") else 0).startswith("MISSED")
        ]
        if not missed or name in ("O6", "C4"):
            break
    assert not missed, "\n".join(command.show({"ratios": missed, "left_out": []}, SLACK))
    assert any(row["value"] is not None for row in ratios)


# Cases and chains


def test_every_goal_has_a_case_and_a_title():
    wanted = {f"{letter}{i}" for letter, last in (("M", 11), ("G", 9), ("F", 6), ("P", 2), ("O", 7), ("C", 4))
              for i in range(1, last + 1)}  # fmt: skip
    have = {name for each in CASES for name in each.ids}
    assert wanted <= have == set(TITLES)
    assert len({(each.id, each.name, each.suites) for each in CASES}) == len(CASES)


def small(chain):
    def shrink(part):
        name, _, sizes = part.partition(":")
        return name + ":" * bool(sizes) + "x".join(str(max(2, int(n) // 32)) for n in sizes.split("x") if n)

    return " ".join(shrink(part) for part in chain.split())


@pytest.mark.parametrize("chain", sorted({small(each.chain) for each in CASES if each.chain}))
@pytest.mark.parametrize("name", ["eager", "opfuse-off", "opfuse"])
def test_a_provider_computes_the_chain(chain, name):
    casts = chain.endswith(("cast", "castt"))
    if casts and name != "eager":
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
    rows, ratios = harness([1.0, 2.0, 3.0, 1.0]).run(case(goals=(Goal("eager", 1.5), Goal("eager", 0.5, cost=True))))
    assert {row["provider"]: row["median_us"] for row in rows} == {"opfuse": 1, "opfuse-off": 2, "eager": 3}
    assert [(row["value"], row["pass"]) for row in ratios] == [(3.0, True), (pytest.approx(1 / 3), True)]
    assert ratios[0]["noise"] == 0 and ratios[0]["beyond_noise"]
    assert rows[0]["rel_err"] < 1e-5 and rows[0]["config"]["fused"] == ["forward Fused"]


def test_a_share_of_the_bandwidth(register, fused):
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear, ops.Bias), fused())])
    goal = (Goal("sol", 0.9),)
    (row,) = harness([2.0, 1.0, 1.0, 2.0]).run(case(metric="forward", goals=goal, traffic=500))[1]
    assert (row["value"], row["pass"]) == (pytest.approx(6 * 500 / 2e-6 / 1e9), True)


def test_what_is_not_built_has_no_pass_and_counts_once_it_is(register, fused):
    each = case("rmsnorm:8")
    rows, (row,) = harness().run(each)
    assert row["pass"] is None and row["value"] is None and row["reason"].startswith("not built")
    assert {row["provider"]: row["status"] for row in rows}["eager"] == "ok"
    register(backward_fusions=[opfuse.Fusion((ops.RMSNorm,), fused())])
    assert harness().run(each)[1][0]["pass"] is False
    assert harness().run(case("rmsnorm:8", "forward"))[1][0]["pass"] is None  # it fuses the other pass


def test_a_wrong_answer_is_not_timed(register):
    class Wrong(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * 2, [()]

    register(forward_fusions=[opfuse.Fusion((ops.Identity,), Wrong)])
    rows, (row,) = harness().run(case("identity", "inference", width=4))
    assert rows[0]["status"].startswith("wrong answer") and "median_us" not in rows[0]
    assert row["pass"] is False and row["value"] is None


def test_a_peer_that_fails_or_is_missing_is_skipped_with_a_reason(no_plugins, monkeypatch):
    def fails(work, case):
        raise RuntimeError("0 active drivers")

    monkeypatch.setitem(providers.PROVIDERS, "compile", fails)
    goals = tuple(
        Goal(name, 1.0, subject="opfuse-off") for name in ("compile", "liger", "te", "compile-max", "library")
    )
    ratios = harness().run(case("linear:8x8", goals=goals))[1]
    assert [row["pass"] for row in ratios] == [None] * 5
    assert all(row["reason"].startswith(row["den"]) for row in ratios)
    assert "0 active drivers" in ratios[0]["reason"]


def test_peak_memory_is_of_a_call_with_the_plugins_of_its_provider(register, fused, monkeypatch):
    register(forward_fusions=[opfuse.Fusion((ops.BasicLinear, ops.Bias), fused())])
    selections = []

    def peak(step, device):
        selections.append(opfuse.plugins.manager.scope.selection)
        return 100 * len(selections)

    monkeypatch.setattr(measure, "peak_bytes", peak)
    (row,) = harness().run(case(metric="peak bytes", goals=(Goal("eager", 0.5, cost=True),)))[1]
    assert selections == [None, "", None] and (row["value"], row["pass"]) == (pytest.approx(1 / 3), True)


def test_noise_is_a_provider_against_itself():
    assert measure.noise([1.0] * 5, [1.0] * 5) == 0
    assert measure.noise([1.0, 1.1, 0.9, 1.2, 0.8], [1.0] * 5) == pytest.approx(0.1)
    assert measure.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_rounds_take_turns():
    order = []
    samplers = {name: (lambda name=name: order.append(name) or 1.0, torch.no_grad) for name in "abc"}
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
    step, quantizer = steps.alone(model, work.inputs[0], ops.GELU, backward=backward)
    z = torch.randn(3, 8) if not backward else torch.nn.functional.linear(work.inputs[0][0], *work.params).detach()
    gelu = torch.nn.functional.gelu(z.requires_grad_(), approximate="tanh")
    assert quantizer is None
    if not backward:
        return torch.testing.assert_close(step(z), gelu)
    torch.testing.assert_close(step(work.grads[0])[0], torch.autograd.grad(gelu, z, work.grads[0])[0])


def test_hook_calls_are_seen(register, monkeypatch):
    each = case("linear:4x4", "hook calls", goals=(Goal("", 0, cost=True),), special="hook_calls", unfused=True)
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
    assert special.saved_as_planned(each, CPU)["opfuse-off"] == special.saved_as_planned(each, CPU)["plan"]
    monkeypatch.setattr(ops.Bias, "saved_names", ("input",))
    assert special.declared_bytes(opfuse.Sequential(ops.Bias(4))._module_groups[0], chains.Work("bias:4", 2, 0, "fp32", CPU)) == 32  # fmt: skip


@pytest.mark.parametrize("name", ["captured", "cold_start", "launch"])
def test_what_needs_a_gpu_says_so(name):
    with pytest.raises(providers.Skip):
        getattr(special, name)(case(), CPU)


@pytest.mark.parametrize("milliseconds", [1.0, 0.01])
def test_the_gpu_timer_replays_short_calls(monkeypatch, milliseconds):
    class Testing:
        do_bench = staticmethod(lambda step, warmup, rep, return_mode: milliseconds)

    monkeypatch.setitem(sys.modules, "triton", Testing)
    monkeypatch.setitem(sys.modules, "triton.testing", Testing)
    monkeypatch.setattr(measure, "_capture", lambda passes: lambda: 7.0)
    assert measure.cuda_timer([lambda: None])() == (1000.0 if milliseconds > 0.1 else 7.0)


# The command line and the reports


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    pytest.importorskip("tqdm")
    path = tmp_path_factory.mktemp("runs") / "run.json"
    arguments = ["--suite", "cpu", "--ids", "O6,P1", "--rounds", "2", "--no-ceilings", "--out", str(path)]
    threads = torch.get_num_threads()
    assert command.main(arguments) == 0
    torch.set_num_threads(threads)
    return path


def test_a_run_is_one_file(run_file):
    run = json.loads(run_file.read_text())
    assert {"schema", "git_sha", "dirty", "time", "host", "gpu", "versions", "ceilings", "cases", "ratios"} <= set(run)
    assert {"id", "num", "den", "value", "noise", "goal", "stretch", "bound", "pass"} <= set(run["ratios"][0])
    assert {"id", "shape", "dtype", "provider", "metric", "status"} <= set(run["cases"][0])


def test_the_budget_leaves_out_what_comes_last(capsys):
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    assert command.main(["--suite", "cpu", "--ids", "C4", "--budget", "1e-9", "--no-ceilings"]) == 0
    torch.set_num_threads(threads)
    assert "the budget left out 4 cases" in capsys.readouterr().out


def test_a_missed_goal_fails_the_check():
    row = {"pass": False, "value": 1.3, "goal": 1.15, "cost": True, "reason": ""}
    assert command.verdict(row) == "MISSED" and command.verdict(row, 0.2) == "met"
    assert command.verdict(row | {"value": 0.9, "goal": 1.0, "cost": False}, 0.2) == "met"
    assert command.verdict(row | {"pass": None, "value": None, "reason": "not built: x"}) == "not built: x"


def test_an_unknown_id_and_a_missing_gpu_are_told():
    pytest.importorskip("tqdm")
    with pytest.raises(ValueError, match="no such case: M99"):
        select("cpu", ["M99"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a CUDA GPU"):
            command.main(["--suite", "gpu-quick"])


def test_compare_tells_what_became_worse(tmp_path, capsys):
    row = {"id": "C1", "case": "x", "num": "opfuse", "den": "eager", "metric": "forward", "cost": False, "noise": 0.01}
    for name, value in (("a", 1.5), ("b", 1.2)):
        (tmp_path / name).write_text(json.dumps({"ratios": [row | {"value": value}]}))
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "-20.0%  WORSE" in capsys.readouterr().out


def test_a_report_has_tables_and_plots(run_file):
    pytest.importorskip("matplotlib")
    assert command.main(["report", str(run_file.parent)]) == 0
    text = (run_file.parent / "report.md").read_text()
    assert ("| P1 |" in text and "report-run-P.svg" in text) or "not built" in text
    assert "<table>" in (run_file.parent / "report.html").read_text()


def test_the_page_is_current():
    text, fingerprint = report.written(report.committed())
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == text, "run python -m benchmarks page"
    assert fingerprint in (ROOT / "docs" / "performance.svg").read_text(encoding="utf-8")


def test_a_probe_compiles_without_a_gpu():
    pytest.importorskip("triton")
    ahead, kernels = (importlib.import_module(f"benchmarks.probes.{name}") for name in ("ahead", "kernels"))
    made = ahead.compiled(kernels.nothing, {}, 90, dict.fromkeys(ahead.POINTERS["nothing"], "*i32"))
    assert made["reg"] > 0 and made["LDL"] == 0
