"""The option ``invariant="batch"``: a row has the same bits whatever else is in the batch.

A library chooses how it sums by the shape of a product, and a vectorized loop computes its last
few values in another way. So a chain gets its rows in blocks of one shape, the last one padded with
zeros. Then only two things can change the bits of a row: the other rows of its block, and its place
there. That neither does is the promise of each op (``BasicOperation.batch_invariant``) and of each
fusion (``Fusion.declares``), and the first call of a shape tries it.

On a CPU, ops without a matrix run on parts of a block: one thread takes a part, and its vectors
leave no remainder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opfuse.core.engine.facts import Facts, Step
from opfuse.core.engine.program import Program
from opfuse.core.engine.selection import Choice
from opfuse.core.errors import CallRefusedError
from opfuse.core.fusible import FusibleOperation, declared
from opfuse.core.introspection import op_class, why_apart
from opfuse.core.settings import current
from opfuse.ops.arithmetic import matmul_precision

BLOCK = 64
"""The number of rows in a block."""

_SERIAL = 1 << 14
"""The most values for which torch's loops on a CPU take one thread.

That of GELU takes more threads for more, others for twice as many.
"""
_VECTORS = 128
"""A multiple of the values that torch's loops on a CPU take at once, also of half of them."""
_ALIGNED = 64
_FEW, _MORE = 512, 7
"""Where a row gives fewer values, so many rows more are tried."""

Run = Callable[..., Any]


def mode(value: Any) -> str:
    """The value of the option that a user gives.

    Inside of a call it is ``"block"`` where a block of rows runs, and ``"whole"`` where all rows
    do, by ops whose every operation is exact.
    """
    if type(value) is not str:
        raise TypeError(f"option invariant must be of type str, got {value!r}")
    if value != "batch":
        raise ValueError(f"option invariant must be 'batch', got {value!r}")
    return str(value)


