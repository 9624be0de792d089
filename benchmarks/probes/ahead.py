"""The probes' kernels, compiled ahead of time for a GPU that need not be there."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from benchmarks.measure import failure

from . import CONFIGS, FP8_CONFIG, FP8_SMALL

BF16 = dict.fromkeys("abch", "*bf16")
FP8 = BF16 | dict.fromkeys("ab", "*fp8e4nv")
NORM = dict.fromkeys(("x", "dy", "weight", "dx"), "*bf16") | dict.fromkeys(
    ("rstd", "partial"), "*fp32"
)
NOTHING = dict.fromkeys("abcdefgh", "*i32")


def compiled(
    kernel: Any,
    capability: int,
    pointers: dict[str, str],
    constants: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What a kernel for given constants needs, or why it does not compile.

    Sizes are multiples of 16.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = pointers | dict.fromkeys(constants or {}, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    even = [
        i for i, name in enumerate(kernel.arg_names) if name in pointers or name in ("M", "N", "K")
    ]
    attributes = {(position,): [["tt.divisibility", 16]] for position in even}
    try:
        source = ASTSource(kernel, signature, constants or {}, attributes)
        return resources(
            triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        )
    except Exception as error:  # a version of Triton that cannot
        return {"failed": failure(error)}


def resources(made: Any) -> dict[str, Any]:
    """Registers, spills, shared memory, and how many of the instructions that matter."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found: dict[str, Any] = {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
        found |= {
            name.lower(): int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)
        }
        code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True).stdout
    names = ("HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "LDL", "STL")
    return found | {name: len(re.findall(rf"\b{name}\b", code)) for name in names}


def compile_all(capability: int) -> list[dict[str, Any]]:
    """Every kernel in every form that a probe runs."""
    from . import kernels

    forms = [
        (config, more, BF16) for more in ({}, {"GELU": True, "SAVE": True}) for config in CONFIGS
    ]
    forms += [(FP8_CONFIG, more, FP8) for more in ({}, {"IMPRECISE": 128}, {"ROWS_OF_B": True})]
    forms += [(FP8_SMALL, {"IMPRECISE": 128}, FP8)]
    rows = []
    for config, more, types in forms:
        *sizes, warps, stages, ws = config
        constants = dict(zip(("BM", "BN", "BK", "GROUP", "SUBTILES"), sizes, strict=True)) | {
            "SMS": 132,
            "WS": ws,
        }
        constants |= {"GELU": False, "SAVE": False, "IMPRECISE": None, "ROWS_OF_B": False} | more
        made = compiled(
            kernels.gemm, capability, types, constants, num_warps=warps, num_stages=stages
        )
        rows.append({"kernel": "gemm", "config": config, **more, "fp8": types is FP8} | made)
    for h in (2048, 4096, 8192):
        constants = {"H": h, "BLOCK": h, "PROGRAMS": 1056}
        made = compiled(kernels.norm_backward, capability, NORM, constants, num_warps=8)
        rows.append({"kernel": "norm_backward", "h": h} | made)
    return [*rows, {"kernel": "nothing"} | compiled(kernels.nothing, capability, NOTHING)]
