"""The arithmetic, in PyTorch primitives: what runs on a CPU, and what GPU kernels will be compared with.

On x86 CPUs that are not Intel's, PyTorch's default library for fp32 matrix products takes a generic path, while
oneDNN uses the chip's vector units at the same fp32 accuracy. ``torch.backends.mkldnn.flags(enabled=False)``
turns oneDNN off, here too.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

ONEDNN_MIN_SIZE = 1 << 14
"""Elements of the left operand below which a call of oneDNN costs more than it saves (it adds about 9 us)."""


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN beats the default library for fp32 matrix products on this machine's CPU."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return False
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        vendor = platform.processor()
    return "AuthenticAMD" in vendor


def _use_onednn(x: Tensor) -> bool:
    """Whether a product with ``x`` on the left goes to oneDNN; while tracing, that is the compiler's affair."""
    return (
        not is_compiling()
        and x.numel() >= ONEDNN_MIN_SIZE
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and onednn_is_faster()
        and torch._C._get_mkldnn_enabled()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` over the last dimension."""
    if _use_onednn(x):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_dgrad(grad_output: Tensor, weight: Tensor) -> Tensor:
    """Gradient of ``linear`` with respect to its input: ``grad_output @ weight``."""
    if _use_onednn(grad_output):
        return torch.ops.mkldnn._linear_pointwise.default(grad_output, weight.t(), None, "none", [], "")
    return grad_output.mm(weight) if grad_output.ndim == 2 else grad_output @ weight


def linear_wgrad(grad_output: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``linear`` with respect to its weight: ``grad_output.T @ x`` over all rows."""
    if x.ndim != 2:
        grad_output, x = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    if _use_onednn(grad_output):
        return torch.ops.mkldnn._linear_pointwise.default(grad_output.t(), x.t(), None, "none", [], "")
    return grad_output.t().mm(x)


def bias_grad(grad_output: Tensor) -> Tensor:
    """Gradient of a bias: the sum over all rows, never an alias of ``grad_output``."""
    if grad_output.ndim == 2:
        return grad_output.sum(0)
    return grad_output.reshape(-1, grad_output.shape[-1]).sum(0)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor, scale: float = 1.0) -> Tensor:
    """``addend + scale * (x @ weight.T + bias)``; the addend has the shape and dtype of the result."""
    if _use_onednn(x):
        if scale == 1.0:
            return torch.ops.mkldnn._linear_pointwise.binary(x, addend, weight, bias, "add")
    elif bias is None and addend.ndim == 2:
        return torch.addmm(addend, x, weight.t(), alpha=scale)
    product = linear(x, weight, bias)
    return torch.add(addend, product, alpha=scale, out=product)


def linear_dgrad_add(grad_output: Tensor, weight: Tensor, addend: Tensor) -> Tensor:
    """``addend + grad_output @ weight``."""
    if _use_onednn(grad_output):
        return torch.ops.mkldnn._linear_pointwise.binary(grad_output, addend, weight.t(), None, "add")
    if addend.ndim == 2:
        return torch.addmm(addend, grad_output, weight)
    return linear_dgrad(grad_output, weight).add_(addend)
