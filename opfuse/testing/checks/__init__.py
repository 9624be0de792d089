"""The checks, in the order in which their results help most.

A failure of a later one may come from a fault that an earlier one found.
"""

from ..scenarios import FOUND, Check
from . import calls, features, memory, planning, quantized, values  # noqa: F401  # each adds its checks

ORDER = """condition settings pattern runs codes unmodified_inputs \
saved_state unmodified_gradients output strides recompute gradients aliasing requires_grad \
grad_input autocast repeatable interleaved orders follows_values keeps_numbers \
nan_and_inf magnitude errors together neighbours saved_bytes released versions generator \
threads host_reads without_grad batch_invariance main_grad recipe held_results \
opcheck compile""".split()

CHECKS: dict[str, Check] = {name: FOUND[name] for name in ORDER}
"""Every check of a fusion, by name."""

ROOTS = ("runs", "output", "gradients")
DEPENDENT = frozenset(
    """settings output recompute gradients requires_grad autocast repeatable interleaved orders
follows_values keeps_numbers nan_and_inf magnitude errors together versions neighbours threads
without_grad batch_invariance main_grad recipe compile""".split()
)
"""Checks that fail for the same cause when an earlier one of ``ROOTS`` fails."""

__all__ = ["CHECKS", "DEPENDENT", "ROOTS", "Check"]
