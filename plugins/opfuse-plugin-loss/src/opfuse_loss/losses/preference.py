"""Losses of preferences: DPO and its relatives, KTO, ORPO, CPO and SimPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from opfuse.ops.authoring import check_bool, expected, shows

from .sequences import (
    Found,
    SequenceLoss,
    Sequences,
    check_choice,
    check_numbers,
    check_range,
    either,
)

Pair = tuple[Tensor, Tensor]
"""A value of the chosen and of the rejected sequence of each pair."""
_REWARDS = ("chosen_reward", "rejected_reward", "margin", "accuracy")
_LOG_PROBS = ("chosen_log_prob", "rejected_log_prob")


def _both(values: Tensor, pairs: Tensor) -> Pair:
    """The values of the sequences of each pair; refuses numbers out of range."""
    check_numbers("pairs: sequence", pairs, len(values))
    check_numbers("pairs: minus sequence", -pairs, 1)
    return values.index_select(0, pairs[:, 0]), values.index_select(0, pairs[:, 1])


def _of_sequences(pairs: Tensor, *of_both: Tensor) -> Tensor:
    """The sum of what the pairs of each sequence give to it; the adjoint of :func:`_both`."""
    flat = torch.stack(of_both, 1).flatten()
    return flat.new_zeros(len(flat)).index_add(0, pairs.flatten(), flat)


def _metrics(beta: float, log_ratios: Pair, log_probs: Pair) -> tuple[Tensor, ...]:
    chosen, rejected = (beta * each for each in log_ratios)
    numbers = chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype)
    return tuple(each.mean() for each in (*numbers, *log_probs))


# A loss of each pair, and its derivatives


def _sigmoid(op: DPO, margin: Tensor) -> Pair:
    h = op.beta * margin
    return -logsigmoid(h), -op.beta * torch.sigmoid(-h)


def _smoothed(op: DPO | CPO, margin: Tensor) -> Pair:
    h, e = op.beta * margin, op.label_smoothing
    loss = -logsigmoid(h) * (1 - e) - logsigmoid(-h) * e
    return loss, op.beta * (torch.sigmoid(h) * e - torch.sigmoid(-h) * (1 - e))


def _hinge(op: DPO | CPO, margin: Tensor) -> Pair:
    loss = torch.relu(1 - op.beta * margin)
    return loss, -op.beta * (loss > 0).to(loss.dtype)


def _ipo(op: DPO | CPO, margin: Tensor) -> Pair:
    off = margin - 1 / (2 * op.beta)
    return off.square(), 2 * off


def _exo(op: DPO, margin: Tensor) -> Pair:
    h, e = op.beta * margin, op.label_smoothing
    p, q = torch.sigmoid(h), torch.sigmoid(-h)
    over, under = logsigmoid(h) - math.log1p(-e), logsigmoid(-h) - math.log(e)
    return p * over + q * under, op.beta * p * q * (over - under)


def _robust(op: DPO, margin: Tensor) -> Pair:
    h, e = op.beta * margin, op.label_smoothing
    loss = (logsigmoid(-h) * e - logsigmoid(h) * (1 - e)) / (1 - 2 * e)
    return loss, -op.beta * (torch.sigmoid(-h) * (1 - e) + torch.sigmoid(h) * e) / (1 - 2 * e)


def _discopop(op: DPO, margin: Tensor) -> Pair:
    h = op.beta * margin
    mix, logistic, exponential = torch.sigmoid(h / op.discopop_tau), -logsigmoid(h), torch.exp(-h)
    loss = logistic * (1 - mix) + exponential * mix
    slope = mix * (1 - mix) / op.discopop_tau * (exponential - logistic)
    return loss, op.beta * (slope - torch.sigmoid(-h) * (1 - mix) - exponential * mix)


_Three = tuple[Tensor, Tensor, Tensor]


def _nca(op: DPO, chosen: Tensor, rejected: Tensor) -> _Three:
    a, b = op.beta * chosen, op.beta * rejected
    loss = -logsigmoid(a) - (logsigmoid(-a) + logsigmoid(-b)) / 2
    return loss, op.beta * (1.5 * torch.sigmoid(a) - 1), op.beta * torch.sigmoid(b) / 2


def _bco(op: DPO, chosen: Tensor, rejected: Tensor) -> _Three:
    a, b = op.beta * chosen, op.beta * rejected
    loss = -logsigmoid(a) - logsigmoid(-b)
    return loss, -op.beta * torch.sigmoid(-a), op.beta * torch.sigmoid(b)


def _sppo(op: DPO, chosen: Tensor, rejected: Tensor) -> _Three:
    a, b = chosen - 0.5 / op.beta, rejected + 0.5 / op.beta
    return a.square() + b.square(), 2 * a, 2 * b


def _slope(h: Tensor) -> Tensor:
    """The derivative of the sigmoid."""
    return torch.sigmoid(h) * torch.sigmoid(-h)


def _apo_zero(op: DPO, chosen: Tensor, rejected: Tensor) -> _Three:
    a, b = op.beta * chosen, op.beta * rejected
    loss = torch.sigmoid(-a) + torch.sigmoid(b)
    return loss, -op.beta * _slope(a), op.beta * _slope(b)


def _apo_down(op: DPO, chosen: Tensor, rejected: Tensor) -> _Three:
    a, between = op.beta * chosen, op.beta * (chosen - rejected)
    of_margin = op.beta * _slope(between)
    return torch.sigmoid(a) + torch.sigmoid(-between), op.beta * _slope(a) - of_margin, of_margin


_OF_MARGIN: dict[str, Callable[[DPO, Tensor], Pair]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo,
    "robust": _robust,
    "discopop": _discopop,
}
_OF_RATIOS: dict[str, Callable[[DPO, Tensor, Tensor], _Three]] = {
    "nca_pair": _nca,
    "bco_pair": _bco,
    "sppo_hard": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
_NORMALIZED, _SORTED = ("ipo", "sigmoid_norm"), ("aot", "aot_unpaired")
_LOSS_TYPES = (*_OF_MARGIN, *_OF_RATIOS, *_SORTED, "sft")
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


class DPO(SequenceLoss):
    """Direct preference optimization (arXiv:2305.18290) and its relatives, with a reference model.

    Extra inputs: ``sequences``; ``pairs``, integers ``(pairs, 2)``, the numbers of the chosen and
    of the rejected sequence of each pair; ``reference``, the reference model's log-probabilities of
    the same tokens; with ``use_weighting`` ``log_sum_squares``, ``log(sum(p^2))`` of each token's
    row. Sequences have numbers below ``2 * pairs``; one may be in several pairs.

    With the log ratio ``r = sum(log p - log p_ref)`` of a sequence, the margin ``m = f(r_chosen) -
    f(r_rejected)`` and ``h = beta m``, the loss of a pair is, by ``loss_type``:

    - ``"sigmoid"``: ``-log s(h)``, where ``s`` is the sigmoid; ``"sigmoid_norm"`` with ``f(r)`` per
      token (Tulu 3, arXiv:2411.15124);
    - ``"hinge"``: ``max(0, 1 - h)`` (SLiC, arXiv:2305.10425);
    - ``"ipo"``: ``(m - 1 / (2 beta))^2``, with ``f(r)`` per token (arXiv:2310.12036);
    - ``"exo_pair"``: the KL divergence of ``(s(h), s(-h))`` from ``(1 - e, e)``, where ``e`` is
      ``label_smoothing`` (arXiv:2402.00856);
    - ``"robust"``: ``((1 - e) -log s(h) + e log s(-h)) / (1 - 2 e)`` (arXiv:2403.00409);
    - ``"discopop"``: the logistic and the exponential loss, mixed by ``s(h / discopop_tau)``
      (arXiv:2406.08414);
    - ``"nca_pair"`` (arXiv:2402.05369), ``"bco_pair"`` (arXiv:2404.04656), ``"sppo_hard"``
      (arXiv:2405.00675), ``"apo_zero"`` and ``"apo_down"`` (arXiv:2408.06266): of both log ratios;
    - ``"aot"`` and ``"aot_unpaired"``: of sorted log ratios (arXiv:2406.05882);
    - ``"sft"``: the mean of ``-log p`` over the tokens of chosen sequences.

    The result is the mean over pairs, NaN over none. The metrics are means over pairs.

    Args:
        loss_type: One of these, or several, which are added.
        loss_weights: Their weights; None: 1.
        beta: How strongly the policy is tied to the reference.
        label_smoothing: For ``"exo_pair"``, ``"robust"`` and the sorted ones, how many labels are
            wrong.
        f_divergence_type: What ``f`` is: ``"reverse_kl"``, ``r``; ``"forward_kl"``, ``1 -
            exp(-r)``; ``"js_divergence"``, ``log 2 + log s(r)``; ``"alpha_divergence"``,
            ``(exp((a - 1) r) - 1) / (a - 1)``, its exponent at most 80 (arXiv:2309.16240).
        f_alpha_divergence_coef: ``a`` of the last.
        ld_alpha: The weight of tokens of a sequence beyond the length of the other one of its pair,
            the shortest if there are several (LD-DPO, arXiv:2409.06411); None: 1.
        discopop_tau: The temperature of ``"discopop"``.
        use_weighting: Whether pairs are weighted by how probable the policy finds them, ``exp(mean(
            log p - log(sum(p^2))))`` of both sequences (WPO, arXiv:2406.11827).
        metrics: Whether to give the metrics.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range, or a divergence, a smoothing or a weighting that does
            not go with the loss; in a call, an extra input of another shape, or one that requires
            grad.
        IndexError: In a call, the number of a sequence out of range; on a GPU the device reports it
            later.
    """

    real_numbers = ("beta", "label_smoothing", "f_alpha_divergence_coef", "discopop_tau")

    def __init__(
        self,
        loss_type: str | Sequence[str] = "sigmoid",
        *,
        loss_weights: Sequence[float] | None = None,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        f_divergence_type: str = "reverse_kl",
        f_alpha_divergence_coef: float = 0.5,
        ld_alpha: float | None = None,
        discopop_tau: float = 0.05,
        use_weighting: bool = False,
        metrics: bool = False,
    ) -> None:
        check_bool(self, "use_weighting", use_weighting)
        inputs = {"sequences": "integer", "pairs": "integer", "reference": "floating"}
        inputs |= {"log_sum_squares": "floating"} if use_weighting else {}
        super().__init__(inputs, (*_REWARDS, *_LOG_PROBS), metrics)
        self._weighs = use_weighting
        self.beta, self.label_smoothing = beta, label_smoothing
        self.f_divergence_type = f_divergence_type
        self.f_alpha_divergence_coef, self.ld_alpha = f_alpha_divergence_coef, ld_alpha
        self.discopop_tau, self.loss_weights = discopop_tau, None
        self.loss_type = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
        self.loss_weights = loss_weights
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_type":
            for each in value:
                check_choice(self, name, each, _LOSS_TYPES)
        elif name == "f_divergence_type":
            check_choice(self, name, value, _DIVERGENCES)
        elif name == "loss_weights" and value is not None:
            value = tuple(map(float, value))
            if len(value) != len(self.loss_type):
                what = f"{len(self.loss_type)} loss_weights, one for each loss_type"
                raise ValueError(expected(self, what, len(value)))
        elif name in ("beta", "discopop_tau"):
            check_range(self, name, value, 0)
        elif name == "label_smoothing" or (name == "ld_alpha" and value is not None):
            check_range(self, name, value, 0, 1, ends="[]")
        super().__setattr__(name, value)

    use_weighting = property(lambda self: self._weighs, doc="Whether pairs are weighted.")
    extra_repr = shows("loss_type", "loss_weights", *real_numbers, "f_divergence_type", "ld_alpha")

    def _check_together(self) -> None:
        types, smoothing = set(self.loss_type), self.label_smoothing
        if not types:
            raise ValueError(expected(self, "at least one loss_type", "none"))
        if self.f_divergence_type != "reverse_kl" and (rest := types - {*_OF_MARGIN, "sft"}):
            what = f"a loss_type of the margin for {self.f_divergence_type}"
            raise ValueError(expected(self, what, ", ".join(sorted(rest))))
        if self.use_weighting and (rest := types & {*_SORTED}):
            what = "a loss_type that keeps pairs for use_weighting"
            raise ValueError(expected(self, what, ", ".join(sorted(rest))))
        if "exo_pair" in types and not 0 < smoothing < 1:
            raise ValueError(expected(self, "label_smoothing in (0, 1) for exo_pair", smoothing))
        if "robust" in types and not smoothing < 0.5:
            raise ValueError(expected(self, "label_smoothing below 0.5 for robust", smoothing))

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """See the base."""
        return (None, 2) if name == "pairs" else None

    def evaluate(  # type: ignore[override]
        self, x: Tensor, *, sequences: Tensor, pairs: Tensor, reference: Tensor, **more: Tensor
    ) -> Found:
        """See the base."""
        pairs = pairs.long()
        those = Sequences(sequences, pairs.numel(), x)
        kept = torch.where(those.counted, x, 0.0)
        log_ratios = torch.where(those.counted, x - reference, 0.0)
        shares = self._shares(those, pairs)
        ratios = _both(those.sum(shares * log_ratios), pairs)
        log_probs = _both(those.sum(shares * kept), pairs)
        lengths, weights = _both(those.lengths, pairs), torch.ones_like(ratios[0])
        if self.use_weighting:
            aligned = torch.where(those.counted, x - more["log_sum_squares"], 0.0)
            of_chosen, of_rejected = _both(those.mean(aligned.detach()).exp(), pairs)
            weights = of_chosen * of_rejected
        loss, gradient = x.new_zeros(()), torch.zeros_like(x)
        factors = self.loss_weights or (1.0,) * len(self.loss_type)
        for kind, factor in zip(self.loss_type, factors, strict=True):
            if kind == "sft":  # of all tokens, none of less weight
                chosen, _ = _both(those.sum(kept), pairs)
                share = factor * weights.mean() / lengths[0].sum()
                loss = loss - share * chosen.sum()
                ones = torch.ones_like(chosen)
                times = _of_sequences(pairs, ones, torch.zeros_like(ones))
                gradient = gradient - share * those.spread(times)
                continue
            losses, *slopes = self._of_pairs(kind, ratios, log_probs, lengths)
            loss = loss + factor * (losses * weights).mean()
            scale = factor * weights / max(1, len(pairs))
            of_sums = _of_sequences(pairs, *[scale * slope for slope in slopes])
            gradient = gradient + those.spread(of_sums) * shares
        return Found(loss, gradient, _metrics(self.beta, ratios, log_probs) if self.metrics else ())

    def _shares(self, those: Sequences, pairs: Tensor) -> Tensor:
        """How much of each token's log-probability counts."""
        ones = those.counted.to(those.lengths.dtype)
        if self.ld_alpha is None:
            return ones
        shorter = torch.minimum(*_both(those.lengths, pairs)).repeat_interleave(2)
        common = those.lengths.scatter_reduce(0, pairs.flatten(), shorter, "amin")
        return torch.where(those.places() < those.spread(common), ones, self.ld_alpha * ones)

    def _of_pairs(self, kind: str, ratios: Pair, log_probs: Pair, lengths: Pair) -> _Three:
        """The loss of each pair, and its derivatives by both log ratios."""
        if kind in _OF_RATIOS:
            return _OF_RATIOS[kind](self, *ratios)
        if kind in _SORTED:
            return _of_sorted(self, kind, ratios, log_probs)
        (a, da), (b, db) = map(self._score, ratios)
        if kind in _NORMALIZED:
            of_a, of_b = (each.clamp(min=1) for each in lengths)
            a, da, b, db = a / of_a, da / of_a, b / of_b, db / of_b
        loss, slope = _OF_MARGIN[kind](self, a - b)
        return loss, slope * da, -slope * db

    def _score(self, ratio: Tensor) -> Pair:
        """``f`` of a log ratio, and its derivative."""
        kind, power = self.f_divergence_type, self.f_alpha_divergence_coef - 1
        if kind == "forward_kl":
            inverse = torch.exp(-ratio)
            return 1 - inverse, inverse
        if kind == "js_divergence":
            return math.log(2) + logsigmoid(ratio), torch.sigmoid(-ratio)
        if kind == "reverse_kl" or abs(power) < 1e-6:
            return ratio, torch.ones_like(ratio)
        grown = torch.exp((power * ratio).clamp(max=80.0))
        return (grown - 1) / power, torch.where(power * ratio <= 80.0, grown, 0.0)


