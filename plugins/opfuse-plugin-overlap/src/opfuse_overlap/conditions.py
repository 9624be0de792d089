"""Where the fusions run, and in how many pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_distributed.collectives import AllGather, AllReduce, CopyToTensorParallelRegion

from opfuse import Environment
from opfuse.ops import ParallelLinear

from . import symm_mem

LEAST_ROWS = 1024
"""Where nothing was measured, no input of fewer rows is communicated beside the products."""

LEAST_PROCESSES = 4
"""Where nothing was measured, no fewer processes communicate beside the products.

For two on a node a step is predicted to be 1.07 times as fast, for four 1.2 times:
``python benchmarks/scale.py predict``.
"""

ROWS_OF_A_PIECE = 512
"""Where nothing was measured, no piece has fewer rows: a GPU needs many to be busy."""

COUNTS = 1, 2, 4, 8
"""The numbers of pieces that ``opfuse tune`` compares."""

_DEFAULT = 4


def collective_of(ops: Sequence[Any]) -> Any:
    """The collective among some ops."""
    return next(op for op in ops if getattr(op, "collective_group", None) is not None)


def runs(ops: Sequence[Any], env: Environment) -> bool | str:
    """Asked while planning: True, or why the ops run one after the other."""
    return _cannot(ops, env) or _does_not_pay(ops, env) or True


def _cannot(ops: Sequence[Any], env: Environment) -> str:
    op = collective_of(ops)
    if env.options.get("overlap.use") == "never":
        return "the option overlap.use says never"
    if env.compiling:
        return "torch.compile traces the separate ops, and orders their collectives itself"
    if op.dim:
        return f"the {type(op).__name__} is of dimension {op.dim}, and pieces are of dimension 0"
    several = isinstance(ops[-1], ParallelLinear)
    if several and env.recipe is not None:
        who = type(env.recipe).__name__
        return f"linears side by side multiply plain tensors here, and {who} quantizes them"
    if env.options.get("overlap.provider") == "symm_mem":
        if several:
            return "symm_mem multiplies by one weight here: overlap.provider='c10d' by several"
        return symm_mem.why_not(op, env)
    return ""


def _does_not_pay(ops: Sequence[Any], env: Environment) -> str:
    """Why it is not expected to pay; where it was measured, the tuning table decides alone."""
    if env.measured is not None or env.options.get("overlap.use") == "always":
        return ""
    op = collective_of(ops)
    if op.process_group_size == 1:
        return "its group has one process, which sends nothing"
    if isinstance(op, CopyToTensorParallelRegion) and not env.requires_grad:
        return "nothing is sent in the forward, and no backward follows"
    advice = "opfuse tune measures it, and the option overlap.use='always' uses it"
    if env.device.type != "cuda":
        return (
            f"on {env.device.type} products and collectives share the processor, and it was not "
            f"measured here: {advice}"
        )
    if env.recipe is not None:
        who = type(env.recipe).__name__
        return (
            f"the products of {who} are emulated here, and another plugin may run them in low "
            f"precision: {advice}"
        )
    if op.process_group_size < LEAST_PROCESSES:
        return (
            f"it was not measured here, and a model predicts less than 1.1 times the speed for "
            f"{op.process_group_size} processes: {advice}"
        )
    if env.rows is not None and env.rows < LEAST_ROWS:
        return (
            f"it was not measured here, and with fewer than {LEAST_ROWS} rows pieces are too small "
            f"to keep a GPU busy: {advice}"
        )
    return ""


def configurations(env: Environment) -> Sequence[Mapping[str, Any]]:
    """The numbers of pieces that ``opfuse tune`` compares."""
    if env.options.get("overlap.provider") == "symm_mem" or env.options.get("overlap.pieces"):
        return ()
    return [{"pieces": count} for count in COUNTS]


def count_of(env: Environment) -> int | None:
    """The number of pieces: as the option says, as measured; None: it depends on the rows."""
    given = env.options.get("overlap.pieces", 0)
    if given < 0:
        raise ValueError(f"option 'overlap.pieces': expected at least 0, got {given}")
    measured = (env.configuration or {}).get("pieces")
    return given or measured or None


def pieces_for(rows: int) -> int:
    """How many pieces there are where nothing was measured."""
    return max(1, min(_DEFAULT, rows // ROWS_OF_A_PIECE))


def benefit(ops: Sequence[Any], env: Environment) -> float:
    """What is sent beside a product counts as a tensor that is neither written nor read."""
    both = isinstance(collective_of(ops), AllGather)
    once = isinstance(collective_of(ops), (AllReduce, CopyToTensorParallelRegion))
    return len(ops) - 1.0 + (1.0 if once else 2.0 + both)
