"""CUDA graphs of a model's layers: ``opfuse.graphed`` and ``opfuse.ungraphed``.

- :mod:`.layers`: which modules, how they are called, and whether a graph can hold them;
- :mod:`.replaying`: the capture of one layer, and what runs in its place.
"""

from .layers import graphed, ungraphed

__all__ = ["graphed", "ungraphed"]
