"""Log-probabilities of tokens in two compiled functions: the numbers of rows, and the gradient.

The forward reads the logits once from memory, whatever else is asked for but the top tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Fusion
from opfuse.ops import TokenLogProb
from opfuse.ops.authoring import wide
from opfuse.ops.token_log_prob import TokenNumbers, cooled

from .fused import fit
from .loss import OF_ROW, Arrays, CompiledRows, capped, pays


class CompiledLogProb(CompiledRows):
    """Log-probabilities, forward and backward; see its base."""

    _check = "check_targets"

    def values(self, x: Tensor, targets: Tensor, numbers: TokenNumbers) -> list[Tensor]:
        """See the base."""
        return self.kernel("forward", _of_rows, 0, x, numbers)([x, targets], len(x))

    def results(
        self, op: Any, ctx: Any, found: list[Tensor], x: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
        """See the base."""
        numbers, (*outputs, largest, spread) = op.numbers_of(), found
        kept = [largest, spread, *outputs[1 : 1 + numbers.entropy]]
        kept += outputs[-1:] if numbers.log_sum_squares else []
        kept = [each.clone() for each in kept]  # the caller may overwrite outputs
        y, *extras = [each.view(targets.shape) for each in outputs]
        return y, tuple(extras), kept

    def gradient(
        self, x: Tensor, targets: Tensor, kept: list[Tensor], grads: Any, numbers: TokenNumbers
    ) -> Tensor:
        """See the base."""
        given = [fit(grad.to(wide(x.dtype)), OF_ROW, len(x)) for grad in grads if grad is not None]
        how = numbers, tuple([grad is not None for grad in grads])
        backward = self.kernel("backward", _gradient, len(kept) + len(given), x, how)
        return backward([x, targets, *kept, *given], len(x))[0]  # type: ignore[no-any-return]


def _of_rows(numbers: TokenNumbers, x: Tensor, tokens: Tensor) -> Arrays:
    """The outputs in their order; and the largest logit of a row, and the spread.

    That is the logarithm of the sum of the exponentials of what all logits are less.
    """
    # each use is computed by itself: a tensor with more than one would be written to memory
    largest = _cooled(numbers, x.amax(-1))
    spread = (_cooled(numbers, x) - largest.unsqueeze(-1)).exp().sum(-1).log()
    counted = tokens != numbers.ignore_index
    places = tokens.where(counted, 0).unsqueeze(-1)
    at_token = _cooled(numbers, x.gather(-1, places).squeeze(-1)) - largest
    found: Arrays = {"log_prob": (at_token - spread).where(counted, 0.0)}
    if numbers.entropy:
        below = _cooled(numbers, x) - largest.unsqueeze(-1)
        e = below.exp()
        terms = torch.where(e == 0, 0.0, e * below)
        found["entropy"] = spread - terms.sum(-1) / spread.exp()
    if numbers.logsumexp:
        found["logsumexp"] = largest.where(largest.isinf(), largest + spread)
    if numbers.log_sum_squares:
        twice = 2 * (_cooled(numbers, x) - largest.unsqueeze(-1))
        found["log_sum_squares"] = twice.exp().sum(-1).log() - 2 * spread
    return {**found, 0: largest, 1: spread}


def _gradient(
    how: tuple[TokenNumbers, tuple[bool, ...]],
    x: Tensor,
    tokens: Tensor,
    largest: Tensor,
    spread: Tensor,
    *more: Tensor,
) -> Arrays:
    """The gradient of the logits, see :func:`opfuse.ops.token_log_prob.row_logit_gradients`.

    Args:
        how: The numbers, and of which outputs there is a gradient.
        x: The logits.
        tokens: The tokens.
        largest: As :func:`_of_rows` gave it.
        spread: Likewise.
        more: Likewise the entropy and the logarithm of the sum of squares, if they are asked for;
            then the gradients.
    """
    (numbers, present), left = how, iter(more)
    entropy = next(left) if numbers.entropy else None
    squares = next(left) if numbers.log_sum_squares else None
    names = ["log_prob", "entropy", "logsumexp", "log_sum_squares"]
    asked = [True, numbers.entropy, numbers.logsumexp, numbers.log_sum_squares]
    outputs = [name for name, each in zip(names, asked, strict=True) if each]
    pairs = zip(outputs, present, strict=True)
    grads = {name: next(left).unsqueeze(-1) for name, is_there in pairs if is_there}
    z = capped(numbers, x)
    log_p = (cooled(z, numbers) - largest.unsqueeze(-1)) - spread.unsqueeze(-1)
    p = log_p.exp()
    dz = torch.zeros_like(p)
    if (dy := grads.get("log_prob")) is not None:
        share = torch.where((tokens != numbers.ignore_index).unsqueeze(-1), dy, 0.0)
        hit = torch.arange(x.shape[-1], device=x.device) == tokens.unsqueeze(-1)
        dz = torch.where(hit, share, 0.0) - p * share
    if (of_lse := grads.get("logsumexp")) is not None:
        dz = dz + p * of_lse
    if (of_entropy := grads.get("entropy")) is not None and entropy is not None:
        terms = torch.where(p == 0, 0.0, p * (log_p + entropy.unsqueeze(-1)))
        dz = dz - terms * of_entropy
    if (of_squares := grads.get("log_sum_squares")) is not None and squares is not None:
        q = (2 * log_p - squares.unsqueeze(-1)).exp()
        dz = dz + 2 * (q - p) * of_squares
    if numbers.softcap is not None:
        dz = dz * (1 - (z / numbers.softcap).square())
    return {"x": cooled(dz, numbers).to(x.dtype)}


def _cooled(numbers: TokenNumbers, x: Tensor) -> Tensor:
    return cooled(capped(numbers, x), numbers)


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    return "its functions give no top tokens" if ops[0].top_k else pays(ops, env)


JOINT = [
    Fusion(
        (TokenLogProb,),
        CompiledLogProb,
        _pays,
        priority=-100,
        name="compiled log-probabilities",
        needs=("rows",),
    )
]
