"""Writes the forward of a program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..cast import Cast
from ..settings import current
from . import checks, lines
from .source import Source, is_builtin, several
from .step import Step

if TYPE_CHECKING:
    from .program import Program


def write_forward(
    program: Program, steps: Sequence[Step], *, ranged: bool = False, recorded: bool = False
) -> Source:
    """Write the forward of a program.

    Its arguments are the autograd function's context or None, the keyword arguments per basic op or
    None, the input, the parameters, and the extra inputs that the caller gave.

    Args:
        program: The program.
        steps: Its steps.
        ranged: Whether fused steps mark their ranges for a profiler.
        recorded: Whether the recorder of the thread is told what is saved.
    """
    return _Forward(program, steps, ranged).write(recorded)


class _Forward(Source):
    def __init__(self, program: Program, steps: Sequence[Step], ranged: bool) -> None:
        self._params = [f"p{i}" for i in range(program.num_params)]
        self._extras = [f"e{i}" for i in range(len(program.chain.external_inputs))]
        self._trains = program.trains
        arguments = ["ctx", "kwargs", "input", *self._params, *self._extras]
        super().__init__(program, "forward", arguments, steps, program.compiling, ranged)

    def write(self, recorded: bool) -> Source:
        program = self.program
        self.begin_pass()
        self.enter("input", program.facts.edges.forward.get(0))
        for name in [f"p{i}" for i in program.dequantized] + self._extras:
            self.add(f"if type({name}) is not Tensor: {name} = {self.call(lines.plain)}({name})")
        if self._watches_versions:
            self.add(f"versions = [{', '.join(f'{name}._version' for name in self._extras)}]")
        if program.leaves_call and self._trains:
            self.add(f"ctx.call = {self.bind('settings', current)}.call")
        self.make_contexts(0, program.contexts)
        for i, first, last in program.params:
            self.add(f"c{i}.params = {several(f'p{n}' for n in range(first, last))}")
        x = "input"
        for step in self.steps:
            if isinstance(step.op, Cast):
                self.run_cast(step, "x", x)
            else:
                self._run(step, x)
            x = "x"
        self.leave("x")
        if self._trains:
            self._save(recorded)
            self._make_independent()
        else:
            self._checked()
        doubtful = self._doubtful
        saving = [i for i, _, _ in self.program.saved.ranges if i not in doubtful]
        self.release_contexts(params=[i for i, *_ in program.params], to_save=[*saving, *doubtful])
        self.add(f"return {', '.join(['x', *self._public])}")
        self.end_pass()
        return self

    @property
    def _public(self) -> list[str]:
        return [f"o{i}_{k}" for i, k in self.chain.public_outputs]

    @property
    def _watches_versions(self) -> bool:
        return self.program.writes_extras and self._trains and not self.program.compiling

    # Steps

    def _run(self, step: Step, x: str) -> None:
        takes_codes = step.start in self.program.facts.edges.forward and step.begin % 2 == 1
        x = self.make_plain("x", x, takes_codes)
        if (width := self.chain.later_widths.get(step.start)) is not None:
            refuse = self.call(lines.refuse_width, step.op, width, at=step.begin)
            self.add(f"if not {x}.shape or {x}.shape[-1] != {width}: {refuse}({x})")
        run, direct = self.method(step)
        if not direct:
            self._run_fused(step, run, x)
            return
        self.add(f"x = {run}(c{step.start}, {x})", self.comment(step))
        if not is_builtin(step.op, "forward"):
            refuse = self.call(checks.refuse_result, self.program)
            self.add(f"if type(x) is not Tensor and not isinstance(x, tensors): {refuse}({run}, x)")

    def _run_fused(self, step: Step, run: str, x: str) -> None:
        for i, name in step.numbers:
            value = self.call(self.chain.ops[i].context_value, name, at=f"{i}_{name}")
            self.add(f"c{i}.{name} = {value}()")
        contexts = self.contexts_of(step)
        given = self.each(step, lambda i: self._extra_inputs(step, i), lambda edge: "()")
        kwargs = self.each(
            step, lambda i: f"kwargs[{i}]" if self.kwargs[i] else "{}", lambda edge: "{}"
        )
        result = self.call(lines.forward_result, self.program, step, at=step.begin)
        self.add(f"y = {run}({contexts}, {x},", self.comment(step))
        self.add(f"    basic_op_extra_inputs={given}, basic_op_kwargs={kwargs},")
        for name, i in (
            ("prev_op_grad_output_quantizer", step.start),
            ("next_op_input_quantizer", step.stop - 1),
        ):
            quantizer = self.program.contexts[i][name]
            bound = quantizer and self.bind(f"{name}_{step.begin}", quantizer)
            self.add(f"    {name}={bound},")
        self.add(")")
        if step.has_extras or step.casts:
            self.add(f"x, y = {result}(y)")
        else:
            is_wrong = "type(y) is not tuple or len(y) != 2 or type(y[0]) is not Tensor"
            self.add(f"if {is_wrong}: y = {result}(y)")
            self.add("x = y[0]")
        self.check_casts(step)
        if step.has_extras:
            self._name_outputs(step, "y")

    def _extra_inputs(self, step: Step, index: int) -> str:
        """The extra inputs of an op; None where the producer is in the same step."""
        found = []
        for k in range(self.chain.ops[index].num_extra_inputs):
            source = self.chain.sources.get((index, k))
            if source is None:
                found.append(self._extras[self.chain.arguments[index, k]])
            elif step.start <= source[0]:
                found.append("None")
            else:
                flows = self._trains and source in self.program.gradient_channels
                name = f"{'a' if flows else 'o'}{source[0]}_{source[1]}"
                check = self.call(lines.checked_kind, self.chain, (index, k), at=f"{index}_{k}")
                found.append(f"{check}({name})")
        return f"({several(found)})" if found else "()"

    def _name_outputs(self, step: Step, outputs: str) -> None:
        """Name the extra outputs of a step, and what channels hand on of them."""
        ops = self.chain.ops
        slots = [
            (i, k) for i in range(step.start, step.stop) for k in range(ops[i].num_extra_outputs)
        ]
        if slots:
            self.add(f"{several(f'o{i}_{k}' for i, k in slots)} = {outputs}")
        for i, k in slots if self._trains else ():
            if (i, k) in self.program.gradient_channels:
                alias = self.call(lines.traced_alias if self.env.compiling else lines.alias)
                self.add(f"a{i}_{k} = {alias}(o{i}_{k})")
        if self._trains:
            self.add(f"shape_{step.stop - 1} = {self.call(lines.shape_of)}(x)")

    # What stays for the backward

    @functools.cached_property
    def _doubtful(self) -> list[int]:
        """The ops whose forward is not of this package, and that declare what they leave."""
        steps = [s for s in self.steps if s.source or not is_builtin(s.op, "forward")]
        found = [i for step in steps for i in range(step.start, step.stop)]
        return [i for i in found if i not in self.program.saved.undeclared]

    def _checked(self) -> dict[int, str]:
        """Check what doubtful ops leave; return the names of their tensors."""
        saved = self.program.saved
        counts = {i: stop - start for i, start, stop in saved.ranges}
        for i in self._doubtful:
            is_wrong = f"c{i}.saved_tensors is not None or "
            is_wrong += f"s{i} is None or len(s{i}) != {counts[i]}" if i in counts else f"s{i}"
            check = self.call(checks.checked_saved, self.program, i, at=i)
            self.add(f"s{i} = c{i}.to_save")
            self.add(f"if {is_wrong}: s{i} = {check}(c{i})")
        return {i: f"s{i}" for i in self._doubtful}

    def _save(self, recorded: bool) -> None:
        program, saved = self.program, self.program.saved
        checked = self._checked()
        flat = ", ".join(f"*{checked.get(i, f'c{i}.to_save')}" for i, _, _ in saved.ranges)
        if saved.attributes:
            refuse = self.call(checks.refuse_unset, program)
            contexts = self.by_index(i for i, _ in saved.attributes)
            self.add(f"try: ctx.attributes = {self.attributes()}")
            self.add(f"except AttributeError as error: {refuse}(error, {contexts})")
        if saved.undeclared:
            keep = self.call(lines.kept_contexts, saved.num_declared)
            self.add(f"undeclared = {self.by_index(saved.undeclared)}")
            self.add(f"ctx.contexts, more = {keep}(undeclared)")
            flat = f"{flat}, *more" if flat else "*more"
        if recorded or program.recomputing or program.saves_quantized:
            self.add(f"saved = [{flat}]")
            flat = "*saved"
        if program.recomputing:
            contexts = self.by_index(sorted(how.start for how in program.recomputing.values()))
            drop = self.call(lines.drop_recomputable, program)
            self.add(f"ctx.dropped = {drop}({contexts}, saved)")
        if program.accumulating:
            spans = [range(first, last) for _, first, last in program.accumulating]
            of_ops = [f"({several(f'p{n}' for n in span)})" for span in spans]
            self.add(f"ctx.accumulating = [{', '.join(of_ops)}]")
        if recorded:
            contexts = "ctx.contexts" if saved.undeclared else "{}"
            self.add(f"{self.call(lines.record_saved, program)}(saved, {contexts})")
        if program.saves_quantized:
            self.add(f"ctx.quantized = {self.call(lines.unpack)}(saved)")
        if self._watches_versions:
            extras, refuse = ", ".join(self._extras), self.call(lines.refuse_overwritten)
            self.add(f"{refuse}(input, [{extras}], versions, [{flat}])")
        if program.has_extras:
            ends = [s.stop - 1 for s in self.steps if s.has_extras]
            self.add(f"ctx.shapes = {{{', '.join(f'{i}: shape_{i}' for i in ends)}}}")
        self.add(f"ctx.save_for_backward({flat})")

    def _make_independent(self) -> None:
        """Make the outputs independent of what a fused op returns them in."""
        if not self.program.compiling:
            self.add("ctx.materialize_grads = False")  # as set_materialize_grads does
            others = ", ".join(["input", *self._params, *self._extras])
            names, unbound = ", ".join(["x", *self._public]), self.call(lines.unbound)
            condition = "" if self._public else "if x._is_view(): "
            self.add(f"{condition}{names}, = {unbound}([{names}], (*ctx.to_save, {others}))")
        if silent := [self._public[k] for k in self.program.silent_outputs]:
            self.add(f"ctx.mark_non_differentiable({', '.join(silent)})")
