"""``opfuse new``: writes a plugin package from the template in this folder."""

from __future__ import annotations

import re
from pathlib import Path

from ...core.hookspecs import GROUP
from ...core.plugins import manager

TEMPLATE = Path(__file__).parent / "template"
PREFIX = "opfuse-plugin-"


def write(name: str, into: Path) -> Path:
    """Write the plugin ``opfuse-plugin-<name>`` into a new folder of that name.

    Args:
        name: The name of the entry point, such as ``fast-gelu``; the prefix may be there
            already.
        into: The folder that gets the new one; made if it does not exist.

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
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = folder / fill(source.relative_to(TEMPLATE).as_posix(), short)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = fill(source.read_text(encoding="utf-8"), short)
            target.write_text(text, encoding="utf-8", newline="\n")
    return folder


def fill(text: str, name: str) -> str:
    """``text`` of the template with the name in it; in identifiers its hyphens are underscores."""
    return re.sub(r"NAME\b", name, text.replace("opfuse_NAME", f"opfuse_{name.replace('-', '_')}"))


def welcome(folder: Path) -> str:
    """The next steps with a plugin that was just written."""
    return f"""Wrote {folder}. It works as it is:

  cd {folder}
  python -m pip install -e ".[test]"
  python -m opfuse plugins
  python -m pytest"""