def _of_sorted(op: DPO, kind: str, ratios: Pair, log_probs: Pair) -> _Three:
    a, b = ratios
    if kind == "aot":
        a = log_probs[0] - log_probs[1]
        b = (a - (ratios[0] - ratios[1])).detach()  # of the reference
    (a, of_a), (b, of_b) = a.sort(), b.sort()
    loss, slope = _smoothed(op, a - b)
    da, db = (torch.empty_like(slope).scatter(0, place, slope) for place in (of_a, of_b))
    return loss, da, -da if kind == "aot" else -db


class KTO(SequenceLoss):
    """Kahneman-Tversky optimization (arXiv:2402.01306): single sequences, good or bad.

    Extra inputs: ``sequences``; ``desirable``, bools ``(sequences,)``; ``reference``, the reference
    model's log-probabilities of the same tokens; for ``"kto"`` ``kl``, without dimensions: the mean
    log ratio of sequences that do not fit their prompts, over all processes. What is below 0 counts
    as 0.

    With the log ratio ``r = sum(log p - log p_ref)``, and the sigmoid ``s``, the loss of a sequence
    is ``1 - s(beta (r - kl))`` if it is desirable, and else ``1 - s(beta (kl - r))``;
    ``"apo_zero_unpaired"`` has 0 for ``kl`` (arXiv:2408.06266). The result is the weighted mean,
    NaN over none.

    The metrics are the mean rewards ``beta r`` and log-probabilities of both kinds, and the margin;
    NaN where there is none of a kind.

    Args:
        loss_type: ``"kto"`` or ``"apo_zero_unpaired"``.
        beta: How strongly the policy is tied to the reference.
        desirable_weight: The weight of desirable sequences.
        undesirable_weight: The weight of the others.
        metrics: Whether to give the metrics.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range; in a call, an extra input of another shape, or one
            that requires grad.
        IndexError: In a call, the number of a sequence out of range; on a GPU the device reports it
            later.
    """

    real_numbers = ("beta", "desirable_weight", "undesirable_weight")

    def __init__(
        self,
        loss_type: str = "kto",
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        metrics: bool = False,
    ) -> None:
        check_choice(self, "loss_type", loss_type, ("kto", "apo_zero_unpaired"))
        inputs = {"sequences": "integer", "desirable": "bool", "reference": "floating"}
        inputs |= {"kl": "floating"} if loss_type == "kto" else {}
        super().__init__(inputs, (*_REWARDS[:3], *_LOG_PROBS), metrics)
        self._type, self.beta = loss_type, beta
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "beta":
            check_range(self, name, value, 0)
        elif name in self.real_numbers:
            check_range(self, name, value, 0, ends="[)")
        super().__setattr__(name, value)

    loss_type = property(lambda self: self._type, doc="Which loss it is.")
    extra_repr = shows("loss_type", *real_numbers)

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """See the base."""
        return {"desirable": (None,), "kl": ()}.get(name)

    def evaluate(  # type: ignore[override]
        self, x: Tensor, *, sequences: Tensor, desirable: Tensor, reference: Tensor, **more: Tensor
    ) -> Found:
        """See the base."""
        those = Sequences(sequences, len(desirable), x)
        ratios = those.sum(torch.where(those.counted, x - reference, 0.0))
        origin = more["kl"].clamp(min=0) if "kl" in more else 0.0
        signs = either(desirable, 1.0, -1.0, x)
        weights = either(desirable, self.desirable_weight, self.undesirable_weight, x)
        h = self.beta * signs * (ratios - origin)
        loss = (weights * torch.sigmoid(-h)).mean()
        slopes = -self.beta * signs * weights * _slope(h) / max(1, len(desirable))
        numbers: tuple[Tensor, ...] = ()
        if self.metrics:
            log_probs = those.sum(torch.where(those.counted, x, 0.0))
            good, bad = (
                [torch.where(kind, each, 0.0).sum() / kind.sum() for each in (ratios, log_probs)]
                for kind in (desirable, ~desirable)
            )
            rewards = self.beta * good[0], self.beta * bad[0]
            numbers = *rewards, rewards[0] - rewards[1], good[1], bad[1]
        return Found(loss, those.spread(slopes), numbers)


