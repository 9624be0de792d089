"""Products of groups of rows, each with its own matrix; for ``GroupedLinear``.

Those under a recipe are in ``_quantized_groups``.

The rows of a tensor are those of its first dimension; the groups follow one another.
There are three ways: torch's grouped product, which never reads the sizes of the groups on the
host; a loop over the groups; and the loop inside custom operators, while ``torch.compile``
traces, or where the sizes have no values yet. A fusion may have another: a subclass of
:class:`Groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..core.overwriting import may_write
from ._common import sum_rows
from ._products import tiled
from .arithmetic import add_product, adds_itself, cast, widen

Matrices = Sequence[Tensor] | Tensor
"""The matrix of each group; one tensor may hold all."""

Sums = Sequence[Tensor | None] | Tensor
"""A matrix for each group, to which a product is added; None: its product is not needed."""


class Groups(NamedTuple):
    """The number of rows in each group, and the products of such groups.

    Attributes:
        sizes: The tensor of sizes; on the CPU if it was read there.
        counts: The same as ints, for a loop.
        ends: The end of each group, as int32, for torch's grouped product.
    """

    sizes: Tensor
    counts: list[int] | None = None
    ends: Tensor | None = None

    def products(self, x: Tensor, weights: Matrices, biases: Sequence[Tensor]) -> Tensor:
        """``x_i @ weight_i.T + bias_i`` for each group; biases are optional."""
        if self.ends is not None:
            y = _multiply(self.ends, x, _stacked(weights).transpose(1, 2))
            return y + self._of_rows(biases, x) if biases else y
        if self.counts is None:
            return _products(self.sizes, x, list(weights), list(biases))  # type: ignore[no-any-return]
        return _loop(self.counts, x, weights, biases)

    # Products of quantized rows and weights, for a fusion to override. The rows are one tensor,
    # :class:`opfuse.ops.row_groups.GroupedTensor`. Each rounds its result once. None:
    # the dequantized values have to be multiplied, group by group.

    def coded_products(
        self, x: Any, weights: Sequence[Any], biases: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """The same as :meth:`products` of codes, with one row dimension."""
        return None

    def coded_input_grads(
        self, dy: Any, weights: Sequence[Any], dtype: torch.dtype
    ) -> Tensor | None:
        """The same as :meth:`input_grads` of codes, with one row dimension."""
        return None

    def coded_weight_grads(self, dy: Any, x: Any, dtype: torch.dtype) -> Tensor | None:
        """The same as :meth:`stacked_grads` of codes."""
        return None

    def add_coded_weight_grads(self, dy: Any, x: Any, sums: Sums, beta: float) -> bool:
        """The same as :meth:`add_weight_grads` of codes."""
        return False

    def input_grads(self, dy: Tensor, weights: Matrices) -> Tensor:
        """``dy_i @ weight_i`` for each group."""
        if self.ends is not None:
            return _multiply(self.ends, dy, _stacked(weights))
        return self.products(dy, [weight.t() for weight in weights], ())

    def weight_grads(self, dy: Tensor, x: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """``dy_i.T @ x_i`` for each wanted group; zeros if it has no rows."""
        if self.ends is not None:
            whole = self.stacked_grads(dy, x, len(wanted))
            return [whole[i] if wants else None for i, wants in enumerate(wanted)]
        if self.counts is None:
            return _only(_weight_grads(self.sizes, dy, x, list(wanted)), wanted)
        return _only(_loop_weights(self.counts, dy, x, wanted), wanted)

    def stacked_grads(self, dy: Tensor, x: Tensor, count: int) -> Tensor:
        """``dy_i.T @ x_i`` for all groups, in one tensor."""
        if self.ends is not None:
            return F.grouped_mm(_aligned(dy).t(), _aligned(x), offs=self.ends)
        if self.counts is not None and may_write(dy, x):
            whole = x.new_empty(count, dy.shape[-1], x.shape[-1])
            _loop_weights(self.counts, dy, x, (True,) * count, whole)
            return whole
        return _stacked(self.weight_grads(dy, x, (True,) * count))

    def add_weight_grads(self, dy: Tensor, x: Tensor, sums: Sums, beta: float) -> bool:
        """``sum_i = beta * sum_i + dy_i.T @ x_i`` by the products, which are not rounded before.

        Args:
            dy: The gradient of the output.
            x: The input, in the same dtype.
            sums: The sum of each group.
            beta: The factor of what is in them; with 0 it is not read.

        Returns:
            Whether it was done. If not, nothing has changed.
        """
        known = [each for each in sums if each is not None]
        if self.counts is None or not all(adds_itself(each, x) for each in known):
            return False
        parts = zip(torch.split(dy, self.counts), torch.split(x, self.counts), sums, strict=True)
        for rows, others, total in parts:
            if total is not None and (len(rows) or beta != 1):
                add_product(total, rows.flatten(0, -2).t(), others.flatten(0, -2), beta=beta)
        return True

    def row_sums(
        self, grad_output: Tensor, wanted: Sequence[bool], scales: Tensor | None = None
    ) -> list[Tensor | None]:
        """The sum of the rows of each wanted group; zeros if it has no rows.

        With scales, each row is first multiplied by its own.
        """
        dtype, dy = grad_output.dtype, grad_output
        if scales is not None:
            dy = widen(dy) * widen(scales).unsqueeze(-1)
        if self.ends is not None:
            dy = _aligned(cast(dy, dtype))  # there is a product for few dtypes
            # a product with ones is the same in every run, unlike sums by atomic adds
            ones = dy.new_ones(dy.shape[0], 8)
            whole = F.grouped_mm(dy.t(), ones, offs=self.ends)[:, :, 0].contiguous()
            return [whole[i] if wants else None for i, wants in enumerate(wanted)]
        if self.counts is None:
            found = _row_sums(self.sizes, dy, list(wanted))
        else:
            found = _loop_sums(self.counts, dy, wanted)
        return _only([cast(of_group, dtype) for of_group in found], wanted)

    def add_scaled(self, y: Tensor, biases: Sequence[Tensor], scales: Tensor) -> Tensor:
        """``y_i + bias_i * scales_i`` for each group, with a scale for each row."""
        of_rows = widen(self._of_rows(biases, y)) * widen(scales).unsqueeze(-1)
        return cast(widen(y) + of_rows, y.dtype)

    def scale_grads(self, dy: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """The sum of ``dy_i * bias_i`` over the features, for each row."""
        return (widen(dy) * widen(self._of_rows(biases, dy))).sum(-1)

    def _of_rows(self, vectors: Sequence[Tensor], x: Tensor) -> Tensor:
        """For each row of ``x``, the vector of its group, such as its bias."""
        sizes = self.sizes.to(x.device, torch.int64)
        group = torch.repeat_interleave(sizes, output_size=x.shape[0])
        of_rows = group.view(-1, *[1] * (x.ndim - 2)).expand(x.shape[:-1])
        return torch.stack(list(vectors))[of_rows]


MOST_ROWS = torch.iinfo(torch.int32).max
"""So many rows have ends in int32; of more, each group is multiplied by itself."""

GroupsOf = Callable[[Tensor, Tensor, Sequence[int], bool], Groups]
"""The type of :func:`groups_of`."""


def groups_of(x: Tensor, sizes: Tensor, features: Sequence[int], looped: bool = False) -> Groups:
    """The groups of the rows of ``x``.

    Args:
        x: The tensor to multiply.
        sizes: Number of rows in each group.
        features: Both sizes of each matrix.
        looped: Whether torch's grouped product cannot be used, as when autograd records it.

    Raises:
        ValueError: A size is negative, or they do not sum up to the rows of ``x``. Where they are
            not read on the host, the device finds it: a RuntimeError, at the latest when it
            synchronizes.
    """
    rows, inner = x.shape[0], math.prod(x.shape[1:-1])
    fits = 0 < rows * inner <= MOST_ROWS and sizes.device == x.device
    if not looped and fits and _takes(x, features):
        return Groups(sizes, None, ends_of(sizes, rows, inner))
    if is_compiling() or sizes.is_meta or type(sizes) is not Tensor:
        return Groups(sizes)
    sizes = sizes.cpu()
    return Groups(sizes, _counts(sizes, rows))


def ends_of(sizes: Tensor, rows: int, inner: int = 1) -> Tensor:
    """The end of each group, as int32; the sizes are not read on the host.

    Args:
        sizes: Number of rows in each group.
        rows: The rows of all groups.
        inner: In how many rows each of them was split.

    Raises:
        RuntimeError: A size is negative, or they do not sum up to ``rows``; on a GPU at the latest
            when it synchronizes.
    """
    ends = sizes.cumsum(0, dtype=torch.int64)
    torch._assert_async((ends[-1] == rows) & (sizes.amin() >= 0), _EXPECTED)
    return (ends * inner).to(torch.int32)


_EXPECTED = "GroupedLinear expected split_sizes of at least 0 that sum up to the rows of its input"


def _counts(sizes: Tensor, rows: int) -> list[int]:
    counts: list[int] = sizes.tolist()
    if sum(counts) != rows or min(counts) < 0:
        raise ValueError(f"{_EXPECTED}, {rows}, got {counts}")
    return counts


def _takes(x: Tensor, features: Sequence[int]) -> bool:
    """Return whether torch's grouped product takes a tensor without reading sizes on the host.

    It does for bf16 on compute capability 9 and 10, as of torch 2.13; otherwise it loops over the
    groups itself. The size of a row must be a multiple of 16 bytes.
    """
    if x.dtype is not torch.bfloat16 or any(size % 8 or not size for size in features):
        return False
    return x.is_cuda and _has_kernel(x.device)


def _has_kernel(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


_has_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _only(found: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The computed results, each at its place among all."""
    rest = iter(found)
    return [next(rest) if wants else None for wants in wanted]


