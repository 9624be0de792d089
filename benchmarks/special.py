"""Cases that are no timed pass of a chain: counts, captures, cold starts, and one step of a plan alone.

Each function takes the case and the device, and gives the numbers by provider: samples, or one value.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

import opfuse
from opfuse import ops

from .cases import Case
from .chains import Work, error
from .measure import around, cpu_timer, sample_rounds, saved_bytes
from .providers import NotBuilt, Skip, with_opfuse
from .record import ROOT
from .steps import alone

Numbers = dict[str, list[float] | Skip]


def in_place(case: Case, device: torch.device) -> Numbers:
    """The backward of bias + GELU where the incoming gradient may be overwritten, as inside a chain; C2."""
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    dy, (grad,) = torch.empty_like(work.grads[0]), work.grads
    z = work.inputs[0][0].detach() + work.params[0]

    def plain() -> Any:
        dx = torch.ops.aten.gelu_backward(dy, z, approximate="tanh")
        return dx, dx.sum(0)

    try:
        built = with_opfuse(work, case)
        step, _ = alone(built.model, work.inputs[0], ops.Bias, backward=True, owns=True)
        passes = {"opfuse": lambda: step(dy), "eager": plain}
    except NotBuilt as reason:
        return {"opfuse": reason}
    passes["opfuse again"] = passes["opfuse"]
    timers = {name: cpu_timer([step], before=lambda: dy.copy_(grad)) for name, step in passes.items()}
    return sample_rounds({name: (sample, torch.no_grad) for name, sample in timers.items()}, case.rounds or 15, 2)


def saved_as_planned(case: Case, device: torch.device) -> Numbers:
    """Bytes saved, against what the ops of the plan declare that they save; C4."""
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    numbers: Numbers = {}
    for name, selection in (("opfuse-off", ""), ("opfuse", None)):
        try:
            built = with_opfuse(work, case, selection)
        except NotBuilt as reason:
            numbers[name] = reason
            continue
        numbers[name] = [saved_bytes(built, work.inputs[0])]
        with around(built, "forward"):
            built.model(*work.inputs[0])
        (fuser,) = built.model._module_groups
        numbers["plan"] = [declared_bytes(fuser, work)]
    return numbers


def declared_bytes(fuser: opfuse.OperationFuser, work: Work) -> int:
    """What the ops declare: a tensor that several save, or that passes through an op unchanged, counts once."""
    width, size = work.inputs[0][0].shape[-1], work.dtype.itemsize
    tensor, total, counted = 0, 0, set()
    for index, op in enumerate(fuser._routing.ops):
        for name in op.saved_names or ():
            if name in ("mean", "rstd"):
                total += 4 * work.rows
            elif name == "input" and tensor not in counted:
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
        undo = manager._pluggy.add_hookcall_monitoring(lambda *call: calls.append(call), lambda *call: None)
        manager._call = lambda *args, **kwargs: calls.append(args) or direct(*args, **kwargs)  # type: ignore
        try:
            for _ in range(3):
                built.model(*work.inputs[0]).backward(grad)
        finally:
            undo()
            del manager._call
    return {"opfuse": [len(calls)]}


def captured(case: Case, device: torch.device) -> Numbers:
    """Whether forward and backward can be captured in a CUDA graph, with PyTorch's answer; O5."""
    if device.type != "cuda":
        raise Skip("CUDA graphs need a GPU")
    work = Work(case.chain, case.rows, case.width, case.dtype, device)
    built, graph = with_opfuse(work, case), torch.cuda.CUDAGraph()
    with around(built, "forward"):
        for _ in range(3):
            work.results(built.model, built.params, work.inputs[0], True)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                results = work.results(built.model, built.params, work.inputs[0], True)
        except RuntimeError:
            return {"opfuse": [0]}
        graph.replay()
    return {"opfuse": [float(error(results, work.reference(True)) < 2e-2)]}


COLD = """
import sys, time, torch, opfuse
from benchmarks.chains import parse
from benchmarks.providers import table
chain, rows, device = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])
with device:
    model = opfuse.Sequential(*[table(opfuse.ops)[name](*sizes) for name, sizes in parse(chain)]).bfloat16()
    x = torch.randn(rows, parse(chain)[0].sizes[0]).bfloat16()
x @ x.t()
start = time.perf_counter()
model(x)[-1, -1].item()
print(time.perf_counter() - start)
"""


def cold_start(case: Case, device: torch.device) -> Numbers:
    """Seconds of a process's first forward, its caches warm or empty; O7."""
    if device.type != "cuda":
        raise Skip("nothing is compiled on a CPU")
    with_opfuse(Work(case.chain, 16, case.width, case.dtype, device), case)  # or it is not built
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-c", COLD, case.chain, str(case.rows), str(device)]
        for _ in range(2 if "warm" in case.metric else 1):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    return {"opfuse": [float(done.stdout)]}


def launch(case: Case, device: torch.device) -> Numbers:
    """Host time of a Triton launch; O4."""
    raise NotBuilt("opfuse has no launcher of its own; python -m benchmarks.probes launcher times Triton's")
