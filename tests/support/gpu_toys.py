"""Cases for ``python -m opfuse_triton gpu``: a sound one, and one for each thing that can go wrong."""

import os
import time

import torch
import triton
from opfuse_triton import Config, Kernel, KernelCase
from triton_toys import one_to_one, rows_of, scale_kernel

SMALL = [{"rows": 3, "features": 40}]
SCALE = Kernel(scale_kernel, [Config({"BLOCK": 8}), Config({"BLOCK": 64})])


def scaled(x, s):
    y = torch.empty_like(x)
    SCALE.launch(lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),), x, s, y, x.numel())
    return y


def twice(x, s):
    return scaled(x, s) * 2


def unwritten(x, s):
    y = torch.empty_like(x)
    SCALE.launch(lambda config: (triton.cdiv(20, config["BLOCK"]),), x, s, y, x.numel() - 100)
    return y


_count = iter(range(1000))


def another_each_time(x, s):
    return scaled(x, s) + next(_count)


def narrow(x, s):
    return scaled(x, s)[:, 1:].contiguous()


def raising(x, s):
    raise ValueError("no such kernel")


def aborting(x, s):
    os.abort()


def hanging(x, s):
    time.sleep(600)


def case(name, run, **more):
    twin = more.pop("separate", lambda x, s: x * s.to(x.dtype))
    return KernelCase(name, run, rows_of, SMALL, SMALL, separate=twin, **more)


SOUND = [
    case("later", scaled, turn=9),
    case("scale", scaled, dtypes=(torch.bfloat16, torch.float32), peers={"twice": twice}, turn=1),
]
WRONG = [
    case("twice", twice),
    case("unwritten", unwritten),
    case("differing", another_each_time),
    case("narrow", narrow),
    case("raising", raising),
    case("without twin", scaled, separate=None),
]
DEADLY = [case("aborts", aborting, turn=1), case("goes on", scaled, turn=2), case("hangs", hanging)]
COUNTS = [
    KernelCase(
        "counts",
        lambda x: x * 1,
        one_to_one,
        SMALL,
        SMALL,
        draw=lambda rows, features: {"x": torch.ones(rows, features)},
    )
]
