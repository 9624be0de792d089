"""The grouped products at the sizes of two models, for ``python -m opfuse_triton``.

They are the experts of Qwen3-30B-A3B and of Mixtral 8x7B, for 8192 tokens; ``rows`` are tokens
times experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import SwiGLU
from opfuse.ops.grouped import Groups

from .kernels import library

BF16 = torch.bfloat16
_SWIGLU = functions_of(SwiGLU())


def _activation(scales: Tensor) -> library.Activation:
    assert _SWIGLU is not None
    return library.Activation(_SWIGLU, (), 0, scales)


def _groups(ends: Tensor) -> Groups:
    """The same groups, whose sizes the host reads; on the meta device all are alike."""
    if ends.is_meta:
        raise NotImplementedError
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return Groups(sizes.cpu(), sizes.tolist())


def _apart(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Torch's grouped product; on the meta device one that counts the same, of equal groups."""
    if not x.is_meta:
        return F.grouped_mm(x, matrices, offs=ends)
    count = len(matrices)
    groups = x.new_empty(count, -(-len(x) // count), x.shape[1])
    return torch.bmm(groups, matrices).flatten(0, 1)[: len(x)]


def _forward_apart(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return _apart(x, w.transpose(1, 2), ends)


def _list(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    matrices = library.listed(w.unbind())
    assert matrices is not None
    return library.product(x, matrices, ends)


def _list_apart(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """On a GPU the matrices are copied into one tensor. Joining the results moves less."""
    if x.is_meta:
        return _forward_apart(x, w, ends).clone()
    return _forward_apart(x, torch.stack(w.unbind()), ends)


def _dgrad_apart(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return _apart(dy, w, ends)


def _wgrad_apart(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if not x.is_meta:
        return F.grouped_mm(dy.t(), x, offs=ends)
    count = len(ends)
    each = -(-len(x) // count)
    left = dy.new_empty(count, dy.shape[1], each)
    return torch.bmm(left, x.new_empty(count, each, x.shape[1]))


def _forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return library.product(x, library.matrices_of(w), ends)


def _forward_twin(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return _groups(ends).products(x, w, ())


def _listed(x: Tensor, w: Tensor, bias: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    matrices = library.listed(w.unbind())
    assert matrices is not None
    return library.product(x, matrices, ends, bias.unbind(), scales)


def _listed_twin(x: Tensor, w: Tensor, bias: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    groups = _groups(ends)
    return groups.add_scaled(groups.products(x, w, ()), bias.unbind(), scales)


def _dgrad(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return library.product(dy, library.matrices_of(w).transposed(), ends)


def _dgrad_twin(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return _groups(ends).input_grads(dy, w)


def _wgrad_twin(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return _groups(ends).stacked_grads(dy, x, ends.shape[0])


def _sums_twin(dy: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    groups = _groups(ends)
    return torch.stack(groups.row_sums(dy, (True,) * ends.shape[0], scales))  # type: ignore[arg-type]


def _activated(x: Tensor, w: Tensor, scales: Tensor, ends: Tensor) -> Any:
    return library.activated(x, library.matrices_of(w), ends, _activation(scales), keep=True)


def _activated_twin(x: Tensor, w: Tensor, scales: Tensor, ends: Tensor) -> Any:
    hidden = _forward_twin(x, w, ends)
    return _scaled(hidden, scales), hidden


def _activated_apart(x: Tensor, w: Tensor, scales: Tensor, ends: Tensor) -> Any:
    hidden = _forward_apart(x, w, ends)
    return _scaled(hidden, scales), hidden


def _scaled(hidden: Tensor, scales: Tensor) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    y = SwiGLU().forward_value(hidden.to(wide)) * scales.to(wide)[:, None]
    return y.to(hidden.dtype)


def _gradients(dy: Tensor, w: Tensor, scales: Tensor, hidden: Tensor, ends: Tensor) -> Any:
    matrices = library.matrices_of(w)
    return library.gradients(dy, matrices, ends, _activation(scales), hidden, True)


def _gradients_twin(dy: Tensor, w: Tensor, scales: Tensor, hidden: Tensor, ends: Tensor) -> Any:
    return _unscaled(_dgrad_twin(dy, w, ends), scales, hidden)


def _gradients_apart(dy: Tensor, w: Tensor, scales: Tensor, hidden: Tensor, ends: Tensor) -> Any:
    return _unscaled(_dgrad_apart(dy, w, ends), scales, hidden)


def _unscaled(gradient: Tensor, scales: Tensor, hidden: Tensor) -> Any:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    gradient, x = gradient.to(wide), hidden.to(wide)
    of_hidden = SwiGLU().backward_value(gradient * scales.to(wide)[:, None], x)
    of_scales = (SwiGLU().forward_value(x) * gradient).sum(-1)
    return of_hidden.to(hidden.dtype), of_scales


def _draw(groups: int, rows: int, **_: int) -> dict[str, Tensor]:
    """The ends of groups of uneven sizes, the first of them empty."""
    weights = torch.linspace(0.0, 2.0, groups) if groups > 1 else torch.ones(1)
    ends = (weights.cumsum(0) / weights.sum() * rows).round().to(torch.int32)
    return {"ends": ends}


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
_SMALL = [
    {"groups": 5, "rows": 131, "depth": 64, "features": 136},
    {"groups": 1, "rows": 1, "depth": 33, "features": 30},
]
_DTYPES = BF16, torch.float16, torch.float32


def _case(
    name: str,
    run: Any,
    twin: Any,
    tensors: tuple[str, str],
    shapes: Any,
    kernel: Any,
    separate: Any = None,
) -> KernelCase:
    gemms = () if kernel is library.SUMS else (kernel.name,)
    return KernelCase(
        name, run, _operands(*tensors), shapes, _SMALL, gemms=gemms, twin=twin, draw=_draw,
        dtypes=_DTYPES, flops=_flops if gemms else None, turn=30, separate=separate,
    )  # fmt: skip


CASES = [
    _case(
        "grouped product", _forward, _forward_twin, ("x w ends", "y"), _UP, library.PRODUCT,
        _forward_apart,
    ),
    _case(
        "grouped product of a list", _list, _forward_twin, ("x w ends", "y"), _UP,
        library.PRODUCT, _list_apart,
    ),
    _case(
        "grouped product, listed", _listed, _listed_twin,
        ("x w bias scales ends", "y"), _DOWN, library.PRODUCT,
    ),
    _case(
        "its gradient", _dgrad, _dgrad_twin, ("dy w ends", "dx"), _UP, library.PRODUCT,
        _dgrad_apart,
    ),
    _case(
        "gradient of the matrices", library.weight_grads, _wgrad_twin,
        ("dy x ends", "dw"), _UP, library.WGRAD, _wgrad_apart,
    ),
    _case(
        "gradient of the biases", lambda dy, scales, ends: library.row_sums(dy, ends, scales),
        _sums_twin, ("dy scales ends", "sums"), _DOWN, library.SUMS,
    ),
    _case(
        "grouped product + SwiGLU", _activated, _activated_twin,
        ("x w scales ends", "activated kept"), _UP, library.ACTIVATED, _activated_apart,
    ),
    _case(
        "its gradient + that of SwiGLU", _gradients, _gradients_twin,
        ("dy w scales hidden ends", "d_hidden d_scales"), _DOWN, library.GRADIENTS,
        _gradients_apart,
    ),
]  # fmt: skip
