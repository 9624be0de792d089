"""What PyTorch has set for products in fp32: in all ways there are to set it, and back again."""

from __future__ import annotations

import contextlib

import torch
from torch import backends

WAYS = {  # what is set: (what a product on a CPU is, what one on a CUDA GPU is)
    "untouched": ("ieee", "ieee", lambda: None),
    "all ieee": ("ieee", "ieee", lambda: new(backends, "ieee")),
    "all tf32": ("tf32", "tf32", lambda: new(backends, "tf32")),
    "all bf16": ("bf16", "ieee", lambda: new(backends, "bf16")),  # CUDA has no such product
    "all none": ("ieee", "ieee", lambda: new(backends, "none")),
    "cuda tf32": ("ieee", "tf32", lambda: new(backends.cuda.matmul, "tf32")),
    "cuda ieee": ("ieee", "ieee", lambda: new(backends.cuda.matmul, "ieee")),
    "cuda none": ("ieee", "ieee", lambda: new(backends.cuda.matmul, "none")),
    "cudnn tf32": ("ieee", "tf32", lambda: new(backends.cudnn, "tf32")),
    "cpu bf16": ("bf16", "ieee", lambda: new(backends.mkldnn.matmul, "bf16")),
    "cpu tf32": ("tf32", "ieee", lambda: new(backends.mkldnn.matmul, "tf32")),
    "cpu ieee": ("ieee", "ieee", lambda: new(backends.mkldnn.matmul, "ieee")),
    "all tf32, cpu ieee": (
        "ieee",
        "tf32",
        lambda: (new(backends, "tf32"), new(backends.mkldnn.matmul, "ieee")),
    ),
    "old highest": ("ieee", "ieee", lambda: old("highest")),
    "old high": ("tf32", "tf32", lambda: old("high")),
    "old medium": ("bf16", "tf32", lambda: old("medium")),
    "old allowed": ("ieee", "tf32", lambda: allow(True)),
    "old not allowed": ("ieee", "ieee", lambda: allow(False)),
    "old high, then cuda ieee": (
        "tf32",
        "ieee",
        lambda: (old("high"), new(backends.cuda.matmul, "ieee")),
    ),
    "old medium, then all ieee": ("bf16", "tf32", lambda: (old("medium"), new(backends, "ieee"))),
    "all tf32, then old highest": ("ieee", "ieee", lambda: (new(backends, "tf32"), old("highest"))),
    "cpu bf16, then old allowed": (
        "bf16",
        "tf32",
        lambda: (new(backends.mkldnn.matmul, "bf16"), allow(True)),
    ),
}


def new(home, value):
    home.fp32_precision = value


def old(value):
    torch.set_float32_matmul_precision(value)


def allow(value):
    backends.cuda.matmul.allow_tf32 = value


@contextlib.contextmanager
def restored():
    """Leaves everything as it is when PyTorch was imported."""
    try:
        yield
    finally:
        old("highest")
        backends.cudnn.allow_tf32 = True
        for home in (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul):
            new(home, "none")
