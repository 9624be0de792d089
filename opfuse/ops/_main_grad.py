"""``main_grad``: the tensor to which a linear adds the gradient of a weight, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.op import BasicOperation


class MainGrads:
    """The ``main_grad`` of an op's weights, to which its products may add.

    They are looked up when a product is there: one before it may have replaced what was in them.

    Args:
        op: The op.
        weights: Its weights; None in place of those that get no gradient.
        several: Whether products take a list of tensors, and not one tensor.
    """

    def __init__(self, op: BasicOperation, weights: Sequence[Any], several: bool = False) -> None:
        self._op, self._weights, self._several = op, weights, several

    def add(self, product: Callable[[Any, float], bool]) -> list[Any] | None:
        """Let a product add to them.

        Args:
            product: Takes them, and 0 where they are replaced, else 1. Returns whether it has added
                to them.

        Returns:
            The tensors, as the gradients of the weights. None: nothing was added, or one of them
            does not fit, or only some are replaced.
        """
        wanted = [weight for weight in self._weights if weight is not None]
        try:
            sums = [None if w is None else _main_grad(self._op, w) for w in self._weights]
        except RuntimeError:  # raised again if there is a gradient
            return None
        replaced = {_is_replaced(weight) for weight in wanted}
        if len(replaced) != 1:
            return None
        (is_replaced,) = replaced
        if not product(sums if self._several else sums[0], 0.0 if is_replaced else 1.0):
            return None
        for weight in wanted if is_replaced else ():
            _note_replaced(weight)
        return sums


def accumulate_main_grad(op: BasicOperation, weight: Any, grad: Tensor | None) -> Tensor | None:
    """Add the gradient of a weight to its ``main_grad``; see :meth:`BasicLinear.accumulate_grads`.

    Returns:
        The gradient for autograd: zeros if hooks must run on ``.grad``, and None otherwise.
    """
    if grad is None:
        return None
    main_grad = _main_grad(op, weight)
    replaced = _is_replaced(weight)
    if not _is_same(grad, main_grad):  # else a product has added it
        if replaced:
            main_grad.copy_(grad)
        else:
            main_grad.add_(grad)
    if replaced:
        _note_replaced(weight)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


_REPLACED_IN = "opfuse: the backward that replaced main_grad"


def _is_replaced(weight: Any) -> bool:
    """Whether a weight's ``main_grad`` is replaced by the next gradient of this backward.

    Only by the first one. Autograd's node that accumulates the weight's gradient remembers it: all
    uses of the weight share that node, and no copy of the weight does.
    """
    if not getattr(weight, "overwrite_main_grad", False):
        return False
    replaced_in = _node_of(weight).metadata.get(_REPLACED_IN)
    return bool(replaced_in != torch._C._current_graph_task_id())


def _note_replaced(weight: Any) -> None:
    _node_of(weight).metadata[_REPLACED_IN] = torch._C._current_graph_task_id()


def _node_of(weight: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(weight).node


def _is_same(grad: Tensor, main_grad: Tensor) -> bool:
    """Whether a gradient is the sum itself; at each look-up that may be another view of it."""
    if grad is main_grad or type(grad) is not Tensor or type(main_grad) is not Tensor:
        return grad is main_grad
    place = grad.data_ptr()  # 0: it has no memory
    return place != 0 and place == main_grad.data_ptr()


def _main_grad(op: BasicOperation, weight: Any) -> Tensor:
    """The tensor that accumulates a weight's gradient; Megatron-FSDP provides it at every call."""
    who = f"{type(op).__name__}(accumulate_into_main_grad=True) expected"
    wanted = f"a tensor of shape {tuple(weight.shape)}"
    if not isinstance(weight, nn.Parameter):
        got = "got a tensor that is computed, as by a parametrization"
        raise RuntimeError(f"{who} a Parameter as its weight, {got}")
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        got = f"got {main_grad!r}: set it before the backward"
        raise RuntimeError(f"{who} {wanted} as weight.main_grad, {got}")
    fits = main_grad.shape == weight.shape and main_grad.device == weight.device
    if not (fits and main_grad.is_floating_point()):
        wanted = f"{wanted}, floating point and on {weight.device}, as weight.main_grad"
        got = f"{main_grad.dtype} of shape {tuple(main_grad.shape)} on {main_grad.device}"
        raise RuntimeError(f"{who} {wanted}, got {got}")
    return main_grad
