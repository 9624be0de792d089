"""Cases: a chain that a fusion replaces, and the circumstances it runs in.

A case is a value: printable as code that makes it again, comparable, and cheap to vary with
``dataclasses.replace``. Its tensors are drawn from a fixed seed, in fp64, and rounded, so that the
same case in fp64 starts from the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.errors import PluginWarning
from ..core.fusion import Fusion, FusionLike, classes_in, fusion_name
from ..core.op import BasicOperation, kinds_of
from ..core.options import options
from ..core.plugins import manager, using
from ..core.quantization import Recipe
from ..core.sequential import Sequential
from ..recipes.autocast import autocast as quantize
from ..recipes.checkpoint import checkpoint_contexts
from .tensors import extra_inputs, input_shapes, lay_out, normal, place


@dataclasses.dataclass(frozen=True, init=False)
class Op:
    """Makes one basic op from its class and arguments; an argument may be another :class:`Op`.

    ``via`` names the method of the class that makes it, such as ``"reading"``; ``rows`` are the
    leading dimensions of its input, if it does not take any.
    """

    cls: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    via: str
    rows: tuple[int, ...] = dataclasses.field(compare=False)

    def __init__(
        self, cls: Any, *args: Any, via: str = "", rows: tuple[int, ...] = (), **kwargs: Any
    ) -> None:
        vars(self).update(cls=cls, args=args, kwargs=tuple(kwargs.items()), via=via, rows=rows)

    def __call__(self) -> BasicOperation:
        """A new op."""
        make = getattr(self.cls, self.via) if self.via else self.cls
        return make(*map(_made, self.args), **dict(self.kwargs))  # type: ignore[no-any-return]

    def with_(self, cls: Any = None, **kwargs: Any) -> Op:
        """The op of another class, or with some arguments changed; its class makes it itself."""
        return Op(cls or self.cls, *self.args, **{**dict(self.kwargs), **kwargs})

    def __repr__(self) -> str:
        named = [*self.kwargs, *([("via", self.via)] if self.via else [])]
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in named)]
        return f"testing.Op({', '.join([where(self.cls), *given])})"


class undrawn(TorchFunctionMode):
    """For a ``with`` block: Parameters that would be drawn have no values; a case draws its own.

    Random numbers for a wide linear take longer than its product, and conditions, which are asked
    with many wide ones, read no values: memory that nobody writes is not taken.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave what would be drawn as it is."""
        given = (*args, *(kwargs or {}).values())
        drawn = func.__name__.endswith("uniform_") and isinstance(given[0], nn.Parameter)
        return given[0] if drawn else func(*args, **(kwargs or {}))


def makes(op: Op) -> bool:
    """Return whether the constructor of an op takes its arguments."""
    with undrawn(), contextlib.suppress(Exception):  # it says why not
        return op() is not None
    return False


def _made(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_made, argument))
    return argument() if isinstance(argument, Op) else argument


CAST = Op(built_in.Cast)
"""The place of a cast of the fusion's pattern among the ops of a case; the engine makes it."""


def is_cast(op: Op) -> bool:
    """Return whether an op is :data:`CAST`."""
    return op.cls is built_in.Cast


def where(cls: type) -> str:
    """The name of a class in code."""
    if getattr(built_in, cls.__name__, None) is cls:
        return f"ops.{cls.__name__}"
    own = cls.__module__.startswith(__package__)
    return f"testing.{cls.__name__}" if own else f"{cls.__module__}.{cls.__qualname__}"


def is_foreign(name: str) -> bool:
    """Return whether a name that :func:`where` gave is of neither opfuse's ops nor the kit."""
    return not name.startswith(("ops.", "testing."))


def changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    pairs = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: now for field, now in pairs if now != field.default}


def recipe_code(recipe: Recipe) -> str:
    """A recipe as code that makes it again."""
    given = (f"{name}={value!r}" for name, value in changed(recipe).items())
    return f"{where(type(recipe))}({', '.join(given)})"


