"""The conformance kit: tests of a plugin against the contract.

``FusionSuite`` and ``QuantizerSuite`` are for the plugin's tests, and the parts are for tests of
kernels.

Not imported by opfuse itself. Needs pytest.
"""

from ..tuning.tolerance import ROWS, TOLERANCES, assert_close, tolerance
from .cases import Case, CubicActivation, CubicGLU, Op, Subject, find, subjects
from .checks import CHECKS
from .generate import Chains, make_chains
from .machine import Tier, tiers
from .quantizers import QuantizerSuite
from .recipes import Delayed, PerBlock, PerTensor
from .report import Outcome, run, run_all, snippet
from .running import Declined, Failure
from .suite import FusionSuite
from .tensors import lay_out

# fmt: off
__all__ = [
    "CHECKS", "ROWS", "TOLERANCES", "Case", "Chains", "CubicActivation", "CubicGLU", "Declined",
    "Delayed", "Failure", "FusionSuite", "Op", "Outcome", "PerBlock", "PerTensor",
    "QuantizerSuite", "Subject", "Tier", "assert_close", "find", "lay_out", "make_chains", "run",
    "run_all", "snippet", "subjects", "tiers", "tolerance",
]
# fmt: on
