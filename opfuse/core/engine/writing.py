"""Writes the functions of a program as straight-line Python: one for each pass.

What a chain needs is a line of its function, and what it does not need is not there. Ops,
quantizers and constants are bound to names that are made here; a name that a user or a plugin
chose appears in comments alone.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..cast import Cast
from ..fusible import declared
from ..introspection import op_class
from ..op import is_direct
from ..quantization import QuantizedTensor
from ..settings import current
from . import checks, lines
from .step import Step

if TYPE_CHECKING:
    from .program import Program

_numbers = itertools.count()


class Code:
    """The text of a function, and what its names mean.

    Args:
        title: A comment that says what the function is of.
        name: The name of the function.
        arguments: The names of its arguments.
    """

    def __init__(self, title: str, name: str, arguments: Sequence[str]) -> None:
        self._name = name
        self._lines = [f"# {_as_comment(title)}", f"def {name}({', '.join(arguments)}):"]
        self.indent = "    "
        self._names: dict[str, Any] = {
            "Tensor": Tensor,
            "QuantizedTensor": QuantizedTensor,
            "plain_or_quantized": (Tensor, QuantizedTensor),
        }

    def bind(self, name: str, value: Any) -> str:
        """Let a name mean a value; return the name."""
        assert name.isidentifier(), name
        self._names.setdefault(name, value)
        return name

    def add(self, text: str, comment: str = "") -> None:
        """Add a line."""
        self._lines.append(
            f"{self.indent}{text}" + (f"  # {_as_comment(comment)}" if comment else "")
        )

    @property
    def text(self) -> str:
        """The source."""
        return "\n".join(self._lines) + "\n"

    def compiled(self) -> Callable[..., Any]:
        """The function. A traceback shows its lines as long as it exists."""
        filename, text = f"<opfuse program {next(_numbers)}>", self.text
        exec(compile(text, filename, "exec"), self._names)
        function: Any = self._names.pop(self._name)
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
        weakref.finalize(function, linecache.cache.pop, filename, None)
        return function  # type: ignore[no-any-return]


def _as_comment(text: str) -> str:
    """Text on one line, without characters that could end it."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())


def is_builtin(op: Any, *methods: str) -> bool:
    """Return whether methods of an op are those of this package, which keep their contracts."""
    return all(
        name not in vars(op)
        and getattr(getattr(type(op), name), "__module__", "").startswith("opfuse.")
        for name in methods
    )


