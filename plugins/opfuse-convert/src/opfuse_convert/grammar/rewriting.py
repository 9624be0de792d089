"""Rewrites a function so that a chain replaces some statements; the others stay as written."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any

from . import statements
from .reads import Attributes, Place
from .source import compiled_like, like
from .statements import TEMP

_SITE, _RESULT = f"{TEMP}site", f"{TEMP}result"
_GIVEN, _NOT_SET = f"{TEMP}given", f"{TEMP}not_set"


def rewritten(
    function: types.FunctionType, tree: ast.FunctionDef, spans: Sequence[Any], own: str, sites: Any
) -> Any:
    """Rewrite a function so that it asks a site before some statements.

    ``site(self, *assumed, *same, *entering)`` returns the results of the statements as a tuple, or
    None. With None, the statements run. Where only these take the result of a part, the part is
    looked up in ``site.lending(holder, self, *assumed)`` in place of its holder.

    Args:
        function: The function.
        tree: Its tree, which is changed.
        spans: A :class:`~opfuse_convert.grammar.stretches.Span` of statements for each site. Their
            bodies are lists of the tree. They share no statements.
        own: The name of ``self``.
        sites: The sites.
    """
    cells = {f"{_SITE}_{number}": site for number, site in enumerate(sites)}
    in_order = sorted(zip(spans, cells, strict=True), key=lambda pair: pair[0].numbers)
    for span, name in reversed(in_order):  # so that the numbers of statements before it stay
        _replace(span, own, name)
        if span.alone is not None:
            lend = ast.Attribute(_read(name), "lending", ast.Load())
            values = [span.alone.part.value, *map(_read, (own, *span.alone.assumed))]
            made = ast.copy_location(ast.Call(lend, values, []), span.alone.part)
            span.alone.part.value = ast.fix_missing_locations(made)
    return compiled_like(function, tree, **cells, **{_NOT_SET: UnboundLocalError})


def _replace(found: Any, own: str, site: str) -> None:
    """Ask a site, by its name, in front of the statements of a span."""
    (body, parts, _), first, last = found.block, found.first, found.last
    begin, end = found.numbers
    numbers = [n for n, (_, origin) in enumerate(parts) if begin <= origin <= end]
    ahead = [parts[n][0] for n in numbers if n < first]
    inside = [parts[n][0] for n in range(first, last + 1)]
    behind = [parts[n][0] for n in numbers if n > last]
    written = _freeing(inside) if ahead or behind else body[begin : end + 1]
    new = [*_freeing(ahead), *_asking(found, own, site, written, inside), *_freeing(behind)]
    for made in new:
        ast.copy_location(made, inside[0])
    body[begin : end + 1] = new


def _freeing(steps: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Add to each step the deletion of the temporary names that only it reads."""
    found: list[ast.stmt] = []
    for step in steps:
        found.append(step)
        if not isinstance(step, ast.Return):
            found += _deleting(_temps(statements.loads(step)), step)
    return found


def _temps(names: Any) -> list[str]:
    return sorted(name for name in names if name.startswith(TEMP))


def _deleting(names: Sequence[str], at: ast.stmt) -> list[ast.stmt]:
    if not names:
        return []
    made = ast.Delete([ast.Name(name, ast.Del()) for name in names])
    return [ast.copy_location(made, at)]


def _asking(
    found: Any, own: str, site: str, written: Sequence[ast.stmt], inside: Sequence[ast.stmt]
) -> list[ast.stmt]:
    given = [own, *found.assumed, *[n for names in found.same for n in names], *found.entering]
    values: list[ast.expr] = [_read(name) for name in given]
    asked: list[ast.stmt] = [_setting(_RESULT, ast.Call(_read(site), values, []))]
    if not found.is_sure:
        asked = _asking_if_set(site, values)
    names: list[ast.expr] = [ast.Name(name, ast.Store()) for name in found.results]
    made = {name for step in inside for name in statements.stores(step)}
    used = {name for step in inside for name in statements.loads(step)}
    freed = [*_temps(used - made), *found.gone]
    taken = ast.Assign([ast.Tuple(names, ast.Store())], _read(_RESULT))
    refused = ast.Compare(_read(_RESULT), [ast.Is()], [ast.Constant(None)])
    return [
        *asked,
        ast.If(refused, [*written], [taken, *_deleting(freed, inside[0])]),
        ast.Delete([ast.Name(_RESULT, ast.Del())]),
    ]


def _asking_if_set(site: str, values: Sequence[ast.expr]) -> list[ast.stmt]:
    """The call of the site, unless one of the names that it is given has no value."""
    made = _setting(_GIVEN, ast.Tuple([*values], ast.Load()))
    missing = ast.ExceptHandler(_read(_NOT_SET), None, [_setting(_RESULT, ast.Constant(None))])
    call = ast.Call(_read(site), [ast.Starred(_read(_GIVEN), ast.Load())], [])
    freed = ast.Delete([ast.Name(_GIVEN, ast.Del())])
    return [ast.Try([made], [missing], [_setting(_RESULT, call), freed], [])]


def _setting(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def unwrapped(function: Any) -> tuple[Any, list[Any], list[Place]]:
    """The function inside its decorators, the decorators from the outside, and the places."""
    around: list[Any] = []
    places = []
    while (inner := vars(function).get("__wrapped__")) is not None:
        cells = [c for c in function.__closure__ or () if _holds(c, inner)]
        if len(cells) != 1 or not isinstance(inner, types.FunctionType):
            break
        places.append(Place(Attributes(cells[0]), "cell_contents", inner, "what is decorated"))
        around.append(function)
        function = inner
    return function, around, places


def wrapped(function: Any, around: Sequence[Any]) -> Any:
    """Put decorators around another function."""
    for outer in reversed(around):
        inner = outer.__wrapped__
        cells = outer.__closure__
        closure = [types.CellType(function) if _holds(c, inner) else c for c in cells]
        function = like(outer, outer.__code__, closure)
    return function


def _holds(cell: types.CellType, value: Any) -> bool:
    return Attributes(cell).get("cell_contents", None) is value