class Subject(NamedTuple):
    """The fusion under test: which plugin offers it, and for which pass.

    ``makers`` makes ops that are not built in. If ``inexact``, a code of a tensor that it casts may
    be one step off.
    """

    plugin: str
    passes: str
    fusion: FusionLike
    makers: tuple[tuple[type, Callable[[int], Any]], ...] = ()
    inexact: bool = False

    @property
    def name(self) -> str:
        """The fusion's name."""
        return fusion_name(self.fusion)

    def __repr__(self) -> str:
        return f"testing.find({self.plugin!r}, {self.passes!r}, {self.name!r})"


def subjects(plugin: str, made: Collection[type] = ()) -> list[Subject]:
    """Every fusion that a plugin offers for one process; none if it does not load.

    The checks of the plugin report that. A fusion of collectives runs on several processes.

    Args:
        plugin: Its name.
        made: The collectives that there is a maker for, in a group of one process.
    """
    return [subject for subject in offered(plugin) if not has_collectives(subject.fusion, made)]


def offered(plugin: str) -> list[Subject]:
    """Every fusion that a plugin offers; none if it does not load."""
    with using(plugin), warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return [
            Subject(plugin, passes, fusion)
            for record in manager.active(plugin)
            for passes, fusion in record.fusions
        ]


def has_collectives(fusion: FusionLike, apart_from: Collection[type] = ()) -> bool:
    """Return whether the pattern of a fusion has an op with a process group, apart from some."""
    elements = classes_in(fusion.pattern) if isinstance(fusion, Fusion) else ()
    classes = {getattr(each, "cls", each) for each in elements}.difference(apart_from)
    return any(getattr(cls, "needs_tools", ()) for cls in classes)


def find(plugin: str, passes: str, name: str) -> Subject:
    """A fusion of a plugin.

    Raises:
        LookupError: The plugin offers none of that name and pass.
    """
    for subject in offered(plugin):
        if (subject.passes, subject.name) == (passes, name):
            return subject
    raise LookupError(f"plugin {plugin!r} offers no {passes} fusion {name!r}")


@contextlib.contextmanager
def seeded(device: str, seed: int) -> Iterator[Callable[[], Tensor]]:
    """Torch's generator with a seed for a ``with`` block, and a function that gives its state.

    What draws, draws the same with and without a fusion.
    """
    gpu = device == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if gpu else []):
        (torch.cuda if gpu else torch.default_generator).manual_seed(seed)
        yield torch.cuda.get_rng_state if gpu else torch.get_rng_state


