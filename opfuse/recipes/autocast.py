"""The block under which chains quantize."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.compiler import is_compiling

from ..core.quantization import Recipe
from ..core.quantization.names import check_names
from ..core.quantization.quantizer import CALIBRATING
from ..core.recipe_lookup import offered
from ..core.settings import Setting, Settings, current
from .checkpoint import checkpoint_frames
from .scale_update import Block

DEFAULT_RECIPE = "fp8-delayed"
"""The default on every device; Transformer Engine has another one from Blackwell on."""

TOOL = "autocast"
"""The name of the tool without which no chain quantizes."""


class autocast(Setting):
    """Quantize inside a ``with`` block, by a recipe, in this thread.

    ``autocast(recipe)``, ``autocast("name")`` and ``autocast(recipe=recipe)`` mean the same. The
    state of a recipe, such as scales computed from earlier maxima, advances at the exit of the
    outermost block (:meth:`Recipe.update`), provided that grad mode is on, nothing was raised, and
    this is not a recomputation in a backward.

    Args:
        enabled: False turns quantization off inside an enclosing block. A value other than a bool
            is taken as the recipe.
        calibrating: With ``enabled=False``, nothing is quantized, but the recipe's quantizers see
            and record the tensors, under ``torch.no_grad()`` too. The scales of delayed scaling are
            then known before the first quantized call. An enabled block records anyway.
        recipe: The recipe, an instance of a class that a plugin offers, or its registered name.
            None: ``"fp8-delayed"``, on every device; Transformer Engine's default depends on the
            GPU.
        amax_reduction_group: The process group over which the maxima of a step are taken. The model
            must be prepared, see :func:`opfuse.assign_names`.
        weights: ``"fresh"`` casts each weight in every call. ``"cached"`` reuses the last cast if
            the Parameter and its version are the same; it is for several microbatches between two
            optimizer steps. The first must be "fresh", since fused optimizers, and whatever writes
            to ``weight.data``, change weights without raising their version. One cast of each
            weight stays in memory.
        skip: Names of ops that are not quantized: patterns such as ``["head", "blocks.0.*"]``, in
            which ``*`` matches anything, including dots. A pattern that matches the name of a
            module covers all ops below it. Ops get names from :func:`opfuse.assign_names` or from
            their constructor. An inner block does not inherit the patterns of outer blocks.

    Raises:
        TypeError: The recipe is neither a :class:`Recipe` nor a name, or is given twice; ``skip``
            is not a list of strings.
        ValueError: A recipe that no installed plugin offers; another value of ``weights``; a
            pattern of ``skip`` that matches no op, which is found when the block is entered.
    """

    def __init__(
        self,
        enabled: bool | Recipe | str = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: Any = None,
        *,
        weights: str = "fresh",
        skip: Iterable[str] = (),
    ) -> None:
        if not isinstance(enabled, bool):
            if recipe is not None:
                raise TypeError(f"autocast: got two recipes, {enabled!r} and {recipe!r}")
            recipe, enabled = enabled, True
        patterns = None if isinstance(skip, str) or skip is None else tuple(skip)
        if patterns is None or not all([isinstance(name, str) for name in patterns]):
            raise TypeError(f"autocast: expected a list of patterns as skip, got {skip!r}")
        if not isinstance(calibrating, bool):
            raise TypeError(f"autocast: expected a bool as calibrating, got {calibrating!r}")
        if weights not in ("fresh", "cached"):
            raise ValueError(f"autocast: weights must be 'fresh' or 'cached', got {weights!r}")
        if recipe is None:
            recipe = DEFAULT_RECIPE
        in_force = offered(recipe) if enabled or calibrating else None
        observer = CALIBRATING if calibrating and not enabled else None
        tools = () if in_force is None else (TOOL,)
        super().__init__(recipe=in_force, skip=patterns, observer=observer, tools=tools)
        self._weights, self._group = weights, amax_reduction_group
        self._outside: list[tuple[int, str, Block | None]] = []

    def _changes_after(self, before: Settings) -> dict[str, Any]:
        observer = self._changes["observer"]
        if observer is None and before.observer is not CALIBRATING:
            observer = before.observer  # the observer of an outer block stays in force
        return {**self._changes, "observer": observer}

    def __enter__(self) -> None:
        if is_compiling():
            super().__enter__()
            return
        group, block = self._group, current.block
        if block is not None and group is not None and group is not block.group:
            raise ValueError(
                "autocast: amax_reduction_group is for the outermost block, at whose exit "
                "state advances"
            )
        check_names(self._changes["skip"])
        super().__enter__()
        self._outside.append((current.checkpoints, current.weights, current.block))
        current.checkpoints, current.weights = checkpoint_frames(), self._weights
        if current.block is None:
            current.block = Block(self._group)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if is_compiling():
            return
        block, current.is_recording = current.block, True
        current.checkpoints, current.weights, current.block = self._outside.pop()
        if current.block is None:
            block.end(failed=exc_info[0] is not None)
