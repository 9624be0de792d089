"""Configurations: the tile sizes, warps and stages that a kernel is compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


def cdiv(size: int, block: int) -> int:
    """How many blocks cover a size. Triton's takes 5 us where a kernel is launched.

    Args:
        size: The size.
        block: The size of a block.
    """
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below a size; 0 for 0. Triton's takes 5 us.

    Args:
        size: The size, at least 0.
    """
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class Config:
    """The settings that one kernel is compiled with, as data.

    ``config["BLOCK"]`` is one of its constants. ``Config(**config.to_dict())`` equals ``config``.

    Attributes:
        constants: Tile sizes, and whatever other ``tl.constexpr`` arguments it decides, by name.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline; None: Triton's default for the GPU.
        options: Other compiler options of Triton: ``num_ctas``, ``maxnreg``, ``waves_per_eu``, ...
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_maps = (frozenset(given.items()) for given in (self.constants, self.options))
        # a launch looks it up
        object.__setattr__(self, "_hash", hash((*of_maps, self.num_warps, self.num_stages)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-able data, if its constants are JSON-able."""
        return asdict(self)

    def compiler_options(self) -> dict[str, Any]:
        """The keyword arguments for Triton that are not arguments of the kernel."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        # Triton 3.9 warns unless told whether a product and a sum may become one operation
        fusing = {"enable_fp_fusion": True}
        return {**fusing, "num_warps": self.num_warps, **stages, **self.options}
