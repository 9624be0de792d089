"""The command line: which plugins there are, and what they do to a model."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch

from .. import __version__
from ..core.plugins import listing, manager
from ..core.records import PluginFilter, is_strict
from ..core.settings import current
from ..report.explain import explain
from ..report.lines import table, wrap
from ..tuning import tune
from . import scaffold
from .check_plugin import check_plugin
from .doctor import as_text, examine
from .models import UserError, load_model, quiet_stdout, user_errors

GROUP = "opfuse.commands"
"""The entry-point group of commands that other packages add."""


class _Commands(click.Group):
    """The commands here, and those of toolkits, which are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted({*super().list_commands(ctx), *manager.entry_points[GROUP]})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of a name, or None."""
        found = super().get_command(ctx, name)
        if found is not None:
            return found
        if entry := manager.entry_points[GROUP].get(name):
            with user_errors(f"the command {name} of {entry.value} cannot be loaded:"):
                return entry.load()  # type: ignore[no-any-return]
        if why := manager.why_missing(f"opfuse {name}"):
            raise UserError(why)
        return None


@click.group(cls=_Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="opfuse", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Show which fusions the installed plugins offer, and what they do to a model."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    try:
        PluginFilter.parse(current.selection)
    except ValueError as error:
        raise UserError(str(error)) from None


# Plugins


@main.command(short_help="List every installed plugin.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout, nothing else.")
def plugins(as_json: bool) -> None:
    """List every installed plugin.

    The environment variable OPFUSE_PLUGINS selects: unset means all, empty none, "a,b" these in
    this precedence, "-a" all but a. With OPFUSE_STRICT=1 a plugin that fails makes the exit status
    1.
    """
    with quiet_stdout():
        rows, tools = _listing(), _listing(tools=True)
    text = "\n".join([*_table(rows), "", *_tools(tools)])
    click.echo(json.dumps(rows + tools, indent=2) if as_json else text)
    if is_strict() and any(row["state"] == "failed" for row in rows + tools):
        sys.exit(1)


def _listing(*, tools: bool = False) -> list[dict[str, Any]]:
    """Every plugin, or every tool, in strict mode too.

    There each failure raises, and the next call continues after it.
    """
    for _ in (*manager.records, *manager.tools):
        try:
            return listing(tools=tools)
        except Exception as error:
            click.echo(f"Error: {type(error).__name__}: {' '.join(str(error).split())}", err=True)
    return listing(tools=tools)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return [
            "No plugins are installed: every op runs unfused.",
            "A plugin is a package with an entry point in group opfuse.v1; pip install one.",
        ]
    cells = [("PLUGIN", "DISTRIBUTION", "STATE")]
    cells += [(r["name"], f"{r['distribution']} {r['version']}", r["state"]) for r in rows]
    starts = table(cells)
    width = max(map(len, starts)) + 2
    lines = [f"{starts[0]:{width}}FUSIONS"]
    for start, row in zip(starts[1:], rows, strict=True):
        passes = {name: ", ".join(dict.fromkeys(of)) for name, of in row["fusions"].items()}
        given = {
            name: f", priority {', '.join(map(str, dict.fromkeys(of.values())))}"
            for name, of in row["priorities"].items()
        }
        fusions = [f"{name} ({of}{given.get(name, '')})" for name, of in passes.items()]
        hooks = [hook for hook in row["hooks"] if not hook.endswith("_fusions")]
        others = [hook.removeprefix("opfuse_") for hook in hooks]
        none = f"none, but {', '.join(others)}" if others else "-"
        gives = ", ".join(fusions) or none
        lines += wrap(gives, f"{start:{width}}", " " * width)
        lines += wrap(" ".join((row["error"] or "").split()), "    ")
    return lines


def _tools(rows: list[dict[str, Any]]) -> list[str]:
    lines = [("TOOL", "DISTRIBUTION", "STATE", "WRAPS")]
    for row in rows:
        wraps = [hook for hook in row["hooks"] if hook.startswith("opfuse_wrap_")]
        wraps = [hook.removeprefix("opfuse_wrap_") for hook in wraps]
        what = row["error"] or f"each {', '.join(wraps)}"
        lines.append((row["name"], f"{row['distribution']} {row['version']}", row["state"], what))
    return table(lines)


# Explain


@main.command(name="explain", short_help="Run a model once and show what is fused, and why.")
@click.argument("target", metavar="MODULE:OBJECT")
@click.option("--details", is_flag=True, help="Every step in order and every candidate refused.")
@click.option("--code", is_flag=True, help="The Python that ran instead of the report.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, nothing else.")
def explain_command(target: str, details: bool, code: bool, as_json: bool) -> None:
    """Run a model once and show what is fused, by which plugin, and why the rest is not.

    MODULE is imported from the current directory or from what is installed. OBJECT is a tuple
    (model, input, ...), or a function without arguments that returns one. A dict as the last input
    has inputs by name.
    """
    with quiet_stdout():
        model, inputs, by_name = load_model(target)
        how = "" if inputs or by_name else " without an input"
        with user_errors(f"{target}: {type(model).__name__}{how} raised"):
            explanation = explain(model, *inputs, **by_name)
    text = explanation.details if details else str(explanation)
    text = explanation.code if code else text
    click.echo(json.dumps(explanation.to_dict(), indent=2) if as_json else text)


# Tune


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, as a function of the number done, the total and the next name."""
    how: dict[str, Any] = {"label": "Measuring", "item_show_func": lambda name: name}
    with click.progressbar(length=0, file=sys.stderr, **how) as bar:

        def show(done: int, of: int, what: str) -> None:
            bar.length = of
            bar.update(done - bar.pos, what)

        yield show


