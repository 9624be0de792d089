"""``opfuse convert``: what a conversion would do to a model."""

from __future__ import annotations

import json

import click

from opfuse.cli import load_model, quiet_stdout, user_errors

from .converting import convert


@click.command(name="convert", short_help="Show what opfuse.convert would do to a model.")
@click.argument("target", metavar="MODULE:OBJECT")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only modules of such names.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Not modules of such names.")
@click.option("--verify", is_flag=True, help="Compare each chain with the module it is for.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, nothing else.")
def convert_command(
    target: str, only: tuple[str, ...], skip: tuple[str, ...], verify: bool, as_json: bool
) -> None:
    """Show which modules of a model opfuse.convert has chains for, and why not for the others.

    If there are inputs, the model runs before and after, and the report says what is fused and what
    is kept for the backward. Nothing is written.

    MODULE is imported from the current directory or from what is installed. OBJECT is a tuple
    (model, input, ...), or a function without arguments that returns one. A dict as the last input
    has inputs by name.
    """
    with quiet_stdout():
        model, inputs, by_name = load_model(target)
        given = (*inputs, by_name) if inputs or by_name else ()
        with user_errors(f"{target}:"):
            report = convert(model, *given, only=only or None, skip=skip, verify=verify or None)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
