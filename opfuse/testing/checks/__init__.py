"""The checks, in the order in which their answers help most: what a later one finds may be due to an earlier one."""

from . import features, memory, planning, values  # noqa: F401  # each adds its checks
from .registry import FOUND, Check

ORDER = """condition same_plan pattern runs unmodified saved_state output gradients requires_grad aliasing grad_input
repeatable follows_values nan_and_inf errors neighbours refusals without_grad autocast gradcheck recipe saved_bytes
released deepcopy checkpoint compile opcheck""".split()

CHECKS: dict[str, Check] = {name: FOUND[name] for name in ORDER}
"""Every check of a fusion, by name."""

__all__ = ["CHECKS", "Check"]
