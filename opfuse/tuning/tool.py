"""The tool by which measurements decide: what a plan's candidates are told, and which are used."""

from __future__ import annotations

from ..core.engine.facts import Facts
from ..core.hookspecs import Run, hookimpl
from .choosing import Measurements
from .table import table_for


@hookimpl
def opfuse_facts(facts: Facts) -> Measurements | None:
    """The measurements on this machine."""
    table = table_for(facts.env.device)
    return Measurements(facts, table) if table.entries else None


@hookimpl
def opfuse_wrap_choice(facts: Facts, run: Run) -> Run | None:
    """Refuse what was slower or wrong here, and take what gains most."""
    found = [known for known in facts.tool_facts if isinstance(known, Measurements)]
    return found[0].wrapped(run) if found else None
