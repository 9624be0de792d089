"""Checks and their error messages: bad arguments, and ops that break their declarations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..fusible import declared
from ..introspection import is_dtensor, kwarg_names, own_call
from ..op import is_kind, kinds_of, refuse_kind
from .blueprint import Blueprint
from .chain import Chain
from .facts import Step

# Arguments of a call


def check_arguments(chain: Chain, input: Any, extra_inputs: Sequence[Any]) -> None:
    """Refuse non-tensors, the wrong number of extra inputs, and a wrong width."""
    who, count = f"{chain.title} expected", len(chain.external_inputs)
    if len(extra_inputs) != count:
        wanting = ", ".join(chain.takers()) or "no op takes one"
        raise ValueError(f"{who} {count} extra inputs, got {len(extra_inputs)} ({wanting})")
    if not isinstance(input, Tensor):
        raise TypeError(f"{who} a tensor, got {type(input).__name__}")
    if not all([isinstance(tensor, Tensor) for tensor in extra_inputs]):
        got = ", ".join([type(tensor).__name__ for tensor in extra_inputs])
        raise TypeError(f"{who} tensors as extra inputs, got {got}")
    if chain.width is not None and (not input.ndim or input.shape[-1] != chain.width):
        what = f"{chain.width} features in the last dimension, got shape {tuple(input.shape)}"
        raise ValueError(f"{who} {what}")


def check_tensors(
    chain: Chain,
    owner: nn.Module | None,
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None,
    extras: Sequence[Any],
    input_is_dtensor: bool = False,
) -> None:
    """Refuse dtypes and devices that do not match, and parameters of several processes.

    Args:
        chain: The chain.
        owner: The op whose own call this is, if it is one.
        dtype: The dtype of the input.
        device: The device of the input.
        autocast: The dtype that autocast asks for, or None.
        extras: The extra inputs, or ``(dtype, device)`` of each.
        input_is_dtensor: Whether the input is a ``DTensor``, so that parameters may be.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"{chain.title} expected a floating-point input, got {dtype}")
    for i, op in enumerate(chain.ops):
        strict = op.params_in_compute_dtype and autocast is None
        _check_params(chain, i, dtype if strict else None, device, input_is_dtensor)
        if op is not owner or not own_call(op):  # its own forward uses what it has
            _check_param_names(chain, i)
        if kinds_of(op) != tuple([chain.kinds[slot] for slot in chain.inputs_of(i, i + 1)]):
            who = f"the extra_input_dtypes of {chain.name(i)}"
            raise RuntimeError(f"{who} are fixed: a fuser captured them; use a new op")
    for (i, k), number in chain.arguments.items():
        op, kind, extra = chain.ops[i], chain.kinds[i, k], extras[number]
        given, where = (extra.dtype, extra.device) if isinstance(extra, Tensor) else extra
        name = op.extra_input_names[k]
        who = f"extra input {k if name is None else f'{k} ({name!r})'} of {chain.name(i)}"
        if not is_kind(kind, given):
            refuse_kind(who, kind, given)
        if where != device:
            raise ValueError(f"{who} is on {where}, the input is on {device}")
        strict = op.params_in_compute_dtype and not op.extras_of_any_dtype and autocast is None
        if strict and kind == "floating" and given != dtype:
            raise TypeError(f"{who} expected {dtype} as the input, got {given}")


def _check_params(
    chain: Chain,
    index: int,
    dtype: torch.dtype | None,
    device: torch.device,
    input_is_dtensor: bool,
) -> None:
    """Refuse parameters on another device, or of another dtype where one is required."""
    op, sources = chain.ops[index], chain.param_sources[slice(*chain.param_ranges[index])]
    who = f"{chain.name(index)} of {chain.title}"
    for own, (module, name) in zip(op.param_names or (), sources, strict=True):
        # a parametrized one is not computed just for a check
        param: Any = module._parameters.get(name)
        if param is None:
            continue
        if not input_is_dtensor and own not in op._layouts and is_dtensor(param):
            how = f"got a DTensor placed as {param.placements}, as only a split op takes"
            raise TypeError(f"{who} expected a plain {name}, {how} among processes")
        if param.device != device:
            where = f"has its {name} on {param.device}, the input is on {device}"
            raise ValueError(f"{who} {where}")
        if dtype is not None and param.dtype != dtype:
            what = f"expected {param.dtype}, the dtype of its {name}, got an input of {dtype}"
            raise TypeError(f"{who} {what}")


