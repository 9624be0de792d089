"""The kernels that ``python -m opfuse_triton`` compiles and counts; never imported otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from opfuse_quantized.swizzle import swizzled_size
from opfuse_triton import KernelCase, Operand
from opfuse_triton.cases import group_ends
from torch import Tensor

from opfuse import ops
from opfuse.core.quantization import BOTH, ROWWISE, QuantizedTensor, Usage
from opfuse.ops.row_groups import counts_of

from . import delayed, formulas, library, twins
from .kernels import launch, launch_groups, launch_norms, scales
from .nvfp4 import SIGNS, NVFP4Quantizer, StochasticNVFP4Quantizer
from .quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer
from .twins import Into

Call = Callable[..., Any]

_E4M3, _E5M2, _BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
_E2M1 = torch.float4_e2m1fn_x2
_HIDDEN = {"rows": 8192, "features": 16384}
_MODEL = {"rows": 8192, "features": 4096}
_LLAMA = {"rows": 8192, "features": 14336}
_WIDE = {"rows": 8192, "features": 8192}
_EXPERTS = {"groups": 128, "rows": 65536, "features": 2048}
_SMALL = [{"rows": 160, "features": 256}, {"rows": 64, "features": 96}]

QUANTIZERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "delayed": lambda dtype, device: DelayedQuantizer(dtype, device=device),
    "current": lambda dtype, device: CurrentQuantizer(dtype),
    "1 x 128": lambda dtype, device: BlockQuantizer(dtype, (1, 128)),
    "128 x 128": lambda dtype, device: BlockQuantizer(dtype, (128, 128)),
    "MX": lambda dtype, device: MXQuantizer(dtype),
    "swizzled MX": lambda dtype, device: MXQuantizer(dtype, swizzles=True),
    "NVFP4": lambda dtype, device: NVFP4Quantizer(signs=SIGNS),
    "NVFP4 16 x 16": lambda dtype, device: NVFP4Quantizer(square=True),
    "NVFP4 swizzled": lambda dtype, device: NVFP4Quantizer(signs=SIGNS, swizzles=True),
    "NVFP4 drawn": lambda dtype, device: StochasticNVFP4Quantizer(signs=SIGNS, device=device),
}
"""The quantizers by the names that cases call them, for an FP8 dtype and a device."""


_FORMS = "delayed", "current", "1 x 128", "MX"
_FP4 = tuple([form for form in QUANTIZERS if form.startswith("NVFP4")])
_BY_AMAX = "current", *_FP4


def _into(form: str, dtype: torch.dtype, x: Any = None, usage: Usage = BOTH) -> Into:
    return Into(QUANTIZERS[form](dtype, None if x is None else x.device), usage)


def _results(form: str, dtype: torch.dtype, usage: Usage, rows: int, columns: int) -> Any:
    """The operands that a cast returns: codes are full, scales are vectors."""
    found = {}
    for name, used, outer, inner in (
        ("row", usage.rowwise, rows, columns),
        ("column", usage.columnwise, columns, rows),
    ):
        if not used:
            continue
        down, across = -(-outer // 128), -(-inner // 128)
        scales: Any = {
            "1 x 128": ((across, outer), torch.float32),
            "128 x 128": ((down, 4 * -(-across // 4)), torch.float32),
            "MX": ((outer, inner // 32), torch.float8_e8m0fnu),
            "swizzled MX": ((swizzled_size(outer, inner // 32),), torch.float8_e8m0fnu),
            **dict.fromkeys(_FP4, ((outer, inner // 16), _E4M3)),
            "NVFP4 swizzled": ((swizzled_size(outer, inner // 16),), _E4M3),
        }
        codes = ((outer, inner // 2), _E2M1) if form in _FP4 else ((outer, inner), dtype)
        found[f"{name} codes"] = Operand(*codes, output=True)
        if form in scales:
            found[f"{name} scales"] = Operand(*scales[form], "vector", True)
    if form in _FP4:
        ways = [way for way, used in zip(("row", "column"), usage, strict=True) if used]
        found |= {f"{way} inverse": Operand((1,), torch.float32, "vector", True) for way in ways}
    if form in ("delayed", "current"):
        found["inverse"] = Operand((1,), torch.float32, "vector", True)
    if form == "delayed":
        found["scale"] = Operand((1,), torch.float32, "vector", True)
    return found


def _outputs(made: QuantizedTensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a cast, in the order of :func:`_results`, and all others."""
    return tuple([tensor for tensor in (*made.tensors(), *others) if tensor is not None])


