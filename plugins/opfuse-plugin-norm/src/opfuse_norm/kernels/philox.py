"""The random numbers of a dropout, in PyTorch's operations: what the kernels draw, to the bit.

They are those of Philox4x32-10 (Salmon et al. 2011), which has no state: the number of an element
is a function of a seed and of its place. The key is the seed. The counter of four neighbours in a
row is the index of the first of them, divided by four, and the index of the row, in 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
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
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of 32 bits for each counter.

    Args:
        counter: Its words, from the least significant one, as int64.
        key: Likewise.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the low 64 bits are right
        c0, c1 = (second >> 32) & _WORD ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32) & _WORD ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


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
    words = (group, row & _WORD, row >> 32, torch.zeros_like(row))
    drawn = torch.stack(philox(words, (seed & _WORD, (seed >> 32) & _WORD)), -1)
    numbers = (drawn.flatten(1)[:, :features] >> 8).to(torch.float32)
    threshold = torch.tensor(drop.threshold, dtype=torch.float32)
    return torch.where(numbers >= threshold, drop.scale, 0.0).to(torch.float32).view(shape)


def dropout(x: Tensor, extra: Tensor | None, drop: Drop) -> Tensor:
    """``x`` with elements dropped, rounded to its dtype, and ``extra`` added to that.

    Args:
        x: The input, or the gradient of the output.
        extra: A tensor of the same shape, or None.
        drop: What is drawn.
    """
    kept = (x.to(torch.float32) * factors(x.shape, drop)).to(x.dtype)
    return kept if extra is None else kept + extra
