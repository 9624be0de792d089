"""Chains made from a fusion's pattern.

They cover every class, every optional element and every built-in activation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.engine.planner import rows_of
from ..core.extra_dtypes import kinds_of
from ..core.fusion import Fusion, OneOrMore, Optional
from ..core.quantization import Recipe, Usage
from .cases import Case, Op, Subject, is_cast, params_of
from .failures import Declined
from .placing import (
    Makers,
    classes_of,
    environment,
    matched,
    next_width_behind,
    placed,
    variants_of,
    width_behind,
)
from .recipes import recipes_for
from .running import separate
from .tensors import extra_shape, input_shapes

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


def structures(pattern: Sequence[Any]) -> Iterator[list[Any]]:
    """The pattern with each optional element and without, each repeated one once and twice."""
    choices = []
    for element in pattern:
        if isinstance(element, Optional):
            choices.append([[element.element], []])
        elif isinstance(element, OneOrMore):
            choices.append([[element.element], [element.element] * 2])
        else:
            choices.append([[element]])
    for chosen in itertools.product(*choices):
        flat = [element for part in chosen for element in part]
        if flat:
            yield flat


def chains(
    elements: Sequence[Any], width: int, makers: Makers, one_by_one: bool = False
) -> list[tuple[Op, ...]]:
    """Chains of one structure, the plainest one first.

    Then comes one for every other class and variant at every place. Where an element is repeated,
    all its places vary at once; ``one_by_one``: and each alone, too.
    """

    @functools.cache
    def options(place: int, at: int) -> list[tuple[Op, int]]:
        """The ops that are possible at a place, and the width of each one's output."""
        found = [op for cls in classes_of(elements[place]) for op in variants_of(cls, at, makers)]
        return [(op, behind) for op in found if (behind := next_width_behind(op, at)) is not None]

    def find(
        numbers: Mapping[int, int], chosen: tuple[Op, ...] = (), at: int = width
    ) -> list[tuple[Op, ...]]:
        """The chain whose op at a place has this number among what is possible.

        Without a number, it is the first op that fits.
        """
        if len(chosen) == len(elements):
            return [chosen]
        found = options(len(chosen), at)
        number = numbers.get(len(chosen))
        for op, behind in found if number is None else found[number : number + 1]:
            if rest := find(numbers, (*chosen, op), behind):
                return rest
        return []

    made = dict.fromkeys(find({}))
    for _, group in itertools.groupby(range(len(elements)), lambda place: id(elements[place])):
        places = list(group)
        count = len(options(places[0], width))
        for number in range(count):
            together = find({place: (number + i) % count for i, place in enumerate(places)})
            made |= dict.fromkeys(together)
            if one_by_one or not together:
                made |= dict.fromkeys(ops for place in places for ops in find({place: number}))
    return list(made)


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
    plain: tuple[Case, ...]
    all: tuple[Case, ...]
    models: tuple[Case, ...]
    tiles: tuple[Case, ...]
    residual: tuple[Case, ...]
    quantized: tuple[Case, ...]
    declined: dict[str, str] = dataclasses.field(compare=False)
    elsewhere: bool = False
    thorough: bool = False
    most_rows: int | None = None
    most_cases: int | None = None
    seen: dict[Case, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def make_chains(
    subject: Subject,
    device: str = "cpu",
    makers: Makers | None = None,
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
    makers = makers or {}
    subject = subject._replace(makers=tuple(makers.items()))
    prefer = "memory" if getattr(subject.fusion, "trades_time", False) else "speed"
    lone = Case(subject, (), device=device, prefer=prefer)
    recipes = recipes_for(subject.plugin) if recipes is None else recipes
    casts = getattr(subject.fusion, "names_casts", False)
    always = getattr(subject.fusion, "needs_recipe", False) and not casts
    places = itertools.product(examples, recipes if always else (None,))
    own = [lone.with_(ops=tuple(ops), recipe=recipe) for ops, recipe in places]
    kinds = "plain", "all", "models", "tiles", "residual", "quantized"
    found: dict[str, list[Case]] = {kind: [*own] if kind in kinds[:2] else [] for kind in kinds}
    found["quantized"] = [case.with_(recipe=recipe) for case in own for recipe in recipes]
    declined, elsewhere = {}, False
    widths = WIDTHS_OF_MODELS + (MORE_WIDTHS_OF_MODELS if thorough else ())
    pattern = subject.fusion.pattern if isinstance(subject.fusion, Fusion) else ()
    last: list[Any] = []
    for elements, recipe in _structures_and_recipes(pattern, recipes, always):
        reason: str | None = "no op could be made; tell how with `makers`"
        wishes = [(prefer, None), ("memory", None), *((prefer, how) for how in _HOW)]
        tried = itertools.product(dict.fromkeys(wishes), DTYPES, _shapes(subject.fusion, recipe))
        refused: list[Case] = []
        takes = set[Any]()  # where the condition does, and the separate ops refuse the plainest
        for (wish, how), dtype, (rows, width) in tried:
            where = wish, how, dtype
            whole = (rows, width) in SHAPES_OF_RECIPES  # blocks may have to be
            small = rows not in MORE_ROWS and width <= WIDTHS[3]
            if where in takes and not (small if recipe is None else whole):
                continue
            least = rows[0] if rows != (3,) else 1
            base = lone.with_(rows=rows, dtype=dtype, recipe=recipe, least=least, prefer=wish)
            cases = [placed(base, ops, width) for ops in chains(elements, width, makers, thorough)]
            cases = [*map(how, cases)] if how else cases
            if where in takes and cases and refusal(cases[0]) is not None:
                continue
            taken = (case for case in cases if refusal(case, runs=True) is None)
            accepted = [*itertools.dropwhile(_declined, taken)]  # the ops run the first
            if accepted:
                at = 2 * width - 1
                odd = [placed(base, ops, at) for ops in chains(elements, at, makers)[:1]]
                again, last = elements is last, elements  # under another recipe
                found["quantized"] += _quantized(accepted[0], elements, recipes)
                if again and always:  # it casts nothing: all recipes are alike
                    break
                found["plain"].append(accepted[0])
                if sum(op.cls is built_in.GroupedLinear for op in accepted[0].ops) > 1:
                    odd.append(accepted[0].with_(shared=False))
                found["all"] += accepted[:1] if again else accepted
                found["all"] += [case for case in odd if refusal(case, runs=True) is None]
                found["residual"] += _residual(accepted[0], elements)
                for width in () if again else widths:
                    found["models"] += _as_in_models(accepted[0], elements, width)
                for number, width in enumerate(() if again else TILES):
                    high = _as_in_models(accepted[0], elements, width)
                    found["tiles"] += [case.with_(rows=(width,)) for case in high]
                    some = chains(elements, width, makers)
                    some[1:] = some[1:] if thorough else some[1 + number :: len(TILES)]
                    wide = [placed(base, ops, width) for ops in some]
                    found["tiles"] += [case for case in wide if refusal(case, runs=True) is None]
                break
            refused += cases[:1]
            takes |= {where for case in cases[:1] if refusal(case, runs=True) is None}
            if len(refused) == 1:  # the plainest
                reason = refusal(cases[0])
        else:
            elsewhere = elsewhere or (device == "cpu" and any(map(_taken_by_a_gpu, refused)))
            names = [getattr(element, "__name__", str(element)) for element in elements]
            names += [f"under {type(recipe).__name__}"] if recipe is not None else []
            declined[" + ".join(names)] = str(reason)
    made_of: Any = {kind: tuple(dict.fromkeys(found[kind])) for kind in kinds}
    elsewhere = elsewhere and not found["all"]
    return Chains(subject, declined=declined, elsewhere=elsewhere, thorough=thorough, **made_of)


def _shapes(fusion: Any, recipe: Recipe | None) -> Sequence[tuple[tuple[int, ...], int]]:
    """Rows and widths to try: more rows for a condition that asks for their number."""
    asks = getattr(fusion, "needs_rows", False) or getattr(fusion, "needs_row_alignment", False)
    usual = SHAPES if recipe is None else SHAPES_OF_RECIPES
    return (*usual, *itertools.product(MORE_ROWS if asks else (), WIDTHS))


def _behind_a_linear(case: Case) -> Case:
    """The case behind an op by which the number of features is known while planning."""
    width = case.first_width()
    return case.with_(before=(Op(built_in.BasicLinear, width, width), *case.before))


def _with_frozen(case: Case) -> Case:
    """The case with frozen parameters, for a fusion that is of no use in training."""
    return case.with_(frozen=tuple(_parts_of(case.with_(**_SAME))[1]))


_HOW = (_with_frozen, _behind_a_linear)
"""Ways to make a case that some conditions ask for."""


def _taken_by_a_gpu(case: Case) -> bool:
    """Whether some GPU takes it, or will once measured, if a measurement is not all that lacks."""
    speeds = (None, math.inf)[: 1 + (refusal(case, runs=True, measured=math.inf) is not None)]
    return _by_a_gpu(case.with_(dtype=torch.bfloat16), speeds)


@functools.lru_cache(maxsize=1024)
def _by_a_gpu(case: Case, speeds: tuple[float | None, ...]) -> bool:
    gpu, places = torch.device("cuda"), itertools.product(((8, 0), (9, 0), (10, 0)), speeds)
    return None in (refusal(case, True, device=gpu, capability=c, measured=s) for c, s in places)


def fitted(case: Case) -> Case:
    """The case with as many times the rows as its fusion needs, if it takes no fewer."""
    if case.least == 1 or refusal(case, runs=True) is None:
        return case
    first, *rest = case.rows or (1,)
    return case.with_(rows=(first * case.least, *rest))


def _structures_and_recipes(
    pattern: Sequence[Any], recipes: Sequence[Recipe], always: bool
) -> Iterator[tuple[list[Any], Recipe | None]]:
    """The structures of a pattern; one with a cast once for each recipe, or there is none.

    ``always``: once for each recipe, since the fusion is of use under one only.
    """
    for elements in structures(pattern):
        casts = always or any(built_in.Cast in classes_of(element) for element in elements)
        yield from ((elements, recipe) for recipe in (recipes if casts else (None,)))


def _quantized(case: Case, elements: Sequence[Any], recipes: Sequence[Recipe]) -> Iterator[Case]:
    """A case between linears that quantize; in fp64, where a last bit hardly moves a code.

    There is one for each recipe, with as many rows and features as that takes.
    """
    exact = case.with_(dtype=torch.float64)
    case = exact if refusal(exact) is None else case
    if case.recipe is not None:
        yield case
        return
    width = case.first_width()
    for recipe in recipes:
        for rows, at in ((case.rows, width), *SHAPES_OF_RECIPES):
            made = [case.ops] if at == width else chains(elements, at, dict(case.subject.makers))
            ops = next(iter(made), ())
            behind = width_behind(ops, at)
            found = case.with_(ops=ops, rows=rows, recipe=recipe)
            before, after = (Op(built_in.BasicLinear, size, size) for size in (at, behind))
            found = found.with_(before=(before,), after=(after,))
            if not _declined(found):
                yield found
                break


def _as_in_models(case: Case, elements: Sequence[Any], width: int) -> Iterator[Case]:
    """Cases that are ``width`` wide, before or after a matrix product.

    On its other side they are as wide as usual.
    """
    usual = case.first_width()
    for first, behind in ((width, usual), (usual, width)):
        for ops in chains(elements, first, {**_products(behind), **dict(case.subject.makers)})[:1]:
            wide = first == width or any(width in op.args for op in ops)
            if wide and refusal(found := placed(case, ops, first), runs=True) is None:
                yield found


def _products(out: int) -> Makers:
    """How to make matrix products that give ``out`` features."""
    parts = out - out // 4, out // 4
    linear, beside = functools.partial(Op, built_in.BasicLinear), built_in.ParallelLinear
    return {
        built_in.BasicLinear: lambda at: linear(at, out),
        built_in.LowRankLinear: lambda at: Op(built_in.LowRankLinear, at, out, 2),
        beside: lambda at: Op(beside, tuple(linear(at, part) for part in parts)),
        built_in.GroupedLinear: lambda at: Op(built_in.GroupedLinear, 3, at, out),
    }


def _residual(case: Case, elements: Sequence[Any]) -> Iterator[Case]:
    """Cases whose extra input is the chain's own input, out of a channel.

    Linears are square, so that shapes fit.
    """
    width = case.first_width()
    for ops in chains(elements, width, {**dict(case.subject.makers), **_products(width)}):
        reads = [i for i, op in enumerate(ops) if op.cls.num_extra_inputs]
        forks = [i for i, op in enumerate(ops) if op.cls.num_extra_outputs]
        if not reads or (forks and forks[0] >= reads[0]):
            continue
        found = placed(case, ops, width)
        forked = () if forks else (Op(built_in.MakeExtraOutput),)
        found = found.with_(before=(*forked, *found.before))
        shape, basic = (*found.rows, found.first_width()), found.basic_ops()
        shapes = set()
        for op, at in zip(basic, input_shapes(basic, shape), strict=True):
            kinds = enumerate(kinds_of(op))
            shapes |= {extra_shape(op, at, k) for k, kind in kinds if kind == "floating"}
        if shapes == {shape} and refusal(found.with_(residual=True)) is None:
            yield found.with_(residual=True)


_SAME: Any = dict(rows=(), dtype=torch.float32, frozen=(), recipe=None, prefer="speed", least=1)
"""What changes no op of a case."""


@functools.lru_cache(maxsize=512)
def _parts_of(case: Case) -> tuple[list[Any], dict[str, Any], int | None]:
    """Ops for conditions, which leave them as they are, their parameters, and the features."""
    basic = case.basic_ops()
    named = enumerate(map(params_of, basic))
    params = {f"{number}.{name}": param for number, of in named for name, param in of.items()}
    return basic, params, Chain(basic).widths[len(case.before)]


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
    fusion = case.subject.fusion
    if not isinstance(fusion, Fusion):
        return None
    basic, params, features = _parts_of(case.with_(**_SAME))
    for name, param in params.items():
        param.requires_grad_(name not in case.frozen)
    wanted = {"row_alignment": fusion.needs_row_alignment, "rows": fusion.needs_rows}
    names = [name for name, needed in wanted.items() if needed]
    of_rows = rows_of((*names,), torch.empty(*case.rows, 0, device="meta"))
    facts: Any = dict(zip(names, of_rows, strict=True), dtype=case.dtype, recipe=case.recipe)
    env = environment(case.device, features=features, **facts)._replace(**changes)
    if case.prefer != "speed":
        env = env._replace(options={**env.options, "prefer": case.prefer})
    try:
        ops = matched(case, basic)
        answer = True if fusion.when is None else fusion.when(ops, env)
        if isinstance(answer, str) and answer:
            return answer
        benefit = fusion.benefit_of(ops, env)
        if benefit < 0:
            return f"it declares a benefit of {benefit:g}"
        return None if runs else _declined(case)
    except Declined as reason:
        return str(reason)
    except Exception:  # the check of the condition is going to tell
        return None


@functools.cache
def neighbours(case: Case) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """An op for the place before, and one for after, that no match of the fusion includes."""
    fusion = case.subject.fusion
    for op in (Op(built_in.ConstantScale, 2.0), Op(built_in.SiLU), Op(built_in.L2Normalization)):
        around = (op, *case.before, *case.ops, *case.after, op)
        basic = [built_in.Cast(None, Usage()) if is_cast(op) else op() for op in around]  # type: ignore[arg-type]
        if not isinstance(fusion, Fusion):
            return (op,), (op,)
        ends = [(start, end) for start in range(len(basic)) for end in fusion.match(basic, start)]
        if all(start and end < len(basic) for start, end in ends):
            return (op,), (op,)
    return (), ()
