"""Makes the ops of a case for the classes of a pattern, and places them among others."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.engine.edges import Needs
from ..core.engine.planner import edges_of
from ..core.environment import Environment
from ..core.fusion import OneOf, Subclasses
from ..core.op import BasicOperation
from ..core.settings import current
from ..ops.distributed import WithProcessGroup
from .cases import CAST, Case, CubicActivation, CubicGLU, Op, first_width, is_cast, undrawn
from .failures import Declined
from .running import only
from .tensors import next_width

DEEP = (4, 4)
"""Rows for a norm over two dimensions: 16 in all, so that none is refused for their number."""


@functools.lru_cache(maxsize=4096)
def next_width_behind(op: Op, width: int) -> int | None:
    """Features that an op gives for ``width`` features, or None if it does not take that many."""
    with undrawn():
        return width if is_cast(op) else next_width(op(), width)


def width_behind(ops: Sequence[Op], width: int) -> int:
    """Features that ops give for ``width`` features."""
    return functools.reduce(lambda at, op: next_width_behind(op, at) or at, ops, width)


def placed(case: Case, ops: tuple[Op, ...], width: int) -> Case:
    """The case with other ops, between ops that ask for the casts at their ends."""
    case = case.with_(ops=ops, rows=DEEP if is_deep(ops) else case.rows, before=(), after=())
    insists, ratio = first_width(tuple(op for op in ops if not is_cast(op)))
    case = case.with_(width=None if insists or width in (8, 8 * ratio) else width)
    if case.subject.passes == "backward" and is_cast(ops[0]):
        return case.with_(before=(Op(built_in.BasicLinear, min(width, 512), width),))
    if case.subject.passes == "forward" and is_cast(ops[-1]):
        behind = width_behind(ops, width)
        return case.with_(after=(Op(built_in.BasicLinear, behind, min(behind, 512)),))
    return case


def is_deep(ops: Sequence[Op]) -> bool:
    """Return whether a norm is over more than the last dimension."""
    norms = [op for op in ops if issubclass(op.cls, (built_in.LayerNorm, built_in.RMSNorm))]
    return any(isinstance(arg, tuple) for op in norms for arg in op.args[:1])


def matched(case: Case, ops: Sequence[BasicOperation] = ()) -> tuple[BasicOperation, ...]:
    """The ops that the fusion would replace, as its condition sees them: with their casts.

    They are of the case's ``ops``, or new ones.

    Raises:
        Declined: Nothing is cast where its pattern has a cast.
    """
    basic, recipe, start = ops or case.basic_ops(), case.recipe, len(case.before)
    stop = start + len(case.ops) - sum(map(is_cast, case.ops))
    if not case.edges:
        return tuple(basic[start:stop])
    env = environment(case.device, dtype=case.dtype, recipe=recipe)
    flags = (True,) * len(basic)
    needs = Needs(True, 0, flags, tuple((True,) * len(op.param_names or ()) for op in basic))
    with only():
        edges = edges_of(Chain(basic), env, needs, current.values._replace(recipe=recipe))
    begin, end = 2 * start + (not is_cast(case.ops[0])), 2 * stop + is_cast(case.ops[-1])
    view = edges.view(basic, case.subject.passes)
    found = [op for op, place in zip(view.ops, view.places, strict=True) if begin <= place < end]
    if len(found) != len(case.ops):
        raise Declined("nothing is cast where its pattern has a cast")
    return tuple(found)


def environment(device: str, **changes: Any) -> Environment:
    """The environment of a plain training step, with the options of plugins that are in force."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    env = Environment(torch.device(device), capability, torch.float32, requires_grad=True)
    options = {name: value for name, value in current.options if "." in name}
    return env._replace(options=options, **changes)


# Ops of the classes of a pattern, with arguments that matter

Makers = Mapping[type, Callable[[int], Any]]


APART = ("Cast", "TrackedDropout")  # no pattern has one


def _built_in_classes() -> tuple[type[BasicOperation], ...]:
    every = [getattr(built_in, name) for name in built_in.__all__ if name not in APART]
    alone = [cls for cls in every if not issubclass(cls, WithProcessGroup)]
    classes = [c for c in alone if issubclass(c, BasicOperation) and not inspect.isabstract(c)]
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
    known = {**_MAKERS, **makers}
    made = known[cls](width) if cls in known else _by_constructor(cls, width)
    return [made] if isinstance(made, Op) else list(made)


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


def _read(op: Op, **given: Any) -> Op:
    """An op that reads the parameters of another one."""
    return Op(op.cls, op, via="reading", **given)


def _norms(cls: type, width: int) -> list[Op]:
    plain = [Op(cls, width, zero_centered_gamma=centered) for centered in (False, True)]
    read = _read(Op(cls, width, eps=0.1))
    without = [Op(cls, width, elementwise_affine=False)]
    without += [Op(cls, width, bias=False)] if cls is built_in.LayerNorm else []
    return [*plain, Op(cls, width, eps=0.1), Op(cls, (DEEP[-1], width)), read, *without]


def _linears(width: int) -> list[Op]:
    turned = Op(built_in.BasicLinear, width + width // 2, width)  # as GPT-2's Conv1D
    return [Op(built_in.BasicLinear, width, width + width // 2), _read(turned, transposed=True)]


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


_SCALES = -0.75, 0.0, 1.0, 2.0**-13, 256.0
_ADDS: Any = {}, {"in_place": True}
_TOKENS: Any = {}, {"temperature": 0.7, "softcap": 3.0, "ignore_index": 1}

_MAKERS: Makers = {
    built_in.Cast: lambda at: CAST,
    built_in.BasicLinear: _linears,
    built_in.Bias: lambda at: [Op(built_in.Bias, at), _read(Op(built_in.Bias, at))],
    built_in.ParallelLinear: _parallel,
    built_in.LayerNorm: lambda at: _norms(built_in.LayerNorm, at),
    built_in.RMSNorm: lambda at: _norms(built_in.RMSNorm, at),
    built_in.ConstantScale: lambda at: [Op(built_in.ConstantScale, scale) for scale in _SCALES],
    built_in.AddExtraInput: lambda at: [Op(built_in.AddExtraInput, **given) for given in _ADDS],
    built_in.GroupedLinear: _grouped,
    built_in.Dropout: lambda at: [Op(built_in.Dropout, p) for p in (0.0, 0.5, 1.0)],
    built_in.Reshape: lambda at: Op(built_in.Reshape, (-1, at)),
    built_in.CrossEntropy: lambda at: [Op(built_in.CrossEntropy, **given) for given in _LOSSES],
    built_in.ScaledActivation: lambda at: Op(built_in.ScaledActivation, Op(built_in.SiLU)),
    built_in.LowRankLinear: lambda at: Op(built_in.LowRankLinear, at, at + at // 2, 2, scaling=0.5),
    built_in.TokenLogProb: lambda at: [Op(built_in.TokenLogProb, **given) for given in _TOKENS],
}