class PassWriter:
    """Writes what both passes of a program have.

    Args:
        program: The program.
        pass_name: ``"forward"`` or ``"backward"``.
        arguments: The names of the function's arguments.
        steps: The steps, in the order they run.
        wrap: Wraps the method of a fused step.
    """

    def __init__(
        self,
        program: Program,
        pass_name: str,
        arguments: Sequence[str],
        steps: Sequence[Step],
        wrap: Callable[[Step, Any], Any],
    ) -> None:
        self.program, self.chain, self.env = program, program.chain, program.env
        self.pass_name, self.steps, self._wrap = pass_name, steps, wrap
        env = self.env
        mode = "training" if env.training else "evaluation"
        title = (
            f"{self.chain.title} on {env.device}, {str(env.dtype).removeprefix('torch.')}, {mode}"
        )
        self.code = Code(title, pass_name, arguments)

    def comment(self, step: Step) -> str:
        """What a step is, for the reader of the source."""
        names = " + ".join(op_class(op).__name__ for op in step.matched)
        if step.source is None:
            return names
        owner = (
            f", {step.source.distribution} {step.source.version}"
            if step.source.distribution
            else ""
        )
        return f"{names}: {step.source.name}{owner}"

    def method(self, step: Step) -> tuple[str, bool]:
        """Bind the method that runs a step; return its name, and whether it is direct."""
        op, start = step.op, step.start
        direct = not self.kwargs_given(step) and not self.has_extras(step)
        direct = direct and is_direct(op, self.pass_name)
        name = f"{'op' if direct else 'fuser'}_{self.pass_name}"
        run = self._wrap(step, getattr(op, name))
        if step.source is not None:
            return self.code.bind(f"fused_{step.begin}", run), direct
        known = is_builtin(op, name)
        word = _snake(op_class(op).__name__) if known else "op"
        return self.code.bind(f"{word}_{start}", run), direct

    def kwargs_given(self, step: Step) -> bool:
        """Return whether one of its ops got keyword arguments."""
        return any(self.program.facts.kwargs[step.start : step.stop])

    def has_extras(self, step: Step) -> bool:
        """Return whether one of its basic ops has extra tensors."""
        ops = self.chain.ops[step.start : step.stop]
        return any(op.num_extra_inputs or op.num_extra_outputs for op in ops)

    def each(
        self, step: Step, of_op: Callable[[int], str], of_cast: str | Callable[[int], str]
    ) -> str:
        """The entries for the ops and casts of a step, in their order."""
        found, index = [], step.start
        for op in step.matched:
            if isinstance(op, Cast):
                found.append(of_cast if isinstance(of_cast, str) else of_cast(index))
            else:
                found.append(of_op(index))
                index += 1
        return f"[{', '.join(found)}]"

    def contexts_of(self, step: Step) -> str:
        """The contexts of the ops and casts of a step."""
        for edge, cast in step.casts:
            make = functools.partial(lines.cast_context, cast.quantizer, cast.usage)
            self.code.add(f"k{edge} = {self.code.bind(f'cast_context_{edge}', make)}()")
        return self.each(step, "c{}".format, "k{}".format)

    def check_casts(self, step: Step) -> None:
        """Refuse what a fused op saved for its casts."""
        if step.casts:
            check = functools.partial(lines.check_cast_contexts, step, f"fuser_{self.pass_name}")
            contexts = ", ".join(f"k{edge}" for edge, _ in step.casts)
            self.code.add(f"{self.code.bind(f'check_casts_{step.begin}', check)}({contexts})")

    def say_which_pass(self) -> None:
        """Let ops that ask for their quantizers know in which pass they do."""
        ops = [
            op
            for op in self.chain.ops
            if op.num_quantizers("forward") or op.num_quantizers("backward")
        ]
        others = [
            s
            for s in self.steps
            if s.source or not is_builtin(s.op, f"op_{self.pass_name}", f"fuser_{self.pass_name}")
        ]
        is_forward = self.pass_name == "forward"
        if ops and others and not self.env.compiling and (self.env.recipe is None) is is_forward:
            self.code.bind("settings", current)
            self.code.add(f"before, settings.in_forward = settings.in_forward, {is_forward}")
            self.code.add("try:")
            self.code.indent += "    "

    def end_pass(self) -> None:
        """End what :meth:`say_which_pass` began."""
        if len(self.code.indent) > 4:
            self.code.indent = self.code.indent[4:]
            self.code.add("finally:")
            self.code.add("    settings.in_forward = before")

    def make_contexts(self, indexes: Sequence[int], values: Sequence[dict[str, Any]]) -> None:
        """Make the contexts of some ops."""
        make = lines.traced_contexts if self.env.compiling else lines.contexts
        bound = functools.partial(make, tuple([values[i] for i in indexes]))
        names = ", ".join(f"c{i}" for i in indexes)
        if indexes:
            self.code.add(f"{names}, = {self.code.bind('contexts', bound)}()")

    def run_cast(self, step: Step, x: str) -> None:
        """Run a cast by itself."""
        cast: Any = step.op
        quantizer = self.code.bind(f"quantizer_{step.start}", cast.quantizer)
        usage = self.code.bind(f"usage_{step.start}", cast.usage)
        self.code.add(f"{x} = {quantizer}({x}, {usage})", f"Cast: {type(cast.quantizer).__name__}")

    def enter(self, x: str, cast: Any) -> None:
        """Take what comes as it is, if it is a plain tensor."""
        enter = self.code.bind("entering", functools.partial(lines.entering, cast=cast))
        self.code.add(f"if type({x}) is not Tensor: {x} = {enter}({x})")

    def make_plain(self, x: str, is_quantized: bool) -> None:
        """Dequantize what a step takes, unless it takes a quantized tensor there."""
        if self.env.recipe is not None and not is_quantized:
            self.code.add(f"if isinstance({x}, QuantizedTensor): {x} = {x}.dequantize()")

    def leave(self, x: str) -> None:
        """Give the caller what it can use."""
        if self.env.recipe is not None:
            recipe = None if self.env.compiling else self.env.recipe
            leave = functools.partial(lines.leaving, recipe=recipe)
            bound = self.code.bind("leaving", leave)
            self.code.add(f"if isinstance({x}, QuantizedTensor): {x} = {bound}({x})")

    def attributes(self) -> str:
        """The context attributes that the forward passes on to the backward."""
        named = self.program.saved.attributes
        return "".join(f"c{i}.{name}, " for i, name in named)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def write_forward(program: Program, steps: Sequence[Step], wrap: Any, *, recorded: bool) -> Code:
    """Write the forward of a program.

    Args:
        program: The program.
        steps: Its steps.
        wrap: See :class:`PassWriter`.
        recorded: Whether a recorder is told what is saved.
    """
    chain = program.chain
    params = [f"p{i}" for i in range(program.num_params)]
    extras = [f"e{i}" for i in range(len(chain.external_inputs))]
    writer = _ForwardWriter(
        program, "forward", ["ctx", "kwargs", "input", *params, *extras], steps, wrap
    )
    writer.params, writer.extras = params, extras
    writer.write(recorded)
    return writer.code


