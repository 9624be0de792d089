"""Matrix products with an epilogue, in Triton.

``y = act(x @ w.T + bias)``, of one product or of a gate and its factor, or
``y = addend + scale * (x @ w.T + bias)``, or ``y = act'(addend) * (x @ w)``, the gradient of an
activation before a linear, which has two halves if the activation is gated. The activation is a
device function, see :func:`opfuse_triton.functions_of`. Products are added up in fp32, and rounded
before the activation as the linear layer rounds them: the activation gets what its backward reads.

Arguments of both kernels, where the tile of each program has ``BLOCK_M`` rows and ``BLOCK_N``
features:

- ``x``: ``(rows, depth)``. ``w``, and ``up`` of a gated activation: ``(features, depth)``.
- ``bias``, ``up_bias``: ``(features,)``, or None.
- ``addend``: ``(rows, features)``, or None. With it ``VALUE`` is None, or a derivative of which it
  is the argument. ``scale``: a float, or None.
- ``up_addend``: the other half of the input of a gated activation, whose gradient is wanted; or
  None. The gradient of the gate is the product times ``VALUE`` of the gate and ``LINEAR_VALUE`` of
  the other half, and goes into ``y``; that of the other half has ``UP_VALUE`` and
  ``UP_LINEAR_VALUE``, and goes into ``up_hidden``.
- ``y``: ``(rows, features)``, contiguous; with ``up_addend``, the first half of such rows.
- ``partial``: where a derivative's program stores the sums of its columns, in fp32, of shape
  ``(rows of tiles, hidden_stride)``; or None.
- ``hidden``, ``up_hidden``: where to store what the activation gets, or None.
- ``numbers``: those of the activation.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile: ``GROUP`` rows of tiles are gone through column by column.

    Programs that run at the same time then share what they read in the cache.
    """
    group = tile // (GROUP * columns)
    first = group * GROUP
    height = min(rows - first, GROUP)
    within = tile - first * columns
    return first + within % height, within // height


@triton.jit
def _plus_bias(product, bias, column, features, dtype: tl.constexpr):
    """The product, plus the bias in the dtype that the linear layer adds it in."""
    if bias is not None:
        added = tl.load(bias + column, column < features, other=0.0)
        product += added.to(dtype).to(tl.float32)[None, :]
    return product


@triton.jit
def _activate(gate, up, numbers, VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr):
    """The activation of what was rounded, in fp32."""
    y = VALUE(gate.to(tl.float32), *numbers)
    if LINEAR_VALUE is not None:
        y *= LINEAR_VALUE(up.to(tl.float32), *numbers)
    return y


@triton.jit
def _with_addend(product, given, scale, numbers, dtype: tl.constexpr, VALUE: tl.constexpr):
    """The addend and the scaled product; or a product times the derivative at the addend."""
    if VALUE is not None:  # a gradient, rounded as the linear layer rounds it
        result = product.to(dtype).to(tl.float32) * VALUE(given, *numbers)
    elif scale is not None:
        result = product * scale + given
    else:
        result = product + given
    return result


@triton.jit
def _gated_gradient(
    product, gate, up, numbers, dtype: tl.constexpr, VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr
):
    """The gradient of one half: a product, rounded as the linear layer rounds it, times both."""
    rounded = product.to(dtype).to(tl.float32)
    return rounded * VALUE(gate, *numbers) * LINEAR_VALUE(up, *numbers)


@triton.jit
def _store_sums(partial, result, tile_row, width, feature, features, dtype: tl.constexpr):
    """Store the sums of a tile's columns, of what is rounded, into a row of this width."""
    sums = tl.sum(result.to(dtype).to(tl.float32), 0)
    tl.store(partial + tile_row.to(tl.int64) * width + feature, sums, feature < features)


