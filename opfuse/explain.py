"""What was planned, and why, as text and as JSON-able data."""

from __future__ import annotations

from typing import Any

from .plan import FusionPlan


class Recorder:
    """Collects the plans of the calls made while it is in the thread's scope."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, FusionPlan]] = []

    def record(self, fuser: Any, plan: FusionPlan) -> None:
        """Called by a fuser for every call."""
        self.calls.append((fuser, plan))


def describe_plan(plan: FusionPlan) -> str:
    """A plan as text."""
    return repr(plan)


def explain(model: Any, *inputs: Any, **kwargs: Any) -> Any:
    raise NotImplementedError
