"""A chain of modules in which runs of fusible ops are fused."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .engine.chain import flatten
from .engine.fuser import OperationFuser
from .fusible import FusibleOperation, dynamo_traces
from .introspection import hook_kinds, kwarg_names
from .op import BasicOperation
from .op_context import ModuleCache
from .tools import wrap_call


class _Groups(NamedTuple):
    """The parts of a chain, as they are called.

    Attributes:
        parts: A fuser for each run of fusible ops, and the other modules.
        calls: What calls each.
        run: The call of the only part, if that is a fuser; else None.
    """

    parts: list[Any]
    calls: list[Any]
    run: Any


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` that fuses: adjacent ops run as one chain; other modules cut it.

    The ops of a nested ``Sequential`` belong to that chain too, unless something makes its own call
    matter; see :func:`opfuse.explain`. ``torch.nn.Sequential`` keeps chains apart.

    Args:
        *args: Modules, or one dict of named modules.
    """

    def __init__(self, *args: nn.Module | Mapping[str, nn.Module]) -> None:
        if len(args) == 1 and isinstance(args[0], Mapping):
            args = (OrderedDict(args[0]),)
        super().__init__(*args)  # type: ignore[arg-type]
        self._cache = ModuleCache()

    @property
    def _module_groups(self) -> list[Any]:
        """The current groups: a fuser for each run of fusible ops, and the other modules."""
        return self._grouped().parts

    def _grouped(self) -> _Groups:
        """The current groups, and what calls them."""
        key = list(_contents(self))
        if dynamo_traces() or not _same(self._cache.key, key):
            _regroup(self, *key)
        return self._cache.value  # type: ignore[no-any-return]

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Run the chain.

        Args:
            input: Input of the first module.
            *extra_inputs: Extra inputs of the ops that take some, in order.
            op_kwargs: Keyword arguments of single ops, by op or by index. A container such as
                ``Linear`` hands each to the basic op that takes it.

        Returns:
            The output, or ``(output, *extra_outputs)``.

        Raises:
            ValueError: The wrong number of extra inputs; ``op_kwargs`` for something that is not an
                op here.
            TypeError: A keyword argument that an op does not take.
        """
        cache, modules = self._cache, self._modules.values()
        # modules are compared by identity, since one may define ==
        known = not is_dynamo_compiling() and len(cache.key) == len(modules)
        current = known and all(map(operator.is_, cache.key, modules))
        groups, calls, run = cache.value if current else self._grouped()
        if run is not None and not op_kwargs:
            return run(input, *extra_inputs)
        extras = [_extras(group) for group in groups]
        if len(extra_inputs) != (expected := sum(count for count, _ in extras)):
            takers = ", ".join(taker for group in groups for taker in _takers(group))
            what = f"expected {expected} extra inputs, got {len(extra_inputs)}"
            raise ValueError(f"Sequential {what} ({takers or 'no op takes one'})")
        kwargs = self._resolve_kwargs(op_kwargs, groups) if op_kwargs else {}
        x, outputs = input, []
        for group, call, (takes, gives) in zip(groups, calls, extras, strict=True):
            given, extra_inputs = extra_inputs[:takes], extra_inputs[takes:]
            if isinstance(group, OperationFuser) and kwargs:
                ops, own = group._chain.ops, group._chain.own
                here = [kwargs.get(ops[i], {}) for i in own]
                x = call(x, *given, basic_op_kwargs=here)
            else:
                x = call(x, *given)
            if gives:
                x, *more = x
                outputs += more
        return (x, *outputs) if outputs else x

    def _resolve_kwargs(
        self, op_kwargs: Mapping[Any, dict[str, Any]], groups: Sequence[Any]
    ) -> dict[BasicOperation, dict[str, Any]]:
        """Hand keyword arguments of children to their basic ops."""
        resolved: dict[BasicOperation, dict[str, Any]] = {}
        ops = [op for group in groups if isinstance(group, OperationFuser) for op in group.ops]
        given = op_kwargs.values() if isinstance(op_kwargs, Mapping) else [op_kwargs]
        if not all(isinstance(kwargs, Mapping) for kwargs in given):
            what = "expected a dict of keyword arguments for each op"
            raise TypeError(f"op_kwargs: {what}, got {op_kwargs!r}")
        for key, kwargs in op_kwargs.items():
            target: Any = self[key] if isinstance(key, int) else key
            who = type(target).__name__
            if target not in ops and target not in flatten(ops):
                raise ValueError(f"op_kwargs: {who} is not an op of this Sequential")
            takes = [(op, kwarg_names(op)) for op in flatten([target])]
            for name, value in kwargs.items():
                takers = [op for op, names in takes if names is None or name in names]
                if not takers:
                    raise TypeError(f"{who} does not take the keyword argument {name!r}")
                for op in takers:
                    resolved.setdefault(op, {})[name] = value
        return resolved

    # Editing as with a list. torch's methods take each name for a position, and so drop the layers
    # of a slice.

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end, named by the next free number."""
        numbers = [int(name) + 1 for name in self._modules if name.isdecimal()]
        self.add_module(str(max([len(self), *numbers])), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in tuple(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Add a module before another; numeric names shift, other names stay."""
        index = operator.index(index)
        children = list(self.append(module)._modules.items())
        children.insert(index, children.pop())
        numbers = iter(sorted(filter(str.isdecimal, self._modules), key=int))
        names = [next(numbers) if name.isdecimal() else name for name, _ in children]
        self._modules = OrderedDict(zip(names, [child for _, child in children], strict=True))
        return self

    def pop(self, key: int | slice = -1) -> nn.Module:
        """Remove a module, or a slice, and return it."""
        return super().pop(key)

    def __delitem__(self, idx: slice | int) -> None:
        children = list(self._modules.items())
        del children[idx]
        names = [str(i) if name.isdecimal() else name for i, (name, _) in enumerate(children)]
        self._modules = OrderedDict(zip(names, [child for _, child in children], strict=True))

    def __iadd__(self, other: Iterable[nn.Module]) -> Sequential:
        return self.extend(other)

    def __imul__(self, times: int) -> Sequential:
        return self.extend(list(self * times)[len(self) :])

    # torch's sum and product would not fuse

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return Sequential(*self, *other)

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*super().__mul__(times))

    __rmul__ = __mul__


def _same(known: Sequence[Any], items: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(known) == len(items) and all(map(operator.is_, known, items))


def _extras(group: Any) -> tuple[int, int]:
    """The numbers of extra inputs and outputs of a group; a module that is not an op has none."""
    if isinstance(group, OperationFuser):
        return group.num_extra_inputs, len(group._chain.public_outputs)
    if not isinstance(group, Sequential) or type(group).forward is not Sequential.forward:
        return 0, 0
    counts = [_extras(inner) for inner in group._module_groups]
    return sum(takes for takes, _ in counts), sum(gives for _, gives in counts)


def _takers(group: Any) -> list[str]:
    """The ops that take the extra inputs of a group, for messages."""
    if isinstance(group, OperationFuser):
        return group._chain.takers()
    return [f"{type(group).__name__} takes {count}"] if (count := _extras(group)[0]) else []


def why_nested_apart(chain: Sequential) -> str:
    """Return why a nested chain runs by its own call; ``""`` if its ops may join the outer one."""
    if type(chain) is not Sequential:
        return f"{type(chain).__name__} is a subclass of Sequential"
    if hooks := hook_kinds(chain):
        return f"it has {hooks} hooks"
    if "forward" in vars(chain) or vars(chain).get("_compiled_call_impl") is not None:
        return "its own forward was replaced or compiled"
    return ""


def _contents(chain: Sequential) -> list[Any]:
    """The children, for comparison; each nested chain is followed by its own and their status."""
    contents: list[Any] = []
    for child in chain._modules.values():
        contents.append(child)
        if type(child) is Sequential:
            contents += [False] if why_nested_apart(child) else [*_contents(child), True]
    return contents


def parts(chain: Sequential) -> tuple[list[nn.Module], dict[nn.Module, str]]:
    """Flatten nested chains into their modules; return also why the others were not flattened.

    Two chains that use the same channel name are kept apart, because joining would merge the
    channels. The same holds for names of extra inputs: the number of arguments must not depend on
    whether ops are joined.
    """
    children = [child for child in chain._modules.values() if child is not None]
    pieces: list[list[nn.Module]] = []
    apart: dict[nn.Module, str] = {}
    for child in children:
        inner: list[nn.Module] = [child]
        if isinstance(child, Sequential):
            if reason := why_nested_apart(child):
                apart[child] = reason
            else:
                inner, deeper = parts(child)
                apart.update(deeper)
        pieces.append(inner)
    names = [_names(piece) for piece in pieces]
    pieces_with = Counter(name for of_piece in names for name in of_piece)
    for index, (child, of_piece) in enumerate(zip(children, names, strict=True)):
        common = [name for name in of_piece if pieces_with[name] > 1]
        if common and isinstance(child, Sequential):
            kind, name = common[0]
            apart[child] = f"its {kind} {name!r} has the name of another one in the chain around it"
            pieces[index] = [child]
    return [part for piece in pieces for part in piece], apart


def _names(modules: Iterable[nn.Module]) -> dict[tuple[str, str], None]:
    """The channels that ops among the modules write, and the names of their extra inputs."""
    ops = flatten([module for module in modules if isinstance(module, FusibleOperation)])
    channels = [("channel", name) for op in ops for name in op._extra_output_channels if name]
    inputs = [("extra input", name) for op in ops for name in op.extra_input_names if name]
    return dict.fromkeys([*channels, *inputs])


def _regroup(chain: Sequential, *key: Any) -> None:
    """Group the parts; ``torch.compile`` sees a constant, guarded by ``key``."""
    if not _same(chain._cache.key, key):
        groups: list[Any] = []
        modules, _ = parts(chain)
        for fusible, group in groupby(modules, lambda part: isinstance(part, FusibleOperation)):
            run: Any = list(group)
            groups += [OperationFuser(run)] if fusible else run
        for group in groups:
            if isinstance(group, OperationFuser):
                group.holder = chain._cache
        calls = [_call_of(group) for group in groups]
        single = len(groups) == 1 and isinstance(groups[0], OperationFuser)
        chain._cache.value = _Groups(groups, calls, calls[0] if single else None)
        chain._cache.key = list(key)


def _call_of(group: Any) -> Any:
    """What calls a group."""
    if isinstance(group, OperationFuser):
        return group.run
    is_plain = isinstance(group, Sequential) and type(group).forward is Sequential.forward
    if is_plain and not hook_kinds(group):  # its chains are wrapped
        return group
    return wrap_call(group, module=group)


_regroup._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result
