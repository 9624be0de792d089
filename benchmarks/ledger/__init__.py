"""The ledger: bytes that the kernels of plugins move, against the floor of their fusion.

``python -m benchmarks.ledger [PLUGIN]`` prints it. Tests have this package as ``ledger``: the
checkout must not be on their path, where it would hide the opfuse that is installed.

At a case's small shapes every program runs in Triton's interpreter, and every byte is counted. At
the real shapes the launch rule of each target says how many programs there are. Some of them run,
each with all of its work, and represent the others.
"""

from .counting import counting
from .entries import Moved, count_separate, count_small, estimate
from .peers import estimate_peer
from .predicted import assert_predicted

__all__ = [
    "Moved",
    "assert_predicted",
    "count_separate",
    "count_small",
    "counting",
    "estimate",
    "estimate_peer",
]
