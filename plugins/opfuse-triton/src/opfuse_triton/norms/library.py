"""For each call: the kernel, launched or as a torch operation in a graph, or the twin.

``torch.compile`` sees one operation per call, ``opfuse_triton::norm_forward``, ``::norm_backward``
and ``::norm_again``. Eager calls launch the kernels themselves, which takes less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from opfuse_triton import Config, current_target

from . import DTYPES, LAYER, MOST_FEATURES, MOST_ROWS, Norm, normalized_dtype, twins
from . import again as again_kernels
from . import backward as backward_kernels
from . import drop as drop_twin
from . import dropout as dropout_kernels
from . import forward as forward_kernels
from .drop import Drop
from .twins import Backward, Forward

_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may do something else


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
        return _named(made, True, sums, save and norm.kind == LAYER, save)
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
        return _named(torch.ops.opfuse_triton.norm_backward(*tensors, *norm, *needs), *needs)
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
    return again_kernels.again(*given)


def dropout(x: Tensor, extra: Tensor | None, drop: Drop, config: Config | None = None) -> Tensor:
    """:func:`opfuse_triton.norms.drop.dropout`, by a kernel if it takes the call.

    Args:
        x: As there.
        extra: As there.
        drop: As there.
        config: The configuration of the kernel, or None.
    """
    if not _are_plain(x, extra):
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
    module = forward_kernels if which == "forward" else backward_kernels
    return module.candidates(current_target(device), features, kind, dtype)


def takes(norm: Norm, first: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels take these tensors."""
    features = first.shape[-norm.dims :].numel()
    if features > MOST_FEATURES or first.numel() > features * MOST_ROWS:
        return False
    return _are_plain(first, *others)


def _are_plain(first: Tensor, *others: Tensor | None) -> bool:
    """Return whether tensors are contiguous, of the dtypes of the kernels, and not empty."""
    if not first.numel():
        return False
    for tensor in (first, *others):
        if tensor is not None and not (
            type(tensor) in _PLAIN
            and tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and tensor.device == first.device
        ):
            return False
    return True


def _named(made: list[Tensor], *there: bool) -> Any:
    """The tensors of a list in their places, None in the others."""
    left = iter(made)
    return tuple([next(left) if is_there else None for is_there in there])


def _there(made: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in made if tensor is not None]


def _forward(*given: Any) -> list[Tensor]:
    *tensors, eps, kind, dims, zero_centered, dtype, keep, save = given
    norm = Norm(kind, dims, zero_centered)
    return _there(forward_kernels.forward(*tensors, eps, norm, dtype, keep, save))


def _backward(*given: Any) -> list[Tensor]:
    *tensors, kind, dims, zero_centered, needs_x, needs_weight, needs_bias = given
    norm, needs = Norm(kind, dims, zero_centered), (needs_x, needs_weight, needs_bias)
    return _there(backward_kernels.backward(*tensors, norm, needs))


def _again(*given: Any) -> list[Tensor]:
    *tensors, kind, dims, zero_centered, dtype = given
    return [again_kernels.again(*tensors, Norm(kind, dims, zero_centered), dtype)]


def _fake_again(x: Tensor, *given: Any) -> list[Tensor]:
    return [torch.empty_like(x, dtype=given[-1])]


def _fake_forward(*given: Any) -> list[Tensor]:
    x, extra, _, _, _, kind, dims, _, dtype, keep, save = given
    made = [torch.empty_like(x, dtype=dtype or normalized_dtype(x, extra))]
    if extra is not None and keep:
        made.append(torch.empty_like(x, dtype=normalized_dtype(x, extra)))
    if save:
        shape = (*x.shape[:-dims], *(1,) * dims)
        made += [x.new_empty(shape, dtype=torch.float32) for _ in range(1 + (kind == LAYER))]
    return made


def _fake_backward(*given: Any) -> list[Tensor]:
    _, x, weight, _, _, extra, _, dims, _, needs_x, needs_weight, needs_bias = given
    made = []
    if needs_x:
        made.append(torch.empty_like(x, dtype=normalized_dtype(x, extra)))
    shape = x.shape[-dims:]
    if needs_weight:
        dtype = torch.float32 if weight is None else weight.dtype
        made.append(x.new_empty(shape, dtype=dtype))
    if needs_bias:
        made.append(x.new_empty(shape, dtype=torch.float32))
    return made


_NORM = "str kind, int dims, bool zero_centered"
for _name, _kernel, _fake, _takes in (
    (
        "opfuse_triton::norm_forward",
        _forward,
        _fake_forward,
        f"Tensor x, Tensor? extra, Tensor? weight, Tensor? bias, float eps, {_NORM}, "
        "ScalarType? dtype, bool keep, bool save",
    ),
    (
        "opfuse_triton::norm_backward",
        _backward,
        _fake_backward,
        "Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? extra, "
        f"{_NORM}, bool needs_x, bool needs_weight, bool needs_bias",
    ),
    (
        "opfuse_triton::norm_again",
        _again,
        _fake_again,
        "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, "
        f"{_NORM}, ScalarType? dtype",
    ),
):
    torch.library.define(_name, f"({_takes}) -> Tensor[]")
    torch.library.impl(_name, ("cpu", "cuda"), _kernel)
    torch.library.register_fake(_name, _fake)