class _ForwardWriter(PassWriter):
    params: list[str]
    extras: list[str]

    def write(self, recorded: bool) -> None:
        program, code, chain = self.program, self.code, self.chain
        self.trains = program.requires_grad and not program.double_backward
        self.x = "input"
        if self.trains:
            code.bind("program", program)
            code.add("ctx.program = program")
        self.say_which_pass()
        self.enter("input", self.program.facts.edges.forward.get(0))
        for i in program.dequantized:
            code.add(f"p{i} = {code.bind('plain', lines.plain)}(p{i})")
        for name in self.extras:
            code.add(
                f"if type({name}) is not Tensor: {name} = {code.bind('plain', lines.plain)}({name})"
            )
        if watched := program.writes_extras and self.trains and not program.compiling:
            code.add(f"versions = [{', '.join(f'{name}._version' for name in self.extras)}]")
        self.make_contexts(range(len(chain.ops)), program.contexts)
        for i, first, last in program.params:
            code.add(f"c{i}.params = ({''.join(f'p{n}, ' for n in range(first, last))})")
        for step in self.steps:
            if isinstance(step.op, Cast):
                code.add(f"x = {self.x}") if self.x != "x" else None
                self.run_cast(step, "x")
            else:
                self._run(step)
            self.x = "x"
        self.leave("x")
        if self.trains:
            self._save(recorded, watched)
        else:
            for i in self._doubtful():
                code.add(f"{self._checked(i)}(c{i})")
        public = [f"o{i}_{k}" for i, k in chain.public_outputs]
        code.add(f"return {', '.join(['x', *public])}")
        self.end_pass()

    def _run(self, step: Step) -> None:
        code, x = self.code, self.x
        is_quantized = step.start in self.program.facts.edges.forward and step.begin % 2 == 1
        if self.env.recipe is not None and not is_quantized and x != "x":
            code.add(f"x = {x}")
            x = "x"
        self.make_plain(x, is_quantized)
        if (width := self.chain.later_widths.get(step.start)) is not None:
            refuse = code.bind(
                f"refuse_width_{step.start}", functools.partial(lines.refuse_width, step.op, width)
            )
            code.add(f"if not {x}.shape or {x}.shape[-1] != {width}: {refuse}({x})")
        run, direct = self.method(step)
        if direct:
            code.add(f"x = {run}(c{step.start}, {x})", self.comment(step))
            if not is_builtin(step.op, "op_forward"):
                refuse = code.bind(
                    "refuse_result", functools.partial(checks.refuse_result, self.program)
                )
                code.add(
                    f"if type(x) is not Tensor and not isinstance(x, plain_or_quantized): {refuse}({run}, x)"
                )
            return
        for i, name in step.numbers:
            get = code.bind(
                f"number_{i}_{name}", functools.partial(self.chain.ops[i].context_value, name)
            )
            code.add(f"c{i}.{name} = {get}()")
        first, last = self.program.contexts[step.start], self.program.contexts[step.stop - 1]
        before, after = (
            "None"
            if (quantizer := of.get(name)) is None
            else code.bind(f"{word}_{step.begin}", quantizer)
            for of, name, word in (
                (first, "prev_op_grad_output_quantizer", "before"),
                (last, "next_op_input_quantizer", "after"),
            )
        )
        contexts = self.contexts_of(step)
        given = self.each(step, lambda i: self._extra_inputs(step, i), "()")
        kwargs = self.each(
            step, lambda i: f"kwargs[{i}]" if self.program.facts.kwargs[i] else "{}", "{}"
        )
        result = code.bind(
            f"result_{step.start}", functools.partial(lines.forward_result, self.program, step)
        )
        outputs = f"outputs_{step.begin}" if self.has_extras(step) else "_"
        code.add(
            f"x, {outputs} = {result}({run}({contexts}, {x}, basic_op_extra_inputs={given},",
            self.comment(step),
        )
        code.add(f"    prev_op_grad_output_quantizer={before}, next_op_input_quantizer={after},")
        code.add(f"    basic_op_kwargs={kwargs}))")
        self.check_casts(step)
        if self.has_extras(step):
            self._keep_outputs(step)

    def _extra_inputs(self, step: Step, index: int) -> str:
        chain, found = self.chain, []
        for k in range(chain.ops[index].num_extra_inputs):
            source = chain.sources.get((index, k))
            if source is None:
                found.append(self.extras[chain.arguments[index, k]])
            elif step.start <= source[0]:
                found.append("None")
            else:
                i, j = source
                name = (
                    f"a{i}_{j}"
                    if self.trains and source in self.program.gradient_channels
                    else f"o{i}_{j}"
                )
                check = functools.partial(lines.checked_kind, chain, (index, k))
                found.append(f"{self.code.bind(f'checked_kind_{index}_{k}', check)}({name})")
        return f"({''.join(f'{name}, ' for name in found)})"

    def _keep_outputs(self, step: Step) -> None:
        """Name the extra outputs of a step, which may have none."""
        code = self.code
        names = [
            (i, k)
            for i in range(step.start, step.stop)
            for k in range(self.chain.ops[i].num_extra_outputs)
        ]
        if names:
            code.add(f"{''.join(f'o{i}_{k}, ' for i, k in names)} = outputs_{step.begin}")
        if not self.trains:
            return
        for i, k in names:
            if (i, k) in self.program.gradient_channels:
                alias = lines.traced_alias if self.env.compiling else lines.alias
                code.add(f"a{i}_{k} = {code.bind('alias', alias)}(o{i}_{k})")
        code.add(f"shape_{step.stop - 1} = {code.bind('shape_of', lines.shape_of)}(x)")

    # Saving

    def _doubtful(self) -> list[int]:
        """The ops whose forward is not one of this package."""
        found = []
        for step in self.steps:
            doubt = step.source is not None or not is_builtin(
                step.op, "op_forward", "fuser_forward"
            )
            found += [i for i in range(step.start, step.stop) if doubt]
        return [i for i in found if i not in self.program.saved.undeclared]

    def _checked(self, index: int) -> str:
        check = functools.partial(checks.checked_saved, self.program, index)
        return self.code.bind(f"checked_saved_{index}", check)

    def _save(self, recorded: bool, watched: bool) -> None:
        code, program = self.code, self.program
        doubtful, saved = self._doubtful(), program.saved
        entries = []
        for i, _, _ in saved.ranges:
            entries.append(f"*{self._checked(i)}(c{i})" if i in doubtful else f"*c{i}.to_save")
        in_ranges = {i for i, *_ in saved.ranges}
        for i in doubtful:
            if i not in in_ranges:
                code.add(f"{self._checked(i)}(c{i})")
        if saved.attributes:
            refuse = code.bind("refuse_unset", functools.partial(checks.refuse_unset, program))
            contexts = self._by_index([i for i, _ in saved.attributes])
            code.add("try:")
            code.add(f"    ctx.attributes = {self.attributes()}")
            code.add("except AttributeError as error:")
            code.add(f"    {refuse}(error, {contexts})")
        if saved.undeclared:
            first = saved.ranges[-1][2] if saved.ranges else 0
            code.add(f"undeclared = {self._by_index(saved.undeclared)}")
            code.add(
                f"ctx.contexts, more = {code.bind('kept_contexts', lines.kept_contexts)}(undeclared, {first})"
            )
            entries.append("*more")
        in_list = recorded or program.recomputing or program.saves_quantized
        flat = ", ".join(entries)
        if in_list:
            code.add(f"saved = [{flat}]")
            flat = "*saved"
        if program.recomputing:
            drop = functools.partial(lines.drop_recomputable, program)
            contexts = self._by_index(sorted({how.start for how in program.recomputing.values()}))
            code.add(f"ctx.dropped = {code.bind('drop_recomputable', drop)}({contexts}, saved)")
        if program.accumulating:
            of_ops = [
                f"({''.join(f'p{n}, ' for n in range(a, b))})" for _, a, b in program.accumulating
            ]
            code.add(f"ctx.accumulating = [{', '.join(of_ops)}]")
        if recorded:
            tell = functools.partial(lines.record_saved, program)
            contexts = "undeclared" if saved.undeclared else "{}"
            code.add(f"{code.bind('record_saved', tell)}(saved, {contexts})")
        if program.saves_quantized:
            code.add(f"ctx.quantized = {code.bind('unpack', lines.unpack)}(saved)")
        if watched:
            refuse = code.bind("refuse_overwritten", lines.refuse_overwritten)
            code.add(f"{refuse}(input, [{', '.join(self.extras)}], versions, [{flat}])")
        if program.has_extras:
            steps = [
                step for step in self.steps if step.stop > step.start and self.has_extras(step)
            ]
            shapes = ", ".join(f"{step.stop - 1}: shape_{step.stop - 1}" for step in steps)
            code.add(f"ctx.shapes = {{{shapes}}}")
        code.add(f"ctx.save_for_backward({flat})")
        self._unbind()

    def _by_index(self, indexes: Sequence[int]) -> str:
        return f"{{{', '.join(f'{i}: c{i}' for i in dict.fromkeys(indexes))}}}"

    def _unbind(self) -> None:
        """Make the outputs independent of what a fused op returns them in."""
        code, program = self.code, self.program
        public = [f"o{i}_{k}" for i, k in self.chain.public_outputs]
        if program.compiling and not public:
            return
        if not program.compiling:
            code.add("ctx.materialize_grads = False")  # as set_materialize_grads does
            unbound = code.bind("unbound", lines.unbound)
            others = ", ".join(["input", *self.params, *self.extras])
            if public:
                names = ", ".join(["x", *public])
                code.add(f"{names} = {unbound}([{names}], (*ctx.to_save, {others}))")
            else:
                code.add(f"if x._is_view(): x, = {unbound}([x], (*ctx.to_save, {others}))")
        if silent := [public[k] for k in program.silent_outputs]:
            code.add(f"ctx.mark_non_differentiable({', '.join(silent)})")


