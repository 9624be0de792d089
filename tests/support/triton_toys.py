"""Kernel cases: sound ones, and for each thing that is refused one that has it."""

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, KernelCase, Operand
from triton.language.extra.libdevice import rsqrt


@triton.jit
def descriptor_kernel(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, BN])
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    y.store(at, x.load(at) * 2)


@triton.jit
def atomic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i % 8, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    tl.atomic_cas(y_ptr + 8, 0.0, 1.0)


@triton.jit
def scale_kernel(x_ptr, s_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, (x * tl.load(s_ptr)).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def twice_kernel(x_ptr, y_ptr, n, N: tl.constexpr, BLOCK: tl.constexpr):
    """Divides a row by its sum; rows that are wider than a block are read twice."""
    row = tl.program_id(0) * N
    total = 0.0
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row + i, mask=i < N, other=0).to(tl.float32), 0)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < N).to(tl.float32)
        tl.store(y_ptr + row + i, (x / total).to(y_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def at_once_kernel(x_ptr, y_ptr, n, N: tl.constexpr):
    """Divides a row by its sum, and holds all of it."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i).to(tl.float32)
    tl.store(y_ptr + i, (x / tl.sum(x, 0)).to(y_ptr.dtype.element_ty))


@triton.jit
def column_sums_kernel(x_ptr, part_ptr, rows, N: tl.constexpr, P: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for row in range(tl.program_id(0), rows, P):
        total += tl.load(x_ptr + row * N + i).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0) * N + i, total)


@triton.jit
def turning_kernel(x_ptr, y_ptr, N: tl.constexpr, TURNS: tl.constexpr, WAITS: tl.constexpr):
    """A square, doubled, and transposed or not."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + row * N + column)
    if WAITS:
        tl.debug_barrier()
    at = column * N + row if TURNS else row * N + column
    tl.store(y_ptr + at, x * 2)


@triton.jit
def mixing_kernel(x_ptr, n, N: tl.constexpr, WHAT: tl.constexpr):
    """Overwrites a row by its own values, or its first number by what all threads have read."""
    i = tl.arange(0, N)
    if WHAT == "row":
        for start in range(0, n, N):
            x = tl.load(x_ptr + start + i)
            tl.store(x_ptr + start + i, (x / tl.sum(x.to(tl.float32), 0)).to(x.dtype))
    elif WHAT == "sum":
        tl.store(x_ptr, tl.sum(tl.load(x_ptr + i).to(tl.float32), 0).to(x_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr)
        if x > 0:
            tl.store(x_ptr, x * 2)


@triton.jit
def gemm_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """``a @ b.T``, for multiples of the tiles."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_ptr + rows[:, None] * K + k[None, :]
    b_at = b_ptr + columns[None, :] * K + k[:, None]
    c = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, K, BK):
        c = tl.dot(tl.load(a_at), tl.load(b_at), c)
        a_at += BK
        b_at += BK
    at = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(at, c.to(c_ptr.dtype.element_ty))


@triton.jit
def slow_gemm_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K):
        a = tl.load(a_ptr + rows * K + k).to(tl.float32)
        c += a[:, None] * tl.load(b_ptr + columns * K + k).to(tl.float32)[None, :]
    at = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(at, c.to(c_ptr.dtype.element_ty))


@triton.jit
def normalize_kernel(x_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    """As in other packages: it takes a float and calls libdevice."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, (x * rsqrt(x * x + eps.to(tl.float32))).to(tl.bfloat16), mask=i < n)


def scaled(kernel):
    def run(x, s):
        y = torch.empty_like(x)
        n = x.numel()
        kernel.launch(lambda config: (triton.cdiv(n, config["BLOCK"]),), x, s, y, n)
        return y

    return run


def divided(kernel):
    def run(x):
        y = torch.empty_like(x)
        kernel.launch((x.shape[0],), x, y, x.numel(), N=x.shape[1])
        return y

    return run


def multiplied(kernel):
    def run(a, b):
        c = a.new_empty(a.shape[0], b.shape[0])

        def grid(config):
            return triton.cdiv(c.shape[0], config["BM"]), triton.cdiv(c.shape[1], config["BN"])

        kernel.launch(grid, a, b, c, *c.shape, a.shape[1])
        return c

    return run


def summed(programs):
    kernel = Kernel(column_sums_kernel, [Config()])

    def run(x):
        count = min(programs, x.shape[0])
        part = x.new_empty((count, x.shape[1]), dtype=torch.float32)
        kernel.launch((count,), x, part, x.shape[0], N=x.shape[1], P=count)
        return part.sum(0)

    return run


def normalized(x, s):
    y = torch.empty_like(x)
    normalize_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, x.numel(), 1e-6, BLOCK=256
    )
    return y


def turned(**constants):
    kernel = Kernel(turning_kernel, [Config()])

    def run(x):
        y = torch.empty_like(x)
        kernel.launch((1,), x, y, N=x.shape[0], **constants)
        return y

    return run


def mixed(what):
    kernel = Kernel(mixing_kernel, [Config()])

    def run(x):
        kernel.launch((1,), x, x.numel(), N=2048, WHAT=what)
        return x

    return run


def absent(x, s):
    import a_package_that_is_not_there  # noqa: F401


def rows_of(rows, features):
    shape = (rows, features)
    return {
        "x": Operand(shape, torch.bfloat16),
        "s": Operand((1,), torch.float32, "vector"),
        "y": Operand(shape, torch.bfloat16, output=True),
    }


def one_to_one(rows, features):
    return {name: operand for name, operand in rows_of(rows, features).items() if name != "s"}


def sums_of(rows, features):
    return {
        "x": Operand((rows, features), torch.bfloat16),
        "sums": Operand((features,), torch.float32, "vector", output=True),
    }


def product_of(m, n, k):
    return {
        "a": Operand((m, k), torch.bfloat16),
        "b": Operand((n, k), torch.bfloat16),
        "c": Operand((m, n), torch.bfloat16, output=True),
    }


REAL, SMALL = {"rows": 8192, "features": 4096}, {"rows": 3, "features": 1000}
PRODUCT, SMALL_PRODUCT = {"m": 4096, "n": 4096, "k": 1024}, {"m": 128, "n": 256, "k": 128}


def elementwise(name, configs, **more):
    run = scaled(Kernel(scale_kernel, configs))
    return KernelCase(name, run, rows_of, [REAL], [SMALL], **more)


def gemm(name, kernel):
    shapes = [PRODUCT], [SMALL_PRODUCT]
    return KernelCase(name, multiplied(kernel), product_of, *shapes, gemms=[kernel.name])


SCALE = elementwise(
    "scale",
    [Config({"BLOCK": 2048}), Config({"BLOCK": 4096}, num_warps=8)],
    separate=lambda x, s: (x.float() * s).bfloat16(),
    peers={"another": normalized, "absent": absent},
)
PRODUCT_CASE = gemm(
    "product", Kernel(gemm_kernel, [Config({"BM": 128, "BN": 128, "BK": 64}, 4, num_stages=2)])
)
SUMS = KernelCase("sums", summed(64), sums_of, [REAL], [{"rows": 16, "features": 128}])
TWICE = KernelCase(
    "twice",
    divided(Kernel(twice_kernel, [Config({"BLOCK": 1024})])),
    one_to_one,
    [REAL],
    [{"rows": 3, "features": 1000}],
)
ALL_TWICE = KernelCase(
    TWICE.name, TWICE.run, TWICE.tensors, [REAL], [{"rows": 3, "features": 2048}]
)
MANY_SUMS = KernelCase("many sums", summed(8192), sums_of, [REAL], SUMS.small)

SPILLS = KernelCase(
    "spills",
    divided(Kernel(at_once_kernel, [Config(num_warps=1)])),
    one_to_one,
    [{"rows": 64, "features": 16384}],
    [SMALL],
)
TOO_LARGE = gemm(
    "too large", Kernel(gemm_kernel, [Config({"BM": 128, "BN": 128, "BK": 128}, 8, num_stages=5)])
)
NO_DOT = gemm("no dot", Kernel(slow_gemm_kernel, [Config({"BM": 64, "BN": 64})]))
NARROW = elementwise("narrow", [Config({"BLOCK": 512})])

IN_PLACE = {"y_ptr": "x_ptr"}
SQUARE = [{"rows": 64, "features": 64}]
OVERWRITING = [
    KernelCase(
        "the same", turned(TURNS=False, WAITS=False), one_to_one, SQUARE, [], overwrites=IN_PLACE
    ),
    KernelCase("elsewhere", turned(TURNS=True, WAITS=False), one_to_one, SQUARE, []),
    KernelCase(
        "waits", turned(TURNS=True, WAITS=True), one_to_one, SQUARE, [], overwrites=IN_PLACE
    ),
    KernelCase("row", mixed("row"), one_to_one, [REAL], []),
    KernelCase("sum", mixed("sum"), one_to_one, [REAL], []),
]
RACING = [
    KernelCase("turns", turned(TURNS=True, WAITS=False), one_to_one, SQUARE, [], overwrites=IN_PLACE),
    KernelCase("first", mixed("first"), one_to_one, [REAL], []),
]  # fmt: skip

SOUND = [SCALE, PRODUCT_CASE]
FAULTY = [SPILLS, TOO_LARGE, NO_DOT, NARROW]
NO_GEMM = [NO_DOT]
