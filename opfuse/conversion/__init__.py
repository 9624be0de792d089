"""Real models: chains that stand for the modules of a model, and how they get there.

Authors of converters find here what the core's own converters are made of.
"""

from .building import ORDINARY, by_reading
from .convert import Candidates, convert, converted, revert, standing_in
from .leaves import gated, leaf_of
from .report import ConversionReport
from .standing import Standing

__all__ = [
    "ORDINARY",
    "Candidates",
    "ConversionReport",
    "Standing",
    "by_reading",
    "convert",
    "converted",
    "gated",
    "leaf_of",
    "revert",
    "standing_in",
]
