"""Real models: chains that stand for the modules of a model, and how they get there.

Authors of converters find here what the core's own converters are made of.
"""

from .building import by_tracing
from .convert import Candidates, Standing, convert, converted, revert, standing_in
from .leaves import gated, leaf_of
from .report import ConversionReport

__all__ = [
    "Candidates",
    "ConversionReport",
    "Standing",
    "by_tracing",
    "convert",
    "converted",
    "gated",
    "leaf_of",
    "revert",
    "standing_in",
]
