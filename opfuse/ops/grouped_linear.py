"""``GroupedLinear``: a linear layer for each group of rows, as in a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..extra_inputs import is_kind, refuse_kind
from ..fusible import ParamSource
from ..op_context import OperationContext
from ._common import (
    AllGrads,
    ExtraTensorOperation,
    Outputs,
    WithLaterArguments,
    cast,
    check_shapes,
    check_size,
    shows,
)
from ._grouped import (
    Groups,
    groups_of,
    input_grads,
    products,
    row_sums,
    stacked_grads,
    weight_grads,
)
from ._reading import tensor_of
from .basic_linear import accumulate_main_grad


class GroupedLinear(WithLaterArguments, ExtraTensorOperation):
    """``y_i = x_i @ weight_i.T + bias_i`` for each group ``i`` of rows: one linear layer per group.

    Takes ``x`` of shape ``(rows, ..., in_features)`` and one extra input ``split_sizes``: integers
    of shape ``(num_groups,)``, how many rows of the first dimension belong to each group, one group
    behind the other. Gives ``(rows, ..., out_features)``, in the compute dtype. A group may have no
    rows; the gradients of its parameters are zeros then.

    The parameters are ``weight0``, ``weight1``, ... of shape ``(out_features, in_features)`` and
    ``bias0``, ``bias1``, ... of shape ``(out_features,)``; each pair starts as that of
    ``torch.nn.Linear`` does.

    On CUDA devices of compute capability 9 and 10 in bf16, with both sizes multiples of 8, the
    split sizes are not read on the host: the products are ``torch.nn.functional.grouped_mm``. Split
    sizes that do not sum up to the rows are found by the device then, which stops with an error.
    Anywhere else a loop runs over the groups, for which the host reads the split sizes once per
    call. While ``torch.compile`` traces, that loop is inside of custom operators.

    Under a quantization recipe nothing is quantized here.

    Args:
        num_groups: Number of groups, at least 1.
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether there are biases; if not, ``bias0``, ... are None.
        device: Device of the parameters; default: torch's.
        dtype: Dtype of the parameters; default: torch's.
        rng_state_tracker_function: None; others come with a later release.
        accumulate_into_main_grad: As for :class:`BasicLinear`, for each weight; the gradients of
            biases go to autograd.
        single_grouped_weight: False; True comes with a later release.
        single_grouped_bias: False; True comes with a later release.
        delay_wgrad_compute: False; True comes with a later release.
        scale_bias: False; True comes with a later release.

    Raises:
        TypeError: A size is not a whole number; in a call, ``split_sizes`` that are no integers.
        ValueError: A size is negative, or there is no group; in a call, ``split_sizes`` of another
            shape, or that do not sum up to the rows, an input of fewer than two dimensions, or a
            parameter of another shape than when the op was made.
        NotImplementedError: An argument that comes with a later release.
        RuntimeError: As for :class:`BasicLinear`.
    """

    num_extra_inputs = 1
    extra_input_dtypes = ("integer",)
    keeps_rows = True
    grad_input = "fresh"
    differentiable = True
    params_in_compute_dtype = True
    casts_input = True
    _is_one = False  # whether the weights are one parameter, of another module

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__(
            rng_state_tracker_function=rng_state_tracker_function,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
            scale_bias=scale_bias,
        )
        self.num_groups = check_size(self, "num_groups", num_groups)
        if not self.num_groups:
            raise ValueError(f"{type(self).__name__} expected num_groups of at least 1, got 0")
        self.in_features = check_size(self, "in_features", in_features)
        self.out_features = check_size(self, "out_features", out_features)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        for i in range(self.num_groups):
            weight = torch.empty(self.out_features, self.in_features, **made)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
        for i in range(self.num_groups):
            param = nn.Parameter(torch.empty(self.out_features, **made)) if bias else None
            self.register_parameter(f"bias{i}", param)
        self._shapes = [tuple(param.shape) for param in self.parameters()]
        self.reset_parameters()
        if accumulate_into_main_grad:
            self.accumulates_grads, self.differentiable = True, False

    @classmethod
    def reading(cls, module: nn.Module, weight: str = "weight", *, name: str = "") -> GroupedLinear:
        """An op without biases whose weights are one parameter of another module, read anew always.

        That is how mixtures of experts keep them. There is one parameter then, ``weight``, and one
        gradient for all groups. See :meth:`BasicLinear.reading`.

        Args:
            module: The module that holds the weights.
            weight: Its attribute there, of shape ``(num_groups, out_features, in_features)``.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`.
            ValueError: It has another number of dimensions.
        """
        groups, outputs, inputs = tensor_of(cls, module, weight, dims=3).shape
        op = cls(groups, inputs, outputs, bias=False, device="meta")
        for i in range(groups):
            del op._parameters[f"weight{i}"]
        op.read_parameters({"weight": ParamSource(module, weight)})
        op._is_one, op.param_names, op.name = True, ("weight",), name
        op._shapes = [(groups, outputs, inputs)]
        return op

    def reset_parameters(self) -> None:
        """Draw the parameters anew; nothing is drawn on the meta device."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for name, param in self.named_parameters():
            if not param.numel():
                continue
            if name.startswith("weight"):
                nn.init.kaiming_uniform_(param, a=math.sqrt(5))
            else:
                nn.init.uniform_(param, -bound, bound)

    @property
    def has_bias(self) -> bool:
        """Whether there are biases."""
        return self.bias0 is not None

    unquantized = "its products are not quantized"

    @property
    def saved_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """``input``, ``split_sizes``, ``weight0``, ``weight1``, ...; or one ``weight``."""
        weights = [f"weight{i}" for i in range(self.num_groups)]
        return ("input", "split_sizes", *(("weight",) if self._is_one else weights))

    extra_repr = shows("num_groups", "in_features", "out_features", "has_bias")

    # The operation itself

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The products, in ``ctx.dtype``; saves input and weights in that dtype.

        The split sizes are saved as they came, or as a copy on the CPU where they were read.
        """
        (ctx,) = basic_op_ctxs
        ((split_sizes,),) = basic_op_extra_inputs
        self._check(input_, split_sizes)
        check_shapes(self, ctx.params, self._shapes)
        dtype, count = ctx.dtype or input_.dtype, len(self.saved_names) - 2
        x, params = cast(input_, dtype), [cast(param, dtype) for param in ctx.params]
        weights, biases = params[:count], params[count:]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *params))
        groups = groups_of(x, split_sizes, self._features, recorded)
        if ctx.requires_grad:
            ctx.save_for_backward(
                x if any(ctx.param_requires_grad[:count]) else None,
                groups.sizes,
                *(weights if ctx.input_requires_grad else [None] * count),
            )
        return products(groups, x, weights[0] if self._is_one else weights, biases), [()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """``dx_i = dy_i @ weight_i``, ``dweight_i = dy_i.T @ x_i``, and ``dbias_i = dy_i.sum(0)``.

        All are in the compute dtype; autograd casts them at the end.
        """
        (ctx,) = basic_op_ctxs
        x, split_sizes, *weights = ctx.saved_tensors
        dy = grad_output if ctx.dtype is None else cast(grad_output, ctx.dtype)
        groups = groups_of(dy, split_sizes, self._features)
        dx = None
        if weights[0] is not None:
            dx = input_grads(groups, dy, weights[0] if self._is_one else weights)
        return dx, [self._param_grads(ctx, groups, dy, x)], [(None,)]

    def _param_grads(
        self, ctx: OperationContext, groups: Groups, dy: Tensor, x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        count, wanted = self.num_groups, ctx.param_requires_grad
        if self._is_one:
            return (None if x is None else stacked_grads(groups, dy, x, count),)
        grads = [None] * count if x is None else weight_grads(groups, dy, x, wanted[:count])
        if any(of_biases := wanted[count:]):
            grads += row_sums(groups, dy, of_biases)
        else:
            grads += [None] * len(of_biases)
        return tuple(grads)

    @property
    def _features(self) -> tuple[int, int]:
        return self.in_features, self.out_features  # type: ignore[return-value]

    def _check(self, input_: Tensor, split_sizes: Tensor) -> None:
        who, expected = type(self).__name__, f"split_sizes of shape ({self.num_groups},)"
        if not is_kind("integer", split_sizes.dtype):
            refuse_kind(f"split_sizes of {who}", "integer", split_sizes.dtype)
        if split_sizes.shape != (self.num_groups,):
            raise ValueError(f"{who} expected {expected}, got {tuple(split_sizes.shape)}")
        if input_.ndim < 2:
            shape = tuple(input_.shape)
            raise ValueError(f"{who} expected an input of at least 2 dimensions, got shape {shape}")

    def accumulate_grads(
        self, params: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Add the gradients of weights to their ``main_grad``; those of biases are autograd's."""
        count = self.num_groups
        pairs = zip(params[:count], grads[:count], strict=True)
        return (*[accumulate_main_grad(self, *pair) for pair in pairs], *grads[count:])
