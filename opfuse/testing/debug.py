"""The tool behind ``options(debug=True)``: a step must not write into what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.engine.facts import Facts, Step
from ..core.hookspecs import hookimpl
from ..core.introspection import op_class
from ..core.quantization import QuantizedTensor
from ..core.settings import Option


def _is_on(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"option debug must be of type bool, got {value!r}")
    return value


@hookimpl
def opfuse_options() -> dict[str, Option]:
    """``debug``: whether each step is watched, which is slow."""
    return {"debug": Option(_is_on)}


@hookimpl
def opfuse_wrap_step(
    step: Step, pass_name: str, facts: Facts, run: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Watch the tensors that a step is given."""
    if not facts.env.options.get("debug") or pass_name == "recompute":
        return None
    names = ", ".join(op_class(each).__name__ for each in step.matched)
    in_place = any(getattr(each, "in_place", False) for each in step.matched)
    return Watched(run, f"{type(step.op).__name__} [{names}]", pass_name, in_place)


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
        pass_name: Its pass, ``"forward"`` or ``"backward"``.
        in_place: Whether it may write into its extra inputs.

    Raises:
        RuntimeError: In a call: a tensor has other values than before, or another version.
    """

    def __init__(
        self, method: Callable[..., Any], who: str, pass_name: str, in_place: bool
    ) -> None:
        self._method, self._who, self._in_place = method, who, in_place
        self._pass_name = pass_name

    def __call__(self, ctxs: Any, x: Any, **given: Any) -> Any:
        """Run the method."""
        before = [(what, tensor, *_state(tensor)) for what, tensor in self._tensors(ctxs, x, given)]
        result = self._method(ctxs, x, **given)
        for what, tensor, version, values in before:
            now, values_now = _state(tensor)
            if now != version or not torch.equal(values_now, values):
                raise RuntimeError(
                    f"{self._who} wrote into {what} in its {self._pass_name}: it must leave that "
                    f"as it is"
                )
        return result

    def _tensors(self, ctxs: Any, x: Any, given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        contexts = ctxs if isinstance(ctxs, list) else [ctxs]
        backward = self._pass_name == "backward"
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
    values = tensor.detach().reshape(-1)  # one value may have any stride
    return version, values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
