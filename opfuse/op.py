"""The operation classes: what the user composes and what a plugin replaces.

A :class:`BasicOperation` is one tensor operation with its parameters and state. A
:class:`FusedOperation` replaces a run of basic ops and holds no state of its own. Both are driven
by :class:`opfuse.OperationFuser` through ``fuser_forward`` and ``fuser_backward``; class, method
and keyword names are those of Transformer Engine's ``te.ops``, so an op written for it runs here.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import threading
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .environment import Environment
from .quantization import Quantizer, QuantizerRole, Recipe
from .quantization.state import QuantizerStates

if TYPE_CHECKING:
    Grads = Iterable[Tensor | None] | None
    Extras = Sequence[Sequence[Tensor | None]]


class OperationContext:
    """What one basic op leaves in forward for its backward: an open bag of attributes.

    The fuser fills in the documented attributes before ``op_forward`` runs; an op does not change
    them, since what it writes there would be there in later calls. It may add attributes if it
    declares ``context_names``, or declares nothing at all; tensors go through
    :meth:`save_for_backward`. The backward gets another context with the same attributes, so
    nothing written in forward is ever mutated. Keep no reference to a context: that of an op that
    adds no attributes takes none (an AttributeError says so), is cleared when the pass is over, and
    serves a later one.

    Attributes:
        requires_grad: Whether this op takes part in the backward at all.
        input_requires_grad: Whether the gradient of the op's input is needed.
        params: The op's parameter values of this call, in ``param_names`` order (forward only).
        param_requires_grad: One flag per parameter.
        dtype: The dtype that autocast asks the op to compute in, or None: then its input's.
        backward_override: The recipe's, or None.
        prev_op_grad_output_quantizer: What the previous op wants its output's gradient quantized
            with.
        next_op_input_quantizer: What the next op wants its input quantized with.
        quantizers: This op's own quantizers as ``(forward, backward)`` tuples.
        saved_tensors: What :meth:`save_for_backward` was given (backward only).
        owns_grad_output: Whether the backward may overwrite ``grad_output`` (backward only).
        may_recompute: On the first context of a fused op that ``recomputes``, whether the next op
            would do without its input (forward only).
        recomputable_output: There the forward may put its output then: it agrees to compute it
            again.
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
        self.quantizers: tuple[tuple[Quantizer, ...], tuple[Quantizer, ...]] = ((), ())
        self.saved_tensors: tuple[Any, ...] | None = None
        self.to_save: tuple[Any, ...] | None = None
        self.owns_grad_output: bool = False
        self.may_recompute: bool = False
        self.recomputable_output: Tensor | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors (or quantized tensors, or None) for the backward, as ``saved_tensors``."""
        self.to_save = tensors


class ModuleCache:
    """Values derived from a module: dropped, never copied, when the module is copied or pickled."""

    def __init__(self) -> None:
        self.key: Any = None
        self.value: Any = None
        self.separate: tuple[int, Any] = (-1, None)  # see FusedOperation.run_separately

    def __reduce__(self) -> tuple[type[ModuleCache], tuple[()]]:
        return ModuleCache, ()


class _OperationMeta(ABCMeta):
    """Fixes ``param_names`` once ``__init__`` is over, before anything can parametrize the op.

    It also notices when a class gets another method or constant, which plans made before do not
    know.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        return init.replace(parameters=list(init.parameters.values())[1:])

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        given = namespace.get("grad_input", "shared")
        if isinstance(given, str) and given not in ("fresh", "same", "shared"):
            raise ValueError(
                f"{name}.grad_input must be 'fresh', 'same' or 'shared', got {given!r}"
            )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            op = super().__call__(*args, **kwargs)
        except TypeError:
            if (sentence := _misfit(cls, args, kwargs)) is None:
                raise
            raise TypeError(sentence) from None
        if op.param_names is None:
            names = [name for name, _ in op.named_parameters(recurse=True)]
            taken = cls.takes_params  # type: ignore[attr-defined]
            op.param_names = tuple(name for name in names if taken is None or name in taken)
        op._constructed()
        return op

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._check_class_attribute(name)  # type: ignore[attr-defined]
        super().__setattr__(name, value)
        _class_changed(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _class_changed(name)


def _class_changed(name: str) -> None:
    # those are set when any class is made
    if not name.startswith(("__abstractmethods__", "_abc_")):
        FusibleOperation._count_change()


def _misfit(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with a constructor's arguments, and the remedy; None: nothing."""
    signature = inspect.signature(cls)
    try:
        signature.bind(*args, **kwargs)
        return None
    except TypeError as error:
        parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        reason = f"{cls.__name__}: {error}, expected {cls.__name__}{inspect.Signature(parameters)}"
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in kwargs]
    surplus = dict(zip(by_name, args[places:], strict=False))
    if not 0 < len(args) - places == len(surplus):
        return reason
    call = ", ".join(
        [*map(repr, args[:places]), *(f"{k}={v!r}" for k, v in {**surplus, **kwargs}.items())]
    )
    word = "a keyword" if len(surplus) == 1 else "keywords"
    return f"{cls.__name__} expected {' and '.join(surplus)} as {word}: {cls.__name__}({call})"


class FusibleOperation(nn.Module, metaclass=_OperationMeta):
    """A tensor operation that the operation fuser can run.

    ``is_fused_op`` says whether an op stands for a run of basic ops. Class attributes that an op
    may set:
        grad_input: How the gradient that the backward returns relates to other tensors.
            ``"fresh"``: newly allocated, no alias anywhere. ``"same"``: ``grad_output`` itself, or
            fresh. ``"shared"`` (default): may alias something the caller sees. Decides
            ``ctx.owns_grad_output`` of the next step.
        kwarg_names: Names of the keyword arguments it takes through ``op_kwargs``; None: the named
            parameters of ``op_forward``.
        real_numbers: Names of attributes that take real numbers only. A tensor would get no
            gradient there, and could change in place where nobody sees it.
    """

    is_fused_op: ClassVar[bool]
    grad_input: ClassVar[str] = "shared"
    kwarg_names: ClassVar[tuple[str, ...] | None] = None
    real_numbers: ClassVar[tuple[str, ...]] = ()
    # how often a method or declaration of any op was replaced; part of a plan's key
    changes: ClassVar[int] = 0
    param_names: tuple[str, ...] | None = None
    _captured = False

    def __init__(self) -> None:
        super().__init__()
        self._cache = ModuleCache()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overridden = _overriding(cls)
        for name, default in _DECLARED.items():
            if _defined(cls, name) > overridden:
                type.__setattr__(cls, name, default)

    # What a plan was made for may change: then it is made anew

    @classmethod
    def _check_class_attribute(cls, name: str) -> None:
        """Refuse to set an attribute of a class that is made, where something would not follow."""

    @staticmethod
    def _count_change() -> None:
        with _changing:
            type.__setattr__(FusibleOperation, "changes", FusibleOperation.changes + 1)

    def __setattr__(self, name: str, value: Any) -> None:
        inherited = getattr(type(self), name, None) if self._captured else None
        if inherited is not None and name == "__dict__":
            raise RuntimeError(
                f"the attributes of this {type(self).__name__} are in use: a fuser captured them"
            )
        self._refuse_lent(name)
        if name in self.real_numbers:
            value = check_real(self, name, value)
        is_new = name not in self.__dict__
        super().__setattr__(name, value)
        # dictionaries of hooks or parameters, maybe
        if self._captured and isinstance(value, (dict, nn.Module)):
            self._count_change()
        if (
            isinstance(value, Tensor)
            and value.is_leaf
            and value.requires_grad
            and not isinstance(value, nn.Parameter)
        ):
            self._count_change()  # planning refuses it: it would get no gradient
        if inherited is None or isinstance(inherited, property):  # a parametrized weight is one
            return
        if is_new or callable(value) or hasattr(BasicOperation, name):
            self._count_change()

    def _refuse_lent(self, name: str) -> None:
        """Refuse to set a parameter that lives on the owner: the op would still read that one."""
        if "_owner" in self.__dict__ and name in (self.param_names or ()):
            owner = type(self.__dict__["_owner"]).__name__
            raise RuntimeError(
                f"{type(self).__name__}.{name} is the parameter of its {owner}: set it there"
            )

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if hasattr(type(self), name):
            self._count_change()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__["_cache"] = ModuleCache()  # not that of the op a shallow copy was made from
        self._count_change()

    def _constructed(self) -> None:
        """Called once, when ``__init__`` is over."""

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "opfuse ops read the parameters of their own model, not of torch.nn.DataParallel's "
            "replicas"
        )

    def pre_first_fuser_forward(self) -> None:
        """Called once, when a fuser captures this op."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward pass of a fuser."""

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer this op wants its input quantized with, under the current recipe."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer this op wants its output's gradient quantized with."""
        return None

    def writes_output(self, quantizer: Quantizer) -> bool:
        """Whether the forward quantizes its output with ``quantizer``; if not, the core casts."""
        return False

    def writes_grad_input(self, quantizer: Quantizer) -> bool:
        """Whether the backward quantizes its result with ``quantizer``; if not, the core casts."""
        return False

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Extras]:
        """Forward pass over the basic ops this op stands for.

        Args:
            basic_op_ctxs: One context per basic op.
            input_: Input of the first basic op.
            basic_op_extra_inputs: Extra inputs per basic op; None where a channel's producer is
                inside.
            prev_op_grad_output_quantizer: See :class:`OperationContext`.
            next_op_input_quantizer: See :class:`OperationContext`; None if ``writes_output``
                declined.
            basic_op_kwargs: Keyword arguments per basic op.

        Returns:
            The output, and the extra outputs of each basic op.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward pass")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> tuple[Tensor | None, Sequence[Grads], Extras]:
        """Backward pass over the basic ops this op stands for.

        Args:
            basic_op_ctxs: One context per basic op, with what its forward saved.
            grad_output: Gradient of the last basic op's output.
            basic_op_grad_extra_outputs: Gradients of the extra outputs per basic op; None means
                zero.

        Returns:
            The gradient of the input, the parameter gradients of each basic op, and the gradients
            of the extra inputs of each basic op.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward pass")

    def _own_fuser(self) -> Any:
        """The fuser behind ``op(x)``, kept as long as the op."""
        if is_dynamo_compiling() or self._cache.key is not self:
            _make_own_fuser(self)
        return self._cache.value


