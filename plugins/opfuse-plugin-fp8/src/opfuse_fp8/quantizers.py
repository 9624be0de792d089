"""The quantizers of the recipes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor
from opfuse_quantized.swizzle import swizzled
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from opfuse import Quantizer, QuantizerRole
from opfuse.core.overwriting import write_state
from opfuse.core.quantization import BOTH, QuantizedTensor, Usage, nothing_recorded, unchanged
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops.authoring import is_captured
from opfuse.ops.row_groups import RowGroups, cast_each

from . import casts
from .twins import Into

__all__ = [
    "BlockQuantizer",
    "CurrentQuantizer",
    "DelayedQuantizer",
    "IdentityQuantizer",
    "MXQuantizer",
]


Tensors = Sequence[Tensor | None]
_by_kernels: Callable[[Tensor, Into], QuantizedTensor | None] | None = None
_groups_by_kernels: Callable[..., RowGroups | None] | None = None
_parts_by_kernels: Callable[[Sequence[Tensor], Into], QuantizedTensor | None] | None = None


def bind_kernels(
    cast: Callable[[Tensor, Into], QuantizedTensor | None],
    groups: Callable[..., RowGroups | None],
    parts: Callable[[Sequence[Tensor], Into], QuantizedTensor | None],
) -> None:
    """Hand down what casts by kernels, or gives None; the kernels know the quantizers.

    Args:
        cast: Casts a tensor.
        groups: Casts groups of rows, called as :meth:`opfuse.Quantizer.quantize_groups`.
        parts: Casts matrices as the rows of one.
    """
    global _by_kernels, _groups_by_kernels, _parts_by_kernels
    _by_kernels, _groups_by_kernels, _parts_by_kernels = cast, groups, parts


def named(role: QuantizerRole) -> str:
    """The name of a tensor in errors."""
    op = f"{role.module_type} {role.name!r}" if role.name else f"a {role.module_type or 'tensor'}"
    return f"the {role.tensor_type or 'value'} of {op}"


def _short(dtype: torch.dtype) -> str:
    """``"E4M3"`` or ``"E5M2"``."""
    return str(dtype).removeprefix("torch.float8_").removesuffix("fn").upper()


class RefusingQuantizer(Quantizer):
    """Raises at the first cast."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """See :meth:`opfuse.Quantizer.quantize`."""
        raise self._error


class BaseQuantizer(Quantizer):
    """Computes plain tensors, and makes a quantized one of them; writes into ``out`` if asked.

    Attributes:
        format: The class of its results.
        power_of_2: Whether its scales are powers of two.
        square: Whether its blocks are as high as wide.
        block: Rows and columns of its blocks, where a format has others than its own.
        swizzles: Whether scales are written in the order in which tensor cores read them.
        four_over_six: How the largest magnitude of a block is chosen, where it is.
    """

    format: ClassVar[type[QuantizedTensor]]
    power_of_2: bool = False
    square: bool = False
    block: tuple[int, int] = (1, 1)
    swizzles: bool = False
    four_over_six: str | None = None

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """See :meth:`opfuse.Quantizer.quantize`."""
        if out is not None:  # a copy that stays would be of other values
            usage = Usage(*map(max, usage, out.copies))
        made = None if _by_kernels is None else _by_kernels(tensor, Into(self, usage))
        if made is None:
            made = self.reference(tensor, usage)
        if out is None:
            return made
        with torch.no_grad():
            return _written(made, out)

    def reference(self, tensor: Tensor, usage: Usage, again: Any = None) -> QuantizedTensor:
        """The cast by PyTorch's operations, wherever the tensor is: kernels are compared with it.

        Args:
            tensor: The values.
            usage: Which copies are needed.
            again: What this quantizer made of the same values before: its scales are used, and
                nothing is recorded. None: it is the first cast.
        """
        with torch.no_grad():
            made = self.over(tensor.shape, tensor.dtype, self.tensors_of(tensor, usage))
        return made.checked()

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """The tensors of the format, in its order; exponents of MX scales as bytes.

        Args:
            tensor: The values.
            usage: Which copies are needed.
        """
        raise NotImplementedError

    def over(self, shape: torch.Size, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
        """A quantized tensor over what :meth:`tensors_of`, or a kernel, computed; without checks.

        Args:
            shape: The shape of the values, in which the first tensor is viewed.
            dtype: The dtype of the values.
            tensors: As :meth:`tensors_of` gives them.
        """
        data, *others = tensors
        data = None if data is None else data.view(shape)
        return self.format.known(shape, dtype, self, (data, *others))


def _written(made: QuantizedTensor, out: QuantizedTensor) -> QuantizedTensor:
    """``out`` with the values of ``made``.

    Raises:
        ValueError: ``out`` has another layout, shape or dtype, or lacks a copy.
    """
    if type(out) is not type(made) or _layout(out) != _layout(made):
        raise ValueError(f"quantize(out=...): expected a place for {made!r}, got {out!r}")
    pairs = list(zip(out.tensors(), made.tensors(), strict=True))
    if any(there is None and new is not None for there, new in pairs):
        raise ValueError(f"quantize(out=...): expected every copy of {made!r}, got {out!r}")
    for there, new in pairs:
        if there is not None and new is not None:
            there.copy_(new)
    return out


def _layout(made: QuantizedTensor) -> list[Any]:
    """Shape, dtype, and what else a format says besides its tensors."""
    apart = (*made.tensor_names, "quantizer")
    return [getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in apart]


class _TensorQuantizer(BaseQuantizer):
    """One scale for the whole tensor.

    Args:
        dtype: An FP8 dtype.

    Attributes:
        infinite: How often the largest magnitude was infinite, int32, (1,), on the device of the
            values, where no step reads it; or None.
        if_infinite: What then becomes of the scale.
    """

    format = ScaledTensor
    infinite: Tensor | None = None
    if_infinite: ClassVar[str]

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def remark(self) -> str:
        """See :meth:`opfuse.Quantizer.remark`."""
        counted = getattr(self._recording or self, "infinite", None)
        times = 0 if counted is None or counted.is_meta else int(counted)
        return f"its largest magnitude was infinite {times} times: {self.if_infinite}" * bool(times)

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        return f"{_short(self.dtype)}, one scale"

    def quantize_groups(
        self, tensor: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Quantizer]
    ) -> RowGroups | None:
        """See :meth:`opfuse.Quantizer.quantize_groups`."""
        known = type(self) in (CurrentQuantizer, DelayedQuantizer)  # others may cast in other ways
        alike = [type(q) is type(self) and _settings(q) == _settings(self) for q in quantizers]
        if not known or not all(alike):
            return None
        run = _groups_by_kernels
        made = None if run is None else run(tensor, ends, usage, quantizers)
        return cast_each(tensor, ends, usage, quantizers) if made is None else made

    def quantize_parts(self, parts: Sequence[Tensor], usage: Usage) -> QuantizedTensor:
        """See :meth:`opfuse.Quantizer.quantize_parts`."""
        made = None if _parts_by_kernels is None else _parts_by_kernels(parts, Into(self, usage))
        return super().quantize_parts(parts, usage) if made is None else made

    def with_scale(self, tensor: Tensor, usage: Usage, scale: Tensor) -> Tensors:
        """The tensors of the format for values that are multiplied by ``scale``: fp32, (1,)."""
        codes = casts.cast(tensor, scale, self.dtype).reshape(tensor.shape).contiguous()
        transposed = as_matrix(codes).t().contiguous() if usage.columnwise else None
        return codes if usage.rowwise else None, transposed, scale.reciprocal()

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """See :meth:`BaseQuantizer.tensors_of`."""
        return self.with_largest(tensor, usage, casts.largest(tensor))

    def with_largest(self, tensor: Tensor, usage: Usage, amax: Tensor) -> Tensors:
        """The tensors of the format for values of which the largest magnitude is known.

        Args:
            tensor: The values.
            usage: Which copies are needed.
            amax: fp32, (1,).
        """
        raise NotImplementedError

    def why_whole(self, shape: torch.Size, usage: Usage) -> str:
        """See :meth:`opfuse.Quantizer.why_whole`."""
        return _why_whole(self, (CurrentQuantizer, DelayedQuantizer), shape, 1)

    def quantize_rows(
        self, tensor: Tensor, usage: Usage, largest: Callable[[Tensor], Tensor]
    ) -> QuantizedTensor:
        """See :meth:`opfuse.Quantizer.quantize_rows`: the scale is that of the largest of all."""
        with torch.no_grad():
            made = self.with_largest(tensor, usage, largest(casts.largest(tensor)))
            return self.over(tensor.shape, tensor.dtype, made).checked()


def _settings(quantizer: Any) -> tuple[Any, ...]:
    names = "dtype", "power_of_2", "square"
    return tuple([getattr(quantizer, name, None) for name in names])


@dataclasses.dataclass(eq=False, repr=False)
class RescaledTensor(ScaledTensor):
    """A :class:`ScaledTensor` that can be cast again to the same bits.

    ``1 / scale_inv`` is not always the number that the values were multiplied by.

    Args:
        shape: As there, and all but the last.
        dtype: See ``shape``.
        quantizer: See ``shape``.
        rowwise_data: See ``shape``.
        columnwise_data: See ``shape``.
        scale_inv: See ``shape``.
        scale: What the values were multiplied by: float32, of one element.
    """

    scale: Tensor | None = None
    tensor_names = (*ScaledTensor.tensor_names, "scale")  # type: ignore[assignment]


class CurrentQuantizer(_TensorQuantizer):
    """A scale from the tensor's own largest magnitude.

    Args:
        dtype: An FP8 dtype.
        power_of_2: Whether the scale is rounded down to a power of two.
    """

    if_infinite = "its scale was 1"

    def __init__(self, dtype: torch.dtype, power_of_2: bool = False) -> None:
        super().__init__(dtype)
        self.power_of_2 = power_of_2

    def counter(self, device: torch.device) -> Tensor | None:
        """Where casts on a device count; None: a graph is captured that would count from 0 again.

        Args:
            device: The device.
        """
        if self.infinite is None or self.infinite.device != device:
            if is_captured(device):
                return None
            with torch.inference_mode(False):
                self.infinite = torch.zeros(1, dtype=torch.int32, device=device)
        return self.infinite

    def with_largest(self, tensor: Tensor, usage: Usage, amax: Tensor) -> Tensors:
        """See :meth:`_TensorQuantizer.with_largest`."""
        most = torch.finfo(self.dtype).max
        scale = casts.scale_of(amax, most, power_of_2=self.power_of_2, if_infinite=casts.FP32_MAX)
        counts = type(amax) is Tensor and not is_compiling()
        if counts and (count := self.counter(amax.device)) is not None:
            write_state(count.add_, amax.isinf())
        return self.with_scale(tensor, usage, scale)


class DelayedQuantizer(_TensorQuantizer):
    """A scale from the largest magnitudes of earlier steps.

    Args:
        dtype: An FP8 dtype.
        is_grad: Whether it casts gradients: its history moves only where one arrived.
        history: Over how many steps the largest magnitude is taken.
        margin: How many powers of two are left free.
        most_recent: Take the last step's alone.
        device: Of its state.

    :func:`opfuse_fp8.delayed.update_delayed` advances it, and puts its state next to that of the
    other quantizers of a block: then the tensors are views of a buffer. There they stay, as they do
    once a CUDA graph was captured that reads them.

    Attributes:
        scale: What values are multiplied by, fp32, (1,).
        amax: The largest magnitude since the last update; -1: none.
        amax_history: Those of the last steps, ``(history,)``: row 0 is the current step, and 0
            between updates; the last row is the latest, as in Transformer Engine.
    """

    format = RescaledTensor
    state_names = ("scale", "amax", "amax_history")
    pending_names = ("amax",)
    if_infinite = "its scale stayed as it was"
    # its state where it stays: in a buffer, or where a CUDA graph reads it
    _fixed: tuple[Tensor | None, ...] = (None,) * 3

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        is_grad: bool = False,
        history: int = 1024,
        margin: int = 0,
        most_recent: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dtype)
        self.is_grad, self.margin, self.most_recent = is_grad, margin, most_recent
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        self.amax = nothing_recorded(device)
        self.amax_history = torch.zeros(history, dtype=torch.float32, device=device)
        self.infinite = torch.zeros(1, dtype=torch.int32, device=device)

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        return f"{super().describe()}, of earlier steps"

    def with_largest(self, tensor: Tensor, usage: Usage, amax: Tensor) -> Tensors:
        """See :meth:`_TensorQuantizer.with_largest`."""
        self.is_fixed()
        self.record(amax)
        scale = self.scale.clone()
        return *self.with_scale(tensor, usage, scale), scale

    def is_fixed(self) -> bool:
        """Return whether the state has to stay where it is: a CUDA graph may read it there.

        To be called where a cast reads or writes state that is not known to be fixed.
        """
        if self._recording is not None:
            return self._recording.is_fixed()  # type: ignore[attr-defined, no-any-return]
        state = self.scale, self.amax, self.amax_history
        if is_captured(self.scale.device):
            self._fixed = state
        return any(map(operator.is_, state, self._fixed))

    def record(self, amax: Tensor) -> None:
        """Record the largest magnitude of a tensor, which a kernel may have found.

        Args:
            amax: fp32, (1,); NaN is left out of it.
        """
        write_state(torch.maximum, self.amax, amax, out=self.amax)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """Cast again with the earlier scale; see :meth:`opfuse.Quantizer.requantize`."""
        made = None if _by_kernels is None else _by_kernels(tensor, Into(self, usage, scales))
        return self.reference(tensor, usage, scales) if made is None else made

    def reference(self, tensor: Tensor, usage: Usage, again: Any = None) -> QuantizedTensor:
        """See :meth:`BaseQuantizer.reference`."""
        if again is None:
            return super().reference(tensor, usage)
        with torch.no_grad():
            made = *self.with_scale(tensor, usage, again.scale), again.scale
            return self.over(tensor.shape, tensor.dtype, made).checked()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own state, which shares no memory with that of other quantizers."""
        own = [name for name in (*self.state_names, "infinite") if name in vars(self)]
        apart = {"_shared": None, "_fixed": (None,) * 3}
        return {**vars(self), **apart, **{n: vars(self)[n].clone() for n in own}}


