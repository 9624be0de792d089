"""Cases that are no timed pass of a chain: counts, captures, cold starts, one step of a plan.

Each function takes the case and the device, and gives the numbers by provider: samples, or one
value.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from typing import Any

import torch

import opfuse
from opfuse import ops

from .cases import Case
from .chains import TOLERANCE, Work, error, several
from .measure import around, capture, cpu_timer, launch_us, sample_rounds, saved_bytes, steps
from .providers import NotBuilt, Skip, by_hand, with_opfuse
from .record import ROOT
from .steps import alone

Numbers = dict[str, list[float] | Skip]


def in_place(case: Case, device: torch.device) -> Numbers:
    """The backward of bias + GELU where it may overwrite the incoming gradient; C2.

    It may do so inside a chain.
    """
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    dy, (grad,) = torch.empty_like(work.grads[0]), work.grads
    z = work.inputs[0][0].detach() + work.params[0]

    def plain() -> Any:
        dx = torch.ops.aten.gelu_backward(dy, z, approximate="tanh")
        return dx, dx.sum(0)

    try:
        built = with_opfuse(work, case)
        step = alone(built.model, work.inputs[0], ops.Bias, backward=True, owns=True).call
        passes = {"opfuse": lambda: step(dy), "eager": plain}
    except NotBuilt as reason:
        return {"opfuse": reason}
    dy.copy_(grad)
    with torch.no_grad():
        dx, (of_bias, *_), *_ = step(dy)
    if (wrong := error([dx, *of_bias], work.reference(True)[1:])) > TOLERANCE[case.dtype]:
        raise ValueError(
            f"wrong answer: relative error {wrong:.1e}, at most {TOLERANCE[case.dtype]:.0e}"
        )
    passes["opfuse again"] = passes["opfuse"]
    timers = {
        name: cpu_timer([step], before=lambda: dy.copy_(grad)) for name, step in passes.items()
    }
    return sample_rounds(
        {name: (sample, torch.no_grad) for name, sample in timers.items()}, case.rounds or 15, 2
    )


def over_hand(case: Case, device: torch.device) -> Numbers:
    """What an op's forward and backward take more than an autograd function by hand; L3."""
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    built = {
        "opfuse": with_opfuse(work, dataclasses.replace(case, unfused=True), ""),
        "hand": by_hand(work, case),
    }
    timers = {
        name: (
            cpu_timer(steps(each, work, "forward+backward")),
            lambda each=each: around(each, "forward+backward"),
        )
        for name, each in built.items()
    }
    samples = sample_rounds(timers, case.rounds, 2)
    return {"opfuse": [a - b for a, b in zip(samples["opfuse"], samples["hand"], strict=True)]}


def saved_as_planned(case: Case, device: torch.device) -> Numbers:
    """Bytes saved, against what the ops of the plan declare that they save; C4."""
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    numbers: Numbers = {}
    for name, selection, plan in (("opfuse-off", "", "plan"), ("opfuse", None, "fused-plan")):
        try:
            built = with_opfuse(work, case, selection)
        except NotBuilt as reason:
            numbers[name] = reason
            continue
        numbers[name] = [saved_bytes(built, work.inputs[0])]
        with around(built, "forward"):
            outputs = built.model(*work.inputs[0])
        (fuser,) = built.model._module_groups
        node = (outputs[0] if isinstance(outputs, tuple) else outputs).grad_fn
        dropped = {name: left for name, left in vars(node).items() if name.startswith("dropped_")}
        again = [int(name[8:]) for name, left in dropped.items() if left is not None]
        numbers[plan] = [declared_bytes(fuser, work, again)]
    return numbers


def declared_bytes(fuser: opfuse.OperationFuser, work: Work, again: Collection[int] = ()) -> int:
    """What the ops declare.

    A tensor that several save, or that passes through an op unchanged, counts once. The inputs of
    the ops ``again`` are not kept but computed again.
    """
    width, size = work.inputs[0][0].shape[-1], work.dtype.itemsize
    tensor, total, counted = 0, 0, set()
    for index, op in enumerate(fuser._chain.ops):
        for name in op.saved_names or ():
            if name in ("mean", "rstd"):
                total += 4 * work.rows
            elif name == "input" and tensor not in counted and index not in again:
                counted.add(tensor)
                total += work.rows * width * size
            elif name not in ("input", "weight"):
                raise NotBuilt(f"{type(op).__name__} saves {name!r}, whose size is not known here")
        if not isinstance(op, (ops.MakeExtraOutput, ops.Identity)):
            tensor = index + 1
        width = op.out_features or width // (op.feature_ratio or 1)
    return total


