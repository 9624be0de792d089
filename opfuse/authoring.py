"""What the author of a plugin may use beside the classes of the contract.

Attributes:
    ModuleCache: Values derived from a module: dropped, never copied, when the module is copied or
        pickled.
    ParamSource: Where an op reads a parameter that another module holds, for
        ``BasicOperation.read_parameters``.
    op_class: The class of an op as its author wrote it.
    wide: The dtype that the built-in ops compute in, for an input's dtype.
"""

from .fusible import ParamSource
from .op_context import ModuleCache
from .ops._common import wide
from .overrides import op_class

__all__ = ["ModuleCache", "ParamSource", "op_class", "wide"]
