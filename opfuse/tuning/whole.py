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
from ..conversion import Standing, standing_in
from ..conversion.choosing import shape_of, subject
from ..conversion.verifying import as_tuple, differ, in_fp64
from ..overrides import op_class
from ..tables import Measurement, Shape
from .report import Result
from .timing import compare


@dataclasses.dataclass
class Whole:
    """One converted module to measure, with the tensors that came to its chain.

    Attributes:
        standing: What stands for it.
        module: The module.
        given: The chain's input and extra inputs.
        autocast: What autocast computed in; None: it was off.
        subject: What the entry is of.
        found: What was measured.
    """

    standing: Standing
    module: nn.Module
    given: Sequence[Tensor]
    autocast: torch.dtype | None
    subject: dict[str, Any]
    found: Measurement | None = None
    unmeasured: str = ""

    @classmethod
    def of(cls, standing: Standing, module: nn.Module, given: Sequence[Tensor]) -> Whole:
        """The one of a call."""
        x, kind = given[0], given[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        chain, _ = standing.both()
        about = subject(*standing.choice.of, module, chain, x)
        kept = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
        return cls(standing, module, kept, autocast, about)

    @property
    def shape(self) -> Shape:
        """What of the input the entry is for."""
        return shape_of(self.given[0])

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.given[0].device

    def measure(self) -> None:
        """Values and gradients first, then time in turns and saved bytes."""
        chain, own = self.standing.both()
        grads = torch.is_grad_enabled()
        params = self.standing.parameters(self.module)
        wanted = [t for t in (*self.given, *params) if grads and t.requires_grad]
        try:
            with self._alone(), self._cast():
                dys = [torch.ones_like(y) for y in as_tuple(chain(*self.given))]

                def run(function: Any, *first: Any) -> None:
                    out = as_tuple(function(*first, *self.given))
                    if wanted:
                        torch.autograd.grad(out, wanted, dys, allow_unused=True)

                if wrong := self._difference(own, chain, wanted):
                    self.found = Measurement(0, 0, 0, wrong=f"differs from the module: {wrong}")
                    return
                timing = compare(lambda: run(own, self.module), lambda: run(chain), self.device)
                theirs = saved_bytes(lambda: own(self.module, *self.given), params)
                ours = saved_bytes(lambda: chain(*self.given), params)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.unmeasured = f"{self._title}: it cannot be run by itself here, {text}"
            return
        took = timing.speed, timing.noise, timing.first - timing.second
        self.found = Measurement(*took, theirs - ours, rows=self.shape.rows)

    def _difference(self, own: Any, chain: Any, wanted: list[Tensor]) -> str:
        """How the chain differs from the module's own operations; both round, so fp64 decides."""
        exact = in_fp64(self.module, own, self.given, wanted)
        both, dtype = (partial(own, self.module), chain), self.autocast or self.given[0].dtype
        return differ(*both, self.given, wanted, exact=exact, dtype=dtype)

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
        enabled = self.autocast is not None
        return torch.autocast(self.device.type, self.autocast, enabled=enabled)

    @property
    def _title(self) -> str:
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
        return Result(self._title, who, "whole", names, self.shape, self.found, refusal)
