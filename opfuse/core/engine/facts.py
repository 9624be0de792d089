"""The facts that a plan is made from."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..environment import Environment
from ..hookspecs import Run
from ..records import PluginRecord
from ..tools import wrap
from .chain import Chain
from .edges import Edges, Needs
from .step import Step

Shapes = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]


class Known(ABC):
    """What a tool knows of the candidates of one plan, beyond what they declare.

    Attributes:
        digest: A hash of it, which joins the plan, or ``""``.
    """

    digest: str = ""

    @abstractmethod
    def fields(self, step: Step, read: Callable[[str], Any]) -> Mapping[str, Any] | None:
        """Fields of the :class:`Environment` of a candidate; None: nothing is known of it.

        They are asked for once, before its condition. What is known replaces that it declares to
        trade time for memory: the tool then refuses it where that does not pay.

        Args:
            step: The candidate. Reports tell its ``remark``.
            read: Gives ``"rows"``, ``"features"`` or ``"contiguous"`` of its input, or None where
                that is not known. The plan is then for such inputs alone.
        """


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that a plan of a chain is made from.

    Attributes:
        chain: The chain.
        env: The environment of the plan.
        needs: The gradients that it computes.
        edges: The casts of each pass.
        params: Shape and dtype of the parameters of each op.
        kwargs: Names of the keyword arguments given to each op.
        autocast: The dtype that autocast asks for, or None.
        input_dtype: The dtype of the chain's input, which autocast may cast.
        tools: The tools that wrap what runs.
        known: What they know of candidates.
    """

    chain: Chain
    env: Environment
    needs: Needs
    edges: Edges
    params: Shapes
    kwargs: Sequence[tuple[str, ...]]
    autocast: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    tools: Sequence[PluginRecord] = ()
    known: Sequence[Known] = ()

    def check_tools(self) -> None:
        """Refuse to go on without a tool that failed, if something was asked of it.

        Raises:
            RuntimeError: An option in force is of it, or an op needs it.
        """
        for record in [record for record in self.tools if record.state == "failed"]:
            asked = [name for name in record.options if name in self.env.options]
            if asked or record.name in self.chain.needs_tools:
                who = f"option {asked[0]}" if asked else self.chain.title
                raise RuntimeError(f"{who} needs the tool {record.name}: {record.error}")

    def wrap(self, hook: str, run: Run, **given: Any) -> Run:
        """What the tools make of a function; see :func:`opfuse.core.tools.wrap`."""
        return wrap(self.tools, hook, run, facts=self, **given)
