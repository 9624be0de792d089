"""Fixtures shared by the tests: which plugins are there is never left to what is installed."""

import pytest
from fakes import OneByOne, make_plugin

from opfuse.core import plugins


@pytest.fixture
def no_plugins():
    """No plugin and no fusion registered in code."""
    with plugins.isolated(), plugins.using(""):
        yield


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
