"""Stand-ins: a fused op that runs its basic ops, and plugins made of values."""

import types

import opfuse

HOOKS = ("forward_fusions", "backward_fusions", "joint_fusions", "recipes", "quantizer")


class OneByOne(opfuse.FusedOperation):
    """Runs its basic ops one by one."""

    kwarg_names = None

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        self.calls.append("forward")
        return self.run_separately(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        self.calls.append("backward")
        return self.run_separately_backward(basic_op_ctxs, grad_output, **given)


def make_plugin(**hooks):
    """A plugin object whose hooks return (or, for functions, are) the values given."""
    plugin = type("Plugin", (), {})()  # pluggy compares plugins by ==
    for hook, value in hooks.items():
        assert hook in HOOKS, hook
        function = value if isinstance(value, types.FunctionType) else _returning(value)
        setattr(plugin, f"opfuse_{hook}", opfuse.hookimpl(function))
    return plugin


def _returning(value):
    return lambda: value
