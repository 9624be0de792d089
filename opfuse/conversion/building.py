"""From a module to the chain that stands for its forward, by tracing."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..converter import Conversion
from ..engine.measured import describe
from ..overrides import op_class
from ..sequential import Sequential
from .guard import still
from .layers import original_class, written_forward
from .leaves import leaf_of
from .parsing import Parser, Region
from .probing import Leaf
from .reading import Untraceable, changed, only_passes_on, read
from .tracing import compiled, kind_of, parameters_of, plain_read, trace

NOTHING = "there is nothing to fuse in it"
_CHAIN = "opfuse_chain"
_MOST = 32
"""For how many kinds of arguments one module keeps a function: each other number is a kind."""


def by_tracing(
    module: nn.Module,
    *,
    forward: Any = None,
    rest: bool | None = None,
    ignore: Sequence[str] = (),
    kinds: Mapping[str, Any] | None = None,
) -> Conversion | str:
    """What stands for the largest part of a module's forward that ops can compute.

    Args:
        module: The module.
        forward: The function to trace, if a decorator that the chain need not know is around it;
            None: that of the module's class.
        rest: Whether the forward only passes on the keyword arguments that it does not name; None:
            its code tells.
        ignore: Attributes of the module that its forward reads and that make no difference.
        kinds: For each parameter what of its argument the trace is for, see :func:`kind_of`;
            default: a tensor, or the parameter's default.
    """
    forward = forward or written_forward(type(module))
    if "forward" in vars(module):
        return "its forward was replaced"
    rest = only_passes_on(forward) if rest is None else rest
    traced = _Traced(forward, rest, {"rest": rest, "ignore": ignore})
    plain = {p.name: p.default for p in parameters_of(forward) if p.default is not p.empty}
    kinds = kinds or {n: kind_of(plain[n]) if n in plain else Tensor for n in traced.names}
    try:
        known = read(forward, op_class(module))
        watched = [n for n in plain_read(module, known.names) if n not in ignore]
        region = traced.region(module, kinds, False)
    except Untraceable as error:
        return f"its forward cannot be read as a graph: {error}"
    if region is None:
        return traced.reason or NOTHING
    chain, _ = _chain_of(region)
    traced.signature = _signature(region)
    separate = _with_chain(region)[1]
    traced.globals += known.globals
    constants = [c for step in region.steps for c in step.constants]
    traced.dropouts = tuple(pair for step in region.steps for pair in step.dropouts)
    probed = any(step.probed for step in region.steps)
    own = [("", attribute) for attribute in watched]
    constants += traced.of_children
    return Conversion(chain, region.reads, traced, separate, (*constants, *own), probed)


def as_leaf(module: nn.Module) -> Conversion | str:
    """What stands for a norm of an unknown class, which PyTorch has no kernel for."""
    if type(module).__module__.startswith("torch."):
        return "PyTorch has a kernel for it"
    leaf = leaf_of(module)
    if isinstance(leaf, str):
        return leaf
    if len(leaf.ops) != 1 or not isinstance(leaf.ops[0], (ops.RMSNorm, ops.LayerNorm)):
        return "it is one op by itself"
    constants = [("", attribute) for attribute in leaf.constants]
    own = original_class(type(module)).forward
    return Conversion(Sequential(*leaf.ops), ("",), _one, own, constants, leaf.probed)


def _one(module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that is one op."""
    return NotImplemented if len(args) != 1 or kwargs else chain(args[0])


def follow(dropouts: Sequence[tuple[Any, Any, bool]]) -> None:
    """Give dropout ops the mode that their modules have now, and the probability of those with one.

    Args:
        dropouts: Each op, its module, and whether that has a probability.
    """
    for op, module, has_p in dropouts:
        if op.training is not module.training:
            op.train(module.training)
        if has_p and op.p != module.p:
            op.p = module.p


