"""Finds the plugin that serves a recipe: by name, by class, and with quantizers."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from torch.compiler import is_compiling

from .environment import Environment
from .plugins import manager
from .quantization import Quantizer, QuantizerRole, Recipe
from .records import PluginFilter, PluginRecord, normalize
from .settings import current

CACHE_RECIPE = "fp8-current"
"""The format of inputs kept with ``cache_quantized_input``, as in Transformer Engine."""


def _offering() -> dict[str, type[Recipe]]:
    """Every recipe of the loaded plugins; for a shared name, the one of a plugin in use."""
    in_use = manager.active(current.selection)
    loaded = [record for record in manager.records if record.state == "loaded"]
    return dict(ChainMap(*[record.recipes for record in (*in_use, *reversed(loaded))]))


def recipe_of(name: str) -> Recipe:
    """Return the recipe of a name, with its defaults.

    Raises:
        ValueError: No installed plugin offers one, or it needs arguments.
    """
    return _recipe_of(name, current.selection, manager.generation)


@functools.lru_cache(64)
def _recipe_of(name: str, selection: str | None, generation: int) -> Recipe:
    """As :func:`recipe_of`; the same one in every step, which is quickly compared."""
    known = _offering()
    if name not in known:
        package = manager.packages.get(name)
        install = f"install {package}, which does; " if package else ""
        raise ValueError(f"no plugin offers a recipe {name!r}; {install}{_offered()}")
    try:
        return known[name]()
    except TypeError as error:
        who = known[name].__name__
        raise ValueError(f"{name!r} has no defaults, pass a value of {who}: {error}") from error


def offered(recipe: Any, who: str = "autocast") -> Recipe:
    """Return a recipe, given as one or by its name; refuse it if no installed plugin offers it.

    Raises:
        TypeError: It is neither a recipe nor, outside of ``torch.compile``, the name of one.
        ValueError: No installed plugin offers it.
    """
    if isinstance(recipe, str):
        if is_compiling():
            raise TypeError(
                f"{who}: inside of torch.compile give the recipe itself, not its name {recipe!r}"
            )
        return recipe_of(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{who}: expected an opfuse.Recipe, or the name of one, got {type(recipe).__name__}"
        )
    if not is_compiling():
        manager.active(current.selection)  # loads them
        if not _owners(recipe) and not _blocked(recipe):
            what = f"no plugin offers {type(recipe).__name__}, with the hook opfuse_recipes"
            raise ValueError(f"{what}; {_offered()}")
    return recipe


def why_off(recipe: Recipe | None, text: str | None) -> str:
    """Return why no plugin serves an installed recipe; ``""`` if one in use does.

    Warns once.

    Args:
        recipe: The recipe, or None.
        text: The selection of plugins.
    """
    if recipe is None:
        return ""
    in_use, owners = manager.active(text), _owners(recipe)
    if any(record in in_use for record in owners):
        return ""
    names = " and ".join(dict.fromkeys(r.name for r in owners or _blocked(recipe)))
    why = f"not quantized by {type(recipe).__name__}: the plugin {names} is off"
    manager.warn_once(why, f"autocast: {why} in the selection {text!r}")
    return why


def recipe_name(recipe: Recipe) -> str:
    """The registered name of a recipe's class, or the place where it is defined."""
    cls = type(recipe)
    names = [name for r in _owners(recipe) for name, known in r.recipes.items() if known is cls]
    return names[0] if names else f"{cls.__module__}.{cls.__qualname__}"


def new_quantizer(
    recipe: Recipe, role: QuantizerRole, env: Environment | None, siblings: Sequence[Quantizer] = ()
) -> Quantizer:
    """Return a new quantizer from the first plugin that has one for ``recipe`` and ``role``.

    The order is that in which fusions choose: the user's list, then by distribution. ``siblings``
    are those of the tensors just before it, see the hook.

    Raises:
        RuntimeError: No plugin has one.
    """
    selection = PluginFilter.parse(current.selection)

    def order(record: PluginRecord) -> tuple[Any, str]:
        return selection.position(record), normalize(record.distribution)

    for record in sorted(manager.active(current.selection), key=order):
        given: Any = dict(recipe=recipe, role=role, env=env, siblings=siblings)
        quantizer = manager.ask(record, "opfuse_quantizer", Quantizer, **given)
        if quantizer is not None:
            return quantizer  # type: ignore[no-any-return]
    raise RuntimeError(
        f"no plugin offers a quantizer for {recipe!r} and {role!r}: install the one that does"
    )


def _owners(recipe: Recipe) -> list[PluginRecord]:
    return [r for r in manager.records if type(recipe) in r.recipes.values()]


def _blocked(recipe: Recipe) -> list[PluginRecord]:
    """Plugins that are not imported and whose package defines the recipe."""
    package = type(recipe).__module__.partition(".")[0]
    found = [r for r in manager.records if r.state == "found"]
    return [r for r in found if r.module.partition(".")[0] == package]


def _offered() -> str:
    """The available recipes; a plugin that is off is not imported just to ask it."""
    names = ", ".join(sorted(_offering())) or "none"
    off = ", ".join(record.name for record in manager.records if record.state == "found")
    return f"those in use offer {names}{f'; not asked, since they are off: {off}' if off else ''}"
