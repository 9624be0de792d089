"""The quantizers of NVFP4: two levels of scales, a Hadamard transform, stochastic rounding.

The order of operations is that of Transformer Engine's reference, so codes and scales are the same
to the bit where it defines them: for finite values, rounded to the nearest.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from opfuse_quantized.formats import NVFP4Tensor
from opfuse_quantized.hadamard import mixed
from opfuse_quantized.swizzle import swizzled
from opfuse_triton.philox import philox
from torch import Tensor

from opfuse import Quantizer
from opfuse.core.quantization import BOTH, QuantizedTensor, Usage, nothing_recorded

from . import casts
from .delayed import update_delayed
from .quantizers import BaseQuantizer, Tensors, as_matrix, side_to_pad

__all__ = ["NVFP4Quantizer", "StochasticNVFP4Quantizer"]

SIGNS = 0xD7E8
"""Transformer Engine's signs of the Hadamard transform: bit ``i`` set means -1."""

BLOCK = 16
MOST, MOST_OF_SCALES, LESS_OF_SCALES = 6.0, 448.0, 256.0
MAE, MSE = "MAE", "MSE"


class NVFP4Quantizer(BaseQuantizer):
    """E2M1 values with an E4M3 scale for each 16, and a float32 scale for the tensor.

    Each copy has scales of its own. A block that holds a value that is not finite has the scale
    NaN, so that all of it becomes NaN: E2M1 has neither infinity nor NaN.

    Args:
        square: Whether 16 x 16 values share a scale.
        signs: None, or of the Hadamard transform of the columnwise copy, see
            :class:`opfuse_quantized.formats.NVFP4Tensor`.
        what: Which tensor it casts, for messages.
        four_over_six: ``"MAE"`` or ``"MSE"``: each block is also cast with its largest magnitude
            at 4 instead of 6, and the one with the lower mean absolute or squared error stays.
            None: always 6.
        most_of_scales: The scale of the tensor's largest block: 448; or 256, with
            ``four_over_six``, which leaves room for a scale that is 1.5 times as large.
        swizzles: Whether the scales of blocks are written in the order in which tensor cores read
            them, see :class:`opfuse_quantized.formats.MXTensor`: then a product does not have to.
    """

    row_multiple = BLOCK

    def __init__(
        self,
        *,
        square: bool = False,
        signs: int | None = None,
        what: str = "the tensor",
        four_over_six: str | None = None,
        most_of_scales: float = MOST_OF_SCALES,
        swizzles: bool = False,
    ) -> None:
        if square and signs is not None:
            raise ValueError(
                "NVFP4Quantizer: expected signs=None with square=True, since mixed rows have no "
                f"blocks of 16 x 16 in common with the rowwise copy, got {signs!r}"
            )
        if four_over_six not in (None, MAE, MSE):
            raise ValueError(
                f"NVFP4Quantizer: expected four_over_six=None, 'MAE' or 'MSE', got "
                f"{four_over_six!r}"
            )
        known = (MOST_OF_SCALES, LESS_OF_SCALES) if four_over_six else (MOST_OF_SCALES,)
        if most_of_scales not in known:
            raise ValueError(
                f"NVFP4Quantizer: expected most_of_scales to be 448, or 256 with four_over_six, "
                f"got {most_of_scales!r}"
            )
        self.square, self.signs, self.what, self.swizzles = square, signs, what, swizzles
        self.four_over_six, self.most_of_scales = four_over_six, float(most_of_scales)

    def describe(self) -> str:
        """See :meth:`opfuse.Quantizer.describe`."""
        mixed_ = ", columns mixed" if self.signs is not None else ""
        mixed_ += ", at 4 or 6" if self.four_over_six else ""
        return f"E2M1, a scale per {BLOCK if self.square else 1} x {BLOCK}, and one{mixed_}"

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """See :meth:`opfuse_fp8.quantizers.BaseQuantizer.tensors_of`."""
        matrix = as_matrix(tensor)
        found = side_to_pad(matrix, BOTH if self.square else usage, BLOCK)
        if found is not None:
            side, size, advice = found
            raise ValueError(
                f"NVFP4 expected {self.what} to have a multiple of 16 {side}, got a tensor of "
                f"shape {tuple(tensor.shape)}, which has {size}: {advice}"
            )
        row = column = (None, None, None)  # type: tuple[Tensor | None, ...]
        if usage.rowwise:
            row = self._copy(matrix, 0)
        if usage.columnwise:
            turned = matrix.t()
            if self.signs is not None:
                turned = _mixed_as_it_came(turned.contiguous(), self.signs)
            column = self._copy(turned, 1)
        return *row[:2], *column[:2], row[2], column[2]

    def over(self, shape: torch.Size, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
        """See :meth:`opfuse_fp8.quantizers.BaseQuantizer.over`."""
        data, *others = tensors
        data = None if data is None else data.view(*shape[:-1], shape[-1] // 2)
        more: Any = {"columnwise_signs": self.signs, "swizzled": self.swizzles}
        return NVFP4Tensor(shape, dtype, self, data, *others, **more)

    def _copy(self, matrix: Tensor, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of a matrix, the scales of its blocks, and its own.

        Args:
            matrix: The values, blocks along the last dimension.
            which: 0 for the rowwise copy, 1 for the columnwise one.
        """
        rows, columns = matrix.shape
        tall = BLOCK if self.square else 1
        values = casts.wide(matrix.contiguous())
        blocks = values.view(rows // tall, tall, columns // BLOCK, BLOCK)
        numbers = blocks.nan_to_num(0.0, torch.inf, -torch.inf)
        size = numbers.abs()
        most = size.amax((1, 3), keepdim=True)
        amax = most.amax().reshape(1) if most.numel() else most.new_zeros(1)
        encode = tensor_scale(amax, self.most_of_scales)
        decode = encode.reciprocal()
        if self.four_over_six is None:
            scale = block_scale(most, encode)
            codes = self._codes(_scaled(size, scale, decode).view(rows, columns), which)
        else:
            scale, codes = self._better(size, most, amax, encode)
        signs = numbers.signbit().to(torch.uint8).view(rows, columns) << 3
        finite = blocks.abs().amax((1, 3), keepdim=True).isfinite()
        scale = torch.where(finite, scale.float(), torch.nan).to(scale.dtype)
        each = scale.expand(-1, tall, -1, 1).reshape(rows, columns // BLOCK)
        each = swizzled(each) if self.swizzles else each.contiguous()
        return packed(codes.view(rows, columns) | signs), each, decode

    def _better(
        self, size: Tensor, most: Tensor, amax: Tensor, encode: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scales and codes of blocks, with the largest magnitude at 4 or 6; of equal ones at 6."""
        six = most / torch.full_like(most, MOST) * encode
        decode, full = encode.reciprocal(), torch.full_like(amax, MOST * self.most_of_scales)
        found = []
        for wanted in (six * 1.5, six):
            scale = wanted.clamp(max=MOST_OF_SCALES).to(torch.float8_e4m3fn)
            codes = self._codes(_scaled(size, scale, decode), 0)
            error = _magnitudes(codes) * scale.float() * amax / full - size
            error = error.square() if self.four_over_six == MSE else error.abs()
            found.append((scale, codes, _summed(error)))
        (scale, codes, error), (scale_6, codes_6, error_6) = found
        at_4 = error < error_6
        scale = torch.where(at_4, scale.float(), scale_6.float()).to(scale.dtype)
        return scale, torch.where(at_4, codes, codes_6)

    def _codes(self, size: Tensor, which: int) -> Tensor:
        """The codes of E2M1 for magnitudes up to 6: the nearest, of two the even one; uint8."""
        place, first = _places(size)
        return place.round().to(torch.uint8) + first


class StochasticNVFP4Quantizer(NVFP4Quantizer):
    """Rounds up or down at random, so that the mean over steps is the value.

    The random numbers are those of Philox4x32-10. The key is the seed. The words of the counter are
    a quarter of the place of a value in its copy, the copy's columns, the number of steps, and
    twice the copy's rows, plus 1 for the columnwise copy. A value takes the word of the result that
    the rest of its place names, and of that the upper 24 bits. So the numbers do not follow from
    the values: one that differs in its last bit, because a fusion computed it, is rounded alike.
    The seed is torch's (:func:`torch.initial_seed`) when the
    quantizer is made, mixed with the name of the layer: layers with names from
    :func:`opfuse.assign_names` draw different numbers, and all others the same. Seed and steps are
    state, so a checkpoint resumes to the bit; torch's own generator is left alone. A repeated cast
    in a step draws the same, and so do two gradients that one layer casts in one step, if it runs
    twice: their errors are not independent.

    Args:
        square: As there, and all but the last.
        signs: See ``square``.
        what: See ``square``.
        swizzles: See ``square``.
        name: Of the layer.
        device: Of its state.

    Attributes:
        seed: int64, (1,).
        step: How many updates there were after a cast; int64, (1,).
        arrived: 0 where there was a cast since the last update, -1 where not; fp32, (1,).
    """

    state_names = ("seed", "step", "arrived")
    pending_names = ("arrived",)

    def __init__(
        self,
        *,
        square: bool = False,
        signs: int | None = None,
        what: str = "the tensor",
        swizzles: bool = False,
        name: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(square=square, signs=signs, what=what, swizzles=swizzles)
        seed = (torch.initial_seed() + (zlib.crc32(name.encode()) << 20)) & 0x7FFFFFFFFFFFFFFF
        self.seed = torch.full((1,), seed, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.arrived = nothing_recorded(device)

    def tensors_of(self, tensor: Tensor, usage: Usage) -> Tensors:
        """See :meth:`NVFP4Quantizer.tensors_of`."""
        made = super().tensors_of(tensor, usage)
        self.arrived.clamp_(min=0)
        return made

    def advance(self) -> None:
        """Count a step, if there was a cast. Nothing is read by the host."""
        self.step.add_(self.arrived >= 0)
        self.discard()

    def _codes(self, size: Tensor, which: int) -> Tensor:
        place, first = _places(size)
        below = place.floor()
        drawn = self._drawn(size, which)
        return (below + (place - below > drawn)).to(torch.uint8) + first

    def _drawn(self, like: Tensor, which: int) -> Tensor:
        """Numbers in [0, 1), multiples of 2^-24."""
        rows, columns = like.shape
        each = torch.arange(like.numel() // 4, device=like.device)
        words = philox(self.seed, each, columns, self.step, 2 * rows + which)
        bits = torch.stack(words, -1) >> 8 & 0xFFFFFF
        return (bits.float() * 2.0**-24).view(like.shape)


def update_counting(quantizers: Sequence[Quantizer], group: Any) -> None:
    """Advance quantizers by one step: those that draw numbers, and those with delayed scales.

    Args:
        quantizers: Those of a block.
        group: The process group over which the largest magnitudes are taken, or None.

    Raises:
        TypeError: One is of another kind, whose state would never advance.
    """
    others = []
    for quantizer in quantizers:
        if isinstance(quantizer, StochasticNVFP4Quantizer):
            quantizer.advance()
        else:
            others.append(quantizer)
    update_delayed(others, group)


# The arithmetic, in an order that decides the bits


def tensor_scale(most: Tensor, most_of_scales: float) -> Tensor:
    """The factor of all values: ``448 * 6 / amax``, 1 where that cannot be used.

    Args:
        most: The largest magnitude, fp32, (1,).
        most_of_scales: What to take for 448.
    """
    return casts.scale_of(most, most_of_scales * MOST, power_of_2=False, if_infinite=casts.FP32_MAX)


def block_scale(most: Tensor, encode: Tensor) -> Tensor:
    """The scales of blocks: ``amax / 6 * encode`` in E4M3.

    Args:
        most: The largest magnitudes of blocks, fp32.
        encode: The scale of the tensor.
    """
    sixth = torch.ones_like(encode) / torch.full_like(encode, MOST)
    return (most * (encode * sixth)).clamp(max=MOST_OF_SCALES).to(torch.float8_e4m3fn)


def _scaled(size: Tensor, scale: Tensor, decode: Tensor) -> Tensor:
    """Magnitudes without their scales: up to 6."""
    factor = (scale.float() * decode).reciprocal().clamp(max=casts.FP32_MAX)
    return (size * factor).clamp(max=MOST)


def _magnitudes(codes: Tensor) -> Tensor:
    """What codes of E2M1 without sign stand for, in fp32."""
    above = (2 + (codes & 1)) << (codes > 5).to(torch.uint8)
    return torch.where(codes < 4, codes.float() * 0.5, above.float())


def _summed(errors: Tensor) -> Tensor:
    """The sums over blocks ``(down, tall, across, 16)``, where the other sizes stay as 1.

    Of a row in their order, then of rows 8, 4, 2 and 1 apart: the order decides a tie.
    """
    total = torch.zeros_like(errors[..., :1])
    for place in range(BLOCK):
        total = total + errors[..., place : place + 1]
    while (half := total.shape[1] // 2) > 0:
        total = total[:, :half] + total[:, half:]
    return total


def packed(codes: Tensor) -> Tensor:
    """Two codes of E2M1 in a byte, the first in the low half.

    Args:
        codes: uint8, 0 to 15, ``(rows, columns)``.

    Returns:
        float4_e2m1fn_x2, ``(rows, columns / 2)``, contiguous.
    """
    pairs = codes.view(codes.shape[0], codes.shape[1] // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.float4_e2m1fn_x2)


def _places(size: Tensor) -> tuple[Tensor, Tensor]:
    """Where magnitudes lie among the values of E2M1 that are as far apart as those around them.

    They are 0.5 apart up to 2, then 1 up to 4, then 2. The sum of both results is a code, and
    between two codes where the first is not whole. The first is exact, the sum would not be.
    """
    ranges = (size < 2).to(torch.uint8) + (size < 4)
    return size * (0.5 * (1 << ranges).float()), 4 - 2 * ranges


def _mixed_as_it_came(matrix: Tensor, signs: int) -> Tensor:
    """The transform in fp32, rounded to the dtype of the matrix, finite numbers saturated.

    Where one of 16 neighbours is not finite, all of them become NaN.
    """
    wide = casts.wide(matrix)
    # so that no sum overflows; it grows to at most 4 times the largest
    found = mixed(wide / 16, signs) * 16
    most = min(torch.finfo(matrix.dtype).max, casts.FP32_MAX)
    groups = wide.reshape(matrix.shape[0], matrix.shape[1] // BLOCK, BLOCK)
    finite = groups.isfinite().all(-1, keepdim=True).expand(groups.shape).reshape(wide.shape)
    return torch.where(finite, found.clamp(-most, most), torch.nan).to(matrix.dtype)
