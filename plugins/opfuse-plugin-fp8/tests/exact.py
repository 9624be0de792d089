"""FP8 casts in numpy, written from the definitions of the formats and from nothing of the plugin.

A code is looked up among all codes of a format, whose values are worked out in float64.
"""

import numpy as np

E4M3, E5M2 = "e4m3", "e5m2"
MOST = {E4M3: 448.0, E5M2: 57344.0}
FP32_MAX = np.finfo(np.float32).max
NAN = {E4M3: 0x7F, E5M2: 0x7E}


def positive_values(name):
    """The values of the codes 0, 1, 2, ... up to the largest finite one."""
    mantissa_bits, bias = (3, 7) if name == E4M3 else (2, 15)
    found = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        found.append(value)
        if value == MOST[name]:
            return np.array(found)
    raise AssertionError(name)


def in_fp32(values):
    """Values of float64 in float32: finite ones stay so."""
    kept = np.where(np.isinf(values), values, np.clip(values, -FP32_MAX, FP32_MAX))
    return kept.astype(np.float32)


def encode(values, name):
    """Codes of finite float32 values within the range: the nearest, of two the one that is even."""
    table = positive_values(name)
    magnitude = np.abs(values).astype(np.float64)
    above = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    nearest = np.where(table[above] == magnitude, above, nearest)
    return (nearest + 128 * np.signbit(values)).astype(np.uint8)


def cast(values, scale, name):
    """Codes of ``values * scale``: finite ones saturated; infinity and NaN as the format has them."""
    with np.errstate(all="ignore"):
        scaled = np.float32(values) * np.float32(scale)
    most = np.float32(MOST[name])
    codes = encode(np.clip(np.nan_to_num(scaled, nan=0.0), -most, most), name)
    sign = 128 * np.signbit(values).astype(np.uint8)
    infinity = NAN[E4M3] if name == E4M3 else 0x7C
    codes = np.where(np.isinf(values), infinity + sign, codes)
    return np.where(np.isnan(values), NAN[name], codes).astype(np.uint8)


def amax(block):
    """The largest magnitude of the numbers in a block."""
    numbers = np.abs(block[~np.isnan(block)])
    return np.float32(numbers.max() if numbers.size else 0)


def scale(most_seen, name, power_of_2=False, if_infinite=FP32_MAX):
    """``MOST / amax``; 1 where that is no use."""
    if most_seen == 0 or not np.isfinite(most_seen):
        return np.float32(1)
    with np.errstate(over="ignore"):
        found = np.float32(MOST[name]) / np.float32(most_seen)
    found = np.float32(if_infinite) if np.isinf(found) else found
    return np.float32(2.0 ** np.floor(np.log2(np.float64(found)))) if power_of_2 else found


def by_blocks(matrix, block, name, power_of_2, if_infinite):
    """Codes and inverse scales, ``(blocks down, blocks across)``, block after block."""
    rows, columns = matrix.shape
    tall, wide = block
    codes = np.zeros(matrix.shape, np.uint8)
    inverse = np.zeros((-(-rows // tall), -(-columns // wide)), np.float32)
    for i in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            here = np.s_[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
            s = scale(amax(matrix[here]), name, power_of_2, if_infinite)
            codes[here], inverse[i, j] = cast(matrix[here], s, name), np.float32(1) / s
    return codes, inverse


def mx_exponent(most_seen, name):
    """The least power of two that covers ``amax / MOST``, as E8M0; at least 2^-127."""
    if np.isinf(most_seen):
        return 254
    wanted = float(np.float32(most_seen) * np.float32(1.0 / MOST[name]))
    return next(e for e in range(255) if 2.0 ** (e - 127) >= wanted)


def by_mx(matrix, name, tall=1):
    """Codes and E8M0 exponents, ``(rows, columns / 32)``."""
    rows, columns = matrix.shape
    codes, exponents = np.zeros(matrix.shape, np.uint8), np.zeros((rows, columns // 32), np.uint8)
    for i in range(0, rows, tall):
        for j in range(columns // 32):
            here = np.s_[i : i + tall, 32 * j : 32 * j + 32]
            e = mx_exponent(amax(matrix[here]), name)
            codes[here], exponents[i : i + tall, j] = cast(matrix[here], 2.0 ** (127 - e), name), e
    return codes, exponents
