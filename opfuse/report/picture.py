"""A plan as a picture: the basic ops from top to bottom, and on both sides the fused steps.

``picture.svg`` is the empty page, with the styles.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from ..core.engine.plan import FusionPlan, PlanStep
from .text import Call, alike_calls, sent_by, title_of, why_none

_CHAR = 7.4  # width of a character of the monospaced font, a little more than the widest of them
_ROW, _GAP, _CAST, _LINE, _MARGIN, _BETWEEN = 38, 10, 38, 19, 24, 22


def write(path: str | os.PathLike[str], picture: str) -> None:
    """Write an SVG image into a file.

    Raises:
        ValueError: The name does not end with ``.svg``.
    """
    if not str(path).endswith(".svg"):
        raise ValueError(
            f"the picture is an SVG image: expected a file name that ends with .svg, got {path!r}"
        )
    Path(path).write_text(picture, encoding="utf-8", newline="\n")


def draw(calls: Sequence[Call], nothing: str) -> str:
    """An SVG image of the plans of calls, one below the other, each under lines of text.

    Args:
        calls: The calls; those alike are drawn once.
        nothing: The text if there is none.
    """
    chains = [] if calls else [([nothing], FusionPlan((), ()))]
    for call, numbers in alike_calls(calls):
        title = title_of(dataclasses.replace(call, ops=(call.owner,)), numbers, calls)
        said = [title, call.cut, why_none(call), sent_by(call)]
        chains.append(([line for line in said if line], call.plan))
    columns: dict[str, list[str]] = {"forward": [], "ops": [], "backward": []}
    for _, plan in chains:
        columns["ops"] += _ops(plan)
        for kind in ("forward", "backward"):
            columns[kind] += [label for step in getattr(plan, kind) for label in _labels(step)]
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
    lines = [line for titles, _ in chains for line in titles]
    width = max([right - _BETWEEN, *(_MARGIN + len(line) * _CHAR for line in lines)]) + _MARGIN
    sizes = {"width": width, "height": y, "right": width - 2, "bottom": y - 2}
    page = Template(Path(__file__).with_suffix(".svg").read_text(encoding="utf-8"))
    return page.substitute({k: f"{v:g}" for k, v in sizes.items()}, body="\n".join(body))


def _ops(plan: FusionPlan) -> list[str]:
    return [name for step in plan.forward for name in step.basic_ops]


def _chain(
    body: list[str], plan: FusionPlan, spans: dict[str, tuple[float, float]], y: float
) -> float:
    """Draw one plan from ``y`` down; returns where it ends."""
    casts = {edge for step in (*plan.forward, *plan.backward) for edge, _ in step.casts}
    edges, tops = [], []
    for index, name in enumerate([*_ops(plan), None]):
        height = _CAST if index in casts else _GAP
        edges.append(y + height / 2)
        tops.append(y + height)
        if name is not None:
            body += _box(spans["ops"], tops[-1], tops[-1] + _ROW, "op", [name])
        y = tops[-1] + _ROW
    for kind, steps in (("forward", plan.forward), ("backward", plan.backward[::-1])):
        x = spans[kind][0] + spans[kind][1] / 2
        ends = [edges[index] for step in steps for index in (step.start, _stop(step))]
        if not ends:
            body.append(_text(x, (edges[0] + edges[-1]) / 2, "none", "small middle"))
            continue
        tail, tip, back = min(ends), max(ends) + _GAP, -6
        if kind == "backward":
            tail, tip, back = max(ends), min(ends) - _GAP, 6
        body.append(f'<path d="M{x:g} {tail:g}V{tip:g}m-4 {back}l4 {-back}l4 {back}"/>')
        for step in steps:
            if step.casts or step.fusion:
                reach, look = _reach(step, edges, tops), kind if step.basic_ops else "cast"
                body += _box(spans[kind], *reach, look, _labels(step))
            else:
                middle = tops[step.start] + _ROW / 2
                body.append(f'<circle cx="{x:g}" cy="{middle:g}" r="3"/>')
    return edges[-1] + 2 * _GAP


def _stop(step: PlanStep) -> int:
    return step.start + len(step.basic_ops)


def _reach(step: PlanStep, edges: Sequence[float], tops: Sequence[float]) -> tuple[float, float]:
    """Where a step begins and ends: over its ops, and over an edge at its end that it casts."""
    casts, stop = dict(step.casts), _stop(step)
    top = edges[step.start] - 12 if step.start in casts else tops[step.start]
    return top, edges[stop] + 12 if stop in casts else tops[stop - 1] + _ROW


def _labels(step: PlanStep) -> list[str]:
    if not step.basic_ops:  # there is room for one line
        return [step.fusion or step.op]
    return [step.fusion, step.owner] if step.fusion else []


def _box(
    span: tuple[float, float], top: float, bottom: float, kind: str, lines: Sequence[str]
) -> list[str]:
    (x, width), height = span, bottom - top
    y = (top + bottom) / 2 + 12 - 8 * len(lines)
    box = f'<rect class="{kind}" x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}"/>'
    styles = ("middle" if kind == "op" else "title middle", "small middle")
    texts = zip(lines, styles, strict=False)
    return [box, *(_text(x + width / 2, y + 16 * i, *text) for i, text in enumerate(texts))]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
