"""Logits that the loss did not need: an output computes them when they are read."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from opfuse.core.introspection import is_dtensor

from . import sharded

_steps = 0
"""The steps that optimizers made: a fused one changes a parameter, and not its version."""

_KEEP = 'opfuse.convert(model, skip="lm_head")'
_WITHOUT = "opfuse-plugin-transformers computed the loss of this output without its logits"
_CHANGED = (
    "but a backward, other weights or an optimizer's step came between, so its head may be another "
    f"one now: read them before, or keep them with {_KEEP}"
)
_RESHARD = (
    "no process can compute them alone. Shard the module that holds the head with "
    f"reshard_after_forward=False, or keep them with {_KEEP}"
)
_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": Tensor.to,
    "*": torch.mul,
    "/": torch.div,
    "tanh": lambda logits, unused: torch.tanh(logits),
    "fsdp": lambda logits, state: sharded.seen_by(state, logits),
}


class Apart(Tensor):
    """Logits that the loss was not computed from.

    Results computed from them, such as another loss, have right gradients. But their own gradient,
    which a hook sees, lacks the part of the loss: whatever asks for it raises. So does autograd
    itself if it is asked only for that of the loss, except with ``allow_unused``.

    Raises:
        RuntimeError: In ``register_hook``, ``retain_grad`` and ``torch.autograd.grad``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[1] if func is torch.autograd.grad else ()
        asks = func is Tensor.retain_grad or any(isinstance(each, cls) for each in of)
        # FSDP2 wants to know when a gradient arrives, whatever it is
        if func is Tensor.register_hook:
            asks = getattr(args[1], "__module__", "").partition(".")[0] != "torch"
        if asks:
            raise RuntimeError(
                f"{_WITHOUT}, so they have no gradient of it: keep them with {_KEEP}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file loads without this class
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _SetApart(torch.autograd.Function):
    """The same numbers as :class:`Apart`, which are no view: FSDP2 warns of views in outputs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return Tensor._make_subclass(Apart, logits.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Logits:
    """Replaces the logits, and holds what they are computed from.

    They are those of the forward or none: once the head may have changed, to compute them raises.
    Functions of torch, and what tensors have, compute them. What was written to a few weights alone
    by way of ``.data`` cannot be seen, nor what was written to the hidden states in inference mode.

    Args:
        linear: The head.
        hidden: Its input.

    Attributes:
        steps: What is done to the result of the head, by names and numbers.
        differentiable: Whether they have a gradient.
    """

    _late = False

    def __init__(self, linear: Any, hidden: Tensor) -> None:
        _count_steps()
        self.linear, self.steps, self.differentiable = linear, (), torch.is_grad_enabled()
        self._autocast: Any = contextlib.nullcontext
        self._dtype = None
        kind = hidden.device.type
        if torch.amp.is_autocast_available(kind):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            self._autocast = functools.partial(torch.autocast, kind, dtype, enabled)
            self._dtype = dtype if enabled and hidden.dtype is not torch.float64 else None
        self._learned = [False]
        self.start(hidden)

    def start(self, hidden: Tensor) -> None:
        """Note the input of the head and its parameters, as they are where it runs."""
        # those of now: torch.func.functional_call puts others back when the forward ends
        self.hidden, self._params = hidden, [*self.linear.parameters()]
        self._own = dict(self.linear._parameters)
        self._trains = any(param.requires_grad for param in self._params)
        self._before, self._some = self._state(), self._samples()

    def _state(self) -> list[Any]:
        tensors = [self.hidden, *self._params]
        versions = [0 if t.is_inference() else t._version for t in tensors]
        return [_steps if self._trains else 0, *versions]

    def _samples(self) -> list[Tensor]:
        """A few numbers of each parameter: averages of weights are often put there as data."""
        if self.hidden.is_meta or torch._C._are_functorch_transforms_active():
            return []
        read = [param.detach() for param in self._params]
        return [p[tuple([slice(0, None, n // 32 + 1) for n in p.shape])].clone() for p in read]

    def _changed(self) -> bool:
        """Whether the head may be another one than in the forward."""
        if self._learned[0] or self._state() != self._before:
            return True
        pairs = zip(self._samples(), self._some, strict=False)
        return not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)

    def end(self, states: Sequence[Any], loss: Tensor) -> None:
        """Note that the forward ends: from now on the head's hooks do not run.

        Args:
            states: Those of FSDP2 around it, see :func:`opfuse_transformers.sharded.states_around`.
            loss: It; once it has had its backward, the head may change in any way.
        """
        self._late, learned = True, self._learned
        if self.differentiable:  # else FSDP2 casts what stands for them
            self.steps = *self.steps, *[("fsdp", state) for state in states]
        if self._trains and loss.requires_grad:
            loss.register_hook(lambda grad: learned.__setitem__(0, True))

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        found = self._dtype or self.hidden.dtype
        for name, of in self.steps:
            if name == "to":
                found = of
            elif name == "fsdp" and not sharded.is_running(of):
                found = of._mp_policy.output_dtype or found
        return found

    @functools.cached_property
    def apart(self) -> Tensor:
        """The logits for a reader: the loss was computed without them."""
        if not self.differentiable:
            return self.value
        with torch.inference_mode(False), torch.enable_grad():
            return _SetApart.apply(self.value)  # type: ignore[no-any-return, no-untyped-call]

    @functools.cached_property
    def value(self) -> Tensor:
        """The logits, with their gradient if they have one, under the autocast of the forward.

        Raises:
            RuntimeError: The head may have changed since, or FSDP2 has sharded it again.
        """
        if self._late and any(map(is_dtensor, self.linear.parameters())):
            raise RuntimeError(
                f"{_WITHOUT}, and FSDP2 has sharded its head again since: {_RESHARD}"
            )
        if self._changed():
            raise RuntimeError(f"{_WITHOUT}, and computes them when they are read; {_CHANGED}")
        grads = functools.partial(torch.set_grad_enabled, self.differentiable)
        with torch.inference_mode(False), grads(), self._autocast():
            if not self._late:  # hooks run around it
                return self.stepped(self.linear(self.hidden))
            own = self._own  # with the parameters of its forward, and without its hooks
            return self.stepped(F.linear(self.hidden, own["weight"], own["bias"]))

    def stepped(self, result: Tensor) -> Tensor:
        """What the forward makes of the result of the head."""
        for name, of in self.steps:
            result = _STEPS[name](result, of)
        return result

    def float(self) -> Logits:
        """The same in fp32, as accelerate asks of every output; computes nothing."""
        return self.to(torch.float32)

    def to(self, dtype: Any, *others: Any, **named: Any) -> Any:
        """The same in another dtype, which computes nothing; anything else as of a tensor."""
        if not _is_dtype(dtype, *others, **named):
            return self.apart.to(dtype, *others, **named)
        # before what FSDP2 is yet to do
        running = [name == "fsdp" and sharded.is_running(of) for name, of in self.steps]
        return self._with([*running, True].index(True), "to", dtype)

    def _with(self, place: int, name: str, of: Any) -> Logits:
        """The same with one more step."""
        other = object.__new__(Logits)
        vars(other).update({k: v for k, v in vars(self).items() if k not in ("value", "apart")})
        other.steps = *self.steps[:place], (name, of), *self.steps[place:]
        return other

    def _then(self, name: str, of: Any = None) -> Any:
        """The same with one more step of the forward; computed, if that cannot be done later."""
        if self._late or not (of is None or type(of) in (int, float)):
            return _STEPS[name](self.apart if self._late else self.value, of)
        return self._with(len(self.steps), name, of)

    def __mul__(self, other: Any) -> Any:
        return self._then("*", other)

    def __truediv__(self, other: Any) -> Any:
        return self._then("/", other)

    def tanh(self) -> Any:
        """As of a tensor."""
        return self._then("tanh")

    def __reduce__(self) -> Any:
        return self.apart.__reduce_ex__(2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"logits have no {name!r}")
        return getattr(self.apart, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        given = tree_map_only(cls, lambda each: each.apart, (args, kwargs or {}))
        return func(*given[0], **given[1])


def _as_tensor(name: str) -> Callable[..., Any]:
    """An operator of tensors that computes the logits."""

    def operator(self: Logits, *others: Any) -> Any:
        return getattr(self.apart, name)(*others)

    return operator


_OPERATORS = """add sub pow floordiv mod matmul rmul rtruediv radd rsub rpow rmatmul neg abs getitem
setitem len iter bool int float eq ne lt le gt ge""".split()
"""Operators that Python looks up on the class, but for those of forwards, which compute nothing."""
for _name in [f"__{name}__" for name in _OPERATORS]:
    setattr(Logits, _name, _as_tensor(_name))
Logits.__hash__ = object.__hash__  # type: ignore[method-assign]  # as tensors have


class Unread(Tensor):
    """Stands for logits without a gradient, and is a tensor for whoever looks at outputs by type.

    What it is asked about shape and dtype it says; everything else computes the logits.
    """

    _logits: Logits

    @classmethod
    def of(cls, logits: Logits) -> Unread:
        """What stands for logits."""
        shape = *logits.hidden.shape[:-1], logits.linear.out_features
        given: Any = {"dtype": logits.dtype, "device": logits.hidden.device}
        made: Unread = Tensor._make_wrapper_subclass(cls, shape, **given)
        made._logits = logits
        return made

    @property
    def read(self) -> Tensor:
        """The logits."""
        return self._logits.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.float or (func is Tensor.to and _is_dtype(*args[1:], **(kwargs or {}))):
            dtype = torch.float32 if func is Tensor.float else args[1]
            return cls.of(args[0]._logits.to(dtype))
        given = tree_map_only(cls, lambda each: each.read, (args, kwargs or {}))
        return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(cls, lambda each: each.read, (args, kwargs or {}))
        return func(*given[0], **given[1])


_ABOUT = {
    *[
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad")
    ],
    *[Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point],
    *[Tensor.__hash__, Tensor.is_complex, torch.is_complex, torch.numel],
}


def _is_dtype(*given: Any, **named: Any) -> bool:
    """Return whether a dtype alone was given."""
    return len(given) == 1 and isinstance(given[0], torch.dtype) and not named


@functools.cache
def _count_steps() -> None:
    """Count the steps of all optimizers from now on."""

    def count(*unused: Any) -> None:
        global _steps
        _steps += 1

    register_optimizer_step_post_hook(count)


def later(output: Any, states: Sequence[Any]) -> Any:
    """An output of the library, whose logits are computed when they are read.

    As an attribute, by name or index, in a slice or a tuple: then it is of its own class again.
    ``items()`` and ``values()``, by which DDP and accelerate look at outputs, and the fields of the
    dataclass, by which FSDP2 does, have what stands for them: a tensor if they have no gradient.

    Args:
        output: It has :class:`Logits` in the place of logits.
        states: See :meth:`Logits.end`.
    """
    output.logits.end(states, output.loss)
    if not output.logits.differentiable:
        output.logits = Unread.of(output.logits)
    object.__setattr__(output, "__class__", _class_of(type(output)))
    return output


class _OfField(str):
    """The name of the field, which is not that of the attribute: reading it computes nothing."""

    __slots__ = ()


def _settle(output: Any) -> None:
    """Compute the logits of an output."""
    given = vars(output).get("logits")
    if isinstance(given, (Logits, Unread)):
        given = given.apart if type(given) is Logits else given.read
    object.__setattr__(output, "__class__", type(output).__mro__[1])
    output.logits = given


@functools.cache
def _class_of(cls: Any) -> Any:
    """A class for the outputs of one class that are yet to compute their logits."""

    class Output(cls):  # type: ignore[misc]
        __doc__ = cls.__doc__
        __module__ = cls.__module__
        __dataclass_fields__ = {each.name: copy.copy(each) for each in fields(cls)}  # noqa: RUF012
        __dataclass_fields__["logits"].name = _OfField("logits")

        def __getattribute__(self, name: str) -> Any:
            if type(name) is _OfField:
                return vars(self)["logits"]
            return super().__getattribute__(name)

        @property
        def logits(self) -> Any:
            _settle(self)
            return self.logits  # the attribute of its own class

        @logits.setter
        def logits(self, value: Any) -> None:
            vars(self)["logits"] = value

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                if key == "logits":
                    _settle(self)
                return dict.__getitem__(self, key)
            if isinstance(key, slice):
                return tuple([self[name] for name in [*self.keys()][key]])
            return self[next(itertools.islice(self.keys(), range(len(self))[key], None))]

        def get(self, key: Any, default: Any = None) -> Any:
            return self[key] if key in self else default

        def __reduce__(self) -> Any:
            _settle(self)
            return self.__reduce__()

    Output.__name__, Output.__qualname__ = cls.__name__, cls.__qualname__
    return Output
