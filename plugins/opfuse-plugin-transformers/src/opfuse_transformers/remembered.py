"""What is known of calls, by the shapes and dtypes of their tensors and the present settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse.core.plugins import manager
from opfuse.core.settings import current

_MOST = 64


class Remembered:
    """Remembers what a function says of a call of plain tensors; None for any other call.

    Args:
        function: ``function(args, kwargs, *facts)``: what is to be known of a call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known: dict[Any, Any] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *facts: Any) -> Any:
        """What the function said when it was first asked.

        Args:
            args: The tensors of the call.
            kwargs: Its numbers.
            *facts: What the answer depends on besides.
        """
        of_args: list[Any] = []
        for x in args:
            if type(x) is not Tensor:
                return None
            of_args.append((x.shape, x.dtype, x.requires_grad))
        for number in kwargs.values():
            if type(number) is not int:
                return None
        if torch._C._are_functorch_transforms_active():
            return None
        of = args[0].device
        autocast: Any = of.type != "meta" and torch.is_autocast_enabled(of.type)
        autocast = autocast and torch.get_autocast_dtype(of.type)
        modes = torch.is_grad_enabled(), autocast, current.values, manager.generation
        key = *of_args, (*kwargs.items(),), of, modes, facts
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._function(args, kwargs, *facts)
        return self._known.get(key)
