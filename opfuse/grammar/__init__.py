"""What of Python a graph may stand for, read from source; it knows nothing of who asks."""

from .reader import Reader
from .reads import MISSING, Place
from .source import Unreadable, compiled_like, tree_of
from .values import Held

__all__ = ["MISSING", "Held", "Place", "Reader", "Unreadable", "compiled_like", "tree_of"]
