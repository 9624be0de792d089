"""Checks of an installed plugin in fresh processes: its entry point, imports and plans."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ops
from ..core.errors import PluginWarning
from ..core.hookspecs import GROUP
from ..core.plugins import listing, manager, using
from ..report.explain import explain
from . import recipes
from .cases import Case
from .failures import Failure


def registered_module(plugin: str) -> str | None:
    """The module that a plugin registered in code is, "" for an object; None: it is installed."""
    for record in manager.records:
        if record.answers_to(plugin) and record.load is not None and not record.module:
            registered = record.load()
            return registered.__name__ if isinstance(registered, types.ModuleType) else ""
    return None


def fresh_environment() -> dict[str, str]:
    """The environment of another process that finds what this one does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    unset = ("OPFUSE_PLUGINS", "OPFUSE_STRICT", "OPFUSE_FUSION_LIMIT", "TRITON_INTERPRET")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    return environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@functools.lru_cache(maxsize=16)
def report(plugin: str, seed: int, cases: tuple[Case, ...] = ()) -> dict[str, Any]:
    """Return how a fresh process sees an installed plugin; :func:`tell` says what.

    Args:
        plugin: Name of its entry point.
        seed: For the hashes of strings, which differ between processes.
        cases: The chains to plan there.

    Raises:
        Failure: The process fails.
    """
    environ = fresh_environment() | {"PYTHONHASHSEED": str(seed)}
    chains = json.dumps([repr(case.with_(subject=None)) for case in cases])
    code = "import sys; from opfuse.testing import processes; processes.tell(*sys.argv[1:])"
    command = [sys.executable, "-c", code, plugin, registered_module(plugin) or "", chains]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failure(f"a process with plugin {plugin!r} failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


class _Names(dict[str, Any]):
    __missing__ = staticmethod(importlib.import_module)


def tell(plugin: str, module: str, chains: str) -> None:
    """Print how this process sees a plugin, as JSON.

    Args:
        plugin: Its name.
        module: The module that registers it; "": it is installed.
        chains: The cases to plan, as a JSON list of code.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if module:
            manager.register(importlib.import_module(module), name=plugin)
        with using(plugin):
            rows = [row for row in listing() if row["name"] == plugin]
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        seen = {"rows": rows, "cuda": has_cuda, "triton": "triton" in sys.modules}
        seen["groups"] = [record.group for record in manager.records if record.name == plugin]
    names = _Names(testing=importlib.import_module(__package__), ops=ops, torch=torch)
    seen["plans"] = plans(plugin, [eval(code, {}, names) for code in json.loads(chains)])
    seen["warnings"] = [str(w.message) for w in caught if issubclass(w.category, PluginWarning)]
    print(json.dumps(seen))


def plans(plugin: str, cases: Sequence[Case]) -> list[str]:
    """The plans of chains with all fusions of a plugin."""
    found = []
    for case in cases:
        with recipes.offered(), using(f"{plugin},{recipes.NAME}"):
            built = case.build()
            with built.settings():
                calls = explain(built.chain, *built.inputs()).calls
            found.append("\n".join(str(call.plan) for call in calls))
    return found


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
    other = report(plugin, 1, tuple(cases))["plans"]
    with contextlib.suppress(Exception):  # what a test sets up may be in the way here
        if plans(plugin, cases) == other:
            return
    for one, planned in zip(report(plugin, 2, tuple(cases))["plans"], other, strict=True):
        if one != planned:
            raise Failure(f"two processes plan the same chain differently\n{one}\nand\n{planned}")


PLUGIN_CHECKS: dict[str, Callable[[str, Sequence[Case]], None]] = {
    check.__name__: check for check in (entry_point, imports, processes)
}
"""The checks of a plugin as a whole."""
