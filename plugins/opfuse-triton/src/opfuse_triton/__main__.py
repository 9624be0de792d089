"""``python -m opfuse_triton``: ``check`` kernels with no GPU, measure them on one with ``gpu``."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .machine import is_interpreting

_PATH = click.Path(path_type=Path)


@click.group()
def main() -> None:
    """Check the kernels of plugins with no GPU, and measure them on one."""


@main.command("check")
@click.argument("plugin", required=False)
@click.option("--all", "candidates", is_flag=True, help="Compile every candidate of each kernel.")
@click.option("--report", type=_PATH, help="Write a report, as JSON.")
@click.option("--verify", type=_PATH, help="Compile nothing: compare a report with the sources.")
def check_command(
    plugin: str | None, candidates: bool, report: Path | None, verify: Path | None
) -> None:
    """Compile what PLUGIN launches for every target: registers, spills, instructions, accesses.

    PLUGIN is the name of an installed plugin, or module:object, a list of cases. Without it every
    installed plugin with cases is checked. The exit status is 1 if something is refused.
    """
    if is_interpreting():
        raise click.ClickException("TRITON_INTERPRET is set, and nothing can be compiled: unset it")
    if importlib.util.find_spec("triton") is None:
        what = "opfuse_triton needs Triton, which is not installed"
        raise click.ClickException(f"{what}: on Linux, python -m pip install triton")
    from .checking import check, refusal_sentences, verify_report, write_report
    from .tables import check_table

    try:
        if verify is not None:
            refusals = verify_report(verify, plugin)
            passed = f"{verify} is of these kernels, and refuses nothing"
        else:
            rows = check(plugin, candidates=candidates)
            for line in check_table(rows):
                click.echo(line)
            refusals = refusal_sentences(map(asdict, rows))
            passed = f"{len(rows)} compiled kernels, nothing is refused"
            if report is not None:
                write_report(report, plugin, rows)
    except (ValueError, ImportError, AttributeError, TypeError, IndexError, OSError) as error:
        # a mistake in what was asked for is one line
        raise click.ClickException(" ".join(str(error).split())) from error
    for one in refusals:
        click.echo(textwrap.fill(f"refused: {one}", 98, subsequent_indent="  "))
    if refusals:
        sys.exit(1)
    click.echo(passed)


@main.command("gpu")
@click.argument("plugin", required=False)
@click.option(
    "--budget", type=click.FloatRange(60), default=300, show_default=True, help="Seconds, at most."
)
@click.option(
    "--report", type=_PATH, default="gpu.json", show_default=True, help="Written after each part."
)
@click.option(
    "--tables", type=_PATH, help="Folder of the fastest configurations; default: the report's."
)
@click.option("--only", type=click.Choice(["odd", "real"]), help="Only the shapes of this kind.")
@click.option("--case", "cases", multiple=True, help="Only the cases of this name; repeatable.")
def gpu_command(
    plugin: str | None, budget: float, report: Path, tables: Path | None, **wanted: Any
) -> None:
    """Compare and time every kernel case of PLUGIN, or of all plugins, on this GPU.

    Results are compared with PyTorch's, at real and odd shapes. The table has the time of each
    case, and how many times as long the separate operations, torch.compile and other packages take.
    The exit status is 1 if a result is wrong, if a case cannot be timed, or if a process had to be
    ended. With TRITON_INTERPRET=1 it runs on the CPU, to test it.
    """
    import torch

    has_device = torch.cuda.is_available() or is_interpreting()
    if importlib.util.find_spec("triton") is None or not has_device:
        raise click.ClickException("opfuse_triton gpu needs Triton and a GPU that torch can use")
    from opfuse.tuning.job import replace
    from opfuse.tuning.table import file_name, kernels_path

    from .gpu import winners
    from .gpu.measuring import Wanted
    from .gpu.session import host, session
    from .gpu.table import lines

    device = host()["device"]
    table = (tables or report.parent) / f"{file_name(device)}.kernels.json"

    def keep(found: dict[str, Any]) -> None:
        replace(report, found)
        winners.write(table, [one for row in found["rows"] for one in row.get("entries", ())])

    try:
        winners.write(table, ())  # what cannot be written is told before, not after
        found = session(plugin, budget, keep, Wanted(**wanted))
    except (ValueError, ImportError, AttributeError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    for line in lines(found):
        click.echo(line)
    click.echo(f"everything is in {report}, the fastest configurations in {table}")
    where = kernels_path(device) or "no place, since OPFUSE_TUNING is empty"
    click.echo(f"kernels look for them at {where}")
    failed = [row for row in found["rows"] if row["wrong"] or isinstance(row.get("seconds"), str)]
    if found["ended"] or failed or not found["rows"]:
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m opfuse_triton")
