"""Launching the grouped products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_triton import Config, DeviceFunctions, Kernel, cdiv, current_target, next_power_of_2
from torch import Tensor

from opfuse.ops.authoring import is_captured, matmul_precision

from . import backward, forward, scaled, tiles

PRODUCT = Kernel(forward.grouped_product, tiles.of_product)
ACTIVATED = Kernel(forward.grouped_activated, tiles.of_gated)
GRADIENTS = Kernel(backward.grouped_gradients, tiles.of_gradients)
WGRAD = Kernel(backward.grouped_wgrad, tiles.of_wgrad)
CODED_WGRAD = Kernel(backward.grouped_coded_wgrad, tiles.of_wgrad)
SCALED = Kernel(scaled.grouped_scaled_product, tiles.of_product)
SUMS = Kernel(backward.group_sums, [Config({"BLOCK_M": 32, "BLOCK_N": 128})])

Grid = Callable[[Config], tuple[int]]

PER_MULTIPROCESSOR = 2
"""Programs that a multiprocessor has registers and shared memory for."""


class Matrices(NamedTuple):
    """The matrix of each group, wherever it is.

    Attributes:
        first: That of the first group, or all in one tensor.
        table: How many elements after it each is; None: they follow one another.
        step: From one to the next, in elements.
        count: Number of groups.
        sizes: Rows and columns of each.
        strides: Of a row and of a column.
        aligned: What divides every element of the table.
    """

    first: Tensor
    table: Tensor | None
    step: int
    count: int
    sizes: tuple[int, int]
    strides: tuple[int, int]
    aligned: int = 1

    def transposed(self) -> Matrices:
        """The same with rows as columns."""
        return self._replace(sizes=self.sizes[::-1], strides=self.strides[::-1])


_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Scaled(NamedTuple):
    """Contiguous FP8 codes, and what they are multiplied by.

    Attributes:
        codes: The codes.
        scales: fp32, one for each group; or of MX blocks, in float8_e8m0fnu, where the last
            dimension has one for each 32 codes.
    """

    codes: Tensor
    scales: Tensor

    @property
    def format(self) -> str | None:
        """The kernels' name for MX blocks of these codes; None: these are none."""
        is_mx = self.scales.dtype is torch.float8_e8m0fnu
        return _FORMATS[self.codes.dtype] if is_mx else None

    @property
    def kernel_scales(self) -> Tensor:
        """The scales as the kernels take them: those of MX blocks are bytes."""
        return self.scales if self.format is None else self.scales.view(torch.uint8)


class Activation(NamedTuple):
    """An activation times a scale for each row, as the kernels compute it.

    Attributes:
        functions: Its device functions.
        numbers: Its numbers, as the functions take them.
        interleaved: How many features of each half alternate; 0: the halves are contiguous.
        scales: ``(rows,)``, contiguous.
    """

    functions: DeviceFunctions
    numbers: tuple[float, ...]
    interleaved: int
    scales: Tensor

    @property
    def ratio(self) -> int:
        """Features of the input for each of the output."""
        return 1 if self.functions.linear_value is None else 2


