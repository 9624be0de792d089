"""Activations, norms and linear layers of unknown classes, recognised by what they compute.

Classes of torch.nn are known, see :mod:`opfuse_convert.leaves`. The forward of any other must be in
the grammar. It is called with numbers of all magnitudes, in each floating-point dtype, in training
and in evaluation mode, and its results are compared with those of each op. So neither the name of
the class matters, nor the way in which its author wrote the formula. The numbers cannot tell what
happens to larger ones, or with other weights. So the forward of a norm must be algebra, without
limits and comparisons, that of an activation may not compare, and that of a linear layer, which is
called with its own weight alone, must be a product and nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from opfuse import ops
from opfuse.core.introspection import op_class
from opfuse.core.op import BasicOperation
from opfuse.core.plugins import using

from .grammar import EveryWay, Held, Place, Unreadable, table
from .layers import original_class

MOST_PROBED = 1 << 16
"""The largest number of elements of a norm's weight."""

_Maker = Callable[[Any], Sequence[BasicOperation]]
"""Makes the ops of a module."""

_ERF = functools.partial(ops.GELU, approximate="none")
_ACTIVATIONS = ops.SiLU, ops.GELU, _ERF, ops.ReLU, ops.SReLU, ops.QGELU
_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


class Leaf(NamedTuple):
    """A module as ops.

    Attributes:
        ops: What computes it, in order; none for the identity.
        constants: Attributes of the module whose values the ops have copied.
        probed: Whether it was recognised by its values.
        places: The places that its forward looks up.
        split: How it is split among processes; None: it is not.
        reads: Dotted names, below the module, of the modules whose parameters the ops read.
        dropouts: Ops that drop, each with the name, below it, of the module that sets its mode.
        join: ``join(modules, leaves)`` puts linears of one input, by name, side by side in one op;
            the leaves of all have this function. None: there is none, but for ``torch.nn.Linear``.
    """

    ops: Sequence[BasicOperation]
    constants: Sequence[str] = ()
    probed: bool = False
    places: Sequence[Place] = ()
    split: Any = None
    reads: Sequence[str] = ()
    dropouts: Sequence[tuple[Any, str]] = ()
    join: Callable[[Mapping[str, Any], Sequence[Leaf]], BasicOperation] | None = None


def recognised(module: nn.Module) -> Leaf | str:
    """A :class:`Leaf` for a module of an unknown class, or a sentence that says why not.

    Args:
        module: A module without children. Copies of it are called; a linear layer, which may be
            large, is called itself. It is not changed.
    """
    cls = op_class(module).__name__
    if any(True for _ in module.buffers()):
        return f"{cls} has buffers"
    try:
        places, graph = looked_up(module)
    except Unreadable as error:
        return f"{cls} cannot be recognised: {error}"
    known = _KNOWN.get({})
    if module not in known:  # by identity: what looks alike may compute something else
        known[module] = _maker(module, graph)
    make = known[module]
    if make is None:
        return f"no op computes what {cls} does"
    return Leaf(make(module), (), True, places)


_KNOWN: contextvars.ContextVar[dict[nn.Module, _Maker | None]] = contextvars.ContextVar("known")


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """A block in which modules do not change: each is called once."""
    before = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(before)


def _maker(module: Any, graph: fx.Graph) -> _Maker | None:
    """The maker of the ops that compute what a module does, or None."""
    params = {key: param for key, param in module._parameters.items() if param is not None}
    with torch.no_grad(), torch.device("cpu"), using(""):
        if not params:
            if any(_name(node) not in _SMOOTH for node, _ in _of_tensors(graph)):
                return None
            makers: Any = [lambda of, make=make: [make()] for make in _ACTIVATIONS]
            return _alike(module, makers, _numbers)
        weight, bias = params.pop("weight", None), params.pop("bias", None)
        if params or weight is None or weight.is_meta or not weight.is_floating_point():
            return None
        if weight.ndim == 2:  # which may be large, and is called with its own weight alone
            known = _is_one_product(graph, bias is not None)
            is_linear = known and _is_transposed_linear(module, weight, bias)
            return functools.partial(linear_ops, transposed=True) if is_linear else None
        if weight.ndim != 1 or len(weight) > MOST_PROBED or not _is_algebra(graph):
            return None
        rows = functools.partial(_rows, len(weight))
        return _alike(module, _norms(graph, "bias" if hasattr(module, "bias") else None), rows)