def write_backward(
    program: Program,
    steps: Sequence[Step],
    wrap: Any,
    values: Sequence[dict[str, Any]],
    *,
    late: Any = None,
    traced: bool = False,
) -> Code:
    """Write the backward of a program.

    Args:
        program: The program.
        steps: Its steps, in the order they run.
        wrap: See :class:`PassWriter`.
        values: The attributes of each context.
        late: Where it begins, if the main output gets no gradient; see :class:`LateStart`.
        traced: Whether compiled autograd traces it.
    """
    grads = [f"d{i}_{k}" for i, k in program.chain.public_outputs]
    writer = _BackwardWriter(program, "backward", ["ctx", "grad_output", *grads], steps, wrap)
    writer.values, writer.late, writer.traced = values, late, traced
    writer.write()
    return writer.code


class _BackwardWriter(PassWriter):
    values: Sequence[dict[str, Any]]
    late: Any
    traced: bool

    def write(self) -> None:
        program, code, late = self.program, self.code, self.late
        self.reached = len(self.chain.ops) if late is None else late.reached
        self.grads: dict[int, str] = {}  # op -> its parameter gradients, as an expression
        self.of_outputs = {slot: "d{}_{}".format(*slot) for slot in self.chain.public_outputs}
        self.of_inputs: dict[int, list[str]] = {}
        self.dy = "grad_output"
        self.say_which_pass()
        self._restore()
        if late is None:
            self.enter("grad_output", self.program.last_cast)
        if late is not None:
            zeros = functools.partial(lines.zeros_of, late.last)
            code.add(f"dy = {code.bind('zeros_of', zeros)}(ctx)")
            self.dy = "dy"
            if late.watched:
                later = ", ".join(f"c{i}" for i in late.watched)
                code.add(f"pending = {code.bind('pending_state', lines.pending_state)}([{later}])")
        if program.accumulating and not self.traced:
            self._offer_sums()
        is_late, ran = late is not None, False
        for step in self.steps:
            if is_late and step.start <= self.reached:
                if ran:
                    zeros = code.bind("zeros_like", lines.zeros_like)
                    code.add(f"dy = {zeros}(dy)", "no gradient reaches the ops behind")
                is_late = False
            self._run(step, is_late)
            self.dy, ran = "dy", True
        if self.dy != "dy":
            code.add("dy = grad_output")
        self.leave("dy")
        if late is not None and late.watched:
            code.add(f"{code.bind('restore_state', lines.restore_state)}(pending)")
        self._end()

    def _restore(self) -> None:
        program, code, saved = self.program, self.code, self.program.saved
        low = min([step.start for step in self.steps], default=0)
        self.make_contexts(range(low, len(self.chain.ops)), self.values)
        code.add("tensors = ctx.saved_tensors")
        if program.saves_quantized:
            code.add(f"tensors = {code.bind('rebuild', lines.rebuild)}(tensors, ctx.quantized)")
        for i, start, stop in saved.ranges:
            code.add(f"c{i}.saved_tensors = tensors[{start}:{stop}]")
        if saved.attributes:
            code.add(f"{self.attributes()}= ctx.attributes")
        restore = lines.restore_context
        for i in saved.undeclared:
            if i >= low:
                code.add(
                    f"{code.bind('restore_context', restore)}(c{i}, ctx.contexts[{i}], tensors)"
                )

    def _run(self, step: Step, is_late: bool) -> None:
        code, dy, start = self.code, self.dy, step.start
        if isinstance(step.op, Cast):
            if dy != "dy":
                code.add(f"dy = {dy}")
            self.run_cast(step, "dy")
            return
        if step.recompute is not None:
            again = functools.partial(lines.recompute, self.program)
            ops = ", ".join(f"{i}: c{i}" for i in range(self._low, start + 1))
            code.add(f"{code.bind('recompute', again)}({{{ops}}}, {start}, ctx.dropped)")
        is_quantized = step.stop in self.program.facts.edges.backward and step.end % 2 == 0
        if self.env.recipe is not None and not is_quantized and dy != "dy":
            code.add(f"dy = {dy}")
            dy = "dy"
        self.make_plain(dy, is_quantized)
        run, direct = self.method(step)
        if direct:
            self._run_direct(step, run, dy)
        else:
            self._run_fused(step, run, dy, is_late)
        if start > self.program.last_without_gradient and not (
            step.source is None and is_builtin(step.op, "op_backward", "fuser_backward")
        ):
            refuse = code.bind("refuse_none", functools.partial(checks.refuse_none, self.program))
            code.add(f"if dy is None: {refuse}({run}, {start})")

    @property
    def _low(self) -> int:
        return min(step.start for step in self.steps)

    def _run_direct(self, step: Step, run: str, dy: str) -> None:
        code, i = self.code, step.start
        call = f"{run}(c{i}, {dy})"
        count = len(self.chain.ops[i].param_names or ())
        if not is_builtin(step.op, "op_backward"):
            check = functools.partial(lines.backward_result, self.program, i, count)
            call = f"{code.bind(f'result_{i}', check)}({run}, {call})"
        code.add(f"dy, g{i} = {call}", self.comment(step))
        if i <= self.reached:
            self.grads[i] = f"*g{i}" if count else ""

    def _run_fused(self, step: Step, run: str, dy: str, is_late: bool) -> None:
        code, start = self.code, step.start
        contexts = self.contexts_of(step)
        given = self.each(step, self._output_grads, "()")
        grads = f"g{start}" if step.stop > start else "_"
        check = functools.partial(lines.fused_backward_result, self.program, step, self.reached)
        result = code.bind(f"result_{step.begin}", check)
        code.add(f"dy, {grads}, of_extras = {result}({run}({contexts}, {dy},", self.comment(step))
        code.add(f"    basic_op_grad_extra_outputs={given}))")
        self.check_casts(step)
        if step.stop > start:
            self.grads[start] = f"*{grads}"
        self.grads |= {i: "" for i in range(start + 1, step.stop)}
        if self.has_extras(step):
            self._keep_input_grads(step, is_late)

    def _output_grads(self, index: int) -> str:
        count = self.chain.ops[index].num_extra_outputs
        names = [self.of_outputs.get((index, k), "None") for k in range(count)]
        return f"({''.join(f'{name}, ' for name in names)})"

    def _keep_input_grads(self, step: Step, is_late: bool) -> None:
        """Name the gradients of extra inputs, or add them to those of the channel's producer."""
        code, number = self.code, 0
        add = code.bind("summed", lines.summed)
        for i in range(step.start, step.stop):
            for k in range(self.chain.ops[i].num_extra_inputs):
                grad, source = f"of_extras[{number}]", self.chain.sources.get((i, k))
                number += 1
                if i > self.reached or is_late:
                    continue
                if source is None:
                    code.add(f"h{i}_{k} = {grad}")
                    self.of_inputs.setdefault(self.chain.arguments[i, k], []).append(f"h{i}_{k}")
                elif source[0] < step.start:
                    known, name = self.of_outputs.get(source), "d{}_{}".format(*source)
                    code.add(f"{name} = {grad if known is None else f'{add}({known}, {grad})'}")
                    self.of_outputs[source] = name

    def _offer_sums(self) -> None:
        code, program = self.code, self.program
        takers = [step for step in self.steps if step.source is None or step.op.adds_to_sum]
        taken = {i for step in takers for i in range(step.start, step.stop) if i <= self.reached}
        offer = functools.partial(lines.offer_sums, program, taken)
        contexts = ", ".join(f"{i}: c{i}" for i, _, _ in program.accumulating if i >= self._low)
        code.add(f"{code.bind('offer_sums', offer)}(ctx, {{{contexts}}})")

    def _end(self) -> None:
        program, code, chain = self.program, self.code, self.chain
        dx = "dy" if program.input_requires_grad else "None"
        ends = []
        for number in range(len(chain.external_inputs)):
            names = self.of_inputs.get(number, ["None"])
            ends.append(
                functools.reduce(
                    lambda a, b: f"{code.bind('summed', lines.summed)}({a}, {b})", names
                )
            )
        if program.has_extras and not self.traced and not program.compiling:
            separate = code.bind("separate_memory", lines.separate_memory)
            code.add(f"dx, *ends = {separate}([{', '.join([dx, *ends])}], grad_output)")
            dx, ends = "dx", ["*ends"]
        grads = []
        for i, (first, last) in enumerate(chain.param_ranges):
            missing = ", ".join(["None"] * (last - first))
            grads.append(self.grads.get(i, missing))
        flat = ", ".join(["None", "None", dx, *filter(None, grads)])
        if program.accumulating:
            store = functools.partial(lines.accumulate, program)
            code.add(f"flat = {code.bind('accumulate', store)}(ctx, [{flat}])")
            flat = "*flat"
        code.add(f"return ({', '.join([flat, *ends])},)")
        self.end_pass()
