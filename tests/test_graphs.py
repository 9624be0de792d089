"""CUDA graphs, on a machine without any."""

import contextlib

import pytest
import torch

from opfuse.ops.authoring import is_captured


@pytest.mark.parametrize("capturing", [0, 1])
def test_the_stream_of_the_tensors_device_is_asked(monkeypatch, capturing):
    """The current device is 0, and the graph is captured on one of two."""
    current = [0]

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    asked = lambda: current[0] == capturing  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    for index in (0, 1):
        assert is_captured(torch.device("cuda", index)) == (index == capturing)
    assert not is_captured(torch.device("cpu")) and current == [0]
