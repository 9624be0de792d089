"""The fused op, its twin in PyTorch, and the condition for using it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opfuse import Environment, FusedOperation, Fusion, Subclasses
from opfuse.ops import Activation, Bias
from opfuse.ops.authoring import wide
from opfuse_triton import why_no_kernel
from torch import Tensor


class BiasActivationGrad(FusedOperation):
    """The gradients of bias + activation: one pass writes one and sums it for the other."""

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._kernels: Any = None
        self._functions: Any = None

    def planned(self, env: Environment) -> None:
        """Find the kernel, or say for reports why there is none."""
        self.fallback = why_no_kernel(env.device, env.capability)
        if not self.fallback:
            from . import kernels  # now that the fusion is used: this imports Triton

            self._kernels, self._functions = kernels, kernels.functions_for(self.basic_ops[1])
            if self._functions is None:
                self.fallback = f"the kernel does not compute {type(self.basic_ops[1]).__name__}"

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """The gradients of the input and of the bias, from what the activation left."""
        bias_ctx, ctx = basic_op_ctxs
        activation: Any = self.basic_ops[1]
        x = activation.saved_input(ctx)
        if x is None:  # nobody needs a gradient here
            return None, [(None,), ()], [(), ()]
        dy = grad_output.to(x.dtype)
        numbers = getattr(ctx, "numbers", ())  # of the forward: the op's may have changed
        needs = bias_ctx.input_requires_grad, bias_ctx.param_requires_grad[0]
        functions = self._functions
        if functions is not None and self._kernels.takes(x, dy, dy.dtype):
            values = functions.numbers(numbers)
            dx, dbias = self._kernels.bias_activation_grad(dy, x, functions, values, *needs)
        else:
            dx, dbias = twin(dy, x, activation.with_numbers(numbers), *needs)
        return dx, [(dbias,), ()], [(), ()]


def twin(
    dy: Tensor, x: Tensor, activation: Any, needs_dx: bool, needs_dbias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of the input and, of the dtypes that sums have, that of the bias, by PyTorch."""
    dx = activation.backward_value(dy, x)
    dbias = None
    if needs_dbias:
        dbias = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=wide(dx.dtype))
    return dx if needs_dx else None, dbias


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    if env.compiling:
        return "torch.compile fuses the gradients of a bias and an activation by itself"
    return True


BACKWARD = [
    Fusion((Bias, Subclasses(Activation)), BiasActivationGrad, pays, name="bias+activation")
]
