"""A model as it is and a converted copy of it: what both give, raise and do, compared."""

import contextlib
import io
import random

import numpy as np
import torch
from torch import Tensor


def taken_apart(value):
    """Its structure, as text, and the tensors in it."""
    if isinstance(value, Tensor):
        return "tensor", [value]
    if isinstance(value, dict):
        parts, of = [taken_apart(each) for each in value.values()], list(map(str, value))
    elif isinstance(value, (list, tuple)):
        parts, of = [taken_apart(each) for each in value], ""
    else:
        return repr(value), []
    shape = f"{type(value).__name__}{of}({', '.join(shape for shape, _ in parts)})"
    return shape, [tensor for _, tensors in parts for tensor in tensors]


def seed(number):
    """The same random numbers from here on."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def outcome(model, args, kwargs, observed=lambda model: None):
    """What a call gives: what was raised, what was printed and done, outputs and gradients.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: See ``args``.
        observed: What of the model and of the world a call may have changed, as text.
    """
    printed = io.StringIO()
    seed(1)
    torch.clear_autocast_cache()  # it may have what parameters were
    found = []
    try:
        with contextlib.redirect_stdout(printed):
            shape, outputs = taken_apart(model(*args, **kwargs))
            found += [(f"output {number}", y) for number, y in enumerate(outputs)]
            found += gradients(model, outputs, [*args, *kwargs.values()])
    except Exception as error:
        return type(error).__name__, repr(observed(model)), [], str(error)[:200]
    done = f"{shape} {[layout(y, args) for y in outputs]} {observed(model)!r} {printed.getvalue()!r} {random.random()} {torch.rand(1)}"
    return "", done, [(name, y if y is None else y.detach().clone()) for name, y in found], ""


def layout(y, given):
    """The strides of an output, where they matter, and whether it has the memory of an input."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    shares = [x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for x in tensors]
    return [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1], shares


def gradients(model, outputs, given):
    """Those of the inputs and of all parameters, by name."""
    wanted = {f"gradient of input {i}": x for i, x in enumerate(given) if isinstance(x, Tensor)}
    wanted |= {f"gradient of {name}": p for name, p in model.named_parameters()}
    wanted = {name: x for name, x in wanted.items() if x.requires_grad}
    ends = [y for y in outputs if y.requires_grad]
    yield from [(f"output {i} needs a gradient", None) for i, y in enumerate(outputs) if y in ends]
    if not ends or not wanted:
        return
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape) for y in ends]
    found = torch.autograd.grad(ends, [*wanted.values()], weights, allow_unused=True)
    yield from zip(wanted, found, strict=True)


def difference(mine, theirs, rtol=1e-4):
    """How two outcomes differ, as a sentence; ``""``: they do not."""
    for what, one, other in zip(("raises", "does"), mine, theirs, strict=False):
        if one != other:
            told = f" ({mine[3]} / {theirs[3]})" if what == "raises" else ""
            return f"it {what} {one or 'nothing'}, the original {other or 'nothing'}{told}"
    if [name for name, _ in mine[2]] != [name for name, _ in theirs[2]]:
        return f"it has {[n for n, _ in mine[2]]}, the original {[n for n, _ in theirs[2]]}"
    if torch.is_autocast_enabled("cpu"):
        rtol = 0.15
    for (name, one), (_, other) in zip(mine[2], theirs[2], strict=True):
        if why := _unlike(one, other, rtol):
            return f"{name}: {why}"
    return ""


def _unlike(one, other, rtol):
    if one is None or other is None:
        return "" if one is other else f"{_size(one)}, the original {_size(other)}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {tuple(one.shape)}, the original {other.dtype} {tuple(other.shape)}"
    if one.dtype in (torch.bfloat16, torch.float16):
        rtol = 0.15
    one, other = one.double(), other.double()
    finite = other[other.isfinite()]
    atol = rtol * (float(finite.abs().max()) if finite.numel() else 1.0)
    if rtol > 0.1:  # a gradient may be all rounding
        atol = max(atol, 2e-3)
    if torch.allclose(one, other, rtol=rtol, atol=max(atol, 1e-7), equal_nan=True):
        return ""
    return f"off by {float((one - other).abs().max()):.3g} of {_size(other)}"


def _size(tensor):
    return "None" if tensor is None else f"{float(tensor.abs().max()):.3g}"
