"""``opfuse freeze``: what decides numbers here."""

from __future__ import annotations

import click

from opfuse.cli import quiet_stdout

from .lock import freeze


@click.command(name="freeze", short_help="Print what decides numbers here, to lock it.")
def freeze_command() -> None:
    """Print what decides numbers here, as JSON: `opfuse freeze > numbers.json`.

    It lists versions, the selection of plugins, hashes of the tuning tables, devices, threads, the
    precision of products, and whether algorithms are deterministic. opfuse.options(locked=PATH)
    then refuses to run under anything else. In a program, opfuse.freeze() gives the same with the
    options and the recipe in force.
    """
    with quiet_stdout():
        text = freeze()
    click.echo(text)
