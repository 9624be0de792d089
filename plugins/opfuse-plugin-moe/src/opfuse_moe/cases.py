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


def _coded(
    x: Tensor, w: Tensor, x_inverse: Tensor, w_inverse: Tensor, bias: Tensor, ends: Tensor
) -> Tensor:
    matrices = library.matrices_of(w)
    given = ends, bias.dtype, bias.unbind()
    return library.coded_product((x, x_inverse), matrices, w_inverse, *given)


def _coded_apart(
    of: GroupsOf,
    x: Tensor,
    w: Tensor,
    x_inverse: Tensor,
    w_inverse: Tensor,
    bias: Tensor,
    ends: Tensor,
) -> Tensor:
    """Group by group, of dequantized values in fp32; on the meta device groups are alike."""
    rows, matrices = _widened(x.split(_counts(ends, len(x))), x_inverse), _widened(w, w_inverse)
    each = zip(rows, matrices, bias, strict=True)
    return torch.cat([F.linear(x, w, b.to(x.dtype)).to(b.dtype) for x, w, b in each])


def _widened(codes: Sequence[Tensor] | Tensor, inverses: Tensor) -> list[Tensor]:
    dtype = torch.promote_types(inverses.dtype, torch.float32)
    return [part.to(dtype) * inverse for part, inverse in zip(codes, inverses, strict=True)]


def _coded_dgrad(
    dy: Tensor, w: Tensor, dy_inverse: Tensor, w_inverse: Tensor, ends: Tensor
) -> Tensor:
    matrices = library.matrices_of(w)
    return library.coded_product((dy, dy_inverse), matrices, w_inverse, ends, BF16, exact=True)


def _coded_dgrad_apart(
    of: GroupsOf, dy: Tensor, w: Tensor, dy_inverse: Tensor, w_inverse: Tensor, ends: Tensor
) -> Tensor:
    rows, matrices = _widened(dy.split(_counts(ends, len(dy))), dy_inverse), _widened(w, w_inverse)
    parts = [dy @ w.t() for dy, w in zip(rows, matrices, strict=True)]
    return torch.cat([_rounded(part) for part in parts])


def _coded_wgrad(
    dy: Tensor,
    x: Tensor,
    dy_inverse: Tensor,
    x_inverse: Tensor,
    ends: Tensor,
    sums: Tensor | None = None,
) -> Tensor:
    sizes = dy.shape[1], dy.shape[0], x.shape[0]
    given = (dy.view(-1), dy_inverse), (x.view(-1), x_inverse), ends, sizes
    if sums is None:
        return library.coded_weight_grads(*given, BF16)
    library.add_coded_weight_grads(*given, _sums_of(sums))
    return sums


def _coded_wgrad_apart(
    of: GroupsOf, dy: Tensor, x: Tensor, dy_inverse: Tensor, x_inverse: Tensor, ends: Tensor
) -> Tensor:
    """The copies of each group are one after the other."""
    counts, each = _counts(ends, dy.shape[1]), list[list[Tensor]]()
    for codes, inverse in ((dy, dy_inverse), (x, x_inverse)):
        blocks = codes.view(-1).split([len(codes) * count for count in counts])
        each.append(_widened([block.view(len(codes), -1) for block in blocks], inverse))
    return torch.stack([_rounded(dy @ x.t()) for dy, x in zip(*each, strict=True)])


def _mx(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor, ends: Tensor
) -> Tensor:
    operands = library.Scaled(x, x_scale), library.Scaled(w, w_scale)
    return library.scaled_product(*operands, ends, BF16, bias.unbind())


def _mx_apart(
    of: GroupsOf, x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor, ends: Tensor
) -> Tensor:
    rows, matrices = _times(x, x_scale).split(_counts(ends, len(x))), _times(w, w_scale)
    each = zip(rows, matrices, bias, strict=True)
    return torch.cat([_rounded(F.linear(x, w, b.to(x.dtype))) for x, w, b in each])


