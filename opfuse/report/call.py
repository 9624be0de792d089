"""One call of a fuser, as data."""

from __future__ import annotations

import dataclasses

from ..core.engine.plan import FusionPlan
from .quantized import Quantized


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one fuser.

    Attributes:
        path: Dotted name of the Sequential, or of the op called alone; ``""`` for the model itself
            and for what is not one of its submodules.
        owner: Its class; ``""`` for what is not a submodule of the model.
        ops: Classes of the ops as the user wrote them.
        plan: What ran.
        grad_enabled: Whether grad mode was on.
        unfused: Why nothing at all could be fused in this call, or ``""``.
        cut: Which module hooks keep this run of ops apart from its neighbours, or ``""``.
        notes: What its fused ops say about themselves (their ``notes``), such as time spent
            compiling; not compared.
        saved_bytes: How many bytes each step of the forward leaves for the backward, parameters
            apart and each storage once; empty without a backward; not compared.
        quantized: What a recipe does to it; not compared, since its ops have names.
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
    quantized: Quantized = dataclasses.field(default=Quantized(), compare=False)
