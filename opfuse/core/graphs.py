"""Whether a CUDA graph is captured."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    """Whether what runs on a device now is captured into a CUDA graph, and runs when it replays.

    Its stream is asked, wherever the current device is.

    Args:
        device: That of a tensor.
    """
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
