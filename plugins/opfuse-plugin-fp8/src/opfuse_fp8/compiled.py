"""The twins compiled by ``torch.compile``: on a CPU, where ``opfuse tune`` found them faster.

What is compiled takes plain tensors and gives plain tensors. A quantizer's state is read before and
written after, so a call whose compilation fails leaves nothing behind, and the twin makes it again.

Equal ops share what was compiled. Each function has code of its own, since Dynamo gives up on code
that it compiled eight times; the number of rows is a symbol, and all else that a caller may change
is in the key.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opfuse import PluginWarning
from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops import LayerNorm

from . import casts, twins
from .conditions import DTYPES, described
from .quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXQuantizer,
    RescaledTensor,
)

logger = logging.getLogger("opfuse.fp8")

PATIENCE = 1.0
"""Seconds after which a compilation is announced."""

MOST = 256
"""How many functions are compiled in a process; what comes after runs as the twins do."""

_PLAIN = Tensor, torch.nn.Parameter  # subclasses have their ways
_functions: dict[Any, _Function] = {}
_lock = threading.Lock()


class Casting:
    """The cast at the end of a call: what it reads before, and what it makes of the tensors.

    Args:
        quantizer: One that the kernels know.
        usage: Which copies are needed.
        again: See :func:`opfuse_fp8.twins.cast`.

    Attributes:
        key: What the compiled code depends on.
        scale: What values are multiplied by, where that is state; or None.
    """

    def __init__(self, quantizer: Any, usage: Usage, again: Any = None) -> None:
        self._quantizer, self._records = quantizer, again is None
        self._cls = cls = type(quantizer)
        block = getattr(quantizer, "block", None)
        self.key = cls, quantizer.dtype, block, getattr(quantizer, "power_of_2", None), usage
        self.scale: Any = None
        if cls is DelayedQuantizer:  # what is made is not to follow the state
            self.scale = quantizer.scale.clone() if again is None else again.scale

    def takes(self, shape: torch.Size) -> bool:
        """Whether blocks are whole where they have to be; if not, the quantizer sees to it."""
        usage, rows = self.key[-1], shape[:-1].numel()
        if self._cls is BlockQuantizer:  # of others, in both ways, Inductor fuses loops wrongly
            return shape[-1] % 128 == 0
        odd = (usage.rowwise and shape[-1] % 32) or (usage.columnwise and rows % 32)
        return self._cls is not MXQuantizer or not odd

    def caster(self) -> Callable[[Tensor, Any], tuple[Any, Any]]:
        """From values and the scale to the tensors of the format, and the amax to record."""
        cls, dtype, block, power_of_2, usage = self.key
        if cls is DelayedQuantizer:
            stateless = CurrentQuantizer(dtype)
            return lambda values, scale: (
                stateless.with_scale(values, usage, scale).tensors(),
                casts.largest(values),
            )
        if cls is CurrentQuantizer:
            quantizer: Any = CurrentQuantizer(dtype, power_of_2)
        elif cls is BlockQuantizer:
            quantizer = BlockQuantizer(dtype, block, power_of_2=power_of_2)
        else:
            quantizer = MXQuantizer(dtype)
        return lambda values, scale: (_as_bytes(quantizer.quantize(values, usage).tensors()), None)

    def made(self, shape: Any, dtype: torch.dtype, tensors: Any, amax: Any) -> QuantizedTensor:
        """The quantized tensor; records what was seen."""
        if amax is not None and self._records:
            self._quantizer.record(amax)
        first, *others = tensors
        if self._cls is MXQuantizer:
            others[::2] = [t if t is None else t.view(torch.float8_e8m0fnu) for t in others[::2]]
        data = None if first is None else first.view(shape)
        given = shape, dtype, self._quantizer, data, *others
        if self._cls is DelayedQuantizer:
            return RescaledTensor(*given, self.scale)
        if self._cls is BlockQuantizer:
            return BlockScaledTensor(*given, block=self.key[2])
        return ScaledTensor(*given) if self._cls is CurrentQuantizer else MXTensor(*given)


def _as_bytes(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors, of E8M0 their bytes: Inductor does not know that dtype on a CPU."""
    e8m0 = torch.float8_e8m0fnu
    return [t.view(torch.uint8) if t is not None and t.dtype is e8m0 else t for t in tensors]


