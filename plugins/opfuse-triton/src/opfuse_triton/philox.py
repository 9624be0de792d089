"""Philox4x32-10 in PyTorch's operations: the numbers that ``tl.philox`` draws in a kernel.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Importing
this imports no Triton.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Number = Tensor | int


def philox(
    seed: Number, c0: Tensor, c1: Number = 0, c2: Number = 0, c3: Number = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw 128 bits for each counter, those of ``tl.philox(seed, c0, c1, c2, c3)``.

    ``tl.randint4x(seed, offset)`` has the low half of the offset in ``c0``, the high one in ``c1``.

    Args:
        seed: The key, of 64 bits: int64.
        c0: The first word of the counters, int64; of this and all others the low 32 bits count.
        c1: The second word, which broadcasts against ``c0``.
        c2: The third, likewise.
        c3: The fourth, likewise.

    Returns:
        Four tensors of the words in their order: int32, with the shape of ``c0``.
    """
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    words: tuple[Any, ...] = c0 & _WORD, c1 & _WORD, c2 & _WORD, c3 & _WORD
    for _ in range(_ROUNDS):
        # int64 wraps around, and keeps the bits
        one, other = words[0] * _FACTORS[0], words[2] * _FACTORS[1]
        first, third = (other >> 32 & _WORD) ^ words[1] ^ k0, (one >> 32 & _WORD) ^ words[3] ^ k1
        words = first, other & _WORD, third, one & _WORD
        k0, k1 = k0 + _STEPS[0] & _WORD, k1 + _STEPS[1] & _WORD
    w0, w1, w2, w3 = [word.int() for word in words]
    return w0, w1, w2, w3
