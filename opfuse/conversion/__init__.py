"""Real models: chains that stand for the modules of a model, and how they get there."""

from .convert import convert, converted, revert
from .report import ConversionReport

__all__ = ["ConversionReport", "convert", "converted", "revert"]