class _Inspector(EveryWay):
    """Reads all branches of a module's forward.

    Inputs of other shapes and dtypes than those tried must take the same way through it. So the
    shape and dtype of an input may only give the shape or dtype of another tensor, or the count of
    an average.

    Attributes:
        facts: Nodes of the shape or dtype of an input.
        fixed: Nodes of the shape or dtype of a parameter, which are known, or tried.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.facts: set[fx.Node] = set()
        self.fixed: set[fx.Node] = set()

    def node(self, kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A node of the graph."""
        if target in table.RANDOM:
            raise Unreadable("it draws random numbers")
        made = super().node(kind, target, args, kwargs)
        given = set(made.all_input_nodes)
        what = target if kind == "call_method" else made.args[1] if target is getattr else None
        if what in _TELL:
            of: Any = made.args[0]
            is_fixed = of.op == "get_attr" and what not in ("device", "is_cuda")
            (self.fixed if is_fixed else self.facts).add(made)
        elif given and given <= self.fixed:
            self.fixed.add(made)
        elif given & self.facts:
            is_item = target is operator.getitem and made.args[0] in self.facts
            if target not in _TAKE_FACTS and not is_item:
                raise Unreadable("what it computes depends on the shape or dtype of its input")
            if given <= self.facts | self.fixed and (is_item or target in _ARITHMETIC):
                self.facts.add(made)
        return made

    def decided(self, value: Any) -> bool:
        """The way that a condition goes this time."""
        if isinstance(value, fx.Node) and value not in self.fixed:
            raise Unreadable("it branches on its input")
        return super().decided(value)


_TELL = {"dim", "numel", "size", *table.PROPERTIES} - {"mT", "T"}
_ARITHMETIC = {
    *(operator.add, operator.mul, operator.neg, operator.pow, operator.sub, operator.truediv, tuple)
}
_TAKE_FACTS = _ARITHMETIC | {
    *("expand", "new_ones", "new_zeros", "reshape", "to", "view"),
    *(torch.reshape, torch.layer_norm, F.layer_norm, F.rms_norm),
}


def looked_up(module: nn.Module) -> tuple[Sequence[Place], fx.Graph]:
    """The places that the forward of a module looks up, and the graph of its computation.

    Raises:
        Unreadable: It does something beyond the grammar, or takes more than one tensor.
    """
    graph = fx.Graph()
    reader = _Inspector(graph, lambda part: False, class_of=original_class)
    if op_class(module) is not original_class(type(module)):
        raise Unreadable("something computes its parameters")
    held = Held(module, "")
    x = graph.placeholder("x")
    reader.each_way(lambda: reader.run(reader.forward_of(held), [held, x], {}))
    return reader.places, graph


def _numbers(dtype: torch.dtype) -> Tensor:
    """Numbers of both signs from 1e-8 to 1e30, zeros, infinities and NaN."""
    sizes = torch.logspace(-8, 30, 97, dtype=torch.float64)
    near = torch.linspace(-12, 12, 193, dtype=torch.float64)
    rest = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    return torch.cat([sizes, -sizes, near, rest]).reshape(4, -1).to(dtype)


def _call(module: nn.Module, x: Tensor) -> Tensor | None:
    """The result of a module; None if it raises, has another shape, or the input is changed."""
    given = x.clone()
    try:
        y = op_class(module).forward(module, x)
    except Exception:
        return None
    same = torch.equal(x.nan_to_num(), given.nan_to_num())
    return y if isinstance(y, Tensor) and y.shape == x.shape and same else None


def _agrees(module: nn.Module, op: Any, x: Tensor) -> bool:
    """Whether both compute the same from ``x``, in both modes of the module, up to rounding.

    Inputs have one, two and four dimensions, and one is transposed: outputs have the same strides.
    In fp64 gradients of two sizes are compared, too.
    """
    for training in (True, False):
        module.train(training)
        rows = x.reshape(-1, x.shape[-1])
        pairs = rows.view(2, -1, x.shape[-1])
        for given in (rows, pairs.unsqueeze(1), pairs.transpose(0, 1), rows[0]):
            y, expected = _call(module, given), op(given)
            if y is None or _kind(y) != _kind(expected) or not _close(y, expected, given):
                return False
        if x.dtype is torch.float64 and not _same_gradients(module, op, x):
            return False
    return True


