"""One step of an opfuse plan on its own, as a kernel is measured.

It has its contexts, without the chain around it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import opfuse


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
    model(*inputs)
    (fuser,) = model._module_groups
    program = fuser._last[1]
    position = next(i for i, each in enumerate(program.chain.ops) if isinstance(each, op))
    steps = program.backward if backward else program.forward
    step = next(step for step in steps if step.start <= position < step.stop)
    name = "backward" if backward else "forward"
    with _calls(type(step.op), name) as calls:
        y = model(*inputs)
        y.backward(y.detach())
    ctxs, given = calls[0]
    method = getattr(step.op, f"fuser_{name}")
    if backward:
        for ctx in ctxs:
            ctx.owns_grad_output = owns or ctx.owns_grad_output
        quantizer = dict(step.casts)[step.start].quantizer if step.begin % 2 == 0 else None
        return Alone(lambda dy: method(ctxs, dy, **given), quantizer, ctxs)
    quantizer = dict(step.casts)[step.stop].quantizer if step.end % 2 else None
    return Alone(lambda x: method(ctxs, x, **given)[0], quantizer, ctxs)


@contextlib.contextmanager
def _calls(cls: type, name: str) -> Iterator[list[tuple[list[Any], dict[str, Any]]]]:
    """The contexts and further arguments of each call of a class's pass in the block."""
    found: list[tuple[list[Any], dict[str, Any]]] = []
    run = getattr(cls, f"fuser_{name}")

    def recording(self: Any, ctxs: list[Any], x: Any, **given: Any) -> Any:
        found.append(([copy.copy(ctx) for ctx in ctxs], given))
        return run(self, ctxs, x, **given)

    with mock.patch.object(cls, f"fuser_{name}", recording):
        yield found
