"""The chain of a converted module against the module's own operations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.environment import shape_of
from ..core.introspection import op_class
from ..core.options import options
from ..core.settings import current
from ..report.calls import saved_bytes
from ..report.replaced_forward import ReplacedForward, replaced_forward
from .clock import Call, Clock
from .comparing import as_tuple, differ, gradients, in_fp64
from .job import Job
from .parts import compiled
from .table import Measurement
from .timing import LEAST, compare


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
        self._given = _copies(given)
        self.title = f"conversion of {op_class(module).__name__}"
        self.device, self.shape = given[0].device, shape_of(self._given[0])
        self.subject = replaced.subject(module, given[0], compiled)
        self.distribution, self.passes = (replaced.plugin or ("opfuse",))[0], "whole"
        self.ops = replaced.chain or ()
        self.trades_time, self.prefer = True, dict(current.options).get("prefer", "speed")
        kind = self.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _measure(self) -> Measurement:
        """Values and gradients first, then time in turns and saved bytes.

        The time is that of ``prefer="speed"``, which decides where that is on. The bytes are those
        of both options, whose plans may differ.
        """
        chain: Any = self.replaced.chain
        own: Any = functools.partial(self.replaced.own_operations, self._module)
        if self._compiled:
            chain, own = compiled(chain), compiled(own)
        params = self.replaced.parameters(self._module)
        grads = torch.is_grad_enabled()
        wanted = [t for t in (*self._given, *params) if grads and t.requires_grad]
        parts = filter(None, map(replaced_forward, self._module.modules()))
        dtype = self._autocast
        autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        exact = in_fp64(self._module, self.replaced.own_operations, self._given, wanted)
        rule: dict[str, Any] = {"dtype": dtype or self._given[0].dtype}
        rule["exact"] = functools.cache(exact)  # both options get the same gradients
        clock = Clock.of(self.device)
        draw = functools.cache(clock.draw)
        rule["draw"] = lambda y, place: draw(y.shape, y.dtype, place)
        with switched_off(parts), autocast:
            for prefer in ("memory", "speed"):
                with options(prefer=prefer):  # both round, so fp64 decides
                    wrong = differ(own, chain, self._given, wanted, **rule)
                    if wrong := clock.agreed(wrong):
                        return Measurement(0, 0, 0, wrong=f"differs from the module: {wrong}")
            with options(prefer="memory"):
                ours = saved_bytes(lambda: chain(*self._given), params)
            with options(prefer="speed"):
                theirs = saved_bytes(lambda: own(*self._given), params)
                plain = saved_bytes(lambda: chain(*self._given), params)
                sets = self._sets(params)
                first, second = (self._calls(way, sets, params) for way in (own, chain))
                timing = compare(first, second, self.device, least=LEAST)
        self.eager = timing.eager
        took = timing.speed, timing.noise, timing.first - timing.second
        saved: Any = {"saved_bytes": theirs - ours, "saved_by_speed": theirs - plain}
        return Measurement(*took, **saved, rows=self.shape.rows, took=timing.first)

    def _calls(self, way: Any, sets: Iterable[Sequence[Tensor]], params: Any) -> list[Call]:
        """Both passes of a way, for each set of inputs."""

        def call(given: Sequence[Tensor]) -> Call:
            wanted = [t for t in (*given, *params) if torch.is_grad_enabled() and t.requires_grad]
            dys = [torch.ones_like(y) for y in as_tuple(way(*given))]

            def run() -> Any:
                torch.clear_autocast_cache()  # as at the end of each step's own block
                return gradients(as_tuple(way(*given)), wanted, dys)

            return run

        return [call(given) for given in sets]

    def _sets(self, params: Iterable[Tensor]) -> list[Sequence[Tensor]]:
        """The sets of inputs that are taken in turns while timing; the parameters stay."""
        nbytes = sum(tensor.nbytes for tensor in (*self._given, *params))
        more = range(Clock.of(self.device).sets(nbytes) - 1)
        return [self._given, *[_copies(self._given) for _ in more]]

    @property
    def declines(self) -> bool:
        """The measurements favour the module's own operations."""
        return self.found is not None and self.replaced.declines(self.found, self._compiled)


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


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
