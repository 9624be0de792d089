"""Products of linear layers in the faster of a CPU's two libraries, for fusions.

On AMD's CPUs with AVX-512, PyTorch's default library for fp32 matrix products does not use it.
oneDNN does, at the same fp32 accuracy. Without AVX-512 it was slower.
``torch.backends.mkldnn.flags(enabled=False)`` turns oneDNN off, here too.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter
from torch.nn import functional as F

from ..core.environment import Environment
from ..core.fused_op import FusedOperation
from .arithmetic import added

ONEDNN_MIN_SIZE = 1 << 14
"""Elements of the left operand below which oneDNN, called directly, costs more than it saves.

In bf16 the default library is oneDNN too, but without epilogue: only products with something after
them are called directly, and small ones add their bias afterwards, since a kernel of their own
costs more than an addition.
"""

ONEDNN_MIN_WIDTH = 8
"""Rows and columns of the result below which the default library's matrix-vector products are
faster.
"""

PLAIN = Tensor, Parameter
"""Their subclasses bring their own operations."""


class Products(FusedOperation):
    """A fused op whose products use the library that was measured to be faster here, if any was."""

    adds_to_sum = True
    _onednn: bool | None = None

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        on_cpu = env.device.type == "cpu" and not env.compiling
        if not on_cpu or env.dtype not in (torch.float32, torch.bfloat16):
            return ()
        return [{"onednn": use} for use in (True, False)]

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._onednn = env.configuration.get("onednn") if env.configuration else None


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN beats the default library for fp32 matrix products on this machine's CPU."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not x86 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        vendor = platform.processor()
    return "AuthenticAMD" in vendor


@functools.cache
def onednn_has_bf16() -> bool:
    """Whether this machine's CPU multiplies bf16 matrices in oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_onednn(
    x: Tensor, weight: Tensor, addend: Tensor | None = None, onednn: bool | None = None
) -> bool:
    """Whether ``x`` times ``weight``, or its transpose, goes to oneDNN.

    While tracing, the compiler decides. ``onednn`` says what was measured here; None: nothing.
    """
    return (
        type(x) is Tensor
        and not is_dynamo_compiling()
        and x.numel() >= ONEDNN_MIN_SIZE
        and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)
        and x.numel() >= ONEDNN_MIN_WIDTH * x.shape[-1]
        and min(weight.shape) >= ONEDNN_MIN_WIDTH
        and x.is_cpu
        and type(weight) in PLAIN
        and (addend is None or type(addend) in PLAIN)
        and not is_compiling()
        and x.layout is torch.strided
        and torch._C._get_mkldnn_enabled()
        and (x.dtype is torch.float32 or onednn_has_bf16())
        and (onednn is True or (onednn is None and is_worth_it(x.dtype)))
    )


def is_worth_it(dtype: torch.dtype) -> bool:
    """Whether oneDNN is taken where nothing was measured."""
    return dtype is not torch.float32 or onednn_is_faster()


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str = "none", form: str = ""
) -> Tensor:
    """The product in oneDNN, with an activation after it that oneDNN calls ``name``."""
    bias = None if bias is None else bias.to(x.dtype)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, [], form)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool | None = None) -> Tensor:
    """``x @ weight.T + bias`` over the last dimension, in the dtype of ``x`` and ``weight``.

    ``onednn`` says whether that is the library to take; None: where it is known to be the faster
    one.
    """
    dtype = x.dtype
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype)
    if (bias is not None or dtype is torch.float32) and use_onednn(x, weight, bias, onednn):
        return onednn_linear(x, weight, bias)
    if dtype is torch.bfloat16 and bias is not None and adds_afterwards(x):
        return linear_then_add(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_then_add(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product, and the bias added to it."""
    return added(F.linear(x, weight), bias)


def adds_afterwards(x: Tensor) -> bool:
    """Whether a bias is added after a product that is not oneDNN's own."""
    return x.dtype is torch.bfloat16 and x.is_cpu and not is_compiling()
