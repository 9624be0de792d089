"""Chains made from a fusion's pattern.

They cover every class, every optional element and every built-in activation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.engine.facts import Needs, edges_of
from ..core.engine.planner import rows_of
from ..core.environment import Environment
from ..core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from ..core.op import BasicOperation, kinds_of
from ..core.quantization import Recipe, Usage
from ..core.settings import current
from .cases import CAST, Case, Op, Subject, insisted, is_cast, makes, params_of, undrawn
from .failures import Declined
from .recipes import recipes_for
from .running import only, separate
from .tensors import next_width

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes to try; the first that a fusion takes is the usual one."""

WIDTHS = (8, 32, 64, 128, 256, 512, 1024, 2048)
"""Widths to try; the first that a fusion takes is the usual one."""

TILES = (64, 192)
"""Rows and widths that are whole tiles; kernels are tested with neighbouring sizes, too."""

WIDTHS_OF_MODELS = (768, 1536, 4096)
MORE_WIDTHS_OF_MODELS = (320, 640, 1000, 1024, 1280, 2048, 3072, 5120, 11008)
"""Widths in real models, where a row is more than one block, and not a power of two."""

SHAPES = tuple(itertools.product(((3,), (16,)), WIDTHS))
"""Rows and widths to try."""

MORE_ROWS = tuple((1 << power,) for power in range(5, 13))
"""Rows to try where the condition looks at their number."""

SHAPES_OF_RECIPES = (((3,), 8), ((3,), 64), ((32,), 64), ((128,), 128), ((128,), 512))
"""Rows and widths to try under a recipe, whose blocks may have to be whole."""


