"""The results of the check, as text of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .checking import CheckedLaunch

_ROW = "      {:7} {:>9} {:>10} {:>9} {:>9}  {:13} {:>3}  {}"
_HEAD = _ROW.format(
    "", "registers", "spilled, B", "shared, B", "occupancy", "matrix", "TMA", "narrowest access, B"
)


def check_table(rows: Sequence[CheckedLaunch]) -> Iterator[str]:
    """The lines of a table of launches, by case and kernel. Shapes with equal lines share them."""
    cases: dict[str, dict[str, dict[str, list[str]]]] = {}
    for row in rows:
        of_shape = cases.setdefault(f"{row.plugin}: {row.case}", {}).setdefault(row.shape, {})
        of_shape.setdefault(_heading(row), []).append(_line(row))
    for case, shapes in cases.items():
        yield case
        shared: dict[tuple[str, ...], list[str]] = {}
        for shape, kernels in shapes.items():
            lines = [line for heading, own in kernels.items() for line in (heading, *own)]
            shared.setdefault(tuple(lines), []).append(f"  {shape}")
        for same, names in shared.items():
            yield from (*names, _HEAD, *same)
        yield ""


def _heading(row: CheckedLaunch) -> str:
    """A kernel, and what it is compiled with."""
    return f"    {row.kernel}: {settings_as_text(row.config, row.constants)}"


def settings_as_text(config: Mapping[str, Any], constants: Mapping[str, str] | None = None) -> str:
    """A configuration as :meth:`opfuse_triton.Config.to_dict` has it, behind other constants."""
    given = {**(constants or {}), **config["constants"], **config["options"]}
    stages = config["num_stages"]
    settings = [" ".join(f"{name}={value}" for name, value in given.items())]
    settings += [f"{config['num_warps']} warps"] + [f"{stages} stages"] * bool(stages)
    return ", ".join(filter(None, settings))


def _line(row: CheckedLaunch) -> str:
    if (found := row.resources) is None:
        return f"      {row.target:7} does not compile"
    widths = " ".join(f"{name.removesuffix('_ptr')}:{n}" for name, n in row.widths.items())
    return _ROW.format(
        row.target, found.registers, found.spilled or "-", found.shared or "-",
        f"{row.occupancy:.0%}",
        " ".join(f"{count} {name}" for name, count in found.matrix.items()) or "-",
        found.tma or "-", widths or "-",
    )  # fmt: skip
