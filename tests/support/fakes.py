"""Stand-ins: a fused op that runs its basic ops, plugins made of values; and fixtures of which are there.

That is never left to what is installed.
"""

import contextlib
import types

import pytest
import torch

import opfuse
from opfuse.core import plugins

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


REGISTER = {
    "forward": opfuse.register_forward_fusion,
    "backward": opfuse.register_backward_fusion,
    "joint": opfuse.register_forward_backward_fusion,
}


@contextlib.contextmanager
def registered(kind, *fusions):
    """Fusions of a pass, or "joint" ones, registered in code for a block."""
    handles = [REGISTER[kind](fusion) for fusion in fusions]
    try:
        yield
    finally:
        for handle in handles:
            handle.unregister()


@pytest.fixture
def no_plugins():
    """No plugin and no fusion registered in code."""
    with plugins.isolated(), plugins.using(""):
        yield


@pytest.fixture
def one_thread():
    """PyTorch computes in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def register():
    """Hides what is installed; ``register(plugin, name=, distribution=, version=)`` adds a plugin for the test.

    Instead of a plugin object, hooks can be given by name: ``register(forward_fusions=[...])``.
    """

    def add(plugin=None, *, name="test", distribution="opfuse-plugin-test", version="1.0", **hooks):
        plugin = plugin or make_plugin(**hooks)
        return plugins.register(plugin, name=name, distribution=distribution, version=version)

    with plugins.isolated():
        yield add


@pytest.fixture
def fused():
    """``fused("Name")``: a fused op class that runs its basic ops one by one and counts its calls."""

    def make(name="Fused", **attributes):
        return type(name, (OneByOne,), {"calls": [], **attributes})

    return make
