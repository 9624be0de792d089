"""The chain of a module against the module's own operations."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core import tuning_table as tables
from ..core.authoring import saved_bytes
from ..core.context_managers import options
from ..core.introspection import op_class
from ..core.replaced_forward import ReplacedForward, replaced_forward
from ..core.tuning_table import Measurement, Shape, shape_of
from .comparing import as_tuple, differ, gradients, in_fp64
from .parts import compiled
from .report import Result
from .timing import compare


@dataclasses.dataclass
class Whole:
    """One module to measure, with the tensors that came to its chain.

    Attributes:
        replaced: Its two ways.
        module: The module.
        given: The chain's input and extra inputs.
        autocast: The dtype of autocast; None: it is off.
        compiled: Whether it is measured under ``torch.compile``.
        subject: The subject of the entry.
        found: The measurement.
    """

    replaced: ReplacedForward
    module: nn.Module
    given: Sequence[Tensor]
    autocast: torch.dtype | None
    compiled: bool
    subject: dict[str, Any]
    found: Measurement | None = None
    unmeasured: str = ""

    @classmethod
    def of(
        cls, replaced: ReplacedForward, module: nn.Module, given: Sequence[Tensor], compiled: bool
    ) -> Whole:
        """The one of a call, to be measured as it is or under ``torch.compile``."""
        device = given[0].device.type
        on = torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if on else None
        about = replaced.subject(module, given[0], compiled)
        kept = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
        return cls(replaced, module, kept, autocast, compiled, about)

    @property
    def shape(self) -> Shape:
        """The shape of the input, for the entry."""
        return shape_of(self.given[0])

    @property
    def device(self) -> torch.device:
        """The device on which it runs."""
        return self.given[0].device

    def measure(self) -> None:
        """Values and gradients first, then time in turns and saved bytes.

        The time is that of ``prefer="speed"``, which decides where that is on. The bytes are those
        of ``prefer="memory"``, which they decide; its plan may be another one.
        """
        chain, own = self._ways()
        grads = torch.is_grad_enabled()
        params = self.replaced.parameters(self.module)
        wanted = [t for t in (*self.given, *params) if grads and t.requires_grad]
        try:
            with self._alone(), self._cast():
                dys = [torch.ones_like(y) for y in as_tuple(chain(*self.given))]

                def run(function: Any) -> None:
                    out = as_tuple(function(*self.given))
                    if wanted and any(y.requires_grad for y in out):
                        gradients(out, wanted, dys)

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
        exact = in_fp64(self.module, self.replaced.own_operations, self.given, wanted)
        dtype = self.autocast or self.given[0].dtype
        return differ(own, chain, self.given, wanted, exact=exact, dtype=dtype)

    def _ways(self) -> tuple[Any, Any]:
        """The chain, and the module's own operations, as functions of what is given."""
        ways: Any = self.replaced.chain, partial(self.replaced.own_operations, self.module)
        return (compiled(ways[0]), compiled(ways[1])) if self.compiled else ways

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A block in which the parts of the module run their own forwards."""
        below = [r for r in map(replaced_forward, self.module.modules()) if r is not None]
        for each in below:
            each.off = True
        try:
            yield
        finally:
            for each in below:
                each.off = False

    def _cast(self) -> Any:
        dtype = self.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    @property
    def gives_way(self) -> bool:
        """Whether the measurements favour the module's own operations."""
        return self.found is not None and self.replaced.gives_way(self.found, self.compiled)

    @property
    def title(self) -> str:
        """Its name in progress and reports."""
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
        chain: Any = self.replaced.chain
        names = tuple(op_class(op).__name__ for op in chain)
        refusal = self.found.refusal(trades_time=True, prefer=prefer)
        who = (self.replaced.plugin or ("opfuse",))[0]
        return Result(self.title, who, "whole", names, self.shape, self.found, refusal)
