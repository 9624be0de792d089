"""Recipes; quantizers, which cast tensors to lower precision; and observers, which wrap them."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .formats import BOTH, QuantizedTensor, ScaledTensor, Usage

_OVERRIDES = (None, "high_precision", "dequantized")


class QuantizerRole(NamedTuple):
    """The role of a quantized tensor, by which a recipe decides how to quantize it.

    Attributes:
        module_type: The kind of op, such as ``"linear"``.
        tensor_type: ``"input"``, ``"weight"``, ``"output"`` or ``"grad_output"``.
        name: The name of the op, or an empty string.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A quantization recipe: a frozen, hashable value that is part of a plan's key.

    Subclass it as a frozen dataclass; unknown keywords are errors, and everything derived is
    computed from the fields. Two equal recipes share their quantizers and their plans.

    Attributes:
        backward_override: None: the backward is quantized too. ``"high_precision"``: it uses the
            original input and weight. ``"dequantized"``: it uses the dequantized copies of the
            forward.
        batch_invariant: Whether the forward casts each row of an input by that row alone, as
            ``options(invariant="batch")`` needs it.
        reduce_amax: Whether :meth:`update` takes maxima over the process group that it gets.
    """

    batch_invariant: ClassVar[bool] = False
    reduce_amax = True  # without annotation: a field of a subclass keeps its place
    backward_override: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.backward_override not in _OVERRIDES:
            raise ValueError(
                f"backward_override must be one of {_OVERRIDES}, got {self.backward_override!r}"
            )
        if not is_compiling():
            self.to_json()
            try:
                hash(self)
            except TypeError as error:
                raise TypeError(
                    f"{type(self).__name__} expected fields that can be hashed, since a recipe is "
                    f"part of a plan's key: {error}; declare it with @dataclass(frozen=True), and "
                    f"give a tuple instead of a list"
                ) from None

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """Advance the state of quantizers by one step: fold in their records, and clear those.

        Called at the exit of the outermost :class:`opfuse.autocast` block of a forward, with the
        quantizers of the forward: never inside a backward, never after an exception, never with
        grad mode off. And at the end of a backward, with those of gradients. It folds the maxima
        that were recorded. A forward quantizer advances at every update, with 0 if nothing was
        recorded; a gradient's quantizer only if one arrived on any rank. Nothing is recorded for a
        weight whose cast is used again (``weights="cached"``): treat 0 as "unknown", and keep the
        scale, unless an earlier maximum requires otherwise.

        Also called for the quantizer of a quantized parameter, alone and without a group, whenever
        values are written there: the new scale must fit the values it recorded.

        Args:
            quantizers: Those of the ops that ran; in a prepared model
                (:func:`opfuse.assign_names`) those of all its ops, in its order.
            group: The process group over which to take the maxima, in one collective, which
                :func:`opfuse_distributed.ranks.start_collective` starts; or None.

        Raises:
            NotImplementedError: The quantizers have state, and the recipe does not override this.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has quantizers with pending state, and no update"
        )

    @classmethod
    def support(cls, device: torch.device) -> tuple[str, str]:
        """How the recipe runs on a device, for ``opfuse doctor``.

        Args:
            device: The device.

        Returns:
            ``"native"``, ``"emulated"`` (products of the dequantized values, in high precision) or
            ``"cannot run"``; and the reason, in a few words.
        """
        return "emulated", "it brings no products of its own"

    def to_json(self, name: str = "") -> str:
        """The recipe as JSON text, which identifies its quantizer state in a checkpoint.

        Args:
            name: The name under which the recipe is registered.

        Raises:
            TypeError: A field is not JSON-able; raised when the recipe is created.
        """
        fields = dataclasses.asdict(self)
        for field, value in fields.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{type(self).__name__}.{field} must be JSON-able, got {value!r}"
                ) from None
        return json.dumps(_plain({"recipe": name or type(self).__name__, **fields}), sort_keys=True)


