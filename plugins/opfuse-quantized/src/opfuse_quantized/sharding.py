"""How FSDP2 gathers a quantized parameter: its codes, or its dequantized values.

A rank holds a shard: some of the rows, quantized separately. Codes and scales of shards equal those
of the whole if no block spans two shards. If one does, or if there is one scale for the whole
tensor, each rank sends its values, and the whole is quantized from these. Shards along another
dimension than the first are plain, and this module does not see them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.quantization import QuantizedTensor
from opfuse.core.quantization.quantizer import with_own_state

from .codes import as_bytes, settled
from .formats import BlockScaledTensor, MXTensor

_SQUARE = (128, 128)


def to_gather(
    shard: Any, ranks: int, outer: torch.Size, dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Any]:
    """The tensors that a rank sends.

    Args:
        shard: Its shard, padded to the rows of the largest.
        ranks: The number of ranks.
        outer: The shape of the whole.
        dtype: The parameter dtype of FSDP2's policy, or None.

    Returns:
        Tensors to concatenate along their first dimension; and metadata for the receiver.
    """
    there: QuantizedTensor = shard.quantized
    why = _why_values(there, ranks, outer, shard.wanted)
    if why:
        values = there.dequantize().to(dtype or there.dtype)
        return (values,), (outer, why)
    parts = [getattr(there, name) for name in _sent(there)]
    return tuple([part.view(torch.uint8) for part in parts]), (outer, "")


def gathered(
    shard: Any, outputs: tuple[Tensor, ...], known: Any, dtype: torch.dtype
) -> tuple[QuantizedTensor, str]:
    """The whole, and how it was gathered, in words.

    Args:
        shard: The shard of this rank.
        outputs: The gathered tensors.
        known: The metadata from :func:`to_gather`.
        dtype: The dtype of the dequantized values.
    """
    outer, why = known
    there: QuantizedTensor = shard.quantized
    if why:
        made = _cast(shard, outputs[0][: outer[0]])
        made.quantizer = there.quantizer
        return made, f"FSDP2 gathers it in {str(dtype).removeprefix('torch.')}: {why}"
    parts = dict.fromkeys(there.tensor_names) | _assembled(there, outputs, shard.wanted)
    return dataclasses.replace(there, shape=outer, dtype=dtype, **parts), "FSDP2 gathers its codes"


def gather_into(
    shard: Any, whole: QuantizedTensor, outputs: tuple[Tensor, ...], known: Any, dtype: torch.dtype
) -> None:
    """Gather again into the tensors of :func:`gathered`.

    A backward uses the rounding of its forward: the scales are kept.
    """
    outer, why = known
    there: QuantizedTensor = shard.quantized
    if not why:
        new = _assembled(there, outputs, shard.wanted)
    else:
        values = outputs[0][: outer[0]]
        if torch._C._current_graph_task_id() != -1 and there.quantizer.requantizes:
            made = there.quantizer.requantize(values, whole, shard.wanted)
        else:
            made = _cast(shard, values)
        new = dict(zip(made.tensor_names, made.tensors(), strict=True))
    for name, part in new.items():
        into = getattr(whole, name)
        if into is not None and part is not None and into.data_ptr() != part.data_ptr():
            # the forward's saved tensors must stay valid: FSDP2 manages that the memory was freed
            with torch.autograd._unsafe_preserve_version_counter(into):  # type: ignore[attr-defined]
                as_bytes(into).copy_(as_bytes(part))


def _cast(shard: Any, values: Tensor) -> QuantizedTensor:
    """Cast the values of the whole as :func:`settled` does; the shard's quantizer records none."""
    return settled(with_own_state(shard.quantizer), shard.recipe, values, shard.wanted)


def like(param: Any, values: Tensor) -> Tensor:
    """Make a DTensor of a rank's plain values, like a DTensor of quantized ones."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def freed(whole: QuantizedTensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors whose memory FSDP2 may free between two uses: those of codes that own theirs."""
    theirs = {output.untyped_storage().data_ptr() for output in outputs}
    parts = [getattr(whole, name) for name in whole.data_names]
    return tuple(
        [
            part
            for part in parts
            if part is not None
            and part.untyped_storage().data_ptr() not in theirs
            and part.untyped_storage().nbytes() == part.numel() * part.element_size()
        ]
    )


def _why_values(there: QuantizedTensor, ranks: int, outer: torch.Size, wanted: Any) -> str:
    """Return why the values are gathered, and not the codes; ``""``: the codes are."""
    rows = there.shape[0] if len(there.shape) else 1
    if not isinstance(there, (MXTensor, BlockScaledTensor)) or len(there.shape) != 2:
        return f"{type(there).__name__} has a scale for more than a shard"
    if isinstance(there, MXTensor) and there.swizzled:
        return "swizzled scales of shards do not follow each other in those of the whole"
    if isinstance(there, BlockScaledTensor):
        high = 128 if there.block == _SQUARE or wanted.columnwise else 1
    else:
        high = 32 if wanted.columnwise else 1
    if rows % high or rows * ranks != outer[0] or not there.copies.covers(wanted):
        return f"{outer[0]} rows over {ranks} ranks are not whole blocks of {high}"
    return ""


def _sent(there: Any) -> list[str]:
    """The tensors that a shard sends; of square blocks one copy is the transpose of the other."""
    square = isinstance(there, BlockScaledTensor) and there.block == _SQUARE
    names = there.tensor_names[:2] if square else there.tensor_names
    return [name for name in names if getattr(there, name) is not None]


def _assembled(there: Any, outputs: tuple[Tensor, ...], wanted: Any) -> dict[str, Tensor | None]:
    """The tensors of the whole, by name."""
    flat_scales = isinstance(there, BlockScaledTensor) and there.block == (1, 128)
    made: dict[str, Tensor | None] = {}
    for name, output in zip(_sent(there), outputs, strict=True):
        part = getattr(there, name)
        # whether the rows of the tensor are its last dimension, along which shards follow then
        last = name.startswith("columnwise") != (flat_scales and name.endswith("scale_inv"))
        if last:
            shards = output.view(-1, *part.view(torch.uint8).shape)
            output = shards.transpose(0, 1).flatten(1).contiguous()
            width = shards.shape[0] * part.shape[1]
        else:
            width = part.shape[1]
        made[name] = output.view(part.dtype).view(-1, width)
    if isinstance(there, BlockScaledTensor) and there.block == _SQUARE and wanted.columnwise:
        codes, scales = made["rowwise_data"], made["rowwise_scale_inv"]
        assert codes is not None and scales is not None
        across = -(-codes.shape[1] // 128)
        down = scales.shape[0]
        other = F.pad(scales[:, :across].t(), (0, -down % 4), value=1.0).contiguous()
        made |= {"columnwise_data": codes.t().contiguous(), "columnwise_scale_inv": other}
    return made
