"""Context managers for the settings of this thread: options, recipe, and recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from .engine.chain import Chain
from .engine.fuser import OperationFuser
from .engine.program import Program
from .overwriting import put_back, unseen
from .quantization import Quantizer, Recipe, WeightCache
from .quantization.names import check_names
from .quantization.quantizer import CALIBRATING
from .recipes import DEFAULT_RECIPE, offered
from .scale_update import Block
from .settings import CORE_OPTIONS, Option, Recorder, Setting, Settings, checkpoint_frames, current
from .tools import tool_option


class options(Setting):
    """Set options of planning for a ``with`` block, in this thread.

    The core knows ``fusion_limit=n`` (keep the first ``n`` fusions of each plan, to bisect a wrong
    number), ``double_backward=True`` (run unfused, differentiable any number of times),
    ``debug=True`` (slow: raise where a step writes into its input, a parameter, an extra or a saved
    tensor that is not its own), ``prefer``, ``locked``, ``invariant``, and
    ``chains_under_compile=True`` (``torch.compile`` traces the chains of converted modules; by
    default it traces their own ``forward``, which it compiles faster and often better). A plugin's
    option is named after the plugin: ``options(**{"mlp.keep_norm": True})``. Values must be
    hashable: they are part of the plan's key.

    ``locked=PATH`` names a file that ``opfuse freeze`` or :func:`opfuse.freeze` wrote. Chains then
    run only if all that it lists is the same here. It is compared when the block begins, except for
    what may change inside: options, recipe, skipped ops and ``torch.autocast``. It is compared in
    whole for every new plan. Every call compares the device, threads and the precision of products,
    which takes about 25 us; a compiled graph does not.

    ``invariant="batch"``: a row of a chain's output has the same bits whatever other rows are in
    the batch. Chains run in blocks of 64 rows, the last one padded, without gradients and not under
    ``torch.compile``. An op or a recipe that does not promise it is refused by an error, and a
    fusion is not used. It covers chains, not what a model computes between them.

    ``prefer="speed"`` is the default. Under ``prefer="memory"`` and ``torch.autocast``, a linear
    saves the weight itself for the backward, and not its autocast copy, and casts it again there.
    The weight must be a plain ``nn.Parameter`` that needs a gradient. A frozen weight, the result
    of a parametrization, a DTensor or another class is saved as cast; so are weights read with
    ``reading(transposed=True)``, and all of a ``ParallelLinear`` with a frozen parameter.
    ``GroupedLinear`` always saves its cast weights. Gradients are bitwise the same. Changing a
    weight between forward and backward is an error, as in torch without autocast. But a **fused**
    optimizer step (``AdamW(..., fused=True)``) and ``weight.data`` change weights without notice:
    between forward and backward they make the gradients wrong without an error. Do not use
    ``prefer="memory"`` if an optimizer steps there, as in some pipelines. A recomputation by
    ``torch.utils.checkpoint`` must run under the same options: pass
    ``context_fn=opfuse.checkpoint_contexts``. Under ``torch.compile``, the partitioner decides what
    a graph saves.

    Raises:
        ValueError: An unknown option, a negative limit, or another value of ``prefer``. An option
            that its plugin does not know is refused by the next plan. ``locked`` is another file.
        TypeError: A value of the wrong type, or one that is not hashable.
        OSError: The file ``locked`` cannot be read.
        LockError: When the block begins, or in a call: what is locked is not what is here.
    """

    def __init__(self, **values: Any) -> None:
        self._tools: dict[str, Option] = {}
        for name, value in values.items():
            if (expected := CORE_OPTIONS.get(name)) is not None:
                if type(value) is not expected:
                    what = f"must be of type {expected.__name__}, got {value!r}"
                    raise TypeError(f"option {name} {what}")
            elif "." not in name:
                self._tools[name] = tool_option(name, current.selection)
                values[name] = value = self._tools[name].convert(value)
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"option {name!r}: expected a hashable value, got {value!r}"
                ) from None
        if (limit := values.get("fusion_limit", 0)) < 0:
            raise ValueError(f"option fusion_limit must not be negative, got {limit}")
        if values.get("prefer", "speed") not in ("speed", "memory"):
            raise ValueError(f"option prefer must be 'speed' or 'memory', got {values['prefer']!r}")
        super().__init__(options=values)

    def _changes_after(self, before: Settings) -> dict[str, Any]:
        merged = {**dict(before.options), **self._changes["options"]}
        return {"options": tuple(sorted(merged.items()))}

    def __enter__(self) -> None:
        super().__enter__()
        try:
            for name, option in self._tools.items():
                if option.enter is not None:
                    option.enter(self._changes["options"][name])
        except BaseException:
            self.__exit__()
            raise


class autocast(Setting):
    """Quantize inside a ``with`` block, by a recipe, in this thread.

    ``autocast(recipe)``, ``autocast("name")`` and ``autocast(recipe=recipe)`` mean the same. The
    state of a recipe, such as scales computed from earlier maxima, advances at the exit of the
    outermost block (:meth:`Recipe.update`), provided that grad mode is on, nothing was raised, and
    this is not a recomputation in a backward.

    Args:
        enabled: False turns quantization off inside an enclosing block. A value other than a bool
            is taken as the recipe.
        calibrating: With ``enabled=False``, nothing is quantized, but the recipe's quantizers see
            and record the tensors, under ``torch.no_grad()`` too. The scales of delayed scaling are
            then known before the first quantized call. An enabled block records anyway.
        recipe: The recipe, an instance of a class that a plugin offers, or its registered name.
            None: ``"fp8-delayed"``, on every device; Transformer Engine's default depends on the
            GPU.
        amax_reduction_group: The process group over which the maxima of a step are taken. The model
            must be prepared, see :func:`opfuse.assign_names`.
        weights: ``"fresh"`` casts each weight in every call. ``"cached"`` reuses the last cast if
            the Parameter and its version are the same; it is for several microbatches between two
            optimizer steps. The first must be "fresh", since fused optimizers, and whatever writes
            to ``weight.data``, change weights without raising their version. One cast of each
            weight stays in memory.
        skip: Names of ops that are not quantized: patterns such as ``["head", "blocks.0.*"]``, in
            which ``*`` matches anything, including dots. A pattern that matches the name of a
            module covers all ops below it. Ops get names from :func:`opfuse.assign_names` or from
            their constructor. An inner block does not inherit the patterns of outer blocks.

    Raises:
        TypeError: The recipe is neither a :class:`Recipe` nor a name, or is given twice; ``skip``
            is not a list of strings.
        ValueError: A recipe that no installed plugin offers; another value of ``weights``; a
            pattern of ``skip`` that matches no op, which is found when the block is entered.
    """

    def __init__(
        self,
        enabled: bool | Recipe | str = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: Any = None,
        *,
        weights: str = "fresh",
        skip: Iterable[str] = (),
    ) -> None:
        if not isinstance(enabled, bool):
            if recipe is not None:
                raise TypeError(f"autocast: got two recipes, {enabled!r} and {recipe!r}")
            recipe, enabled = enabled, True
        patterns = None if isinstance(skip, str) or skip is None else tuple(skip)
        if patterns is None or not all([isinstance(name, str) for name in patterns]):
            raise TypeError(f"autocast: expected a list of patterns as skip, got {skip!r}")
        if not isinstance(calibrating, bool):
            raise TypeError(f"autocast: expected a bool as calibrating, got {calibrating!r}")
        if weights not in ("fresh", "cached"):
            raise ValueError(f"autocast: weights must be 'fresh' or 'cached', got {weights!r}")
        if recipe is None:
            recipe = DEFAULT_RECIPE
        in_force = offered(recipe) if enabled or calibrating else None
        observer = CALIBRATING if calibrating and not enabled else None
        super().__init__(recipe=in_force, skip=patterns, observer=observer)
        self._weights, self._group = weights, amax_reduction_group
        self._outside: list[tuple[int, str, Block | None]] = []

    def _changes_after(self, before: Settings) -> dict[str, Any]:
        observer = self._changes["observer"]
        if observer is None and before.observer is not CALIBRATING:
            observer = before.observer  # the observer of an outer block stays in force
        return {**self._changes, "observer": observer}

    def __enter__(self) -> None:
        if is_compiling():
            super().__enter__()
            return
        group, block = self._group, current.block
        if block is not None and group is not None and group is not block.group:
            raise ValueError(
                "autocast: amax_reduction_group is for the outermost block, at whose exit "
                "state advances"
            )
        check_names(self._changes["skip"])
        super().__enter__()
        self._outside.append((current.recipe_depth, current.weights, current.block))
        current.recipe_depth, current.weights = checkpoint_frames(), self._weights
        if current.block is None:
            current.block = Block(self._group)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if is_compiling():
            return
        block, current.recording = current.block, True
        current.recipe_depth, current.weights, current.block = self._outside.pop()
        if current.block is None:
            block.end(failed=exc_info[0] is not None)


class _State(NamedTuple):
    """What the ops of a chain keep from one call to the next, as it was at one time.

    Attributes:
        quantizers: The tensors of their quantizers, with the values.
        casts: The casts of their weights.
    """

    quantizers: list[tuple[Quantizer, str, Tensor]]
    casts: list[tuple[WeightCache, Any]]

    @classmethod
    def of(cls, chain: Chain) -> _State:
        """That of the ops of a chain now."""
        ops, recipe = chain.ops, current.recipe
        quantizers = [q for op in ops for q in op._quantizers.of_mode(op, recipe, "forward")]
        named = [(q, name) for q in quantizers for name in q.state_names]
        values = [(q, name, unseen(getattr(q, name))) for q, name in named]
        return cls(values, [(op._weights, op._weights.entries()) for op in ops])

    def put_back(self) -> None:
        """Restore it."""
        for quantizer, name, value in self.quantizers:
            put_back(getattr(quantizer, name), value)
        for cache, entries in self.casts:
            cache.put_back(entries)


class _Forward(Recorder):
    """Active in a checkpointed forward; records the state that each chain starts from."""

    restores = True

    def __init__(self) -> None:
        self.settings, self.weights = current.values, current.weights
        self.states: list[_State] = []

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the state of the chain."""
        self.states.append(_State.of(fuser._chain))


