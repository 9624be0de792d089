"""Chooses between a converted module's chain and its own operations, by measurements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuse import ops
from opfuse.core.environment import shape_of
from opfuse.core.fusible import FusibleOperation
from opfuse.core.introspection import op_class, standing_for
from opfuse.core.overwriting import without_modes
from opfuse.core.plugins import manager
from opfuse.core.records import normalize
from opfuse.core.settings import current
from opfuse.ops.arithmetic import matmul_precision
from opfuse.ops.modulate import broadcasts
from opfuse.tuning import table as tables
from opfuse.tuning.lookup import applicable_entry, describe
from opfuse.tuning.table import Entries, Measurement

_PLAIN = {Tensor, nn.Parameter}
_MOST = 64


def fits(params: Sequence[Any], chain: Any, x: Any, *extras: Any) -> str:
    """Return why a chain does not compute what a module would, in its dtypes; ``""``: it does.

    Outside of autocast it does if parameters, input and extra inputs have one dtype. Under autocast
    it adds tensors of two dtypes as PyTorch does, a residual in fp32 and a product in bf16, say.
    But activations and norms of an input in another dtype than autocast's differ: PyTorch leaves
    the dtype as it is, and the ops compute in autocast's.

    Args:
        params: For each parameter its dtype, whether it needs a gradient, and whether its dtype may
            be another than that of the rest; True for a missing one.
        chain: The chain.
        x: Its input.
        *extras: Its extra inputs.
    """
    dtypes = [param[0] for param in params if param is not True and not param[2]]
    if any([each is not dtypes[0] for each in dtypes]):
        return f"its parameters are of {' and of '.join(map(str, dict.fromkeys(dtypes)))}"
    dtype = dtypes[0] if dtypes else None
    given = x, *extras
    if not _PLAIN.issuperset(map(type, given)) or not x.ndim:
        return "its input is not a plain tensor"
    if any([t.layout is not torch.strided or t.is_nested for t in given]):
        return "its input is sparse or nested"
    if x.is_meta or not x.is_floating_point():
        return f"its input is {'on the meta device' if x.is_meta else f'of {x.dtype}'}"
    autocast = torch.is_autocast_enabled(x.device.type)
    if dtype is not None and x.dtype is not dtype and not autocast:
        return f"its input is of {x.dtype}, its parameters are of {dtype}"
    return _flow(chain, x, extras, autocast)


def _flow(chain: Any, x: Tensor, extras: Any, autocast: bool) -> str:
    """Describe what is wrong with the widths and dtypes that flow through a chain, or ``""``."""
    width, given = x.shape[-1], iter(extras)
    known: dict[Any, Any] = {}
    flowing, lower = x.dtype, torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    for op in chain:
        if op.in_features is not None and op.in_features != width:
            return f"its input has {x.shape[-1]} features"
        if isinstance(op, (ops.AddExtraInput, ops.Modulate)):
            for channel in op.extra_input_channels:
                if channel is not None and channel in known:
                    other, shape = known[channel]
                else:
                    extra = next(given)
                    other, shape = extra.dtype, extra.shape
                    if other is not x.dtype and not autocast:
                        return "the tensors that it adds differ in dtype"
                    if not other.is_floating_point:
                        return "what it adds is not floating-point"
                wanted = *x.shape[:-1], width
                fitting = broadcasts if isinstance(op, ops.Modulate) else operator.eq
                if not fitting(tuple(shape), wanted):
                    return "the tensors that it adds differ in shape"
                flowing = torch.promote_types(flowing, other)
        elif isinstance(op, ops.MakeExtraOutput):
            known[op.extra_output_channels[0]] = flowing, (*x.shape[:-1], width)
        elif autocast:
            # the dtype in which the op computes as PyTorch does; None: any
            own = lower if isinstance(op, ops.Activation) else None
            own = torch.float32 if isinstance(op, (ops.LayerNorm, ops.RMSNorm)) else own
            if own is not None and flowing is not own:
                return f"under autocast {type(op).__name__} gets {flowing}"
            flowing = lower if op.casts_input else flowing
        if op.out_features is not None:
            width = op.out_features
        elif op.feature_ratio is not None and op.feature_ratio != 1:
            if width % op.feature_ratio:
                return f"{width} features cannot be halved"
            width //= op.feature_ratio
    return ""


class Kind(NamedTuple):
    """The kind of call that an entry of a table is for, apart from shapes.

    Attributes:
        device: The kind of device.
        dtype: The dtype of the input.
        autocast: The dtype of autocast; None: it is off.
        grads: Whether grad mode is on, and whether the input requires a gradient.
        compiled: Whether ``torch.compile`` traces.
    """

    device: str
    dtype: torch.dtype
    autocast: torch.dtype | None
    grads: tuple[bool, bool]
    compiled: bool

    @classmethod
    def of(cls, x: Tensor, compiled: bool) -> Kind:
        """The kind of a call with this input, now."""
        kind, grad = x.device.type, torch.is_grad_enabled()
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(kind, x.dtype, autocast, (grad, grad and x.requires_grad), compiled)


def title_of(name: str, module: nn.Module) -> str:
    """The title of entries for a converter and the class of a module."""
    cls = op_class(module)
    return f"{name} of {cls.__module__}.{cls.__qualname__}"


class MeasuredChoice:
    """Looks up whether the chain of one module is faster, and remembers the answer.

    Args:
        name: The converter.
        plugin: Its distribution and version; None: the core.
    """

    def __init__(self, name: str, plugin: Any) -> None:
        self._name, self._plugin = name, plugin
        self._known: dict[Any, str] = {}

    def subject(self, module: nn.Module, chain: Any, kind: Kind) -> dict[str, Any]:
        """The subject of an entry for a kind of call of the module, as JSON-able data."""
        names = [op.param_names or () for op in chain]
        pairs = zip(chain, names, strict=True)
        params = [[op.read_parameter(name, standing_for) for name in of] for op, of in pairs]
        grad, of_x = kind.grads
        plugin = self._plugin
        return {
            "plugin": plugin and [normalize(plugin[0]), plugin[1]],
            "fusion": title_of(self._name, module),
            "pass": "whole",
            "ops": [describe(op) for op in chain],
            "params": [[[list(p.shape), str(p.dtype)] for p in of] for of in params],
            "grads": [of_x, [grad and p.requires_grad for of in params for p in of]],
            "dtype": [str(kind.dtype), str(kind.autocast)],
            "mode": [module.training, torch.are_deterministic_algorithms_enabled(), kind.compiled],
            "options": [[k, v] for k, v in sorted(current.options) if "." in k],
        }

    def refusal(self, module: nn.Module, params: Any, chain: Any, x: Any, *extras: Any) -> str:
        """Return why the module's own operations are to run, or ``""``; see :func:`fits`."""
        if not (_is_ordinary(x) and x.ndim and all(map(_is_ordinary, extras))):
            return fits(params, chain, x, *extras)
        kind, rows = x.device.type, x.shape[:-1]
        shapes = []
        for each in extras:
            shapes.append((each.dtype, each.shape[-1:], _alike(each.shape[:-1], rows)))
        key = (
            x.dtype, x.shape[-1], rows.numel().bit_length(), x.is_contiguous(), *shapes,
            x.requires_grad, params, torch.is_grad_enabled(), kind, module.training,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            torch.are_deterministic_algorithms_enabled(), matmul_precision(kind),
            torch.get_num_threads(), current.values, manager.generation, FusibleOperation.changes,
        )  # fmt: skip
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._looked_up(module, params, chain, x, *extras)
        return self._known[key]

    @without_modes()
    def _looked_up(
        self, module: nn.Module, params: Any, chain: Any, x: Tensor, *extras: Any
    ) -> str:
        why = fits(params, chain, x, *extras)
        if why or current.recipe is not None:
            return why
        how: Any = {"trades_time": True, "prefer": dict(current.options).get("prefer", "speed")}
        entries = self.entries(module, chain, Kind.of(x, False))
        found = applicable_entry(entries, shape_of(x)._asdict(), **how)
        return "" if found is None else found.refusal(**how)

    def entries(self, module: nn.Module, chain: Any, kind: Kind) -> Entries:
        """The measurements for a kind of call, by the shape of the input."""
        param = next(module.parameters(), None)
        device = torch.device(kind.device) if param is None else param.device
        table = tables.table_for(device)
        if not table.entries:
            return {}
        of = tables.subject_key(self.subject(module, chain, kind))
        return table.entries.get(of, {})


