"""Kernels: configurations, targets, recording without a GPU, and the fast launcher."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import sys
from unittest import mock

import pytest
import torch

from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.alone
pytest.importorskip("triton")

import opfuse_triton  # noqa: E402
import triton  # noqa: E402
import triton_activation as support  # noqa: E402
from opfuse_triton import (  # noqa: E402
    TARGETS,
    Config,
    Kernel,
    KernelCase,
    Operand,
    current_target,
    launcher,
    recording,
    target,
)
from triton import language as tl  # noqa: E402

from opfuse import ops  # noqa: E402

compiled = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
ROOT = pathlib.Path(__file__).parents[3]
BF16 = torch.bfloat16


@triton.jit
def scale(
    x,
    out,
    count,
    shift,
    factors,
    bias,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr = 7,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, at < count).to(tl.float32) * factors[0] + shift
    if bias is not None:
        y += tl.load(bias + at, at < count)
    if KEEP:
        tl.store(out + at, y, at < count)


def by_size(target, facts):
    size = 256 if facts["count"] < 2048 else 1024
    return [Config({"BLOCK": size}), Config({"BLOCK": 2 * size}, num_warps=8)]


def fake(*shape, offset=0):
    return torch.empty(offset + torch.Size(shape).numel(), dtype=BF16, device="meta")[offset:].view(
        shape
    )


def test_a_configuration_is_data():
    config = Config({"BLOCK": 64}, num_warps=8, num_stages=3, options={"maxnreg": 128})
    again = Config(**json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config) and config["BLOCK"] == 64
    assert Config({"BLOCK": 64}, num_warps=8) != config
    assert config.compiler_options() == {
        "enable_fp_fusion": True, "num_warps": 8, "num_stages": 3, "maxnreg": 128,
    }  # fmt: skip
    assert "num_stages" not in Config().compiler_options()


def test_configurations_are_picked_by_target_and_facts():
    kernel = Kernel(scale, by_size)
    facts = {"count": 100}
    assert kernel.pick(TARGETS[90], facts) == Config({"BLOCK": 256})
    first, second = kernel.candidates(TARGETS[90], facts)
    assert Config(**first) == kernel.pick(TARGETS[90], facts) and second["constants"] == {
        "BLOCK": 512
    }
    for configs in ([], [Config()] * 9):
        with pytest.raises(
            ValueError, match=f"scale has {len(configs)} configurations, and 1 to 8"
        ):
            Kernel(scale, configs).pick(TARGETS[90], facts)


def test_a_parameter_with_a_taken_name_is_refused():
    @triton.jit
    def kernel(x, grid):
        pass

    with pytest.raises(
        ValueError, match="kernel has a parameter 'grid', which means something else"
    ):
        Kernel(kernel, [Config()])


def test_target_chooses_what_to_compile_for():
    with target("gfx942") as chosen, target(90):
        assert current_target(torch.device("cpu")) is TARGETS[90]
        assert (chosen.backend, str(chosen), chosen.for_triton().warp_size) == ("hip", "gfx942", 64)
    with pytest.raises(KeyError), target(91):
        pass
    if is_interpreting():
        found = current_target(torch.device("cpu"))
        assert dataclasses.replace(found, name="") == TARGETS[90]
    else:
        with pytest.raises(
            RuntimeError, match="a Triton kernel cannot run on cpu: move the tensors"
        ):
            current_target(torch.device("cpu"))


def test_a_gpu_of_this_machine_is_described_by_its_driver():
    properties = mock.Mock(
        major=9, minor=0, multi_processor_count=66, shared_memory_per_block_optin=1000,
        memory_clock_rate=3201000, memory_bus_width=6144,
    )  # fmt: skip
    properties.name = "NVIDIA H200"
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.version, "hip", None),
    ):
        found = current_target(torch.device("cuda", 7777))  # an index that nothing else asks for
    assert (found.arch, found.multiprocessors, found.shared_memory) == (90, 66, 1000)
    assert (found.flops, found.name) == (TARGETS[90].flops / 2, "NVIDIA H200")
    assert 4.8e12 < found.bandwidth < 5e12  # of an H200, not of the H100 of the table


def test_a_small_gpu_is_not_taken_for_a_large_one():
    properties = mock.Mock(
        spec=["major", "minor", "multi_processor_count", "name"],
        major=8,
        minor=9,
        multi_processor_count=142,
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.version, "hip", None),
    ):
        found = current_target(torch.device("cuda", 7778))
    assert (found.arch, found.shared_memory, found.bandwidth) == (89, 101376, 0.86e12)  # an L40S


def test_launches_are_recorded_and_nothing_runs():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    with recording(80):
        assert opfuse_triton.kernels_run(meta)
    assert not opfuse_triton.kernels_run(meta)
    assert opfuse_triton.kernels_run(cpu) == is_interpreting()
    kernel = Kernel(scale, by_size)
    x, bias = fake(64, 64, offset=3), fake(4096)
    with recording(80) as launches:
        kernel.launch(lambda c: (4096 // c["BLOCK"], 2), x, x, 4096, 1.5, (2.0,), bias, KEEP=True)
        kernel.launch((1,), x, x, 100, 1.5, (2.0,), None, KEEP=True, config=Config({"BLOCK": 16}))
        kernel.launch(
            (1,), x, x, 100, 1.5, (2.0,), None, KEEP=True, config={"constants": {"BLOCK": 16}}
        )
    first, second, third = launches
    assert first.kernel is kernel and first.grid == (4, 2) and first.config["BLOCK"] == 1024
    assert first.args[0] is x and first.constants == {"KEEP": True} and first.target is TARGETS[80]
    assert first.facts == {
        "KEEP": True, "x": BF16, "out": BF16, "count": 4096, "bias": BF16,
    }  # fmt: skip
    assert second.arguments == {
        "x": x, "out": x, "count": 100, "shift": 1.5, "factors": (2.0,), "bias": None, "KEEP": True, "BLOCK": 16,
    }  # fmt: skip
    assert second.config == third.config == Config({"BLOCK": 16})


@compiled
@pytest.mark.parametrize("arch", TARGETS)
def test_a_launch_compiles_as_triton_would(arch):
    kernel = Kernel(scale, by_size)
    with recording(arch) as launches:
        for x in (fake(64, 64), fake(64, 64, offset=3)):
            kernel.launch((4,), x, x, 4096, 1.5, (2.0,), None, KEEP=True)
    aligned, unaligned = (launch.compile() for launch in launches)
    assert aligned.metadata.num_warps == 4
    wide = {"cuda": ("ptx", "v4.b32"), "hip": ("amdgcn", "dwordx2")}
    asm, words = wide[TARGETS[arch].backend]
    counts = [kernel.asm[asm].count(words) for kernel in (aligned, unaligned)]
    assert counts[0] > counts[1], counts
    other = launches[0].compile(TARGETS[80])
    assert "sm_80" in other.asm["ptx"]


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_a_kernel_runs_in_the_interpreter_and_refuses_to_compile():
    x, out = torch.arange(300.0), torch.zeros(300)
    kernel = Kernel(scale, by_size)
    kernel.launch(lambda c: (-(-300 // c["BLOCK"]),), x, out, 300, 1.5, (2.0,), x, KEEP=True)
    assert torch.equal(out, 3 * x + 1.5)
    with recording(90) as (launches):
        kernel.launch((1,), x, out, 300, 0.0, (2.0,), x, KEEP=True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        launches[0].compile()


def cases():
    def tensors(rows, columns):
        return {
            "x": Operand((rows, columns), BF16),
            "index": Operand((rows,), torch.int32, "vector"),
            "y": Operand((rows, columns), BF16, output=True),
        }

    shapes = {"shapes": [{"rows": 8192, "columns": 4096}], "small": [{"rows": 3, "columns": 5}]}
    run = lambda x, index: support.forward(ops.GELU(), x)  # noqa: E731
    return KernelCase("gelu", run, tensors, **shapes), KernelCase(
        "own", run, tensors, floor=lambda rows, columns: rows, **shapes
    )


def test_a_case_runs_at_real_shapes_without_memory():
    case, own = cases()
    with recording(100) as launches:
        y = case.run(**case.inputs(case.shapes[0]))
    assert y.shape == (8192, 4096) and y.is_meta and launches[0].grid == (8192 * 4096 // 256,)
    assert case.floor_bytes(case.shapes[0]) == 2 * 8192 * 4096 * 2
    assert own.floor_bytes(own.shapes[0]) == 8192
    small = case.inputs(case.small[0], "cpu")
    assert small["x"].dtype is BF16 and small["x"].std() > 0 and not small["index"].any()


# The launcher, with a driver of Triton's that does nothing


@pytest.fixture(scope="session")  # what was compiled holds its launcher
def bench():
    """``benchmarks/launcher.py``, once for all, whatever the order of the tests is."""
    place = ROOT / "benchmarks" / "launcher.py"
    spec = importlib.util.spec_from_file_location("opfuse_benchmark_launcher", place)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    yield sys.modules[spec.name]
    del sys.modules[spec.name]


class Calls:
    """What Triton's launchers got, and how often its JIT ran."""

    def __init__(self):
        self.launched, self.jit = [], 0

    def latest(self):
        x, y, z, _, _, _, *rest = self.launched[-1]
        return (x, y, z), rest[:3], rest[3:]


