"""Extra state as Transformer Engine writes it, over its versions, without Transformer Engine.

The classes stand under its module names while something is pickled, so that the bytes are its own.
"""

import contextlib
import enum
import io
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

MODULE = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


class _OverrideLinearPrecision(NamedTuple):
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling:
    margin: int = 0


@dataclass
class SomethingNew:
    margin: int = 0


CLASSES = (
    *(_FormatHelper, Format, _OverrideLinearPrecision),
    *(DelayedScaling, MXFP8BlockScaling, SomethingNew),
)


@contextlib.contextmanager
def named_as_there():
    """The classes are importable under Transformer Engine's names."""
    parts = MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    modules = {name: types.ModuleType(name) for name in names}
    before = {cls: cls.__module__ for cls in CLASSES}
    for cls in CLASSES:
        setattr(modules[MODULE], cls.__name__, cls)
        cls.__module__ = MODULE
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        for cls, module in before.items():
            cls.__module__ = module


def pickled(state, protocol=None):
    """Since 2.0: a tensor of the bytes of a pickle."""
    with named_as_there():
        content = bytearray(pickle.dumps(state, protocol))
    return torch.frombuffer(content, dtype=torch.uint8)


def saved(state):
    """Before 2.0: a file in memory."""
    file = io.BytesIO()
    torch.save(state, file)
    return file


def _scales(quantizers, which, history):
    columns = list(zip(*quantizers, strict=True))
    return {
        f"scale_{which}": torch.tensor(columns[0], dtype=torch.float32),
        f"amax_history_{which}": torch.tensor(columns[1], dtype=torch.float32).t().contiguous(),
    }


def module_2(forward, backward, recipe):
    """``te.Linear`` and the other modules since 2.0.

    ``forward`` has ``(scale, history)`` of input, weight and output of each product, and
    ``backward`` of the gradients of output and input.
    """
    history = recipe.amax_history_len
    extra = {"fp8_checkpoint": True, "fp8_max_fwd": 448.0, "num_gemms": len(forward) // 3}
    scales = _scales(forward, "fwd", history) | _scales(backward, "bwd", history)
    return pickled({"recipe": recipe, **scales, "extra_fp8_variables": extra})


def module_1(forward, backward):
    """The same before 2.0: scales and their inverses, and no recipe."""
    state = _scales(forward, "fwd", None) | _scales(backward, "bwd", None)
    for which in ("fwd", "bwd"):
        state[f"scale_inv_{which}"] = 1 / state[f"scale_{which}"]
    extra = {"fp8_checkpoint": True, "async_amax_reduction": False, "num_gemms": 1}
    buffers = {"FWD_AMAX_1": [torch.zeros(3), torch.zeros(3)]}  # until 1.5
    return saved({**state, "global_fp8_buffer": buffers, "extra_fp8_variables": extra})


def op_2(forward, backward, recipe):
    """``te.ops`` since 2.3: a dictionary for each pass."""
    state = {
        "forward": {
            "recipe": recipe,
            **_scales(forward, "fwd", None),
            "extra_fp8_variables": {"fp8_checkpoint": False, "fp8_max_fwd": 448.0},
        },
        "backward": {
            "recipe": recipe,
            **_scales(backward, "bwd", None),
            "extra_fp8_variables": {"fp8_checkpoint": False, "fp8_max_bwd": 57344.0},
        },
    }
    return pickled(state)


def op_1(forward, backward):
    """``te.ops`` in 1.13: a dictionary for each tensor, and no recipe."""
    one = {"input": ([forward[0]], "fwd"), "param": ([forward[1]], "fwd")}
    state = {
        mode: {**_scales(quantizers, which, None), "extra_fp8_variables": {}}
        for mode, (quantizers, which) in (one | {"grad_output": (backward, "bwd")}).items()
    }
    return pickled(state)
