"""Activations times a scale per row: the base class, and the ops that derive from it.

They are ScaledSwiGLU, ScaledSiTUGLU, ScaledClampedQGeGLU and ScaledSReLU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.introspection import overridden, why_apart
from ..core.op_context import AllGrads, Outputs
from ._common import ExtraTensorOperation, RowwiseOperation, check_bool, expected
from ._samples import BOUNDED, CLAMPED, INTERLEAVED, samples
from .activation import Activation, SiLU, SReLU
from .arithmetic import widen
from .gated import ClampedSwiGLU, GatedActivation, SiTUGLU, SwiGLU


class ScaledActivation(RowwiseOperation, ExtraTensorOperation):
    """``y = activation(x) * scales[..., None]``, as a mixture of experts weights its tokens.

    Takes ``x`` and one extra input ``scales`` of shape ``x.shape[:-1]``; gives what the activation
    gives, in the compute dtype. The backward uses the activation's numbers of the forward.

    Args:
        activation: The activation; it holds the constants.
        activation_recompute_in_mlp: In Transformer Engine, that a fused MLP computes this op's
            output again in the backward instead of keeping it, and that nothing else may run the
            op. Here it is an attribute that fusions may read; by itself it changes neither results
            nor memory. It must be False for a gated activation, as in Transformer Engine.

    Raises:
        TypeError: ``activation`` is no activation, or ``activation_recompute_in_mlp`` no bool.
        ValueError: ``activation_recompute_in_mlp`` with a gated activation; in a call, ``scales``
            of another shape.
        RuntimeError: The activation has hooks, or a ``forward``, ``op_forward`` or ``op_backward``
            of its own, which would not run.
    """

    num_extra_inputs = 1
    saved_names = ("input", "scales")
    context_names = ("scales_requires_grad", "numbers")
    casts_input = True

    def __init__(
        self, activation: Activation, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__()
        check_bool(self, "activation_recompute_in_mlp", activation_recompute_in_mlp)
        if not isinstance(activation, Activation):
            raise TypeError(expected(self, "an Activation", type(activation).__name__))
        if activation_recompute_in_mlp and isinstance(activation, GatedActivation):
            who = f"{type(self).__name__} does not support activation recomputation"
            raise ValueError(f"{who}: activation_recompute_in_mlp=True is for no gated activation")
        if name := overridden(activation, Activation, "op_forward", "op_backward"):
            self._refuse(activation, f"overrides {name}")
        if activation.cache_quantized_input:
            self._refuse(activation, "has cache_quantized_input=True")
        self.activation = activation
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self.feature_ratio = activation.feature_ratio

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        return [op(cls, op(SiLU))]

    def sample_extra_inputs(self, shape: tuple[int, ...], generator: Any) -> list[Any]:
        """A scale per row."""
        return [shape[:-1]]

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of the activation."""
        return self.activation.batch_invariant

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Refuse an activation whose call now does more than its formulas."""
        if why := why_apart(self.activation):
            self._refuse(self.activation, why)
        for name in ("op_forward", "op_backward"):
            if name in vars(self.activation):
                self._refuse(self.activation, f"overrides {name}")

    def _refuse(self, activation: Activation, why: str) -> None:
        who = f"{type(self).__name__} computes by the formulas of its activation"
        raise RuntimeError(f"{who}, and {type(activation).__name__} {why}, which would not run")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation" and name in self._modules:
            who = type(self).__name__
            raise RuntimeError(f"{who}.activation is fixed: make another {who}")
        super().__setattr__(name, value)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The output; saves ``(input, scales)``, the input in ``ctx.dtype``."""
        (ctx,), ((scales,),) = basic_op_ctxs, basic_op_extra_inputs
        if scales.shape != input_.shape[:-1]:
            shape = tuple(input_.shape)
            what = f"scales of shape {shape[:-1]} for an input of shape {shape}"
            raise ValueError(expected(self, what, tuple(scales.shape)))
        x = input_.to(ctx.dtype or input_.dtype)
        if self.keeps_input(ctx, scales):
            ctx.to_save = x, *ctx.to_save[1:]
        y = self.activation.forward_value(widen(x)) * widen(scales).unsqueeze(-1)
        return y.to(x.dtype), [()]

    def keeps_input(self, ctx: Any, scales: Tensor) -> bool:
        """Leave on ``ctx`` what the backward needs; return whether that includes the input.

        The input itself is then the first of ``ctx.to_save``, which is None here. For the op, and
        for fusions of the forward that compute in another way.
        """
        if not ctx.requires_grad:
            return False
        ctx.numbers = self.numbers_of()
        ctx.scales_requires_grad = self.wants_gradient(scales)
        ctx.to_save = None, scales if ctx.input_requires_grad else None
        return bool(ctx.input_requires_grad or ctx.scales_requires_grad)

    def numbers_of(self) -> tuple[tuple[str, Any], ...]:
        """Those of the activation; see :meth:`opfuse.ops.Activation.numbers_of`."""
        return self.activation.numbers_of()

    def wants_gradient(self, scales: Tensor) -> bool:
        """Return whether the gradient of ``scales`` is needed.

        Traced tensors do not tell. A tracer may override the answer.
        """
        return scales.requires_grad or torch.compiler.is_compiling()

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> AllGrads:
        """``dx = act'(x) dy scales``; ``dscales`` is the sum of ``act(x) dy`` over the features."""
        (ctx,) = basic_op_ctxs
        x, scales = ctx.saved_tensors
        activation = self.activation.with_numbers(ctx.numbers)
        dx = dscales = None
        dy = widen(grad_output)
        if x is not None:
            x = widen(x)
        if scales is not None:
            dx = activation.backward_value(dy * widen(scales).unsqueeze(-1), x)
            dx = dx.to(grad_output.dtype)
        if ctx.scales_requires_grad:
            dscales = (activation.forward_value(x) * dy).sum(-1)
            dscales = dscales if scales is None else dscales.to(scales.dtype)
        return dx, [()], [(dscales,)]


