"""What a module's forward computes of its children, as a graph of torch.fx."""

from __future__ import annotations

import dis
import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

REST = "opfuse_rest"
"""The keyword that stands for those that a forward passes on by ``**kwargs``."""

_lock = threading.RLock()  # tracing patches torch.nn.Module for a moment


class Untraceable(RuntimeError):
    """A forward that no graph can stand for; the message is the end of a sentence."""


def parameters_of(forward: Any) -> list[inspect.Parameter]:
    """The parameters of a forward, without ``self``."""
    return list(inspect.signature(forward).parameters.values())[1:]


def kind_of(value: Any) -> Any:
    """What of an argument a trace depends on: that it is a tensor or an object, or its value."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    return Tensor if isinstance(value, Tensor) else object


def trace(module: nn.Module, forward: Any, kinds: Mapping[str, Any], rest: bool) -> fx.Graph:
    """The graph of one way through a forward; every child is a leaf in it.

    Args:
        module: The module.
        forward: The function of its class.
        kinds: For each parameter but ``self``, by name, :func:`kind_of` of what it is given. What
            is no plain value becomes a placeholder.
        rest: Whether further keyword arguments are given; they are one placeholder, named
            :data:`REST`.

    Raises:
        Untraceable: The forward looks at values of tensors, or does what a graph cannot hold.
    """
    with _lock:
        try:
            return _Tracer(forward, kinds, rest).trace(module)
        except Exception as error:
            raise Untraceable(_told(error)) from error


_KNOWN = {
    "used as inputs to control flow": "it branches on values of tensors",
    "cannot be iterated": "it takes a tensor apart that it does not know the size of",
    "missing the required": "it has none of its own",
}


def _told(error: Exception) -> str:
    """Why a forward could not be traced, in few words."""
    text = " ".join(str(error).split())
    known = [words for part, words in _KNOWN.items() if part in text]
    return known[0] if known else f"{type(error).__name__}: {text[:100]}"


class _Tracer(fx.Tracer):
    def __init__(self, forward: Any, kinds: Mapping[str, Any], rest: bool) -> None:
        super().__init__()
        self._of = forward, kinds, rest

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every one: who reads the graph looks into them."""
        return True

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The function to trace, and what it gets: the module."""
        forward, kinds, rest = self._of

        def placeholder(name: str) -> fx.Proxy:
            return self.create_proxy("placeholder", name, (), {})

        given = {
            name: kind[1] if isinstance(kind, tuple) else placeholder(name)
            for name, kind in kinds.items()
        }
        if rest:
            given[REST] = placeholder(REST)
        keywords = {p.name for p in parameters_of(forward) if p.kind is p.KEYWORD_ONLY} | {REST}

        def traced(root: nn.Module) -> Any:
            places = [value for name, value in given.items() if name not in keywords]
            return forward(root, *places, **{n: v for n, v in given.items() if n in keywords})

        return traced, [self.root]


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
                if name in _names_of(step) and not _hands_on(steps, i):
                    return False
        forward = getattr(forward, "__wrapped__", None)
    return True


_FILLING = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"}


def _names_of(step: dis.Instruction) -> tuple[Any, ...]:
    """The variables that an instruction reads or writes; some have two."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _hands_on(steps: list[dis.Instruction], i: int) -> bool:
    """Whether the value that an instruction loads goes into the keywords of a call."""
    loads = steps[i].opname.startswith("LOAD_FAST")
    return (
        loads and i + 1 < len(steps) and steps[i + 1].opname in ("DICT_MERGE", "CALL_FUNCTION_EX")
    )


def names_read(forward: Any) -> set[str]:
    """The names that the code of a function, and what it wraps, looks up."""
    names: set[str] = set()
    while forward is not None:
        code = getattr(forward, "__code__", None)
        names |= set(code.co_names) if code is not None else set()
        forward = getattr(forward, "__wrapped__", None)
    return names


def plain_read(module: nn.Module, names: set[str]) -> list[str]:
    """Those names that are attributes of a module, with numbers and the like as values."""
    found = [name for name in names if name != "training" and hasattr(module, name)]
    return sorted(n for n in found if isinstance(kind_of(getattr(module, n)), tuple))


def compiled(graph: fx.Graph) -> Any:
    """A function ``(module, *values)`` that runs a graph, one value for each placeholder."""
    code = graph.python_code("self")
    source = code.src.replace(f"{REST} = {REST}", f"**{REST}")
    scope = dict(code.globals)
    exec(source, scope)  # what torch.fx itself does
    return scope["forward"]
