"""What a call may leave behind: settings, attributes of ops, tensors and their memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.quantization import QuantizedTensor
from ...ops import Cast
from ..cases import Built, Case
from ..failures import Declined, Failure
from ..reference import compare, compare_codes
from ..tensors import parts_of, same_bits

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


_DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
_AUTOCAST = torch.is_autocast_enabled, torch.set_autocast_enabled
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the deterministic flag": _DETERMINISTIC,
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (functools.partial(_AUTOCAST[0], "cpu"), functools.partial(_AUTOCAST[1], "cpu")),
    **{f"torch.backends.{path}": _flag(path) for path in _FLAGS},
}
"""Settings of the process: how each is read, and how it is put back."""


_OTHER = {True: False, False: True, "tf32": "ieee", "ieee": "tf32", "none": "tf32", "bf16": "ieee"}


def settings_now() -> dict[str, Any]:
    """The settings of the process."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def _put_back(was: dict[str, Any]) -> dict[str, Any]:
    """Put settings back to what they were; those that were others, as they were found."""
    found = {name: now for name, now in settings_now().items() if now != was[name]}
    for name in found:
        _SETTINGS[name][1](was[name])
    return found


def unchanged_settings(was: dict[str, Any], who: str) -> None:
    """Raise unless the settings of the process are as they were.

    Raises:
        Failure: One is another; all are put back.
    """
    for name, now in _put_back(was).items():
        raise Failure(f"its {who} leaves {name} at {now} instead of {was[name]}")


@contextlib.contextmanager
def restored_settings() -> Iterator[dict[str, Any]]:
    """A ``with`` block after which the settings of the process are as before."""
    before = settings_now()
    try:
        yield before
    finally:
        _put_back(before)


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


def same_versions(saved: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> None:
    """Raise unless saved tensors that have the memory of leaves have their versions.

    Raises:
        Failure: One has not.
    """
    for what, tensor in saved.items():
        for name in aliases(tensor, leaves):
            if tensor._version != leaves[name]._version:
                text = f"its {what}, has the memory of {name}, and not its version"
                raise Failure(f"{text}: save what the op got, never .data")


def aliases(tensor: Any, known: Mapping[str, Any]) -> list[str]:
    """The names of the known tensors, quantized or not, that share memory with this one."""
    memory = memory_of(tensor)
    return [name for name, other in known.items() if memory & memory_of(other)]


def memory_of(tensor: Any) -> set[int]:
    """The storages of a tensor, quantized or not; of anything else there are none."""
    return {t.untyped_storage()._cdata for t in parts_of(tensor) if t.numel()}


# Contexts


class Kept:
    """Keeps what is in each context, and what each saved tensor is an alias of.

    It is called after the forward of each fused op.
    """

    def __init__(self) -> None:
        self._left: list[tuple[Any, list[dict[str, Any]]]] = []

    def of(self, case: Case, built: Built) -> list[dict[str, Any]]:
        """The entries of a chain's own ops and casts, without those of other matches around it.

        Raises:
            Declined: Other fused ops replace them, or theirs replaces ops around the chain, too.
        """
        own = [*built.chain][len(case.before) : len(case.chain_ops) - len(case.after)]
        found: list[dict[str, Any]] = []
        for basic, left in self._left:
            mine = {any(op is one for one in own) for op in basic if not isinstance(op, Cast)}
            found += left if False not in mine else []
        if len(found) != len(case.ops):
            raise Declined("it does not replace the whole chain, and nothing else")
        return found

    def __call__(self, op: Any, ctxs: Any, x: Tensor, result: Any) -> None:
        """Keep what a fused op left."""
        y, extras = result
        known = {"the input": x, "the output": y}
        for number, (ctx, outputs) in enumerate(zip(ctxs, extras, strict=True)):
            known |= {f"parameter {k} of op {number}": t for k, t in enumerate(ctx.params)}
            known |= {f"extra output {k} of op {number}": t for k, t in enumerate(outputs)}
        left: list[dict[str, Any]] = []
        for basic, ctx in zip(op.basic_ops, ctxs, strict=True):
            saved = ctx.to_save
            names = basic.saved_names or tuple(f"tensor {k}" for k in range(len(saved or ())))
            either = getattr(basic, "saves_output", False)  # a fused op may save the input
            if either and saved is not None:
                saved = tuple([t if t is None else basic.forward_value(t) for t in saved])
            entry = {"needed": ctx.requires_grad, "saved": saved, "names": names}
            entry["aliases"] = [[] if either else aliases(t, known) for t in saved or ()]
            names = () if isinstance(basic, Cast) else basic.context_names
            entry["context"] = {name: getattr(ctx, name, None) for name in names}
            left.append(entry)
        self._left.append((op.basic_ops, left))


def same_contexts(case: Case, *given: tuple[Kept, Built]) -> None:
    """Compare what a fused op left in the contexts of ops with what the ops leave.

    Args:
        case: The case.
        *given: What each of the two left, and in which chain.

    Raises:
        Failure: It is something else.
    """
    left = [kept.of(case, built) for kept, built in given]
    for number, (op, mine, other) in enumerate(zip(case.ops, *left, strict=True)):
        who = f"op {number} ({op.cls.__name__})"
        if other["needed"]:
            _compare_context(case, who, mine, other)
        elif mine["saved"] is not None:
            raise Failure(f"it saves tensors for {who}, which takes no part in the backward")


def _compare_context(case: Case, who: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    counts = [len(entry["saved"] or ()) for entry in (got, expected)]
    if counts[0] != counts[1]:
        names = ", ".join(expected["names"])
        raise Failure(f"it saves {counts[0]} tensors for {who} instead of {counts[1]}: {names}")
    for k, name in enumerate(expected["names"]):
        mine, other = got["saved"][k], expected["saved"][k]
        what = f"what it saves as {name!r} for {who}"
        if isinstance(other, QuantizedTensor):
            compare_codes(case, what, mine, other)
        else:  # numbers of a kernel may be on the host or not
            moves = mine is not None and other is not None and not other.is_floating_point()
            compare(case, what, mine.to(other.device) if moves else mine, other, other)
        shared = [" and ".join(each["aliases"][k]) or "nothing" for each in (got, expected)]
        if shared[0] != shared[1]:
            raise Failure(f"{what} shares memory with {shared[0]}, the basic op's with {shared[1]}")
    for name, value in expected["context"].items():
        if not _is_same(mine := got["context"][name], value):
            left = f"{name}={mine!r} in the context of {who}"
            raise Failure(f"it leaves {left} instead of {value!r}")


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two numbers, tensors, or tuples of them, are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    return bool(one == other)
