"""The common base of basic and fused ops: declarations, and tracking of outdated plans."""

from __future__ import annotations

import functools
import inspect
import numbers
import threading
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .op_context import AllGrads, Extras, ModuleCache, OperationContext, Outputs
from .quantization import Quantizer, coded_tensor
from .quantization.names import remember
from .quantization.state import entries_of
from .settings import current


class _OperationMeta(ABCMeta):
    """Fixes ``param_names`` after ``__init__``, before anything can parametrize the op.

    It also notices when a class gets another method or constant, which makes earlier plans
    outdated.
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
            what = "must be 'fresh', 'same' or 'shared'"
            raise ValueError(f"{name}.grad_input {what}, got {given!r}")
        for attribute, value in namespace.items():
            _check_number(cls, attribute, value)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        name = "" if _takes_name(cls) else kwargs.pop("name", "")
        if not isinstance(name, str):
            raise TypeError(f"{cls.__name__} expected a string as name, got {name!r}")
        outside = current.new_op_name
        current.new_op_name = name or outside
        try:
            op = super().__call__(*args, **kwargs)
        except TypeError:
            if (sentence := _misfit(cls, args, kwargs)) is None:
                raise
            raise TypeError(sentence) from None
        finally:
            current.new_op_name = outside
        if op.param_names is None:
            names = [name for name, _ in op.named_parameters(recurse=True)]
            taken = cls.takes_params  # type: ignore[attr-defined]
            op.param_names = tuple(name for name in names if taken is None or name in taken)
        if name:
            op._take_name(name)
        op._constructed()
        return op

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._check_class_attribute(name)  # type: ignore[attr-defined]
        _check_number(cls, name, value)
        super().__setattr__(name, value)
        _class_changed(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _class_changed(name)


def _check_number(cls: Any, name: str, value: Any) -> None:
    """Refuse a class attribute that is not a real number where ops may read one from the class.

    Properties and other descriptors are the responsibility of the class's author.
    """
    if name in cls.real_numbers and not hasattr(value, "__get__"):
        check_real(cls, name, value)


@functools.lru_cache(maxsize=1024)
def _takes_name(cls: type) -> bool:
    """Return whether ``__init__`` takes ``name`` itself; otherwise the metaclass does."""
    parameters = inspect.signature(cls).parameters.values()
    return any(p.name == "name" or p.kind is p.VAR_KEYWORD for p in parameters)


def _class_changed(name: str) -> None:
    # these are set whenever a class is created
    if not name.startswith(("__abstractmethods__", "_abc_")):
        FusibleOperation._count_change()


def _misfit(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return what is wrong with a constructor's arguments and the remedy; None: nothing."""
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
    named = [f"{k}={v!r}" for k, v in {**surplus, **kwargs}.items()]
    call = ", ".join([*map(repr, args[:places]), *named])
    word = "a keyword" if len(surplus) == 1 else "keywords"
    return f"{cls.__name__} expected {' and '.join(surplus)} as {word}: {cls.__name__}({call})"


class ParamSource(NamedTuple):
    """The place of a parameter that an op reads but does not hold itself.

    Attributes:
        module: The module that holds it.
        name: The attribute of that module.
        transposed: Whether the op takes the transposed matrix.
    """

    module: nn.Module
    name: str
    transposed: bool = False


