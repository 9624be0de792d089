"""Layers with the fusions of a plugin, in processes that form a gloo group."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from opfuse.core.options import options
from opfuse.core.plugins import using
from opfuse.testing.cases import offered
from opfuse.testing.failures import Failure
from opfuse.testing.processes import fresh_environment, registered_module
from opfuse.testing.running import only

from .rank_checks import compare_steps, whole
from .sharded import Circumstances, Shard, ShardedLayer, Step

SIZE, SECONDS = 2, 30
_START = """
import importlib, sys
plugin, module = sys.argv[1:3]
import opfuse
if module:
    opfuse.plugins.register(importlib.import_module(module), name=plugin)
from opfuse_distributed.testing import gloo_ranks
gloo_ranks.serve(plugin, *sys.argv[3:])
"""


def serve(plugin: str, rank: str, folder: str) -> None:
    """Run the layers as one process of the group, and write what went wrong.

    Args:
        plugin: The plugin, whose fusions are in force.
        rank: The number of this process.
        folder: With the layers; the answers go there.
    """
    path = pathlib.Path(folder)
    layers, given = _layers_of((path / "layers").read_text())
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    store = f"file://{path / 'store'}"
    dist.init_process_group("gloo", store, timeout, SIZE, int(rank))
    problem = "" if offered(plugin) else f"no plugin {plugin!r} with fusions is installed"
    for layer in layers:
        try:
            _check(plugin, layer, given, int(rank), path)
        except Exception as error:
            problem = f"{layer.name}: {type(error).__name__}: {error}"
            break
    (path / f"answer{rank}").write_text(json.dumps(problem))
    if not problem:
        dist.barrier()  # neither leaves while the other still reads from it
    sys.stdout.flush()
    os._exit(0)  # what compiled a model may keep the group, which then aborts


def describe(layers: Sequence[ShardedLayer], chosen: Mapping[str, Any]) -> str:
    """Layers and options as text, for another process.

    Raises:
        ValueError: Another process cannot build them.
    """
    rows = []
    for layer in layers:
        build: Any = layer.build
        module, name = getattr(build, "__module__", ""), getattr(build, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is not build:
            raise ValueError(f"{layer.name!r} is not built by a function of a module")
        rows.append({**vars(layer), "build": [module, name]})
    try:
        return json.dumps([rows, {**chosen}])
    except TypeError as error:
        raise ValueError(str(error)) from error


def _layers_of(text: str) -> tuple[list[ShardedLayer], dict[str, Any]]:
    """Undo :func:`describe`."""
    rows, chosen = json.loads(text)
    layers = []
    for row in rows:
        module, name = row["build"]
        build = getattr(importlib.import_module(module), name)
        layers.append(ShardedLayer(**{**row, "build": build, "summed": tuple(row["summed"])}))
    return layers, chosen


def _check(plugin: str, layer: ShardedLayer, chosen: Any, rank: int, folder: pathlib.Path) -> None:
    """Two steps, with all ranks' results on each; each rank compares them."""
    for number, rows in enumerate(layer.row_counts()[:2]):
        given = Circumstances(layer, rows)
        with only():
            separate = Shard(given, rank).step()
        with using(plugin), options(**chosen):
            mine = Shard(given, rank).step()
        files = [folder / f"{layer.name} {number} {each}" for each in range(SIZE)]
        torch.save([dataclasses.asdict(step) for step in (mine, separate)], files[rank])
        dist.barrier()
        found = [torch.load(file, weights_only=True) for file in files]
        steps = [[Step(**of_rank[which]) for of_rank in found] for which in range(2)]
        compare_steps(given, steps[0], steps[1], whole(given))


def check_on_gloo(plugin: str, layers: Sequence[ShardedLayer], chosen: Mapping[str, Any]) -> None:
    """Run layers with a plugin, and options of it, in processes over gloo.

    Raises:
        Failure: A result is wrong, a process raises, or one hangs.
    """
    command = [sys.executable, "-c", _START, plugin, registered_module(plugin) or ""]
    given: Any = dict(env=fresh_environment(), text=True)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "layers").write_text(describe(layers, chosen))
        processes = [
            subprocess.Popen([*command, str(rank), folder], stderr=subprocess.PIPE, **given)
            for rank in range(SIZE)
        ]
        problems = [_answer(process, folder, rank) for rank, process in enumerate(processes)]
    for rank, problem in enumerate(problems):
        if problem:
            raise Failure(f"over gloo, on rank {rank}: {problem}")


def _answer(process: subprocess.Popen[str], folder: str, rank: int) -> str:
    """What went wrong in a process; ``""``: nothing."""
    try:
        _, errors = process.communicate(timeout=10 * SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"it hangs for {10 * SECONDS} seconds"
    answer = pathlib.Path(folder) / f"answer{rank}"
    if not answer.exists():
        return f"it ended: {errors.strip()[-2000:]}"
    return str(json.loads(answer.read_text()))
