"""The conformance kit for fusions with collectives: a suite, on ranks that threads simulate.

Needs pytest.
"""

from .rank_checks import CHECKS, Trial
from .sharded import LAYERS, ShardedLayer, Split
from .suite import DistributedSuite

__all__ = ["CHECKS", "LAYERS", "DistributedSuite", "ShardedLayer", "Split", "Trial"]