class _Traced:
    """The forward of a module with a chain in it: one function per way through the forward."""

    as_written = True  # with the module's own operations in the chain's place, it is the forward
    signature: Any = None
    dropouts: Sequence[tuple[Any, str, bool]] = ()
    reason = why = ""
    of_children: Sequence[tuple[str, str]] = ()
    _ran = False
    _other: Mapping[str, Any] | None = None

    def __init__(self, forward: Any, rest: bool, how: Mapping[str, Any]) -> None:
        self._forward, self._rest, self._how = forward, rest, how
        parameters = parameters_of(forward)
        self.names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._by_place = sum(p.kind is not p.KEYWORD_ONLY for p in parameters[: len(self.names)])
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._variants: dict[Any, Any] = {}
        self.globals: list[tuple[Any, str, Any]] = []
        self._leaves: dict[str, Leaf | str] = {}

    def region(self, module: nn.Module, kinds: Mapping[str, Any], rest: bool) -> Region | None:
        """The largest chain in one way through the forward."""
        graph = trace(module, self._forward, kinds, rest)
        parser = Parser(module, graph, "", self._leaves)
        found = parser.best()
        self.globals += parser.globals
        constants = graph.constants  # type: ignore[attr-defined]
        if self.signature is not None and set(constants) - set(self.of_children):
            raise Untraceable("it reads numbers of its children that it did not read by default")
        self.of_children = self.of_children or constants
        own = [n for n in parser.reasons if next(module.get_submodule(n).children(), None) is None]
        self.reason = f"{own[0]}: {parser.reasons[own[0]]}" if own else ""
        return found

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward by way of the chain; see :class:`opfuse.Conversion`."""
        if not is_dynamo_compiling():  # traces are to have no side effects
            self.why = ""
        if len(args) > self._by_place:
            return NotImplemented
        given = list(args)
        try:
            given += [
                kwargs.pop(name) if name in kwargs else self._defaults[name]
                for name in self.names[len(args) :]
            ]
        except KeyError:  # the module's own forward says what is missing
            return NotImplemented
        if not is_dynamo_compiling() and (why := changed(self.globals)):
            self.why = why
            return NotImplemented
        if kwargs and not self._rest:
            if not is_dynamo_compiling():
                self.why = f"it was called with {', '.join(kwargs)}, which its forward may look at"
            return NotImplemented
        kinds = tuple(map(kind_of, given))
        grads = torch.is_grad_enabled(), torch.is_autocast_enabled(_kind_of(given))
        key = kinds, bool(kwargs), module.training, *grads
        run = None if is_dynamo_compiling() else self._variants.get(key)
        is_full = not is_dynamo_compiling() and len(self._variants) >= _MOST
        if run is None and is_full and key not in self._variants:
            self.why = f"it was called with more than {_MOST} kinds of arguments, such as numbers"
            return NotImplemented
        if run is None:
            run = getattr(self, _variant_untraced(self, module, key))
        if not is_dynamo_compiling():
            self._ran = self._ran or run is not None
            self.why = self.why or ("" if run else "it computes something else for these arguments")
        if run is None:
            return NotImplemented
        follow([(op, module.get_submodule(name), has_p) for op, name, has_p in self.dropouts])
        values = [v for v, kind in zip(given, kinds, strict=True) if not isinstance(kind, tuple)]
        return run(module, chain, *values, *[kwargs] * bool(kwargs))

    def otherwise(self, module: Any) -> Conversion | str:
        """A conversion for the arguments of the latest call, if no call ran this one's chain.

        Defaults may be rare: a decoder's layer has no encoder by default, and one in each call.
        """
        if self._ran or self._other is None:
            return self.why
        return by_tracing(module, forward=self._forward, kinds=self._other, **self._how)

    def _variant(self, module: Any, kinds: Sequence[Any], rest: bool) -> Any:
        """A function for arguments of these kinds; None: the module's own forward runs."""
        named = dict(zip(self.names, kinds, strict=True))
        try:
            with still(module):
                region = self.region(module, named, rest)
        except Untraceable as error:
            self.why = f"its forward cannot be read as a graph for these arguments: {error}"
            return None
        if region is None or _signature(region) != self.signature:
            self.why = "it computes something else for these arguments"
            self._other = named if region is not None else None
            return None
        return _with_chain(region)[0]


