"""``torch.nn.TransformerEncoderLayer``: all that follows its attention in one chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import ops
from ..converter import Conversion
from ..environment import Environment
from ..op import BasicOperation
from ..sequential import Sequential
from .building import follow
from .layers import is_patched
from .leaves import function_op, leaf_of

_READS = ("norm1", "norm2", "linear1", "linear2", "dropout", "dropout2")


def build(module: Any, env: Environment) -> Conversion | str:
    """The chain of a layer, and a forward that calls attention and then the chain."""
    if is_patched(nn.TransformerEncoderLayer):
        return "TransformerEncoderLayer got another forward"
    act = _activation(module)
    if act is None:
        return "no op computes its activation"
    made: dict[str, list[Any]] = {}
    for which in _READS:
        leaf = leaf_of(getattr(module, which))
        if isinstance(leaf, str):
            return f"{which}: {leaf}"
        made[which] = list(leaf.ops)
    drops = [*made["dropout"], *made["dropout2"]]
    if not all(isinstance(op, ops.Dropout) for op in drops):
        return "its dropout is another module"
    norms = [made["norm1"], made["norm2"]]
    feed_forward: list[BasicOperation] = [
        *made["linear1"],
        act,
        drops[0],
        *made["linear2"],
        drops[1],
    ]
    add, fork, last = ops.AddExtraInput(), ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    last.set_extra_input_channel(0, "residual")
    if module.norm_first:
        chain = Sequential(add, fork, *norms[1], *feed_forward, last)
    else:
        chain = Sequential(add, *norms[0], fork, *feed_forward, last, *norms[1])
    reads = [n for n in _READS if n != "norm1" or not module.norm_first]
    constants = [("", "norm_first"), *[(n, "eps") for n in reads if n.startswith("norm")]]
    watched = [*constants, ("", "activation")]
    return Conversion(chain, reads, _Call(drops), _separate, watched)


def _activation(module: Any) -> BasicOperation | None:
    act = module.activation
    if isinstance(act, nn.Module):
        leaf = leaf_of(act)
        return None if isinstance(leaf, str) or len(leaf.ops) != 1 else leaf.ops[0]
    return function_op({F.relu: F.relu, F.gelu: F.gelu}.get(act, act), {})


def _separate(module: Any, y: Any, x: Any) -> Any:
    """What the chain computes of the output of attention and the layer's input."""
    if module.norm_first:
        z = x + y
        return z + module._ff_block(module.norm2(z))
    z = module.norm1(x + y)
    return module.norm2(z + module._ff_block(z))


class _Call:
    """The forward of a layer by way of its chain."""

    def __init__(self, drops: Any) -> None:
        self._drops = drops

    def __call__(
        self,
        module: Any,
        chain: Any,
        src: Any,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Any:
        """See :meth:`torch.nn.TransformerEncoderLayer.forward`, whose fast path it leaves alone."""
        if not torch.is_grad_enabled() or src.is_nested:
            return NotImplemented
        modules = module.dropout, module.dropout2
        follow([(op, own, True) for op, own in zip(self._drops, modules, strict=True)])
        x = module.norm1(src) if module.norm_first else src
        y = module._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)
        return chain(y, src)
