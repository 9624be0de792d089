"""Makes ops: for each class of a pattern, with arguments that matter."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import ops as built_in
from ..core.fusion import OneOf, Subclasses
from ..core.op import BasicOperation
from ..ops.distributed import WithProcessGroup
from .cases import CAST, CubicActivation, CubicGLU, Op
from .placing import DEEP

Makers = Mapping[type, Callable[[int], Any]]


APART = ("Cast", "TrackedDropout")  # no pattern has one


def _built_in_classes() -> tuple[type[BasicOperation], ...]:
    classes = [getattr(built_in, name) for name in built_in.__all__ if name not in APART]
    classes = [
        cls
        for cls in classes
        if issubclass(cls, BasicOperation)
        and not inspect.isabstract(cls)
        and not issubclass(cls, WithProcessGroup)
    ]
    # representatives first
    classes.sort(key=lambda cls: cls not in (built_in.GELU, built_in.Bias))
    return (*classes, CubicActivation, CubicGLU)


def classes_of(element: Any) -> list[type]:
    """The classes of ops to try for a pattern element.

    For an abstract class these are the built-in subclasses.
    """
    if isinstance(element, OneOf):
        return list(dict.fromkeys(cls for inner in element.elements for cls in classes_of(inner)))
    if isinstance(element, Subclasses):
        found: list[type] = [cls for cls in _built_in_classes() if issubclass(cls, element.cls)]
        if issubclass(element.cls, BasicOperation) and not inspect.isabstract(element.cls):
            found = [element.cls, *found]
        return list(dict.fromkeys(found))
    return [element]


def variants_of(cls: type, width: int, makers: Makers) -> list[Op]:
    """The ways to make an op of a class for an input of ``width`` features."""
    for known in (makers, _MAKERS):
        if cls in known:
            made = known[cls](width)
            return [made] if isinstance(made, Op) else list(made)
    return _by_constructor(cls, width)


@functools.lru_cache(maxsize=4096)
def _by_constructor(cls: type, width: int) -> list[Op]:
    found = []
    for op in (Op(cls), Op(cls, width)):
        with contextlib.suppress(Exception):  # its constructor wants something else
            op()
            found.append(op)
            break
    if issubclass(cls, _NAMED):
        takes = inspect.signature(cls).parameters
        given = {n: v for n, v in {**_OTHERWISE, "rotary_dim": width // 2}.items() if n in takes}
        found += [op.with_(**{n: v}) for op in found for n, v in given.items()]
    if cls in _ARGUMENTS:
        found.append(Op(cls, **_ARGUMENTS[cls]))
    return found


_ROTATING = (built_in.RoPE, built_in.ApplyRoPE)
_NAMED = (built_in.GatedActivation, built_in.ScaledActivation, built_in.GELU, *_ROTATING)
_OTHERWISE: Any = {"glu_interleave_size": 2, "approximate": "none", "interleaved": True}
"""Values of arguments of these classes that are not the default."""
_CLAMPED = {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.5}
_BOUNDED = {"beta1": 2.0, "beta2": 3.0}
_LOSS: Any = {"ignore_index": 1, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0}
_LOSSES: Any = {}, _LOSS, {"reduction": "sum", "ignore_index": 0}, {"reduction": "none"}
_ARGUMENTS: Mapping[type, Mapping[str, Any]] = {
    built_in.ClampedSwiGLU: _CLAMPED,
    built_in.ScaledClampedQGeGLU: _CLAMPED,
    built_in.SiTUGLU: _BOUNDED,
    built_in.ScaledSiTUGLU: _BOUNDED,
    built_in.L2Normalization: {"eps": 0.1},
}
"""Arguments that are not the default, and matter for inputs around 1."""


def _norms(cls: type, width: int) -> list[Op]:
    plain = [Op(cls, width, zero_centered_gamma=centered) for centered in (False, True)]
    read = Op(cls, Op(cls, width, eps=0.1), via="reading")
    without = [Op(cls, width, elementwise_affine=False)]
    without += [Op(cls, width, bias=False)] if cls is built_in.LayerNorm else []
    return [*plain, Op(cls, width, eps=0.1), Op(cls, (DEEP[-1], width)), read, *without]


def _linears(width: int) -> list[Op]:
    turned = Op(built_in.BasicLinear, width + width // 2, width)  # as GPT-2's Conv1D
    read = Op(built_in.BasicLinear, turned, via="reading", transposed=True)
    return [Op(built_in.BasicLinear, width, width + width // 2), read]


def _parallel(width: int) -> list[Op]:
    """With and without biases, of one width and of two."""
    sizes = width - width // 4, width // 4 + width % 2
    cls, plain = built_in.ParallelLinear, [Op(built_in.BasicLinear, width, size) for size in sizes]
    biased = Op(built_in.Linear, width, sizes[0])
    return [Op(cls, tuple(plain)), Op(cls, (biased, plain[1])), Op(cls, (biased,), via="reading")]


def _grouped(width: int) -> list[Op]:
    plain = Op(built_in.GroupedLinear, 3, width, width + width // 2)
    one = Op(built_in.GroupedLinear, 1, width, width, bias=False)
    return [plain, one, plain.with_(scale_bias=True)]


_MAKERS: Makers = {
    built_in.Cast: lambda width: CAST,
    built_in.BasicLinear: _linears,
    built_in.Bias: lambda width: [
        Op(built_in.Bias, width),
        Op(built_in.Bias, Op(built_in.Bias, width), via="reading"),
    ],
    built_in.ParallelLinear: _parallel,
    built_in.LayerNorm: lambda width: _norms(built_in.LayerNorm, width),
    built_in.RMSNorm: lambda width: _norms(built_in.RMSNorm, width),
    built_in.ConstantScale: lambda width: [
        Op(built_in.ConstantScale, scale) for scale in (-0.75, 0.0, 1.0, 2.0**-13, 256.0)
    ],
    built_in.AddExtraInput: lambda width: [
        Op(built_in.AddExtraInput),
        Op(built_in.AddExtraInput, in_place=True),
    ],
    built_in.GroupedLinear: _grouped,
    built_in.Dropout: lambda width: [Op(built_in.Dropout, p) for p in (0.0, 0.5, 1.0)],
    built_in.Reshape: lambda width: Op(built_in.Reshape, (-1, width)),
    built_in.CrossEntropy: lambda width: [Op(built_in.CrossEntropy, **given) for given in _LOSSES],
    built_in.ScaledActivation: lambda width: Op(built_in.ScaledActivation, Op(built_in.SiLU)),
    built_in.LowRankLinear: lambda width: Op(
        built_in.LowRankLinear, width, width + width // 2, 2, scaling=0.5
    ),
    built_in.TokenLogProb: lambda width: [
        Op(built_in.TokenLogProb),
        Op(built_in.TokenLogProb, temperature=0.7, softcap=3.0, ignore_index=1),
    ],
}
