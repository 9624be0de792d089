"""The Triton products at the sizes of real models, for ``python -m opfuse_triton`` to check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import (
    GELU,
    QGELU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReLU,
    SwiGLU,
    cross_entropy,
    token_log_prob,
)
from opfuse.ops.cross_entropy import LossNumbers
from opfuse.ops.token_log_prob import TokenNumbers

from . import chunks
from .kernels import DTYPES
from .products import BY_POINTERS, BY_TILES, activation_gradient, multiply
from .softmax import row_gradients, row_losses, softmax_in_place
from .token_statistics import row_gradients as row_logit_gradients
from .token_statistics import row_statistics

BF16 = torch.bfloat16
_GELU, _SWIGLU = functions_of(GELU()), functions_of(SwiGLU())
_GEMMS = BY_TILES.name, BY_POINTERS.name


def _product(functions: Any = None, **how: Any) -> Callable[..., Any]:
    """A product as a case runs it."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, up: Any = None, addend: Any = None) -> Any:
        weights, biases = ((weight,), (bias,)) if up is None else ((weight, up), (bias, bias))
        y, hidden = multiply(x, weights, biases, functions, addend=addend, **how)
        return y if hidden is None else (y, hidden)

    return run


def _operands(*others: str) -> Callable[..., Mapping[str, Operand]]:
    """The operands of a product, with those of ``"up"``, ``"addend"`` and ``"hidden"`` it has."""

    def operands(rows: int, depth: int, features: int) -> Mapping[str, Operand]:
        weight, full = Operand((features, depth), BF16), Operand((rows, features), BF16)
        width = features * (2 if "up" in others else 1)
        known = {
            "x": Operand((rows, depth), BF16),
            "weight": weight,
            "up": weight,
            "bias": Operand((features,), BF16, "vector"),
            "addend": full,
            "y": replace(full, output=True),
            "hidden": Operand((rows, width), BF16, output=True),
        }
        wanted = {"x", "weight", "bias", "y", *others}
        return {name: operand for name, operand in known.items() if name in wanted}

    return operands


def _training_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = F.linear(x, weight, bias)
    return F.gelu(hidden, approximate="tanh"), hidden


