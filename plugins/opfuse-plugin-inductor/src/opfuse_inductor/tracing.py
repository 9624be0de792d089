"""From a function of tensors to a graph of torch operations, traced with fake tensors.

The number of rows is a symbol. Where a decision depends on it, the environment of the symbol keeps
a guard.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_convert.grammar import Unreadable
from torch import Tensor

from opfuse.ops.authoring import wide

HINT = 4096
"""The number of rows that Inductor optimizes for first, in every call: the same code in every
process.
"""


class Spec(NamedTuple):
    """An input of a graph: a matrix of some width, a value per row, or a tensor of fixed shape.

    A value per row has the width None.
    """

    dtype: torch.dtype
    width: int | None = None
    shape: tuple[int, ...] | None = None


def trace(
    function: Callable[..., Any],
    specs: Sequence[Spec],
    device: torch.device,
    hint: int,
    *,
    decompose: bool = False,
) -> tuple[torch.fx.GraphModule, list[Any], Any]:
    """The graph of ``function``, the fake tensors it was traced with, and its guards.

    The guards are the conditions that the sizes of these tensors had to meet.

    Args:
        function: Returns a list of tensors.
        specs: Its inputs.
        device: Theirs.
        hint: A number of rows, for decisions that depend on it.
        decompose: Into the operations that Inductor takes.

    Raises:
        Unreadable: The function draws random numbers.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with faked(hint) as (rows, env):
        fakes = [fake(spec, rows, device) for spec in specs]
        table = None
        if decompose:
            known = select_decomp_table()
            matrices = [spec.dtype for spec in specs if spec.width is not None]
            half = all(wide(dtype) is not dtype for dtype in matrices)
            ours = DECOMPOSITIONS | (FOR_HALF_PRECISION if device.type == "cpu" and half else {})
            table = {**known, **{op: _first(mine, known.get(op)) for op, mine in ours.items()}}
        graph = make_fx(torch.func.functionalize(function), decomposition_table=table)(*fakes)
    if (drawn := drawing(graph)) is not None:
        raise Unreadable(f"{drawn} draws random numbers, and a compiled function would draw others")
    return graph, fakes, env


def _first(ours: Callable[..., Any], known: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition that leaves other cases to another one.

    Inductor refuses to meet what it would decompose.
    """

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        return known(*args, **kwargs) if result is NotImplemented and known is not None else result

    return decomposed


def silu(x: Tensor) -> Tensor:
    """SiLU by the sigmoid that its derivative needs too, so that a backward computes that once."""
    wider = x.to(wide(x.dtype))
    return (wider * torch.sigmoid(wider)).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """The tanh form of GELU by a sigmoid, which a CPU computes faster.

    For ``(1 + tanh(u)) / 2 = sigmoid(2 u)``.
    """
    if approximate != "tanh":
        return NotImplemented
    wider = x.to(wide(x.dtype))
    return (wider * torch.sigmoid(wider * (TWICE_U[0] + TWICE_U[1] * wider * wider))).to(x.dtype)


def gelu_backward(grad_output: Tensor, x: Tensor, *, approximate: str = "none") -> Any:
    """Its derivative: with ``s = sigmoid(2 u)``, ``s + x s (1 - s) 2 u'``."""
    if approximate != "tanh":
        return NotImplemented
    wider = x.to(wide(x.dtype))
    square = wider * wider
    s = torch.sigmoid(wider * (TWICE_U[0] + TWICE_U[1] * square))
    slope = s + s * (1 - s) * wider * (TWICE_U[0] + 3 * TWICE_U[1] * square)
    return (grad_output.to(wider.dtype) * slope).to(x.dtype)


def sigmoid(x: Tensor) -> Any:
    """The sigmoid by powers of two, which a CPU computes faster.

    Rounding the exponent costs ``2^-24 |x|`` of it.
    """
    if x.dtype is not torch.float32:
        return NotImplemented
    return 1 / (1 + torch.exp2(x * -math.log2(math.e)))


TWICE_U = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""The factors of ``2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3)``."""

DECOMPOSITIONS = {
    torch.ops.aten.silu.default: silu,
    torch.ops.aten.gelu.default: gelu,
    torch.ops.aten.gelu_backward.default: gelu_backward,
}
"""How Inductor is to compute what it would compute otherwise."""

FOR_HALF_PRECISION = {torch.ops.aten.sigmoid.default: sigmoid}
"""The same on a CPU, where all matrices are of half precision."""


@contextlib.contextmanager
def faked(hint: int) -> Iterator[tuple[Any, Any]]:
    """A block in which tensors are fake.

    It gives the symbolic number of rows, and the environment of the symbol.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._python_dispatch import _disable_current_modes

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    # the cache is for models of many equal layers, and takes as long as the rest
    mode.cache_enabled = False
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        rows = mode.from_tensor(torch.empty(hint, device="cpu"), symbolic_context=dynamic).shape[0]
        with mode:
            yield rows, env


def fake(spec: Spec, rows: Any, device: torch.device) -> Tensor:
    """A tensor that a spec describes."""
    shape = spec.shape
    if shape is None:
        shape = (rows,) if spec.width is None else (rows, spec.width)
    return torch.empty(shape, dtype=spec.dtype, device=device)


def prune(graph: torch.fx.GraphModule) -> tuple[tuple[int, ...], tuple[tuple[bool, int], ...]]:
    """Drop inputs that are not read, and outputs that are inputs or given twice.

    Returns:
        Which inputs are left; and for each output of the function whether it is one of its inputs,
        and which input, or which output of the graph.
    """
    graph.graph.eliminate_dead_code()
    placeholders = graph.graph.find_nodes(op="placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    computed = list(dict.fromkeys(node for node in output.args[0] if node.op != "placeholder"))
    slots = []
    for node in output.args[0]:
        is_input = node.op == "placeholder"
        slots.append((is_input, (placeholders if is_input else computed).index(node)))
    output.args = (tuple(computed),)
    used = []
    for i, node in enumerate(placeholders):
        if node.users:
            used.append(i)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return tuple(used), tuple(slots)


def drawing(graph: torch.fx.GraphModule) -> str | None:
    """The operation of a graph that draws random numbers, if there is one."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node.target)
    return None