def check_real(op: object, name: str, value: Any) -> float:
    """A real number, as a float.

    Raises:
        TypeError: It is not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        what = (
            f"a {type(value).__name__}, whose gradient would be lost"
            if isinstance(value, Tensor)
            else repr(value)
        )
        raise TypeError(f"{type(op).__name__} expected a real number as {name}, got {what}")
    return float(value)


_changing = threading.Lock()
_PASSES = ("op_forward", "op_backward", "fuser_forward", "fuser_backward", "operand")
_DECLARED: dict[str, Any] = {
    "grad_input": "shared",
    "saved_names": None,
    "context_names": (),
    "differentiable": False,
    "keeps_rows": False,
    "casts_input": False,
    "takes_params": None,
}
"""What a class declares about its passes, and what holds where nothing is declared.

A class that overrides a pass says anew what is true of it: what it inherits was said of another
    one.
"""


def _defined(cls: type, name: str, start: int = 0) -> int:
    """How far up a class's ancestors the first one is that defines a name."""
    found = (i for i, base in enumerate(cls.__mro__) if i >= start and name in vars(base))
    return next(found, len(cls.__mro__))


def _overriding(cls: type) -> int:
    """How far up the first ancestor is that overrides another's pass; past all if none does."""
    first = len(cls.__mro__)
    for name in _PASSES:
        own = _defined(cls, name)
        inherited = _defined(cls, name, own + 1)
        if inherited == len(cls.__mro__) or cls.__mro__[own].__module__.startswith("opfuse.ops."):
            continue
        base = cls.__mro__[inherited]
        template = base.__module__ == "opfuse.op" or getattr(
            vars(base)[name], "__isabstractmethod__", False
        )
        if not template:
            first = min(first, own)
    return first


