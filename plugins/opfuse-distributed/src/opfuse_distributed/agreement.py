"""Chains with collectives: the processes of a group agree on what they run, or say so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils import checkpoint

from opfuse.core.engine.chain import Chain
from opfuse.core.engine.facts import Step
from opfuse.core.engine.program import Program
from opfuse.core.settings import current
from opfuse.tuning.causes import causes

from .ranks import Group, Pass, RankError, state

# a checkpoint raises it in a forward whose backward needs no more, on each process at its own time
_END_OF_RECOMPUTATION = getattr(checkpoint, "_StopRecomputationError", ())


_groups: WeakKeyDictionary[Chain, list[Group]] = WeakKeyDictionary()


def groups_of(chain: Chain) -> list[Group]:
    """The process groups of a chain's collectives, but those of one process."""
    if chain not in _groups:
        every = [getattr(op, "collective_group", None) for op in chain.ops]
        groups = [group for group in every if group is not None and group.size > 1]
        _groups[chain] = [*{group.given: group for group in groups[::-1]}.values()]
    return _groups[chain]


class Agreed:
    """Wraps what runs a plan of a chain with collectives: it takes the turn of each call first.

    Args:
        run: What runs it.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._turns: dict[Any, Any] = {}  # the last turn of each group, behind what it is for

    def __call__(
        self,
        fuser: Any,
        program: Program,
        input: Tensor,
        tensors: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        kwargs: Any,
    ) -> Any:
        """Run a call.

        Raises:
            RankError: Another process does something else, failed, or did not come.
        """
        chain, shapes = program.chain, (input.shape, *[extra.shape for extra in extra_inputs])
        running = state.running = current.call = Pass("forward", chain, {})
        again = torch._C._current_graph_task_id() != -1  # a recomputation is no new call
        for group in groups_of(chain):
            if (talk := group.talk) is not None:
                known = self._turns.get((talk, again))
                if known is None or known[:2] != (talk.era, shapes):
                    what = f"{chain.title}, in a backward" if again else chain.title
                    name = what, "", "", tuple([talk.number(op) for op in chain.ops])
                    uneven = any(getattr(op, "uneven_rows", False) for op in chain.ops)
                    size = 1 if uneven else input.numel() or 1  # equal on all processes
                    turn = name, _details(program, shapes, uneven)
                    self._turns[talk, again] = known = talk.era, shapes, turn, size
                running.turns[talk], running.size = talk.turn, known[3]
                talk.take_turn(group, known[2])
        return self._run(fuser, program, input, tensors, extra_inputs, kwargs)


def backward_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of a chain with collectives, which knows which call it belongs to."""

    def run_backward(ctx: Any, *grads: Any) -> Any:
        if is_dynamo_compiling():
            return run(ctx, *grads)
        call = ctx.call
        running = Pass("backward", call.chain, call.turns, call.size)
        with reported(call.chain, running=running):
            return run(ctx, *grads)

    return run_backward


def reporting(chain: Chain, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a chain, and tells the other processes of its groups of an error."""
    return Reported(run, chain) if groups_of(chain) else run


def _details(program: Program, shapes: Sequence[Any], uneven: bool) -> tuple[str, str]:
    """What a call does, as text, and the shapes of what it is called with.

    Plans of the steps without collectives may differ, and a process may plan again what the others
    do not. So may the number of rows, if an op of the chain sends each process its own number.
    """
    chain, made_from, plan = program.chain, program.facts, program.plan
    collective = [getattr(op, "collective_group", None) is not None for op in chain.ops]
    steps = [step for of_pass in (plan.forward, plan.backward) for step in of_pass]
    facts = {
        **causes(),
        "its ops": [f"{chain.name(i)} {op.name}".rstrip() for i, op in enumerate(chain.ops)],
        "what it is called with": {
            "dtype": str(made_from.input_dtype),
            "device": made_from.env.device.type,
            "autocast": str(program.autocast),
            "recipe": str(program.recipe),
            "gradients of": ", ".join(_wanted(program)) or "nothing",
            "training": str([op.training for op in chain.ops]),
            "keywords": str(made_from.kwargs),
        },
        "what its collectives take": {
            chain.name(i): f"{width or 'any'} features, dim {getattr(op, 'dim', 0)}"
            for i, (op, width) in enumerate(zip(chain.ops, chain.widths, strict=False))
            if collective[i]
        },
        "its steps": [
            str(step)
            for step in steps
            if any(collective[step.start : step.start + len(step.basic_ops)])
        ],
    }
    sizes = shapes[0][-1:] if uneven else [tuple(shape) for shape in shapes]
    return sys.intern(json.dumps(facts)), f"shapes {sizes}"


def _wanted(program: Program) -> Iterator[str]:
    """What needs a gradient, by name."""
    chain, needs = program.chain, program.facts.needs
    for i, flags in enumerate(needs.params if program.requires_grad else ()):
        if needs.inputs[i]:  # by an extra input, it may be the first that needs one
            yield f"the input of {chain.name(i)}" if i else "the input"
        names = zip(chain.ops[i].param_names or (), flags, strict=True)
        yield from (f"{name} of {chain.name(i)}" for name, needed in names if needed)


@contextmanager
def reported(chain: Chain, where: str = "", running: Pass | None = None) -> Iterator[None]:
    """Tell the other processes of a chain's groups of an error in the block.

    An error that all of them raise is raised as it is.

    Args:
        chain: The chain.
        where: The op, for messages.
        running: The pass that the block is; None: it is in one, or begins one.
    """
    before = state.running, state.told
    told = state.told = [] if state.told is None else state.told
    state.running = running or state.running
    try:
        yield
    except RankError as error:
        if not where or error.located:
            raise
        located = RankError(f"{chain.title}, {where}: {error}")
        located.located = True
        raise located from error.__cause__
    except _END_OF_RECOMPUTATION:
        raise
    except Exception as error:
        talks = [talk for group in groups_of(chain) if (talk := group.talk) is not None]
        for talk in [talk for talk in talks if (talk, error) not in told]:
            why = f"{chain.title}{where and f', {where}'} on {talk.me} raised "
            failure = talk.failed(f"{why}{type(error).__name__}: {error}", unfinished=None)
            told.append((talk, error))
            if talk.broken:
                raise failure from error
        raise
    finally:
        state.running, state.told = before


class Reported:
    """Wraps a chain with collectives, or a method of one of its steps.

    Args:
        run: What runs it.
        chain: The chain.
        step: The step; None: the whole chain.
    """

    def __init__(self, run: Callable[..., Any], chain: Chain, step: Step | None = None) -> None:
        self._run, self._chain, self._where = run, chain, ""
        if step is not None:
            names = [chain.name(i) for i in range(step.start, step.stop)]
            self._where = " + ".join(names) or "a cast"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if is_dynamo_compiling():
            return self._run(*args, **kwargs)
        with reported(self._chain, self._where):
            return self._run(*args, **kwargs)
