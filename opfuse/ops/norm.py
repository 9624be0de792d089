"""Normalizations: LayerNorm, RMSNorm, L2Normalization."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..core.fusible import ParamSource
from ..core.op_context import Unread
from ..core.plugins import manager
from ._blocks import blocks, gradients_by_blocks, in_blocks, memory, scaled_by_blocks
from ._common import OpGrads, RowwiseOperation, check_shape, expected, require, shows, sum_rows
from ._reading import check_stock, eps_of, reader, tensor_of
from ._samples import samples
from .arithmetic import cast, wide, widened


class _Norm(RowwiseOperation):
    """The base of LayerNorm and RMSNorm: the shape, the parameters, and their arguments."""

    context_names = ("zero_centered_gamma",)
    real_numbers = ("eps",)
    takes_params = ("weight", "bias")
    autocast_dtype = torch.float32
    weight: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
        sequence_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(self, "normalized_shape", normalized_shape)
        self._dims = tuple(range(-len(self.normalized_shape), 0))
        self.in_features = self.out_features = self.normalized_shape[-1]
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        margins = sm_margin.values() if isinstance(sm_margin, dict) else [sm_margin]
        are_ints = all(isinstance(margin, int) for margin in margins)
        require(self, are_ints, "an int or a dict of ints as sm_margin", sm_margin, TypeError)
        self.sm_margin = sm_margin
        what = "elementwise_affine=True for zero_centered_gamma=True"
        require(self, elementwise_affine or not zero_centered_gamma, what, elementwise_affine)
        self.elementwise_affine = elementwise_affine
        weight = None
        if elementwise_affine:
            weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        if sequence_parallel_group is not None:
            summed = manager.give("opfuse.ops", "Layout").summed_over(sequence_parallel_group)
            self._layouts = {"weight": summed, "bias": summed}
            self.needs_tools = ("distributed",)
        self.reset_parameters()

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        other, deep = op(cls, features, eps=0.1), op(cls, (4, features), rows=(4, 4))
        centered = [op(cls, features, zero_centered_gamma=flag) for flag in (False, True)]
        lacking = [op(cls, features, **{name: False}) for name in ("elementwise_affine", "bias")]
        return [*centered, other, deep, op(cls, other, via="reading"), *lacking]

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """``"rows"``, if the rows that it normalizes are those of the last dimension."""
        return ("rows",) if len(self._dims) == 1 else ()

    def extra_repr(self) -> str:
        """The shape and the constants."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        known = f"{self.normalized_shape}, eps={self.eps}{affine}"
        return f"{known}, zero_centered_gamma={self.zero_centered_gamma}"

    def reset_parameters(self) -> None:
        """Set the parameters so that the op only normalizes, unless another module holds them."""
        if self._sources:
            return
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if (bias := getattr(self, "bias", None)) is not None:
            nn.init.zeros_(bias)

    def _check_input(self, x: Tensor) -> None:
        shape = self.normalized_shape  # of one dimension: the chain has checked it
        if len(shape) > 1 and x.shape[-len(shape) :] != shape:
            raise ValueError(expected(self, f"last dimensions {shape}", f"shape {tuple(x.shape)}"))