@dataclasses.dataclass(frozen=True)
class Chains:
    """The chains that a fusion is tested on.

    Attributes:
        subject: The fusion.
        plain: One case per structure.
        all: These, and one for every other class and variant.
        models: One case per structure and width of real models.
        tiles: As ``all`` and ``models``, as wide as tiles; the latter with as many rows. The
            plainest chain has every width, each other one of ``all`` one of them, or every width
            if ``thorough``.
        residual: Chains whose extra input comes out of a channel of the same chain.
        quantized: One case per structure and recipe, between ops that quantize.
        declined: The reasons why the fusion is not used for other structures, by structure.
        elsewhere: Its condition takes none of them here, and takes one on some GPU.
        thorough: The checks try everything they know, however long it takes.
        most_rows: Cases with more rows are left out; None: none is.
        most_cases: So many cases of a check run, or all.
        seen: What was found in the cases that ran, for all checks of one run.
    """

    subject: Subject
    declined: dict[str, str] = dataclasses.field(compare=False)
    elsewhere: bool = False
    plain: tuple[Case, ...] = ()
    all: tuple[Case, ...] = ()
    models: tuple[Case, ...] = ()
    tiles: tuple[Case, ...] = ()
    residual: tuple[Case, ...] = ()
    quantized: tuple[Case, ...] = ()
    thorough: bool = False
    most_rows: int | None = None
    most_cases: int | None = None
    seen: dict[Case, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def make_chains(
    subject: Subject,
    device: str = "cpu",
    makers: Mapping[type, Callable[[int], Any]] | None = None,
    examples: Sequence[Sequence[Op]] = (),
    thorough: bool = False,
    recipes: Sequence[Recipe] | None = None,
) -> Chains:
    """The chains for a fusion.

    They are as wide, in the dtype, and with as many rows as its condition asks for. Those of a
    fusion that trades time run under ``prefer="memory"``, without which it is not used.

    Args:
        subject: The fusion.
        device: Where they will run.
        makers: How to make ops of classes that are not built in: by class, a function of the
            input's features.
        examples: Chains of a fusion function, which has no pattern to make them from; under each
            recipe, if the fusion needs one.
        thorough: See :class:`Chains`.
        recipes: Under which of them; None: those of the plugin and of the kit.
    """
    subject = subject._replace(makers=tuple((makers or {}).items()))
    fusion: Any = subject.fusion
    recipes = recipes_for(subject.plugin) if recipes is None else recipes
    prefer = "memory" if "trades_time" in getattr(fusion, "declares", ()) else "speed"
    lone = Case(subject, (), device=device, prefer=prefer)
    always = "recipe" in getattr(fusion, "needs", ()) and not getattr(fusion, "names_casts", False)
    places = itertools.product(examples, recipes if always else [None])
    given = [lone.with_(ops=tuple(ops), recipe=recipe) for ops, recipe in places]
    found = defaultdict[str, list[Case]](list, plain=[*given], all=[*given])
    found["quantized"] = [case.with_(recipe=recipe) for case in given for recipe in recipes]
    declined, elsewhere = {}, False
    for elements in structures(fusion.pattern if isinstance(fusion, Fusion) else ()):
        again = False  # under another recipe
        casts = always or any(built_in.Cast in classes_of(element) for element in elements)
        for recipe in recipes if casts else [None]:
            accepted, refused = _accepted(lone.with_(recipe=recipe), elements, thorough)
            if not accepted:
                names = [getattr(element, "__name__", str(element)) for element in elements]
                names += [f"under {type(recipe).__name__}"] if recipe is not None else []
                why = "no op could be made; tell how with `sample_inputs` of its class, or `makers`"
                declined[" + ".join(names)] = str(refusal(refused[0])) if refused else why
                elsewhere = elsewhere or (device == "cpu" and any(map(_taken_by_a_gpu, refused)))
                continue
            found["quantized"] += _quantized(accepted[0], elements, recipes)
            if not (again and always):  # it casts nothing: all recipes are alike
                for kind, cases in _by_kind(accepted, elements, thorough, again).items():
                    found[kind] += cases
            again = True
    kinds: Any = {kind: tuple(dict.fromkeys(cases)) for kind, cases in found.items()}
    return Chains(subject, declined, elsewhere and not found["all"], thorough=thorough, **kinds)


def _frozen(case: Case) -> Case:
    return case.with_(frozen=tuple(_parts_of(case.with_(**_SAME))[1]))


def _behind_a_linear(case: Case) -> Case:
    width = case.first_width()
    return case.with_(before=(Op(built_in.BasicLinear, width, width), *case.before))


_WAYS: tuple[Callable[[Case], Case], ...] = (
    Case.with_,
    lambda case: case.with_(prefer="memory"),
    _frozen,  # of no use in training
    _behind_a_linear,  # by which the number of features is known while planning
)
"""Ways to make a case, the first as it is; conditions ask for some of the others."""


def _accepted(
    lone: Case, elements: Sequence[Any], one_by_one: bool
) -> tuple[list[Case], list[Case]]:
    """The cases of a structure that the condition takes, made in the first way that it takes.

    Returns:
        These; where there is none, the plainest case of each way.
    """
    fusion: Any = lone.subject.fusion
    asks = not {"rows", "row_alignment"}.isdisjoint(getattr(fusion, "needs", ()))
    shapes = [*(SHAPES if lone.recipe is None else SHAPES_OF_RECIPES)]
    shapes += itertools.product(MORE_ROWS if asks else (), WIDTHS)
    refused: list[Case] = []
    takes = set[Any]()  # where the condition does, and the separate ops refuse the plainest
    of_width = functools.cache(lambda width: chains(lone, elements, width, one_by_one=one_by_one))
    for way, dtype, (rows, width) in itertools.product(_WAYS, DTYPES, shapes):
        if (way, dtype) in takes and (rows, width) not in SHAPES_OF_RECIPES:
            continue
        base = lone.with_(rows=rows, dtype=dtype, least=1 if rows == (3,) else rows[0])
        cases = [way(placed(base, ops, width)) for ops in of_width(width)]
        if not cases or ((way, dtype) in takes and refusal(cases[0]) is not None):
            continue
        taken = [case for case in cases if refusal(case, runs=True) is None]
        if accepted := [*itertools.dropwhile(_declined, taken)]:  # the ops run the first
            return accepted, []
        refused.append(cases[0])
        takes |= {(way, dtype)} if taken[:1] == cases[:1] else set()
    return [], refused


def _by_kind(
    accepted: Sequence[Case], elements: Sequence[Any], thorough: bool, again: bool
) -> dict[str, list[Case]]:
    """The cases of one structure.

    Args:
        accepted: Those that the condition takes.
        elements: The structure.
        thorough: See :class:`Chains`.
        again: Whether another recipe has given the cases that are the same under each.
    """
    case, usual = accepted[0], accepted[0].first_width()
    alike = functools.partial(_alike, case, elements)
    found = {"plain": [case], "all": [*accepted[: 1 if again else None], *alike(2 * usual - 1)]}
    if sum(op.cls is built_in.GroupedLinear for op in case.ops) > 1:
        apart = case.with_(shared=False)
        found["all"] += [apart] if refusal(apart, runs=True) is None else []
    found["residual"] = [*_residual(case, elements)]
    if again:
        return found
    widths = WIDTHS_OF_MODELS + (MORE_WIDTHS_OF_MODELS if thorough else ())
    found["models"] = [each for width in widths for each in _in_models(alike, usual, width)]
    found["tiles"] = []
    for number, width in enumerate(TILES):
        others = slice(1, None) if thorough else slice(1 + number, None, len(TILES))
        high = [each.with_(rows=(width,)) for each in _in_models(alike, usual, width)]
        found["tiles"] += [*high, *alike(width), *alike(width, pick=others)]
    return found


def _alike(
    case: Case, elements: Sequence[Any], width: int, out: int | None = None, pick: slice = slice(1)
) -> Iterator[Case]:
    """Cases of the same structure with other features, those of some that the condition takes."""
    for ops in chains(case, elements, width, out)[pick]:
        if refusal(found := placed(case, ops, width), runs=True) is None:
            yield found


def _in_models(alike: Callable[..., Iterator[Case]], usual: int, width: int) -> Iterator[Case]:
    """Cases that are ``width`` wide, before or after a matrix product, and else as usual."""
    yield from alike(width, usual)
    yield from (case for case in alike(usual, width) if any(width in op.args for op in case.ops))


def _taken_by_a_gpu(case: Case) -> bool:
    """Whether some GPU takes it, or will once measured, if a measurement is not all that lacks."""
    speeds = (None, math.inf)[: 1 + (refusal(case, runs=True, measured=math.inf) is not None)]
    half, ask = case.with_(dtype=torch.bfloat16), functools.partial(refusal, runs=True)
    gpu, places = torch.device("cuda"), itertools.product(((8, 0), (9, 0), (10, 0)), speeds)
    return None in (ask(half, device=gpu, capability=c, measured=s) for c, s in places)


def fitted(case: Case) -> Case:
    """The case with as many times the rows as its fusion needs, if it takes no fewer."""
    if case.least == 1 or refusal(case, runs=True) is None:
        return case
    first, *rest = case.rows or (1,)
    return case.with_(rows=(first * case.least, *rest))


def _quantized(case: Case, elements: Sequence[Any], recipes: Sequence[Recipe]) -> Iterator[Case]:
    """A case between linears that quantize; in fp64, where a last bit hardly moves a code.

    There is one for each recipe, with as many rows and features as that takes.
    """
    exact = case.with_(dtype=torch.float64)
    case = exact if refusal(exact) is None else case
    usual = case.first_width()

    def between(rows: tuple[int, ...], width: int) -> Case:
        same = [case.ops] if width == usual else chains(case, elements, width)
        ops = next(iter(same), ())
        sizes = width, width_behind(ops, width)
        before, after = [(Op(built_in.BasicLinear, size, size),) for size in sizes]
        return case.with_(ops=ops, rows=rows, before=before, after=after)

    for recipe in recipes if case.recipe is None else ():
        tried = (between(*shape) for shape in ((case.rows, usual), *SHAPES_OF_RECIPES))
        wide = (found.with_(recipe=recipe) for found in tried)
        yield from itertools.islice((found for found in wide if not _declined(found)), 1)
    if case.recipe is not None:
        yield case


def _residual(case: Case, elements: Sequence[Any]) -> Iterator[Case]:
    """Cases whose extra input is the chain's own input, out of a channel.

    Linears are square, so that shapes fit.
    """
    width = case.first_width()
    for ops in chains(case, elements, width, width):
        reads = [i for i, op in enumerate(ops) if "floating" in kinds_of(op.cls)]
        forks = [i for i, op in enumerate(ops) if op.cls.num_extra_outputs]
        found = placed(case, ops, width).with_(channels="residual")
        if not forks:
            found = found.with_(before=(Op(built_in.MakeExtraOutput), *found.before))
        if reads and min(forks, default=-1) < reads[0] and refusal(found) is None:
            yield found


_SAME: Any = dict(rows=(), dtype=torch.float32, frozen=(), recipe=None, prefer="speed", least=1)
"""What changes no op of a case."""


@functools.lru_cache(maxsize=512)
def _parts_of(case: Case) -> tuple[list[Any], dict[str, Any], int | None]:
    """Ops for conditions, which leave them as they are, their parameters, and the features."""
    basic = case.basic_ops()
    return basic, params_of(basic), Chain(basic).widths[len(case.before)]


def _declined(case: Case) -> str | None:
    """Why the separate ops refuse the case."""
    try:
        separate(case)
    except Declined as reason:
        return str(reason)
    return None


def refusal(case: Case, runs: bool = False, **changes: Any) -> str | None:
    """Why the fusion's condition refuses the case, or the separate ops do.

    With ``runs``, it is known that the separate ops run it; ``changes`` are of the environment.
    """
    if not isinstance(case.subject.fusion, Fusion):
        return None
    try:
        return ask(case, **changes) or (None if runs else _declined(case))
    except Declined as reason:
        return str(reason)
    except Exception:  # the check of the condition is going to tell
        return None


def ask(case: Case, **changes: Any) -> str:
    """What the fusion's condition, or its benefit, says against the case; ``""``: nothing.

    Args:
        case: A case of a fusion that is no function.
        **changes: Fields of the environment.

    Raises:
        Declined: Nothing is cast where its pattern has a cast.
        Exception: The condition raises.
    """
    fusion: Any = case.subject.fusion
    basic, params, features = _parts_of(case.with_(**_SAME))
    for name, param in params.items():
        param.requires_grad_(name not in case.frozen)
    names = [name for name in ("row_alignment", "rows") if name in fusion.needs]
    of_rows = rows_of((*names,), torch.empty(*case.rows, 0, device="meta")) if names else ()
    facts: Any = dict(zip(names, of_rows, strict=True), dtype=case.dtype, recipe=case.recipe)
    env = environment(case.device, features=features, **facts)
    env = env._replace(options={**env.options, "prefer": case.prefer}, **changes)
    ops = matched(case, basic)
    answer = True if fusion.when is None else fusion.when(ops, env)
    if isinstance(answer, str) and answer:
        return answer
    benefit = fusion.benefit_of(ops, env)
    return f"it declares a benefit of {benefit:g}" if benefit < 0 else ""


@functools.cache
def neighbours(case: Case) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """An op for the place before, and one for after, that no match of the fusion includes."""
    fusion: Any = case.subject.fusion
    for op in (Op(built_in.ConstantScale, 2.0), Op(built_in.SiLU), Op(built_in.L2Normalization)):
        around = (op, *case.before, *case.ops, *case.after, op)
        basic = [built_in.Cast(None, Usage()) if is_cast(op) else op() for op in around]  # type: ignore[arg-type]
        starts = range(len(basic)) if isinstance(fusion, Fusion) else ()
        ends = [(start, end) for start in starts for end in fusion.match(basic, start)]
        if all(start and end < len(basic) for start, end in ends):
            return (op,), (op,)
    return (), ()


# Ops of a chain, among others


@functools.lru_cache(maxsize=4096)
def next_width_behind(op: Op, width: int) -> int | None:
    """Features that an op gives for ``width`` features, or None if it does not take that many."""
    with undrawn():
        return width if is_cast(op) else next_width(op(), width)


def width_behind(ops: Sequence[Op], width: int) -> int:
    """Features that ops give for ``width`` features."""
    return functools.reduce(lambda at, op: next_width_behind(op, at) or at, ops, width)


def placed(case: Case, ops: tuple[Op, ...], width: int) -> Case:
    """The case with other ops, between ops that ask for the casts at their ends."""
    rows = next((op.rows for op in ops if op.rows), case.rows)
    case = case.with_(ops=ops, rows=rows, before=(), after=())
    case = case.with_(width=None if width == 8 or insisted(case.chain_ops) else width)
    behind = width_behind(ops, width)
    if case.subject.passes == "backward" and is_cast(ops[0]):
        return case.with_(before=(Op(built_in.BasicLinear, min(width, 512), width),))
    if case.subject.passes == "forward" and is_cast(ops[-1]):
        return case.with_(after=(Op(built_in.BasicLinear, behind, min(behind, 512)),))
    return case


def matched(case: Case, ops: Sequence[BasicOperation] = ()) -> tuple[BasicOperation, ...]:
    """The ops that the fusion would replace, as its condition sees them: with their casts.

    They are of the case's ``ops``, or new ones.

    Raises:
        Declined: Nothing is cast where its pattern has a cast.
    """
    basic, recipe, start = ops or case.basic_ops(), case.recipe, len(case.before)
    stop = start + len(case.ops) - sum(map(is_cast, case.ops))
    if not case.edges:
        return tuple(basic[start:stop])
    env = environment(case.device, dtype=case.dtype, recipe=recipe)
    flags = (True,) * len(basic)
    needs = Needs(True, 0, flags, tuple((True,) * len(op.param_names or ()) for op in basic))
    with only():
        edges = edges_of(Chain(basic), env, needs, current.values._replace(recipe=recipe))
    begin, end = 2 * start + (not is_cast(case.ops[0])), 2 * stop + is_cast(case.ops[-1])
    view = edges.view(basic, case.subject.passes)
    found = [op for place, op in view.items() if begin <= place < end]
    if len(found) != len(case.ops):
        raise Declined("nothing is cast where its pattern has a cast")
    return tuple(found)


def environment(device: str, **changes: Any) -> Environment:
    """The environment of a plain training step, with the options of plugins that are in force."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    env = Environment(torch.device(device), capability, torch.float32, requires_grad=True)
    options = {name: value for name, value in current.options if "." in name}
    return env._replace(options=options, **changes)


# Ops of the classes of a pattern


class CubicActivation(built_in.Activation):
    """An activation unknown to every plugin: ``x + 0.1 x^3``."""

    number_names = ()

    def value(self, x: Tensor) -> Tensor:
        """The function."""
        return x + 0.1 * x**3

    def derivative(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return 1 + 0.3 * x**2


class CubicGLU(built_in.GatedActivation):
    """A gated activation unknown to every plugin."""

    number_names = ()
    value = CubicActivation.value
    derivative = CubicActivation.derivative


def classes_of(element: Any) -> list[type]:
    """The classes of ops to try for a pattern element; an abstract one needs a maker."""
    if isinstance(element, OneOf):
        return list(dict.fromkeys(cls for inner in element.elements for cls in classes_of(inner)))
    if isinstance(element, Subclasses):
        every = [getattr(built_in, name) for name in built_in.__all__ if name != "Cast"]
        every = [cls for cls in every if not getattr(cls, "needs_tools", ())]
        every.sort(key=lambda cls: cls not in (built_in.GELU, built_in.Bias))  # the usual first
        every = [element.cls, *every, CubicActivation, CubicGLU]
        return list(dict.fromkeys(cls for cls in every if issubclass(cls, element.cls)))
    return [element]


@functools.lru_cache(maxsize=4096)
def samples_of(cls: Any, width: int, out: int | None, makers: Any = ()) -> tuple[Op, ...]:
    """The ways to make an op of a class for an input of ``width`` features, the plainest first.

    They are what a suite says, or ``sample_inputs`` of the class, or what its constructor takes.

    Args:
        cls: The class.
        width: Features of the input.
        out: Features of the output, for an op that may give any number; it is made in one way.
        makers: Classes, and how a suite makes their ops.
    """
    if make := dict(makers).get(cls):
        made = make(width)
        return (made,) if isinstance(made, Op) else tuple(made)
    if cls is built_in.Cast:
        return (CAST,)
    offered = getattr(cls, "sample_inputs", lambda op, *features: ())(Op, width, out)
    if found := tuple(filter(makes, offered)):
        return found if out is None or found == samples_of(cls, width, None) else found[:1]
    return tuple(filter(makes, (Op(cls), Op(cls, width))))[:1]


# Chains of such ops


def structures(pattern: Sequence[Any]) -> Iterator[list[Any]]:
    """The pattern with each optional element and without, each repeated one once and twice."""

    def forms(element: Any) -> list[list[Any]]:
        if isinstance(element, Optional):
            return [[element.element], []]
        repeated = isinstance(element, OneOrMore)
        return [[element.element], [element.element] * 2] if repeated else [[element]]

    for chosen in itertools.product(*map(forms, pattern)):
        if flat := [*itertools.chain(*chosen)]:
            yield flat


def chains(
    case: Case,
    elements: Sequence[Any],
    width: int,
    out: int | None = None,
    one_by_one: bool = False,
) -> list[tuple[Op, ...]]:
    """Chains of one structure, the plainest one first.

    Then comes one for every other class and sample at every place. Where an element is repeated,
    all its places vary at once.

    Args:
        case: One of the fusion.
        elements: The structure.
        width: Features of the input.
        out: Features that matrix products give; None: as their samples have them.
        one_by_one: The places of a repeated element vary each alone, too.
    """

    @functools.cache
    def options(place: int, at: int) -> list[tuple[Op, int]]:
        """The ops that are possible at a place, and the width of each one's output."""
        classes = classes_of(elements[place])
        found = [op for cls in classes for op in samples_of(cls, at, out, case.subject.makers)]
        return [(op, behind) for op in found if (behind := next_width_behind(op, at)) is not None]

    def find(
        numbers: Mapping[int, int], chosen: tuple[Op, ...] = (), at: int = width
    ) -> tuple[Op, ...]:
        """The chain whose op at a place has this number among what is possible, if it fits.

        Without a number, it is the first op that fits.
        """
        if len(chosen) == len(elements):
            return chosen
        found = options(len(chosen), at)
        number = numbers.get(len(chosen))
        for op, behind in found if number is None else found[number : number + 1]:
            if rest := find(numbers, (*chosen, op), behind):
                return rest
        return ()

    made = {find({}): None}
    for _, group in itertools.groupby(range(len(elements)), lambda place: id(elements[place])):
        places = list(group)
        count = len(options(places[0], width))
        for number in range(count):
            together = find({place: (number + i) % count for i, place in enumerate(places)})
            made[together] = None
            if one_by_one or not together:
                made |= dict.fromkeys(find({place: number}) for place in places)
    return [*filter(None, made)]
