"""Activations, norms and linear layers of unknown classes, recognised by what they compute.

A module is called with numbers of all magnitudes, in fp64 and in its own dtype, in training and in
evaluation mode, and what it gives is compared with what each op gives. So the name of a class does
not matter, and neither does how its author wrote the formula.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..op import BasicOperation
from ..overrides import BESIDE, op_class
from ..plugins import using
from .reading import Untraceable, read
from .tracing import kind_of, plain_read

MOST_PROBED = 1 << 16
"""The largest number of elements of a norm's weight."""

_ACTIVATIONS: tuple[Callable[[], Any], ...] = (
    ops.SiLU,
    ops.GELU,
    lambda: ops.GELU(approximate="none"),
    ops.ReLU,
    ops.SReLU,
    ops.QGELU,
)
_EPS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")


class Leaf(NamedTuple):
    """A module as ops.

    Attributes:
        ops: What computes it, in order; none for the identity.
        constants: Attributes of the module whose values the ops have taken over.
        probed: Whether it was recognised by its values.
    """

    ops: Sequence[BasicOperation]
    constants: Sequence[str] = ()
    probed: bool = False


def recognised(module: nn.Module) -> Leaf | str:
    """A :class:`Leaf` for a module of an unknown class, or a sentence that says why not.

    Args:
        module: It has no children. It is not changed; copies of it are called, of a linear layer
            it is called itself, which may be large.
    """
    cls = op_class(module).__name__
    if not _takes_one(module):
        return f"{cls} takes more than one tensor"
    if any(True for _ in module.buffers()):
        return f"{cls} has buffers"
    params = {key: param for key, param in module._parameters.items() if param is not None}
    try:
        numbers = _watched(module)
    except Untraceable as error:
        return f"{cls} cannot be recognised: {error}"
    with _quiet():
        if not params:
            act = _activation(module)
            return Leaf([act], numbers, True) if act else f"no op computes what {cls} does"
        if set(params) <= {"weight", "bias"} and params["weight"].ndim == 2:
            if _is_transposed_linear(module):
                return Leaf(linear_ops(module, transposed=True), numbers, True)
        elif set(params) <= {"weight", "bias"} and params["weight"].ndim == 1:
            norm = _norm(module)
            return Leaf([norm], numbers, True) if norm else f"no op computes what {cls} does"
    return f"no op computes what {cls} does"


def _watched(module: nn.Module) -> Sequence[str]:
    """Names of what a module's forward may read: its own numbers, and what its code looks up.

    Raises:
        Untraceable: What the code does is not all in what it gives.
    """
    known = read(op_class(module).forward, op_class(module))
    internal = vars(nn.Module()).keys() | {BESIDE}
    own = [
        name
        for name, value in vars(module).items()
        if name not in internal and isinstance(kind_of(value), tuple)
    ]
    return sorted({*own, *plain_read(module, known.names)})


def _takes_one(module: nn.Module) -> bool:
    """Whether ``forward`` takes one tensor, and what else it takes has defaults."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    kind = inspect.Parameter
    places = kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD
    return len(needed) == 1 and needed[0].kind in places


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block in which random numbers and grad mode are nobody else's."""
    with torch.random.fork_rng([]), torch.no_grad(), torch.device("cpu"), using(""):
        yield


def _numbers(dtype: torch.dtype) -> Tensor:
    """Numbers of both signs from 1e-8 to 1e4, zeros, infinities and NaN."""
    sizes = torch.logspace(-8, 4, 97, dtype=torch.float64)
    near = torch.linspace(-12, 12, 193, dtype=torch.float64)
    rest = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    return torch.cat([sizes, -sizes, near, rest]).reshape(4, -1).to(dtype)


