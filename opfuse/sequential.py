"""A chain of modules in which runs of fusible ops are fused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .fuser import OperationFuser, run_in_turn
from .op import BasicOperation, FusibleOperation, ModuleCache, kwarg_names
from .routing import flatten


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` that fuses: adjacent fusible ops run as one chain, other modules cut it.

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
        """The current children: one fuser for each run of fusible ops, other modules as they are."""
        return self._grouped()[0]

    def _grouped(self) -> tuple[list[Any], Any]:
        """The groups; and, if there is one alone, what runs it."""
        children = tuple(self._modules.values())
        if is_dynamo_compiling() or self._cache.key != children:
            _regroup(self, *children)
        return self._cache.value  # type: ignore[no-any-return]

    def forward(
        self, input: Tensor, *extra_inputs: Tensor, op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None
    ) -> Any:
        """Run the chain.

        Args:
            input: Input of the first module.
            *extra_inputs: Extra inputs of the ops that take some, in order.
            op_kwargs: Keyword arguments of single ops, by op or by index. A container such as ``Linear``
                hands each to the basic op that takes it.

        Returns:
            The output, or ``(output, *extra_outputs)``.

        Raises:
            ValueError: The wrong number of extra inputs; ``op_kwargs`` for something that is not an op here.
            TypeError: A keyword argument that an op does not take.
        """
        cache = self._cache
        current = not is_dynamo_compiling() and cache.key == tuple(self._modules.values())
        groups, run = cache.value if current else self._grouped()
        if run is not None and not op_kwargs:
            return run(input, *extra_inputs)
        fusers = [group for group in groups if isinstance(group, OperationFuser)]
        expected = sum(fuser.num_extra_inputs for fuser in fusers)
        if len(extra_inputs) != expected:
            raise ValueError(f"Sequential expected {expected} extra inputs, got {len(extra_inputs)}")
        given = self._resolve_kwargs(op_kwargs) if op_kwargs else {}
        kwargs = [given.get(op, {}) for fuser in fusers for op in fuser._routing.ops] if given else []
        return run_in_turn(groups, input, extra_inputs, kwargs)

    def _resolve_kwargs(self, op_kwargs: Mapping[Any, dict[str, Any]]) -> dict[BasicOperation, dict[str, Any]]:
        """Hand keyword arguments of children to their basic ops."""
        resolved: dict[BasicOperation, dict[str, Any]] = {}
        if not isinstance(op_kwargs, Mapping) or not all(isinstance(kwargs, Mapping) for kwargs in op_kwargs.values()):
            raise TypeError(f"op_kwargs: expected a dict of keyword arguments for each op, got {op_kwargs!r}")
        ops = [child for child in self._modules.values() if isinstance(child, FusibleOperation)]
        for key, kwargs in op_kwargs.items():
            target: Any = self[key] if isinstance(key, int) else key
            if target not in ops and target not in flatten(ops):
                raise ValueError(f"op_kwargs: {type(target).__name__} is not an op of this Sequential")
            for name, value in kwargs.items():
                takers = [op for op in flatten([target]) if (names := kwarg_names(op)) is None or name in names]
                if not takers:
                    raise TypeError(f"{type(target).__name__} does not take the keyword argument {name!r}")
                for op in takers:
                    resolved.setdefault(op, {})[name] = value
        return resolved

    def __add__(self, other: nn.Sequential) -> Sequential:  # torch's would not fuse, nor would its product
        return Sequential(*super().__add__(other))

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*super().__mul__(times))

    __rmul__ = __mul__


def _regroup(chain: Sequential, *children: nn.Module | None) -> None:
    """Group the children; while ``torch.compile`` traces, the call is a constant of the graph, guarded by them."""
    if chain._cache.key != children:
        groups: list[Any] = []
        present = [child for child in children if child is not None]
        for fusible, group in groupby(present, lambda child: isinstance(child, FusibleOperation)):
            run: Any = list(group)
            groups += [OperationFuser(run)] if fusible else run
        alone = groups[0].run if len(groups) == 1 and isinstance(groups[0], OperationFuser) else None
        chain._cache.value, chain._cache.key = (groups, alone), children


_regroup._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result