class ORPO(SequenceLoss):
    """Odds ratio preference optimization (arXiv:2403.07691), without a reference model.

    Extra inputs: ``sequences``, here with the tokens of the prompts; ``pairs``, as for
    :class:`DPO`; ``responses``, bools in the shape of the log-probabilities, True where a token is
    of the response.

    With the mean log-probability ``q`` of a response and its log odds ``q - log(1 - exp(q))``, the
    loss is the mean of ``-log p`` over all tokens of the chosen sequences, plus ``beta`` times the
    mean over pairs of ``-log s(log odds of the chosen - log odds of the rejected)``, where ``s`` is
    the sigmoid. A response without tokens, or one that is certain, has no odds: the result is not
    finite.

    The metrics are those of :class:`DPO` with rewards ``beta q``, then the mean of ``-log p``, the
    mean ``log s(...)`` and the mean difference of log odds.

    Args:
        beta: The weight of the odds ratio.
        metrics: Whether to give the metrics.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range; in a call, an extra input of another shape.
        IndexError: In a call, the number of a sequence out of range; on a GPU the device reports it
            later.
    """

    real_numbers = ("beta",)

    def __init__(self, *, beta: float = 0.1, metrics: bool = False) -> None:
        inputs = {"sequences": "integer", "pairs": "integer", "responses": "bool"}
        names = *_REWARDS, *_LOG_PROBS, "nll", "log_odds_ratio", "log_odds_margin"
        super().__init__(inputs, names, metrics)
        self.beta = beta

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "beta":
            check_range(self, name, value, 0, ends="[)")
        super().__setattr__(name, value)

    extra_repr = shows("beta")

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """See the base."""
        return (None, 2) if name == "pairs" else None

    def evaluate(  # type: ignore[override]
        self, x: Tensor, *, sequences: Tensor, pairs: Tensor, responses: Tensor
    ) -> Found:
        """See the base."""
        pairs = pairs.long()
        whole = Sequences(sequences, pairs.numel(), x)
        answers = Sequences(sequences.long().where(responses, -1), pairs.numel(), x)
        means = answers.sum(torch.where(answers.counted, x, 0.0)) / answers.lengths
        log_probs = _both(means, pairs)
        odds, slopes = zip(*map(_log_odds, log_probs), strict=True)
        margin = odds[0] - odds[1]
        ratio = logsigmoid(margin)
        chosen, _ = _both(whole.sum(torch.where(whole.counted, x, 0.0)), pairs)
        count = _both(whole.lengths, pairs)[0].sum()
        nll = -chosen.sum() / count
        of_margin = -self.beta * torch.sigmoid(-margin) / max(1, len(pairs))
        of_means = _of_sequences(pairs, of_margin * slopes[0], -of_margin * slopes[1])
        ones = torch.ones_like(chosen)
        times = _of_sequences(pairs, ones, torch.zeros_like(ones))
        gradient = answers.spread(of_means / answers.lengths) - whole.spread(times) / count
        numbers: tuple[Tensor, ...] = ()
        if self.metrics:
            shared = _metrics(self.beta, log_probs, log_probs)
            numbers = *shared, nll, ratio.mean(), margin.mean()
        return Found(nll - self.beta * ratio.mean(), gradient, numbers)


