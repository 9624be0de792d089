"""A module's own forward on a stand-in for it, some of whose parts are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opfuse.ops.authoring import op_class


def forward(module: Any, args: Any, kwargs: Any) -> Any:
    """Run the forward of a module's class."""
    return op_class(module).forward(module, *args, **kwargs)


def run(
    module: Any,
    parts: dict[str, Any],
    attributes: dict[str, Any],
    args: Any,
    kwargs: Any,
    of_class: Callable[[Any, Any, Any], Any] = forward,
) -> Any:
    """The forward of a module's class, on an object of the class that shares the rest with it.

    Attributes that the forward, or a function that it calls, writes to the stand-in are copied to
    the module.

    Args:
        module: The module.
        parts: Replacements of some of its children.
        attributes: Replacements of some of its attributes.
        args: The arguments of the call.
        kwargs: Those by name.
        of_class: Runs the forward.
    """
    others = {**attributes, "_modules": {**module._modules, **parts}}
    before = {**vars(module), **others}
    twin = object.__new__(type(module))
    object.__setattr__(twin, "__dict__", {**before})
    result = of_class(twin, args, kwargs)
    after = vars(twin)
    # the module itself may have been written to as well, by a hook of a child, say
    for key, value in after.items():
        if value is not before.get(key, others):
            vars(module)[key] = value
    for key in before.keys() - after.keys():
        vars(module).pop(key, None)
    return result


class ChildInPlace:
    """Replaces a child: its attributes are the child's, and a call does something else."""

    def __init__(self, child: Any) -> None:
        self._child = child

    def __call__(self, x: Any) -> Any:
        """Return the result that the child would give."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)
