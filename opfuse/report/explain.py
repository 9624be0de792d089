"""Reports of plans and their reasons, as text and as JSON-able data."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.engine.chain import Cut
from ..core.engine.fuser import OperationFuser, _functorch_active
from ..core.engine.plan import PlanStep, Refusal
from ..core.engine.program import Program
from ..core.fused_op import FusedOperation
from ..core.fusible import FusibleOperation
from ..core.introspection import op_class, why_apart
from ..core.plugins import manager
from ..core.records import PluginFilter
from ..core.sequential import Sequential, parts
from ..core.settings import Recorder, current
from .calls import memory_of
from .isolation import isolated
from .lines import wrap
from .picture import draw, write
from .quantized import quantized_by
from .replaced_forward import MEMORY, replaced_forwards
from .text import Call, Traffic, describe

_OWN = "path", "class", "reason"
_NOWHERE: dict[str, Any] = {"path": "", "owner": ""}


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Every call of a fuser in one forward pass, in call order. Comparable.

    ``str()`` is the short report: the steps of each chain, those alike once, and each reason why a
    candidate was refused, once. ``details`` is the long one, ``to_dict()`` has the same for
    programs. ``code`` is the Python that ran.

    Attributes:
        calls: The calls.
        own: Converted modules that ran their own forward: path, class, and why.
        convertible: If there is no call, how many modules :func:`opfuse.convert` could convert.
        memory: What :func:`opfuse.plan_memory` attached: path, class, and what the module does;
            that of the whole model has the class "memory plan".
    """

    calls: tuple[Call, ...]
    own: tuple[tuple[str, str, str], ...] = ()
    convertible: int = 0
    memory: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        return self._described(full=False)

    __repr__ = __str__

    @property
    def details(self) -> str:
        """The long report: every step in order, every refused candidate, notes of fused ops."""
        return self._described(full=True)

    @property
    def code(self) -> str:
        """The Python of each chain, that of equal ones once: the functions of both passes."""
        return "\n\n".join(dict.fromkeys(call.code for call in self.calls))

    def _described(self, *, full: bool) -> str:
        lines = []
        for path, cls, action in self.memory:
            lines += wrap(f"{path}: {action} ({cls})" if path else f"{cls}: {action}", "", "  ")
        return "\n".join([*lines, describe(self.calls, self.own, self.convertible, full=full)])

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The same as JSON-able data.

        Returns:
            ``forward`` and ``backward``: the steps, calls in call order and the steps of a call in
            the order they run, each with path, call, op, basic_ops, fusion, distribution, version
            (these three are None for a step that is not fused), casts (each with its edge and
            quantizer), note, fallback; those of the forward with saved_bytes, None without a
            backward.
            ``refused``: the candidates not taken, each with path, fusion, pass, basic_ops, reason,
            distribution, lost_to (the distribution of the first fusion that was taken in its place,
            empty if that was registered in code, None if the reason is the candidate's own); once
            for equal calls.
            ``sent``: what this process sends to others, each with path, call, op, forward and
            backward (bytes), overlapped.
            ``own_forward``: converted modules that ran their own forward, each with path, class,
            reason.
            ``memory``: what a memory plan attached, each with path, class, action.
            ``quantized``: for each call under a recipe, path, call, recipe, products (of linear
            ops), quantized (how many of them), and tensors, each with op, tensor, format, usage,
            quantizer, where (which step casts it), remark (what was wrong with its values).
        """
        calls = [({"path": c.path, "call": n}, c) for n, c in enumerate(self.calls)]
        refused = dict.fromkeys((c.path, c.ops, r) for c in self.calls for r in c.plan.refused)
        quantized = [where | c.quantized.to_dict() for where, c in calls if c.quantized.recipe]
        return {
            "forward": [
                _row(step, where) | {"saved_bytes": size}
                for where, c in calls
                for step, size in itertools.zip_longest(c.plan.forward, c.saved_bytes)
            ],
            "backward": [_row(step, where) for where, c in calls for step in c.plan.backward],
            "refused": [_row(refusal, {"path": path}) for path, _, refusal in refused],
            "sent": [where | dataclasses.asdict(sent) for where, c in calls for sent in c.sent],
            "own_forward": [dict(zip(_OWN, row, strict=True)) for row in self.own],
            "memory": [{"path": p, "class": c, "action": a} for p, c, a in self.memory],
            "quantized": quantized,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the ops, and next to them the fusions of each pass, into an SVG file.

        Args:
            path: The file, whose name ends with ``.svg``; one that exists is replaced.

        Raises:
            ValueError: Another name.
        """
        write(path, draw(self.calls, nothing=str(self)))


def _planned(model: nn.Module) -> tuple[tuple[str, str, str], ...]:
    """What a memory plan attached to the modules of a model."""
    found = [(path, m, vars(m)[MEMORY]) for path, m in model.named_modules() if MEMORY in vars(m)]
    notes = [(path, "memory plan", memory.note) for path, _, memory in found if memory.note]
    rows = [(path, op_class(m).__name__, str(memory)) for path, m, memory in found if str(memory)]
    return (*notes, *rows)


def _row(item: PlanStep | Refusal, where: dict[str, Any]) -> dict[str, Any]:
    row = where | dataclasses.asdict(item) | {"basic_ops": list(item.basic_ops)}
    if isinstance(item, PlanStep):
        row["casts"] = [[edge, by] for edge, by in item.casts]
    del row["start"]
    return {"pass" if name == "passes" else name: value for name, value in row.items()}


# Recording


class _Calls(Recorder):
    """Collects the plans of the calls made while it is in the thread's scope."""

    def __init__(self) -> None:
        self.ran: list[tuple[OperationFuser, Program, dict[str, Any]]] = []

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the plan."""
        self._params = memory_of(given[1][: program.num_params])
        facts = {"ops": tuple(op_class(op).__name__ for op in fuser.ops), "plan": program.plan}
        facts |= {"grad_enabled": torch.is_grad_enabled(), "unfused": _why_unfused()}
        self.ran.append((fuser, program, facts | {"quantized": quantized_by(program)}))

    def sends(self, op: Any, forward: int, backward: int) -> None:
        """Keep what an op sends."""
        _, program, facts = [ran for ran in self.ran if op in ran[1].chain.ops][-1]
        place = program.chain.ops.index(op)
        steps = [step for step in program.forward if step.start <= place < step.stop]
        overlapped = any(getattr(step.op, "overlaps", False) for step in steps)
        sent = Traffic(op_class(op).__name__, forward, backward, overlapped)
        facts["sent"] = *facts.get("sent", ()), sent

    def saved(self, program: Program, tensors: Mapping[int, Sequence[Any]]) -> None:
        """Keep how much each step leaves for the backward, each storage once."""
        seen = {*self._params}
        sizes = []
        for step in program.forward:
            inside = range(step.start, step.stop)
            found = memory_of(tensor for i in inside for tensor in tensors.get(i, ()))
            sizes.append(sum(size for key, size in found.items() if key not in seen))
            seen |= found.keys()
        # an op may have called another chain since
        facts = [facts for _, ran, facts in self.ran if ran.plan is program.plan][-1]
        facts["saved_bytes"] = tuple(sizes)


def _why_unfused() -> str:
    """Return why nothing can be fused in this thread now; ``""`` if there are fusions on offer."""
    if _functorch_active():
        return "functorch transforms run the ops one by one"
    options = dict(current.options)
    if options.get("double_backward"):
        return "the option double_backward runs the ops one by one"
    if options.get("invariant") == "whole":
        return 'the option invariant="batch" runs these ops one by one'
    selection = current.selection
    if manager.sources(selection):
        return ""
    if not manager.records:
        return "no plugin is installed and no fusion is registered"
    chosen = PluginFilter.parse(selection)
    selected = [record for record in manager.records if chosen.position(record) is not None]
    if not selected:
        return f"every plugin is blocked by the selection {selection!r}"
    if not any(record.state == "loaded" for record in selected):
        return "no plugin could be loaded, see `opfuse plugins`"
    return "the plugins in use offer no fusion"


def _locate(model: Any) -> dict[OperationFuser, dict[str, Any]]:
    """Where in ``model`` each fuser that has run belongs."""
    places: dict[OperationFuser, dict[str, Any]] = {}
    alone: dict[nn.Module, str] = {}
    found: list[tuple[str, Any, nn.Module]] = []
    if isinstance(model, nn.Module):
        found += [(path, module, module) for path, module in model.named_modules()]
        for path, module, each in replaced_forwards(model):
            found += [(path, chain, module) for chain in each.chains]
    for path, module, owner in found:
        if not isinstance(module, (Sequential, FusibleOperation)):
            continue
        if isinstance(module, Sequential):
            for inner, why in parts(module)[1].items():
                alone[inner] = f"apart from the chain around it: {why}"
        value, place = module._cache.value, {"path": path, "owner": op_class(owner).__name__}
        groups = value[0] if isinstance(value, tuple) else [value]  # a container has several
        for fuser in [group for group in groups if isinstance(group, OperationFuser)]:
            places[fuser] = {**place, "cut": alone.get(module, "")}
            for pieces in [value.parts for value in vars(fuser).values() if isinstance(value, Cut)]:
                ops = [part.run for part in pieces if isinstance(part.run, nn.Module)]
                whys = {op: why_apart(op) or "is no longer on its own" for op in ops}
                alone |= {op: f"on its own, for it {why}" for op, why in whys.items()}
                names = [f"{op_class(op).__name__}, which {why}" for op, why in whys.items()]
                cut = {**place, "cut": "cut at " + " and ".join(dict.fromkeys(names))}
                places |= {part.run: cut for part in pieces if isinstance(part.run, OperationFuser)}
    return places


def _notes(program: Program) -> tuple[str, ...]:
    """The notes of the fused ops of a program."""
    ops = [step.op for step in program.forward]
    noted = [op for op in ops if isinstance(op, FusedOperation) and op.notes]
    names = [" + ".join(op_class(basic).__name__ for basic in op.basic_ops) for op in noted]
    return tuple(f"{name}: {op.notes}" for name, op in zip(names, noted, strict=True))


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Explanation:
    """Run the forward pass once and report what was fused, by which plugin, and why not.

    The forward runs in the caller's grad and autocast mode, with the plugins, options and recipe in
    force here. Afterwards the model and all random number generators are as before, as with
    :func:`opfuse.tune`. A copy of the model's tensors is kept meanwhile. Calls made in other
    threads are not seen.

    Args:
        model: A module, or any callable that calls some.
        *inputs: Its inputs.
        **kwargs: Its keyword arguments.

    Returns:
        The report: ``str()`` fits a screen, ``details`` has everything, ``to_dict()`` the same for
        programs.

    Raises:
        RuntimeError: Called in code that ``torch.compile`` or ``torch.export`` traces.
    """
    recorder = _Calls()
    with isolated(model, who="opfuse.explain"), recorder:
        model(*inputs, **kwargs)
    places = _locate(model)
    calls = tuple(
        Call(notes=_notes(program), code=program.code, **facts, **places.get(fuser, _NOWHERE))
        for fuser, program, facts in recorder.ran
    )
    if not isinstance(model, nn.Module):
        return Explanation(calls)
    replaced = replaced_forwards(model)
    own = [(path, op_class(m).__name__, each.reason) for path, m, each in replaced if each.reason]
    count = manager.entry_points["opfuse.reports"].get("convertible")
    convertible = 0 if calls or own or count is None else int(count.load()(model))
    return Explanation(calls, tuple(own), convertible, _planned(model))
