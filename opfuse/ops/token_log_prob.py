"""Log-probabilities of chosen tokens: TokenLogProb."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.overwriting import may_write
from ._common import check_bool, check_size, expected, rows_of, shows
from ._samples import samples
from .arithmetic import filled, multiplied, reusable, widened, with_shares
from .cross_entropy import RowLoss, Spare, capped, gradients_by_parts, parts, uncapped


class TokenNumbers(NamedTuple):
    """The numbers of a :class:`TokenLogProb`, named like its arguments.

    The backward uses those of its forward.
    """

    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    entropy: bool = False
    logsumexp: bool = False
    top_k: int = 0
    log_sum_squares: bool = False


class TokenLogProb(RowLoss):
    """The log-probabilities of tokens under logits, as DPO, GRPO and others need them.

    Takes logits ``(..., classes)`` and one extra input, the chosen tokens: integers of shape
    ``(...)``. Gives ``z[token] - logsumexp(z)`` in the shape of the tokens, in fp32, for logits in
    fp64 in fp64, where ``z`` is the logits over the temperature. The extra outputs are those
    that are asked for, in this order, in the same dtype, each ``(...)`` or ``(..., top_k)``:

    - the entropy ``-sum(p log p)`` of each row;
    - its ``logsumexp(z)``;
    - its ``log(sum(p^2))``;
    - the ``top_k`` most probable tokens, int64, and their log-probabilities, the largest first.

    All of them but the tokens have gradients.

    Args:
        temperature: What logits are divided by.
        softcap: Logits are ``softcap * tanh(logits / softcap)`` first (Gemma 2); None: as they are.
        ignore_index: Rows with this token have a log-probability of 0, and so no gradient of it.
        entropy: Whether to give the entropy.
        logsumexp: Whether to give it.
        top_k: How many of the most probable tokens to give.
        log_sum_squares: Whether to give ``log(sum(p^2))``, which WPO needs (arXiv:2406.11827).

    Raises:
        TypeError: An argument of the wrong type; in a call, tokens that are not integers.
        ValueError: An argument out of range; in a call, tokens of another shape, or fewer classes
            than ``top_k``.
        IndexError: In a call, a token that is not a class; on a GPU the device reports it later.
    """

    batch_invariant = ("rows",)
    sample_inputs = samples({}, {"temperature": 0.7, "softcap": 3.0, "ignore_index": 1})
    real_numbers = ("temperature",)
    _numbers = TokenNumbers
    _ranges = RowLoss._ranges | {
        "temperature": ("a finite temperature above 0", lambda number: 0 < number < math.inf),
        "softcap": ("a finite softcap above 0", lambda cap: cap is None or 0 < cap < math.inf),
    }
    _targets = "tokens"

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        ignore_index: int = -100,
        entropy: bool = False,
        logsumexp: bool = False,
        top_k: int = 0,
        log_sum_squares: bool = False,
    ) -> None:
        flags = {"entropy": entropy, "logsumexp": logsumexp, "log_sum_squares": log_sum_squares}
        for name, value in flags.items():
            check_bool(self, name, value)
        top_k = check_size(self, "top_k", top_k)
        self.num_extra_outputs = sum(flags.values()) + 2 * bool(top_k)
        super().__init__()
        self._asked = entropy, logsumexp, top_k, log_sum_squares
        self.temperature, self.softcap, self.ignore_index = temperature, softcap, ignore_index

    entropy = property(lambda self: self._asked[0], doc="Whether the entropy is an extra output.")
    logsumexp = property(lambda self: self._asked[1], doc="Whether it is an extra output.")
    top_k = property(lambda self: self._asked[2], doc="How many of the most probable tokens are.")
    log_sum_squares = property(lambda self: self._asked[3], doc="Whether it is an extra output.")
    extra_repr = shows(*TokenNumbers._fields)

    def check_targets(self, targets: Tensor, shape: torch.Size) -> None:
        """Refuse tokens that do not fit logits of this shape; for fusions too.

        Raises:
            ValueError: They have another shape, or there are fewer classes than ``top_k``.
        """
        super().check_targets(targets, shape)
        if self.top_k > shape[-1]:
            raise ValueError(expected(self, f"at least {self.top_k} classes, as top_k", shape[-1]))

    def _outputs(self, ctx: Any, logits: Tensor, targets: Tensor, numbers: Any) -> Sequence[Tensor]:
        outputs = row_log_probs(rows_of(logits), targets.flatten(), numbers)
        return [output.view((*targets.shape, *output.shape[1:])) for output in outputs]

    def _row_gradients(
        self, rows: Tensor, targets: Tensor, grads: Sequence[Tensor | None], numbers: Any
    ) -> Tensor:
        """``dz = onehot(token) dy - p dy``, and the other outputs' shares; see below."""
        grads = grads_of_rows(grads, targets)
        return row_logit_gradients(rows, targets.flatten(), grads, numbers)


