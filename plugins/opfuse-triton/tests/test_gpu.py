"""``python -m opfuse_triton gpu``, end to end with the interpreter as the device, and with a fake clock."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

import gpu_toys as toys  # noqa: E402
from opfuse_triton import TARGETS, Config, Kernel, KernelCase, Operand, config_tables, target  # noqa: E402
from opfuse_triton.__main__ import main  # noqa: E402
from opfuse_triton.gpu import ahead, measuring, session, table, worker  # noqa: E402
from opfuse_triton.gpu.judging import judge  # noqa: E402
from opfuse_triton.gpu.timing import Clock  # noqa: E402
from opfuse_triton.targets import INTERPRETER  # noqa: E402
from triton_toys import scale_kernel  # noqa: E402

from opfuse.tuning.clock import GPUClock  # noqa: E402

HERE = pathlib.Path(__file__)
SUPPORT = HERE.parents[3] / "tests" / "support"
interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
once = pytest.mark.skipif(is_interpreting(), reason="the processes that it starts always interpret")


def command(*arguments, cwd):
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    start = [sys.executable, "-m", "opfuse_triton", "gpu"]
    return subprocess.run(
        [*start, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240
    )


@once
def test_a_sound_case_passes_and_is_timed(tmp_path, monkeypatch):
    done = command("gpu_toys:SOUND", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["part"] for row in report["rows"]] == [
        "scale", "scale: rows=3 features=40", "later", "later: rows=3 features=40",
    ]  # fmt: skip
    assert report["rows"][0]["judged"] == 4 and report["rows"][2]["judged"] == 2
    row = report["rows"][1]
    assert row["seconds"] > 0 and row["floor"] == 2 * 3 * 40 * 2 and row["wrong"] == []
    assert set(row["others"]) == {"separate", "twice"} and "scale_kernel" in row["best"]
    lines = done.stdout.splitlines()
    assert "interpreter, torch" in lines[0] and "gpu_toys:SOUND: scale" in lines
    assert any(line.startswith("  rows=3 features=40 ") for line in lines)
    assert max(map(len, lines[:-2])) <= 100 and report["left"] == {"gpu_toys:SOUND": []}
    kept = config_tables.read(tmp_path / "interpreter.kernels.json")
    found = [one for row in report["rows"] for one in row.get("entries", ())]
    assert all(one in kept for one in found) and all(one in found for one in kept)
    speeds = {one["case"]: one for one in kept if "case" in one}
    assert {*speeds} == {"gpu_toys:SOUND: scale", "gpu_toys:SOUND: later"}
    fastest = min(row["seconds"], row["best"]["scale_kernel"]["seconds"])
    speed = speeds["gpu_toys:SOUND: scale"]
    assert speed["shape"] == {"rows": 3, "features": 40}
    assert speed["speed"] == row["others"]["separate"] / fastest
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    config_tables._table.cache_clear()
    facts = {"x_ptr": torch.bfloat16, "s_ptr": torch.float32, "y_ptr": torch.bfloat16, "n": 120}
    assert toys.SCALE.pick(INTERPRETER, facts).to_dict() == found[0]["config"]
    config_tables._table.cache_clear()


@pytest.mark.parametrize(
    ("seconds", "best", "wrong"),
    [
        ({2: 1.0, 4: 2.0}, 4, True),
        ({2: 3.0, 4: 2.0}, 4, False),
        ({2: 4.0, 4: 3.95}, 1, False),  # no more than noise
        ({2: 1.0, 4: None}, 1, True),
    ],
)
def test_the_fastest_right_configuration_wins(seconds, best, wrong):
    kernel = Kernel(scale_kernel, [Config({"BLOCK": block}) for block in (1, 2, 4)])

    def block():
        return kernel.pick(INTERPRETER, {})["BLOCK"]

    def run(x, s):
        return x * s.to(x.dtype) + (block() == 2)

    with target(INTERPRETER):
        found = measuring._fastest(
            toys.case("kernel", run), toys.SMALL[0], FakeClock(), kernel, {}, 4.0,
            lambda call: seconds[block()],
        )  # fmt: skip
    assert found["config"]["constants"]["BLOCK"] == best
    assert found["seconds"] == {1: 4.0, **seconds}[best]
    told = ["scale_kernel with BLOCK=2, 4 warps: y is wrong"] * wrong
    assert [fault.partition(" by")[0] for fault in found["faults"]] == told


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gpu_toys:SOUND"], 1, "is not a table of configurations"),
        (["gpu_toys:SOUND", "--budget", "20"], 2, "20.0 is not in the range x>=60"),
        (["nothing", "--tables", "."], 1, "no installed plugin 'nothing' has kernel cases"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    arguments, status, said, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "interpreter.kernels.json").write_text('{"format": 1, "entries": [{}]}')
    done = CliRunner().invoke(main, ["gpu", "--tables", "kept", *arguments])
    assert done.exit_code == status and said in " ".join(done.output.split())
    assert not (tmp_path / "gpu.json").exists()


@once
def test_each_fault_is_told_and_the_command_fails(tmp_path):
    done = command("gpu_toys:WRONG", cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    for text in (
        "WRONG twice: rows=3 features=40, bfloat16: y is wrong by",
        "WRONG unwritten: rows=3 features=40, bfloat16: y is NaN in 100 places, expected in 0",
        "WRONG differing: rows=3 features=40, bfloat16: y differs between 3 runs of the same",
        "WRONG raising: rows=3 features=40, bfloat16: ValueError: no such kernel",
        "WRONG without twin: rows=3 features=40, bfloat16: it has no twin to be compared with",
        "WRONG narrow: rows=3 features=40, bfloat16: y is (3, 39) torch.bfloat16, and its twin's",
        "not timed, the case, raising: rows=3 features=40: ValueError: no such kernel",
    ):
        assert text in said, (text, said)


@once
def test_a_process_that_dies_or_hangs_costs_its_part_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.syspath_prepend(str(SUPPORT))
    kept = []
    found = session.session(
        "gpu_toys:DEADLY", 200, lambda report: kept.append(len(report["rows"])), silence=12,
        works=lambda: True,
    )  # fmt: skip
    ended = {row["part"]: row["how"] for row in found["ended"]}
    assert ended["aborts"].startswith("exit status -6") and ended["hangs"] == "nothing for 12 s"
    assert [row["part"] for row in found["rows"]] == ["goes on", "goes on: rows=3 features=40"]
    assert kept[:2] == [1, 2]
    text = "\n".join(table.lines(found))
    assert "ENDED its process: aborts: exit status -6" in text


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("moved", "by", "exact", "fault"),
    [
        (0, 0, True, ""),
        (1, 1, True, "codes differs from its twin in 1 of 400 codes, by up to 1 steps"),
        (8, 1, False, ""),
        (9, 1, False, "codes differs from its twin in 9 of 400 codes, by up to 1 steps"),
        (1, 2, False, "codes differs from its twin in 1 of 400 codes, by up to 2 steps"),
        (8, 8, False, ""),  # twice as large: a block with another power of two as its scale
        (9, 8, False, "codes differs from its twin in 9 of 400 codes, by up to 8 steps"),
        (1, 16, False, "codes differs from its twin in 1 of 400 codes, by up to 16 steps"),
    ],
)
def test_how_far_fp8_codes_may_be_from_the_twins(moved, by, exact, fault):
    def cast(x):
        return x.clamp(1, 8).to(FP8)

    def run(x):
        codes = cast(x).view(torch.uint8)
        codes.view(-1)[:moved] += by
        return codes.view(FP8)

    def tensors(rows):
        shape = (rows, 100)
        return {"x": Operand(shape, torch.bfloat16), "codes": Operand(shape, FP8, output=True)}

    case = KernelCase("cast", run, tensors, [], [], twin=cast, exact=exact)
    assert judge(case, {"rows": 4}, case.inputs({"rows": 4}, "cpu")) == fault


@pytest.mark.parametrize(
    "moved, factor, fault",
    [
        (2, 2.0, ""),
        (2, 0.5, ""),
        (3, 2.0, "scales differs from its twin in 3 of 100 codes, by up to 1 steps"),
        (1, 4.0, "scales differs from its twin in 1 of 100 codes, by up to 2 steps"),
        (1, 3.0, "scales is wrong"),
    ],
)
def test_few_scales_may_be_the_next_power_of_two(moved, factor, fault):
    torch.manual_seed(0)  # beside large scales a small one may be wrong by its tolerance

    def scales(x):
        return torch.exp2((x * 4).round()).float()

    def run(x):
        found = scales(x)
        found.view(-1)[:moved] *= factor
        return found

    def tensors(rows):
        shape = (rows, 25)
        return {
            "x": Operand(shape, torch.bfloat16),
            "scales": Operand(shape, torch.float32, output=True),
        }

    case = KernelCase("scales", run, tensors, [], [], twin=scales)
    said = judge(case, {"rows": 4}, case.inputs({"rows": 4}, "cpu"))
    assert said.startswith(fault) and bool(said) == bool(fault)


class FakeClock(Clock):
    """Each look at it takes a second."""

    def __init__(self):
        self.time = 0.0
        super().__init__(torch.device("cpu"), self.tick)

    def tick(self):
        self.time += 1
        return self.time


class Process:
    """It wrote its lines, and runs on."""

    returncode, killed = None, False

    def __init__(self, arguments, log):
        rows = [
            {"begins": "scale"},
            dict(part="scale", plugin=arguments[0], judged=4, left=0, wrong=[]),
        ]
        pathlib.Path(arguments[2]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def poll(self):
        return self.returncode

    def kill(self):
        self.killed = True

    def wait(self, timeout):  # it cannot even be ended
        raise subprocess.TimeoutExpired("worker", timeout)


@interpreted
def test_the_budget_holds_and_what_it_leaves_out_is_named():
    clock, began = FakeClock(), []

    def begin(*given):
        began.append(Process(*given))
        return began[-1]

    def wait(seconds):
        clock.time += 5

    found = session.session(
        "gpu_toys:SOUND", 100, lambda report: None, begin=begin, now=clock.now, wait=wait
    )
    assert [process.killed for process in began] == [True] and 100 < found["seconds"] < 120
    assert found["ended"] == []
    left = ["scale: rows=3 features=40", "later", "later: rows=3 features=40"]
    assert found["left"]["gpu_toys:SOUND"] == left
    text = "\n".join(table.lines(found))
    assert (
        "not measured, gpu_toys:SOUND: scale: rows=3 features=40 and 2 more; --budget gives more time"
        in text
    )


@interpreted
def test_each_plugin_has_a_share_of_the_budget_and_then_the_rest(monkeypatch):
    clock, began = FakeClock(), []
    lists = {"first": "gpu_toys:SOUND", "second": "gpu_toys:COUNTS", "third": "gpu_toys:SOUND"}
    monkeypatch.setattr(session, "case_lists", lambda plugin: lists)

    class Taking:
        """It takes all its time, the second one ten seconds, and then it has one part."""

        returncode = None

        def __init__(self, arguments, log):
            name, _, self.out, seconds, *wanted = arguments
            began.append((name, float(seconds), wanted))
            self.end = clock.time + (10 if name == "second" else float(seconds))
            part = "counts" if name == "second" else "scale" if "scale" in wanted else "later"
            self.row = {"part": part, "plugin": name, "wrong": []}

        def poll(self):
            if clock.time >= self.end and self.returncode is None:
                pathlib.Path(self.out).write_text(json.dumps(self.row) + "\n")
                self.returncode = 0
            return self.returncode

    def wait(seconds):
        clock.time += 5

    found = session.session(
        None, 600, lambda report: None, begin=Taking, now=clock.now, wait=wait, silence=1000
    )
    assert [name for name, *_ in began[:4]] == ["first", "third", "second", "first"]
    shares = [seconds for _, seconds, _ in began[:3]]
    assert (
        all(160 < seconds < 230 for seconds in shares)
        and began[3][2][0] == "scale: rows=3 features=40"
    )
    assert found["seconds"] < 620 and set(found["plugins"]) == set(lists)


@interpreted
def test_no_part_begins_after_the_deadline():
    rows, clock = [], FakeClock()
    names = [part.name for part in measuring.parts(toys.SOUND, False)]
    worker.run("toys", "gpu_toys:SOUND", rows.append, clock, 12.0, names)
    assert [row["part"] for row in rows if "part" in row] == ["scale", "scale: rows=3 features=40"]
    (odd,) = [row for row in rows if "judged" in row]
    assert odd["judged"] == 4 and rows[-1]["seconds"] == 1.0 and clock.time < 20
    rows.clear()
    worker.run("toys", "gpu_toys:SOUND", rows.append, FakeClock(), 3.0, names)
    (row,) = [row for row in rows if "judged" in row]
    assert row["judged"] + row["left"] == 4 and row["left"] > 0


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (["odd"], ["scale", "later"]),
        (["odd", ["later"]], ["later"]),
        (["real", ["scale"]], ["scale: rows=3 features=40"]),
        ([None, ["later"]], ["later", "later: rows=3 features=40"]),
        ([None, ["unknown"]], []),
    ],
)
@interpreted
def test_what_is_not_asked_for_is_neither_run_nor_missed(wanted, names):
    clock, began = FakeClock(), []

    class Ending:
        """It has done everything at once."""

        returncode = 0

        def __init__(self, arguments, log):
            began.append(arguments[4:])
            rows = [{"part": each, "plugin": arguments[0], "wrong": []} for each in arguments[4:]]
            pathlib.Path(arguments[2]).write_text("".join(json.dumps(row) + "\n" for row in rows))

        def poll(self):
            return 0

    asked = measuring.Wanted(*wanted)
    found = session.session(
        "gpu_toys:SOUND", 200, lambda report: None, asked, begin=Ending, now=clock.now
    )
    assert [row["part"] for row in found["rows"]] == names and began == [names] * bool(names)
    assert found["left"] == {"gpu_toys:SOUND": []} and found["ended"] == []
    compiled = {case.name for _, case, *_ in ahead.work(["gpu_toys:SOUND"], asked)}
    assert compiled == {name.partition(":")[0] for name in names}


def test_calls_are_captured_on_a_stream_of_their_own(monkeypatch):
    """No CUDA graph can be captured on the default one."""
    events = []

    @contextlib.contextmanager
    def around(clock):
        events.append("own")
        yield
        events.append("default")

    def samplers(clock, ways):
        events.append("captured")
        return [lambda: 1.0], ""

    monkeypatch.setattr(GPUClock, "around", around)
    monkeypatch.setattr(GPUClock, "samplers", samplers)
    assert Clock(torch.device("cuda")).seconds([lambda: None]) == 1.0
    assert events == ["own", "captured", "default"]


def test_a_part_for_torch_compile_comes_after_all_others(monkeypatch):
    monkeypatch.setattr(measuring, "current_target", lambda device: TARGETS[90])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = measuring.parts([dataclasses.replace(toys.SOUND[0], shapes=[{"rows": 2, "features": 8}, {"rows": 4, "features": 8}]), toys.SOUND[1]], True)  # fmt: skip
    names = [part.name for part in found]
    compiled = [name for name in names if name.endswith(", torch.compile")]
    assert compiled and names[-len(compiled) :] == compiled
    shapes = [name.partition("rows=")[2][0] for name in compiled]
    assert shapes == ["3", "2", "4"]  # the first of each case, then the second
    rows = [
        {"part": "a: rows=2", "wrong": [], "others": {"separate": 2.0}},
        {"part": "a: rows=2, torch.compile", "compiled": 3.0, "wrong": []},
    ]
    assert table._with_compiled(rows) == [
        {"part": "a: rows=2", "wrong": [], "others": {"separate": 2.0, "compiled": 3.0}}
    ]


def test_what_is_launched_is_compiled_on_all_cores_first(tmp_path):
    began, clock = [], FakeClock()

    class Compiling:
        def __init__(self, command):
            began.append(command)
            self.ended = None if len(began) == 1 else 0

        def poll(self):
            return self.ended

        def kill(self):
            self.killed = True

        def wait(self):
            pass

    ahead.compile_ahead(
        ["gpu_toys:SOUND"], TARGETS[90], 20.0, begin=Compiling, wait=lambda seconds: None,
        now=clock.now,
    )  # fmt: skip
    assert clock.time > 20 and len(began) == len(os.sched_getaffinity(0))
    assert [command[5] for command in began] == [str(number) for number in range(len(began))]
    assert ahead.Target(**json.loads(began[0][3])) == TARGETS[90]


@pytest.mark.skipif(is_interpreting(), reason="nothing is compiled while Triton interprets")
def test_compiling_ahead_fills_the_cache_of_what_runs_later(tmp_path):
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    target = json.dumps(dataclasses.asdict(TARGETS[90]))
    command = [sys.executable, "-m", "opfuse_triton.gpu.ahead", target, '[null, []]', "0", "1", "gpu_toys:SOUND"]  # fmt: skip
    subprocess.run(command, env=environ, check=True, timeout=200)
    assert len(list(tmp_path.rglob("scale_kernel.cubin"))) >= 3  # its candidates


def test_sets_of_inputs_are_larger_than_the_cache():
    assert FakeClock().sets(10) == 1
    clock = Clock(torch.device("cuda"))
    with mock.patch.object(GPUClock, "cache", 1000):
        assert [clock.sets(nbytes) for nbytes in (100, 900, 3000, 0)] == [16, 3, 1, 16]


def test_a_kernel_is_pinned_once():
    config = toys.SCALE.candidates(None, {})[1]
    with toys.SCALE.pinned(config):
        assert toys.SCALE.pick(TARGETS[90], {}).to_dict() == config
        with pytest.raises(RuntimeError, match="scale_kernel is pinned already"):
            toys.SCALE.pinned(config).__enter__()
    assert not {"launch", "pick"} & vars(toys.SCALE).keys()


def test_draw_of_something_that_is_no_operand_is_refused():
    case = dataclasses.replace(toys.COUNTS[0], draw=lambda **shape: {"targets": torch.ones(1)})
    with pytest.raises(ValueError, match="counts: draw gives targets, which is no operand"):
        case.inputs({"rows": 2, "features": 3}, "cpu")


def test_draw_gives_the_inputs_that_it_names():
    x = toys.COUNTS[0].inputs({"rows": 2, "features": 3}, "cpu", torch.float32, 1)["x"]
    assert torch.equal(x, torch.ones(2, 3)) and x.storage_offset() == 1


@once
def test_in_a_process_that_interprets():
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    given = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE),
        "-k",
        "deadline or budget",
    ]
    config = ["-c", str(HERE.parents[3] / "pyproject.toml"), "--rootdir", str(HERE.parents[3])]
    done = subprocess.run(
        [*given, *config], env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
