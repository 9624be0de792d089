"""PEFT's linear layer with a low-rank adapter: ``W x + s B A dropout(x)``.

If the base layer is a plain ``torch.nn.Linear``, both are one op, within longer chains too. Any
other base layer is called as it is; the chain adds the adapter to its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from opfuse_convert import Conversion
from opfuse_convert import leaf_of as of_library
from opfuse_convert.grammar import Place, function_places
from opfuse_convert.guard import unreadable
from opfuse_convert.probing import Leaf
from torch import Tensor, nn

from opfuse import BasicOperation, Environment, Sequential, autocast
from opfuse.core.settings import current
from opfuse.ops import AddExtraInput, BasicLinear, Bias, ConstantScale, Dropout, LowRankLinear
from opfuse.ops.authoring import op_class

from .adapted import LoRALinear, ParallelLoRALinear
from .parallel import splits

LINEAR = "peft.tuners.lora.layer.Linear"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is PEFT's linear layer."""
    cls = op_class(module)
    return f"{cls.__module__}.{cls.__qualname__}" == LINEAR


def leaf_of(module: Any) -> Leaf | str:
    """The ops that compute a module within a longer chain, or why there are none."""
    if not is_linear(module):
        return of_library(module, splits)
    leaf = _whole(module)
    return leaf if isinstance(leaf, str) else leaf._replace(places=[*leaf.places, *_state(module)])


def _whole(module: Any) -> Leaf | str:
    """The ops of PEFT's linear layer with a plain base layer, apart from its state."""
    found = _adapter(module)
    if isinstance(found, str):
        return found
    (name, drop, a, b), base = found, module.base_layer
    of_base = of_library(base, splits)
    if isinstance(of_base, str):
        return of_base
    if op_class(base) is not nn.Linear or of_base.split is not None:
        return "its base layer is not a plain torch.nn.Linear"
    reads = ["base_layer", *_parts(name)]
    if why := unreadable(module, reads):
        return why
    drops = op_class(drop) is nn.Dropout
    how: Any = {"scaling": module.scaling[name], "dropout": drop.p if drops else 0.0}
    low_rank = LoRALinear.reading(base, a, b, **how)
    return Leaf(
        [low_rank, *([] if base.bias is None else [Bias.reading(base)])],
        places=[*of_base.places, *function_places(inspect.unwrap(op_class(module).forward))],
        reads=reads,
        dropouts=[(low_rank, f"lora_dropout.{name}")] if drops else (),
        join=joined,
    )


def _state(module: Any) -> list[Place]:
    """The places of what an adapter adds now, and of the numbers that its op has copied."""
    (name,) = module.active_adapters
    drop, scaling = module.lora_dropout[name], module.scaling
    places: list[Place] = [_InUse(_Use(module, name), name, "", op_class(module).__name__)]
    where = _Scaling(module)  # PEFT may replace the dictionary
    places.append(Place(where, name, scaling[name], f"the scaling of {name!r}"))
    if op_class(drop) is nn.Dropout:
        places.append(Place(vars(drop), "p", drop.p, f"the dropout of {name!r}"))
    return places


def joined(modules: Mapping[str, Any], leaves: Sequence[Leaf]) -> ParallelLoRALinear:
    """Linear layers of one input in one op."""
    pairs: Any = [*zip(modules, leaves, strict=True)]
    linears = {name: leaf.ops[0] for name, leaf in pairs}
    biased = {n: leaf.ops[1].param_source("bias")[0] for n, leaf in pairs if len(leaf.ops) > 1}
    return ParallelLoRALinear(linears, biased)


def build(module: Any, env: Environment) -> Conversion | str:
    """The chain of the one adapter that is active, with the base layer if that is plain."""
    if isinstance(found := _adapter(module), str):
        return found
    name, drop, a, b = found
    leaf = _whole(module)
    if isinstance(leaf, Leaf):
        return Conversion(
            Sequential(*leaf.ops),
            leaf.reads,
            _WholeCall(name, leaf.ops[0], drop),
            _LoRASeparate(name, True),
            places=leaf.places,
        )
    dropout = Dropout(drop.p) if op_class(drop) is nn.Dropout else None
    product, scale = BasicLinear.reading(b), ConstantScale(module.scaling[name])
    ops = [*([dropout] if dropout is not None else []), BasicLinear.reading(a), product]
    scale.unquantized = LowRankLinear.unquantized  # type: ignore[misc]  # and so are its products
    chain = Sequential(*ops, scale, AddExtraInput())
    places = function_places(inspect.unwrap(op_class(module).forward))
    call = _LoRACall(name, dropout, scale)
    return Conversion(chain, _parts(name), call, _LoRASeparate(name), places=places)


_OWN = "lora_dropout", "lora_A", "lora_B"


def _parts(name: str) -> list[str]:
    """The names of the modules of an adapter."""
    return [f"{part}{of}" for part in _OWN for of in ("", f".{name}")]


class _Use:
    """Whether a module adds one adapter, looked up like a value."""

    def __init__(self, module: Any, name: str) -> None:
        self._of = module, name

    def get(self, name: str, default: Any) -> str:
        """Why it computes something else now, or ``""``."""
        return _refusal(*self._of)


class _Scaling:
    """The scaling of each adapter of a module, looked up where it is now."""

    def __init__(self, module: Any) -> None:
        self._of = module

    def get(self, name: str, default: Any) -> Any:
        """That of one of them."""
        return self._of.scaling.get(name, default)


class _InUse(Place):
    """The place of that, whose change is a sentence by itself."""

    def change(self) -> str:
        """Why the module computes something else now, or ``""``."""
        why = self.where.get(self.name, "")
        return why and f"{self.what}: {why}"


