"""``GroupedLinear``: a linear layer for each group of rows, as in a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..core.fusible import ParamSource
from ..core.introspection import overridden
from ..core.op import is_kind, refuse_kind
from ..core.op_context import AllGrads, Outputs
from ..core.quantization import QuantizerRole
from ._common import ExtraTensorOperation, check_size, expected, require, shows
from ._main_grad import MainGrads, accumulate_main_grad
from ._quantized_groups import QuantizedGroups
from ._reading import reader, tensor_of
from ._split import WithLaterArguments, check_tracker, forked
from .arithmetic import cast
from .basic_linear import LinearOperation, draw
from .grouped import Groups, GroupsOf, groups_of

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


class GroupedLinear(WithLaterArguments, LinearOperation, ExtraTensorOperation):
    """``y_i = x_i @ weight_i.T + bias_i`` for each group ``i`` of rows: one linear layer per group.

    Takes ``x`` of shape ``(rows, ..., in_features)`` and one extra input ``split_sizes``: integers
    of shape ``(num_groups,)``, the number of rows of each group. The groups follow one another in
    the first dimension. Gives ``(rows, ..., out_features)``, in the compute dtype. A group may have
    no rows; the gradients of its parameters are zeros then.

    With ``scale_bias`` there is a second extra input, ``scales`` of shape ``(rows, ...)`` and any
    floating dtype: a group's bias is multiplied by the scale of each row before it is added. The
    last layer of a mixture of experts needs this if its activation is weighted.

    The parameters are ``weight0``, ``weight1``, ... of shape ``(out_features, in_features)`` and
    ``bias0``, ``bias1``, ... of shape ``(out_features,)``; each pair starts as that of
    ``torch.nn.Linear`` does.

    On CUDA devices of compute capability 9 and 10 in bf16, with both sizes multiples of 8, the
    split sizes are not read on the host: the products are ``torch.nn.functional.grouped_mm``. The
    device then detects split sizes that do not sum up to the rows, and stops with an error.
    Otherwise a loop runs over the groups, for which the host reads the split sizes once per
    call. While ``torch.compile`` traces, that loop is inside custom operators.

    Under a quantization recipe each group is a :class:`BasicLinear` of its own, with three
    quantizers of its own: ``"input0"``, ``"weight0"``, ``"grad_output0"``, and so on; with one
    group they have no number. Quantizers may cast all groups at once
    (:meth:`opfuse.Quantizer.quantize_groups`): the input is one tensor then, saved as ``input0``.
    The op multiplies each group separately, and the host reads the split sizes; a fusion may
    multiply all at once. ``torch.compile`` breaks its graph there. Biases are added before a
    product is rounded; scaled biases and their gradients are not quantized. A format may require a
    multiple of some number of rows (:attr:`opfuse.Quantizer.row_multiple`): a smaller group is
    padded with rows of zeros for the cast, which changes no other number.

    A call accepts two tensors to write into, as keyword arguments or in ``op_kwargs``: ``output``
    for the output, and ``grad_input`` for the gradient of the input. Each must be contiguous, have
    the shape, dtype and device of the result, and not require grad; ``output`` must not share
    memory with tensors that the call reads. Their names are
    ``OUTPUT_BUFFER_KEY`` and ``GRAD_INPUT_BUFFER_KEY`` of this module.

    Args:
        num_groups: Number of groups, at least 1.
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether there are biases; if not, ``bias0``, ... are None.
        device: Device of the parameters; default: torch's.
        dtype: Dtype of the parameters; default: torch's.
        rng_state_tracker_function: As for :class:`BasicLinear`.
        accumulate_into_main_grad: As for :class:`BasicLinear`, for each weight; the gradients of
            biases go to autograd. The products add to ``main_grad`` themselves where all those of
            the op are alike: in one dtype, and either all or none of them replaced. A weight that
            several groups share is added to afterwards.
        single_grouped_weight: False; True comes with a later release.
        single_grouped_bias: False; True comes with a later release.
        delay_wgrad_compute: False; True comes with a later release.
        scale_bias: Scale the biases, see above. Without biases it changes nothing.

    Raises:
        TypeError: A size is not a whole number; in a call, ``split_sizes`` that are not integers,
            or a buffer that is not a tensor.
        ValueError: A size is negative, or there is no group; in a call, ``split_sizes`` or
            ``scales`` of another shape, split sizes that do not sum up to the rows, an input of
            fewer than two dimensions, a parameter of another shape than when the op was made, or a
            buffer that does not fit.
        NotImplementedError: An argument that comes with a later release.
        RuntimeError: As for :class:`BasicLinear`; a buffer under ``torch.compile``, or with
            ``double_backward=True``.
    """

    num_extra_inputs = 1
    extra_input_dtypes: tuple[str, ...] = ("integer",)
    kwarg_names: ClassVar[tuple[str, ...] | None] = (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)
    context_names = ("grad_input_buffer",)
    extras_of_any_dtype = True
    groups_input = 0
    reads_sizes = True  # under a recipe, which torch.compile cannot trace
    is_stacked = False  # whether the weights are one parameter, of another module

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        if scale_bias and bias:  # before the channels of the extra inputs are made
            self.num_extra_inputs, self.extra_input_dtypes = 2, ("integer", "floating")
        super().__init__(
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        check_tracker(self, rng_state_tracker_function)
        self._tracker = rng_state_tracker_function
        self.num_groups = check_size(self, "num_groups", num_groups)
        require(self, self.num_groups > 0, "num_groups of at least 1", 0)
        self.in_features = check_size(self, "in_features", in_features)
        self.out_features = check_size(self, "out_features", out_features)
        self._register(bias, device=device, dtype=dtype)
        self.reset_parameters()
        if accumulate_into_main_grad:
            self.accumulates_grads, self.differentiable = True, False

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        given: Any = 3, features, out_features or features + features // 2
        one = op(cls, 1, features, features, bias=False)
        return [op(cls, *given), one, op(cls, *given, scale_bias=True)]

    def sample_extra_inputs(self, shape: tuple[int, ...], generator: Any) -> list[Any]:
        """Split sizes, some of them 0 at times, and the scale of each row's bias."""
        cuts = torch.randint(0, shape[0] + 1, (self.num_groups - 1,), generator=generator)
        sizes = torch.tensor([0, *sorted(cuts.tolist()), shape[0]]).diff()
        return [sizes, shape[:-1]][: self.num_extra_inputs]

    def _register(self, bias: bool, **made: Any) -> None:
        """Register the parameters of each group; None as a bias where there is none."""
        shapes = {"weight": self._features[::-1], "bias": self._features[1:]}
        for name, shape in shapes.items():
            for i in range(self.num_groups):
                used = bias or name == "weight"
                param = nn.Parameter(torch.empty(shape, **made)) if used else None
                self.register_parameter(f"{name}{i}", param)
        self._shapes = [tuple(param.shape) for param in self.parameters()]

    @classmethod
    def reading(
        cls,
        module: nn.Module,
        weight: str = "weight",
        bias: str | None = None,
        *,
        transposed: bool = False,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        name: str = "",
    ) -> GroupedLinear:
        """Return an op that reads all weights from one parameter of another module.

        Mixtures of experts often store them that way. The op then has one parameter, ``weight``,
        with biases another one, ``bias``, and one gradient of each for all groups. See
        :meth:`BasicLinear.reading`.

        Args:
            module: The module that holds the weights.
            weight: Its attribute, of shape ``(num_groups, out_features, in_features)``.
            bias: Its attribute with the biases, ``(num_groups, out_features)``; None: there are
                none.
            transposed: The weights are ``(num_groups, in_features, out_features)``; the op reads a
                transposed view.
            scale_bias: As for :class:`GroupedLinear`.
            accumulate_into_main_grad: As for :class:`GroupedLinear`; ``main_grad`` has the shape of
                the attribute; not with ``transposed``.
            name: As for :meth:`BasicLinear.reading`.

        Raises:
            AttributeError, TypeError: As for :meth:`BasicLinear.reading`.
            ValueError: An attribute has another shape, or both flags of the weights are set.
        """
        if transposed and accumulate_into_main_grad:
            why = "main_grad has the shape of a Parameter, which transposed=True does not"
            raise ValueError(f"GroupedLinear.reading: {why}: leave out accumulate_into_main_grad")
        groups, *sizes = tensor_of(cls, module, weight, dims=3).shape
        outputs, inputs = reversed(sizes) if transposed else sizes
        op = cls(
            groups,
            inputs,
            outputs,
            bias=bias is not None,
            device="meta",
            accumulate_into_main_grad=accumulate_into_main_grad,
            scale_bias=scale_bias,
        )
        op._parameters.clear()
        op.is_stacked, op._shapes = True, [(groups, outputs, inputs)]
        sources = {"weight": ParamSource(module, weight, transposed)}
        if bias is not None:
            if (got := tensor_of(cls, module, bias, dims=2).shape) != (groups, outputs):
                what = f"{type(module).__name__}.{bias} of shape ({groups}, {outputs})"
                raise ValueError(f"{cls.__name__}.reading expected {what}, got {tuple(got)}")
            sources["bias"] = ParamSource(module, bias)
            op._shapes.append((groups, outputs))
        op.param_names = tuple(sources)
        return reader(op, sources, name)

    def reset_parameters(self) -> None:
        """Draw the parameters again; nothing is drawn on the meta device."""
        with forked(self._tracker):
            for param in self.parameters():
                draw(param, self.in_features)

    @property
    def has_bias(self) -> bool:
        """True if there are biases."""
        return bool(len(self._shapes) > self._count)

    @property
    def scales_bias(self) -> bool:
        """True if there are biases, and each is scaled by row."""
        return self.num_extra_inputs == 2

    @property
    def saved_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """``input``, ``split_sizes``, ``weight0``..., ``input0``..., ``scales``, ``bias0``..."""
        # one weight comes before those that a recipe makes of it, scales only if biases are scaled
        groups = range(self.num_groups)
        inputs, weights, biases = [[f"{n}{i}" for i in groups] for n in ("input", "weight", "bias")]
        one, scaled = ["weight"] * self.is_stacked, ["scales", *biases] if self.scales_bias else []
        return ("input", "split_sizes", *one, *weights, *inputs, *scaled)

    def extra_repr(self) -> str:
        """The sizes, and how biases are used."""
        known = shows("num_groups", "in_features", "out_features", "has_bias")(self)
        return f"{known}, scale_bias=True" if self.scales_bias else known

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        """Two for each group in forward (input, weight), one in backward (gradient of output)."""
        return super().num_quantizers(mode) * self.num_groups

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """For each group those of a :class:`BasicLinear`, all under the name of the op."""
        return super().get_quantizer_roles(mode) * self.num_groups

    def get_input_quantizer(self) -> None:
        """None: the op casts each group itself."""

    def get_grad_output_quantizer(self) -> None:
        """None: the op casts each group itself."""

    # The operation itself

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any = ({},),
        **_: Any,
    ) -> Outputs:
        """The products, in ``ctx.dtype``; saves input and weights in that dtype, or quantized.

        The split sizes are saved as they came, or as a copy on the CPU where they were read.
        """
        (ctx,), (extras,), (given,) = basic_op_ctxs, basic_op_extra_inputs, basic_op_kwargs
        return self.forward_in(groups_of, ctx, input_, extras, given), [()]

    def forward_in(
        self,
        groups_of: GroupsOf,
        ctx: Any,
        input_: Tensor,
        extras: Sequence[Any],
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """The forward, with products of these groups.

        For the op itself, and for fusions of the forward that multiply in another way.

        Args:
            groups_of: Makes the groups, called as :func:`opfuse.ops.grouped.groups_of`.
            ctx: The context of the op, on which it leaves what the backward needs.
            input_: The input.
            extras: The extra inputs of the op.
            given: The keyword arguments of the op.
        """
        split_sizes, *scales = extras
        self._check(input_, split_sizes, *scales)
        self._check_shapes(ctx.params)
        dtype, params = ctx.dtype or input_.dtype, ctx.params
        x = input_ if ctx.quantizers else cast(input_, dtype)
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *params))
        groups = groups_of(x, split_sizes, self._features, recorded or bool(ctx.quantizers))
        into = self._places(given, input_, dtype, [*params, *scales], recorded)
        biases = [cast(bias, dtype) for bias in self.biases_of(params)]
        added = () if scales else biases
        if ctx.quantizers:
            parts = QuantizedGroups(self, ctx, groups, stacked=self.is_stacked)
            y, of_x, of_weights = parts.products(x, added, dtype)
            saved = (None, groups.sizes, *[None] * self.is_stacked, *of_weights, *of_x)
        else:
            y, saved = self._products(ctx, groups, x, added, dtype)
        if scales:
            y = groups.add_scaled(y, biases, *scales)
        if ctx.requires_grad:
            ctx.save_for_backward(*saved, *self._saved_to_scale(ctx, biases, *scales))
            ctx.grad_input_buffer = into[1]
        return y if into[0] is None else into[0].copy_(y).detach()

    def _products(
        self, ctx: Any, groups: Groups, x: Tensor, biases: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The products, and what the backward needs, in the order of ``saved_names``."""
        count = self._count
        weights = [cast(weight, dtype) for weight in ctx.params[:count]]
        y = groups.products(x, weights[0] if self.is_stacked else weights, biases)
        kept_x = x if any(ctx.param_requires_grad[:count]) else None
        kept = weights if ctx.input_requires_grad else [None] * count
        return y, (kept_x, groups.sizes, *kept, *[None] * self.num_groups * (1 + self.is_stacked))

    def _saved_to_scale(
        self, ctx: Any, biases: Sequence[Tensor], scales: Tensor | None = None
    ) -> Sequence[Tensor | None]:
        """The tensors that the gradients of scaled biases, and of their scales, need."""
        if scales is None:
            return ()
        wanted = scales.requires_grad or is_compiling()  # traced ones do not tell
        needed = wanted or any(ctx.param_requires_grad[self._count :])
        return scales if needed else None, *(biases if wanted else [None] * len(biases))

    def _places(
        self, given: Any, x: Tensor, dtype: torch.dtype, read: list[Tensor], recorded: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The caller's tensors for the output and for the gradient of the input."""
        if not given:
            return None, None
        if recorded or is_compiling():
            what = "under torch.compile, nor with options(double_backward=True)"
            raise RuntimeError(f"{type(self).__name__} writes into no tensor of the caller {what}")
        output, grad_input = [given.get(n) for n in (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)]
        like = x.new_empty(0, dtype=dtype)
        shape = (*x.shape[:-1], self.out_features)
        check_buffer(self, OUTPUT_BUFFER_KEY, output, shape, like, [x, *read])
        check_buffer(self, GRAD_INPUT_BUFFER_KEY, grad_input, x.shape, like)
        return output, grad_input

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> AllGrads:
        """``dx_i = dy_i @ weight_i``, ``dweight_i = dy_i.T @ x_i``, and ``dbias_i = dy_i.sum(0)``.

        With scaled biases ``dbias_i`` is the sum of ``dy_i * scales_i``, and ``dscales_i`` that of
        ``dy_i * bias_i`` over the features. All are in the compute dtype; autograd casts them at
        the end.
        """
        dx, grads, of_extras = self.backward_in(groups_of, basic_op_ctxs[0], grad_output)
        return dx, [grads], [of_extras]

    def backward_in(
        self, groups_of: GroupsOf, ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """The gradients of input, parameters and extra inputs, with products of these groups.

        Arguments as for :meth:`forward_in`.
        """
        x, split_sizes, *rest = ctx.saved_tensors
        weights, rest = rest[: self._count], rest[self._count :]
        dy = grad_output if ctx.dtype is None else cast(grad_output, ctx.dtype)
        groups = groups_of(dy, split_sizes, self._features, bool(ctx.quantizers))
        if ctx.quantizers:
            if self.is_stacked:
                weights, rest = rest[: self.num_groups], rest[self.num_groups :]
            parts = QuantizedGroups(self, ctx, groups, stacked=self.is_stacked)
            dx, grads = parts.grads(grad_output, rest[: self.num_groups], weights)
        else:
            dx, grads = self._grads(ctx, groups, dy, x, weights)
        to_scale = rest[-1 - self.num_groups :] if self.scales_bias else ()
        of_biases, of_scales = self._bias_grads(ctx, groups, dy, *to_scale)
        if dx is not None and ctx.grad_input_buffer is not None:
            dx = ctx.grad_input_buffer.copy_(dx)  # the last of all: it may be what was read above
        return dx, (*grads, *of_biases), (None, *of_scales)

    def _grads(
        self, ctx: Any, groups: Groups, dy: Tensor, x: Tensor | None, weights: Sequence[Any]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the input and of the weights."""
        dx = None
        if weights[0] is not None:
            dx = groups.input_grads(dy, weights[0] if self.is_stacked else weights)
        if x is None:
            return dx, [None] * self._count
        if ctx.grad_sum is not None:
            sums = ctx.grad_sum.add(functools.partial(groups.add_weight_grads, dy, x))
            if sums is not None:
                return dx, sums
        if self.is_stacked:
            return dx, [groups.stacked_grads(dy, x, self.num_groups)]
        return dx, groups.weight_grads(dy, x, ctx.param_requires_grad[: self._count])

    def _bias_grads(
        self, ctx: Any, groups: Groups, dy: Tensor, scales: Tensor | None = None, *biases: Tensor
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The gradients of the biases, and of their scales where there are some."""
        wanted = ctx.param_requires_grad[self._count :]
        of_biases: Sequence[Any] = [None] * len(wanted)
        if any(wanted):
            each = wanted * self.num_groups if self.is_stacked else wanted
            sums: Any = groups.row_sums(dy, each, scales)
            of_biases = [torch.stack(sums)] if self.is_stacked else sums
        if not self.scales_bias:
            return of_biases, ()
        if scales is None or biases[0] is None:
            return of_biases, (None,)
        return of_biases, (groups.scale_grads(dy, biases).to(scales.dtype),)

    _count: Any = property(lambda self: 1 if self.is_stacked else self.num_groups)
    """The number of weight parameters; those of the biases follow."""

    def biases_of(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """The bias of each group, among the parameters of the op; for fusions too."""
        rest = params[self._count :]
        return rest[0].unbind() if self.is_stacked and rest else rest

    _features: Any = property(lambda self: (self.in_features, self.out_features))

    def _check(self, input_: Tensor, split_sizes: Tensor, scales: Tensor | None = None) -> None:
        shape = input_.shape
        if not is_kind("integer", split_sizes.dtype):
            refuse_kind(f"split_sizes of {type(self).__name__}", "integer", split_sizes.dtype)
        if split_sizes.shape != (self.num_groups,):
            what = f"split_sizes of shape ({self.num_groups},)"
            raise ValueError(expected(self, what, tuple(split_sizes.shape)))
        if len(shape) < 2:
            got = f"shape {tuple(shape)}"
            raise ValueError(expected(self, "an input of at least 2 dimensions", got))
        if scales is not None and scales.shape != shape[:-1]:
            what = f"scales of shape {tuple(shape[:-1])}, a scale for each row"
            raise ValueError(expected(self, what, tuple(scales.shape)))

    def grad_sum(self, params: Sequence[Tensor | None]) -> MainGrads | None:
        """The ``main_grad`` of each weight, or of all in one; see :meth:`BasicLinear.grad_sum`.

        None also where groups share a weight: they are multiplied at the same time.
        """
        if overridden(self, GroupedLinear, "fuser_backward", "backward_in", "accumulate_grads"):
            return None  # it may change the gradients
        weights = params[: self._count]
        known = [id(weight) for weight in weights if weight is not None]
        if len({*known}) < len(known):
            return None
        return MainGrads(self, weights, not self.is_stacked)

    def accumulate_grads(
        self, params: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Add the gradients of weights to their ``main_grad``; those of biases are autograd's."""
        count = self._count
        pairs = zip(params[:count], grads[:count], strict=True)
        return (*[accumulate_main_grad(self, *pair) for pair in pairs], *grads[count:])


def check_buffer(
    op: object,
    name: str,
    buffer: Any,
    shape: Sequence[int],
    like: Tensor,
    read: Sequence[Tensor] = (),
) -> None:
    """Refuse a buffer that does not fit the result.

    Args:
        op: The op.
        name: The name of the buffer.
        buffer: The tensor, or None, which always fits.
        shape: The shape of the result.
        like: A tensor with the dtype and device of the result.
        read: Tensors that are read before, and may be read again.

    Raises:
        TypeError: It is not a tensor.
        ValueError: It has another shape, dtype or device, is not contiguous, requires grad, or
            shares memory with a tensor that is read.
    """
    if buffer is None:
        return
    who = f"{type(op).__name__} expected a tensor as {name}"
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{who}, got {type(buffer).__name__}")
    got = f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
    wanted = f"{like.dtype} of shape {tuple(shape)} on {like.device}"
    if got != wanted:
        raise ValueError(f"{who}, {wanted}, got {got}")
    if not buffer.is_contiguous():
        raise ValueError(f"{who} that is contiguous, got strides {buffer.stride()}")
    if buffer.requires_grad:
        raise ValueError(f"{who} that does not require grad: pass {name}.detach()")
    if any(_share_memory(buffer, tensor) for tensor in read):
        raise ValueError(f"{who} that shares no memory with what the op reads")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory ranges of two plain tensors overlap."""
    spans = [_span(tensor) for tensor in (one, other) if type(tensor) in (Tensor, nn.Parameter)]
    if len(spans) < 2 or one.device != other.device:
        return False
    (first, end), (other_first, other_end) = spans
    return first < other_end and other_first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The address of its first byte, and that after its last byte."""
    if not tensor.numel() or tensor.is_meta:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