def _call(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module gives; None if it raises, gives something else, or changes its input."""
    given = x.clone()
    try:
        y = op_class(module).forward(module, x)
    except Exception:
        return None
    same = torch.equal(x.nan_to_num(), given.nan_to_num())
    return y if isinstance(y, Tensor) and y.shape == x.shape and same else None


def _agrees(module: nn.Module, op: Any, x: Tensor) -> bool:
    """Whether both give the same of ``x``, in both modes of the module, up to rounding.

    That is for one, two and four dimensions, and in fp64 for gradients of two sizes, too.
    """
    for training in (True, False):
        module.train(training)
        for shape in ((-1, x.shape[-1]), (2, 1, -1, x.shape[-1]), None):
            given = x.reshape(shape) if shape else x.reshape(-1, x.shape[-1])[0]
            y, expected = _call(module, given), op(given)
            if y is None or y.dtype != expected.dtype or not _close(y, expected, given):
                return False
        if x.dtype is torch.float64 and not _same_gradients(module, op, x):
            return False
    return True


def _same_gradients(module: nn.Module, op: Any, x: Tensor) -> bool:
    x = torch.where(x.isfinite() & (x.abs() > 1e-6) & (x.abs() < 100), x, torch.ones_like(x))
    generator = torch.Generator().manual_seed(3)
    for size in (1.0, 1e3):
        dy = size * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        found: list[Tensor] = []
        with torch.enable_grad():
            for function in (functools.partial(op_class(module).forward, module), op):
                given = x.clone().requires_grad_()
                try:
                    found += torch.autograd.grad(function(given), given, dy)
                except RuntimeError:  # it has no gradient
                    return False
        most = 1e-4 * found[1].abs() + 1e-5 * size
        if not bool(((found[0] - found[1]).abs() <= most).all()):
            return False
    return True


def _close(y: Tensor, expected: Tensor, x: Tensor) -> bool:
    # many modules compute in fp32 whatever they are given
    eps = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
    a, b = y.double(), expected.double()
    if not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())):
        return False
    finite = a.isfinite()
    a, b, near = a[finite], b[finite], x.double()[finite].abs()
    # a gate that is all but closed is a difference of numbers near 1, relative to the input
    most = 8 * eps * b.abs() + 8 * eps * near.clamp(max=16.0) + torch.finfo(x.dtype).tiny
    return bool(((a - b).abs() <= most).all())


def _activation(module: nn.Module) -> Any:
    """The activation that computes what a module without parameters does, or None."""
    if vars(module).get("_forward_hooks"):
        return None
    try:
        twin = copy.deepcopy(module)
    except Exception:
        return None
    for make in _ACTIVATIONS:
        op = make()
        if all(
            _agrees(twin, op, _numbers(dtype))
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        ):
            return op
    return None


def _norm(module: Any) -> Any:
    """The norm over the last dimension that computes what a module does, or None."""
    width = module.weight.shape[0]
    if width > MOST_PROBED or not module.weight.is_floating_point():
        return None
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    twins = [_twin(module, dtype) for dtype in dtypes]
    if None in twins:
        return None
    for make in _norms(module):
        if all(_agrees(of, make(of), _rows(of.weight.dtype, width)) for of in twins):
            return make(module)
    return None


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """A copy on the CPU with other parameters, to tell ``weight`` from ``1 + weight``."""
    try:
        on_cpu = module if module.weight.device.type == "cpu" else None
        twin = copy.deepcopy(on_cpu) if on_cpu is not None else _emptied(module)
    except Exception:
        return None
    generator = torch.Generator().manual_seed(0)
    for param in twin.parameters():
        param.requires_grad_(False)
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)
    return twin


def _emptied(module: Any) -> Any:
    """A copy on the CPU of a module that is elsewhere."""
    memo = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _rows(dtype: torch.dtype, width: int) -> Tensor:
    """Rows of all magnitudes, with and without a mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(26, width, generator=generator, dtype=torch.float64)
    most = 1 if dtype is torch.float16 else 4  # beyond that squares are infinite
    sizes = torch.logspace(-8, most, 13, dtype=torch.float64).repeat(2)
    return (x + torch.arange(26).ge(13).double()[:, None]).mul(sizes[:, None]).to(dtype)


def _norms(module: Any) -> Iterator[Callable[[Any], Any]]:
    """Makers of norms that read a module's parameters."""
    found = [getattr(module, key) for key in _EPS if isinstance(getattr(module, key, None), float)]
    for eps in dict.fromkeys([*found, *_small(module)]):
        for centered in (False, True):
            rule: dict[str, Any] = {"eps": eps, "zero_centered_gamma": centered}
            if getattr(module, "bias", None) is None:
                yield functools.partial(ops.RMSNorm.reading, **rule)
            bias = "bias" if hasattr(module, "bias") else None
            yield functools.partial(ops.LayerNorm.reading, bias=bias, **rule)


def _small(module: nn.Module) -> Iterator[float]:
    """Other numbers of a module that may be what it adds."""
    for value in vars(module).values():
        if isinstance(value, float) and 0 <= value <= 1e-2:
            yield value


def _is_transposed_linear(module: Any) -> bool:
    """Whether a module computes ``x @ weight + bias``, as the ``Conv1D`` of GPT-2 does."""
    if op_class(module) is nn.Linear or set(module._parameters) - {"weight", "bias"}:
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        return False
    if any(True for _ in module.children()) or not _takes_one(module):
        return False
    try:
        _watched(module)
    except Untraceable:
        return False
    modes = module.training
    try:
        return all(_is_product(module.train(training), weight, bias) for training in (True, False))
    finally:
        module.training = modes


def _is_product(module: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a module gives ``x @ weight + bias`` of numbers of many sizes, and of no other."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, weight.shape[0], generator=generator)
    x = (x * torch.logspace(-4, 4, 9)[:, None]).to(weight.device, weight.dtype)
    with torch.no_grad():
        expected = x @ weight
        if bias is not None and bias.shape != expected.shape[-1:]:
            return False
        expected = expected if bias is None else expected + bias
        other = x @ weight.t() if weight.shape[0] == weight.shape[1] else None
        try:
            y = op_class(module).forward(module, x.clone())
        except Exception:
            return False
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    if other is not None:
        other = other if bias is None else other + bias
        if bool(((other - expected).abs() <= 1e-3 * size).all()):
            return False  # which of both it is cannot be told
    return bool(((y - expected).abs() <= 64 * torch.finfo(y.dtype).eps * size).all())


def linear_ops(module: Any, transposed: bool = False) -> list[BasicOperation]:
    """The ops of a linear layer."""
    product = ops.BasicLinear.reading(module, transposed=transposed)
    return [product] if module.bias is None else [product, ops.Bias.reading(module)]
