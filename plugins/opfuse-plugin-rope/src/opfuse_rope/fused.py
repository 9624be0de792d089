"""The fused ops, and their patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import Predicted, why_no_kernel
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf, OperationContext, Optional
from opfuse.ops import ApplyRoPE, L2Normalization, RMSNorm, RoPE, SwapExtraInput
from opfuse.ops.authoring import is_captured, may_write

from . import layouts
from .layouts import Angles, Heads

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]


class _Side:
    """The ops of one tensor, by their places in the pattern: a rotation, and maybe a norm."""

    def __init__(self, ops: Sequence[Any], rope: int, norm: int | None) -> None:
        self.rope, self.norm = rope, norm
        self.op, self.norm_op = ops[rope], None if norm is None else ops[norm]
        self.kind = None
        if norm is not None:
            self.kind = "rms" if isinstance(self.norm_op, RMSNorm) else "l2"

    def heads(self, ctxs: Ctxs, x: Tensor) -> Heads | None:
        """What a forward computes; None: the ops do that, or say what is wrong."""
        weight, dtype = None, x.dtype
        saves = zero_centered = False
        eps = 0.0
        if self.norm is not None:
            ctx = ctxs[self.norm]
            weight, dtype = (*ctx.params, None)[0], ctx.dtype or dtype
            of_x = ctx.requires_grad and ctx.input_requires_grad
            saves = of_x or (ctx.requires_grad and any(ctx.param_requires_grad[:1]))
            eps = self.norm_op.eps
            zero_centered = getattr(self.norm_op, "zero_centered_gamma", False)
        if x.shape[-1:] != (self.op.head_dim,) or dtype not in layouts.DTYPES:
            return None
        if weight is not None and weight.shape != x.shape[-1:]:
            return None
        if not layouts.takes(x, weight):
            return None
        return Heads(x, dtype, self.kind, weight, zero_centered, eps, saves)

    def save(
        self, ctxs: Ctxs, extras: Extras, heads: Heads, rotation: Any, rstd: Tensor | None
    ) -> None:
        """Leave on the contexts what the ops leave."""
        ctx: Any = ctxs[self.rope]
        if ctx.requires_grad:
            given = tuple(extras[self.rope])
            ctx.rotation = rotation
            ctx.to_save = given if ctx.input_requires_grad else (None,) * len(given)
        if self.norm is None or not ctxs[self.norm].requires_grad:
            return
        norm: Any = ctxs[self.norm]
        x = heads.x if heads.saves else None
        if self.kind == "rms":
            weight = heads.weight if norm.input_requires_grad else None
            norm.to_save = x, weight, rstd
            norm.zero_centered_gamma = heads.zero_centered
        else:
            norm.to_save = x, rstd

    def saved(self, ctxs: Ctxs, dy: Tensor, owns: bool) -> Heads | None:
        """What a backward computes; None: the ops do that."""
        into = dy if owns else None
        if self.norm is None:
            return Heads(dy, dy.dtype, into=into) if layouts.takes(dy) else None
        ctx: Any = ctxs[self.norm]
        x, *weight, rstd = ctx.saved_tensors
        if x is None or not layouts.takes(x, dy, rstd, *weight):
            return None
        into = into if dy.dtype is x.dtype else None
        needs = ctx.input_requires_grad, any(ctx.param_requires_grad[:1])
        zero_centered = getattr(ctx, "zero_centered_gamma", False)
        what = self.kind, (*weight, None)[0], zero_centered
        return Heads(x, x.dtype, *what, rstd=rstd, into=into, needs=needs)


class _Fused(FusedOperation):
    """The base of both passes: it has the sides, the first in the chain first."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        ropes = [i for i, op in enumerate(basic_ops) if isinstance(op, (RoPE, ApplyRoPE))]
        norms = [i - 1 if i and isinstance(basic_ops[i - 1], _NORMS) else None for i in ropes]
        pairs = zip(ropes, norms, strict=True)
        self._sides = tuple([_Side(basic_ops, rope, norm) for rope, norm in pairs])
        self._swap = ropes[0] + 1 if len(ropes) > 1 else None
        self._nothing = ((),) * len(basic_ops)
        self._no_extras: list[Any] = [(None,) * op.num_extra_inputs for op in basic_ops]
        self._frequencies: dict[Any, Tensor] = {}

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._config = env.configuration
        self.fallback = why_no_kernel(env.device, env.capability)
        if self.fallback:
            from . import twins as run
        else:
            from . import kernels as run  # type: ignore[no-redef]
        self._run = run

    def _frequencies_of(self, rotation: Any, device: torch.device) -> Tensor:
        key = rotation, device
        found = self._frequencies.get(key)
        if found is None:
            found = layouts.frequencies_of(rotation, device)
            # one that a CUDA graph makes has its numbers only once it is replayed
            if not is_captured(device):
                self._frequencies[key] = found
        return found


