"""The grouped products at the sizes of two models, for ``python -m opfuse_triton``.

They are the experts of Qwen3-30B-A3B and of Mixtral 8x7B, for 8192 tokens; ``rows`` are tokens
times experts per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from opfuse_triton import KernelCase, Operand, Target, functions_of, is_interpreting
from opfuse_triton.cases import group_ends
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import SwiGLU
from opfuse.ops.grouped import Groups

from .kernels import library

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
_SWIGLU = functions_of(SwiGLU())


def _activation(scales: Tensor) -> library.Activation:
    assert _SWIGLU is not None
    return library.Activation(_SWIGLU, (), 0, scales)


GroupsOf = Callable[[Tensor, int], Groups]


def _looped(ends: Tensor, rows: int) -> Groups:
    """The same groups, whose sizes the host reads; on the meta device all are alike."""
    if ends.is_meta:
        raise NotImplementedError
    sizes = _sizes(ends)
    return Groups(sizes.cpu(), sizes.tolist())


def _torch(ends: Tensor, rows: int) -> Groups:
    """The same groups, for torch's grouped product; one group needs none."""
    return Groups(
        _sizes(ends), [rows] if len(ends) == 1 else None, None if len(ends) == 1 else ends
    )


def _sizes(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return library.product(x, library.matrices_of(w), ends)


def _forward_apart(of: GroupsOf, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return of(ends, len(x)).products(x, w, ())


def _list(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    matrices = library.listed(w.unbind())
    assert matrices is not None
    return library.product(x, matrices, ends)


def _list_apart(of: GroupsOf, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """On a GPU the matrices are copied into one tensor, or the results joined, which moves less."""
    if x.is_meta:
        return _forward_apart(of, x, w, ends).clone()
    return of(ends, len(x)).products(x, w.unbind(), ())


def _listed(x: Tensor, w: Tensor, bias: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    matrices = library.listed(w.unbind())
    assert matrices is not None
    return library.product(x, matrices, ends, bias.unbind(), scales)


def _listed_apart(
    of: GroupsOf, x: Tensor, w: Tensor, bias: Tensor, scales: Tensor, ends: Tensor
) -> Tensor:
    groups = of(ends, len(x))
    return groups.add_scaled(groups.products(x, w.unbind(), ()), bias.unbind(), scales)


def _dgrad(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return library.product(dy, library.matrices_of(w).transposed(), ends)


def _dgrad_apart(of: GroupsOf, dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return of(ends, len(dy)).input_grads(dy, w)


def _wgrad_apart(of: GroupsOf, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return of(ends, len(x)).stacked_grads(dy, x, ends.shape[0])


def _sums_of(sums: Tensor) -> library.Matrices:
    """Each in a tensor by itself, as the ``main_grad`` of several parameters."""
    matrices = library.listed(sums.unbind())
    assert matrices is not None
    return matrices


def _added_apart(apart: Any) -> Any:
    """The same, and each gradient is added to its sum afterwards."""

    def separate(of: GroupsOf, *, sums: Tensor, **given: Tensor) -> Tensor:
        for total, gradient in zip(sums.unbind(), apart(of, **given).unbind(), strict=True):
            total.add_(gradient)
        return sums

    return separate


def _wgrad_added(dy: Tensor, x: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
    library.add_weight_grads(dy, x, ends, _sums_of(sums))
    return sums


def _sums_apart(of: GroupsOf, dy: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    sums = of(ends, len(dy)).row_sums(dy, (True,) * ends.shape[0], scales)
    return torch.stack(sums)  # type: ignore[arg-type]


def _activated(x: Tensor, w: Tensor, scales: Tensor, ends: Tensor) -> Any:
    return library.activated(x, library.matrices_of(w), ends, _activation(scales), keep=True)


def _activated_apart(of: GroupsOf, x: Tensor, w: Tensor, scales: Tensor, ends: Tensor) -> Any:
    hidden = _forward_apart(of, x, w, ends)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    y = SwiGLU().forward_value(hidden.to(wide)) * scales.to(wide)[:, None]
    return y.to(hidden.dtype), hidden


def _gradients(dy: Tensor, w: Tensor, scales: Tensor, hidden: Tensor, ends: Tensor) -> Any:
    matrices = library.matrices_of(w)
    return library.gradients(dy, matrices, ends, _activation(scales), hidden, True)


def _gradients_apart(
    of: GroupsOf, dy: Tensor, w: Tensor, scales: Tensor, hidden: Tensor, ends: Tensor
) -> Any:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    gradient, x = _dgrad_apart(of, dy, w, ends).to(wide), hidden.to(wide)
    of_hidden = SwiGLU().backward_value(gradient * scales.to(wide)[:, None], x)
    of_scales = (SwiGLU().forward_value(x) * gradient).sum(-1)
    return of_hidden.to(hidden.dtype), of_scales


# Products of codes. All are of two operands, the second one transposed; ``x_scale`` has what the
# codes ``x`` are multiplied by: those of each group, or each 32 of them


def _pairs(given: Mapping[str, Tensor]) -> list[library.Scaled]:
    """Both operands with their scales."""
    names = [name for name in given if f"{name}_scale" in given]
    return [library.Scaled(given[name], given[f"{name}_scale"]) for name in names]


def _of_codes(exact: bool, ends: Tensor, bias: Tensor | None = None, **given: Tensor) -> Tensor:
    """Of rows with matrices."""
    rows, matrices = _pairs(given)
    dtype, biases = (BF16, ()) if bias is None else (bias.dtype, bias.unbind())
    if rows.format is not None:
        return library.scaled_product(rows, matrices, ends, dtype, biases)
    codes, inverse = library.matrices_of(matrices.codes), matrices.scales
    return library.coded_product(rows, codes, inverse, ends, dtype, biases, exact=exact)


def _wgrad_of_codes(ends: Tensor, sums: Tensor | None = None, **given: Tensor) -> Tensor:
    """Of columnwise copies, which are added to sums if there are some."""
    dy, x = _pairs(given)
    sizes = dy.codes.shape[1], len(dy.codes), len(x.codes)
    flat = [library.Scaled(codes.view(-1), scales.view(-1)) for codes, scales in (dy, x)]
    if sums is None:
        return library.coded_weight_grads(*flat, ends, sizes, BF16)
    library.add_coded_weight_grads(*flat, ends, sizes, _sums_of(sums))
    return sums


def _codes_apart(of: GroupsOf, ends: Tensor, bias: Tensor | None = None, **given: Tensor) -> Tensor:
    """Group by group, of dequantized values; on the meta device groups are alike."""
    pairs, products = _pairs(given), list[Tensor]()
    columnwise = all(codes.ndim == 2 for codes, _ in pairs)
    each = zip(*[_dequantized(*pair, ends, columnwise) for pair in pairs], strict=True)
    for i, (one, other) in enumerate(each):
        product = F.linear(one, other, None if bias is None else bias[i].to(one.dtype))
        exact = product.dtype is torch.float64  # the reference rounds nothing
        products.append(product if exact else product.to(BF16 if bias is None else bias.dtype))
    return torch.stack(products) if columnwise else torch.cat(products)


def _dequantized(codes: Tensor, scales: Tensor, ends: Tensor, columnwise: bool) -> list[Tensor]:
    """The values of each group; of columnwise copies one group is behind the other."""
    # in fp32, or where scales are the reference's in fp64
    dtype = torch.float64 if scales.dtype is torch.float64 else torch.float32
    values, in_blocks = codes.to(dtype), scales.ndim > 1
    if in_blocks:
        blocks = values.unflatten(-1, (-1, 32)) * scales.to(dtype)[..., None]
        values = blocks.flatten(-2)
    if columnwise:
        high, counts = len(codes), _counts(ends, codes.shape[1])
        each = values.view(-1).split([high * count for count in counts])
        parts = [part.view(high, -1) for part in each]
    else:
        parts = list(values if values.ndim == 3 else values.split(_counts(ends, len(values))))
    if in_blocks:
        return parts
    return [part * scale for part, scale in zip(parts, scales, strict=True)]


def _counts(ends: Tensor, rows: int) -> list[int]:
    """The rows of each group, which the host reads."""
    if not ends.is_meta:
        return _sizes(ends).tolist()  # type: ignore[no-any-return]
    each, groups = rows // len(ends), len(ends)
    return [*[each] * (groups - 1), rows - each * (groups - 1)]


def multiplies_codes(target: Target) -> bool:
    """Whether a target has products of the FP8 codes of the OCP."""
    if target.backend == "hip":
        return target.arch == "gfx950"
    return int(target.arch) >= 89


# Peers: Liger-Kernel as of 0.8. Its product with SwiGLU has no scales, and is no peer


def _by_liger(kernel: str) -> Any:
    """One of its kernels, which finds out by itself how it runs fastest, but not interpreted."""
    given = {"LIGER_FUSED_MOE_AUTOTUNE": "0"} if is_interpreting() else {}
    with mock.patch.dict(os.environ, given):
        from liger_kernel.ops import fused_moe_kernels  # type: ignore[import-not-found]

    return getattr(fused_moe_kernels, kernel)


_TILE = 64
"""Rows of its tiles."""


def _tiles(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bounds of the groups; the first row and the group of each of its tiles.

    Liger's host reads how many there are; here some may have no rows.
    """
    starts = torch.cat([ends.new_zeros(1), ends])
    last = ((_sizes(ends) + _TILE - 1) // _TILE).cumsum(0)
    tile = torch.arange(triton.cdiv(rows, _TILE) + len(ends), device=ends.device)
    group = torch.searchsorted(last, tile, right=True)
    within = tile - torch.cat([last.new_zeros(1), last])[group]
    group = group.clamp(max=len(ends) - 1)
    return starts, (starts[group] + within * _TILE).int(), group.int()


def _forward_by_liger(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    kernel, (starts, row, group) = _by_liger("_fused_down_proj_kernel"), _tiles(ends, len(x))
    y = x.new_empty((len(x), w.shape[1]))
    kernel[lambda meta: (len(row), triton.cdiv(w.shape[1], meta["BLOCK_N"]))](
        *(x, w, starts, row, group, y, *w.shape[1:], *x.stride(), *w.stride(), *y.stride()),
        BLOCK_M=_TILE,
    )
    return y


def _dgrad_by_liger(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    kernel, (starts, row, group) = _by_liger("_moe_bwd_dX_expanded_kernel"), _tiles(ends, len(dy))
    _, features, depth = w.shape
    dx = dy.new_empty((len(dy), depth))
    sizes = depth, features // 2
    kernel[lambda meta: (len(row), triton.cdiv(depth, meta["BLOCK_N"]))](
        *(dy, w, starts, row, group, dx, *sizes, *dy.stride(), *w.stride(), *dx.stride()),
        BLOCK_M=_TILE,
    )
    return dx


def _wgrad_by_liger(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """It reads the place of each row, and leaves zeros where a group has no rows."""
    kernel, groups = _by_liger("_moe_bwd_dW1_kernel"), len(ends)
    starts = torch.cat([ends.new_zeros(1), ends])
    place = torch.arange(len(x), dtype=torch.int32, device=x.device)
    dw = x.new_zeros((groups, dy.shape[1], x.shape[1]))
    sizes = x.shape[1], dy.shape[1] // 2

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        down, across = triton.cdiv(x.shape[1], meta["BLOCK_M"]), meta["BLOCK_N"]
        return groups * down, triton.cdiv(dy.shape[1], across)

    kernel[grid](x, dy, place, starts, dw, *sizes, *x.stride(), *dy.stride(), *dw.stride())
    return dw


def _draw(groups: int, rows: int, multiple: int = 1, **_: int) -> dict[str, Tensor]:
    """Groups of uneven sizes; with multiples of 32 rows a columnwise copy is not filled up."""
    return {"ends": group_ends(groups, rows, multiple)}


def _draw_scaled(name: str, **shape: int) -> dict[str, Tensor]:
    """Powers of two around 1, too."""
    found = _draw(**shape, multiple=32)
    for key, operand in _code_operands(name, True, **shape).items():
        if operand.dtype is E8M0:
            found[key] = torch.randint(-3, 4, operand.shape).float().exp2().to(E8M0)
    return found


def _code_operands(result: str, in_blocks: bool, **shape: int) -> Mapping[str, Operand]:
    """The operands of a product of codes: what is added up is contiguous in all."""
    groups, rows, depth, features = [shape[n] for n in ("groups", "rows", "depth", "features")]
    sizes: dict[str, Any] = {
        "y": {"x": (rows, depth), "w": (groups, features, depth), "y": (rows, features)},
        "dx": {"dy": (rows, features), "w": (groups, depth, features), "dx": (rows, depth)},
        "dw": {"dy": (features, rows), "x": (depth, rows), "dw": (groups, features, depth)},
    }
    *codes, (_, size) = sizes[result].items()
    dtypes = {"dy": E4M3 if in_blocks else E5M2}
    found = {name: Operand(size, dtypes.get(name, E4M3)) for name, size in codes}
    for name, wide in codes:
        if in_blocks:
            found[f"{name}_scale"] = Operand((*wide[:-1], wide[-1] // 32), E8M0, "vector")
        else:
            found[f"{name}_scale"] = Operand((groups,), torch.float32, "vector")
    if result == "y":
        found["bias"] = Operand((groups, features), BF16, "vector")
    found["ends"] = Operand((groups,), torch.int32, "vector")
    return found | {result: Operand(size, BF16, output=True)}


def multiplies_mx(target: Target) -> bool:
    """Whether a target has products of MX blocks."""
    return target.arch in (100, 103, "gfx950")


def _codes(
    name: str, result: str, kernel: Any, in_blocks: bool = False, added: bool = False
) -> KernelCase:
    """A product of codes, with a scale for each group, or in MX blocks."""
    operands: Any = partial(_code_operands, result, in_blocks)
    run: Any = _wgrad_of_codes if result == "dw" else partial(_of_codes, result == "dx")
    apart: Any = _codes_apart
    if added:
        operands, apart = _with_sums(operands), _added_apart(apart)
    small: Any = [{**shape, "rows": 32 * -(-shape["rows"] // 32)} for shape in _SMALL]
    draw: Any = partial(_draw, multiple=32)
    dtypes: Any = (BF16,)
    if in_blocks:
        small, draw = _WHOLE_BLOCKS, partial(_draw_scaled, result)
    elif result == "y":
        small, draw, dtypes = _SMALL, _draw, _DTYPES
    return KernelCase(
        name, run, operands, _UP, small, partial(_floor, operands), (kernel.name,),
        separate=partial(apart, _torch), twin=partial(apart, _looped), draw=draw, dtypes=dtypes,
        flops=_flops, runs_on=multiplies_mx if in_blocks else multiplies_codes, turn=30,
    )  # fmt: skip


def _with_sums(operands: Any) -> Callable[..., Mapping[str, Operand]]:
    """The same operands, where ``dw`` is a sum in fp32 to which the product is added."""

    def added(**shape: int) -> Mapping[str, Operand]:
        found = dict(operands(**shape))
        total = replace(found.pop("dw"), dtype=torch.float32)
        return {**found, "sums": replace(total, output=False), "dw": total}

    return added


def _operands(inputs: str, outputs: str) -> Callable[..., Mapping[str, Operand]]:
    """The operands of these names; ``y`` and ``dy`` have ``features``, ``hidden`` has ``depth``."""

    def operands(groups: int, rows: int, depth: int, features: int) -> Mapping[str, Operand]:
        known = {
            "x": Operand((rows, depth), BF16),
            "dy": Operand((rows, features), BF16),
            "w": Operand((groups, features, depth), BF16),
            "bias": Operand((groups, features), BF16, "vector"),
            "scales": Operand((rows,), BF16, "vector"),
            "ends": Operand((groups,), torch.int32, "vector"),
            "hidden": Operand((rows, 2 * depth), BF16),
        }
        results = {
            "y": Operand((rows, features), BF16, output=True),
            "dx": Operand((rows, depth), BF16, output=True),
            "dw": Operand((groups, features, depth), BF16, output=True),
            "sums": Operand((groups, features), BF16, "vector", output=True),
            "activated": Operand((rows, features // 2), BF16, output=True),
            "kept": Operand((rows, features), BF16, output=True),
            "d_hidden": Operand((rows, 2 * depth), BF16, output=True),
            "d_scales": Operand((rows,), torch.float32, "vector", output=True),
        }
        found = {name: known[name] for name in inputs.split()}
        return found | {name: results[name] for name in outputs.split()}

    return operands


def _flops(groups: int, rows: int, depth: int, features: int) -> int:
    return 2 * rows * depth * features


_UP = [
    {"groups": 128, "rows": 65536, "depth": 2048, "features": 1536},
    {"groups": 8, "rows": 16384, "depth": 4096, "features": 28672},
]
_DOWN = [
    {"groups": 128, "rows": 65536, "depth": 768, "features": 2048},
    {"groups": 8, "rows": 16384, "depth": 14336, "features": 4096},
]
_UNALIGNED = [{"groups": 128, "rows": 65536, "depth": 2049, "features": 1535}]
_SMALL = [
    {"groups": 5, "rows": 131, "depth": 64, "features": 136},
    {"groups": 1, "rows": 1, "depth": 33, "features": 30},
]
_WHOLE_BLOCKS = [
    {"groups": 5, "rows": 160, "depth": 64, "features": 96},
    {"groups": 1, "rows": 32, "depth": 32, "features": 160},
]
_DTYPES = BF16, torch.float16, torch.float32


def _floor(operands: Callable[..., Mapping[str, Operand]], **shape: int) -> int:
    """The matrix of the first of several groups, which is empty, is not read, nor added to."""
    found = operands(**shape)
    of_group = ("w", "sums", "dw") if "sums" in found else ("w",)
    nbytes = sum(found[name].nbytes for name in of_group if name in found)
    unread = nbytes // shape["groups"] if shape["groups"] > 1 else 0
    return sum(each.nbytes for each in found.values() if each.role == "full") - unread


def _case(
    name: str,
    run: Any,
    apart: Any,
    tensors: tuple[str, str],
    shapes: Any,
    kernel: Any,
    liger: Any = None,
    *,
    added: bool = False,
    unaligned: Sequence[Mapping[str, int]] = (),
) -> KernelCase:
    gemms, operands = () if kernel is library.SUMS else (kernel.name,), _operands(*tensors)
    if added:
        operands, apart = _with_sums(operands), _added_apart(apart)
    return KernelCase(
        name, run, operands, shapes, _SMALL, partial(_floor, operands), gemms,
        separate=partial(apart, _torch), twin=partial(apart, _looped), draw=_draw, dtypes=_DTYPES,
        flops=_flops if gemms else None, peers={"liger_kernel": liger} if liger else {}, turn=30,
        unaligned=unaligned,
    )  # fmt: skip


CASES = [
    _case(
        "grouped product", _forward, _forward_apart,
        ("x w ends", "y"), _UP, library.PRODUCT, _forward_by_liger,
    ),
    _case(
        "grouped product of a list", _list, _list_apart,
        ("x w ends", "y"), _UP, library.PRODUCT,
    ),
    _case(
        "grouped product of a list, with biases", _listed, _listed_apart,
        ("x w bias scales ends", "y"), _DOWN, library.PRODUCT,
    ),
    _codes("grouped product of codes", "y", library.PRODUCT),
    _case(
        "its gradient", _dgrad, _dgrad_apart,
        ("dy w ends", "dx"), _UP, library.PRODUCT, _dgrad_by_liger,
    ),
    _case(
        "gradient of the matrices", library.weight_grads, _wgrad_apart,
        ("dy x ends", "dw"), _UP, library.WGRAD, _wgrad_by_liger,
    ),
    _case(
        "gradient of the matrices, added", _wgrad_added, _wgrad_apart,
        ("dy x ends", "dw"), _UP, library.WGRAD, added=True, unaligned=_UNALIGNED,
    ),
    _codes("its gradient of codes", "dx", library.PRODUCT),
    _codes("gradient of the matrices, of codes", "dw", library.CODED_WGRAD),
    _codes("gradient of the matrices, of codes, added", "dw", library.CODED_WGRAD, added=True),
    _codes("grouped product of MX codes", "y", library.SCALED, True),
    _codes("its gradient of MX codes", "dx", library.SCALED, True),
    _codes("gradient of the matrices, of MX codes", "dw", library.CODED_WGRAD, True),
    _codes("gradient of the matrices, of MX codes, added", "dw", library.CODED_WGRAD, True, True),
    _case(
        "gradient of the biases", lambda dy, scales, ends: library.row_sums(dy, ends, scales),
        _sums_apart, ("dy scales ends", "sums"), _DOWN, library.SUMS,
    ),
    _case(
        "grouped product + SwiGLU", _activated, _activated_apart,
        ("x w scales ends", "activated kept"), _UP, library.ACTIVATED,
    ),
    _case(
        "its gradient + that of SwiGLU", _gradients, _gradients_apart,
        ("dy w scales hidden ends", "d_hidden d_scales"), _DOWN, library.GRADIENTS,
    ),
]  # fmt: skip
