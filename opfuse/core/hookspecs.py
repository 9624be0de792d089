"""The plugin contract, and nothing else.

A plugin is a distribution with an entry point in group ``opfuse.v1`` that names a module or object
whose functions are marked with :data:`opfuse.hookimpl`. Every hook returns declarations and is
called while planning, never during a forward or backward pass. Adding an argument to a hook is
compatible (an implementation may take fewer); anything else opens group ``opfuse.v2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from .environment import Environment
from .fusion import FusionLike
from .quantization import Quantizer, QuantizerRole, Recipe

GROUP = "opfuse.v1"
"""The entry-point group of this contract."""

hookspec = pluggy.HookspecMarker("opfuse")
hookimpl = pluggy.HookimplMarker("opfuse")


@hookspec
def opfuse_forward_fusions() -> list[FusionLike]:
    """Fusions of the forward pass.

    The fused op implements ``fuser_forward`` and leaves in every context exactly what the basic ops
    would, since their own backward, or another plugin's backward fusion, reads it.

    Example:
        class BiasReLU(opfuse.FusedOperation):
            def fuser_forward(self, basic_op_ctxs, input_, **unused):
                bias, relu = basic_op_ctxs
                act = self.basic_ops[1]
                hidden = (input_ + bias.params[0]).to(input_.dtype)  # as the op: the input decides
                hidden = act.operand(relu, hidden)  # leaves what the backward reads
                return hidden.relu(), [(), ()]


        @opfuse.hookimpl
        def opfuse_forward_fusions():
            return [opfuse.Fusion((opfuse.ops.Bias, opfuse.ops.ReLU), BiasReLU)]
    """


@hookspec
def opfuse_backward_fusions() -> list[FusionLike]:
    """Fusions of the backward pass.

    The fused op implements ``fuser_backward`` and relies only on what the basic ops leave in their
    contexts. It returns the gradient of the input, the gradients of each op's parameters, and those
    of each op's extra inputs.

    Example:
        class BiasReLUGrad(opfuse.FusedOperation):
            def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
                bias, relu = basic_op_ctxs
                x = self.basic_ops[1].saved_input(relu)  # or its codes, with cache_quantized_input
                dx = grad_output.masked_fill(x <= 0, 0)
                rows = dx.reshape(-1, dx.shape[-1])
                return dx, [(rows.sum(0) if bias.param_requires_grad[0] else None,), ()], [(), ()]


        @opfuse.hookimpl
        def opfuse_backward_fusions():
            return [opfuse.Fusion((opfuse.ops.Bias, opfuse.ops.ReLU), BiasReLUGrad)]
    """


@hookspec
def opfuse_joint_fusions() -> list[FusionLike]:
    """Fusions of both passes by one fused op, which may keep anything between them.

    The fused op implements ``fuser_forward`` and ``fuser_backward``. Joint fusions choose before
    forward and backward fusions of the same precedence.

    Example:
        class TwiceScaled(opfuse.FusedOperation):
            def fuser_forward(self, basic_op_ctxs, input_, **unused):
                scale = self.basic_ops[0].scale * self.basic_ops[1].scale
                basic_op_ctxs[0].twice = scale  # the backward uses the numbers of the forward
                return input_ * scale, [(), ()]

            def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
                return grad_output * basic_op_ctxs[0].twice, [(), ()], [(), ()]


        @opfuse.hookimpl
        def opfuse_joint_fusions():
            return [opfuse.Fusion((opfuse.ops.ConstantScale,) * 2, TwiceScaled)]
    """


@hookspec
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """Quantization recipes by name: frozen dataclasses derived from :class:`opfuse.Recipe`.

    A recipe is a value: it is part of a plan's key, and its JSON form names quantizer state in
    checkpoints.
    ``opfuse.plugins.recipes()`` has those of all plugins; for a shared name, the first plugin's.

    Example:
        import dataclasses


        @dataclasses.dataclass(frozen=True)
        class Rounding(opfuse.Recipe):
            step: float = 0.25


        @opfuse.hookimpl
        def opfuse_recipes():
            return {"rounding": Rounding}
    """


@hookspec
def opfuse_options() -> dict[str, Any]:
    """The plugin's options by name, ``"<entry-point name>.<option>"``, with their defaults.

    An option set with :class:`opfuse.options` is in ``env.options`` for every fusion. A name that
    the plugin does not declare is refused when a plan is made, and so is a value whose type differs
    from the default's (None: any type). A tuple lists all allowed values, the default first; any
    other value is refused.

    Example:
        @opfuse.hookimpl
        def opfuse_options():
            return {"example.min_rows": 64, "example.rounding": ("nearest", "up")}
    """


@hookspec(firstresult=True)
def opfuse_quantizer(
    recipe: Recipe, role: QuantizerRole, env: Environment | None, siblings: Sequence[Quantizer]
) -> Quantizer | None:
    """Return a new quantizer for a tensor of ``role``; None for another plugin's recipe.

    The first answer counts, in the order in which fusions choose. The hook is called once for each
    tensor that an op quantizes, when the op first runs under the recipe. The quantizer lives as
    long as the op. ``env`` describes that first run, for instance its device. ``siblings`` are the
    new quantizers of the tensors just before it in the op's list, as far as their role is the same:
    those of the weights of a ``ParallelLinear``. Return one of them, and the tensors have it
    together. If all of these weights do, they are cast as one matrix, see
    :meth:`opfuse.Quantizer.quantize_parts`.

    Example:
        import torch
        from opfuse.core.quantization.formats import ScaledTensor


        class RoundingQuantizer(opfuse.Quantizer):
            def __init__(self, step):
                self.step = step

            def quantize(self, tensor, usage, out=None):
                data = (tensor / self.step).round().to(torch.int8)
                scale = torch.tensor([self.step], dtype=torch.float32, device=tensor.device)
                return ScaledTensor(tensor.shape, tensor.dtype, self, data, None, scale)


        @opfuse.hookimpl
        def opfuse_quantizer(recipe, role):
            return RoundingQuantizer(recipe.step) if isinstance(recipe, Rounding) else None
    """
