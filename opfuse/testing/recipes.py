"""Recipes for the checks, in plain PyTorch, and access to those of the plugins.

Each makes fp8 tensors: PerBlock in a format of its own, which no kernel knows, the others as
``ScaledTensor``. They differ in what a fusion can get wrong: one scale per tensor, blocks whose
rowwise and columnwise copies hold different values, and scales that follow from earlier steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.environment import Environment
from ..core.hookspecs import hookimpl
from ..core.plugins import manager
from ..core.quantization import (
    ROWWISE,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    Usage,
    nothing_recorded,
)
from ..core.quantization.formats import ScaledTensor, transpose_back
from ..core.recipe_lookup import CACHE_RECIPE
from ..core.records import PluginRecord
from ..ops.row_groups import GroupedTensor, cast_each

_Out = QuantizedTensor | None
OVERRIDES = (None, "high_precision", "dequantized")
NAME = "opfuse-testing"
"""The name of the plugin that offers these recipes."""


@dataclasses.dataclass(frozen=True)
class PerTensor(Recipe):
    """One scale per tensor, from its own largest magnitude; e4m3, gradients e5m2."""


@dataclasses.dataclass(frozen=True)
class PerBlock(Recipe):
    """A scale per 1 x 128 values; e4m3.

    The copies of a tensor are cut along different dimensions: who reads the wrong one computes with
    other values.
    """


@dataclasses.dataclass(frozen=True)
class Delayed(Recipe):
    """One scale per tensor, from the largest magnitudes of the last two steps; else as PerTensor.

    It also counts casts, so that two for one tensor do not look like one.
    """

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """See :meth:`opfuse.Recipe.update`; there is no group in the kit."""
        assert group is None
        for quantizer in quantizers:
            assert isinstance(quantizer, _Delayed)
            if not quantizer.is_gradient or quantizer.seen >= 0:
                quantizer.advance()


class _PerTensor(Quantizer):
    def __init__(self, role: QuantizerRole, device: torch.device | None) -> None:
        self.is_gradient = role.tensor_type == "grad_output"
        self.dtype = torch.float8_e5m2 if self.is_gradient else torch.float8_e4m3fn

    def quantize(self, tensor: Tensor, usage: Usage, out: _Out = None) -> QuantizedTensor:
        return self.scaled(tensor, _scale(_amax(tensor), self.dtype).reshape(1), usage)

    def quantize_groups(
        self, tensor: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Quantizer]
    ) -> GroupedTensor | None:
        return cast_each(tensor, ends, usage, quantizers)

    def scaled(self, tensor: Tensor, scale: Tensor, usage: Usage) -> QuantizedTensor:
        data = _codes(tensor.detach(), scale.reshape(()), self.dtype).contiguous()
        row = data if usage.rowwise else None
        column = _matrix(data).t().contiguous() if usage.columnwise else None
        return ScaledTensor(tensor.shape, tensor.dtype, self, row, column, scale)


class _Delayed(_PerTensor):
    state_names: ClassVar[tuple[str, ...]] = ("scale", "history", "count", "seen", "casts")
    pending_names: ClassVar[tuple[str, ...]] = ("seen", "casts")

    def __init__(self, role: QuantizerRole, device: torch.device | None) -> None:
        super().__init__(role, device)
        made: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.scale, self.history = torch.ones(1, **made), torch.zeros(2, **made)
        self.count = torch.zeros(1, **made)
        self.seen, self.casts = nothing_recorded(device), nothing_recorded(device)

    def quantize(self, tensor: Tensor, usage: Usage, out: _Out = None) -> QuantizedTensor:
        torch.maximum(self.seen, _amax(tensor), out=self.seen)
        self.casts.add_(1)
        return self.scaled(tensor, self.scale.clone(), usage)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        assert isinstance(scales, ScaledTensor) and scales.scale_inv is not None
        return self.scaled(tensor, scales.scale_inv, usage)

    def advance(self) -> None:
        """Fold in what was recorded, and forget it."""
        self.history.copy_(torch.cat([self.seen.clamp(min=0), self.history[:1]]))
        most = self.history.amax()  # 0: nothing was seen, as of a weight that was not cast again
        self.scale.copy_(torch.where(most > 0, _scale(most, self.dtype), self.scale))
        self.count.add_(self.casts + 1)
        self.discard()


@dataclasses.dataclass(eq=False, repr=False)
class _Blocks(QuantizedTensor):
    """A float32 scale for each 1 x 128 values of a copy: ``(outer, ceil(inner / 128))``."""

    rowwise_data: Tensor | None
    rowwise_scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    data_names = ("rowwise_data", "columnwise_data")
    tensor_names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")

    @property
    def usage(self) -> Usage:
        return Usage(self.rowwise_data is not None, self.columnwise_data is not None)

    def dequantize(self, usage: Usage = ROWWISE) -> Tensor:
        way = self.copy_to_read(usage)
        codes, scale = getattr(self, f"{way}_data"), getattr(self, f"{way}_scale_inv")
        codes = _matrix(codes)
        each = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
        values = (codes.float() * each).to(self.dtype)
        return values.reshape(self.shape) if usage.rowwise else transpose_back(values, self.shape)


class _PerBlock(Quantizer):
    def __init__(self, role: QuantizerRole, device: torch.device | None) -> None:
        super().__init__()

    def quantize(self, tensor: Tensor, usage: Usage, out: _Out = None) -> QuantizedTensor:
        values = _matrix(tensor.detach())
        row, row_scale = self._copy(values) if usage.rowwise else (None, None)
        column, column_scale = self._copy(values.t()) if usage.columnwise else (None, None)
        row = row if row is None else row.reshape(tensor.shape)
        return _Blocks(tensor.shape, tensor.dtype, self, row, row_scale, column, column_scale)

    def _copy(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales of a matrix whose blocks lie along its last dimension."""
        outer, inner = values.shape
        along = -(-inner // 128)
        blocks = F.pad(values, (0, 128 * along - inner)).abs().reshape(outer, along, 128).float()
        scale = _scale(blocks.amax(2), torch.float8_e4m3fn)
        each = scale.repeat_interleave(128, 1)[:, :inner]
        return _codes(values, each, torch.float8_e4m3fn).contiguous(), scale


def _matrix(tensor: Tensor) -> Tensor:
    """The tensor as rows and columns: its last dimension is the columns."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    return tensor.reshape(tensor.shape[:-1].numel(), columns)


def _amax(tensor: Tensor) -> Tensor:
    none = tensor.new_zeros((), dtype=torch.float32)
    return tensor.detach().abs().amax().float() if tensor.numel() else none


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor of the codes with which ``amax`` becomes the largest code."""
    scale = amax / torch.finfo(dtype).max
    return torch.where(scale == 0, 1.0, scale)


def _codes(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    wide = values if values.dtype is torch.float64 else values.float()
    return (wide / scale).clamp(-most, most).to(dtype)


TOYS: Mapping[type[Recipe], Any] = {PerTensor: _PerTensor, PerBlock: _PerBlock, Delayed: _Delayed}
"""The recipes of the kit, and their quantizers."""


class _Plugin:
    """Offers the recipes of the kit and of the plugins, without the plugins' fusions."""

    @hookimpl
    def opfuse_recipes(self) -> dict[str, type[Recipe]]:
        """See :func:`opfuse.core.hookspecs.opfuse_recipes`."""
        named = {f"testing-{cls.__name__}": cls for cls in TOYS}
        return {**named, CACHE_RECIPE: PerTensor}  # unless a plugin offers it

    @hookimpl
    def opfuse_quantizer(
        self, recipe: Recipe, role: QuantizerRole, env: Environment | None, siblings: Any
    ) -> Quantizer | None:
        """See :func:`opfuse.core.hookspecs.opfuse_quantizer`."""
        if type(recipe) in TOYS:
            return TOYS[type(recipe)](role, env and env.device)  # type: ignore[no-any-return]
        given: Any = dict(recipe=recipe, role=role, env=env, siblings=siblings)
        for record in manager.records:
            if record.name != NAME and type(recipe) in record.recipes.values():
                if quantizer := manager.ask(record, "opfuse_quantizer", Quantizer, **given):
                    return quantizer  # type: ignore[no-any-return]
        return None


@functools.cache
def _record() -> PluginRecord:
    """The plugin, loaded once, among no others."""
    record = manager.register(_Plugin(), name=NAME, distribution=NAME)
    manager.active(NAME)
    manager.records = [other for other in manager.records if other is not record]
    return record


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """The plugin ``opfuse-testing`` is there, for a ``with`` block; it serves every recipe."""
    record, others = _record(), (other.recipes for other in manager.records)
    record.recipes = functools.reduce(operator.or_, others, _Plugin().opfuse_recipes())
    with manager.temporarily(records=[*manager.records, record]):
        yield


def recipes_for(plugin: str) -> tuple[Recipe, ...]:
    """The recipes that a plugin is tested under: its own with defaults, then those of the kit."""
    records = [record for record in manager.records if record.answers_to(plugin)]
    own = dict.fromkeys(cls for record in records for cls in record.recipes.values())
    made = []
    for cls in (*own, *TOYS):
        with contextlib.suppress(TypeError):  # it needs arguments
            made.append(cls())
    return tuple(made)


def variants(recipe: Recipe) -> Iterator[Recipe]:
    """A recipe with each value of ``backward_override`` that it takes."""
    for override in OVERRIDES:
        with contextlib.suppress(ValueError, NotImplementedError):
            yield dataclasses.replace(recipe, backward_override=override)
