"""Compares a candidate with the separate ops: values and gradients, then memory and time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.engine.facts import Candidate
from ..core.engine.program import Program
from ..core.fusible import declared
from ..report.calls import saved_bytes
from .clock import Call
from .comparing import problem_of
from .job import Job, one_line
from .lookup import subject_of, trades_time
from .parts import MeasuredCall, part_program
from .reference import InputSet, Reference
from .table import REPEATS, THRESHOLD, Measurement
from .timing import LEAST, TURNS, Timing, compare

MOST_CONFIGURATIONS = 8


class Trial(Job):
    """One candidate of a call, and the ops that it replaces.

    Args:
        call: The call.
        candidate: The candidate.
        reference: Makes the ops, with their tensors. Candidates of the same ops share what it
            makes, which is freed after the last of them.
    """

    _reference: Reference

    def __init__(
        self, call: MeasuredCall, candidate: Candidate, reference: Callable[[], Reference] | None
    ) -> None:
        self._candidate, self._make_reference = candidate, reference
        source, env = candidate.source, call.program.env
        self.title, self.device = str(source.name), env.device
        self.subject = subject_of(call.program.facts, candidate)
        self.distribution, self.passes = source.distribution, source.passes
        self.ops = candidate.matched
        self.trades_time, self.prefer = trades_time(source), env.options.get("prefer", "speed")

    def _measure(self) -> Measurement:
        assert self._make_reference is not None
        self._reference, self._make_reference = self._make_reference(), None
        self.shape, self._separate = self._reference.shape, self._reference.program
        try:
            return self.measure()
        finally:
            del self._reference, self._separate

    # Judging

    def measure(self) -> Measurement:
        """Compare the candidate with the separate ops, in the fastest of its configurations.

        Returns:
            The measurement; only the error if the candidate is wrong or raises.

        Raises:
            Exception: The separate ops raise, or memory is short.
        """
        with torch.set_grad_enabled(self._separate.requires_grad):
            self._reference.changed()  # what the candidate before has done
            self._reference.results  # noqa: B018, raises what the separate ops raise
            try:
                return self._measured()
            except (torch.OutOfMemoryError, MemoryError):  # there may be enough another time
                raise
            except Exception as error:
                return self._wrong(f"raises {one_line(error)}")

    def _wrong(self, why: str) -> Measurement:
        return Measurement(0.0, 0.0, 0.0, wrong=why, rows=self._reference.rows)

    def _measured(self) -> Measurement:
        fused, configuration = self._fastest()
        if wrong := self._difference(fused):
            return self._wrong(wrong)
        timing = self._costs(fused)
        self.eager = timing.eager
        saved = self._saved(self._separate) - self._saved(fused) + self._recomputable(fused)
        if wrong := self._reference.clock.agreed(self._reference.changed()):
            return self._wrong(wrong)
        took = timing.speed, timing.noise, timing.first - timing.second
        compared, rows = not self._reference.draws, self._reference.rows
        return Measurement(*took, saved, "", configuration, compared, rows, timing.first)

    def _fastest(self) -> tuple[Program, Mapping[str, Any] | None]:
        """The candidate's program in its fastest configuration, and that configuration."""
        reference = self._reference
        make = functools.partial(part_program, reference.call, reference.span, self._candidate)
        plain = make()
        (fused,) = [s for s in (*plain.forward, *plain.backward) if s.source][:1]
        env = self._candidate.env or plain.env
        offered, speed = list(fused.op.configurations(env)), 1.0
        best: tuple[Program, Mapping[str, Any] | None] = plain, None
        for configuration in offered[:MOST_CONFIGURATIONS]:
            program = make(configuration=dict(configuration))
            with contextlib.suppress(Exception):  # such as one that this GPU has no room for
                if not self._difference(program):
                    timing = self._compare(plain, program)
                    if timing.speed - timing.noise > speed:
                        best, speed = (program, dict(configuration)), timing.speed
            reference.changed()  # so that the next one is not blamed for it
        return best

    def _difference(self, program: Program) -> str:
        """How a program differs from the separate ops, as a sentence, or ``""``."""
        return self._reference.clock.agreed(self._difference_here(program))

    def _difference_here(self, program: Program) -> str:
        reference = self._reference
        fused = reference.run(program)
        is_steady = reference.draws or reference.is_steady(program, fused)
        if changed := reference.changed():
            return changed
        if not is_steady and reference.steady:
            return f"differs between {reference.clock.runs} runs on the same input"
        env, chain = self._separate.env, self._separate.chain
        dtype = torch.float8_e5m2 if env.recipe is not None else env.dtype
        product = any(op.out_features is not None for op in chain.ops)
        twice = dtype is torch.float16 or env.recipe is not None
        rule: dict[str, Any] = {"dtype": dtype, "gemm": product, "roundings": 1 + twice}
        for what, expected in reference.results.items():
            got, truth = fused.get(what), reference.exact.get(what)
            # for the same seed it may draw otherwise
            values = not reference.draws and got is not None and got.is_floating_point()
            if problem := problem_of(what, got, expected, truth, values=values, **rule):
                return f"differs from the separate ops: {problem}"
        return ""

    # Costs

    def _calls(self, program: Program, *, both: bool = False) -> list[Call]:
        """What is timed, for each set of inputs: the passes that the fusion is for, or both.

        ``torch.compile`` divides the work of both passes its own way, so there it is always both.
        """
        passes = "joint" if both or program.compiling else self._candidate.passes
        passes = passes if program.requires_grad else "forward"
        return [self._call(program, passes, given) for given in self._reference.sets]

    def _call(self, program: Program, passes: str, given: InputSet) -> Call:
        forward, gradients = self._reference.forward, self._reference.gradients
        if passes == "forward":
            return lambda: forward(program, given)
        if passes == "joint":
            return lambda: gradients(forward(program, given), given)
        outputs = forward(program, given)
        return lambda: gradients(outputs, given)

    def _costs(self, fused: Program) -> Timing:
        """The timing of a fusion, or that of both passes if it makes the backward slower.

        A forward can leave something else in the caches, such as a copy of a weight instead of the
        weight, and that can cost the backward more than the forward saved.
        """
        timing = self._compare(self._separate, fused, least=LEAST)
        alone = fused.requires_grad and self._candidate.passes == "forward" and not fused.compiling
        if not alone or timing.speed < THRESHOLD - REPEATS:
            return timing
        for how in ({"most": TURNS}, {"least": LEAST}):  # a few may say that it is not slower
            both = self._compare(self._separate, fused, both=True, **how)
            if both.speed + max(both.noise, REPEATS) >= 1:
                return timing
        return both

    def _compare(self, one: Program, other: Program, *, both: bool = False, **how: Any) -> Timing:
        first, second = (self._calls(program, both=both) for program in (one, other))
        return compare(first, second, self._reference.clock.device, **how)

    def _saved(self, program: Program) -> int:
        if not program.requires_grad:
            return 0
        given = self._reference.first
        params = given.leaves[1 : 1 + program.num_params]
        return saved_bytes(lambda: self._reference.forward(program, given), params)

    def _recomputable(self, fused: Program) -> int:
        """The bytes that the next op need not keep, since the fused op computes them again.

        At the end of a chain too: the entry is for other chains as well, where an op follows.
        """
        reference = self._reference
        whole, behind = reference.call.program, reference.span.stop
        if not any(step.source and step.op.recomputes for step in fused.forward):
            return 0
        if behind < len(whole.chain.ops):
            keeps = "input" in (declared(whole.chain.ops[behind], "saved_names") or ())
            if not (keeps and any(whole.facts.needs.params[behind])):
                return 0
        output, *_ = reference.forward(fused, reference.first)
        return output.numel() * output.element_size()