class FusibleOperation(nn.Module, metaclass=_OperationMeta):
    """A tensor operation that the operation fuser can run.

    ``is_fused_op`` says whether an op replaces a run of basic ops.

    Class attributes that an op may set:
        adds_to_sum: The backward of a fused op may add a weight's gradient to ``ctx.grad_sum``, and
            gives what its basic ops give for their parameters unchanged.
        grad_input: How the gradient that the backward returns relates to other tensors.
            ``"fresh"``: newly allocated, no alias anywhere. ``"same"``: ``grad_output`` itself, or
            fresh. ``"shared"`` (default): may alias something the caller sees. It determines
            ``ctx.owns_grad_output`` of the next step.
        keeps_input_as_first: Whether a fused op of both passes keeps its input only as its first
            op does, in the same place of that op's context. A step before that ``recomputes`` then
            computes it again.
        kwarg_names: Names of the keyword arguments it takes through ``op_kwargs``; None: the named
            parameters of ``op_forward``.
        recomputes: Whether ``fuser_recompute`` can return the output of the forward again. A next
            op that saves this very tensor as its ``"input"`` then does not keep it, and still finds
            it in its backward. The forward agrees to that at each call, see
            :attr:`OperationContext.may_recompute`.
        real_numbers: Names of attributes that take only real numbers. A tensor there would get no
            gradient, and could change in place unnoticed.
    """

    is_fused_op: ClassVar[bool]
    adds_to_sum: ClassVar[bool] = False
    grad_input: ClassVar[str] = "shared"
    # documented on BasicOperation
    saved_names: ClassVar[tuple[str, ...] | None] = None
    context_names: ClassVar[tuple[str, ...]] = ()
    takes_params: ClassVar[tuple[str, ...] | None] = None
    differentiable: bool = False
    keeps_rows: bool = False
    casts_input: ClassVar[bool] = False
    batch_invariant: tuple[str, ...] = ()
    keeps_input_as_first: ClassVar[bool] = False
    kwarg_names: ClassVar[tuple[str, ...] | None] = None
    recomputes: bool = False
    real_numbers: ClassVar[tuple[str, ...]] = ()
    # how often a method or declaration of any op was replaced; part of a plan's key
    changes: ClassVar[int] = 0
    param_names: tuple[str, ...] | None = None
    _captured = False
    # set in the body of a class whose passes are only a default: overriding them voids nothing
    _is_base = True
    _name = _path = ""
    # parameters that other modules hold, by name; hidden from nn.Module's registration
    _sources: Mapping[str, ParamSource] = MappingProxyType({})
    # places where those modules had no parameter when the op was created
    _absent: tuple[ParamSource, ...] = ()
    engine: ClassVar[Engine]  # see bind_engine

    def __init__(self) -> None:
        super().__init__()
        self._cache = ModuleCache()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overridden = _overriding(cls)
        for name, default in _DECLARED.items():
            if first_defining(cls, name) > overridden:
                type.__setattr__(cls, name, default)

    @property
    def name(self) -> str:
        """The constructor's ``name``, or the one from :func:`opfuse.assign_names`, or ``""``.

        Every op, ``reading`` and ``of`` accept ``name`` as a keyword. It can also be set.

        Raises:
            TypeError: The new value is not a string.
            RuntimeError: The op already has quantizers that know it by another name.
        """
        return self._name or self._path

    @name.setter
    def name(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{type(self).__name__} expected a string as name, got {name!r}")
        self._take_name(name)

    def _take_name(self, name: str) -> None:
        """Take a name from the constructor or from an assignment to ``name``."""
        self._set_name("_name", name)

    def _set_name(self, attribute: str, name: str) -> None:
        """Set ``_name``, or ``_path``, the name from :func:`opfuse.assign_names`."""
        setattr(self, attribute, name)
        remember(self)
        if self._captured:
            self._count_change()  # a recipe may skip it now, or no longer

    # Changes that make plans outdated

    @classmethod
    def _check_class_attribute(cls, name: str) -> None:
        """Refuse to set a class attribute where something made earlier would not follow."""

    @staticmethod
    def _count_change() -> None:
        with _changing:
            type.__setattr__(FusibleOperation, "changes", FusibleOperation.changes + 1)

    def __setattr__(self, name: str, value: Any) -> None:
        inherited = getattr(type(self), name, None) if self._captured else None
        if inherited is not None and name == "__dict__":
            who = f"the attributes of this {type(self).__name__}"
            raise RuntimeError(f"{who} are in use: a fuser captured them")
        self._refuse_foreign(name)
        if name in self.real_numbers:
            value = check_real(self, name, value)
        is_new = name not in self.__dict__
        super().__setattr__(name, value)
        # dictionaries of hooks or parameters, maybe
        if self._captured and isinstance(value, (dict, nn.Module)):
            self._count_change()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            if value.is_leaf and value.requires_grad:
                self._count_change()  # planning refuses it: it would get no gradient
        if inherited is None or isinstance(inherited, property):  # a parametrized weight is one
            return
        if is_new or callable(value) or self._is_of_contract(name):
            self._count_change()

    @staticmethod
    def _is_of_contract(name: str) -> bool:
        """Return whether plans depend on an attribute of this name, whatever its value."""
        return hasattr(FusibleOperation, name)

    def _refuse_foreign(self, name: str) -> None:
        """Refuse to set a parameter that another module holds: the op would not read it."""
        if name in self._sources:
            who, owner = f"{type(self).__name__}.{name}", type(self._sources[name].module).__name__
            raise RuntimeError(f"{who} is the parameter of its {owner}: set it there")

    def _refuse_late_parameters(self) -> None:
        """Refuse parameters that a source module got after this op was made: they would be ignored.

        Raises:
            ValueError: There is such a parameter.
        """
        for module, name, _ in self._absent:
            if getattr(module, name, None) is not None:
                who = f"{type(self).__name__} reads a {type(module).__name__} that had no {name}"
                raise ValueError(f"{who} when the op was made, and has one now: make the op again")

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if hasattr(type(self), name):
            self._count_change()

    def __setstate__(self, state: dict[str, Any]) -> None:
        changed = self._captured
        super().__setstate__({**state, "_cache": ModuleCache(), "_captured": changed})  # type: ignore[no-untyped-call]
        remember(self)
        if changed:  # a copy is in no fuser yet
            self._count_change()

    def _constructed(self) -> None:
        """Called once, after ``__init__``."""

    # torch.distributed.checkpoint looks up its keys as attributes
    quantized = property(lambda self: entries_of(self, "quantized"))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        coded_tensor.save(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        coded_tensor.load(self, state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "opfuse ops read the parameters of their own model, not of torch.nn.DataParallel's "
            "replicas"
        )

    def pre_first_fuser_forward(self) -> None:
        """Called once, when a fuser captures this op."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward pass of a fuser."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> Outputs:
        """Forward pass over the basic ops that this op replaces.

        Args:
            basic_op_ctxs: One context per basic op.
            input_: Input of the first basic op.
            basic_op_extra_inputs: Extra inputs per basic op; None if the channel's producer is one
                of the ops.
            prev_op_grad_output_quantizer: Quantizer that the previous op wants for its gradient.
            next_op_input_quantizer: Quantizer that the next op wants for its input.
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
    ) -> AllGrads:
        """Backward pass over the basic ops that this op replaces.

        Args:
            basic_op_ctxs: One context per basic op, with the values that its forward saved.
            grad_output: Gradient of the last basic op's output.
            basic_op_grad_extra_outputs: Gradients of the extra outputs per basic op; None means
                zero.

        Returns:
            The gradient of the input, the parameter gradients of each basic op, and the gradients
            of the extra inputs of each basic op.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward pass")

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """Return the output of the forward again, from the contexts of the backward.

        Returns:
            A tensor that equals the output up to rounding. It stands for a saved one: nobody writes
            to it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not compute its output again")

    def _own_fuser(self) -> Any:
        """The fuser behind ``op(x)``, which lives as long as the op."""
        if dynamo_traces() or self._cache.key is not self:
            _make_own_fuser(self)
        return self._cache.value


def check_real(op: object, name: str, value: Any) -> float:
    """Return a real number as a float; ``op`` is an op, or its class.

    Raises:
        TypeError: It is not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        lost = f"a {type(value).__name__}, whose gradient would be lost"
        what = lost if isinstance(value, Tensor) else repr(value)
        who = op if isinstance(op, type) else type(op)
        raise TypeError(f"{who.__name__} expected a real number as {name}, got {what}")
    return float(value)


_changing = threading.Lock()

_PASSES = ("op_forward", "op_backward", "fuser_forward", "fuser_backward", "operand")

_DECLARED: dict[str, Any] = {
    name: vars(FusibleOperation)[name]
    for name in (
        "grad_input saved_names context_names differentiable keeps_rows casts_input takes_params "
        "batch_invariant"
    ).split()
}
"""The declarations of a class about its passes, with their defaults.

A class that overrides a pass must declare again what holds for it: inherited declarations describe
another pass.
"""


def first_defining(cls: type, *names: str, start: int = 0) -> int:
    """Return the MRO index of the first class, from ``start`` on, that defines one of the names.

    It is the length of the MRO if none does.
    """
    defines = [not vars(base).keys().isdisjoint(names) for base in cls.__mro__]
    return next((i for i, does in enumerate(defines) if does and i >= start), len(defines))


def _overriding(cls: type) -> int:
    """Return the MRO index of the first class that overrides a pass; its length if none does."""
    first = len(cls.__mro__)
    for name in _PASSES:
        own = first_defining(cls, name)
        inherited = first_defining(cls, name, start=own + 1)
        if inherited == len(cls.__mro__):
            continue
        base = cls.__mro__[inherited]
        abstract = getattr(vars(base)[name], "__isabstractmethod__", False)
        if not (abstract or vars(base).get("_is_base")):
            first = min(first, own)
    return first


def declared(op: nn.Module, name: str) -> Any:
    """Return an op's declaration about its passes; none holds if the op itself replaced a pass."""
    replaced = any([method in vars(op) for method in _PASSES])  # which torch.compile can trace
    return _DECLARED[name] if replaced else getattr(op, name)


class Engine(NamedTuple):
    """The parts of the engine that ops use, though it is imported after them.

    Attributes:
        make_fuser: The class of fusers, for ``op(x)``.
        new_quantizer: ``new_quantizer(recipe, role, env, siblings)``, from the plugin that serves a
            recipe.
        recipe_name: ``recipe_name(recipe)``: the name under which a recipe is registered.
    """

    make_fuser: Callable[..., Any]
    new_quantizer: Callable[..., Quantizer]
    recipe_name: Callable[..., str]


def bind_engine(engine: Engine) -> None:
    """Give the ops access to the engine, which calls this once, when it is imported."""
    type.__setattr__(FusibleOperation, "engine", engine)


_COMPILING_NEEDS_TORCH_2_12 = (
    f"torch.compile cannot trace opfuse's ops with torch {torch.__version__}: its Dynamo refuses "
    f"modules as arguments of functions whose result is constant, which torch 2.12 and newer take. "
    f"Without fullgraph=True they run in eager mode"
    if torch.__version__ < "2.12"
    else ""
)


def dynamo_traces() -> bool:
    """Whether Dynamo traces the caller.

    Raises:
        NotImplementedError: It does, and is too old. Without ``fullgraph=True`` it then gives up on
            the caller, which runs in eager mode. With it, its error shows this line.
    """
    if is_dynamo_compiling() and _COMPILING_NEEDS_TORCH_2_12:
        raise NotImplementedError(_COMPILING_NEEDS_TORCH_2_12)
    return is_dynamo_compiling()


def _make_own_fuser(op: FusibleOperation) -> None:
    if op._cache.key is not op:
        op._cache.key, op._cache.value = op, op.engine.make_fuser([op], owner=op)
        op._cache.value.holder = op._cache


_make_own_fuser._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result
