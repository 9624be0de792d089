"""Where the kernels run. Importing this imports no Triton."""

from __future__ import annotations

import enum
import functools
import numbers
import os
import shutil
import sys
from typing import Any

import torch
from opfuse_triton import Predicted, why_no_kernel
from opfuse_triton.calls import DTYPES, are_plain
from opfuse_triton.calls import PLAIN as PLAIN
from torch import Tensor

from opfuse import Environment
from opfuse.ops import Identity
from opfuse.ops.authoring import op_class

from .nvfp4 import NVFP4Quantizer, StochasticNVFP4Quantizer
from .quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer
from .twins import Into

ANY_SHAPE = BlockQuantizer, CurrentQuantizer, DelayedQuantizer
"""Quantizers whose kernels cast any shape: :func:`has_blocks` need not be asked."""

_KNOWN = BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer
_FP4 = NVFP4Quantizer, StochasticNVFP4Quantizer
_CODES = torch.float8_e4m3fn, torch.float8_e5m2
_COMMON = frozenset({*vars(Identity()), "_caches", "_captured", "_path"})
"""Attributes that every op has, and those that do not affect an activation's formulas."""


def of_quantizer(quantizer: Any, alone: bool = False) -> str:
    """Why the kernels cannot cast as a quantizer does, as a sentence; empty: they can.

    Args:
        quantizer: The quantizer.
        alone: Whether nothing but a cast is fused.
    """
    dtype, square = getattr(quantizer, "dtype", None), getattr(quantizer, "square", False)
    chooses = bool(getattr(quantizer, "four_over_six", None))
    return of_kind(type(quantizer), dtype, square, chooses, alone)


@functools.lru_cache
def of_kind(kind: type, dtype: Any, square: bool, chooses: bool, alone: bool) -> str:
    """The same by the class of the quantizer, and by what decides it of its attributes."""
    name = kind.__name__
    if kind in _FP4:
        late = "NVFP4 needs the largest magnitude of the whole tensor first, and it is cast alone"
        either = "its kernels have the largest magnitude of a block at 6, and here it is at 4 or 6"
        return late if not alone else either if chooses else ""
    if kind not in _KNOWN:
        known = ", ".join(cls.__name__ for cls in _KNOWN)
        return f"its kernels cast as {known} do, and this is a {name}"
    if dtype not in _CODES:
        return f"its kernels make E4M3 and E5M2, and the {name} makes {dtype}"
    if square:
        return "its kernels have a scale for 1 x 32 values, and here 32 x 32 share one"
    return ""


def why_not(env: Environment, quantizer: Any, activation: Any = None, alone: bool = False) -> str:
    """Why a kernel cannot run, as a sentence; empty: it can.

    Args:
        env: Where it would run.
        quantizer: The quantizer that it would cast with.
        activation: The activation in it, or None.
        alone: Whether nothing but a cast is fused.
    """
    if why := why_no_kernel(env.device, env.capability) or of_quantizer(quantizer, alone):
        return why
    if env.dtype not in DTYPES:
        return f"its kernels compute in fp32, and the ops in {str(env.dtype)[6:]}"
    if env.compiling:
        return "its kernels are not in graphs: torch.compile fuses the separate ops"
    from . import formulas

    return "" if activation is None else formulas.why_not(activation)


def why_not_compiled(env: Environment, quantizer: Any, activation: Any = None) -> str:
    """Why the twins are not compiled there, as a sentence; empty: they can be.

    Args:
        env: Where they would run.
        quantizer: The quantizer that they would cast with.
        activation: The activation in it, or None.
    """
    if env.device.type != "cpu" or not why_no_kernel(env.device):
        return "they are compiled on a CPU, without Triton's interpreter"
    if why := of_quantizer(quantizer):
        return why
    if env.compiling:
        return "its kernels are not in graphs: torch.compile fuses the separate ops"
    if env.dtype not in DTYPES:
        return f"its kernels run on a GPU, this is cpu, and {str(env.dtype)[6:]} is not compiled"
    if why := no_compiler():
        return f"its kernels run on a GPU, this is cpu, and {why}"
    name = type(activation).__name__
    if activation is not None and not activation.deterministic:
        return f"{name} does not declare itself deterministic, and compiled it may draw others"
    if described(activation) is None:
        return f"{name} has more attributes than numbers, and what is compiled is shared"
    if activation is not None and activation.number_names is None:
        return f"{name} does not declare number_names, and what is compiled is shared"
    return ""


