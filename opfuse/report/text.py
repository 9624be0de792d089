"""Plans and calls as lines of text."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Sequence

from ..core.engine.plan import FusionPlan, PlanStep
from .call import Call

_WIDTH = 100
MATCHES_NOTHING = "no plugin offers a fusion for these ops"
_NOT_FUSED = "not fused"
_LOST = (
    "overlaps ",
    "another set of fusions ",
)  # how the planner's reasons begin where a candidate lost to others


def alike_calls(calls: Sequence[Call], full: bool = True) -> dict[Call, tuple[Call, list[int]]]:
    """The first of calls that are alike but for their path, and the numbers of all."""
    alike: dict[Call, tuple[Call, list[int]]] = {}
    for number, call in enumerate(calls):
        plan = call.plan if full else dataclasses.replace(call.plan, refused=())
        alike.setdefault(dataclasses.replace(call, path="", plan=plan), (call, []))[1].append(
            number
        )
    return alike


def title_of(call: Call, numbers: list[int], calls: Sequence[Call], most: int) -> str:
    """Where calls that are alike are, of what, and which they are; at most ``most`` by name."""
    names = list(dict.fromkeys(calls[n].path or "the model" for n in numbers))
    if len(names) > most:
        kept = 3 if most > 3 else 1
        names = [*names[:kept], f"... {len(names) - kept - 1} more like these ...", names[-1]]
    where = ", ".join(names) + ": " if call.owner else ""
    what = call.owner or "chain"
    if call.ops != (call.owner,):
        ops = (
            call.ops
            if most > 3 or len(call.ops) <= 12
            else (*call.ops[:8], f"{len(call.ops) - 8} more")
        )
        what += f" [{', '.join(ops)}]"
    several = (
        f"{len(numbers)} calls" if len(numbers) > most else "calls " + ", ".join(map(str, numbers))
    )
    return f"{where}{what} ({several if len(numbers) > 1 else f'call {numbers[0]}'})"


def why_none(plan: FusionPlan, unfused: str) -> str:
    """Return why no step of a plan is fused; ``""`` if one is."""
    if any(step.fusion for step in (*plan.forward, *plan.backward)):
        return ""
    reason = "every candidate was refused" if plan.refused else unfused
    return reason and f"nothing is fused: {reason}"


def describe_passes(
    plan: FusionPlan,
    no_grad: str,
    unfused: str = MATCHES_NOTHING,
    indent: str = "",
    *,
    full: bool = True,
    saved_bytes: Sequence[int] = (),
) -> list[str]:
    """A plan as lines of text.

    Args:
        plan: The plan.
        no_grad: Why there is no backward, if there is none.
        unfused: Why there is no candidate, if there is none.
        indent: What each line begins with.
        full: Every step in order and every candidate refused; if not, the steps, those alike once.
        saved_bytes: Bytes that each step of the forward keeps, if there is a backward.
    """
    lines = wrap(why_none(plan, unfused), indent)
    title = "forward"
    if full and any(saved_bytes):
        title += f", keeps {as_bytes(sum(saved_bytes))} for the backward"
    lines += _describe_steps(title, plan.forward, indent, full, saved_bytes)
    none = [f"{indent}backward: none, {no_grad}"]
    lines += _describe_steps("backward", plan.backward, indent, full) if plan.backward else none
    if not full or not plan.refused:
        return lines
    shown = [
        r for r in plan.refused if not (r.distribution and f" of {r.distribution}" in r.reason)
    ]
    alike = Counter(dataclasses.replace(refusal, start=0) for refusal in shown)  # wherever they are
    lines.append(f"{indent}refused")
    if count := len(plan.refused) - len(shown):
        lines += wrap(
            f"{counted(count, 'candidate')} that lost to another one of the same plugin",
            indent + "  ",
        )
    for refusal, times in alike.items():
        title = f"{refusal.passes} {refusal.fusion}, {refusal.distribution or 'registered in code'}"
        title += f", on {' + '.join(refusal.basic_ops)}" + _times(times)
        lines += [
            *wrap(title, indent + "  ", indent + "      "),
            *wrap(refusal.reason, indent + "    "),
        ]
    return lines


def _describe_steps(
    title: str, steps: Sequence[PlanStep], indent: str, full: bool, saved_bytes: Sequence[int] = ()
) -> list[str]:
    apart = [step.op for step in steps if step.fusion is None]
    alone = apart if full else [name + _times(times) for name, times in Counter(apart).items()]
    said = _describe_notes(steps, indent + "  ")
    if len(apart) == len(steps):
        return [*wrap(f"{title}, not fused: {', '.join(alone)}", indent, indent + "  "), *said]
    rows = [(" + ".join(step.parts), _describe_step(step, full)) for step in steps]
    if full and saved_bytes:
        sized = zip(rows, saved_bytes, strict=True)
        rows = [(ops, f"{by}; keeps {as_bytes(size)}" if size else by) for (ops, by), size in sized]
    if not full:
        rows = [
            (ops, by + _times(times))
            for (ops, by), times in Counter(rows).items()
            if by != _NOT_FUSED
        ]
    width = min(44, max(len(ops) for ops, _ in rows))
    lines = [f"{indent}{title}"]
    for ops, by in rows:
        if len(ops) <= width:
            lines += wrap(f"{ops:{width}}  {by}", indent + "  ", indent + " " * (width + 4))
        else:
            lines += [*wrap(ops, indent + "  "), *wrap(by, indent + " " * (width + 4))]
    if alone and not full:
        lines += wrap(f"{_NOT_FUSED}: {', '.join(alone)}", indent + "  ", indent + "    ")
    return lines + said


def _describe_notes(steps: Sequence[PlanStep], indent: str) -> list[str]:
    notes = Counter(f"{' + '.join(step.parts)}: {step.note}" for step in steps if step.note)
    lines = [wrap(note + _times(times), indent, indent + "  ") for note, times in notes.items()]
    return [line for wrapped in lines for line in wrapped]


def _describe_step(step: PlanStep, full: bool) -> str:
    if step.fusion is None:
        return _NOT_FUSED
    op = f" as {step.op}" if full and step.op != step.fusion else ""
    instead = f", by PyTorch's operations: {step.fallback}" if step.fallback else ""
    return f"fused by {step.fusion}{op}, {step.owner}{instead}"


def summarize_refused(calls: Sequence[Call]) -> list[str]:
    """Each reason once, with its ops; candidates that lost to others are counted."""
    refused = list(
        dict.fromkeys((c.ops, refusal) for c in calls for refusal in c.plan.refused)
    )  # calls alike once
    shown = [refusal for _, refusal in refused if not refusal.reason.startswith(_LOST)]
    about: dict[tuple[str, str], dict[str, None]] = {}
    for refusal in shown:
        who = f"{refusal.fusion}, {refusal.distribution or 'registered in code'}"
        about.setdefault((refusal.reason, who), {})[" + ".join(refusal.basic_ops)] = None
    lines = []
    for (reason, who), runs in about.items():
        most = list(runs)[:3] + [f"{len(runs) - 3} more"] * (len(runs) > 3)
        lines += wrap(f"{'; '.join(most)}: {reason} ({who})", "  ", "    ")
    if lost := len(refused) - len(shown):
        lines += wrap(
            f"{counted(lost, 'candidate')} lost to what was taken; `.details` has each",
            "  ",
            "    ",
        )
    return ["", "refused", *lines] if lines else []


def _times(number: int) -> str:
    return f" ({number} times)" if number > 1 else ""


def counted(number: int, noun: str) -> str:
    """A number and what there are so many of."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def how_many_fused(calls: Sequence[Call]) -> str:
    """How many steps of each pass are fused, how many of them fall back, how many are separate."""
    parts = []
    for name in ("forward", "backward"):
        steps = [step for call in calls for step in getattr(call.plan, name)]
        fused = [step for step in steps if step.fusion is not None]
        fallbacks = sum(bool(step.fallback) for step in fused)
        of_them = f" ({fallbacks} by fallback)" if fallbacks else ""
        parts.append(f"{name} {len(fused)} fused{of_them}, {len(steps) - len(fused)} separate")
    return "; ".join(parts)


def as_bytes(count: int) -> str:
    """A number of bytes with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def wrap(text: str, indent: str, rest: str | None = None) -> list[str]:
    """A text as lines behind ``indent``, all but the first behind ``rest`` if given."""
    wrapper = textwrap.TextWrapper(
        max(_WIDTH, len(indent) + 40), indent, indent if rest is None else rest
    )
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)
