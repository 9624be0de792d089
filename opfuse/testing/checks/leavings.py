"""A check that a call leaves the settings of the process as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cases import Case
from ..running import Declined, Failure, backward, forward, fused, only
from .registry import check, plain

_FLAGS = (
    *("cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    *("cuda.matmul.allow_fp16_accumulation", "mkldnn.enabled", "mkldnn.deterministic"),
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
)


def _flag(path: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Functions that read an attribute in ``torch.backends``, and put it back."""
    where, _, name = path.rpartition(".")
    owner: Any = torch.backends
    for part in where.split("."):
        owner = getattr(owner, part)
    return lambda: getattr(owner, name), lambda was: setattr(owner, name, was)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the deterministic flag": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda was: torch.set_autocast_enabled("cpu", was),
    ),
    **{f"torch.backends.{path}": _flag(path) for path in _FLAGS},
}
"""Settings of the process: how each is read, and how it is put back."""


_OTHER = {True: False, False: True, "tf32": "ieee", "ieee": "tf32", "none": "tf32", "bf16": "ieee"}


@check(plain)
def settings(case: Case) -> None:
    """A forward and a backward leave torch's settings as they were, whatever those were."""
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    try:
        try:
            fused(case)
        except Failure as failure:
            raise Declined("it does not run") from failure
        _compare(before, "first call")
        torch.set_num_threads(before["the number of threads"] + 1)
        for name, (_, put) in _SETTINGS.items():  # it may restore the default, not what was
            if name.startswith("torch.backends."):
                put(_OTHER[before[name]])
        with only(case.subject):
            was = {name: read() for name, (read, _) in _SETTINGS.items()}
            result = forward(case)
            _compare(was, "forward")
            backward(case, result)
            _compare(was, "backward")
    finally:
        for name, (read, put_back) in _SETTINGS.items():
            if read() != before[name]:
                put_back(before[name])


def _compare(was: dict[str, Any], who: str) -> None:
    for name, (read, _) in _SETTINGS.items():
        if read() != was[name]:
            raise Failure(f"its {who} leaves {name} at {read()} instead of {was[name]}")