def compile_exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call."""
    # codes are those of the values in their dtype, and not of what they were rounded from
    exact = {"emulate_precision_casts": True}
    return torch.compile(function, fullgraph=True, dynamic=False, options=exact)


class _Function:
    """A function of plain tensors, compiled at its first call.

    Args:
        title: What messages call it.
        function: Gives tensors.
    """

    def __init__(self, title: str, function: Any) -> None:
        self._title, self._called = title, False
        self.failed = False
        code = function.__code__.replace(co_name=f"{function.__name__}_{id(self)}")
        own = types.FunctionType(code, function.__globals__, closure=function.__closure__)
        self._compiled: Any = compile_exactly(own)

    def __call__(self, tensors: Sequence[Tensor | None]) -> Any:
        """What the function gives, or None if it cannot be compiled."""
        for tensor in tensors:
            if tensor is not None and tensor.ndim == 2:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            with torch.no_grad():
                return self._compiled(*tensors) if self._called else self._first(tensors)
        except Exception as error:
            self.failed = True
            outcome = f"opfuse-plugin-fp8 cannot compile {self._title}, which runs uncompiled"
            text = " ".join(f"{outcome}: {type(error).__name__}: {error}".split())[:500]
            warnings.warn(PluginWarning(text), stacklevel=2)
            return None

    def _first(self, tensors: Sequence[Tensor | None]) -> Any:
        """The first call, which compiles, and says so if that takes long."""
        text = "opfuse-plugin-fp8 is compiling %s; the log level ERROR of %r silences this"
        timer = threading.Timer(PATIENCE, logger.warning, (text, self._title, logger.name))
        timer.daemon = True
        started = time.perf_counter()
        timer.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of what Inductor imports
                made = self._compiled(*tensors)
        finally:
            timer.cancel()
        logger.info("compiled %s in %.1f s", self._title, time.perf_counter() - started)
        self._called = True
        return made


def _function(title: str, key: Any, make: Callable[[], Any]) -> _Function | None:
    """What was compiled for a key, or is to be; None: it failed, or there are too many."""
    key = title, *key, torch.get_num_threads()
    found = _functions.get(key)
    if found is None:
        with _lock:
            if key not in _functions and len(_functions) < MOST:
                _functions[key] = _Function(title, make())
            found = _functions.get(key)
    return None if found is None or found.failed else found


def _takes(*tensors: Any) -> bool:
    """Whether compiled code takes these tensors, the first of which has the rows."""
    x = tensors[0]
    if not isinstance(x, Tensor) or not x.ndim or x.shape[:-1].numel() < 2 or not x.numel():
        return False
    # a mode is to see the operations, and a caller's trace too
    if is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(
        tensor is None
        or (type(tensor) in _PLAIN and tensor.dtype in DTYPES and tensor.device.type == "cpu")
        for tensor in tensors
    )


def _matrix(tensor: Tensor | None) -> Any:
    """The tensor as a dense matrix: a new object, on which a mark disturbs nobody."""
    if tensor is None:
        return None
    return tensor.detach().contiguous().view(-1, tensor.shape[-1])


def _detached(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach()


def _facts(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple([None if t is None else (t.dtype, t.shape[-1]) for t in tensors])


# The calls of the twins


def cast(
    x: Any, quantizer: Any, usage: Usage, again: QuantizedTensor | None = None
) -> QuantizedTensor:
    """:func:`opfuse_fp8.twins.cast`, compiled."""
    made = None
    if _takes(x) and (casting := Casting(quantizer, usage, again)).takes(x.shape):
        key = *casting.key, _facts(x)
        function = _function("a cast", key, lambda: casting.caster())
        made = function and function((_matrix(x), casting.scale))
    if made is None:
        return twins.cast(x, quantizer, usage, again)
    return casting.made(x.shape, x.dtype, *made)


def activation(
    op: Any,
    x: Tensor,
    bias: Tensor | None,
    dtype: Any,
    keep: bool,
    quantizer: Any,
    usage: Usage,
    again: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.activation`, compiled."""
    made, same = None, bias is None and dtype is x.dtype
    fits = _takes(x, bias) and dtype in DTYPES and (bias is None or bias.shape == x.shape[-1:])
    shape = _output(op, x.shape) if fits else None
    if shape is not None and (casting := Casting(quantizer, usage, again)).takes(shape):
        writes = keep and not same
        key = described(op), dtype, writes, *casting.key, _facts(x, bias)
        title = f"{type(op).__name__} with a cast"
        function = _function(title, key, lambda: _activation(op, dtype, writes, casting))
        made = function and function((_matrix(x), _detached(bias), casting.scale))
    if made is None or shape is None:
        return twins.activation(op, x, bias, dtype, keep, quantizer, usage, again)
    tensors, amax, hidden = made
    kept = None if not keep else x if same else hidden.view(x.shape)
    return casting.made(shape, dtype, tensors, amax), kept


