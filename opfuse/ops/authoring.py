"""What the built-in ops share, for ops and fusions of other packages.

Attributes:
    ExtraTensorOperation: The base of ops with extra inputs or outputs.
    check_bool: Refuses anything but True and False.
    expected: The text of a refusal: who expected what, and what came.
    rows_of: A tensor with one row dimension.
    shows: Makes an ``extra_repr`` of the attributes that are not None.
"""

from ._common import ExtraTensorOperation, check_bool, expected, rows_of, shows

__all__ = ["ExtraTensorOperation", "check_bool", "expected", "rows_of", "shows"]