def _log_odds(log_p: Tensor) -> Pair:
    """``log(p / (1 - p))`` and its derivative, ``1 / (1 - p)``."""
    rest = -torch.expm1(log_p)
    # where p is small, log1p keeps it; where it is close to 1, expm1 keeps the rest
    small = log_p < -math.log(2)
    log_rest = torch.where(small, torch.log1p(-log_p.exp()), rest.where(~small, 0.5).log())
    return log_p - log_rest, 1 / rest


_OF_CPO = {"sigmoid": _smoothed, "hinge": _hinge, "ipo": _ipo, "simpo": _smoothed}


class CPO(SequenceLoss):
    """Contrastive preference optimization (arXiv:2401.08417) and SimPO, without a reference model.

    Extra inputs: ``sequences`` and ``pairs``, as for :class:`DPO`.

    With the log-probability ``q`` of a sequence, its reward ``r = q``, the margin ``m = r_chosen -
    r_rejected`` and the sigmoid ``s``, the loss of a pair is, by ``loss_type``:

    - ``"sigmoid"``: ``-(1 - e) log s(beta m) - e log s(-beta m)``, where ``e`` is
      ``label_smoothing``;
    - ``"simpo"``: the same of ``beta m - simpo_gamma``, where ``q`` is per token (arXiv:2405.14734;
      SimPO itself has ``cpo_alpha=0``);
    - ``"hinge"``: ``max(0, 1 - beta m)``;
    - ``"ipo"``: ``(m - 1 / (2 beta))^2``, where ``q`` is per token.

    The result is the mean over pairs, plus ``cpo_alpha`` times the mean of ``-log p`` over the
    tokens of chosen sequences; NaN over none. The metrics are those of :class:`DPO` with rewards
    ``beta r``, then the mean of ``-log p``.

    Args:
        loss_type: One of these.
        beta: The scale of rewards.
        label_smoothing: How many labels are wrong, for ``"sigmoid"`` and ``"simpo"``.
        simpo_gamma: The margin by which the chosen one is to win in ``"simpo"``.
        cpo_alpha: The weight of ``-log p``.
        alpha: Makes the reward ``(1 - exp(-alpha q)) / alpha`` (AlphaPO, arXiv:2501.03884); 0:
            ``q``.
        metrics: Whether to give the metrics.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range; in a call, an extra input of another shape.
        IndexError: In a call, the number of a sequence out of range; on a GPU the device reports it
            later.
    """

    real_numbers = ("beta", "label_smoothing", "simpo_gamma", "cpo_alpha", "alpha")

    def __init__(
        self,
        loss_type: str = "sigmoid",
        *,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        simpo_gamma: float = 0.5,
        cpo_alpha: float = 1.0,
        alpha: float = 0.0,
        metrics: bool = False,
    ) -> None:
        inputs = {"sequences": "integer", "pairs": "integer"}
        super().__init__(inputs, (*_REWARDS, *_LOG_PROBS, "nll"), metrics)
        self.loss_type, self.beta, self.label_smoothing = loss_type, beta, label_smoothing
        self.simpo_gamma, self.cpo_alpha, self.alpha = simpo_gamma, cpo_alpha, alpha

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_type":
            check_choice(self, name, value, _OF_CPO)
        elif name == "label_smoothing":
            check_range(self, name, value, 0, 1, ends="[]")
        elif name in ("simpo_gamma", "alpha"):
            check_range(self, name, value, -math.inf)
        elif name in self.real_numbers:
            check_range(self, name, value, 0, ends="[)" if name == "cpo_alpha" else "()")
        super().__setattr__(name, value)

    extra_repr = shows("loss_type", *real_numbers)

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """See the base."""
        return (None, 2) if name == "pairs" else None

    def evaluate(  # type: ignore[override]
        self, x: Tensor, *, sequences: Tensor, pairs: Tensor
    ) -> Found:
        """See the base."""
        pairs = pairs.long()
        those = Sequences(sequences, pairs.numel(), x)
        sums = those.sum(torch.where(those.counted, x, 0.0))
        per_token = self.loss_type in ("ipo", "simpo")
        sizes = those.lengths.clamp(min=1) if per_token else torch.ones_like(sums)
        log_probs = _both(sums / sizes, pairs)
        (a, da), (b, db) = map(self._reward, log_probs)
        gamma = self.simpo_gamma / self.beta if self.loss_type == "simpo" else 0.0
        losses, slopes = _OF_CPO[self.loss_type](self, a - b - gamma)
        slopes = slopes / max(1, len(pairs))
        gradient = those.spread(_of_sequences(pairs, slopes * da, -slopes * db) / sizes)
        chosen, _ = _both(sums, pairs)
        count = _both(those.lengths, pairs)[0].sum()
        nll, loss = -chosen.sum() / count, losses.mean()
        if self.cpo_alpha:
            loss = loss + self.cpo_alpha * nll
            ones = torch.ones_like(chosen)
            times = _of_sequences(pairs, ones, torch.zeros_like(ones))
            gradient = gradient - self.cpo_alpha / count * those.spread(times)
        numbers = (*_metrics(self.beta, (a, b), log_probs), nll) if self.metrics else ()
        return Found(loss, gradient, numbers)

    def _reward(self, log_prob: Tensor) -> Pair:
        """The reward of a log-probability, and its derivative."""
        if not self.alpha:
            return log_prob, torch.ones_like(log_prob)
        return -torch.expm1(-self.alpha * log_prob) / self.alpha, (-self.alpha * log_prob).exp()
