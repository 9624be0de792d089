"""``ParallelLinear``: several linear layers of one input, side by side in one output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.cast import Identity
from ..core.fusible import ParamSource
from ..core.introspection import hook_dicts, hook_kinds, op_class
from ..core.op_context import Grads, OperationContext, Unread
from ..core.overwriting import may_write
from ..core.quantization import QuantizedTensor, Quantizer
from ._autocast import cast_weights
from ._common import OpGrads, rows_of
from ._products import quantized_backward, quantized_operands, tiled
from ._reading import reader, tensor_of
from ._split import NotSplit
from .arithmetic import plus_product
from .basic_linear import BasicLinear, LinearOperation, kept_weights
from .linear import Linear

_LINEARS = nn.Linear, Linear, BasicLinear
_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_ATTRIBUTES = vars(Identity()).keys()
Modules = Mapping[str, nn.Module] | Sequence[nn.Module]


class ParallelLinear(LinearOperation):
    """``y = concat(x @ w.T + b for w, b in linears)``: several linear layers of one input.

    Takes ``(..., in_features)`` and returns ``(..., out_features)``, in the compute dtype, where
    ``out_features`` is the sum of those of the linears. Each product is written to its place in one
    buffer, and the input is kept once. So gate and up are one op before a ``SwiGLU``, and query,
    key and value one op before a split, while each keeps its own Parameters and their names::

        ParallelLinear({"gate_proj": Linear(64, 256), "up_proj": Linear(64, 256)})

    has the state dict ``gate_proj.weight``, ``gate_proj.bias``, ``up_proj.weight``,
    ``up_proj.bias``. The linears are its submodules, but it does not call them: one with hooks or
    its own ``forward`` is refused. Each may have a bias or not. All parameters have one dtype, that
    of the input, except under ``torch.autocast``.

    Under a quantization recipe the input is quantized once, each weight separately, unless the
    recipe gives all of them one quantizer, and the gradient of the output as a whole. With biases
    the op casts that gradient itself, since the gradients of biases need the uncast one. See
    :class:`BasicLinear` for the products.

    Attributes:
        sizes: ``out_features`` of each linear.
        biased: Whether each linear has a bias.

    Args:
        linears: The linears by name, or in a sequence, where their names are "0", "1", ... Each is
            a ``torch.nn.Linear``, a :class:`Linear` or a :class:`BasicLinear`.

    Raises:
        TypeError: One is of another class, or ``linears`` is one itself.
        ValueError: There is none, two have one name, or a name cannot be that of a submodule. One
            takes another number of features than the first, has hooks or a ``forward`` of its own,
            reads its parameters from another module, or accumulates into ``main_grad``.
            One is split among processes by rows, or not as the first is.
            In a call, a weight or a bias of another shape than when the op was made, or a bias that
            was not there then.
    """

    sizes: tuple[int, ...] = ()
    biased: tuple[bool, ...] = ()
    _known: frozenset[str] = frozenset()
    _num_weights = property(lambda self: len(self.sizes))

    def __init__(self, linears: Modules) -> None:
        super().__init__()
        named: dict[str, Any] = _named(linears)
        for name, linear in named.items():
            _check_new(name, linear)
            self.add_module(name, linear)
        self.in_features = next(iter(named.values())).in_features
        for name, linear in named.items():
            if linear.in_features != self.in_features:
                who = f"ParallelLinear expected linears of {self.in_features} features"
                raise ValueError(f"{who}, got {linear.in_features} for {name}")
        sizes = {name: linear.out_features for name, linear in named.items()}
        biased = {n: getattr(linear, "bias", None) is not None for n, linear in named.items()}
        self.sizes, self.biased = tuple(sizes.values()), tuple(biased.values())
        self.out_features = sum(self.sizes)
        self.surround(before=_split_of(named).before)
        shapes: dict[str, Any] = {f"{n}.weight": (sizes[n], self.in_features) for n in named}
        shapes |= {f"{n}.bias": (sizes[n],) for n in named if biased[n]}
        self.param_names, self._shapes = tuple(shapes), list(shapes.values())
        self._known = frozenset(shapes)

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op: with and without biases, of one width and of two."""
        out = out_features or features + features % 2
        sizes = out - out // 4, out // 4
        first, second = [op(BasicLinear, features, size) for size in sizes]
        biased = op(Linear, features, sizes[0])
        each = op(cls, (first, second)), op(cls, (biased, second))
        return [*each, op(cls, (biased,), via="reading")]

    @property
    def saved_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """``input``, and the weight of each linear."""
        assert self.param_names is not None
        return ("input", *self.param_names[: len(self.sizes)])

    @classmethod
    def reading(
        cls,
        modules: Modules,
        *,
        weight: str = "weight",
        bias: str | None = "bias",
        transposed: bool = False,
        name: str = "",
    ) -> ParallelLinear:
        """Return an op that reads its parameters elsewhere; see :meth:`BasicLinear.reading`.

        Args:
            modules: The modules that hold the parameters, by name or in a sequence.
            weight: The attribute of each weight.
            bias: The attribute of each bias; where it is missing or None, there is none. None: no
                bias is read.
            transposed: As for :meth:`BasicLinear.reading`, for all of them.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`; or no module has an
                attribute ``bias``, unless that is "bias".
            ValueError: A weight is not a matrix or does not fit, or a bias does not fit its weight.
        """
        sources, linears, absent, named = {}, {}, [], _named(modules)
        if bias not in (None, "bias") and not any(hasattr(m, bias) for m in named.values()):
            who = f"{cls.__name__}.reading expected the name of a bias of one of the modules"
            raise AttributeError(f"{who}, got {bias!r}")
        for each, module in named.items():
            sizes = tensor_of(cls, module, weight, dims=2).shape
            outputs, inputs = reversed(sizes) if transposed else sizes
            sources[f"{each}.weight"] = ParamSource(module, weight, transposed)
            has_bias = bias is not None and getattr(module, bias, None) is not None
            linears[each] = Linear(inputs, outputs, bias=has_bias, device="meta")
            if bias is None:
                continue
            if not has_bias:
                absent.append(ParamSource(module, bias))
            else:
                sources[f"{each}.bias"] = ParamSource(module, bias)
                if (got := tensor_of(cls, module, bias).shape) != (outputs,):
                    what = f"{type(module).__name__}.{bias} of shape ({outputs},)"
                    raise ValueError(f"{cls.__name__}.reading expected {what}, got {tuple(got)}")
        op = cls(linears)
        op._modules.clear()
        op._absent = tuple(absent)
        return reader(op, sources, name)

    def param_source(self, name: str) -> tuple[nn.Module, str]:
        """The module and attribute from which a parameter is read at every call.

        Raises:
            ValueError, TypeError: The linear is one that must be called, not read, or it got a bias
                after the op was made.
        """
        if name in self._sources:
            return super().param_source(name)
        linear, leaf = name.split(".")
        module: Any = self._modules[linear]  # quicker than by attribute
        _check_linear(linear, module)
        if getattr(module, "bias", None) is not None and f"{linear}.bias" not in self._known:
            who = f"ParallelLinear got {linear} without a bias, and it has one now"
            raise ValueError(f"{who}: make the op again")
        return module, leaf

    def reset_parameters(self) -> None:
        """Draw the parameters again, as each linear does, if the op holds them."""
        for linear in self.children():
            linear.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        """The sizes."""
        return f"in_features={self.in_features}, sizes={self.sizes}, biased={self.biased}"

    # Quantizers

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of the gradient; None if there are biases: the op then casts it itself."""
        return None if any(self.biased) else super().get_grad_output_quantizer()

    # The operation itself

    def quantized_operands(
        self, ctx: OperationContext, input_: Tensor | QuantizedTensor
    ) -> tuple[QuantizedTensor, list[QuantizedTensor], list[Tensor | None]]:
        """Input and weights as the recipe's quantizers cast them, and biases as they are.

        See :meth:`BasicLinear.quantized_operands`. Weights that have one quantizer together are one
        matrix, all their rows.
        """
        self._check_shapes(ctx.params)
        names = [*ctx.quantizers][1 : 1 + len(self.sizes)]  # behind that of the input
        rest = iter(ctx.params[len(names) :])
        biases = [next(rest) if has_bias else None for has_bias in self.biased]
        return *quantized_operands(ctx, input_, names), biases

    def operands(
        self, ctx: OperationContext, input_: Tensor | QuantizedTensor
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        """Input, weights and biases in ``ctx.dtype``; a bias that is not there is None.

        Under a recipe the first two are dequantized. Leaves on ``ctx`` what the backward needs. For
        the op itself, and for fusions of the forward that multiply in another way.

        Raises:
            ValueError: A weight or a bias has another shape than when the op was made.
        """
        params, count, dtype = ctx.params, len(self.sizes), ctx.dtype or input_.dtype
        if ctx.quantizers:
            of_x, of_weights, biases = self.quantized_operands(ctx, input_)
            plain, *matrices = [each.dequantize().to(dtype) for each in (of_x, *of_weights)]
            of_biases = [None if bias is None else bias.to(dtype) for bias in biases]
            return plain, self._apart(matrices), of_biases
        x: Any = input_
        self._check_shapes(params)
        kept: Sequence[Tensor] = params[:count]
        if ctx.dtype is not None:
            x, params = x.to(ctx.dtype), tuple(cast_weights(ctx, params))
            kept = kept_weights(ctx, kept, params[:count])
        weights, rest = params[:count], iter(params[count:])
        if ctx.requires_grad:
            kept_x = x if any(ctx.param_requires_grad[:count]) else None
            ctx.to_save = kept_x, *(kept if ctx.input_requires_grad else (None,) * count)
        x, *matrices = tiled(x, *weights)
        return x, matrices, [next(rest) if has_bias else None for has_bias in self.biased]

    @staticmethod
    def saved_operands(ctx: OperationContext) -> tuple[Tensor | None, list[Any]]:
        """Input and weights that the forward left; see :meth:`BasicLinear.saved_operands`."""
        x, *weights = ctx.saved_tensors  # type: ignore[misc]
        if ctx.saves_params and weights[0] is not None:
            return x, [weight.to(ctx.dtype) for weight in weights]
        return x, weights

    def op_forward(self, ctx: Any, input_: Any, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The products side by side; saves ``(input, *weights)``, as :class:`BasicLinear` does."""
        if ctx.quantizers:
            x, weights, biases = self.quantized_operands(ctx, input_)
            wide, *matrices = tiled(x.widened(), *[weight.widened() for weight in weights])
            given = [bias if bias is None else bias.to(wide.dtype) for bias in biases]
            y = self.product(wide, self._apart(matrices), given)
            return y.to(ctx.dtype or x.dtype)
        return self.product(*self.operands(ctx, input_))

    def product(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """The products side by side, from the result of :meth:`operands`."""
        if not may_write(x, *weights, *biases):
            pairs = zip(weights, biases, strict=True)  # autograd and tracers do not follow an out
            return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], -1)
        rows = rows_of(x)
        y = x.new_empty((rows.shape[0], sum(self.sizes)))
        places = torch.split_with_sizes(y, self.sizes, -1)
        for place, weight, bias in zip(places, weights, biases, strict=True):
            if bias is None:
                torch.mm(rows, weight.t(), out=place)
            else:
                torch.addmm(bias, rows, weight.t(), out=place)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> OpGrads:
        """``dx`` is the sum over the linears; each weight and bias has its own gradient."""
        if ctx.quantizers:
            dx, of_weights = quantized_backward(ctx, grad_output, self.sizes)
            return dx, (*of_weights, *self.bias_grads(ctx, grad_output))
        x, weights = self.saved_operands(ctx)
        parts = self.parts_of(ctx, grad_output)
        dx = None
        for dy, weight in zip(parts, weights, strict=True) if weights[0] is not None else ():
            dx = plus_product(dx, dy, weight)
        if dx is not None and grad_output.ndim != 2:
            dx = dx.view(*grad_output.shape[:-1], dx.shape[1])
        rows: Any = None if x is None else rows_of(x)
        return dx, self.param_grads(ctx, parts, lambda dy: None if x is None else dy.t().mm(rows))

    def _apart(self, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights, of which one matrix may have the rows of all."""
        one = len(matrices) < len(self.sizes)
        return torch.split_with_sizes(matrices[0], self.sizes) if one else matrices

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Views of the last dimension, one for each linear."""
        return torch.split_with_sizes(tensor, self.sizes, -1)

    def parts_of(self, ctx: OperationContext, grad_output: Tensor) -> Sequence[Tensor]:
        """The gradient of each linear's output, with one row dimension, in the compute dtype."""
        dy = grad_output if ctx.dtype is None else grad_output.to(ctx.dtype)
        return torch.split_with_sizes(rows_of(dy), self.sizes, -1)

    def param_grads(
        self,
        ctx: OperationContext,
        parts: Sequence[Tensor],
        of_weight: Any,
        summed: Sequence[Tensor] = (),
    ) -> Grads:
        """The gradients of the parameters that need one, in the order of ``param_names``.

        Args:
            ctx: The context.
            parts: The result of :meth:`parts_of`.
            of_weight: Computes the gradient of a weight from its part.
            summed: The parts of the sum over all rows, as a matrix of one row, if it is known.
        """
        wants = zip(parts, ctx.param_requires_grad, strict=False)
        grads = [of_weight(dy) if wanted else None for dy, wanted in wants]
        return (*grads, *(self._sums(ctx, summed or parts) if any(self.biased) else ()))

    def bias_grads(self, ctx: OperationContext, grad_output: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the biases that need one, from a gradient that is not quantized."""
        return self._sums(ctx, self.parts_of(ctx, grad_output)) if any(self.biased) else ()

    def _sums(self, ctx: OperationContext, parts: Sequence[Tensor]) -> Sequence[Tensor | None]:
        biased = [dy for dy, has_bias in zip(parts, self.biased, strict=True) if has_bias]
        wants = zip(biased, ctx.param_requires_grad[len(parts) :], strict=True)
        return [dy.sum(0) if wanted else None for dy, wanted in wants]


def _named(modules: Modules) -> dict[str, nn.Module]:
    """The modules by name; those of a sequence are numbered."""
    lone = isinstance(modules, nn.Module) and not isinstance(modules, _CONTAINERS)
    if lone or not isinstance(modules, Iterable):
        who = "ParallelLinear expected linears by name or in a sequence"
        raise TypeError(f"{who}, got {type(modules).__name__}: put it in a list")
    by_name = isinstance(modules, (Mapping, nn.ModuleDict))
    pairs = list(modules.items() if by_name else enumerate(modules))  # type: ignore[union-attr]
    if not pairs:
        raise ValueError("ParallelLinear expected at least one linear, got none")
    names = [str(name) for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"ParallelLinear expected names that differ, got {name!r} twice")
        if not name or "." in name:
            who = "ParallelLinear expected names of submodules, not empty and without a dot"
            raise ValueError(f"{who}, got {name!r}")
        if hasattr(ParallelLinear, name) or name in _ATTRIBUTES:
            who = f"ParallelLinear has an attribute {name} already"
            raise ValueError(f"{who}: give that linear another name")
    return dict(zip(names, [module for _, module in pairs], strict=True))


def _check_linear(name: str, linear: nn.Module) -> None:
    """Refuse a linear that does more than its parameters show; checked at every call."""
    if type(linear) not in _LINEARS and op_class(linear) not in _LINEARS:
        who = "ParallelLinear expected a torch.nn.Linear, ops.Linear or ops.BasicLinear"
        raise TypeError(f"{who} as {name}, got {type(linear).__name__}")
    if "forward" in vars(linear) or any(hook_dicts(linear)):
        what = f"{hook_kinds(linear)} hooks" if hook_kinds(linear) else "a forward of its own"
        who = f"ParallelLinear reads its linear {name} and does not call it"
        raise ValueError(f"{who}, which has {what}: put them on the ParallelLinear")


def _split_of(named: Mapping[str, Any]) -> NotSplit:
    """How all of the linears are split among processes."""
    splits = {name: getattr(linear, "_split", NotSplit()) for name, linear in named.items()}
    first, *_ = splits.values()
    for name, split in splits.items():
        alike = [(each.mode, each.group, each.sequence) for each in (split, first)]
        if split.mode == "row" or alike[0] != alike[1]:
            what = "linears that are split among processes by columns, all alike, or not at all"
            got = split.shows.removeprefix(", ") or "a whole one"
            raise ValueError(f"ParallelLinear expected {what}, got {got} for {name}")
    return first


def _check_new(name: str, linear: nn.Module) -> None:
    """Refuse a linear that the op cannot replace."""
    _check_linear(name, linear)
    if isinstance(linear, BasicLinear) and linear._sources:
        remedy = "ParallelLinear.reading takes that module"
        raise ValueError(f"ParallelLinear: {name} reads its weight from another module: {remedy}")
    if any(getattr(part, "accumulates_grads", False) for part in linear.modules()):
        remedy = "which ParallelLinear does not do"
        raise ValueError(f"ParallelLinear: {name} has accumulate_into_main_grad=True, {remedy}")
