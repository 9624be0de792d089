"""A plan as a picture: the basic ops from top to bottom, beside them what the passes fuse.

``picture.svg`` is the empty page, with the styles.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from ..core.engine.plan import FusionPlan, PlanStep

_CHAR = 7.4  # width of a character of the monospaced font, a little more than the widest of them
_ROW, _GAP, _CAST, _LINE, _MARGIN, _BETWEEN = 38, 10, 38, 19, 24, 22


def draw(chains: Sequence[tuple[Sequence[str], FusionPlan]]) -> str:
    """An SVG image of plans below each other, each under lines of text."""
    columns = {
        "forward": [
            label for _, plan in chains for step in plan.forward for label in _labels(step)
        ],
        "ops": [name for _, plan in chains for step in plan.forward for name in step.basic_ops],
        "backward": [
            label for _, plan in chains for step in plan.backward for label in _labels(step)
        ],
    }
    spans: dict[str, tuple[float, float]] = {}
    right = float(_MARGIN)
    for heading, texts in columns.items():
        spans[heading] = right, max(map(len, [heading, *texts])) * _CHAR + 20
        right += spans[heading][1] + _BETWEEN
    body: list[str] = []
    y = float(_MARGIN)
    for titles, plan in chains:
        for number, line in enumerate(titles):
            body.append(_text(_MARGIN, y + 12, line, "small" if number else "title"))
            y += _LINE
        body += [
            _text(x + width / 2, y + 12, heading, "small middle")
            for heading, (x, width) in spans.items()
        ]
        y = _chain(body, plan, spans, y + 28) + _MARGIN
    width = (
        max(
            [
                right - _BETWEEN,
                *(_MARGIN + len(line) * _CHAR for titles, _ in chains for line in titles),
            ]
        )
        + _MARGIN
    )
    page = Template(Path(__file__).with_suffix(".svg").read_text(encoding="utf-8"))
    sizes = {
        "width": f"{width:g}",
        "height": f"{y:g}",
        "right": f"{width - 2:g}",
        "bottom": f"{y - 2:g}",
    }
    return page.substitute(sizes, body="\n".join(body))


def _chain(
    body: list[str], plan: FusionPlan, spans: dict[str, tuple[float, float]], y: float
) -> float:
    """Draw one plan from ``y`` down; returns where it ends."""
    forward = [(step.start, step.start + len(step.basic_ops), step) for step in plan.forward]
    backward = [
        (step.start, step.start + len(step.basic_ops), step) for step in plan.backward[::-1]
    ]
    casts = {edge for _, _, step in (*forward, *backward) for edge, _ in step.casts}
    edges, tops = [], []
    for index, name in enumerate(
        [*(name for step in plan.forward for name in step.basic_ops), None]
    ):
        height = _CAST if index in casts else _GAP
        edges.append(y + height / 2)
        tops.append(y + height)
        if name is not None:
            body += _box(spans["ops"], tops[-1], tops[-1] + _ROW, "op", [name])
        y = tops[-1] + _ROW
    for kind, steps in (("forward", forward), ("backward", backward)):
        x = spans[kind][0] + spans[kind][1] / 2
        ends = [edges[index] for start, stop, _ in steps for index in (start, stop)]
        if not ends:
            body.append(_text(x, (edges[0] + edges[-1]) / 2, "none", "small middle"))
            continue
        tail, tip, back = (
            (min(ends), max(ends) + _GAP, -6)
            if kind == "forward"
            else (max(ends), min(ends) - _GAP, 6)
        )
        body.append(f'<path d="M{x:g} {tail:g}V{tip:g}m-4 {back}l4 {-back}l4 {back}"/>')
        for _, _, step in steps:
            if step.casts or step.fusion:
                body += _box(
                    spans[kind], *_reach(step, edges, tops), _look(step, kind), _labels(step)
                )
            else:
                middle = tops[step.start] + _ROW / 2
                body.append(f'<circle cx="{x:g}" cy="{middle:g}" r="3"/>')
    return edges[-1] + 2 * _GAP


def _reach(step: PlanStep, edges: Sequence[float], tops: Sequence[float]) -> tuple[float, float]:
    """Where a step begins and ends: over its ops, and over an edge at its end that it casts."""
    casts, stop = dict(step.casts), step.start + len(step.basic_ops)
    top = edges[step.start] - 12 if step.start in casts else tops[step.start]
    return top, edges[stop] + 12 if stop in casts else tops[stop - 1] + _ROW


def _look(step: PlanStep, kind: str) -> str:
    return kind if step.basic_ops else "cast"


def _labels(step: PlanStep) -> list[str]:
    if not step.basic_ops:  # there is room for one line
        return [step.fusion or step.op]
    return [step.fusion, step.owner] if step.fusion else []


def _box(
    span: tuple[float, float], top: float, bottom: float, kind: str, lines: Sequence[str]
) -> list[str]:
    x, width = span
    y = (top + bottom) / 2 + 12 - 8 * len(lines)
    box = (
        f'<rect class="{kind}" x="{x:g}" y="{top:g}" width="{width:g}" height="{bottom - top:g}"/>'
    )
    styles = ("middle" if kind == "op" else "title middle", "small middle")
    return [
        box,
        *(_text(x + width / 2, y + 16 * i, line, styles[i]) for i, line in enumerate(lines)),
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
