"""Plans and calls as data, and as lines of text."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.engine.plan import FusionPlan, PlanStep, Refusal
from .lines import as_bytes, counted, wrap
from .quantized import Quantized, total


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What an op sends to other processes.

    Attributes:
        op: Its name.
        forward, backward: Bytes that this process sends in each pass.
        overlapped: Whether a fused op runs its collectives beside other work.
    """

    op: str
    forward: int
    backward: int
    overlapped: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one fuser.

    Attributes:
        path: Dotted name of the Sequential, or of the op called alone; ``""`` for the model itself
            and for objects that are not its submodules.
        owner: Its class; ``""`` if it is not a submodule of the model.
        ops: Classes of the ops as the user wrote them.
        plan: The plan that ran.
        grad_enabled: Whether grad mode was on.
        unfused: The reason why nothing could be fused in this call, or ``""``.
        cut: The module hooks that separate this run of ops from its neighbours, or ``""``.
        notes: The ``notes`` of its fused ops, such as time spent compiling; not compared.
        saved_bytes: Bytes that each step of the forward keeps for the backward, without parameters
            and with each storage once; empty without a backward; not compared.
        sent: What this process sends to others, for each op with collectives; not compared.
        code: The Python that ran, the functions of both passes; not compared.
        quantized: The effect of a recipe; not compared, since its ops have names.
    """

    path: str
    owner: str
    ops: tuple[str, ...]
    plan: FusionPlan
    grad_enabled: bool
    unfused: str = ""
    cut: str = ""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    saved_bytes: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    sent: tuple[Traffic, ...] = dataclasses.field(default=(), compare=False)
    code: str = dataclasses.field(default="", compare=False)
    quantized: Quantized = dataclasses.field(default=Quantized(), compare=False)


def describe(
    calls: Sequence[Call], own: Sequence[tuple[str, str, str]], convertible: int, *, full: bool
) -> str:
    """An explanation as text.

    Args:
        calls: Its calls.
        own: Converted modules that ran their own forward: path, class, and why.
        convertible: If there is no call, how many modules could be converted.
        full: Every step in order and every refused candidate. If not, the steps of each chain,
            those alike once, and then each reason of a refusal once.
    """
    lines = []
    for (cls, why), n in Counter((cls, why) for _, cls, why in own).items():
        lines += wrap(f"{cls} x {n} ran its own forward: {why}", "", "  ")
    if not calls:
        none = "No opfuse op was called: opfuse fuses what is in an opfuse.Sequential, or made of "
        none += "opfuse.ops."
        if convertible:
            none += f" opfuse.convert(model) could convert {convertible} of its modules."
        return "\n".join([*lines, *wrap(none, "")])
    count = f"{counted(len(calls), 'call')} of fusible ops: {_how_many_fused(calls)}."
    lines += [*wrap(count, "", "  "), *total([call.quantized for call in calls]).lines()]
    unfused = {call.unfused for call in calls}
    everywhere = unfused.pop() if len(unfused) == 1 else ""
    if everywhere:
        lines += wrap(f"Nothing is fused: {everywhere}.", "")
    for call, numbers in alike_calls(calls, full):
        title = title_of(call, numbers, calls, full)
        why = "" if everywhere else why_none(call)
        lines += ["", *wrap(title, "", "  "), *wrap(call.cut, "  "), *wrap(why, "  ")]
        lines += _describe_call(call, full)
    return "\n".join(lines + ([] if full else _summarize_refused(calls)))


def _describe_call(call: Call, full: bool) -> list[str]:
    """The steps of a call and, if full, its refused candidates, its recipe and its notes."""
    plan, sizes = call.plan, call.saved_bytes if full else ()
    keeps = f", keeps {as_bytes(sum(sizes))} for the backward" if any(sizes) else ""
    lines = _describe_steps(f"forward{keeps}", plan.forward, full, sizes)
    if plan.backward:
        lines += _describe_steps("backward", plan.backward, full)
    else:
        none = "nothing here needs a gradient" if call.grad_enabled else "grad mode is off"
        lines.append(f"  backward: none, {none}")
    lines += wrap(sent_by(call), "  ", "    ")
    if full:
        lines += _describe_refused(plan.refused)
        lines += [f"  {line}" for line in call.quantized.lines()]
        lines += [line for note in call.notes for line in wrap(note, "  ", "    ")]
    return lines


def sent_by(call: Call) -> str:
    """What a process sends to others in a call; ``""``: nothing."""
    if not call.sent:
        return ""
    sizes = {of: sum(getattr(sent, of) for sent in call.sent) for of in ("forward", "backward")}
    beside = sum(sent.forward + sent.backward for sent in call.sent if sent.overlapped)
    ops = ", ".join(dict.fromkeys(sent.op for sent in call.sent))
    both = " and ".join(f"{as_bytes(n) if n else 'nothing'} in the {of}" for of, n in sizes.items())
    much = f"; {as_bytes(beside)} of it beside other work" if beside else ""
    return f"sends {both} ({ops}){much}"


def alike_calls(calls: Sequence[Call], full: bool = True) -> list[tuple[Call, list[int]]]:
    """The first of the calls that differ only in their path, and the numbers of all."""
    alike: dict[Call, tuple[Call, list[int]]] = {}
    for number, call in enumerate(calls):
        plan = call.plan if full else dataclasses.replace(call.plan, refused=())
        key = dataclasses.replace(call, path="", plan=plan)
        alike.setdefault(key, (call, []))[1].append(number)
    return list(alike.values())


def title_of(call: Call, numbers: list[int], calls: Sequence[Call], full: bool = True) -> str:
    """The places, ops and numbers of calls that are alike; if not full, a few places by name."""
    most, kept = (8, 3) if full else (3, 1)
    names = list(dict.fromkeys(calls[n].path or "the model" for n in numbers))
    if len(names) > most:
        names = [*names[:kept], f"... {len(names) - kept - 1} more like these ...", names[-1]]
    where = ", ".join(names) + ": " if call.owner else ""
    what = call.owner or "chain"
    if call.ops != (call.owner,):
        ops = call.ops if full or len(call.ops) <= 12 else _first(call.ops, 8)
        what += f" [{', '.join(ops)}]"
    which = f"calls {', '.join(map(str, numbers))}"
    if len(numbers) > most:
        which = f"{len(numbers)} calls"
    elif len(numbers) == 1:
        which = f"call {numbers[0]}"
    return f"{where}{what} ({which})"


def why_none(call: Call) -> str:
    """Return why no step of a call is fused; ``""`` if one is."""
    plan = call.plan
    if any(step.fusion for step in (*plan.forward, *plan.backward)):
        return ""
    nothing = call.unfused or "no plugin offers a fusion for these ops"
    return f"nothing is fused: {'every candidate was refused' if plan.refused else nothing}"


def _describe_steps(
    title: str, steps: Sequence[PlanStep], full: bool, sizes: Sequence[int] = ()
) -> list[str]:
    apart = [step.op for step in steps if step.fusion is None]
    alone = ", ".join(apart if full else _numbered(apart))
    notes = _numbered(f"{' + '.join(step.parts)}: {step.note}" for step in steps if step.note)
    said = [line for note in notes for line in wrap(note, "    ", "      ")]
    if len(apart) == len(steps):
        return [*wrap(f"{title}, not fused: {alone}", "  ", "    "), *said]
    rows = []
    for step, size in itertools.zip_longest(steps, sizes):
        if full or step.fusion is not None:
            keeps = f"; keeps {as_bytes(size)}" if size else ""
            rows.append((" + ".join(step.parts), _describe_step(step, full) + keeps))
    if not full:
        rows = [(ops, by + _times(times)) for (ops, by), times in Counter(rows).items()]
    width = min(44, max(len(ops) for ops, _ in rows))
    lines, behind = [f"  {title}"], " " * (width + 6)
    for ops, by in rows:
        if len(ops) <= width:
            lines += wrap(f"{ops:{width}}  {by}", "    ", behind)
        else:
            lines += [*wrap(ops, "    "), *wrap(by, behind)]
    if alone and not full:
        lines += wrap(f"not fused: {alone}", "    ", "      ")
    return lines + said


def _describe_step(step: PlanStep, full: bool) -> str:
    if step.fusion is None:
        return "not fused"
    op = f" as {step.op}" if full and step.op != step.fusion else ""
    instead = f", by PyTorch's operations: {step.fallback}" if step.fallback else ""
    return f"fused by {step.fusion}{op}, {step.owner}{instead}"


def _describe_refused(refused: Sequence[Refusal]) -> list[str]:
    """Every refused candidate, except those that lost to another one of the same plugin."""
    shown = [r for r in refused if not (r.lost_to and r.lost_to == r.distribution)]
    lines = ["  refused"] if refused else []
    if lost := len(refused) - len(shown):
        which = "that lost to another one of the same plugin: see `to_dict()`"
        lines += wrap(f"{counted(lost, 'candidate')} {which}", "    ")
    alike = Counter(dataclasses.replace(refusal, start=0) for refusal in shown)  # wherever they are
    for refusal, times in alike.items():
        lines += wrap(where_of(refusal) + _times(times), "    ", "        ")
        lines += wrap(refusal.reason, "      ")
    return lines


def _summarize_refused(calls: Sequence[Call]) -> list[str]:
    """Each reason once, with its ops; candidates that lost to others are counted."""
    # calls alike once
    refused = dict.fromkeys((c.ops, refusal) for c in calls for refusal in c.plan.refused)
    shown = [refusal for _, refusal in refused if refusal.lost_to is None]
    about: dict[tuple[str, str], dict[str, None]] = {}
    for refusal in shown:
        ops = about.setdefault((refusal.reason, _who(refusal)), {})
        ops[" + ".join(refusal.basic_ops)] = None
    lines = []
    for (reason, who), runs in about.items():
        lines += wrap(f"{'; '.join(_first([*runs], 3))}: {reason} ({who})", "  ", "    ")
    if lost := len(refused) - len(shown):
        where = "see `.details`, on the command line `--details`"
        lines += wrap(f"{counted(lost, 'candidate')} lost to others: {where}", "  ", "    ")
    return ["", "refused", *lines] if lines else []


def where_of(item: Any) -> str:
    """The pass, the fusion, its origin and the ops of a refusal or a measurement."""
    return f"{item.passes} {_who(item)}, on {' + '.join(item.basic_ops)}"


def _who(item: Any) -> str:
    return f"{item.fusion}, {item.distribution or 'registered in code'}"


def _first(items: Sequence[str], most: int) -> list[str]:
    """The first items, and how many more there are."""
    more = len(items) - most
    return [*items[:most], *([f"{more} more"] if more > 0 else [])]


def _numbered(items: Iterable[str]) -> list[str]:
    """Items alike once, with their number."""
    return [item + _times(times) for item, times in Counter(items).items()]


def _times(number: int) -> str:
    return f" ({number} times)" if number > 1 else ""


def _how_many_fused(calls: Sequence[Call]) -> str:
    """How many steps of each pass are fused, how many of them fall back, how many are separate."""
    parts = []
    for name in ("forward", "backward"):
        steps = [step for call in calls for step in getattr(call.plan, name)]
        fused = [step for step in steps if step.fusion is not None]
        fallbacks = sum(bool(step.fallback) for step in fused)
        of_them = f" ({fallbacks} by fallback)" if fallbacks else ""
        parts.append(f"{name} {len(fused)} fused{of_them}, {len(steps) - len(fused)} separate")
    return "; ".join(parts)