class Refused:
    """A module that runs by a call of its own: the mode refuses it.

    Args:
        module: The module.
        run: What calls it.
    """

    def __init__(self, module: nn.Module, run: Run) -> None:
        self._module, self._run = module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it outside of the mode."""
        if ("invariant", "batch") in current.values.options:
            module = self._module
            is_op = isinstance(module, FusibleOperation)
            who, why = op_class(module).__name__, why_apart(module) if is_op else "is no op"
            raise CallRefusedError(f'{who} {why}, and promises nothing to invariant="batch"')
        return self._run(*args, **kwargs)


def among_promising(facts: Facts, run: Run) -> Run:
    """The choice of fusions in the mode: among those that promise the bits of a row."""
    inside = facts.env.options.get("invariant")
    if inside is None:
        return run

    def choose(choice: Choice) -> Any:
        for candidate in choice.candidates:
            if "batch_invariant" not in getattr(candidate.source.fusion, "declares", ()):
                why = 'it does not promise the bits of a row that invariant="batch" asks for'
                choice.refused.setdefault(candidate, why)
        return run(choice)

    return choose if inside == "block" else lambda choice: []


def in_blocks(program: Program, run: Run) -> Run:
    """What runs a plan, by blocks of rows at the door of the mode.

    Raises:
        CallRefusedError: The chain promises nothing, or the call asks for more than a forward.
    """
    return Blocks(program).run if program.env.options.get("invariant") == "batch" else run


def in_parts(step: Step, facts: Facts, run: Run) -> Run:
    """What runs a step of an op without a matrix in the mode, on a CPU."""
    env, chain = facts.env, facts.chain
    if "invariant" not in env.options or env.device.type != "cpu" or step.op not in chain.ops:
        return run
    shapes = [shape for shape, _ in facts.params[step.start]]
    return InParts(run) if all(len(shape) < 2 for shape in shapes) else run


class Blocks:
    """Runs a chain in this mode: cuts the rows of a call into blocks.

    Args:
        program: What would run them all at once.

    Raises:
        CallRefusedError: The chain promises nothing, or the call asks for more than a forward.
    """

    def __init__(self, program: Program) -> None:
        chain = self._chain = program.chain
        recipe = program.recipe
        promised = [tuple(declared(op, "batch_invariant")) for op in chain.ops]
        alike = all("exact" in promise for promise in promised)
        self._within = "whole" if alike and recipe is None else "block"
        if program.requires_grad:
            self._refuse("it is for the forward alone: call it under torch.no_grad()")
        if program.compiling or program.double_backward:
            self._refuse("torch.compile, functorch and double_backward compute in their own way")
        if recipe is not None and not recipe.batch_invariant:
            what = "that it casts a row by that row alone (Recipe.batch_invariant)"
            self._refuse(f"{type(recipe).__name__} does not promise {what}")
        for i, promise in enumerate(promised if self._within == "block" else ()):
            if "rows" not in promise:
                what = "the bits of a row, as it is (BasicOperation.batch_invariant)"
                self._refuse(f"{chain.name(i)} does not promise {what}")
        slots = [(i, k) for i, op in enumerate(chain.ops) if (k := op.groups_input) is not None]
        if any(slot not in chain.arguments for slot in slots):
            self._refuse("the sizes of groups come out of a channel, and not from the caller")
        self._sizes = [chain.arguments[slot] for slot in slots]
        self._tried: set[Any] = set()

    def _refuse(self, why: str) -> None:
        raise CallRefusedError(f'{self._chain.title}, with invariant="batch": {why}')

    def run(
        self,
        fuser: Any,
        program: Program,
        input: Tensor,
        tensors: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        kwargs: Any,
    ) -> Any:
        """Run a call, which may have no keyword arguments.

        Args:
            fuser: The fuser of the chain.
            program: What would run them all at once.
            input: The chain's input.
            tensors: The parameters that were read, which may change a state.
            extra_inputs: The extra inputs that no channel feeds.
            kwargs: Keyword arguments per basic op, or None.
        """
        if kwargs and any(kwargs):
            self._refuse("keyword arguments may be about all rows")
        for tensor in (input, *extra_inputs):
            if type(tensor) not in (Tensor, nn.Parameter):
                self._refuse(f"expected plain tensors, got {type(tensor).__name__}")
        run = functools.partial(type(fuser).run, fuser)
        pairs = zip(fuser._params, tensors, strict=False)
        read = {(module, name): tensor for (_, module, name), tensor in pairs}
        options = dict(current.values.options) | {"invariant": self._within}
        values = current.values._replace(options=tuple(sorted(options.items())))
        with current.temporarily(values=values, part_params=read):
            if self._within == "whole":
                return run(input, *extra_inputs)
            return self._by_rows(run, input, extra_inputs)

    def _by_rows(self, run: Run, input: Tensor, extra_inputs: Sequence[Tensor]) -> Any:
        lead = input.shape[:-1]
        by_rows = {-1: input} | dict(enumerate(extra_inputs))
        sizes = [by_rows.pop(i) for i in dict.fromkeys(self._sizes)]
        for tensor in by_rows.values():
            if tensor.shape[: len(lead)] != lead:
                what = f"extra inputs with the leading dimensions {tuple(lead)} of the input"
                self._refuse(f"expected {what}, got shape {tuple(tensor.shape)}")
        count = lead.numel()
        tensors = [t.reshape(count, *t.shape[len(lead) :]) for t in by_rows.values()]

        def of_block(rows: Sequence[Tensor], group: int) -> tuple[Tensor, ...]:
            x, *extras = rows
            for i in sorted({*self._sizes}):
                groups = torch.arange(len(extra_inputs[i]), device=extra_inputs[i].device)
                extras.insert(i, groups.eq(group).to(extra_inputs[i].dtype) * BLOCK)
            result = run(x, *extras)
            found = result if isinstance(result, tuple) else (result,)
            if any(type(y) is not Tensor or y.shape[:1] != (BLOCK,) for y in found):
                self._refuse("it gives what has not a row for each row, or is quantized")
            return found

        shapes = [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
        how = torch.get_num_threads(), matmul_precision(input.device.type)
        if (key := (*how, *shapes)) not in self._tried:
            self._try(of_block, tensors)
            self._tried.add(key)
        found = [
            [y[: stop - start] for y in of_block([_block(t, start, stop) for t in tensors], group)]
            for start, stop, group in self._spans(count, lead, sizes)
        ]
        whole = [torch.cat(parts) for parts in zip(*found, strict=True)]
        outputs = [y.reshape(*lead, *y.shape[1:]) for y in whole]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _spans(
        self, count: int, lead: torch.Size, sizes: Sequence[Tensor]
    ) -> Iterator[tuple[int, int, int]]:
        """The begin, the end and the group of each block; there is at least one."""
        counts = [count]
        if sizes:
            given = [each.tolist() for each in sizes]
            counts = [size * lead[1:].numel() for size in given[0]]
            if given != given[:1] * len(given) or sum(counts) != count or min(counts) < 0:
                self._refuse(f"expected the same sizes of groups for {lead[0]} rows, got {given}")
        start = 0
        for group, size in enumerate(counts):
            for begin in range(start, start + size, BLOCK):
                yield begin, min(begin + BLOCK, start + size), group
            start += size
        if not count:
            yield 0, 0, 0

    def _try(self, of_block: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
        """Compare the bits of rows at every place, and beside others.

        Where a row gives few values, more rows are tried: one value is often rounded alike.

        Raises:
            RuntimeError: They differ.
        """
        generator = torch.Generator().manual_seed(0)

        def drawn(like: Tensor, rows: int) -> Tensor:
            shape = rows, *like.shape[1:]
            if not like.is_floating_point():
                return like.new_zeros(shape)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

        def copied() -> tuple[list[Tensor], Sequence[Tensor]]:
            one = [drawn(tensor, 1) for tensor in tensors]
            return one, of_block([torch.cat([row] * BLOCK) for row in one], 0)

        others = [drawn(tensor, BLOCK - 1) for tensor in tensors]
        even = torch.arange(0, BLOCK - 1, 2)
        others = [t.index_fill(0, even.to(t.device), torch.inf) if t.is_floating_point() else t
                  for t in others]  # fmt: skip
        with current.temporarily(recorders=()):
            one, alike = copied()
            mixed = of_block([torch.cat(pair) for pair in zip(one, others, strict=True)], 0)
            beside = [torch.cat((y[:1], other[:1])) for y, other in zip(alike, mixed, strict=True)]
            few = min([y[0].numel() for y in alike]) < _FEW
            more = [copied()[1] for _ in range(_MORE if few else 0)]
        for y in (y for of_rows in (alike, beside, *more) for y in of_rows):
            bits = y.reshape(len(y), y[0].numel()).contiguous().view(torch.uint8)
            if (bits != bits[0]).any():
                self._refuse(
                    f"{y.dtype} rows of {tuple(tensors[0].shape[1:])} values have other bits at "
                    f"another place, or beside other rows, by the libraries in use here"
                )


def _block(tensor: Tensor, start: int, stop: int) -> Tensor:
    """A dense, aligned block of rows, padded with zeros."""
    rows = tensor[start:stop]
    if stop - start == BLOCK and rows.is_contiguous() and not rows.data_ptr() % _ALIGNED:
        return rows
    return torch.cat((rows, tensor.new_zeros(BLOCK - len(rows), *tensor.shape[1:])))


class InParts:
    """Wraps the forward of an op, which runs on a few rows at a time.

    Args:
        run: The method.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, ctxs: Any, x: Any, **given: Any) -> Any:
        """Run it."""
        rows = _fitting(x) if type(x) is Tensor else BLOCK
        if rows == BLOCK:
            return self._run(ctxs, x, **given)
        parts = torch.split(x, rows)
        if not given:
            return torch.cat([self._run(ctxs, part) for part in parts])
        (extras,) = given.pop("basic_op_extra_inputs")
        each = zip(*[torch.split(extra, rows) for extra in extras], strict=True)
        made = [
            self._run(ctxs, part, basic_op_extra_inputs=[list(of)], **given)
            for part, of in zip(parts, each if extras else [()] * len(parts), strict=True)
        ]
        outputs = zip(*[outputs for _, (outputs,) in made], strict=True)
        return torch.cat([y for y, _ in made]), [tuple(map(torch.cat, outputs))]


def _fitting(x: Tensor) -> int:
    """How many rows of a block one thread takes without a remainder; 1: each row alone."""
    width = x.shape[1:].numel()
    rows = BLOCK
    while rows > 1 and (rows * width > _SERIAL or (rows < BLOCK and rows * width % _VECTORS)):
        rows //= 2
    return rows