def _scale(weight: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor | None:
    """The factor of the normalized values; None: there is none."""
    if weight is None:
        return None
    weight = cast(weight, dtype)
    return weight + 1 if zero_centered else weight


class LayerNorm(_Norm):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016).

    Takes ``(..., *normalized_shape)`` and returns the same shape, in the dtype of the input, under
    autocast in fp32; mean and (biased) variance are over ``normalized_shape``, in fp32 for half
    precision. ``weight`` and ``bias`` have shape ``normalized_shape``, any floating dtype, and
    start at 1 and 0.

    Args:
        normalized_shape: The last dimensions, or the last one.
        eps: Added to the variance.
        elementwise_affine: False: there is neither weight nor bias.
        bias: False: there is no bias.
        device: Device of the parameters; default: torch's.
        dtype: Dtype of the parameters; default: torch's.
        zero_centered_gamma: Multiply by ``1 + weight``; the weight then starts at 0.
        sm_margin: Multiprocessors that a CUDA kernel leaves free; without effect here.
        sequence_parallel_group: Processes that each have some of the rows, and all of the
            parameters: the gradients of these are summed over the group in the backward.
            Transformer Engine leaves that to the caller. Default: they are not summed.

    Attributes:
        is_inner: Whether ops of chains alone read the output, a linear one among them, so that
            nobody writes to it. A fused op may then keep it in place of the input. A number: in the
            thread of that number.

    Raises:
        ValueError: ``normalized_shape`` is empty or negative; ``zero_centered_gamma`` without a
            weight; in a call, an input of another shape.
        TypeError: ``normalized_shape`` or ``sm_margin`` of the wrong type.
    """

    saved_names = ("input", "weight", "mean", "rstd")
    is_inner: bool | int = False
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
        sequence_parallel_group: Any = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps=eps,
            elementwise_affine=elementwise_affine,
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
            sm_margin=sm_margin,
            sequence_parallel_group=sequence_parallel_group,
        )
        zeros = None
        if bias and self.weight is not None:
            zeros = nn.Parameter(torch.zeros_like(self.weight))
        self.register_parameter("bias", zeros)

    @classmethod
    def reading(
        cls,
        module: nn.Module,
        weight: str = "weight",
        bias: str | None = "bias",
        *,
        eps: float | None = None,
        zero_centered_gamma: bool = False,
        name: str = "",
    ) -> LayerNorm:
        """Return an op that reads its parameters elsewhere; see :meth:`BasicLinear.reading`.

        Args:
            module: The module that holds the parameters.
            weight: The attribute of the weight, whose shape is ``normalized_shape``.
            bias: The attribute of the bias; None, or an attribute that is None: there is no bias.
            eps: As for :meth:`RMSNorm.reading`.
            zero_centered_gamma: As for :class:`LayerNorm`.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`.
            ValueError: As for :meth:`RMSNorm.reading`, or weight and bias differ in shape. In a
                call, the module has a bias that it did not have when the op was made.
        """
        shape = tuple(tensor_of(cls, module, weight).shape)
        sources = {"weight": ParamSource(module, weight)}
        if bias is not None and getattr(module, bias, 0) is not None:
            sources["bias"] = ParamSource(module, bias)
            if (got := tuple(tensor_of(cls, module, bias).shape)) != shape:
                what = f"{type(module).__name__}.{bias} of shape {shape}, that of {weight}"
                raise ValueError(f"{cls.__name__}.reading expected {what}, got {got}")
        number, biased = eps_of(cls, module, eps), "bias" in sources
        op = cls(
            shape, eps=number, bias=biased, device="meta", zero_centered_gamma=zero_centered_gamma
        )
        if bias is not None and not biased:
            op._absent = (ParamSource(module, bias),)
        return reader(op, sources, name)

    @classmethod
    def of(cls, module: nn.LayerNorm, *, name: str = "") -> LayerNorm:
        """Return a ``LayerNorm`` that shares the Parameters of a ``torch.nn.LayerNorm``, if any.

        See :meth:`Linear.of`.

        Args:
            module: The module, which has no hooks, no parametrization and no forward of its own.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            TypeError: ``module`` is not such a module.
        """
        check_stock(cls, module, nn.LayerNorm)
        shape, affine = module.normalized_shape, module.elementwise_affine
        biased = module.bias is not None
        op = cls(shape, eps=module.eps, elementwise_affine=affine, bias=biased, device="meta")
        op.weight, op.bias, op.name = module.weight, module.bias, name
        return op.train(module.training)

    def extra_repr(self) -> str:
        """The shape and the constants."""
        lacks_bias = self.elementwise_affine and self.bias is None
        return super().extra_repr() + (", bias=False" if lacks_bias else "")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The output, in ``ctx.dtype``; saves ``(input, weight, mean, rstd)``.

        The input is saved as it came.
        """
        self._check_input(input_)
        weight, bias = (*ctx.params, None, None)[:2]
        dtype = wide(input_.dtype)
        # on the CPU torch's kernel mixes a half precision input with fp32 parameters and statistics
        # the mixed kernel's tangent has the statistics' dtype, and a compiler takes another for it
        plain = forward_ad._current_level < 0 and not torch.compiler.is_dynamo_compiling()
        mixes = input_.device.type == "cpu" and weight is not None and plain
        x = input_ if mixes else cast(input_, dtype)
        scale = _scale(weight, dtype, self.zero_centered_gamma)
        shift = None if bias is None else cast(bias, dtype)
        y, mean, rstd = torch.native_layer_norm(x, self.normalized_shape, scale, shift, self.eps)
        if ctx.requires_grad:
            ctx.zero_centered_gamma = self.zero_centered_gamma
            needs_x = ctx.input_requires_grad
            needed = needs_x or (weight is not None and ctx.param_requires_grad[0])
            saved = input_, weight if needs_x else None, mean, rstd
            ctx.to_save = saved if needed else (None,) * 4
        return cast(y, ctx.dtype or input_.dtype)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """``dx = rstd (g - mean(g) - n mean(g n))``.

        Here ``n`` is the normalized input and ``g = dy weight``.
        """
        x, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.param_requires_grad
        if x is None:
            return None, (None, sum_rows(grad_output, len(self.normalized_shape)))[: len(needs)]
        dtype = mean.dtype
        scale = _scale(weight, dtype, ctx.zero_centered_gamma)
        if scale is None and needs:
            scale = mean.new_ones(self.normalized_shape)
        wants = [ctx.input_requires_grad, *needs, False, False][:3]
        constants = scale, self.normalized_shape, wants
        halves = grad_output.dtype is x.dtype is not dtype and scale is not None
        if halves and len(self._dims) == 1 and in_blocks(x):
            dx, *grads = _mixed_layer_norm_backward(grad_output, x, mean, rstd, constants)
        else:
            dy = cast(grad_output, dtype)
            dx, *grads = _layer_norm_backward(dy, cast(x, dtype), mean, rstd, constants)
        return (cast(dx, x.dtype) if wants[0] else None), tuple(grads[: len(needs)])


def _layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, constants: Sequence[Any]
) -> tuple[Any, ...]:
    """The gradients of the input, weight and bias that are wanted.

    The constants are the factor of the normalized values, ``normalized_shape``, and which gradients
    are wanted.
    """
    scale, shape, wants = constants
    kernel = torch.ops.aten.native_layer_norm_backward.default
    grads = kernel(dy, x, shape, mean, rstd, scale, scale, wants)
    return tuple([grad if wanted else None for grad, wanted in zip(grads, wants, strict=True)])


def _mixed_layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, constants: Sequence[Any]
) -> tuple[Any, ...]:
    """The same of half precision on a CPU.

    torch's kernel casts in registers, but sums the gradients of weight and bias in half precision:
    these are computed from blocks of rows in fp32. It takes no mixture without a weight.
    """
    scale, shape, (of_input, *of_params) = constants
    dy, sums = dy.contiguous(), [mean.new_zeros(shape) if wanted else None for wanted in of_params]
    dx, _, _ = _layer_norm_backward(dy, x, mean, rstd, (scale, shape, [of_input, False, False]))
    if any(of_params):
        gradients, values = memory(2, x, mean.dtype)
        of_sums = scale, shape, [False, *of_params]
        for of_dy, of_x, of_mean, of_rstd in blocks(dy, x, mean, rstd):
            rows = widened(of_dy, gradients[: len(of_x)]), widened(of_x, values[: len(of_x)])
            _, *new = _layer_norm_backward(*rows, of_mean, of_rstd, of_sums)
            for total, of_rows in zip(sums, new, strict=True):
                if total is not None:
                    total.add_(of_rows)
    return dx, *sums


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019).

    Takes ``(..., *normalized_shape)`` and returns the same shape, in the dtype of the input, under
    autocast in fp32; the mean is over ``normalized_shape``, in fp32 for half precision. ``weight``
    has shape ``normalized_shape``, any floating dtype, and starts at 1.

    Args:
        normalized_shape: The last dimensions, or the last one.
        eps: Added to the mean square.
        elementwise_affine: False: there is no weight.
        device: Device of the weight; default: torch's.
        dtype: Dtype of the weight; default: torch's.
        zero_centered_gamma: Multiply by ``1 + weight``; the weight then starts at 0.
        sm_margin: Multiprocessors that a CUDA kernel leaves free; without effect here.
        sequence_parallel_group: Processes that each have some of the rows, and all of the
            parameters: the gradients of these are summed over the group in the backward.
            Transformer Engine leaves that to the caller. Default: they are not summed.

    Attributes:
        dense: Whether the output is contiguous whatever the input is, as that of
            ``torch.nn.RMSNorm``; if not, it has the strides that pointwise operations give.

    Raises:
        ValueError: ``normalized_shape`` is empty or negative; ``zero_centered_gamma`` without a
            weight; in a call, an input of another shape.
        TypeError: ``normalized_shape`` or ``sm_margin`` of the wrong type.
    """

    saved_names = ("input", "weight", "rstd")
    dense = True

    @classmethod
    def reading(
        cls,
        module: nn.Module,
        weight: str = "weight",
        *,
        eps: float | None = None,
        zero_centered_gamma: bool = False,
        name: str = "",
    ) -> RMSNorm:
        """Return an op that reads its weight from another module; see :meth:`BasicLinear.reading`.

        Args:
            module: The module that holds the weight.
            weight: The attribute of that module, whose shape is ``normalized_shape``.
            eps: Added to the mean square, fixed from now on; None: the current ``eps`` or
                ``variance_epsilon`` of the module. If that is None, as by default in
                ``torch.nn.RMSNorm``, pass a number.
            zero_centered_gamma: As for :class:`RMSNorm`; it cannot be read from the module. Gemma's
                norms need it.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`.
            ValueError: The module has no ``eps``, or two.
        """
        shape = tuple(tensor_of(cls, module, weight).shape)
        number = eps_of(cls, module, eps)
        op = cls(shape, eps=number, device="meta", zero_centered_gamma=zero_centered_gamma)
        return reader(op, {"weight": ParamSource(module, weight)}, name)

    @classmethod
    def of(cls, module: nn.RMSNorm, *, eps: float | None = None, name: str = "") -> RMSNorm:
        """Return an ``RMSNorm`` that shares the Parameter of a ``torch.nn.RMSNorm``, if any.

        See :meth:`Linear.of`.

        Args:
            module: The module, which has no hooks, no parametrization and no forward of its own.
            eps: As for :meth:`reading`.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            TypeError: ``module`` is not such a module.
            ValueError: The ``eps`` of the module is None, and none is given.
        """
        check_stock(cls, module, nn.RMSNorm)
        number, affine = eps_of(cls, module, eps), module.elementwise_affine
        op = cls(module.normalized_shape, eps=number, elementwise_affine=affine, device="meta")
        op.weight, op.name = module.weight, name
        return op.train(module.training)

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The output, in ``ctx.dtype``; saves ``(input, weight, rstd)``, the input as it came."""
        self._check_input(input_)
        (weight,) = ctx.params or (None,)
        dtype, result = wide(input_.dtype), ctx.dtype or input_.dtype
        scale = _scale(weight, dtype, self.zero_centered_gamma)
        if len(self._dims) == 1 and in_blocks(input_):
            y, rstd = scaled_by_blocks(input_, scale, self.eps, input_.shape[-1], result)
        else:
            x = cast(input_, dtype)
            rstd = torch.rsqrt(x.square().mean(self._dims, keepdim=True) + self.eps)
            y = x * rstd if scale is None else x * rstd * scale
        if ctx.requires_grad:
            ctx.zero_centered_gamma = self.zero_centered_gamma
            needs_x = ctx.input_requires_grad
            saved = input_, weight if needs_x else None, rstd
            ctx.to_save = saved if needs_x or weight is not None else (None,) * 3
        y = cast(y, result)
        return y.contiguous() if self.dense else y

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """``dx = rstd (g - n mean(g n))``, with ``n`` the normalized input, ``g = dy weight``."""
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight = ctx.input_requires_grad, any(ctx.param_requires_grad)
        if x is None:
            return None, ()
        scale = _scale(weight, rstd.dtype, ctx.zero_centered_gamma)
        if len(self._dims) == 1 and in_blocks(x):
            dy, count = grad_output.contiguous(), x.shape[-1]
            dx, dw = gradients_by_blocks(dy, x, rstd, scale, count, (needs_x, needs_weight))
            return dx, (dw,) if ctx.param_requires_grad else ()
        normalized, dy = cast(x, rstd.dtype) * rstd, cast(grad_output, rstd.dtype)
        dx = dw = None
        if needs_x:
            g = dy if scale is None else dy * scale
            mean = (g * normalized).mean(self._dims, keepdim=True)
            dx = cast(rstd * (g - normalized * mean), x.dtype)
        if needs_weight:
            dw = sum_rows(dy * normalized, len(self._dims))
        return dx, (dw,) if ctx.param_requires_grad else ()


