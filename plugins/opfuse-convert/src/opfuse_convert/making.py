"""Makes the conversion of one module, and compares its chain with what it replaces."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from opfuse import ops
from opfuse.core.environment import Environment
from opfuse.core.introspection import op_class
from opfuse.core.op import BasicOperation
from opfuse.core.plugins import using
from opfuse.core.settings import current
from opfuse.report.isolation import isolated
from opfuse.tuning.comparing import differ

from .converter import Conversion, Converter
from .grammar import table
from .guard import unreadable
from .layers import original_class
from .parallel import localized

ROWS = (2, 3)


def built(converter: Converter, module: nn.Module) -> Conversion | str:
    """Build the conversion of a module by a converter."""
    if why := _unfit(type(module)):
        return why
    cpu = torch.empty(0, device="cpu")  # of the default dtype
    like = next(module.parameters(), cpu)
    options = dict(current.options)
    env = Environment(like.device, None, like.dtype, training=module.training, options=options)
    try:
        made = converter.build(module, env)
        if isinstance(made, Conversion):
            return _unusable(module, converter, made) or made
    except Exception as error:
        return f"{converter.name} raised {_text_of(error)}"
    if isinstance(made, str) and made:
        return made
    return f"{converter.name} gave {made!r}: expected a Conversion, or a sentence"


def _unusable(module: nn.Module, converter: Converter, made: Conversion) -> str:
    """Return what is wrong with a conversion as it is declared, or ``""``."""
    of, cls = f"the conversion of {converter.name}", op_class(module).__name__
    children = {}
    for name in dict.fromkeys((*made.reads, *[name for name, _ in made.constants])):
        with contextlib.suppress(AttributeError):  # not named_modules: a module may be in a cycle
            children[name] = module.get_submodule(name)
    for name in made.reads:
        if name not in children:
            return f"{of} reads {name!r}, and {cls} has no such child"
    for name, path in made.constants:
        try:
            operator.attrgetter(path)(children[name])
        except (KeyError, AttributeError):
            return f"{of} has the constant {(name, path)}, and {cls} has no such attribute"
    for name, _ in made.chain.named_parameters():
        return f"{of} has a parameter of its own, {name}: make its ops by reading the module's"
    guarded, draws = {id(children[name]) for name in made.reads}, False
    for op in [op for op in made.chain.modules() if isinstance(op, BasicOperation)]:
        for name in op.param_names or ():
            source, leaf = op.param_source(name)
            what = f"the {name} of its {op_class(op).__name__}"
            if id(source) not in guarded:
                return f"{of} does not name in reads the module that has {what}"
            if draws and _may_draw(source, leaf):
                return f"a chain reads {what} before it drops, and reading it may draw numbers"
        draws |= isinstance(op, ops.Dropout)
    return ""


def _may_draw(module: Any, name: str) -> bool:
    """Return whether reading a parameter may draw random numbers, as an author may do."""
    own = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()
    return any(type(each).__module__ != parametrizations.__name__ for each in own)


def _unfit(cls: type) -> str:
    """Return why a class must not be derived from, or ``""``."""
    if issubclass(cls, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        return "its parameters are made at the first call"
    for base in cls.__mro__:
        known = base.__module__.partition(".")[0] in ("torch", "transformers", "builtins", "typing")
        if "__init_subclass__" in vars(base) and not known:
            return f"{base.__name__}.__init_subclass__ would see the class that a conversion makes"
    return ""


def checked(module: nn.Module, made: Conversion, verify: bool) -> Conversion | str:
    """A conversion, or a sentence that says why its chain cannot replace the forward of a module.

    Args:
        module: The module.
        made: The conversion.
        verify: Whether to compare values and gradients.
    """
    try:
        with localized(module, bool(made.shapes)):
            if why := unreadable(module, made.reads, {*made.splits, *made.called}):
                return why
            why = _difference(module, made) if verify else ""
    except Exception as error:
        why = f"comparing raised {_text_of(error)}"
    return f"the chain differs from the module: {why}" if why else made


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def alike(module: nn.Module, made: Conversion) -> Any:
    """A key of a conversion; only one of those with the same key has to be compared."""
    everyone = [module, *[module.get_submodule(name) for name in made.reads if name]]
    plain = [[(k, v) for k, v in vars(each).items() if table.is_plain(v)] for each in everyone]
    shapes = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    ops = tuple(op_class(op) for op in made.chain)
    return op_class(module), ops, tuple(made.reads), repr(list(map(sorted, plain))), shapes


def _difference(module: nn.Module, made: Conversion) -> str:
    """Describe how a chain differs from the operations that it replaces; ``""``: it does not.

    Both get the same random numbers, in the dtype of the parameters and in evaluation mode. The
    gradients of input and parameters are compared, too.
    """
    chain: Any = made.chain
    features = next((op.in_features for op in chain if op.in_features), None)
    params = [p for p in module.parameters() if p.is_floating_point()]
    if features is None or not params or any(p.is_meta for p in params):
        return ""
    modes = {child: child.training for child in chain.modules()}
    try:
        # without plugins: their tests and opfuse.tune say whether a fusion is right
        with isolated(module), using(""):
            module.eval()
            chain.eval()
            given = _random_inputs(made, features, params[0])
            wanted = [t for t in (*given, *params) if t.requires_grad]
            own = functools.partial(made.separate or original_class(type(module)).forward, module)
            mine = chain if made.separate else functools.partial(made.call, module, chain)
            # gradients of parameters in a wider dtype come out of products in this one
            return differ(own, mine, given, wanted, dtype=params[0].dtype)
    finally:
        for child, training in modes.items():
            child.training = training


def _random_inputs(made: Conversion, features: int, like: torch.Tensor) -> list[torch.Tensor]:
    """An input of a chain, and its extra inputs; those of integers are zeros."""
    ops: Any = made.chain if made.separate is not None else ()
    kinds = [
        op.extra_input_dtypes[k] if op.extra_input_dtypes else ""
        for op in ops
        for k, channel in enumerate(op.extra_input_channels)
        if channel is None
    ]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.zeros(ROWS, dtype=torch.long, device=like.device)
        if kind == "integer"
        else torch.randn((*ROWS, features), generator=generator).to(like).requires_grad_()
        for kind in ("", *kinds)
    ]
