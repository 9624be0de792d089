"""The tool behind ``options(debug=True)``: a step must not write into what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..core.engine.facts import Facts, Step
from ..core.hookspecs import hookimpl
from ..core.introspection import op_class
from ..core.settings import Option
from .tensors import parts_of, same_bits


def _is_on(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"option debug must be of type bool, got {value!r}")
    return value


@hookimpl
def opfuse_options() -> dict[str, Option]:
    """``debug``: whether each step is watched, which is slow."""
    return {"debug": Option(_is_on)}


_FORWARD = "its input", "a parameter", "an extra input", "basic_op_extra_inputs"
_BACKWARD = (
    "the gradient of its output",
    "a tensor saved for its backward",
    "the gradient of an extra output",
    "basic_op_grad_extra_outputs",
)
"""The arguments of a step: its tensor, those of its ops, extra ones, and the name of these."""


@hookimpl
def opfuse_wrap_step(
    step: Step, pass_name: str, facts: Facts, run: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Compare the tensors that a step is given before and after it.

    Raises:
        RuntimeError: In a call: a tensor has other values than before, or another version.
    """
    if not facts.env.options.get("debug") or pass_name == "recompute":
        return None
    backward = pass_name == "backward"
    first, kept, extra, name = _BACKWARD if backward else _FORWARD
    in_place = any(getattr(each, "in_place", False) for each in step.matched)
    names = ", ".join(op_class(each).__name__ for each in step.matched)

    def tensors(ctxs: Any, x: Any, given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        contexts = ctxs if isinstance(ctxs, list) else [ctxs]
        held = [] if backward and contexts[-1].owns_grad_output else [(first, [x])]
        held += [(kept, ctx.saved_tensors if backward else ctx.params) for ctx in contexts]
        held += [] if in_place else [(extra, of_op) for of_op in given.get(name, ())]
        for what, values in held:
            yield from ((what, part) for value in values or () for part in parts_of(value))

    def compared(ctxs: Any, x: Any, **given: Any) -> Any:
        before = [(*each, *_state(each[1])) for each in tensors(ctxs, x, given)]
        result = run(ctxs, x, **given)
        for what, tensor, version, values in before:
            now, values_now = _state(tensor)
            if now != version or not same_bits(values_now, values):
                raise RuntimeError(
                    f"{type(step.op).__name__} [{names}] wrote into {what} in its {pass_name}: it "
                    f"must leave that as it is"
                )
        return result

    return compared


def _state(tensor: Tensor) -> tuple[int, Tensor]:
    """The version of a tensor, and a copy of it."""
    return 0 if tensor.is_inference() else tensor._version, tensor.detach().clone()
