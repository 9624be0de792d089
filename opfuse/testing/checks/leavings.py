"""What a call may leave behind: settings, attributes of ops, tensors and their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.quantization import QuantizedTensor
from ..cases import Built
from ..failures import Failure

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


def settings_now() -> dict[str, Any]:
    """The settings of the process."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def unchanged_settings(was: dict[str, Any], who: str) -> None:
    """Raise unless the settings of the process are as they were.

    Raises:
        Failure: One is another, which it puts back.
    """
    for name, (read, put_back) in _SETTINGS.items():
        if (now := read()) != was[name]:
            put_back(was[name])
            raise Failure(f"its {who} leaves {name} at {now} instead of {was[name]}")


@contextlib.contextmanager
def restored_settings() -> Iterator[dict[str, Any]]:
    """A ``with`` block after which the settings of the process are as before."""
    before = settings_now()
    try:
        yield before
    finally:
        for name, (read, put_back) in _SETTINGS.items():
            if read() != before[name]:
                put_back(before[name])


@contextlib.contextmanager
def other_settings() -> Iterator[dict[str, Any]]:
    """Other values of those that a call may set, for a ``with`` block: it may not restore these."""
    with restored_settings() as before:
        torch.set_num_threads(before["the number of threads"] + 1)
        for name, (_, put) in _SETTINGS.items():  # it may restore the default, not what was
            if name.startswith("torch.backends."):
                put(_OTHER[before[name]])
        yield settings_now()


def unchanged_attributes(built: Built, expected: Built) -> None:
    """Raise unless the public attributes of ops are as the separate ops leave them.

    Raises:
        Failure: One is another.
    """
    for number, (op, other) in enumerate(zip(built.chain, expected.chain, strict=True)):
        for name, value in plain_attributes(other).items():
            if (now := getattr(op, name, None)) != value and now == now:  # NaN
                who = f"op {number} ({type(op).__name__})"
                raise Failure(f"its call leaves {name} of {who} at {now!r} instead of {value!r}")


def plain_attributes(op: Any) -> dict[str, Any]:
    """The public attributes of an op that are numbers, flags or texts, its mode included."""
    plain = {n: v for n, v in vars(op).items() if isinstance(v, (bool, int, float, str))}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


# Tensors


def copies(named: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Each tensor with a copy of it."""
    return {name: (tensor, tensor.detach().clone()) for name, tensor in named.items()}


def unchanged(copied: Mapping[str, tuple[Tensor, Tensor]], who: str) -> None:
    """Raise unless tensors are as their copies.

    Raises:
        Failure: One is not.
    """
    for name, (tensor, copy) in copied.items():
        if not same_bits(tensor, copy):
            raise Failure(f"its {who} modifies {name}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one.detach(), other):
        return True
    nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one).bool()
    return bool(((one == other) | nan).all())


def aliases(tensor: Any, known: Mapping[str, Any]) -> list[str]:
    """The names of the known tensors, quantized or not, that share memory with this one."""
    memory = memory_of(tensor)
    return [name for name, other in known.items() if memory & memory_of(other)]


def memory_of(tensor: Any) -> set[int]:
    """The storages of a tensor, quantized or not; of anything else there are none."""
    return {t.untyped_storage()._cdata for t in parts_of(tensor) if t.numel()}


def parts_of(tensor: Any) -> list[Tensor]:
    """The plain tensors that one consists of."""
    parts = tensor.tensors() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return [part for part in parts if isinstance(part, Tensor)]