class ForwardRoPE(_Fused):
    """[Norm +] rotation, of one tensor or of two that are swapped, in one kernel."""

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **given: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        extras = basic_op_extra_inputs
        tensors: list[Any] = [input_]
        if self._swap is not None:
            tensors.append(extras[self._swap][0])
        found = self._call(basic_op_ctxs, tensors, extras)
        if found is None:
            return self.run_separately(basic_op_ctxs, input_, basic_op_extra_inputs=extras, **given)
        heads, rotations, calls = found
        made: list[Any] = []
        for call in calls:
            made += self._run.forward(*call, config=self._config)
        for side, *one, (_, rstd) in zip(self._sides, heads, rotations, made, strict=True):
            side.save(basic_op_ctxs, extras, *one, rstd)
        if self._swap is None:
            return made[0][0], self._nothing
        ctx: Any = basic_op_ctxs[self._swap]
        (first, _), (y, _) = made
        if ctx.requires_grad:
            ctx.like = first.shape, first.dtype, first.device
        outputs: list[Any] = list(self._nothing)
        outputs[self._swap] = (first,)
        return y, outputs

    def _call(self, ctxs: Ctxs, tensors: Sequence[Tensor], extras: Extras) -> Any:
        """The heads and rotation of each side, and the calls that compute them; None: the ops."""
        heads, rotations, angles = [], [], []
        for side, x in zip(self._sides, tensors, strict=True):
            one, given = side.heads(ctxs, x), extras[side.rope]
            if one is None:
                return None
            if ctxs[side.rope].requires_grad:
                for tensor in given:
                    if tensor is not None and tensor.requires_grad:
                        return None
            rotation, lead = side.op.rotation, x.shape[:-2]
            found = layouts.angles_of(side.op, rotation, given, lead, self._frequencies_of)
            if found is None:
                return None
            heads.append(one)
            rotations.append(rotation)
            angles.append(found)
        return heads, rotations, _together(heads, angles)


class BackwardRoPE(_Fused):
    """The backward of the same: rotated back, and through the norms, in one kernel."""

    grad_input = "fresh"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        grads: list[Any] = [grad_output]
        owns = [bool(basic_op_ctxs[-1].owns_grad_output)]
        if self._swap is not None:
            grads.insert(0, basic_op_grad_extra_outputs[self._swap][0])
            owns.insert(0, False)
        found = self._call(basic_op_ctxs, grads, owns)
        if found is None:
            return self.run_separately_backward(
                *(basic_op_ctxs, grad_output),
                basic_op_grad_extra_outputs=basic_op_grad_extra_outputs,
            )
        of_params = list(self._nothing)
        of_extras = list(self._no_extras)
        dxs = []
        for side, (dx, dw) in zip(self._sides, found, strict=True):
            dxs.append(dx)
            if side.norm is not None:
                count = len(basic_op_ctxs[side.norm].param_requires_grad)
                of_params[side.norm] = (dw,)[:count]
        if self._swap is not None:
            of_extras[self._swap] = (dxs[1],)
        return dxs[0], of_params, of_extras

    def _call(self, ctxs: Ctxs, grads: Sequence[Tensor | None], owns: Sequence[bool]) -> Any:
        """The gradients of each side, and of its weight; None: the ops compute them."""
        heads, angles, given = [], [], []
        for side, dy, owned in zip(self._sides, grads, owns, strict=True):
            ctx: Any = ctxs[side.rope]
            saved = ctx.saved_tensors
            if dy is None or saved[0] is None:
                return None
            whole = dy.contiguous()
            one = side.saved(ctxs, whole, owned or (whole is not dy and may_write(whole)))
            if one is None:
                return None
            given_angles = ctx.rotation, saved, whole.shape[:-2], self._frequencies_of
            found = layouts.angles_of(side.op, *given_angles)
            if found is None:
                return None
            heads.append(one)
            angles.append(found)
            given.append(whole)
        made: list[Any] = []
        for some, of in _together(heads, angles):
            if some[0].norm or some[-1].norm:
                dys = given[len(made) : len(made) + len(some)]
                made += self._run.norm_backward(some, dys, of)
            else:
                made += self._run.forward(some, of, True)
        return made


