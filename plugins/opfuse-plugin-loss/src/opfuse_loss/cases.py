"""The kernels of losses at the sizes of real models, for ``python -m opfuse_triton`` to check."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from opfuse_triton import KernelCase, Operand
from torch import Tensor

from opfuse.ops import cross_entropy, token_log_prob
from opfuse.ops.cross_entropy import LossNumbers
from opfuse.ops.token_log_prob import TokenNumbers

from . import chunks
from .conditions import DTYPES
from .kernels.softmax import row_gradients, row_losses, softmax_in_place
from .kernels.token_statistics import row_gradients as row_logit_gradients
from .kernels.token_statistics import row_statistics

BF16 = torch.bfloat16


def _softmax(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    return logits, softmax_in_place(logits, targets, weights, numbers)


def _softmax_twin(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses, gradient = chunks.softmax_gradient(logits, targets, weights, numbers)
    return gradient, losses


def _draw_targets(rows: int, classes: int) -> dict[str, Tensor]:
    targets, weights = torch.randint(classes, (rows,)), torch.rand(rows)
    targets[::7], weights[::7] = LossNumbers().ignore_index, 0.0
    return {"targets": targets, "weights": weights}


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


# Peers: quack-kernels as of 0.6.4


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
_UNALIGNED_CLASSES = [{"rows": 512, "classes": 50257}]

CASES = [
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
            overwrites={"gradient": "logits"},
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
