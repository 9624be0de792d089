"""A tool of opfuse: chains on several processes, whose ranks agree on what they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import opfuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from opfuse.core.engine.chain import Chain
    from opfuse.core.engine.facts import Facts
    from opfuse.core.engine.program import Program
    from opfuse.core.engine.step import Step

    Run = Callable[..., Any]


@opfuse.hookimpl
def opfuse_wrap_call(chain: Chain | None, run: Run) -> Run | None:
    """Tell the other processes of errors, and run a chain on the parts of this process."""
    from . import agreement, layout

    return None if chain is None else layout.on_parts(chain, agreement.reporting(chain, run))


@opfuse.hookimpl
def opfuse_wrap_pass(program: Program, pass_name: str, run: Run) -> Run | None:
    """Agree with the other processes on a call, and on the pass that a backward is of."""
    from . import agreement

    if program.compiling or not agreement.groups_of(program.chain):
        return None
    if pass_name == "forward":
        return agreement.Agreed(run)
    return agreement.backward_of(run)


@opfuse.hookimpl
def opfuse_wrap_update(run: Run) -> Run:
    """Take the maxima of a recipe over the processes of a group."""
    from . import update

    return update.by_groups(run)


@opfuse.hookimpl
def opfuse_wrap_step(step: Step, facts: Facts, run: Run) -> Run | None:
    """Say in errors of collectives which op they are of."""
    from . import agreement

    groups = agreement.groups_of(facts.chain)
    return agreement.Reported(run, facts.chain, step) if groups else None
