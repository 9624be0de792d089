"""The names that :mod:`opfuse.testing` offers."""

from ..tuning.tolerance import ROWS, TOLERANCES, assert_close, tolerance
from .cases import Case, Op, Subject, find, subjects
from .checks import CHECKS
from .failures import Declined, Failure
from .generate import Chains, CubicActivation, CubicGLU, make_chains
from .machine import Tier, tiers
from .quantizers import QuantizerSuite
from .recipes import Delayed, PerBlock, PerTensor
from .report import Outcome, run, run_all, snippet
from .suite import FusionSuite
from .tensors import lay_out

# fmt: off
__all__ = [
    "CHECKS", "ROWS", "TOLERANCES", "Case", "Chains", "CubicActivation",
    "CubicGLU", "Declined", "Delayed", "Failure", "FusionSuite", "Op",
    "Outcome", "PerBlock", "PerTensor", "QuantizerSuite", "Subject",
    "Tier", "assert_close", "find", "lay_out", "make_chains", "run", "run_all", "snippet",
    "subjects", "tiers", "tolerance",
]
# fmt: on
