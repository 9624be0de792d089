"""The arithmetic, in PyTorch primitives.

A CPU runs it, and GPU kernels are compared with it. :mod:`opfuse.ops.libraries` says which of a
CPU's two libraries computes a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional as F

from opfuse import Environment, OperationContext
from opfuse.ops import BasicLinear
from opfuse.ops.authoring import added, may_write, reusable
from opfuse.ops.libraries import (
    ONEDNN_MIN_SIZE,
    PLAIN,
    adds_afterwards,
    linear,
    linear_then_add,
    onednn_linear,
    use_onednn,
)

ONEDNN_MIN_ADDEND = 1 << 14
"""Elements of a residual below which adding it afterwards is faster than in oneDNN's epilogue."""

HALF = torch.bfloat16, torch.float16
DTYPES = torch.float32, *HALF
"""The dtypes that the Triton products compute in."""

MIN_FEATURES = 32
"""Features below which no fusion of the backward pays on a CPU, whatever the number of rows: it is
all Python.
"""


def for_small(env: Environment) -> tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """How many elements make an input large, and the product to take for a smaller one.

    For a smaller one it takes too long to find the best product.
    """
    afterwards = env.dtype is torch.bfloat16 and env.device.type == "cpu"
    return 0 if env.compiling else ONEDNN_MIN_SIZE, linear_then_add if afterwards else F.linear


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with one row dimension."""
    if tensor.ndim == 2:
        return tensor
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(0, -2)


def _scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    if not scale:  # a library does not multiply then, and NaN becomes 0
        return a.mm(b) * scale
    return torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    onednn: bool | None = None,
) -> Tensor | None:
    """The linears of one input, side by side, in the dtype of ``x`` and the weights.

    None where the default library, which writes each product to its place, is as fast, and where
    nothing may be written.
    """
    pairs = list(zip(weights, biases, strict=True))
    if x.dtype is not torch.float32 or not all([use_onednn(x, *pair, onednn) for pair in pairs]):
        return None
    if not may_write(x, *weights, *biases):
        return None
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty((*x.shape[:-1], sum(sizes)))
    for place, pair in zip(torch.split_with_sizes(y, sizes, -1), pairs, strict=True):
        place.copy_(onednn_linear(x, *pair))
    return y


def is_small(x: Tensor) -> bool:
    """Whether a product with ``x`` is over before a better way to do it is found.

    It is false for tensors without a size.
    """
    return type(x) is Tensor and not is_dynamo_compiling() and x.numel() < ONEDNN_MIN_SIZE


def has_gelu_epilogue(env: Environment) -> bool:
    """Whether cuBLASLt, or hipBLASLt, can apply a GELU to the product before it is stored.

    False if a backward follows: it needs the input of the GELU, which PyTorch cannot get from the
    library.
    """
    takes = env.device.type == "cuda" and env.dtype in HALF
    return takes and not env.requires_grad and not env.compiling


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of ``x @ weight.T + bias``.

    On a GPU it is the tanh form in one kernel, on a CPU the erf form in two.
    """
    y = torch._addmm_activation(bias.to(x.dtype), _rows(x), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, form: str, onednn: bool | None = None
) -> Tensor | None:
    """``act(x @ weight.T + bias)`` in one call of a library.

    None where no library has it, or where it does not pay off.

    Args:
        x: The input.
        weight: The weight.
        bias: The bias, or None.
        name: The activation as oneDNN calls it: "gelu" or "swish". Not "relu", for which oneDNN
            turns NaN into 0.
        form: Which form of it: "tanh" or "none" for GELU.
        onednn: See :func:`opfuse.ops.libraries.linear`.
    """
    if use_onednn(x, weight, bias, onednn):
        return onednn_linear(x, weight, bias, name, form)
    gelu = bias is not None and form == "tanh" and x.is_cuda and x.dtype in HALF
    # for an empty product PyTorch returns the bias, without its GELU
    if not gelu or not x.numel() or is_compiling():
        return None
    plain = type(x) is Tensor and type(weight) in PLAIN and type(bias) in PLAIN
    return linear_gelu(x, weight, bias) if plain else None


def linear_dgrad(
    grad_output: Tensor, weight: Tensor, scale: float = 1.0, onednn: bool | None = None
) -> Tensor:
    """Gradient of ``scale * linear`` for its input: ``scale * grad_output @ weight``."""
    plain = scale == 1.0 and grad_output.dtype is torch.float32
    if plain and use_onednn(grad_output, weight, None, onednn):
        return onednn_linear(grad_output, weight.t())
    if scale != 1.0:
        rows = _scaled_mm(_rows(grad_output), weight, scale)
        return rows.view(*grad_output.shape[:-1], weight.shape[1])
    return grad_output.mm(weight) if grad_output.ndim == 2 else grad_output @ weight


def linears_dgrad(
    parts: Sequence[Tensor], weights: Sequence[Tensor | None], onednn: bool | None = None
) -> Tensor | None:
    """Gradient of linears of one input for it, from matrices: the sum of ``part @ weight``.

    None where the weights, which are there or not together, are None.
    """
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        if weight is None:
            return None
        if total is None:
            total = linear_dgrad(part, weight, onednn=onednn)
        else:
            total = linear_dgrad_add(part, weight, total, onednn, owned=True)
    return total


