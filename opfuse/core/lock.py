"""What decides numbers in a process: compared by processes of a group, and kept by a lock.

``opfuse freeze`` prints it, and :class:`opfuse.options` with ``locked`` compares it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from . import tuning_table as tables
from .errors import LockError
from .plugins import manager
from .ranks import first_difference
from .settings import current

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


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return devices


def causes() -> dict[str, Any]:
    """What plans depend on in a process, as JSON-able data; causes come before effects."""
    active = manager.active(current.selection)
    given = [pair for pair in current.options if pair[0] != "locked"]
    return {
        "torch": torch.__version__,
        "the plugins": {record.distribution: record.version for record in active},
        "the selection of plugins": current.selection,
        "the options": {name: repr(value) for name, value in given},
        "the tuning tables": {
            device.type: tables.table_for(device).digest or "none" for device in _devices()
        },
    }


def machine() -> dict[str, Any]:
    """What decides numbers around the plans: devices, threads and the switches of PyTorch."""
    cuda = torch.backends.cuda.matmul
    sums = cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction
    return {
        **{f"the {device.type}": tables.setting(device) for device in _devices()},
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
        "the recipe": recipe and f"{type(recipe).__name__} {recipe.to_json()}",
        "ops that it skips": list(current.skip),
        "torch.autocast": {
            device.type: str(torch.get_autocast_dtype(device.type))
            for device in _devices()
            if torch.is_autocast_enabled(device.type)
        },
        "the kernels' configurations": {
            device.type: tables.kernels_digest(tables.setting(device)["device"]) or "none"
            for device in _devices()
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
