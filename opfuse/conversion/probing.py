"""Activations, norms and linear layers of unknown classes, recognised by what they compute.

Its code has to be in the grammar. Then it is called with numbers of all magnitudes, in fp64 and in
its own dtype, in training and in evaluation mode, and what it gives is compared with what each op
gives. So the name of a class does not matter, and neither does how its author wrote the formula.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .. import ops
from ..grammar import MISSING, Frame, Held, Place, Reader, Unreadable, table
from ..op import BasicOperation
from ..overrides import op_class
from ..plugins import using
from .layers import original_class

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
        places: Where its forward looks things up.
    """

    ops: Sequence[BasicOperation]
    constants: Sequence[str] = ()
    probed: bool = False
    places: Sequence[Place] = ()


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
        places = looked_up(module)
    except Unreadable as error:
        return f"{cls} cannot be recognised: {error}"
    known = _KNOWN.get()
    make = known[module] if known and module in known else _maker(module, params)
    if known is not None:
        known[module] = make
    if make is None:
        return f"no op computes what {cls} does"
    return Leaf(make(), (), True, places)


_KNOWN: contextvars.ContextVar[dict[nn.Module, Any] | None] = contextvars.ContextVar(
    "known", default=None
)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """A block in which modules do not change: each is called once to find out what it computes."""
    before = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(before)


def _maker(module: Any, params: Mapping[str, Tensor]) -> Callable[[], Sequence[Any]] | None:
    """What makes the ops that compute what a module does, or None."""
    with _quiet():
        if not params:
            act = _activation(module)
            return act and (lambda: [act()])
        if not set(params) <= {"weight", "bias"} or "weight" not in params:
            return None
        if params["weight"].ndim == 2 and _is_transposed_linear(module):
            return functools.partial(linear_ops, module, transposed=True)
        norm = _norm(module) if params["weight"].ndim == 1 else None
        return norm and (lambda: [norm(module)])


class _Everywhere(Frame):
    """Goes both ways where a condition is on values: what they compute is not asked."""

    def statement(self, node: ast.stmt) -> Any:
        """Read one statement; what it returns."""
        try:
            return super().statement(node)
        except Unreadable:
            if not isinstance(node, ast.If):
                raise
        self.expression(node.test)
        for body in (node.body, node.orelse):
            result = self.block(body)
        return result if node.orelse else MISSING

    def items(self, value: Any) -> Sequence[Any]:
        """What a loop goes through; a value stands for its parts."""
        return [value] if isinstance(value, fx.Node) else super().items(value)

    def _of_ifexp(self, node: ast.IfExp) -> Any:
        return [*map(self.expression, (node.test, node.orelse, node.body))][-1]

    def _of_boolop(self, node: ast.BoolOp) -> Any:
        return [*map(self.expression, node.values)][-1]

    def _of_compare(self, node: ast.Compare) -> Any:
        try:
            return super()._of_compare(node)
        except Unreadable:
            given = [*map(self.expression, (node.left, *node.comparators))]
            return self.reader.graph.call_function(operator.eq, (given[0],))


class _Inspector(Reader):
    """Reads all that a module's forward may do."""

    frame = _Everywhere

    def node(self, kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A node of the graph."""
        if target in table.RANDOM:
            raise Unreadable("it draws random numbers")
        return super().node(kind, target, args, kwargs)


def looked_up(module: nn.Module) -> Sequence[Place]:
    """Where the forward of a module looks things up.

    Raises:
        Unreadable: It does something beyond the grammar.
    """
    graph = fx.Graph()
    reader = _Inspector(graph, lambda part: False, class_of=original_class)
    if op_class(module) is not original_class(type(module)):
        raise Unreadable("something computes its parameters")
    held = Held(module, "")
    reader.run(reader.forward_of(held), [held, graph.placeholder("x")], {})
    return reader.places


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
    """What makes the activation that a module without parameters is, or None."""
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
            return make
    return None


def _norm(module: Any) -> Any:
    """What makes the norm over the last dimension that a module is, of the module; or None."""
    width = module.weight.shape[0]
    if width > MOST_PROBED or not module.weight.is_floating_point():
        return None
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    twins = [_twin(module, dtype) for dtype in dtypes]
    if None in twins:
        return None
    for make in _norms(module):
        if all(_agrees(of, make(of), _rows(of.weight.dtype, width)) for of in twins):
            return make
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
