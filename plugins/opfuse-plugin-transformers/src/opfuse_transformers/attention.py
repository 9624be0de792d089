"""Self-attention of the library: query, key and value as one ``ParallelLinear``.

Such a forward cannot be traced, since it takes shapes apart. It does not have to be: it runs as it
is, on a stand-in for the module whose three projections return their parts of one chain's result.
The stand-in shares everything else with the module.

Unless it is quantized, one product has been no faster than three on a CPU: the gradients of its
parts are joined. So it runs only under a recipe, or where an option says so. Another value of that
option asks for a chain of three linears, where a plugin adds up the gradients of their input in one
step. The rotations of
queries and keys are chains in any case, see :mod:`.rotations`. The projection of the output is a
chain of its own under a recipe, which quantizes it like the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opfuse_convert import Conversion, Converter, leaf_of
from opfuse_convert.building import follow
from opfuse_convert.probing import Leaf
from torch import Tensor, nn

from opfuse import Environment, Sequential
from opfuse.core.introspection import hook_dicts
from opfuse.core.settings import current
from opfuse.ops import BasicLinear, Bias, MakeExtraOutput, ParallelLinear, SwapExtraInput
from opfuse.ops.authoring import op_class
from opfuse.report.calls import plan_of, program_of

from . import lora, norms, standin
from .adapted import ParallelLoRALinear
from .parallel import splits
from .remembered import Remembered
from .rotations import Rotations

_NAMES = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")
# what the library's newer forwards call these things: a product is split into heads by a view,
# which takes the part of a wider one
_KNOWN = {"hidden_states", "input_shape", "hidden_shape"}
_OUTPUTS = "o_proj", "out_proj", "dense"
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
    if any(map(lora.is_linear, projections.values())):
        return _adapted(module, projections)
    leaves = {name: leaf_of(linear, splits) for name, linear in projections.items()}
    for name, leaf in leaves.items():
        if op_class(projections[name]) is not nn.Linear or isinstance(leaf, str):
            return leaf if isinstance(leaf, str) else f"{name} is not a plain torch.nn.Linear"
    product = ParallelLinear.reading(projections)
    places = [place for leaf in leaves.values() for place in leaf.places]
    (how, *others) = [leaf.split for leaf in leaves.values()]
    if any(other != how for other in others):
        return "its projections are split among processes in different ways"
    if how is not None:
        from opfuse_distributed.parallel import split

        split(product, how)
    option = env.options.get("transformers.projections")
    rotations = Rotations(module)
    is_chained = option == "chained" and how is None
    chained = _OneByOne([*projections.values()]) if is_chained else None
    call = _AttentionCall(names, product.sizes, option == "joined", rotations, chained)
    shared = {} if how is None else dict.fromkeys(names, how)
    return Conversion(
        *(Sequential(product), names, call, _AttentionSeparate(names)),
        places=[*places, *rotations.places],
        splits=shared,
        also=rotations.chains(module.head_dim) if hasattr(module, "head_dim") else (),
        parts={name: _OUTPUT for name in _OUTPUTS if name in module._modules},
    )


def _adapted(module: Any, projections: Mapping[str, Any]) -> Conversion | str:
    """The same for projections that all have adapters."""
    leaves = [lora.leaf_of(linear) for linear in projections.values()]
    for name, leaf in zip(projections, leaves, strict=True):
        if isinstance(leaf, str):
            return f"{name}: {leaf}"
    known = [leaf for leaf in leaves if isinstance(leaf, Leaf)]
    if any(leaf.join is not lora.joined for leaf in known):
        return "not all of its projections have an adapter"
    product = lora.joined(projections, known)
    pairs = [*zip(projections, known, strict=True)]
    dropouts = [
        (op, module.get_submodule(f"{name}.{below}"), False)
        for name, leaf in pairs
        for op, below in leaf.dropouts
    ]
    rotations = Rotations(module)
    names = tuple(projections)
    after = _AfterNorm(product, dropouts)
    call = _AttentionCall(names, product.sizes, False, rotations, after)
    return Conversion(
        Sequential(product),
        [f"{name}.{below}".rstrip(".") for name, leaf in pairs for below in ("", *leaf.reads)],
        call,
        _AttentionSeparate(names),
        places=[*rotations.places, *[place for leaf in known for place in leaf.places]],
        also=rotations.chains(module.head_dim) if hasattr(module, "head_dim") else (),
    )


class _AfterNorm:
    """The products of projections with adapters, in one chain with the norm before them; or none.

    A norm that is computed again keeps its input, which the layer keeps anyway, and the projections
    keep none. The norm has run already, as a chain of its own, and runs once more here: it is found
    as what computed the projections' input.

    Args:
        product: The projections side by side.
        dropouts: See :func:`opfuse_convert.building.follow`.
    """

    def __init__(self, product: ParallelLoRALinear, dropouts: Sequence[Any]) -> None:
        self._product, self._dropouts = product, dropouts
        self._chain: Any = None
        self._pays = Remembered(self._computes_again)

    def __call__(self, x: Tensor) -> Sequence[Tensor] | None:
        """The products of an input; None: nothing is gained by the chain, or it does not fit."""
        found = norms.behind(x)
        if found is None or current.recipe is not None:
            return None
        norm, given = found
        if self._chain is None or self._chain[0] is not norm:
            self._chain, self._pays = (
                Sequential(norm, self._product),
                Remembered(self._computes_again),
            )
        follow(self._dropouts)
        names = self._product.param_names or ()
        dtypes = [self._product.read_parameter(name).dtype for name in names]
        modes = [linear.training for linear in self._product.linears]
        if not self._pays((given,), {}, x.dtype, (*dtypes, *modes)):
            return None
        # copies, so that what keeps one of them does not keep all
        parts = self._chain(given).split(self._product.sizes, -1)
        return [part.contiguous() for part in parts]

    def _computes_again(self, args: Sequence[Tensor], kwargs: Any, dtype: Any, facts: Any) -> bool:
        (given,) = args
        weights = {linear.read_parameter("weight").dtype for linear in self._product.linears}
        has_autocast = torch.is_autocast_enabled(given.device.type)
        fits = torch.float64 not in {dtype, *weights} if has_autocast else weights == {dtype}
        if not fits:
            return False
        program = program_of(self._chain, given)
        return program is not None and (bool(program.recomputations) or bool(current.recorders))


def _build_output(module: Any, env: Environment) -> Conversion | str:
    """The chain of a linear layer alone, for a recipe."""
    leaf = leaf_of(module, splits)
    if op_class(module) is not nn.Linear or isinstance(leaf, str) or leaf.split is not None:
        return leaf if isinstance(leaf, str) else "it is not a plain torch.nn.Linear"
    chain = Sequential(*leaf.ops)
    return Conversion(chain, ("",), _OutputCall(), nn.Linear.forward, places=leaf.places)


class _OutputCall:
    """The forward of a linear layer, by its chain under a recipe."""

    why = ""

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        is_quantized = current.recipe is not None
        self.why = "" if is_quantized else UNQUANTIZED
        return chain(args[0]) if is_quantized and len(args) == 1 and not kwargs else NotImplemented


NO_NORM = "its projections have adapters, and no norm before them is computed again"
UNQUANTIZED = "it is a chain under a recipe alone"
_OUTPUT = Converter(nn.Linear, _build_output, "output of attention, under a recipe")


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


class _OneByOne:
    """The products one by one, in a chain whose backward is one step; or nothing.

    Args:
        linears: The projections.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        ops: list[Any] = []
        for number, linear in enumerate(linears):
            name, is_last = f"input {number}", number == len(linears) - 1
            fork = MakeExtraOutput()
            fork.set_extra_output_channel(0, name, output_to_caller=False)
            bias = [] if linear.bias is None else [Bias.reading(linear)]
            ops += [*([] if is_last else [fork]), BasicLinear.reading(linear), *bias]
            if not is_last:
                swap = SwapExtraInput()
                swap.set_extra_input_channel(0, name)
                ops.append(swap)
        self._linears, self._chain = linears, Sequential(*ops)
        self._pays = Remembered(self._is_one_step)

    def __call__(self, x: Tensor) -> Sequence[Tensor] | None:
        """The products of an input; None: nothing is gained by the chain, or it does not fit."""
        params = [param for linear in self._linears for param in (linear.weight, linear.bias)]
        dtypes = frozenset([param.dtype for param in params if param is not None])
        if not self._pays((x,), {}, dtypes):
            return None
        last, *others = self._chain(x)
        return *others, last

    def _is_one_step(self, args: Sequence[Tensor], kwargs: Any, dtypes: frozenset[Any]) -> bool:
        (x,) = args
        has_autocast = torch.is_autocast_enabled(x.device.type)
        fits = torch.float64 not in dtypes | {x.dtype} if has_autocast else dtypes == {x.dtype}
        if not (fits and x.requires_grad and x.shape[-1] == self._linears[0].in_features):
            return False
        plan = plan_of(self._chain, x)
        return plan is not None and len(plan.backward) == 1


