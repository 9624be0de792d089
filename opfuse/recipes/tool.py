"""The tool behind :class:`opfuse.autocast`: it tells a block which chains run in it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.compiler import is_dynamo_compiling

from ..core.engine.program import Program
from ..core.hookspecs import Run, hookimpl
from ..core.settings import current, is_captured
from .checkpoint import check_checkpoint
from .scale_update import Pass, begin_backward


@hookimpl
def opfuse_wrap_pass(program: Program, pass_name: str, run: Run) -> Run | None:
    """Tell the block around a call which ops run in it, and in their backward.

    Raises:
        RuntimeError: In a call: ``torch.compile`` cannot trace what the recipe does, or
            ``torch.utils.checkpoint`` would not restore it.
    """
    if not any(program.facts.edges.quantizers):  # it quantizes nothing
        return None
    observer = current.observer
    records = program.advances and (program.grad_mode or getattr(observer, "records", False))
    if program.compiling:
        return _refusal(program, records) if pass_name == "forward" else None
    part = Pass.of(program, pass_name)
    if pass_name == "forward":
        return _forward(run, part, records)
    return _backward(run, part) if program.advances else None


def _refusal(program: Program, records: bool) -> Run | None:
    """What refuses to be traced; None: the program can be."""
    title = program.chain.title
    pairs = zip(program.chain.ops, program.facts.edges.quantizers, strict=True)
    if any(its and getattr(op, "reads_sizes", 0) for op, its in pairs):
        what = f"{title} has an op that reads sizes on the host under a recipe"
        why = f"{what}, which torch.compile cannot trace: run it in eager mode"
    elif records:
        what = f"{program.recipe} has state that advances once per step"
        remedy = f"run {title} in eager mode, or under torch.no_grad"
        why = f"{what}, which torch.compile does not see: {remedy}"
    else:
        return None

    def refuse(*args: Any) -> NoReturn:
        raise RuntimeError(why)

    return refuse


def _forward(run: Run, part: Pass, records: bool) -> Run:
    """A forward, of which the block is told; ``records``: it advances the state of the recipe."""

    def forward(
        fuser: Any, program: Program, input: Any, tensors: Any, extra_inputs: Any, kwargs: Any
    ) -> Any:
        check_checkpoint(program)
        current.is_recording = program.grad_mode  # for ops that request their quantizers themselves
        current.is_capturing = is_captured(input.device)
        for op in program.chain.ops:
            op._quantizers.latest = program.recipe
        if current.block is not None:
            current.block.begin(part, records)
        return run(fuser, program, input, tensors, extra_inputs, kwargs)

    return forward


def _backward(run: Run, part: Pass) -> Run:
    """A backward, of which the block of its forward is told."""

    def backward(ctx: Any, *grads: Any) -> Any:
        if not is_dynamo_compiling():
            begin_backward(part)
        return run(ctx, *grads)

    return backward