class L2Normalization(RowwiseOperation):
    """``y = x / sqrt(sum(x^2) + eps)`` over the last dimension.

    Takes and returns ``(..., n)``, in the dtype of the input, under autocast in fp32; the sum is in
    fp32 for half precision.

    Args:
        eps: Added to the sum of squares.
        seq_length: Accepted for Transformer Engine's signature; without effect.
        micro_batch_size: Accepted for Transformer Engine's signature; without effect.
    """

    saved_names = ("input", "rstd")
    batch_invariant = ("rows",)
    real_numbers = ("eps",)
    sample_inputs = samples({}, {"eps": 0.1})
    feature_ratio = 1
    autocast_dtype = torch.float32

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size

    extra_repr = shows("eps")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The output, in ``ctx.dtype``; saves ``(input, rstd)``, the input as it came."""
        if in_blocks(input_):
            y, rstd = scaled_by_blocks(input_, None, self.eps, 1, ctx.dtype or input_.dtype)
        else:
            x = cast(input_, wide(input_.dtype))
            rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)
            y = x * rstd
        if ctx.requires_grad:
            ctx.to_save = (input_, rstd) if ctx.input_requires_grad else (None, None)
        return cast(y, ctx.dtype or input_.dtype)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """With ``n`` the normalized input: ``dx = rstd (dy - n sum(dy n))``."""
        x, rstd = ctx.saved_tensors
        if x is None:
            return None, ()
        if in_blocks(x):
            dy = grad_output.contiguous()
            return gradients_by_blocks(dy, x, rstd, None, 1, (True, False))[0], ()
        normalized, dy = cast(x, rstd.dtype) * rstd, cast(grad_output, rstd.dtype)
        dx = rstd * (dy - normalized * (dy * normalized).sum(-1, keepdim=True))
        return cast(dx, x.dtype), ()
