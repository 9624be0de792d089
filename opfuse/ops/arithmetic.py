"""What ops compute in, how PyTorch multiplies matrices, and arithmetic that overwrites results."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core.overwriting import may_write

_CUDA = torch.backends.cuda.matmul
_OTHERS = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def matmul_precision(device: str) -> str:
    """The precision of products of fp32 matrices on a kind of device.

    ``torch.backends.*.fp32_precision`` decides, and every older setting writes to it. Reading an
    older setting raises if it disagrees with it.

    Args:
        device: The type of a ``torch.device``.

    Returns:
        ``"ieee"``, ``"tf32"`` or ``"bf16"``; ``"ieee"`` if nothing is set.
    """
    found: str = (_CUDA if device == "cuda" else _OTHERS).fp32_precision
    return "ieee" if found == "none" else found


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for pointwise math: fp32 for half precision, otherwise ``dtype`` itself."""
    return torch.float32 if dtype is torch.float16 or dtype is torch.bfloat16 else dtype


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at no cost if the dtype is right already."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype :func:`wide` of its own."""
    return cast(tensor, wide(tensor.dtype))


def widened(x: Tensor, out: Tensor | None) -> Tensor:
    """``widen(x)``, in ``out`` if that is given and another dtype is needed."""
    return widen(x) if out is None or x.dtype is out.dtype else out.copy_(x)


def add_product(
    total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> None:
    """``total = beta * total + alpha * a @ b``, by the product itself if :func:`adds_itself`.

    Elsewhere the product is rounded to the dtype of the operands first.

    Args:
        total: The sum, a matrix of any floating dtype; overwritten. With ``beta=0`` it is not read.
        a: A matrix.
        b: A matrix of the same dtype.
        beta: The factor of the sum.
        alpha: The factor of the product; with 0 a library multiplies nothing, not even NaN.
    """
    if not adds_itself(total, a):
        product = a.mm(b) if alpha == 1 else a.mm(b) * alpha
        if beta == 0:
            total.copy_(product)
        else:
            total.mul_(beta).add_(product) if beta != 1 else total.add_(product)
    elif total.dtype is a.dtype:
        total.addmm_(a, b, beta=beta, alpha=alpha)
    else:
        torch.addmm(total, a, b, beta=beta, alpha=alpha, out_dtype=total.dtype, out=total)


def adds_itself(total: Tensor, operand: Tensor) -> bool:
    """Whether a product of matrices in one dtype can be added to a sum by the product itself.

    It can in its own dtype; in fp32, for half precision, where the device's library does so.
    """
    if total.dtype is operand.dtype:
        return True
    if total.dtype is not torch.float32 or wide(operand.dtype) is not torch.float32:
        return False
    tunes = operand.is_cuda and torch.cuda.tunable.is_enabled()
    return operand.is_meta or _library_adds(operand.device, operand.dtype, tunes)


@functools.cache
def _library_adds(device: torch.device, dtype: torch.dtype, tunes: bool) -> bool:
    """Ask a library by a small product.

    On a GPU PyTorch before 2.10 takes no sum in fp32, and TunableOp (``tunes``) and some builds for
    AMD refuse it. On a CPU no version takes it.
    """
    a = torch.zeros((8, 8), device=device, dtype=dtype)
    total = torch.zeros((8, 8), device=device, dtype=torch.float32)
    try:
        torch.addmm(total, a, a, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


# Results that are overwritten, where :func:`may_write` says that they may


def reusable(result: Tensor, *operands: Tensor) -> Tensor | None:
    """The ``out`` of an operation that may overwrite a result; None: it makes a new tensor.

    Args:
        result: The result of another operation.
        *operands: The further operands.
    """
    return result if may_write(result, *operands) else None


def added(total: Tensor, part: Tensor, alpha: float = 1.0) -> Tensor:
    """``total + alpha * part`` in the dtype of ``total``, which it overwrites if it may."""
    if may_write(total, part):
        return total.add_(part, alpha=alpha)
    return cast(torch.add(total, part, alpha=alpha), total.dtype)


def multiplied(result: Tensor, factor: Tensor) -> Tensor:
    """``result * factor``; it overwrites the result if it may."""
    return torch.mul(result, factor, out=reusable(result, factor))


def plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` of matrices; it overwrites the sum if it may. None: zero."""
    return a.mm(b) if total is None else torch.addmm(total, a, b, out=reusable(total, a, b))


def with_shares(dz: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Matrices with shares added at places of each row; it overwrites them if it may."""
    if not dz.shape[-1]:
        return dz
    add = dz.scatter_add_ if may_write(dz, shares) else dz.scatter_add
    return add(-1, places, shares)


def filled(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """A tensor with a value where a mask is set; it overwrites the tensor if it may."""
    fill = tensor.masked_fill_ if may_write(tensor) else tensor.masked_fill
    return fill(mask, value)