class Built(NamedTuple):
    """The tensors and modules of a case.

    Attributes:
        chain: The chain.
        leaves: Input, extra inputs and parameters by name: ``input``, ``extra 0``, ``1.bias``.
        writable: Extra inputs that an op may write into.
        case: Whose settings are in force in a call; the truth is without autocast.
    """

    chain: Sequential
    leaves: dict[str, Tensor]
    writable: set[str]
    case: Case

    def inputs(self) -> list[Tensor]:
        """Input and extra inputs of one call; a copy of what is written into."""
        given = [(name, leaf) for name, leaf in self.leaves.items() if "." not in name]
        return [leaf * 1 if name in self.writable else leaf for name, leaf in given]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Every output of the chain."""
        return self.run(inputs or self.inputs(), self.chain)[0]

    def run(self, inputs: Sequence[Tensor], call: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """Every output of a call, and the state of torch's generator, seeded before, after it."""
        with seeded(self.case.device, 0) as state, self.settings():
            if self.case.checkpointed and torch.is_grad_enabled():
                how: Any = dict(use_reentrant=False, context_fn=checkpoint_contexts)
                call = functools.partial(checkpoint, call, **how)
            result = call(*inputs)
            return result if isinstance(result, tuple) else (result,), state()

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Autocast, options and the recipe in force, for a ``with`` block."""
        case, usual = self.case, contextlib.nullcontext()
        autocast = torch.autocast(case.device, case.autocast) if case.autocast else usual
        preferred = usual if case.prefer == "speed" else options(prefer=case.prefer)
        with autocast, preferred, quantize(case.recipe) if case.recipe else usual:
            yield


NOT_SMALLER = frozenset("subject ops rows dtype channels shared device recipe least".split())
"""Attributes of a case that have no default, or whose default is not smaller than others."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain, and the circumstances it runs in.

    Attributes:
        subject: The fusion under test.
        ops: The ops that it replaces, with :data:`CAST` where its pattern has a cast.
        before, after: Ops around them.
        rows: Leading dimensions of the input.
        width: Features of the input, where no op insists on some; None: 8.
        dtype: Of the input, and of the parameters.
        layout: Of input, extra inputs and incoming gradients: one of ``LAYOUTS``; ``summed`` is of
            the gradients alone.
        params: The layout of the parameters.
        scale: Factor of the input and the extra inputs, which are around 1 without it.
        mean: The mean of the input.
        mixed: They, and the incoming gradients, differ in magnitude, within a row and between rows.
        gradient: Factor of the incoming gradients, which are around 1 without it.
        positive: Incoming gradients have one sign.
        cancelling: They are large, and of two rows one cancels the other.
        parametrized: Every read of a parameter draws its factor again.
        frozen: Leaves that need no gradient: ``input``, ``extra 0``, ``1.bias``.
        autocast: Run under autocast to this dtype.
        prefer: The option of this name: "speed" or "memory".
        param_dtype: Of the parameters where ops take another one; None: that of the input.
        extra_dtype: Of the extra inputs; None: that of autocast, or of the input.
        channels: Extra outputs go into channels; "": they do not. "residual": Extra inputs come out
            of that of the first. "crossing": They come out of them in the same order. "hidden":
            Nobody reads them.
        shared: Split sizes of several ops are one tensor, by name.
        device: Where it runs.
        training: The mode of the chain.
        switched: Ops of the other mode, by number.
        reached: Which outputs get a gradient: "all", the "first", or the "extra" ones.
        checkpointed: The chain is called by ``torch.utils.checkpoint``.
        recipe: The recipe that quantizes it, or None.
        least: The fewest rows that the fusion was seen to take.
    """

    subject: Subject
    ops: tuple[Op, ...]
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    rows: tuple[int, ...] = (3,)
    width: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    params: str = "contiguous"
    scale: float = 1.0
    mean: float = 0.0
    mixed: bool = False
    gradient: float = 1.0
    positive: bool = False
    cancelling: bool = False
    parametrized: bool = False
    frozen: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    prefer: str = "speed"
    param_dtype: torch.dtype | None = None
    extra_dtype: torch.dtype | None = None
    channels: str = ""
    shared: bool = True
    device: str = "cpu"
    training: bool = True
    switched: tuple[int, ...] = ()
    reached: str = "all"
    checkpointed: bool = False
    recipe: Recipe | None = None
    least: int = 1

    def __repr__(self) -> str:
        known: Any = {"recipe": recipe_code}
        texts = {name: known.get(name, repr)(value) for name, value in changed(self).items()}
        lines = [texts.pop("subject"), *(f"{name}={text}" for name, text in texts.items())]
        return "testing.Case(\n" + "".join(f"    {line},\n" for line in lines) + ")"

    def with_(self, **changes: Any) -> Case:
        """The case with some attributes changed."""
        made = object.__new__(Case)  # dataclasses.replace takes six times as long
        vars(made).update(vars(self), **changes)
        if len(vars(made)) != len(vars(self)):
            unknown = ", ".join(sorted(changes.keys() - vars(self).keys()))
            raise TypeError(f"Case.with_ expected attributes of a Case, got {unknown}")
        return made

    @property
    def varied(self) -> list[str]:
        """The attributes in which it differs from the plainest case of its chain."""
        return [name for name in changed(self) if name not in NOT_SMALLER]

    @property
    def chain_ops(self) -> tuple[Op, ...]:
        """The ops of the chain, those around included, without casts."""
        return tuple(op for op in (*self.before, *self.ops, *self.after) if not is_cast(op))

    @property
    def edges(self) -> set[int]:
        """The edges of the chain on which its pattern has a cast."""
        places = [n for n, op in enumerate(self.ops) if is_cast(op)]
        return {len(self.before) + n - earlier for earlier, n in enumerate(places)}

    @property
    def gemm(self) -> bool:
        """True if a matrix product is in the chain."""
        products = built_in.BasicLinear, built_in.GroupedLinear, built_in.ParallelLinear
        return any(op.cls in products for op in self.chain_ops)

    @property
    def has_modes(self) -> bool:
        """True if an op may behave differently in evaluation mode.

        That is a dropout, or an op that is not built in.
        """
        return any(op.cls is built_in.Dropout or is_foreign(where(op.cls)) for op in self.ops)

    @property
    def exact(self) -> torch.dtype | None:
        """The dtype of the truth: fp64, or None for the dtypes of the case.

        It is None where the numbers drawn depend on the dtype, and under a recipe: what is rounded
        to a few bits depends on the last bits of what it was. And it is where all is fp64.
        """
        others = self.autocast or self.param_dtype or self.extra_dtype
        if self.recipe is not None or (self.dtype is torch.float64 and others is None):
            return None
        return None if self.draws and self.device != "cpu" else torch.float64

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype the ops compute in."""
        return self.autocast or self.dtype

    @property
    def draws(self) -> bool:
        """True if an op draws random numbers: a dropout that drops."""
        return any(op.cls is built_in.Dropout for op in self.chain_ops) and any(
            isinstance(op, built_in.Dropout) and op.training and op.p for op in self.basic_ops()
        )

    def basic_ops(self) -> list[BasicOperation]:
        """New ops, those around included."""
        with torch.random.fork_rng([]), undrawn():
            basic = [op() for op in self.chain_ops]
        for number, op in enumerate(basic):
            op.train(self.training is not (number in self.switched))
        forks = [(op, k) for op in basic for k in range(op.num_extra_outputs)]
        every = [(op, k, kind) for op in basic for k, kind in enumerate(kinds_of(op))]
        joins = [(op, k) for op, k, kind in every if kind == "floating"]
        crossing, to_caller = self.channels == "crossing", self.channels == "residual"
        last = len(joins) if crossing else len(forks)
        for number, (op, k) in enumerate(forks[:last] if self.channels else ()):
            op.set_extra_output_channel(k, f"channel {number}", output_to_caller=to_caller)
        for number, (op, k) in enumerate(joins[: len(forks)] if crossing else joins):
            if crossing or to_caller:
                op.set_extra_input_channel(k, f"channel {number * crossing}")
        grouped = [op for op in basic if isinstance(op, built_in.GroupedLinear)]
        for op in grouped if self.shared and len(grouped) > 1 else ():
            op.set_extra_input_name(0, "split_sizes")
        return basic

    def first_width(self) -> int:
        """Features of the input.

        It is what the first op that insists on some takes, or else ``width``.
        """
        return insisted(self.chain_ops) or self.width or 8

    def build(self, dtype: torch.dtype | None = None) -> Built:
        """Ops and tensors, the same ones every time.

        In another dtype than the case's, they have the same values.

        Args:
            dtype: What to compute in: fp64 for the truth; default: as the case says.
        """
        basic = self.basic_ops()
        chain = Sequential(*basic)
        chain.training = self.training
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Any, scale: float, mixed: bool = False, put: Any = (0.0,)) -> Tensor:
            return place(normal(tuple(shape), generator, mixed) * scale, put)

        def lay(values: Tensor, own: torch.dtype, layout: str) -> Tensor:
            values = values.to(own).to(dtype or own) if values.is_floating_point() else values
            return lay_out(values.to(self.device), layout)

        layout = "contiguous" if self.layout == "summed" else self.layout
        shape = (*self.rows, self.first_width())
        put = [0.0, *(n for op in basic[len(self.before) :] for n in vars(op).values())]
        usual = (self.scale, self.mean, self.mixed) == (1.0, 0.0, False)
        values = self.mean + draw(shape, self.scale, self.mixed, put if usual else ())
        leaves = {"input": lay(values, self.dtype, layout)}
        structure, shapes, fixed = Chain(basic), input_shapes(basic, shape), {*self.frozen}
        places = {f"extra {n}": place for n, place in enumerate(structure.external_inputs)}
        for name, (i, k) in places.items():
            extra = extra_inputs(basic[i], shapes[i], generator)[k]
            if isinstance(extra, Tensor):
                fixed.add(name)
            else:
                extra = draw(extra, self.scale, self.mixed)
            leaves[name] = lay(extra, self.extra_dtype or self.compute_dtype, layout)
        writable = {name for name, (i, _) in places.items() if getattr(basic[i], "in_place", False)}
        for name, param in params_of(basic).items():
            op = basic[int(name.partition(".")[0])]
            own = None if op.params_in_compute_dtype else self.param_dtype
            scale = 1 / math.sqrt(param.shape[-1]) if param.ndim > 1 else 1.0
            param.data = lay(draw(param.shape, scale), own or self.dtype, self.params)
            leaves[name] = param
        for op in basic if self.parametrized else ():
            _parametrize(op)
        for name, leaf in leaves.items():
            leaf.requires_grad_(leaf.is_floating_point() and name not in fixed)
        return Built(chain, leaves, writable, self if dtype is None else self.with_(autocast=None))

    def weights(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Incoming gradients, the same ones every time."""
        generator = torch.Generator().manual_seed(1)
        result = []
        for y in outputs:
            values = normal(y.shape, generator, self.mixed) * self.gradient
            values = values.abs() if self.positive else values
            if self.cancelling and y.ndim > 1:
                values[::2] += _LARGE
                values[1::2] -= _LARGE
            values = values.to(self.compute_dtype)
            result.append(lay_out(values.to(y.dtype).to(y.device), self.layout))
        return result


_LARGE = 2.0**14
"""A number around 1 that is added to it keeps half its digits in fp32, and all in fp64."""


class _Drawn(nn.Module):
    """A parametrization whose value changes at every read, in the same way for every dtype."""

    def forward(self, original: Tensor) -> Tensor:
        """The parameter as it is now."""
        factor = torch.randint(1, 128, (), device=original.device) / 64  # exact in every dtype
        return original * factor.to(original.dtype)


def _parametrize(op: BasicOperation) -> None:
    for name in [*op._parameters] if op.param_names else ():
        if op._parameters[name] is not None:
            parametrize.register_parametrization(op, name, _Drawn(), unsafe=True)


@functools.lru_cache(maxsize=1024)
def insisted(ops: tuple[Op, ...]) -> int | None:
    """Features that ops insist on for their input, or None."""
    with torch.random.fork_rng([]), undrawn():
        chain = Chain([op() for op in ops])
    return chain.width or next(iter(chain.later_widths.values()), None)


def params_of(ops: Iterable[Any]) -> dict[str, Tensor]:
    """The Parameters of ops by number and name, ``1.bias``; those read from another module too."""
    found: dict[str, Any] = {}
    for number, op in enumerate(ops):
        read = {name: op.param_source(name) for name in op.param_names or ()}
        own = dict(op.named_parameters())
        own |= {name: module._parameters[leaf] for name, (module, leaf) in read.items()}
        found |= {f"{number}.{name}": param for name, param in own.items() if param is not None}
    return found
