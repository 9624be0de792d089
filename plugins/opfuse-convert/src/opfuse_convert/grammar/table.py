"""The functions, methods and properties that the grammar knows.

Each gives a new value of its arguments, or a view of them. None writes into an argument, draws
random numbers, or reads anything but its arguments and PyTorch's modes.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

_TORCH = """
abs add addmm bmm cat chunk clamp clamp_max clamp_min concat cos div eq erf exp exp2 expm1 flatten
full_like ge gelu gt isfinite isinf isnan layer_norm le log log1p lt matmul max maximum mean min
minimum mm movedim mul multiply ne neg ones_like permute pow reciprocal relu reshape rms_norm roll
rsqrt select sigmoid sign sin softmax split sqrt square squeeze stack sub subtract sum tan tanh
transpose true_divide unbind unflatten unsqueeze var where zeros_like
"""
_FUNCTIONAL = """
celu elu gelu hardsigmoid hardswish hardtanh layer_norm leaky_relu linear logsigmoid mish normalize
relu relu6 rms_norm selu sigmoid silu softmax softplus softsign tanh
"""
_METHODS = """
abs add bfloat16 chunk clamp clamp_max clamp_min contiguous cos detach dim div double erf exp
expand expand_as eq flatten float ge gt half le log lt masked_fill matmul max mean min movedim mul
narrow ne neg new_ones new_zeros numel permute pow reciprocal repeat repeat_interleave reshape
rsqrt select sigmoid sign sin size softmax split sqrt square squeeze sub sum t tanh to transpose
type_as unbind unflatten unsqueeze var view view_as where
"""
_MATH = """
acos asin atan ceil cos erf exp floor fabs log log10 log2 pow sin sqrt tan tanh
"""
_OPERATORS = """
Add:add Sub:sub Mult:mul Div:truediv FloorDiv:floordiv Mod:mod Pow:pow MatMult:matmul
Eq:eq NotEq:ne Lt:lt LtE:le Gt:gt GtE:ge USub:neg UAdd:pos
"""


@functools.cache
def writing_places(function: Any) -> tuple[int, ...]:
    """The positions of a function's arguments ``inplace`` and ``out``; a built-in has none."""
    if not isinstance(function, types.FunctionType):
        return ()
    names = enumerate(inspect.signature(function).parameters)
    return tuple(place for place, name in names if name in TOLD_TO_WRITE)


def _named(home: Any, names: str) -> dict[Any, str]:
    """The functions of a module that this PyTorch has, and their names."""
    found = {name: getattr(home, name) for name in names.split() if hasattr(home, name)}
    return {function: f"{home.__name__}.{name}" for name, function in found.items()}


FUNCTIONS: Mapping[Any, str] = {**_named(F, _FUNCTIONAL), **_named(torch, _TORCH)}
"""Functions of tensors, and the names under which people know them."""

TOLD_TO_WRITE = frozenset({"inplace", "out"})
"""The names of arguments that say whether, or where, a function writes into a tensor."""

RANDOM: Mapping[Any, str] = {F.dropout: "torch.nn.functional.dropout"}
"""Functions that draw random numbers. An op may replace them; nothing else uses them."""

NUMBERS: Mapping[Any, str] = {
    **_named(math, _MATH),
    **{each: each.__name__ for each in (abs, bool, float, int, len, max, min, round)},
}
"""Functions of numbers."""

METHODS = frozenset(_METHODS.split())
"""Methods of tensors."""

PROPERTIES = frozenset("device dtype is_cuda mT ndim shape T".split())
"""Properties of tensors."""

OPERATORS: Mapping[str, Callable[..., Any]] = {
    node: getattr(operator, name) for node, name in (pair.split(":") for pair in _OPERATORS.split())
}
"""The function of each operator and comparison, by its name in a syntax tree."""

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, type(Ellipsis))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a name, or something else that cannot change."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in PLAIN


def is_same(now: Any, then: Any) -> bool:
    """Whether a value is what it was: one object, or plain and of one type and value."""
    if now is then:
        return True
    if type(now) is not type(then) or not is_plain(now):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and all(map(is_same, now, then))
    # 0.0 and -0.0 are equal, and NaN is not
    return repr(now) == repr(then) if isinstance(now, float) else bool(now == then)
