"""What surrounds a call: the environment a fusion is asked about, and the settings of this thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .fuser import OperationFuser
    from .plan import FusionPlan
    from .quantization import Recipe

Options = tuple[tuple[str, Any], ...]


class Recorder(Protocol):
    """What a thread's scope tells about every call of a fuser."""

    def record(self, fuser: OperationFuser, plan: FusionPlan) -> None:
        """Called before the chain runs."""


class Environment(NamedTuple):
    """Where a plan is made for: metadata only, never tensor data.

    Attributes:
        device: Device of the chain's input.
        capability: CUDA compute capability, or None on other devices.
        dtype: The dtype the ops compute in, autocast counted.
        recipe: The quantization recipe in force, or None.
        training: Whether any op of the chain is in training mode.
        requires_grad: Whether a backward pass is planned.
        row_alignment: The largest of 16, 8, 4, 2, 1 that divides the number of rows, for a fusion that
            declares ``needs_row_alignment``; 1 for every other, and while tracing.
        deterministic: ``torch.are_deterministic_algorithms_enabled()``.
        options: The options set with :func:`opfuse.options`.
        compiling: Whether ``torch.compile`` or ``torch.export`` is tracing.
    """

    device: torch.device
    capability: tuple[int, int] | None
    dtype: torch.dtype
    recipe: Recipe | None = None
    training: bool = True
    requires_grad: bool = False
    row_alignment: int = 1
    deterministic: bool = False
    options: Mapping[str, Any] = {}
    compiling: bool = False


def _options_from_environ() -> Options:
    text = os.environ.get("OPFUSE_FUSION_LIMIT", "").strip()
    if not text:
        return ()
    return (("fusion_limit", int(text) if text.isdecimal() else text),)  # text is refused by the first plan


class Scope(threading.local):
    """The settings of one thread. Class attributes are the defaults; a context sets instance attributes.

    Everything but ``recorder`` is part of a plan's key. Read in forward only: a plan carries what its
    backward needs.
    """

    options: Options = _options_from_environ()
    selection: str | None = os.environ.get("OPFUSE_PLUGINS")
    recipe: Recipe | None = None
    recorder: Recorder | None = None

    @property
    def settings(self) -> tuple[Options, str | None, Recipe | None]:
        """Options, plugin selection and recipe together."""
        return self.options, self.selection, self.recipe

    @settings.setter
    def settings(self, values: tuple[Options, str | None, Recipe | None]) -> None:
        self.options, self.selection, self.recipe = values


class Setting:
    """Sets one attribute of a scope for a ``with`` block; base of the context managers."""

    def __init__(self, scope: Scope, name: str, value: Any) -> None:
        self._scope = scope
        self._name = name
        self._value = value
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(getattr(self._scope, self._name))
        setattr(self._scope, self._name, self._new_value(self._before[-1]))

    def __exit__(self, *exc_info: object) -> None:
        setattr(self._scope, self._name, self._before.pop())

    def _new_value(self, before: Any) -> Any:
        return self._value
