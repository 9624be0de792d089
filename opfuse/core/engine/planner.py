"""Makes the program for the key of a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..environment import Environment, device_name, shape_of
from ..fused_op import FusedOperation
from ..introspection import is_dtensor, standing_for
from ..plugins import manager
from ..quantization.names import check_names, matching
from ..recipes import why_off
from ..records import FusionSource
from ..settings import Settings, current
from ..tools import check_options
from .chain import Chain
from .checks import check_attributes, check_differentiable, check_kwargs, check_tensors
from .compile import compile_program
from .edges import Edges, Needs, find_edges
from .facts import Facts, Known, Shapes
from .program import Program
from .selection import Selection, check_expansion, choose
from .step import Step


class Key(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        grads: For the input, the parameters and the extra inputs, whether each needs a gradient;
            None: grad mode is off.
        dtype, device: Dtype and device of the input.
        autocast: The dtype that autocast asks for, or None.
        training: For each op, whether it is in training mode.
        generation: The generation of the plugins.
        changes: How often an op or a class of ops was changed.
        deterministic: Whether PyTorch is to use deterministic algorithms.
        compiling: Whether ``torch.compile`` traces.
        kwargs: For each op, the names of its keyword arguments; or None.
        extras: Dtype and device of each extra input, or None.
        settings: The settings of the thread.
    """

    grads: tuple[bool, ...] | None
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    training: tuple[bool, ...]
    generation: int
    changes: int
    deterministic: bool
    compiling: bool
    kwargs: tuple[tuple[str, ...], ...] | None
    extras: tuple[tuple[torch.dtype, torch.device], ...] | None
    settings: Settings


_SHAPE_FACTS = "row_alignment", "rows", "features", "contiguous"
_MOST_ALIGNED = 128  # what NVFP4 needs; MX needs 32, and kernels of half precision 8 or 16


def rows_of(facts: tuple[str, ...], input: Tensor | None) -> tuple[Any, ...]:
    """Facts about the rows of an input, named as in :class:`Environment`."""
    known: dict[str, Any] = {"row_alignment": 1}
    if input is not None:
        alignment = math.gcd(input.shape[:-1].numel(), _MOST_ALIGNED)
        known = {"row_alignment": alignment, **shape_of(input)._asdict()}
    return tuple([known.get(fact) for fact in facts])


def make_program(
    chain: Chain,
    owner: nn.Module | None,
    key: Key,
    input: Tensor | None,
    tensors: Sequence[Tensor] | None = None,
) -> Program:
    """Make the program for a key, where no mode sees that plugins look at tensors.

    Args:
        chain: The chain.
        owner: The op whose own call this is, if it is one.
        key: The key.
        input: The input, for its number of rows; None while tracing.
        tensors: The parameters, for their shapes; None: they are looked at.
    """
    settings = key.settings
    given = key.dtype, key.device, key.autocast, key.extras or ()
    check_tensors(chain, owner, *given, input is None or is_dtensor(input))
    check_kwargs(chain, key.kwargs)
    off = why_off(settings.recipe, settings.selection)
    check_names(settings.skip)
    env = _environment(key, input)._replace(recipe=None if off else settings.recipe)
    needs = _needs(chain, key.grads)
    double_backward = env.options.get("double_backward")
    if double_backward:
        check_differentiable(chain, env.recipe)
    elif env.requires_grad:
        check_attributes(chain)
    sources = () if double_backward else manager.sources(settings.selection)
    check_options(settings.options, settings.selection)
    edges = edges_of(chain, env, needs, settings, off)
    kwargs = key.kwargs or ((),) * len(chain.ops)
    facts = Facts(
        chain, env, needs, edges, _shapes(chain, tensors), kwargs,
        autocast=key.autocast, input_dtype=key.dtype,
        tools=manager.active_tools(settings.selection),
    )  # fmt: skip
    if sources:
        asked = [tool for tool in facts.tools if "opfuse_facts" in tool.hooks]
        told = [manager.ask(tool, "opfuse_facts", Known, facts=facts) for tool in asked]
        facts = dataclasses.replace(facts, known=[known for known in told if known is not None])
    return compile_program(facts, _build(facts, sources))


