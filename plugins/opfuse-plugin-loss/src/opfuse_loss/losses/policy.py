"""Losses of rewards: GRPO and its relatives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from opfuse.ops.authoring import check_bool, expected, shows

from .sequences import Found, SequenceLoss, Sequences, check_choice, check_range, either

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_LOSS_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
_OR_NONE = ("epsilon_high", "delta", "max_completion_length", "off_policy_mask_threshold")
_RANGES = {
    **dict.fromkeys(("beta", "epsilon", "epsilon_high"), (0.0, math.inf, "[)")),
    **dict.fromkeys(("delta", "max_completion_length"), (0.0, math.inf, "()")),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), (0.0, math.inf, "()")),
    **dict.fromkeys(("vespo_k_pos", "vespo_k_neg"), (0.0, math.inf, "[)")),
    **dict.fromkeys(("vespo_lambda_pos", "vespo_lambda_neg"), (1e-4, math.inf, "[)")),
    **dict.fromkeys(("entropy_coef", "off_policy_mask_threshold"), (-math.inf, math.inf, "()")),
    "top_entropy_quantile": (0.0, 1.0, "[]"),
}
_UNUSED = {"beta": 0.0, "entropy_coef": 0.0, "top_entropy_quantile": 1.0}
_OPTIONAL = ("old_log_probs", "sampling_log_probs", "importance_ratio", "num_items")


class GRPO(SequenceLoss):
    """Group relative policy optimization (arXiv:2402.03300) and its relatives.

    Extra inputs, in the order of ``input_names``: ``sequences``; ``advantages``, ``(sequences,)``;
    ``reference`` with a ``beta`` other than 0, the reference model's log-probabilities of the same
    tokens; those of ``given``; ``entropy`` where it is used, that of each token's row.

    A token has the ratio ``c = exp(log p - log p_old)``, or with ``importance_sampling_level=
    "sequence"`` its sequence has one, of the mean difference (GSPO, arXiv:2507.18071). With the
    advantage ``A`` of its sequence, the loss of a token is, by ``loss_type``:

    - ``"grpo"``, ``"bnpo"``, ``"dr_grpo"``, ``"dapo"``, ``"luspo"``: ``-min(min(c, delta) A,
      clamp(c, 1 - epsilon, 1 + epsilon_high) A)``;
    - ``"cispo"``: ``-min(c, epsilon_high) A log p``, without a gradient through ``c``
      (arXiv:2506.13585);
    - ``"sapo"``: ``-4 / t s(t (c - 1)) A``, where ``s`` is the sigmoid, and ``t`` the temperature
      for the sign of ``A`` (arXiv:2511.20347);
    - ``"vespo"``: ``-w A log p``, where ``w = exp(lambda (1 - C)) C^k`` has no gradient, and ``C``
      is the ratio of whole sequences (arXiv:2602.10693).

    Then it is multiplied by ``importance_ratio``, and is 0 where a mask says so. ``beta`` times
    ``exp(d) - d - 1``, with ``d = log p_ref - log p``, is added (Schulman's estimate of the KL
    divergence), times ``c`` with ``use_bias_correction_kl``. The result is

    - for ``"grpo"`` and ``"sapo"`` the mean over sequences of the mean over tokens;
    - for ``"bnpo"`` the mean over all tokens; for ``"dapo"`` (arXiv:2503.14476), ``"cispo"`` and
      ``"vespo"`` too, or the sum over ``num_items``;
    - for ``"dr_grpo"`` the sum over ``max_completion_length`` times the number of sequences
      (arXiv:2503.20783);
    - for ``"luspo"`` the mean over sequences of the sum over tokens (arXiv:2602.05261).

    It is 0 if there are no tokens. Empty sequences count as sequences.

    The metrics are means over tokens, for ratios of sequences over sequences: ``kl`` with a
    ``beta``, ``entropy`` where it is an input, how many ratios are clipped and lose their gradient
    (``clip_low``, ``clip_high``, ``clip_region``; of ``"cispo"`` only ``clip_high``), and ``w`` of
    ``"vespo"``.

    Args:
        loss_type: One of these.
        given: Which extra inputs there are besides: ``"old_log_probs"``, those of the policy that
            is improved, else the present ones are taken, without gradient;
            ``"sampling_log_probs"``, those of the program that drew the tokens, for
            ``off_policy_mask_threshold``, else the old ones; ``"importance_ratio"``, a factor of
            each token, for ``"vespo"`` of its ``C``; ``"num_items"``, without dimensions, the
            tokens of all batches and processes that are summed up, over how many are averaged.
        importance_sampling_level: ``"token"`` or ``"sequence"``.
        beta: The weight of the KL divergence. Whether it is 0 cannot change later.
        epsilon: How far below 1 a ratio may be.
        epsilon_high: How far above; None: as ``epsilon``. For ``"cispo"`` the largest ratio.
        delta: The largest ratio for a negative advantage (arXiv:2505.07291); None: any.
        use_bias_correction_kl: Whether the KL divergence is multiplied by the ratio
            (arXiv:2512.02556).
        max_completion_length: The longest response, for ``"dr_grpo"``.
        sapo_temperature_pos: ``t`` for positive advantages.
        sapo_temperature_neg: ``t`` for others.
        vespo_k_pos: ``k`` for advantages of at least 0.
        vespo_lambda_pos: ``lambda`` for these.
        vespo_k_neg: ``k`` for negative ones.
        vespo_lambda_neg: ``lambda`` for these, at least 1e-4.
        off_policy_mask_threshold: A sequence with a negative advantage counts only if the mean of
            ``log p_sampling - log p`` is at most this (arXiv:2512.02556); None: all do.
        top_entropy_quantile: The part of all tokens that count, those of most entropy
            (arXiv:2506.01939). The KL divergence is of all.
        entropy_coef: The mean entropy of the tokens that count is subtracted, times this. The
            entropy then gets a gradient. Whether it is 0 cannot change later.
        metrics: Whether to give the metrics.

    Raises:
        TypeError: An argument of the wrong type; in a call, an extra input of another kind.
        ValueError: An argument out of range; in a call, an extra input of another shape, or one
            that requires grad and is not the entropy.
        IndexError: In a call, the number of a sequence out of range; on a GPU the device reports it
            later.
    """

    real_numbers = tuple(name for name in _RANGES if name not in _OR_NONE)

    def __init__(
        self,
        loss_type: str = "dapo",
        *,
        given: Iterable[str] = (),
        importance_sampling_level: str = "token",
        beta: float = 0.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = True,
        max_completion_length: float | None = None,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        off_policy_mask_threshold: float | None = None,
        top_entropy_quantile: float = 1.0,
        entropy_coef: float = 0.0,
        metrics: bool = False,
    ) -> None:
        self._fixed = loss_type, tuple(given), importance_sampling_level
        self._uses = bool(beta), bool(entropy_coef) or top_entropy_quantile != 1
        super().__init__(self._inputs(), self._metric_names(), metrics)
        self.beta, self.entropy_coef = beta, entropy_coef
        self.epsilon, self.epsilon_high, self.delta = epsilon, epsilon_high, delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.max_completion_length = max_completion_length
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.top_entropy_quantile = top_entropy_quantile

    loss_type = property(lambda self: self._fixed[0], doc="Which loss it is.")
    given = property(lambda self: self._fixed[1], doc="Which optional extra inputs there are.")
    importance_sampling_level = property(lambda self: self._fixed[2], doc="What has a ratio.")
    extra_repr = shows(
        "loss_type", "given", "importance_sampling_level", "beta", "epsilon", *_OR_NONE
    )

    def _inputs(self) -> dict[str, str]:
        """The extra inputs; refuses what is not known."""
        check_choice(self, "loss_type", self.loss_type, _LOSS_TYPES)
        for name in self.given:
            check_choice(self, "given", name, _OPTIONAL)
        level = self.importance_sampling_level
        check_choice(self, "importance_sampling_level", level, ("token", "sequence"))
        names = ["reference"] * self._uses[0] + list(dict.fromkeys(self.given))
        names = ["advantages", *names, *["entropy"] * self._uses[1]]
        return {"sequences": "integer", **dict.fromkeys(names, "floating")}

    def _metric_names(self) -> list[str]:
        names = ["kl"] * self._uses[0] + ["entropy"] * self._uses[1]
        if self.loss_type in _CLIPPED:
            return [*names, "clip_low", "clip_high", "clip_region"]
        return names + {"cispo": ["clip_high"], "vespo": ["weight"]}.get(self.loss_type, [])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_completion_length" and value is None and self.loss_type == "dr_grpo":
            raise ValueError(expected(self, f"a {name} for dr_grpo", value))
        if name == "use_bias_correction_kl":
            check_bool(self, name, value)
        elif name in _RANGES and not (value is None and name in _OR_NONE):
            low, high, ends = _RANGES[name]
            value = check_range(self, name, value, low, high, ends=ends)
        if name in _UNUSED and not self._uses[name != "beta"] and value != _UNUSED[name]:
            what = f"{name} to stay {_UNUSED[name]}, as there is no extra input for it"
            raise ValueError(expected(self, what, value))
        super().__setattr__(name, value)

    def shape_of(self, name: str) -> tuple[int | None, ...] | None:
        """See the base."""
        return {"advantages": (None,), "num_items": ()}.get(name)

    def evaluate(  # type: ignore[override]
        self, x: Tensor, *, sequences: Tensor, advantages: Tensor, **more: Tensor
    ) -> Found:
        """See the base."""
        those = Sequences(sequences, len(advantages), x)
        count = those.lengths.sum().clamp(min=1)
        items = more.pop("num_items", count).clamp(min=1)
        x, *others = (torch.where(those.counted, each, 0.0) for each in (x, *more.values()))
        tokens = dict(zip(more, others, strict=True))
        log_ratio = x - tokens.get("old_log_probs", x.detach())
        whole = self.importance_sampling_level == "sequence"
        ratio = (those.mean(log_ratio) if whole else log_ratio).exp()
        c = those.spread(ratio) if whole else ratio
        numbers: dict[str, Tensor] = {}
        if self.loss_type == "vespo":
            ratios = tokens.pop("importance_ratio", None)
            weight = self._gamma(those, log_ratio, advantages, ratios)
            numbers["weight"] = weight.mean()
            losses = _weighted(those.spread(weight * advantages), x)
        else:
            losses = self._policy(x, c, those.spread(advantages))
        top = self._top(those, tokens.get("entropy"))
        factor = top * self._factor(those, x, advantages, tokens)
        by_c: Tensor
        loss, by_x, by_c = (factor * each for each in losses)
        if "reference" in tokens:
            kl, of_x, of_c = self._divergence(tokens["reference"] - x, c, whole)
            loss, by_x, by_c = loss + self.beta * kl, by_x + self.beta * of_x, by_c + of_c
            numbers["kl"] = kl.sum() / count
        weights = self._token_weights(those, items)
        total, by_c = (weights * loss).sum(), weights * by_c
        gradient = weights * by_x + (those.spread(those.mean(by_c)) if whole else by_c)
        of_entropy = None
        if "entropy" in tokens:
            share = top / top.sum().clamp(min=1)
            total = total - self.entropy_coef * (share * tokens["entropy"]).sum()
            of_entropy = -self.entropy_coef * share
            numbers["entropy"] = tokens["entropy"].sum() / count
        if self.metrics:
            flags = self._clipped(ratio, advantages if whole else those.spread(advantages))
            size = max(1, len(advantages)) if whole else count
            numbers |= {name: flag.to(x.dtype).sum() / size for name, flag in flags.items()}
        return Found(total, gradient, tuple(numbers[n] for n in self.metric_names), of_entropy)

    # Each of these gives the loss of each token, and its derivatives by log p and by log c

    def _policy(self, x: Tensor, c: Tensor, advantages: Tensor) -> _Terms:
        if self.loss_type == "cispo":
            return _weighted(c.clamp(max=self._high).detach() * advantages, x)
        if self.loss_type == "sapo":
            t = either(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, c)
            gate = torch.sigmoid(t * (c - 1))
            slope = -4 * gate * (1 - gate) * c * advantages
            return -4 / t * gate * advantages, torch.zeros_like(x), slope
        low, high = 1 - self.epsilon, 1 + self._high
        most = math.inf if self.delta is None else self.delta
        one, other = c.clamp(max=most) * advantages, c.clamp(low, high) * advantages
        moves = torch.where(one <= other, c <= most, (c >= low) & (c <= high))
        slope = torch.where(moves, -c * advantages, 0.0)
        return -torch.minimum(one, other), torch.zeros_like(x), slope

    def _divergence(self, d: Tensor, c: Tensor, whole: bool) -> _Terms:
        """Of the reference; the last is already times ``beta``."""
        kl, slope = torch.expm1(d) - d, -torch.expm1(d)
        if not self.use_bias_correction_kl:
            return kl, slope, torch.zeros_like(kl)
        if not whole:  # the two slopes add up to this, and would cancel
            return kl * c, -d * c, torch.zeros_like(kl)
        return kl * c, slope * c, self.beta * kl * c

    # What tokens and sequences count

    @property
    def _high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def _token_weights(self, those: Sequences, items: Tensor) -> Tensor:
        """How much the loss of each token counts."""
        size, kind = max(1, len(those.lengths)), self.loss_type
        ones = those.counted.to(items.dtype)
        if kind in ("grpo", "sapo"):
            return those.spread(1 / those.lengths.clamp(min=1)) / size
        if kind == "bnpo":
            return ones / ones.sum().clamp(min=1)
        if kind == "dr_grpo":
            return ones / (size * (self.max_completion_length or math.nan))
        return ones / (size if kind == "luspo" else items)

    def _top(self, those: Sequences, entropy: Tensor | None) -> Tensor:
        """1 for a token among those of most entropy, 0 for others."""
        ones = those.counted.to(those.lengths.dtype)
        if entropy is None or self.top_entropy_quantile == 1 or not len(entropy):
            return ones
        counted = entropy.detach().where(those.counted, math.nan)
        return ones * (counted >= counted.nanquantile(1 - self.top_entropy_quantile))

    def _factor(
        self, those: Sequences, x: Tensor, advantages: Tensor, tokens: Mapping[str, Tensor]
    ) -> Tensor:
        """The factor of each token's loss, without gradient."""
        factor = tokens.get("importance_ratio", torch.ones_like(x))
        if self.off_policy_mask_threshold is None:
            return factor
        old = tokens.get("old_log_probs", x.detach())
        apart = (tokens.get("sampling_log_probs", old) - x.detach()).nan_to_num(nan=0.0)
        kept = (advantages >= 0) | (those.mean(apart) <= self.off_policy_mask_threshold)
        return factor * those.spread(kept.to(x.dtype))

    def _gamma(
        self, those: Sequences, log_ratio: Tensor, advantages: Tensor, ratios: Tensor | None
    ) -> Tensor:
        """``w`` of VESPO, of each sequence."""
        least, most = math.log(1e-8), 20.0
        log_c = log_ratio.detach().clamp(-most, most)
        if ratios is not None:
            log_c = log_c + ratios.log().clamp(least, most)
        log_c = those.sum(log_c).clamp(least, most)
        good = advantages >= 0
        k = either(good, self.vespo_k_pos, self.vespo_k_neg, log_c)
        rate = either(good, self.vespo_lambda_pos, self.vespo_lambda_neg, log_c)
        weight = torch.exp(rate * (1 - log_c.exp()) + k * log_c)
        return weight.nan_to_num(nan=0.0, posinf=0.0)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Where the ratio is clipped, and so has no gradient."""
        if self.loss_type == "cispo":
            return {"clip_high": (ratio > self._high) & (advantages > 0)}
        if self.loss_type not in _CLIPPED:
            return {}
        low = (ratio < 1 - self.epsilon) & (advantages < 0)
        capped = ratio if self.delta is None else ratio.clamp(max=self.delta)
        high = (capped > 1 + self._high) & (advantages > 0)
        return {"clip_low": low, "clip_high": high, "clip_region": low | high}


_Terms = tuple[Tensor, Tensor, Tensor]


def _weighted(weights: Tensor, x: Tensor) -> _Terms:
    """Of a log-probability with a weight that has no gradient."""
    return -weights * x, -weights, torch.zeros_like(x)
