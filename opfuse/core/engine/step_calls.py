"""Decides how the loops call a step: the method, its further arguments, casts, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cast import Cast
from ..introspection import op_class
from ..op import BasicOperation, is_direct
from ..op_context import OperationContext
from ..quantization import QuantizedTensor
from ..quantization.quantizer import same_quantizer
from .measured import Facts
from .step import Step


def lone_step(op: BasicOperation, place: int) -> Step:
    """A step of an op, or of a cast, by itself."""
    return Step(None, place, place + 1, (op,), op=op)


def finish(step: Step, pass_name: str, facts: Facts) -> None:
    """Decide how a step is called."""
    op, env, forward = step.op, facts.env, pass_name == "forward"
    if isinstance(op, Cast):
        _call_cast(step, forward)
        return
    ops = facts.chain.ops[step.start : step.stop]
    step.has_extras = any(each.num_extra_inputs or each.num_extra_outputs for each in ops)
    step.no_extras = ((),) * len(ops)
    step.given = any(facts.kwargs[step.start : step.stop])
    step.direct = not step.given and not step.has_extras and is_direct(op, pass_name)
    if forward:
        step.run = op.op_forward if step.direct else op.fuser_forward
        step.takes_quantized = step.start in facts.edges.forward and step.begin % 2 == 1
        step.width = facts.chain.later_widths.get(step.start)
    else:
        step.run = op.op_backward if step.direct else op.fuser_backward
        step.takes_quantized = step.stop in facts.edges.backward and step.end % 2 == 0
    if env.options.get("debug") and not env.compiling:
        who = f"{type(op).__name__} [{', '.join(op_class(each).__name__ for each in step.matched)}]"
        step.run = Watched(step.run, who, any(getattr(each, "in_place", False) for each in ops))
    if step.casts:
        step.run = WithCasts(step.run, step.matched)
    made_plain = env.recipe is not None and not step.takes_quantized
    step.prepares = made_plain or step.width is not None


def separate(step: Step, pass_name: str, last: int | None = None) -> list[Step]:
    """The steps of the ops and casts of a fused step, in the order of the pass.

    Args:
        step: A step of that pass.
        pass_name: ``"forward"`` or ``"backward"``.
        last: The last op that takes part; None: all do.
    """
    found: list[Step] = []
    edge, casts, forward = step.start, dict(step.casts), pass_name == "forward"
    for op in step.matched:
        if last is not None and edge > last:
            break
        if isinstance(op, Cast):
            found.append(lone_step(op, 2 * edge))
            _call_cast(found[-1], forward)
            continue
        found.append(alone := lone_step(op, 2 * edge + 1))
        alone.run = op.fuser_forward if forward else op.fuser_backward
        alone.prepares = True
        alone.takes_quantized = (edge if forward else edge + 1) in casts
        alone.recompute = step.recompute if edge == step.start else None
        alone.has_extras = bool(op.num_extra_inputs or op.num_extra_outputs)
        alone.no_extras = ((),)
        edge += 1
    return found if forward else found[::-1]


def _call_cast(step: Step, forward: bool) -> None:
    """Decide how a cast step is called; a loop passes the context of the op that asked for it."""
    step.direct, step.takes_quantized = forward, True
    step.run = step.op.op_forward if forward else step.op.fuser_backward


class InRange:
    """Wraps the method of a fused step in a range that ``torch.profiler`` shows.

    The range names the fusion, the plugin, the pass and the ops.
    """

    def __init__(self, step: Step, pass_name: str, run: Callable[..., Any]) -> None:
        self.__self__, self.__name__ = step.op, run.__name__
        self._run, source = run, step.source
        ops = " + ".join(op_class(op).__name__ for op in step.matched)
        owner = f" of {source.distribution}" if source.distribution else ""
        self._title = f"{source.name}{owner}, {pass_name}: {ops}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with torch.profiler.record_function(self._title):
            return self._run(*args, **kwargs)


_PER_OP = "basic_op_extra_inputs", "basic_op_kwargs", "basic_op_grad_extra_outputs"


class WithCasts:
    """Wraps the method of a fused op that casts, for loops that know only basic ops.

    The op gets a context for each cast, and an empty entry in every list with one per op. These
    entries are removed from its result.

    Args:
        method: ``fuser_forward``, ``fuser_backward`` or ``fuser_recompute``, bound to its op.
        ops: The basic ops and casts that it replaces.
    """

    def __init__(self, method: Callable[..., Any], ops: Sequence[BasicOperation]) -> None:
        self.__self__: Any = getattr(method, "__self__", None)
        self.__name__, self._method = method.__name__, method
        self._casts = [(i, op) for i, op in enumerate(ops) if isinstance(op, Cast)]
        self._basic = [i for i, op in enumerate(ops) if not isinstance(op, Cast)]
        last = ops[0 if self.__name__ == "fuser_backward" else -1]
        self._gives = last if isinstance(last, Cast) else None

    def __call__(
        self, ctxs: Any, *args: Any, scales: Any = None, usage: Any = None, **given: Any
    ) -> Any:
        """Run the method.

        Args:
            ctxs: One context per basic op.
            *args: The incoming tensor; nothing for ``fuser_recompute``.
            scales: For ``fuser_recompute``: the result of its cast, without the data.
            usage: The copies that the result had.
            **given: The arguments with an entry per basic op.
        """
        for name in _PER_OP:
            if name in given:
                given[name] = self._among(given[name], [() if "kwargs" not in name else {}])
        contexts = self._contexts(scales, usage)
        result = self._method(self._among(ctxs, contexts), *args, **given)
        for ctx in contexts:
            if ctx.to_save:
                raise RuntimeError(
                    f"{self._who} gave tensors to save_for_backward of a Cast, which saves "
                    f"nothing: they would be lost"
                )
        if type(result) is not tuple:
            return result
        if self._gives is not None:
            self._check_quantized(result[0])
        return (result[0], *[self._without_casts(entries) for entries in result[1:]])

    @property
    def _who(self) -> str:
        return f"{type(self.__self__).__name__}: {self.__name__}"

    def _check_quantized(self, given: Any) -> None:
        """Refuse a result of another kind than that of its last cast."""
        cast: Any = self._gives
        right = isinstance(given, QuantizedTensor) and same_quantizer(
            given.quantizer, cast.quantizer
        )
        if given is not None and not (right and given.usage.covers(cast.usage)):
            what = repr(given) if isinstance(given, QuantizedTensor) else "a plain tensor"
            raise TypeError(
                f"{self._who} expected to give what {type(cast.quantizer).__name__} quantizes for "
                f"{cast.usage}, since it ends with a Cast; got {what}"
            )

    def _contexts(self, scales: Any, usage: Any) -> list[OperationContext]:
        made = []
        for _, cast in self._casts:
            ctx: Any = OperationContext()
            ctx.quantizer, ctx.usage = cast.quantizer, usage or cast.usage
            ctx.saved_tensors = None if scales is None else (scales,)
            made.append(ctx)
        return made

    def _among(self, per_op: Sequence[Any], per_cast: Sequence[Any]) -> list[Any]:
        """A list with one entry per basic op, with those of the casts in their places."""
        among = list(per_op)
        for number, (place, _) in enumerate(self._casts):
            among.insert(place, per_cast[number % len(per_cast)])
        return among

    def _without_casts(self, entries: Any) -> Any:
        if len(entries) != len(self._casts) + len(self._basic):
            return entries  # too many, or too few: the loop refuses it
        for place, _ in self._casts:
            of_cast = entries[place]
            if of_cast and not all([entry is None for entry in of_cast]):
                raise RuntimeError(
                    f"{self._who} gave tensors for a Cast, "
                    f"which has no parameters and no extra tensors"
                )
        return list(map(entries.__getitem__, self._basic))


_FORWARD = "its input", "a parameter", "an extra input", "basic_op_extra_inputs"
_BACKWARD = (
    "the gradient of its output",
    "a tensor saved for its backward",
    "the gradient of an extra output",
    "basic_op_grad_extra_outputs",
)
"""The arguments of a step: its tensor, those of its ops, extra ones, and the name of these."""


class Watched:
    """Wraps the method of a step and compares the given tensors before and after.

    Args:
        method: ``op_forward``, ``op_backward``, ``fuser_forward`` or ``fuser_backward``, bound to
            its op.
        who: The name of the step in errors.
        in_place: Whether it may write into its extra inputs.

    Raises:
        RuntimeError: In a call: a tensor has other values than before, or another version.
    """

    def __init__(self, method: Callable[..., Any], who: str, in_place: bool) -> None:
        self.__self__, self.__name__ = getattr(method, "__self__", None), method.__name__
        self._method, self._who, self._in_place = method, who, in_place

    def __call__(self, ctxs: Any, x: Any, **given: Any) -> Any:
        """Run the method."""
        before = [(what, tensor, *_state(tensor)) for what, tensor in self._tensors(ctxs, x, given)]
        result = self._method(ctxs, x, **given)
        for what, tensor, version, values in before:
            now, values_now = _state(tensor)
            if now != version or not torch.equal(values_now, values):
                raise RuntimeError(
                    f"{self._who} wrote into {what} in {self.__name__}: it must leave that as it is"
                )
        return result

    def _tensors(self, ctxs: Any, x: Any, given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        contexts = ctxs if isinstance(ctxs, list) else [ctxs]
        backward = self.__name__.endswith("backward")
        first, kept, extra, name = _BACKWARD if backward else _FORWARD
        held = [] if backward and contexts[-1].owns_grad_output else [(first, [x])]
        held += [(kept, ctx.saved_tensors if backward else ctx.params) for ctx in contexts]
        held += [] if self._in_place else [(extra, of_op) for of_op in given.get(name, ())]
        for what, values in held:
            for value in values or ():
                parts = value.tensors() if isinstance(value, QuantizedTensor) else (value,)
                yield from [(what, tensor) for tensor in parts if tensor is not None]


def _state(tensor: Tensor) -> tuple[int, Tensor]:
    """The version of a tensor, and a copy of its bytes, since NaN is not equal to itself."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.detach().reshape(-1).clone().view(torch.uint8)
