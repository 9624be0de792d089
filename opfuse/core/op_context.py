"""The context of an op, which carries what its backward needs from the forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

if TYPE_CHECKING:
    from .quantization import QuantizedTensor, Quantizer, Usage, WeightCache

Grads = Iterable[Tensor | None] | None
"""The gradients of one op's parameters."""
Extras = Sequence[Sequence[Tensor | None]]
"""The extra inputs or outputs of each op, or their gradients."""
Outputs = tuple[Tensor, Extras]
"""The result of ``fuser_forward``: the output, and the extra outputs of each op."""
AllGrads = tuple[Tensor | None, Sequence[Grads], Extras]
"""The result of ``fuser_backward``: the gradients of input, parameters, and extra inputs."""


class OperationContext:
    """The state that the forward of one basic op leaves for its backward.

    The fuser fills in the documented attributes before ``op_forward`` runs. A fused op must not
    change them: the contexts of ops of the library serve later calls. An op may add attributes if
    it declares ``context_names``, or declares nothing at all; tensors go through
    :meth:`save_for_backward`. The backward gets another context with the same attributes, so
    nothing written in forward is ever mutated. Keep no reference to a context. The context of an op
    that adds no attributes accepts none (AttributeError).

    Attributes:
        requires_grad: Whether this op takes part in the backward at all.
        input_requires_grad: Whether the gradient of the op's input is needed.
        params: The op's parameter values of this call, in ``param_names`` order (forward only).
        param_requires_grad: One flag per parameter.
        dtype: The dtype that autocast asks the op to compute in; None: that of the input.
        backward_override: The ``backward_override`` of the recipe, or None.
        prev_op_grad_output_quantizer: The quantizer that the previous op wants for the gradient of
            its output.
        next_op_input_quantizer: The quantizer that the next op wants for its input.
        quantizers: This op's own quantizers by name: ``"input"``, ``"weight"``, ``"grad_output"``,
            or as its roles say; empty without a recipe.
        weights: The casts of its weights; see :meth:`quantized_weight`.
        saves_params: Whether the op may save a parameter as it is, and not as autocast cast it:
            the backward casts it again. True under ``options(prefer="memory")``, if all parameters
            of the op are registered Parameters that need a gradient. See
            :meth:`opfuse.ops.BasicLinear.operands`.
        saved_tensors: The values passed to :meth:`save_for_backward` (backward only).
        owns_grad_output: Whether the backward may overwrite ``grad_output`` (backward only).
        is_reached: Whether a gradient reaches the op. A joint fusion also runs where one reaches
            only some of its ops, and then gets a ``grad_output`` of zeros, which give NaN times a
            value that is not finite: its backward leaves out the others (backward only).
        grad_sum: The sums of the gradients of the op's weights, to which its products may add;
            None: there are none. Its method ``add(product)`` calls ``product(sum, beta)`` with
            the sum, or a list for several weights, None in place of one that is not needed, and
            the factor of what is in it. It returns a list, which the backward then gives for the
            weights; or None, if ``product`` returned False or was not called (backward only).
        may_recompute: On the first context of a fused op that ``recomputes``, whether the next op
            can do without a saved input; never if its first op takes no part in the backward
            (forward only).
        recomputable_output: The output, which the forward then sets to agree to compute it again.
    """

    def __init__(self) -> None:
        self.requires_grad: bool = True
        self.input_requires_grad: bool = True
        self.params: tuple[Tensor, ...] = ()
        self.param_requires_grad: tuple[bool, ...] = ()
        self.dtype: torch.dtype | None = None
        self.backward_override: str | None = None
        self.prev_op_grad_output_quantizer: Quantizer | None = None
        self.next_op_input_quantizer: Quantizer | None = None
        self.quantizers: dict[str, Quantizer] = {}
        self.weights: WeightCache | None = None
        self.saves_params: bool = False
        self.saved_tensors: tuple[Any, ...] | None = None
        self.to_save: tuple[Any, ...] | None = None  # by save_for_backward
        self.owns_grad_output: bool = False
        self.is_reached: bool = True
        self.grad_sum: Any = None
        self.may_recompute: bool = False
        self.recomputable_output: Tensor | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors (or quantized tensors, or None) for the backward, as ``saved_tensors``."""
        self.to_save = tensors

    def quantized_weight(
        self, usage: Usage, *, name: str = "weight", index: int = 0, part: int | None = None
    ) -> QuantizedTensor:
        """Return a weight of this op as its quantizer casts it, from the cache if still valid.

        Args:
            usage: The copies that are needed.
            name: The name of its quantizer.
            index: Its index in ``params``.
            part: Index of the matrix in that parameter; None: it is one matrix.
        """
        assert self.weights is not None, "there is no recipe"
        return self.weights.quantized(name, self.params[index], self.quantizers[name], usage, part)


Unread: TypeAlias = Annotated[Any, "unread"]
"""The annotation of an argument that callers may pass and that the op does not read.

The engine does not pass a Transformer Engine quantizer that an op annotates so.
"""

QUANTIZERS = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")


def asks_for_quantizers(op: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which Transformer Engine quantizers ``op_forward`` takes: by position, by name."""
    forward = op.op_forward
    return _asked_by(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))


asks_for_quantizers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


@functools.lru_cache(maxsize=1024)
def _asked_by(function: Any, is_method: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parameters = list(inspect.signature(function).parameters.values())[3 if is_method else 2 :]
    parameters = [p for p in parameters if p.annotation not in ("Unread", Unread)]
    if named := tuple(p.name for p in parameters if p.name in QUANTIZERS):
        return (), named
    first_two = [p.name[:7] for p in parameters[:2] if p.kind is p.POSITIONAL_OR_KEYWORD]
    return (QUANTIZERS, ()) if first_two == ["prev_op", "next_op"] else ((), ())


class ModuleCache:
    """Values derived from a module: dropped, never copied, when the module is copied or pickled."""

    def __init__(self) -> None:
        self.key: Any = (ModuleCache,)  # equal to no key: copies start empty
        self.value: Any = None

    def __reduce__(self) -> tuple[type[ModuleCache], tuple[()]]:
        return ModuleCache, ()


def alias(output: Tensor | None) -> Tensor | None:
    """What a channel gives to a later op: it says that a gradient flows.

    The flag of a tensor that the caller may hold must not change.
    """
    if output is None or not output.is_floating_point():
        return output
    return (output.clone() if is_dynamo_compiling() else output.detach()).requires_grad_()


def summed(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be missing."""
    return a if b is None else b if a is None else a + b
