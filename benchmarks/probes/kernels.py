"""Small Triton kernels, as plain as they can be and still be what a real one would be made of."""

import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """The tanh form, as ``x sigmoid(2 u)``."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def finish(acc, out, pre, row, column, GELU: tl.constexpr, SAVE: tl.constexpr):
    """Store a tile of the result, and before the activation if asked."""
    if SAVE:
        pre.store([row, column], acc.to(pre.dtype))
    if GELU:
        acc = gelu(acc)
    out.store([row, column], acc.to(out.dtype))


@triton.jit
def gemm(
    a,
    b,
    c,
    h,
    M,
    N,
    K,
    SMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    WS: tl.constexpr,
    GELU: tl.constexpr,
    SAVE: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ROWS_OF_B: tl.constexpr,
):
    """``a [M, K] @ b`` with TMA, persistent; ``b`` is [N, K], or with ROWS_OF_B [K, N]."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    if ROWS_OF_B:
        right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    else:
        right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN // SUBTILES])
    pre = tl.make_tensor_descriptor(h, [M, N], [N, 1], [BM, BN // SUBTILES])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), rows * columns, SMS, warp_specialize=WS):
        group = tile // (GROUP * columns)
        height = min(rows - group * GROUP, GROUP)
        row = (group * GROUP + tile % height) * BM
        column = (tile % (GROUP * columns)) // height * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            x = left.load([row, k * BK])
            if ROWS_OF_B:
                w = right.load([k * BK, column])
            else:
                w = right.load([column, k * BK]).T
            acc = tl.dot(x, w, acc, max_num_imprecise_acc=IMPRECISE)
        if SUBTILES == 2:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            finish(first, out, pre, row, column, GELU, SAVE)
            finish(second, out, pre, row, column + BN // 2, GELU, SAVE)
        else:
            finish(acc, out, pre, row, column, GELU, SAVE)


@triton.jit
def norm_backward(
    x,
    dy,
    weight,
    rstd,
    dx,
    partial,
    M,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """RMSNorm's backward over every PROGRAMS-th row.

    The weight's gradient stays in registers until the end.
    """
    at = tl.arange(0, BLOCK)
    inside = at < H
    gamma = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), M, PROGRAMS):
        start = row.to(tl.int64) * H
        scale = tl.load(rstd + row)
        n = tl.load(x + start + at, inside, other=0.0).to(tl.float32) * scale
        d = tl.load(dy + start + at, inside, other=0.0).to(tl.float32)
        total += d * n
        g = d * gamma
        grad = scale * (g - n * (tl.sum(g * n, 0) / H))
        tl.store(dx + start + at, grad.to(dx.dtype.element_ty), inside)
    tl.store(partial + tl.program_id(0) * H + at, total, inside)


@triton.jit
def nothing(a, b, c, d, e, f, g, h, m, n):
    """Ten arguments, one store."""
    tl.store(a + tl.program_id(0), m + n)
