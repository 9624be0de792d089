"""Routing of extra tensors: from the caller, between ops by channels, back to the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..extra_dtypes import is_kind, refuse_kind
from ..op_context import summed
from ..quantization import QuantizedTensor
from ..quantization.activation import plain
from .chain import Chain, Slot
from .program import Program
from .step import Step


class ForwardExtras:
    """The extra inputs and outputs of one forward pass.

    Attributes:
        shapes: Shape, dtype and device of the main output of steps with extra tensors, by their
            last op.

    Args:
        program: The program that runs.
        tensors: The parameters, then the extra inputs that the caller gave.
        recorded: Whether a backward will follow.
    """

    def __init__(self, program: Program, tensors: Sequence[Tensor], recorded: bool) -> None:
        self._program, self._chain = program, program.chain
        self._given = [plain(tensor) for tensor in tensors[program.num_params :]]
        self._inputs: dict[Slot, Any] = {
            slot: self._given[number] for slot, number in self._chain.arguments.items()
        }
        self._outputs: dict[Slot, Any] = {}
        self._aliases: dict[Slot, Tensor] = {}
        self.shapes: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._flowing = program.gradient_channels if recorded else ()
        watched = program.writes_extras and program.requires_grad and not program.compiling
        self._versions = [tensor._version for tensor in self._given] if watched else None

    def given(self, step: Step) -> list[list[Tensor | None]]:
        """The extra inputs of each basic op of a step; None where the producer is inside it."""
        gathered = []
        for i in range(step.start, step.stop):
            slots: list[Tensor | None] = []
            for k in range(self._chain.ops[i].num_extra_inputs):
                source = self._chain.sources.get((i, k))
                if source is None:
                    slots.append(self._inputs[i, k])
                elif step.start <= source[0]:
                    slots.append(None)
                else:
                    tensor = self._aliases.get(source, self._outputs[source])
                    if not is_kind(kind := self._chain.kinds[i, k], tensor.dtype):
                        who = f"extra input {k} of {self._chain.name(i)}, out of a channel,"
                        refuse_kind(who, kind, tensor.dtype)
                    slots.append(tensor)
            gathered.append(slots)
        return gathered

    def keep(self, step: Step, outputs: Sequence[Sequence[Tensor | None]], x: Any) -> None:
        """Check and keep the extra outputs of a step; ``x`` is its main output."""
        chain = self._chain
        # a quantized tensor has an unquantized gradient
        parts = x.tensors() if isinstance(x, QuantizedTensor) else (x,)
        (device, *_) = [part.device for part in parts if part is not None]
        self.shapes[step.stop - 1] = x.shape, x.dtype, device
        for i, tensors in _per_basic_op(step, outputs, chain, "extra outputs"):
            for k, tensor in enumerate(tensors):
                if tensor is None and chain.needed_after((i, k), step.stop):
                    what = f"gave None for extra output {k} of {chain.name(i)}"
                    who = type(step.op).__name__
                    raise RuntimeError(f"{who} {what}, which is used outside of it")
                self._outputs[i, k] = tensor
                if tensor is not None and (i, k) in self._flowing and tensor.is_floating_point():
                    # do not change the flag of a tensor that the caller may hold
                    alias = tensor.clone() if is_dynamo_compiling() else tensor.detach()
                    self._aliases[i, k] = alias.requires_grad_()

    def refuse_overwritten(self, x: Tensor, saved: Sequence[Tensor | None]) -> None:
        """Refuse an overwritten saved tensor that autograd's check misses.

        That check starts after the forward. Of the saved tensors that share memory with a written
        one, those that were given as inputs were saved before the write.
        """
        if self._versions is None:
            return
        pairs = zip(self._given, self._versions, strict=True)
        written = [tensor for tensor, version in pairs if tensor._version != version]
        if not written:
            return
        came_in = {id(_root(tensor)) for tensor in (x, *self._given)}
        memory = {_memory(tensor) for tensor in written}
        for tensor in [tensor for tensor in saved if tensor is not None]:
            if id(_root(tensor)) in came_in and _memory(tensor) in memory:
                raise RuntimeError(
                    "an in-place op overwrote an extra input that the backward of another op of "
                    "the chain needs: pass in_place=False, or a copy"
                )

    def unbound(self, x: Tensor, others: Sequence[Any]) -> Tensor:
        """Make the caller's outputs independent, see :func:`unbound`; return the main one."""
        slots = self._chain.public_outputs
        x, *public = unbound([x, *[self._outputs[slot] for slot in slots]], others)
        self._outputs.update(zip(slots, public, strict=True))
        return x

    def with_outputs(self, output: Tensor, func_ctx: Any) -> Any:
        """The output together with the extra outputs for the caller, if any."""
        slots = self._chain.public_outputs
        if not slots:
            return output
        public = [self._outputs[slot] for slot in slots]
        if func_ctx is not None and self._program.silent_outputs:
            func_ctx.mark_non_differentiable(*[public[k] for k in self._program.silent_outputs])
        return (output, *public)


