"""Triton's interpreter made exact for bf16 and fp8, with torch as the one that rounds.

Triton's own interpreter (3.6 to 3.9 at least) works on numpy arrays, which have neither type. It
truncates where the hardware rounds to nearest even, turns the NaN of fp8 into numbers, and adds and
multiplies the bit patterns of bf16. :func:`install` replaces four methods of its builder. It also
keeps Triton from preparing its language again for each call of a device function. The hooks are
private to Triton, so a test compares the interpreter, with and without them, with torch: it fails
once Triton no longer needs this module, or changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

METHODS = "cast_impl", "create_fp_to_fp", "create_dot", "binary_op"
"""The methods of the interpreter's builder that are replaced."""

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Conversions to fp8 saturate on a GPU (``cvt.rn.satfinite``), and not in torch."""


def install() -> None:
    """Make the interpreter of this process exact. Doing it twice does no harm.

    Raises:
        ImportError: Triton is not installed.
    """
    builder = _builder()
    if builder.binary_op.__module__ != __name__:
        _replace(builder, {name: getattr(builder, name) for name in METHODS})
        _prepare_once()


def _prepare_once() -> None:
    """Let a launch prepare Triton's language once, and not again for each call of a function."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    tl: Any = importlib.import_module("triton.language")
    prepare = interpreter._patch_lang
    nothing: Any = getattr(interpreter, "_LangPatchScope", type(None))  # that undoes nothing

    @functools.wraps(prepare)
    def once(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if seen and not any(tl.core.is_builtin(language.load) for language in seen):
            return nothing()
        return prepare(fn)

    interpreter._patch_lang = once


def _builder() -> Any:
    """The class whose methods the interpreter runs."""
    return type(importlib.import_module("triton.runtime.interpreter").interpreter_builder)


@contextlib.contextmanager
def count_programs() -> Iterator[list[Any]]:
    """The places of the programs that are interpreted, for a ``with`` block."""
    builder, places = _builder(), list[Any]()
    original = builder.set_grid_idx

    def noting(self: Any, *place: Any) -> Any:
        places.append(place)
        return original(self, *place)

    builder.set_grid_idx = noting
    try:
        yield places
    finally:
        builder.set_grid_idx = original


def _replace(builder: Any, originals: dict[str, Any]) -> None:
    np: Any = importlib.import_module("numpy")
    tl: Any = importlib.import_module("triton.language")
    TensorHandle = importlib.import_module("triton.runtime.interpreter").TensorHandle

    dtypes = {
        tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
        tl.float32: torch.float32, tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
    }  # fmt: skip
    bits = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8, tl.float8e5: np.uint8}

    def to_torch(handle: Any) -> torch.Tensor:
        """The values of an array, which for bf16 and fp8 is one of bit patterns."""
        data = torch.from_numpy(np.ascontiguousarray(handle.data).reshape(-1).view(np.uint8))
        return data.view(dtypes[handle.dtype.scalar]).reshape(handle.data.shape)

    def to_handle(values: torch.Tensor, shape: Any, type_: Any) -> Any:
        data = values.reshape(-1).view(torch.uint8).numpy()
        array = data.view(bits.get(type_) or str(values.dtype)[len("torch.") :])
        return TensorHandle(array.reshape(shape), type_)

    def convert(src: Any, dst_type: Any, *, saturate: bool) -> Any:
        values, dtype = to_torch(src), dtypes[dst_type.scalar]
        if saturate and dtype in _LARGEST and values.dtype not in _LARGEST:
            wide, most = values.float(), _LARGEST[dtype]
            values = torch.where(wide.isnan(), wide, wide.clamp(-most, most))
        return to_handle(values.to(dtype), src.data.shape, dst_type.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar in dtypes and dst_type.scalar in dtypes:
            return convert(src, dst_type, saturate=False)
        return originals["cast_impl"](self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar in dtypes and dst_type.scalar in dtypes:
            return convert(src, dst_type, saturate=True)
        return originals["create_fp_to_fp"](self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.dtype.scalar not in dtypes or a.dtype.scalar in (tl.float32, tl.float64):
            return originals["create_dot"](self, a, b, d, *precision)
        product = to_torch(a).float().numpy() @ to_torch(b).float().numpy()
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    comparisons = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16 or op in bitwise:
            return originals["binary_op"](self, lhs, rhs, op)
        result = op(to_torch(lhs).float().numpy(), to_torch(rhs).float().numpy())
        if op in comparisons:
            return TensorHandle(result, tl.bfloat16)
        return to_handle(torch.from_numpy(result).bfloat16(), result.shape, tl.bfloat16)

    for method in (cast_impl, create_fp_to_fp, create_dot, binary_op):
        setattr(builder, method.__name__, _unseen(method))


def _unseen(method: Any) -> Any:
    """A method whose operations of torch are the interpreter's own: no dispatch mode sees them."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return method(*args)
        with _disable_current_modes():
            return method(*args)

    return run