# Torch's grouped product


def _stacked(matrices: Any) -> Tensor:
    return matrices if isinstance(matrices, Tensor) else torch.stack(list(matrices))


def _multiply(ends: Tensor, x: Tensor, matrices: Tensor) -> Tensor:
    y = F.grouped_mm(_aligned(x), matrices, offs=ends)
    return y.reshape(*x.shape[:-1], matrices.shape[-1])


def _aligned(x: Tensor) -> Tensor:
    """The rows as torch's grouped product needs them: dense, at an address that 16 divides."""
    x = x.reshape(-1, x.shape[-1])
    if x.stride() == (x.shape[1], 1) and (is_compiling() or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


# The loop, and the same as operators that torch.compile does not trace


def _loop(counts: list[int], x: Tensor, weights: Matrices, biases: Sequence[Tensor]) -> Tensor:
    each: Sequence[Tensor | None] = biases or [None] * len(weights)
    x, *weights = tiled(x, *weights)
    parts = zip(torch.split(x, counts), weights, each, strict=True)
    return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


def _loop_weights(
    counts: list[int], dy: Tensor, x: Tensor, wanted: Sequence[bool], whole: Tensor | None = None
) -> list[Tensor]:
    """The wanted products; with ``whole`` they are written there, and not copied afterwards."""
    into = [None] * len(counts) if whole is None else whole
    parts = zip(torch.split(dy, counts), torch.split(x, counts), wanted, into, strict=True)
    return [
        torch.mm(dy.flatten(0, -2).t(), x.flatten(0, -2), out=out)
        for dy, x, wants, out in parts
        if wants
    ]


def _loop_sums(counts: list[int], dy: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    parts = zip(torch.split(dy, counts), wanted, strict=True)
    return [sum_rows(dy, 1) for dy, wants in parts if wants]


def _operator(loop: Callable[..., Any], types: str) -> Callable[[Callable[..., Any]], Any]:
    """Make the loop an operator, which takes the sizes and reads them when it runs.

    Args:
        loop: The loop.
        types: The types of the arguments and of the result.

    Returns:
        A decorator of a function that makes tensors of the result's shapes.
    """

    def run(sizes: Tensor, rows: Tensor, *others: Any) -> Any:
        return loop(_counts(sizes, rows.shape[0]), rows, *others)

    def decorate(fake: Callable[..., Any]) -> Any:
        name = f"opfuse::grouped{fake.__name__}"
        tags = (torch.Tag.cudagraph_unsafe,)  # a graph of CUDA cannot hold what reads on the host
        made = torch.library.custom_op(name, run, mutates_args=(), schema=types, tags=tags)
        made.register_fake(fake)
        return made

    return decorate


@_operator(_loop, "(Tensor sizes, Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
def _products(sizes: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[0].shape[0])


@_operator(_loop_weights, "(Tensor sizes, Tensor dy, Tensor x, bool[] wanted) -> Tensor[]")
def _weight_grads(sizes: Tensor, dy: Tensor, x: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    return [x.new_empty(dy.shape[-1], x.shape[-1]) for wants in wanted if wants]


@_operator(_loop_sums, "(Tensor sizes, Tensor dy, bool[] wanted) -> Tensor[]")
def _row_sums(sizes: Tensor, dy: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    return [dy.new_empty(dy.shape[-1]) for wants in wanted if wants]
