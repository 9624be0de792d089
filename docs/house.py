"""Draws the house: who imports whom, read from the code as ``tests/test_house.py`` reads it."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
WIDE, HIGH, GAP, LEFT = 250, 34, 12, 20
FONT = "font-family='ui-sans-serif, system-ui, sans-serif' font-size='13'"


def read():
    """The module that reads the imports."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "tests" / "test_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def knows(house):
    """What each folder of opfuse, and each other package, imports of the others."""
    pairs = set()
    for a, b in house.arrows():
        names = [house.folder_of(m) or m.partition(".")[0] for m in (a, b)]
        if names[1] == "opfuse" or "__main__" in names or names[0] == names[1]:
            continue  # public names of the root belong to whatever folder has them
        pairs.add(tuple(names))
    return {name: {b for a, b in pairs if a == name} for name in {a for a, _ in pairs}}


def box(x, y, name, note="", fill="#eef2f7"):
    """A labelled box; the note is below the name."""
    high = HIGH + 18 * bool(note)
    middle = x + WIDE / 2
    text = f"<text x='{middle}' y='{y + 22}' text-anchor='middle' {FONT}>{name}</text>"
    small = FONT.replace("13", "11")
    text += (
        f"<text x='{middle}' y='{y + 40}' text-anchor='middle' fill='#555' {small}>{note}</text>"
    )
    shape = (
        f"<rect x='{x}' y='{y}' width='{WIDE}' height='{high}' rx='5' fill='{fill}' stroke='#555'/>"
    )
    return shape + text


def arrow(start, end):
    """A line with a head."""
    (a, b), (c, d) = start, end
    curve = f"M{a} {b} C{a - 40} {b} {c + 40} {d} {c} {d}"
    return f"<path d='{curve}' fill='none' stroke='#777' marker-end='url(#head)'/>"


def draw():
    """The picture, as SVG: plugins on the right, toolkits in the middle, opfuse on the left."""
    house = read()
    below = knows(house)
    folders = [f for f in reversed(house.FOLDERS)]
    plugins = sorted(set(house.PACKAGES) - {"opfuse", *house.TOOLKITS})
    column = [LEFT + i * (WIDE + 90) for i in range(3)]
    parts, top = [], 46
    for i, title in enumerate(("opfuse: the upper imports the lower", "toolkits", "plugins")):
        parts.append(f"<text x='{column[i]}' y='26' font-weight='bold' {FONT}>{title}</text>")
    height = top + len(plugins) * (HIGH + GAP)
    step = (height - top) // len(folders)
    parts.append(
        f"<rect x='{LEFT - 8}' y='{top - 8}' width='{WIDE + 16}' height='{height - top}' rx='8' "
        f"fill='none' stroke='#999'/>"
    )
    for i, name in enumerate(folders):
        note = "imports " + (
            ", ".join(f for f in house.FOLDERS if f in below.get(name, ())) or "none"
        )
        parts.append(box(column[0], top + i * step, f"opfuse/{name}", note, "#dce8f5"))
    places = {}
    for i, name in enumerate(house.TOOLKITS):
        y = top + int((i + 0.5) * (height - top) / len(house.TOOLKITS)) - HIGH // 2
        places[name] = y + HIGH / 2
        others = [other for other in house.TOOLKITS if other in below.get(name, ())]
        note = f"imports {', '.join(others)}" if others else ""
        parts.append(box(column[1], y, name, note, fill="#e6f3e6"))
        parts.append(arrow((column[1], y + HIGH / 2), (column[0] + WIDE + 12, y + HIGH / 2)))
    for i, name in enumerate(plugins):
        y = top + i * (HIGH + GAP)
        used = [toolkit for toolkit in house.TOOLKITS if toolkit in below.get(name, ())]
        note = "" if used else " (opfuse only)"
        parts.append(box(column[2], y, name + note, fill="#fbf1dc"))
        for toolkit in used:
            end = column[1] + WIDE + 4, places[toolkit]
            parts.append(arrow((column[2], y + HIGH / 2), end))
    width = column[2] + WIDE + LEFT
    head = (
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        "markerHeight='7' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#777'/></marker></defs>"
    )
    lines = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height + GAP}' "
        f"role='img' aria-label='Who imports whom'>\n"
        f"<!-- Written by docs/generate.py. -->\n<rect width='100%' height='100%' fill='white'/>\n"
        f"{head}\n{lines}\n</svg>\n"
    )
