"""The Triton kernel: the gradient of an activation's input and its output again, in one pass.

Only this file imports Triton. ``torch.compile`` sees one operation, ``opfuse_mlp::gradients``.
Eager calls launch the kernel themselves, which takes less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, DeviceFunctions, Kernel, Target, current_target
from torch import Tensor
from torch.compiler import is_compiling

_FUNCTIONS: dict[str, DeviceFunctions] = {}
"""The functions by the names that the operation for ``torch.compile`` takes."""


@triton.jit
def gradients_kernel(
    dy,
    z,
    dz,
    y,
    rows,
    features,
    numbers,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    LINEAR_VALUE: tl.constexpr,
    LINEAR_DERIVATIVE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of ``ROWS`` and ``COLUMNS`` of the output.

    ``y`` may be ``dy``, each of whose numbers is read before one is written in its place.
    ``INTERLEAVED`` is how many features of each half alternate, or 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (feature < features)
    at = row * features + feature
    gradient = tl.load(dy + at, inside, other=0.0).to(tl.float32)
    if LINEAR_VALUE is None:
        x = tl.load(z + at, inside, other=0.0).to(tl.float32)
        output = VALUE(x, *numbers)
        of_x = gradient * DERIVATIVE(x, *numbers)
        tl.store(dz + at, of_x.to(dz.dtype.element_ty), inside)
    else:
        if INTERLEAVED == 0:
            gate = 2 * row * features + feature
            linear = gate + features
        else:
            gate = 2 * row * features + feature + feature // INTERLEAVED * INTERLEAVED
            linear = gate + INTERLEAVED
        a = tl.load(z + gate, inside, other=0.0).to(tl.float32)
        b = tl.load(z + linear, inside, other=0.0).to(tl.float32)
        of_gate, of_linear = VALUE(a, *numbers), LINEAR_VALUE(b, *numbers)
        output = of_gate * of_linear
        da = gradient * of_linear * DERIVATIVE(a, *numbers)
        db = gradient * of_gate * LINEAR_DERIVATIVE(b, *numbers)
        tl.store(dz + gate, da.to(dz.dtype.element_ty), inside)
        tl.store(dz + linear, db.to(dz.dtype.element_ty), inside)
    if y is not None:
        tl.store(y + at, output.to(y.dtype.element_ty), inside)


MOST_COLUMNS = 1024
NUMBERS_PER_WARP = 512
"""Of a tile: 16 of each tensor per thread of 32, in two accesses of 16 bytes in half precision."""


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """The widest tile whose last column of tiles is mostly in use, and tiles around it."""
    features = facts["features"]
    columns = min(MOST_COLUMNS, triton.next_power_of_2(features))
    while columns > 128 and features % columns and features % columns <= columns // 2:
        columns //= 2
    warps = (4, 8, 2, 1)
    sizes = [(max(1, n * NUMBERS_PER_WARP // columns), n) for n in warps]
    made = [Config({"ROWS": rows, "COLUMNS": columns}, num_warps=n) for rows, n in sizes]
    return list(dict.fromkeys(made))


GRADIENTS = Kernel(gradients_kernel, _configs)


def launch(
    dy: Tensor,
    z: Tensor,
    y: Tensor | None,
    functions: DeviceFunctions,
    numbers: tuple[float, ...] = (),
    interleaved: int = 0,
    config: Config | None = None,
) -> Tensor:
    """Launch the kernel.

    Args:
        dy: Gradient of the activation's output, ``(rows, n)``, contiguous, as all here.
        z: Its input, ``(rows, n)``; of a gated one ``(rows, 2 n)``.
        y: Where its output is written, ``(rows, n)``: ``dy`` itself, another tensor, or None.
        functions: Its device functions.
        numbers: Its numbers, as the functions take them.
        interleaved: How many features of each half alternate; 0: the halves are contiguous.
        config: The configuration; None: the heuristic's.

    Returns:
        The gradient of ``z``.
    """
    dz, (rows, features) = torch.empty_like(z), dy.shape
    if not dy.numel():
        return dz

    def grid(config: Config) -> tuple[int, int]:
        return triton.cdiv(rows, config["ROWS"]), triton.cdiv(features, config["COLUMNS"])

    GRADIENTS.launch(
        grid,
        *(dy, z, dz, y, rows, features, numbers),
        config=config,
        VALUE=functions.value,
        DERIVATIVE=functions.derivative,
        LINEAR_VALUE=functions.linear_value,
        LINEAR_DERIVATIVE=functions.linear_derivative,
        INTERLEAVED=interleaved,
    )
    return dz


def candidates(device: torch.device, features: int) -> Sequence[Mapping[str, Any]]:
    """The configurations to measure for an output of so many features."""
    return GRADIENTS.candidates(current_target(device), {"features": features})


class Gradients:
    """:func:`opfuse_mlp.formulas.gradients` of one activation, by the kernel.

    Args:
        functions: Its device functions.
        interleaved: As for :func:`launch`.
        config: As for :func:`launch`.
    """

    def __init__(
        self, functions: DeviceFunctions, interleaved: int, config: Config | None = None
    ) -> None:
        of_gate = functions.value, functions.derivative
        parts = *of_gate, functions.linear_value, functions.linear_derivative
        name = " ".join([f"{p.__module__}.{p.__name__}" for p in parts if p is not None])
        while _FUNCTIONS.setdefault(name, functions) != functions:
            name += "'"  # others have the same names
        self._name = name
        self._functions, self._interleaved, self._config = functions, interleaved, config

    def __call__(
        self, dy: Tensor, z: Tensor, numbers: tuple[tuple[str, Any], ...], with_output: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the input, and the output again, which overwrites ``dy``.

        Args:
            dy: As for :func:`launch`.
            z: As for :func:`launch`.
            numbers: The activation's numbers as ``(name, value)``.
            with_output: Whether the output is needed.
        """
        given = self._functions.numbers(numbers)
        if is_compiling():
            what = self._name, given, self._interleaved, with_output
            made = torch.ops.opfuse_mlp.gradients(dy, z, *what)
            return made[0], made[1] if with_output else None
        y = dy if with_output else None
        return launch(dy, z, y, self._functions, given, self._interleaved, self._config), y


torch.library.define(
    "opfuse_mlp::gradients",
    "(Tensor dy, Tensor z, str functions, float[] numbers, int interleaved, bool with_output) "
    "-> Tensor[]",
)


@torch.library.impl("opfuse_mlp::gradients", ("cpu", "cuda"))
def _gradients(
    dy: Tensor, z: Tensor, functions: str, numbers: list[float], interleaved: int, with_output: bool
) -> list[Tensor]:
    y = torch.empty_like(dy) if with_output else None
    dz = launch(dy, z, y, _FUNCTIONS[functions], tuple(numbers), interleaved)
    return [dz] if y is None else [dz, y]


@torch.library.register_fake("opfuse_mlp::gradients")
def _fake_gradients(dy: Tensor, z: Tensor, *what: Any) -> list[Tensor]:
    *_, with_output = what
    return [torch.empty_like(z), *([torch.empty_like(dy)] if with_output else [])]