def _activation(op: Any, dtype: torch.dtype, keep: bool, casting: Casting) -> Any:
    own, caster = copy.deepcopy(op), casting.caster()  # no op of a model is held

    def function(x: Tensor, bias: Any, scale: Any) -> Any:
        hidden = (x if bias is None else (x + bias).to(x.dtype)).to(dtype)
        return (*caster(own.forward_value(hidden), scale), hidden if keep else None)

    return function


def gradient(
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor | None,
    needs_sums: bool,
    quantizer: Any,
    usage: Usage,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.gradient`, compiled."""
    made, like = None, dy if x is None else x
    fits = _takes(like, dy) and (x is None or dy.shape == _output(op, x.shape))
    if fits and (casting := Casting(quantizer, usage)).takes(like.shape):
        then = None if x is None else op.with_numbers(numbers)
        key = described(then), needs_sums, *casting.key, _facts(dy, x)
        title = f"the gradient of {'an output' if x is None else type(op).__name__} with a cast"
        function = _function(title, key, lambda: _gradient(then, needs_sums, casting))
        made = function and function((_matrix(dy), _matrix(x), casting.scale))
    if made is None:
        return twins.gradient(op, numbers, dy, x, needs_sums, quantizer, usage)
    tensors, amax, sums = made
    return casting.made(like.shape, like.dtype, tensors, amax), sums


def _gradient(op: Any, needs_sums: bool, casting: Casting) -> Any:
    own, caster = copy.deepcopy(op), casting.caster()

    def function(dy: Tensor, x: Any, scale: Any) -> Any:
        dx = dy if x is None else own.backward_value(dy.to(x.dtype), x)
        return (*caster(dx, scale), dx.sum(0) if needs_sums else None)

    return function


def _output(op: Any, shape: torch.Size) -> torch.Size | None:
    """The shape of an activation's output; None: the op says what is wrong with the features."""
    if not op.gated:
        return shape
    whole = shape[-1] % (2 * (op.glu_interleave_size or 1)) == 0
    return torch.Size((*shape[:-1], shape[-1] // 2)) if whole else None


# Norms


class Normalized(NamedTuple):
    """What a norm gives.

    Attributes:
        output: The output, quantized.
        total: What was normalized, where that is a sum and wanted.
        mean: The mean of each row, ``(..., 1)`` in fp32, of a LayerNorm; or None.
        rstd: What each row is multiplied by, likewise.
    """

    output: QuantizedTensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def norm(
    op: Any,
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    keep: bool,
    quantizer: Any,
    usage: Usage,
) -> Normalized | None:
    """A norm of the last dimension, quantized; None: compiled code does not take the call.

    Args:
        op: The norm.
        tensors: The input, what is added to it, the weight and the bias; of these any may be None.
        dtype: What the output is rounded to before it is cast; None: the dtype of what is
            normalized.
        keep: Whether the sum is wanted.
        quantizer: One that the kernels know; it records what it saw.
        usage: Which copies are needed.
    """
    x: Any
    x, extra, weight, bias = tensors
    made = None
    if _takes(*tensors) and (casting := Casting(quantizer, usage)).takes(x.shape):
        summed = x.dtype if extra is None else torch.promote_types(x.dtype, extra.dtype)
        which = isinstance(op, LayerNorm), op.eps, op.zero_centered_gamma, dtype or summed
        key = *which, keep, *casting.key, _facts(*tensors)
        function = _function(
            f"{type(op).__name__} with a cast", key, lambda: _norm(*which, keep, casting)
        )
        given = _matrix(x), _matrix(extra), _detached(weight), _detached(bias), casting.scale
        made = function and function(given)
    if made is None:
        return None
    quantized, amax, total, *statistics = made
    mean, rstd = [None if t is None else t.view(*x.shape[:-1], 1) for t in statistics]
    output = casting.made(x.shape, dtype or summed, quantized, amax)
    return Normalized(output, None if total is None else total.view(x.shape), mean, rstd)


def _norm(
    centers: bool, eps: float, zero_centered: bool, dtype: Any, keep: bool, casting: Casting
) -> Any:
    caster = casting.caster()

    def function(x: Tensor, extra: Any, weight: Any, bias: Any, scale: Any) -> Any:
        total = x if extra is None else x + extra
        values = total.float()
        mean = values.mean(-1, keepdim=True) if centers else None
        values = values if mean is None else values - mean
        rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        y = values * rstd
        if weight is not None:
            y = y * (weight.float() + 1 if zero_centered else weight.float())
        y = (y if bias is None else y + bias.float()).to(dtype)
        return (*caster(y, scale), total if keep else None, mean, rstd)

    return function
