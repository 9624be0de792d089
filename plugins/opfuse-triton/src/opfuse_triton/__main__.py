"""``python -m opfuse_triton check``: compile and check the kernels of plugins, with no GPU."""

from __future__ import annotations

import pathlib
import sys
import textwrap
from dataclasses import asdict

import click

from .checking import check, refusal_sentences, verify_report, write_report
from .machine import is_interpreting
from .tables import check_table

_PATH = click.Path(path_type=pathlib.Path)


@click.group()
def main() -> None:
    """Check the kernels of plugins, with no GPU."""


@main.command("check")
@click.argument("plugin", required=False)
@click.option("--all", "candidates", is_flag=True, help="Compile every candidate of each kernel.")
@click.option("--report", type=_PATH, help="Write a report, as JSON.")
@click.option("--verify", type=_PATH, help="Compile nothing: compare a report with the sources.")
def check_command(
    plugin: str | None, candidates: bool, report: pathlib.Path | None, verify: pathlib.Path | None
) -> None:
    """Compile what PLUGIN launches for every target: registers, spills, instructions, accesses.

    PLUGIN is the name of an installed plugin, or module:object, a list of cases. Without it every
    installed plugin with cases is checked. The exit status is 1 if something is refused.
    """
    if is_interpreting():
        raise click.ClickException("TRITON_INTERPRET is set, and nothing can be compiled: unset it")
    try:
        if verify is not None:
            refusals = verify_report(verify, plugin)
            passed = f"{verify} is of these sources, and refuses nothing"
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


if __name__ == "__main__":
    main(prog_name="python -m opfuse_triton")
