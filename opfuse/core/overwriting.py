"""Which results of torch's operations may be overwritten, and by what.

Another may hold a result. A mode sees each one, a ``TorchDispatchMode`` or a ``TorchFunctionMode``:
selective activation checkpointing keeps those that its policy names, and returns them when it
computes again. Hooks of saved tensors see none of those that are asked about here, since autograd
saves nothing where it does not record. So a forward or a backward overwrites a result only where
:func:`may_write` says that it may. What runs beside the user's
own calls is seen by no mode, in a block :func:`without_modes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from .settings import current

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of active function modes."""

_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
_function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def tracing() -> bool:
    """Return whether calls are traced rather than run: formulas are then better than kernels.

    A mode of torch's compiler traces. Other modes let the calls run.
    """
    if is_dynamo_compiling():
        return True
    return any([getattr(_mode_at(i), "_mode_key", None) for i in range(dispatch_modes())])


def may_write(*tensors: Tensor | None) -> bool:
    """Return whether results of torch's operations may be overwritten.

    They may in an eager pass that autograd does not record, by plain tensors, and while no mode is
    active but those that declare ``keeps_no_tensors = True``, or set a default device.

    Args:
        *tensors: The operands of the operation that writes; None: there is none.
    """
    if is_dynamo_compiling():
        return False
    if dispatch_modes() or function_modes():
        modes = [_mode_at(i) for i in range(dispatch_modes())]
        modes += [_function_mode_at(i) for i in range(function_modes())]
        if not all([getattr(mode, "keeps_no_tensors", _is_default_device(mode)) for mode in modes]):
            return False
    if _transforms() is not None or forward_ad._current_level >= 0:
        return False
    records = torch.is_grad_enabled()
    for tensor in tensors:
        plain = tensor is None or type(tensor) is Tensor or type(tensor) is nn.Parameter
        if not plain or (records and tensor is not None and tensor.requires_grad):
            return False
    return True


def _is_default_device(mode: Any) -> bool:
    """Return whether a mode only says where new tensors are; torch imports its class late."""
    return type(mode).__name__ == "DeviceContext" and type(mode).__module__ == "torch.utils._device"


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A block without the caller's modes, apart from a default device."""
    saved: Any = torch._C._autograd
    push, pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack
    with contextlib.ExitStack() as stack:  # which undoes in the reverse order
        if dispatch_modes():
            stack.enter_context(_disable_current_modes())
        # without the block of a recipe: it is not to advance the state of what ran here
        stack.enter_context(current.temporarily(block=None))
        ask = saved._top_saved_tensors_default_hooks
        while saved._saved_tensors_hooks_is_enabled() and (top := ask(True)):
            saved._pop_saved_tensors_default_hooks()
            stack.callback(saved._push_saved_tensors_default_hooks, *top)
        modes = [pop() for _ in range(function_modes())]
        for mode in modes:
            stack.callback(push, mode)
        for mode in filter(_is_default_device, reversed(modes)):
            push(mode)
            stack.callback(pop)
        cached = {*parametrize._cache}
        try:
            yield
        finally:
            for key in {*parametrize._cache} - cached:
                del parametrize._cache[key]


def unseen(tensor: Tensor, *, is_result: bool = False) -> Tensor:
    """A dense copy that no mode has seen, for a collective that overwrites it.

    Args:
        tensor: The values.
        is_result: Whether it is a dense result that nothing else reads: itself, if it may be.
    """
    if is_result and may_write(tensor):
        return tensor
    return write_state(tensor.clone, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


def write_state(write: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call an operation that writes into a state; no mode sees it, as for :func:`put_back`.

    A trace has it.

    Args:
        write: The operation.
        given: Its arguments.
        named: Those by name.
    """
    if tracing() or not (dispatch_modes() or function_modes()):
        return write(*given, **named)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return write(*given, **named)


def put_back(tensor: Tensor, value: Tensor) -> None:
    """Write earlier values into a state; no mode sees it, since it is no part of a forward."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        tensor.copy_(value)
