"""Losses of preferences and of rewards, over the log-probabilities of tokens, and of a teacher.

The first take what :class:`opfuse.ops.TokenLogProb` gives, as in ``Sequential(Linear(...),
TokenLogProb(), losses.GRPO())``. :class:`Distillation` takes logits.
"""

from .distillation import Distillation
from .policy import GRPO
from .preference import CPO, DPO, KTO, ORPO

__all__ = ["CPO", "DPO", "GRPO", "KTO", "ORPO", "Distillation"]
