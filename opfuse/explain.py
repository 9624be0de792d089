"""What was planned, and why, as text and as JSON-able data."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .fuser import OperationFuser, _functorch_active, _hook_kind
from .op import FusibleOperation, op_class
from .plan import FusionPlan, PlanStep, Refusal
from .plugins import Selection, manager
from .scope import Recorder
from .sequential import Sequential

_WIDTH = 100
_MATCHES_NOTHING = "no plugin offers a fusion for these ops"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one fuser.

    Attributes:
        path: Dotted name of the Sequential, or of the op called alone; ``""`` for the model itself and for
            what is not one of its submodules.
        owner: Its class; ``""`` for what is not a submodule of the model.
        ops: Classes of the ops as the user wrote them.
        plan: What ran.
        grad_enabled: Whether grad mode was on.
        unfused: Why nothing at all could be fused in this call, or ``""``.
        cut: Which module hooks keep this run of ops apart from its neighbours, or ``""``.
        notes: What its fused ops say about themselves (their ``notes``), such as time spent compiling; not compared.
    """

    path: str
    owner: str
    ops: tuple[str, ...]
    plan: FusionPlan
    grad_enabled: bool
    unfused: str = ""
    cut: str = ""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Every call of a fuser in one forward pass, in call order. Comparable; ``str()`` is the report."""

    calls: tuple[Call, ...]

    def __str__(self) -> str:
        calls = self.calls
        if not calls:
            return "No opfuse op was called: opfuse fuses what is in an opfuse.Sequential, or made of opfuse.ops."
        fused = [sum(step.fusion is not None for c in calls for step in c.plan.forward)]
        fused.append(sum(step.fusion is not None for c in calls for step in c.plan.backward))
        lines = [f"{_count(len(calls), 'call')} of fusible ops, fused steps: {fused[0]} forward, {fused[1]} backward."]
        unfused = {call.unfused for call in calls}
        everywhere = unfused.pop() if len(unfused) == 1 else ""
        if everywhere:
            lines += wrap(f"Nothing is fused: {everywhere}.", "")
        for call, numbers in _alike(calls).items():
            lines += ["", *wrap(_title(call, numbers, calls), "", "  ")]
            lines += wrap(call.cut, "  ")
            no_grad = "nothing here needs a gradient" if call.grad_enabled else "grad mode is off"
            lines += describe_passes(call.plan, no_grad, "" if everywhere else call.unfused or _MATCHES_NOTHING, "  ")
            for note in call.notes:
                lines += wrap(note, "  ", "    ")
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The same as JSON-able data.

        Returns:
            ``forward`` and ``backward``: the steps, calls in call order and the steps of a call in the order
            they run, each with path, call, op, basic_ops, fusion, distribution, version (the last three are
            None for a step that is not fused). ``refused``: the candidates not taken, each with path,
            fusion, pass, basic_ops, reason, distribution; once for all calls alike.
        """
        refused = dict.fromkeys((call.path, call.ops, refusal) for call in self.calls for refusal in call.plan.refused)
        return {
            "forward": [_row(step, path=c.path, call=n) for n, c in enumerate(self.calls) for step in c.plan.forward],
            "backward": [_row(step, path=c.path, call=n) for n, c in enumerate(self.calls) for step in c.plan.backward],
            "refused": [_row(refusal, path=path) for path, _, refusal in refused],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the same as a picture, into an SVG file: the ops, and beside them what each pass fuses.

        Args:
            path: The file, whose name ends with ``.svg``; one that exists is replaced.

        Raises:
            ValueError: Another name.
        """
        from .picture import draw

        if not str(path).endswith(".svg"):
            raise ValueError(f"the picture is an SVG image: expected a file name that ends with .svg, got {path!r}")
        chains = [] if self.calls else [([str(self)], FusionPlan((), ()))]
        for call, numbers in _alike(self.calls).items():
            reason = _why_none(call.plan, call.unfused or _MATCHES_NOTHING)
            title = _title(dataclasses.replace(call, ops=(call.owner,)), numbers, self.calls)
            chains.append(([line for line in (title, call.cut, reason) if line], call.plan))
        Path(path).write_text(draw(chains), encoding="utf-8", newline="\n")


def _row(item: PlanStep | Refusal, **where: Any) -> dict[str, Any]:
    row = where | dataclasses.asdict(item) | {"basic_ops": list(item.basic_ops)}
    del row["start"]
    return {"pass" if name == "kind" else name: value for name, value in row.items()}


# Recording


class _Calls(Recorder):
    """Collects the plans of the calls made while it is in the thread's scope."""

    def __init__(self) -> None:
        super().__init__(manager.scope)
        self.calls: list[tuple[OperationFuser, Call]] = []

    def record(self, fuser: OperationFuser, plan: FusionPlan) -> None:
        """Keep the plan."""
        super().record(fuser, plan)
        ops = tuple(op_class(op).__name__ for op in fuser.ops)
        self.calls.append((fuser, Call("", "", ops, plan, torch.is_grad_enabled(), _why_unfused())))


def _why_unfused() -> str:
    """Why nothing can be fused in this thread now, whatever the ops; ``""`` if there are fusions on offer."""
    if _functorch_active():
        return "functorch transforms run the ops one by one"
    if dict(manager.scope.options).get("double_backward"):
        return "the option double_backward runs the ops one by one"
    if manager.sources():
        return ""
    selection = manager.scope.selection
    if not manager.records:
        return "no plugin is installed and no fusion is registered"
    selected = [record for record in manager.records if Selection.parse(selection).position(record) is not None]
    if not selected:
        return f"every plugin is blocked by the selection {selection!r}"
    if not any(record.state == "loaded" for record in selected):
        return "no plugin could be loaded, see `opfuse plugins`"
    return "the plugins in use offer no fusion"


def _locate(model: Any) -> dict[OperationFuser, dict[str, Any]]:
    """Where in ``model`` each fuser that has run belongs."""
    places: dict[OperationFuser, dict[str, Any]] = {}
    alone: dict[nn.Module, str] = {}
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if not isinstance(module, (Sequential, FusibleOperation)):
            continue
        value, place = module._cache.value, {"path": path, "owner": op_class(module).__name__}
        groups = value[0] if isinstance(value, tuple) else [value]  # a container has several
        for fuser in [group for group in groups if isinstance(group, OperationFuser)]:
            places[fuser] = {**place, "cut": alone.get(module, "")}
            for segments in [value for name, value in vars(fuser).items() if name.startswith("_cut_")]:
                kinds = {op: _hook_kind(op) or "removed" for op in segments if not isinstance(op, OperationFuser)}
                alone |= {op: f"on its own, for it has {kind} hooks" for op, kind in kinds.items()}
                names = dict.fromkeys(f"{op_class(op).__name__}, which has {kind} hooks" for op, kind in kinds.items())
                cut = {**place, "cut": "cut at " + " and ".join(names)}
                places |= {segment: cut for segment in segments if isinstance(segment, OperationFuser)}
    return places


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Explanation:
    """Run the forward pass once and tell what was fused, by which plugin, and what was not, and why.

    The forward runs in the caller's grad and autocast mode, with the plugins, options and recipe in force
    here. Afterwards the random number generators of the CPU, and of CUDA if it is in use, are as before.
    Whatever else a forward pass changes it changes here too: buffers (running statistics), the state of
    quantizers, Python's and NumPy's random numbers. Calls made in other threads are not seen.

    Args:
        model: A module, or any callable that calls some.
        *inputs: Its inputs.
        **kwargs: Its keyword arguments.

    Returns:
        The report: ``str()`` for people, ``to_dict()`` for programs.

    Raises:
        RuntimeError: Called in code that ``torch.compile`` or ``torch.export`` traces.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("opfuse.explain cannot be traced by torch.compile or torch.export: call it outside")
    recorder = _Calls()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices), recorder:
        model(*inputs, **kwargs)
    places = _locate(model)
    found = [(call, {"notes": fuser.notes(call.plan), **places.get(fuser, {})}) for fuser, call in recorder.calls]
    return Explanation(tuple(dataclasses.replace(call, **what) for call, what in found))


# Text


def _alike(calls: Sequence[Call]) -> dict[Call, list[int]]:
    """Calls that differ in nothing but their path, and their numbers."""
    alike: dict[Call, list[int]] = {}
    for number, call in enumerate(calls):
        alike.setdefault(dataclasses.replace(call, path=""), []).append(number)
    return alike


def _title(call: Call, numbers: list[int], calls: Sequence[Call]) -> str:
    names = list(dict.fromkeys(calls[n].path or "the model" for n in numbers))
    if len(names) > 8:
        names = [*names[:3], f"... {len(names) - 4} more like these ...", names[-1]]
    where = ", ".join(names) + ": " if call.owner else ""
    what = call.owner or "chain"
    if call.ops != (call.owner,):
        what += f" [{', '.join(call.ops)}]"
    several = f"{len(numbers)} calls" if len(numbers) > 8 else "calls " + ", ".join(map(str, numbers))
    return f"{where}{what} ({several if len(numbers) > 1 else f'call {numbers[0]}'})"


def _why_none(plan: FusionPlan, unfused: str) -> str:
    """Why no step of a plan is fused; ``""`` if one is."""
    if any(step.fusion for step in (*plan.forward, *plan.backward)):
        return ""
    reason = "every candidate was refused" if plan.refused else unfused
    return reason and f"nothing is fused: {reason}"


def describe_passes(plan: FusionPlan, no_grad: str, unfused: str = _MATCHES_NOTHING, indent: str = "") -> list[str]:
    """A plan as lines of text; ``no_grad`` and ``unfused`` say why there is no backward, and no candidate."""
    lines = wrap(_why_none(plan, unfused), indent)
    lines += _describe_steps("forward", plan.forward, indent)
    none = [f"{indent}backward: none, {no_grad}"]
    lines += _describe_steps("backward", plan.backward, indent) if plan.backward else none
    shown = [r for r in plan.refused if not (r.distribution and f" of {r.distribution}" in r.reason)]
    alike = Counter(dataclasses.replace(refusal, start=0) for refusal in shown)  # wherever they are
    lines += [f"{indent}refused"] if plan.refused else []
    if count := len(plan.refused) - len(shown):
        lines += wrap(f"{_count(count, 'candidate')} that lost to another one of the same plugin", indent + "  ")
    for refusal, times in alike.items():
        title = f"{refusal.kind} {refusal.fusion}, {refusal.distribution or 'registered in code'}"
        title += f", on {' + '.join(refusal.basic_ops)}" + (f" ({times} times)" if times > 1 else "")
        lines += [*wrap(title, indent + "  ", indent + "      "), *wrap(refusal.reason, indent + "    ")]
    return lines


def _describe_steps(title: str, steps: Sequence[PlanStep], indent: str) -> list[str]:
    if all(step.fusion is None and step.basic_ops for step in steps):
        return wrap(f"{title}, not fused: {', '.join(step.op for step in steps)}", indent, indent + "  ")
    rows = [(" + ".join(step.basic_ops) or step.op, _describe_step(step)) for step in steps]
    width = min(44, max(len(ops) for ops, _ in rows))
    lines = [f"{indent}{title}"]
    for ops, by in rows:
        if len(ops) <= width:
            lines += wrap(f"{ops:{width}}  {by}", indent + "  ", indent + " " * (width + 4))
        else:
            lines += [*wrap(ops, indent + "  "), *wrap(by, indent + " " * (width + 4))]
    return lines


def _describe_step(step: PlanStep) -> str:
    if step.fusion is None:
        return "not fused" if step.basic_ops else "added: the op before cannot write what the next one reads"
    op = "" if step.op == step.fusion else f" as {step.op}"
    return f"fused by {step.fusion}{op}, {step.owner}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def wrap(text: str, indent: str, rest: str | None = None) -> list[str]:
    """A text as lines, none for none, behind ``indent``, all but the first behind ``rest`` if that is given."""
    wrapper = textwrap.TextWrapper(max(_WIDTH, len(indent) + 40), indent, indent if rest is None else rest)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)
