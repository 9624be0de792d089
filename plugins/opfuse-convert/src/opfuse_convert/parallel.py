"""Modules that a style has split among processes, recognised by the functions around them.

A style of ``torch.distributed.tensor.parallel`` leaves a hook before and a hook after a linear
layer. They are known by identity: their code is that of ``distribute_module``, and their variables
are the methods of the style and a mesh. Whatever else is found there is left alone.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opfuse.core.introspection import hook_dicts, is_dtensor, op_class

from .grammar.source import like

Splits = Callable[[nn.Module], Any]
"""How a linear layer is split: an ``opfuse_distributed.parallel.Split``, or a sentence that says
why a chain cannot run it; None: it is not split. In a pair, the places that this depends on follow.
"""

_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
_HOME = "torch.distributed.tensor"


def split_by_torch(module: nn.Module) -> Any:
    """How torch's ``parallelize_module`` has split a linear layer; see :data:`Splits`."""
    if not vars(module).get("_distribute_module_applied"):
        return None
    after, before, *others = hook_dicts(module)
    hooks = [*before.values(), *after.values()]
    if len(before) != 1 or len(after) != 1 or any(others) or "forward" in vars(module):
        return "it has more hooks than those of the style that split it"
    known = sys.modules[f"{_HOME}._api"].distribute_module.__code__
    if not all(is_inner(hook, known) for hook in hooks):
        return "its hooks are not those of a style of torch"
    ends: list[Any] = [
        (held.get("input_fn") or held.get("output_fn"), held.get("device_mesh"))
        for held in (inspect.getclosurevars(hook).nonlocals for hook in hooks)
    ]
    (enter, mesh), (leave, other) = ends
    for name, mode in _STYLES.items():
        style = getattr(sys.modules[f"{_HOME}.parallel.style"], name)
        wanted = style._prepare_input_fn, style._prepare_output_fn
        if (getattr(enter, "func", None), getattr(leave, "func", None)) == wanted:
            ((takes,), desired), ((gives,), local) = enter.args, leave.args
            if mesh is not other or [p.is_replicate() for p in desired] != [mode == "column"]:
                return "its hooks are not those of one style of torch"
            return split_of(module, mode, mesh, takes, gives, local)
    return "the style that split it is unknown"


def split_of(module: Any, mode: str, mesh: Any, takes: Any, gives: Any, local: bool) -> Any:
    """How a linear layer is split, if chains can do it; see :data:`Splits`.

    Args:
        module: The module.
        mode: ``"column"`` or ``"row"``.
        mesh: The ``DeviceMesh``.
        takes: The placement of its input.
        gives: The placement of its output.
        local: Whether it gives a local tensor.
    """
    from opfuse_distributed.parallel import Split

    if op_class(module) is not nn.Linear:
        return f"a {op_class(module).__name__} is split among processes"
    if not local:
        return "it gives a DTensor"
    how = Split(mode, mesh, takes, gives)
    if how.refusal():
        return f"it is split among processes with {takes} before and {gives} after it"
    for key, param in module._parameters.items():
        if param is not None and not is_placed(how, key, param):
            return f"its {key} is not placed as its style does"
    sizes = module.out_features if mode == "column" else module.in_features
    return f"its {sizes} features do not divide among the processes" if sizes % mesh.size() else how


def is_placed(how: Any, key: str, param: Any) -> bool:
    """Whether a parameter is the ``DTensor`` that a split layer has."""
    if not is_dtensor(param) or len(param.placements) != 1 or param.device_mesh != how.mesh:
        return False
    (placed,), dim = param.placements, how.dim(key)
    return bool(placed.is_replicate() if dim is None else placed.is_shard(dim))


def is_inner(function: Any, outer: types.CodeType) -> bool:
    """Whether a function is written inside the function that has a certain code."""
    code = getattr(function, "__code__", None)
    return code is not None and any(code is each for each in outer.co_consts)


# A style that replaced the forward of a module, and calls the module's own with local parameters


@contextlib.contextmanager
def localized(module: nn.Module, wanted: bool) -> Iterator[None]:
    """A block in which a module has its own process's part of its parameters, if wanted."""
    params = module._parameters
    whole: Any = {k: p for k, p in params.items() if is_dtensor(p)} if wanted else {}
    try:
        params.update({k: nn.Parameter(p.to_local(), p.requires_grad) for k, p in whole.items()})
        yield
    finally:
        params.update(whole)


def with_own(module: nn.Module, cls: Any) -> None:
    """Let the forward around a module's own call that of a class."""
    around: Any = vars(module)["forward"]
    names = around.__code__.co_freevars
    cells = dict(zip(names, around.__closure__, strict=True))
    cells["original_forward"] = types.CellType(types.MethodType(cls.forward, module))
    vars(module)["forward"] = like(around, around.__code__, [cells[name] for name in names])
