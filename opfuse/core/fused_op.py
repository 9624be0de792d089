"""Fused operations: what replaces a run of basic ops, and holds no state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn, zeros_like

from .cast import Cast
from .environment import Environment
from .fusible import FusibleOperation
from .op import BasicOperation
from .op_context import AllGrads, Extras, Outputs, alias, summed
from .overwriting import may_write
from .quantization import QuantizedTensor, Quantizer


class _FixedChildren(nn.Module):
    """A module with children that are fixed: a fuser that captured them would run the old ones."""

    _is_complete = False

    def _refuse(self, name: str, value: Any) -> None:
        is_fixed = self._is_complete and (name == "basic_ops" or name.isdecimal())
        # torch's wrappers set the one that is there
        if is_fixed and self._modules.get(name) is not value:
            raise RuntimeError("the basic ops of a fused op are fixed: make another op")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse(name, module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse(name, None)
        super().__delattr__(name)


class _BasicOps(_FixedChildren, nn.ModuleList):
    """The basic ops of a fused op."""

    def __init__(self, ops: Iterable[nn.Module]) -> None:
        super().__init__(ops)
        self._is_complete = True

    def insert(self, index: int, module: nn.Module) -> None:
        self._refuse("0", None)


class FusedOperation(_FixedChildren, FusibleOperation):
    """An op that replaces a run of basic ops and keeps no state of its own.

    A fusion builds one from the ops it matched; ``build`` of a :class:`opfuse.Fusion` can be the
    subclass itself. In a forward-only fusion, ``fuser_forward`` must leave on each context exactly
    what the basic op would, as ``saved_names`` and ``context_names`` declare. A backward-only
    fusion may rely on exactly that. A joint fusion may keep anything.

    Attributes:
        overlaps: Whether the collectives among its ops run beside other work.
        casts: Whether it performs the casts that a recipe wants between its ops. For fusions that
            are plain functions; :class:`opfuse.Fusion` has an argument for it.
        fallback: A sentence that says why it does not run its kernel where it was planned, or
            empty. Reports then count it as running in PyTorch's operations.
        notes: Text that reports add about this op, such as the time it spent compiling; an
            attribute or a property.

    Args:
        basic_ops: The basic ops that this op replaces, in order.

    Raises:
        ValueError: There is none.
        TypeError: One of them is not a basic op.
    """

    is_fused_op = True
    _is_base = True
    kwarg_names: ClassVar[tuple[str, ...] | None] = ()
    param_names: tuple[str, ...] | None = ()
    notes: str = ""
    overlaps: bool = False
    casts: bool = False
    fallback: str = ""

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        ops = list(basic_ops)
        if not ops:
            raise ValueError(f"{type(self).__name__} needs at least one basic op to replace")
        for op in ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"{type(self).__name__} replaces basic ops, got {type(op).__name__}"
                )
        self.basic_ops = _BasicOps(ops)
        self._is_complete = True

    def _take_name(self, name: str) -> None:
        for op in [op for op in self.basic_ops if op._name in ("", self._name)]:
            op._take_name(name)  # type: ignore[operator]
        super()._take_name(name)

    def get_input_quantizer(self) -> Quantizer | None:
        """The input quantizer of the first basic op."""
        return self.basic_ops[0].get_input_quantizer()  # type: ignore[no-any-return,operator]

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of the last basic op's output gradient."""
        return self.basic_ops[-1].get_grad_output_quantizer()  # type: ignore[no-any-return,operator]

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """The configurations that ``opfuse tune`` chooses among, at most 8, as JSON-able data.

        The fastest is ``env.configuration`` when :meth:`planned` is called on this machine. If
        nothing was measured, that is None, and the op decides by itself.
        """
        return ()

    def planned(self, env: Environment) -> None:
        """Called once, when a plan takes this op, with the environment that ``when`` got.

        If it raises, for instance because of an option's value, the user is warned and the fusion
        is not used.
        """

    # The basic ops one after the other: the fallback of kernels, and the reference for their
    # results

    def run_separately(
        self,
        basic_op_ctxs: Sequence[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> Outputs:
        """Run the forward of the basic ops, one after the other.

        Arguments, result and contexts are as for ``fuser_forward``.
        """
        ops: list[Any] = [*self.basic_ops]
        x, outputs, last = input_, [], len(ops) - 1
        made: dict[str | None, Tensor | None] = {}
        for i, (op, ctx) in enumerate(zip(ops, basic_op_ctxs, strict=True)):
            if i and isinstance(x, QuantizedTensor) and not isinstance(ops[i - 1], Cast):
                x = x.dequantize()  # Quantize passes on what is cast before it
            pairs = zip(basic_op_extra_inputs[i], op._extra_input_channels, strict=True)
            extras = [made[channel] if extra is None else extra for extra, channel in pairs]
            x, (given,) = op.fuser_forward(
                [ctx],
                x,
                basic_op_extra_inputs=[extras],
                prev_op_grad_output_quantizer=prev_op_grad_output_quantizer if i == 0 else None,
                next_op_input_quantizer=next_op_input_quantizer if i == last else None,
                basic_op_kwargs=[basic_op_kwargs[i] if basic_op_kwargs else {}],
            )
            inside = map(alias, given) if ctx.requires_grad else given
            made.update(zip(op._extra_output_channels, inside, strict=True))
            outputs.append(given)
        return x, outputs

    def run_separately_backward(
        self,
        basic_op_ctxs: Sequence[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> AllGrads:
        """Run the backward of the basic ops, one after the other, as ``fuser_backward`` would.

        Of those that no gradient reaches, none gets out: see :class:`OperationContext`.
        """
        ops: list[Any] = [*self.basic_ops]
        dy: Tensor | None = grad_output
        of_params: list[Any] = [None] * len(ops)
        of_extras: list[Any] = [(None,) * op.num_extra_inputs for op in ops]
        inside: dict[str, Tensor | None] = {}
        # with keywords a gradient may be a tensor that the caller gave
        owns, shared = basic_op_ctxs[-1].owns_grad_output, self.kwarg_names or not may_write()
        for i, op in reversed([*enumerate(ops)]):
            ctx, behind = basic_op_ctxs[i], ops[i + 1 : i + 2]
            if not ctx.requires_grad:  # nor does any before it
                return None, of_params, of_extras
            if behind and isinstance(dy, QuantizedTensor) and not isinstance(behind[0], Cast):
                dy = dy.dequantize()
            owned, ctx.owns_grad_output = ctx.owns_grad_output, owns
            given = zip(basic_op_grad_extra_outputs[i], op._extra_output_channels, strict=True)
            grads = [summed(grad, inside.get(channel)) for grad, channel in given]
            dy, (of_params[i],), (of_op,) = op.fuser_backward(
                [ctx], dy, basic_op_grad_extra_outputs=[grads]
            )
            of_extras[i] = of_op = tuple(of_op)
            for channel, grad in zip(op._extra_input_channels, of_op, strict=True):
                if channel is not None and ctx.is_reached:
                    inside[channel] = summed(grad, inside.get(channel))
            if not ctx.is_reached and dy is not None:  # 0 times what is not finite is NaN
                dy = zeros_like(dy)
            ctx.owns_grad_output = owned
            owns = not shared and op.grad_input in ("fresh", "same")[: 1 + owns]
        return dy, of_params, of_extras

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Apply the basic ops, fused as the installed plugins allow."""
        return self._own_fuser().run(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
