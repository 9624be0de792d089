"""The probes' kernels, compiled ahead of time for a GPU that need not be there."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from . import CONFIGS, FP8_CONFIG, FP8_SMALL

POINTERS = {"gemm": "abch", "norm_backward": ("x", "dy", "weight", "rstd", "dx", "partial"), "nothing": "abcdefgh"}
FLOATS = {"rstd": "*fp32", "partial": "*fp32"}


def compiled(
    kernel: Any, constants: dict[str, Any], capability: int, types: dict[str, str], **options: Any
) -> dict[str, Any]:
    """What a kernel for given constants needs, sizes being multiples of 16; or why it does not compile."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = POINTERS[kernel.__name__]
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in pointers or name in ("M", "N", "K"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    try:
        return resources(triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options))
    except Exception as error:  # a version of Triton that cannot
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def resources(made: Any) -> dict[str, Any]:
    """Registers, spills, shared memory, and how many of the instructions that matter."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found: dict[str, Any] = {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
        found |= {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
        code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True).stdout
    names = ("HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "LDL", "STL")
    return found | {name: len(re.findall(rf"\b{name}\b", code)) for name in names}


def compile_all(capability: int) -> list[dict[str, Any]]:
    """Every kernel in every form that a probe runs."""
    from . import kernels

    bf16, fp8 = dict.fromkeys("abch", "*bf16"), dict.fromkeys("ab", "*fp8e4nv") | dict.fromkeys("ch", "*bf16")
    forms = [(config, {}, bf16) for config in CONFIGS]
    forms += [(config, {"GELU": True, "SAVE": True}, bf16) for config in CONFIGS]
    forms += [(FP8_CONFIG, more, fp8) for more in ({}, {"IMPRECISE": 128}, {"ROWS_OF_B": True})]
    forms += [(FP8_SMALL, {"IMPRECISE": 128}, fp8)]
    rows = []
    for config, more, types in forms:
        bm, bn, bk, group, subtiles, warps, stages, ws = config
        constants = {"SMS": 132, "BM": bm, "BN": bn, "BK": bk, "GROUP": group, "SUBTILES": subtiles, "WS": ws}
        constants |= {"GELU": False, "SAVE": False, "IMPRECISE": None, "ROWS_OF_B": False} | more
        options = {"num_warps": warps, "num_stages": stages}
        made = compiled(kernels.gemm, constants, capability, types, **options)
        rows.append({"kernel": "gemm", "config": config, **more, "fp8": types is fp8} | made)
    types = dict.fromkeys(POINTERS["norm_backward"], "*bf16") | FLOATS
    for h in (2048, 4096, 8192):
        constants = {"H": h, "BLOCK": h, "PROGRAMS": 1056}
        made = compiled(kernels.norm_backward, constants, capability, types, num_warps=8)
        rows.append({"kernel": "norm_backward", "h": h} | made)
    made = compiled(kernels.nothing, {}, capability, dict.fromkeys(POINTERS["nothing"], "*i32"))
    return [*rows, {"kernel": "nothing"} | made]
