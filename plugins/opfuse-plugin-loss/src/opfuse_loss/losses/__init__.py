"""Losses of preferences and of rewards, over the log-probabilities of tokens.

They take what :class:`opfuse.ops.TokenLogProb` gives, as in ``Sequential(Linear(...),
TokenLogProb(), losses.GRPO())``.
"""

from .policy import GRPO
from .preference import CPO, DPO, KTO, ORPO

__all__ = ["CPO", "DPO", "GRPO", "KTO", "ORPO"]
