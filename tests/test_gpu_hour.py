"""What runs in the next hour on a GPU, tried without one."""

import json
import re
import time

import pytest
import torch
from checkout import ROOT

import opfuse

pytest.importorskip("triton")
pytest.importorskip("opfuse_triton")
from opfuse_triton.__main__ import gpu_command
from opfuse_triton.recorded import case_lists, load_cases

from benchmarks import gpu_formulas, gpu_hour, gpu_step, products, report, slices
from benchmarks.ledger import host

STORED, STEP = report.stored("h100-kernels"), report.stored("h100-step")


def test_only_functions_of_opfuse_count_wherever_the_environment_is(tmp_path):
    place = tmp_path / "opfuse-environment" / "lib" / "site-packages" / "other.py"
    found = {}
    exec(compile("def other():\n    return 0\n", place, "exec"), found)
    calls = host.profiled(lambda: (found["other"](), opfuse.ops.RMSNorm(8).reset_parameters()))
    assert calls and all(name.startswith("opfuse/") for name in calls), calls


# The step


def test_kernels_alone_are_counted():
    kinds = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "ac2g")
    kinds += ("gpu_user_annotation", "cpu_op", "user_annotation", "kernel")
    events = [{"cat": kind, "name": f"of {kind}", "dur": 500.0} for kind in kinds]
    events += [{"cat": "kernel", "name": "another", "dur": 4000.0}, {"ph": "M", "name": "process"}]
    trace = {"traceEvents": events}
    rows = [["all", 5.0, 3], ["another", 4.0, 1], ["of kernel", 1.0, 2]]
    assert gpu_step.kernels_of(trace) == rows


class FakeBench:
    """A way's step takes what it says; a turn takes a second of a clock."""

    def __init__(self, breaks=()):
        self.time, self.breaks, self.turns = 0.0, set(breaks), []

    def first(self, name):
        if (name, "first") in self.breaks:
            raise ValueError("no such kernel")
        return name, {"way": name, "loss": 1.0}

    def turn(self, way):
        self.time += 1
        self.turns.append(way)
        if (way, self.turns.count(way)) in self.breaks:
            raise RuntimeError("lost")
        ms = {"eager": 10.0, "half": 5.0}.get(way, 8.0) * (1 + len(self.turns) / 100)
        return {"ms": ms, "python_ms": 1.0, "sm_mhz": 1980, "last_loss": 1.0}

    def kernels(self, way):
        return [["all", 1.0, 2], ["one", 1.0, 2]]


def rounds(bench, names, seconds=1000.0, count=6, **more):
    kept = []
    found = gpu_step.rounds_of(
        bench, names, count, lambda: seconds - bench.time,
        lambda found: kept.append(json.loads(json.dumps(found))), **more,
    )  # fmt: skip
    assert kept[-1] == found and found["now"] == ""
    return {row["way"]: row for row in found["rows"]}, found["rounds"], kept


def test_ways_take_turns_in_rounds_of_drawn_orders():
    bench = FakeBench()
    rows, turns, kept = rounds(bench, ["eager", "half", "other"], kernels=True)
    orders = [[turn["way"] for turn in one] for one in turns]
    assert [sorted(order) for order in orders] == [
        ["eager"], ["eager", "half"], *[["eager", "half", "other"]] * 7,
    ]  # fmt: skip
    assert (
        len({tuple(order) for order in orders[2:]}) > 2
        and [way for order in orders for way in order] == bench.turns
    )
    assert 1.9 < rows["half"]["speed"] < 2.1 and rows["eager"]["speed"] == 1.0  # of their rounds
    assert [rows[way]["turns"] for way in rows] == [9, 8, 7] and rows["half"]["sm_mhz"] == 1980
    assert all(row["kernels"][0] == ["all", 1.0, 2] for row in rows.values())
    assert [len(found["rounds"]) for found in kept if found["now"]][-1] == 9
    again, *_ = rounds(FakeBench(), ["eager", "half", "other"])
    assert again["half"]["ms"] == rows["half"]["ms"]


def test_a_way_that_fails_leaves_the_others_alone():
    bench = FakeBench({("half", "first"), ("other", 2)})
    rows, turns, _ = rounds(bench, ["eager", "half", "other"])
    assert rows["half"] == {"way": "half", "why": "ValueError: no such kernel"}
    assert rows["other"]["why"] == "RuntimeError: lost" and rows["other"]["turns"] == 1
    assert rows["eager"]["turns"] == 8 and len(turns[-1]) == 1


def test_no_round_begins_when_the_time_is_over():
    rows, turns, _ = rounds(FakeBench(), ["eager", "half", "other"], seconds=2.0)
    assert rows["other"] == {"way": "other", "why": "no time"}
    assert len(turns) == 2 and "ms" in rows["half"]
    text = "\n".join(report.of_step({"rows": list(rows.values())}))
    assert "| other | no time |" in text and "| half | 5." in text


