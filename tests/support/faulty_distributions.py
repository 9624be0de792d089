"""Installed plugins that are wrong, each in one way: entry points, and a module."""

_FUSION = """
class Gelu(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,) = self.basic_ops
        return act.forward_value(act.operand(basic_op_ctxs[0], input_)), [()]


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [opfuse.Fusion([opfuse.ops.GELU], Gelu)]
"""

SOUND = "import opfuse, torch\n" + _FUSION
"""A sound plugin, as one module."""

FUNCTION = """
import opfuse


def nothing(ops, *, recipe):
    return ops


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [nothing]
"""
"""A plugin with a fusion function, which has no pattern."""

# name -> check, message, entry points, module
DISTRIBUTIONS: dict[str, tuple[str, str, str, str]] = {
    "imports_triton": (
        "imports",
        "imports triton",
        "opfuse.v1",
        "import opfuse, triton\n" + _FUSION,
    ),
    "wrong_group": (
        "entry_point",
        "is in group opfuse.v2",
        "opfuse.v2",
        "import opfuse\n" + _FUSION,
    ),
    "does_not_import": (
        "entry_point",
        "does not load: import: ZeroDivisionError",
        "opfuse.v1",
        "1 / 0",
    ),
    "unknown_hook": (
        "entry_point",
        "unknown hook opfuse_sideways_fusions",
        "opfuse.v1",
        "import opfuse\n" + _FUSION.replace("forward_fusions", "sideways_fusions"),
    ),
    "hash_order": (
        "processes",
        "two processes plan the same chain differently",
        "opfuse.v1",
        "import opfuse\n"
        + _FUSION.replace(
            "[opfuse.ops.GELU], Gelu)", "[opfuse.ops.GELU], Gelu, name=f'gelu {hash(chr(97))}')"
        ),
    ),
}
"""Faults of an installed plugin."""