# The arithmetic, row by row; for fusions too


def row_log_probs(logits: Tensor, tokens: Tensor, numbers: TokenNumbers) -> tuple[Tensor, ...]:
    """The log-probability of each row's token, and the extra outputs; in fp32 for half precision.

    Args:
        logits: ``(rows, classes)``.
        tokens: ``(rows,)``.
        numbers: Of the op.
    """
    found = [_of_rows(numbers, *part) for part in parts(logits, tokens.long())]
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))


def _of_rows(
    numbers: TokenNumbers, spare: Spare, logits: Tensor, tokens: Tensor
) -> tuple[Tensor, ...]:
    z = capped(widened(logits, spare[0]), numbers.softcap, spare[0])
    z = cooled(z, numbers, spare[0])
    log_p = torch.log_softmax(z, -1, out=spare[1])
    # it refuses tokens that are not classes, without a sync with the host
    found = [-F.nll_loss(log_p, tokens, ignore_index=numbers.ignore_index, reduction="none")]
    if numbers.logsumexp:
        found.append(z.logsumexp(-1))
    if numbers.log_sum_squares:
        found.append((2 * log_p).logsumexp(-1))
    if numbers.top_k:
        values, top = log_p.topk(numbers.top_k, -1)
        found += [top, values]
    if numbers.entropy:  # the last, since it may overwrite
        p = torch.softmax(z, -1, out=spare[2])  # cheaper than exp(log_p)
        found.insert(1, -_weighted(p, log_p)[1])
    return tuple(found)


def cooled(z: Tensor, numbers: TokenNumbers, out: Tensor | None = None) -> Tensor:
    """Logits, or gradients of them, over the temperature; in ``out`` if that is given."""
    return z if numbers.temperature == 1 else torch.div(z, numbers.temperature, out=out)


def possible(log_p: Tensor) -> Tensor:
    """Logarithms without -inf, which times 0 is NaN; it overwrites them if it may.

    -1000 is below the logarithms of all numbers above 0.
    """
    return torch.clamp(log_p, min=-1000.0, out=reusable(log_p))


