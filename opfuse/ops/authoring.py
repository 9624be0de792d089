"""What the authors of ops and fusions need, in addition to the classes of the contract.

Attributes:
    ExtraTensorOperation: The base of ops with extra inputs or outputs.
    ModuleCache: Values derived from a module: dropped, never copied, when the module is copied or
        pickled.
    NotSplit: A layer that a process has as a whole.
    OpGrads: What ``op_backward`` gives, as a type.
    ParamSource: The place of a parameter that another module holds, for
        ``BasicOperation.read_parameters``.
    add_product: Adds a product of matrices to a sum, by the product itself where that is possible.
    added: A sum, written into its first part if it may be.
    adds_itself: Whether it is.
    cast: A tensor in another dtype.
    check_bool: Refuses anything but True and False.
    check_size: Refuses what is no size; gives it as an int.
    expected: The text of a refusal: who expected what, and what came.
    is_captured: Whether what runs on a device now is captured into a CUDA graph.
    matmul_precision: How PyTorch multiplies fp32 matrices on a kind of device.
    may_write: Whether results of torch's operations may be overwritten. They may not while a
        ``TorchDispatchMode`` or a ``TorchFunctionMode`` is active, which may hold them; but if its
        class declares ``keeps_no_tensors = True``, as one that only counts does.
    op_class: The class of an op as its author wrote it.
    reusable: The ``out`` of an operation that may overwrite a result, or None.
    rows_of: A tensor with one row dimension.
    shows: Makes an ``extra_repr`` of the attributes that are not None.
    tiled: Operands of a product whose features fill the tiles of a CPU's library, where a row must
        not depend on the others.
    wide: The dtype that the built-in ops compute in, for an input's dtype.
    widen: A tensor in that dtype.
"""

from ..core.fusible import ParamSource
from ..core.introspection import op_class
from ..core.op_context import ModuleCache
from ..core.overwriting import may_write
from ..core.settings import is_captured
from ._common import ExtraTensorOperation, OpGrads, check_bool, check_size, expected, rows_of, shows
from ._products import tiled
from ._split import NotSplit
from .arithmetic import (
    add_product,
    added,
    adds_itself,
    cast,
    matmul_precision,
    reusable,
    wide,
    widen,
)

# fmt: off
__all__ = [
    "ExtraTensorOperation", "ModuleCache", "NotSplit", "OpGrads", "ParamSource", "add_product",
    "added", "adds_itself", "cast", "check_bool", "check_size", "expected", "is_captured",
    "matmul_precision", "may_write", "op_class", "reusable", "rows_of", "shows", "tiled", "wide",
    "widen",
]
# fmt: on
