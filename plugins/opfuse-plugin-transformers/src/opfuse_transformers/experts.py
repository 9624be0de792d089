"""Experts of a mixture, whose matrices are one parameter: grouped products around a scaled gate.

The rows are sorted by expert before, and summed by token after, as the library's ``grouped_mm``
does.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from typing import Any

import torch
from opfuse_convert import Conversion, gated, leaf_of
from opfuse_convert.grammar import MISSING, Place, function_places
from opfuse_convert.grammar.reads import attribute_places
from opfuse_convert.parallel import localized
from torch import Tensor, nn

from opfuse import Environment, Sequential
from opfuse.ops import ClampedSwiGLU, GatedActivation, GroupedLinear, ScaledActivation
from opfuse.ops.authoring import op_class

from .parallel import places_of, style_of

# what the library's decorator of such classes says of them; None: either is taken
_DECLARED = {
    "has_gate": True,
    "has_bias": None,
    "has_post_expert_norm": False,
    "is_transposed": None,
    "is_concatenated": None,  # the gate says how its halves lie
}
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
"""What classes call the numbers of a clamped gate."""
_FORWARDS = "eager", "grouped_mm", "batched_mm"
_HOME = "transformers.integrations.moe"
_STYLES = "transformers.distributed.tensor_parallel"


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has experts as the library keeps them, and the library's forward."""
    code = getattr(op_class(module).forward, "__code__", None)
    of = "use_experts_implementation.<locals>.wrapper.<locals>.forward"
    known = getattr(code, "co_qualname", of) == of and hasattr(module, "_is_expert_parallel")
    return known and {"gate_up_proj", "down_proj"} <= module._parameters.keys()


def build(module: Any, env: Environment) -> Conversion | str:
    """The products and the gate, with the weights of the router on it.

    Experts that a ``tp_plan`` has split have a part of each matrix, and the sum over the processes
    follows that over the experts of a token: the library's style does it around their forward.
    """
    found = style_of(module)
    if isinstance(found, str):
        return found
    if found is None:
        return "its forward was replaced" if "forward" in vars(module) else _conversion(module)
    style, _ = found
    if type(style) is not sys.modules[_STYLES].MoeExpertsParallel:
        return f"it is split among processes in the style {type(style).__name__}"
    with localized(module, True):  # as the style calls it
        made = _conversion(module)
        shapes = {name: param.shape for name, param in module._parameters.items()}
    if isinstance(made, Conversion):
        places = [*made.places, *places_of(style)]
        made = dataclasses.replace(made, shapes=shapes, places=places)
    return made


def _conversion(module: Any) -> Conversion | str:
    for name, value in _DECLARED.items():
        if getattr(module, name, None) not in ((True, False) if value is None else (value,)):
            return f"its {name} is {getattr(module, name, None)}"
    gate, places = attribute_places(module, "_apply_gate", "_apply_gate", op_class(module))
    places += [*function_places(gate), *_forward_places(op_class(module).forward)]
    names = [*_DECLARED, "_is_expert_parallel", "num_experts"]
    constants, reads = [("", name) for name in names], [""]
    leaf = leaf_of(module.act_fn) if hasattr(module, "act_fn") else ""
    if not isinstance(leaf, str):
        places += leaf.places
        constants += [("act_fn", name) for name in leaf.constants]
        reads.append("act_fn")
    if gate.__module__ == _HOME:
        op = gated(leaf.ops[0]) if not isinstance(leaf, str) and len(leaf.ops) == 1 else None
    else:
        read = {*gate.__code__.co_names}
        others = module._parameters.keys() | module._buffers.keys() | module._modules.keys()
        op = None if read & others - {"act_fn"} else _clamped(module, gate)
        constants += [("", name) for name in sorted(read & vars(module).keys())]
    if not isinstance(op, GatedActivation):
        return "no op computes its gate"
    return Conversion(
        *(_chain(module, op), reads, _ExpertsCall(op_class(module)), None, tuple(constants)),
        places=places,
    )


