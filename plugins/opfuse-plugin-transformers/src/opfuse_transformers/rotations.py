"""Rotary position embeddings: the functions of a library that rotate queries and keys.

Such a function is known by what it computes, not by its name. Its code, and that of what it calls,
is read. It may consist of sums, products, and changes of shape and dtype alone: then it is a
polynomial, and one that agrees with a rotation for random numbers, in heads of two sizes, is that
rotation. While a forward that calls one runs, its name stands for a chain.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_convert import Conversion
from opfuse_convert.grammar import Place, Reader, Unreadable, function_places
from opfuse_convert.site import Site
from torch import Tensor, fx, nn

from opfuse import Environment, Sequential
from opfuse.ops import ApplyRoPE, SwapExtraInput
from opfuse.ops.authoring import op_class
from opfuse.ops.rope import Rotation, rotated
from opfuse.report.calls import plan_of

from . import chunks
from .remembered import Remembered

_ORDINARY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class Turn(NamedTuple):
    """What a function computes in one way of calling it.

    Attributes:
        count: How many tensors are rotated, 1 or 2. They come first; then cosines, then sines.
        heads: The dimension of the heads, counted from the first.
        ndim: The number of dimensions of what is rotated.
        interleaved: Whether pairs of features are neighbours.
        tables: ``"whole"``: cosines and sines have a number for each feature; ``"pairs"``: for each
            pair; ``"first"``: the first half of them is for each pair, and the rest is not read.
        is_partial: Whether heads may be larger than what is rotated.
    """

    count: int
    heads: int
    ndim: int
    interleaved: bool
    tables: str
    is_partial: bool = False

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
        """The tables of the op for those of a call, and the number of features that turn."""
        width = cos.shape[-1]
        if self.tables == "first":
            half = width // 2
            return cos[..., :half], sin[..., :half], 2 * half
        return cos, sin, width if self.tables == "whole" else 2 * width


class Rotary:
    """A function that rotates, as far as it is known.

    Args:
        function: The function.

    Attributes:
        turns: What it computes, by the ways to call it, see :func:`_way`; none: it is unknown.
        dtypes: The dtype of its results by those of what is rotated and of the tables. What is
            rotated is cast to that before.
        places: What all this depends on.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.places: list[Place] = []
        with torch.no_grad(), torch.device("cpu"):
            self.turns = dict(self._recognised())
            self.dtypes = dict(self._results()) if self.turns else {}

    @property
    def is_known(self) -> bool:
        """Whether it is a rotation, and what it depends on is as it was."""
        return bool(self.turns) and all(place.is_same for place in self.places)

    def _recognised(self) -> Iterator[tuple[Any, Turn]]:
        params = inspect.signature(self.function).parameters.values()
        needed = [param for param in params if param.default is param.empty]
        if len(needed) not in (3, 4) or any(param.kind is not _ORDINARY for param in params):
            return
        places = [{"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}]
        takes_place = any(param.name == "unsqueeze_dim" for param in params)
        for given in ({}, *(places if takes_place else ())):
            if not self._is_polynomial(len(needed), given):
                return
            for ndim in (4, 3):
                turn = _turn(self.function, len(needed) - 2, ndim, given)
                if turn is not None:
                    yield _way(len(needed), given, ndim), turn

    def _is_polynomial(self, count: int, given: Mapping[str, Any]) -> bool:
        """Whether its code consists of sums, products and changes of shape and dtype."""
        graph = fx.Graph()
        reader = Reader(graph, lambda module: False)
        values = [graph.placeholder(f"given_{number}") for number in range(count)]
        try:
            reader.run(self.function, values, given)
        except (Unreadable, TypeError):
            return False
        self.places += reader.places
        return all(map(_is_plain, graph.nodes))

    def _results(self) -> Iterator[tuple[Any, torch.dtype]]:
        """The dtypes, where they are no narrower than that of what is rotated."""
        (_, given, ndim), turn = next(iter(self.turns.items()))
        width = 4 if turn.tables == "pairs" else 8
        for of_x, of_table in itertools.product(_DTYPES, _DTYPES):
            heads = [x.to(of_x) for x in _heads(turn.count, ndim, turn.heads, 8)]
            tables = [table.to(of_table) for table in _tables(ndim, width)]
            found = _tuple(self.function(*heads, *tables, **dict(given)))
            dtype = found[0].dtype
            if torch.promote_types(dtype, of_x) is dtype and found[-1].dtype is dtype:
                yield (of_x, of_table), dtype


class Turning:
    """A function that rotates, in the forward of one module, with the chains for its calls.

    Args:
        rotary: What is known of the function.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._chains: dict[Any, Any] = {}
        self._ready = Remembered(self._prepared)

    def call(self, seen: list[Any], *args: Any, **kwargs: Any) -> Any:
        """What the function gives: by the chain, if a plugin fuses that.

        Args:
            seen: Gets the chain, if it runs.
            *args: The arguments.
            **kwargs: Those by name.
        """
        ready = self._ready(args, kwargs) if len(args) > 2 else None
        if ready is None:
            return self._rotary.function(*args, **kwargs)
        turn, dtype, chain = ready
        *given, cos, sin = args
        cos, sin, _ = turn.of(cos, sin)
        # keys come in, and queries are swapped in for them
        *others, first = [x.to(dtype).movedim(turn.heads, -2) for x in given]
        seen.append(chain)
        found = [y.movedim(-2, turn.heads) for y in _tuple(chain(first, cos, sin, *others))]
        return tuple(found) if turn.count == 2 else found[0]

    def _prepared(self, args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Any:
        """What a call computes, its dtype, and the chain for it; None: the function runs."""
        x, *_, cos, sin = args
        turn = self._rotary.turns.get(_way(len(args), kwargs, x.ndim))
        dtype = self._rotary.dtypes.get((x.dtype, cos.dtype))
        if turn is None or dtype is None:
            return None
        lead, given = _lead(x, turn), args[: turn.count]
        if any([(y.dtype, _lead(y, turn)) != (x.dtype, lead) for y in given]):
            return None
        if (cos.shape, cos.dtype) != (sin.shape, sin.dtype) or cos.ndim != turn.ndim - 1:
            return None
        if any([a not in (1, b) for a, b in zip(cos.shape[:-1], lead, strict=False)]):
            return None
        if cos.requires_grad or sin.requires_grad:
            return None
        cos, sin, width = turn.of(cos, sin)
        if width % 2 or width > lead[-1] or (width < lead[-1] and not turn.is_partial):
            return None
        chain = self.chain(turn, lead[-1], width)
        *others, first = [y.to(dtype).movedim(turn.heads, -2) for y in given]
        plan = plan_of(chain, first, cos, sin, *others)
        steps = () if plan is None else plan.forward
        is_fused = all(step.fusion or step.op == SwapExtraInput.__name__ for step in steps)
        return (turn, dtype, chain) if steps and is_fused else None

    def first_chain(self, size: int) -> Any:
        """The chain for heads of a size, all of which turn."""
        return self.chain(next(iter(self._rotary.turns.values())), size, size)

    def chain(self, turn: Turn, size: int, width: int) -> Any:
        """The chain for heads of a size, of which so many features turn."""
        key = turn, size, width
        if key not in self._chains:
            turning: list[Any] = []
            for _ in range(turn.count):
                op = ApplyRoPE(size, interleaved=turn.interleaved, rotary_dim=width)
                for number, name in enumerate(("cos", "sin")):
                    op.set_extra_input_name(number, name)
                turning += [op, SwapExtraInput()]
            self._chains[key] = Sequential(*turning[:-1])
        return self._chains[key]


def _way(count: int, kwargs: Mapping[str, Any], ndim: int) -> tuple[Any, ...]:
    """The key of a way to call a function."""
    return count, (*kwargs.items(),), ndim


def _lead(x: Tensor, turn: Turn) -> tuple[int, ...]:
    """The sizes of what is rotated, without the number of heads."""
    return (*x.shape[: turn.heads], *x.shape[turn.heads + 1 :])


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# Recognition

_CALLS = {
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.getitem, operator.floordiv),
    *(torch.add, torch.sub, torch.mul, torch.neg, torch.cat, torch.chunk, torch.stack, getattr),
}
_METHODS = frozenset(
    "add chunk flatten float mul neg repeat_interleave size sub to type_as unsqueeze".split()
)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node adds, multiplies, or changes a shape or dtype, by small numbers at most."""
    if node.op == "call_function" and node.target not in _CALLS:
        return False
    if node.op == "call_method" and node.target not in _METHODS:
        return False
    return node.op != "get_attr" and all(map(_is_small, _numbers_in((node.args, node.kwargs))))


def _is_small(number: Any) -> bool:
    return type(number) is int and -2 <= number <= 2


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _numbers_in(each)
    elif isinstance(value, Mapping):
        yield from _numbers_in([*value.values()])
    elif isinstance(value, slice):
        yield from _numbers_in((value.start, value.stop, value.step))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _heads(count: int, ndim: int, heads: int, size: int) -> list[Tensor]:
    """What is rotated: with other numbers of heads, tokens and sequences."""
    draw = torch.Generator().manual_seed(size)
    lead = (2, 5) if ndim == 4 else (5,)
    found = []
    for number in (3, 1)[:count]:
        shape = [*lead, size]
        shape.insert(heads, number)
        found.append(torch.randn(shape, dtype=torch.float64, generator=draw))
    return found


def _tables(ndim: int, width: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    shape = (*((2, 5) if ndim == 4 else (5,)), width)
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for _ in range(2)]


def _turn(
    function: Callable[..., Any], count: int, ndim: int, given: Mapping[str, Any]
) -> Turn | None:
    """What a function computes of tensors with so many dimensions, or None."""
    ways = itertools.product(range(ndim - 2, -1, -1), (False, True), ("whole", "pairs", "first"))
    for heads, interleaved, tables in ways:
        turn = Turn(count, heads, ndim, interleaved, tables)
        share = 2 if tables == "pairs" else 1
        if all(_agrees(function, turn, size, size // share, given) for size in (8, 12)):
            part = [_agrees(function, turn, size, size // 2 // share, given) for size in (8, 16)]
            return turn._replace(is_partial=all(part))
    return None


def _agrees(
    function: Callable[..., Any], turn: Turn, size: int, width: int, given: Mapping[str, Any]
) -> bool:
    """Whether a function gives what a turn does, in fp64, up to its own casts to fp32."""
    heads, (cos, sin) = _heads(turn.count, turn.ndim, turn.heads, size), _tables(turn.ndim, width)
    try:
        found = _tuple(function(*heads, cos, sin, **given))
    except (RuntimeError, IndexError, TypeError):
        return False
    cos, sin, turning = turn.of(cos, sin)
    rotation = Rotation(0.0, turn.interleaved, turning)
    expected = [
        rotated(x.movedim(turn.heads, -2), cos, sin, rotation).movedim(-2, turn.heads)
        for x in heads
    ]
    return len(found) == turn.count and all(
        isinstance(y, Tensor) and y.shape == z.shape and torch.allclose(y.double(), z, 1e-5, 1e-5)
        for y, z in zip(found, expected, strict=True)
    )


# Forwards

_KNOWN: weakref.WeakKeyDictionary[Any, Rotary] = weakref.WeakKeyDictionary()
_SIZES = "head_dim", "head_size", "attention_head_size"


class Rotations:
    """The functions that a module's forward calls and that rotate, by their names there.

    Attributes:
        found: The functions.
        places: What they, and the forward that calls them, depend on.
        seen: The chains that ran in the latest call.
    """

    def __init__(self, module: nn.Module) -> None:
        forward = op_class(module).forward
        self._forward, self.places = forward, []
        self.found: dict[str, Turning] = {}
        self.seen: list[Any] = []
        if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
            return
        if any(_sets_globals(forward.__code__)):  # it would set those of another function
            return
        names = forward.__globals__
        for name in dict.fromkeys(forward.__code__.co_names):
            function = names.get(name)
            if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
                continue
            if function not in _KNOWN or not _KNOWN[function].is_known:
                _KNOWN[function] = Rotary(function)
            if _KNOWN[function].turns:
                self.found[name] = Turning(_KNOWN[function])
                self.places += [Place(names, name, function, name), *_KNOWN[function].places]
        self.places += function_places(forward) if self.found else []

    def chains(self, size: int) -> list[Any]:
        """The chains for heads of a size."""
        return [one.first_chain(size) for one in self.found.values()]

    def run(self, module: Any, args: Any, kwargs: Any) -> Any:
        """The forward of a module's class, in which the names of the functions stand for chains."""
        return self.within(self._forward)(module, *args, **kwargs)

    def within(self, forward: Any) -> Any:
        """A forward in which the names of the functions stand for chains, for one call."""
        self.seen = seen = []
        memory: set[int] = set()
        calls = {name: functools.partial(one.call, seen) for name, one in self.found.items()}
        names = {name: functools.partial(_noting, memory, call) for name, call in calls.items()}
        functions = forward.__globals__.get(_FUNCTIONS)
        if hasattr(functions, "get_interface"):
            names[_FUNCTIONS] = _Functions(functions, memory)
        return renamed(forward, names)


_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


def _noting(memory: set[int], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A rotation, which notes in which larger memory the tensors are that it is given."""
    for x in args:
        if type(x) is Tensor and (of := x.untyped_storage()).nbytes() > x.nbytes:
            memory.add(of._cdata)
    return call(*args, **kwargs)


class _Functions(Mapping[Any, Any]):
    """The library's functions of attention, whose values keep no other tensor alive.

    Attention keeps its values for the backward. Where one product gives queries, keys and values,
    these are a view of all three, of which the first two are needed no longer: they were rotated.

    Args:
        functions: Those of the library.
        memory: The memory of what was rotated, where it is larger than that.
    """

    def __init__(self, functions: Any, memory: set[int]) -> None:
        self._functions, self._memory = functions, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def __getitem__(self, name: Any) -> Any:
        return self._with_own_values(self._functions[name])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def get_interface(self, *args: Any, **kwargs: Any) -> Any:
        """A function of the library, see there."""
        return self._with_own_values(self._functions.get_interface(*args, **kwargs))

    def _with_own_values(self, function: Any) -> Any:
        if not self._memory:
            return function

        @functools.wraps(function)
        def attention(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 3 and self._keeps_more(args[3], *args[1:3]):
                args = (*args[:3], args[3].clone(), *args[4:])
            return function(*args, **kwargs)

        return attention

    def _keeps_more(self, value: Any, *turned: Any) -> bool:
        """Whether values alone would keep memory that is larger than they are."""
        is_plain = all(type(x) is Tensor for x in (value, *turned)) and value.is_cpu
        if not (is_plain and torch.is_grad_enabled() and value.requires_grad):
            return False
        memory = value.untyped_storage()._cdata
        return memory in self._memory.difference([x.untyped_storage()._cdata for x in turned])


def _sets_globals(code: types.CodeType) -> Iterator[bool]:
    yield any(
        "_GLOBAL" in each.opname and "LOAD" not in each.opname
        for each in dis.get_instructions(code)
    )
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _sets_globals(inner)


def renamed(function: Any, names: Mapping[str, Any]) -> Any:
    """The same function, for which some global names stand for something else."""
    code, others = function.__code__, {**function.__globals__, **names}
    rest = function.__name__, function.__defaults__, function.__closure__
    made = types.FunctionType(code, others, *rest)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def rotates(module: nn.Module) -> bool:
    """Return whether the forward of a module calls functions that rotate."""
    is_own = op_class(module).__module__.partition(".")[0] != "torch"
    return is_own and _size_of(module) > 0 and bool(Rotations(module).found)


def _size_of(module: nn.Module) -> int:
    found = [vars(module).get(name) for name in _SIZES]
    return next((size for size in found if type(size) is int and size > 1), 0)


def build(module: Any, env: Environment) -> Conversion:
    """The chains of the rotations, and the forward in which their names stand for these.

    If a chain can replace other statements of the forward, that is in it, too.
    """
    rotations, made = Rotations(module), chunks.build(module, env)
    first, *others = rotations.chains(_size_of(module))
    site = made.call if isinstance(made, Conversion) else None
    if isinstance(site, Site):
        site.forward = _around(rotations, site.forward)
        places = [*made.places, *rotations.places]
        return dataclasses.replace(made, places=places, also=[first, *others])
    return Conversion(first, (), _Call(rotations), places=rotations.places, also=others)


def _around(rotations: Rotations, forward: Any) -> Any:
    @functools.wraps(forward)
    def rotating(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(module, *args, **kwargs)
        return rotations.within(forward)(module, *args, **kwargs)

    return rotating


class _Call:
    """The forward of a module, whose rotations are chains."""

    def __init__(self, rotations: Rotations) -> None:
        self.rotations = rotations
        self.why = ""

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        if torch.compiler.is_compiling():
            return NotImplemented
        result = self.rotations.run(module, args, kwargs)
        self.why = "" if self.rotations.seen else UNFUSED
        return result


UNFUSED = "no plugin fuses its rotations"
