"""What a module's forward computes of its children, as a graph of torch.fx."""

from __future__ import annotations

import collections
import copy
import inspect
import operator
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..overrides import BESIDE, op_class
from .layers import layered
from .reading import TRUSTED, Untraceable, read

REST = "opfuse_rest"
"""The keyword that stands for those that a forward passes on by ``**kwargs``."""


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
    try:
        if any(p.kind is p.VAR_POSITIONAL for p in parameters_of(forward)):
            raise Untraceable("it takes any number of arguments")
        read(forward, op_class(module))
        return _traced(module, forward, kinds, rest)
    except Exception as error:
        raise Untraceable(_told(error)) from error


_KNOWN = {
    "used as inputs to control flow": "it branches on values of tensors",
    "cannot be iterated": "it takes a tensor apart that it does not know the size of",
    "missing the required": "it has none of its own",
    "got multiple values for": "functions around it give it more arguments",
}


def _told(error: Exception) -> str:
    """Why a forward could not be traced, in few words."""
    text = " ".join(str(error).split())
    if isinstance(error, Untraceable):
        return text
    known = [words for part, words in _KNOWN.items() if part in text]
    return known[0] if known else f"{type(error).__name__}: {text[:100]}"


class _Tracer(fx.Tracer):
    """Refuses what a graph would lose."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.root, self.graph = module, fx.Graph()
        self._modes = _modes()

    def create_arg(self, a: Any) -> Any:
        """As there, but a tensor that is no parameter would be a constant."""
        if isinstance(a, Tensor):
            raise Untraceable("it makes tensors of its own")
        for kind in (dict, list, tuple):  # one of a class of its own would become one
            if isinstance(a, kind) and type(a) is not kind and not hasattr(a, "_fields"):
                raise Untraceable(f"it makes an object, {type(a).__name__}")
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any) -> fx.Node:
        """As there, but every node runs in the caller's modes, and writes into nothing."""
        if _modes() != self._modes:
            raise Untraceable("it switches gradients or autocast on or off")
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        is_method = kind == "call_method" and name.endswith("_") and not name.endswith("__")
        is_function = kind == "call_function" and (
            target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        )
        if is_method or is_function or kwargs.get("inplace") or "out" in kwargs:
            raise Untraceable(f"it writes into tensors ({name})")
        return super().create_node(kind, target, args, kwargs, *more)


_IN_PLACE = {
    getattr(operator, n) for n in operator.__all__ if n.startswith("i") and n[1:] in vars(operator)
}
_IN_PLACE |= {operator.setitem, operator.delitem}


class _NothingComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which no operation runs: what a graph does not show would be a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Untraceable(f"it computes with tensors of its own ({func})")


