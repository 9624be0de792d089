"""A tool of opfuse: locks on what decides numbers, and the batch-invariant mode.

Options: ``opfuse.options(locked=PATH)`` and ``opfuse.options(invariant="batch")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import opfuse
from opfuse.core.settings import Option

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from opfuse.core.engine.facts import Facts, Step
    from opfuse.core.engine.program import Program

    Run = Callable[..., Any]


@opfuse.hookimpl
def opfuse_options() -> dict[str, Option]:
    """``locked`` and ``invariant``."""
    from . import invariant, lock

    return {
        "locked": Option(lock.Lock.read, lock.check_settings),
        "invariant": Option(invariant.mode),
    }


@opfuse.hookimpl
def opfuse_wrap_call(module: nn.Module | None, run: Run) -> Run | None:
    """Refuse a module between chains in the batch-invariant mode."""
    from . import invariant

    return None if module is None else invariant.Refused(module, run)


@opfuse.hookimpl
def opfuse_wrap_choice(facts: Facts, run: Run) -> Run | None:
    """Refuse fusions that do not promise what the batch-invariant mode asks for."""
    from . import invariant

    return invariant.among_promising(facts, run)


@opfuse.hookimpl
def opfuse_wrap_pass(program: Program, pass_name: str, run: Run) -> Run | None:
    """Compare a lock before each call, and cut the rows of a call into blocks."""
    from . import invariant, lock

    if pass_name != "forward":
        return None
    return lock.checked(program, invariant.in_blocks(program, run))


@opfuse.hookimpl
def opfuse_wrap_step(step: Step, pass_name: str, facts: Facts, run: Run) -> Run | None:
    """Run an op on a few rows of a block at a time."""
    from . import invariant

    return invariant.in_parts(step, facts, run) if pass_name == "forward" else None
