"""One call of a fuser, as data."""

from __future__ import annotations

import dataclasses

from ..core.engine.plan import FusionPlan
from .quantized import Quantized


@dataclasses.dataclass(frozen=True)
class Sent:
    """What an op sends to other processes.

    Attributes:
        op: Its name.
        forward, backward: Bytes that this process sends in each pass.
        overlapped: Whether a fused op runs its collectives beside other work.
    """

    op: str
    forward: int
    backward: int
    overlapped: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one fuser.

    Attributes:
        path: Dotted name of the Sequential, or of the op called alone; ``""`` for the model itself
            and for objects that are not its submodules.
        owner: Its class; ``""`` if it is not a submodule of the model.
        ops: Classes of the ops as the user wrote them.
        plan: The plan that ran.
        grad_enabled: Whether grad mode was on.
        unfused: The reason why nothing could be fused in this call, or ``""``.
        cut: The module hooks that separate this run of ops from its neighbours, or ``""``.
        notes: The ``notes`` of its fused ops, such as time spent compiling; not compared.
        saved_bytes: Bytes that each step of the forward keeps for the backward, without parameters
            and with each storage once; empty without a backward; not compared.
        sent: What this process sends to others, for each op with collectives; not compared.
        quantized: The effect of a recipe; not compared, since its ops have names.
    """

    path: str
    owner: str
    ops: tuple[str, ...]
    plan: FusionPlan
    grad_enabled: bool
    unfused: str = ""
    cut: str = ""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    saved_bytes: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    sent: tuple[Sent, ...] = dataclasses.field(default=(), compare=False)
    quantized: Quantized = dataclasses.field(default=Quantized(), compare=False)
