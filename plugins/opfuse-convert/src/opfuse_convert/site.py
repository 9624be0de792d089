"""The place in a rewritten forward at which a chain may replace some statements."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling

from opfuse.report.replaced_forward import KEPT_AS

from .converter import Conversion
from .grammar import MISSING, Place, table
from .grammar.stretches import NOT_NONE, Span, object_of


class View(NamedTuple):
    """A view of a tensor: a function or the name of a method, and the further arguments."""

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> View:
        """The one of a node."""
        return cls(node.target, node.args[1:], node.kwargs)

    def __call__(self, tensor: Tensor) -> Any:
        """The view of another tensor."""
        if isinstance(self.target, str):
            return getattr(tensor, self.target)(*self.args, **self.kwargs)
        return self.target(tensor, *self.args, **self.kwargs)


class Site:
    """The function that a rewritten forward calls: ``site(module, *assumed, *same, *entering)``.

    It is also the ``call`` of a :class:`~opfuse_convert.Conversion`: the rewritten forward.

    Args:
        span: The statements that the chain replaces.
        views: The views that the chain takes of each entering value after the first.
        dropouts: See :func:`~opfuse_convert.building.follow`.
        origin: The class of the module, its forward, and the places that this depends on.
        again: ``again(facts)`` converts the module for other facts about arguments.
        defaults: The values that the conversion assumes for arguments.

    Attributes:
        forward: The rewritten forward.
        further: Conversions of other statements of it, each with a site of its own as ``call``.
        settled: Whether the chain is known to be for the arguments of calls.
        returned: Which item of the forward's result the output of the chain is, and nothing else
            then reads that; -1: it is the result; None: neither is known.
    """

    forward: Any = None
    further: Sequence[Conversion] = ()
    settled = False
    returned: int | None = None

    def __init__(
        self,
        span: Span,
        views: Sequence[Sequence[View]],
        dropouts: Sequence[Any],
        origin: tuple[Any, Any, Sequence[Place]],
        again: Callable[[Mapping[str, Any]], Conversion | str],
        defaults: Mapping[str, Any],
    ) -> None:
        self.assumed = [(name, object_of(value)) for name, value in span.assumed.items()]
        self._same = [len(names) for names in span.same]
        self._first, self._views = len(self.assumed) + sum(self._same), views
        self._results = [*span.results.values()]
        self.alone = span.alone
        self._tests = [(test.names, test.is_one) for test in span.device_tests]
        self.dropouts, self.again = dropouts, again
        self._origin, self._defaults = origin, defaults
        self._looked_up = [(place.where.get, place.name, place.value, place) for place in origin[2]]

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        """The results as a tuple, or None: the statements run."""
        replaced = vars(module).get(KEPT_AS)
        return None if replaced is None else replaced.at_site(self, module, values)

    def refusal(self, values: Sequence[Any]) -> str:
        """Return why the chain cannot replace the statements for these values, or ``""``."""
        for (name, wanted), value in zip(self.assumed, values, strict=False):
            if value is wanted or (wanted is NOT_NONE and value is not None):
                continue
            if wanted is NOT_NONE or not table.is_same(value, wanted):
                if is_dynamo_compiling():
                    return "it was called in another way"
                given = "a tensor" if isinstance(value, Tensor) else repr(value)
                return f"{name} is {given}, and the chain is for {wanted!r}"
        begin = len(self.assumed)
        for count in self._same:
            if any([value is not values[begin] for value in values[begin : begin + count]]):
                return "the chain is for one value where it has two"
            begin += count
        for names, is_one in self._tests:
            for value in values[begin:]:
                if isinstance(value, Tensor) and (value.device.type in names) is not is_one:
                    return f"its input is on {value.device.type}"
        return ""

    def lending(self, holder: Any, module: nn.Module, *values: Any) -> Any:
        """What has the part, and says to its chain who takes its output; or ``holder``.

        Args:
            holder: What has the part as an attribute.
            module: The module.
            *values: Those of the names on which it depends that nothing else takes it.
        """
        assert self.alone is not None
        replaced = vars(module).get(KEPT_AS)
        wanted = map(object_of, self.alone.assumed.values())
        is_so = all(a is b or table.is_same(a, b) for a, b in zip(values, wanted, strict=True))
        if not is_so or replaced is None or is_dynamo_compiling():
            return holder
        return Lending(holder, self.alone.item) if replaced.vouches(self, module) else holder

    def change(self) -> str:
        """Describe a change of the forward itself, as a sentence, or ``""``."""
        cls, forward, _ = self._origin
        if cls.forward is not forward:
            return f"{cls.__name__} got another forward"
        for get, name, value, place in self._looked_up:
            now = get(name, MISSING)
            if now is not value and not table.is_same(now, value):
                return place.change()
        return ""

    def facts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the first call, if they are not as assumed; otherwise nothing."""
        if self.settled or is_dynamo_compiling():
            return {}
        self.settled = True
        try:
            given = inspect.signature(self.forward).bind(None, *args, **kwargs).arguments
        except TypeError:
            return {}
        asked = {name for name, _ in self.assumed} & self._defaults.keys() & given.keys()
        if all(table.is_same(given[name], self._defaults[name]) for name in asked):
            return {}
        return {name: value if table.is_plain(value) else NOT_NONE for name, value in given.items()}

    def taken(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values that the chain takes."""
        first = self._first
        found = list(values[first : first + 1 + len(self._views)])
        for place, views in enumerate(self._views, 1):
            for view in views if isinstance(found[place], Tensor) else ():
                found[place] = view(found[place])
        return found

    def results(self, values: Sequence[Any], output: Any) -> tuple[Any, ...]:
        """The new values of the names, from the values given and the output of the chain."""
        entering = values[self._first :]
        return tuple([_result(of, entering, output) for of in self._results])


def _result(of: Any, entering: Sequence[Any], output: Any) -> Any:
    kind, what = of
    if kind == "chain":
        return output
    if kind == "in":
        return entering[what]
    return what if kind == "is" else tuple([_result(each, entering, output) for each in what])


class Lending:
    """Has the parts of a holder, which say to their chains that a chain alone takes their output.

    Args:
        holder: The holder.
        item: The item of a part's result that this is about; -1: the result itself.
    """

    def __init__(self, holder: Any, item: int) -> None:
        self._holder, self._item = holder, item

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._holder, name)
        replaced = vars(part).get(KEPT_AS) if isinstance(part, nn.Module) else None
        return part if replaced is None else functools.partial(replaced.lent, part, self._item)


def watched_elsewhere() -> str:
    """Name a mode that sees the functions of a forward and may change what they compute."""
    if not torch._C._len_torch_function_stack():
        return ""
    from torch.utils._device import DeviceContext

    modes: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    other = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    return f"{other[0]} sees the functions that it calls" if other else ""
