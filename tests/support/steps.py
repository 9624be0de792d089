"""Steps of training, and whether two of them gave the same."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

RELATIVE = 1e-5


class Step(NamedTuple):
    """What one step gave.

    Attributes:
        loss: Its loss.
        grads: The gradients by name of their parameter, as it is in the model alone.
    """

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]


def plain_name(name: str) -> str:
    """The name of a parameter without what wrappers put into it."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def step(model: Any, family: Any, **inputs: Any) -> Step:
    """One step; gradients are taken from the model and left None."""
    given = {**family.inputs(), **inputs}
    loss = model(**given).loss
    loss.backward()
    grads = {plain_name(name): param.grad for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
    return Step(loss.detach(), grads)


def check(got: Step, expected: Step, family: Any, relative: float = RELATIVE) -> None:
    """Loss and every gradient are the same up to rounding.

    The gradient of the bias of an attention's keys is zero: softmax does not see what is added to
    all scores of a row. What is there is rounding, so it is compared with the largest gradient.
    """
    torch.testing.assert_close(got.loss, expected.loss, rtol=relative, atol=relative)
    assert got.grads.keys() == expected.grads.keys()
    there = [g.norm().item() for g in expected.grads.values() if g is not None]
    assert there
    for name, grad in expected.grads.items():
        mine = got.grads[name]
        assert (mine is None) == (grad is None), name
        if grad is not None:
            assert mine.dtype == grad.dtype, name
            size = max(there) if name.endswith(family.zero or ("\n",)) else grad.norm().item()
            worst = (mine - grad).norm().item()
            assert worst <= relative * max(size, 1e-12), f"{name}: {worst / max(size, 1e-12):.1e}"


def twins(model: nn.Module) -> tuple[Any, Any]:
    """A model and a copy of it."""
    return copy.deepcopy(model), model