class _AttentionCall:
    """The forward of the module, on a stand-in."""

    why = _apart = ""

    def __init__(
        self,
        names: tuple[str, ...],
        sizes: Sequence[int],
        always: bool,
        rotations: Rotations,
        one_by_one: _OneByOne | _AfterNorm | None,
    ) -> None:
        self._names, self._sizes, self._always = names, sizes, always
        self._rotations, self._one_by_one = rotations, one_by_one

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        compiling = torch.compiler.is_compiling()
        self.why, products = self._apart, self._one_by_one
        adapted = isinstance(products, _AfterNorm)
        if self._always or (current.recipe is not None and not adapted):
            products = functools.partial(self._joined, chain)
        elif not self.why:
            products = None if adapted and any(hook_dicts(module)) else products
            self.why = NO_NORM if adapted else "its projections are joined under a recipe alone"
            products = None if compiling or not torch.is_grad_enabled() else products
        rotates = bool(self._rotations.found) and not compiling
        run = self._rotations.run if rotates else standin.forward
        if self._apart or products is None:
            if not rotates:
                return NotImplemented
            result = run(module, args, kwargs)
            self.why = "" if self._rotations.seen else self.why
            return result
        shared = _Shared(products, [module._modules[name] for name in self._names])
        parts = {name: _Projection(shared, number) for number, name in enumerate(self._names)}
        result = standin.run(module, parts, {}, args, kwargs, run)
        if shared.asked != {0, 1, 2}:
            self._apart = "its projections are not those of one tensor"
        elif shared.parts is not None or (rotates and self._rotations.seen):
            self.why = ""
        return result

    def _joined(self, chain: Any, x: Tensor) -> Sequence[Tensor]:
        return chain(x).split(self._sizes, -1)  # type: ignore[no-any-return]


