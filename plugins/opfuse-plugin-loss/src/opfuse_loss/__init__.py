"""Losses and log-probabilities without the logits of all rows, and losses of rewards."""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """Linear [+ bias] + cross entropy or log-probabilities, by chunks of rows; these alone.

    And linear [+ bias] + log-probabilities + a loss of rewards, or + the divergence from a teacher.
    """
    from . import (
        cross_entropy,
        distilled,
        fused,
        log_prob,
        low_rank,
        policy_loss,
        split_log_prob,
        split_loss,
        token_log_prob,
    )

    log_probs = *log_prob.JOINT, *split_log_prob.JOINT, *low_rank.JOINT, *policy_loss.JOINT
    of_teachers = distilled.JOINT
    alone = *cross_entropy.JOINT, *token_log_prob.JOINT
    return [*fused.JOINT, *split_loss.JOINT, *of_teachers, *log_probs, *alone]