def _alike(shape: torch.Size, rows: torch.Size) -> tuple[Any, ...]:
    """How the leading dimensions of an extra input stand to those of the input."""
    pairs = zip(reversed(shape), reversed(rows), strict=False)
    return len(shape) - len(rows), *[(size == 1, size == other) for size, other in pairs]


def _is_ordinary(x: Any) -> bool:
    """Whether a key of :class:`MeasuredChoice` has all that matters about an argument."""
    plain = type(x) in _PLAIN and not x.is_nested
    return plain and x.layout is torch.strided and not x.is_meta


def wants_chains_in_graphs(values: Any) -> bool:
    """Whether the user wants chains in graphs of ``torch.compile``."""
    return ("chains_under_compile", True) in values.options


def nothing_in_graphs() -> bool:
    """Whether no chain of any module runs where ``torch.compile`` traces."""
    if wants_chains_in_graphs(current.values):
        return False
    return not any(table.in_graphs for table in _tables())


def _tables() -> list[tables.Table]:
    kinds = "cpu", *["cuda"] * torch.cuda.is_available()
    return [tables.table_for(torch.device(kind)) for kind in kinds]


def pays_in_graph(found: Measurement) -> bool:
    """Whether a chain that ``torch.compile`` traced was faster than the module's own forward."""
    return not found.wrong and found.speed - found.noise / 2 > 1


# These are constant in a trace. The generation guards them; a new table changes it.


def is_known_in_graphs(title: str, generation: int) -> bool:
    """Whether a chain of such modules was measured to be faster under ``torch.compile``.

    It depends on the title alone, so that modules of one class are compiled once.
    """
    return any(
        pays_in_graph(found) for table in _tables() for found in table.in_graphs.get(title, ())
    )


def is_faster_in_graph(
    choice: MeasuredChoice, module: nn.Module, chain: Any, generation: int, *kind: Any
) -> bool:
    """Whether the chain of a module is faster there for all numbers of rows that were measured."""
    entries = choice.entries(module, chain, Kind(*kind)).values()
    return bool(entries) and all(map(pays_in_graph, entries))


is_known_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_faster_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