class ScaledSwiGLU(ScaledActivation):
    """:class:`SwiGLU` times a scale per row.

    Args:
        glu_interleave_size: As for :class:`SwiGLU`.
        activation_recompute_in_mlp: As for :class:`ScaledActivation`.

    Raises:
        TypeError: ``activation_recompute_in_mlp`` is not a bool.
    """

    sample_inputs = samples({}, INTERLEAVED)

    def __init__(
        self, *, glu_interleave_size: int | None = None, activation_recompute_in_mlp: bool = False
    ) -> None:
        activation = SwiGLU(glu_interleave_size=glu_interleave_size)
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSiTUGLU(ScaledActivation):
    """:class:`SiTUGLU` times a scale per row.

    Args:
        beta1: As for :class:`SiTUGLU`.
        beta2: As for :class:`SiTUGLU`.
        glu_interleave_size: As for :class:`SiTUGLU`.
        activation_recompute_in_mlp: As for :class:`ScaledActivation`.

    Raises:
        ValueError: As for :class:`SiTUGLU`.
        TypeError: ``activation_recompute_in_mlp`` is not a bool.
    """

    sample_inputs = samples({}, INTERLEAVED, BOUNDED)

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        activation = SiTUGLU(beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledClampedQGeGLU(ScaledActivation):
    """:class:`ClampedSwiGLU` times a scale per row.

    Args:
        limit: As for :class:`ClampedSwiGLU`.
        alpha: As for :class:`ClampedSwiGLU`.
        glu_linear_offset: As for :class:`ClampedSwiGLU`.
        glu_interleave_size: As for :class:`ClampedSwiGLU`.
        activation_recompute_in_mlp: As for :class:`ScaledActivation`.

    Raises:
        ValueError: As for :class:`ClampedSwiGLU`.
        TypeError: ``activation_recompute_in_mlp`` is not a bool.
    """

    sample_inputs = samples({}, INTERLEAVED, CLAMPED)

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        activation = ClampedSwiGLU(
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
        )
        super().__init__(activation, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSReLU(ScaledActivation):
    """:class:`SReLU` times a scale per row.

    Args:
        activation_recompute_in_mlp: As for :class:`ScaledActivation`.

    Raises:
        TypeError: ``activation_recompute_in_mlp`` is not a bool.
    """

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(SReLU(), activation_recompute_in_mlp=activation_recompute_in_mlp)