def _mx_dgrad(dy: Tensor, w: Tensor, dy_scale: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    operands = library.Scaled(dy, dy_scale), library.Scaled(w, w_scale)
    return library.scaled_product(*operands, ends, BF16)


def _mx_dgrad_apart(
    of: GroupsOf, dy: Tensor, w: Tensor, dy_scale: Tensor, w_scale: Tensor, ends: Tensor
) -> Tensor:
    rows, matrices = _times(dy, dy_scale).split(_counts(ends, len(dy))), _times(w, w_scale)
    return torch.cat([_rounded(dy @ w.t()) for dy, w in zip(rows, matrices, strict=True)])


def _mx_wgrad(
    dy: Tensor,
    x: Tensor,
    dy_scale: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    sums: Tensor | None = None,
) -> Tensor:
    sizes = dy.shape[1], dy.shape[0], x.shape[0]
    operands = [library.Scaled(t.view(-1), s.view(-1)) for t, s in ((dy, dy_scale), (x, x_scale))]
    if sums is None:
        return library.scaled_weight_grads(*operands, ends, sizes, BF16)
    library.add_scaled_weight_grads(*operands, ends, sizes, _sums_of(sums))
    return sums


def _mx_wgrad_apart(
    of: GroupsOf, dy: Tensor, x: Tensor, dy_scale: Tensor, x_scale: Tensor, ends: Tensor
) -> Tensor:
    """The copies of each group are one after the other."""
    counts, each = _counts(ends, dy.shape[1]), list[list[Tensor]]()
    for codes, scales in ((dy, dy_scale), (x, x_scale)):
        values, high = _times(codes.view(-1, 32), scales.view(-1, 1)).view(-1), len(codes)
        blocks = values.split([high * count for count in counts])
        each.append([block.view(high, -1) for block in blocks])
    return torch.stack([_rounded(dy @ x.t()) for dy, x in zip(*each, strict=True)])


def _times(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of MX blocks, in fp32 or where scales are the reference's in fp64."""
    dtype = torch.float64 if scales.dtype is torch.float64 else torch.float32
    blocks = codes.to(dtype).unflatten(-1, (-1, 32)) * scales.to(dtype)[..., None]
    return blocks.flatten(-2)


def _rounded(product: Tensor) -> Tensor:
    """As the kernels round; the reference is in fp64."""
    return product if product.dtype is torch.float64 else product.to(BF16)


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


def _draw(groups: int, rows: int, **_: int) -> dict[str, Tensor]:
    """The ends of groups of uneven sizes, the first of them empty."""
    weights = torch.linspace(0.0, 2.0, groups) if groups > 1 else torch.ones(1)
    ends = (weights.cumsum(0) / weights.sum() * rows).round().to(torch.int32)
    return {"ends": ends}


def _draw_whole(groups: int, rows: int, **_: int) -> dict[str, Tensor]:
    """The same of multiples of 32 rows, so that a columnwise copy has no zeros in between."""
    return {"ends": _draw(groups, rows // 32)["ends"] * 32}


def _draw_scaled(name: str, **shape: int) -> dict[str, Tensor]:
    """Powers of two around 1, too."""
    found = _draw_whole(**shape)
    for key, operand in _mx_operands(name, **shape).items():
        if operand.dtype is E8M0:
            found[key] = torch.randint(-3, 4, operand.shape).float().exp2().to(E8M0)
    return found


def _coded_operands(name: str, **shape: int) -> Mapping[str, Operand]:
    """Those of gradients of codes: columnwise copies have contiguous rows."""
    groups, rows, depth, features = [shape[n] for n in ("groups", "rows", "depth", "features")]
    codes: dict[str, Any] = {
        "dx": {"dy": ((rows, features), E5M2), "w": ((groups, depth, features), E4M3)},
        "dw": {"dy": ((features, rows), E5M2), "x": ((depth, rows), E4M3)},
    }
    found = {key: Operand(*given) for key, given in codes[name].items()}
    inverse = Operand((groups,), torch.float32, "vector")
    found |= {f"{key}_inverse": inverse for key in codes[name]}
    found["ends"] = Operand((groups,), torch.int32, "vector")
    size = {"dx": (rows, depth), "dw": (groups, features, depth)}[name]
    return found | {name: Operand(size, BF16, output=True)}


def _mx_operands(name: str, **shape: int) -> Mapping[str, Operand]:
    """Those of products of MX codes: what is added up is contiguous in all."""
    groups, rows, depth, features = [shape[n] for n in ("groups", "rows", "depth", "features")]
    sizes: dict[str, Any] = {
        "y": {"x": (rows, depth), "w": (groups, features, depth)},
        "dx": {"dy": (rows, features), "w": (groups, depth, features)},
        "dw": {"dy": (features, rows), "x": (depth, rows)},
    }
    found = {key: Operand(size, E4M3) for key, size in sizes[name].items()}
    for key, size in sizes[name].items():
        found[f"{key}_scale"] = Operand((*size[:-1], size[-1] // 32), E8M0, "vector")
    if name == "y":
        found["bias"] = Operand((groups, features), BF16, "vector")
    found["ends"] = Operand((groups,), torch.int32, "vector")
    result = {"y": (rows, features), "dx": (rows, depth), "dw": (groups, features, depth)}[name]
    return found | {name: Operand(result, BF16, output=True)}


def multiplies_mx(target: Target) -> bool:
    """Whether a target has products of MX blocks."""
    return target.arch in (100, 103, "gfx950")


def _of_mx(
    name: str, result: str, run: Any, apart: Any, kernel: Any, added: bool = False
) -> KernelCase:
    operands: Any = partial(_mx_operands, result)
    if added:
        operands, apart = _with_sums(operands), _added_apart(apart)
    small = [
        {"groups": 5, "rows": 160, "depth": 64, "features": 96},
        {"groups": 1, "rows": 32, "depth": 32, "features": 160},
    ]
    return KernelCase(
        name, run, operands, _UP, small, partial(_floor, operands), (kernel.name,),
        separate=partial(apart, _torch), twin=partial(apart, _looped),
        draw=partial(_draw_scaled, result), flops=_flops, runs_on=multiplies_mx, turn=30,
    )  # fmt: skip


def _coded_gradient(
    name: str, result: str, run: Any, apart: Any, kernel: Any, added: bool = False
) -> KernelCase:
    operands: Any = partial(_coded_operands, result)
    if added:
        operands, apart = _with_sums(operands), _added_apart(apart)
    small = [{**shape, "rows": 32 * -(-shape["rows"] // 32)} for shape in _SMALL]
    return KernelCase(
        name, run, operands, _UP, small, partial(_floor, operands), (kernel.name,),
        separate=partial(apart, _torch), twin=partial(apart, _looped), draw=_draw_whole,
        flops=_flops, runs_on=multiplies_codes, turn=30,
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
            "x_inverse": Operand((groups,), torch.float32, "vector"),
            "w_inverse": Operand((groups,), torch.float32, "vector"),
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
        if "x_inverse" in found:  # of codes
            found |= {name: replace(found[name], dtype=E4M3) for name in ("x", "w")}
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
    coded: Mapping[str, Any] = {}
    if "x_inverse" in tensors[0]:
        coded = {"runs_on": multiplies_codes}
    return KernelCase(
        name, run, operands, shapes, _SMALL, partial(_floor, operands), gemms,
        separate=partial(apart, _torch), twin=partial(apart, _looped), draw=_draw, dtypes=_DTYPES,
        flops=_flops if gemms else None, peers={"liger_kernel": liger} if liger else {}, turn=30,
        unaligned=unaligned, **coded,
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
    _case(
        "grouped product of codes", _coded, _coded_apart,
        ("x w x_inverse w_inverse bias ends", "y"), _UP, library.PRODUCT,
    ),
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
    _coded_gradient(
        "its gradient of codes", "dx", _coded_dgrad, _coded_dgrad_apart, library.PRODUCT
    ),
    _coded_gradient(
        "gradient of the matrices, of codes", "dw",
        _coded_wgrad, _coded_wgrad_apart, library.CODED_WGRAD,
    ),
    _coded_gradient(
        "gradient of the matrices, of codes, added", "dw",
        _coded_wgrad, _coded_wgrad_apart, library.CODED_WGRAD, added=True,
    ),
    _of_mx("grouped product of MX codes", "y", _mx, _mx_apart, library.SCALED),
    _of_mx("its gradient of MX codes", "dx", _mx_dgrad, _mx_dgrad_apart, library.SCALED),
    _of_mx(
        "gradient of the matrices, of MX codes", "dw",
        _mx_wgrad, _mx_wgrad_apart, library.SCALED_WGRAD,
    ),
    _of_mx(
        "gradient of the matrices, of MX codes, added", "dw",
        _mx_wgrad, _mx_wgrad_apart, library.SCALED_WGRAD, added=True,
    ),
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
