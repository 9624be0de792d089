"""Builds the chain that replaces a module's forward, by reading the author's code."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from opfuse import ops
from opfuse.core.sequential import Sequential

from .converter import Conversion
from .grammar import Unreadable, function_places, parameters_of, table, tree_of
from .grammar.rewriting import rewritten, unwrapped, wrapped
from .grammar.stretches import NOT_NONE, UNKNOWN, Survey
from .guard import unreadable
from .layers import original_class, written_forward
from .leaves import leaf_of
from .probing import Leaf
from .regions import LINEARS, Found, Parser, Region, StretchReader, chosen, dropout_arguments
from .site import Site, View

NOTHING = "there is nothing to fuse in it"
"""The reason that a printed report leaves out."""

ORDINARY = "what its forward computes"
"""The name of converters that read a forward as any other."""


def by_reading(
    module: nn.Module,
    *,
    known: Mapping[Any, Callable[..., Any]] = types.MappingProxyType({}),
    facts: Mapping[str, Any] = types.MappingProxyType({}),
    leaf_of: Callable[[nn.Module], Leaf | str] = leaf_of,
) -> Conversion | str:
    """Convert the largest part of a module's forward that ops can compute, and others beside it.

    Its forward is read by :mod:`opfuse_convert.grammar`. It runs as its author wrote it, apart from
    the statements that the chain replaces.

    Args:
        module: The module.
        known: Functions with readers of their own, see :class:`opfuse_convert.grammar.Reader`.
        facts: Known arguments by name; default: the plain default values.
        leaf_of: The ops of a module; see :func:`~opfuse_convert.leaves.leaf_of`.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    if next(module.children(), None) is None:
        return _as_leaf(module)
    function, around, places = unwrapped(written_forward(type(module)))
    try:
        tree = copy.deepcopy(tree_of(function))
        names = _parameters(function, facts)
        leaf, reasons = functools.cache(leaf_of), dict[str, str]()
        device = next((param.device.type for param in module.parameters()), None)
        reader = functools.partial(StretchReader, leaf, reasons, known, device)
        survey = Survey(module, function, tree, names, reader)
    except Unreadable as error:
        return f"its forward cannot be read: {error}"
    parsers = [Parser(module, stretch, leaf) for stretch in survey.stretches]
    found = chosen([each for parser in parsers for each in parser.found()])
    if not found:
        return next((f"{name}: {why}" for name, why in reasons.items()), NOTHING)
    places += [place for each in (function, *around) for place in function_places(each)]
    cls = original_class(type(module))
    site_of = functools.partial(
        _site_of,
        module,
        (cls, cls.forward, places),
        lambda facts: by_reading(module, known=known, facts=facts, leaf_of=leaf_of),
        {name: value for name, value in names.items() if value is not UNKNOWN},
    )
    sites = [site_of(each) for each in found]
    spans = [each.span for each in found]
    if function is cls.forward:  # and nothing around it gets the result
        for site, span in zip(sites, spans, strict=True):
            site.returned = span.returned(tree)
    sites[0].forward = wrapped(rewritten(function, tree, spans, survey.own, sites), around)
    of = lambda name: leaf(module.get_submodule(name))  # noqa: E731
    first, *others = [_conversion(*pair, of) for pair in zip(found, sites, strict=True)]
    sites[0].further = [each for each in others if not unreadable(module, each.reads)]
    return dataclasses.replace(first, also=[each.chain for each in sites[0].further])


def _site_of(module: nn.Module, origin: Any, again: Any, defaults: Any, found: Found) -> Site:
    """The site of a chain; see there."""
    drops = [each for step in found.region.steps for each in step.dropouts]
    dropouts = [(op, module.get_submodule(name), has_p) for op, name, has_p in drops]
    views = [[View.of(node) for node in extra.views] for extra in found.region.extras]
    return Site(found.span, views, dropouts, origin, again, defaults)