def chosen(
    env: Environment, quantizer: Any, activation: Any = None, alone: bool = False
) -> tuple[str, str]:
    """Which module computes a fused cast, and if that is the twins, why it is not the kernels.

    Args:
        env: Where it would run.
        quantizer: The quantizer that it would cast with.
        activation: The activation in it, or None.
        alone: Whether nothing but a cast is fused.
    """
    given = env, quantizer, activation
    if not (why := why_not(*given, alone)):
        return "library", ""
    if env.options.get("fp8.twins") or why_not_compiled(*given):
        return "twins", why
    return "compiled", ""


def no_compiler() -> str:
    """What Inductor lacks on this CPU, in words; empty: nothing."""
    if torch.__version__ < "2.13":
        return f"Inductor of torch {torch.__version__} rounds to half precision elsewhere"
    if sys.platform == "win32":  # there it finds one by itself
        return ""
    default = "clang++" if sys.platform == "darwin" else "g++"
    name = (os.environ.get("CXX", "").split() or [default])[0]
    return "" if shutil.which(name) else f"the C++ compiler {name!r} is not found (CXX names one)"


def described(op: Any) -> tuple[Any, ...] | None:
    """The numbers that decide an activation's formulas, hashable; None: numbers are not enough.

    Args:
        op: The activation; None: the identity.
    """
    if op is None:
        return ()
    if any(True for _ in (*op.parameters(), *op.buffers(), *op.children())):
        return None
    own = tuple([pair for pair in vars(op).items() if pair[0] not in _COMMON])
    if not all(_is_plain(value) for _, value in own):
        return None
    return op_class(op), own, op.numbers_of()


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (numbers.Number, str, enum.Enum, torch.dtype))


PREDICTED = Predicted(
    "fp8",
    {
        "cast+bias": (1.29, ["cast + bias, current"]),
        "activation+cast": (1.40, ["bias + GELU + cast, current"]),
        "cast+activation": (1.38, ["cast + bias + GELU, current"]),
        "norm+cast": (6.75, ["RMSNorm + cast, current"]),
        "add+norm+cast": (5.00, ["add + RMSNorm + cast, current"]),
    },
)
"""The speed of each fusion by the model, relative to the separate ops and a kernel that casts
alone, in the slowest of its cases. A cast alone is not in it: on a GPU the quantizer launches the
same kernel, see :mod:`opfuse_fp8.direct`."""


def runs(
    quantizer: Any, env: Environment, activation: Any = None, name: str = "cast"
) -> bool | str:
    """Where a kernel can run, or its twin is wanted or measured to pay; else the sentence.

    Args:
        quantizer: The quantizer that it would cast with.
        env: Where it would run.
        activation: The activation in it, or None.
        name: That of the fusion.
    """
    alone = name == "cast"
    if env.options.get("fp8.twins"):
        return of_quantizer(quantizer, alone) or True
    if env.device.type != "cpu" or not why_no_kernel(env.device):
        if why := why_not(env, quantizer, activation, alone):
            return why
        return alone or PREDICTED.why_not(name, env) or True
    if why := why_not_compiled(env, quantizer, activation):
        return why
    if env.measured is None:
        return "its kernels run on a GPU, and this is cpu: opfuse tune measures compiled code here"
    return True


def output_shape(op: Any, shape: torch.Size) -> torch.Size | None:
    """The shape of an activation's output; None: the op says what is wrong with the features."""
    if not op.gated:
        return shape
    whole = bool(shape) and shape[-1] % (2 * (op.glu_interleave_size or 1)) == 0
    return torch.Size((*shape[:-1], shape[-1] // 2)) if whole else None


def has_blocks(into: Into, shape: torch.Size, parts: int = 1) -> bool:
    """Whether blocks are whole where they have to be, also within halves that lie side by side."""
    quantizer, usage, _ = into
    columns = shape[-1]
    rows = shape.numel() // max(columns, 1)
    if isinstance(quantizer, (MXQuantizer, NVFP4Quantizer)):
        wide = quantizer.row_multiple
        across, down = [used or quantizer.square for used in usage]
        return not ((across and columns % (wide * parts)) or (down and rows % wide))
    if isinstance(quantizer, BlockQuantizer) and parts > 1:
        return not ((usage.rowwise or quantizer.block[0] > 1) and columns % (128 * parts))
    return True


def takes(*tensors: Any) -> bool:
    """Whether the kernels take these tensors, of which all but the first may be None."""
    return isinstance(tensors[0], Tensor) and tensors[0].ndim > 0 and are_plain(*tensors)
