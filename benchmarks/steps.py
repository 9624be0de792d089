"""One step of an opfuse plan on its own, as a kernel is measured.

It has its contexts, without the chain around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import opfuse
from opfuse.core.engine.execute import run_forward
from opfuse.core.engine.saved import rebuilt, restore_more


class _Saved:
    """What the autograd function's context is to the loops."""

    left: dict[int, Any]
    saved_tensors: tuple[Any, ...] = ()
    attributes: tuple[Any, ...] = ()

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing is materialized here."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class Alone(NamedTuple):
    """A step on its own.

    It is what the step does to an incoming tensor, the quantizer its result leaves in, or None, and
    its contexts.
    """

    call: Callable[[Any], Any]
    quantizer: Any
    ctxs: list[Any]


def alone(
    model: opfuse.Sequential,
    inputs: list[Any],
    op: type,
    *,
    backward: bool = False,
    owns: bool = False,
) -> Alone:
    """The step that covers the first ``op`` of a chain, with the contexts of a real pass.

    Args:
        model: The chain.
        inputs: Its inputs.
        op: A class of basic op.
        backward: The backward step instead of the forward one.
        owns: Let the backward step overwrite its incoming gradient.
    """
    y = model(*inputs)
    (fuser,) = model._module_groups
    program, saved = fuser._last[1], _Saved()
    run_forward(saved, program, None, inputs[0].detach(), *(p.detach() for p in model.parameters()))
    ctxs = program.pool.new()
    tensors = saved.saved_tensors
    if program.recipe is not None:
        tensors = rebuilt(tensors, saved.quantized)
    for index, start, stop in program.saved.ranges:
        ctxs[index].saved_tensors = tensors[start:stop]
    restore_more(saved, program, ctxs, tensors)
    tensors = list(model.parameters())
    for index, first, last in program.params:  # last: what is restored may have lost them
        ctxs[index].params = tuple(tensors[first:last])
    position = next(i for i, each in enumerate(program.chain.ops) if isinstance(each, op))
    steps = program.backward if backward else program.forward
    step = next(step for step in steps if step.start <= position < step.stop)
    mine, nothing = ctxs[step.start : step.stop], [()] * (step.stop - step.start)
    del y
    if backward:
        for ctx in mine:
            ctx.owns_grad_output = owns or ctx.owns_grad_output
        run = step.run if step.casts else step.op.fuser_backward
        quantizer = dict(step.casts)[step.start].quantizer if step.begin % 2 == 0 else None
        return Alone(lambda dy: run(mine, dy, basic_op_grad_extra_outputs=nothing), quantizer, mine)
    run = step.run if step.casts else step.op.fuser_forward
    quantizer = dict(step.casts)[step.stop].quantizer if step.end % 2 else None
    options = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": quantizer}
    options |= {"basic_op_extra_inputs": nothing, "basic_op_kwargs": [{}] * len(mine)}
    return Alone(lambda x: run(mine, x, **options)[0], quantizer, mine)
