"""Norms as chains of their own, whose outputs tell which norm they come from."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

import torch
from opfuse_convert import Conversion
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from opfuse.core.introspection import hook_dicts
from opfuse.ops import LayerNorm, RMSNorm


class _Note(NamedTuple):
    """What is known of a tensor that a norm computed.

    Attributes:
        module: The norm.
        op: The op that computed it.
        given: The input of the norm, if that is still alive.
        version: How often the input was written to before.
    """

    module: Any
    op: Any
    given: weakref.ref[Tensor]
    version: int


_NOTES: Any = WeakTensorKeyDictionary()
"""What is known of tensors that are alive; they carry nothing themselves, which one could save."""


def noting(made: Conversion | str) -> Conversion | str:
    """The conversion of a norm, which notes on each output where it comes from; or another one."""
    if isinstance(made, str) or len(made.chain) != 1:
        return made
    if made.reads != ("",) or not isinstance(made.chain[0], (RMSNorm, LayerNorm)):
        return made
    return dataclasses.replace(made, call=_Noting(made.call, made.chain[0]))


class _Noting:
    """The forward of a norm."""

    def __init__(self, call: Any, op: Any) -> None:
        self._call, self._op = call, op

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        result = self._call(module, chain, *args, **kwargs)
        if torch.compiler.is_compiling() or type(result) is not Tensor:
            return result
        (given,) = args
        # the chain ran, and not the module's own operations
        if hasattr(result.grad_fn, "program") and not given.is_inference():
            note = _Note(module, self._op, weakref.ref(given), given._version)
            _NOTES[result] = note
        return result


def behind(x: Any) -> tuple[Any, Tensor] | None:
    """The op of the norm that computed a tensor, and the norm's input.

    None: it is unknown, something was changed since, or somebody else may watch the tensor, who
    would miss a gradient that does not pass through it.
    """
    note: _Note | None = _NOTES.get(x) if type(x) is Tensor else None
    if note is None or x._version or x._backward_hooks or x.retains_grad:
        return None
    given = note.given()
    if given is None or given._version != note.version or any(hook_dicts(note.module)):
        return None
    return (note.op, given) if type(given) is Tensor and given.requires_grad else None
