"""Write the scales in a checkpoint of Transformer Engine as plain values, which opfuse can read.

Since version 2.0 Transformer Engine pickles the state of delayed scaling, with classes of its own.
Run this where it is installed. Neither opfuse, a GPU nor a network is needed::

    python te_state.py checkpoint.pt plain.pt

Everything else in the checkpoint stays as it is. ``opfuse_fp8.from_te_extra_state`` reads the
result, see docs/from-te-ops.md. To unpickle a file runs what it says: give it only checkpoints that
you trust, as you would to Transformer Engine itself.
"""

from __future__ import annotations

import argparse
import enum
import io
import pickle
from typing import Any

import torch

_KEY = "_extra_state"


def readable(checkpoint: Any) -> Any:
    """The checkpoint with each extra state as plain values, in dictionaries of dictionaries too."""
    if not isinstance(checkpoint, dict):
        return checkpoint
    return {
        key: plain(unpickled(value)) if str(key).rpartition(".")[2] == _KEY else readable(value)
        for key, value in checkpoint.items()
    }


def unpickled(state: Any) -> Any:
    """The content of an extra state, of any version; None if there is none."""
    if isinstance(state, io.BytesIO):  # before 2.0
        state.seek(0)
        return torch.load(state, map_location="cpu", weights_only=False)
    if isinstance(state, torch.Tensor):
        state = bytes(state.cpu().tolist())
    return pickle.loads(state) if state else None


def plain(value: Any) -> Any:
    """A value as tensors, numbers, strings, lists and dictionaries.

    A recipe becomes a dictionary of its fields, with the name of its class. A member of an
    enumeration, and a function, become their names.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"class": type(value).__name__, **plain(vars(value))}


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", help="what torch.save wrote")
    parser.add_argument("plain", help="where to write the result")
    given = parser.parse_args()
    checkpoint = torch.load(given.checkpoint, map_location="cpu", weights_only=False)
    torch.save(readable(checkpoint), given.plain)


if __name__ == "__main__":
    main()
