"""Philox4x32-10: the known answers of Random123, and the numbers that Triton draws."""

import pytest
import torch
from opfuse_triton.philox import philox

from opfuse.testing.machine import is_interpreting

ONES = 0xFFFFFFFF
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def of_64_bits(low, high):
    return (torch.tensor([high]) << 32) | low


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter, key, words):
    made = philox(of_64_bits(*key), *[torch.tensor([word]) for word in counter])
    assert tuple(int(word) & ONES for word in made) == words
    assert all(word.dtype == torch.int32 for word in made)
    numbers = philox(of_64_bits(*key), torch.tensor([counter[0]]), *counter[1:])
    assert all(torch.equal(one, other) for one, other in zip(made, numbers, strict=True))


@pytest.mark.skipif(not is_interpreting(), reason="TRITON_INTERPRET is not set")
def test_triton_draws_the_same():
    """Over the words of the counter, of which the last three are numbers, and a negative seed."""
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def draw(seed_ptr, first_ptr, out_ptr, c1, c2, c3, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        first = tl.load(first_ptr + at).to(tl.uint32)
        words = tl.philox(tl.load(seed_ptr), first, c1, c2, c3)
        for i in tl.static_range(4):
            tl.store(out_ptr + i * BLOCK + at, words[i].to(tl.int32, bitcast=True))

    seed = torch.tensor([-(2**40) - 12345])
    first = torch.arange(256) * 0x9E3779B1
    made = torch.empty(4, 256, dtype=torch.int32)
    draw[(1,)](seed, first, made, 7, 2**31 - 5, 33, BLOCK=256)
    assert torch.equal(made, torch.stack(philox(seed, first, 7, 2**31 - 5, 33)))
