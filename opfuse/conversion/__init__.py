"""Real models: chains that stand for the modules of a model, and how they get there."""

from .building import by_tracing
from .convert import Standing, candidates, convert, converted, revert, standing_in
from .report import ConversionReport

__all__ = [
    "ConversionReport",
    "Standing",
    "by_tracing",
    "candidates",
    "convert",
    "converted",
    "revert",
    "standing_in",
]