def _case(
    name: str,
    run: Call,
    separate: Call,
    tensors: Call,
    shapes: Any,
    again: Sequence[str],
    values: Call | None,
    exact: bool = False,
) -> KernelCase:
    """A case that has to move its full operands, and once more those in ``again``.

    ``values`` computes what is cast, if the kernel writes that too.
    """

    def floor(**shape: int) -> int:
        found = tensors(**shape)
        full = [operand for operand in found.values() if operand.role == "full"]
        return sum(operand.nbytes for operand in (*full, *(found[name] for name in again)))

    def twin(**given: Tensor) -> tuple[Tensor, ...]:
        return (*separate(**given), *([values(**given)] if values else []))

    more: Any = {"separate": separate, "twin": twin, "exact": exact, "turn": 40}
    more["dtypes"] = (torch.bfloat16, torch.float32)
    # blocks of MX and NVFP4, and halves, are whole; so are the 128 x 128 weights of models
    whole = any(word in name for word in ("MX", "NVFP4", "SwiGLU", "128 x 128"))
    width = 4224 if whole else 5001
    more["unaligned"] = [{"rows": 8192, "features": width}]
    return KernelCase(name, run, tensors, shapes, _SMALL, floor, **more)


def _forward(
    name: str, op: Any, form: str, *shapes: Any, inputs: str = "x", usage: Usage = BOTH
) -> KernelCase:
    formula: Any = formulas.formula_of(op)
    bias, values = "bias" in inputs, form == "current" and op is not None

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        width = features * (2 if formula.gated else 1)
        found = {"x": Operand((rows, width), _BF16)}
        if bias:
            found["bias"] = Operand((width,), _BF16, "vector")
        found |= _results(form, _E4M3, usage, rows, features)
        if bias:
            found["kept"] = Operand((rows, width), _BF16, output=True)
        if values:
            found["values"] = Operand((rows, features), _BF16, output=True)
        return found

    def run(x: Tensor, bias: Any = None) -> tuple[Tensor, ...]:
        shape = torch.Size((*x.shape[:-1], x.shape[-1] // (2 if formula.gated else 1)))
        kept = None if bias is None else torch.empty_like(x)
        if op is None:
            return _outputs(library.cast(x, _into(form, _E4M3, x, usage)))
        casting = launch.Casting(_into(form, _E4M3, x, usage), shape, x.dtype, x.device)
        launch.forward(formula, formula.functions.numbers(op.numbers_of()), x, bias, kept, casting)
        return _outputs(casting.made(), kept, casting.values if values else None)

    def separate(x: Tensor, bias: Any = None) -> tuple[Tensor, ...]:
        into = _into(form, _E4M3, x, usage)
        if op is None:
            return _outputs(twins.cast(x, into))
        return _outputs(*twins.activation(op, x, bias, x.dtype, bias is not None, into))

    def activated(x: Tensor, bias: Any = None) -> Tensor:
        return op.forward_value(x if bias is None else (x + bias).to(x.dtype))  # type: ignore[no-any-return]

    again = () if form not in _BY_AMAX else ("values",) if values else ("x",)
    what = activated if values else None
    return _case(f"{name}, {form}", run, separate, tensors, shapes, again, what, exact=op is None)


def _backward(name: str, op: Any, form: str, *shapes: Any, sums: bool = False) -> KernelCase:
    formula: Any = formulas.formula_of(op)
    values, numbers = form == "current" and op is not None, op.numbers_of() if op else ()

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        width = features * (2 if formula.gated else 1)
        found = {"dy": Operand((rows, features), _BF16)}
        if op is not None:
            found["x"] = Operand((rows, width), _BF16)
        found |= _results(form, _E5M2, BOTH, rows, width)
        if sums:
            found["dbias"] = Operand((width,), _BF16, "vector", True)
        if values:
            found["values"] = Operand((rows, width), _BF16, output=True)
        return found

    def run(dy: Tensor, x: Any = None) -> tuple[Tensor, ...]:
        into = _into(form, _E5M2, dy)
        if not values:
            return _outputs(*library.gradient(formula, op, numbers, dy, x, sums, into))
        casting = launch.Casting(into, x.shape, dy.dtype, dy.device)
        dbias = launch.backward(formula, formula.functions.numbers(numbers), dy, x, sums, casting)
        return _outputs(casting.made(), dbias, casting.values)

    def separate(dy: Tensor, x: Any = None) -> tuple[Tensor, ...]:
        return _outputs(*twins.gradient(op, numbers, dy, x, sums, _into(form, _E5M2, dy)))

    again: tuple[str, ...] = () if form != "current" else ("values",) if values else ("dy",)
    if form == "1 x 128" and formula.gated and not formula.size:  # a pass for each copy
        again = "dy", "x"

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        return op.with_numbers(numbers).backward_value(dy, x)  # type: ignore[no-any-return]

    what = gradient if values else None
    return _case(f"{name}, {form}", run, separate, tensors, shapes, again, what, exact=op is None)


def _norm(name: str, op: Any, form: str, *shapes: Any, usage: Usage = BOTH) -> KernelCase:
    layer, adds, values = isinstance(op, ops.LayerNorm), "add" in name, form == "current"

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        full, vector = Operand((rows, features), _BF16), Operand((features,), _BF16, "vector")
        found = {"x": full, **({"extra": full} if adds else {}), "weight": vector}
        found |= {"bias": vector} if layer else {}
        found |= _results(form, _E4M3, usage, rows, features)
        found |= {"sum": replace(full, output=True)} if adds else {}
        for statistic in ("mean", "rstd") if layer else ("rstd",):
            found[statistic] = Operand((rows, 1), torch.float32, "vector", True)
        return found | ({"values": replace(full, output=True)} if values else {})

    def run(x: Tensor, weight: Tensor, extra: Any = None, bias: Any = None) -> tuple[Tensor, ...]:
        tensors, into = (x, extra, weight, bias), _into(form, _E4M3, x, usage)
        made: Any = launch_norms.norm(op, tensors, None, adds, True, into)
        return _outputs(*made)

    def normalized(x: Tensor, weight: Tensor, extra: Any = None, bias: Any = None) -> Any:
        total = x if extra is None else x + extra
        wide = total.float()
        mean = wide.mean(-1, keepdim=True) if layer else None
        centered = wide if mean is None else wide - mean
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + op.eps)
        y = (centered * rstd * weight.float() + (0.0 if bias is None else bias.float())).to(x.dtype)
        return y, total if adds else None, mean, rstd

    def separate(**given: Tensor) -> tuple[Tensor, ...]:
        y, *others = normalized(**given)
        return _outputs(twins.cast(y, _into(form, _E4M3, given["x"], usage)), *others)

    again = ["values"] if values else []
    if form == "delayed" and usage.columnwise:
        again = ["row codes"]
    if launch_norms.takes_two_reads(_into(form, _E4M3, usage=usage)):
        again = ["sum" if adds else "x"]
    what = (lambda **given: normalized(**given)[0]) if values else None
    return _case(f"{name}, {form}", run, separate, tensors, shapes, again, what)


def _group_operands(
    form: str, usage: Usage, groups: int, rows: int, features: int
) -> dict[str, Operand]:
    """The operands of a cast of groups; a columnwise copy has one group behind the other."""
    vector = Operand((groups,), torch.float32, "vector")
    found = {"x": Operand((rows, features), _BF16)}
    found |= {"scales": vector} if form == "delayed" else {}
    found["ends"] = Operand((groups,), torch.int32, "vector")
    shapes = (rows, features), (rows * features,)
    for way, used, shape in zip(("row", "column"), usage, shapes, strict=True):
        if used:
            found[f"{way} codes"] = Operand(shape, _E4M3, output=True)
        if used and form == "MX":
            sizes = *shape[:-1], shape[-1] // 32
            found[f"{way} scales"] = Operand(sizes, torch.float8_e8m0fnu, "vector", True)
    found |= {} if form == "MX" else {"inverse": replace(vector, output=True)}
    return found | ({"amax": replace(vector, output=True)} if form == "delayed" else {})


def _of_groups(form: str, usage: Usage, *shapes: Any) -> KernelCase:
    """Groups of rows, each cast by itself; of as many rows that none is filled up."""
    in_blocks, is_delayed = form == "MX", form == "delayed"
    multiple = 32 if in_blocks else 16

    def draw(groups: int, rows: int, **_: int) -> dict[str, Tensor]:
        found = {"ends": group_ends(groups, rows, multiple)}
        return found | ({"scales": torch.rand(groups) + 1} if is_delayed else {})

    def run(x: Tensor, ends: Tensor, scales: Tensor | None = None) -> tuple[Tensor, ...]:
        first, made, amax = QUANTIZERS[form](_E4M3, x.device), None, []  # type: Any
        if in_blocks:
            made = launch_groups.cast_mx(x, ends, usage, first)
        else:
            made, *amax = launch_groups.cast(x, ends, usage, first, scales)
        found = []
        for name, tensor in zip(made.tensor_names, made.tensors(), strict=True):
            if tensor is not None and name.startswith("columnwise"):  # what follows is undefined
                tensor = tensor[: x.numel() // (32 if "scale" in name else 1)]
            found += [] if name == "ends" or tensor is None else [tensor]
        return (*found, *(amax if is_delayed else ()))

    def separate(x: Tensor, ends: Tensor, scales: Tensor | None = None) -> tuple[Tensor, ...]:
        """One after the other; on the meta device groups are alike."""
        alike = [len(x) // len(ends)] * len(ends)
        each = x.split(alike if ends.is_meta else counts_of(ends))
        quantizers = [QUANTIZERS[form](_E4M3, x.device) for _ in each]
        if scales is not None:
            for quantizer, scale in zip(quantizers, scales.split(1), strict=True):
                quantizer.scale = scale
        pairs = zip(quantizers, each, strict=True)
        parts: Any = [quantizer.reference(part, usage) for quantizer, part in pairs]
        found = []
        for name, first in zip(parts[0].tensor_names, parts[0].tensors(), strict=True):
            if first is None or name == "scale":
                continue
            of_groups = [getattr(part, name).view(torch.uint8) for part in parts]
            flat = name.startswith("columnwise")
            whole = torch.cat([t.flatten() if flat else t for t in of_groups])
            found.append(whole.view(first.dtype))
        if is_delayed:
            found.append(torch.cat([quantizer.amax for quantizer in quantizers]))
        return tuple(found)

    def floor(groups: int, rows: int, features: int) -> int:
        reads = 2 if form == "current" else 1
        return rows * features * (2 * reads + usage.rowwise + usage.columnwise)

    small = [{"groups": 3, "rows": 160, "features": 256}, {"groups": 2, "rows": 64, "features": 96}]
    ways = "" if usage.columnwise else "rowwise "
    more: Any = {"separate": separate, "draw": draw, "exact": True, "turn": 40}
    more["unaligned"] = [{"groups": 8, "rows": 8192, "features": 4224 if in_blocks else 5001}]
    name, tensors = f"{ways}cast of groups, {form}", partial(_group_operands, form, usage)
    return KernelCase(name, run, tensors, list(shapes), small, floor, **more)


def _advance() -> KernelCase:
    """The scales of a model of 32 layers, in place.

    A history moves by one number, 4 bytes: so it is no full-size operand, which moves 16 at a time.
    """

    def tensors(quantizers: int, steps: int) -> dict[str, Operand]:
        history = Operand((quantizers, steps), torch.float32, "vector")
        vector = Operand((quantizers,), torch.float32, "vector")
        counts = Operand((quantizers,), torch.int32, "vector")
        given = {"scales": vector, "amaxes": vector, "histories": history, "counts": counts}
        facts = {"facts": Operand((quantizers, 3), torch.float32, "vector")}
        return given | facts | {f"next {n}": replace(o, output=True) for n, o in given.items()}

    def draw(quantizers: int, steps: int) -> dict[str, Tensor]:
        facts = torch.tensor([448.0, 2.0, 0.0]).expand(quantizers, 3)
        amaxes, histories = torch.rand(quantizers), torch.rand(quantizers, steps)
        return {"amaxes": amaxes, "histories": histories, "facts": facts}

    def run(function: Call, **given: Tensor) -> tuple[Tensor, ...]:
        function(**given, rows=None, most_recent=False)
        return given["scales"], given["amaxes"], given["histories"], given["counts"]

    def floor(quantizers: int, steps: int) -> int:
        return 2 * quantizers * steps * 4

    real, small = [{"quantizers": 672, "steps": 1024}], [{"quantizers": 3, "steps": 1030}]
    twin, advance = partial(run, delayed.advance), partial(run, scales.advance)
    more: Any = {"separate": twin, "draw": draw, "turn": 40}
    return KernelCase("delayed scales", advance, tensors, real, small, floor, **more)


def _each(
    make: Any, name: str, op: Any, *shapes: Any, forms: Sequence[str] = _FORMS, **more: Any
) -> Sequence[KernelCase]:
    return [make(name, op, form, *shapes, **more) for form in forms]


_RMS, _LAYER = ops.RMSNorm(1, eps=1e-5), ops.LayerNorm(1, eps=1e-5)
_GELU, _SWIGLU = ops.GELU(), ops.SwiGLU()
_BY_32, _BY_1 = ops.SwiGLU(glu_interleave_size=32), ops.SwiGLU(glu_interleave_size=1)
_BUT_CURRENT = "delayed", "1 x 128", "MX"

CASES = [
    *_each(_forward, "cast", None, _MODEL, _HIDDEN),
    *_each(_forward, "cast", None, _MODEL, forms=("128 x 128", "swizzled MX")),
    *_each(_forward, "cast", None, _MODEL, forms=_FP4),
    *_each(_forward, "rowwise cast", None, _MODEL, usage=ROWWISE, forms=(*_BUT_CURRENT, "NVFP4")),
    *_each(_forward, "bias + GELU + cast", _GELU, _HIDDEN, inputs="x bias"),
    *_each(_forward, "SwiGLU + cast", _SWIGLU, _LLAMA),
    _forward("SwiGLU + cast", _SWIGLU, "swizzled MX", _LLAMA),
    _forward("SwiGLU by 32 + cast", _BY_32, "delayed", _LLAMA),
    *_each(_backward, "cast + bias", None, _MODEL, sums=True, forms=(*_FORMS, "swizzled MX")),
    *_each(_backward, "cast + bias + GELU", _GELU, _HIDDEN, sums=True),
    *_each(_backward, "cast + SwiGLU", _SWIGLU, _LLAMA),
    *_each(_backward, "cast + bias + SwiGLU", _SWIGLU, _LLAMA, sums=True, forms=("delayed", "MX")),
    _backward("cast + SwiGLU by 32", _BY_32, "1 x 128", _LLAMA),
    _backward("cast + SwiGLU by 1", _BY_1, "MX", _LLAMA),
    *_each(_norm, "RMSNorm + cast", _RMS, _MODEL, _WIDE),
    *_each(_norm, "rowwise RMSNorm + cast", _RMS, _MODEL, usage=ROWWISE, forms=_BUT_CURRENT),
    *_each(_norm, "add + RMSNorm + cast", _RMS, _MODEL),
    *_each(_norm, "LayerNorm + cast", _LAYER, _MODEL, forms=("delayed", "MX")),
    *[_of_groups(form, BOTH, _EXPERTS) for form in ("delayed", "current")],
    _of_groups("delayed", ROWWISE, _EXPERTS),
    _of_groups("MX", BOTH, _EXPERTS),
    _advance(),
]
"""Widths of 4096 and 16384, and of Llama 3 8B; bfloat16 in, E4M3 out, and E5M2 for gradients."""
