"""``BasicLinear``: the matrix product of a linear layer, plain or quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ..core.fusible import ParamSource
from ..core.introspection import overridden
from ..core.op_context import OperationContext, Unread
from ..core.quantization import QuantizedTensor, Quantizer, QuantizerRole
from ..core.settings import current
from ._autocast import cast_weights
from ._common import OpGrads, RowwiseOperation, check_size, expected, rows_of, shows
from ._main_grad import MainGrads, accumulate_main_grad
from ._products import quantized_backward, quantized_operands, tiled
from ._reading import reader, tensor_of
from ._split import SplitLayer, WithLaterArguments, check_tracker, forked, split_of
from .arithmetic import add_product, adds_itself


class LinearOperation(RowwiseOperation):
    """The declarations and the input's quantizer, which all ops with matrix products share."""

    params_in_compute_dtype = True
    casts_input = True
    batch_invariant = ("rows",)
    _shapes: Sequence[tuple[int, ...]] = ()  # of the parameters when the op was made
    _num_weights: Any = 1  # that multiply one input

    def _check_shapes(self, params: Sequence[Tensor]) -> None:
        """Refuse parameters whose shape changed since the op was made."""
        if [param.shape for param in params] == self._shapes:
            return
        for name, param, shape in zip(self.param_names or (), params, self._shapes, strict=True):
            if param.shape != shape:
                what = f"{name} of shape {shape}, as when it was made"
                raise ValueError(expected(self, what, tuple(param.shape)))

    def num_quantizers(self, mode: str) -> int:
        """In forward the input's and one for each weight, in backward the gradient's."""
        return 1 + self._num_weights if mode == "forward" else 1

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """Input and weights of a linear layer, or the gradient of its output."""
        forward = ["input", *["weight"] * self._num_weights]
        tensors = forward if mode == "forward" else ["grad_output"]
        return [QuantizerRole("linear", tensor, self.name) for tensor in tensors]

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer of the input; None if the op quantizes the input itself.

        It does so if the backward needs the unquantized input.
        """
        recipe = current.recipe
        if recipe is not None and recipe.backward_override == "high_precision":
            return None
        return super().get_input_quantizer()


class BasicLinear(SplitLayer, WithLaterArguments, LinearOperation):
    """``y = x @ weight.T``: a linear layer without bias.

    Maps ``(..., in_features)`` to ``(..., out_features)``, in the compute dtype. ``weight`` has
    shape ``(out_features, in_features)`` and is initialized as in ``torch.nn.Linear``: uniform
    within ``1 / sqrt(in_features)`` of zero (Kaiming, He et al. 2015, with slope ``sqrt(5)``).

    Under a quantization recipe, input and weight are quantized, and so are the gradients, subject
    to the recipe's ``backward_override``. The products are emulated: they multiply the dequantized
    tensors, sum in fp32, and round once. A fusion may multiply in hardware.

    Args:
        in_features: Size of the last dimension of the input, of all processes together.
        out_features: Size of the last dimension of the output, of all processes together.
        device: Device of the weight; default: torch's.
        dtype: Dtype of the weight; default: torch's.
        tensor_parallel_mode: None: each process has the whole weight. "column": each has its part
            of the outputs, ``(out_features / processes, in_features)``. "row": each has its part
            of the inputs, ``(out_features, in_features / processes)``, and the products are added
            up. The collectives that this takes are ops of the chain around this one, see
            :meth:`opfuse.BasicOperation.surround`. A group of one process asks for nothing.
        tensor_parallel_group: The processes; default: all.
        sequence_parallel: With "column", the input is this process's part of the rows (of the first
            dimension), and is gathered; with "row", the output is.
        rng_state_tracker_function: A function that returns an object whose ``fork()`` gives a
            context in which this process draws its own numbers; the weight is drawn in it. Without
            one, processes whose generators have one seed draw equal parts.
        accumulate_into_main_grad: Add the weight's gradient to ``weight.main_grad``, a tensor of
            its shape and any floating dtype, as Megatron-LM sets it up, instead of passing it to
            autograd. The product of the backward adds it itself where the library does so in the
            dtype of ``main_grad``: in its own dtype, and on a GPU in fp32. Elsewhere it is rounded
            to the compute dtype first. If a backward raises, ``main_grad`` may have its gradient
            already. ``weight.grad`` does not change. If the weight has an attribute
            ``grad_added_to_main_grad``, that becomes True and autograd gets zeros, so that its
            hooks run. If ``weight.overwrite_main_grad`` is true, the first gradient of a backward
            replaces ``main_grad``, and the further ones of a shared weight are added; a backward
            inside of another, as of a reentrant checkpoint, is one of its own. This holds for
            every fusion. ``torch.autograd.grad`` still returns the requested gradients; second
            derivatives, functorch and ``torch.compile`` are refused.
        userbuffers_options: None; others come with a later release.

    Attributes:
        in_features, out_features: Sizes of the last dimensions here, on this process.
        local_in_features, local_out_features: The same, by Transformer Engine's names.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel: The arguments; None and
            False in a group of one process.
        tensor_parallel_size: The number of processes.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is negative, or does not divide by the number of processes.
        NotImplementedError: An argument that comes with a later release.
        RuntimeError: ``torch.distributed`` is not initialised; in a backward with
            ``accumulate_into_main_grad``, a weight without a fitting ``main_grad``.
    """

    saved_names = ("input", "weight")
    takes_params = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(userbuffers_options=userbuffers_options)
        check_tracker(self, rng_state_tracker_function)
        self._tracker = rng_state_tracker_function
        split = split_of(self, tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        inputs = check_size(self, "in_features", in_features)
        outputs = check_size(self, "out_features", out_features)
        self.in_features = split.part(self, "in_features", inputs, "row")
        self.out_features = split.part(self, "out_features", outputs, "column")
        self._split = split
        self.surround(before=split.before, after=split.after)
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()
        if accumulate_into_main_grad:
            self.accumulates_grads, self.differentiable = True, False

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op; the second as GPT-2's ``Conv1D`` has its weight."""
        out = out_features or features + features // 2
        turned = op(cls, op(cls, out, features), via="reading", transposed=True)
        return [op(cls, features, out), turned]

    @classmethod
    def reading(
        cls,
        module: nn.Module,
        weight: str = "weight",
        *,
        transposed: bool = False,
        accumulate_into_main_grad: bool = False,
        name: str = "",
    ) -> BasicLinear:
        """Return an op that reads its weight from another module at every call.

        The gradient reaches the module's current Parameter, even after
        ``load_state_dict(assign=True)``, ``to()``, a parametrization or FSDP2. The module is
        neither registered nor called, so its hooks and its own ``forward`` (an adapter) do not run.
        If the module itself is replaced, as by PEFT, the op does not notice.

        Args:
            module: The module that holds the weight.
            weight: The attribute of that module, of shape ``(out_features, in_features)``.
            transposed: The attribute has shape ``(in_features, out_features)``, as in the
                ``Conv1D`` of GPT-2; the op reads a transposed view.
            accumulate_into_main_grad: As for :class:`BasicLinear`; not with ``transposed``.
            name: The name of the op, see :attr:`opfuse.FusibleOperation.name`.

        Raises:
            AttributeError: The module has no such attribute.
            TypeError: It is not a floating-point tensor, or ``module`` is not a module.
            ValueError: It is not a matrix, or both flags are set.
        """
        if transposed and accumulate_into_main_grad:
            why = "main_grad has the shape of a Parameter, which transposed=True does not"
            raise ValueError(f"BasicLinear.reading: {why}: leave out accumulate_into_main_grad")
        sizes = tensor_of(cls, module, weight, dims=2).shape
        outputs, inputs = reversed(sizes) if transposed else sizes
        op = cls(
            inputs, outputs, device="meta", accumulate_into_main_grad=accumulate_into_main_grad
        )
        return reader(op, {"weight": ParamSource(module, weight, transposed)}, name)

    local_in_features = property(lambda op: op.in_features, doc="``in_features``.")
    local_out_features = property(lambda op: op.out_features, doc="``out_features``.")

    def reset_parameters(self) -> None:
        """Draw the weight again, unless another module holds it or it is on the meta device."""
        if not self._sources:
            with forked(self._tracker):
                draw(self.weight, self._fan_in)

    @property
    def _fan_in(self) -> int:
        """``in_features`` of all processes together."""
        return (self.in_features or 0) * (self._split.size if self._split.mode == "row" else 1)

    def extra_repr(self) -> str:
        """The sizes on this process, and how the layer is split."""
        return shows("in_features", "out_features")(self) + self._split.shows

    # The operation itself

    @staticmethod
    def quantized_operands(
        ctx: OperationContext, input_: Tensor | QuantizedTensor
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Input and weight of the product, as the recipe's quantizers cast them for the forward.

        Leaves on ``ctx`` what the backward needs: without a ``backward_override``, the columnwise
        copies of both. For the op itself, and for fusions of the forward that multiply quantized
        tensors, if ``ctx.quantizers`` is not empty.
        """
        x, (weight,) = quantized_operands(ctx, input_, ("weight",))
        return x, weight

    @staticmethod
    def operands(ctx: OperationContext, input_: Tensor | QuantizedTensor) -> tuple[Tensor, Tensor]:
        """Input and weight of the product in ``ctx.dtype``; under a recipe, dequantized.

        Leaves on ``ctx`` what the backward needs. For the op itself, and for fusions of the forward
        that multiply in another way.
        """
        (weight,) = ctx.params
        dtype = ctx.dtype
        x: Any = input_
        if ctx.quantizers:
            pair = BasicLinear.quantized_operands(ctx, x)
            x, w = [tensor.dequantize().to(dtype or x.dtype) for tensor in pair]
            return x, w
        kept = w = weight
        if dtype is not None:
            x, (w,) = x.to(dtype), cast_weights(ctx, ctx.params)
            (kept,) = kept_weights(ctx, (weight,), (w,))
        if ctx.requires_grad:
            kept_x = x if ctx.param_requires_grad[0] else None
            ctx.to_save = kept_x, kept if ctx.input_requires_grad else None
        x, w = tiled(x, w)
        return x, w

    @staticmethod
    def saved_operands(ctx: OperationContext) -> tuple[Tensor | None, Tensor | None]:
        """Input and weight that the forward saved, in ``ctx.dtype``; None if it saved none.

        For the op itself, and for fusions of the backward that multiply in another way without a
        recipe. A weight that was saved as it is, under ``ctx.saves_params``, is cast here.
        """
        x, w = ctx.saved_tensors  # type: ignore[misc]
        if ctx.saves_params and w is not None:
            w = w.to(ctx.dtype)
        return x, w

    def op_forward(self, ctx: Any, input_: Any, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The product, in ``ctx.dtype``; saves ``(input, weight)`` in that dtype, or quantized.

        The weight is saved as it is if ``ctx.saves_params``.
        """
        if not ctx.quantizers:
            return F.linear(*BasicLinear.operands(ctx, input_))
        x, w = BasicLinear.quantized_operands(ctx, input_)
        return F.linear(*tiled(x.widened(), w.widened())).to(ctx.dtype or x.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor | QuantizedTensor) -> OpGrads:
        """``dx = dy @ weight``, ``dweight = dy.T @ x``, in the compute dtype.

        Autograd casts them at the end.
        """
        if ctx.quantizers:
            return quantized_backward(ctx, grad_output, (self.out_features or 0,))
        x, w = BasicLinear.saved_operands(ctx)
        dy: Any = grad_output if ctx.dtype is None else grad_output.to(ctx.dtype)  # type: ignore[union-attr]
        if x is not None and ctx.grad_sum is not None:
            grad = BasicLinear.added_grad(ctx, rows_of(dy), rows_of(x))
            if grad is not None:
                return None if w is None else dy @ w, (grad,)
        if dy.ndim == 2:  # the same in fewer steps
            return None if w is None else dy.mm(w), (None if x is None else dy.t().mm(x),)
        dx = None if w is None else dy @ w
        return dx, (None if x is None else rows_of(dy).t().mm(rows_of(x)),)

    @staticmethod
    def added_grad(
        ctx: OperationContext, dy: Tensor, x: Tensor, scale: float = 1.0
    ) -> Tensor | None:
        """Add ``scale * dy.T @ x`` to ``ctx.grad_sum`` by the product; for fusions too.

        Args:
            ctx: The context of the backward.
            dy: The gradient of the output, a matrix in the dtype of ``x``.
            x: The input, a matrix.
            scale: A factor.

        Returns:
            The gradient to give for the weight; None: nothing was added, as there is no sum, or
            the product can add nothing to it.
        """
        if ctx.grad_sum is None or not scale or dy.dtype is not x.dtype:
            return None

        def product(total: Tensor, beta: float) -> bool:
            if adds := adds_itself(total, x):
                add_product(total, dy.t(), x, beta=beta, alpha=scale)
            return adds

        sums = ctx.grad_sum.add(product)
        return None if sums is None else sums[0]

    def grad_sum(self, params: Sequence[Tensor | None]) -> MainGrads | None:
        """The ``main_grad`` of the weight."""
        if overridden(self, BasicLinear, "op_backward", "accumulate_grads"):
            return None  # it may change the gradient
        return MainGrads(self, params[:1])

    def accumulate_grads(
        self, params: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Add the weight's gradient to its ``main_grad``.

        Returns zeros if hooks must run on ``.grad``, and None otherwise.
        """
        return (accumulate_main_grad(self, params[0], grads[0]),)


def draw(param: Tensor | None, in_features: int | None) -> None:
    """Draw a weight, a part of one, or a bias of one dimension, as ``torch.nn.Linear`` does.

    Nothing is drawn on the meta device.
    """
    if param is None or param.is_meta or not param.numel():
        return
    if param.ndim > 1 and param.shape[-1] == in_features:
        nn.init.kaiming_uniform_(param, a=math.sqrt(5))
    else:
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        nn.init.uniform_(param, -bound, bound)


def _can_be_saved(weight: Tensor) -> bool:
    """Return whether a weight is a Parameter, whose version shows changes by an optimizer.

    A weight that is computed, sharded, of another class or made in inference mode is not. This is
    checked at every call, since FSDP2 and ``torch.func.functional_call`` replace weights.
    """
    if type(weight) is not nn.Parameter:
        return False
    return is_dynamo_compiling() or not weight.is_inference()  # which Dynamo cannot trace


def kept_weights(
    ctx: OperationContext, weights: Sequence[Tensor], casts: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The weights that a linear saves: each as it is if ``ctx.saves_params``, or its cast."""
    if not ctx.saves_params:
        return casts
    pairs = zip(weights, casts, strict=True)
    return [weight if _can_be_saved(weight) else cast for weight, cast in pairs]
