"""Checks of an installed plugin in fresh processes: its entry point, imports and plans."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from ..core.hookspecs import GROUP
from ..core.plugins import manager
from .cases import Case
from .running import Failure

_REPORT = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import opfuse, torch
    from opfuse.core.plugins import manager, using
    name, chains, module = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    if module:
        import importlib
        opfuse.plugins.register(importlib.import_module(module), name=name)
    with using(name):
        rows = [row for row in opfuse.plugins.listing() if row["name"] == name]
        groups = [record.group for record in manager.records if record.name == name]
    state = {"triton": "triton" in sys.modules, "cuda": torch.cuda.is_initialized()}
import importlib
from opfuse import ops, testing
class Names(dict):
    __missing__ = staticmethod(importlib.import_module)
plans, names = [], Names(testing=testing, ops=ops, torch=torch)
for code in chains:
    with testing.recipes.offered(), using(f"{name},{testing.recipes.NAME}"):
        built = eval(code, {}, names).build()
        with built.settings():
            calls = opfuse.explain(built.chain, *built.inputs()).calls
        plans.append("\\n".join(str(call.plan) for call in calls))
messages = [str(w.message) for w in caught if issubclass(w.category, opfuse.PluginWarning)]
print(json.dumps({"rows": rows, "groups": groups, "warnings": messages, "plans": plans, **state}))
"""


def registered_module(plugin: str) -> str | None:
    """The module that a plugin registered in code is, "" for an object; None: it is installed."""
    for record in manager.records:
        if record.answers_to(plugin) and record.load is not None and not record.module:
            registered = record.load()
            return registered.__name__ if isinstance(registered, types.ModuleType) else ""
    return None


@functools.lru_cache(maxsize=16)
def report(plugin: str, seed: int, cases: tuple[Case, ...] = ()) -> dict[str, Any]:
    """Return how a fresh process sees an installed plugin.

    Args:
        plugin: Name of its entry point.
        seed: For the hashes of strings, which differ between processes.
        cases: The chains to plan there.

    Raises:
        Failure: The process fails.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    unset = ("OPFUSE_PLUGINS", "OPFUSE_STRICT", "OPFUSE_FUSION_LIMIT", "TRITON_INTERPRET")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    chains = json.dumps([repr(case.with_(subject=None)) for case in cases])
    command = [sys.executable, "-c", _REPORT, plugin, chains, registered_module(plugin) or ""]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failure(f"a process with plugin {plugin!r} failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def entry_point(plugin: str, cases: Sequence[Case] = ()) -> None:
    """The entry point is there, in the group of this contract, and loads without a warning."""
    seen = report(plugin, 1, tuple(cases))
    if not seen["groups"]:
        where = f"entry point {plugin!r} in a group opfuse.v*"
        raise Failure(f"no installed distribution has an {where}")
    if GROUP not in seen["groups"]:
        where = f"in group {seen['groups'][0]}, this opfuse reads {GROUP}"
        raise Failure(f"its entry point {plugin!r} is {where}")
    for row in seen["rows"]:
        if row["state"] == "failed":
            raise Failure(f"entry point {plugin!r} does not load: {row['error']}")
    if seen["warnings"]:
        raise Failure(f"loading it warns: {seen['warnings'][0]}")


def imports(plugin: str, cases: Sequence[Case] = ()) -> None:
    """Finding and listing the plugin imports no triton and makes no CUDA context."""
    seen = report(plugin, 1, tuple(cases))
    if seen["triton"]:
        how = "import it where a kernel is launched"
        raise Failure(f"importing it, or calling its hooks, imports triton: {how}")
    if seen["cuda"]:
        raise Failure("importing it, or calling its hooks, makes a CUDA context")


def processes(plugin: str, cases: Sequence[Case] = ()) -> None:
    """Two fresh processes make the same plans."""
    plans = [report(plugin, seed, tuple(cases))["plans"] for seed in (1, 2)]
    for one, other in zip(*plans, strict=True):
        if one != other:
            raise Failure(f"two processes plan the same chain differently\n{one}\nand\n{other}")


PLUGIN_CHECKS: dict[str, Callable[[str, Sequence[Case]], None]] = {
    check.__name__: check for check in (entry_point, imports, processes)
}
"""The checks of a plugin as a whole."""
