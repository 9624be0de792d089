"""``opfuse new``: writes a plugin package from the template in this folder.

The template has a folder for every kind of plugin, one for kinds with a kernel, and one with the
files of any kind. In the last two a line such as ``# only joint op`` begins lines for some kinds,
and ``# all`` ends them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...core.hookspecs import GROUP
from ...core.plugins import manager

TEMPLATE = Path(__file__).parent / "template"
PREFIX = "opfuse-plugin-"


class Kind(NamedTuple):
    """What a plugin of one kind is an example of.

    Attributes:
        description: The description in its ``pyproject.toml``.
        offers: The name of its fusion, or the class of its recipe.
        fuses: The pass of its fusion.
    """

    description: str
    offers: str
    fuses: str = "forward"


KINDS = {
    "forward": Kind("A fusion of bias and activation for opfuse", "bias+activation"),
    "joint": Kind("A fusion of RMSNorm and activation for opfuse", "rmsnorm+activation", "joint"),
    "backward": Kind(
        "A fusion of bias and activation gradients for opfuse", "bias+activation", "backward"
    ),
    "op": Kind("An op for opfuse, and its fusion with a residual add", "scale+add"),
    "recipe": Kind("A recipe for opfuse in int8 with one scale per tensor", "Int8"),
}
"""Every kind of plugin, the default first."""


def write(name: str, into: Path, kind: str = "forward") -> Path:
    """Write the plugin ``opfuse-plugin-<name>`` into a new folder of that name.

    Args:
        name: The name of the entry point, such as ``fast-gelu``; the prefix may be there
            already.
        into: The folder that gets the new one; made if it does not exist.
        kind: One of ``KINDS``.

    Returns:
        The new folder.

    Raises:
        ValueError: The name is not valid for a plugin, or an installed plugin answers to it.
        FileExistsError: The folder exists already; nothing is written.
    """
    short = name.removeprefix(PREFIX)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", short):
        raise ValueError(
            f"{name!r} cannot be the name of a plugin; expected "
            "lower-case letters and digits, beginning with a letter, "
            "words joined by single hyphens, such as 'fast-gelu'"
        )
    for record in [record for record in manager.records if record.group == GROUP]:
        if any(map(record.answers_to, (short, PREFIX + short))):
            taken = f"{record.distribution} {record.version}"
            raise ValueError(
                f"a plugin called {short!r} is installed already, by {taken}: choose another name"
            )
    folder = into / (PREFIX + short)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already, and nothing is overwritten")
    kernel = ["kernel"] * (kind in ("forward", "backward"))
    for part in [TEMPLATE / name for name in ("any", *kernel, kind)]:  # a kind may replace a file
        for source in sorted(part.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                target = folder / fill(source.relative_to(part).as_posix(), short, kind)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = fill(source.read_text(encoding="utf-8"), short, kind)
                target.write_text(text, encoding="utf-8", newline="\n")
    return folder


def fill(text: str, name: str, kind: str) -> str:
    """Text of the template for one plugin; its name has underscores in identifiers."""
    description, _, fuses = KINDS[kind]
    text = _for_kind(text, kind).replace("DESCRIPTION", description)
    text = text.replace("opfuse_PASS", f"opfuse_{fuses}").replace("PASS", fuses.upper())
    return re.sub(r"NAME\b", name, text.replace("opfuse_NAME", f"opfuse_{name.replace('-', '_')}"))


def _for_kind(text: str, kind: str) -> str:
    """The lines of a file of the template that a kind has."""
    lines, is_included = list[str](), True
    for line in text.splitlines(keepends=True):
        if found := re.fullmatch(r" *(?:#|<!--) (all|only [a-z ]+?)(?: -->)?\n", line):
            is_included = found[1] == "all" or kind in found[1].split()[1:]
        elif is_included:
            lines.append(line)
    return "".join(lines)


def welcome(folder: Path) -> str:
    """The next steps with a plugin that was just written."""
    return f"""Wrote {folder}. It works as it is:

  cd {folder}
  python -m pip install -e ".[test]"
  python -m opfuse plugins
  python -m pytest"""
