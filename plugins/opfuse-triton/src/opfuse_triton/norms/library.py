"""For each call: the kernel, launched or as a torch operation in a graph, or the twin.

``torch.compile`` sees one operation per call, ``opfuse_triton::norm_forward``, ``::norm_backward``
and ``::norm_again``. Eager calls launch the kernels themselves, which takes less time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from opfuse_triton import Config, current_target

from ..calls import are_plain, define, placed, there
from . import LAYER, MOST_FEATURES, MOST_ROWS, Norm, twins
from . import backward as backward_kernels
from . import drop as drop_twin
from . import dropout as dropout_kernels
from . import forward as forward_kernels
from .drop import Drop
from .twins import Backward, Forward


def forward(
    *given: Any, into: Tensor | None = None, drop: Drop | None = None, config: Config | None = None
) -> Forward:
    """:func:`opfuse_triton.norms.twins.forward`, by a kernel if it takes the call.

    Args:
        *given: As there.
        into: As there.
        drop: As there; not while ``torch.compile`` traces.
        config: The configuration of the kernel, or None.
    """
    *tensors, eps, norm, dtype, keep, save = given
    if not takes(norm, *tensors):
        return twins.forward(*given, into=into, drop=drop)
    if is_compiling():
        made = torch.ops.opfuse_triton.norm_forward(*tensors, eps, *norm, dtype, keep, save)
        sums = tensors[1] is not None and keep
        return placed(made, True, sums, save and norm.kind == LAYER, save)
    made = forward_kernels.forward(*given, into=into, drop=drop, config=config)
    if into is not None and not into.is_inference():
        torch.autograd.graph.increment_version(into)
    return made


def backward(*given: Any, owns: bool = False, config: Config | None = None) -> Backward:
    """:func:`opfuse_triton.norms.twins.backward`, by kernels if they take the call.

    Args:
        *given: As there.
        owns: As there.
        config: The configuration of the kernel, or None.
    """
    dy, *tensors, extra, norm, needs = given
    extra = None if extra is None else extra.contiguous()
    tensors = [dy.contiguous(), *tensors, extra]  # autograd gives expanded ones, from a sum
    if not takes(norm, *tensors):
        return twins.backward(*tensors, norm, needs)
    if is_compiling():
        return placed(torch.ops.opfuse_triton.norm_backward(*tensors, *norm, *needs), *needs)
    return backward_kernels.backward(*tensors, norm, needs, owns, config)


def again(*given: Any) -> Tensor:
    """:func:`opfuse_triton.norms.twins.again`, by a kernel if it takes the call.

    Args:
        *given: As there.
    """
    *tensors, norm, dtype = given
    if not takes(norm, *tensors):
        return twins.again(*given)
    if is_compiling():
        return torch.ops.opfuse_triton.norm_again(*tensors, *norm, dtype)[0]
    return forward_kernels.again(*given)


def dropout(x: Tensor, extra: Tensor | None, drop: Drop, config: Config | None = None) -> Tensor:
    """:func:`opfuse_triton.norms.drop.dropout`, by a kernel if it takes the call.

    Args:
        x: As there.
        extra: As there.
        drop: As there.
        config: The configuration of the kernel, or None.
    """
    if not are_plain(x, extra):
        return drop_twin.dropout(x, extra, drop)
    return dropout_kernels.dropout(x, extra, drop, config)


def candidates(
    which: str, device: torch.device, features: int, kind: str, dtype: torch.dtype
) -> Sequence[Mapping[str, Any]]:
    """The possible ``config`` of ``"forward"`` or ``"backward"`` for rows of so many features.

    Args:
        which: The name of the function.
        device: The device.
        features: Numbers in a row.
        kind: The norm.
        dtype: The dtype of the rows.
    """
    if which == "forward":
        kernel = forward_kernels.kernel_of(features)
    else:
        kernel = backward_kernels.kernel_of(features, kind)
    facts = {"features": features, "KIND": kind, "x_ptr": dtype, "dy_ptr": dtype}
    return kernel.candidates(current_target(device), facts)


def takes(norm: Norm, first: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels take these tensors."""
    features = first.shape[-norm.dims :].numel()
    if features > MOST_FEATURES or first.numel() > features * MOST_ROWS:
        return False
    return are_plain(first, *others)


def _forward(run: Callable[..., Forward], *given: Any) -> list[Tensor]:
    """By the kernel; or by the twin, for the shapes and dtypes of its results."""
    *tensors, eps, kind, dims, zero_centered, dtype, keep, save = given
    return there(run(*tensors, eps, Norm(kind, dims, zero_centered), dtype, keep, save))


def _backward(run: Callable[..., Backward], *given: Any) -> list[Tensor]:
    """The same; the twin has the gradient of a weight in fp32."""
    *tensors, kind, dims, zero_centered, needs_x, needs_weight, needs_bias = given
    norm, needs = Norm(kind, dims, zero_centered), (needs_x, needs_weight, needs_bias)
    dx, dw, db = run(*tensors, norm, needs)
    if dw is not None and tensors[2] is not None:
        dw = dw.to(tensors[2].dtype)
    return there((dx, dw, db))


def _again(run: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    *tensors, kind, dims, zero_centered, dtype = given
    return [run(*tensors, Norm(kind, dims, zero_centered), dtype)]


_NORM = "str kind, int dims, bool zero_centered"
for _name, _call, _kernels, _takes in (
    (
        "forward",
        _forward,
        forward_kernels,
        f"Tensor x, Tensor? extra, Tensor? weight, Tensor? bias, float eps, {_NORM}, "
        "ScalarType? dtype, bool keep, bool save",
    ),
    (
        "backward",
        _backward,
        backward_kernels,
        "Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? extra, "
        f"{_NORM}, bool needs_x, bool needs_weight, bool needs_bias",
    ),
    (
        "again",
        _again,
        forward_kernels,
        "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, "
        f"{_NORM}, ScalarType? dtype",
    ),
):
    _by_kernel, _fake = (functools.partial(_call, getattr(of, _name)) for of in (_kernels, twins))
    define(f"norm_{_name}", _takes, _by_kernel, _fake)
