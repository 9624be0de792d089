"""Activations: the base class, and GELU, QGELU, ReLU, SReLU, SiLU."""

from __future__ import annotations

import enum
import inspect
import numbers
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ..core.cast import PassThrough
from ..core.fusible import first_defining
from ..core.introspection import PASS_METHODS
from ..core.op_context import OperationContext, Unread
from ..core.overwriting import may_write
from ..core.quantization import ROWWISE, Quantizer, QuantizerRole, Recipe, dequantize
from ..core.recipe_lookup import CACHE_RECIPE, new_quantizer, recipe_of, why_off
from ..core.settings import current
from ._blocks import blocks, in_blocks
from ._common import OpGrads, RowwiseOperation, check_bool, require
from ._samples import samples
from .arithmetic import cast, reusable, wide, widen

_FORMULAS = "value", "derivative", "linear_value", "linear_derivative", "split", "join"
"""The methods that say what an activation computes."""

_FASTER = (
    *("value_and_derivative", "linear_value_and_derivative", "gate_value", "gate_gradient"),
    *("forward_value", "backward_value", "_gradient", "_write_gradients", "device_functions"),
)
"""Methods that compute the same in less time, and functions that kernels compute it by."""

_COMPUTING = *_FORMULAS, *_FASTER

_DECLARED: dict[str, tuple[Any, Any]] = {
    "deterministic": (True, False),
    "saves_output": (False, False),
    "_in_parts": (True, False),
}
"""What a class declares about its own methods: the defaults of opfuse's classes, and of others."""

_PLAIN = numbers.Number, str, enum.Enum, torch.dtype, type(None)
_COMMON = frozenset(vars(PassThrough())) - {"training"}
"""The attributes that every op has, and no formula reads."""


