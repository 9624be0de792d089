"""FSDP2 around a head: what its hooks do to logits that are computed after the forward.

FSDP2 looks for tensors in what a module returns, gives them a hook that gathers parameters before
the backward, and casts them. Logits that are not there yet get both when they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from opfuse.core.introspection import hook_dicts, hook_kinds, is_dtensor

from . import standin

_HOME = "torch.distributed.fsdp"


def why_not_called(head: nn.Module) -> str:
    """Return why no chain runs within a call of a head, or ``""``."""
    if parametrize.is_parametrized(head):  # perhaps into others each time they are read
        return "the weights of lm_head are computed"
    hooks = [hook for hooks in hook_dicts(head) for hook in hooks.values()]
    if not all(map(_is_of_fsdp, hooks)):
        return f"lm_head has {hook_kinds(head)} hooks"
    for name, param in head.named_parameters():
        part = param._local_tensor if hooks and is_dtensor(param) else param
        if type(part) not in (Tensor, nn.Parameter):
            return f"lm_head.{name} is a {type(part).__name__}"
    if not hooks:
        return ""
    try:
        groups: Any = head._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
        parts = any(param.is_dtensor for group in groups for param in group.fsdp_params)
    except AttributeError:
        return "lm_head has hooks of an FSDP2 that is not the one that is known"
    return "lm_head is split by more than FSDP2" if parts else ""


def within(head: Any, x: Tensor, compute: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What a function gives of a head's input, called as the forward of that head.

    So FSDP2's hooks run around it: they gather the parameters, and look at the result.

    Args:
        head: The head.
        x: Its input.
        compute: The function.

    Returns:
        What it gives, and what the hooks make of that: they cast it as if it were logits.
    """
    if not any(hook_dicts(head)):
        return (result := compute(x)), result
    found: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        found.append(compute(x))
        return found[0]

    own = {"forward": forward}
    result = standin.run(head, {}, own, (x,), {}, lambda twin, args, kwargs: twin(*args, **kwargs))
    return found[0], result


def states_around(model: nn.Module, head: nn.Module) -> list[Any] | None:
    """The states of FSDP2 that shard a head or run around it now, the innermost first.

    Args:
        model: The model, in whose forward this is asked.
        head: Its head.

    Returns:
        None: there is an FSDP, and it is not the one that is known.
    """
    if any(getattr(param, "_fsdp_flattened", False) for param in head.parameters()):
        return None  # the first FSDP
    # whichever module around them is the sharded one, those with parameters have hooks for state
    hooks = (
        hook for each in (head, *model.modules()) for hook in each._state_dict_pre_hooks.values()
    )
    hook: Any = next(filter(_is_of_fsdp, hooks), None)
    if hook is None:
        return []
    try:
        group = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))["self"]
        every = group.cell_contents.modules[0]._get_fsdp_state()._state_ctx.all_states
        own = head._get_fsdp_state() if any(hook_dicts(head)) else None  # type: ignore[operator]
        return [each for each in reversed(every) if each is own or is_running(each)]
    except (AttributeError, KeyError, TypeError):
        return None


def is_running(state: Any) -> bool:
    """Return whether the forward that a state of FSDP2 is for has not ended."""
    return bool(state._training_state.name == "FORWARD")


def seen_by(state: Any, logits: Tensor) -> Tensor:
    """What FSDP2 makes of logits that a module returns, but for sharding parameters again."""
    if logits.requires_grad:
        logits.register_hook(state._pre_backward)
    return state._cast_output_dtype(logits)  # type: ignore[no-any-return]


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_HOME)
