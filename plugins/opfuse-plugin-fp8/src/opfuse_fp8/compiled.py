"""The twins compiled by ``torch.compile``: on a CPU, where ``opfuse tune`` found them faster.

Compiled code takes plain tensors and returns plain tensors. A quantizer's state is read before and
written after, so a call whose compilation fails changes nothing, and the twin computes it instead.

Equal ops share compiled code. Each function has its own code, since Dynamo gives up on code that it
compiled eight times; the number of rows is a symbol, and everything else that a caller may change
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
from typing import Any

import torch
from opfuse_triton.calls import DTYPES, PLAIN
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opfuse import PluginWarning
from opfuse.core.quantization import QuantizedTensor
from opfuse.ops import LayerNorm

from . import casts, twins
from .conditions import described, has_blocks, output_shape
from .quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer
from .twins import Into, Normalized

logger = logging.getLogger("opfuse.fp8")

PATIENCE = 1.0
"""Seconds after which a compilation is announced."""

MOST = 256
"""How many functions are compiled in a process; later ones run as the twins do."""

_functions: dict[Any, _Function] = {}
_lock = threading.Lock()


class CompiledCasting:
    """The cast at the end of a call: the state that it reads before, and the tensors that it makes.

    Args:
        into: What the values are cast into, by a quantizer that the kernels know.

    Attributes:
        key: What the compiled code depends on.
        scale: The factor of the values, where that is state; or None.
    """

    def __init__(self, into: Into) -> None:
        quantizer, usage, again = into
        self._into, self._quantizer, self._usage = into, quantizer, usage
        names = "block", "power_of_2", "swizzles"
        settings = tuple([getattr(quantizer, name, None) for name in names])
        self.key = type(quantizer), quantizer.dtype, settings, usage
        self.scale: Any = None
        if isinstance(quantizer, DelayedQuantizer):  # the result must not follow the state
            self.scale = quantizer.scale.clone() if again is None else again.scale

    def takes(self, shape: torch.Size) -> bool:
        """Whether blocks are whole where they have to be; if not, the quantizer handles them."""
        # of others, in both ways, Inductor fuses loops wrongly
        if isinstance(self._quantizer, BlockQuantizer):
            return shape[-1] % 128 == 0
        return has_blocks(self._into, shape)

    def caster(self) -> Callable[[Tensor, Any], tuple[Any, Any]]:
        """From values and the scale to the tensors of the format, and the amax to record."""
        usage = self._usage
        if isinstance(self._quantizer, DelayedQuantizer):
            stateless = CurrentQuantizer(self._quantizer.dtype)
            return lambda values, scale: (
                stateless.with_scale(values, usage, scale),
                casts.largest(values),
            )
        quantizer = copy.copy(self._quantizer)  # it must hold no quantizer of a model
        return lambda values, scale: (quantizer.tensors_of(values, usage), None)

    def made(self, shape: Any, dtype: torch.dtype, tensors: Any, amax: Any) -> QuantizedTensor:
        """The quantized tensor; records the largest magnitude."""
        if amax is not None and self._into.again is None:
            self._quantizer.record(amax)
        if self.scale is not None:
            tensors = *tensors, self.scale
        return self._quantizer.over(shape, dtype, tensors)  # type: ignore[no-any-return]


def compile_exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call."""
    # codes are those of the values in their dtype, not before they were rounded to it
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
        """The result of the function, or None if it cannot be compiled."""
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


def _called(
    title: str, key: Any, casting: CompiledCasting, tensors: Sequence[Any], make: Callable[[], Any]
) -> Any:
    """The result of a compiled function; None: it failed, or there are too many.

    Args:
        title: What messages call it.
        key: What the code depends on besides the cast and the tensors.
        casting: The cast at its end.
        tensors: Its arguments, before the scale of the cast.
        make: Returns the function.
    """
    facts = tuple([None if t is None else (t.dtype, t.shape[-1]) for t in tensors])
    key = title, *key, *casting.key, facts, torch.get_num_threads()
    found = _functions.get(key)
    if found is None:
        with _lock:
            if key not in _functions and len(_functions) < MOST:
                _functions[key] = _Function(title, make())
            found = _functions.get(key)
    if found is None or found.failed:
        return None
    return found((*[_plain(tensor) for tensor in tensors], casting.scale))


def _takes(*tensors: Any) -> bool:
    """Whether compiled code takes these tensors, the first of which has the rows."""
    x, there = tensors[0], [tensor for tensor in tensors if tensor is not None]
    if not all([type(each) in PLAIN and each.dtype in DTYPES and each.is_cpu for each in there]):
        return False
    if x.shape[:-1].numel() < 2 or not x.numel():
        return False
    # a mode must see the operations, and so must a caller's trace
    return not is_dynamo_compiling() and torch._C._len_torch_dispatch_stack() == 0


