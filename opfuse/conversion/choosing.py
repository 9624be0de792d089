"""Whether a converted module's chain or its own operations run, by what was measured here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import tables
from ..engine.measured import counting, describe
from ..fusible import FusibleOperation
from ..overrides import op_class
from ..plugins import manager
from ..records import normalize
from ..settings import current
from ..tables import Shape

_PLAIN = Tensor, nn.Parameter
_MOST = 64


def fits(dtype: torch.dtype | None, x: Any, *extras: Any) -> str:
    """Why a chain does not compute in the dtype in which a module would; ``""``: it does.

    Outside of autocast it does if parameters, input and extra inputs have one dtype. Under autocast
    it adds tensors of two dtypes as PyTorch does: a residual in fp32 and a product in bf16, say.

    Args:
        dtype: That of the parameters; None: there are none.
        x: The chain's input.
        *extras: Its extra inputs.
    """
    if not all(type(tensor) in _PLAIN for tensor in (x, *extras)) or not x.ndim:
        return "its input is no plain tensor"
    autocast = torch.is_autocast_enabled(x.device.type)
    if any(
        (extra.dtype is not x.dtype and not (autocast and extra.is_floating_point()))
        or extra.shape != x.shape[:-1] + extra.shape[-1:]
        for extra in extras
    ):
        return "the tensors that it adds differ in dtype or shape"
    if dtype is not None and x.dtype is not dtype and not autocast:
        return f"its input is of {x.dtype}, its parameters are of {dtype}"
    return ""


def shape_of(x: Tensor) -> Shape:
    """What of an input an entry is for."""
    rows = x.shape[:-1].numel()
    return Shape(1 << max(rows.bit_length() - 1, 0) if rows else 0, x.shape[-1], x.is_contiguous())


def subject(name: str, plugin: Any, module: nn.Module, chain: Any, x: Tensor) -> dict[str, Any]:
    """What an entry of a whole conversion is of, as JSON-able data; see :mod:`opfuse.tables`.

    Args:
        name: The converter.
        plugin: Its distribution and version; None: the core.
        module: The module.
        chain: Its chain.
        x: The chain's input.
    """
    params = [[op.read_parameter(name) for name in op.param_names or ()] for op in chain]
    kind, grad = x.device.type, torch.is_grad_enabled()
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    cls = op_class(module)
    return {
        "plugin": plugin and [normalize(plugin[0]), plugin[1]],
        "fusion": f"{name} of {cls.__module__}.{cls.__qualname__}",
        "pass": "whole",
        "ops": [describe(op) for op in chain],
        "params": [[[list(p.shape), str(p.dtype)] for p in of] for of in params],
        "grads": [
            grad and x.requires_grad,
            [grad and p.requires_grad for of in params for p in of],
        ],
        "dtype": [str(x.dtype), str(autocast)],
        "mode": [module.training, torch.are_deterministic_algorithms_enabled()],
        "options": [[k, v] for k, v in sorted(current.options) if "." in k],
    }


class Choice:
    """Looks up whether the chain of one module pays; remembers what it found.

    Args:
        name: The converter.
        plugin: Its distribution and version; None: the core.
    """

    def __init__(self, name: str, plugin: Any) -> None:
        self.of = name, plugin
        self._known: dict[Any, str] = {}

    def refusal(self, module: nn.Module, chain: Any, x: Tensor) -> str:
        """Why the module's own operations are to run, or ``""``."""
        kind = x.device.type
        key = (
            x.dtype,
            x.shape[-1],
            x.shape[:-1].numel().bit_length(),
            x.is_contiguous(),
            torch.is_grad_enabled(),
            x.requires_grad,
            torch.is_autocast_enabled(kind),
            module.training,
            current.values,
            manager.generation,
            FusibleOperation.changes,
            torch.get_num_threads(),
        )
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._looked_up(module, chain, x)
        return self._known[key]

    def _looked_up(self, module: nn.Module, chain: Any, x: Tensor) -> str:
        table = tables.table_for(x.device)
        if current.recipe is not None or not table.entries:
            return ""
        name, plugin = self.of
        entries = table.entries.get(tables.subject_key(subject(name, plugin, module, chain, x)), {})
        prefer = dict(current.options).get("prefer", "speed")
        known = shape_of(x)._asdict()
        found = counting(entries, known, trades_time=True, prefer=prefer)
        if found is None:
            return ""
        return found.refusal(trades_time=True, prefer=prefer)
