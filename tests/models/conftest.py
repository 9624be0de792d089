"""Tiny models of known families. The quick set has one of each; ``OPFUSE_MODELS=all`` asks for everything."""

import logging
import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent
THEIRS = (  # what the libraries warn of among themselves
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
)


def pytest_collection_modifyitems(items):
    """Warnings of other libraries are theirs; those of opfuse are errors as everywhere."""
    for item in items:
        if HERE in item.path.parents:
            for rule in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(rule), append=False)
            item.add_marker(pytest.mark.filterwarnings("error::opfuse.PluginWarning"))


@pytest.fixture(autouse=True)
def logging_breaks_no_graph():
    """No graph breaks where a library logs."""
    logs = {getattr(logging.Logger, "warning_once", logging.Logger.warning)}  # transformers adds it
    with torch._dynamo.config.patch(ignore_logging_functions=logs):
        yield
