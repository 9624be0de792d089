"""Layers that are split among ranks, beside whole ones, and one step of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opfuse import ops
from opfuse.core.quantization import Recipe
from opfuse.core.sequential import Sequential
from opfuse.recipes.autocast import autocast as quantize
from opfuse.report.calls import saved_bytes


class Split:
    """How ``ShardedLayer.build`` shall split: called with a mode, the arguments for a linear.

    Attributes:
        size: The number of ranks; 1: the layer is whole.
        sequence: Whether tensors outside are split along the rows.
    """

    def __init__(self, size: int, sequence: bool) -> None:
        self.size, self.sequence = size, sequence

    def __call__(self, mode: str) -> dict[str, Any]:
        """The arguments of ``opfuse.ops.Linear`` for ``"column"`` or ``"row"``."""
        if self.size == 1:
            return {}
        return {"tensor_parallel_mode": mode, "sequence_parallel": self.sequence}


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """A layer that is split among ranks.

    Attributes:
        name: Its name in reports.
        build: ``build(split)`` returns its ops on one rank, or those of the whole layer, where
            ``split.size`` is 1. See :class:`Split`. A function of a module, so that other processes
            find it.
        features: Of the whole input, a multiple of 2 and 3.
        takes: What a rank has of the input: ``"rows"``, ``"features"`` or ``"whole"``.
        gives: What it has of the output.
        sequence: Whether tensors outside are split along the rows.
        dim: The dimension of the rows that are split.
        summed: Parameters of the whole layer, by name, that are the sum of those of the ranks: the
            bias of a ``Linear`` that is split by rows.
    """

    name: str
    build: Callable[[Split], Sequence[Any]]
    features: int = 12
    takes: str = "whole"
    gives: str = "whole"
    sequence: bool = False
    dim: int = 0
    summed: tuple[str, ...] = ()

    def row_counts(self) -> list[tuple[int, ...]]:
        """Leading dimensions worth testing, from one row, or none, to three dimensions."""
        if self.dim:
            return [(2, 3), (1, 1), (2, 0), (2, 1, 3)]
        split = "rows" in (self.takes, self.gives)
        return [(3,), (1,), (0,), (2, 3), (2, 1, 3), (2, 0), *([] if split else [()])]

    def chain(self, size: int = 1) -> Sequential:
        """Its ops."""
        with torch.random.fork_rng([]):
            return Sequential(*self.build(Split(size, self.sequence)))

    def part(self, tensor: Tensor, has: str, rank: int, size: int) -> Tensor:
        """What a rank has of a tensor."""
        if has == "whole":
            return tensor
        return tensor.chunk(size, self.dim if has == "rows" else -1)[rank].contiguous()

    def joined(self, parts: Sequence[Tensor], has: str) -> Tensor:
        """The tensor of which each rank has a part."""
        if has == "whole":
            return parts[0]
        return torch.cat([*parts], self.dim if has == "rows" else -1)


def _column(split: Split) -> Sequence[Any]:
    return [ops.Linear(12, 18, **split("column"))]


def _column_no_bias(split: Split) -> Sequence[Any]:
    return [ops.Linear(12, 18, bias=False, **split("column"))]


def _row(split: Split) -> Sequence[Any]:
    return [ops.Linear(12, 5, **split("row"))]


def _row_no_bias(split: Split) -> Sequence[Any]:
    return [ops.Linear(12, 5, bias=False, **split("row"))]


def _row_then_bias(split: Split) -> Sequence[Any]:
    return [ops.BasicLinear(12, 5, **split("row")), ops.Bias(5)]


def _mlp(split: Split) -> Sequence[Any]:
    first, second = ops.Linear(12, 18, **split("column")), ops.Linear(18, 12, **split("row"))
    return [first, ops.GELU(), second]


def _gated(split: Split) -> Sequence[Any]:
    linears = {name: ops.Linear(12, 18, **split("column")) for name in ("gate", "up")}
    return [ops.ParallelLinear(linears), ops.SwiGLU()]


def _norm(split: Split) -> Sequence[Any]:
    return [ops.RMSNorm(12), ops.Linear(12, 18, **split("column"))]


def _second_rows(split: Split) -> Sequence[Any]:
    whole = split.size == 1
    gather, scatter = ([] if whole else [cls(dim=1)] for cls in (ops.AllGather, ops.ReduceScatter))
    first = ops.BasicLinear(12, 18 // split.size), ops.Bias(18 // split.size)
    return [*gather, *first, ops.ReLU(), ops.BasicLinear(18 // split.size, 5), *scatter]


def _default_layers() -> Iterator[ShardedLayer]:
    for sequence in (False, True):
        rows, outside = (", rows split", "rows") if sequence else ("", "whole")
        make: Any = functools.partial(ShardedLayer, sequence=sequence)
        column = dict(takes=outside, gives="features")
        yield make(f"column{rows}", _column, **column)
        yield make(f"column without bias{rows}", _column_no_bias, **column)
        yield make(f"row{rows}", _row, takes="features", gives=outside, summed=("0.bias",))
        yield make(f"row without bias{rows}", _row_no_bias, takes="features", gives=outside)
        yield make(f"row, then bias{rows}", _row_then_bias, takes="features", gives=outside)
        both = dict(takes=outside, gives=outside, summed=("2.bias",))
        yield make(f"column and row{rows}", _mlp, **both)
        yield make(f"gate and up{rows}", _gated, **column)
        yield make(f"norm and column{rows}", _norm, **column)
    yield ShardedLayer("second rows split", _second_rows, 12, "rows", "rows", True, 1)


LAYERS = tuple(_default_layers())
"""The layers that fusions are tested with."""


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What one step runs in.

    Attributes:
        layer: The layer.
        rows: Leading dimensions of a rank's input, where it has a part of the rows, else of all.
        dtype: Of the input and the parameters.
        autocast: The dtype of autocast, or None.
        size: The number of ranks.
        bias: The magnitude of the biases.
        frozen: Leaves that need no gradient: ``input``, and parameters by name.
        mode: ``"train"``, ``"no_grad"`` or ``"inference"``.
        checkpoint: Whether the forward is computed again in the backward.
        recipe: The recipe that quantizes it, or None.
        seed: Of the input.
    """

    layer: ShardedLayer = dataclasses.field(repr=False)
    rows: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    size: int = 2
    bias: float = 1.0
    frozen: tuple[str, ...] = ()
    mode: str = "train"
    checkpoint: bool = False
    recipe: Recipe | None = None
    seed: int = 0

    def with_(self, **changes: Any) -> Circumstances:
        """With some attributes changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class Step:
    """What one rank, or the whole layer, computed; ``saved`` counts bytes kept for the backward.

    ``sent`` is the number of its collectives at the end of the forward.
    """

    output: Tensor
    grads: dict[str, Tensor | None]
    saved: int = 0
    sent: int = 0


class Shard:
    """A layer with its leaves: on one rank, or whole.

    Args:
        given: The circumstances.
        rank: The rank; None: the layer is whole.
        dtype: Instead of that of the circumstances: the values are still rounded to that one.
    """

    def __init__(
        self, given: Circumstances, rank: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.given, self.rank, layer = given, rank, given.layer
        whole = layer.chain()
        self.chain = whole if rank is None else layer.chain(given.size)
        self.chain.to(dtype or given.dtype)
        self.names = [name for name, _ in whole.named_parameters()]
        self.params: dict[str, nn.Parameter] = dict(
            zip(self.names, self.chain.parameters(), strict=True)
        )
        rows = list(given.rows)
        if "rows" in (layer.takes, layer.gives):
            rows[layer.dim] *= given.size
        x = _drawing(given.seed)(*rows, layer.features).to(given.dtype)
        draw = _drawing(100)
        with torch.no_grad():
            for name, full in whole.named_parameters():
                self._load(name, full.shape, draw)
        if rank is not None:
            x = layer.part(x, layer.takes, rank, given.size)
        self.input = x.to(dtype or given.dtype).requires_grad_("input" not in given.frozen)
        for name, param in self.params.items():
            param.requires_grad_(name not in given.frozen)

    def _load(self, name: str, shape: Any, draw: Any) -> None:
        """Draw a parameter of the whole layer, and take the part of this rank."""
        given, param = self.given, self.params[name]
        is_bias = len(shape) == 1 and name.endswith("bias")
        scale = given.bias if is_bias else 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        if name in given.layer.summed:  # each rank has one of its own
            each = [(scale * draw(*shape)).to(given.dtype).double() for _ in range(given.size)]
            param.copy_(torch.stack(each).sum(0) if self.rank is None else each[self.rank])
            return
        full = (scale * draw(*shape)).to(given.dtype)
        dims = [d for d in range(len(shape)) if param.shape[d] != shape[d]]
        param.copy_(full.chunk(given.size, dims[0])[self.rank or 0] if dims else full)

    def leaves(self) -> dict[str, Tensor]:
        """Input and parameters by name."""
        return {"input": self.input, **self.params}

    def weights(self, y: Tensor) -> Tensor:
        """The incoming gradient of the output: this rank's part of that of the whole."""
        given, layer = self.given, self.given.layer
        shape = list(y.shape)
        if self.rank is not None and layer.gives != "whole":
            shape[layer.dim if layer.gives == "rows" else -1] *= given.size
        dy = _drawing(given.seed + 1)(*shape)
        dy = dy.to(given.autocast or given.dtype).to(y.dtype)
        return dy if self.rank is None else layer.part(dy, layer.gives, self.rank, given.size)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The mode, autocast and the recipe, for a ``with`` block."""
        given = self.given
        with contextlib.ExitStack() as around:
            if given.mode != "train":
                mode = torch.no_grad if given.mode == "no_grad" else torch.inference_mode
                around.enter_context(mode())
            if given.autocast and self.rank is not None:
                around.enter_context(torch.autocast("cpu", given.autocast))
            if given.recipe:
                around.enter_context(quantize(given.recipe))
            yield

    def forward(self, x: Tensor | None = None) -> Tensor:
        """The output of one call."""
        x = self.input if x is None else x
        with self.settings():
            if self.given.checkpoint:
                return checkpoint(self.chain, x, use_reentrant=False)  # type: ignore[no-any-return]
            return self.chain(x)  # type: ignore[no-any-return]

    def backward(self, y: Tensor) -> dict[str, Tensor | None]:
        """The gradients of the leaves that need one."""
        wanted = {name: leaf for name, leaf in self.leaves().items() if leaf.requires_grad}
        if not (y.requires_grad and wanted):
            return {}
        leaves = list(wanted.values())
        grads = torch.autograd.grad(y, leaves, self.weights(y), allow_unused=True)
        return dict(zip(wanted, grads, strict=True))

    def step(self, calls: Sequence[Any] = ()) -> Step:
        """A forward and a backward; ``calls`` are the collectives of the rank."""
        made: list[Tensor] = []
        saved = saved_bytes(lambda: made.append(self.forward()), self.leaves().values())
        sent, (y,) = len(calls), made
        return Step(y.detach(), self.backward(y), saved, sent)


def _drawing(seed: int) -> Callable[..., Tensor]:
    """A function that draws from a generator of its own: torch's is one for all threads."""
    generator = torch.Generator().manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float64)