class _Shared:
    """The products of one tensor, computed when one of them is asked for.

    Attributes:
        linears: The projections.
        parts: The products; None: the projections compute them.
        asked: The numbers of those that were asked for this tensor.
    """

    def __init__(self, products: Callable[[Any], Any], linears: list[Any]) -> None:
        self._products, self.linears = products, linears
        self._watched = [part for linear in linears for part in linear.modules()]
        self.parts: Sequence[Tensor] | None = None
        self._of: Any = None
        self.asked: set[int] = set()

    def part(self, number: int, x: Any) -> Any:
        """The result of a projection for ``x``."""
        around = _circumstances(x, self._watched)
        if self._of is None:
            self._of = x, around
            self.parts = self._products(x)
        if x is not self._of[0] or around != self._of[1] or number in self.asked:
            return self.linears[number](x)
        self.asked.add(number)
        return self.linears[number](x) if self.parts is None else self.parts[number]


def _circumstances(x: Tensor, linears: Sequence[Any]) -> tuple[Any, ...]:
    """What else the products of a tensor depend on, which a forward may change between them."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current.values
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    modes += autocast, autocast and torch.get_autocast_dtype(x.device.type)
    # how often it was written to, as far as that is counted
    found: list[Any] = [0 if x.is_inference() else x._version, modes]
    for linear in linears:
        # its class and forward, the hooks that its call would run, and its parameters
        own = vars(linear)
        hooks = own["_forward_hooks"], own["_forward_pre_hooks"]
        hooks += own["_backward_hooks"], own["_backward_pre_hooks"]
        found += type(linear), own.get("forward"), *map(len, hooks)
        for param in own["_parameters"].values():
            if param is not None:
                version = 0 if param.is_inference() else param._version
                found += id(param), version, param.requires_grad
    return tuple(found)


class _Projection(standin.ChildInPlace):
    """Replaces a projection by its part of the chain."""

    def __init__(self, shared: _Shared, number: int) -> None:
        super().__init__(shared.linears[number])
        self._shared, self._number = shared, number

    def __call__(self, x: Any) -> Any:
        return self._shared.part(self._number, x)
