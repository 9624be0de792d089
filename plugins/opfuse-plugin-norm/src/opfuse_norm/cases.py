"""The kernels that ``python -m opfuse_triton`` compiles; nothing else imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand
from opfuse_triton import norms as kernels
from opfuse_triton.norms import backward as backward_kernels
from opfuse_triton.norms import drop, modulated, modulation, twins
from opfuse_triton.norms import dropout as dropout_kernels
from opfuse_triton.norms import forward as forward_kernels
from opfuse_triton.norms.drop import Drop
from torch import Tensor

_WIDTHS = [{"rows": 8192, "features": features} for features in (2048, 4096, 8192)]
_SMALL = [{"rows": 37, "features": 512}, {"rows": 5, "features": 1500}]
_UNALIGNED = [{"rows": 8192, "features": features} for features in (8192, 4095, 5001)]
_HEADS = [{"rows": 262144, "features": 128}]
_WIDE = [{"rows": 1024, "features": 65536}]


def _tensors(inputs: str, outputs: str) -> Callable[..., Mapping[str, Operand]]:
    """The operands of these names: in bf16, statistics and the bias's gradient in fp32."""

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        full = Operand((rows, features), torch.bfloat16)
        row = Operand((rows, 1), torch.float32, "vector")
        vector = Operand((features,), torch.bfloat16, "vector")
        known = {"mean": row, "rstd": row, "weight": vector, "bias": vector, "dw": vector}
        known["db"] = replace(vector, dtype=torch.float32)
        found = {name: known.get(name, full) for name in inputs.split()}
        return found | {
            name: replace(known.get(name, full), output=True) for name in outputs.split()
        }

    return tensors


def _forward(run: Callable[..., Any], kind: str) -> Callable[..., tuple[Tensor, ...]]:
    norm = kernels.Norm(kind, 1, False)

    def forward(x: Tensor, **others: Tensor) -> tuple[Tensor, ...]:
        given = [others.get(name) for name in ("extra", "weight", "bias")]
        made = run(x, *given, 1e-5, norm, None, True, True)
        return tuple([tensor for tensor in made if tensor is not None])

    return forward


def _backward(run: Callable[..., Any], kind: str) -> Callable[..., tuple[Tensor, ...]]:
    norm = kernels.Norm(kind, 1, False)
    needs = True, kind != kernels.L2, kind == kernels.LAYER

    def backward(**given: Tensor) -> tuple[Tensor, ...]:
        names = ("dy", "x", "weight", "mean", "rstd", "extra")
        made = run(*[given.get(name) for name in names], norm, needs)
        return tuple([tensor for tensor in made if tensor is not None])

    return backward


