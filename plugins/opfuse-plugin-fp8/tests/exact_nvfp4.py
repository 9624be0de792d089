"""NVFP4 in numpy, from the definition of the format and from nothing of the plugin.

A code is looked up among the eight magnitudes of E2M1 in float64; scales are worked out in float32,
step by step.
"""

import exact
import numpy as np

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
E4M3 = np.concatenate([exact.positive_values(exact.E4M3), [np.nan]])  # by code, without signs


def hadamard():
    """Sylvester's matrix of 16 rows: the sign is the parity of the bits that two indices share."""
    numbers = np.arange(16)
    shared = numbers[:, None] & numbers
    return np.vectorize(lambda n: -1 if bin(n).count("1") % 2 else 1)(shared).astype(np.float32)


def summed(group):
    """A group of 16 times the matrix, in float32, of numbers 1, then 2, 4 and 8 apart."""
    found = [np.float32(value) for value in group]
    for apart in (1, 2, 4, 8):
        before = list(found)
        for i in range(16):
            partner = i ^ apart
            found[i] = before[i] + before[partner] if i < partner else before[partner] - before[i]
    return found


def transformed(matrix, most, rounded):
    """Each 16 neighbours of a row transformed; ``rounded`` brings float32 to the input's dtype."""
    found = np.empty(matrix.shape, np.float32)
    with np.errstate(all="ignore"):
        for index in np.ndindex(matrix.shape[0], matrix.shape[1] // 16):
            here = np.s_[index[0], 16 * index[1] : 16 * index[1] + 16]
            group = matrix[here].astype(np.float32)
            if not np.isfinite(group).all():
                found[here] = np.nan
                continue
            sums = summed(group / np.float32(16) * SIGNS)
            found[here] = np.clip(np.array(sums) / np.float32(4) * np.float32(16), -most, most)
    return rounded(found)


def tensor_scale(most_seen, most_of_scales=448):
    if most_seen == 0 or not np.isfinite(most_seen):
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(6 * most_of_scales) / np.float32(most_seen), exact.FP32_MAX)


def encoded(wanted):
    """The code of a scale, saturated."""
    return exact.encode(np.minimum(np.float32([wanted]), np.float32(448)), exact.E4M3)[0]


def block_scale(most_seen, encode):
    """The code of the scale of a block."""
    with np.errstate(over="ignore"):
        return encoded(np.float32(most_seen) * (encode * (np.float32(1) / np.float32(6))))


def four_or_six(most_seen, encode):
    """Both scales of a block, as codes: with its largest magnitude at 4, and at 6."""
    with np.errstate(over="ignore"):
        six = np.float32(most_seen) / np.float32(6) * encode
        return encoded(six * np.float32(1.5)), encoded(six)


def error(found, block, scale, most, most_of_scales, how):
    """How far codes are from a block, in the order of its values, then of rows 8, 4, 2, 1 apart."""
    value = np.float32(MAGNITUDES[found]) * np.float32(E4M3[scale]) * np.float32(most)
    size = np.where(np.isnan(block), np.float32(0), np.abs(block))
    apart = value / np.float32(6 * most_of_scales) - size
    each = apart * apart if how == "MSE" else np.abs(apart)
    total = np.zeros(len(each), np.float32)
    for column in each.T:
        total = total + column
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0]


def nearest(magnitude):
    """Codes of magnitudes up to 6, of two the even one."""
    distance = np.abs(MAGNITUDES - magnitude[..., None])
    best = distance.min(-1, keepdims=True)
    return np.where(distance == best, np.arange(8) + 100 * (np.arange(8) % 2), 999).min(-1) % 100


def drawn(magnitude, draw):
    """Codes of magnitudes up to 6: up with the probability of the place between two."""
    below = np.searchsorted(MAGNITUDES, magnitude, side="right") - 1
    above = np.minimum(below + 1, 7)
    gap = np.where(above > below, MAGNITUDES[above] - MAGNITUDES[below], 1)
    return np.where((magnitude - MAGNITUDES[below]) / gap > draw, above, below)


def philox(key, counter):
    """Philox4x32-10 of Random123, of integers."""
    for _ in range(10):
        one, other = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        high = (other >> 32) ^ counter[1] ^ key[0], (one >> 32) ^ counter[3] ^ key[1]
        counter = high[0], other % 2**32, high[1], one % 2**32
        key = (key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32
    return counter


def draws(shape, seed, step, which):
    """The numbers of stochastic rounding."""
    rows, columns = shape
    key = seed % 2**32, seed >> 32
    words = [
        word
        for each in range(rows * columns // 4)
        for word in philox(key, (each, columns, step, 2 * rows + which))
    ]
    return (np.array(words, np.int64) >> 8).astype(np.float64).reshape(shape) / 2**24


def quantized(matrix, tall=1, draw=None, four=None, most_of_scales=448):
    """The codes 0 to 15, the codes of the scales ``(rows, columns / 16)``, and the tensor's.

    ``draw`` has the numbers of stochastic rounding. ``four`` is the error by which blocks choose.
    """
    rows, columns = matrix.shape
    most = exact.amax(matrix)
    encode = tensor_scale(most, most_of_scales)
    decode = np.float32(1) / encode
    codes = np.zeros(matrix.shape, np.uint8)
    scales = np.zeros((rows, columns // 16), np.uint8)
    with np.errstate(all="ignore"):
        for i in range(0, rows, tall):
            for j in range(columns // 16):
                here = np.s_[i : i + tall, 16 * j : 16 * j + 16]
                block = matrix[here].astype(np.float32)
                finite = np.isfinite(block).all()
                at = exact.amax(block)
                known = four_or_six(at, encode) if four else (block_scale(at, encode),)
                made, least = None, np.inf
                for scale in reversed(known):
                    inverse = np.float32(1) / (np.float32(E4M3[scale]) * decode)
                    scaled = np.clip(block * min(inverse, exact.FP32_MAX), -6, 6)
                    size = np.nan_to_num(np.abs(scaled), nan=0.0).astype(np.float64)
                    found = nearest(size) if draw is None else drawn(size, draw[here])
                    off = error(found, block, scale, most, most_of_scales, four) if four else 0
                    if made is None or off < least:
                        made, least = (scale, found), off
                scale, found = made
                negative = np.signbit(block) & ~np.isnan(block)
                codes[here] = np.where(np.isnan(block), 0, found + 8 * negative)
                scales[i : i + tall, j] = scale if finite else 0x7F
    return codes, scales, decode


def unpacked(data):
    """Codes from bytes, the first in the low half."""
    return np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], 2 * data.shape[1])


def values(codes):
    """The values of codes, without scales."""
    return np.where(codes > 7, -1, 1) * MAGNITUDES[codes & 7]


def untransformed(matrix):
    """The transform undone, in float64."""
    groups = matrix.reshape(matrix.shape[0], -1, 16)
    return (groups @ hadamard().T.astype(np.float64) / 4 * SIGNS).reshape(matrix.shape)


def block_product(one, other):
    """``one @ other.T`` of two copies, as the hardware does it: a sum for each block, then scales.

    A copy is what :func:`quantized` gives.
    """
    (codes, scales, decode), (codes2, scales2, decode2) = one, other
    found = np.zeros((codes.shape[0], codes2.shape[0]), np.float64)
    for block in range(scales.shape[1]):
        here = np.s_[:, 16 * block : 16 * block + 16]
        inner = values(codes)[here] @ values(codes2)[here].T
        found += np.outer(E4M3[scales[:, block]], E4M3[scales2[:, block]]) * inner
    return found * np.float64(decode) * np.float64(decode2)