def _plain(tensor: Tensor | None) -> Any:
    """A vector, or else a dense matrix: a new object, so a mark on it has no side effect."""
    if tensor is None or tensor.ndim == 1:
        return None if tensor is None else tensor.detach()
    return tensor.detach().contiguous().view(-1, tensor.shape[-1])


# The calls of the twins


def cast(x: Any, into: Into) -> QuantizedTensor:
    """:func:`opfuse_fp8.twins.cast`, compiled."""
    made = None
    if _takes(x) and (casting := CompiledCasting(into)).takes(x.shape):
        made = _called("a cast", (), casting, (x,), casting.caster)
    if made is None:
        return twins.cast(x, into)
    return casting.made(x.shape, x.dtype, *made)


def activation(
    op: Any, x: Tensor, bias: Tensor | None, dtype: Any, keep: bool, into: Into
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.activation`, compiled."""
    made, same = None, bias is None and dtype is x.dtype
    fits = _takes(x, bias) and dtype in DTYPES and (bias is None or bias.shape == x.shape[-1:])
    shape = output_shape(op, x.shape) if fits else None
    if shape is not None and (casting := CompiledCasting(into)).takes(shape):
        key = described(op), dtype, keep and not same
        title = f"{type(op).__name__} with a cast"
        make = lambda: _activation(op, dtype, keep and not same, casting)  # noqa: E731
        made = _called(title, key, casting, (x, bias), make)
    if made is None or shape is None:
        return twins.activation(op, x, bias, dtype, keep, into)
    tensors, amax, hidden = made
    kept = None if not keep else x if same else hidden.view(x.shape)
    return casting.made(shape, dtype, tensors, amax), kept


def _activation(op: Any, dtype: torch.dtype, keep: bool, casting: CompiledCasting) -> Any:
    own, caster = copy.deepcopy(op), casting.caster()  # it must hold no op of a model

    def function(x: Tensor, bias: Any, scale: Any) -> Any:
        hidden = (x if bias is None else (x + bias).to(x.dtype)).to(dtype)
        return (*caster(own.forward_value(hidden), scale), hidden if keep else None)

    return function


def gradient(
    op: Any, numbers: Any, dy: Tensor, x: Tensor | None, needs_sums: bool, into: Into
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.gradient`, compiled."""
    made, like = None, dy if x is None else x
    fits = _takes(like, dy) and (x is None or dy.shape == output_shape(op, x.shape))
    if fits and (casting := CompiledCasting(into)).takes(like.shape):
        then = None if x is None else op.with_numbers(numbers)
        title = f"the gradient of {'an output' if x is None else type(op).__name__} with a cast"
        make = lambda: _gradient(then, needs_sums, casting)  # noqa: E731
        made = _called(title, (described(then), needs_sums), casting, (dy, x), make)
    if made is None:
        return twins.gradient(op, numbers, dy, x, needs_sums, into)
    tensors, amax, sums = made
    return casting.made(like.shape, like.dtype, tensors, amax), sums


def _gradient(op: Any, needs_sums: bool, casting: CompiledCasting) -> Any:
    own, caster = copy.deepcopy(op), casting.caster()

    def function(dy: Tensor, x: Any, scale: Any) -> Any:
        dx = dy if x is None else own.backward_value(dy.to(x.dtype), x)
        return (*caster(dx, scale), dx.sum(0) if needs_sums else None)

    return function


# Norms


def norm(
    op: Any, tensors: Sequence[Any], dtype: torch.dtype | None, keep: bool, save: bool, into: Into
) -> Normalized | None:
    """A norm of the last dimension, quantized; None: compiled code does not take the call.

    Args:
        op: The norm.
        tensors: The input, what is added to it, the weight and the bias; of these any may be None.
        dtype: What the output is rounded to before it is cast; None: the dtype of what is
            normalized.
        keep: Whether the sum is wanted.
        save: Whether the statistics are; compiled code always gives them.
        into: What the output is cast into, by a quantizer that the kernels know.
    """
    x, extra, *_ = tensors
    made = None
    if _takes(*tensors) and (casting := CompiledCasting(into)).takes(x.shape):
        summed = x.dtype if extra is None else torch.promote_types(x.dtype, extra.dtype)
        which = isinstance(op, LayerNorm), op.eps, op.zero_centered_gamma, dtype or summed
        title = f"{type(op).__name__} with a cast"
        make = lambda: _norm(*which, keep, casting)  # noqa: E731
        made = _called(title, (*which, keep), casting, tensors, make)
    if made is None:
        return None
    quantized, amax, total, *statistics = made
    mean, rstd = [None if t is None else t.view(*x.shape[:-1], 1) for t in statistics]
    output = casting.made(x.shape, dtype or summed, quantized, amax)
    return Normalized(output, None if total is None else total.view(x.shape), mean, rstd)


def _norm(
    centers: bool, eps: float, zero_centered: bool, dtype: Any, keep: bool, casting: CompiledCasting
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
