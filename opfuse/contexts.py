"""Context managers over the settings of this thread: options, recipe, and both again on recomputation."""

from __future__ import annotations

from typing import Any

from .plugins import manager
from .quantization import Recipe
from .scope import Options

_CORE_OPTIONS: dict[str, type] = {"fusion_limit": int, "double_backward": bool}


class options:  # noqa: N801 (used as a function)
    """Set options of planning for a ``with`` block, in this thread.

    The core knows ``fusion_limit=n`` (keep the first ``n`` fusions of each plan, to bisect a wrong number)
    and ``double_backward=True`` (run unfused, differentiable any number of times). A plugin's option is
    named after the plugin: ``options(**{"linear.min_rows": 64})``. Values must be hashable: they are part
    of the plan's key.

    Raises:
        ValueError: An unknown option, or a negative limit.
        TypeError: A value of the wrong type, or one that is not hashable.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if "." not in name and name not in _CORE_OPTIONS:
                raise ValueError(
                    f"unknown option {name!r}: the core has {sorted(_CORE_OPTIONS)}, "
                    "a plugin's option is named '<plugin>.<option>'"
                )
            expected = _CORE_OPTIONS.get(name)
            if expected is not None and type(value) is not expected:
                raise TypeError(f"option {name} must be of type {expected.__name__}, got {value!r}")
            hash(value)
        if values.get("fusion_limit", 0) < 0:
            raise ValueError(f"option fusion_limit must not be negative, got {values['fusion_limit']}")
        self._values = values
        self._before: list[Options] = []

    def __enter__(self) -> None:
        before = manager.scope.options
        self._before.append(before)
        manager.scope.options = tuple(sorted({**dict(before), **self._values}.items()))

    def __exit__(self, *exc_info: object) -> None:
        manager.scope.options = self._before.pop()


class autocast:  # noqa: N801 (used as a function)
    """Quantize inside a ``with`` block, by ``recipe``, in this thread.

    Args:
        enabled: False turns quantization off inside an enclosing block.
        recipe: The recipe, a value of a class that a plugin offers.
        calibrating: Reserved for the FP8 recipes; not supported yet.
        amax_reduction_group: Reserved for the FP8 recipes; not supported yet.

    Raises:
        TypeError: ``recipe`` is not a :class:`Recipe`.
        ValueError: Enabled without a recipe.
        NotImplementedError: A reserved argument was given.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if calibrating or amax_reduction_group is not None:
            raise NotImplementedError("autocast: calibrating and amax_reduction_group come with the FP8 recipes")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe must be an opfuse.Recipe, got {type(recipe).__name__}")
        if enabled and recipe is None:
            raise ValueError("autocast: the core has no default recipe, pass recipe=... (offered by a plugin)")
        self._recipe = recipe if enabled else None
        self._before: list[Recipe | None] = []

    def __enter__(self) -> None:
        self._before.append(manager.scope.recipe)
        manager.scope.recipe = self._recipe

    def __exit__(self, *exc_info: object) -> None:
        manager.scope.recipe = self._before.pop()


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Restored:
    """The settings in force when it was made, whatever they are when it is entered."""

    def __init__(self) -> None:
        scope = manager.scope
        self._inside = (scope.options, scope.selection, scope.recipe)
        self._outside = self._inside

    def __enter__(self) -> None:
        scope = manager.scope
        self._outside = (scope.options, scope.selection, scope.recipe)
        scope.options, scope.selection, scope.recipe = self._inside

    def __exit__(self, *exc_info: object) -> None:
        scope = manager.scope
        scope.options, scope.selection, scope.recipe = self._outside


def checkpoint_contexts() -> tuple[_Nothing, _Restored]:
    """A ``context_fn`` for ``torch.utils.checkpoint``: recompute under the settings of the forward.

    The recomputation runs when the ``with`` blocks around the forward are long over (and on a GPU in
    another thread). Without this it would run without the recipe, silently in high precision.
    """
    return _Nothing(), _Restored()