class Activation(RowwiseOperation):
    """An elementwise function. A subclass implements only :meth:`value` and :meth:`derivative`.

    Accepts any shape, which the output keeps; the output is in the compute dtype. Half precision is
    computed in fp32.

    A class or a mixin may implement other methods for speed, such as :meth:`forward_value`. They
    replace the ``value`` and ``derivative`` of that class only: a subclass that overrides these
    uses its own again.

    An op's own numbers, such as ``self.slope``, may change at any time: a backward uses those of
    its forward. The same holds for strings and tuples, but not for tensors. Name them in
    ``number_names``. A class that does not is right, too, but each forward then looks for all plain
    values that its methods may read, and no kernel computes it.

    Attributes:
        gated: Whether the op splits its features; see :class:`opfuse.ops.GatedActivation`.
        number_names: Names of the attributes that the methods read, such as ``("slope",)``; that
            of ``self.training`` is ``"training"``. A class that implements any of the computing
            methods declares its own; one with both passes of its own, which declares
            ``saved_names``, has none. None: not declared.
        deterministic: Whether the same input always gives the same output, so that it may be
            computed again. False for a class that implements any of the computing methods and does
            not declare it, unless it is one of opfuse's.
        saves_output: Whether the output is saved in place of the input, as that of ReLU. It must
            have the same value and derivative as the input; whoever reads :meth:`saved_input` may
            get either. A class that implements any of the computing methods declares it itself, and
            is tried where it is made. False if ``cache_quantized_input``.

    Args:
        cache_quantized_input: Keep the input for the backward in FP8, with one scale, as the recipe
            named "fp8-current" casts it, whether or not a recipe is in force. The gradient of the
            input is then computed from the cast input, and so is a recomputed output: this saves
            memory and loses precision. The output of the forward differs only by rounding, since
            other fusions may be taken.

    Raises:
        TypeError: ``cache_quantized_input`` is not a bool.
        ValueError: In a call with ``cache_quantized_input``, no installed plugin offers
            "fp8-current".
    """

    gated: ClassVar[bool] = False
    deterministic: bool = True
    saves_output: bool = False
    number_names: ClassVar[tuple[str, ...] | None] = ()
    saved_names = ("input",)
    feature_ratio = 1
    casts_input = True
    _fixed: ClassVar[tuple[str, ...]] = ()  # attributes that cannot be set again
    _caches: bool = False
    _built_in: ClassVar[bool] = True  # whether opfuse.ops defines the class, not a class below it
    _in_parts: ClassVar[bool] = True  # whether the formulas are known to take any rows of an input

    def __init_subclass__(cls, built_in: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type.__setattr__(cls, "_built_in", built_in)
        computing = first_defining(cls, *_COMPUTING, *PASS_METHODS, "operand")
        for name, (ours, of_others) in _DECLARED.items():
            if computing < first_defining(cls, name):
                type.__setattr__(cls, name, ours if _is_built_in(cls, computing) else of_others)
        cls._declare_numbers()
        cls._replace_faster_methods()

    @classmethod
    def _declare_numbers(cls) -> None:
        """Set ``number_names`` where the class has new formulas; let the context carry them."""
        formulas = first_defining(cls, *_COMPUTING)
        if formulas < first_defining(cls, "number_names"):
            both_passes = max(first_defining(cls, "op_forward"), first_defining(cls, "op_backward"))
            own_passes = both_passes < cls.__mro__.index(Activation)
            none = _is_built_in(cls, formulas) or (own_passes and cls.saved_names is not None)
            type.__setattr__(cls, "number_names", () if none else None)
        if cls.number_names != () and "numbers" not in cls.context_names:
            type.__setattr__(cls, "context_names", (*cls.context_names, "numbers"))
        for name in cls.number_names or ():
            if hasattr(getattr(cls, name, None), "__set__"):
                what = f"{cls.__name__}.number_names has the property {name!r}"
                raise TypeError(f"{what}: name the attributes that it reads")

    @classmethod
    def _replace_faster_methods(cls) -> None:
        """Take those that inherited formulas had from the nearest abstract base."""
        formulas = first_defining(cls, *_FORMULAS)
        abstract = filter(inspect.isabstract, reversed(cls.__mro__))
        templates = {name: method for base in abstract for name, method in vars(base).items()}
        for name in templates.keys() & _FASTER:
            if formulas < first_defining(cls, name) and getattr(cls, name) is not templates[name]:
                type.__setattr__(cls, name, templates[name])

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        check_bool(self, "cache_quantized_input", cache_quantized_input)
        self._caches = cache_quantized_input
        if cache_quantized_input:
            self.saves_output = False

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of formulas of the library, which compute each value alone."""
        return ("rows",) if self._in_parts else ()

    cache_quantized_input = property(lambda op: op._caches, doc="Whether the input is in FP8.")

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """See :meth:`opfuse.ops.BasicOperation.reset_recipe_state`."""
        super().reset_recipe_state(recipe=recipe)
        self._quantizers.own = self._cache_quantizers() if self._caches else {}

    def _cache_quantizers(self) -> dict[str, Quantizer]:
        """The quantizer of an input kept in FP8; none, with a warning, if its plugin is off."""
        try:
            recipe = recipe_of(CACHE_RECIPE)
        except ValueError as error:
            who = f"{type(self).__name__}(cache_quantized_input=True)"
            raise ValueError(f"{who}: {error}") from None
        if why_off(recipe, current.selection):
            return {}
        role = QuantizerRole("activation", "input", self.name)
        return {"cached": new_quantizer(recipe, role, current.environment)}

    def _constructed(self) -> None:
        super()._constructed()
        declared = self.saves_output and not self._built_in
        if declared and (self.gated or not self._is_its_input()):
            raise ValueError(
                f"{type(self).__name__} declares saves_output, but its output is no input with the "
                f"same value and derivative, as that of ReLU is"
            )

    def _is_its_input(self) -> bool:
        """Whether some outputs have, as inputs, the value and derivative of their own input."""
        x = torch.linspace(-8, 8, 129, dtype=torch.float64, device="cpu")
        y = self.value(x)
        return torch.equal(self.value(y), y) and torch.equal(self.derivative(y), self.derivative(x))

    @classmethod
    def _check_class_attribute(cls, name: str) -> None:
        if name in cls._fixed and hasattr(cls, name):
            raise RuntimeError(f"{cls.__name__}.{name} is fixed: write a subclass")
        if name not in _COMPUTING:
            return
        library = [base for base in cls.__mro__ if vars(base).get("_built_in")]
        if not all(map(inspect.isabstract, library)):
            why = "cannot be replaced, kernels would not follow: write a subclass"
            raise RuntimeError(f"{cls.__name__}.{name} {why}")

    def __setattr__(self, name: str, value: Any) -> None:
        who = f"{type(self).__name__}.{name}"
        if name in _COMPUTING and hasattr(type(self), name):
            why = "on one op, whose kernels would not follow: write a subclass"
            raise RuntimeError(f"{who} cannot be replaced {why}")
        if name in self._fixed and hasattr(self, name):
            remedy = f"make another {type(self).__name__}"
            raise RuntimeError(f"{who} is fixed, and is {getattr(self, name)!r}: {remedy}")
        super().__setattr__(name, value)

    def numbers_of(self) -> tuple[tuple[str, Any], ...]:
        """The op's own numbers as ``(name, value)``, in the order of ``number_names``.

        A forward leaves them as ``ctx.numbers`` if there are any. They are all its plain values if
        its class declares no names.
        """
        if self.number_names is None:
            return () if is_dynamo_compiling() else _plain_values(self)  # one graph has both passes
        if not self.number_names:
            return ()
        return tuple([(name, getattr(self, name)) for name in self.number_names])

    def with_numbers(self, values: tuple[tuple[str, Any], ...]) -> Activation:
        """The activation as it was when :meth:`numbers_of` gave ``values``.

        It is the activation itself, unless its numbers have changed since.
        """
        now = self.numbers_of()
        if values == now:
            return self
        twin = object.__new__(type(self))
        kept = {name: value for name, value in vars(self).items() if name not in dict(now)}
        vars(twin).update(kept, **dict(values))
        return twin

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The function, elementwise; ``x`` is fp32 or fp64.

        It is made of differentiable torch operations.
        """

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """Its derivative at ``x``, elementwise; ``x`` is fp32 or fp64."""

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Value and derivative, for a class that shares work between them; as :meth:`value`."""
        return self.value(x), self.derivative(x)

    def device_functions(self) -> tuple[Any, ...] | None:
        """Triton device functions that compute this op: its value and its derivative.

        Each takes one fp32 value, and then the op's numbers in the order of ``number_names``. A
        gated activation with its own ``linear_value`` returns four, the last two for that half.
        None: there are none. A kernel for any activation gets them from
        ``opfuse_triton.functions_of(op)``, and declines if there are none.
        """
        return None

    def forward_value(self, x: Tensor) -> Tensor:
        """The op's output for the input ``x``, in the dtype of ``x``."""
        wider = wide(x.dtype)
        if wider is x.dtype:
            return self.value(x)
        if self._in_parts and in_blocks(x):
            y = torch.empty_like(x)
            for rows, of_x in blocks(y, x):
                rows.copy_(self.value(of_x.to(wider)))
            return y
        return self.value(x.to(wider)).to(x.dtype)

    def backward_value(
        self, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """The gradient of the input ``x``.

        Args:
            grad_output: Gradient of the output, in the dtype of ``x``.
            x: The input.
            out: Memory for the result, with the shape and dtype of ``x``. It may be
                ``grad_output`` itself if that has this shape.

        Returns:
            A new tensor, or ``out``.
        """
        if self._in_parts and in_blocks(x, grad_output, *(() if out is None else (out,))):
            dx = torch.empty_like(x) if out is None else out
            for rows, dy, of_x in blocks(dx, grad_output, x):
                self._gradient(dy, of_x, rows)
            return dx
        return self._gradient(grad_output, x, out)

    def _gradient(self, grad_output: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        wide_x = widen(x)
        if wide_x is x:
            return torch.mul(grad_output, self.derivative(x), out=out)
        dx = widen(grad_output) * self.derivative(wide_x)
        return dx.to(x.dtype) if out is None else out.copy_(dx)

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The output, in ``ctx.dtype``; saves ``(input,)``, or the output, in that dtype."""
        if self.saves_output:
            return self.operand(ctx, self.forward_value(cast(input_, ctx.dtype or input_.dtype)))
        return self.forward_value(self.operand(ctx, input_))

    def operand(self, ctx: Any, input_: Tensor) -> Tensor:
        """The input in ``ctx.dtype``; leaves on ``ctx`` what the backward needs.

        Fusions may call it too, with the output if ``saves_output``. With ``cache_quantized_input``
        the saved input is quantized.
        """
        x = input_ if ctx.dtype is input_.dtype or ctx.dtype is None else input_.to(ctx.dtype)
        if ctx.requires_grad:
            kept: Any = x if ctx.input_requires_grad else None
            if self._caches and kept is not None and ctx.quantizers:
                kept = ctx.quantizers["cached"](x, ROWWISE)
            ctx.to_save = (kept,)
            if self.number_names != ():
                ctx.numbers = self.numbers_of()
        return x

    @staticmethod
    def saved_input(ctx: Any) -> Tensor | None:
        """What :meth:`operand` saved, as a plain tensor; None if it saved nothing.

        For the op itself, and for fusions of the backward.
        """
        (x,) = ctx.saved_tensors
        return x if type(x) is Tensor else dequantize(x)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Compute the gradient of the input; overwrite ``grad_output`` if allowed."""
        x = self.saved_input(ctx)
        if x is None:
            return None, ()
        if grad_output.dtype is not x.dtype:
            grad_output = grad_output.to(x.dtype)
        out = grad_output if ctx.owns_grad_output and not self.gated else None
        # a custom forward may have left none
        has_numbers = self.number_names != () and hasattr(ctx, "numbers")
        op = self.with_numbers(ctx.numbers) if has_numbers else self  # type: ignore[attr-defined]
        return op.backward_value(grad_output, x, out=out), ()


def _plain_values(op: Activation) -> tuple[tuple[str, Any], ...]:
    """All plain values of an op and of its author's classes, but those that every op has."""
    found: dict[str, Any] = {}
    for base in reversed(type(op).__mro__):
        if base not in Activation.__mro__:
            found.update(vars(base))
    found.update(vars(op))
    own = [(n, v) for n, v in found.items() if n not in _COMMON and n[:2] != "__" and _is_plain(v)]
    return tuple(own)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_built_in(cls: type, index: int) -> bool:
    """Return whether a class of the MRO comes with opfuse: it takes any rows, and does not draw."""
    base = cls.__mro__[index]
    return vars(base).get("_built_in", base in Activation.__mro__)  # type: ignore[no-any-return]


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` of a result that nothing else reads."""
    return torch.sigmoid(x, out=reusable(x))


def _backward_kernel(
    kernel: Any, *constants: Any, option: tuple[str, str] | None = None
) -> Callable[..., Tensor]:
    """Make a ``backward_value`` from one kernel of torch.

    The kernel computes half precision in fp32 itself.

    Args:
        kernel: A kernel with the overloads ``default`` and ``grad_input``.
        *constants: Its further arguments after the two tensors.
        option: The name of a keyword argument that is an attribute of the op, and its value if the
            op has none.
    """
    # what kernel.default and kernel.grad_input call after half a microsecond
    allocating, writing = kernel.default._op, kernel.grad_input._op

    def backward_value(
        self: Activation, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """See :meth:`Activation.backward_value`."""
        options = {} if option is None else {option[0]: getattr(self, *option)}
        if is_dynamo_compiling():  # in a graph one with `out` has the strides of the input
            return kernel.default(grad_output, x, *constants, **options)  # type: ignore[no-any-return]
        if out is None:
            return allocating(grad_output, x, *constants, **options)  # type: ignore[no-any-return]
        return writing(grad_output, x, *constants, **options, grad_input=out)  # type: ignore[no-any-return]

    return backward_value


def form_of_gelu(op: Activation, approximate: str) -> str:
    """The form, if there is one of that name."""
    is_known = approximate in ("tanh", "none")
    require(op, is_known, "approximate to be 'tanh' or 'none'", approximate)
    return approximate


class GELU(Activation, built_in=True):
    """GELU: ``x Phi(x)`` with the normal distribution, or its tanh form.

    It is ``torch.nn.functional.gelu(x, approximate=approximate)`` (Hendrycks and Gimpel 2016).

    Args:
        approximate: ``"tanh"``: ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2``; ``"none"``:
            ``x (1 + erf(x / sqrt(2))) / 2``. Fixed; unlike torch's, the default is ``"tanh"``.
        cache_quantized_input: As for :class:`Activation`.

    Raises:
        ValueError: ``approximate`` is neither.
    """

    _fixed = ("approximate",)
    sample_inputs = samples({}, {"approximate": "none"})

    def __init__(self, *, approximate: str = "tanh", cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.approximate = form_of_gelu(self, approximate)

    def extra_repr(self) -> str:
        """The form, if it is not the default."""
        return "" if self.approximate == "tanh" else f"approximate={self.approximate!r}"

    def value(self, x: Tensor) -> Tensor:
        """The function."""
        return F.gelu(x, approximate=getattr(self, "approximate", "tanh"))

    def derivative(self, x: Tensor) -> Tensor:
        """``(1 + t) / 2 + x (1 - t^2) u' / 2`` with ``t = tanh(u)``; or ``Phi(x) + x phi(x)``."""
        if getattr(self, "approximate", "tanh") == "none":
            cdf = 0.5 * (1 + torch.erf(x * 0.7071067811865476))
            return cdf + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
        t = torch.tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x))
        du = 0.7978845608028654 + 0.10703222440890037 * x * x
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du

    forward_value = value  # torch computes half precision in fp32 itself
    # the default is for other activations that reuse GELU's methods
    backward_value = _backward_kernel(torch.ops.aten.gelu_backward, option=("approximate", "tanh"))


class QGELU(Activation, built_in=True):
    """GELU by a sigmoid: ``x sigmoid(1.702 x)``.

    It is the approximation of equation 2 in Hendrycks and Gimpel 2016.
    """

    def value(self, x: Tensor) -> Tensor:
        """``x sigmoid(1.702 x)``."""
        return x * sigmoid(1.702 * x)

    def derivative(self, x: Tensor) -> Tensor:
        """``s + 1.702 x s (1 - s)`` with ``s = sigmoid(1.702 x)``."""
        return QGELU.value_and_derivative(self, x)[1]

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from ``s``."""
        s = sigmoid(1.702 * x)
        y = x * s
        return y, torch.addcmul(s, y, 1 - s, value=1.702)

    def _gradient(self, grad_output: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        # it is silu(1.702 x) / 1.702
        dx = torch.ops.aten.silu_backward.default(widen(grad_output), 1.702 * widen(x))
        return cast(dx, x.dtype) if out is None else out.copy_(dx)


class ReLU(Activation, built_in=True):
    """``max(x, 0)``."""

    saves_output = True

    def value(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return torch.relu(x)

    def derivative(self, x: Tensor) -> Tensor:
        """1 where ``x > 0``, else 0."""
        return (x > 0).to(x.dtype)

    forward_value = value  # exact in half precision
    backward_value = _backward_kernel(torch.ops.aten.threshold_backward, 0)


class SReLU(Activation, built_in=True):
    """Squared ReLU: ``max(x, 0)^2`` (So et al. 2021)."""

    def value(self, x: Tensor) -> Tensor:
        """``max(x, 0)^2``."""
        return torch.relu(x).square()

    def derivative(self, x: Tensor) -> Tensor:
        """``max(2 x, 0)``."""
        twice = 2 * x
        return torch.relu_(twice) if may_write(twice) else torch.relu(twice)

    forward_value = value  # half precision is rounded once, as if it were computed in fp32

    def backward_value(
        self, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """See :meth:`Activation.backward_value`."""
        return torch.mul(grad_output, SReLU.derivative(self, x), out=out)


class SiLU(Activation, built_in=True):
    """``x sigmoid(x)`` (Elfwing et al. 2017), also called Swish."""

    def value(self, x: Tensor) -> Tensor:
        """``x sigmoid(x)``."""
        return F.silu(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``x s (1 - s) + s`` with ``s = sigmoid(x)``."""
        s = torch.sigmoid(x)
        return x * s * (1 - s) + s

    forward_value = value  # torch computes half precision in fp32 itself
    backward_value = _backward_kernel(torch.ops.aten.silu_backward)