class _Recompute(Recorder):
    """Active in the recomputation; restores the forward's settings and each chain's state.

    Outer recorders are told nothing: they were in the forward.
    """

    restores = True

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._after: list[_State] = []

    def __enter__(self) -> _Recompute:
        super().__enter__()
        current.recorders = (self,)
        self._settings = current.values, current.weights
        current.values, current.weights = self._forward.settings, self._forward.weights
        self._states = iter(self._forward.states)
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        current.values, current.weights = self._settings
        while self._after:
            self._after.pop().put_back()

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Restore the state that the chain started from."""
        self._after.append(_State.of(fuser._chain))
        next(self._states).put_back()


@contextlib.contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def checkpoint_contexts(
    context_fn: Callable[[], Iterable[AbstractContextManager[Any]]] | None = None,
) -> tuple[AbstractContextManager[Any], ...]:
    """A ``context_fn`` for ``torch.utils.checkpoint``: recompute under the settings of the forward.

    The recomputation runs after the ``with`` blocks around the forward have ended (and on a GPU in
    another thread). Without this function it would run without the recipe and update quantizer
    state a second time. A chain under a recipe inside ``torch.utils.checkpoint`` therefore raises
    without it.

    Args:
        context_fn: Another such function, which applies as well; None: none does. With
            ``functools.partial`` it may be one of selective checkpointing.

    Raises:
        ValueError: ``context_fn`` does not return two contexts.
    """
    forward = _Forward()
    pair = forward, _Recompute(forward)
    if context_fn is None:
        return pair
    if len(others := tuple(context_fn())) != 2:
        what = "context_fn must return two contexts, those of the forward and of the recomputation"
        raise ValueError(f"opfuse.checkpoint_contexts: {what}, it returned {len(others)}")
    return tuple(_together(*both) for both in zip(pair, others, strict=True))