def matrices_of(weights: Sequence[Tensor] | Tensor) -> Matrices:
    """Where the matrices are; they are copied only if neither rows nor columns are contiguous.

    Args:
        weights: One tensor ``(groups, rows, columns)``, or a matrix for each group.
    """
    if isinstance(weights, Tensor):
        if weights.stride(2) != 1 == weights.stride(1):
            return matrices_of(weights.mT).transposed()
        weights = weights if weights.stride(2) == 1 else weights.contiguous()
        count, *sizes = weights.shape
        step, *strides = weights.stride()
        return Matrices(weights, None, step, count, tuple(sizes), tuple(strides))  # type: ignore[arg-type]
    if len(weights) == 1:
        return matrices_of(weights[0][None])
    if (whole := in_a_row(weights)) is not None:
        return matrices_of(whole)
    found = listed(weights) if all([weight.is_contiguous() for weight in weights]) else None
    return matrices_of(torch.stack(list(weights))) if found is None else found


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors of one shape as one, if they are in one memory, equally far apart."""
    first, second = tensors[0], tensors[min(1, len(tensors) - 1)]
    start, step = first.storage_offset(), second.storage_offset() - first.storage_offset()
    if step < first.numel() or not first.is_contiguous():
        return None
    memory, shape, strides = first.untyped_storage()._cdata, first.shape, first.stride()
    for i, each in enumerate(tensors):
        if (each.untyped_storage()._cdata, each.storage_offset()) != (memory, start + i * step):
            return None
        if (each.shape, each.stride(), each.dtype) != (shape, strides, first.dtype):
            return None
    return first.as_strided((len(tensors), *shape), (step, *strides))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors of one shape as one: where they are, or a copy."""
    whole = in_a_row(tensors)
    if whole is None and tensors[0].itemsize == 1:
        whole = torch.stack([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
    return torch.stack(list(tensors)) if whole is None else whole


def listed(weights: Sequence[Tensor | None]) -> Matrices | None:
    """Matrices in several tensors, each contiguous: a table says where each is, or that it is not.

    None while a CUDA graph is captured, if no call before had the same matrices.
    """
    first = next(weight for weight in weights if weight is not None)
    start, itemsize = first.data_ptr(), first.element_size()
    places = [None if weight is None else weight.data_ptr() - start for weight in weights]
    known = [place for place in places if place is not None]
    entries = [_ABSENT if place is None else place // itemsize for place in places]
    table = _table(tuple(entries), first.device)
    if table is None:
        return None
    sizes, aligned = (first.shape[0], first.shape[1]), all((start + p) % 16 == 0 for p in known)
    aligned_to = 16 // itemsize if aligned else 1
    return Matrices(first, table, 0, len(weights), sizes, (sizes[1], 1), aligned_to)


_ABSENT = backward.ABSENT.value


def sums_of(sums: Sequence[Tensor | None] | Tensor) -> Matrices | None:
    """Where matrices in fp32 are, to which products are added.

    Args:
        sums: As for :func:`matrices_of`; None in place of a matrix that is not needed.

    Returns:
        None: the kernels do not add to them. They are in another dtype, not contiguous, or share
        memory; or as for :func:`listed`.
    """
    known = [sums] if isinstance(sums, Tensor) else [each for each in sums if each is not None]
    if not all(each.dtype is torch.float32 and each.is_contiguous() for each in known):
        return None
    if isinstance(sums, Tensor) or (len(known) == len(sums) == 1):
        return matrices_of(sums)  # type: ignore[arg-type]
    if len(known) == len(sums) and (whole := in_a_row(known)) is not None:
        return matrices_of(whole)
    places = sorted([each.data_ptr() for each in known])
    apart = known[0].nbytes
    if any(after - before < apart for before, after in itertools.pairwise(places)):
        return None
    return listed(sums)


_TABLES: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
_CAPTURED: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Tables that a CUDA graph reads: they outlive those above."""

MOST_TABLES = 256


def _table(places: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The table on a device; parameters stay where they are, so it is copied there once."""
    key = places, device
    found = _CAPTURED.get(key)
    if found is not None:
        return found
    found = _TABLES.get(key)
    if is_captured(device):
        if found is not None:
            _CAPTURED[key] = found
        return found
    if found is None:
        if len(_TABLES) >= MOST_TABLES:
            _TABLES.pop(next(iter(_TABLES)))
        found = _TABLES[key] = torch.tensor(places, dtype=torch.int64).to(device)
    if device.type == "cuda":  # its memory waits for this stream too once no table is left
        found.record_stream(torch.cuda.current_stream(device))
    return found


def product(
    x: Tensor,
    matrices: Matrices,
    ends: Tensor,
    biases: Sequence[Tensor] = (),
    scales: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``x_i @ matrix_i.T + bias_i`` for each group; a scaled bias is times the scale of the row.

    Args:
        x: ``(rows, columns of a matrix)``.
        matrices: One for each group.
        ends: The end of each group, int32.
        biases: One for each group, or none.
        scales: ``(rows,)``.
        config: The configuration; None: the table's.

    Returns:
        ``(rows, rows of a matrix)``.
    """
    x = _dense(x)
    y = x.new_empty((x.shape[0], matrices.sizes[0]))
    scales = None if scales is None else scales.contiguous()
    tensors = matrices.first, matrices.table, ends, None, None, _stacked(biases), scales, y
    _launch(PRODUCT, x, tensors, matrices, matrices.sizes[0], config, EXACT=False)
    return y


def coded_product(
    codes: tuple[Tensor, Tensor],
    matrices: Matrices,
    inverses: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    biases: Sequence[Tensor] = (),
    config: Config | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """:func:`product` of FP8 codes, rounded once.

    Args:
        codes: The rows, and what the codes of each group are multiplied by: fp32.
        matrices: The codes of one for each group.
        inverses: The same of the matrices.
        ends: As for :func:`product`.
        dtype: The dtype of the result.
        biases: As for :func:`product`.
        config: Likewise.
        exact: Whether a Hopper GPU adds up in fp32; else it may do so in fewer bits.
    """
    x = _dense(codes[0])
    y = x.new_empty((x.shape[0], matrices.sizes[0]), dtype=dtype)
    tensors = matrices.first, matrices.table, ends, codes[1], inverses, _stacked(biases), None, y
    _launch(PRODUCT, x, tensors, matrices, matrices.sizes[0], config, EXACT=exact)
    return y


def activated(
    x: Tensor,
    matrices: Matrices,
    ends: Tensor,
    activation: Activation,
    biases: Sequence[Tensor] = (),
    keep: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The activation of :func:`product`, times the scales; and if ``keep``, its input."""
    x, wide = _dense(x), matrices.sizes[0]
    y = x.new_empty((x.shape[0], wide // activation.ratio))
    hidden = x.new_empty((x.shape[0], wide)) if keep else None
    tensors = matrices.first, matrices.table, ends, _stacked(biases), activation.scales, y, hidden
    constants = {
        "VALUE": activation.functions.value,
        "LINEAR_VALUE": activation.functions.linear_value,
        "INTERLEAVED": activation.interleaved,
    }
    given = *tensors, activation.numbers
    _launch(ACTIVATED, x, given, matrices, y.shape[1], config, **constants)
    return y, hidden


def gradients(
    dy: Tensor,
    matrices: Matrices,
    ends: Tensor,
    activation: Activation,
    hidden: Tensor,
    with_scales: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of ``hidden`` in ``act(hidden_i) * scales @ matrix_i.T``, and of the scales.

    Args:
        dy: The gradient of that product, ``(rows, rows of a matrix)``.
        matrices: One for each group.
        ends: As for :func:`product`.
        activation: As for :func:`activated`.
        hidden: The activation's input, contiguous.
        with_scales: Whether the gradient of the scales is needed, in fp32.
        config: As for :func:`product`.
    """
    dy, of_input = _dense(dy), matrices.transposed()
    d_hidden, features = torch.empty_like(hidden), of_input.sizes[0]
    functions = activation.functions
    chosen = config or _configured(GRADIENTS, dy, matrices.count)
    columns = cdiv(features, chosen["BLOCK_N"])
    partial = None
    if with_scales:
        partial = dy.new_empty((columns, dy.shape[0]), dtype=torch.float32)
    tensors = of_input.first, of_input.table, ends, activation.scales, hidden, d_hidden, partial
    constants = {
        "VALUE": functions.value,
        "DERIVATIVE": functions.derivative,
        "LINEAR_VALUE": functions.linear_value,
        "LINEAR_DERIVATIVE": functions.linear_derivative,
        "INTERLEAVED": activation.interleaved,
    }
    given = *tensors, activation.numbers
    _launch(GRADIENTS, dy, given, of_input, features, chosen, **constants)
    return d_hidden, None if partial is None else partial.sum(0)


def weight_grads(dy: Tensor, x: Tensor, ends: Tensor, config: Config | None = None) -> Tensor:
    """``dy_i.T @ x_i`` for each group, in one tensor; zeros where a group has no rows."""
    dw = x.new_empty((ends.shape[0], dy.shape[1], x.shape[1]))
    add_weight_grads(dy, x, ends, matrices_of(dw), adds=False, config=config)
    return dw


def add_weight_grads(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    sums: Matrices,
    *,
    adds: bool = True,
    config: Config | None = None,
) -> None:
    """Add :func:`weight_grads` to matrices; a group without rows changes nothing.

    Args:
        dy: ``(rows, features)``.
        x: ``(rows, depth)``.
        ends: The end of each group, int32.
        sums: A contiguous matrix for each group.
        adds: If not, they replace what is there, those of a group without rows with zeros.
        config: As for :func:`product`.
    """
    dy, x = _dense(dy), _dense(x)
    rows, features, depth = *dy.shape, x.shape[1]
    sizes = rows, features, depth, dy.stride(0), x.stride(0), sums.step
    WGRAD.launch(
        _tiles_of_matrices(sums.count, features, depth),
        dy, x, ends, sums.first, sums.table, *sizes,
        config=config, PRECISION=_precision(x), ADDS=adds, ALIGNED=sums.aligned,
    )  # fmt: skip


def coded_weight_grads(
    dy: Scaled,
    x: Scaled,
    ends: Tensor,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """:func:`weight_grads` of FP8 codes, rounded once to ``dtype``."""
    dw = ends.new_empty((ends.shape[0], *sizes[1:]), dtype=dtype)
    add_coded_weight_grads(dy, x, ends, sizes, matrices_of(dw), adds=False, config=config)
    return dw


def add_coded_weight_grads(
    dy: Scaled,
    x: Scaled,
    ends: Tensor,
    sizes: tuple[int, int, int],
    sums: Matrices,
    *,
    adds: bool = True,
    config: Config | None = None,
) -> None:
    """:func:`add_weight_grads` of FP8 codes.

    Args:
        dy: The columnwise copy of a :class:`opfuse.ops.row_groups.GroupedTensor`, or of a
            :class:`opfuse_quantized.grouped.GroupedMXTensor`.
        x: Likewise.
        ends: The end of each group, int32.
        sizes: The rows of both, the features of ``dy``, and those of ``x``.
        sums: As for :func:`add_weight_grads`.
        adds: Likewise.
        config: As for :func:`product`.
    """
    groups = ends.shape[0]
    CODED_WGRAD.launch(
        _tiles_of_matrices(groups, *sizes[1:]),
        dy.codes, x.codes, ends, dy.kernel_scales, x.kernel_scales, sums.first, sums.table,
        groups, *sizes, sums.step,
        config=config, DY_FORMAT=dy.format, X_FORMAT=x.format,
        GROUPS=next_power_of_2(groups), ADDS=adds, ALIGNED=sums.aligned,
    )  # fmt: skip


def scaled_product(
    x: Scaled,
    matrices: Scaled,
    ends: Tensor,
    dtype: torch.dtype,
    biases: Sequence[Tensor] = (),
    config: Config | None = None,
) -> Tensor:
    """:func:`product` of FP8 codes in MX blocks, rounded once.

    Args:
        x: The rows.
        matrices: ``(groups, features, depth)``.
        ends: The end of each group, int32.
        dtype: The dtype of the result.
        biases: One for each group, or none.
        config: As for :func:`product`.
    """
    (rows, depth), (groups, features, _) = x.codes.shape, matrices.codes.shape
    y = x.codes.new_empty((rows, features), dtype=dtype)
    SCALED.launch(
        _tiles(rows, groups, features, x.codes.device),
        x.codes, x.kernel_scales, matrices.codes, matrices.kernel_scales, ends, _stacked(biases), y,
        groups, rows, features, depth,
        config=config, GROUPS=next_power_of_2(groups),
        X_FORMAT=x.format, W_FORMAT=matrices.format,
    )  # fmt: skip
    return y


def row_sums(dy: Tensor, ends: Tensor, scales: Tensor | None = None) -> Tensor:
    """The sum of the rows of each group, each times its scale if there are scales."""
    dy, groups = _dense(dy), ends.shape[0]
    sums = dy.new_empty((groups, dy.shape[1]))

    def grid(config: Config) -> tuple[int]:
        return (groups * cdiv(dy.shape[1], config["BLOCK_N"]),)

    scales = None if scales is None else scales.contiguous()
    SUMS.launch(grid, dy, scales, ends, sums, *dy.shape, dy.stride(0))
    return sums


def _launch(
    kernel: Kernel,
    x: Tensor,
    tensors: tuple[Any, ...],
    matrices: Matrices,
    features: int,
    config: Config | None,
    **constants: Any,
) -> None:
    """Launch a kernel over the tiles of all groups, which it counts by itself."""
    (rows, depth), groups = x.shape, matrices.count
    grid = _tiles(rows, groups, features, x.device)
    sizes = groups, rows, features, depth, x.stride(0), matrices.step, *matrices.strides
    kernel.launch(
        grid, x, *tensors, *sizes, config=config, PRECISION=_precision(x),
        ALIGNED=matrices.aligned, GROUPS=next_power_of_2(groups), **constants,
    )  # fmt: skip


def _tiles(rows: int, groups: int, features: int, device: torch.device) -> Grid:
    """As many programs as run at once, each of which takes tiles; fewer where there are fewer."""
    programs = PER_MULTIPROCESSOR * current_target(device).multiprocessors

    def grid(config: Config) -> tuple[int]:
        # each group may have a tile that its rows do not fill
        down = cdiv(rows, config["BLOCK_M"]) + groups
        return (min(down * cdiv(features, config["BLOCK_N"]), programs),)

    return grid


def _tiles_of_matrices(groups: int, features: int, depth: int) -> Grid:
    """A program for each tile of a matrix of each group."""

    def grid(config: Config) -> tuple[int]:
        down, across = config["BLOCK_M"], config["BLOCK_N"]
        return (groups * cdiv(features, down) * cdiv(depth, across),)

    return grid


def _configured(kernel: Kernel, x: Tensor, groups: int) -> Config:
    """The configuration that a launch would pick, where its workspace depends on it."""
    return kernel.pick(
        current_target(x.device), {"x": x.dtype, "rows": x.shape[0], "groups": groups}
    )


def _dense(x: Tensor) -> Tensor:
    """Rows with contiguous features, each at a place of its own."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _stacked(biases: Sequence[Tensor]) -> Tensor | None:
    return torch.stack(list(biases)) if biases else None


def _precision(x: Tensor) -> str:
    """How fp32 operands are multiplied: in TF32 where PyTorch may do so."""
    allowed = x.dtype is torch.float32 and current_target(x.device).backend == "cuda"
    return matmul_precision("cuda") if allowed else "ieee"