def _kind(y: Tensor) -> tuple[Any, ...]:
    return y.dtype, *[s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1]


def _same_gradients(module: nn.Module, op: Any, x: Tensor) -> bool:
    # at 0, too, where those of clamp and ReLU differ
    tried = (x == 0) | ((x.abs() > 1e-6) & (x.abs() < 100))
    x = torch.where(tried, x, torch.ones_like(x))
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
    # a gate that is nearly closed is a difference of numbers near 1, relative to the input
    most = 8 * eps * b.abs() + 8 * eps * near.clamp(max=16.0) + torch.finfo(x.dtype).tiny
    return bool(((a - b).abs() <= most).all())


def _alike(
    module: Any, makers: Iterable[_Maker], numbers: Callable[[torch.dtype], Tensor]
) -> _Maker | None:
    """The maker whose op computes the same as a module in every dtype, or None."""
    twins = [(_twin(module, dtype), numbers(dtype)) for dtype in _DTYPES]
    for make in makers if all(twin is not None for twin, _ in twins) else ():
        if all(_agrees(twin, make(twin)[0], x) for twin, x in twins):
            return make
    return None


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """A copy on the CPU with other parameters, to tell ``weight`` from ``1 + weight``."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        id(p): torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
        for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, {k: nn.Parameter(p, False) for k, p in drawn.items()})
    except Exception:
        return None


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, with and without a mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(26, width, generator=generator, dtype=torch.float64)
    most = 1 if dtype is torch.float16 else 4  # beyond that squares are infinite
    sizes = torch.logspace(-8, most, 13, dtype=torch.float64).repeat(2)
    return (x + torch.arange(26).ge(13).double()[:, None]).mul(sizes[:, None]).to(dtype)


def _norms(graph: fx.Graph, bias: str | None) -> Iterator[_Maker]:
    """Makers of norms that add one of the small numbers in a graph."""
    given = [a for node in graph.nodes for a in (*node.args, *node.kwargs.values())]
    small = [a for a in given if isinstance(a, float) and 0 <= a <= 1e-2]
    for eps in dict.fromkeys([*small, 1e-5]):  # the default of PyTorch's functions
        for centered in (False, True):
            rule: dict[str, Any] = {"eps": eps, "zero_centered_gamma": centered}
            yield functools.partial(_pointwise_rms_norm, rule)
            yield functools.partial(_made, ops.RMSNorm, rule)
            yield functools.partial(_made, ops.LayerNorm, {**rule, "bias": bias})


def _made(cls: Any, rule: Mapping[str, Any], module: nn.Module) -> Sequence[BasicOperation]:
    return [cls.reading(module, **rule)]


def _pointwise_rms_norm(rule: Mapping[str, Any], module: nn.Module) -> Sequence[BasicOperation]:
    op = ops.RMSNorm.reading(module, **rule)
    op.dense = False
    return [op]


_TAKES = {
    **dict.fromkeys([operator.matmul, torch.matmul, torch.mm, "matmul", "mm"], ("", "weight")),
    **dict.fromkeys([torch.addmm, "addmm"], ("bias", "", "weight")),
    **dict.fromkeys([operator.add, torch.add, "add"], ("", "bias")),
    **dict.fromkeys(["contiguous", "reshape", "view", torch.reshape], ("",)),
}
"""What a linear layer calls: the parameters that it gives, and ``""`` for other tensors."""


def _is_one_product(graph: fx.Graph, has_bias: bool) -> bool:
    """Whether a graph is a product with the weight, plus the bias: both as they are.

    Besides it may only give its input and its result other shapes. So it computes the same after
    other parameters are loaded, which the values of these cannot tell.
    """
    found: list[str] = []
    for node, tensors in _of_tensors(graph):
        names = [str(n.target) if n.op == "get_attr" else "" for n in tensors]
        takes = _TAKES.get(node.target, ())
        in_order = sorted(names) if takes[1:] == ("bias",) else names
        if node.kwargs or not takes or (*in_order,) != takes:
            return False
        found += sorted(filter(None, names), reverse=True)
    return found == ["weight", "bias"][: 1 + has_bias]


_SHAPES = frozenset(
    """
    bfloat16 contiguous double expand expand_as flatten float getitem half new_ones new_zeros
    ones_like pos reshape squeeze to transpose type_as unsqueeze view view_as zeros_like
    """.split()
)
_ROOTS = frozenset({"layer_norm", "rms_norm", "rsqrt", "sqrt"})
_ALGEBRA = _SHAPES.union(
    _ROOTS,
    "add div mean mul multiply neg pow reciprocal square sub subtract sum".split(),
    "true_divide truediv var".split(),
)
_SMOOTH = _ALGEBRA.union(
    "abs clamp clamp_max clamp_min erf exp exp2 expm1 gelu hardsigmoid hardswish hardtanh".split(),
    "log1p max maximum min minimum mish relu relu6 sigmoid silu softplus tanh".split(),
)
"""What an activation calls: nothing that compares, and may differ between the numbers tried."""


def _is_algebra(graph: fx.Graph) -> bool:
    """Whether a graph is sums, products, means and one root, of an input and a weight.

    The weight may be cast, and a number be added to it. What clamps, replaces or compares, or does
    more with its weight, may compute something else beyond the numbers that were tried.
    """
    weights = {node for node in graph.nodes if node.op == "get_attr"}
    roots: dict[fx.Node, set[fx.Node]] = {}  # that a value depends on
    for node, tensors in _of_tensors(graph):
        name = _name(node)
        if name not in _ALGEBRA:
            return False
        power = node.args[1] if name == "pow" and len(node.args) > 1 else None
        if name == "pow" and (tensors != [node.args[0]] or isinstance(power, fx.Node)):
            return False
        roots[node] = set().union(*[roots.get(each, ()) for each in tensors])
        if name in _ROOTS or (name == "pow" and power != 2):
            roots[node].add(node)
        if tensors and weights.issuperset(tensors):
            weights.add(node)
            if name not in _SHAPES and (name != "add" or len(tensors) > 1):
                return False
    return all(len(each) <= 1 for each in roots.values())


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def _of_tensors(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The calls that compute a tensor, not a shape or dtype, and the tensors that each takes."""
    facts: set[fx.Node] = set()
    for node in graph.nodes:
        given = set(node.all_input_nodes)
        what = node.args[1] if node.target is getattr else node.target
        if (isinstance(what, str) and what in _TELL) or (given and given <= facts):
            facts.add(node)
        elif node.op in ("call_function", "call_method"):
            yield node, [n for n in node.all_input_nodes if n not in facts]