def _shapes(chain: Chain, tensors: Sequence[Tensor] | None) -> Shapes:
    """Shape and dtype of the parameters of each op."""
    if tensors is None:
        named = [(op, name) for op in chain.ops for name in op.param_names or ()]
        with torch.no_grad():
            tensors = [op.read_parameter(name, standing_for) for op, name in named]
    described = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return [described[slice(*span)] for span in chain.param_ranges]


def edges_of(
    chain: Chain, env: Environment, needs: Needs, settings: Settings, off: str = ""
) -> Edges:
    """Create the quantizers of the ops, and ask each op which ones its tensors need."""
    # ops read the recipe in the settings; it is not in force while tracing
    with current.temporarily(values=settings, environment=env, recording=True):
        for op in chain.ops:
            skipped = matching(op.name, settings.skip)
            op.reset_recipe_state(recipe=None if skipped else env.recipe)
        return find_edges(chain, env, needs, off)


def _environment(key: Key, input: Tensor | None) -> Environment:
    """The environment of a plan, from its key."""
    device = key.device
    return Environment(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=key.autocast or key.dtype,
        training=any(key.training),
        requires_grad=key.grads is not None and any(key.grads),
        **dict(zip(_SHAPE_FACTS, rows_of(_SHAPE_FACTS, input), strict=True)),
        device_name=device_name(device.type, device.index if device.type == "cuda" else None),
        **processor(device),
        deterministic=key.deterministic,
        options=dict(key.settings.options),
        compiling=key.compiling,
    )


def processor(device: torch.device) -> dict[str, Any]:
    """The fields of :class:`Environment` about the processor."""
    if device.type != "cuda":
        return {"multiprocessors": torch.get_num_threads() if device.type == "cpu" else 1}
    found = torch.cuda.get_device_properties(device)
    name = getattr(found, "gcnArchName", "") if torch.version.hip else ""
    architecture = name.partition(":")[0] or f"sm_{found.major}{found.minor}"
    return {"multiprocessors": found.multi_processor_count, "architecture": architecture}


def _build(facts: Facts, sources: Sequence[FusionSource]) -> Selection:
    """Choose fusions and build their ops; choose again without those whose build fails."""
    excluded: set[tuple[Any, int, int]] = set()
    while True:
        choice = choose(facts, sources, excluded)
        built: list[Step] = []
        for step in choice.taken:
            fused = build_step(step, step.env or facts.env)
            if fused is None:
                excluded.add((step.source, step.begin, step.end))
                break
            built.append(dataclasses.replace(step, op=fused))
        else:
            return dataclasses.replace(choice, taken=tuple(built))


def build_step(step: Step, env: Environment) -> Any:
    """Build the fused op of a step; None, after a warning, if its author's code fails."""
    ops, fused = step.matched, step.op
    try:
        if fused is None:
            fused = step.source.fusion.build(ops)
        if isinstance(fused, FusedOperation):
            fused.planned(env)
    except Exception as error:
        what = "build" if fused is None else "planned"
        step.source.warn(f"its {what} raised {type(error).__name__}: {error}")
        return None
    check_expansion(step.source, fused, ops)
    return fused


def _needs(chain: Chain, grads: tuple[bool, ...] | None) -> Needs:
    """The gradients that are needed, given which tensors require grad."""
    ops, count = len(chain.ops), 1 + len(chain.param_sources)
    flags = grads or (False,) * (count + len(chain.external_inputs))
    params = [flags[1:count][slice(*span)] for span in chain.param_ranges]
    wanting = [i for i, of_op in enumerate(params) if any(of_op)]
    extras = zip(chain.external_inputs, flags[count:], strict=True)
    wanting += [i for (i, _), wanted in extras if wanted]
    first = 0 if flags[0] else min(wanting, default=ops)
    first_with_input = 0 if flags[0] else first + 1
    inputs = tuple(i >= first_with_input for i in range(ops))
    return Needs(grads is not None, first, inputs, tuple(params))