def _weighted(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``p x``, and 0 where ``p`` is 0, and its sums; it overwrites ``x`` if it may.

    On a CPU the sums tell whether ``x`` has -inf; elsewhere that would wait for the device.
    """
    if torch.is_grad_enabled():
        x = p * possible(x)
        return x, x.sum(-1)
    x = multiplied(x, p)
    sums = x.sum(-1)
    if p.is_cpu and may_write(p, x) and bool(sums.isfinite().all()):
        return x, sums
    x = filled(x, p == 0, 0.0)
    return x, x.sum(-1)


def row_logit_gradients(
    logits: Tensor,
    tokens: Tensor,
    grads: Sequence[Tensor | None],
    numbers: TokenNumbers,
    *,
    in_place: bool = False,
) -> Tensor:
    """The gradient of the logits, in their dtype.

    Of ``z`` it is ``onehot(token) dy - p dy`` for the log-probability, as for each of the top
    tokens, ``-p (log p + H) dH`` for the entropy, ``p dl`` for the logsumexp, and ``2 (q - p) ds``
    for the log of ``sum(p^2)``, where ``q`` is ``p^2`` over that sum.

    Args:
        logits: ``(rows, classes)``.
        tokens: ``(rows,)``.
        grads: Of the output and of the extra outputs, ``(rows, ...)``; None: there is none.
        numbers: Of the forward.
        in_place: Whether it overwrites the logits.
    """
    of_part = functools.partial(_gradients_of, numbers)
    return gradients_by_parts(of_part, logits, tokens, *grads, in_place=in_place)


def _gradients_of(
    numbers: TokenNumbers, spare: Spare, logits: Tensor, tokens: Tensor, *grads: Tensor | None
) -> Tensor:
    z = capped(widened(logits, spare[0]), numbers.softcap, spare[0])
    _, of_entropy, _, of_squares, of_top = _named(grads, numbers)
    below: Any = None
    if of_squares is of_top is None:  # in fewer passes than with logarithms
        p = cooled(z, numbers, spare[1])
        if of_entropy is not None and p.shape[-1]:
            largest = p.detach().amax(-1, keepdim=True)
            p = below = torch.sub(p, largest, out=spare[1])
        p = torch.softmax(p, -1, out=spare[2])
    else:
        below = torch.log_softmax(cooled(z, numbers, spare[2]), -1, out=spare[1])
        p = torch.exp(below, out=spare[2])
    log_squares = None if of_squares is None else (2 * below).logsumexp(-1)
    top = None if of_top is None else below.topk(numbers.top_k, -1)[1]
    found = RowStatistics(None, log_squares, top)
    given = found, z, below, p, tokens.long(), grads, numbers
    return gradients_from(*given, lambda *all_here: all_here, spare)


def _named(grads: Sequence[Tensor | None], numbers: TokenNumbers) -> tuple[Tensor | None, ...]:
    """Those of log-probability, entropy, logsumexp, squares and top tokens; None: there is none."""
    dy, *extras = grads
    asked = numbers.entropy, numbers.logsumexp, numbers.log_sum_squares
    given = iter(extras)
    found = [next(given) if each else None for each in asked]
    return dy, *found, extras[-1] if numbers.top_k else None


class RowStatistics(NamedTuple):
    """What the gradient of some rows needs to know of all their classes; None: it does not.

    Attributes:
        entropy: ``(rows,)``; None: all classes are here, so it follows from them.
        log_squares: ``log(sum(p^2))``, ``(rows,)``.
        top: The most probable tokens, ``(rows, top_k)``.
    """

    entropy: Tensor | None
    log_squares: Tensor | None
    top: Tensor | None


Places = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def gradients_from(
    found: RowStatistics,
    z: Tensor,
    below: Tensor | None,
    p: Tensor,
    tokens: Tensor,
    grads: Sequence[Tensor | None],
    numbers: TokenNumbers,
    places_of: Places,
    spare: Spare = (None, None, None),
) -> Tensor:
    """The gradient of logits, of all classes or of some; see :func:`row_logit_gradients`.

    Args:
        found: The statistics of the rows.
        z: The capped logits, ``(rows, classes)``.
        below: The logits over the temperature less a number of each row, of the same shape. That
            number is their ``logsumexp`` if there is a gradient of the squares, or a statistic of
            the entropy. None: no gradient needs them. Overwritten if it may be.
        p: The probabilities; overwritten likewise.
        tokens: ``(rows,)``, int64.
        grads: As there.
        numbers: As there.
        places_of: Gives the columns of tokens, and their shares, 0 where they have no column.
        spare: See :func:`opfuse.ops.cross_entropy.parts`; the first may hold ``z``.
    """
    dy, of_entropy, of_lse, of_squares, of_top = _named(grads, numbers)
    factor, chosen = p.new_zeros(len(p)), []
    if dy is not None:
        counted = tokens != numbers.ignore_index
        share = torch.where(counted, dy.to(p.dtype), 0.0)
        factor = factor - share
        chosen.append((tokens.where(counted, 0)[:, None], share[:, None]))
    if of_lse is not None:
        factor = factor + of_lse
    if of_top is not None and found.top is not None:
        factor = factor - of_top.sum(-1)
        chosen.append((found.top, of_top.to(p.dtype)))
    added: list[tuple[Tensor, Tensor]] = []
    slopes = factor[:, None]
    if of_squares is not None and found.log_squares is not None and below is not None:
        q = (2 * below - found.log_squares[:, None]).exp()
        added.append((q - p, 2 * of_squares[:, None]))
    if of_entropy is not None and below is not None:
        of_rows = of_entropy.to(p.dtype)[:, None]
        terms, mean = _weighted(p, below)
        mean = mean if found.entropy is None else -found.entropy
        slopes = slopes + of_rows * mean[:, None]
        added.append((terms, -of_rows))
    dz = multiplied(p, slopes)
    for each in added:
        dz = torch.addcmul(dz, *each, out=reusable(dz, *each))
    if chosen and p.shape[-1]:
        of_tokens, shares = [torch.cat(each, 1) for each in zip(*chosen, strict=True)]
        dz = with_shares(dz, *places_of(of_tokens, shares))
    dz = uncapped(dz, z, numbers.softcap, spare[0])
    return cooled(dz, numbers, None if spare[0] is None else dz)


def grads_of_rows(grads: Sequence[Tensor | None], tokens: Tensor) -> list[Tensor | None]:
    """The gradients of outputs, one row for each token.

    Args:
        grads: Of the output and of the extra outputs, in their shapes; None: there is none.
        tokens: Of any shape.
    """
    rows = tokens.numel()
    return [
        None if grad is None else grad.reshape((rows, *grad.shape[tokens.ndim :])) for grad in grads
    ]
