"""``python -m opfuse_triton``: check the kernels of plugins, and count their bytes, with no GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import click

from .cases import KernelCase
from .checking import check, refusal_sentences, verify_report, write_report
from .ledger import SAMPLE, Moved, count_separate, count_small, estimate
from .peers import estimate_peer
from .recorded import case_lists, load_cases
from .tables import check_table, peer_lines, small_table, target_table
from .targets import TARGETS, Target, is_interpreting

_Answer = TypeVar("_Answer")

_MODEL = (
    "* a model, not measured: bytes in flight over a latency of 0.8 us, at most the bandwidth; "
    "matrix\n  products at the peak."
)


@click.group()
def main() -> None:
    """Check the kernels of plugins, and count the bytes that they move, with no GPU."""


@main.command("check")
@click.argument("plugin", required=False)
@click.option("--all", "candidates", is_flag=True, help="Compile every candidate of each kernel.")
@click.option("--report", type=click.Path(path_type=pathlib.Path), help="Write a report, as JSON.")
@click.option(
    "--verify",
    type=click.Path(path_type=pathlib.Path, exists=True),
    help="Compile nothing: say whether a report is of the sources as they are.",
)
def check_command(
    plugin: str | None, candidates: bool, report: pathlib.Path | None, verify: pathlib.Path | None
) -> None:
    """Compile what PLUGIN launches for every target: registers, spills, instructions, accesses.

    PLUGIN is the name of an installed plugin, or module:object, a list of cases. Without it every
    installed plugin with cases is checked. The exit status is 1 if something is refused.
    """
    _in_process(interpreting=False)
    if verify is not None:
        refusals = _told(lambda: verify_report(verify, plugin))
        click.echo(_refused(refusals) or f"{verify} is of these sources, and refuses nothing")
    else:
        rows = _told(lambda: check(plugin, candidates=candidates))
        for line in check_table(rows):
            click.echo(line)
        refusals = refusal_sentences(map(asdict, rows))
        click.echo(_refused(refusals) or f"{len(rows)} compiled kernels, nothing is refused")
        if report is not None:
            write_report(report, plugin, rows)
    sys.exit(1 if refusals else 0)


@main.command("ledger")
@click.argument("plugin", required=False)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice([str(target) for target in TARGETS.values()]),
    help="Only for this target; may be given again.",
)
def ledger_command(plugin: str | None, targets: tuple[str, ...]) -> None:
    """Count the bytes that PLUGIN's kernels move, against the floor of each fusion.

    PLUGIN is the name of an installed plugin, or module:object, a list of cases.
    """
    _in_process(interpreting=True)
    chosen = [target for target in TARGETS.values() if not targets or str(target) in targets]
    for name, where in _told(lambda: case_lists(plugin)).items():
        for case in _told(lambda where=where: load_cases(where)):  # type: ignore[misc]
            click.echo(f"{name}: {case.name}")
            lines = _ledger_of(case, chosen)
            while (line := _told(lambda lines=lines: next(lines, None))) is not None:  # type: ignore[misc]
                click.echo(line)
            click.echo("")
    click.echo(_MODEL)


def _ledger_of(case: KernelCase, targets: list[Target]) -> Iterator[str]:
    for shape in case.small:
        rows: dict[str, Moved | int | str] = {"opfuse": count_small(case, shape)}
        separate = count_separate(case, shape)
        if separate is not None:
            rows["separate ops"] = separate
        for peer, run in case.peers.items():
            try:
                rows[peer] = count_small(case, shape, run)
            except ImportError:
                rows[peer] = "not installed"
            except Exception as error:  # another package's
                rows[peer] = f"does not run here: {type(error).__name__}: {error}"[:80]
        yield from small_table(shape, case.floor_bytes(shape), rows)
    for shape in case.shapes:
        counted: dict[Any, Any] = {}
        entries = [estimate(case, shape, target, counted=counted) for target in targets]
        yield from target_table(case, shape, entries, SAMPLE)
        for name, run in case.peers.items():
            try:
                others = [estimate_peer(case, shape, target, run) for target in targets]
                yield from peer_lines(case, shape, name, others)
            except Exception as error:  # another package's
                if not case.small:  # where it was not said before
                    yield f"    {name} does not run here: {type(error).__name__}: {error}"[:100]


def _refused(sentences: list[str]) -> str:
    return "\n".join(
        textwrap.fill(f"refused: {one}", 98, subsequent_indent="  ") for one in sentences
    )


def _told(ask: Callable[[], _Answer]) -> _Answer:
    """Make a mistake in what was asked for one line."""
    try:
        return ask()
    except (ValueError, ImportError, AttributeError, TypeError, IndexError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _in_process(interpreting: bool) -> None:
    """Go on in a process that interprets, or does not: Triton decides when it is imported."""
    if is_interpreting() != interpreting:
        environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreting else "0"}
        command = [sys.executable, "-m", "opfuse_triton", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main(prog_name="python -m opfuse_triton")
