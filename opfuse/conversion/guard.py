"""Whether a module is still as it was when it was converted: asked at every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

from ..grammar import MISSING, Place
from ..grammar.table import is_plain, is_same
from ..overrides import hook_dicts, hook_kinds, op_class
from .layers import is_patched, original_class

_PLAIN = {Tensor, nn.Parameter}


class Guard:
    """What must not have changed for a chain to stand for a module.

    Args:
        module: The module.
        reads: Dotted names of the children that the chain stands for; ``""``: the module itself.
        constants: Pairs of such a name and an attribute whose value the chain has taken over.
        places: What else was looked up.

    Attributes:
        module: The module.
        dtype: That of the parameters, when it was asked last; None: there are none.
    """

    dtype: Any = None

    def __init__(
        self,
        module: nn.Module,
        reads: Sequence[str],
        constants: Sequence[tuple[str, str]],
        places: Sequence[Place] = (),
    ) -> None:
        self.module, self._cls = module, op_class(module)
        once = {place.key: place for place in places}
        self._places = [(p.where.get, p.name, p.value, p) for p in once.values()]
        in_graphs = [p for p in once.values() if type(p.where) is dict and is_plain(p.value)]
        self._in_graphs = [(p.where, p.name, p.value) for p in in_graphs]
        self._names = [name for name in reads if name]
        self._children: list[tuple[dict[str, Any], str, Any, type, dict[str, Any]]] = []
        for name in self._names:
            above, _, key = name.rpartition(".")
            holder: Any = module.get_submodule(above)._modules
            child = module.get_submodule(name)
            self._children.append((holder, key, child, type(child), vars(child)))
        self._classes = [op_class(child) for _, _, child, _, _ in self._children]
        holders = [module, *[child for _, _, child, _, _ in self._children]]
        self._parts = [  # of what goes through them all
            (each._modules, list(each._modules))
            for each in holders
            if isinstance(each, (nn.Sequential, nn.ModuleList))
        ]
        everyone = [module, *[child for _, _, child, _, _ in self._children]]
        written = {op_class(each) for each in everyone}
        self._methods = [(cls, cls.forward, cls.__call__) for cls in written]
        self._params = [
            (each._parameters, key)
            for each in (module, *[module.get_submodule(n) for n in self._names])
            for key in each._parameters
            if each is not module or "" in reads
        ]
        self._there = [getattr(holder[key], "shape", None) for holder, key in self._params]
        of = [(module.get_submodule(name), attribute) for name, attribute in constants]
        self._constants = [(each, name, value_of(each, name)) for each, name in of]

    def parameters(self) -> tuple[Any, ...]:
        """Of each parameter the dtype, and whether it needs a gradient."""
        params = [holder.get(key) for holder, key in self._params]
        return tuple([param is None or (param.dtype, param.requires_grad) for param in params])

    def why_not(self) -> str:
        """What has changed, as a sentence; ``""``: nothing."""
        for holder, key, child, cls, attributes in self._children:
            if (
                holder.get(key) is not child
                or type(child) is not cls
                or "forward" in attributes
                or attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
                or attributes.get("_compiled_call_impl") is not None
            ) and (why := self._explained()):
                return why
        if self._children and _hooked_everywhere():
            return "there are hooks on every module"
        for cls, forward, call in self._methods:
            if cls.forward is not forward or cls.__call__ is not call:
                return f"{cls.__name__} got another forward"
        for parts, names in self._parts:
            if len(parts) != len(names) or [*parts] != names:
                return f"its parts were {', '.join(names)} and are {', '.join(parts)}"
        if why := self._of_parameters():
            return why
        if why := self._of_places():
            return why
        for each, name, value in self._constants:
            now = value_of(each, name)
            if now is not value and now != value:
                was = "" if is_dynamo_compiling() else f" was {value!r} and is {now!r}"
                return f"{name} of {op_class(each).__name__}{was or ' is another one now'}"
        return ""

    def _of_places(self) -> str:
        """What has changed of what was looked up, as a sentence, or ``""``."""
        if is_dynamo_compiling():  # it has guards for what a trace looks at
            same = all([is_same(of.get(name, MISSING), v) for of, name, v in self._in_graphs])
            return "" if same else "what its forward reads is another one now"
        if op_class(self.module) is not self._cls:
            return f"it is a {op_class(self.module).__name__} now"
        for get, name, value, place in self._places:
            now = get(name, MISSING)
            if now is not value and not is_same(now, value):
                return place.change()
        return ""

    def _of_parameters(self) -> str:
        """What has changed of the parameters, as a sentence, or ``""``."""
        dtype = None
        for (params, key), there in zip(self._params, self._there, strict=True):
            param = params.get(key)
            if param is not None and param.dtype is not dtype:
                if dtype is not None:
                    return f"its parameters are of {dtype} and of {param.dtype}"
                self.dtype = dtype = param.dtype
            shape = getattr(param, "shape", None)
            if shape != there or (shape is not None and type(param) not in _PLAIN):
                if shape is not None and there is not None and shape != there:
                    return f"{key} has shape {tuple(shape)} instead of {tuple(there)}"
                if why := self._of_parameter(params, key, there is not None):
                    return why
        return ""

    def _explained(self) -> str:
        """What is no longer so of the children, looked at in detail."""
        pairs = zip(self._children, self._classes, self._names, strict=True)
        for (holder, key, child, _, attributes), cls, name in pairs:
            now: Any = holder.get(key)
            if now is not child:
                return f"{name} was replaced by {_described(now)}"
            if op_class(child) is not cls:
                return f"{name} is a {op_class(child).__name__} now"
            if "forward" in attributes:
                return f"the forward of {name} was replaced"
            if hooks := hook_kinds(child):
                return f"{name} has {hooks} hooks"
            if attributes.get("_compiled_call_impl") is not None:
                return f"{name} was compiled"
        return ""

    def _of_parameter(self, params: dict[str, Any], key: str, there: bool) -> str:
        """What is wrong with a parameter; ``""`` if a parametrization computes it."""
        for name, (_, _, child, _, _) in zip(self._names, self._children, strict=True):
            if child._parameters is params:
                if parametrize.is_parametrized(child, key):  # to look at it is to compute it
                    return ""
                value = getattr(child, key, None)
                if (value is not None) is there and (value is None or type(value) in _PLAIN):
                    return ""
                what = "is gone" if value is None else f"is a {type(value).__name__}"
                return f"{name}.{key} {what if there else 'was added'}"
        return f"{key} is another kind of tensor"


def value_of(module: nn.Module, path: str) -> Any:
    """An attribute, or the attribute of one; None: it is not there."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _hooked_everywhere() -> bool:
    """Whether there are hooks that run when any module is called."""
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


