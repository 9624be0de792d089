"""PEFT's linear layer with a low-rank adapter: ``W x + s B A dropout(x)``.

The base layer is called as it is, whatever its class; the chain adds the adapter to its result, so
a fusion may write ``s B`` times the small product into that sum.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from opfuse_convert import Conversion
from opfuse_convert.grammar import function_places
from torch import Tensor, nn

from opfuse import BasicOperation, Environment, Sequential
from opfuse.ops import AddExtraInput, BasicLinear, Bias, ConstantScale, Dropout, LowRankLinear
from opfuse.ops.authoring import op_class

LINEAR = "peft.tuners.lora.layer.Linear"


def build(module: Any, env: Environment) -> Conversion | str:
    """The chain of the one adapter that is active."""
    if isinstance(found := _adapter(module), str):
        return found
    name, drop, a, b = found
    dropout = Dropout(drop.p) if op_class(drop) is nn.Dropout else None
    product, scale = BasicLinear.reading(b), ConstantScale(module.scaling[name])
    ops = [*([dropout] if dropout is not None else []), BasicLinear.reading(a), product]
    chain = Sequential(*ops, scale, AddExtraInput())
    reads = [
        f"{part}{of}" for part in ("lora_dropout", "lora_A", "lora_B") for of in ("", f".{name}")
    ]
    places = function_places(inspect.unwrap(op_class(module).forward))
    return Conversion(
        chain, reads, _LoRACall(name, dropout, scale), _LoRASeparate(name), places=places
    )


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
    if name in module.lora_variant:
        return f"adapter {name!r} is a {type(module.lora_variant[name]).__name__}"
    return ""


class _LoRASeparate:
    """The adapter by its own modules, added to what the base layer gave."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: Any, x: Tensor, base: Tensor) -> Tensor:
        name = self._name
        low = module.lora_A[name](module.lora_dropout[name](x))
        result: Tensor = base + module.lora_B[name](low) * module.scaling[name]
        return result


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
        return chain(x, extra).to(base.dtype)
