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
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from ..cast import Cast
from ..fusible import declared
from ..introspection import op_class
from ..op import is_direct
from ..quantization import QuantizedTensor
from ..quantization.state import MODES
from ..settings import current
from . import lines
from .blueprint import Blueprint, is_builtin
from .facts import Step

_numbers = itertools.count()


class Variant(NamedTuple):
    """A function of a program: the ordinary one of a pass, or one for rare calls.

    Attributes:
        pass_name: ``"forward"`` or ``"backward"``.
        codes: Whether what comes in is quantized already.
        ranged: Whether fused steps mark their ranges for a profiler.
        watched: Whether the recorders of the thread are told what is saved (forward only).
        traced: Whether compiled autograd traces it (backward only).
        owns: Whether steps may overwrite gradients (backward only).
        reached: The last op that a gradient reaches; None: the main output has one (backward only).
    """

    pass_name: str
    codes: bool = False
    ranged: bool = False
    watched: bool = False
    traced: bool = False
    owns: bool = True
    reached: int | None = None


class Source:
    """The source of a function.

    Args:
        program: The program.
        variant: Which of its functions it is.
        arguments: The names of the function's arguments.
    """

    def __init__(self, program: Blueprint, variant: Variant, arguments: Iterable[str]) -> None:
        self.program, self.chain, self.env = program, program.chain, program.env
        self.variant, self.pass_name = variant, variant.pass_name
        self.traced = variant.traced or program.compiling
        self.casts = getattr(program.facts.edges, variant.pass_name)
        self.steps: list[Step] = [*getattr(program, variant.pass_name)]
        self._entry = program.entry_casts[variant.pass_name]
        if variant.codes and self.steps[0].source and self._entry in self.steps[0].matched:
            self.steps = [*self.steps[0].separate(variant.pass_name), *self.steps[1:]]
        mode = "training" if self.env.training else "evaluation"
        title = f"{self.chain.title} on {self.env.device}, {self.env.dtype}, {mode}"
        self._lines = [f"# {_comment(title)}", f"def {self.pass_name}({', '.join(arguments)}):"]
        self._indent = "    "
        self._names: dict[str, Any] = {"Tensor": Tensor, "QuantizedTensor": QuantizedTensor}

    def write(self) -> Source:
        """Write it; ops that ask for their quantizers themselves get those of the program."""
        asking = any(op.num_quantizers(name) for op in self.chain.ops for name in MODES)
        if not asking or not self.to_check or self.traced:
            self.write_lines()
            return self
        self.bind("settings", current)
        given = zip(self.chain.ops, self.program.facts.edges.quantizers, strict=True)
        quantizers = self.bind("quantizers", dict(given))
        self.add(f"before, settings.quantizers = settings.quantizers, {quantizers}")
        self.add("try:")
        self._indent += "    "
        self.write_lines()
        self._indent = self._indent[4:]
        self.add("finally:")
        self.add("    settings.quantizers = before")
        return self

    def write_lines(self) -> None:
        """Write the lines of the pass."""
        raise NotImplementedError

    @functools.cached_property
    def to_check(self) -> list[Step]:
        """The steps whose results are checked: their ops are not of this package."""
        return [s for s in self.steps if s.source or not is_builtin(s.op, self.pass_name)]

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
        self._lines.append(self._indent + text + (f"  # {_comment(comment)}" if comment else ""))

    @property
    def text(self) -> str:
        """The source."""
        return "\n".join(self._lines) + "\n"

    def compile(self) -> Callable[..., Any]:
        """The function. A traceback shows its lines as long as it exists."""
        filename, text = f"<opfuse program {next(_numbers)}>", self.text
        exec(_relocate(_compile(text), filename), self._names)
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
        op, facts, source, name = step.op, self.program.facts, step.source, self.pass_name
        given = any(facts.kwargs[step.start : step.stop])
        direct = not given and not step.has_extras and is_direct(op, name)
        run = getattr(op, f"{'op' if direct else 'fuser'}_{name}")
        run = facts.wrap("opfuse_wrap_step", run, step=step, pass_name=name)
        if source is not None:
            if self.variant.ranged:
                owner = f" of {source.distribution}" if source.distribution else ""
                run = lines.in_range(f"{source.name}{owner}, {name}: {step.title}", run)
            return self.bind(f"fused_{step.start}_{step.stop}", run), direct
        word = "op" if step in self.to_check else op_class(op).__name__
        word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()
        return self.bind(f"{word}_{step.start}", run), direct

    def comment(self, step: Step) -> str:
        """What a step is, for the reader of the source."""
        return f"{step.title}: {step.source.full_name}" if step.source else step.title

    def each(self, step: Step, of_op: Callable[[int], str], of_cast: str) -> str:
        """A list with an entry for each op of a step; ``of_cast`` is given a cast's edge."""
        found = [
            of_cast.format(i) if isinstance(op, Cast) else of_op(i) for i, op in step.indexed_ops
        ]
        return f"[{', '.join(found)}]"

    def run_cast(self, step: Step, x: str) -> None:
        """Run a cast by itself."""
        cast, edge = step.op, step.start
        quantizer = self.bind(f"quantizer_{edge}", cast.quantizer)
        usage = self.bind(f"usage_{edge}", cast.usage)
        self.add(f"{x} = {quantizer}({x}, {usage})", f"Cast: {type(cast.quantizer).__name__}")

    # Contexts and quantized tensors

    def make_contexts(self, first: int, values: Sequence[dict[str, Any]]) -> None:
        """Take the contexts of the ops from ``first`` on: those of an earlier call, or new ones.

        Making one takes half a microsecond, and resetting it a twentieth of that.
        """
        pooled, others = dict[str, Any](), dict[str, Any]()
        for i in range(first, len(values)):
            is_free = self.traced or i in self.program.free_ops
            names = None if is_free else tuple(declared(self.chain.ops[i], "context_names"))
            alone = self.traced or i in self.program.unpooled_ops
            (others if alone else pooled)[f"c{i}"] = lines.context_class(names), values[i]
        for step in [step for step in self.steps if step.source]:
            for edge, cast in step.casts:
                kind = lines.of_cast(step, self.pass_name, cast.quantizer, cast.usage)
                (others if self.traced else pooled)[f"k{edge}"] = kind
        self._pooled = tuple(pooled)
        for kinds in filter(None, (pooled, others)):
            taken, at = several(kinds), next(iter(kinds))
            make = f"{taken} = {self.call(lines.contexts, [*kinds.values()], at=at)}()"
            if kinds is pooled:
                self.add(f"try: {taken} = {self.bind('idle', [])}.pop()")
                make = f"except IndexError: {make}"
            self.add(make)

    def release_contexts(self, **fields: Iterable[int]) -> None:
        """Reset fields of the contexts of some ops, and let the next call take all contexts."""
        for name, ops in fields.items():
            if found := [f"c{i}.{name} = " for i in ops if f"c{i}" in self._pooled]:
                self.add(f"{''.join(found)}{'()' if name == 'params' else 'None'}")
        saved = self.program.saved_attributes
        if left := [f"c{i}.{name}" for i, name in saved if f"c{i}" in self._pooled]:
            self.add(f"del {', '.join(left)}")
        if self._pooled:
            self.add(f"idle.append(({several(self._pooled)}))")

    def by_index(self, indexes: Iterable[int]) -> str:
        """A dict of contexts."""
        return f"{{{', '.join(f'{i}: c{i}' for i in dict.fromkeys(indexes))}}}"

    def attributes(self) -> str:
        """The context attributes that the forward passes on to the backward."""
        return several(f"c{i}.{name}" for i, name in self.program.saved_attributes)

    def enter(self, x: str) -> None:
        """Take what comes as it is, if it is a plain tensor."""
        self.add(
            f"if type({x}) is not Tensor: {x} = {self.call(lines.first_tensor, self._entry)}({x})"
        )

    def make_plain(self, x: str) -> None:
        """Dequantize what a step takes."""
        if self.env.recipe is not None:
            self.add(f"if isinstance({x}, QuantizedTensor): {x} = {x}.dequantize()")

    def write_return(self, x: str) -> None:
        """Give the caller what it can use."""
        if self.env.recipe is not None:
            recipe = None if self.env.compiling else self.env.recipe
            leave = self.call(lines.as_output, recipe)
            self.add(f"if isinstance({x}, QuantizedTensor): {x} = {leave}({x})")


def several(names: Iterable[str]) -> str:
    """Names in a tuple, without its parentheses unless it is empty."""
    found = ", ".join(names)
    return found if ", " in found else f"{found}," if found else "()"


@functools.lru_cache(maxsize=512)
def _compile(text: str) -> CodeType:
    """The code of a source. Equal layers of a model have equal ones; compiling takes longest."""
    return compile(text, "", "exec")


def _relocate(code: CodeType, filename: str) -> CodeType:
    """A copy of code, and of what it defines, of which a traceback reads another file."""
    inner = [_relocate(c, filename) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.replace(co_filename=filename, co_consts=tuple(inner))


def _comment(text: str) -> str:
    """Text on one line, without characters that could end it."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())