@pytest.fixture
def calls(bench, monkeypatch):
    found, run = Calls(), triton.JITFunction.run

    def count(self, *args, **kwargs):
        found.jit += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(
        bench.IdleLauncher, "__call__", lambda self, *args: found.launched.append(args)
    )
    monkeypatch.setattr(triton.JITFunction, "run", count)
    with bench.idle_driver():
        yield found


def tensor(count=4096, offset=0, dtype=BF16):
    return torch.zeros(count + offset, dtype=dtype)[offset:]


def run(
    kernel, x=None, count=4096, shift=1.5, factors=(2.0,), bias=None, keep=True, grid=(4,), **given
):
    x = tensor() if x is None else x
    kernel.launch(grid, x, x, count, shift, factors, bias, KEEP=keep, **given)
    return x


@compiled
def test_what_was_launched_is_launched_again_without_the_jit(calls):
    kernel = Kernel(scale, by_size)
    for grid in ((4,), (4, 2), (4, 2, 3), lambda c: (4096 // c["BLOCK"],)):
        x = run(
            kernel,
            grid=grid,
            shift=0.25 * len(calls.launched),
            factors=(0.5 * len(calls.launched),),
        )
        size = (4,) if callable(grid) else grid
        n = len(calls.launched) - 1
        got, hooks, args = calls.latest()
        assert got == (*size, 1, 1)[:3]
        assert args[:2] == [x, x] and args[2:] == [4096, 0.25 * n, (0.5 * n,), None, True, 1024, 7]
    assert calls.jit == 1
    assert hooks == [None] * 3


@compiled
def test_the_own_grid_of_a_kernel_is_asked_once_for_what_it_depends_on(calls):
    asked, known = [], []

    def grid(count, config):
        asked.append((count, config["BLOCK"]))
        return (-(-count // config["BLOCK"]),)

    kernel, small = Kernel(scale, by_size, grid), {"config": Config({"BLOCK": 512})}
    for _ in range(2):
        for count, given, size in (
            (4096, {}, 4),
            (8192, {}, 8),
            (4096, small, 8),
            (8192, small, 16),
        ):
            run(kernel, count=count, grid=None, **given)
            assert calls.latest()[0] == (size, 1, 1)
        run(kernel, grid=(3,))
        assert calls.latest()[0] == (3, 1, 1)
        known = known or asked.copy()
    assert asked == known and {*asked} == {(n, b) for n in (4096, 8192) for b in (1024, 512)}
    with recording(90) as launches:
        run(kernel, grid=None)
    assert launches[0].grid == (4,)


DIFFERENT = {
    "dtype": {"x": tensor(dtype=torch.float32)}, "address": {"x": tensor(offset=1)}, "one": {"count": 1},
    "not a multiple of 16": {"count": 4097}, "64 bits": {"count": 2**33},
    "64 bits below 0": {"count": -(2**31) - 16}, "an integer": {"shift": 2},
    "a tensor": {"bias": tensor()}, "a constant": {"keep": False}, "two floats": {"factors": (1.0, 2.0)},
    "configuration": {"config": Config({"BLOCK": 512})},
}  # fmt: skip


@compiled
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_to_triton_is_compiled_again(name, calls):
    kernel = Kernel(scale, by_size)
    run(kernel)
    run(kernel, **DIFFERENT[name])
    ours = [arg for arg in calls.latest()[2]]
    assert calls.jit == 2
    for _ in range(2):
        run(kernel, **DIFFERENT[name])
        run(kernel)
    assert calls.jit == 2 and len(calls.launched) == 6
    assert calls.launched[-2][-9:][2:5] == tuple(ours[2:5])
    functions = {id(call[5]) for call in calls.launched}
    assert len(functions) == 2  # the metadata of two compiled kernels


@compiled
def test_integers_that_are_the_same_to_triton_are_not_compiled_again(calls):
    kernel = Kernel(scale, by_size)
    for count in (4096, 4112, 8192):
        run(kernel, count=count)
        assert calls.latest()[2][2] == count
    assert calls.jit == 1
    run(kernel, count=160)  # another configuration
    assert calls.jit == 2 and calls.latest()[2][-2] == 256
    parameter = torch.nn.Parameter(tensor())
    run(kernel, x=parameter)
    run(kernel, x=parameter)
    assert calls.jit == 3


@compiled
def test_the_lowest_of_32_bits_is_not_the_highest_of_64(calls):
    kernel = Kernel(scale, by_size)
    for count in (-(2**31), -(2**31) - 16, -(2**31), -(2**31) - 16):
        run(kernel, count=count)
    assert calls.jit == 2


@compiled
def test_a_version_of_triton_that_was_not_tested_launches_by_itself(calls, monkeypatch):
    monkeypatch.setattr("opfuse_triton.launcher._TESTED", False)
    kernel = Kernel(scale, by_size)
    for _ in range(3):
        run(kernel)
    assert calls.jit == 3


@compiled
@pytest.mark.parametrize(
    "name", ["enter", "leave", "a function", "pre-run", "debug", "instrumentation", "pretended"]
)
def test_whoever_watches_gets_the_jit(name, calls, monkeypatch):
    kernel, seen = Kernel(scale, by_size), []
    run(kernel)
    run(kernel)
    assert calls.jit == 1
    with contextlib.ExitStack() as stack, monkeypatch.context() as monkeypatch:
        runtime = triton.knobs.runtime
        if name in ("enter", "leave"):
            chain = runtime.launch_enter_hook if name == "enter" else runtime.launch_exit_hook
            chain.add(seen.append)
            stack.callback(chain.remove, seen.append)
        elif name == "a function":
            monkeypatch.setattr(runtime, "launch_enter_hook", seen.append)
        elif name == "pre-run":
            monkeypatch.setattr(scale, "pre_run_hooks", [lambda *args, **kwargs: seen.append(args)])
        elif name == "debug":
            monkeypatch.setattr(runtime, "debug", True)
        elif name == "instrumentation":
            monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "consan")
            monkeypatch.setattr(
                triton.JITFunction, "run", lambda *args, **kwargs: seen.append(args)
            )
        else:
            stack.enter_context(target(80))
        run(kernel)
        assert calls.jit == 2 or (name == "instrumentation" and seen)
    run(kernel)
    assert calls.jit == 2 - (name == "instrumentation")


@compiled
@pytest.mark.parametrize(
    "given",
    [{"shift": True}, {"factors": (2,)}, {"factors": [2.0]}, {"x": torch.zeros(4096).as_subclass(type("T", (torch.Tensor,), {}))}],
    ids=["bool", "tuple of integers", "list", "subclass"],
)  # fmt: skip
def test_unknown_arguments_go_to_the_jit(given, calls):
    kernel = Kernel(scale, by_size)
    for _ in range(2):
        with contextlib.suppress(TypeError):  # Triton takes no lists
            run(kernel, **given)
    assert calls.jit == 2


@compiled
def test_a_launch_is_on_the_device_of_its_tensors(bench, calls, monkeypatch):
    kernel, entered = Kernel(scale, by_size), []
    current, streams = [-1], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(current[0])
            current[0] = self.index

        def __exit__(self, *unused):
            current[0] = entered.pop()

    monkeypatch.setattr(bench.IdleDriver, "get_current_device", lambda self: current[0])
    monkeypatch.setattr(
        bench.IdleDriver, "get_current_stream", lambda self, i: streams.append(i) or i
    )
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(
        bench.IdleLauncher, "__call__", lambda self, *args: calls.launched.append(current[0])
    )
    current[0] = 3
    for _ in range(3):
        run(kernel)  # a CPU tensor is on device -1
    assert calls.launched == [-1] * 3 and streams == [-1] * 3 and current == [3] and calls.jit == 1


@compiled
def test_the_tables_are_bounded(calls, monkeypatch):
    monkeypatch.setattr(launcher, "MOST_KEYS", 4)
    kernel = Kernel(scale, by_size)
    for count in itertools.chain(range(2048, 4096, 16), [4096]):
        run(kernel, count=count)
    (form,) = kernel._forms.values()
    assert len(form.exact) <= 4 and calls.jit == 1


@compiled
def test_a_launch_calls_less_than_the_jit_does(bench):
    """In place of the times, which depend on the machine: the functions that one launch calls."""
    counts = {}
    with bench.idle_driver():
        for name, call in bench.ways().items():
            call()
            call()
            events = []
            sys.setprofile(lambda frame, event, arg: events.append(event))  # noqa: B023
            call()
            sys.setprofile(None)
            counts[name] = events.count("call"), events.count("c_call")
    jit, ours = counts["JITFunction.run"], counts["Kernel.launch"]
    # six of each are the same: the call itself, the driver, and Triton's launcher
    assert ours[0] <= 9 and sum(ours) <= 0.6 * sum(jit), counts


@compiled
def test_a_graph_can_be_captured(calls):
    """A launch that is known makes no tensor and reads none."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    kernel, x = Kernel(scale, by_size), tensor()
    run(kernel, x)
    with Nothing():
        run(kernel, x)
    assert calls.jit == 1 and len(calls.launched) == 2
