"""Reads Python source into graphs, as far as it is in the grammar; independent of its callers."""

from . import table
from .reader import EveryWay, Reader
from .reads import (
    MISSING,
    Attributes,
    Place,
    behind_places,
    function_places,
    key_place,
    parameters_of,
)
from .source import Unreadable, compiled_like, tree_of
from .values import Callee, Held, Thing

__all__ = [
    "MISSING",
    "Attributes",
    "Callee",
    "EveryWay",
    "Held",
    "Place",
    "Reader",
    "Thing",
    "Unreadable",
    "behind_places",
    "compiled_like",
    "function_places",
    "key_place",
    "parameters_of",
    "table",
    "tree_of",
]
