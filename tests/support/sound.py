"""Sound fusions with random patterns, for all of which the conformance suite must find nothing."""

from __future__ import annotations

import copy
import random

import torch
from chains import Forwarding, Joint
from opfuse_distributed.collectives import WithProcessGroup

from opfuse import ops, plugins
from opfuse.core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from opfuse.ops.authoring import may_write

ABSTRACT = ("Activation", "GatedActivation", "ScaledActivation")
COLLECTIVES = {
    name
    for name in plugins.manager.entry_points["opfuse.ops"]
    if issubclass(getattr(ops, name), WithProcessGroup)
}
RARE = ("CrossEntropy", "RoPE", "ApplyRoPE")  # few patterns of chance with these can match at all
CLASSES = [
    getattr(ops, name)
    for name in ops.__all__
    if name not in (*ABSTRACT, *COLLECTIVES, *RARE, "Linear")
]


def _rounded_otherwise(y):
    """Every other element one step up or down, as from a kernel that adds up in another order.

    Which ones has nothing to do with the features that they belong to.
    """
    places = (torch.arange(y.numel(), device=y.device).reshape(y.shape) * 2654435761 >> 16) % 4
    for place, end in ((0, 0.0), (2, 2.0)):
        moved = torch.nextafter(y, end * y)
        y = torch.where((places == place) & y.isfinite() & moved.isfinite(), moved, y)
    return y


def _in_fp32(value):
    """A copy of a tensor of floating-point numbers; anything else as it is."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float32, copy=True) if floating else value


class Rounding(Forwarding):
    """Rounds otherwise than the separate ops.

    In half precision it computes in fp32 and rounds the last result alone, as kernels do: a last
    bit of half precision more would be an error that none of them makes.
    """

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        if torch.compiler.is_compiling():
            return super().fuser_forward(basic_op_ctxs, input_, **given)
        wide = self._output_in_fp32(basic_op_ctxs, input_, **given)  # before an op writes into it
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        result = torch.empty_like(y)  # in the same order in memory
        if y.dtype.itemsize > 2:
            return result.copy_(_rounded_otherwise(y)), extras
        if wide is not None:
            y = torch.where(y.isfinite() & wide.isfinite(), _rounded_otherwise(wide).to(y.dtype), y)
        return result.copy_(y), extras

    def _output_in_fp32(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **given):
        """None where the ops draw numbers, or where a mode holds what they write into."""
        if any(isinstance(op, (ops.Dropout, ops.LowRankLinear)) for op in self.basic_ops):
            return None
        if not may_write():
            return None
        inner = [copy.copy(ctx) for ctx in basic_op_ctxs]
        for ctx in inner:
            ctx.params, ctx.dtype = tuple(map(_in_fp32, ctx.params)), ctx.dtype and torch.float32
            ctx.requires_grad = ctx.input_requires_grad = False
            ctx.param_requires_grad = (False,) * len(ctx.params)
        extras = [[*map(_in_fp32, of_op)] for of_op in basic_op_extra_inputs]
        with torch.no_grad():
            wide, _ = self.run_separately(
                inner, _in_fp32(input_), basic_op_extra_inputs=extras, **given
            )
        return wide


class RoundingJoint(Joint, Rounding):
    """The same in a joint fusion."""


class Again(Joint):
    """Gives its output again where the next op does not keep it, from a copy of its own."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        first, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        first.copied = first.may_recompute
        if first.copied:
            first.recomputable_output = y
            last.save_for_backward(y, *last.to_save)
        return y, extras

    def fuser_recompute(self, basic_op_ctxs):
        return basic_op_ctxs[-1].saved_tensors[0].clone()

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        if basic_op_ctxs[0].copied:
            basic_op_ctxs[-1].saved_tensors = basic_op_ctxs[-1].saved_tensors[1:]
        return super().fuser_backward(basic_op_ctxs, grad_output, **given)


def without_recipe(matched, env):
    return True if env.recipe is None else "it does not quantize"


def not_in_fp16(matched, env):
    if env.dtype is torch.float16:
        return "it has no kernel for fp16"
    return without_recipe(matched, env)


def fusion(seed):
    """``(kind, fusion)`` of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(["forward", "backward", "joint"])
    linear = [
        ops.BasicLinear,
        ops.Bias,
        ops.GELU,
        ops.AddExtraInput,
        ops.MakeExtraOutput,
        ops.ConstantScale,
    ]

    def element():
        cls = rng.choice(linear if rng.random() < 0.5 else CLASSES)
        return rng.choice(
            [cls, cls, cls, OneOf(cls, rng.choice(CLASSES)), Subclasses(ops.Activation)]
        )

    pattern = [element() for _ in range(rng.randint(1, 3))]
    for place in range(len(pattern)):
        if rng.random() < 0.3 and len(pattern) > 1:
            pattern[place] = rng.choice([Optional, OneOrMore])(pattern[place])
    if all(isinstance(part, Optional) for part in pattern):
        pattern.append(ops.Identity)
    cls = {
        "forward": [Forwarding, Rounding],
        "backward": [Forwarding],
        "joint": [Joint, RoundingJoint, Again],
    }[kind]
    when, build = rng.choice([without_recipe, not_in_fp16]), rng.choice(cls)
    made = Fusion(pattern, build, when, name=f"sound {seed}")
    if made.names_casts:  # it gives what its casts make, and a joint fusion names none
        made = Fusion(pattern, Forwarding, name=f"sound {seed}")
        kind = "forward" if kind == "joint" else kind
    return kind, made


def report(seed, names=None):
    """Check a fusion of ``seed``; the pattern, how many cases ran, and what was found.

    ``names`` are those of the checks; None: all.
    """
    kind, made = fusion(seed)
    return {"seed": seed, "pattern": _text(made.pattern), **look(kind, made, names)}


def look(kind, made, names=None):
    """How many cases ran with a fusion, and what was found."""
    from opfuse import testing

    checks = [testing.CHECKS[name] for name in names or testing.CHECKS]
    chains = testing.make_chains(testing.Subject("sound", kind, made))
    outcomes = [testing.run_all(check, chains) for check in checks if kind in check.passes]
    alarms = [str(outcome) for outcome in outcomes if outcome.failure is not None]
    return {"kind": kind, "cases": sum(o.ran for o in outcomes), "alarms": alarms}


def _text(element):
    if isinstance(element, type):
        return element.__name__
    if isinstance(element, tuple):
        return " + ".join(map(_text, element))
    inner = (
        element.elements
        if isinstance(element, OneOf)
        else (getattr(element, "element", None) or element.cls,)
    )
    return f"{type(element).__name__}({', '.join(map(_text, inner))})"
