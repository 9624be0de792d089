"""The settings of a thread: options, the selection of plugins, the recipe, and recorders.

The settings are part of a plan's key. They are read in forward only: a plan carries what its
backward needs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

if TYPE_CHECKING:
    from torch import Tensor, nn

R = TypeVar("R", bound="Recorder")
Options = tuple[tuple[str, Any], ...]


CORE_OPTIONS: dict[str, type] = {
    "fusion_limit": int,
    "double_backward": bool,
    "prefer": str,
    "chains_under_compile": bool,
}
"""The options that no tool declares, and their types."""


class Option(NamedTuple):
    """An option with a plain name, which a tool declares.

    Attributes:
        convert: Makes the value in a plan's key, which is hashable, from what the user gives.
            Raises ``ValueError`` or ``TypeError`` for what it cannot be.
        enter: Called with that value when a block with the option begins; what it raises ends the
            block.
    """

    convert: Callable[[Any], Any]
    enter: Callable[[Any], None] | None = None


def _options_from_environ() -> Options:
    text = os.environ.get("OPFUSE_FUSION_LIMIT", "").strip()
    limit = int(text) if text.isdecimal() else text  # the first plan refuses text
    return (("fusion_limit", limit),) if text else ()


class Settings(NamedTuple):
    """The settings that are part of a plan's key.

    Attributes:
        options: The options of planning.
        selection: The selection of plugins, as the user wrote it.
        recipe: The quantization recipe, or None.
        skip: Name patterns of ops that the recipe does not quantize.
        observer: The observer of each tensor that the recipe quantizes, or None.
        tools: The tools without which no plan is made.
    """

    options: Options = ()
    selection: str | None = None
    recipe: Any = None
    skip: tuple[str, ...] = ()
    observer: Any = None
    tools: tuple[str, ...] = ()


class ThreadSettings(threading.local):
    """The settings of one thread.

    Class attributes are the defaults; a ``with`` block sets instance attributes.

    Attributes:
        values: The settings that are part of a plan's key; each can also be read from this object.
        recorders: Those that are told of every call in this thread, the outermost first.
        weights: ``"fresh"``: weights are cast in every call; ``"cached"``: the last cast may be
            used again.
        block: The outermost block of a recipe, or None.
        is_recording: Whether the running forward may advance the scales of a recipe.
        quantizers: The quantizers of each op of the pass that is planned or that runs, for ops that
            ask for theirs; None: between passes.
        is_capturing: Whether the running forward under a recipe is captured into a CUDA graph.
        model_init: Called with each new op, to quantize its weights; None: they stay as they are.
        new_op_name: The name of the op under construction, which inner ops get too, or "".
        environment: The environment of the plan that is being made.
        part_params: The parameters that were read for the parts of a chain, by module and name.
        call: What a tool leaves in a forward for its backward, see
            :func:`opfuse.core.hookspecs.opfuse_wrap_pass`.
        autograd_run: The last run of autograd that cast gradients under a recipe with state, or
            None.
        checkpoints: The number of ``torch.utils.checkpoint`` frames around the innermost block of a
            recipe.
        tuning_group: The processes that tune together with this one, or None.
    """

    values: Settings = Settings(_options_from_environ(), os.environ.get("OPFUSE_PLUGINS"))
    recorders: tuple[Recorder, ...] = ()
    weights: str = "fresh"
    block: Any = None
    is_recording: bool = True
    quantizers: Any = None
    is_capturing: bool = False
    model_init: Any = None
    new_op_name: str = ""
    environment: Any = None
    part_params: Any = None
    call: Any = None
    autograd_run: Any = None
    checkpoints: int = 0
    tuning_group: Any = None

    @contextlib.contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """A block in which some attributes have other values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    # parts of the values
    options: Any = property(lambda self: self.values.options)
    selection: Any = property(lambda self: self.values.selection)
    recipe: Any = property(lambda self: self.values.recipe)
    skip: Any = property(lambda self: self.values.skip)
    observer: Any = property(lambda self: self.values.observer)


current = ThreadSettings()
"""The settings of the current thread."""


def is_captured(device: torch.device) -> bool:
    """Return whether what this thread runs on a device is captured into a CUDA graph.

    Its stream is asked, wherever the current device is.

    Args:
        device: That of a tensor.
    """
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class Recorder:
    """Is told of every call of a fuser in its thread, within its ``with`` block."""

    _outside: tuple[Recorder, ...] = ()

    def __enter__(self: R) -> R:
        self._outside = current.recorders
        current.recorders = (*self._outside, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        current.recorders = self._outside

    def record(self, fuser: Any, program: Any, given: Any) -> None:
        """Called before a chain runs.

        Args:
            fuser: The :class:`opfuse.OperationFuser` of the chain.
            program: The :class:`opfuse.core.engine.program.Program` that will run.
            given: The input, the parameters and extra inputs, and the keyword arguments per basic
                op, or None.
        """

    def replaced(self, replaced: Any, module: nn.Module, tensors: tuple[Tensor, ...]) -> None:
        """Called where a module's chain or its own operations run.

        Args:
            replaced: What the module keeps of the two.
            module: The module.
            tensors: The chain's input and extra inputs.
        """

    def saved(self, program: Any, tensors: Any) -> None:
        """Called with the tensors that a chain keeps.

        Args:
            program: The program that ran.
            tensors: The saved tensors of each basic op.
        """

    def sends(self, op: Any, forward: int, backward: int) -> None:
        """Called where an op has collectives.

        Args:
            op: The op.
            forward: Bytes that this process sends in its forward.
            backward: Bytes that it will send in its backward.
        """


class Setting:
    """Changes some of the settings for a ``with`` block; base of the context managers.

    Args:
        **changes: The new values, by the names of :class:`Settings`.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self._blocks: list[tuple[Settings, Settings]] = []  # what was there, and what it made of it

    def __enter__(self) -> None:
        before = current.values
        current.values = before._replace(**self._changes_after(before))
        self._blocks.append((before, current.values))

    def __exit__(self, *exc_info: object) -> None:
        before, inside = self._blocks[-1]
        for name in () if is_dynamo_compiling() else self._changes:
            if getattr(current.values, name) != getattr(inside, name):
                what = "expected blocks to end in the reverse order, in the thread that began them"
                who = f"opfuse.{type(self).__name__}"
                raise RuntimeError(f"{who} {what}: another block has set the {name} since")
        self._blocks.pop()
        restored = {name: getattr(before, name) for name in self._changes}
        current.values = current.values._replace(**restored)

    def _changes_after(self, before: Settings) -> dict[str, Any]:
        """The changes, for a block that begins with these settings."""
        return self._changes