def _plain(value: Any) -> Any:
    """A JSON-able value, in which equal numbers read the same: 1 and 1.0."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


ROWWISE, COLUMNWISE = Usage(True, False), Usage(False, True)


class Quantizer(ABC):
    """Casts a tensor into one of the formats of :mod:`opfuse.core.quantization.formats`.

    The result owns its scales: they alias no state of the quantizer, which may change before the
    backward reads them.

    Attributes:
        state_names: Names of the tensor attributes that persist over steps. They go into the op's
            ``state_dict`` and follow it to another device; update them in place.
        pending_names: The names among these that :meth:`quantize` writes, such as the largest
            magnitude (amax) seen since the last :meth:`Recipe.update`, which folds them into the
            others. They hold maxima, and -1 if nothing was recorded. State that is not pending
            changes in ``update`` only.
        quantizes: Whether values change; False for one that leaves them as they are, which reports
            do not count.
        row_multiple: The number of rows must be a multiple of it for a columnwise copy. An op over
            groups of rows pads each group with rows of zeros, which change nothing.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    pending_names: ClassVar[tuple[str, ...]] = ()
    quantizes: ClassVar[bool] = True
    row_multiple: ClassVar[int] = 1
    _recording: Quantizer | None = None
    _shared: Any = None  # where the state of several quantizers is together

    @abstractmethod
    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor``; may record statistics in the pending state.

        Args:
            tensor: The values, of any shape.
            usage: The copies that are needed.
            out: A quantized tensor to write into and return.

        Returns:
            A tensor with the shape and dtype of ``tensor``, at least these copies, and this
            quantizer as its ``quantizer``.
        """

    def quantize_groups(
        self, tensor: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Quantizer]
    ) -> Any:
        """Quantize groups of rows at once, each as its own quantizer does: to the same codes.

        Args:
            tensor: The values.
            ends: The row at which each group ends: int32, on the device of the values.
            usage: The copies that are needed; as both have the same values, it may give one.
            quantizers: The quantizer of each group; this is the first.

        Returns:
            A quantized tensor with a scale for each group, and ``ends`` itself, which a method
            ``cut`` divides (:mod:`opfuse.ops.row_groups`). None: it cannot, and has recorded
            nothing; then each group is cast by itself.
        """
        return None

    def quantize_parts(self, parts: Sequence[Tensor], usage: Usage) -> QuantizedTensor:
        """Quantize matrices as the rows of one: the weights of an op that all have this quantizer.

        Override it to do without their copy in one tensor.

        Args:
            parts: Matrices of one width and dtype.
            usage: The copies that are needed.
        """
        return self(torch.cat([part.detach() for part in parts]), usage)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """Quantize ``tensor`` again with the scales that it was quantized with; records nothing.

        Used for an input that the backward computes again instead of keeping it. A quantizer
        without state repeats its cast. One with state must override this; otherwise its inputs are
        kept.

        Args:
            tensor: The same values again.
            scales: The result of :meth:`quantize`, without its data.
            usage: The copies that are needed.
        """
        if self.state_names:
            raise NotImplementedError(f"{type(self).__name__} has state and no requantize")
        return self.quantize(tensor, usage)

    def why_whole(self, shape: torch.Size, usage: Usage) -> str:
        """Return why rows are quantized together with the others of their tensor; ``""``: apart.

        Rows that are quantized apart from the others, by :meth:`quantize_rows`, get the codes and
        scales that they have in the whole. So processes that each hold some can send these.

        Args:
            shape: The shape of the rows on each process.
            usage: The copies that are needed.
        """
        return f"{type(self).__name__} does not declare that rows can be quantized apart"

    def quantize_rows(
        self, tensor: Tensor, usage: Usage, largest: Callable[[Tensor], Tensor]
    ) -> QuantizedTensor:
        """Quantize the rows of this process as part of the whole, see :meth:`why_whole`.

        Args:
            tensor: The rows.
            usage: The copies that are needed.
            largest: Returns the elementwise maximum of a tensor over all processes, which all call
                it as often.

        Returns:
            The result for these rows. What it records is that of the whole.
        """
        raise NotImplementedError(f"{type(self).__name__} quantizes no rows apart")

    @property
    def casts_groups(self) -> bool:
        """Whether :meth:`quantize_groups` may give something."""
        return type(self).quantize_groups is not Quantizer.quantize_groups

    @property
    def requantizes(self) -> bool:
        """Whether :meth:`requantize` works."""
        return not self.state_names or type(self).requantize is not Quantizer.requantize

    def __call__(self, tensor: Tensor | QuantizedTensor, usage: Usage = BOTH) -> QuantizedTensor:
        """Quantize ``tensor``, unless this quantizer did so already, for at least this usage.

        Raises:
            TypeError: Another quantizer made it, or a copy is missing: a cast starts from the
                unquantized tensor. Or :meth:`quantize` returned what it must not.
        """
        made = tensor if isinstance(tensor, QuantizedTensor) else self.quantize(tensor, usage)
        if (
            isinstance(made, QuantizedTensor)
            and (made.quantizer is self or same_quantizer(made.quantizer, self))
            and (made.shape == tensor.shape and made.dtype == tensor.dtype)
        ):
            # what is stored can be read; to ask for the usage takes longer
            row = not usage.rowwise or getattr(made, "rowwise_data", None) is not None
            if row and (not usage.columnwise or getattr(made, "columnwise_data", None) is not None):
                return made
            if made.usage.covers(usage):
                return made
        if not isinstance(tensor, QuantizedTensor):
            self._refuse(made, tensor, usage)
        raise TypeError(
            f"{type(self).__name__} expected a plain tensor, or one that it quantized for {usage}, "
            f"got {tensor!r} of {type(tensor.quantizer).__name__} for {tensor.usage}: a cast "
            f"starts from the unquantized tensor"
        )

    def _refuse(self, made: Any, tensor: Tensor, usage: Usage) -> NoReturn:
        """Say why a result of :meth:`quantize` does not fit the tensor."""
        got = type(made).__name__
        if not isinstance(made, QuantizedTensor):
            wanted = f"one of the formats of opfuse.core.quantization.formats, got {got}"
        elif not same_quantizer(made.quantizer, self):
            other = type(made.quantizer).__name__
            wanted = f"a {got} whose quantizer is itself, got one of {other}"
        elif (made.shape, made.dtype) != (tensor.shape, tensor.dtype):
            wanted = (
                f"a {got} with the shape and dtype of its input, {tuple(tensor.shape)} and "
                f"{tensor.dtype}, got {tuple(made.shape)} and {made.dtype}"
            )
        else:
            wanted = f"the copies that it is asked for, {usage}, got {made.usage} in a {got}"
        raise TypeError(f"{type(self).__name__}.quantize must return {wanted}")

    def describe(self) -> str:
        """The format in a few words for reports, such as ``"E4M3, one scale"``."""
        return type(self).__name__

    # Records

    def discard(self) -> None:
        """Discard the records since the last update."""
        for name in self.pending_names:
            getattr(self, name).fill_(-1)

    def remark(self) -> str:
        """Return what was wrong with the values that it cast, as a sentence; ``""``: nothing.

        Reports show it, and a checkpoint that is saved warns of it: nothing in a step asks, so it
        may wait for the device.
        """
        return ""

    def unrecorded(self) -> Quantizer:
        """Return a quantizer that casts like this one, from the same state, without recording.

        For calls with grad mode off: an evaluation must not advance the scales.
        """
        if not self.pending_names:
            return self
        twin = _copied(self, self.pending_names, recording=self)
        for name in {*self.state_names} - {*self.pending_names}:
            del vars(twin)[name]  # always read from the original
        return twin

    def __getattr__(self, name: str) -> object:
        # only a twin comes here: it reads missing attributes from the original
        recording = vars(self).get("_recording")
        if recording is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(recording, name)


def unchanged(tensor: Tensor, usage: Usage, quantizer: Quantizer | None) -> ScaledTensor:
    """Wrap a tensor as a quantized one with unchanged values.

    Args:
        tensor: The values.
        usage: The copies that are needed.
        quantizer: The quantizer to name as its maker.
    """
    values = tensor.detach()
    matrix = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    one = torch.ones(1, dtype=torch.float32, device=values.device)
    columnwise = matrix.t().contiguous() if usage.columnwise else None
    rowwise = values.contiguous() if usage.rowwise else None
    return ScaledTensor(values.shape, values.dtype, quantizer, rowwise, columnwise, one)


def with_own_state(quantizer: Quantizer) -> Quantizer:
    """Return a copy of a quantizer whose state starts equal and is then independent."""
    names = quantizer.state_names
    return _copied(quantizer, names, recording=None) if names else quantizer


def _copied(
    quantizer: Quantizer, names: Iterable[str], *, recording: Quantizer | None
) -> Quantizer:
    """Return a copy of a quantizer that has its own tensors of these names."""
    made: Quantizer = object.__new__(type(quantizer))
    vars(made).update(vars(quantizer), _recording=recording)
    with torch.inference_mode(False):  # it serves other calls too
        for name in names:
            setattr(made, name, getattr(quantizer, name).clone())
    return made


def same_quantizer(one: Quantizer | None, other: Quantizer | None) -> bool:
    """Return whether two quantizers are the same, recording or not."""
    if one is None or other is None:
        return False
    return one is other or original(one) is original(other)


def original(quantizer: Quantizer) -> Quantizer:
    """The quantizer that records, which one may be a copy of that does not; or itself."""
    return quantizer._recording or quantizer


def dequantize(tensor: Tensor | QuantizedTensor, usage: Usage = ROWWISE) -> Tensor:
    """A plain tensor from a plain or quantized one."""
    return tensor.dequantize(usage) if isinstance(tensor, QuantizedTensor) else tensor


def nothing_recorded(device: torch.device | str | None = None) -> Tensor:
    """A pending maximum: one number in fp32, -1, as after :meth:`Quantizer.discard`."""
    return torch.full((1,), -1.0, dtype=torch.float32, device=device)


class Observer:
    """Observes each tensor that a recipe quantizes, with quantizers that wrap the recipe's.

    This one is for ``autocast(calibrating=True)``: nothing is quantized, but the recipe's
    quantizers record what they would see.

    Attributes:
        records: Whether quantizers record with grad mode off, too.
    """

    records = True

    def wrap(self, quantizer: Quantizer, op: Any, tensor: str) -> Quantizer:
        """The quantizer that replaces a quantizer of an op."""
        return CalibratingQuantizer(quantizer)


CALIBRATING = Observer()


class CalibratingQuantizer(Quantizer):
    """Lets another quantizer record each tensor, and casts nothing.

    Args:
        quantizer: The other quantizer.
    """

    quantizes = False

    def __init__(self, quantizer: Quantizer) -> None:
        self._recording = self._inner = quantizer
        self.pending_names = quantizer.pending_names  # type: ignore[misc]

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Record the tensor, and return it unchanged."""
        if self.pending_names:
            self._inner.quantize(tensor, ROWWISE)
        return unchanged(tensor, usage, self)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """Return the tensor unchanged."""
        return unchanged(tensor, usage, self)

    def unrecorded(self) -> Quantizer:
        """Itself: calibration records with grad mode off too."""
        return self

    def describe(self) -> str:
        """That it is not quantized, and the format it would have."""
        return f"not quantized; calibrates {self._inner.describe()}"
