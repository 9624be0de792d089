"""What a candidate is compared with: its ops run separately, and in fp64, on the same tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.engine.program import Program
from ..core.environment import shape_of
from ..core.op import BasicOperation
from ..report.isolation import is_equal
from .clock import Clock
from .comparing import as_tuple, gradients
from .parts import MeasuredCall, compiled, part_program

Results = Mapping[str, Tensor | None]
"""The outputs and gradients of a run, by name."""


@dataclasses.dataclass
class InputSet:
    """One set of inputs.

    Attributes:
        leaves: The input, the parameters, and the extra inputs.
        arriving: The gradients of outputs, by their place and shape.
    """

    leaves: list[Tensor]
    arriving: dict[tuple[int, ...], Tensor] = dataclasses.field(default_factory=dict)


class Reference:
    """Some ops of a call, with the tensors that come to them there.

    Tensors and results are made once, on the device, for all candidates of these ops.

    Args:
        call: The call.
        span: The range of basic ops.

    Attributes:
        program: The program that runs them separately.
        shape: The shape of the input, for the entry.
        rows: Its number of rows.
        clock: The clock of the device.
    """

    def __init__(self, call: MeasuredCall, span: range) -> None:
        self.call, self.span = call, span
        self.program = part_program(call, span)
        self._kwargs = call.kwargs[span.start : span.stop]
        needs, chain = self.program.facts.needs, self.program.chain
        x, extras = _arriving(call, self.program, span.start)
        self._owned = [x, *_params(chain.ops), *extras]
        self._flags = [*needs.inputs[:1], *[flag for flags in needs.params for flag in flags]]
        self._flags += [extra.requires_grad for extra in extras]
        ops = enumerate(chain.ops)
        names = [f"{chain.name(i)}.{name}" for i, op in ops for name in op.param_names or ()]
        places = [f"extra input {k} of {chain.name(i)}" for i, k in chain.external_inputs]
        self._names = ["the input", *names, *places]
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        self.clock, self.rows = Clock.of(x.device), x.shape[:-1].numel()
        self.first = self._set()
        self.shape = shape_of(self.first.leaves[0])

    # Inputs

    def _set(self) -> InputSet:
        """Copies: a fusion that writes into them is wrong, and the user's tensors stay."""
        pairs = zip(self._owned, self._flags, strict=True)
        return InputSet([_copy(tensor).requires_grad_(flag) for tensor, flag in pairs])

    @functools.cached_property
    def sets(self) -> list[InputSet]:
        """The sets of inputs that are taken in turns while timing."""
        nbytes = sum(tensor.nbytes for tensor in (*self._owned, *self._drawn.values()))
        return [self.first, *[self._set() for _ in range(self.clock.sets(nbytes) - 1)]]

    def _gradient(self, output: Tensor, given: InputSet, place: int) -> Tensor:
        """The gradient of an output, the same in every run."""
        key = place, *output.shape
        if key not in self._drawn:
            self._drawn[key] = self.clock.draw(output.shape, self.program.env.dtype, place)
        if key not in given.arriving:
            given.arriving[key] = self._drawn[key].clone()
        return given.arriving[key].to(output.dtype)

    def changed(self) -> str:
        """Which tensor that it does not own a fusion wrote into, as a sentence; that is undone."""
        leaves, arriving, changed = self.first.leaves, self.first.arriving, []
        for place, (leaf, owned) in enumerate(zip(leaves, self._owned, strict=True)):
            if not is_equal(leaf, owned):
                leaves[place] = _copy(owned).requires_grad_(leaf.requires_grad)
                changed.append(self._names[place])
        for shape, gradient in tuple(arriving.items()):
            if not is_equal(gradient, self._drawn[shape]):
                del arriving[shape]
                changed.append("the gradient that arrives")
        if not changed:
            return ""
        vars(self).pop("sets", None)  # the others were written into, too
        return f"changes {changed[0]}, which it does not own"

    # Results

    @functools.cached_property
    def results(self) -> Results:
        """What the separate ops give."""
        return _kept(self.run(self.program))

    @functools.cached_property
    def exact(self) -> Results:
        """The results in fp64; none if the ops do not support it, then the separate ops decide."""
        if self.program.env.recipe is not None or self.draws:
            return {}
        tensors = [leaf.detach() for leaf in self.first.leaves]
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        for tensor, leaf in zip(wide, self.first.leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        try:
            program = part_program(self.call, self.span, exact=True)
            return _kept(self._results(program, InputSet(wide, self.first.arriving)))
        except Exception:
            return {}

    @functools.cached_property
    def draws(self) -> bool:
        """The ops draw random numbers: results are equal for one seed, and not for another."""
        same, other = (self.run(self.program, seed) for seed in (0, 1))
        return equal(self.results, same) and not equal(self.results, other)

    def is_steady(self, program: Program, results: Results) -> bool:
        """Return whether all runs of a program give the same bits, as far as the clock asks."""
        return all(equal(self.run(program), results) for _ in range(self.clock.runs - 1))

    @functools.cached_property
    def steady(self) -> bool:
        """Whether the separate ops give the same bits each time."""
        return self.is_steady(self.program, self.results)

    def run(self, program: Program, seed: int = 0) -> Results:
        """The outputs and gradients of a program for the first set of inputs."""
        device = self.clock.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self._results(program, self.first)

    def _results(self, program: Program, given: InputSet) -> Results:
        outputs = self.forward(program, given)
        grads = self.gradients(outputs, given)
        results = {f"output {i}" if i else "the output": y for i, y in enumerate(outputs)}
        named = zip(self._names, given.leaves, strict=True)
        wanted = [f"the gradient of {name}" for name, leaf in named if leaf.requires_grad]
        return results | dict(zip(wanted, grads, strict=False))  # none at all without a backward

    def forward(self, program: Program, given: InputSet) -> tuple[Tensor, ...]:
        """The outputs of a program."""
        return _outputs(program, given.leaves, self._kwargs)

    def gradients(self, outputs: Sequence[Tensor], given: InputSet) -> Sequence[Tensor | None]:
        """The gradients of the leaves that have one, for fixed gradients of the outputs."""
        wanted = [leaf for leaf in given.leaves if leaf.requires_grad]
        dys = [
            self._gradient(y, given, place) if y.requires_grad else None
            for place, y in enumerate(outputs)
        ]
        # compiled code may reuse its buffers
        return gradients(outputs, wanted, dys, again=not self.program.compiling)


def _arriving(call: MeasuredCall, part: Program, start: int) -> tuple[Tensor, list[Tensor]]:
    """The input of a part's first op, and the extra inputs of its ops."""
    whole, made = call.program.chain, {}
    x = call.input.detach()
    if start:
        before = part_program(call, range(start), grads=False)
        extras = [call.extra(slot).detach() for slot in before.chain.external_inputs]
        given = [*_params(before.chain.ops), *extras]
        with torch.no_grad():
            x, *others = _outputs(before, [x, *given], call.kwargs[:start])
        made = dict(zip(before.chain.public_outputs, others, strict=True))
    found = []
    for i, k in part.chain.external_inputs:
        source = whole.sources.get((start + i, k))
        extra = call.extra((start + i, k)) if source is None else made[source]
        inner = source is not None and source[0] >= call.program.first_backward
        wanted = inner if source is not None else extra.requires_grad
        wanted = wanted and call.program.requires_grad and extra.is_floating_point()
        found.append(extra.detach().requires_grad_(wanted))
    return x.detach(), found


def _params(ops: Sequence[BasicOperation]) -> list[Tensor]:
    return [op.read_parameter(name).detach() for op in ops for name in op.param_names or ()]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with memory of its own, laid out as the tensor is: gaps and overlaps stay."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return tensor.detach().clone()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((span + 1,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def _kept(results: Results) -> Results:
    """Results that nothing else writes into, without their graph."""
    return {what: t if t is None else t.detach().clone() for what, t in results.items()}


def equal(one: Results, other: Results) -> bool:
    """Return whether two runs gave the same bits."""
    pairs = [(found, other.get(what)) for what, found in one.items()]
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and torch.equal(_bits(a), _bits(b)))
        for a, b in pairs
    )


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; one of a class of its own as it is."""
    plain = type(tensor.detach()) is Tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if plain else tensor


def _outputs(program: Program, leaves: Sequence[Tensor], kwargs: Any) -> tuple[Tensor, ...]:
    """The outputs of a program; what is written in place is a copy."""
    x, *tensors = leaves
    if program.writes_extras:
        count = program.num_params
        tensors = [*tensors[:count], *[extra.clone() for extra in tensors[count:]]]
    for op, requires_grad in program.pre_forward_ops:
        op.pre_fuser_forward(requires_grad=requires_grad)
    with torch.autocast(program.autocast_device, enabled=False):
        return as_tuple(_function(program, x)(kwargs, x, *tensors))


def _function(program: Program, x: Tensor) -> Callable[..., Any]:
    """The function that runs a program for an input, compiled if needed and then kept on it."""
    if not program.compiling:
        return program.forward_of(x)
    if "_function" not in vars(program):
        vars(program)["_function"] = compiled(program.run)
    return vars(program)["_function"]  # type: ignore[no-any-return]
