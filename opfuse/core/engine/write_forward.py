"""Writes the forward of a program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..cast import Cast
from ..fusible import declared
from ..op_context import QUANTIZERS
from ..settings import current
from . import checks, lines
from .blueprint import Blueprint
from .facts import Step
from .source import Source, Variant, several


class Forward(Source):
    """The forward of a program.

    Its arguments are the autograd function's context if there is one, the keyword arguments per
    basic op or None, the input, the parameters, and the extra inputs that the caller gave.
    """

    def __init__(self, program: Blueprint, variant: Variant) -> None:
        chain, self._trains = program.chain, program.trains
        self._params = [f"p{i}" for i in range(program.num_params)]
        self._extras = [f"e{i}" for i in range(len(chain.external_inputs))]
        self._public = [f"o{i}_{k}" for i, k in chain.public_outputs]
        first = ["ctx", "kwargs", "input"][not self._trains :]
        super().__init__(program, variant, [*first, *self._params, *self._extras])
        self._watches_versions = program.writes_extras and self._trains and not self.traced
        found = [i for step in self.to_check for i in range(step.start, step.stop)]
        # the ops whose forward is not of this package, and that declare what they leave
        self._doubtful = [i for i in found if i not in program.undeclared_ops]

    def write_lines(self) -> None:
        """Write the lines of the pass."""
        program, ranges = self.program, enumerate(self.chain.param_ranges)
        self.enter("input")
        for name in [f"p{i}" for i in program.params_to_dequantize] + self._extras:
            self.add(f"if type({name}) is not Tensor: {name} = {self.call(lines.plain)}({name})")
        if self._watches_versions:
            self.add(f"versions = [{', '.join(f'{name}._version' for name in self._extras)}]")
        if program.saves_call and self._trains:
            self.add(f"ctx.call = {self.bind('settings', current)}.call")
        self.make_contexts(0, program.contexts)
        spans = {i: range(first, last) for i, (first, last) in ranges if first < last}
        for i, span in spans.items():
            self.add(f"c{i}.params = {several(f'p{n}' for n in span)}")
        self.add("x = input")
        for step in self.steps:
            self._run(step)
        self.write_return("x")
        self._check()
        if self._trains:
            self._save()
            self._make_independent()
        saving = dict.fromkeys([*[i for i, _, _ in program.saved_ranges], *self._doubtful])
        self.release_contexts(params=spans, to_save=saving)
        self.add(f"return {', '.join(['x', *self._public])}")

    # Steps

    def _run(self, step: Step) -> None:
        if isinstance(step.op, Cast):
            self.run_cast(step, "x")
            return
        if step.start not in self.casts or step.begin % 2 == 0:
            self.make_plain("x")
        if (width := self.chain.later_widths.get(step.start)) is not None:
            refuse = self.call(lines.refuse_width, step.op, width, at=step.begin)
            self.add(f"if not x.shape or x.shape[-1] != {width}: {refuse}(x)")
        run, direct = self.method(step)
        if not direct:
            self._run_fused(step, run)
            return
        self.add(f"x = {run}(c{step.start}, x)", self.comment(step))
        if step in self.to_check:
            given = self.program, step.op, "op_forward"
            refuse = self.call(checks.refuse_result, *given, at=step.begin)
            is_wrong = "type(x) is not Tensor and not isinstance(x, (Tensor, QuantizedTensor))"
            self.add(f"if {is_wrong}: {refuse}(x)")

    def _run_fused(self, step: Step, run: str) -> None:
        self._set_numbers(step)
        contexts, keywords = self.each(step, "c{}".format, "k{}"), self.program.facts.kwargs
        given = self.each(step, lambda i: self._extra_inputs(step, i), "()")
        kwargs = self.each(step, lambda i: f"kwargs[{i}]" if keywords[i] else "{}", "{{}}")
        slots = enumerate(self.chain.outputs_of(step.start, step.stop))
        used = [pair for pair in slots if self.chain.is_needed_after(pair[1], step.stop)]
        counts = [op.num_extra_outputs for op in self.chain.ops[step.start : step.stop]]
        fixed = self.program, step, counts, used
        result = self.call(lines.forward_result, *fixed, at=step.begin)
        self.add(f"y = {run}({contexts}, x,", self.comment(step))
        self.add(f"    basic_op_extra_inputs={given}, basic_op_kwargs={kwargs},")
        for name, i in zip(QUANTIZERS, (step.start, step.stop - 1), strict=True):
            quantizer = self.program.contexts[i][name]
            bound = quantizer and self.bind(f"{name}_{step.begin}", quantizer)
            self.add(f"    {name}={bound},")
        self.add(")")
        if step.has_extras or step.cast_places:
            self.add(f"x, y = {result}(y)")
        else:
            is_wrong = "type(y) is not tuple or len(y) != 2 or type(y[0]) is not Tensor"
            self.add(f"if {is_wrong}: y = {result}(y)")
            self.add("x = y[0]")
        if step.has_extras:
            self._name_outputs(step)

    def _set_numbers(self, step: Step) -> None:
        """Set the numbers of a fused step's ops on the contexts that have a backward."""
        first = max(step.start, self.program.first_backward)
        wanted = step.source and self.env.requires_grad  # an op sets its own
        for i in range(first, step.stop) if wanted else ():
            op = self.chain.ops[i]
            for name in [name for name in declared(op, "context_names") if _is_number(op, name)]:
                value = self.call(op.context_value, name, at=f"{i}_{name}")
                self.add(f"c{i}.{name} = {value}()")

    def _extra_inputs(self, step: Step, index: int) -> str:
        """The extra inputs of an op; None where the producer is in the same step."""
        found = []
        for slot in self.chain.inputs_of(index, index + 1):
            source = self.chain.sources.get(slot)
            if source is None:
                found.append(self._extras[self.chain.arguments[slot]])
            elif step.start <= source[0]:
                found.append("None")
            else:
                flows = self._trains and source in self.program.gradient_channels
                check = self.call(lines.checked_kind, self.chain, slot, at="{}_{}".format(*slot))
                found.append(f"{check}({'a' if flows else 'o'}{source[0]}_{source[1]})")
        return f"({several(found)})" if found else "()"

    def _name_outputs(self, step: Step) -> None:
        """Name the extra outputs of a step, and what channels hand on of them."""
        slots = self.chain.outputs_of(step.start, step.stop)
        if slots:
            self.add(f"{several(f'o{i}_{k}' for i, k in slots)} = y")
        if self._trains:
            for i, k in [slot for slot in slots if slot in self.program.gradient_channels]:
                self.add(f"a{i}_{k} = {self.call(lines.alias)}(o{i}_{k})")
            self.add(f"ctx.shape_{step.stop - 1} = {self.call(lines.meta_of)}(x)")

    # What stays for the backward

    def _check(self) -> None:
        """Check what doubtful ops leave."""
        counts = {i: stop - start for i, start, stop in self.program.saved_ranges}
        for i in self._doubtful:
            left = f"c{i}.to_save"
            is_wrong = f"{left} is None or len({left}) != {counts[i]}" if i in counts else left
            check = self.call(checks.check_saved, self.program, i, at=i)
            self.add(f"if c{i}.saved_tensors is not None or {is_wrong}: {left} = {check}(c{i})")

    def _save(self) -> None:
        program, watched = self.program, self.variant.watched
        parts = [f"*c{i}.to_save" for i, _, _ in program.saved_ranges]
        if program.saved_attributes:
            refuse = self.call(checks.refuse_unset, program)
            contexts = self.by_index(i for i, _ in program.saved_attributes)
            self.add(f"try: ctx.attributes = {self.attributes()}")
            self.add(f"except AttributeError as error: {refuse}(error, {contexts})")
        for i in program.undeclared_ops:
            self.add(f"s{i} = c{i}.to_save or ()")
            if (how := program.recomputations.get(i)) is not None:
                drop = self.call(lines.drop_among, how, at=i)
                self.add(f"s{i}, ctx.dropped_{i} = {drop}(c{how.step.start}, s{i})")
            self.add(f"ctx.left_{i} = {self.call(lines.leftover_attributes)}(c{i}), len(s{i})")
            parts.append(f"*s{i}")
        flat = ", ".join(parts)
        if watched or program.recomputations or program.saves_quantized:
            self.add(f"saved = [{flat}]")
            flat = "*saved"
        firsts = {i: first for i, first, _ in program.saved_ranges}
        for i, how in [each for each in program.recomputations.items() if each[0] in firsts]:
            drop = self.call(lines.drop_recomputable, how.cast, at=i)
            at = f"saved[{firsts[i] + how.place}]"
            self.add(f"{at}, ctx.dropped_{i} = {drop}(c{how.step.start}, {at})")
        if program.accumulators:
            params = [f"c{i}.params" for i, *_ in program.accumulators]
            self.add(f"ctx.accumulating = [{', '.join(params)}]")
        if watched:
            found = [f"{i}: saved[{start}:{stop}]" for i, start, stop in program.saved_ranges]
            found += [f"{i}: s{i}" for i in program.undeclared_ops]
            given = f"{self.bind('program', program)}, {{{', '.join(found)}}}"
            recorders = f"{self.bind('settings', current)}.recorders"
            self.add(f"for recorder in {recorders}: recorder.saved({given})")
        if program.saves_quantized:
            self.add(f"ctx.quantized = {self.call(lines.unpack)}(saved)")
        if self._watches_versions:
            extras, refuse = ", ".join(self._extras), self.call(lines.refuse_overwritten)
            self.add(f"{refuse}(input, [{extras}], versions, [{flat}])")
        self.add(f"ctx.save_for_backward({flat})")

    def _make_independent(self) -> None:
        """Make the outputs independent of what a fused op returns them in."""
        if not self.traced:
            self.add("ctx.materialize_grads = False")  # as set_materialize_grads does
            others = ", ".join(["input", *self._params, *self._extras])
            names, unbound = ", ".join(["x", *self._public]), self.call(lines.free_views)
            condition = "" if self._public else "if x._is_view(): "
            self.add(f"{condition}{names}, = {unbound}([{names}], (*ctx.to_save, {others}))")
        if silent := [self._public[k] for k in self.program.silent_outputs]:
            self.add(f"ctx.mark_non_differentiable({', '.join(silent)})")


def _is_number(op: Any, name: str) -> bool:
    """Return whether one of an op's ``context_names`` is a number of the op, not of a call."""
    try:
        return not isinstance(op.context_value(name), Tensor)
    except AttributeError:
        return False
