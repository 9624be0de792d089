"""The passes of a norm, on the contexts of its op. Importing this imports no Triton."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment
from opfuse.ops import L2Normalization, LayerNorm, RMSNorm

from ..machine import why_no_kernel
from . import L2, LAYER, RMS, Norm
from .drop import Drop

_KINDS = {RMSNorm: RMS, LayerNorm: LAYER, L2Normalization: L2}
_PLACES = ("input", "weight", "mean", "rstd")


class NormPasses:
    """What a norm's op does in the passes, by kernels where they run, or by their twins.

    It reads and leaves on a context what the op does.

    Args:
        op: An RMSNorm, LayerNorm or L2Normalization.

    Attributes:
        kind: The norm, as the kernels call it.
        shape: The last dimensions, which are normalized together; of L2Normalization ``(0,)``.
        has_kernels: Whether :meth:`plan` found that kernels run.
    """

    def __init__(self, op: Any) -> None:
        self._op = op
        self.kind = next(kind for cls, kind in _KINDS.items() if isinstance(op, cls))
        self.shape: tuple[int, ...] = getattr(op, "normalized_shape", (0,))
        self.has_kernels = False
        self._saved = [_PLACES.index(name) for name in op.saved_names]
        # behind what was saved comes None, for what is not
        names = op.saved_names
        self._known = [names.index(n) if n in names else len(names) for n in _PLACES]

    def plan(self, env: Environment, **configurations: Mapping[str, Any] | None) -> str:
        """Choose between kernels and twins for an environment.

        Args:
            env: The environment.
            **configurations: The configuration of ``forward`` or ``backward``; None or absent: the
                first for each call.

        Returns:
            Why no kernel can run, as a sentence, or ``""``.
        """
        said = why_no_kernel(env.device, env.capability)
        self.has_kernels = not said
        run: Any
        if said:
            from . import twins as run
        else:
            from . import library as run
        self._forward, self._backward, self._again = run.forward, run.backward, run.again
        for name, configuration in configurations.items():
            if configuration is not None and not said:
                from ..configs import Config

                call = functools.partial(getattr(run, name), config=Config(**configuration))
                setattr(self, f"_{name}", call)
        return said

    def fits(self, ctx: Any, x: Tensor) -> bool:
        """Return whether input and parameters have the op's shape; it says what is wrong."""
        dims = len(self.shape)
        if dims > 1 and x.shape[-dims:] != self.shape:
            return False
        for param in ctx.params:
            if param.shape != self.shape:
                return False
        return True

    def forward(
        self,
        ctx: Any,
        x: Tensor,
        extra: Tensor | None = None,
        into: Tensor | None = None,
        keep: bool = False,
        drop: Drop | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x``, or of ``x + extra``; see :func:`opfuse_triton.norms.twins.forward`.

        Args:
            ctx: The context of the op.
            x: The input, which :meth:`fits`.
            extra: As there.
            into: As there.
            keep: Return the sum, even if no backward needs it.
            drop: As there.

        Returns:
            The output, and what was normalized: ``x``, or the sum if it was kept.
        """
        weight, bias = (*ctx.params, None, None)[:2]
        needs_x = ctx.requires_grad and ctx.input_requires_grad
        save = needs_x or (ctx.requires_grad and any(ctx.param_requires_grad[:1]))
        zero_centered = getattr(self._op, "zero_centered_gamma", False)
        norm = Norm(self.kind, len(self.shape), zero_centered)
        call = x, extra, weight, bias, self._op.eps, norm, ctx.dtype, keep or save, save
        y, total, mean, rstd = self._forward(*call, into=into, drop=drop)
        x = x if extra is None else total
        if ctx.requires_grad:
            saved = (x, weight if needs_x else None, mean, rstd) if save else (None,) * 4
            kept = []
            for i in self._saved:
                kept.append(saved[i])
            ctx.to_save = tuple(kept)
            if self.kind != L2:
                ctx.zero_centered_gamma = zero_centered
        return y, x

    def saved(self, ctx: Any) -> Sequence[Any]:
        """What a forward has saved: the input, the weight, the mean and ``rstd``, or None."""
        return self._placed(ctx.saved_tensors)

    def _placed(self, saved: Sequence[Any]) -> list[Any]:
        saved = *saved, None
        return [saved[i] for i in self._known]

    def backward(
        self, ctx: Any, dy: Tensor, extra: Tensor | None = None, owns: bool = False
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The gradients of the input, and of the parameters.

        Args:
            ctx: The context of the op, whose input was saved.
            dy: The gradient of the output.
            extra: Another gradient of the input, which is added.
            owns: Whether the gradient of the input may overwrite ``dy``.
        """
        of_params = ctx.param_requires_grad
        needs = (ctx.input_requires_grad, *of_params, False, False)[:3]
        known, (i, j, k, n) = (*ctx.saved_tensors, None), self._known
        saved = known[i], known[j], known[k], known[n]
        zero_centered = getattr(ctx, "zero_centered_gamma", False)
        norm = Norm(self.kind, len(self.shape), zero_centered)
        call = *saved, extra if needs[0] else None, norm, needs
        dx, *grads = self._backward(dy, *call, owns=owns)
        return dx, tuple(grads[: len(of_params)])

    def again(self, ctx: Any, saved: Sequence[Any], params: Sequence[Tensor | None]) -> Tensor:
        """The output once more.

        Args:
            ctx: The context of the op in the backward.
            saved: What its forward has saved, the input among it.
            params: Its weight and its bias as they were; None: there is none.
        """
        x, _, mean, rstd = self._placed(saved)
        zero_centered = getattr(ctx, "zero_centered_gamma", False)
        norm = Norm(self.kind, len(self.shape), zero_centered)
        return self._again(x, *params, mean, rstd, norm, ctx.dtype)
