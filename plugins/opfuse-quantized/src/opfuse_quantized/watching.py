"""Statistics of quantized tensors: largest magnitudes, underflow, saturation and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from opfuse.core.quantization import ROWWISE, QuantizedTensor, Quantizer, Usage
from opfuse.core.quantization.quantizer import Observer
from opfuse.core.settings import Setting, current
from opfuse.report.lines import table

from .formats import NVFP4Tensor
from .hadamard import mixed

_COLUMNS: tuple[str, ...] = (
    *("TENSOR", "FORMAT", "CASTS", "AMAX", "TO ZERO", "SATURATED", "NOT FINITE", "ERROR"),
)
_BEYOND = 1 + 1 / 32  # a quotient of scales may be off in its last bits


class WatchedQuantizer(Quantizer):
    """Casts like another quantizer, and records the effect in a report.

    Args:
        quantizer: The other quantizer.
        watch: The report.
        name: The name of the tensor in the report.
    """

    def __init__(self, quantizer: Quantizer, watch: watch_quantization, name: str) -> None:
        self._recording = quantizer._recording or quantizer
        self._inner, self._watch, self._name = quantizer, watch, name
        for fact in ("quantizes", "row_multiple", "state_names", "pending_names"):
            setattr(self, fact, getattr(quantizer, fact))

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Quantize by the other quantizer, and record the result."""
        made = self._inner.quantize(tensor, usage, out)
        with torch.no_grad():
            self._watch._add(self._name, self._inner, tensor.detach(), made)
        return made

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """Requantize by the other quantizer, and record the result."""
        return self._inner.requantize(tensor, scales, usage)

    @property
    def requantizes(self) -> bool:
        """The other quantizer can requantize."""
        return self._inner.requantizes

    def unrecorded(self) -> Quantizer:
        """A quantizer that does not advance the scales; the report still sees its casts."""
        return WatchedQuantizer(self._inner.unrecorded(), self._watch, self._name)

    def describe(self) -> str:
        """The description of the other quantizer."""
        return self._inner.describe()


