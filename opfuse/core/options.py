"""The block that sets options of planning."""

from __future__ import annotations

from typing import Any

from .settings import CORE_OPTIONS, Option, Setting, Settings, current
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
