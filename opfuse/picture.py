"""A plan as a picture: the basic ops from top to bottom, beside them what the passes fuse. SVG, written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from .plan import FusionPlan, PlanStep

_CHAR = 7.4  # width of a character of the monospaced font, a little more than the widest of them
_ROW, _GAP, _CAST, _LINE, _MARGIN, _BETWEEN = 38, 10, 38, 19, 24, 22
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}">
<style>
text {{ font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2937 }}
.middle {{ text-anchor: middle }} .title {{ font-weight: bold }} .small {{ font-size: 11px; fill: #4b5563 }}
rect {{ stroke-width: 1.5; rx: 6px }} .page {{ fill: #ffffff; stroke: #e5e7eb; rx: 10px }}
.op {{ fill: #f3f4f6; stroke: #9ca3af }} .forward {{ fill: #dbeafe; stroke: #2563eb }}
.backward {{ fill: #dcfce7; stroke: #15803d }} .cast {{ fill: #fef3c7; stroke: #b45309; rx: 12px }}
path {{ stroke: #9ca3af; stroke-width: 1.5; fill: none }} circle {{ fill: #9ca3af }}
</style>
<rect class="page" x="1" y="1" width="{2}" height="{3}"/>"""


def draw(chains: Sequence[tuple[Sequence[str], FusionPlan]]) -> str:
    """An SVG image of plans below each other, each under lines of text."""
    plans = [plan for _, plan in chains]
    columns = [
        _width([label for plan in plans for step in plan.forward for label in _labels(step)] + ["forward"]),
        _width([name for plan in plans for step in plan.forward for name in step.basic_ops] + ["ops"]),
        _width([label for plan in plans for step in plan.backward for label in _labels(step)] + ["backward"]),
    ]
    spans, x = [], float(_MARGIN)
    for width in columns:
        spans.append((x, width))
        x += width + _BETWEEN
    body: list[str] = []
    y = float(_MARGIN)
    for titles, plan in chains:
        for number, line in enumerate(titles):
            body.append(_text(_MARGIN, y + 12, line, "small" if number else "title"))
            y += _LINE
        for (left, width), heading in zip(spans, ("forward", "ops", "backward"), strict=True):
            body.append(_text(left + width / 2, y + 16, heading, "small middle"))
        y = _chain(body, plan, spans, y + 28) + _MARGIN
    width = max([x - _BETWEEN, *(_MARGIN + len(line) * _CHAR for titles, _ in chains for line in titles)]) + _MARGIN
    head = _HEAD.format(f"{width:g}", f"{y:g}", f"{width - 2:g}", f"{y - 2:g}")
    return "\n".join([head, *body, "</svg>\n"])


def _chain(body: list[str], plan: FusionPlan, spans: Sequence[tuple[float, float]], y: float) -> float:
    """Draw one plan from ``y`` down; returns where it ends."""
    names = [name for step in plan.forward for name in step.basic_ops]
    forward = [(step.start, step.start + len(step.basic_ops), step) for step in plan.forward]
    after = [step.start + len(step.basic_ops) for step in (*plan.backward[1:], *plan.backward[-1:])]
    backward = [  # the gradient is cast where it enters the next step: behind that step's last op
        (step.start, step.start + len(step.basic_ops), step) if step.basic_ops else (end, end, step)
        for step, end in zip(plan.backward, after, strict=True)
    ]
    casts = {start for start, _, step in (*forward, *backward) if not step.basic_ops}
    edges, tops = [], []
    for index in range(len(names) + 1):
        height = _CAST if index in casts else _GAP
        edges.append(y + height / 2)
        y += height
        if index < len(names):
            tops.append(y)
            body += _box(spans[1], y, y + _ROW, "op", [names[index]])
            y += _ROW
    y += _GAP
    for steps, span, kind in ((forward, spans[0], "forward"), (backward, spans[2], "backward")):
        x = span[0] + span[1] / 2
        ends = [edge for start, stop, _ in steps for edge in (edges[start], edges[stop])]
        if not ends:
            body.append(_text(x, (edges[0] + edges[-1]) / 2, "none", "small middle"))
            continue
        tail, tip, back = (min(ends), max(ends) + _GAP, -6) if kind == "forward" else (max(ends), min(ends) - _GAP, 6)
        body.append(f'<path d="M{x:g} {tail:g}V{tip:g}m-4 {back}l4 {-back}l4 {back}"/>')
        for start, stop, step in steps:
            if not step.basic_ops:
                body += _box(span, edges[start] - 12, edges[start] + 12, "cast", _labels(step))
            elif step.fusion:
                body += _box(span, tops[start], tops[stop - 1] + _ROW, kind, _labels(step))
            else:
                body.append(f'<circle cx="{x:g}" cy="{tops[start] + _ROW / 2:g}" r="3"/>')
    return y


def _labels(step: PlanStep) -> list[str]:
    if step.fusion:
        return [step.fusion, step.owner]
    return [] if step.basic_ops else [step.op]


def _width(texts: Iterable[str]) -> float:
    return max(map(len, texts)) * _CHAR + 20


def _box(span: tuple[float, float], top: float, bottom: float, kind: str, lines: Sequence[str]) -> list[str]:
    x, width = span
    y = (top + bottom - 16 * len(lines)) / 2 + 12
    box = f'<rect class="{kind}" x="{x:g}" y="{top:g}" width="{width:g}" height="{bottom - top:g}"/>'
    styles = ("middle" if kind == "op" else "title middle", "small middle")
    return [box, *(_text(x + width / 2, y + 16 * i, line, styles[i]) for i, line in enumerate(lines))]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
