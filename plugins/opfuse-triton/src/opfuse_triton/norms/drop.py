"""The random numbers of a dropout, in PyTorch's operations: what the kernels draw, to the bit.

They are those of Philox4x32-10 (Salmon et al. 2011), which has no state: the number of an element
is a function of a seed and of its place. The key is the seed. The counter of four neighbours in a
row is the index of the first of them, divided by four, and the index of the row, in 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..philox import philox

_WORD = 0xFFFFFFFF


class Drop(NamedTuple):
    """What a dropout draws.

    Attributes:
        seed: The seed, one int64 on the device of the input.
        p: The probability of a zero, between 0 and 1, and neither of them.
    """

    seed: Tensor
    p: float

    @property
    def threshold(self) -> float:
        """An element stays where the upper 24 bits of its number are not less."""
        return self.p * 2**24

    @property
    def scale(self) -> float:
        """What an element that stays is multiplied by."""
        return 1 / (1 - self.p)


def draw_seed(device: torch.device) -> Tensor:
    """A seed out of torch's generator of a device. The host does not wait for it."""
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


def factors(shape: torch.Size, drop: Drop) -> Tensor:
    """What each element is multiplied by: 0, or ``drop.scale``; in fp32.

    Args:
        shape: The shape of the input; its last dimension is a row.
        drop: What is drawn.
    """
    features = shape[-1] if shape else 1
    rows, groups = shape.numel() // max(features, 1), -(-features // 4)
    seed = drop.seed
    row = torch.arange(rows, device=seed.device)[:, None].expand(rows, groups)
    group = torch.arange(groups, device=seed.device).expand(rows, groups)
    drawn = torch.stack(philox(seed, group, row, row >> 32), -1)
    numbers = ((drawn.flatten(1)[:, :features].long() & _WORD) >> 8).to(torch.float32)
    threshold = torch.tensor(drop.threshold, dtype=torch.float32)
    return ((numbers >= threshold).to(torch.float32) * drop.scale).view(shape)


def dropout(x: Tensor, extra: Tensor | None, drop: Drop) -> Tensor:
    """``x`` with elements dropped, rounded to its dtype, and ``extra`` added to that.

    Args:
        x: The input, or the gradient of the output.
        extra: A tensor of the same shape, or None.
        drop: What is drawn.
    """
    kept = (x.to(torch.float32) * factors(x.shape, drop)).to(x.dtype)
    return kept if extra is None else kept + extra
