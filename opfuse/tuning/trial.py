"""Compares a candidate with the separate ops: values and gradients, then memory and time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.authoring import saved_bytes
from ..core.engine.execute import Pipeline, run_forward
from ..core.engine.planner import rows_of
from ..core.engine.program import Program
from ..core.engine.step import Step
from ..core.fusible import declared
from ..core.op import BasicOperation
from ..core.tuning_table import Measurement, Shape
from .comparing import as_tuple, gradients, problem_of
from .job import one_line
from .parts import MeasuredCall, compiled, extent, part_program
from .timing import TURNS, Timing, compare

MOST_CONFIGURATIONS = 8

Results = Mapping[str, Tensor | None]
"""The outputs and gradients of a run, by name."""


class Trial:
    """One candidate of a call, with the tensors that come to it there.

    Args:
        call: The call.
        step: The candidate.

    Attributes:
        shape: The shape of the input, for the entry.
    """

    def __init__(self, call: MeasuredCall, step: Step) -> None:
        self._call, self._step, self._of = call, step, extent(step)
        self._kwargs = call.kwargs[self._of.start : self._of.stop]
        self._separate = part_program(call, self._of)
        needs = self._separate.facts.needs
        chain = self._separate.chain
        x, extras = self._arriving()
        self._owned = [x, *_params(chain.ops), *extras]
        flags = [*needs.inputs[:1], *[flag for of_op in needs.params for flag in of_op]]
        flags += [extra.requires_grad for extra in extras]
        # copies: a fusion that writes into them is wrong, and the user's tensors stay as they are
        pairs = zip(self._owned, flags, strict=True)
        self._leaves = [_copy(tensor).requires_grad_(flag) for tensor, flag in pairs]
        ops = enumerate(chain.ops)
        names = [f"{chain.name(i)}.{name}" for i, op in ops for name in op.param_names or ()]
        places = [f"extra input {k} of {chain.name(i)}" for i, k in chain.external_inputs]
        self._names = ["the input", *names, *places]
        self._weights: dict[tuple[int, ...], Tensor] = {}
        self._device, self._rows = x.device, x.shape[:-1].numel()
        self.shape = Shape(*rows_of(Shape._fields, self._leaves[0]))

    def _arriving(self) -> tuple[Tensor, list[Tensor]]:
        """The input of the candidate's first op, and the extra inputs of its ops."""
        call, start = self._call, self._of.start
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
        for i, k in self._separate.chain.external_inputs:
            source = whole.sources.get((start + i, k))
            extra = call.extra((start + i, k)) if source is None else made[source]
            inner = source is not None and source[0] >= call.program.first_backward
            wanted = inner if source is not None else extra.requires_grad
            wanted = wanted and call.program.requires_grad and extra.is_floating_point()
            found.append(extra.detach().requires_grad_(wanted))
        return x.detach(), found

    # Judging

    def measure(self) -> Measurement:
        """Compare the candidate with the separate ops, in the fastest of its configurations.

        Returns:
            The measurement; only the error if the candidate is wrong or raises.

        Raises:
            Exception: The separate ops raise, or memory is short.
        """
        with torch.set_grad_enabled(self._separate.requires_grad):
            self._seeded(self._separate)
            try:
                return self._measured()
            except (torch.OutOfMemoryError, MemoryError):  # there may be enough another time
                raise
            except Exception as error:
                return self._wrong(f"raises {one_line(error)}")

    def _wrong(self, why: str) -> Measurement:
        return Measurement(0.0, 0.0, 0.0, wrong=why, rows=self._rows)

    def _measured(self) -> Measurement:
        fused, configuration = self._fastest()
        if wrong := self._difference(fused):
            return self._wrong(wrong)
        timing = self._costs(fused)
        saved = self._saved(self._separate) - self._saved(fused) + self._recomputable(fused)
        if wrong := self._changed():
            return self._wrong(wrong)
        took = timing.speed, timing.noise, timing.first - timing.second
        return Measurement(*took, saved, "", configuration, not self.draws, self._rows)

    def _fastest(self) -> tuple[Program, Mapping[str, Any] | None]:
        """The candidate's program in its fastest configuration, and that configuration."""
        make = functools.partial(part_program, self._call, self._of, self._step)
        plain = make()
        (fused,) = [s for s in (*plain.forward, *plain.backward) if s.source][:1]
        offered, speed = list(fused.op.configurations(fused.env or plain.env)), 1.0
        best: tuple[Program, Mapping[str, Any] | None] = plain, None
        for configuration in offered[:MOST_CONFIGURATIONS]:
            program = make(configuration=dict(configuration))
            with contextlib.suppress(Exception):  # such as one that this GPU has no room for
                if not self._difference(program):
                    timing = self._compare(plain, program)
                    if timing.speed - timing.noise > speed:
                        best, speed = (program, dict(configuration)), timing.speed
            self._changed()  # so that the next one is not blamed for it
        return best

    @functools.cached_property
    def draws(self) -> bool:
        """The ops draw random numbers: results are equal for one seed, and not for another."""
        first, again, other = (self._seeded(self._separate, seed) for seed in (0, 0, 1))
        return _same(first, again) and not _same(first, other)

    def _timed(self, program: Program, *, both: bool = False) -> Callable[[], object]:
        """The function to time: the passes that the fusion is for, or both.

        ``torch.compile`` divides the work of both passes its own way, so there it is always both.
        """
        passes = "joint" if both or program.compiling else self._step.passes
        if passes == "forward" or not program.requires_grad:
            return lambda: self._forward(program)
        if passes == "joint":
            return lambda: self._gradients(self._forward(program))
        outputs = self._forward(program)
        return lambda: self._gradients(outputs)

    def _costs(self, fused: Program) -> Timing:
        """The timing of a fusion, or that of both passes if it makes the backward slower.

        A forward can leave something else in the caches, such as a copy of a weight instead of the
        weight, and that can cost the backward more than the forward saved.
        """
        timing = self._compare(self._separate, fused)
        alone = fused.requires_grad and self._step.passes == "forward" and not fused.compiling
        if not alone or timing.speed < 1:
            return timing
        ways = self._timed(self._separate, both=True), self._timed(fused, both=True)
        both = compare(*ways, self._device, most=TURNS)
        return both if both.speed + both.noise < 1 else timing

    def _compare(self, one: Program, other: Program) -> Timing:
        return compare(self._timed(one), self._timed(other), self._device)

    def _saved(self, program: Program) -> int:
        if not program.requires_grad:
            return 0
        params = self._leaves[1 : 1 + program.num_params]
        return saved_bytes(lambda: self._forward(program), params)

    def _recomputable(self, fused: Program) -> int:
        """The bytes that the next op need not keep, since the fused op computes them again.

        At the end of a chain too: the entry is for other chains as well, where an op follows.
        """
        whole, behind = self._call.program, self._of.stop
        if not any(step.source and step.op.recomputes for step in fused.forward):
            return 0
        if behind < len(whole.chain.ops):
            keeps = "input" in (declared(whole.chain.ops[behind], "saved_names") or ())
            if not (keeps and any(whole.facts.needs.params[behind])):
                return 0
        output, *_ = self._forward(fused)
        return output.numel() * output.element_size()

    # Values and gradients

    def _difference(self, program: Program) -> str:
        """How a program differs from the separate ops, as a sentence, or ``""``."""
        separate, fused = self._seeded(self._separate), self._seeded(program)
        if changed := self._changed():
            return changed
        exact = {} if self.draws else self._exact()
        env, chain = self._separate.env, self._separate.chain
        dtype = torch.float8_e5m2 if env.recipe is not None else env.dtype
        product = any(op.out_features is not None for op in chain.ops)
        twice = dtype is torch.float16 or env.recipe is not None
        rule: dict[str, Any] = {"dtype": dtype, "gemm": product, "roundings": 1 + twice}
        for what, expected in separate.items():
            got, truth = fused.get(what), exact.get(what)
            # for the same seed it may draw otherwise
            values = not self.draws and got is not None and got.is_floating_point()
            if problem := problem_of(what, got, expected, truth, values=values, **rule):
                return f"differs from the separate ops: {problem}"
        return ""

    def _changed(self) -> str:
        """Which tensor that it does not own a fusion wrote into, as a sentence; that is undone."""
        changed = []
        for place, (leaf, owned) in enumerate(zip(self._leaves, self._owned, strict=True)):
            if not _equal(leaf, owned):
                self._leaves[place] = _copy(owned).requires_grad_(leaf.requires_grad)
                changed.append(self._names[place])
        for shape, weight in tuple(self._weights.items()):
            if not _equal(weight, self._drawn(shape)):
                del self._weights[shape]
                changed.append("the gradient that arrives")
        return f"changes {changed[0]}, which it does not own" if changed else ""

    def _exact(self) -> Results:
        """The results in fp64; none if the ops do not support it, then the separate ops decide."""
        if self._separate.env.recipe is not None:
            return {}
        tensors = [leaf.detach() for leaf in self._leaves]
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        for tensor, leaf in zip(wide, self._leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        try:
            return self._run(part_program(self._call, self._of, exact=True), wide)
        except Exception:
            return {}

    def _seeded(self, program: Program, seed: int = 0) -> Results:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return self._run(program, self._leaves)

    def _run(self, program: Program, leaves: Sequence[Tensor]) -> Results:
        outputs = _outputs(program, leaves, self._kwargs)
        grads = self._gradients(outputs, leaves)
        results = {f"output {i}" if i else "the output": y for i, y in enumerate(outputs)}
        named = zip(self._names, leaves, strict=True)
        wanted = [f"the gradient of {name}" for name, leaf in named if leaf.requires_grad]
        return results | dict(zip(wanted, grads, strict=False))  # none at all without a backward

    def _forward(self, program: Program) -> tuple[Tensor, ...]:
        return _outputs(program, self._leaves, self._kwargs)

    def _gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor | None]:
        """The gradients of the leaves that have one, for fixed gradients of the outputs."""
        wanted = [leaf for leaf in leaves or self._leaves if leaf.requires_grad]
        dys = [self._weight(y) if y.requires_grad else None for y in outputs]
        # compiled code may reuse its buffers
        return gradients(outputs, wanted, dys, again=not self._separate.compiling)

    def _weight(self, output: Tensor) -> Tensor:
        """The gradient of an output, the same in every run."""
        shape = tuple(output.shape)
        if shape not in self._weights:
            self._weights[shape] = self._drawn(shape)
        return self._weights[shape].to(output.dtype)

    def _drawn(self, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(self._device, self._separate.env.dtype)


def _params(ops: Sequence[BasicOperation]) -> list[Tensor]:
    return [op.read_parameter(name).detach() for op in ops for name in op.param_names or ()]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with memory of its own, laid out as the tensor is: gaps and overlaps stay."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return tensor.detach().clone()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((span + 1,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two have the same numbers; NaN equals NaN."""
    alike = torch.isclose(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)
    return bool(alike.all())


def _same(one: Results, other: Results) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _outputs(program: Program, leaves: Sequence[Tensor], kwargs: Any) -> tuple[Tensor, ...]:
    """The outputs of a program; what is written in place is a copy."""
    x, *tensors = leaves
    if program.writes_extras:
        count = program.num_params
        tensors = [*tensors[:count], *[extra.clone() for extra in tensors[count:]]]
    for op, requires_grad in program.called_before:
        op.pre_fuser_forward(requires_grad=requires_grad)
    with torch.autocast(program.autocast_device, enabled=False):
        return as_tuple(_function(program)(kwargs, x, *tensors))


def _function(program: Program) -> Callable[..., Any]:
    """The function that runs a program, compiled if needed; kept on the program."""

    def function(kwargs: Any, x: Tensor, *tensors: Tensor) -> Any:
        if program.requires_grad:
            return Pipeline.apply(program, kwargs, x, *tensors)  # type: ignore[no-untyped-call]
        return run_forward(None, program, kwargs, x, *tensors)

    if not program.compiling:
        return function
    if "_function" not in vars(program):
        vars(program)["_function"] = compiled(function)
    return vars(program)["_function"]  # type: ignore[no-any-return]
