"""Context managers over the settings of this thread: options, recipe, and both on recomputation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from .engine.fuser import OperationFuser
from .engine.plan import FusionPlan
from .quantization import Quantizer, Recipe
from .settings import Options, Recorder, Setting, checkpoint_frames, current

_CORE_OPTIONS: dict[str, type] = {"fusion_limit": int, "double_backward": bool, "debug": bool}


class options(Setting):
    """Set options of planning for a ``with`` block, in this thread.

    The core knows ``fusion_limit=n`` (keep the first ``n`` fusions of each plan, to bisect a wrong
    number), ``double_backward=True`` (run unfused, differentiable any number of times) and
    ``debug=True`` (slow: raise where a step writes into its input, a parameter, an extra or a saved
    tensor that is not its own). A plugin's option is named after the plugin:
    ``options(**{"linear.recompute": True})``. Values must be hashable: they are part of the plan's
    key.

    Raises:
        ValueError: An unknown option, or a negative limit. One that its plugin does not know is
            refused by the next plan.
        TypeError: A value of the wrong type, or one that is not hashable.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if "." not in name and name not in _CORE_OPTIONS:
                known = (
                    f"the core has {sorted(_CORE_OPTIONS)}, a plugin's option is named "
                    f"'<plugin>.<option>'"
                )
                raise ValueError(f"unknown option {name!r}: {known}")
            expected = _CORE_OPTIONS.get(name)
            if expected is not None and type(value) is not expected:
                raise TypeError(f"option {name} must be of type {expected.__name__}, got {value!r}")
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"option {name!r}: expected a hashable value, got {value!r}"
                ) from None
        if values.get("fusion_limit", 0) < 0:
            raise ValueError(
                f"option fusion_limit must not be negative, got {values['fusion_limit']}"
            )
        super().__init__(0, values)

    def _new_value(self, before: Options) -> Options:
        return tuple(sorted({**dict(before), **self._value}.items()))


class autocast(Setting):
    """Quantize inside a ``with`` block, by ``recipe``, in this thread.

    Args:
        enabled: False turns quantization off inside an enclosing block.
        recipe: The recipe, a value of a class that a plugin offers.
        calibrating: Reserved for the FP8 recipes; not supported yet.
        amax_reduction_group: Reserved for the FP8 recipes; not supported yet.

    Raises:
        TypeError: ``recipe`` is not a :class:`Recipe`.
        ValueError: Enabled without a recipe.
        NotImplementedError: A reserved argument was given.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if calibrating or amax_reduction_group is not None:
            raise NotImplementedError(
                "autocast: calibrating and amax_reduction_group come with the FP8 recipes"
            )
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"autocast: recipe must be an opfuse.Recipe, got {type(recipe).__name__}"
            )
        if enabled and recipe is None:
            raise ValueError(
                "autocast: the core has no default recipe, pass recipe=... (offered by a plugin)"
            )
        super().__init__(2, recipe if enabled else None)
        self._depths: list[int] = []

    def __enter__(self) -> None:
        super().__enter__()
        if not is_compiling():
            self._depths.append(current.recipe_depth)
            current.recipe_depth = checkpoint_frames()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if not is_compiling():
            current.recipe_depth = self._depths.pop()


class _Forward(Recorder):
    """Around a checkpointed forward: keeps the quantizer state that each chain starts from."""

    restores = True

    def __init__(self) -> None:
        self.settings = current.values
        self.states: list[list[tuple[Quantizer, str, Tensor]]] = []

    def record(self, fuser: OperationFuser, plan: FusionPlan) -> None:
        """Keep the state of the chain's quantizers."""
        super().record(fuser, plan)
        quantizers = [q for op in fuser._chain.ops for q in op._quantizers.of(current.recipe)[0]]
        self.states.append(
            [(q, name, getattr(q, name).clone()) for q in quantizers for name in q.state_names]
        )


class _Recompute(Recorder):
    """Around the recomputation: the settings of the forward, and each chain's state before."""

    restores = True

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._after: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> _Recompute:
        super().__enter__()
        self._outside, current.values = current.values, self._forward.settings
        self._states = iter(self._forward.states)
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        current.values = self._outside
        while self._after:
            state, value = self._after.pop()
            state.copy_(value)

    def record(self, fuser: OperationFuser, plan: FusionPlan) -> None:
        """Put the state back that the chain started from.

        An outer recorder is not told: it was in the forward.
        """
        for quantizer, name, before in next(self._states):
            state = getattr(quantizer, name)
            self._after.append((state, state.clone()))
            state.copy_(before)


def checkpoint_contexts() -> tuple[_Forward, _Recompute]:
    """A ``context_fn`` for ``torch.utils.checkpoint``: recompute under the settings of the forward.

    The recomputation runs when the ``with`` blocks around the forward are long over (and on a GPU
    in another thread). Without this it would run without the recipe and would update quantizer
    state a second time; a chain that runs under a recipe inside of ``torch.utils.checkpoint``
    raises then.
    """
    forward = _Forward()
    return forward, _Recompute(forward)
