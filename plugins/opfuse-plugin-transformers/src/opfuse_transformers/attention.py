"""Self-attention of the library: query, key and value as one ``ParallelLinear``.

Such a forward cannot be traced, since it takes shapes apart. It does not have to be: it runs as it
is, on a stand-in for the module whose three projections return their parts of one chain's result.
The stand-in shares everything else with the module.

Unless it is quantized, one product has been no faster than three on a CPU: the gradients of its
parts are joined. So it runs only under a recipe, or where an option says so. The rotations of
queries and keys are chains in any case, see :mod:`.rotations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_convert import Conversion, leaf_of
from torch import Tensor, nn

from opfuse import Environment, Sequential
from opfuse.core.authoring import op_class
from opfuse.core.settings import current
from opfuse.ops import ParallelLinear

from . import standin
from .parallel import splits
from .rotations import Rotations

_NAMES = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")
# what the library's newer forwards call these things: a product is split into heads by a view,
# which takes the part of a wider one
_KNOWN = {"hidden_states", "input_shape", "hidden_shape"}
_CROSS = {"current_states", "encoder_hidden_states", "key_value_states"}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is self-attention with three projections, in the newer form."""
    if not any(all(name in module._modules for name in names) for names in _NAMES):
        return False
    code = getattr(_own(module), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return False
    return set(code.co_varnames) >= _KNOWN and not _CROSS & set(code.co_varnames)


def build(module: Any, env: Environment) -> Conversion | str:
    """The chain of the projections, and a forward that uses their parts of its result."""
    names = next(names for names in _NAMES if all(name in module._modules for name in names))
    if "forward" in vars(module):
        return "its forward was replaced"
    projections = {name: module._modules[name] for name in names}
    leaves = {name: leaf_of(linear, splits) for name, linear in projections.items()}
    for name, leaf in leaves.items():
        if op_class(projections[name]) is not nn.Linear or isinstance(leaf, str):
            return leaf if isinstance(leaf, str) else f"{name} is not a plain torch.nn.Linear"
    product, places = ParallelLinear.reading(projections), []
    (how, *others) = [leaf.split for leaf in leaves.values()]
    if any(other != how for other in others):
        return "its projections are split among processes in different ways"
    if how is not None:
        from opfuse.ops.parallel import split

        split(product, how)
        places = [place for leaf in leaves.values() for place in leaf.places]
    always = env.options.get("transformers.projections") == "joined"
    rotations = Rotations(module)
    call = _AttentionCall(names, product.sizes, always, rotations)
    shared = {} if how is None else dict.fromkeys(names, how)
    return Conversion(
        *(Sequential(product), names, call, _AttentionSeparate(names)),
        places=[*places, *rotations.places],
        splits=shared,
        also=rotations.chains(module.head_dim) if hasattr(module, "head_dim") else (),
    )


def _own(module: nn.Module) -> Any:
    """The forward of a module's class, below decorators."""
    forward: Any = op_class(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


class _AttentionSeparate:
    """The three products by the projections themselves."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        return torch.cat([module._modules[name](x) for name in self._names], -1)


class _AttentionCall:
    """The forward of the module, on a stand-in."""

    why = _apart = ""

    def __init__(
        self, names: tuple[str, ...], sizes: Sequence[int], always: bool, rotations: Rotations
    ) -> None:
        self._names, self._sizes, self._always = names, sizes, always
        self._rotations = rotations

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        self.why = self._apart
        if not self._always and current.recipe is None:
            self.why = "its projections are joined under a recipe alone"
        rotates = bool(self._rotations.found) and not torch.compiler.is_compiling()
        run = self._rotations.run if rotates else standin.forward
        if self.why:
            if not rotates:
                return NotImplemented
            result = run(module, args, kwargs)
            self.why = "" if self._rotations.seen else self.why
            return result
        shared = _Shared(chain, [module._modules[name] for name in self._names], self._sizes)
        parts = {name: _Projection(shared, number) for number, name in enumerate(self._names)}
        result = standin.run(module, parts, {}, args, kwargs, run)
        if shared.asked != {0, 1, 2}:
            self._apart = "its projections are not those of one tensor"
        return result


class _Shared:
    """The products of one tensor, computed when one of them is asked for.

    Attributes:
        linears: The projections.
        asked: The numbers of those that got their part of the chain.
    """

    def __init__(self, chain: Any, linears: list[Any], sizes: Sequence[int]) -> None:
        self._chain, self.linears, self._sizes = chain, linears, sizes
        self._of: Any = None
        self.asked: set[int] = set()

    def part(self, number: int, x: Any) -> Any:
        """The result of a projection for ``x``."""
        if self._of is None:
            self._parts = self._chain(x).split(self._sizes, -1)
            self._of = x, _version(x)
        if x is not self._of[0] or _version(x) != self._of[1]:
            return self.linears[number](x)
        self.asked.add(number)
        return self._parts[number]


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to, as far as that is counted."""
    return 0 if x.is_inference() else x._version


class _Projection(standin.ChildInPlace):
    """Replaces a projection by its part of the chain."""

    def __init__(self, shared: _Shared, number: int) -> None:
        super().__init__(shared.linears[number])
        self._shared, self._number = shared, number

    def __call__(self, x: Any) -> Any:
        return self._shared.part(self._number, x)