@triton.jit
def _half(tile, INDEX: tl.constexpr):
    """The left or the right half of the columns of a tile."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()[INDEX]


@triton.jit
def _part(tile, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """One of 1, 2 or 4 parts of the columns of a tile."""
    if COUNT == 1:
        part = tile
    elif COUNT == 2:
        part = _half(tile, INDEX)
    else:
        part = _half(_half(tile, INDEX // 2), INDEX % 2)
    return part


@triton.jit
def gemm_by_tiles(
    x, w, up, bias, up_bias, addend, up_addend, y, hidden, up_hidden, partial,
    rows, features, depth,
    x_stride, w_stride, up_stride, addend_stride, hidden_stride,
    scale, numbers,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr,
    UP_VALUE: tl.constexpr, UP_LINEAR_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SPECIALIZE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Tiles move by TMA: rows begin at multiples of 16 bytes, and features are contiguous.

    Each program takes every ``num_programs``-th tile. The epilogue works on ``PARTS`` parts of its
    columns, one after the other, which leaves shared memory for the pipeline. ``SPECIALIZE``: some
    warps load, others multiply. ``TURNED``: ``w`` is ``(depth, features)``.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    of_x = tl.make_tensor_descriptor(x, [rows, depth], [x_stride, 1], [BLOCK_M, BLOCK_K])
    if TURNED:
        of_w = tl.make_tensor_descriptor(w, [depth, features], [w_stride, 1], [BLOCK_K, BLOCK_N])
    else:
        of_w = tl.make_tensor_descriptor(w, [features, depth], [w_stride, 1], [BLOCK_N, BLOCK_K])
    y_stride = features
    if up_addend is not None:
        y_stride = hidden_stride
        of_up_addend = tl.make_tensor_descriptor(
            up_addend, [rows, features], [addend_stride, 1], [BLOCK_M, WIDTH]
        )
    of_y = tl.make_tensor_descriptor(y, [rows, features], [y_stride, 1], [BLOCK_M, WIDTH])
    if up is not None:
        of_up = tl.make_tensor_descriptor(up, [features, depth], [up_stride, 1], [BLOCK_N, BLOCK_K])
    if addend is not None:
        of_addend = tl.make_tensor_descriptor(
            addend, [rows, features], [addend_stride, 1], [BLOCK_M, WIDTH]
        )
    if hidden is not None:
        of_hidden = tl.make_tensor_descriptor(
            hidden, [rows, features], [hidden_stride, 1], [BLOCK_M, WIDTH]
        )
    if up_hidden is not None:
        of_up_hidden = tl.make_tensor_descriptor(
            up_hidden, [rows, features], [hidden_stride, 1], [BLOCK_M, WIDTH]
        )
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), warp_specialize=SPECIALIZE
    ):
        tile_row, tile_column = _place(tile, row_tiles, column_tiles, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_product = product
        for step in range(tl.cdiv(depth, BLOCK_K)):
            at = step * BLOCK_K
            left = of_x.load([row, at])
            if TURNED:
                right = of_w.load([at, column])
            else:
                right = of_w.load([column, at]).T
            product = tl.dot(left, right, product, input_precision=PRECISION)
            if up is not None:
                up_product = tl.dot(
                    left, of_up.load([column, at]).T, up_product, input_precision=PRECISION
                )
        for i in tl.static_range(PARTS):
            start = column + i * WIDTH
            feature = start + tl.arange(0, WIDTH)
            result = _plus_bias(_part(product, i, PARTS), bias, feature, features, dtype)
            if addend is not None:
                given = of_addend.load([row, start]).to(tl.float32)
                if up_addend is not None:
                    other = of_up_addend.load([row, start]).to(tl.float32)
                    up_result = _gated_gradient(
                        result, given, other, numbers, dtype, UP_VALUE, UP_LINEAR_VALUE
                    )
                    of_up_hidden.store([row, start], up_result.to(dtype))
                    if partial is not None:
                        up_sums = partial + features
                        _store_sums(
                            up_sums, up_result, tile_row, hidden_stride, feature, features, dtype
                        )
                    result = _gated_gradient(
                        result, given, other, numbers, dtype, VALUE, LINEAR_VALUE
                    )
                else:
                    result = _with_addend(result, given, scale, numbers, dtype, VALUE)
                if partial is not None:
                    _store_sums(partial, result, tile_row, hidden_stride, feature, features, dtype)
            else:
                gate = result.to(dtype)
                other = gate
                if hidden is not None:
                    of_hidden.store([row, start], gate)
                if up is not None:
                    other = _plus_bias(
                        _part(up_product, i, PARTS), up_bias, feature, features, dtype
                    )
                    other = other.to(dtype)
                    if up_hidden is not None:
                        of_up_hidden.store([row, start], other)
                result = _activate(gate, other, numbers, VALUE, LINEAR_VALUE)
            of_y.store([row, start], result.to(dtype))


@triton.jit
def gemm_by_pointers(
    x, w, up, bias, up_bias, addend, up_addend, y, hidden, up_hidden, partial,
    rows, features, depth,
    x_stride, x_step, w_stride, w_step, up_stride, up_step, addend_stride, addend_step,
    hidden_stride, scale, numbers,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr,
    UP_VALUE: tl.constexpr, UP_LINEAR_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Any strides and alignment, and GPUs without TMA: one tile for each program."""
    dtype: tl.constexpr = x.dtype.element_ty
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    tile_row, tile_column = _place(tl.program_id(0), row_tiles, column_tiles, GROUP)
    row = tile_row.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tile_column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    along = tl.arange(0, BLOCK_K)
    far = along.to(tl.int64)  # a transposed operand may have steps beyond 2^31 elements
    ahead = tl.full((), BLOCK_K, tl.int64)
    # beyond the last row or feature the first is read again, and not stored
    own_row, own_feature = row % rows, feature % features
    of_x = x + own_row[:, None] * x_stride + far[None, :] * x_step
    of_w = w + far[:, None] * w_step + own_feature[None, :] * w_stride
    of_up = of_w
    if up is not None:
        of_up = up + far[:, None] * up_step + own_feature[None, :] * up_stride
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_product = product
    for step in range(tl.cdiv(depth, BLOCK_K)):
        inside = along < depth - step * BLOCK_K
        left = tl.load(of_x, inside[None, :], other=0.0)
        right = tl.load(of_w, inside[:, None], other=0.0)
        product = tl.dot(left, right, product, input_precision=PRECISION)
        of_x += ahead * x_step
        of_w += ahead * w_step
        if up is not None:
            right = tl.load(of_up, inside[:, None], other=0.0)
            up_product = tl.dot(left, right, up_product, input_precision=PRECISION)
            of_up += ahead * up_step
    stored = (row < rows)[:, None] & (feature < features)[None, :]
    y_stride = features
    result = _plus_bias(product, bias, feature, features, dtype)
    if addend is not None:
        place = row[:, None] * addend_stride + feature[None, :] * addend_step
        given = tl.load(addend + place, stored, other=0.0).to(tl.float32)
        if up_addend is not None:
            y_stride = hidden_stride
            other = tl.load(up_addend + place, stored, other=0.0).to(tl.float32)
            up_result = _gated_gradient(
                result, given, other, numbers, dtype, UP_VALUE, UP_LINEAR_VALUE
            )
            half = up_hidden + row[:, None] * hidden_stride + feature[None, :]
            tl.store(half, up_result.to(dtype), stored)
            if partial is not None:
                up_result = tl.where(stored, up_result, 0.0)
                up_sums = partial + features
                _store_sums(up_sums, up_result, tile_row, hidden_stride, feature, features, dtype)
            result = _gated_gradient(result, given, other, numbers, dtype, VALUE, LINEAR_VALUE)
        else:
            result = _with_addend(result, given, scale, numbers, dtype, VALUE)
        if partial is not None:
            result = tl.where(stored, result, 0.0)
            _store_sums(partial, result, tile_row, hidden_stride, feature, features, dtype)
    else:
        gate = result.to(dtype)
        other = gate
        kept = row[:, None] * hidden_stride + feature[None, :]
        if hidden is not None:
            tl.store(hidden + kept, gate, stored)
        if up is not None:
            other = _plus_bias(up_product, up_bias, feature, features, dtype).to(dtype)
            if up_hidden is not None:
                tl.store(up_hidden + kept, other, stored)
        result = _activate(gate, other, numbers, VALUE, LINEAR_VALUE)
    tl.store(y + row[:, None] * y_stride + feature[None, :], result.to(dtype), stored)
