"""The chain of a converted module against the module's own operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.authoring import saved_bytes
from ..core.context_managers import options
from ..core.introspection import op_class
from ..core.replaced_forward import ReplacedForward, replaced_forward
from ..core.settings import current
from ..core.tuning_table import Measurement, shape_of
from .comparing import as_tuple, differ, gradients, in_fp64
from .job import Job
from .parts import compiled
from .report import Result
from .timing import compare


class Whole(Job):
    """One module to measure, with the tensors that came to its chain.

    Args:
        replaced: Its two ways.
        module: The module.
        given: The chain's input and extra inputs.
        compiled: Measure it under ``torch.compile``.
    """

    def __init__(
        self, replaced: ReplacedForward, module: nn.Module, given: Sequence[Tensor], compiled: bool
    ) -> None:
        self.replaced, self._module, self._compiled = replaced, module, compiled
        self._given = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        self._prefer = dict(current.options).get("prefer", "speed")
        self.title = f"conversion of {op_class(module).__name__}"
        self.device, self.shape = given[0].device, shape_of(self._given[0])
        self.subject = replaced.subject(module, given[0], compiled)
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind)
        self._autocast = torch.get_autocast_dtype(kind) if autocast else None

    def _measure(self) -> Measurement:
        """Values and gradients first, then time in turns and saved bytes.

        The time is that of ``prefer="speed"``, which decides where that is on. The bytes are those
        of ``prefer="memory"``, which they decide; its plan may be another one.
        """
        chain, own = self._ways()
        params = self.replaced.parameters(self._module)
        grads = torch.is_grad_enabled()
        wanted = [t for t in (*self._given, *params) if grads and t.requires_grad]
        parts = filter(None, map(replaced_forward, self._module.modules()))
        dtype = self._autocast
        autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        with switched_off(parts), autocast:
            dys = [torch.ones_like(y) for y in as_tuple(chain(*self._given))]

            def run(function: Any) -> None:
                gradients(as_tuple(function(*self._given)), wanted, dys)

            for prefer in ("memory", "speed"):
                with options(prefer=prefer):
                    if wrong := self._difference(own, chain, wanted):
                        return Measurement(0, 0, 0, wrong=f"differs from the module: {wrong}")
            with options(prefer="memory"):
                ours = saved_bytes(lambda: chain(*self._given), params)
            with options(prefer="speed"):
                theirs = saved_bytes(lambda: own(*self._given), params)
                timing = compare(lambda: run(own), lambda: run(chain), self.device)
        took = timing.speed, timing.noise, timing.first - timing.second
        return Measurement(*took, theirs - ours, rows=self.shape.rows)

    def _difference(self, own: Any, chain: Any, wanted: list[Tensor]) -> str:
        """How the chain differs from the module's own operations; both round, so fp64 decides."""
        exact = in_fp64(self._module, self.replaced.own_operations, self._given, wanted)
        dtype = self._autocast or self._given[0].dtype
        return differ(own, chain, self._given, wanted, exact=exact, dtype=dtype)

    def _ways(self) -> tuple[Any, Any]:
        """The chain, and the module's own operations, as functions of what is given."""
        ways: Any = self.replaced.chain, partial(self.replaced.own_operations, self._module)
        return (compiled(ways[0]), compiled(ways[1])) if self._compiled else ways

    @property
    def declines(self) -> bool:
        """The measurements favour the module's own operations."""
        return self.found is not None and self.replaced.declines(self.found, self._compiled)

    def result(self) -> Result:
        """The line of the report."""
        who = (self.replaced.plugin or ("opfuse",))[0]
        chain: Any = self.replaced.chain
        return self._result(who, "whole", chain, trades_time=True, prefer=self._prefer)


@contextlib.contextmanager
def switched_off(replaced: Iterable[ReplacedForward]) -> Iterator[None]:
    """A block in which modules run their own forwards."""
    modules = [*replaced]
    for each in modules:
        each.off = True
    try:
        yield
    finally:
        for each in modules:
            each.off = False
