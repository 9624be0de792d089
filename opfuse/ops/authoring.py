"""What the built-in ops share, for ops and fusions of other packages.

Attributes:
    ExtraTensorOperation: The base of ops with extra inputs or outputs.
    NotSplit: A layer that a process has as a whole.
    OpGrads: What ``op_backward`` gives, as a type.
    check_bool: Refuses anything but True and False.
    check_size: Refuses what is no size; gives it as an int.
    expected: The text of a refusal: who expected what, and what came.
    rows_of: A tensor with one row dimension.
    shows: Makes an ``extra_repr`` of the attributes that are not None.
"""

from ._common import ExtraTensorOperation, OpGrads, check_bool, check_size, expected, rows_of, shows
from ._split import NotSplit

__all__ = [
    "ExtraTensorOperation",
    "NotSplit",
    "OpGrads",
    "check_bool",
    "check_size",
    "expected",
    "rows_of",
    "shows",
]
