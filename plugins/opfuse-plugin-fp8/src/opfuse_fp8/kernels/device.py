"""Device functions: scales and codes, bit for bit those of :mod:`opfuse_fp8.casts`."""
# kernels take what they are given

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.functions import ptx_capability


@triton.jit
def largest(v, axis: tl.constexpr = None):
    """The largest magnitude of fp32 values, or along an axis, which stays; NaN does not count."""
    size = tl.max(tl.abs(v), axis, keep_dims=axis is not None)  # NaN only of nothing but NaN
    return tl.where(size == size, size, 0.0)


@triton.jit
def scale_of(amax, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr):
    """``most / amax``, rounded once; 1 where the amax is 0 or infinite."""
    if POWER_OF_2:
        # most is 1.75 times a power of two, so the quotient is below one where amax is above that
        bits = amax.to(tl.int32, bitcast=True)
        top: tl.constexpr = 262 if MANTISSA == 3 else 269
        exponent = top - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    else:
        most: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
        scale = tl.div_rn(tl.zeros_like(amax) + most, amax)
        scale = tl.where(scale == float("inf"), IF_INFINITE, scale)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def inverse_of(scale, POWER_OF_2: tl.constexpr):
    """``1 / scale``, rounded once."""
    if POWER_OF_2:
        inverse = scale_of_exponent(scale.to(tl.int32, bitcast=True) >> 23)
    else:
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return inverse


@triton.jit
def exponent_of(amax, MANTISSA: tl.constexpr):
    """The biased exponent of an MX scale, as int32: that of ``amax / most``, rounded up."""
    reciprocal: tl.constexpr = 1.0 / (448.0 if MANTISSA == 3 else 57344.0)
    wanted = amax * reciprocal
    bits = wanted.to(tl.int32, bitcast=True)
    exponent, rest = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # 2^-127, the least scale, is half of the first exponent's subnormal numbers
    covered = (rest == 0) | ((exponent == 0) & (rest <= 0x400000))
    exponent += tl.where(covered | (exponent >= 254), 0, 1)
    return tl.where(wanted == float("inf"), 254, exponent)


@triton.jit
def scale_of_exponent(exponent):
    """``2^(127 - exponent)``: what values are multiplied by."""
    bits = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def place_of(row, block, blocks, SWIZZLED: tl.constexpr):
    """Where the scale of a block is, see :mod:`opfuse_quantized.swizzle`; rows are int64."""
    if SWIZZLED:
        tile = (row // 128) * tl.cdiv(blocks, 4) + block // 4
        return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4
    else:
        return row * blocks + block


@triton.jit
def _rounded(v, MANTISSA: tl.constexpr):
    """The codes of finite values within the range, by integers: to nearest even."""
    shift: tl.constexpr = 23 - MANTISSA
    bias: tl.constexpr = 7 if MANTISSA == 3 else 15
    # the sum has the least step of the format as its last bit
    magic: tl.constexpr = 16384.0 if MANTISSA == 3 else 128.0
    magic_bits: tl.constexpr = 0x46800000 if MANTISSA == 3 else 0x43000000
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift
    normal -= (127 - bias) << MANTISSA
    small = (tl.abs(v) + magic).to(tl.int32, bitcast=True) - magic_bits
    code = tl.where(size >= ((128 - bias) << 23), normal, small)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _converted(v, scale, MANTISSA: tl.constexpr):
    """:func:`codes_of` by instructions of a GPU of NVIDIA, which convert two values at once.

    Four codes leave as one word. Where LLVM handles two, ptxas before CUDA 13 reads halves of a
    register before they are there, see ``tests/test_machine_code.py``.
    """
    if MANTISSA == 3:  # infinity times 0 is NaN; any other product with 0 only keeps the sign
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [tl.fma(v, scale, v * 0.0)], tl.uint8, True, 4,
        )  # fmt: skip
    else:  # infinity is the code after the largest number
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .pred p, q, r, s;
            testp.infinite.f32 p, $5;
            testp.infinite.f32 q, $6;
            testp.infinite.f32 r, $7;
            testp.infinite.f32 s, $8;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            @p add.u32 $0, $0, 0x1;
            @q add.u32 $0, $0, 0x100;
            @r add.u32 $0, $0, 0x10000;
            @s add.u32 $0, $0, 0x1000000;
            }""",
            "=r,f,f,f,f,f,f,f,f", [v * scale, v], tl.uint8, True, 4,
        )  # fmt: skip


@triton.jit
def codes_of(v, scale, MANTISSA: tl.constexpr):
    """``v * scale`` as codes, in bytes: finite values saturate, infinity and NaN stay.

    A GPU that converts fp32 to FP8 itself rounds once too. The others compute with integers.
    """
    if ptx_capability() >= 89:
        return _converted(v, scale, MANTISSA)
    else:
        most: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
        scaled = v * scale
        code = _rounded(tl.minimum(tl.maximum(scaled, -most), most), MANTISSA)
        sign = ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
        code = tl.where(scaled == scaled, code, sign | 0x7F)
        infinite = tl.abs(v) == float("inf")
        if MANTISSA == 3:  # without infinity
            return tl.where(infinite, 0x7F, code)
        else:  # infinity follows the largest number
            return code + infinite.to(tl.uint8)