def _kept_twin(act: Any) -> Callable[..., Any]:
    def twin(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        hidden = F.linear(x, weight, bias)
        return act.value(hidden), hidden

    return twin


def _before_linear(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    functions: Any = functions_of(act)
    numbers = functions.numbers(act.numbers_of())
    return activation_gradient(dy, weight, hidden, functions, numbers, sums=True)


def _before_linear_apart(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    dx = torch.ops.aten.gelu_backward(dy.mm(weight), hidden, approximate=act.approximate)
    return dx, dx.sum(0)


def _before_swiglu_apart(dy: Tensor, weight: Tensor, hidden: Tensor) -> Any:
    gradient, (gate, up) = dy.mm(weight), hidden.chunk(2, 1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    dx = torch.cat([of_gate, gradient * F.silu(gate)], 1)
    return dx, dx.sum(0)


def _before_linear_twin(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    dx = act.backward_value(dy.mm(weight), hidden)
    return dx, dx.sum(0)


def _gradient_operands(
    rows: int, outputs: int, features: int, halves: int = 1
) -> Mapping[str, Operand]:
    full = Operand((rows, halves * features), BF16)
    return {
        "dy": Operand((rows, outputs), BF16),
        "weight": Operand((outputs, features), BF16),
        "hidden": full,
        "dx": replace(full, output=True),
        "db": Operand((halves * features,), BF16, "vector", output=True),
    }


def _gradient_operations(rows: int, outputs: int, features: int) -> int:
    return _operations(rows, outputs, features)


def _gated_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) * F.linear(x, up, bias)


def _gated_kept_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Any:
    gate, linear = F.linear(x, weight, bias), F.linear(x, up, bias)
    return F.silu(gate) * linear, torch.cat([gate, linear], -1)


def _softmax(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses = softmax_in_place(logits, targets, weights, numbers)
    return logits, losses


def _softmax_twin(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses, gradient = chunks.softmax_gradient(logits, targets, weights, numbers)
    return gradient, losses


def _draw_targets(rows: int, classes: int) -> dict[str, Tensor]:
    targets, weights = torch.randint(classes, (rows,)), torch.rand(rows)
    targets[::7], weights[::7] = LossNumbers().ignore_index, 0.0
    return {"targets": targets, "weights": weights}


def _operations(rows: int, depth: int, features: int) -> int:
    return 2 * rows * depth * features


def _both_operations(**shape: int) -> int:
    return 2 * _operations(**shape)


def _softmax_operands(rows: int, classes: int) -> Mapping[str, Operand]:
    return {
        "logits": Operand((rows, classes), BF16),
        "targets": Operand((rows,), torch.int64, "vector"),
        "weights": Operand((rows,), torch.float32, "vector"),
        "gradient": Operand((rows, classes), BF16, output=True),
        "losses": Operand((rows,), torch.float32, "vector", output=True),
    }


def _cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses, sums = row_losses(logits, targets, numbers, keep=True)
    assert sums is not None
    return row_gradients(logits, targets, weights, sums, numbers), losses


def _cross_entropy_apart(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses = cross_entropy.row_losses(logits, targets, numbers)
    return cross_entropy.row_gradients(logits, targets, weights, numbers), losses


def _by_liger(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    """Its gradient overwrites the logits; it takes no gradient of each row's loss."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward  # type: ignore[import-not-found]

    ignored, smoothing, z_loss, softcap, _ = numbers
    options = ignored, z_loss, smoothing, "none", softcap, False
    wanted = logits.detach().requires_grad_()  # it asks
    losses, *_, gradient = cross_entropy_forward(wanted, targets, None, *options)
    return gradient.detach(), losses.float()


def _by_quack(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd  # type: ignore[import-not-found]

    ignored = numbers.ignore_index
    losses, lse = cross_entropy_fwd(logits, targets, ignore_index=ignored, return_lse=True)
    return cross_entropy_bwd(logits, targets, weights, lse, ignore_index=ignored), losses


def _statistics(logits: Tensor, tokens: Tensor, *, numbers: TokenNumbers) -> tuple[Tensor, ...]:
    return row_statistics(logits, tokens, numbers)[0]


def _log_probs(
    logits: Tensor, tokens: Tensor, *, numbers: TokenNumbers, **grads: Tensor
) -> tuple[Tensor, ...]:
    found, kept = row_statistics(logits, tokens, numbers, keep=True)
    return row_logit_gradients(logits, tokens, list(grads.values()), kept, numbers), *found


def _log_probs_apart(
    logits: Tensor, tokens: Tensor, *, numbers: TokenNumbers, **grads: Tensor
) -> tuple[Tensor, ...]:
    found = token_log_prob.row_log_probs(logits, tokens, numbers)
    dx = token_log_prob.row_logit_gradients(logits, tokens, list(grads.values()), numbers)
    return dx, *found


def _log_prob_operands(
    rows: int, classes: int, numbers: TokenNumbers, backward: bool = False
) -> Mapping[str, Operand]:
    extras = [
        name for name in ("entropy", "logsumexp", "log_sum_squares") if numbers._asdict()[name]
    ]
    of_row, names = Operand((rows,), torch.float32, "vector"), ["log_prob", *extras]
    full = Operand((rows, classes), BF16)
    return {
        "logits": full,
        "tokens": Operand((rows,), torch.int64, "vector"),
        **{f"of_{name}": of_row for name in names if backward},
        **({"gradient": replace(full, output=True)} if backward else {}),
        **{name: replace(of_row, output=True) for name in names},
    }


def _draw_tokens(rows: int, classes: int) -> dict[str, Tensor]:
    return {"tokens": _draw_targets(rows, classes)["targets"]}


def _once(rows: int, classes: int) -> int:
    return rows * classes * BF16.itemsize


def _twice_and_once(rows: int, classes: int) -> int:
    """A row is wider than what a program keeps: it is read twice, and written once."""
    return 3 * rows * classes * BF16.itemsize


# Peers: quack-kernels as of 0.6.4. Its products are not tuned here, which takes minutes


def _quack_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _quack_gelu_kept(x, weight, bias, False)[0]


def _quack_gelu_kept(
    x: Tensor, weight: Tensor, bias: Tensor, keep: bool = True
) -> tuple[Tensor, Tensor]:
    from quack.gemm_interface import gemm_act

    how = {"activation": "gelu_tanh_approx", "store_preact": keep, "tuned": False}
    hidden, y = gemm_act(x, weight.t(), bias=bias, **how)
    return y, hidden


def _quack_add(x: Tensor, weight: Tensor, bias: Tensor, addend: Tensor) -> Tensor:
    from quack.gemm_interface import gemm_add

    return gemm_add(x, weight.t(), addend, bias=bias, tuned=False)  # type: ignore[no-any-return]


def _quack_softmax(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

    losses, lse = cross_entropy_fwd(logits, targets, return_lse=True)
    return cross_entropy_bwd(logits, targets, weights, lse, inplace_backward=True), losses


def _quack_in_one(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the sum of losses, without the weights."""
    from quack.cross_entropy import cross_entropy_fwd

    losses, gradient = cross_entropy_fwd(logits, targets, return_dx=True, inplace_backward=True)
    return gradient, losses


_QUACK_LOSS = {"quack-kernels": _quack_softmax, "quack, one kernel": _quack_in_one}
_ALL = LossNumbers(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
_ALL_OUTPUTS = TokenNumbers(0.7, 30.0, entropy=True, logsumexp=True, log_sum_squares=True)
_VOCABULARIES = [{"rows": 512, "classes": 128256}, {"rows": 512, "classes": 32000}]
_FEW = [{"rows": 5, "classes": 5000}, {"rows": 3, "classes": 65}]

_MLP = [
    {"rows": 8192, "depth": 1024, "features": 4096},
    {"rows": 512, "depth": 768, "features": 3072},
]
_GATED = [{"rows": 8192, "depth": 4096, "features": 14336}]
_DOWN = [
    {"rows": 8192, "depth": 4096, "features": 1024},
    {"rows": 8192, "depth": 14336, "features": 4096},
]
_WIDE = [{"rows": 8192, "depth": 4096, "features": 4096}]
_TANH = GELU()
_KEPT = {
    "GELU (tanh), wide": _TANH,
    "GELU (erf)": GELU(approximate="none"),
    "QGELU": QGELU(),
    "ReLU": ReLU(),
    "SReLU": SReLU(),
    "SiLU": SiLU(),
}
"""The activations of one value: which tiles of 128x256 spill differs between them."""
_BACK = [
    {"rows": 8192, "outputs": 1024, "features": 4096},
    {"rows": 8192, "outputs": 12288, "features": 49152},
    {"rows": 1000, "outputs": 129, "features": 771},
]
_BACK_GATED = [{"rows": 8192, "outputs": 4096, "features": 14336}, _BACK[-1]]
_BACK_SMALL = [
    {"rows": 130, "outputs": 64, "features": 264},
    {"rows": 3, "outputs": 65, "features": 31},
]
_ODD = [{"rows": 1000, "depth": 129, "features": 771}]
_SMALL = [{"rows": 127, "depth": 64, "features": 264}, {"rows": 3, "depth": 65, "features": 31}]

_UNALIGNED_CLASSES = [{"rows": 512, "classes": 50257}]

CASES = [
    KernelCase(
        "linear + GELU", _product(_GELU), _operands(), _MLP + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        peers={"quack-kernels": _quack_gelu},
    ),
    KernelCase(
        "linear + GELU, kept", _product(_GELU, keep=True), _operands("hidden"), _MLP + _ODD,
        _SMALL, gemms=_GEMMS, flops=_operations, unaligned=_ODD, separate=_training_apart,
        peers={"quack-kernels": _quack_gelu_kept},
    ),
    *[
        KernelCase(
            f"linear + {name}, kept", _product(functions_of(act), keep=True), _operands("hidden"),
            _WIDE, [], gemms=_GEMMS, flops=_operations, twin=_kept_twin(act), turn=80,
            separate=_training_apart if act is _TANH else None,
        )
        for name, act in _KEPT.items()
    ],
    *[
        KernelCase(
            f"gradient of {name} before a linear", functools.partial(_before_linear, act=act),
            _gradient_operands, _BACK, _BACK_SMALL, gemms=_GEMMS, flops=_gradient_operations,
            separate=functools.partial(_before_linear_apart, act=act), turn=70,
        )
        for name, act in (("GELU", GELU()), ("GELU (erf)", GELU(approximate="none")))
    ],
    *[
        KernelCase(
            f"gradient of {name} before a linear", functools.partial(_before_linear, act=act),
            functools.partial(_gradient_operands, halves=2), _BACK_GATED, _BACK_SMALL,
            gemms=_GEMMS, flops=_gradient_operations, separate=separate, turn=70,
            twin=functools.partial(_before_linear_twin, act=act),
        )
        for name, act, separate in (
            ("SwiGLU", SwiGLU(), _before_swiglu_apart), ("SiTUGLU", SiTUGLU(), None)
        )
    ],
    KernelCase(
        "linear + add", _product(), _operands("addend"), _DOWN + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias, addend: F.linear(x, weight, bias) + addend,
        peers={"quack-kernels": _quack_add},
    ),
    KernelCase(
        "linear + scale + add", _product(scale=0.5), _operands("addend"), _DOWN, _SMALL[:1],
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias, addend: F.linear(x, weight, bias) * 0.5 + addend,
    ),
    KernelCase(
        "gate and up + SwiGLU", _product(_SWIGLU), _operands("up"), _GATED + _ODD, _SMALL,
        gemms=_GEMMS, flops=_both_operations, unaligned=_ODD, separate=_gated_apart,
    ),
    KernelCase(
        "gate and up + SwiGLU, kept", _product(_SWIGLU, keep=True), _operands("up", "hidden"),
        _GATED + _ODD, _SMALL, gemms=_GEMMS, flops=_both_operations, unaligned=_ODD,
        twin=_gated_kept_apart, separate=_gated_apart,
    ),
    *[
        KernelCase(
            f"statistics of tokens{said}", functools.partial(_statistics, numbers=numbers),
            functools.partial(_log_prob_operands, numbers=numbers), _VOCABULARIES, _FEW,
            floor=_once, twin=functools.partial(token_log_prob.row_log_probs, numbers=numbers),
            draw=_draw_tokens, dtypes=DTYPES, unaligned=_UNALIGNED_CLASSES, turn=20,
        )
        for said, numbers in (("", TokenNumbers()), (", all outputs", _ALL_OUTPUTS))
    ],
    *[
        KernelCase(
            f"log-probabilities{said}", functools.partial(_log_probs, numbers=numbers),
            functools.partial(_log_prob_operands, numbers=numbers, backward=True), _VOCABULARIES,
            _FEW, floor=_twice_and_once,
            separate=functools.partial(_log_probs_apart, numbers=numbers),
            draw=_draw_tokens, dtypes=DTYPES, unaligned=_UNALIGNED_CLASSES, turn=20,
        )
        for said, numbers in (("", TokenNumbers()), (", all outputs", _ALL_OUTPUTS))
    ],
    *[
        KernelCase(
            name, functools.partial(_softmax, numbers=numbers), _softmax_operands, _VOCABULARIES,
            _FEW, floor=_twice_and_once, twin=functools.partial(_softmax_twin, numbers=numbers),
            draw=_draw_targets, unaligned=_UNALIGNED_CLASSES, turn=20, peers=peers,
        )
        for name, numbers, peers in (
            ("softmax of a loss", LossNumbers(), _QUACK_LOSS), ("with all options", _ALL, {})
        )
    ],
    *[
        KernelCase(
            name, functools.partial(_cross_entropy, numbers=numbers), _softmax_operands,
            _VOCABULARIES, _FEW, floor=_twice_and_once,
            separate=functools.partial(_cross_entropy_apart, numbers=numbers),
            peers={
                peer: functools.partial(run, numbers=numbers)
                for peer, run in (("liger_kernel", _by_liger), ("quack", _by_quack))
                if numbers == LossNumbers() or peer != "quack"
            },
            draw=_draw_targets, dtypes=DTYPES, unaligned=_UNALIGNED_CLASSES, turn=20,
        )
        for name, numbers in (
            ("cross entropy", LossNumbers()), ("cross entropy with all options", _ALL)
        )
    ],
]  # fmt: skip
