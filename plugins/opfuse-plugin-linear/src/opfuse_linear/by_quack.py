"""Products with an activation by quack-kernels, for those who have it: on Hopper and Blackwell.

Nothing uses them before ``opfuse tune`` has measured them on your GPU. The calls are those of
quack-kernels 0.6.4. It does not tune its products here, which takes minutes.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses, has_same_math
from opfuse.ops import GELU, Activation, BasicLinear, ReLU, SReLU

from . import kernels

CONFIGURATION = {"library": "quack"}
"""What ``opfuse tune`` measures beside the configurations of the Triton product."""


def is_installed() -> bool:
    """Whether the package is there; it is imported with its first product."""
    return importlib.util.find_spec("quack") is not None


def name_of(act: Any) -> str:
    """The name that quack has for an activation; ``""``: it has none."""
    if has_same_math(act, GELU) and act.approximate == "tanh":
        return "gelu_tanh_approx"
    names = {ReLU: "relu", SReLU: "relu_sq"}
    return next((name for cls, name in names.items() if has_same_math(act, cls)), "")


def why_not(act: Any, env: Environment) -> str:
    """Why quack does not multiply here, as a sentence; ``""``: it does."""
    if torch.version.hip or env.capability is None or env.capability < (9, 0):
        return "quack's products need a Hopper or Blackwell GPU"
    if env.dtype not in kernels.HALF or env.recipe is not None or env.compiling:
        return "quack's products take plain tensors of half precision, in eager mode"
    if not name_of(act) or act.cache_quantized_input:
        return f"quack's products do not take this {type(act).__name__}"
    return "" if is_installed() else "quack-kernels is not installed"


class Product:
    """The product in the place of linear [+ bias] + activation, see :class:`.gemm.Product`."""

    def __init__(self, act: Any) -> None:
        from quack.gemm_interface import gemm_act

        self._act = act
        self._run = functools.partial(gemm_act, activation=name_of(act), tuned=False)

    def __call__(
        self, ctx: OperationContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """The activation of the product, or None for tensors that quack does not take."""
        from .gemm import takes

        if not takes(x, weight, bias):
            return None
        keep = ctx.requires_grad and ctx.input_requires_grad and not self._act.saves_output
        rows = x.reshape(-1, x.shape[-1])
        hidden, y = self._run(rows, weight.t(), bias=bias, store_preact=keep)
        y = y.view(*x.shape[:-1], weight.shape[0])
        if ctx.requires_grad:
            self._act.operand(ctx, hidden.view(y.shape) if keep else y)
        return y


class BackwardActivationLinear(FusedOperation):
    """The backward of activation + linear: one product gives the gradient before the activation."""

    grad_input = "fresh"

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        from quack.gemm_interface import gemm_dact

        self._run = functools.partial(gemm_dact, activation=name_of(self.basic_ops[0]), tuned=False)

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        from .gemm import are_aligned

        x, weight = BasicLinear.saved_operands(basic_op_ctxs[1])
        hidden = Activation.saved_input(basic_op_ctxs[0])
        if hidden is None or not are_aligned(grad_output, weight, hidden):
            extras = basic_op_grad_extra_outputs
            return self.run_separately_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=extras
            )
        rows, before = (t.reshape(-1, t.shape[-1]) for t in (grad_output, hidden))
        dx, _ = self._run(rows, weight, before)
        _, of_weight = kernels.linear_grads(grad_output, x, None, ctx=basic_op_ctxs[1])
        return dx.view(hidden.shape), ((), (of_weight,)), ((), ())


def pays(ops: Any, env: Environment) -> bool | str:
    """Whether ``opfuse tune`` found the backward of activation + linear faster by quack."""
    unmeasured = "" if env.measured else "opfuse tune has not measured it on this GPU"
    return why_not(ops[0], env) or unmeasured or True


def backward_fusions() -> list[Fusion]:
    """Those of who has the package."""
    pattern, name = (Subclasses(Activation), BasicLinear), "activation+linear by quack"
    found = Fusion(pattern, BackwardActivationLinear, pays, name=name)
    return [found] if is_installed() else []
