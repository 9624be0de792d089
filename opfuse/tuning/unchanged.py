"""A model as it was before its forward ran: what a measurement is not to leave behind."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..core.fusible import FusibleOperation
from ..core.sequential import Sequential

_CONTAINERS = list, dict, set


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """A block after which a model has the buffers, gradients and attributes that it had.

    So have the random number generators of Python and NumPy. A list, dictionary or set that is an
    attribute has the same members again; what is inside of other objects is not known.

    Args:
        model: A module, or a method of one; of any other callable nothing is known.
    """
    owner = getattr(model, "__self__", model)
    modules = [*owner.modules()] if isinstance(owner, nn.Module) else []
    tensors = {id(b): (b, b.detach().clone()) for module in modules for b in module.buffers(False)}
    grads = [(p, p.grad) for module in modules for p in module.parameters(False)]
    tensors |= {id(g): (g, g.detach().clone()) for _, g in grads if g is not None}
    others = [m for m in modules if not isinstance(m, (FusibleOperation, Sequential))]
    held = [(vars(module), _content(vars(module))) for module in others]
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.set_state(states[1])
        for attributes, before in held:
            _restore(attributes, before)
        with torch.no_grad():
            for tensor, value in tensors.values():
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for param, grad in grads:
            param.grad = grad


def _content(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The attributes of a module, each with what is in it."""
    kinds = (*_CONTAINERS, type(nn.Module()._modules))
    return {n: (v, v.copy() if type(v) in kinds else None) for n, v in attributes.items()}


def _restore(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in attributes if name not in before]:
        del attributes[name]
    for name, (value, content) in before.items():
        attributes[name] = value
        if content is not None and not _is_same(value, content):
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container has the very members that it had, in order."""
    if len(value) != len(content):
        return False
    pairs = zip(value, content, strict=True)
    same = all(a is b for a, b in pairs)
    return same and (not isinstance(value, dict) or all(value[k] is content[k] for k in content))
