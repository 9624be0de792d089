"""Draws two pictures of the gallery: kernels against their limits, and a memory curve."""

import json
import pathlib
import tempfile

import torch

import opfuse

ROOT = pathlib.Path(__file__).parents[1]
LANE, LEFT, WIDE = 46, 90, 560
FONT = "font-family='ui-sans-serif, system-ui, sans-serif' font-size='13'"
COLORS = {False: ("#3b6ea5", "limited by bytes"), True: ("#d9822b", "limited by products")}


def shares(timed):
    """The share of what the device reaches, of each case at its largest shape, by plugin."""
    copied, product = timed["limits"]
    cases = {}
    for row in timed["rows"]:
        if "seconds" in row:
            key = row["plugin"], row["part"].rpartition(": ")[0]
            least = max(row["flops"] / product, row["floor"] / copied)
            cases[key] = max(cases.get(key, (0.0,)), (least, row["seconds"], bool(row["flops"])))
    found = {}
    for (plugin, _), (least, seconds, is_product) in cases.items():
        found.setdefault(plugin, []).append((least / seconds, is_product))
    return {plugin: sorted(dots) for plugin, dots in sorted(found.items())}


def kernels():
    """A dot for each case: the shortest possible time over the measured one."""
    text = (ROOT / "benchmarks/results/h100-kernels.json").read_text(encoding="utf-8")
    parts, top = [], 44
    lanes = shares(json.loads(text))
    bottom = top + LANE * len(lanes)
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, end = LEFT + WIDE * share, "#777" if share == 1 else "#ddd"
        parts.append(f"<path d='M{x} {top}V{bottom}' stroke='{end}'/>")
        label = f"<text x='{x}' y='{bottom + 18}' text-anchor='middle' {FONT}>{share:.0%}</text>"
        parts.append(label)
    for lane, (plugin, dots) in enumerate(lanes.items()):
        middle = top + LANE * lane + LANE // 2
        parts.append(
            f"<text x='{LEFT - 10}' y='{middle + 4}' text-anchor='end' {FONT}>{plugin}</text>"
        )
        for number, (share, is_product) in enumerate(dots):
            x, y = LEFT + WIDE * share, middle + (number % 5 - 2) * 6
            fill = COLORS[is_product][0]
            parts.append(
                f"<circle cx='{x:.0f}' cy='{y}' r='4.5' fill='{fill}' fill-opacity='0.7'/>"
            )
    for number, (fill, name) in enumerate(COLORS.values()):
        x = LEFT + 170 * number
        parts.append(f"<circle cx='{x + 5}' cy='18' r='5' fill='{fill}'/>")
        parts.append(f"<text x='{x + 16}' y='22' {FONT}>{name}</text>")
    lines = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {LEFT + WIDE * 1.25:.0f} "
        f"{bottom + 28}' role='img' "
        f"aria-label='Kernels on an H100, as a share of what the device reaches'>\n"
        f"<!-- Written by docs/generate.py. -->\n<rect width='100%' height='100%' fill='white'/>\n"
        f"{lines}\n</svg>\n"
    )


def memory():
    """The curve of a small encoder, counted and not measured, so that it is the same everywhere."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.zeros(4, 128, 256, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "memory.svg"
        opfuse.plan_memory(model, x, measure=False).save(path)
        return path.read_text(encoding="utf-8")
