"""Linear layers: ``Bias``, and ``Linear``, one name for ``BasicLinear`` and ``Bias``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.fused_op import FusedOperation
from ..core.fusible import ParamSource
from ..core.introspection import is_dtensor
from ..core.op import BasicOperation
from ..core.op_context import ModuleCache, OperationContext, Unread
from ._common import OpGrads, RowwiseOperation, check_bool, check_size, expected, sum_rows
from ._reading import check_stock, reader, tensor_of
from ._split import SplitLayer, forked, split_of
from .basic_linear import BasicLinear, draw


class Bias(SplitLayer, RowwiseOperation):
    """``y = x + bias`` over the last dimension, in the dtype of the input.

    Takes and returns ``(..., size)``; ``bias`` has shape ``(size,)`` and starts at zero.

    Args:
        size: Size of the last dimension, of all processes together.
        device: Device of the bias; default: torch's.
        dtype: Dtype of the bias; default: torch's.
        tensor_parallel: Whether each process has its part of the last dimension.
        tensor_parallel_group: The processes; default: all.

    Attributes:
        local_size: Size of the last dimension here, on this process.
        tensor_parallel_size: The number of processes.

    Raises:
        TypeError: ``size`` is not a whole number.
        ValueError: ``size`` is negative, or does not divide by the number of processes.
        RuntimeError: ``tensor_parallel=True``, and ``torch.distributed`` is not initialised.
    """

    saved_names = ()
    takes_params = ("bias",)
    grad_input = "same"
    batch_invariant = ("rows", "exact")

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        check_bool(self, "tensor_parallel", tensor_parallel)
        mode = "column" if tensor_parallel else None
        self._split = split_of(self, mode, tensor_parallel_group)
        self.local_size = self._split.part(self, "size", check_size(self, "size", size), "column")
        self.in_features = self.out_features = self.local_size
        self.bias = nn.Parameter(torch.zeros(self.out_features, device=device, dtype=dtype))

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        return [op(cls, features), op(cls, op(cls, features), via="reading")]

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
        return reader(cls(size, device="meta"), {"bias": ParamSource(module, bias)}, name)

    def reset_parameters(self) -> None:
        """Set the bias to zero, unless another module holds it."""
        if not self._sources:
            nn.init.zeros_(self.bias)

    @property
    def tensor_parallel(self) -> bool:
        """Whether each process has its part of the bias."""
        return self._split.mode is not None

    def extra_repr(self) -> str:
        """The size on this process, and how the bias is split."""
        more = f", tensor_parallel_size={self._split.size}" if self.tensor_parallel else ""
        return f"size={self.local_size}{more}"

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


class Linear(SplitLayer, FusedOperation):
    """``y = x @ weight.T + bias``: ``torch.nn.Linear`` in two basic ops.

    The ops are ``BasicLinear`` and ``Bias``. Takes ``(..., in_features)`` and gives
    ``(..., out_features)``. Parameters, their names, initial values and state dict are those of
    ``torch.nn.Linear``; they live here, and the basic ops read them at every call.

    Split by rows among processes, each has a bias of ``(out_features,)``, and what is added is the
    sum of them, as in Transformer Engine. The first process begins with one bias, and the others
    with zeros. The parameters of a whole layer are loaded with :meth:`load_whole`.

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
            is_split, group = linear.tensor_parallel_mode == "column", linear.tensor_parallel_group
            split = {"tensor_parallel": is_split, "tensor_parallel_group": group}
            ops.append(Bias(out_features, device=device, dtype=dtype, **split))
            if linear.tensor_parallel_mode == "row":  # the biases are added up with the products
                ops[1].surround(after=linear.ops_as_run[1:])
                linear.surround()
        super().__init__(ops)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for op in ops:
            op.lend_parameters(self)
        if not bias:
            self.register_parameter("bias", None)
        self._draw_bias()

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

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this process's part of the parameters of a whole layer.

        Split by rows, the first process takes the bias, and the others zeros.

        Args:
            weight: Of shape ``(out_features, in_features)``, of all processes together.
            bias: Of shape ``(out_features,)``; None if the layer has none.

        Raises:
            ValueError: A shape does not fit, or the layer has a bias and the other has none, or
                the other way round.
        """
        mode, size = self.tensor_parallel_mode, self.tensor_parallel_size
        rank = dist.get_rank(self.tensor_parallel_group) if mode else 0
        shape = [self.out_features, self.in_features]
        for dim, by in enumerate(("column", "row")):
            shape[dim] = (shape[dim] or 0) * (size if mode == by else 1)
        has = None if self.bias is None else (shape[0],)
        if tuple(weight.shape) != tuple(shape) or has != (bias if bias is None else bias.shape):
            what = f"a weight of shape {tuple(shape)} and a bias of shape {has}"
            got = tuple(weight.shape), bias if bias is None else tuple(bias.shape)
            raise ValueError(expected(self, what, f"{got[0]} and {got[1]}"))
        self.weight.copy_(weight.chunk(size, 1 if mode == "row" else 0)[rank] if mode else weight)
        if bias is not None and self.bias is not None:
            part = bias.chunk(size)[rank] if mode == "column" else bias
            self.bias.copy_(torch.zeros_like(part) if mode == "row" and rank else part)

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
        with forked(self._linear._tracker):
            draw(self.weight, self._linear._fan_in)
        self._draw_bias()

    def _draw_bias(self) -> None:
        with forked(self._linear._tracker):
            draw(self.bias, self._linear._fan_in)
        if self.tensor_parallel_mode == "row" and not self.basic_ops[-1]._layouts:
            rank = dist.get_rank(self.tensor_parallel_group)
            if self.bias is not None and rank:  # what is added up is one bias
                nn.init.zeros_(self.bias)

    @property
    def _linear(self) -> BasicLinear:
        linear = self.basic_ops[0]
        assert isinstance(linear, BasicLinear)
        return linear

    _split: Any = property(lambda op: op._linear._split)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for index, name in enumerate(("weight", "bias")[: len(self.basic_ops)]):
            theirs = f"{prefix}basic_ops.{index}.{name}"  # as Transformer Engine writes it
            if theirs in state_dict and prefix + name not in state_dict:
                part = state_dict[prefix + name] = state_dict.pop(theirs)
                param: Any = self._parameters[name]
                if is_dtensor(param) and not is_dtensor(part):  # it writes that of one process
                    how = param.device_mesh, param.placements
                    state_dict[prefix + name] = type(param).from_local(part, *how, run_check=False)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The sizes on this process, whether there is a bias, and how the layer is split."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{self._linear._split.shows}"
