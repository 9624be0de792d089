"""Linear layers: ``Bias``, and ``Linear``, one name for ``BasicLinear`` and ``Bias``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.fusible import ParamSource
from ..core.op import BasicOperation, FusedOperation
from ..core.op_context import ModuleCache, OperationContext, Unread
from ._common import OpGrads, RowwiseOperation, WithLaterArguments, check_size, sum_rows
from ._reading import check_stock, tensor_of
from .basic_linear import BasicLinear, draw


class Bias(WithLaterArguments, RowwiseOperation):
    """``y = x + bias`` over the last dimension, in the dtype of the input.

    Takes and returns ``(..., size)``; ``bias`` has shape ``(size,)`` and starts at zero.

    Args:
        size: Size of the last dimension.
        device: Device of the bias; default: torch's.
        dtype: Dtype of the bias; default: torch's.
        tensor_parallel: False; True in a group of one process, in a larger one it comes with a
            later release.
        tensor_parallel_group: That group; default: all processes.

    Raises:
        TypeError: ``size`` is not a whole number.
        ValueError: ``size`` is negative.
        NotImplementedError: ``tensor_parallel=True`` in a group of several processes.
    """

    saved_names = ()
    takes_params = ("bias",)
    grad_input = "same"

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__(tensor_parallel_group, tensor_parallel=tensor_parallel)
        self.in_features = self.out_features = check_size(self, "size", size)
        self.bias = nn.Parameter(torch.zeros(self.out_features, device=device, dtype=dtype))

    @classmethod
    def reading(cls, module: nn.Module, bias: str = "bias", *, name: str = "") -> Bias:
        """Return an op that reads its bias from another module; see :meth:`BasicLinear.reading`.

        Args:
            module: The module that holds the bias.
            bias: The attribute of that module, of shape ``(size,)``.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError, ValueError: As for :meth:`BasicLinear.reading`.
        """
        (size,) = tensor_of(cls, module, bias, dims=1).shape
        op = cls(size, device="meta")
        op.read_parameters({"bias": ParamSource(module, bias)})
        op.name = name
        return op

    def reset_parameters(self) -> None:
        """Set the bias to zero, unless another module holds it."""
        if not self._sources:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """The size."""
        return f"size={self.in_features}"

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The sum; saves nothing."""
        y: Tensor = input_ + ctx.params[0]
        return y if y.dtype is input_.dtype else y.to(input_.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """``dx = dy``; ``dbias`` is the sum of ``dy`` over all rows."""
        if not ctx.param_requires_grad[0]:
            return grad_output, (None,)
        grad = grad_output.sum(0) if grad_output.ndim == 2 else sum_rows(grad_output, 1)
        return grad_output, (grad,)


class Linear(FusedOperation):
    """``y = x @ weight.T + bias``: ``torch.nn.Linear`` in two basic ops.

    The ops are ``BasicLinear`` and ``Bias``. Takes ``(..., in_features)`` and gives
    ``(..., out_features)``. Parameters, their names, initial values and state dict are those of
    ``torch.nn.Linear``; they live here, and the basic ops read them at every call.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether there is a bias; if not, ``self.bias`` is None and there is no ``Bias`` op.
        device: Device of the parameters; default: torch's.
        dtype: Dtype of the parameters; default: torch's.
        tensor_parallel_mode: As for :class:`BasicLinear`.
        tensor_parallel_group: As for :class:`BasicLinear`.
        sequence_parallel: As for :class:`BasicLinear`.
        rng_state_tracker_function: As for :class:`BasicLinear`.
        accumulate_into_main_grad: As for :class:`BasicLinear`.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is negative.
        NotImplementedError: An argument that comes with a later release.
        RuntimeError: As for :class:`BasicLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            ops.append(Bias(out_features, device=device, dtype=dtype))
        super().__init__(ops)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for op in ops:
            op.lend_parameters(self)
        if not bias:
            self.register_parameter("bias", None)
        draw(self.bias, self.in_features)

    @classmethod
    def of(
        cls, module: nn.Linear, *, accumulate_into_main_grad: bool = False, name: str = ""
    ) -> Linear:
        """Return a ``Linear`` that shares the Parameters of a ``torch.nn.Linear``.

        Both modules then hold the same Parameter objects. If one of them will get new ones, as by
        ``load_state_dict(assign=True)``, use :meth:`BasicLinear.reading`.

        Args:
            module: The module, which has no hooks, no parametrization and no forward of its own.
            accumulate_into_main_grad: As for :class:`BasicLinear`.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            TypeError: ``module`` is not such a module.
        """
        check_stock(cls, module, nn.Linear)
        op = cls(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            device="meta",
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        op.weight, op.bias = module.weight, module.bias  # type: ignore[assignment]
        op.name = name
        return op.train(module.training)

    def __copy__(self) -> Linear:
        """A shallow copy, whose basic ops read the copy's parameters."""
        twin: Linear = object.__new__(type(self))
        ops = type(self.basic_ops)([copy.copy(op) for op in self.basic_ops])
        for op in ops:
            vars(op)["_sources"] = {name: ParamSource(twin, name) for name in vars(op)["_sources"]}
        modules = {**self._modules, "basic_ops": ops}
        vars(twin).update(vars(self), _modules=modules, _cache=ModuleCache())
        return twin

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; refused for the bias of a layer without one."""
        if name == "bias" and param is not None and len(self.basic_ops) == 1:
            remedy = "make one with bias=True and set its bias"
            raise RuntimeError(f"Linear(bias=False) does not add a bias: {remedy}")
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draw the parameters again, as ``torch.nn.Linear`` does.

        On the meta device nothing is drawn.
        """
        for param in (self.weight, self.bias):
            draw(param, self.in_features)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for index, name in enumerate(("weight", "bias")[: len(self.basic_ops)]):
            theirs = f"{prefix}basic_ops.{index}.{name}"  # as Transformer Engine writes it
            if theirs in state_dict and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(theirs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The sizes, and whether there is a bias."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
