"""Small Triton kernels that show how the interpreter rounds."""

import torch
import triton
import triton.language as tl


@triton.jit
def _cast(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < size).to(y.dtype.element_ty), at < size)


def cast(x, dtype):
    y = torch.empty(x.shape, dtype=dtype)
    _cast[(triton.cdiv(x.numel(), 8192),)](x, y, x.numel(), BLOCK=8192)
    return y


@triton.jit
def _pointwise(a, b, y, LESS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    left, right = tl.load(a + at), tl.load(b + at)
    if LESS:
        tl.store(y + at, tl.where(left < right, 1.0, 0.0))
    else:
        tl.store(y + at, left + right)


def add(a, b):
    y = torch.empty_like(a)
    _pointwise[(1,)](a, b, y, False, BLOCK=a.numel())
    return y


def less(a, b):
    y = torch.empty(a.shape)
    _pointwise[(1,)](a, b, y, True, BLOCK=a.numel())
    return y


@triton.jit
def _dot(a, b, y, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def dot(a, b):
    y = torch.empty(a.shape)
    _dot[(1,)](a, b, y, N=a.shape[0])
    return y


@triton.jit
def _plus_one(x):
    return x + 1


@triton.jit
def _plus_three(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, _plus_one(_plus_one(_plus_one(tl.load(x + at)))))


def plus_three(x):
    y = torch.empty_like(x)
    _plus_three[(1,)](x, y, BLOCK=x.numel())
    return y
