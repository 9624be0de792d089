"""The blueprint of a program: what its two functions are written from."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..fusible import declared
from ..fusion import Fusion
from ..introspection import op_class, overridden
from ..op import BasicOperation
from ..op_context import OperationContext
from ..quantization.coded_tensor import params_to_dequantize
from ..quantization.state import MODES
from .facts import Facts, Recompute, Step
from .plan import FusionPlan


def is_builtin(op: Any, pass_name: str) -> bool:
    """Return whether an op computes by this package alone, which keeps its contract.

    A class of somebody else may inherit the pass, and give a value of its own to it.
    """
    cls = op_class(op)
    methods = [getattr(type(op), f"{kind}_{pass_name}") for kind in ("op", "fuser")]
    sources = [getattr(each, "__module__", "") for each in (cls, *methods)]
    return all(each.startswith("opfuse.") for each in sources) and overridden(op, cls) is None


def _identifier(op: Any, name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{type(op).__name__}.context_names expected names, got {name!r}")
    return name


class Blueprint:
    """The steps of both passes, and what both functions must agree on.

    Attributes:
        facts: Everything that it was made from; its ``chain``, ``env`` and ``autocast``.
        forward, backward: The steps, in the order they run.
        contexts: The attributes of each op's context.
        first_backward: The first op that takes part in the backward.
        grad_mode: Whether grad mode is on.
        trains: Whether it is an autograd function.
        entry_casts: For each pass, the cast of what comes in, or None.
        saved_ranges: ``(op, first, last)``: the range of each op's saved tensors.
        saved_attributes: ``(op, name)``: the context attributes that are passed on.
        num_saved: The number of tensors that are saved by declaration.
        undeclared_ops: The ops that may leave anything, so that all of their contexts is kept.
        saves_quantized: Whether ops may save quantized tensors.
        free_ops: The ops that may leave anything on their contexts: those, and all of functions.
        unpooled_ops: The ops whose contexts serve one call: those, and all that are not of opfuse.
        recomputations: Basic op -> how its input is computed again.
        params_to_dequantize: The quantized parameters that belong to ops that quantize nothing.
        accumulators: ``(op, first, last)``: the range of parameters of each op that stores their
            gradients.
        silent_outputs: Which of the chain's extra outputs have no gradient.
        gradient_channels: The extra outputs that feed a channel through which a gradient returns.
        writes_extras: Whether an op writes into its extra inputs.
        pre_forward_ops: The ops with a ``pre_fuser_forward``, and whether they have a backward.
        advances: Whether a quantizer records values that advance its state.
        saves_call: Whether a forward leaves ``current.call`` for its backward.
    """

    saves_call = False

    def __init__(
        self,
        facts: Facts,
        plan: FusionPlan,
        steps: tuple[Sequence[Step], Sequence[Step]],
        contexts: Sequence[dict[str, Any]],
        recomputations: Mapping[int, Recompute],
    ) -> None:
        self.facts, self.plan, self.autocast = facts, plan, facts.autocast
        self.recomputations = recomputations
        self.chain, self.env = chain, env = facts.chain, facts.env
        self.grad_mode, self.first_backward, *_ = facts.needs
        self.forward, self.backward = map(tuple, steps)
        self.recipe, self.compiling = env.recipe, env.compiling
        self.contexts = [vars(OperationContext()) | values for values in contexts]
        self.requires_grad = env.requires_grad
        self.double_backward = bool(env.options.get("double_backward"))
        self.trains = self.requires_grad and not self.double_backward
        known = torch.amp.is_autocast_available(env.device.type)
        self.autocast_device = env.device.type if known else "cpu"
        self.num_params = len(chain.param_sources)
        self.input_requires_grad = bool(contexts) and contexts[0]["input_requires_grad"]
        casts = facts.edges.forward.get(0), facts.edges.backward.get(len(chain.ops))
        self.entry_casts = dict(zip(MODES, casts, strict=True))
        self._set_saved()
        self._set_gradients()
        ranges, quantizers = chain.param_ranges, facts.edges.quantizers
        self.params_to_dequantize = params_to_dequantize(chain.ops, ranges, quantizers, env)
        self.writes_extras = any(getattr(op, "in_place", False) for op in chain.ops)
        default = BasicOperation.pre_fuser_forward
        pairs = [(op, of["requires_grad"]) for op, of in zip(chain.ops, contexts, strict=True)]
        self.pre_forward_ops = [p for p in pairs if type(p[0]).pre_fuser_forward is not default]
        self.advances = any(q.pending_names for of_op in quantizers for q in of_op.values())

    def _set_saved(self) -> None:
        """Set what stays between the passes."""
        fused = [(s, range(s.start, s.stop)) for s in self.forward if s.source]
        # a joint op may leave anything on its contexts
        joint = {i for step, of in fused if step.passes == "joint" for i in of}
        self.saved_ranges: list[tuple[int, int, int]] = []
        self.saved_attributes: list[tuple[int, str]] = []
        self.undeclared_ops: list[int] = []
        self.num_saved = 0
        for i, op in enumerate(self.chain.ops):
            names = declared(op, "saved_names")
            if names is None or i in joint:
                self.undeclared_ops.append(i)
            elif i >= self.first_backward:
                attributes = [(i, _identifier(op, name)) for name in declared(op, "context_names")]
                self.saved_attributes += attributes
                first, self.num_saved = self.num_saved, self.num_saved + len(names)
                self.saved_ranges += [(i, first, self.num_saved)] if names else []
        own = any(op._quantizers.own for op in self.chain.ops)
        self.saves_quantized = own or self.recipe is not None
        # functions are the fusions of Transformer Engine: their ops may write anything
        of_functions = {i for s, of in fused if not isinstance(s.source.fusion, Fusion) for i in of}
        ops = enumerate(self.chain.ops)
        foreign = [i for i, op in ops if not all(is_builtin(op, name) for name in MODES)]
        self.free_ops = of_functions.union(self.undeclared_ops)
        self.unpooled_ops = self.free_ops.union(foreign)

    def _set_gradients(self) -> None:
        """Set where gradients flow other than through the main tensors.

        Raises:
            RuntimeError: In traced code an op puts its gradients away itself.
        """
        chain, first = self.chain, self.first_backward
        ops = [*enumerate(chain.ops)]
        silent = {i for i, op in ops if i < first or getattr(op, "silent_outputs", False)}
        outputs = enumerate(chain.public_outputs)
        self.silent_outputs = [number for number, (i, _) in outputs if i in silent]
        self.gradient_channels = {slot for slot in chain.sources.values() if slot[0] not in silent}
        putting = [i for i, op in ops if self.requires_grad and op.accumulates_grads]
        self.accumulators = [(i, *chain.param_ranges[i]) for i in putting]
        if putting and self.compiling:
            what = "puts gradients away itself (BasicOperation.accumulates_grads)"
            how = "which torch.compile does not see; run this chain in eager mode"
            raise RuntimeError(f"{chain.name(putting[0])} {what}, {how}")