class BackwardExtras:
    """The gradients of extra tensors in one backward pass.

    Args:
        program: The program that runs.
        grad_output: Gradient of the chain's output.
        grad_public: Gradients of the extra outputs that the caller got.
    """

    def __init__(
        self, program: Program, grad_output: Tensor | None, grad_public: Sequence[Tensor]
    ) -> None:
        self._chain = program.chain
        self._grad_output = grad_output
        self._of_inputs: dict[Slot, Any] = {}
        self._of_outputs: dict[Slot, Any] = dict(
            zip(self._chain.public_outputs, map(plain, grad_public), strict=True)
        )
        self._pending: list[tuple[Tensor, Tensor]] = []

    def given(self, step: Step) -> list[list[Tensor | None]]:
        """The gradients of the extra outputs of each basic op of a step."""
        ops = self._chain.ops
        return [
            [self._of_outputs.get((i, k)) for k in range(ops[i].num_extra_outputs)]
            for i in range(step.start, step.stop)
        ]

    def keep(self, step: Step, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """Keep the gradients of extra inputs, or add them to those of the channel's producer."""
        chain = self._chain
        for i, tensors in _per_basic_op(step, grads, chain, "extra-input gradients"):
            for k, grad in enumerate(tensors):
                source = chain.sources.get((i, k))
                if source is None:
                    self._of_inputs[i, k] = grad
                elif source[0] < step.start:
                    self._of_outputs[source] = summed(self._of_outputs.get(source), grad)

    def last_given(self) -> int:
        """The last op whose extra output gets a gradient; -1 if there is none."""
        return max([i for (i, _), grad in self._of_outputs.items() if grad is not None], default=-1)

    def reach_no_further(self, ctxs: Sequence[Any]) -> None:
        """Keep what the quantizers of these ops recorded: only zeros will reach them."""
        quantizers = [quantizer for ctx in ctxs for quantizer in ctx.quantizers.values()]
        state = [getattr(q, name) for q in quantizers for name in q.pending_names]
        self._pending = [(tensor, tensor.clone()) for tensor in state]
        self._reaching = dict(self._of_outputs)

    def begin_again(self, ctx: Any, grad: Tensor) -> tuple[Tensor, tuple[()]]:
        """As a step between later ops and the last one that a gradient reaches: zeros."""
        self._of_outputs = self._reaching
        return torch.zeros_like(grad), ()

    def forget_after(self, index: int) -> None:
        """Discard the gradients and records of later ops: no gradient reached them."""
        self._of_inputs = {slot: grad for slot, grad in self._of_inputs.items() if slot[0] <= index}
        for tensor, before in self._pending:
            tensor.copy_(before)

    def ends(self, dx: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients that precede and follow those of the parameters; no two share memory."""
        of_arguments: list[Tensor | None] = [None] * len(self._chain.external_inputs)
        for slot, number in self._chain.arguments.items():
            of_arguments[number] = summed(of_arguments[number], self._of_inputs.get(slot))
        ends = [dx, *of_arguments]
        if not is_dynamo_compiling():
            first = self._grad_output
            _separate(ends, {} if first is None else {_memory(first): first})
        return [None, None, *ends[:1]], ends[1:]


def _separate(grads: list[Tensor | None], seen: dict[int, Tensor]) -> None:
    """Copy gradients that share memory: autograd would keep both as ``.grad``."""
    for i, grad in enumerate(grads):
        if grad is not None and seen.setdefault(_memory(grad), grad) is not grad:
            grads[i] = grad.clone()


def unbound(outputs: list[Any], others: Sequence[Any]) -> list[Any]:
    """Outputs, those that are views turned into tensors, unless others own their memory.

    PyTorch refuses to write in place into a view that a Function returns. A fused op often returns
    its matrix in the shape of the input, which is such a view; the separate ops do not.
    """
    if not any([type(each) is Tensor and each._is_view() for each in outputs]):
        return outputs
    owned = [_memory(each) for each in (*outputs, *others) if isinstance(each, Tensor)]
    return [
        torch.ops.aten._unsafe_view.default(each, each.shape)
        if type(each) is Tensor and each._is_view() and owned.count(_memory(each)) == 1
        else each
        for each in outputs
    ]


def _root(tensor: Tensor) -> Tensor | None:
    """The tensor itself, or the one that it is a view of."""
    return tensor._base if tensor._is_view() else tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _per_basic_op(
    step: Step, given: Sequence[Sequence[Any]], chain: Chain, what: str
) -> Iterator[tuple[int, Sequence[Any]]]:
    """The results of a step per basic op, checked against their declarations."""
    who, count = f"{type(step.op).__name__} must give", step.stop - step.start
    if len(given) != count:
        raise RuntimeError(f"{who} {what} for {count} basic ops, gave {len(given)}")
    for i, tensors in enumerate(given, step.start):
        op = chain.ops[i]
        count = op.num_extra_outputs if what == "extra outputs" else op.num_extra_inputs
        if len(tensors) != count:
            raise RuntimeError(f"{who} {count} {what} for {chain.name(i)}, gave {len(tensors)}")
        yield i, tensors
