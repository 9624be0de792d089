"""The source of a function, if it is the one that was compiled."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Sequence
from typing import Any

_FLAGS = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_SAME = """
co_code co_names co_varnames co_freevars co_cellvars co_argcount co_posonlyargcount
co_kwonlyargcount co_exceptiontable
""".split()


class Unreadable(Exception):
    """The sentence that says what cannot be read."""


def result_of_call(what: str, function: Any, *args: Any) -> Any:
    """The result of a function.

    Raises:
        Unreadable: The function raises an error.
    """
    try:
        return function(*args)
    except Exception as error:
        raise Unreadable(f"{what} raises {type(error).__name__}") from error


def tree_of(function: Any) -> ast.FunctionDef:
    """The syntax tree of a function. It is shared: copy it before you change it.

    Its source counts only if compiling it gives this very function's code. A decorated function is
    the one that the decorator returned. A file may have been edited since.

    Raises:
        Unreadable: There is no such source.
    """
    if not isinstance(function, types.FunctionType):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise Unreadable(f"{name} is not a function whose code can be read")
    found = _read(function.__code__, _qualname(function))
    if isinstance(found, str):
        raise Unreadable(found)
    return found


@functools.lru_cache(maxsize=1024)
def _read(code: types.CodeType, qualname: str) -> ast.FunctionDef | str:
    name = code.co_name
    try:
        lines, _ = inspect.getsourcelines(code)
        above = "if 1:\n" * lines[0].startswith((" ", "\t"))
        tree = ast.parse(above + "".join(lines))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return f"{name} has no source"
    found: Any = tree.body[0] if tree.body else None
    if above:
        found = found.body[0]
    if not isinstance(found, ast.FunctionDef) or found.name != name:
        return f"{name} has no source of its own"
    found.decorator_list = []
    ast.increment_lineno(found, code.co_firstlineno - 1 - bool(above))
    try:
        compiled = _compiled(found, code, qualname)
    except (SyntaxError, ValueError):
        return f"{name} has no source of its own"
    if compiled is None or not _is_same(compiled, code):
        return f"the source of {name} is not what was compiled"
    return found


def compiled_like(function: types.FunctionType, tree: ast.FunctionDef, **cells: Any) -> Any:
    """A function of another tree, with the globals, defaults and variables of a function.

    Args:
        function: The function.
        tree: The tree; its signature is that of the function.
        **cells: Further variables that it reads as those of an enclosing function.
    """
    code = _compiled(tree, function.__code__, _qualname(function), tuple(cells))
    assert code is not None
    own = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = [own[n] if n in own else types.CellType(cells[n]) for n in code.co_freevars]
    return like(function, code, closure)


def like(function: types.FunctionType, code: types.CodeType, closure: Sequence[Any]) -> Any:
    """A function with other code and another closure; everything else is that of a function."""
    given = function.__globals__, function.__name__, function.__defaults__, tuple(closure)
    made = types.FunctionType(code, *given)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__
    return made


def _qualname(function: types.FunctionType) -> str:
    return getattr(function.__code__, "co_qualname", function.__qualname__)


def _compiled(
    tree: ast.FunctionDef, code: types.CodeType, qualname: str, more: tuple[str, ...] = ()
) -> types.CodeType | None:
    """Compile a tree inside the class of a function, with the variables around that function."""
    inner = copy.copy(tree)
    inner.args = copy.deepcopy(tree.args)
    of = inner.args
    for each in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
        if each is not None:
            each.annotation = None
    inner.returns = None
    inner.args.defaults = [ast.Constant(None) for _ in inner.args.defaults]
    inner.args.kw_defaults = [d and ast.Constant(None) for d in inner.args.kw_defaults]
    around = qualname.split(".")[-2:-1]
    within: Any = inner
    if around and around[0] != "<locals>":
        within = ast.ClassDef(around[0], [], [], [inner], [])
    names = [name for name in (*code.co_freevars, *more) if name != "__class__"]
    cells = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    outer = ast.FunctionDef("outer", cells, [within], [])
    if hasattr(outer, "type_params"):  # from Python 3.12 on
        for node in (outer, within):
            node.type_params = getattr(node, "type_params", [])
    # a method of what is imported is called by other instructions than one of another value
    imported = [ast.ImportFrom("_", [ast.alias(n) for n in _imported(code.co_filename)], 0)]
    body: list[ast.stmt] = [*imported, outer] if imported[0].names else [outer]
    module = ast.fix_missing_locations(ast.Module(body, []))
    flags = code.co_flags & _FLAGS
    made: Any = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in [name for name in ("outer", *around, code.co_name) if name != "<locals>"]:
        inner_codes = [c for c in made.co_consts if isinstance(c, types.CodeType)]
        made = next((c for c in inner_codes if c.co_name == name), None)
        if made is None:
            return None
    return made  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _imported(path: str) -> tuple[str, ...]:
    """The names that a file imports outside its functions and classes."""
    names: dict[str, None] = {}
    try:
        waiting: list[Any] = [*ast.parse("".join(linecache.getlines(path))).body]
    except SyntaxError:  # code in a page of text
        return ()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(each.asname or each.name).partition(".")[0]: None for each in node.names}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            waiting += [h for h in getattr(node, "handlers", ())]
    return tuple(name for name in names if name != "*")


def _is_same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two codes do the same, whatever their lines are."""
    if any(getattr(a, name, None) != getattr(b, name, None) for name in _SAME):
        return False
    same_length = len(a.co_consts) == len(b.co_consts)
    return same_length and all(map(_is_same_constant, a.co_consts, b.co_consts))


def _is_same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
        return _is_same(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, str) and "<locals>." in a and not hasattr(types.CodeType, "co_qualname"):
        # before Python 3.11 the qualified name of an inner function is a constant of the outer one
        return bool(a.rpartition("<locals>.")[2] == b.rpartition("<locals>.")[2])
    return repr(a) == repr(b) if not isinstance(a, frozenset) else a == b