def hook_calls(case: Case, device: torch.device) -> Numbers:
    """Hooks of plugins called by a forward and backward that has been planned before; O6."""
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    built, manager, calls = with_opfuse(work, case), opfuse.plugins.manager, []
    (grad,) = work.grads
    direct = manager._call
    with around(built, "forward"):
        built.model(*work.inputs[0]).backward(grad)
        undo = manager._pluggy.add_hookcall_monitoring(
            lambda *call: calls.append(call), lambda *call: None
        )
        manager._call = lambda *args, **kwargs: calls.append(args) or direct(*args, **kwargs)  # type: ignore
        try:
            for _ in range(3):
                built.model(*work.inputs[0]).backward(grad)
        finally:
            undo()
            del manager._call
    return {"opfuse": [len(calls)]}


def captured(case: Case, device: torch.device) -> Numbers:
    """Whether forward and backward can be captured in a CUDA graph; O5.

    Without waiting for the GPU, with PyTorch's answer, and with a forward that keeps no more than
    its ops declare.
    """
    if device.type != "cuda":
        raise Skip("CUDA graphs need a GPU")
    work, results = Work(case.chain, case.rows, case.width, case.dtype, device), []
    built = with_opfuse(work, case)

    def step() -> None:
        results[:] = work.results(built.model, built.params, work.inputs[0], True)

    with around(built, "forward"):
        step()
        before = torch.cuda.memory_allocated()
        outputs = several(built.model(*work.inputs[0]))
        kept = torch.cuda.memory_allocated() - before - sum(y.nbytes for y in outputs)
        del outputs
        (fuser,) = built.model._module_groups
        replay = capture([step], 1)
    if replay is None or kept > declared_bytes(fuser, work) + (1 << 20):  # the allocator rounds up
        return {"opfuse": [0]}
    replay()
    return {"opfuse": [float(error(results, work.reference(True)) < TOLERANCE[case.dtype])]}


COLD = """
import sys, time, torch, opfuse
from benchmarks.chains import parse
from benchmarks.providers import table
chain, rows, device = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])
with device:
    model = opfuse.Sequential(\
*[table(opfuse.ops)[name](*sizes) for name, sizes in parse(chain)]).bfloat16()
    x = torch.randn(rows, parse(chain)[0].sizes[0]).bfloat16()
x @ x.t()
start = time.perf_counter()
model(x)[-1, -1].item()
print(time.perf_counter() - start)
"""


def first_forward(case: Case, device: torch.device, processes: int) -> float:
    """Seconds of the first forward of the last of some processes.

    They have the same caches, which are empty at first.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        command = [sys.executable, "-c", COLD, case.chain, str(case.rows), str(device)]
        for _ in range(processes):
            done = subprocess.run(
                command, env=os.environ | caches, capture_output=True, text=True, cwd=ROOT
            )
            if done.returncode:
                raise RuntimeError(
                    f"the new process failed: {done.stderr.strip().splitlines()[-1]}"
                )
    return float(done.stdout.splitlines()[-1])


def cold_start(case: Case, device: torch.device) -> Numbers:
    """Seconds of a process's first forward, its caches warm or empty; O7."""
    if device.type != "cuda":
        raise Skip("nothing is compiled on a CPU")
    with_opfuse(Work(case.chain, 16, case.width, case.dtype, device), case)  # or it is not built
    return {"opfuse": [first_forward(case, device, 2 if "warm" in case.metric else 1)]}


def launch(case: Case, device: torch.device) -> Numbers:
    """Host time of a launch of a Triton kernel with ten arguments; O4.

    It counts once a plugin's entry point has a function ``launcher``: it takes a kernel, and what
    it returns launches as the kernel itself does, ``launcher(kernel)[grid](*arguments)``.
    """
    plugins = [record.plugin for record in opfuse.plugins.manager.active(None)]
    found = [plugin.launcher for plugin in plugins if hasattr(plugin, "launcher")]
    if not found:
        raise NotBuilt(
            "no plugin has a launcher; python benchmarks/launcher.py compares two without a GPU"
        )
    if device.type != "cuda":
        raise Skip("a launch needs a GPU")
    from .nothing import nothing

    given = (*[torch.empty(64, device=device, dtype=torch.int32)] * 8, 3, 4)
    mine = found[0](nothing)
    return {
        "opfuse": launch_us(lambda: mine[(1,)](*given)),
        "jit": launch_us(lambda: nothing[(1,)](*given)),
    }
