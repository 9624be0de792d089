"""Cases: the kernels of a plugin that are compiled, checked and counted without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .targets import Target


@dataclass(frozen=True)
class Operand:
    """A tensor that a fusion reads or writes.

    Attributes:
        shape: Its sizes.
        dtype: Its dtype.
        role: ``"full"``: the fusion has to read or write it once. ``"vector"``: a weight or a
            statistic, small enough that every program may read it again. ``"partial"``: partial
            sums, which another kernel adds up.
        output: Whether ``run`` returns it rather than takes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["full", "vector", "partial"] = "full"
    output: bool = False

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class KernelCase:
    """One fusion of a plugin, at the shapes of real models.

    A plugin lists its cases under an entry point of group ``opfuse_triton.cases``, such as
    ``"opfuse_fast.cases:CASES"``. ``python -m opfuse_triton check`` reads it, and no model does.

    Attributes:
        name: Unique in the plugin.
        run: Called as ``run(**inputs)``, where it launches what the fusion launches. It gives the
            outputs in the order of ``tensors``: a tensor, or a tuple of them. A tensor that is
            neither an input nor an output, such as a workspace, counts as partial.
        tensors: Called as ``tensors(**shape)``: the operands by name, first the inputs.
        shapes: Shapes of real models.
        small: Shapes that the interpreter can run, with rows and columns that do not fill a tile.
        floor: Called as ``floor(**shape)``: the bytes that the fusion has to move. None: the sum
            of its full operands.
        gemms: Names of the kernels that are matrix products: they have to use the GPU's matrix
            instructions.
        separate: The same with PyTorch's operations, one after the other, called like ``run``. Each
            counts as reading its operands and writing its result. Or it returns their bytes, as a
            number, if PyTorch's operations on a GPU differ from those on the meta device.
        peers: The same by other packages' kernels, by the name of the package, called like
            ``run``. One that raises ImportError is reported as not installed.
        twin: The same with PyTorch's operations, called like ``run``, which its results are
            compared with on a GPU. With floating-point inputs in fp64 it is the reference. Default:
            ``separate``.
        exact: Whether results in FP8 must have the twin's bits: nothing is rounded before the cast.
        draw: Called as ``draw(**shape)``: the inputs that a normal distribution does not suit,
            such as class indices or group sizes, by name, on the CPU.
        dtypes: The dtypes that its operands in bfloat16 may have instead, bfloat16 included.
        unaligned: Shapes at which ``check`` compiles it for tensors, or rows, that do not begin at
            multiples of 16 bytes: accesses are narrow then, and addresses take registers.
        flops: Called as ``flops(**shape)``: floating-point operations of its matrix products.
        runs_on: Whether a target has what the kernels need, such as products of FP8 codes. None:
            all have.
        overwrites: Parameters of its kernels whose tensor may be that of another one: what is
            written, with what is read in its place, such as ``{"dx_ptr": "dy_ptr"}``. ``check``
            looks whether each thread overwrites what it has read itself.
        turn: Its place in the order of ``python -m opfuse_triton gpu``; the smallest come first.
    """

    name: str
    run: Callable[..., Any]
    tensors: Callable[..., Mapping[str, Operand]]
    shapes: Sequence[Mapping[str, int]]
    small: Sequence[Mapping[str, int]]
    floor: Callable[..., int] | None = None
    gemms: Sequence[str] = ()
    separate: Callable[..., Any] | None = None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    twin: Callable[..., Any] | None = None
    exact: bool = False
    draw: Callable[..., Mapping[str, Tensor]] | None = None
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    unaligned: Sequence[Mapping[str, int]] = ()
    flops: Callable[..., int] | None = None
    runs_on: Callable[[Target], bool] | None = None
    turn: int = 50
    overwrites: Mapping[str, str] = field(default_factory=dict)

    def fits(self, target: Target) -> bool:
        """Whether it runs on a target."""
        return self.runs_on is None or self.runs_on(target)

    def inputs(
        self,
        shape: Mapping[str, int],
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.bfloat16,
        offset: int = 0,
    ) -> dict[str, Tensor]:
        """The arguments of ``run`` at a shape.

        Args:
            shape: One of ``shapes`` or ``small``.
            device: ``"meta"``: tensors without memory. On others, floating-point tensors are
                drawn from a normal distribution by torch's generator, those of ``draw`` are its
                own, and others are 0.
            dtype: The dtype in place of bfloat16.
            offset: The index in its memory at which each tensor begins.

        Raises:
            ValueError: ``draw`` gives something that is not an operand.
        """
        meta = torch.device(device).type == "meta"
        drawn = {} if meta or self.draw is None else self.draw(**shape)
        if unknown := drawn.keys() - self.tensors(**shape).keys():
            raise ValueError(f"{self.name}: draw gives {', '.join(unknown)}, which is no operand")
        found = {}
        for name, operand in self.tensors(**shape).items():
            if operand.output:
                continue
            own = dtype if operand.dtype is torch.bfloat16 else operand.dtype
            memory = torch.zeros(operand.numel + offset, dtype=own, device=device)
            found[name] = memory[offset:].view(operand.shape)
            if name in drawn:
                found[name].copy_(drawn[name])
            elif own.is_floating_point and not meta:
                found[name].copy_(torch.randn(operand.shape, device=device))
        return found

    def compiled(self) -> Iterator[tuple[Mapping[str, int], torch.dtype, int]]:
        """What ``check`` compiles: shapes, with the dtype in place of bfloat16, and the offset.

        These are all ``shapes``, the last of them in the other ``dtypes``, and ``unaligned`` in
        each.
        """
        yield from ((shape, torch.bfloat16, 0) for shape in self.shapes)
        for dtype in self.dtypes:
            if dtype is not torch.bfloat16:
                yield self.shapes[-1], dtype, 0
            yield from ((shape, dtype, 1) for shape in self.unaligned)

    def floor_bytes(self, shape: Mapping[str, int]) -> int:
        """The bytes that the fusion has to move at a shape."""
        if self.floor is not None:
            return self.floor(**shape)
        operands = self.tensors(**shape).values()
        return sum(operand.nbytes for operand in operands if operand.role == "full")


def group_ends(groups: int, rows: int, multiple: int = 1) -> Tensor:
    """The rows at which groups of uneven sizes end, int32; the first of several is empty.

    Args:
        groups: The number of groups.
        rows: The rows of all, a multiple of ``multiple``.
        multiple: What divides the rows of each group.
    """
    weights = torch.linspace(0.0, 2.0, groups) if groups > 1 else torch.ones(1)
    ends = weights.cumsum(0) / weights.sum() * (rows // multiple)
    return ends.round().to(torch.int32) * multiple