def _is_transposed_linear(module: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a module computes ``x @ weight + bias``, as the ``Conv1D`` of GPT-2 does.

    It has to do so for numbers of many sizes. Its code is known to be one such product.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, weight.shape[0], generator=generator)
    x = (x * torch.logspace(-4, 4, 9)[:, None]).to(weight.device, weight.dtype)
    if (bias is not None and bias.shape != weight.shape[1:]) or not bool(weight.any()):
        return False  # a weight of zeros tells nothing
    for shape in ((9, -1), (3, 3, -1), (1, 3, 3, -1), (1, 3, 1, 3, -1), (-1,)):
        given = x.reshape(shape) if len(shape) > 1 else x[0]
        if not _is_product(module, given, given @ weight + (0 if bias is None else bias)):
            return False
    return True


def _is_product(module: Any, x: Tensor, y: Tensor) -> bool:
    """Whether a module gives a product, in both of its modes."""
    near = y.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    most, mode = 64 * torch.finfo(y.dtype).eps * near, module.training
    try:
        found = [op_class(module).forward(module.train(on), x.clone()) for on in (True, False)]
    except Exception:
        return False
    finally:
        module.training = mode
    same = [isinstance(z, Tensor) and (z.shape, z.dtype) == (y.shape, y.dtype) for z in found]
    return all(same) and all(bool(((z - y).abs() <= most).all()) for z in found)


def linear_ops(module: Any, transposed: bool = False) -> list[BasicOperation]:
    """The ops of a linear layer."""
    product = ops.BasicLinear.reading(module, transposed=transposed)
    has_bias = getattr(module, "bias", None) is not None
    return [product, ops.Bias.reading(module)] if has_bias else [product]