@pytest.fixture
def masking(monkeypatch):
    """transformers' module of masks, as it is again afterwards."""
    pytest.importorskip("transformers")
    from transformers import masking_utils as module

    name = "find_packed_sequence_indices"
    monkeypatch.setattr(module, name, getattr(module, name))
    return module


@pytest.mark.filterwarnings("ignore:::transformers")
def test_ways_share_weights_and_compute_the_same(masking):
    kept = masking.find_packed_sequence_indices
    bench = gpu_step.Bench(gpu_step.TINY, torch.device("cpu"))
    assert masking.find_packed_sequence_indices is not kept  # it would wait for a GPU
    before = [param.clone() for param in bench.model.parameters()]
    losses = {}
    for name in ("eager", "converted"):
        way, row = bench.first(name)
        turn = bench.turn(way)
        assert turn["last_loss"] == row["loss"] and turn["ms"] > 0 and turn["python_ms"] > 0
        losses[name] = row["loss"]
    assert losses["converted"] == pytest.approx(losses["eager"], rel=1e-3)
    params = list(bench.model.parameters())
    assert all(map(torch.equal, before, params)) and len(bench.optimizer.state) == len(params)
    assert bench.shared_bytes() > 3 * sum(param.nbytes for param in params)


@pytest.mark.filterwarnings("ignore:::transformers")
def test_the_script_of_the_step_writes_what_a_page_reads(masking, tmp_path, capsys):
    gpu_step.main(["--ways", "eager,unknown-graph", "--rounds", "1", "--kernels", "--out", str(tmp_path / "step.json")])  # fmt: skip
    found = json.loads((tmp_path / "step.json").read_text())
    (eager, graph), sizes = found["rows"], gpu_step.Sizes(**found["sizes"])
    assert sizes == gpu_step.TINY and "RuntimeError" in graph["why"]
    assert eager["turns"] == len(found["rounds"]) == 2 and eager["kernels"] == [["all", 0.0, 0]]
    text = "\n".join(gpu_hour.step_lines(found))
    assert "| eager | " in text and text in capsys.readouterr().out


def test_slices_are_compared_with_their_copies_in_a_part_of_the_hour(tmp_path):
    """The part as it is, in a process of its own."""
    (part,) = [part for part in gpu_hour.parts() if part.name == "slices"]
    (row,) = gpu_hour.hour([part], 600, tmp_path)["parts"]
    assert row["state"] == "done", row
    rows = row["result"]["rows"]
    assert [each["product"] for each in rows] == ["scaled_mm", "_scaled_mm"] * len(slices.TINY)
    for each in rows:
        assert each["same"] and each["wrong_by"] < 0.01 and each["speed"] > 0, each
    text = (tmp_path / "gpu-hour.md").read_text()
    assert text.startswith("## slices: done") and text.count("| yes |") == len(rows)


def test_formulas_are_compared_and_timed_in_a_part_of_the_hour(tmp_path):
    """The part as it is, in a process of its own."""
    for plugin in ("opfuse_activation", "opfuse_fp8"):
        pytest.importorskip(plugin, reason="the kernels that are timed are those of plugins")
    (part,) = [part for part in gpu_hour.parts() if part.name == "formulas"]
    (row,) = gpu_hour.hour([part._replace(limit=600)], 600, tmp_path)["parts"]
    assert row["state"] == "done", row
    found = row["result"]
    assert len(found["errors"]) == 7 and len(found["times"]) == len(found["exact"]) == 3
    for each in found["errors"]:
        assert each["ulps"][0] < 3 and each["relative"][0] < 3e-7, each
    for each in found["times"] + found["exact"]:
        assert each["us"]["opfuse"] > 0 and "why" not in each, each
    text = (tmp_path / "gpu-hour.md").read_text()
    assert text.startswith("## formulas: done") and "| sigmoid | opfuse | " in text


def test_errors_of_formulas_are_seen_where_they_are():
    tiny = 2.0**-130
    exact = torch.tensor([1.0, 2.0, tiny, torch.inf, torch.nan, -1.0], dtype=torch.float64)
    y = exact.float()
    y[1] += 2.0**-21
    row = {"flushed": 0, "wrong": 0}
    gpu_formulas.compare(row, torch.arange(6.0) * 5, y, exact)
    assert row["ulps"] == (2.0, 5.0) and row["near"] == (2.0, 5.0)
    assert row["relative"] == (2.0**-22, 5.0) and row["flushed"] == row["wrong"] == 0
    y = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.0, 1.0])
    gpu_formulas.compare(row, torch.arange(6.0), y, exact)
    assert row["flushed"] == 1 and row["wrong"] == 3