@main.command(name="tune", short_help="Measure which fusions are right and fast for a model here.")
@click.argument("target", metavar="MODULE:OBJECT")
@click.option("--no-grad", is_flag=True, help="For inference: under torch.no_grad().")
@click.option("--compiled", is_flag=True, help="For torch.compile: measure each fusion there.")
@click.option("--check", is_flag=True, help="Exit with status 1 if a fusion is wrong.")
@click.option("--details", is_flag=True, help="A line about every candidate.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, nothing else.")
def tune_command(
    target: str, no_grad: bool, compiled: bool, check: bool, details: bool, as_json: bool
) -> None:
    """Measure on this machine which fusions are right and not slower for a model.

    The results go into the table of this device, and every plan uses them from then on.
    The tables are in the user's cache directory, or where the environment variable OPFUSE_TUNING
    says; if it is empty, nothing is written.

    MODULE is imported from the current directory or from what is installed. OBJECT is a tuple
    (model, input, ...), or a function without arguments that returns one. A dict as the last input
    has inputs by name.
    """
    with quiet_stdout():
        model, inputs, by_name = load_model(target)
        with user_errors(f"{target}:"), torch.set_grad_enabled(not no_grad):
            try:
                with _progress() as progress:
                    given = {"compiled": compiled, "progress": progress, **by_name}
                    report = tune(model, *inputs, **given)
            except KeyboardInterrupt:
                click.echo("Interrupted; what was measured by then is written.", err=True)
                sys.exit(130)
    text = report.details if details else str(report)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else text)
    if check and report.wrong:
        sys.exit(1)


# Doctor


@main.command(short_help="Show versions, devices, tuning tables, and which recipes run here.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, nothing else.")
def doctor(as_json: bool) -> None:
    """Show what is installed, what this machine has, and which recipes run on it.

    For each device: the tuning table that applies there, and for each recipe whether its products
    run natively, emulated or not at all, and why. With OPFUSE_STRICT=1 a plugin that fails makes
    the exit status 1.
    """
    with quiet_stdout():
        _listing()  # prints what fails
        found = examine()
    click.echo(json.dumps(found, indent=2) if as_json else as_text(found))
    if is_strict() and found["errors"]:
        sys.exit(1)


# New plugins


@main.command(short_help="Write a new plugin.")
@click.argument("name")
@click.option("--into", metavar="DIR", default=".", help="Its parent folder; default: this one.")
@click.option(
    "--kind",
    type=click.Choice([*scaffold.KINDS]),
    default=next(iter(scaffold.KINDS)),
    show_default=True,
    help="What it gives to opfuse: a fusion of these passes, an op with its fusion, or a recipe.",
)
def new(name: str, into: str, kind: str) -> None:
    """Write a complete plugin into a new folder opfuse-plugin-NAME.

    It has one example and its tests, and works as it is. A fusion of the forward or of the backward
    has a Triton kernel with its PyTorch twin. The others are written in PyTorch's operations.
    """
    try:
        click.echo(scaffold.welcome(scaffold.write(name, pathlib.Path(into), kind)))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None


main.add_command(check_plugin)
