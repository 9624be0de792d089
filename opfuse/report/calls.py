"""What a call of a chain would run, and what a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.engine.fuser import key_of
from ..core.engine.plan import FusionPlan
from ..core.engine.program import Program
from ..core.introspection import hook_dicts, standing_for
from ..core.quantization import QuantizedParameter, QuantizedTensor
from ..core.settings import current


def plan_of(chain: Any, input: Tensor, *extra_inputs: Tensor) -> FusionPlan | None:
    """Return the plan of :func:`program_of`, or None."""
    program = program_of(chain, input, *extra_inputs)
    return None if program is None else program.plan


def program_of(chain: Any, input: Tensor, *extra_inputs: Tensor) -> Program | None:
    """Return the program of a call of a chain, under the present settings, and do not run it.

    Args:
        chain: An :class:`opfuse.Sequential` of fusible ops.
        input: Its input.
        *extra_inputs: Its extra inputs.

    Returns:
        The program; None: the call would run in parts, because of hooks or of what is not fusible.
    """
    fuser, *others = chain._module_groups
    units = getattr(fuser, "_units", ())
    if others or not units or any(any(hook_dicts(unit)) for unit in units):
        return None
    owners = () if fuser._owner is None else (fuser._owner,)
    training = [unit.training for unit in (*units, *owners)]
    params = {
        (module, name): standing_for(module, name)
        if attributes is vars(module)
        else module.read_parameter(name, standing_for)
        for attributes, module, name in fuser._params
    }
    with current.temporarily(part_params=params):
        tensors = fuser._tensors(input, extra_inputs)
    key = key_of(input, tensors, extra_inputs, None, training)
    return fuser.program_for(key, input, tensors)  # type: ignore[no-any-return]


def saved_bytes(forward: Callable[[], Any], apart_from: Iterable[Tensor] = ()) -> int:
    """Return the number of bytes that a forward keeps for its backward, each storage once.

    Args:
        forward: Runs it; its result stays alive until all is counted.
        apart_from: Tensors whose memory does not count, such as parameters.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        kept.update(memory_of([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    known = memory_of(apart_from)
    del result
    return sum(nbytes for storage, nbytes in kept.items() if storage not in known)


def memory_of(tensors: Iterable[Any]) -> dict[int, int]:
    """The storages of tensors, which may be quantized or None, and the bytes of each."""
    return {int(s._cdata): s.nbytes() for tensor in tensors for s in _storages(tensor)}


def _storages(tensor: Any) -> Iterator[Any]:
    """The storages of a tensor: those inside a subclass around others, such as a ``DTensor``."""
    parts: Iterable[Any] = ()
    tensor = tensor.quantized if isinstance(tensor, QuantizedParameter) else tensor
    if isinstance(tensor, QuantizedTensor):
        parts = tensor.tensors()
    elif hasattr(tensor, "__tensor_flatten__"):  # of a DTensor, one part is the mesh
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif isinstance(tensor, Tensor):
        yield tensor.untyped_storage()
    for part in parts:
        yield from _storages(part)