def _why_whole(quantizer: Quantizer, known: tuple[type, ...], shape: torch.Size, high: int) -> str:
    """See :meth:`opfuse.Quantizer.why_whole`.

    Args:
        quantizer: The quantizer.
        known: The classes whose casts are known; one derived from them may cast otherwise.
        shape: The shape of the rows.
        high: The number of rows that share a scale.
    """
    if type(quantizer) not in known:
        names = " and ".join(cls.__name__ for cls in known)
        return f"{type(quantizer).__name__} may cast otherwise than {names}"
    rows = shape[:-1].numel()
    if rows % high:
        return f"{rows} rows of a process are not whole blocks of {high}"
    return ""


class _BlockwiseQuantizer(BaseQuantizer):
    """Each copy is cast by itself, with the scales of its blocks."""

    def quantize_rows(
        self, tensor: Tensor, usage: Usage, largest: Callable[[Tensor], Tensor]
    ) -> QuantizedTensor:
        """See :meth:`opfuse.Quantizer.quantize_rows`: no block has rows of two processes."""
        return self.quantize(tensor, usage)

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """See :meth:`BaseQuantizer.tensors_of`."""
        matrix = as_matrix(tensor)
        one = self._copy(matrix) if usage.rowwise else (None, None)
        other = self._copy(matrix.t()) if usage.columnwise else (None, None)
        return *one, *other

    def _copy(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of a matrix, contiguous, and the scales of its blocks."""
        raise NotImplementedError


class BlockQuantizer(_BlockwiseQuantizer):
    """A scale for each block of 1 x 128 or 128 x 128 values.

    Args:
        dtype: An FP8 dtype.
        block: ``(1, 128)`` or ``(128, 128)``.
        power_of_2: Whether scales are rounded down to powers of two.
    """

    def __init__(
        self, dtype: torch.dtype, block: tuple[int, int], *, power_of_2: bool = True
    ) -> None:
        self.dtype, self.block, self.power_of_2 = dtype, block, power_of_2

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        return f"{_short(self.dtype)}, a scale per {self.block[0]} x {self.block[1]}"

    def why_whole(self, shape: torch.Size, usage: Usage) -> str:
        """See :meth:`opfuse.Quantizer.why_whole`."""
        high = 128 if usage.columnwise else self.block[0]
        return _why_whole(self, (BlockQuantizer,), shape, high)

    def over(self, shape: torch.Size, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
        """See :meth:`BaseQuantizer.over`."""
        data, *others = tensors
        data = None if data is None else data.view(shape)
        return BlockScaledTensor.known(shape, dtype, self, (data, *others), block=self.block)

    def _copy(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = matrix.shape
        tall, wide = self.block
        down, across = -(-rows // tall), -(-columns // wide)
        padded = F.pad(matrix, (0, across * wide - columns, 0, down * tall - rows))
        blocks = padded.contiguous().view(down, tall, across, wide)
        infinite = min(torch.finfo(matrix.dtype).max, casts.FP32_MAX)
        scale = casts.scale_of(
            casts.largest(blocks, (1, 3)),
            torch.finfo(self.dtype).max,
            power_of_2=self.power_of_2,
            if_infinite=infinite,
        )
        codes = casts.cast(blocks, scale, self.dtype).view(down * tall, across * wide)
        inverse = scale.reciprocal().view(down, across)
        if tall == 1:
            inverse = inverse.t().contiguous()
        else:
            inverse = F.pad(inverse, (0, -across % 4))
        return codes[:rows, :columns].contiguous(), inverse


class MXQuantizer(_BlockwiseQuantizer):
    """A power of two for each 32 values along what a product sums over.

    Args:
        dtype: An FP8 dtype.
        square: Whether 32 x 32 values share a scale.
        who: What errors call the tensor.
        swizzles: Whether scales are written in the order in which tensor cores read them, see
            :class:`opfuse_quantized.formats.MXTensor`: then a product does not have to.
    """

    row_multiple = 32

    def __init__(
        self,
        dtype: torch.dtype,
        square: bool = False,
        *,
        who: str = "a tensor",
        swizzles: bool = False,
    ) -> None:
        self.dtype, self.square, self._who, self.swizzles = dtype, square, who, swizzles

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        return f"{_short(self.dtype)}, a power of two per {32 if self.square else 1} x 32"

    def quantize_groups(
        self, tensor: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Quantizer]
    ) -> RowGroups | None:
        """See :meth:`opfuse.Quantizer.quantize_groups`; by the kernel alone."""
        alike = [type(q) is MXQuantizer and _settings(q) == _settings(self) for q in quantizers]
        if self.square or tensor.shape[-1] % 32 or not all(alike) or _groups_by_kernels is None:
            return None
        return _groups_by_kernels(tensor, ends, usage, quantizers)

    @property
    def casts_groups(self) -> bool:
        """See :attr:`opfuse.Quantizer.casts_groups`."""
        return not self.square

    def why_whole(self, shape: torch.Size, usage: Usage) -> str:
        """See :meth:`opfuse.Quantizer.why_whole`."""
        return _why_whole(self, (MXQuantizer,), shape, 32 if usage.columnwise or self.square else 1)

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """See :meth:`BaseQuantizer.tensors_of`."""
        needed = BOTH if self.square else usage
        if (found := side_to_pad(as_matrix(tensor), needed, 32)) is not None:
            side, _, advice = found
            raise ValueError(
                f"MXFP8 expected a multiple of 32 {side}, got {self._who} of shape "
                f"{tuple(tensor.shape)}: {advice}"
            )
        return super().tensors_of(tensor, usage)

    def over(self, shape: torch.Size, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
        """See :meth:`BaseQuantizer.over`."""
        (row, column), scales = tensors[::2], tensors[1::2]
        data = None if row is None else row.view(shape)
        exponents = [None if s is None else s.view(torch.float8_e8m0fnu) for s in scales]
        parts = data, exponents[0], column, exponents[1]
        return MXTensor.known(shape, dtype, self, parts, swizzled=self.swizzles)

    def _copy(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = matrix.shape
        tall = 32 if self.square else 1
        blocks = matrix.reshape(rows // tall, tall, columns // 32, 32)
        exponent = casts.e8m0_of(casts.largest(blocks, (1, 3)), self.dtype)
        codes = casts.cast(blocks, casts.e8m0_scale(exponent), self.dtype).view(rows, columns)
        each = exponent.expand(-1, tall, -1, 1).reshape(rows, columns // 32)
        return codes.contiguous(), swizzled(each) if self.swizzles else each.contiguous()


class IdentityQuantizer(BaseQuantizer):
    """Leaves values as they are: for tensors that a :class:`CustomRecipe` does not quantize."""

    quantizes = False

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        return "unchanged"

    def reference(self, tensor: Tensor, usage: Usage, again: Any = None) -> QuantizedTensor:
        """See :meth:`BaseQuantizer.reference`."""
        with torch.no_grad():
            return unchanged(tensor, usage, self)


def as_matrix(tensor: Tensor) -> Tensor:
    """All dimensions but the last together are the rows; without gradients."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    return tensor.detach().reshape(tensor.shape[:-1].numel(), columns)


def side_to_pad(matrix: Tensor, usage: Usage, multiple: int) -> tuple[str, int, str] | None:
    """A side of a matrix that blocks do not fill: name, size, and advice for an error."""
    rows, columns = matrix.shape
    for used, side, size in ((usage.rowwise, "columns", columns), (usage.columnwise, "rows", rows)):
        if used and size % multiple:
            advice = f"pad it with zeros to {size + -size % multiple} {side}"
            return side, size, f"{advice}, or leave the op out by autocast(skip=[...])"
    return None
