"""Objects that hold models and are none, such as a trainer with a model and its reference."""

from __future__ import annotations

from typing import Any

from torch import nn


class Held(nn.ModuleDict):
    """The modules that an object has as attributes, under their names, each once.

    Its class is named like that of the object, as reports show it.

    Attributes:
        of: The object.
    """

    def __init__(self, of: Any) -> None:
        found = {id(m): (n, m) for n, m in [*vars(of).items()][::-1] if isinstance(m, nn.Module)}
        super().__init__()
        self._modules.update([*found.values()][::-1])
        self.of = of


def as_module(given: Any, what: str) -> nn.Module:
    """A module itself, or the modules that another object has as attributes.

    Args:
        given: The one or the other.
        what: The function that got it, for the error.

    Raises:
        TypeError: It is no module, and has none.
    """
    if isinstance(given, nn.Module):
        return given
    of, attributes = type(given), getattr(given, "__dict__", {})
    if not any(isinstance(each, nn.Module) for each in attributes.values()):
        expected = "a torch.nn.Module, or an object that has some as attributes"
        raise TypeError(f"{what} expected {expected}, got {of.__name__}")
    return type(of.__name__, (Held,), {"__module__": of.__module__})(given)  # type: ignore[no-any-return]
