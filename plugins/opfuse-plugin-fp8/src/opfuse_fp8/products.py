"""Linears whose products run in FP8: the fused ops, and their conditions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Optional
from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Usage
from opfuse.ops import BasicLinear, Bias, ParallelLinear
from opfuse.ops.authoring import added

from . import hardware, recipes
from .gemm import DEPTH, GemmOperand, multiply
from .hardware import Hardware
from .together import side_by_side

Ctxs = list[OperationContext]

AUTO, NATIVE, EMULATED = "auto", "native", "emulated"
"""Values of the option ``fp8.products``."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Product(FusedOperation):
    """The base of both: says whether the hardware may sum the forward's products in fewer bits."""

    grad_input = "fresh"
    _fast = _adds_bias = _is_one = False
    _sizes: tuple[int, ...] = ()

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        # as Transformer Engine: the forward of per-tensor scales, and no backward; but an fp32
        # result shows the bits that are left out
        tensor_wise = hardware.kind_of(type(env.recipe)) == "tensor"
        self._fast = tensor_wise and env.dtype is not torch.float32
        self._adds_bias = not _bias_apart(env)
        self._is_one = is_one_product(self.basic_ops[0], env)
        self._sizes = _sizes(self.basic_ops[0])


class ForwardProduct(_Product):
    """Linear [+ bias], or linears side by side: a product of codes for all weights, or for each.

    A bias is added in the product where it can be; else before the result is rounded.
    """

    def fuser_forward(self, basic_op_ctxs: Ctxs, input_: Any, **unused: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op: Any = self.basic_ops[0]
        ctx, *biased = basic_op_ctxs
        if isinstance(op, ParallelLinear):
            # behind that of the input
            of_weights = [*ctx.quantizers.values()][1 : 1 + len(op.sizes)]
            apart = self._is_one and not is_compiling() and of_weights[0] is not of_weights[-1]
            with side_by_side(of_weights, op.sizes) if apart else nullcontext():
                x, weights, biases = op.quantized_operands(ctx, input_)
        else:
            x, weight = BasicLinear.quantized_operands(ctx, input_)
            weights, biases = [weight], [biased[0].params[0] if biased else None]
        dtype = ctx.dtype or x.dtype
        left, *rights = GemmOperand.each((x, *weights), ROWWISE)
        if self._is_one or len(rights) < len(biases):  # weights with one quantizer are one matrix
            biases = [_joined_bias(biases, op.sizes) if any(op.biased) else None]
            rights = rights if len(rights) == 1 else [GemmOperand.stacked(rights)]
        parts = []
        for right, bias in zip(rights, biases, strict=True):
            if bias is None or self._adds_bias:
                given = None if bias is None else bias.to(dtype)
                parts.append(multiply(left, right, dtype, bias=given, fast=self._fast))
            else:
                wide = multiply(left, right, torch.float32, fast=self._fast)
                parts.append(added(wide, bias).to(dtype))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y.view(*x.shape[:-1], y.shape[1]), ((),) * len(basic_op_ctxs)


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """The biases side by side, of which one is there, with zeros for one that is not."""
    known = next(bias for bias in biases if bias is not None)
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([known.new_zeros(n) if bias is None else bias for bias, n in pairs])


class BackwardProduct(_Product):
    """The backward of a linear: products of codes for the gradients of input and weight.

    The gradient of the input of several linears side by side is one product where scales belong to
    blocks alone, or one scale to all weights; else a sum of products, in fp32.
    """

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Any, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        op: Any = self.basic_ops[0]
        ctx = basic_op_ctxs[0]
        dx, grads = gradients(ctx, grad_output, self._sizes)
        if isinstance(op, ParallelLinear):
            grads = *grads, *op.bias_grads(ctx, grad_output)
        return dx, (grads,), ((),)


def _sizes(op: Any) -> tuple[int, ...]:
    """The output features of each weight."""
    return tuple(getattr(op, "sizes", (op.out_features,)))


def gradients(
    ctx: Any, grad_output: Any, sizes: Sequence[int]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """The gradients of the input and of each weight, from what the forward left.

    Args:
        ctx: The context of the linear in the backward.
        grad_output: The gradient of its output, quantized or not.
        sizes: The output features of each weight.
    """
    x, *weights = ctx.saved_tensors
    dgrad, wgrad = weights[0] is not None, x is not None
    dtype = ctx.dtype or grad_output.dtype
    quantize, usage = ctx.quantizers["grad_output"], Usage(dgrad, wgrad)
    # what comes quantized was checked
    dy = grad_output if isinstance(grad_output, QuantizedTensor) else quantize(grad_output, usage)
    stops = [*itertools.accumulate(sizes)]
    spans = [*zip((0, *stops), stops, strict=False)]
    dx: Tensor | None = None
    grads: list[Tensor | None] = [None] * len(sizes)
    if dgrad:
        (left,) = GemmOperand.each((dy,), ROWWISE)
        rights = GemmOperand.each(filter(None, weights), COLUMNWISE)
        if len(rights) > 1 and not rights[0].stands_alone:
            rights = [GemmOperand.chained(rights)]
        wide = dtype if len(rights) == 1 else torch.float32
        for span, right in zip(spans, rights, strict=False):
            part = left if len(rights) == 1 else left.inner(*span)
            product = multiply(part, right, wide)
            dx = product if dx is None else added(dx, product)
        assert dx is not None
        dx = dx.to(dtype).view(*grad_output.shape[:-1], dx.shape[1])
    if wgrad:
        left, right = GemmOperand.each((dy, x), COLUMNWISE)
        for i, span in enumerate(spans):  # a product each: no two share memory
            if ctx.param_requires_grad[i]:  # biases come after the weights
                part = left if len(spans) == 1 else left.outer(*span)
                grads[i] = multiply(part, right, dtype)
    return dx, tuple(grads)


# Where they may stand


def is_one_product(op: Any, env: Environment) -> bool:
    """Whether linears side by side have one product in the forward.

    Blocks have their own scales. Where each weight has one, a product must scale each row of the
    weights: the results differ from those of the parts by the order of two factors in fp32. Of two
    levels of scales, as NVFP4 has, a product takes one of the upper level.
    """
    if len(_sizes(op)) == 1 or env.recipe is None:
        return False
    kind = hardware.kind_of(type(env.recipe))
    if kind != "tensor":
        return kind != "nvfp4"
    recipe: Any = env.recipe
    in_e4m3 = recipe.fp8_format in (recipes.Format.HYBRID, recipes.Format.E4M3)
    return in_e4m3 and env.dtype is torch.bfloat16 and hardware.scales_rows(Hardware.where(env))


def forward_runs(ops: Any, env: Environment) -> bool | str:
    """Whether a forward product runs in FP8, or the sentence that says why it is emulated."""
    return _emulated(ops, env) or (_bias_apart(env) if len(ops) > 1 else "") or True


def backward_runs(ops: Any, env: Environment) -> bool | str:
    """The same of a backward."""
    recipe: Any = env.recipe
    override = None if recipe is None else recipe.backward_override
    if override is not None:
        return f"backward_override={override!r}: the backward multiplies plain tensors"
    if why := _emulated(ops, env):
        return why
    if hardware.kind_of(type(recipe)) != "tensor" and recipe.fp8_format is not recipes.Format.E4M3:
        return "emulated: blocks are multiplied in E4M3, and Format.HYBRID has gradients in E5M2"
    return True


def _emulated(ops: Any, env: Environment) -> str:
    """Why the products of a linear are emulated; empty: they are not."""
    name, here = type(env.recipe).__name__, hardware.Hardware.where(env)
    wanted = env.options.get("fp8.products", AUTO)
    kind = "" if env.recipe is None else hardware.kind_of(type(env.recipe))
    if not kind:
        return f"emulated: this plugin has no product for what {name} quantizes to"
    first = ops[0].get_quantizer("forward", 0)
    if first is not None and not first.quantizes:
        return "emulated: nothing is quantized where quantizers calibrate"
    if wanted == EMULATED:
        return "emulated, as the option fp8.products says"
    why = hardware.why_no_gemm(kind, here)
    # PyTorch multiplies FP8 codes on a CPU too, but not in FP8
    on_cpu = here.device == "cpu" and kind == "tensor"
    if why and not (on_cpu and (wanted == NATIVE or env.measured is not None)):
        return f"emulated: {why}"
    if env.dtype not in DTYPES:
        return f"emulated: an {hardware.codes_of(kind)} GEMM does not give {str(env.dtype)[6:]}"
    if env.compiling and kind in hardware.SWIZZLED:
        return "emulated: Inductor lowers no product with swizzled scales"
    return "" if on_cpu else _does_not_fit(ops[0], kind, env)


def _does_not_fit(op: Any, kind: str, env: Environment) -> str:
    """Which dimension of a linear no GEMM takes on a GPU, as a sentence."""
    who, sizes, gemm = type(op).__name__, _sizes(op), f"an {hardware.codes_of(kind)} GEMM"
    for what, size in (("in_features", op.in_features), *[("out_features", s) for s in sizes]):
        if size % DEPTH:
            pad = size + -size % DEPTH
            return (
                f"emulated: {gemm} takes {what} that are a multiple of 16, and {who} has "
                f"{size}: pad it to {pad}"
            )
    if kind == "block":
        if env.row_alignment < 4:
            return "emulated: blocks of 128 are multiplied where the rows are a multiple of 4"
        if any(size % 128 for size in sizes[:-1]):
            return (
                f"emulated: the {who} splits a block of 128 of the gradient, its sizes are {sizes}"
            )
        recipe: Any = env.recipe
        if len(sizes) > 1 and recipe.grad_block_scaling_dim == 2:
            return "emulated: a gradient in blocks of 128 x 128 is not split into its linears"
    return ""


def _bias_apart(env: Environment) -> str:
    """Why a bias is added by itself; empty: a product adds it."""
    if env.dtype is torch.float32:
        return "" if env.device.type == "cpu" else "an FP8 GEMM adds no bias to a result in float32"
    if hardware.kind_of(type(env.recipe)) != "tensor":
        return "the bias goes into products of tensors with one scale only"
    return ""


def _saved(ops: Any, env: Environment) -> float:
    """A bias that is added in the product saves a pass over memory."""
    return float(len(ops))


# the purpose of a recipe comes before saving a pass over memory
_EACH: Any = {"priority": 50, "needs": ("row_alignment", "recipe")}

FORWARD = [
    Fusion(pattern, ForwardProduct, forward_runs, _saved, name=name, **_EACH)
    for pattern, name in (
        ((BasicLinear, Optional(Bias)), "fp8 linear+bias"),
        ((ParallelLinear,), "fp8 parallel linear"),
    )
]

BACKWARD = [
    Fusion((of,), BackwardProduct, backward_runs, 1.0, name=name, **_EACH)
    for of, name in ((BasicLinear, "fp8 linear"), (ParallelLinear, "fp8 parallel linear"))
]
