"""Functions of the rows of logits, compiled: the losses of cross entropy, and their gradient.

PyTorch's operations go over the logits half a dozen times, in fp32. These functions read them once
from memory in the forward, read and write them once in the backward, and keep two numbers per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse import Environment, FusedOperation, Fusion
from opfuse.ops import CrossEntropy
from opfuse.ops.authoring import wide
from opfuse.ops.cross_entropy import LossNumbers, reduced, row_weights

from . import conditions
from .fused import fit, matrix, notes_of
from .kernels import CompiledKernel, cached
from .tracing import Spec

Arrays = dict[Any, Tensor]
OF_ROW = Spec(torch.int64)
_MOST_NUMBERS = 8


class Compiled(FusedOperation):
    """Ops with a compiled function for each pass."""

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._parts = tuple(basic_ops)  # in a tuple: looking up a module's attributes is slow
        self._backend = conditions.DEFAULTS["inductor.backend"][0]
        self._min_elements = conditions.DEFAULTS["inductor.min_elements"]
        self._made: dict[str, list[CompiledKernel]] = {}

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._backend = conditions.option(env, "inductor.backend")
        self._min_elements = conditions.option(env, "inductor.min_elements")

    def made(
        self,
        name: str,
        function: Callable[..., Arrays],
        how: Any,
        specs: Sequence[Spec],
        device: torch.device,
    ) -> CompiledKernel:
        """The function of a pass.

        Args:
            name: The pass.
            function: Takes ``how``, and a tensor for each of ``specs``.
            how: What else is part of the function; hashable.
            specs: Of its inputs.
            device: Where it runs.
        """
        key = function, how, tuple(specs), device, torch.get_num_threads(), self._backend

        def make() -> CompiledKernel:
            title = f"the {name} of {' + '.join(type(op).__name__ for op in self._parts)}"
            bound = functools.partial(function, how)
            return CompiledKernel(title, bound, specs, device, self._backend)

        self._made[name] = [cached(key, make)]
        return self._made[name][0]

    @property
    def notes(self) -> str:  # type: ignore[override]
        """Text that ``opfuse.explain`` adds: the time spent compiling, or that none was."""
        return notes_of(self._made) if self._made else "nothing was compiled, the op ran by itself"


class CompiledRows(Compiled):
    """An op that gives numbers for each row of logits, forward and backward.

    Small inputs, those that no kernel takes, and settings of the op after the eighth go through the
    op, as if there were no fusion.
    """

    _check: str
    """The name of the op's method that refuses targets of another shape."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._numbers: set[Any] = set()

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Any]],
        **unused: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (op,), (ctx,), ((targets,),) = self._parts, basic_op_ctxs, basic_op_extra_inputs
        getattr(op, self._check)(targets, input_.shape)
        rows, numbers = targets.numel(), op.numbers_of()
        plain = type(input_) is Tensor and type(targets) is Tensor
        small = rows < 2 or input_.numel() < max(self._min_elements, 1)
        if not plain or small or not self._compiles_for(self._of_rows(numbers)):
            return self.run_separately(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs
            )
        flat = fit(targets.long(), OF_ROW, rows)
        _refuse_what_is_no_class(flat, input_.shape[-1], numbers)
        found = self.values(matrix(input_, rows), flat, self._of_rows(numbers))
        y, extras, kept = self.results(op, ctx, found, input_, targets)
        if ctx.requires_grad:
            needed = ctx.input_requires_grad
            ctx.numbers, ctx.compiled = numbers, True
            ctx.to_save = (input_, targets, *kept) if needed else (None,) * (2 + len(kept))
        return y, [extras]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Any]],
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (ctx,) = basic_op_ctxs
        if not getattr(ctx, "compiled", False):
            return self.run_separately_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )
        x, targets, *kept = ctx.saved_tensors
        if x is None:
            return None, [()], [(None,)]
        rows = targets.numel()
        given = matrix(x, rows), fit(targets.long(), OF_ROW, rows), kept
        dx = self.gradient(*given, (grad_output, *basic_op_grad_extra_outputs[0]), ctx.numbers)
        return dx.view(x.shape), [()], [(None,)]

    def values(self, x: Tensor, targets: Tensor, numbers: Any) -> list[Tensor]:
        """What the forward's function gives."""
        raise NotImplementedError

    def results(
        self, op: Any, ctx: Any, found: list[Tensor], x: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
        """The output, the extra outputs and what is kept, from what the forward's function gave."""
        raise NotImplementedError

    def gradient(
        self, x: Tensor, targets: Tensor, kept: list[Tensor], grads: Any, numbers: Any
    ) -> Tensor:
        """The gradient of the logits.

        Args:
            x: The logits, ``(rows, classes)``.
            targets: ``(rows,)``, int64.
            kept: As :meth:`results` gave it.
            grads: Of the output and the extra outputs; None: there is none.
            numbers: Of the forward.
        """
        raise NotImplementedError

    def _of_rows(self, numbers: Any) -> Any:
        """The numbers of the op, without those that do not matter to a row."""
        return numbers

    def _compiles_for(self, numbers: Any) -> bool:
        """Whether these are among the first numbers: a schedule would compile at every step."""
        if len(self._numbers) < _MOST_NUMBERS:
            self._numbers.add(numbers)
        return numbers in self._numbers

    def kernel(
        self, name: str, function: Callable[..., Arrays], rows: int, x: Tensor, how: Any
    ) -> CompiledKernel:
        """The function of a pass, for logits like these.

        Args:
            name: The pass.
            function: Takes ``how``, the logits, the targets, and numbers of rows.
            rows: How many such numbers.
            x: The logits.
            how: What else is part of the function; hashable.
        """
        specs = Spec(x.dtype, x.shape[-1]), OF_ROW, *[Spec(wide(x.dtype))] * rows
        return self.made(name, function, how, specs, x.device)


class CompiledLoss(CompiledRows):
    """Cross entropy, forward and backward; see its base."""

    _check = "check_targets"

    def _of_rows(self, numbers: LossNumbers) -> LossNumbers:
        # class weights are factors of rows, but for those of what smoothing spreads
        weight = numbers.weight if numbers.label_smoothing else None
        return numbers._replace(reduction="none", weight=weight)

    def _compiles_for(self, numbers: LossNumbers) -> bool:
        return numbers.weight is None and super()._compiles_for(numbers)

    def values(self, x: Tensor, targets: Tensor, numbers: LossNumbers) -> list[Tensor]:
        """See the base."""
        return self.kernel("forward", _losses, 0, x, numbers)([x, targets], len(x))

    def results(
        self, op: Any, ctx: Any, found: list[Tensor], x: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
        """See the base."""
        losses, *kept = found
        return op.in_dtype(reduced(losses, targets, op.numbers_of()), ctx, x), (), kept

    def gradient(
        self, x: Tensor, targets: Tensor, kept: list[Tensor], grads: Any, numbers: LossNumbers
    ) -> Tensor:
        """See the base."""
        weights = row_weights(grads[0].to(wide(x.dtype)), targets, numbers)
        backward = self.kernel("backward", _gradients, 3, x, self._of_rows(numbers))
        return backward([x, targets, *kept, weights], len(x))[0]  # type: ignore[no-any-return]


def _refuse_what_is_no_class(targets: Tensor, classes: int, numbers: Any) -> None:
    """Let PyTorch raise its own error, for logits that take no memory."""
    nothing = torch.zeros((), device=targets.device).expand(len(targets), classes)
    F.nll_loss(nothing, targets, ignore_index=numbers.ignore_index, reduction="none")


def _losses(numbers: LossNumbers, x: Tensor, targets: Tensor) -> Arrays:
    """The loss of each row, 0 where it is ignored; and what is kept.

    That is the largest logit of a row, and the logarithm of the sum of the exponentials of what all
    are less.
    """
    # each use is capped by itself: a tensor with more than one use would be written to memory
    largest = capped(numbers, x.amax(-1))
    spread = (capped(numbers, x) - largest.unsqueeze(-1)).exp().sum(-1).log()
    counted = targets != numbers.ignore_index
    places = targets.where(counted, 0).unsqueeze(-1)
    at_target = capped(numbers, x.gather(-1, places).squeeze(-1)) - largest
    loss = spread - at_target * (1 - numbers.label_smoothing)
    if numbers.label_smoothing:
        others = (capped(numbers, x) - largest.unsqueeze(-1)).mean(-1)
        loss = loss - others * numbers.label_smoothing
    if numbers.z_loss:
        loss = loss + (largest + spread).square() * numbers.z_loss
    return {"loss": loss.where(counted, 0.0), 0: largest, 1: spread}


def _gradients(
    numbers: LossNumbers,
    x: Tensor,
    targets: Tensor,
    largest: Tensor,
    spread: Tensor,
    weights: Tensor,
) -> Arrays:
    """The gradient of the logits, as :meth:`opfuse.ops.CrossEntropy.fuser_backward` says."""
    z = capped(numbers, x)
    p = ((z - largest.unsqueeze(-1)) - spread.unsqueeze(-1)).exp()
    factor = weights * (1 + 2 * numbers.z_loss * (largest + spread)) if numbers.z_loss else weights
    hit = torch.arange(x.shape[-1], device=x.device) == targets.unsqueeze(-1)
    at_target = (weights * (1 - numbers.label_smoothing)).unsqueeze(-1)
    dz = p * factor.unsqueeze(-1) - torch.where(hit, at_target, 0.0)
    if numbers.label_smoothing:
        dz = dz - (weights * (numbers.label_smoothing / x.shape[-1])).unsqueeze(-1)
    if numbers.softcap is not None:
        dz = dz * (1 - (z / numbers.softcap).square())
    return {"x": dz.to(x.dtype)}


def capped(numbers: Any, x: Tensor) -> Tensor:
    """Logits in the dtype of the arithmetic, capped if the numbers say so."""
    z = x.to(wide(x.dtype))
    return z if numbers.softcap is None else torch.tanh(z / numbers.softcap) * numbers.softcap


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if env.device.type != "cpu":
        return f"it compiles this for cpu, the input is on {env.device.type}"
    return conditions.unavailable(env) or conditions.too_small(ops, env) or True


JOINT = [
    Fusion(
        (CrossEntropy,), CompiledLoss, pays, priority=-100, name="compiled loss", needs=("rows",)
    )
]