def test_a_slice_that_pytorch_refuses_says_why(monkeypatch):
    def refused():
        raise RuntimeError("a row must begin | at 16 bytes")

    monkeypatch.setattr(slices, "products", lambda left, right: {"scaled_mm": refused})
    (row,) = slices.compared(16, 96, 1, 32, 48)
    assert row["why"] == "RuntimeError: a row must begin | at 16 bytes" and "us" not in row
    *_, line = slices.lines([row])
    assert line.endswith("| RuntimeError: a row must begin / at 16 bytes |")


def test_products_are_compared_in_a_part_of_the_hour(tmp_path):
    """The part as it is, in a process of its own."""
    for plugin in ("opfuse_linear", "opfuse_moe"):
        pytest.importorskip(plugin, reason="the kernels that are timed are those of plugins")
    (part,) = [part for part in gpu_hour.parts() if part.name == "products"]
    (row,) = gpu_hour.hour([part], 600, tmp_path)["parts"]
    assert row["state"] == "done", row
    result = row["result"]
    assert result["nan"] == {"gelu": True, "relu": True} and not result["left"]
    assert [len(each["us"]) for each in result["rows"]] == [3, 3, 3, 2, 5, 4]
    for each in result["rows"]:
        # torch's product of groups of codes is for CUDA alone
        assert {*each["why"]} <= {"scaled_grouped_mm"}, each
        assert max(each["wrong_by"].values()) < 0.01, each
    assert (tmp_path / "gpu-hour.md").read_text().count("| dw, 16 x 16 -> 32 |") == 3


def test_a_product_that_fails_says_why(monkeypatch):
    def fails():
        raise RuntimeError("out of | memory")

    ways = {"kernel": lambda row: fails, "epilogue": lambda row: lambda: torch.ones(2)}
    row = products.compared(
        lambda **case: (torch.ones(2), ways), rows=2, depth=1, features=1, keep=True
    )
    assert row["why"] == {"kernel": "RuntimeError: out of | memory"} and row["us"].keys() == {
        "epilogue"
    }
    row["case"] = {"kind": "dw", "sizes": [1, 1], "depth": 1, "features": 1}
    assert any(
        "| kernel |  |  |  | RuntimeError: out of / memory |" in line
        for line in products.lines({"rows": [row], "nan": {}})
    )


# The hour


class Clock:
    """Waiting takes no time."""

    def __init__(self):
        self.time = 0.0

    def wait(self, seconds):
        self.time += seconds


def hour(tmp_path, programs, seconds, limits=(100, 100, 100, 100)):
    """Parts that write what they say at the seconds that they say, and end at the last, with a status."""
    clock, began, ended = Clock(), [], []

    class Process:
        returncode = None

        def __init__(self, command, log):
            self.name, self.out, self.told = command
            self.began = clock.time
            began.append((self.name, clock.time, float(self.told)))
            log.write_text("what it says\n")

        def poll(self):
            *writes, (end, status) = programs[self.name]
            for when, text in writes:
                if clock.time - self.began >= when:
                    gpu_hour.pathlib.Path(self.out).write_text(text)
            if clock.time - self.began >= end:
                self.returncode = status
            return self.returncode

        def end(self):
            ended.append(self.name)

    parts = [
        gpu_hour.Part(name, limit, 20, [name, "{out}", "{seconds}"], lambda found: [f"- {found}"])
        for name, limit in zip(programs, limits, strict=False)
    ]
    given = {"begin": Process, "now": lambda: clock.time, "wait": clock.wait}
    result = gpu_hour.hour(parts, seconds, tmp_path / "out", **given)
    stored = json.loads((tmp_path / "out" / "gpu-hour.json").read_text())
    assert stored == result and ended == [name for name, *_ in began]
    return result["parts"], began, (tmp_path / "out" / "gpu-hour.md").read_text()


def test_each_part_has_a_limit_and_keeps_what_it_wrote(tmp_path):
    programs = {
        "works": [(1, '{"a": 1}'), (5, 0)],
        "hangs": [(1, '{"b": 1}'), (90, '{"b": 2}'), (10_000, 0)],
        "fails": [(1, '{"c": 1}'), (3, 7)],
        "leaves": [(2, -11)],
    }
    rows, began, text = hour(tmp_path, programs, 1000)
    assert [row["state"] for row in rows] == [
        "done", "ended after 100 s", "exit status 7", "exit status -11",
    ]  # fmt: skip
    assert [row["result"] for row in rows] == [{"a": 1}, {"b": 2}, {"c": 1}, None]
    assert rows[2]["said"] == ["what it says"] and began[1] == ("hangs", 5.0, 100 - gpu_hour.SPARE)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "gpu-hour.json", "gpu-hour.md",
    ]  # fmt: skip
    assert "## hangs: ended after 100 s\n\n- {'b': 2}" in text


