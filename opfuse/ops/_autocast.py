"""Casts of weights under autocast: each once in a block, as PyTorch casts them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.op_context import OperationContext
from ..core.overwriting import may_write

with torch.inference_mode(False):
    _TOKEN = torch.zeros(1, requires_grad=True)
    _NO_ROWS = torch.zeros(0, 1, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)


class _Casts(dict[Any, Any]):
    """Casts of one block, by weight and dtype; a class of its own has weak references."""


_latest = threading.local()  # a weak reference to the casts of this thread's latest block


def cast_weights(ctx: OperationContext, weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights in ``ctx.dtype``, each cast once in a block of ``torch.autocast``.

    As for PyTorch, these are fp32 parameters that need a gradient, in a block with
    ``cache_enabled``. One that was changed in place since is cast again. Gradients are those of the
    weights, so a cast has only values: where autograd records what an op does, it is made anew, as
    where a mode sees the operations, which must be the same when they run again.
    """
    shares = may_write() and not (ctx.saves_params or torch.is_grad_enabled())
    shares = shares and torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
    dtype = ctx.dtype
    return [_shared(w, dtype) if shares and _can_be_shared(w) else w.to(dtype) for w in weights]


def _can_be_shared(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.dtype is torch.float32
    if not (plain and weight.requires_grad) or weight.is_inference():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _shared(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    casts, key = _of_block(), (id(weight), dtype)
    found = casts.get(key)
    if found is None or found[1] != weight._version:
        casts[key] = found = weight, weight._version, weight.to(dtype)  # the id stays its own
    return found[2]


def _of_block() -> _Casts:
    """The casts that this thread made in this block.

    They live as long as what PyTorch has in its cache, since they hang on the node of such a cast.
    """
    casts: _Casts | None = getattr(_latest, "casts", lambda: None)()
    if casts is None:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            total: Any = torch.addmm(_TOKEN, *_NO_ROWS)
        held = total.grad_fn.next_functions[0][0].metadata
        casts = held.setdefault(("opfuse", threading.get_ident()), _Casts())
        _latest.casts = weakref.ref(casts)
    return casts