def _separate(twin: Callable[..., Any], kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """The ops one after the other: PyTorch has a LayerNorm, and the ops compute it in fp32."""

    def layer_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        given = x.float(), x.shape[-1:], weight.float(), bias.float()
        y, mean, rstd = torch.native_layer_norm(*given, 1e-5)
        return y.to(x.dtype), mean, rstd

    def layer_backward(
        dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, ...]:
        given = dy.float(), x.float(), x.shape[-1:], mean, rstd, weight.float(), weight.float()
        backward = torch.ops.aten.native_layer_norm_backward.default
        dx, dw, db = backward(*given, [True, True, True])
        return dx.to(x.dtype), dw.to(weight.dtype), db

    def separate(extra: Tensor | None = None, **given: Tensor) -> tuple[Tensor, ...]:
        if "dy" in given:
            dx, *others = (layer_backward if kind == kernels.LAYER else twin)(**given)
            return (dx if extra is None else dx + extra, *others)
        if extra is not None:
            given["x"] = given["x"] + extra
        y, *others = (layer_forward if kind == kernels.LAYER else twin)(**given)
        return (y, *([] if extra is None else [given["x"]]), *others)

    return separate


def _liger_forward(kind: str, with_extra: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Liger-Kernel's kernel; casting as its Llama does it, which is its default."""

    def rms(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        y, _, rstd, *_ = rms_norm_forward(x, weight, 1e-5, 0.0, "llama", None)
        return y, rstd.view(-1, 1)

    def add_rms(x: Tensor, extra: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

        y, total, rstd, *_ = fused_add_rms_norm_forward(x, extra, weight, 1e-5, 0.0, "llama")
        return y, total, rstd.view(-1, 1)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops.layer_norm import layer_norm_forward

        y, _, mean, rstd, *_ = layer_norm_forward(x, weight, bias, 1e-5)
        return y, mean.view(-1, 1), rstd.view(-1, 1)

    return add_rms if with_extra else layer if kind == kernels.LAYER else rms


def _liger_backward(
    kind: str, with_extra: bool, in_place: bool = False
) -> Callable[..., tuple[Tensor, ...]]:
    """Liger-Kernel's kernel, with a new tensor for ``dx`` or over ``dy``."""

    def rms(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        block = calculate_settings(x.shape[-1])
        made = rms_norm_backward(dy, x, weight, rstd.view(-1), 0.0, 0, *block, in_place, None)
        return tuple(made)

    def add_rms(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, extra: Tensor
    ) -> tuple[Tensor, ...]:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        block = calculate_settings(x.shape[-1])
        dx, _, dw = fused_add_rms_norm_backward(
            dy, extra, x, weight, rstd.view(-1), 0.0, 0, *block, 2, in_place
        )
        return dx, dw

    def layer(
        dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, ...]:
        from liger_kernel.ops.layer_norm import layer_norm_backward

        dx, dw, db = layer_norm_backward(dy, x, weight, weight, mean.view(-1), rstd.view(-1))
        return dx, dw, db.float()

    return add_rms if with_extra else layer if kind == kernels.LAYER else rms


def _quack_forward(kind: str, with_extra: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel of quack-kernels, as of 0.6.4."""

    def rms(x: Tensor, weight: Tensor, extra: Tensor | None = None) -> tuple[Tensor, ...]:
        from quack.rmsnorm import rmsnorm_fwd

        y, total, rstd = rmsnorm_fwd(x, weight, residual=extra, eps=1e-5, store_rstd=True)
        return (y, *[total] * with_extra, rstd.view(-1, 1))

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """Its weights must be in fp32, so its time has two small casts in it."""
        from quack.rmsnorm import layernorm_fwd

        both = weight.float(), bias.float()
        y, rstd, mean = layernorm_fwd(x, *both, eps=1e-5, return_rstd=True, return_mean=True)
        return y, mean.view(-1, 1), rstd.view(-1, 1)

    return layer if kind == kernels.LAYER else rms


def _quack_backward(kind: str, with_extra: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel of quack-kernels, as of 0.6.4."""

    def rms(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, extra: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        from quack.rmsnorm import rmsnorm_bwd

        made = rmsnorm_bwd(x, weight, dy, rstd.view(-1), extra, has_residual=with_extra)
        return tuple(made[:2])

    def layer(
        dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, ...]:
        from quack.rmsnorm import layernorm_bwd

        dx, dw, db = layernorm_bwd(x, weight, dy, rstd.view(-1), mean.view(-1))
        return dx, dw, db.float()

    return layer if kind == kernels.LAYER else rms


def _peers(kind: str, inputs: str) -> dict[str, Callable[..., Any]]:
    """Other packages' kernels of the same fusion: no L2Normalization, nor an add with LayerNorm."""
    with_extra = "extra" in inputs
    if kind == kernels.L2 or (kind == kernels.LAYER and with_extra):
        return {}
    if "dy" not in inputs:
        quack = _quack_forward(kind, with_extra)
        return {"liger-kernel": _liger_forward(kind, with_extra), "quack-kernels": quack}
    found = {"liger-kernel": _liger_backward(kind, with_extra)}
    if kind == kernels.RMS:
        found["liger, over dy"] = _liger_backward(kind, with_extra, in_place=True)
    return found | {"quack-kernels": _quack_backward(kind, with_extra)}


def _case(
    name: str,
    kind: str,
    inputs: str,
    outputs: str,
    shapes: Sequence[Mapping[str, int]] = _WIDTHS,
    small: Sequence[Mapping[str, int]] = _SMALL,
) -> KernelCase:
    made = (_backward, backward_kernels, twins.backward) if "dy" in inputs else None
    of, launching, twin = made or (_forward, forward_kernels, twins.forward)
    run = getattr(launching, twin.__name__)
    tensors = _tensors(inputs, outputs)
    peers = _peers(kind, inputs)
    both = torch.bfloat16, torch.float32
    run, twin = of(run, kind), of(twin, kind)
    separate = _separate(twin, kind)
    return KernelCase(
        name, run, tensors, shapes, small, separate=separate, twin=twin, peers=peers, dtypes=both,
        unaligned=shapes if shapes in (_HEADS, _WIDE) else _UNALIGNED, turn=10,
        overwrites={"dx_ptr": "dy_ptr", "sum_ptr": "extra_ptr"},
    )  # fmt: skip


def _dropout_case(name: str, kind: str = "") -> KernelCase:
    """A dropout, with an addition or not, and with a norm of that kind."""
    adds, p = "add" in name, 0.1
    outputs = "y sum rstd" if kind else "y"

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        weight = " weight" if kind else ""
        found = _tensors("x" + " extra" * adds + weight, outputs)(rows, features)
        return {"seed": Operand((1,), torch.int64, "vector")} | found

    def by(dropout: Any, norm: Any) -> Callable[..., Any]:
        def run(seed: Tensor, x: Tensor, extra: Any = None, weight: Any = None) -> Any:
            drop = Drop(seed, p)
            if not kind:
                return dropout(x, extra, drop)
            given = x, extra, weight, None, 1e-5, kernels.Norm(kind, 1, False), None, True, True
            y, total, _, rstd = norm(*given, drop=drop)
            return y, total, rstd

        return run

    def separate(seed: Tensor, x: Tensor, extra: Any = None, **others: Tensor) -> Any:
        y, _ = torch.native_dropout(x, p, True)
        y = y if extra is None else y + extra
        return _separate(_forward(twins.forward, kind), kind)(x=y, **others) if kind else y

    return KernelCase(
        name, by(dropout_kernels.dropout, forward_kernels.forward), tensors, _WIDTHS, _SMALL,
        separate=separate, twin=by(drop.dropout, twins.forward), unaligned=_UNALIGNED[1:],
        draw=lambda **shape: {"seed": torch.tensor([2**40 + 7])}, turn=15,
        overwrites={"sum_ptr": "extra_ptr"},
        dtypes=(torch.bfloat16, torch.float32),
    )  # fmt: skip


def _modulated_case(kind: str, which: str) -> KernelCase:
    """A pass of a norm and what modulates it: of an image each, a factor and a summand."""
    norm = kernels.Norm(kind, 1, False)
    back = which == "backward"

    def tensors(rows: int, features: int, groups: int) -> dict[str, Operand]:
        x = Operand((groups, rows // groups, features), torch.bfloat16)
        row = Operand((*x.shape[:-1], 1), torch.float32, "vector")
        vector = Operand((groups, 1, features), torch.float32, "vector")
        statistics = {"mean": row} if kind == kernels.LAYER else {}
        statistics["rstd"] = row
        if back:
            made = {"dx": x, "dfactor": vector, "dsummand": vector}
            found = {"dy": x, "x": x, "factor": vector} | statistics
        else:
            found, made = {"x": x, "factor": vector, "summand": vector}, {"y": x} | statistics
        return found | {name: replace(one, output=True) for name, one in made.items()}

    def by(module: Any) -> Callable[..., Any]:
        def forward(x: Tensor, factor: Tensor, summand: Tensor) -> Any:
            made = module.forward(x, factor, summand, 1e-5, norm, x.dtype, True)
            return tuple([tensor for tensor in made if tensor is not None])

        def backward(dy: Tensor, x: Tensor, factor: Tensor, rstd: Tensor, mean: Any = None) -> Any:
            shape = factor.shape
            return module.backward(dy, x, factor, mean, rstd, norm, shape, shape)

        return backward if back else forward

    def separate(x: Tensor, factor: Tensor, **others: Tensor) -> Any:
        if not back:
            given = x.float(), x.shape[-1:], None, None
            if kind == kernels.LAYER:
                n, *statistics = torch.native_layer_norm(*given, 1e-5)
            else:
                n, _, _, *statistics = twins.forward(x, *[None] * 3, 1e-5, norm, None, False, True)
            y = n.to(x.dtype).float().mul(factor).add_(others["summand"]).to(x.dtype)
            return y, *statistics
        # the input stands for the norm's output, which is as large
        dy, n = others["dy"].float(), x.float()
        sums = (dy * n).sum(1, keepdim=True), dy.sum(1, keepdim=True)
        dn, stats = (dy * factor).to(x.dtype), (others.get("mean"), others["rstd"])
        if kind == kernels.LAYER:
            run = torch.ops.aten.native_layer_norm_backward.default
            wants = [True, False, False]
            dx, *_ = run(dn.float(), x.float(), x.shape[-1:], *stats, None, None, wants)
        else:
            dx, *_ = twins.backward(dn, x, None, *stats, None, norm, (True, False, False))
        return dx.to(x.dtype), *sums

    shapes = [
        {"rows": 8192, "features": features, "groups": groups}
        for features, groups in ((1152, 32), (3072, 2), (5120, 2), (8192, 1))
    ]
    return KernelCase(
        f"{_NAMES[kind]} + modulate {which}", by(modulated), tensors, shapes,
        [{"rows": 74, "features": 512, "groups": 2}, {"rows": 15, "features": 1500, "groups": 3}],
        separate=separate, twin=by(modulation), dtypes=(torch.bfloat16, torch.float32), turn=15,
        unaligned=[{"rows": 8192, "features": size, "groups": 2} for size in (3072, 2047)],
        overwrites={"dx_ptr": "dy_ptr"},
    )  # fmt: skip


_NAMES = {kernels.LAYER: "LayerNorm", kernels.RMS: "RMSNorm"}

CASES = [
    _case("RMSNorm forward", kernels.RMS, "x weight", "y rstd"),
    _case("RMSNorm backward", kernels.RMS, "dy x weight rstd", "dx dw"),
    _case("add + RMSNorm forward", kernels.RMS, "x extra weight", "y sum rstd"),
    _case("RMSNorm backward + add", kernels.RMS, "dy x weight rstd extra", "dx dw"),
    _case("LayerNorm forward", kernels.LAYER, "x weight bias", "y mean rstd"),
    _case("LayerNorm backward", kernels.LAYER, "dy x weight mean rstd", "dx dw db"),
    _case("add + LayerNorm forward", kernels.LAYER, "x extra weight bias", "y sum mean rstd"),
    _case(
        "LayerNorm backward + add",
        kernels.LAYER,
        "dy x weight mean rstd extra",
        "dx dw db",
        _WIDTHS[::2],
    ),
    _case("L2Normalization forward", kernels.L2, "x", "y rstd", _HEADS),
    _case("L2Normalization backward", kernels.L2, "dy x rstd", "dx", _HEADS),
    _dropout_case("dropout"),
    _dropout_case("dropout + add"),
    _dropout_case("dropout + add + RMSNorm", kernels.RMS),
    *[_modulated_case(kind, which) for kind in _NAMES for which in ("forward", "backward")],
    _case("RMSNorm forward, wide rows", kernels.RMS, "x weight", "y rstd", _WIDE, []),
    _case("RMSNorm backward, wide rows", kernels.RMS, "dy x weight rstd", "dx dw", _WIDE, []),
]
"""Rows that are too wide for registers are read twice; the second time, mostly from the cache."""