def _variant_untraced(traced: _Traced, module: Any, key: Any) -> str:
    """Make the function for arguments of these kinds; a constant in traces of ``torch.compile``.

    Returns:
        The attribute that has it.
    """
    if key not in traced._variants:
        kinds, rest, *_ = key
        traced._variants[key] = traced._variant(module, kinds, rest)
    name = f"variant {list(traced._variants).index(key)}"
    vars(traced)[name] = traced._variants[key]
    return name


_variant_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _kind_of(values: Sequence[Any]) -> str:
    """The kind of device that tensors among some values are on."""
    kinds = [value.device.type for value in values if isinstance(value, Tensor)]
    return next((kind for kind in kinds if kind != "meta"), "cpu")


def _signature(region: Region) -> Any:
    """What two regions that one chain stands for have in common."""
    return list(region.given), [
        (
            [describe(op) for op in step.ops],
            list(step.reads),
            step.extra if isinstance(step.extra, int) else type(step.extra),
            [name for _, name, _ in step.dropouts],
        )
        for step in region.steps
    ]


def _chain_of(region: Region) -> tuple[Sequential, list[fx.Node]]:
    """The chain of a region, and the nodes of the extra inputs that it takes."""
    forks = {step.extra for step in region.steps if isinstance(step.extra, int)}
    found: list[Any] = []
    outside: list[fx.Node] = []
    for number, step in enumerate(region.steps):
        if number in forks or number in region.given:
            fork = ops.MakeExtraOutput()
            if number in forks:
                public = number in region.given
                fork.set_extra_output_channel(0, f"value {number}", output_to_caller=public)
            found.append(fork)
        if isinstance(step.extra, fx.Node):
            outside.append(step.extra)
        elif step.extra is not None:
            step.ops[0].set_extra_input_channel(0, f"value {step.extra}")
        found += step.ops
    return Sequential(*found), outside


def _with_chain(region: Region) -> tuple[Any, Any]:
    """The graph of a region with the chain in its place, and the region by itself.

    Returns:
        ``whole(module, chain, *values)``, where ``chain(x, *extras)`` stands for the region; and
        ``separate(module, x, *extras)``, the region's own operations.
    """
    outside = [step.extra for step in region.steps if isinstance(step.extra, fx.Node)]
    covered = {node for step in region.steps for node in step.covers}
    values = region.values()
    given: list[Any] = [values[number] for number in region.given]
    whole, plain = fx.Graph(), fx.Graph()
    inner = {region.start: plain.placeholder("x")}
    for number, node in enumerate(outside):
        inner[node] = plain.placeholder(f"extra_{number}")
    outer: dict[fx.Node, fx.Node] = {}
    chain = whole.placeholder(_CHAIN)
    for node in region.start.graph.find_nodes(op="placeholder"):
        outer[node] = whole.placeholder(str(node.target))
    for node in region.start.graph.nodes:
        if node in covered:
            inner[node] = plain.node_copy(node, inner.__getitem__)
        if node is region.end:
            entering = [outer[each] for each in (region.start, *outside)]
            result = whole.call_function(_run, (chain, *entering))
            if given:
                for number, each in enumerate((node, *given)):
                    outer[each] = whole.call_function(operator.getitem, (result, number))
            else:
                outer[node] = result
        elif node not in covered and node not in outer:
            outer[node] = whole.node_copy(node, outer.__getitem__)
    results = inner[region.end], *[inner[each] for each in given]
    plain.output(results if given else results[0])
    return compiled(whole), compiled(plain)


def _run(chain: Any, *given: Any) -> Any:
    return chain(*given)