def declared(op: nn.Module, name: str) -> Any:
    """What an op declares about its passes: nothing, if passes were replaced on the op itself."""
    return getattr(op, name) if vars(op).keys().isdisjoint(_PASSES) else _DECLARED[name]


def _make_own_fuser(op: FusibleOperation) -> None:
    from .engine.fuser import OperationFuser

    if op._cache.key is not op:
        op._cache.key, op._cache.value = op, OperationFuser([op], owner=op)


_make_own_fuser._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


class BasicOperation(FusibleOperation):
    """One tensor operation with its parameters and state.

    Subclasses implement ``op_forward`` and ``op_backward``; an op with extra inputs or outputs
    implements ``fuser_forward`` and ``fuser_backward`` instead.

    A class that overrides one of these passes inherits no declaration about them, but says anew
    what is true of it: ``saved_names``, ``context_names``, ``grad_input``, ``differentiable``,
    ``keeps_rows``, ``casts_input`` and ``takes_params``.

    Class attributes that describe an op to fusions and to the fuser:
        num_extra_inputs, num_extra_outputs: Tensors beside the main one.
        takes_params: Names of the parameters that the passes take, in order; None: all that there
            are at the end of ``__init__``. Others belong to a ``forward`` of its own.
        saved_names: Names of what ``save_for_backward`` is given, in order; None: not declared.
        context_names: Context attributes beyond the documented ones that the backward reads, such
            as a number of the op; the forward leaves each where ``ctx.requires_grad``.
        in_features: Last dimension the op takes, or None for any.
        out_features: Last dimension it gives, or None for the one it got divided by
            ``feature_ratio``.
        feature_ratio: See above; None: unknown.
        keeps_rows: Whether the output has the leading dimensions of the input, all but the last.
        differentiable: Whether autograd may differentiate through ``op_forward`` itself (it is made
            of differentiable torch operations), which second derivatives and functorch need.
        params_in_compute_dtype: Whether parameters and extra inputs must have the input's dtype,
            outside autocast.
        autocast_dtype: The dtype that ``ctx.dtype`` says under autocast instead of autocast's own,
            unless the next op ``casts_input``; None: autocast's own.
        casts_input: Whether the op casts its input to ``ctx.dtype`` before anything else.
        accumulates_grads: Whether :meth:`accumulate_grads` puts the gradients of parameters away.
    """

    is_fused_op = False
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    saved_names: ClassVar[tuple[str, ...] | None] = None
    context_names: ClassVar[tuple[str, ...]] = ()
    in_features: int | None = None
    out_features: int | None = None
    feature_ratio: int | None = None
    keeps_rows: bool = False
    differentiable: bool = False
    params_in_compute_dtype: bool = False
    autocast_dtype: ClassVar[torch.dtype | None] = None
    casts_input: ClassVar[bool] = False
    accumulates_grads: bool = False
    takes_params: ClassVar[tuple[str, ...] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_output_to_caller = [True] * self.num_extra_outputs
        self._quantizers = QuantizerStates()

    # Parameters that live on another module

    def lend_parameters(self, owner: nn.Module) -> None:
        """Give this op's parameters to ``owner``, which registers them under the same names.

        The op goes on reading them, from ``owner``, at every call; its ``param_names`` stay.
        """
        for name, param in list(self._parameters.items()):
            del self._parameters[name]
            owner.register_parameter(name, param)
        self.__dict__["_owner"] = owner

    def param_source(self, name: str) -> tuple[nn.Module, str]:
        """The module and attribute from which a parameter is read at every call."""
        module: nn.Module = self.__dict__.get("_owner", self)
        *path, leaf = name.split(".")
        for part in path:
            module = getattr(module, part)
        return module, leaf

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("_owner")
        if owner is not None and name in (self.param_names or ()):
            return getattr(owner, name)
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; refused where the parameter lives on the owner."""
        self._refuse_lent(name)
        super().register_parameter(name, param)
        if self._captured and name not in (self.param_names or ()):
            self._count_change()

    def accumulate_grads(
        self, params: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Put gradients away that autograd is not to see, whatever fusion computed them.

        Called once in a backward that would add them to ``.grad``, and not by
        ``torch.autograd.grad``.

        Args:
            params: The parameters of the forward.
            grads: Their gradients, or None.

        Returns:
            What autograd gets instead.
        """
        raise NotImplementedError(f"{type(self).__name__} does not accumulate gradients")

    # Extra tensors bound to named channels

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Feed an extra input from the named channel of an earlier op instead of from the caller.

        Raises:
            IndexError: The op has no such extra input.
            ValueError: ``channel`` is neither None nor a non-empty string.
            RuntimeError: A fuser has captured this op already (calling ``op(x)`` does so).
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Publish an extra output under a channel name, for later ops of the same fuser.

        Args:
            index: Which extra output.
            channel: The name, or None to remove the binding.
            output_to_caller: Whether the caller gets the tensor too.

        Raises:
            IndexError, ValueError, RuntimeError: As for :meth:`set_extra_input_channel`.
            TypeError: ``output_to_caller`` is not a bool.
        """
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool, got {output_to_caller!r}")
        self._check_channel("output", index, self.num_extra_outputs, channel)
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller or channel is None
        return self

    @property
    def extra_input_channels(self) -> tuple[str | None, ...]:
        """The channel that feeds each extra input; None: the caller does."""
        return tuple(self._extra_input_channels)

    @property
    def extra_output_channels(self) -> tuple[str | None, ...]:
        """The channel under which each extra output is published; None: under none."""
        return tuple(self._extra_output_channels)

    def _check_channel(self, side: str, index: int, count: int, channel: str | None) -> None:
        name = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"{name} has {count} extra {side}s, there is no extra {side} {index}")
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise ValueError(f"a channel is a non-empty string or None, {name} got {channel!r}")
        if self._captured:
            when = "a Sequential at its first call, or op(x)"
            raise RuntimeError(
                f"the channels of this {name} are fixed: a fuser captured them ({when}); use a "
                f"new op"
            )

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        """How many tensors the op quantizes in ``mode`` ("forward" or "backward")."""
        return 0

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        """What each of the ``num_quantizers(mode)`` tensors is; None: roles without a name."""
        return None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make ``recipe`` current; the first time, create this op's quantizers for it."""
        self._quantizers.use(self, recipe)

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """The current recipe's quantizer for a tensor of ``mode``; None without a recipe."""
        return self._quantizers.get(mode, index)

    def get_input_quantizer(self) -> Quantizer | None:
        """The first forward quantizer, if there is one."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The first backward quantizer, if there is one."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    # The operation itself

    @abstractmethod
    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        """Forward pass.

        Args:
            ctx: Where to leave what the backward needs, if ``ctx.requires_grad``.
            input_: The input tensor.
            **kwargs: The op's own keyword arguments. An op whose signature names
                ``prev_op_grad_output_quantizer`` and ``next_op_input_quantizer`` gets these too,
                and one with two more positional parameters gets them there, as in Transformer
                Engine; see :class:`OperationContext`.

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
    ) -> tuple[Tensor, Extras]:
        """Run ``op_forward``; see :meth:`FusibleOperation.fuser_forward`."""
        self._check_has_no_extras("forward")
        by_position, by_name = asks_for_quantizers(self)
        before = [quantizers.get(name) for name in by_position]
        given = {name: quantizers.get(name) for name in by_name}
        return self.op_forward(basic_op_ctxs[0], input_, *before, **given, **basic_op_kwargs[0]), [
            ()
        ]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> tuple[Tensor | None, Sequence[Grads], Extras]:
        """Run ``op_backward``; see :meth:`FusibleOperation.fuser_backward`."""
        self._check_has_no_extras("backward")
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def _check_has_no_extras(self, direction: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            who = f"{type(self).__name__} has extra inputs or outputs"
            raise RuntimeError(f"{who}: it must implement fuser_{direction}, not op_{direction}")

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Apply the op on its own: the output, or ``(output, *extra_outputs)``."""
        return self._own_fuser().run(
            input, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None
        )

    # State

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BasicOperation:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._quantizers.apply(fn)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._quantizers.save(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._quantizers.load(state_dict, prefix)
        if type(self).set_extra_state is nn.Module.set_extra_state:
            pickled = state_dict.pop(
                f"{prefix}_extra_state", None
            )  # Transformer Engine writes one for every op
            if pickled is not None and not (isinstance(pickled, Tensor) and not pickled.numel()):
                what = "is pickled FP8 state of Transformer Engine, which opfuse does not read"
                args[-1].append(
                    f"{prefix}_extra_state {what}: drop the key to load the parameters without it"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


_QUANTIZERS = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")


def asks_for_quantizers(op: BasicOperation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of Transformer Engine's quantizers ``op_forward`` takes: by position, and by name."""
    return _asked_by(
        getattr(op.op_forward, "__func__", op.op_forward), "__func__" in dir(op.op_forward)
    )


asks_for_quantizers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


@functools.lru_cache(maxsize=1024)
def _asked_by(function: Any, is_method: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parameters = list(inspect.signature(function).parameters.values())[3 if is_method else 2 :]
    if named := tuple(p.name for p in parameters if p.name in _QUANTIZERS):
        return (), named
    required = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return (_QUANTIZERS, ()) if len(required) == 2 else ((), ())


class FusedOperation(FusibleOperation):
    """Stands for a run of basic ops and keeps no state of its own.

    A fusion builds one from the ops it matched; ``build`` of a :class:`opfuse.Fusion` can be the
    subclass itself. In a forward-only fusion ``fuser_forward`` must leave in each context exactly
    what the basic op would (``saved_names`` and ``context_names`` say what); a backward-only fusion
    may rely on exactly that; a joint fusion may keep what it likes.

    Attributes:
        recomputes: Whether ``fuser_recompute`` can give the output of ``fuser_forward`` again. An
            op behind it that saves this very tensor as its ``"input"`` then does not keep it, and
            finds it in its backward all the same; ``fuser_forward`` agrees to that at each call,
            see :attr:`OperationContext.may_recompute`.
        notes: What reports add about this op, such as the time it spent compiling; an attribute or
            a property.

    Args:
        basic_ops: The basic ops this op stands for, in order.

    Raises:
        ValueError: There is none.
        TypeError: One of them is not a basic op.
    """

    is_fused_op = True
    kwarg_names: ClassVar[tuple[str, ...] | None] = ()
    param_names: tuple[str, ...] | None = ()
    notes: str = ""
    recomputes: bool = False

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        ops = list(basic_ops)
        if not ops:
            raise ValueError(f"{type(self).__name__} needs at least one basic op to stand for")
        for op in ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"{type(self).__name__} stands for basic ops, got {type(op).__name__}"
                )
        self.basic_ops = nn.ModuleList(ops)

    def get_input_quantizer(self) -> Quantizer | None:
        """The first basic op's."""
        return self.basic_ops[0].get_input_quantizer()  # type: ignore[no-any-return,operator]

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The last basic op's."""
        return self.basic_ops[-1].get_grad_output_quantizer()  # type: ignore[no-any-return,operator]

    def planned(self, env: Environment) -> None:
        """Called once, when a plan takes this op, with where it will run and the options.

        If it raises, such as for an option's value, there is a warning, and the fusion is not used.
        """

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """The output of ``fuser_forward`` again, from the contexts of the backward.

        Returns:
            A new tensor that equals the output up to rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} does not compute its output again")

    # The basic ops one after the other: what a kernel falls back to, and what its results are held
    # against

    def run_separately(
        self,
        basic_op_ctxs: Sequence[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[Tensor, Extras]:
        """The forward of the basic ops, one after the other.

        Takes and gives what ``fuser_forward`` does, and leaves the same on the contexts.
        """
        x, outputs, last = input_, [], len(basic_op_ctxs) - 1
        made: dict[str | None, Tensor | None] = {}
        for i, (op, forward, _) in enumerate(self._separate_ops()):
            ctx, kwargs = basic_op_ctxs[i], basic_op_kwargs[i] if basic_op_kwargs else {}
            if forward is not None and not kwargs:
                x = forward(ctx, x)
                outputs.append(())
                continue
            channels = op._extra_input_channels
            extras = zip(basic_op_extra_inputs[i], channels, strict=True)
            x, (given,) = op.fuser_forward(
                [ctx],
                x,
                basic_op_extra_inputs=[
                    [made[c] if extra is None else extra for extra, c in extras]
                ],
                prev_op_grad_output_quantizer=prev_op_grad_output_quantizer if i == 0 else None,
                next_op_input_quantizer=next_op_input_quantizer if i == last else None,
                basic_op_kwargs=[kwargs],
            )
            inside = [_in_channel(tensor, ctx) for tensor in given]
            made.update(zip(op._extra_output_channels, inside, strict=True))
            outputs.append(given)
        return x, outputs

    def run_separately_backward(
        self,
        basic_op_ctxs: Sequence[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> tuple[Tensor | None, Sequence[Grads], Extras]:
        """The backward of the basic ops, one after the other; as ``fuser_backward``."""
        dy: Tensor | None = grad_output
        of_params: list[Any] = [None] * len(basic_op_ctxs)
        of_extras: list[Any] = [(None,) * op.num_extra_inputs for op, *_ in self._separate_ops()]
        inside: dict[str, Tensor | None] = {}
        owns = basic_op_ctxs[-1].owns_grad_output
        for i, (op, _, backward) in reversed([*enumerate(self._separate_ops())]):
            ctx = basic_op_ctxs[i]
            if not ctx.requires_grad:  # nor does any before it
                return None, of_params, of_extras
            owned, ctx.owns_grad_output = ctx.owns_grad_output, owns
            if backward is not None:
                dy, of_params[i] = backward(ctx, dy)
            else:
                given = zip(basic_op_grad_extra_outputs[i], op._extra_output_channels, strict=True)
                grads = [_sum(grad, inside.get(channel)) for grad, channel in given]
                dy, (of_params[i],), (of_op,) = op.fuser_backward(
                    [ctx], dy, basic_op_grad_extra_outputs=[grads]
                )
                of_extras[i] = of_op = tuple(of_op)
                for channel, grad in zip(op._extra_input_channels, of_op, strict=True):
                    if channel is not None:
                        inside[channel] = _sum(grad, inside.get(channel))
            ctx.owns_grad_output = owned
            owns = op.grad_input == "fresh" or (op.grad_input == "same" and owns)
        return dy, of_params, of_extras

    def _separate_ops(self) -> list[tuple[Any, Any, Any]]:
        """The basic ops, with ``op_forward`` and ``op_backward`` where these are all there is."""
        changes, found = self._cache.separate
        if changes == FusibleOperation.changes:
            return found  # type: ignore[no-any-return]
        found = []
        default = {
            name: getattr(BasicOperation, name) for name in ("fuser_forward", "fuser_backward")
        }
        for op in self.basic_ops:
            assert isinstance(op, BasicOperation)
            plain = not (
                op.num_extra_inputs or op.num_extra_outputs or default.keys() & vars(op).keys()
            )
            forward = plain and type(op).fuser_forward is default["fuser_forward"]
            forward = forward and asks_for_quantizers(op) == ((), ())
            backward = plain and type(op).fuser_backward is default["fuser_backward"]
            found.append(
                (op, op.op_forward if forward else None, op.op_backward if backward else None)
            )
        self._cache.separate = FusibleOperation.changes, found
        return found

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Apply the basic ops, fused as the installed plugins allow."""
        return self._own_fuser().run(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def _in_channel(tensor: Tensor | None, ctx: Any) -> Tensor | None:
    """What a later op gets of an extra output: an alias that says whether a gradient flows."""
    if (
        tensor is None
        or not (ctx.requires_grad and tensor.is_floating_point())
        or is_dynamo_compiling()
    ):
        return tensor
    return tensor.detach().requires_grad_()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
