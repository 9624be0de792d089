"""Which recipes multiply in FP8 hardware, and where; importing this touches no device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from opfuse import Environment, Recipe

NATIVE, EMULATED, CANNOT = "native", "emulated", "cannot run"

SWIZZLED = {"mx": "MX", "nvfp4": "NVFP4"}
"""The kinds whose products read swizzled scales, and the names of their formats."""

OCP_FP8 = ("gfx950", "gfx1200", "gfx1201")
"""GPUs of AMD that multiply the FP8 codes of the OCP, which the recipes write."""


class Hardware(NamedTuple):
    """The facts that decide whether there is a product.

    Attributes:
        device: The kind of device: ``"cpu"``, ``"cuda"`` (ROCm too), ...
        capability: The compute capability of an NVIDIA GPU.
        architecture: The architecture of a GPU, such as ``"sm_90"`` or ``"gfx942"``.
        cuda: The version of CUDA that PyTorch is built with.
    """

    device: str
    capability: tuple[int, int] | None = None
    architecture: str | None = None
    cuda: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: torch.device | str) -> Hardware:
        """That of a device."""
        where = torch.device(device)
        if where.type != "cuda" or not torch.cuda.is_available():
            return cls(where.type)
        found = torch.cuda.get_device_properties(where)
        name = getattr(found, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
        version = found.major, found.minor
        return cls("cuda", version, name or f"sm_{found.major}{found.minor}", _built_with())

    @classmethod
    def where(cls, env: Environment) -> Hardware:
        """That of the device that a plan is made for."""
        return cls(env.device.type, env.capability, env.architecture, _built_with())


class Support(NamedTuple):
    """How a recipe runs.

    Attributes:
        how: ``"native"``: its products run in FP8 hardware. ``"emulated"``: they multiply the
            values of the codes, in fp32. ``"cannot run"``: not even that.
        why: A sentence.
    """

    how: str
    why: str


def how(cls: type[Recipe], here: Hardware) -> Support:
    """How a recipe runs on a device."""
    if here.device not in ("cpu", "cuda", "meta", "xpu"):
        return Support(CANNOT, f"PyTorch has no FP8 dtypes on {here.device}")
    kind = kind_of(cls)
    unknown = f"this plugin has no GEMM for what {cls.__name__} quantizes to"
    why = why_no_gemm(kind, here) if kind else unknown
    if why:
        return Support(EMULATED, f"{why}: the values of the codes are multiplied in fp32")
    return Support(NATIVE, f"PyTorch's scaled_mm on {here.architecture}")


def kind_of(recipe: type[Recipe]) -> str:
    """How a recipe scales tensors: ``"tensor"``, ``"block"``, ``"mx"``, ``"nvfp4"``; or ``""``."""
    return getattr(recipe, "scales", "")


def codes_of(kind: str) -> str:
    """What a product of this kind of scales multiplies."""
    return "FP4" if kind == "nvfp4" else "FP8"


def why_no_gemm(kind: str, here: Hardware) -> str:
    """Why the hardware, or PyTorch, has no product for a kind of scales; empty: it has one."""
    what = codes_of(kind)
    if here.device != "cuda":
        return f"no {what} GEMM on {here.device}"
    name, capability = here.architecture or "this GPU", here.capability or (0, 0)
    if name.startswith("gfx"):
        if kind != "tensor":
            return f"no {what} GEMM for these scales on {name} is used"
        if name == "gfx942":
            return "gfx942 multiplies FP8 of another encoding (fnuz) than the recipes write"
        return "" if name in OCP_FP8 else f"no FP8 GEMM on {name}"
    if kind in SWIZZLED and capability[0] != 10:
        format_ = SWIZZLED[kind]
        return f"this plugin multiplies {format_} on sm_100 and sm_103, and this is {name}"
    if capability < (8, 9):
        return f"no FP8 GEMM on {name}, it needs compute capability 8.9"
    if kind == "block" and capability[0] != 9:
        return f"PyTorch multiplies blocks of 128 on sm_90 only, and this is {name}"
    least = {"tensor": (12, 0), "block": (12, 9), "mx": (12, 8), "nvfp4": (12, 8)}[kind]
    if here.cuda is not None and here.cuda < least:
        return f"its product needs PyTorch for CUDA {least[0]}.{least[1]}"
    return ""


def scales_rows(here: Hardware) -> bool:
    """Whether a product has a scale for each row of both operands, in cuBLAS.

    That is on sm_90 from CUDA 12.9 on. Elsewhere PyTorch takes another kernel, which reads outside
    of its operands at some sizes.
    """
    return here.architecture == "sm_90" and here.cuda is not None and here.cuda >= (12, 9)


def _built_with() -> tuple[int, int] | None:
    version: Any = torch.version.cuda
    return None if version is None else tuple(int(part) for part in version.split(".")[:2])  # type: ignore[return-value]