def linear_ops(module: Any) -> list[BasicOperation]:
    """The ops of PEFT's linear layer, for a chain of your own such as a head with a loss.

    They are :class:`opfuse.ops.LowRankLinear`, which reads the module's weights at every call, and
    a bias if it has one. They have the scaling and the dropout that the module has now, and do not
    see an adapter that is merged, disabled or replaced later.

    Args:
        module: A ``peft.tuners.lora.Linear`` with one active adapter.

    Raises:
        ValueError: It computes something else, as with several adapters.

    Example::

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
        head = linear_ops(model.base_model.model.lm_head)
        chain = opfuse.Sequential(*head, opfuse.ops.TokenLogProb())
    """
    found = _adapter(module)
    base = getattr(module, "base_layer", module)
    if not isinstance(found, str) and op_class(base) is not nn.Linear:
        found = f"its base layer is a {type(base).__name__}"
    if isinstance(found, str):
        raise ValueError(f"linear_ops expected a linear layer with one adapter: {found}")
    name, drop, a, b = found
    dropout = drop.p if op_class(drop) is nn.Dropout else 0.0
    low_rank = LowRankLinear.reading(base, a, b, scaling=module.scaling[name], dropout=dropout)
    return [low_rank, *([] if base.bias is None else [Bias.reading(base)])]


def _adapter(module: Any) -> tuple[str, Any, Any, Any] | str:
    """The one adapter that is active: its name, dropout and two modules; or why there is none."""
    if not hasattr(module, "lora_A"):
        return f"a {type(module).__name__} has no adapters"
    if "forward" in vars(module):
        return "its forward was replaced"
    name = module.active_adapters[0] if len(module.active_adapters) == 1 else None
    if name is None or name not in module.lora_A:
        return f"its active adapters are {module.active_adapters}, and a chain adds one"
    if why := _refusal(module, name):
        return why
    drop, a, b = [getattr(module, part)[name] for part in ("lora_dropout", "lora_A", "lora_B")]
    if not (op_class(a) is op_class(b) is nn.Linear) or a.bias is not None or b.bias is not None:
        return f"adapter {name!r} is not made of two matrices"
    if op_class(drop) not in (nn.Dropout, nn.Identity):
        return f"adapter {name!r} has a {type(drop).__name__} before it"
    return name, drop, a, b


def _refusal(module: Any, name: str) -> str:
    """Why a module computes something else now than its adapter added, or ``""``."""
    if module.disable_adapters:
        return "its adapters are disabled"
    if module.merged:
        return "its adapters are merged"
    if list(module.active_adapters) != [name]:
        return f"its active adapters are {module.active_adapters}, not {name!r} alone"
    if not getattr(module, "cast_input_dtype_enabled", True):
        return "it does not cast its input"
    if isinstance(module.scaling.get(name), Tensor):  # PEFT makes it one to exchange adapters
        return f"the scaling of {name!r} is a tensor"
    if name in module.lora_variant:
        return f"adapter {name!r} is a {type(module.lora_variant[name]).__name__}"
    return ""


class _LoRASeparate:
    """The adapter by its own modules, added to what the base layer gave, or gives."""

    def __init__(self, name: str, calls_base: bool = False) -> None:
        self._name, self._calls_base = name, calls_base

    def __call__(self, module: Any, x: Tensor, *given: Tensor) -> Tensor:
        name = self._name
        base = module.base_layer(x) if self._calls_base else given[0]
        x = module._cast_input_dtype(x, module.lora_A[name].weight.dtype)
        low = module.lora_A[name](module.lora_dropout[name](x))
        result: Tensor = base + module.lora_B[name](low) * module.scaling[name]
        return result.to(base.dtype) if self._calls_base else result


class _WholeCall:
    """The forward by way of a chain with the base layer."""

    why = ""

    def __init__(self, name: str, op: Any, dropout: Any) -> None:
        self._name, self._op, self._dropout = name, op, dropout

    def __call__(self, module: Any, chain: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        self.why = _refusal(module, self._name)
        if args or kwargs:
            self.why = "it was called with more than a tensor"
        if self.why:
            return NotImplemented
        op, dropout, scaling = self._op, self._dropout, module.scaling[self._name]
        if op.scaling != scaling:
            op.scaling = scaling
        if op_class(dropout) is nn.Dropout:
            if op.training is not dropout.training:
                op.train(dropout.training)
            if op.dropout != dropout.p:
                op.dropout = dropout.p
        return chain(x)


class _LoRACall:
    """The forward by way of the chain."""

    why = ""

    def __init__(self, name: str, dropout: Dropout | None, scale: ConstantScale) -> None:
        self._name, self._dropout, self._scale = name, dropout, scale

    def __call__(self, module: Any, chain: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        name = self._name
        self.why = _refusal(module, name)
        if args or kwargs:
            self.why = "it was called with more than a tensor"
        if self.why:
            return NotImplemented
        if self._scale.scale != module.scaling[name]:
            self._scale.scale = module.scaling[name]
        if self._dropout is not None:
            given = module.lora_dropout[name]
            self._dropout.train(given.training)
            if self._dropout.p != given.p:
                self._dropout.p = given.p
        base = module.base_layer(x)
        x = module._cast_input_dtype(x, module.lora_A[name].weight.dtype)
        extra = base if torch.is_autocast_enabled(x.device.type) else base.to(x.dtype)
        with nullcontext() if current.recipe is None else autocast(enabled=False):
            return chain(x, extra).to(base.dtype)
