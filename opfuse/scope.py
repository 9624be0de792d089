"""What surrounds a call: the environment a fusion is asked about, and the settings of this thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from .fuser import OperationFuser
    from .plan import FusionPlan
    from .quantization import Recipe

R = TypeVar("R", bound="Recorder")
Options = tuple[tuple[str, Any], ...]


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
        rows: The number of rows rounded down to a power of two, for a fusion that declares ``needs_rows``; None
            for every other, while tracing, and when asked whether it would fuse many rows.
        features: Last dimension of the tensor that the fused op would get, or None where the chain does not tell.
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
    rows: int | None = None
    features: int | None = None
    deterministic: bool = False
    options: Mapping[str, Any] = {}
    compiling: bool = False


def _options_from_environ() -> Options:
    text = os.environ.get("OPFUSE_FUSION_LIMIT", "").strip()
    if not text:
        return ()
    return (("fusion_limit", int(text) if text.isdecimal() else text),)  # text is refused by the first plan


Settings = tuple[Options, str | None, "Recipe | None"]
"""Options, plugin selection and recipe: a plain tuple, which ``torch.compile`` can rebuild."""


class Scope(threading.local):
    """The settings of one thread. Class attributes are the defaults; a context sets instance attributes.

    The settings are part of a plan's key, read in forward only: a plan carries what its backward needs.
    """

    settings: Settings = (_options_from_environ(), os.environ.get("OPFUSE_PLUGINS"), None)
    recorder: Recorder | None = None
    recipe_depth: int = 0
    """In how many frames of ``torch.utils.checkpoint`` the recipe was set."""

    @property
    def options(self) -> Options:
        """The options of planning."""
        return self.settings[0]

    @property
    def selection(self) -> str | None:
        """Which plugins, as the user wrote it."""
        return self.settings[1]

    @property
    def recipe(self) -> Recipe | None:
        """The quantization recipe."""
        return self.settings[2]


def checkpoint_frames() -> int:
    """How many frames of ``torch.utils.checkpoint`` this is called in."""
    count, frame = 0, sys._getframe().f_back
    while frame is not None:
        count += frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        frame = frame.f_back
    return count


class Recorder:
    """Told of every call of a fuser in its thread, inside a ``with`` block of its own.

    Args:
        scope: The scope whose calls it is told of.

    Attributes:
        restores: Whether it restores the settings when ``torch.utils.checkpoint`` computes a forward again.
    """

    restores: ClassVar[bool] = False
    _outer: Recorder | None = None

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __enter__(self: R) -> R:
        self._outer, self.scope.recorder = self.scope.recorder, self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.scope.recorder = self._outer

    @property
    def restoring(self) -> bool:
        """Whether it, or one around it, restores the settings."""
        return self.restores or (self._outer is not None and self._outer.restoring)

    def record(self, fuser: OperationFuser, plan: FusionPlan) -> None:
        """Called before a chain runs; tells an outer recorder too."""
        if self._outer is not None:
            self._outer.record(fuser, plan)


class Setting:
    """Changes one of a scope's settings for a ``with`` block; base of the context managers."""

    def __init__(self, scope: Scope, index: int, value: Any) -> None:
        self._scope = scope
        self._index = index
        self._value = value
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(self._scope.settings[self._index])
        self._set(self._new_value(self._before[-1]))

    def __exit__(self, *exc_info: object) -> None:
        self._set(self._before.pop())

    def _set(self, value: Any) -> None:
        settings: Any = self._scope.settings
        self._scope.settings = (*settings[: self._index], value, *settings[self._index + 1 :])

    def _new_value(self, before: Any) -> Any:
        return self._value
