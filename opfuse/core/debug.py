"""The option ``debug``: detects steps that write into tensors that are not their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .quantization import QuantizedTensor

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
        self.__self__: Any = getattr(method, "__self__", None) or method.op  # type: ignore[attr-defined]
        self.__name__ = method.__name__
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
        if not (backward and contexts[-1].owns_grad_output):
            yield from _plain(first, x)
        for ctx in contexts:
            for tensor in (ctx.saved_tensors or ()) if backward else ctx.params:
                yield from _plain(kept, tensor)
        for of_op in () if self._in_place else given.get(name, ()):
            for tensor in of_op:
                yield from _plain(extra, tensor)


def _plain(what: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    for tensor in value.tensors() if isinstance(value, QuantizedTensor) else (value,):
        if tensor is not None:
            yield what, tensor


def _state(tensor: Tensor) -> tuple[int, Tensor]:
    """The version of a tensor, and a copy of its bytes, since NaN is not equal to itself."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.detach().reshape(-1).clone().view(torch.uint8)
