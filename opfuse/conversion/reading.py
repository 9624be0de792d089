"""What the code of a forward does that a graph would lose, read from its instructions."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_FILLING = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS", "MAKE_CELL", "PRECALL"}
_REFUSED = {  # instructions, and what they do
    "STORE_ATTR": "it sets attributes",
    "DELETE_ATTR": "it sets attributes",
    "STORE_GLOBAL": "it sets globals",
    "STORE_SUBSCR": "it writes into what it indexes",
    "DELETE_SUBSCR": "it writes into what it indexes",
    "STORE_DEREF": "it sets variables of a function around it",
    "BEFORE_WITH": "it enters contexts",
    "SETUP_WITH": "it enters contexts",
    "SETUP_FINALLY": "it catches exceptions",
    "LOAD_SPECIAL": "it enters contexts",
    "PUSH_EXC_INFO": "it catches exceptions",
    "IMPORT_NAME": "it imports",
    "YIELD_VALUE": "it is a generator",
}
_ASKS = {"isinstance", "issubclass", "type", "id", "getattr", "setattr", "delattr", "vars", "print"}
_ASKS |= {"open", "input", "globals", "locals", "eval", "exec", "callable", "iter", "next"}
_CALLS = {"append", "extend", "update", "setdefault", "pop", "popitem", "insert", "remove"}
_CALLS |= {"clear", "write", "item", "tolist", "numpy", "get", "data_ptr", "__setattr__"}
_SIZES = {"shape", "size", "stride"}
TRUSTED = "torch", "transformers", "math", "opfuse"


class Read(NamedTuple):
    """What a forward and its helpers read.

    Attributes:
        names: All names that their code looks up.
        globals: The numbers and functions among their globals and closures: in which dict, under
            which name, and the value.
    """

    names: set[str]
    globals: list[tuple[Any, str, Any]]


class Untraceable(RuntimeError):
    """A forward that no graph can stand for; the message is the end of a sentence."""


def read(forward: Any, cls: type) -> Read:
    """Read the code of a forward, of what it wraps, and of the methods of its class that it calls.

    Functions of torch and transformers are taken for what they are.

    Raises:
        Untraceable: What it does cannot be in a graph.
    """
    found = Read(set(), [])
    seen: set[Any] = set()
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        code = getattr(function, "__code__", None)
        if code is None:
            raise Untraceable("its code cannot be read")
        found.names.update(code.co_names)
        if wrapped := getattr(function, "__wrapped__", None):
            waiting.append(wrapped)
        home = (getattr(function, "__module__", "") or "").partition(".")[0]
        if home in TRUSTED[:2] and function is not forward:
            continue
        inner = [code]  # and the functions and comprehensions in it
        for part in inner:
            inner += [each for each in part.co_consts if isinstance(each, types.CodeType)]
            found.names.update(part.co_names)
            _check(part, trusted=home in TRUSTED and wrapped is not None)
        waiting += _helpers(function, code, cls, found)
    return found


def _check(code: types.CodeType, trusted: bool) -> None:
    """Raise what is wrong with the instructions of a function."""
    if trusted:  # a decorator of a library
        return
    steps = [step for step in dis.get_instructions(code) if step.opname not in _FILLING]
    kept = _never_set(code, steps)
    for i, step in enumerate(steps):
        if step.opname in _REFUSED:
            raise Untraceable(_REFUSED[step.opname])
        if step.opname.startswith("MATCH_"):
            raise Untraceable("it matches patterns")
        before = steps[i - 1] if i else step
        if step.opname == "IS_OP" or step.opname.endswith(("IF_NONE", "IF_NOT_NONE")):
            of_none = step.opname != "IS_OP"
            if not of_none and before.opname == "LOAD_CONST" and before.argval is None and i > 1:
                before, of_none = steps[i - 2], True
            own = code.co_varnames[:1]
            if not of_none or not _is_known(steps, steps.index(before), kept, own):
                raise Untraceable("it tests the identity of a value (is, is not)")
        if (
            step.opname == "UNPACK_SEQUENCE"
            and {s.argval for s in steps[max(i - 3, 0) : i]} & _SIZES
        ):
            raise Untraceable("it takes a shape apart")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in _ASKS:
            raise Untraceable(f"it calls {step.argval}()")
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _CALLS:
            raise Untraceable(f"it may call .{step.argval}()")


def _never_set(code: types.CodeType, steps: list[dis.Instruction]) -> set[str]:
    """The parameters of a function that keep the value that the caller gave."""
    count = code.co_argcount + code.co_kwonlyargcount
    written = [_variables(step) for step in steps if "STORE_FAST" in step.opname]
    return set(code.co_varnames[:count]) - {name for names in written for name in names}


def _variables(step: dis.Instruction) -> tuple[Any, ...]:
    """The variables of an instruction, the one that is on top at last; some have two."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _is_known(steps: list[dis.Instruction], i: int, kept: set[str], own: tuple[str, ...]) -> bool:
    """Whether what is compared with None is a parameter as it came, or an attribute of ``own``."""
    step = steps[i]
    if step.opname.startswith("LOAD_FAST"):
        return _variables(step)[-1] in kept
    while i and steps[i].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        i -= 1
    return steps[i].opname.startswith("LOAD_FAST") and _variables(steps[i])[-1:] == own


def _helpers(function: Any, code: types.CodeType, cls: type, found: Read) -> Iterator[Any]:
    """The functions that a function may call; notes what else it reads from outside."""
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    cells = {name: cell for name, cell in closure if name != "__class__"}
    loads = [step for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    outside = [(function.__globals__, step.argval) for step in loads]
    for where, name in [*outside, *[(cells, name) for name in cells]]:
        try:
            value = where[name].cell_contents if where is cells else where[name]
        except (KeyError, ValueError):
            continue
        if isinstance(value, (types.ModuleType, type, torch.dtype)):
            continue
        if isinstance(value, (list, dict, set, Tensor, nn.Module)):
            raise Untraceable(f"it reads {name}, which may change")
        if where is not cells:
            found.globals.append((where, name, value))
        if inspect.isfunction(value):
            yield value
    for name in code.co_names:
        value = inspect.getattr_static(cls, name, None)
        value = getattr(value, "__func__", value)
        is_own = inspect.isfunction(value) and not hasattr(nn.Module, name)
        if isinstance(value, property):
            yield value.fget
        elif is_own and name != "forward":
            yield value


def only_passes_on(forward: Any) -> bool:
    """Whether a forward does nothing with its ``**kwargs`` but hand them to what it calls."""
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is None:
            return False
        if code.co_flags & inspect.CO_VARKEYWORDS:
            name = code.co_varnames[
                code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            ]
            steps = [i for i in dis.get_instructions(code) if i.opname not in _FILLING]
            for i, step in enumerate(steps):
                if name in _variables(step) and not _hands_on(steps, i):
                    return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _hands_on(steps: list[dis.Instruction], i: int) -> bool:
    """Whether the value that an instruction loads goes into the keywords of a call."""
    loads = steps[i].opname.startswith("LOAD_FAST")
    return (
        loads and i + 1 < len(steps) and steps[i + 1].opname in ("DICT_MERGE", "CALL_FUNCTION_EX")
    )


def changed(globals_: list[tuple[Any, str, Any]]) -> str:
    """Which of the globals that a forward reads is another one now; ``""``: none."""
    for where, name, value in globals_:
        now = where.get(name)
        if now is not value and now != value:
            return f"{name}, which its forward reads, is another one now"
    return ""
