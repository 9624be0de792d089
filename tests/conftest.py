"""Fixtures shared by the tests: which plugins are there is never left to what is installed."""

import pytest
from fakes import OneByOne, make_plugin

from opfuse import plugins


def pytest_collection_modifyitems(items):
    """What hides the installed plugins gives the same with them: it is left out where all of them are there."""
    for item in items:
        if not {"no_plugins", "register"}.isdisjoint(item.fixturenames):
            item.add_marker("alone")


@pytest.fixture
def no_plugins():
    """No plugin and no fusion registered in code."""
    before, plugins.manager._registered = plugins.manager._registered, []
    plugins.manager._changed()
    with plugins.using(""):
        yield
    plugins.manager._registered = before
    plugins.manager._changed()


@pytest.fixture
def register():
    """Hides what is installed; ``register(plugin, name=, distribution=, version=)`` adds a plugin for the test.

    Instead of a plugin object, hooks can be given by name: ``register(forward_fusions=[...])``.
    """
    manager = plugins.manager
    before = manager.records, manager._registered
    manager.records, manager._registered = [], []
    manager._changed()
    added = []

    def add(plugin=None, *, name="test", distribution="opfuse-plugin-test", version="1.0", **hooks):
        record = plugins.register(
            plugin or make_plugin(**hooks), name=name, distribution=distribution, version=version
        )
        added.append(record)
        return record

    with plugins.using(None):
        yield add
    for record in added:
        plugins.remove(record)
    manager.records, manager._registered = before
    manager._changed()


@pytest.fixture
def fused():
    """``fused("Name")``: a fused op class that runs its basic ops one by one and counts its calls."""

    def make(name="Fused", **attributes):
        return type(name, (OneByOne,), {"calls": [], **attributes})

    return make