def test_what_the_time_does_not_hold_is_skipped_with_a_reason(tmp_path):
    programs = {name: [(1, "{}"), (10_000, 0)] for name in ("first", "second", "third")}
    rows, began, text = hour(tmp_path, programs, 140, (90, 45, 90))
    assert [(name, when) for name, when, _ in began] == [("first", 0.0), ("second", 90.0)]
    assert rows[2] == {
        "name": "third", "state": "skipped", "why": "5 s were left, and it needs 20 s",
    }  # fmt: skip
    assert "## third: skipped" in text


def test_what_broke_off_in_the_middle_of_a_file_is_no_result(tmp_path):
    rows, *_ = hour(tmp_path, {"broken": [(1, '{"a": '), (3, -9)]}, 100)
    assert rows[0]["result"] is None and rows[0]["state"] == "exit status -9"


def test_a_part_ends_with_everything_that_it_started(tmp_path):
    beats = tmp_path / "beats"
    beats.touch()
    child = f"import time\nwhile True: open({str(beats)!r}, 'a').write('.'); time.sleep(0.01)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = gpu_hour.Running(["-c", code], tmp_path / "log")
    until = time.monotonic() + 60
    while not beats.stat().st_size:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.end()
    assert process.returncode == -9
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size


def test_what_the_parts_call_understands_them():
    known = gpu_hour.parts()
    names = ["odd-shapes", "step", "slices", "formulas", "products", "behind"]
    assert [part.name for part in known] == names
    assert sum(part.limit for part in known[:-1]) < 60 * 14 - known[-1].least
    parsers = {
        "gpu_step.py": gpu_step.parsed,
        "slices.py": slices.parsed,
        "gpu_formulas.py": gpu_formulas.parsed,
        "products.py": products.parsed,
    }
    for part in known:
        command = [{"{out}": "x", "{seconds}": "75"}.get(word, word) for word in part.command]
        assert "{out}" in part.command
        if command[0] == "-m":
            assert command[1:3] == ["opfuse_triton", "gpu"]
            found = gpu_command.make_context("gpu", command[3:]).params
            assert found["budget"] == 75 and found["only"] in ("odd", "real")
            assert bool(found["cases"]) == (part.name == "behind")
        else:
            name = command[0].rpartition("/")[2]
            assert str(parsers[name](command[1:]).out) == "x"


def test_what_was_slower_is_measured_under_the_name_that_it_has_now():
    here = {name: {case.name for case in load_cases(at)} for name, at in case_lists(None).items()}
    stored = {case for case, *_ in report.timed_cases(STORED)}
    behind = [case for case in stored if case.partition(": ")[2] in report.behind_in(STORED)]
    assert len(behind) > 20
    assert not any(name in cases for name in report.GONE for cases in here.values())
    for case in behind:
        plugin, _, name = case.partition(": ")
        assert plugin not in here or name in here[plugin], case


def test_the_stored_results_give_the_lines_of_a_page():
    kernels = gpu_hour.kernel_lines(STORED | {"left": {"norm": ["dropout"]}})
    assert kernels[-1] == "- no time for 1 shapes or cases" and len(kernels) > 100
    assert kernels[-2].startswith("- NVIDIA H100") and "RoPE" in report.behind_in(STORED)
    assert any(line.startswith("| converted | 47.5") for line in report.of_step(STEP))
    (bf16, fp8), new = (
        report.launches_of(report.stored("h100-step-kernels")),
        {"way": "eager", "ms": 2.0},
    )
    assert "276 kernels" in bf16 and "690 more events" in bf16 and "310 kernels" in fp8
    new["kernels"] = [["all", 1.0, 2], ["one", 1.0, 2]]
    assert report.launches_of({"rows": [new]}) == [
        "- eager, a step of 2.0 ms: 2 kernels took 1.0 ms"
    ]


# The READMEs


def readme(package):
    path = ROOT / "plugins" / package / "README.md" if package else ROOT / "README.md"
    return " ".join(path.read_text(encoding="utf-8").replace("**", "").split())


@pytest.mark.parametrize("package", report.ran_on_gpu())
def test_a_readme_says_what_the_stored_runs_say_of_a_gpu(package):
    text = readme(package)
    for claim in report.ran_on_gpu()[package]:
        assert claim in text, f"expected {claim!r}"
    denied = re.findall(r"[^.]*(?:not run|never ran|never run|no run) on (?:a|any) GPU[^.]*", text)
    assert not denied


def test_no_other_readme_tells_of_shapes_on_a_gpu():
    packages = {path.parent.name for path in (ROOT / "plugins").glob("*/README.md")}
    others = packages - {*report.ran_on_gpu()}
    assert others and not [name for name in others if "real shapes" in readme(name)]
