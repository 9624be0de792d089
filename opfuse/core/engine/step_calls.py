"""Steps of single ops, and what runs around the method of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..cast import Cast
from ..introspection import op_class
from ..op import BasicOperation
from ..quantization import QuantizedTensor
from .agreement import Reported
from .invariant import InParts
from .measured import Facts
from .step import Step


def lone_step(op: BasicOperation, place: int) -> Step:
    """A step of an op, or of a cast, by itself."""
    return Step(None, place, place + 1, (op,), op=op)


def separate(step: Step, pass_name: str, last: int | None = None) -> list[Step]:
    """The steps of the ops and casts of a fused step, in the order of the pass.

    Args:
        step: A step of that pass.
        pass_name: ``"forward"`` or ``"backward"``.
        last: The last op that takes part; None: all do.
    """
    found: list[Step] = []
    index = step.start
    for op in step.matched:
        if last is not None and index > last:
            break
        is_cast = isinstance(op, Cast)
        found.append(alone := lone_step(op, 2 * index + (not is_cast)))
        alone.recompute = step.recompute if index == step.start and not is_cast else None
        index += not is_cast
    return found if pass_name == "forward" else found[::-1]


def wrapped(step: Step, pass_name: str, run: Callable[..., Any], facts: Facts) -> Any:
    """The method of a step, with what tools do around it."""
    env, chain = facts.env, facts.chain
    if env.options.get("debug") and not env.compiling:
        names = ", ".join(op_class(each).__name__ for each in step.matched)
        in_place = any(getattr(each, "in_place", False) for each in step.matched)
        run = Watched(run, f"{type(step.op).__name__} [{names}]", in_place)
    if chain.groups:
        run = Reported(run, chain, step)
    in_parts = "invariant" in env.options and env.device.type == "cpu"
    if in_parts and pass_name == "forward" and step.op in chain.ops:
        shapes = [shape for shape, _ in facts.params[step.start]]
        run = InParts(run) if all(len(shape) < 2 for shape in shapes) else run
    return run


class InRange:
    """Wraps the method of a fused step in a range that ``torch.profiler`` shows.

    The range names the fusion, the plugin, the pass and the ops.
    """

    def __init__(self, step: Step, pass_name: str, run: Callable[..., Any]) -> None:
        self.__self__, self.__name__ = step.op, run.__name__
        self._run, source = run, step.source
        ops = " + ".join(op_class(op).__name__ for op in step.matched)
        owner = f" of {source.distribution}" if source.distribution else ""
        self._title = f"{source.name}{owner}, {pass_name}: {ops}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with torch.profiler.record_function(self._title):
            return self._run(*args, **kwargs)


_FORWARD = "its input", "a parameter", "an extra input", "basic_op_extra_inputs"
_BACKWARD = (
    "the gradient of its output",
    "a tensor saved for its backward",
    "the gradient of an extra output",
    "basic_op_grad_extra_outputs",
)
"""The arguments of a step: its tensor, those of its ops, extra ones, and the name of these."""


class Watched:
    """Wraps the method of a step and compares the given tensors before and after.

    Args:
        method: ``op_forward``, ``op_backward``, ``fuser_forward`` or ``fuser_backward``, bound to
            its op.
        who: The name of the step in errors.
        in_place: Whether it may write into its extra inputs.

    Raises:
        RuntimeError: In a call: a tensor has other values than before, or another version.
    """

    def __init__(self, method: Callable[..., Any], who: str, in_place: bool) -> None:
        self.__self__, self.__name__ = getattr(method, "__self__", None), method.__name__
        self._method, self._who, self._in_place = method, who, in_place

    def __call__(self, ctxs: Any, x: Any, **given: Any) -> Any:
        """Run the method."""
        before = [(what, tensor, *_state(tensor)) for what, tensor in self._tensors(ctxs, x, given)]
        result = self._method(ctxs, x, **given)
        for what, tensor, version, values in before:
            now, values_now = _state(tensor)
            if now != version or not torch.equal(values_now, values):
                raise RuntimeError(
                    f"{self._who} wrote into {what} in {self.__name__}: it must leave that as it is"
                )
        return result

    def _tensors(self, ctxs: Any, x: Any, given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        contexts = ctxs if isinstance(ctxs, list) else [ctxs]
        backward = self.__name__.endswith("backward")
        first, kept, extra, name = _BACKWARD if backward else _FORWARD
        held = [] if backward and contexts[-1].owns_grad_output else [(first, [x])]
        held += [(kept, ctx.saved_tensors if backward else ctx.params) for ctx in contexts]
        held += [] if self._in_place else [(extra, of_op) for of_op in given.get(name, ())]
        for what, values in held:
            for value in values or ():
                parts = value.tensors() if isinstance(value, QuantizedTensor) else (value,)
                yield from [(what, tensor) for tensor in parts if tensor is not None]


def _state(tensor: Tensor) -> tuple[int, Tensor]:
    """The version of a tensor, and a copy of its bytes, since NaN is not equal to itself."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.detach().reshape(-1).clone().view(torch.uint8)