def _check_param_names(chain: Chain, index: int) -> None:
    """Refuse parameters that an op did not have when it was made: their gradients would be lost."""
    op = chain.ops[index]
    names = op.param_names or ()
    known = [f"{each}_" for each in names]  # weight_orig, weight_g
    known += [f"{each.rpartition('.')[0]}.parametrizations.".lstrip(".") for each in names]
    for name, _ in op.named_parameters():
        if name not in names and not name.startswith(("parametrizations.", *known)):
            raise TypeError(
                f"{chain.name(index)} of {chain.title} has a parameter {name} that it does not "
                f"take, or that it got after its __init__: its gradient would be lost; register it "
                f"in __init__, and use it in op_forward or in its own forward"
            )


def check_kwargs(chain: Chain, kwargs: Sequence[Sequence[str]] | None) -> None:
    """Refuse keyword arguments that an op does not take."""
    for i, names in enumerate(kwargs or ()):
        takes = kwarg_names(chain.ops[i])
        if takes is not None and (wrong := [name for name in names if name not in takes]):
            what = f"does not take the keyword argument {wrong[0]!r}"
            known = f"it takes {', '.join(takes) or 'none'}"
            raise TypeError(f"{chain.name(i)} of {chain.title} {what}; {known}")


def check_constants(chain: Chain, kwargs: Sequence[dict[str, Any]]) -> None:
    """Refuse keyword tensors whose gradient would be lost: only parameters and extras get one."""
    for i, given in enumerate(kwargs):
        for name, value in given.items():
            if any(tensor.requires_grad for tensor in tensors_in(value)):
                who = (
                    f"{chain.name(i)} of {chain.title} got a tensor that requires grad as {name!r}"
                )
                what = "and a keyword argument gets no gradient: use an extra input, or detach it"
                raise TypeError(f"{who}, {what}")


def check_differentiable(chain: Chain, recipe: Any) -> None:
    """Refuse what autograd cannot record op by op, for second derivatives and functorch."""
    who = "second derivatives and functorch transforms"
    if recipe is not None:
        raise RuntimeError(f"{who} do not pass the rounding of {recipe}")
    for index, op in enumerate(chain.ops):
        if not declared(op, "differentiable"):
            what = "is not declared to be differentiable (BasicOperation.differentiable)"
            raise RuntimeError(f"{who}: {chain.name(index)} {what}")


def check_attributes(chain: Chain) -> None:
    """Refuse tensor attributes of an op or its class that need gradients but are not parameters."""
    for i, op in enumerate(chain.ops):
        held = [pair for of in (op, *type(op).__mro__) for pair in [*vars(of).items()]]
        for name in [name for name, value in held if isinstance(value, Tensor)]:
            value = getattr(op, name)  # not what it hides
            known = name in (op.param_names or ()) or not isinstance(value, Tensor)
            if not known and value.requires_grad and value.is_leaf:
                who = (
                    f"{chain.name(i)} of {chain.title} has the tensor {name!r}, which requires grad"
                )
                remedy = "make it an nn.Parameter, and give its gradient"
                raise TypeError(f"{who} and would get none: {remedy}")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, list, tuple or dict, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


# Results of an op


_RESULTS = {
    "op_forward": "its output, a tensor",
    "fuser_forward": "a tuple of its output, a tensor, and the extra outputs of each basic op",
    "op_backward": "a tuple of the gradient of its input and those of its parameters",
    "fuser_backward": "a tuple of the gradients of its input, of the parameters and of the extra "
    "inputs of each op",
}