def linear_wgrad(
    grad_output: Tensor, x: Tensor, scale: float = 1.0, onednn: bool | None = None
) -> Tensor:
    """Gradient of ``scale * linear`` for its weight: ``scale * grad_output.T @ x``, all rows."""
    grad_output, x = _rows(grad_output), _rows(x)
    plain = scale == 1.0 and grad_output.dtype is torch.float32
    if plain and use_onednn(grad_output, x, None, onednn):
        (rows, inputs), outputs = x.shape, grad_output.shape[1]
        # oneDNN copies a transposed left operand: better the small one, even if the result must be
        # transposed too
        if rows * inputs + inputs * outputs < rows * outputs:
            return onednn_linear(x.t(), grad_output.t()).t().contiguous()
        return onednn_linear(grad_output.t(), x.t())
    return grad_output.t().mm(x) if scale == 1.0 else _scaled_mm(grad_output.t(), x, scale)


def linear_grads(
    grad_output: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    *,
    scale: float = 1.0,
    addend: Tensor | None = None,
    owned: bool = False,
    onednn: bool | None = None,
    ctx: OperationContext | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``scale * linear`` for its input, plus ``addend``, and for its weight.

    Args:
        grad_output: Gradient of the output; it is cast to the operands' dtype.
        x: The input; None: the gradient of the weight is not needed.
        weight: The weight; None: the gradient of the input is not needed.
        scale: The scale; 1 with an addend.
        addend: Of the input's shape.
        owned: Whether nothing else reads the addend, which may then be overwritten.
        onednn: See :func:`opfuse.ops.libraries.linear`.
        ctx: The context of the linear, if its weight's gradient may go to ``ctx.grad_sum``.
    """
    operand = weight if x is None else x
    # under autocast, the output may be wider
    if operand is not None and grad_output.dtype is not operand.dtype:
        grad_output = grad_output.to(operand.dtype)
    grad_weight = None
    if x is not None and ctx is not None and ctx.grad_sum is not None:
        grad_weight = _added_grad(ctx, grad_output, x, scale, onednn)
        x = x if grad_weight is None else None
    plain = grad_output.ndim == 2 and scale == 1.0 and addend is None
    if plain and x is not None and weight is not None and is_small(grad_output):
        return grad_output.mm(weight), grad_output.t().mm(x)
    if x is not None:
        grad_weight = linear_wgrad(grad_output, x, scale, onednn)
    if weight is None:
        return None, grad_weight
    if addend is None:
        return linear_dgrad(grad_output, weight, scale, onednn), grad_weight
    if addend.dtype is grad_output.dtype:
        total = linear_dgrad_add(grad_output, weight, addend, onednn, owned=owned)
        return total, grad_weight
    return linear_dgrad(grad_output, weight, onednn=onednn) + addend, grad_weight


def _added_grad(
    ctx: OperationContext, grad_output: Tensor, x: Tensor, scale: float, onednn: bool | None
) -> Tensor | None:
    """The gradient of a weight, added to its sum by the product; None where oneDNN is faster."""
    dy, rows = _rows(grad_output), _rows(x)
    if dy.dtype is torch.float32 and scale == 1.0 and use_onednn(dy, rows, None, onednn):
        return None
    return BasicLinear.added_grad(ctx, dy, rows, scale)


def bias_grad(grad_output: Tensor) -> Tensor:
    """Gradient of a bias: the sum over all rows, never an alias of ``grad_output``."""
    return grad_output.sum(0) if grad_output.ndim == 2 else _rows(grad_output).sum(0)


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor,
    scale: float = 1.0,
    onednn: bool | None = None,
) -> Tensor:
    """``addend + scale * (x @ weight.T + bias)``, with the shape and dtype of the addend."""
    direct = use_onednn(x, weight, bias, onednn)
    if direct and scale == 1.0 and addend.numel() >= ONEDNN_MIN_ADDEND:
        bias = bias if bias is None else bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise.binary(x, addend, weight, bias, "add")
    added_inside = bias is None and addend.ndim == 2 and not adds_afterwards(x)
    if not direct and added_inside and scale:  # 0 times NaN is NaN, but not in a library
        return torch.addmm(addend, x, weight.t(), alpha=scale)
    product = linear(x, weight, bias, onednn)
    if scale == 1.0:
        return added(product, addend)
    return torch.add(addend, product, alpha=scale, out=reusable(product, addend))


def linear_dgrad_add(
    grad_output: Tensor,
    weight: Tensor,
    addend: Tensor,
    onednn: bool | None = None,
    *,
    owned: bool = False,
) -> Tensor:
    """``addend + grad_output @ weight``; in the memory of the addend, if it is ``owned``."""
    wide = grad_output.dtype is torch.float32
    if wide and use_onednn(grad_output, weight, addend, onednn):
        return torch.ops.mkldnn._linear_pointwise.binary(
            grad_output, addend, weight.t(), None, "add"
        )
    if addend.ndim == 2:
        into = reusable(addend, grad_output, weight) if owned else None
        return torch.addmm(addend, grad_output, weight, out=into)
    return added(linear_dgrad(grad_output, weight, onednn=onednn), addend)