def _modes() -> tuple[Any, ...]:
    """What the operations of a forward depend on beside their arguments."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _drawn() -> tuple[Any, ...]:
    """The states of random number generators."""
    numpy: Any = sys.modules.get("numpy.random")
    state = bytes(numpy.get_state()[1]) if numpy else b""
    return random.getstate(), bytes(torch.get_rng_state().tolist()), state


def _traced(module: nn.Module, forward: Any, kinds: Mapping[str, Any], rest: bool) -> fx.Graph:
    tracer = _Tracer(module)
    tracer.graph.constants = []  # type: ignore[attr-defined]  # of children, which it read
    given: dict[str, Any] = {
        name: kind[1]
        if isinstance(kind, tuple)
        else tracer.create_proxy("placeholder", name, (), {})
        for name, kind in kinds.items()
    }
    if rest:
        given[REST] = tracer.create_proxy("placeholder", REST, (), {})
    keywords = {p.name for p in parameters_of(forward) if p.kind is p.KEYWORD_ONLY} | {REST}
    places = [value for name, value in given.items() if name not in keywords]
    named = {name: value for name, value in given.items() if name in keywords}
    stand, drawn = _stand_in(tracer, module), _drawn()
    before = {name: _content(value) for name, value in vars(stand).items()}
    with _NothingComputed():  # type: ignore[no-untyped-call]
        result = forward(stand, *places, **named)
    if {name: _content(value) for name, value in vars(stand).items()} != before:
        raise Untraceable("it sets attributes of the module")
    if _drawn() != drawn:
        raise Untraceable("it draws random numbers")
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    return tracer.graph


def _stand_in(tracer: fx.Tracer, module: nn.Module) -> Any:
    """What a forward gets as ``self``: its children and parameters write into the graph.

    ``torch.fx`` itself puts other methods on ``torch.nn.Module`` while it traces, which every
    thread would run.
    """
    # of the class that a conversion makes, so that what else derives from the module's is not on
    # top, such as the checkpointing that transformers puts into every subclass
    cls: Any = type(module)
    stand: Any = object.__new__(layered(cls))
    containers = list, dict, set, collections.OrderedDict, collections.deque
    vars(stand).update(
        {k: copy.copy(v) if type(v) in containers else v for k, v in vars(module).items()}
    )
    vars(stand).pop(BESIDE, None)
    vars(stand)["_modules"] = {
        name: child and _Child(tracer, name, child) for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        vars(stand)[kind] = {
            name: None if tensor is None else _tensor(tracer, name)
            for name, tensor in getattr(module, kind).items()
        }
    return stand


def _content(value: Any) -> Any:
    """What of an attribute a forward may have changed: the objects in a container, or itself."""
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return [*map(id, value)] if isinstance(value, (list, set, collections.deque)) else id(value)


def _tensor(tracer: fx.Tracer, path: str) -> fx.Proxy:
    return tracer.create_proxy("get_attr", path, (), {})


class _Child:
    """A child of the module whose forward is traced, or of a child: calling it makes a node."""

    def __init__(self, tracer: fx.Tracer, path: str, module: nn.Module) -> None:
        self._of = tracer, path, module

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        tracer, path, module = self._of
        if getattr(module, "inplace", False):
            raise Untraceable(f"{path} writes into its input")
        return tracer.create_proxy("call_module", path, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        tracer, path, module = self._of
        value = getattr(module, name)
        if isinstance(value, nn.Module):
            return _Child(tracer, f"{path}.{name}", value)
        if isinstance(value, Tensor):
            return _tensor(tracer, f"{path}.{name}")
        if inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
            raise Untraceable(f"it calls {path}.{name}()")
        if isinstance(value, (list, dict, set)) or not isinstance(kind_of(value), tuple):
            raise Untraceable(f"it reads {path}.{name}, which may change")
        tracer.graph.constants.append((path, name))  # type: ignore[attr-defined]
        return value

    def __len__(self) -> int:
        return len(self._of[2])  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._of[2])

    def __getitem__(self, key: Any) -> _Child:
        tracer, path, module = self._of
        found = module[key]  # type: ignore[index]
        names = [name for name, child in module.named_children() if child is found]
        return _Child(tracer, f"{path}.{names[0]}", found)

    def __iter__(self) -> Iterator[Any]:
        tracer, path, module = self._of
        if isinstance(module, nn.ModuleDict):
            return iter(module)
        named = module.named_children()
        return iter([_Child(tracer, f"{path}.{name}", child) for name, child in named])


def _held(name: str, value: Any, names: set[str]) -> Iterator[str]:
    """What is read of an object that a module has, such as a config."""
    if isinstance(value, (random.Random, torch.Generator)):
        raise Untraceable("it draws random numbers")
    for inner, held in getattr(value, "__dict__", {}).items():
        if inner not in names:
            continue
        if not isinstance(kind_of(held), tuple):
            raise Untraceable(f"it reads {name}.{inner}, which may change")
        yield f"{name}.{inner}"


def plain_read(module: nn.Module, names: set[str]) -> list[str]:
    """Those names that are attributes of a module, with numbers, functions and the like as values.

    Those of its attributes' attributes are among them, such as ``config.hidden_act``.

    Raises:
        Untraceable: One is a list or the like, which may change without being another one.
    """
    found = [n for n in names if not hasattr(nn.Module, n) and hasattr(module, n)]
    values = {name: getattr(module, name) for name in found if name not in vars(nn.Module())}
    plain = []
    for name, value in values.items():
        if isinstance(value, (list, dict, set, bytearray)):
            raise Untraceable(f"it reads {name}, which may change")
        if isinstance(kind_of(value), tuple) or (
            callable(value) and not isinstance(value, nn.Module)
        ):
            home = (getattr(value, "__module__", "") or "").partition(".")[0]
            if name in vars(module) and inspect.isfunction(value) and home not in TRUSTED:
                raise Untraceable(f"it calls {name}, a function that may read what changes")
            plain.append(name)
        elif name in vars(module) and not isinstance(value, Tensor):
            plain += _held(name, value, names)
    return sorted(plain)


def compiled(graph: fx.Graph) -> Any:
    """A function ``(module, *values)`` that runs a graph, one value for each placeholder."""
    code = graph.python_code("self")
    source = code.src.replace(f"{REST} = {REST}", f"**{REST}")
    scope = dict(code.globals)
    exec(source, scope)  # what torch.fx itself does
    return scope["forward"]
