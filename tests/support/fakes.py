"""Stand-ins: a fused op that runs its basic ops, and plugins made of values."""

import types

import opfuse

HOOKS = ("forward_fusions", "backward_fusions", "joint_fusions", "recipes", "quantizer")


class OneByOne(opfuse.FusedOperation):
    """Runs its basic ops one by one."""

    kwarg_names = None

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **_):
        self.calls.append("forward")
        for ctx, op, kwargs in zip(basic_op_ctxs, self.basic_ops, basic_op_kwargs, strict=True):
            input_ = op.op_forward(
                ctx, input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **kwargs
            )
        return input_, [()] * len(basic_op_ctxs)

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        self.calls.append("backward")
        grads = []
        for ctx, op in zip(basic_op_ctxs[::-1], list(self.basic_ops)[::-1], strict=True):
            grad_output, grad_params = op.op_backward(ctx, grad_output)
            grads.append(grad_params)
        return grad_output, grads[::-1], [()] * len(basic_op_ctxs)


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