def _conversion(found: Found, site: Site, leaf: Callable[[str], Any]) -> Conversion:
    """The conversion for a region of a forward; ``leaf`` gives that of a module."""
    steps = found.region.steps
    names = [*found.span.called, *[name for step in steps for name in step.reads]]
    reads = {n.rsplit(".", i)[0] for n in names for i in range(n.count(".") + 1)}
    leaves = [(name, leaf(name)) for name in sorted(reads - {""})]
    return Conversion(
        _chain_of(found.region),
        [name for name, _ in leaves],
        site,
        _separate(found.region, found.modes),
        [constant for step in steps for constant in step.constants],
        any(step.probed for step in steps),
        [*found.span.places, *(found.span.alone.places if found.span.alone else ())],
        {name: of.split for name, of in leaves if isinstance(of, Leaf) and of.split is not None},
    )


def _parameters(function: types.FunctionType, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The known values of the parameters of a function."""
    names: dict[str, Any] = {}
    for p in parameters_of(function):
        given = facts.get(p.name, p.default)
        is_known = table.is_plain(given) or given is NOT_NONE
        names[p.name] = given if is_known and p.default is not p.empty else UNKNOWN
    if not names:
        raise Unreadable("it is not a method")
    return names


def _as_leaf(module: nn.Module) -> Conversion | str:
    """Convert a norm that PyTorch has no kernel for."""
    if type(module).__module__.startswith("torch."):
        return "PyTorch has a kernel for it"
    leaf = leaf_of(module)
    if isinstance(leaf, str):
        return leaf
    if len(leaf.ops) != 1 or not isinstance(leaf.ops[0], (ops.RMSNorm, ops.LayerNorm)):
        return "it is one op by itself"
    constants = [("", attribute) for attribute in leaf.constants]
    own = original_class(type(module)).forward
    chain = Sequential(*leaf.ops)
    return Conversion(chain, ("",), _one, own, constants, leaf.probed, leaf.places)


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


def _chain_of(region: Region) -> Sequential:
    """The chain of a region."""
    values = region.values
    every = [extra.node for step in region.steps for extra in step.extras if not extra.views]
    forks = {*every} & {*values}
    found: list[Any] = []
    for number, (value, step) in enumerate(zip(values, region.steps, strict=False)):
        if value in forks:
            found.append(ops.MakeExtraOutput())
            found[-1].set_extra_output_channel(0, f"value {number}", output_to_caller=False)
        for place, extra in enumerate(step.extras):
            if extra.node in forks and not extra.views:
                channel = f"value {values.index(extra.node)}"
                step.ops[0].set_extra_input_channel(place, channel)
        found += step.ops
    for norm, fork, linear in zip(found, found[1:], found[2:], strict=False):
        if isinstance(norm, ops.LayerNorm) and isinstance(fork, ops.MakeExtraOutput):
            norm.is_inner = isinstance(linear, LINEARS)
    return Sequential(*found)


def _separate(region: Region, modes: Mapping[fx.Node, Any]) -> Any:
    """``separate(module, x, *extras)``: the region's own operations, but for views of extras."""
    graph = fx.Graph()
    inner = {region.start: graph.placeholder("x")}
    for number, extra in enumerate(region.extras):
        inner[extra.node] = graph.placeholder(f"extra_{number}")
    views = {node for extra in region.extras for node in extra.views}
    for node in filter(region.covered.__contains__, region.start.graph.nodes):
        if node in views:
            inner[node] = inner[node.args[0]]
            continue
        made = inner[node] = graph.node_copy(node, inner.__getitem__)
        if node in modes:
            with graph.inserting_before(made):
                path = f"{modes[node].path}.training".lstrip(".")
                mode = graph.create_node("get_attr", path)
            made.args, made.kwargs = (), {**dropout_arguments(made), "training": mode}
    graph.output(inner[region.end])
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)  # what torch.fx itself does
    return scope["forward"]