def refuse_result(program: Blueprint, op: Any, method: str, result: Any) -> NoReturn:
    """Refuse a result that is not a tuple: a tensor, for instance, would unpack by rows."""
    got = type(result).__name__
    if isinstance(result, tuple):
        got = f"({', '.join(type(item).__name__ for item in result)})"
    raise TypeError(f"{_by(program, op)}: {method} must return {_RESULTS[method]}, got {got}")


def refuse_none(program: Blueprint, op: Any, method: str, start: int) -> NoReturn:
    """Refuse a missing gradient that is needed."""
    needs = program.chain.name(start - 1) if start else "the input of the chain"
    what = f"{method} gave None as the gradient of its input, which {needs} needs"
    raise RuntimeError(f"{_by(program, op)}: {what}; give zeros if it is zero")


def param_grads(chain: Chain, index: int, grads: Any) -> tuple[Any, ...]:
    """The parameter gradients of an op as a tuple; refused if it has more or less parameters."""
    first, last = chain.param_ranges[index]
    count = last - first
    if type(grads) is tuple and len(grads) == count:
        return grads
    several = (None,) * count if grads is None else tuple(grads)
    if not count and not all([grad is None for grad in several]):
        what = f"has no parameters, but its backward gave {len(several)} gradients for some"
        raise RuntimeError(f"{chain.name(index)} {what}")
    if count and len(several) != count:
        what = f"must give {count} parameter gradients, gave {len(several)}"
        raise RuntimeError(f"{chain.name(index)} {what}")
    return several if count else ()


def check_saved(program: Blueprint, index: int, ctx: Any) -> tuple[Any, ...]:
    """The tensors that an op saves; refused if they are not those that it declares."""
    who = program.chain.name(index)
    count = len(declared(program.chain.ops[index], "saved_names"))
    if ctx.saved_tensors is not None:
        remedy = "give tensors to ctx.save_for_backward"
        raise RuntimeError(f"{who} wrote saved_tensors on its context in its forward: {remedy}")
    to_save: tuple[Any, ...] = ctx.to_save or ()
    if not count and any(tensor is not None for tensor in to_save):
        what = "declares saved_names = (), and its forward gave tensors to save_for_backward"
        raise RuntimeError(f"{who} {what}: they would be lost; declare their names, in order")
    if len(to_save) != count and (ctx.to_save is not None or ctx.requires_grad):
        what = f"{who} declares {count} saved tensors"
        by = forward_op_of(program, index)
        raise RuntimeError(f"{what}, but the forward of {by} saved {len(to_save)} for it")
    return to_save if count else ()


def refuse_unset(
    program: Blueprint, error: AttributeError, contexts: Mapping[int, Any]
) -> NoReturn:
    """Refuse a forward that did not leave a declared attribute on a context."""
    index = next(i for i, ctx in contexts.items() if ctx is error.obj)
    what = f"{program.chain.name(index)} declares the context attribute {error.name!r}"
    by = forward_op_of(program, index)
    raise RuntimeError(f"{what}, but the forward of {by} did not leave it") from None


def refuse_counts(
    step: Step, given: Sequence[Sequence[Any]], counts: Sequence[int], chain: Chain, what: str
) -> None:
    """Refuse extra results of a step of which a basic op has others than it declared."""
    who, count = f"{type(step.op).__name__} must give", step.stop - step.start
    if len(given) != count:
        raise RuntimeError(f"{who} {what} for {count} basic ops, gave {len(given)}")
    for i, (tensors, count) in enumerate(zip(given, counts, strict=True), step.start):
        if len(tensors) != count:
            raise RuntimeError(f"{who} {count} {what} for {chain.name(i)}, gave {len(tensors)}")


def forward_op_of(program: Blueprint, index: int) -> str:
    """The op whose forward ran a basic op."""
    step = next(s for s in program.plan.forward if 0 <= index - s.start < len(s.basic_ops))
    return f"{step.op} ({step.distribution or 'no plugin'})"


def _by(program: Blueprint, op: Any) -> str:
    """The name of an op in errors, with its origin."""
    name, steps = type(op).__name__, (*program.plan.forward, *program.plan.backward)
    return next((f"{name} ({s.owner})" for s in steps if s.op == name and s.fusion), name)
