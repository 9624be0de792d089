"""Writes the backward of a program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cast import Cast
from . import checks, lines
from .chain import Slot
from .source import Source, is_builtin, several
from .step import Step

if TYPE_CHECKING:
    from .program import Program


class LateStart(NamedTuple):
    """Where a backward begins if the main output gets no gradient.

    Attributes:
        reached: The last op that a gradient reaches, by an extra output.
        last: The op whose output gets zeros.
        watched: The ops behind the first one, whose quantizers see only zeros.
    """

    reached: int
    last: int
    watched: tuple[int, ...]


def write_backward(
    program: Program,
    steps: Sequence[Step],
    values: Sequence[dict[str, Any]],
    late: LateStart | None = None,
    *,
    traced: bool = False,
    ranged: bool = False,
) -> Source:
    """Write the backward of a program.

    Its arguments are the autograd function's context, and the gradients of the outputs. It returns
    the gradients of the arguments of the forward.

    Args:
        program: The program.
        steps: Its steps, in the order they run.
        values: The attributes of each context.
        late: Where it begins, if the main output gets no gradient.
        traced: Whether ``torch.compile`` or compiled autograd traces it.
        ranged: Whether fused steps mark their ranges for a profiler.
    """
    return _Backward(program, steps, values, late, traced, ranged).write()


class _Backward(Source):
    def __init__(
        self,
        program: Program,
        steps: Sequence[Step],
        values: Sequence[dict[str, Any]],
        late: LateStart | None,
        traced: bool,
        ranged: bool,
    ) -> None:
        slots = program.chain.public_outputs
        self._of_outputs = {(i, k): f"d{i}_{k}" for i, k in slots}
        arguments = ["ctx", "grad_output", *self._of_outputs.values()]
        super().__init__(program, "backward", arguments, steps, traced, ranged)
        self._values, self._late = values, late
        self._low = min([step.start for step in steps], default=0)
        self._reached = len(values) if late is None else late.reached
        self._of_params: dict[int, str] = {}  # by op, as an expression
        self._of_arguments: dict[int, list[str]] = {}

    def write(self) -> Source:
        late, dy = self._late, "grad_output"
        self.begin_pass()
        self._restore()
        if late is None:
            self.enter(dy, self.program.last_cast)
        else:
            dy = "dy"
            self.add(f"dy = {self.call(lines.zeros_of, late.last)}(ctx)")
            if late.watched:
                watched = self.call(lines.pending_state)
                self.add(f"pending = {watched}([{', '.join(f'c{i}' for i in late.watched)}])")
        if self.program.accumulating and not self.traced:
            self._offer_sums()
        behind = late is not None
        for step in self.steps:
            if behind and step.start <= self._reached:
                if step is not self.steps[0]:
                    zeros = self.call(lines.zeros_like)
                    self.add(f"dy = {zeros}(dy)", "no gradient reaches the ops behind")
                behind = False
            self._run(step, dy, behind)
            dy = "dy"
        if dy != "dy":
            self.add("dy = grad_output")
        self.leave("dy")
        if late is not None and late.watched:
            self.add(f"{self.call(lines.restore_state)}(pending)")
        self._return()
        self.end_pass()
        return self

    def _restore(self) -> None:
        """Give the contexts what the forward left."""
        program, saved = self.program, self.program.saved
        self.make_contexts(self._low, self._values)
        self.add("saved = ctx.saved_tensors")
        if program.saves_quantized:
            self.add(f"saved = {self.call(lines.rebuild)}(saved, ctx.quantized)")
        for i, start, stop in saved.ranges:
            self.add(f"c{i}.saved_tensors = saved[{start}:{stop}]")
        if saved.attributes:
            self.add(f"{self.attributes()} = ctx.attributes")
        for i in [i for i in saved.undeclared if i >= self._low]:
            self.add(f"{self.call(lines.restore_context)}(c{i}, ctx.contexts[{i}], saved)")

    # Steps

    def _run(self, step: Step, dy: str, behind: bool) -> None:
        if isinstance(step.op, Cast):
            self.run_cast(step, "dy", dy)
            return
        if step.recompute is not None:
            contexts = self.by_index(range(self._low, step.start + 1))
            again = self.call(lines.recompute, self.program)
            self.add(f"{again}({contexts}, {step.start}, ctx.dropped)")
        takes_codes = step.stop in self.program.facts.edges.backward and step.end % 2 == 0
        dy = self.make_plain("dy", dy, takes_codes)
        run, direct = self.method(step)
        (self._run_direct if direct else self._run_fused)(step, run, dy)
        if step.has_extras:
            self._name_input_grads(step, behind)
        known = step.source is None and is_builtin(step.op, "backward")
        if step.start > self.program.last_without_gradient and not known:
            refuse = self.call(checks.refuse_none, self.program)
            self.add(f"if dy is None: {refuse}({run}, {step.start})")

    def _run_direct(self, step: Step, run: str, dy: str) -> None:
        i = step.start
        first, last = self.chain.param_ranges[i]
        call = f"{run}(c{i}, {dy})"
        if not is_builtin(step.op, "backward"):
            check = self.call(lines.backward_result, self.program, i, last - first, at=i)
            call = f"{check}({run}, {call})"
        self.add(f"dy, g{i} = {call}", self.comment(step))
        if i <= self._reached:
            self._of_params[i] = f"*g{i}" if first < last else ""

    def _run_fused(self, step: Step, run: str, dy: str) -> None:
        start, contexts = step.start, self.contexts_of(step)
        given = self.each(step, self._output_grads, lambda edge: "()")
        check = self.call(
            lines.fused_backward_result, self.program, step, self._reached, at=step.begin
        )
        grads = f"g{start}" if step.stop > start else "_"
        self.add(f"dy, {grads}, of_extras = {check}({run}({contexts}, {dy},", self.comment(step))
        self.add(f"    basic_op_grad_extra_outputs={given}))")
        self.check_casts(step)
        for i in range(start, step.stop):
            self._of_params[i] = f"*{grads}" if i == start else ""

    def _output_grads(self, index: int) -> str:
        """The gradients of an op's extra outputs."""
        slots = [(index, k) for k in range(self.chain.ops[index].num_extra_outputs)]
        return f"({several(str(self._of_outputs.get(slot)) for slot in slots)})" if slots else "()"

    def _name_input_grads(self, step: Step, behind: bool) -> None:
        """Name the gradients of extra inputs, or add them to those of the channel's producer."""
        ops = self.chain.ops
        slots = [
            (i, k) for i in range(step.start, step.stop) for k in range(ops[i].num_extra_inputs)
        ]
        for number, (i, k) in enumerate(slots):
            source = self.chain.sources.get((i, k))
            if i > self._reached or behind:
                continue
            if source is None:
                self.add(f"h{i}_{k} = of_extras[{number}]")
                self._of_arguments.setdefault(self.chain.arguments[i, k], []).append(f"h{i}_{k}")
            elif source[0] < step.start:
                self._add_to(source, f"of_extras[{number}]")

    def _add_to(self, source: Slot, grad: str) -> None:
        name, known = "d{}_{}".format(*source), self._of_outputs.get(source)
        self._of_outputs[source] = name
        self.add(f"{name} = {grad if known is None else self._sum(known, grad)}")

    def _sum(self, one: str, other: str) -> str:
        return f"{self.call(lines.summed)}({one}, {other})"

    def _offer_sums(self) -> None:
        program = self.program
        takers = [step for step in self.steps if step.source is None or step.op.adds_to_sum]
        taken = {i for step in takers for i in range(step.start, step.stop) if i <= self._reached}
        contexts = self.by_index(i for i, _, _ in program.accumulating if i >= self._low)
        self.add(f"{self.call(lines.offer_sums, program, taken)}(ctx, {contexts})")

    # Results

    def _return(self) -> None:
        program, chain = self.program, self.chain
        dx = "dy" if program.input_requires_grad else "None"
        arguments = range(len(chain.external_inputs))
        ends = [functools.reduce(self._sum, self._of_arguments.get(i, ["None"])) for i in arguments]
        if program.has_extras and not self.traced:
            separate = self.call(lines.separate_memory)
            self.add(f"dx, *ends = {separate}([{', '.join([dx, *ends])}], grad_output)")
            dx, ends = "dx", ["*ends"]
        missing = [", ".join(["None"] * (last - first)) for first, last in chain.param_ranges]
        grads = [self._of_params.get(i, none) for i, none in enumerate(missing)]
        flat = ", ".join(["None", dx, *filter(None, grads)])
        if program.accumulating:
            self.add(f"flat = {self.call(lines.accumulate, program)}(ctx, [{flat}])")
            flat = "*flat"
        holding = [i for i, _, _ in program.saved.ranges]
        sums = [i for i, *_ in program.accumulating]
        self.release_contexts(saved_tensors=holding, grad_sum=sums)
        self.add(f"return {several([flat, *ends])}")
