"""Basic operations: the ops that users compose and that plugins replace.

A :class:`BasicOperation` is one tensor operation with its parameters and state. The fuser drives it
through ``fuser_forward`` and ``fuser_backward``; class, method and keyword names are those of
Transformer Engine's ``te.ops``, so an op written for it runs here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from .fusible import FusibleOperation, ParamSource
from .op_context import AllGrads, Extras, Grads, OperationContext, Outputs, asks_for_quantizers
from .quantization import Quantizer, QuantizerRole, Recipe, Usage, WeightCache
from .quantization.state import PreparedOps, QuantizerStates, entries_of
from .settings import current


class BasicOperation(FusibleOperation):
    """One tensor operation with its parameters and state.

    Subclasses implement ``op_forward`` and ``op_backward``; an op with extra inputs or outputs
    implements ``fuser_forward`` and ``fuser_backward`` instead.

    A class that overrides one of these passes inherits no declaration about them. It must declare
    again what holds for it: ``saved_names``, ``context_names``, ``grad_input``,
    ``differentiable``, ``keeps_rows``, ``casts_input``, ``takes_params`` and ``batch_invariant``.

    Class attributes that describe an op to fusions and to the fuser:
        num_extra_inputs, num_extra_outputs: Number of tensors in addition to the main one.
        extra_input_dtypes: The kind of each extra input: ``"floating"``, ``"integer"`` (targets,
            positions, split sizes) or ``"bool"``. The last two kinds get no gradient. Empty: all
            are floating point.
        takes_params: Names of the parameters that the passes take, in order; None: all that exist
            at the end of ``__init__``. Others belong to a ``forward`` of the op's own.
        saved_names: Names of the values passed to ``save_for_backward``, in order; None: not
            declared.
        context_names: Context attributes beyond the documented ones that the backward reads, such
            as a number of the op. The forward sets each if ``ctx.requires_grad``. For a fused
            forward, those that :meth:`context_value` returns are already set.
        in_features: Last dimension of the input, or None for any.
        out_features: Last dimension of the output, or None for that of the input divided by
            ``feature_ratio``.
        feature_ratio: Last dimension of the input over that of the output; None: unknown.
        keeps_rows: Whether the output has the leading dimensions of the input, all but the last.
        batch_invariant: What the forward promises to ``options(invariant="batch")``. ``"rows"``:
            each row of each output, of the leading dimensions of the input, follows from that row
            of the inputs alone, in the same steps for each row. The op then gets blocks of rows.
            ``"exact"``: each operation is exact, or rounded once as IEEE 754 says, for every value
            alike, so that no shape changes a bit. Empty: nothing.
        groups_input: The place of the extra input that holds the sizes of groups of rows, or None.
            A block then has rows of one group.
        differentiable: Whether autograd may differentiate through ``op_forward`` itself (it is made
            of differentiable torch operations), which second derivatives and functorch need.
        params_in_compute_dtype: Whether parameters and extra inputs must have the input's dtype,
            outside autocast.
        autocast_dtype: The value of ``ctx.dtype`` under autocast, unless the next op
            ``casts_input``; None: autocast's own dtype.
        casts_input: Whether the op casts its input to ``ctx.dtype`` before anything else.
        needs_tools: The tools without which it does not run, such as ``"distributed"``.
        accumulates_grads: Whether :meth:`accumulate_grads` stores the gradients of parameters.
        unquantized: Why no recipe quantizes the products of the op, for reports; empty: it has
            none, or has quantizers for them.
        silent_outputs: Whether the extra outputs are numbers to report, which have no gradients.
        extras_of_any_dtype: Whether the dtype of floating-point extra inputs may differ from that
            of the input, though the parameters' may not.
    """

    is_fused_op = False
    _is_base = True
    _around: tuple[tuple[BasicOperation, ...], tuple[BasicOperation, ...]] = ((), ())
    # how split parameters are read; opfuse-distributed sets them
    _layouts: Mapping[str, Any] = MappingProxyType({})
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    extra_input_dtypes: tuple[str, ...] = ()
    in_features: int | None = None
    out_features: int | None = None
    feature_ratio: int | None = None
    groups_input: ClassVar[int | None] = None
    params_in_compute_dtype: bool = False
    autocast_dtype: ClassVar[torch.dtype | None] = None
    needs_tools: tuple[str, ...] = ()
    accumulates_grads: bool = False
    extras_of_any_dtype: ClassVar[bool] = False
    unquantized: ClassVar[str] = ""
    silent_outputs: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        # no lists, which a shallow copy would share
        self._extra_input_channels: tuple[str | None, ...] = (None,) * self.num_extra_inputs
        self._extra_input_names = self._extra_input_channels
        self._extra_output_channels: tuple[str | None, ...] = (None,) * self.num_extra_outputs
        self._extra_output_to_caller = (True,) * self.num_extra_outputs
        self._quantizers = QuantizerStates()
        self._weights = WeightCache()
        self._prepared = PreparedOps()

    def surround(
        self, *, before: Iterable[BasicOperation] = (), after: Iterable[BasicOperation] = ()
    ) -> None:
        """Let every chain run other ops right before and right after this one.

        They belong to this op: keyword arguments, names, state dicts and the indices of a chain do
        not count them. They have neither parameters nor extra tensors. Fusions match them as any
        op. Called by ``__init__``, before a fuser captures the op.

        Args:
            before: The ops that run before, such as a gather of the input.
            after: The ops that run after, such as a reduction of the output.

        Raises:
            ValueError: One of them has parameters or extra tensors.
        """
        around = tuple(before), tuple(after)
        for op in (*around[0], *around[1]):
            if op.param_names or op.num_extra_inputs or op.num_extra_outputs:
                who, what = type(self).__name__, "ops without parameters and extra tensors"
                raise ValueError(f"{who}.surround expected {what}, got {type(op).__name__}")
        vars(self)["_around"] = around  # a tuple, so that torch registers no module

    @property
    def ops_as_run(self) -> tuple[BasicOperation, ...]:
        """This op with those that :meth:`surround` gave it, as they run."""
        return (*self._around[0], self, *self._around[1])

    def _constructed(self) -> None:
        super()._constructed()
        if current.model_init is not None:
            current.model_init(self)

    # Parameters that other modules hold

    def lend_parameters(self, owner: nn.Module) -> None:
        """Move this op's parameters to ``owner``, which registers them under the same names.

        The op reads them from ``owner`` at every call; its ``param_names`` stay the same.
        """
        lent = dict(self._parameters)
        self.read_parameters({name: ParamSource(owner, name) for name in lent})
        for name, param in lent.items():
            owner.register_parameter(name, param)

    def read_parameters(self, sources: Mapping[str, ParamSource]) -> None:
        """Read parameters from other modules at every call from now on.

        The op holds none of them: they are in neither its ``parameters()`` nor its state dict, and
        gradients reach the Parameters of these modules. A copy of the op reads from the copies of
        these modules that are made with it.

        Args:
            sources: The module and attribute of each parameter.
        """
        for name in sources:
            self._parameters.pop(name, None)
        vars(self)["_sources"] = dict(sources)

    def param_source(self, name: str) -> tuple[nn.Module, str]:
        """The module and attribute from which a parameter is read at every call."""
        if name in self._sources:
            return self._sources[name].module, self._sources[name].name
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            module = getattr(module, part)
        return module, leaf

    def read_parameter(self, name: str, read: Callable[[Any, str], Any] = getattr) -> Any:
        """Return the current value of a parameter as the passes get it; None if there is none.

        Args:
            name: The parameter.
            read: Reads an attribute of a module.
        """
        module, leaf = self.param_source(name)
        value = read(module, leaf)
        if name in self._layouts and value is not None:
            value = self._layouts[name].part_of(f"{type(self).__name__}.{name}", value)
        transposed = name in self._sources and self._sources[name].transposed
        return value.mT if transposed and value is not None else value

    def __getattr__(self, name: str) -> Any:
        return self.read_parameter(name) if name in self._sources else super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; refused if another module holds it."""
        self._refuse_foreign(name)
        super().register_parameter(name, param)
        if self._captured and name not in (self.param_names or ()):
            self._count_change()

    def accumulate_grads(
        self, params: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Store gradients that autograd must not see, whichever fusion computed them.

        Called once in a backward that would add them to ``.grad``, but not by
        ``torch.autograd.grad``.

        Args:
            params: The parameters of the forward.
            grads: Their gradients; None where none is to be stored.

        Returns:
            The values that autograd gets instead.
        """
        raise NotImplementedError(f"{type(self).__name__} does not accumulate gradients")

    def grad_sum(self, params: Sequence[Tensor | None]) -> Any:
        """What :meth:`accumulate_grads` will add to, if a product may do so before it.

        Called before the backward of a call whose gradients will be added.

        Args:
            params: The parameters of the forward; None in place of those that get no gradient.

        Returns:
            For :attr:`opfuse.OperationContext.grad_sum`; None: no product may.
        """
        return None

    # Extra tensors bound to named channels, and external inputs that share a name

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Feed an extra input from the named channel of an earlier op instead of from the caller.

        Raises:
            IndexError: The op has no such extra input.
            ValueError: ``channel`` is neither None nor a non-empty string.
            RuntimeError: A fuser has captured this op already (calling ``op(x)`` does so).
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._refuse_both(index, self._extra_input_names[index], channel)
        self._extra_input_channels = _with(self._extra_input_channels, index, channel)
        return self

    def set_extra_input_name(self, index: int, name: str | None) -> BasicOperation:
        """Name an extra input that the caller passes; inputs of one name share one argument.

        Extra inputs of one name in one fuser share one argument, at the place of the first of them.
        They all get the same tensor, and their gradients are added.

        Args:
            index: Index of the extra input.
            name: The name, or None to remove it.

        Raises:
            IndexError: The op has no such extra input.
            ValueError: ``name`` is neither None nor a non-empty string, or a channel feeds this
                extra input.
            RuntimeError: A fuser has captured this op already (calling ``op(x)`` does so).
        """
        self._check_channel("input", index, self.num_extra_inputs, name, "name")
        self._refuse_both(index, name, self._extra_input_channels[index])
        self._extra_input_names = _with(self._extra_input_names, index, name)
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Publish an extra output under a channel name, for later ops of the same fuser.

        Args:
            index: Index of the extra output.
            channel: The name, or None to remove the binding.
            output_to_caller: Whether the caller gets the tensor too.

        Raises:
            IndexError, ValueError, RuntimeError: As for :meth:`set_extra_input_channel`.
            TypeError: ``output_to_caller`` is not a bool.
        """
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool, got {output_to_caller!r}")
        self._check_channel("output", index, self.num_extra_outputs, channel)
        to_caller = output_to_caller or channel is None
        self._extra_output_channels = _with(self._extra_output_channels, index, channel)
        self._extra_output_to_caller = _with(self._extra_output_to_caller, index, to_caller)
        return self

    @property
    def extra_input_channels(self) -> tuple[str | None, ...]:
        """The channel that feeds each extra input; None: the caller does."""
        return self._extra_input_channels

    @property
    def extra_input_names(self) -> tuple[str | None, ...]:
        """The name of each extra input; None: it has none."""
        return self._extra_input_names

    @property
    def extra_output_channels(self) -> tuple[str | None, ...]:
        """The channel under which each extra output is published; None: under none."""
        return self._extra_output_channels

    def _check_channel(
        self, side: str, index: int, count: int, channel: str | None, what: str = "channel"
    ) -> None:
        name = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"{name} has {count} extra {side}s, there is no extra {side} {index}")
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise ValueError(f"a {what} is a non-empty string or None, {name} got {channel!r}")
        if self._captured:
            why = "a fuser captured them (a Sequential at its first call, or op(x))"
            raise RuntimeError(f"the {what}s of this {name} are fixed: {why}; use a new op")

    def _refuse_both(self, index: int, name: str | None, channel: str | None) -> None:
        if name is not None and channel is not None:
            who = f"extra input {index} of {type(self).__name__} has the name {name!r}"
            what = (
                f"for a tensor of the caller, or the channel {channel!r}, for one of an earlier op"
            )
            raise ValueError(f"{who}, {what}, not both: set the other to None first")

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        """The number of tensors that the op quantizes in ``mode`` ("forward" or "backward")."""
        return 0

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        """The role of each of the ``num_quantizers(mode)`` tensors; None: roles without a name."""
        return None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make ``recipe`` current; create this op's quantizers for it if it is new."""
        self._quantizers.use(self, recipe)

    def _check_name(self, name: str) -> None:
        states = vars(self).get("_quantizers")  # maybe before super().__init__()
        if states is not None:
            states.check_name(self, name)

    def _set_name(self, attribute: str, name: str) -> None:
        self._check_name(self._name or name if attribute == "_path" else name or self._path)
        super()._set_name(attribute, name)

    @staticmethod
    def _is_of_contract(name: str) -> bool:
        return hasattr(BasicOperation, name)

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """The current recipe's quantizer for a tensor of ``mode``; None without a recipe.

        In a backward, and between calls, it is that of the recipe that the op last ran under.
        """
        return self._quantizers.get(self, mode, index)

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer that this op wants for its input: the first of the forward, if any."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The one that it wants for the gradient of its output: the first of the backward."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def get_usage(self, name: str, *, dgrad: bool, wgrad: bool, backward: bool = True) -> Usage:
        """Return which copies of a quantized tensor this op reads: those its GEMMs reduce over.

        An input is read rowwise by the forward, and columnwise for the gradient of a parameter. A
        weight is read rowwise by the forward, and columnwise for the gradient of the input. A
        gradient is read rowwise for the gradient of the input, and columnwise for that of a
        parameter.

        Args:
            name: ``"input"``, ``"weight"`` (or a name that starts with it) or ``"grad_output"``.
            dgrad: Whether the gradient of the input is needed.
            wgrad: Whether the gradient of a parameter is needed.
            backward: Whether the backward reads quantized tensors of its own.
        """
        if name.startswith("grad_output"):
            return Usage(dgrad, wgrad)
        return Usage(True, backward and (dgrad if name.startswith("weight") else wgrad))

    # The operation itself

    def context_value(self, name: str) -> Any:
        """Return a number of the op, which the engine sets on the context of a fused forward.

        The fused forward may overwrite it. It must itself set each of the ``context_names`` that is
        not a number of the op; for these, this raises AttributeError.

        Args:
            name: One of the ``context_names``: an attribute of the op, or ``"numbers"`` for all
                that its ``numbers_of()`` returns.
        """
        return self.numbers_of() if name == "numbers" else getattr(self, name)

    @abstractmethod
    def op_forward(self, ctx: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Forward pass.

        Args:
            ctx: The context, which keeps what the backward needs if ``ctx.requires_grad``.
            input_: The input tensor.
            *args: Transformer Engine's ``prev_op_grad_output_quantizer`` and
                ``next_op_input_quantizer``, if the op has two more positional parameters; see
                :class:`OperationContext`.
            **kwargs: The op's own keyword arguments, and those two if its signature names them.
                Ops of the library accept both from a fused op that calls them, and need neither.

        Returns:
            The output tensor.
        """

    @abstractmethod
    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """Backward pass: the gradient of the input, and one gradient (or None) per parameter."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        basic_op_kwargs: Sequence[dict[str, Any]],
        **quantizers: Any,
    ) -> Outputs:
        """Run ``op_forward``; see :meth:`FusibleOperation.fuser_forward`."""
        self._check_has_no_extras("forward")
        by_position, by_name = asks_for_quantizers(self)
        before = [quantizers.get(name) for name in by_position]
        given = {name: quantizers.get(name) for name in by_name} | basic_op_kwargs[0]
        return self.op_forward(basic_op_ctxs[0], input_, *before, **given), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> AllGrads:
        """Run ``op_backward``; see :meth:`FusibleOperation.fuser_backward`."""
        self._check_has_no_extras("backward")
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def _check_has_no_extras(self, direction: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            who = f"{type(self).__name__} has extra inputs or outputs"
            raise RuntimeError(f"{who}: it must implement fuser_{direction}, not op_{direction}")

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Apply the op on its own; return the output, or ``(output, *extra_outputs)``."""
        return self._own_fuser().run(
            input, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None
        )

    # State

    # torch.distributed.checkpoint looks up its keys as attributes
    quantizers = property(lambda self: entries_of(self, "quantizers"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BasicOperation:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_state(fn)
        return self

    def _move_state(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the state of the quantizers."""
        had_state = self._quantizers.has_state
        self._quantizers.apply(fn)
        self._weights.clear()
        if had_state:
            self._count_change()  # plans hold quantizers whose state is elsewhere now

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._quantizers.refresh(self).save(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._quantizers.refresh(self).load(state_dict, prefix)
        if type(self).set_extra_state is nn.Module.set_extra_state:
            key = f"{prefix}_extra_state"  # Transformer Engine writes one for every op
            pickled = state_dict.pop(key, None)
            if pickled is not None and not (isinstance(pickled, Tensor) and not pickled.numel()):
                args[-1].append(
                    f"{key} is pickled FP8 state of Transformer Engine, which opfuse does not "
                    f"read: convert the checkpoint with opfuse.from_te_extra_state, or drop the "
                    f"key to load the parameters without it"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_direct(op: Any, pass_name: str) -> bool:
    """Return whether a basic op's ``fuser_forward``, or backward, only calls ``op_forward``.

    One that asks for quantizers gets them from ``fuser_forward``.
    """
    method = f"fuser_{pass_name}"
    if not isinstance(op, BasicOperation) or method in vars(op):
        return False
    if pass_name == "forward" and any(asks_for_quantizers(op)):
        return False
    return getattr(type(op), method) is getattr(BasicOperation, method)


# The dtypes that ops accept as extra inputs


WORDS = {
    "floating": "a floating-point tensor",
    "integer": "an integer tensor",
    "bool": "a bool tensor",
}
"""The kinds of extra inputs, in words."""


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def kinds_of(op: BasicOperation) -> tuple[str, ...]:
    """The kind of each extra input of an op: ``"floating"``, ``"integer"`` or ``"bool"``.

    Raises:
        ValueError: ``extra_input_dtypes`` does not have one of these for each extra input.
    """
    count, declared = op.num_extra_inputs, op.extra_input_dtypes
    if declared == ():
        return ("floating",) * count
    if isinstance(declared, str) or len(declared) != count or not WORDS.keys() >= {*declared}:
        words = ", ".join(map(repr, WORDS))
        raise ValueError(
            f"{type(op).__name__}.extra_input_dtypes must have one of {words} for each of its "
            f"{count} extra inputs, got {declared!r}"
        )
    return tuple(declared)


def is_kind(kind: str, dtype: torch.dtype) -> bool:
    """Return whether an extra input of this kind may have that dtype."""
    if kind == "integer":
        return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return dtype is torch.bool if kind == "bool" else dtype.is_floating_point


def refuse_kind(who: str, kind: str, dtype: torch.dtype) -> NoReturn:
    """Refuse an extra input of a dtype that the op does not take."""
    other = kind == "floating" and not dtype.is_complex
    hint = "; an op declares another kind in its extra_input_dtypes" if other else ""
    raise TypeError(f"{who} expected {WORDS[kind]}, got {dtype}{hint}")
