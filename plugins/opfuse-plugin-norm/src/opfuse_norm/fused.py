"""The fused ops, and their patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opfuse_triton import Predicted, why_no_kernel
from opfuse_triton import norms as kernels
from opfuse_triton.norms.drop import Drop, dropout
from opfuse_triton.norms.passes import NormPasses
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf, OperationContext, Optional
from opfuse.ops import AddExtraInput, L2Normalization, LayerNorm, MakeExtraOutput, RMSNorm
from opfuse.ops.authoring import may_write

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]


class _Fused(FusedOperation):
    """The base of forward and backward: it has the norm, and what computes it."""

    _pass = ""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in tuples, since looking up a module's attributes is slow
        self._ops, self._nothing = tuple(basic_ops), ((),) * len(basic_ops)
        self._norm = NormPasses(basic_ops[-1])

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self.fallback = self._norm.plan(env, **{self._pass: env.configuration})

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        features = _features(self._ops, env)
        if features is None or env.compiling or self.fallback:
            return ()
        from opfuse_triton.norms import library

        return library.candidates(self._pass, env.device, features, self._norm.kind, env.dtype)


class ForwardNorm(_Fused):
    """[AddExtraInput +] [MakeExtraOutput +] norm: the sum and the norm are written in one pass."""

    _pass = "forward"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._adds = isinstance(basic_ops[0], AddExtraInput)
        self._forks = len(basic_ops) > 1 and isinstance(basic_ops[-2], MakeExtraOutput)

    def fuser_forward(
        self,
        basic_op_ctxs: Ctxs,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        drop: Drop | None = None,
        **given: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`; ``drop``: of the input."""
        ctx = basic_op_ctxs[-1]
        extra = basic_op_extra_inputs[0][0] if self._adds else None
        if not self._takes(ctx, input_, extra):  # the ops say what is wrong
            if drop is not None:
                input_ = dropout(input_, None, drop)
            return self.run_separately(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
            )
        into = None
        if extra is not None:
            if self._ops[0].check_extra(basic_op_ctxs[0], extra, input_.shape):
                into = extra.detach()
        keep = self._forks or into is not None
        y, x = self._norm.forward(ctx, input_, extra, into, keep, drop)
        outputs: tuple[Any, ...] = self._nothing
        if self._forks:
            outputs = (*outputs[:-2], (x.view_as(x),), ())
        return y, outputs

    def _takes(self, ctx: Any, x: Tensor, extra: Tensor | None) -> bool:
        """Return whether all shapes are as they should, and the sum overwrites no other row.

        What the kernels write is contiguous; the ops may give other inputs other strides.
        """
        dense = x.is_contiguous() and (extra is None or extra.is_contiguous())
        if not dense or not self._norm.fits(ctx, x):
            return False
        if extra is None or not getattr(self._ops[0], "in_place", False):
            return True
        if not may_write(extra):
            return False
        apart = extra.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return apart or extra.data_ptr() == x.data_ptr()


class BackwardNorm(_Fused):
    """The backward of [MakeExtraOutput +] norm: the extra gradient is added in the same pass."""

    _pass = "backward"
    grad_input = "fresh"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx = basic_op_ctxs[-1]
        if ctx.saved_tensors[0] is None:  # the gradient of a LayerNorm's bias alone
            return self.run_separately_backward(
                *(basic_op_ctxs, grad_output),
                basic_op_grad_extra_outputs=basic_op_grad_extra_outputs,
            )
        extra = basic_op_grad_extra_outputs[0][0] if len(self._ops) > 1 else None
        dx, grads = self._norm.backward(ctx, grad_output, extra, ctx.owns_grad_output)
        return dx, (*self._nothing[:-1], grads), self._nothing


def _features(ops: Sequence[Any], env: Environment) -> int | None:
    """Return how many numbers are normalized together, where the chain tells."""
    shape = getattr(ops[-1], "normalized_shape", None)
    return env.features if shape is None else math.prod(shape)


def in_which_dtypes(env: Environment) -> str:
    """The sentence that refuses a dtype."""
    return f"its kernels compute in fp32, and the ops in {str(env.dtype).removeprefix('torch.')}"


def why_not(ops: Sequence[Any], env: Environment) -> str:
    """Why the fused op does not take this, as a sentence; empty: it does."""
    if env.dtype not in kernels.DTYPES:
        return in_which_dtypes(env)
    if (features := _features(ops, env)) is not None and features > kernels.MOST_FEATURES:
        return f"its kernels take up to {kernels.MOST_FEATURES} features, and these are {features}"
    if env.options.get("norm.twins"):
        return ""
    return why_no_kernel(env.device, env.capability)


def _runs(name: str) -> Callable[[Sequence[Any], Environment], bool | str]:
    """The condition of a fusion."""

    def when(ops: Sequence[Any], env: Environment) -> bool | str:
        return why_not(ops, env) or PREDICTED.why_not(name, env) or True

    return when


PREDICTED = Predicted(
    "norm",
    {
        "norm": (5.0, ["RMSNorm forward", "LayerNorm forward", "L2Normalization forward"]),
        "add+norm": (3.25, ["add + RMSNorm forward", "add + LayerNorm forward"]),
        "norm backward": (
            4.47,
            ["RMSNorm backward", "LayerNorm backward", "L2Normalization backward"],
        ),
        "norm+add backward": (4.11, ["RMSNorm backward + add", "LayerNorm backward + add"]),
        # the backward of each dropout is the kernel of a dropout alone
        "dropout": (1.25, ["dropout"]),
        "dropout+add": (1.25, ["dropout", "dropout + add"]),
        "dropout+add+norm": (1.25, ["dropout", "dropout + add + RMSNorm"]),
        "norm+modulate": (
            8.2,
            [
                f"{norm} + modulate {which}"
                for norm in ("LayerNorm", "RMSNorm")
                for which in ("forward", "backward")
            ],
        ),
    },
)
"""The speed of each fusion by the model."""

_NORM = OneOf(RMSNorm, LayerNorm, L2Normalization)
_FORWARD, _BACKWARD = 4, 6
"""Additional passes over memory of a norm in PyTorch's operations, in half precision."""

FORWARD = [
    Fusion((_NORM,), ForwardNorm, _runs("norm"), benefit=_FORWARD, name="norm"),
    Fusion(
        (AddExtraInput, Optional(MakeExtraOutput), _NORM),
        ForwardNorm,
        _runs("add+norm"),
        # the sum is not written and read again; a GEMM that adds would copy what it adds to
        benefit=_FORWARD + 3,
        name="add+norm",
    ),
]

BACKWARD = [
    Fusion((_NORM,), BackwardNorm, _runs("norm backward"), benefit=_BACKWARD, name="norm"),
    Fusion(
        (MakeExtraOutput, _NORM),
        BackwardNorm,
        _runs("norm+add backward"),
        benefit=_BACKWARD + 2,
        name="norm+add",
    ),
]
