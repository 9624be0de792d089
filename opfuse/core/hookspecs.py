"""The plugin contract, and nothing else.

A plugin is a distribution with an entry point in group ``opfuse.v1`` that names a module or object
whose functions are marked with :data:`opfuse.hookimpl`. Every hook returns declarations and is
called while planning, never during a forward or backward pass. Adding an argument to a hook is
compatible (an implementation may take fewer); anything else opens group ``opfuse.v2``.

A *tool* has an entry point in group ``opfuse.tools.v1`` instead. It wraps what runs, from the
outside to the inside: a call, the choice of fusions, a pass of a plan, a step. A list of plugins
selects fusions and leaves tools alone; only ``-name`` switches one off. Tools wrap in the sorted
order of their names: the first is the innermost. A :class:`opfuse.CallRefusedError` that a hook of
a tool raises is raised by the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from .environment import Environment
from .fusion import FusionLike
from .quantization import Quantizer, QuantizerRole, Recipe

if TYPE_CHECKING:
    from torch.nn import Module

Run = Callable[..., Any]

GROUP = "opfuse.v1"
"""The entry-point group of this contract."""

TOOLS = "opfuse.tools.v1"
"""The entry-point group of tools, which wrap what runs instead of offering fusions."""

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


@hookspec
def opfuse_wrap_call(chain: Any, module: Module | None, run: Run) -> Run | None:
    """Wrap the calls of a :class:`opfuse.core.engine.chain.Chain`: checks, planning and the run.

    Return what is called in place of ``run``, or None.

    It is asked when a chain is captured, at the first call under each other selection, and again
    after something was registered or removed. What it returns is not called where the selection
    switches the tool off. For a module that runs by its own call between chains, and for an op that
    does, ``chain`` is None, and ``module`` is that module.

    Example:
        import collections

        counts = collections.Counter()


        @opfuse.hookimpl
        def opfuse_wrap_call(chain, run):
            def counted(*args, **kwargs):
                counts[chain] += 1
                return run(*args, **kwargs)

            return None if chain is None else counted
    """


@hookspec
def opfuse_facts(facts: Any) -> Any:
    """What the tool knows of the candidates of a plan, beyond what they declare; None: nothing.

    It takes the :class:`opfuse.core.engine.facts.Facts` that the plan is made from, and returns
    :class:`opfuse.core.engine.facts.ToolFacts`. It is asked once for each plan. Conditions and
    benefits then find it in their environment, and its ``digest`` joins the plan. Its
    ``opfuse_wrap_choice`` finds it in ``facts.tool_facts``.

    Example:
        from opfuse.core.engine.facts import ToolFacts


        class Tuesday(ToolFacts):
            digest = "of Tuesday"

            def fields(self, candidate, read):
                if candidate.source.name != "BiasReLU" or read("rows") != 4:
                    return None
                candidate.remark("as fast on Tuesday")
                return {"measured": 1.0}


        @opfuse.hookimpl
        def opfuse_facts(facts):
            return Tuesday() if facts.env.device.type == "cpu" else None
    """


@hookspec
def opfuse_wrap_choice(facts: Any, run: Run) -> Run | None:
    """Wrap the choice among overlapping fusions. None leaves it as it is.

    It is asked once for each plan. What it returns is called for each precedence, with a
    :class:`opfuse.core.engine.selection.Choice`, and returns the candidates that are used. It may
    refuse some first, with a sentence for reports, or choose in another way.

    Args:
        facts: The :class:`opfuse.core.engine.facts.Facts` that the plan is made from.
        run: The choice by declared benefits.

    Example:
        @opfuse.hookimpl
        def opfuse_wrap_choice(run):
            def without_liger(choice):
                for candidate in choice.candidates:
                    if candidate.source.distribution == "opfuse-plugin-liger":
                        choice.refused[candidate] = "it is not trusted here"
                return run(choice)

            return without_liger
    """


@hookspec
def opfuse_wrap_pass(program: Any, pass_name: str, run: Run) -> Run | None:
    """Wrap a pass of a plan, ``"forward"`` or ``"backward"``. None leaves it as it is.

    It is asked once for each pass of a :class:`opfuse.core.engine.program.Program`. A plan for
    ``torch.func`` or ``double_backward`` has no backward of its own, since autograd records its ops
    one by one. ``torch.compile`` traces what it returns for a program that is ``compiling``.

    A forward is called with ``(fuser, program, input, tensors, extra_inputs, kwargs)``, where
    ``tensors`` has the parameters, then the extra inputs. A backward is called with the context of
    the autograd function and the gradients of the outputs; what the forward set as
    ``current.call`` of :mod:`opfuse.core.settings` is ``call`` on that context.

    Example:
        @opfuse.hookimpl
        def opfuse_wrap_pass(program, pass_name, run):
            def announced(*args):
                print(pass_name, "of", program.chain.title)
                return run(*args)

            return announced
    """


@hookspec
def opfuse_wrap_update(run: Run) -> Run | None:
    """Wrap the update of a recipe's quantizers, after a forward or a backward. None leaves it.

    It is asked before the first update, and again after a tool comes or goes. The update is called
    with an :class:`opfuse.recipes.scale_update.Update`, and may be called for parts of it.

    Example:
        @opfuse.hookimpl
        def opfuse_wrap_update(run):
            def counted(update):
                counts[update.recipe] += 1
                run(update)

            return counted
    """


@hookspec
def opfuse_wrap_step(step: Any, pass_name: str, facts: Any, run: Run) -> Run | None:
    """Wrap the method that runs a step. None leaves it as it is.

    It is asked while the functions of a plan are written: for each step of a pass, and with the
    name ``"recompute"`` for a step whose output the backward computes again.

    Args:
        step: The :class:`opfuse.core.engine.facts.Step`: its ops, and the fusion if it is fused.
        pass_name: ``"forward"``, ``"backward"`` or ``"recompute"``.
        facts: The :class:`opfuse.core.engine.facts.Facts` that the plan is made from.
        run: The method: ``op_forward``, ``op_backward``, ``fuser_forward``, ``fuser_backward`` or
            ``fuser_recompute``.

    Example:
        import time

        seconds = collections.Counter()


        @opfuse.hookimpl
        def opfuse_wrap_step(step, run):
            def timed(*args, **kwargs):
                before = time.perf_counter()
                result = run(*args, **kwargs)
                seconds[type(step.op).__name__] += time.perf_counter() - before
                return result

            return timed
    """
