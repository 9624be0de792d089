"""The source of one function of a program, and what both passes write into it.

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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..cast import Cast
from ..introspection import op_class, overridden
from ..op import is_direct
from ..quantization import QuantizedTensor
from ..settings import current
from . import lines
from .step import Step
from .step_calls import InRange

if TYPE_CHECKING:
    from .program import Program

_numbers = itertools.count()


def is_builtin(op: Any, pass_name: str) -> bool:
    """Return whether an op computes by this package alone, which keeps its contract.

    A class of somebody else may inherit the pass, and give a value of its own to it.
    """
    cls = op_class(op)
    methods = [getattr(type(op), f"{kind}_{pass_name}") for kind in ("op", "fuser")]
    sources = [getattr(each, "__module__", "") for each in (cls, *methods)]
    return all(each.startswith("opfuse.") for each in sources) and overridden(op, cls) is None


class Source:
    """The source of a pass.

    Args:
        program: The program.
        pass_name: ``"forward"`` or ``"backward"``.
        arguments: The names of the function's arguments.
        steps: The steps, in the order they run.
        traced: Whether ``torch.compile`` or compiled autograd traces it.
        ranged: Whether fused steps mark their ranges for a profiler.
    """

    def __init__(
        self,
        program: Program,
        pass_name: str,
        arguments: Iterable[str],
        steps: Sequence[Step],
        traced: bool,
        ranged: bool,
    ) -> None:
        self.program, self.chain, self.env = program, program.chain, program.env
        self.pass_name, self.steps, self.traced, self._ranged = pass_name, steps, traced, ranged
        self.kwargs = program.facts.kwargs
        mode = "training" if self.env.training else "evaluation"
        title = f"{self.chain.title} on {self.env.device}, {self.env.dtype}, {mode}"
        self._lines = [f"# {_comment(title)}", f"def {pass_name}({', '.join(arguments)}):"]
        self._indent = "    "
        self._names: dict[str, Any] = {
            "Tensor": Tensor,
            "QuantizedTensor": QuantizedTensor,
            "tensors": (Tensor, QuantizedTensor),
        }

    # Names and lines

    def bind(self, name: str, value: Any) -> str:
        """Let a name mean a value, unless it has a meaning; return the name."""
        assert name.isidentifier(), name
        self._names.setdefault(name, value)
        return name

    def call(self, function: Callable[..., Any], *fixed: Any, at: int | str = "") -> str:
        """Bind a function, with its first arguments; return its name.

        Args:
            function: The function.
            *fixed: Its first arguments.
            at: Distinguishes it from the same function with other arguments.
        """
        name = function.__name__ if at == "" else f"{function.__name__}_{at}"
        return self.bind(name, functools.partial(function, *fixed) if fixed else function)

    def add(self, text: str, comment: str = "") -> None:
        """Add a line."""
        self._lines.append(
            f"{self._indent}{text}" + (f"  # {_comment(comment)}" if comment else "")
        )

    @property
    def text(self) -> str:
        """The source."""
        return "\n".join(self._lines) + "\n"

    def compiled(self) -> Callable[..., Any]:
        """The function. A traceback shows its lines as long as it exists."""
        filename, text = f"<opfuse program {next(_numbers)}>", self.text
        exec(compile(text, filename, "exec"), self._names)
        function: Any = self._names.pop(self.pass_name)
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
        weakref.finalize(function, linecache.cache.pop, filename, None)
        return function  # type: ignore[no-any-return]

    # Steps

    def method(self, step: Step) -> tuple[str, bool]:
        """Bind the method that runs a step.

        Returns:
            Its name; and whether it is that of a basic op, with one context.
        """
        op, given = step.op, any(self.kwargs[step.start : step.stop])
        direct = not given and not step.has_extras and is_direct(op, self.pass_name)
        run = getattr(op, f"{'op' if direct else 'fuser'}_{self.pass_name}")
        facts, name = self.program.facts, self.pass_name
        run = facts.wrap("opfuse_wrap_step", run, step=step, pass_name=name)
        if self._ranged and step.source:
            run = InRange(step, self.pass_name, run)
        word = "fused" if step.source else "op"
        if step.source is None and is_builtin(op, self.pass_name):
            word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op_class(op).__name__).lower()
        return self.bind(f"{word}_{step.start if step.source is None else step.begin}", run), direct

    def comment(self, step: Step) -> str:
        """What a step is, for the reader of the source."""
        names, source = " + ".join(op_class(op).__name__ for op in step.matched), step.source
        if source is None:
            return names
        owner = f", {source.distribution} {source.version}" if source.distribution else ""
        return f"{names}: {source.name}{owner}"

    def each(self, step: Step, of_op: Callable[[int], str], of_cast: Callable[[int], str]) -> str:
        """A list with an entry for each op of a step, and for each cast, by its edge."""
        found, index = [], step.start
        for op in step.matched:
            is_cast = isinstance(op, Cast)
            found.append(of_cast(index) if is_cast else of_op(index))
            index += not is_cast
        return f"[{', '.join(found)}]"

    def contexts_of(self, step: Step) -> str:
        """The contexts of the ops and casts of a step."""
        for edge, cast in step.casts:
            make = self.call(lines.cast_context, cast.quantizer, cast.usage, at=edge)
            self.add(f"k{edge} = {make}()")
        return self.each(step, "c{}".format, "k{}".format)

    def check_casts(self, step: Step) -> None:
        """Refuse what a fused op saved for its casts."""
        if step.casts:
            check = self.call(lines.check_cast_contexts, step, self.pass_name, at=step.begin)
            self.add(f"{check}({', '.join(f'k{edge}' for edge, _ in step.casts)})")

    def run_cast(self, step: Step, x: str, given: str) -> None:
        """Run a cast by itself."""
        cast, edge = step.op, step.start
        quantizer = self.bind(f"quantizer_{edge}", cast.quantizer)
        usage = self.bind(f"usage_{edge}", cast.usage)
        self.add(f"{x} = {quantizer}({given}, {usage})", f"Cast: {type(cast.quantizer).__name__}")

    # Contexts and quantized tensors

    def make_contexts(self, first: int, values: Sequence[dict[str, Any]]) -> None:
        """Take the contexts of the ops from ``first`` on: those of an earlier call, or new ones.

        Making one takes half a microsecond, and resetting it a twentieth of that.
        """
        fresh = range(len(values)) if self.traced else self.program.fresh
        everyone = range(first, len(values))
        self._pooled = [i for i in everyone if i not in fresh]
        if self._pooled:
            names = several(f"c{i}" for i in self._pooled)
            self.add(f"try: {names} = {self.bind('idle', [])}.pop()")
            make = self.call(lines.contexts, self._kinds(self._pooled, values))
            self.add(f"except IndexError: {names} = {make}()")
        if others := [i for i in everyone if i in fresh]:
            make = self.call(lines.contexts, self._kinds(others, values), at="fresh")
            self.add(f"{several(f'c{i}' for i in others)} = {make}()")

    def _kinds(self, indexes: Iterable[int], values: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        """The class and the attributes of the contexts of some ops."""
        names: dict[int, tuple[str, ...] | None] = dict.fromkeys(indexes)
        if not self.traced:
            names |= {i: self.program.saved.context_names[i] for i in indexes if i in self._pooled}
        return tuple([(lines.context_class(names[i]), values[i]) for i in indexes])

    def release_contexts(self, **fields: Iterable[int]) -> None:
        """Reset fields of the contexts of some ops, and let the next call take all contexts."""
        empty = {"params": "()"}
        for name, ops in fields.items():
            if found := [f"c{i}.{name} = " for i in ops if i in self._pooled]:
                self.add(f"{''.join(found)}{empty.get(name, 'None')}")
        left = [f"c{i}.{name}" for i, name in self.program.saved.attributes if i in self._pooled]
        if left:
            self.add(f"del {', '.join(left)}")
        if self._pooled:
            self.add(f"idle.append(({several(f'c{i}' for i in self._pooled)}))")

    def by_index(self, indexes: Iterable[int]) -> str:
        """A dict of contexts."""
        return f"{{{', '.join(f'{i}: c{i}' for i in dict.fromkeys(indexes))}}}"

    def attributes(self) -> str:
        """The context attributes that the forward passes on to the backward."""
        return several(f"c{i}.{name}" for i, name in self.program.saved.attributes)

    def enter(self, x: str, cast: Any) -> None:
        """Take what comes as it is, if it is a plain tensor."""
        self.add(f"if type({x}) is not Tensor: {x} = {self.call(lines.entering, cast)}({x})")

    def make_plain(self, x: str, given: str, is_quantized: bool) -> str:
        """Dequantize what a step takes, unless it takes a quantized tensor; return its name."""
        if self.env.recipe is None or is_quantized:
            return given
        self.add(f"{x} = {given}.dequantize() if isinstance({given}, QuantizedTensor) else {given}")
        return x

    def leave(self, x: str) -> None:
        """Give the caller what it can use."""
        if self.env.recipe is not None:
            recipe = None if self.env.compiling else self.env.recipe
            leave = self.call(lines.leaving, recipe)
            self.add(f"if isinstance({x}, QuantizedTensor): {x} = {leave}({x})")

    # Ops that ask for their quantizers themselves

    def begin_pass(self) -> None:
        """Let ops that ask for their quantizers know in which pass they do."""
        asking = [op for op in self.chain.ops if any(map(op.num_quantizers, _MODES))]
        others = [s for s in self.steps if s.source or not is_builtin(s.op, self.pass_name)]
        forward = self.pass_name == "forward"
        if asking and others and not self.traced and (self.env.recipe is None) is forward:
            self.bind("settings", current)
            self.add(f"before, settings.in_forward = settings.in_forward, {forward}")
            self.add("try:")
            self._indent += "    "

    def end_pass(self) -> None:
        """End what :meth:`begin_pass` began."""
        if len(self._indent) > 4:
            self._indent = self._indent[4:]
            self.add("finally:")
            self.add("    settings.in_forward = before")


_MODES = "forward", "backward"


def several(names: Iterable[str]) -> str:
    """Names in a tuple, without its parentheses unless it is empty."""
    found = ", ".join(names)
    return found if ", " in found else f"{found}," if found else "()"


def _comment(text: str) -> str:
    """Text on one line, without characters that could end it."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())
