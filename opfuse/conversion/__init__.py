"""Real models: chains that stand for the modules of a model, and how they get there."""

from .building import by_tracing
from .convert import Candidates, Standing, convert, converted, revert, standing_in
from .report import ConversionReport

__all__ = [
    "Candidates",
    "ConversionReport",
    "Standing",
    "by_tracing",
    "convert",
    "converted",
    "revert",
    "standing_in",
]
