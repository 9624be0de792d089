"""A tool of opfuse: chains on several processes, whose ranks agree on what they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import opfuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from opfuse.core.engine.chain import Chain
    from opfuse.core.engine.facts import Facts, Step
    from opfuse.core.engine.program import Program

    Run = Callable[..., Any]


@opfuse.hookimpl
def opfuse_wrap_call(chain: Chain | None, run: Run) -> Run | None:
    """Tell the other processes of errors, and run a chain on the parts of this process."""
    if chain is None or not _has_processes(chain):
        return None
    from . import agreement, layout

    return layout.on_parts(chain, agreement.reporting(chain, run))


@opfuse.hookimpl
def opfuse_wrap_pass(program: Program, pass_name: str, run: Run) -> Run | None:
    """Agree with the other processes on a call, and on the pass that a backward is of."""
    if program.compiling or not _has_processes(program.chain):
        return None
    from . import agreement

    if not agreement.groups_of(program.chain):
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
    if not _has_processes(facts.chain):
        return None
    from . import agreement

    groups = agreement.groups_of(facts.chain)
    return agreement.Reported(run, facts.chain, step) if groups else None


def _has_processes(chain: Chain) -> bool:
    """Whether an op of a chain concerns several processes; without it nothing more is imported."""
    if chain.needs_tools:
        return True
    # reading an attribute that a module lacks takes long, and this is asked for each step
    name = "collective_group"
    return any([name in vars(op) or hasattr(type(op), name) for op in chain.ops])
