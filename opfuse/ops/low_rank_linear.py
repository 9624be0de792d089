"""A linear layer with a low-rank adapter: LowRankLinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.fusible import ParamSource
from ..core.op_context import OperationContext, Unread
from ._autocast import cast_weights
from ._common import OpGrads, RowwiseOperation, check_size, require, rows_of, shows
from ._products import tiled
from ._reading import reader, tensor_of
from .basic_linear import draw, kept_weights


class LowRankLinear(RowwiseOperation):
    """``y = x W^T + scaling * dropout(x) A^T B^T``: a linear layer with one LoRA adapter.

    See LoRA (Hu et al. 2021). Maps ``(..., in_features)`` to ``(..., out_features)``, in the
    compute dtype. ``weight`` is ``(out_features, in_features)``, ``lora_a`` ``(rank, in_features)``
    and ``lora_b`` ``(out_features, rank)``, which starts at 0. Put ``Bias`` behind it for a bias.
    No recipe quantizes it.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        rank: Of the adapter.
        scaling: The factor of the adapter: in PEFT ``lora_alpha / rank``.
        dropout: Probability of a zero in the adapter's input, in training.
        device: Device of the parameters; default: torch's.
        dtype: Their dtype; default: torch's.

    Raises:
        TypeError: A size is not a whole number, or another number not real.
        ValueError: A size is negative, the rank 0, or the probability not between 0 and 1.
    """

    params_in_compute_dtype = True
    casts_input = True
    takes_params = ("weight", "lora_a", "lora_b")
    unquantized = "not quantized: no recipe quantizes a linear with a LoRA adapter as one op"
    saved_names = ("input", "mask", "low", "weight", "lora_a", "lora_b")
    context_names = ("scaling", "dropout")
    real_numbers = ("scaling", "dropout")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        scaling: float = 1.0,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_size(self, "in_features", in_features)
        self.out_features = check_size(self, "out_features", out_features)
        self.rank = check_size(self, "rank", rank)
        require(self, self.rank > 0, "a rank of at least 1", self.rank)
        self.scaling, self.dropout = scaling, dropout
        require(self, 0 <= self.dropout <= 1, "a probability dropout between 0 and 1", dropout)
        shapes = {
            "weight": (self.out_features, self.in_features),
            "lora_a": (self.rank, self.in_features),
            "lora_b": (self.out_features, self.rank),
        }
        for name, shape in shapes.items():
            given = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(given))
        self.reset_parameters()

    extra_repr = shows("in_features", "out_features", "rank", "scaling", "dropout")

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        return [op(cls, features, out_features or features + features // 2, 2, scaling=0.5)]

    def reset_parameters(self) -> None:
        """Draw weight and ``lora_a`` again, and zero ``lora_b``; not those of another module."""
        if not self._sources:
            for param in (self.weight, self.lora_a):
                draw(param, self.in_features)
            nn.init.zeros_(self.lora_b)

    @classmethod
    def reading(
        cls,
        base: nn.Module,
        lora_a: nn.Module,
        lora_b: nn.Module,
        *,
        scaling: float = 1.0,
        dropout: float = 0.0,
        name: str = "",
    ) -> LowRankLinear:
        """Return an op that reads each ``weight`` from a module at every call.

        See :meth:`BasicLinear.reading`; of a bias that the base has, :meth:`Bias.reading`.

        Args:
            base: The module with the weight of the linear layer.
            lora_a: That with ``lora_a``.
            lora_b: That with ``lora_b``.
            scaling: As for the class.
            dropout: As for the class.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`.
            ValueError: A weight is not a matrix, or they do not fit each other.
        """
        sources = {"weight": base, "lora_a": lora_a, "lora_b": lora_b}
        weight, a, b = [tensor_of(cls, m, "weight", dims=2).shape for m in sources.values()]
        (outputs, inputs), rank = weight, a[0]
        if (a, b) != ((rank, inputs), (outputs, rank)):
            what = f"matrices of ({rank}, {inputs}) and ({outputs}, {rank}) beside a weight"
            got = f"{tuple(a)} and {tuple(b)}"
            raise ValueError(
                f"{cls.__name__}.reading expected {what} of {tuple(weight)}, got {got}"
            )
        op = cls(inputs, outputs, rank, scaling=scaling, dropout=dropout, device="meta")
        read = {key: ParamSource(module, "weight") for key, module in sources.items()}
        return reader(op, read, name)

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of products, where nothing is drawn."""
        return () if self.training and self.dropout else ("rows",)

    # The arithmetic, for fusions too

    def operands(
        self, ctx: Any, input_: Tensor, *, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input, weight, ``scaling * dropout(x) A^T`` and ``lora_b``, in ``ctx.dtype``.

        Args:
            ctx: The context of the forward.
            input_: The input.
            keep: Whether to leave on ``ctx`` what a backward needs.
        """
        dtype = ctx.dtype or input_.dtype
        x, mask = input_.to(dtype), None
        casts = [p.to(dtype) for p in ctx.params] if ctx.dtype is None else None
        weight, a, b = casts or cast_weights(ctx, ctx.params)
        x, weight, a = tiled(x, weight, a)
        dropped = x
        if self.training and self.dropout:
            dropped, mask = torch.native_dropout(x, self.dropout, True)
        low = F.linear(dropped, a) * self.scaling
        if keep:
            ctx.scaling, ctx.dropout = self.scaling, self.dropout
            kept = kept_weights(ctx, ctx.params, (weight, a, b))
            ctx.save_for_backward(x, mask, low, *kept)
        return x, weight, low, b

    def op_forward(self, ctx: OperationContext, input_: Tensor,
                   prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The sum of both products."""
        return self.value(ctx, input_)

    def value(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The output; leaves on ``ctx`` what the backward needs."""
        x, weight, low, b = self.operands(ctx, input_, keep=ctx.requires_grad)
        return F.linear(x, weight) + F.linear(*tiled(low, b))

    def again(self, ctx: Any, x: Tensor) -> Tensor:
        """The output once more, from the input as a matrix and what the forward left."""
        _, _, low, weight, _, b = ctx.saved_tensors
        return F.linear(x, weight.to(x.dtype)) + F.linear(rows_of(low), b.to(x.dtype))

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """``dx = dy W + dlow A``, ``dA = dlow^T x``, ``dB = dy^T low``; ``dlow = scaling dy B``."""
        x, dtype = ctx.saved_tensors[0], ctx.dtype or grad_output.dtype
        dx, left = self.input_grad(ctx, rows_of(grad_output.to(dtype)))
        grads = self.param_grads(ctx, left, None if x is None else rows_of(x))
        return None if dx is None else dx.view(*grad_output.shape[:-1], dx.shape[1]), grads

    def takes_input(self, ctx: Any) -> bool:
        """Return whether the gradient of a parameter takes the input."""
        return any(ctx.param_requires_grad[:2])

    def input_grad(self, ctx: Any, dy: Tensor) -> tuple[Tensor | None, Any]:
        """The gradient of the input, if it is needed, and what :meth:`param_grads` takes.

        Args:
            ctx: The context of the backward.
            dy: The gradient of the output, a matrix in the compute dtype.
        """
        _, mask, low, *params = ctx.saved_tensors
        weight, a, b = [param.to(dy.dtype) for param in params]
        dlow, dx = dy @ b * ctx.scaling, None
        if ctx.input_requires_grad:
            dx = torch.addmm(self.dropped(dlow @ a, mask, ctx.dropout), dy, weight)
        return dx, (dy, dlow, mask, low)

    def param_grads(self, ctx: Any, left: Any, x: Any) -> Sequence[Tensor | None]:
        """The gradients of the parameters that need one.

        Args:
            ctx: The context of the backward.
            left: What :meth:`input_grad` left.
            x: The input, a matrix; None: no gradient takes it.
        """
        (dy, dlow, mask, low), (of_weight, of_a, of_b) = left, ctx.param_requires_grad
        da = dlow.t() @ self.dropped(x, mask, ctx.dropout) if of_a else None
        return dy.t() @ x if of_weight else None, da, dy.t() @ rows_of(low) if of_b else None

    @staticmethod
    def dropped(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
        """A matrix after a dropout of a known mask, or a gradient before it; None: all stays."""
        if mask is None:
            return x
        keep = 1 / (1 - p) if p < 1 else 0.0
        return torch.ops.aten.native_dropout_backward.default(x, rows_of(mask), keep)  # type: ignore[no-any-return]
