"""What decides numbers in a process: compared by processes of a group, and kept by a lock.

``opfuse freeze`` prints it, and :class:`opfuse.options` with ``locked`` compares it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from opfuse.core.engine.program import Program
from opfuse.core.errors import CallRefusedError
from opfuse.core.plugins import manager
from opfuse.core.settings import current
from opfuse.tuning import table as tables
from opfuse.tuning.causes import causes, devices, first_difference


class LockError(CallRefusedError):
    """What decides numbers here differs from what ``opfuse.options(locked=...)`` names.

    The text names the first difference.
    """


VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
"""Environment variables by which libraries choose their arithmetic."""


def machine() -> dict[str, Any]:
    """What decides numbers around the plans: devices, threads and the switches of PyTorch."""
    cuda = torch.backends.cuda.matmul
    sums = cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction
    return {
        **{f"the {device.type}": tables.setting(device) for device in devices()},
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "other switches": {
            "mkldnn": torch.backends.mkldnn.enabled,
            # PyTorch sets it for the thread, and does not say; it is 0 where they are flushed
            "denormal numbers on the cpu": sys.float_info.min / 2 != 0.0,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "sums of half precision in products on CUDA": repr(sums),
        },
        "the environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def deciding() -> dict[str, Any]:
    """All that decides numbers here, with the settings of this thread; JSON-able."""
    recipe = current.recipe
    return {
        "opfuse": sys.modules["opfuse"].__version__,
        **causes(),
        "the tools": {r.name: r.version for r in manager.active_tools(current.selection)},
        "the recipe": recipe and f"{type(recipe).__name__} {recipe.to_json()}",
        "ops that it skips": list(current.skip),
        "torch.autocast": {
            device.type: str(torch.get_autocast_dtype(device.type))
            for device in devices()
            if torch.is_autocast_enabled(device.type)
        },
        "the kernels' configurations": {
            device.type: tables.kernels_digest(tables.setting(device)["device"]) or "none"
            for device in devices()
        },
        **machine(),
    }


def freeze() -> str:
    """What decides numbers here, as JSON text, for a file that :class:`opfuse.options` can lock.

    It lists versions, the selection of plugins, options, the recipe, hashes of the tuning tables,
    devices, threads, the precision of products of fp32 matrices, and whether algorithms are
    deterministic; those in force where it is called.
    """
    return json.dumps(deciding(), indent=2)


class Lock(NamedTuple):
    """A file that :func:`freeze` wrote; the value of the option ``locked``.

    Attributes:
        path: The file.
        text: Its content.
    """

    path: str
    text: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Lock:
        """Read a file.

        Raises:
            ValueError: It is no lock.
            OSError: It cannot be read.
        """
        path = os.fspath(path)
        if "\n" in path:
            what = "the path of a file that `opfuse freeze` wrote"
            raise ValueError(f"options(locked=...) expected {what}, got its text")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            known = json.loads(text)
        except ValueError:
            known = None
        if not isinstance(known, dict) or "the plugins" not in known:
            what = "a file that `opfuse freeze` wrote"
            raise ValueError(f"options(locked={path!r}) expected {what}, got another")
        return cls(path, text)

    def check(self, but: Collection[str] = ()) -> None:
        """Compare what is locked with what is here.

        Args:
            but: What is not compared.

        Raises:
            LockError: They differ.
        """
        locked = json.loads(self.text)
        here = json.loads(json.dumps(deciding()))
        compared = [name for name in {**locked, **here} if name not in but]
        pair = [{name: of.get(name, "nothing") for name in compared} for of in (locked, here)]
        if difference := first_difference(*pair):
            raise LockError(
                f"options(locked={self.path!r}): what is locked differs from what is here, in "
                f"{difference} here; make them equal, or run `opfuse freeze` again"
            )


SETTINGS = "the options", "the recipe", "ops that it skips", "torch.autocast"
"""What may still change inside of a block; it is compared when a plan is made."""


def check_settings(lock: Lock) -> None:
    """Compare a lock where a block begins, but for what may still change inside of it."""
    lock.check(but=SETTINGS)


def checked(program: Program, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what runs a plan: it refuses to run once something that is locked has changed.

    Raises:
        LockError: What is locked differs from what is here already.
    """
    options, device = program.env.options, program.env.device
    lock = options.get("locked")
    if lock is None or options.get("invariant", "batch") != "batch":
        return run  # a block of rows is of a call that was compared
    lock.check()
    planned = tables.setting(device)

    def run_if_alike(*args: Any) -> Any:
        if planned != tables.setting(device):
            lock.check()
        return run(*args)

    return run_if_alike