@contextlib.contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """A block in which reading a parameter that a parametrization computes changes nothing.

    In training, some go on with what they keep whenever they are read, such as spectral norm.
    """
    found = [
        part
        for each in module.modules()
        if parametrize.is_parametrized(each)
        for part in each.parametrizations.modules()  # type: ignore[union-attr]
        if part.training
    ]
    for part in found:
        part.training = False
    try:
        yield
    finally:
        for part in found:
            part.training = True


def _described(module: Any) -> str:
    if module is None:
        return "nothing"
    cls = original_class(type(module))
    package = cls.__module__.partition(".")[0]
    return f"{cls.__name__} of {package}" if package not in ("torch", "__main__") else cls.__name__


def unreadable(module: nn.Module, reads: Sequence[str]) -> str:
    """Why a chain cannot read the parameters of a module's children; ``""``: it can."""
    for name in reads:
        child = module.get_submodule(name)
        if (cls := op_class(child)).__module__.startswith("torch.nn.") and is_patched(cls):
            return f"{cls.__name__} got another forward"
        for key, param in child._parameters.items():
            if param is not None and type(param) not in _PLAIN:
                return f"{name or 'its'} {key} is a {type(param).__name__}"
            if param is not None and not param.is_floating_point():
                return f"{name or 'its'} {key} is of {param.dtype}"
        if any(hook_dicts(child)) and name:
            return f"{name} has {hook_kinds(child)} hooks"
    return ""