def _chain(module: Any, op: GatedActivation) -> Sequential:
    """The products around a gate; the weights of the router scale the bias of the second too."""

    def product(name: str, **given: Any) -> GroupedLinear:
        bias = f"{name}_bias" if module.has_bias else None
        made = GroupedLinear.reading(module, name, bias, transposed=module.is_transposed, **given)
        made.set_extra_input_name(0, "split sizes")
        return made

    up, scaled = product("gate_up_proj"), ScaledActivation(op)
    down = product("down_proj", scale_bias=module.has_bias)
    scaled.set_extra_input_name(0, "scales")
    if down.scales_bias:
        down.set_extra_input_name(1, "scales")
    return Sequential(up, scaled, down)


def _clamped(module: Any, gate: Any) -> GatedActivation | None:
    """The op that gives what a gate of its own gives, for numbers below, within and above a limit.

    Those of gpt-oss and of its relatives differ in their numbers, and in how the halves lie.
    """
    limit, alpha = (
        next((getattr(module, name) for name in names if hasattr(module, name)), None)
        for names in (_LIMITS, _SLOPES)
    )
    if not isinstance(limit, (int, float)) or not isinstance(alpha or 1.0, (int, float)):
        return None
    line = torch.linspace(-2.3, 2.3, 24, dtype=torch.float64) * (limit or 1.0)
    sample = torch.cartesian_prod(line, line).repeat(2, 1).reshape(-1, 8)
    with torch.no_grad():
        try:
            expected = gate(module, sample)
        except Exception:  # whatever it needs, it is another gate
            return None
        for size, offset in itertools.product((None, 1), (0.0, 1.0)):
            given = {"glu_linear_offset": offset, "glu_interleave_size": size}
            op = ClampedSwiGLU(limit=limit, alpha=alpha or 1.0, **given)
            got = op.forward_value(sample)
            if got.shape == expected.shape and torch.allclose(got, expected, 1e-12, 1e-12):
                return op
    return None


def _forward_places(forward: Any) -> list[Place]:
    """The parts of the library's forward of experts."""
    parts = inspect.getclosurevars(forward).nonlocals
    table = parts["experts_interface"]
    written = [forward, parts["original_forward"], *[table[n] for n in _FORWARDS if n in table]]
    named = [Place(table, n, table.get(n, MISSING), f"the {n} of experts") for n in _FORWARDS]
    return [*named, *[place for each in written for place in function_places(each)]]


class _ExpertsCall:
    """The forward of the experts by way of the chain."""

    why = ""

    def __init__(self, cls: Any) -> None:
        # classes call the arguments differently, and have them in the same order
        self._signature = inspect.signature(cls.forward)

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        try:
            _, x, top_k_index, top_k_weights = self._signature.bind(module, *args, **kwargs).args
        except (TypeError, ValueError):
            self.why = "it was called with other arguments"
            return NotImplemented
        weight = module.gate_up_proj
        self.why = self._refusal(module, x, weight)
        if self.why:
            return NotImplemented
        count = top_k_index.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1))
        if torch.compiler.is_compiling():  # a graph does not know how many bincount gives
            numbers = torch.arange(module.num_experts + 1, device=experts.device)
            sizes = torch.searchsorted(experts, numbers).diff()
        else:
            sizes = torch.bincount(experts, minlength=module.num_experts)
        scales = top_k_weights.reshape(-1)[order]
        rows, kind = x[order // count], x.device.type
        if self._how(module) == "grouped_mm" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):  # which that product does not know
                y = chain(rows.to(weight.dtype), sizes, scales)
        else:
            y = chain(rows, sizes, scales)
        places = torch.arange(order.shape[0], device=order.device)
        back = torch.empty_like(order).scatter(0, order, places)
        y = y[back].view(x.shape[0], count, x.shape[1]).to(torch.promote_types(y.dtype, x.dtype))
        return y.sum(1).to(x.dtype)

    @staticmethod
    def _how(module: Any) -> str | None:
        return getattr(module.config, "_experts_implementation", None)

    @classmethod
    def _refusal(cls, module: Any, x: Tensor, weight: Tensor) -> str:
        how = cls._how(module)
        if how not in _FORWARDS:
            return f"its experts_implementation is {how!r}"
        if module._is_expert_parallel:
            return "its experts are spread over ranks"
        if torch.is_autocast_enabled(x.device.type):
            if how == "batched_mm":
                return f"under autocast no chain rounds as {how} does"
        elif x.dtype is not weight.dtype:
            return f"its input is of {x.dtype}, its parameters are of {weight.dtype}"
        return ""