@dataclasses.dataclass
class TensorRecord:
    """The effect of quantization on one tensor of one op, over all casts.

    Attributes:
        format: The format it was cast to, as described by its quantizer.
        casts: Number of casts; one that is used again counts once.
        values: Number of values in these casts.
        amax: The largest finite magnitude.
        underflow: Number of nonzero values that became 0.
        saturated: Number of finite values beyond the largest that their scale can represent.
        not_finite: Number of values that are infinite or NaN.
        error: The root of the mean squared error, divided by that of the mean squared value, over
            the finite values.
    """

    format: str
    casts: int = 0
    values: int = 0
    amax: float = 0.0
    underflow: int = 0
    saturated: int = 0
    not_finite: int = 0
    _squares: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        """The relative error; see the class."""
        lost, all_ = self._squares
        return (lost / all_) ** 0.5 if all_ else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able data."""
        data = dataclasses.asdict(self) | {"error": self.error}
        del data["_squares"]
        return data


class watch_quantization(Setting, Observer):
    """Record what quantization does to each tensor, for a ``with`` block in this thread.

    For a run that diverges or learns badly under a recipe. Put it around the
    :class:`opfuse.autocast` blocks, and the backward, of one step or a few::

        with opfuse.watch_quantization() as seen:
            with opfuse.autocast("fp8-delayed"):
                loss = model(x)
            loss.backward()
        print(seen)

    The results are the same bits as those of the separate ops without it: in the block each cast is
    a step of its own, which no fusion takes. It is slow, and waits for the device at each cast.
    Call :func:`opfuse.assign_names` before, so that tensors are called by the names of their ops.
    Code that ``torch.compile`` compiled is not seen, and tracing inside the block is an error.

    Attributes:
        tensors: A :class:`TensorRecord` by name: that of the op, or its class, and ``input``,
            ``weight`` or ``grad_output``.

    Raises:
        RuntimeError: Entered while ``torch.compile`` traces.
    """

    records = False
    _around: watch_quantization | None = None

    def __init__(self) -> None:
        super().__init__(observer=self)
        self.tensors: dict[str, TensorRecord] = {}

    def __enter__(self) -> watch_quantization:  # type: ignore[override]
        if is_compiling():
            raise RuntimeError("opfuse.watch_quantization cannot be traced by torch.compile")
        around = current.observer
        self._around = around if isinstance(around, watch_quantization) else None
        super().__enter__()
        return self

    def wrap(self, quantizer: Quantizer, op: Any, tensor: str) -> Quantizer:
        """The quantizer that replaces a quantizer of an op."""
        if self._around is not None:
            quantizer = self._around.wrap(quantizer, op, tensor)
        if current.environment is not None and current.environment.compiling:
            raise RuntimeError(
                "opfuse.watch_quantization sees nothing of code that torch.compile compiles: run "
                "the model in eager mode inside of the block"
            )
        return WatchedQuantizer(quantizer, self, f"{op.name or type(op).__name__} {tensor}")

    def _add(self, name: str, by: Quantizer, tensor: Tensor, made: QuantizedTensor) -> None:
        kind = by.describe()
        if name in self.tensors and self.tensors[name].format != kind:
            name += f", {kind}"  # another recipe
        record = self.tensors.setdefault(name, TensorRecord(kind))
        usage = ROWWISE if made.usage.rowwise else made.usage
        x, made = _as_cast(tensor.double(), made, usage)
        finite, y = x.isfinite(), made.dequantize(usage).double()
        magnitude = torch.where(finite, x.abs(), 0.0)
        record.casts += 1
        record.values += x.numel()
        record.not_finite += int((~finite).sum())
        if not x.numel():
            return
        largest = tensor[tensor.isfinite()].abs()
        record.amax = max(record.amax, float(largest.max()) if largest.numel() else 0.0)
        record.underflow += int(((magnitude > 0) & (y == 0)).sum())
        record.saturated += int((magnitude > _limit(made, usage) * _BEYOND).sum())
        lost = torch.where(finite & y.isfinite(), x - y, 0.0).square().sum()
        squares = float(lost), float(magnitude.square().sum())
        record._squares = (record._squares[0] + squares[0], record._squares[1] + squares[1])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The records by name, as JSON-able data."""
        return {name: record.to_dict() for name, record in self.tensors.items()}

    def __str__(self) -> str:
        if not self.tensors:
            return "Nothing was recorded: no op ran under a recipe that quantizes it."
        rows = [_COLUMNS]
        for name, record in self.tensors.items():
            numbers = record.underflow, record.saturated, record.not_finite
            shares = [_share(number, record.values) for number in numbers]
            first = name, record.format, str(record.casts), f"{record.amax:.3g}"
            rows.append((*first, *shares, f"{record.error:.2%}"))
        return "\n".join(table(rows, numbers_from=2))


def _as_cast(x: Tensor, made: QuantizedTensor, usage: Usage) -> tuple[Tensor, QuantizedTensor]:
    """The values as they were cast, and what they were cast to.

    The columnwise copy of NVFP4 may hold mixed values.
    """
    if usage.rowwise or not isinstance(made, NVFP4Tensor) or made.columnwise_signs is None:
        return x, made
    matrix = x.reshape(-1, x.shape[-1])
    turned = mixed(matrix.t().contiguous(), made.columnwise_signs).t().reshape(x.shape)
    return turned, dataclasses.replace(made, columnwise_signs=None)


def _limit(made: QuantizedTensor, usage: Usage) -> Tensor:
    """The largest magnitude that each element of a quantized tensor can represent."""
    largest = []
    for name, tensor in zip(made.tensor_names, made.tensors(), strict=True):
        if tensor is not None and name in made.data_names:
            tensor = _largest_codes(tensor)
        largest.append(tensor)
    return made.rebuild(largest).dequantize(usage).double().abs()


def _largest_codes(codes: Tensor) -> Tensor:
    if codes.dtype is torch.float4_e2m1fn_x2:  # two numbers in each byte
        return torch.full_like(codes.view(torch.uint8), 0x77).view(codes.dtype)
    kind = torch.finfo if codes.is_floating_point() else torch.iinfo
    most = torch.full(codes.shape, kind(codes.dtype).max, dtype=torch.float32, device=codes.device)
    return most.to(codes.dtype)


def _share(count: int, of: int) -> str:
    if not count:
        return "-"
    return f"{count / of:.2%}" if count / of >= 1e-4 else "<0.01%"