def _together(heads: list[Heads], angles: list[Angles]) -> list[tuple[list[Heads], Angles]]:
    """Both sides in one call if their angles are the same, or else one by one."""
    if len(heads) == 1:
        return [(heads, angles[0])]
    x, other = heads[0].x, heads[1].x
    tokens = x.shape[:-2].numel(), other.shape[:-2].numel()
    alike = tokens[0] == tokens[1] and x.shape[-1] == other.shape[-1] and x.device == other.device
    if alike and _same(*angles):
        return [(heads, angles[0])]
    return [([one], of) for one, of in zip(heads, angles, strict=True)]


def _same(one: Angles, other: Angles) -> bool:
    """Return whether two sides turn by the same angles, out of the same memory."""
    if one.frequencies is not other.frequencies or one[3:] != other[3:]:
        return False
    for a, b in zip(one[:2], other[:2], strict=True):
        if a.data_ptr() != b.data_ptr() or a.dtype is not b.dtype:
            return False
        if a.shape != b.shape or a.stride() != b.stride():
            return False
    return True


def _why_not(ops: Sequence[Any], env: Environment) -> str:
    """Why the fused op does not take this, as a sentence; empty: it does."""
    if env.dtype not in layouts.DTYPES:
        said = str(env.dtype).removeprefix("torch.")
        return f"its kernels compute in fp32, and the ops in {said}"
    for op in ops:
        if isinstance(op, RMSNorm) and len(op.normalized_shape) != 1:
            return "its kernels normalize heads, and this norm several dimensions together"
        if isinstance(op, (RoPE, ApplyRoPE)):
            if op.head_dim > layouts.MOST_FEATURES:
                most = f"its kernels take heads of up to {layouts.MOST_FEATURES} features"
                return f"{most}, and these have {op.head_dim}"
            if not op.rotary_dim:
                return "nothing is rotated"
    if env.compiling:
        return "torch.compile fuses a rotation with what is around it"
    if env.options.get("rope.twins"):
        return ""
    return why_no_kernel(env.device, env.capability)


PREDICTED = Predicted(
    "rope",
    {
        "rope": (
            6.88,
            [
                "RoPE of queries and keys",
                "RoPE",
                "interleaved RoPE of queries and keys",
                "RoPE of half of queries and keys",
            ],
        ),
        "norm+rope": (20.4, ["RMSNorm + RoPE of queries and keys"]),
        "rope backward": (11.6, ["RoPE of queries and keys, backward"]),
        "norm+rope backward": (
            18.4,
            ["RMSNorm + RoPE of queries and keys, backward", "L2Normalization + RoPE, backward"],
        ),
    },
)
"""The speed of each fusion by the model."""


def _forward_runs(ops: Sequence[Any], env: Environment, passes: str = "") -> bool | str:
    name = "norm+rope" if any(isinstance(op, _NORMS) for op in ops) else "rope"
    return _why_not(ops, env) or PREDICTED.why_not(f"{name}{passes}", env) or True


def _backward_runs(ops: Sequence[Any], env: Environment) -> bool | str:
    return _forward_runs(ops, env, " backward")


_NORMS = RMSNorm, L2Normalization
_ROPE, _NORM = OneOf(RoPE, ApplyRoPE), Optional(OneOf(*_NORMS))
_ONE, _TWO = (_NORM, _ROPE), (_NORM, _ROPE, SwapExtraInput, _NORM, _ROPE)


def _fusions(fused: Any, when: Any) -> list[Fusion]:
    return [
        Fusion(_TWO, fused, when, benefit=_passes, name="rope of queries and keys"),
        Fusion(_ONE, fused, when, benefit=_passes, name="rope"),
    ]


def _passes(ops: Sequence[Any], env: Environment) -> float:
    """Additional passes over memory of the separate ops: a rotation takes 12, a norm fewer."""
    return 12.0 * sum(not isinstance(op, SwapExtraInput) for op in ops)


FORWARD = _fusions(ForwardRoPE, _forward_runs)
BACKWARD = _fusions(BackwardRoPE, _backward_runs)
