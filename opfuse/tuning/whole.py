"""The chain of a converted module against the module's own operations."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import tables
from ..authoring import saved_bytes
from ..contexts import options
from ..conversion import Standing, standing_in
from ..conversion.choosing import Kind, pays_in_graph, shape_of, subject
from ..conversion.verifying import as_tuple, differ, in_fp64
from ..overrides import op_class
from ..tables import Measurement, Shape
from .parts import compiled
from .report import Result
from .timing import compare


@dataclasses.dataclass
class Whole:
    """One converted module to measure, with the tensors that came to its chain.

    Attributes:
        standing: What stands for it.
        module: The module.
        given: The chain's input and extra inputs.
        kind: The kind of call.
        subject: What the entry is of.
        found: What was measured.
    """

    standing: Standing
    module: nn.Module
    given: Sequence[Tensor]
    kind: Kind
    subject: dict[str, Any]
    found: Measurement | None = None
    unmeasured: str = ""

    @classmethod
    def of(
        cls, standing: Standing, module: nn.Module, given: Sequence[Tensor], compiled: bool
    ) -> Whole:
        """The one of a call, to be measured as it is or under ``torch.compile``."""
        kind = Kind.of(given[0], compiled)
        chain, _ = standing.both()
        about = subject(*standing.choice.of, module, chain, kind)
        kept = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
        return cls(standing, module, kept, kind, about)

    @property
    def shape(self) -> Shape:
        """What of the input the entry is for."""
        return shape_of(self.given[0])

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.given[0].device

    def measure(self) -> None:
        """Values and gradients first, then time in turns and saved bytes.

        The time is that of ``prefer="speed"``, which decides where that is on. The bytes are those
        of ``prefer="memory"``, which they decide; its plan may be another one.
        """
        chain, own = self._ways()
        grads = torch.is_grad_enabled()
        params = self.standing.parameters(self.module)
        wanted = [t for t in (*self.given, *params) if grads and t.requires_grad]
        try:
            with self._alone(), self._cast():
                dys = [torch.ones_like(y) for y in as_tuple(chain(*self.given))]

                def run(function: Any) -> None:
                    out = as_tuple(function(*self.given))
                    if wanted:
                        torch.autograd.grad(out, wanted, dys, allow_unused=True)

                for prefer in ("memory", "speed"):
                    with options(prefer=prefer):
                        if wrong := self._difference(own, chain, wanted):
                            text = f"differs from the module: {wrong}"
                            self.found = Measurement(0, 0, 0, wrong=text)
                            return
                with options(prefer="memory"):
                    ours = saved_bytes(lambda: chain(*self.given), params)
                with options(prefer="speed"):
                    theirs = saved_bytes(lambda: own(*self.given), params)
                    timing = compare(lambda: run(own), lambda: run(chain), self.device)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.unmeasured = f"{self.title}: it cannot be run by itself here, {text}"
            return
        took = timing.speed, timing.noise, timing.first - timing.second
        self.found = Measurement(*took, theirs - ours, rows=self.shape.rows)

    def _difference(self, own: Any, chain: Any, wanted: list[Tensor]) -> str:
        """How the chain differs from the module's own operations; both round, so fp64 decides."""
        exact = in_fp64(self.module, self.standing.both()[1], self.given, wanted)
        dtype = self.kind.autocast or self.given[0].dtype
        return differ(own, chain, self.given, wanted, exact=exact, dtype=dtype)

    def _ways(self) -> tuple[Any, Any]:
        """The chain, and the module's own operations, as functions of what is given."""
        chain, own = self.standing.both()
        ways = chain, partial(own, self.module)
        return tuple(map(compiled, ways)) if self.kind.compiled else ways  # type: ignore[return-value]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A block in which nothing stands for the parts of the module."""
        below = [s for s in map(standing_in, self.module.modules()) if s is not None]
        for each in below:
            each.off = True
        try:
            yield
        finally:
            for each in below:
                each.off = False

    def _cast(self) -> Any:
        dtype = self.kind.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    @property
    def gives_way(self) -> bool:
        """Whether the module's own operations run, by what was measured."""
        if self.found is None:
            return False
        if self.kind.compiled:
            return not pays_in_graph(self.found)
        return bool(self.found.refusal(trades_time=True, prefer="speed"))

    @property
    def title(self) -> str:
        """What progress and reports call it."""
        return f"conversion of {op_class(self.module).__name__}"

    def row(self) -> dict[str, Any]:
        """The entry."""
        assert self.found is not None
        return {
            "setting": tables.setting(self.device),
            "subject": self.subject,
            "shape": list(self.shape),
            "found": dataclasses.asdict(self.found),
        }

    def result(self, prefer: str) -> Result:
        """For the report."""
        assert self.found is not None
        chain, _ = self.standing.both()
        names = tuple(op_class(op).__name__ for op in chain)
        refusal = self.found.refusal(trades_time=True, prefer=prefer)
        who = (self.standing.choice.of[1] or ("opfuse",))[0]
        return Result(self.title, who, "whole", names, self.shape, self.found, refusal)
