"""Writes the backward of a program."""

from __future__ import annotations

import functools

import torch

from ..cast import Cast
from ..overwriting import put_back
from . import checks, lines
from .blueprint import Blueprint
from .chain import Slot
from .facts import Step
from .source import Source, Variant, several


class Backward(Source):
    """The backward of a program.

    Its arguments are the autograd function's context, and the gradients of the outputs. It returns
    the gradients of the arguments of the forward.
    """

    def __init__(self, program: Blueprint, variant: Variant) -> None:
        self._of_outputs = {(i, k): f"d{i}_{k}" for i, k in program.chain.public_outputs}
        super().__init__(program, variant, ["ctx", "dy", *self._of_outputs.values()])
        self._values = [dict(of) for of in program.contexts]
        self._reached = len(self._values) if variant.reached is None else variant.reached
        self._last = None if variant.reached is None else self._leave_out_unreached()
        for of_op in self._values if not variant.owns else ():
            of_op["owns_grad_output"] = False
        self._low = min([step.start for step in self.steps], default=0)
        self._restored: set[int] = set()
        self._of_params: dict[int, str] = {}  # by op, as an expression
        self._of_arguments: dict[int, list[str]] = {}

    def _leave_out_unreached(self) -> int:
        """Begin at the last op that a gradient reaches, since the main output gets none.

        If the shape is unknown there, the backward begins with zeros at the nearest later step
        whose shape is known; the results of these extra steps are discarded.

        Returns:
            The op whose output gets zeros.
        """
        steps, values, reached = self.steps, self._values, self._reached
        known = [step.stop - 1 for step in self.program.forward if step.has_extras]
        last = min(i for i in known if i >= reached)
        position = next(p for p, step in enumerate(steps) if step.start <= last < step.stop)
        step = steps[position]
        first = [step]
        if any(step.op is other.op for other in self.program.forward):  # no backward fusion
            last = step.stop - 1
            for of_op in values[reached + 1 : step.stop]:
                of_op["is_reached"] = False
        else:  # it may not handle zeros: the ops run one by one
            first = step.separate("backward", last)
        for of_op in values[step.start : last]:
            of_op["owns_grad_output"] = False
        steps[: position + 1] = first
        at = next(p for p, step in enumerate(steps) if step.start <= reached)
        if at and steps[at].stop > reached + 1:  # as above, it may not handle zeros
            steps[at : at + 1] = steps[at].separate("backward")
        return last

    def write_lines(self) -> None:
        """Write the lines of the pass."""
        self._restore()
        separates = self.chain.has_extras and not self.traced
        if separates:
            self.add("grad_output = dy")
        watched = ""
        if self._last is None:
            self.enter("dy")
        else:
            self.add(f"shape, dtype, device = ctx.shape_{self._last}")
            zeros = self.bind("zeros", torch.zeros)
            self.add(f"dy = {zeros}(shape, dtype=dtype, device=device)")
            behind = range(max(self._reached + 1, self._low), len(self._values))
            watched = ", ".join(f"c{i}" for i in behind if self._values[i]["quantizers"])
        if watched:  # quantizers that see only zeros
            self.add(f"pending = {self.call(lines.pending_state)}([{watched}])")
        if self.program.accumulators:
            self._offer_sums()
        is_behind = self._last is not None
        for step in self.steps:
            if is_behind and step.start <= self._reached:
                if step is not self.steps[0]:
                    self.make_plain("dy")
                    zeros_like = self.bind("zeros_like", torch.zeros_like)
                    self.add(f"dy = {zeros_like}(dy)", "no gradient reaches the ops behind")
                is_behind = False
            self._run(step, is_behind)
        self.write_return("dy")
        if watched:
            restore = self.bind("restore", put_back)
            self.add(f"for state, before in pending: {restore}(state, before)")
        self._return(separates)

    def _restore(self) -> None:
        """Give the contexts what the forward left."""
        program = self.program
        self.make_contexts(self._low, self._values)
        self.add("saved = ctx.saved_tensors")
        if program.saves_quantized:
            self.add(f"saved = {self.call(lines.rebuild)}(saved, ctx.quantized)")
        for i, start, stop in program.saved_ranges:
            self.add(f"c{i}.saved_tensors = saved[{start}:{stop}]")
        if program.saved_attributes:
            self.add(f"{self.attributes()} = ctx.attributes")
        if program.undeclared_ops:
            self.add(f"end = {program.num_saved}")
        for i in program.undeclared_ops:
            self.add(f"left, start, end = ctx.left_{i}[0], end, end + ctx.left_{i}[1]")
            if i >= self._low:
                self.add(f"vars(c{i}).update(left, saved_tensors=saved[start:end])")

    # Steps

    def _run(self, step: Step, is_behind: bool) -> None:
        if isinstance(step.op, Cast):
            self.run_cast(step, "dy")
            return
        self._recompute(step.start)
        if step.stop not in self.casts or step.end % 2:
            self.make_plain("dy")
        run, direct = self.method(step)
        (self._run_direct if direct else self._run_fused)(step, run)
        if step.has_extras and not is_behind:
            self._name_input_grads(step)
        program = self.program
        # the ops after this one must return a gradient of their input
        free = -1 if program.input_requires_grad else program.first_backward
        if step.start > free and step in self.to_check:
            given = program, step.op, f"{'op' if direct else 'fuser'}_backward", step.start
            self.add(f"if dy is None: {self.call(checks.refuse_none, *given, at=step.begin)}()")

    def _recompute(self, index: int) -> None:
        """Restore the input of an op, if it was not kept, after the input that it is made from."""
        how = self.program.recomputations.get(index)
        if how is not None and index not in self._restored and how.step.start >= self._low:
            self._restored.add(index)
            self._recompute(how.step.start)
            contexts = self.by_index(range(how.step.start, how.step.stop))
            again = f"{self.call(lines.recompute, how, at=index)}({contexts}, c{index}, dropped)"
            self.add(f"if (dropped := ctx.dropped_{index}) is not None: {again}")

    def _run_direct(self, step: Step, run: str) -> None:
        i = step.start
        first, last = self.chain.param_ranges[i]
        call = f"{run}(c{i}, dy)"
        if step in self.to_check:
            check = self.call(lines.backward_result, self.program, step.op, i, at=i)
            call = f"{check}({call})"
        self.add(f"dy, g{i} = {call}", self.comment(step))
        if i <= self._reached:
            self._of_params[i] = f"*g{i}" if first < last else ""

    def _run_fused(self, step: Step, run: str) -> None:
        start, contexts = step.start, self.each(step, "c{}".format, "k{}")
        given = self.each(step, self._output_grads, "()")
        counts = [op.num_extra_inputs for op in self.chain.ops[start : step.stop]]
        fixed = self.program, step, self._reached, counts
        check = self.call(lines.fused_backward_result, *fixed, at=step.begin)
        grads = f"g{start}" if step.stop > start else "_"
        self.add(f"dy, {grads}, of_extras = {check}({run}({contexts}, dy,", self.comment(step))
        self.add(f"    basic_op_grad_extra_outputs={given}))")
        for i in range(start, step.stop):
            self._of_params[i] = f"*{grads}" if i == start else ""

    def _output_grads(self, index: int) -> str:
        """The gradients of an op's extra outputs."""
        slots = self.chain.outputs_of(index, index + 1)
        return f"({several(str(self._of_outputs.get(slot)) for slot in slots)})" if slots else "()"

    def _name_input_grads(self, step: Step) -> None:
        """Name the gradients of extra inputs, or add them to those of the channel's producer."""
        for number, (i, k) in enumerate(self.chain.inputs_of(step.start, step.stop)):
            source = self.chain.sources.get((i, k))
            if i > self._reached:
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
        """Let products add to sums, where the step gives what an op's backward gives."""
        if self.traced:
            self.add("wanted = ctx.accumulating")
            return
        self.add(f"wanted = {self.call(lines.wanted_params, self.program)}(ctx)")
        takers = [step for step in self.steps if step.source is None or step.op.adds_to_sum]
        taken = {i for step in takers for i in range(step.start, step.stop) if i <= self._reached}
        for n, (i, *_) in enumerate(self.program.accumulators):
            if i in taken:
                offer = self.bind(f"grad_sum_{i}", self.chain.ops[i].grad_sum)
                self.add(f"c{i}.grad_sum = {offer}(wanted[{n}])")

    # Results

    def _return(self, separates: bool) -> None:
        program, chain = self.program, self.chain
        dx = "dy" if program.input_requires_grad else "None"
        arguments = range(len(chain.external_inputs))
        ends = [functools.reduce(self._sum, self._of_arguments.get(i, ["None"])) for i in arguments]
        if separates:
            separate = self.call(lines.separate_memory)
            self.add(f"dx, *ends = {separate}([{', '.join([dx, *ends])}], grad_output)")
            dx, ends = "dx", ["*ends"]
        missing = [", ".join(["None"] * (last - first)) for first, last in chain.param_ranges]
        grads = [self._of_params.get(i, none) for i, none in enumerate(missing)]
        flat = ", ".join(["None", dx, *filter(None, grads)])
        if program.accumulators:
            self.add(f"flat = [{flat}]")
            flat = "*flat"
        for n, (i, first, last) in enumerate(program.accumulators):
            accumulate = self.call(lines.accumulate, chain.ops[i], at=i)
            here = f"flat[{2 + first}:{2 + last}]"
            self.add(f"{here} = {accumulate}(wanted[{n}], ctx.accumulating[{n}], {here})")
        holding = [i for i, _, _ in program.saved_ranges]
        sums = [i for i, *_ in program.accumulators]
        self.release_contexts(saved_tensors=holding, grad_sum=sums)
        self.add(f"return {several([flat, *ends])}")
