"""The groups of a call whose products are the kernels'; imported where these can run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opfuse_quantized.formats import MXTensor
from opfuse_quantized.grouped import GroupedMXTensor
from opfuse_triton import Config
from opfuse_triton.calls import DTYPES, PLAIN
from torch import Tensor

from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops.grouped import Groups, Sums, ends_of, groups_of

from . import by_torch
from .conditions import CODES
from .kernels import library

MOST_FEATURES = 1 << 23
"""Places in a tile have 32 bits."""

MOST_ROWS = (1 << 31) - (1 << 10)
"""So have rows, those of the last tile among them."""


class DeviceGroups(Groups):
    """Groups whose sizes the device reads, with the products of :mod:`.kernels.library`."""

    config: Config | None = None
    by_torch = False  # where that takes the codes

    def products(self, x: Tensor, weights: Any, biases: Sequence[Tensor]) -> Tensor:
        """See :meth:`opfuse.ops.grouped.Groups.products`."""
        matrices = library.matrices_of(weights)
        y = library.product(_rows(x), matrices, self._ends, biases, config=self.config)
        return y.view(*x.shape[:-1], y.shape[1])

    def coded_products(
        self, x: Any, weights: Sequence[Any], biases: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """See :meth:`opfuse.ops.grouped.Groups.coded_products`."""
        return self._product(x, weights, "rowwise", dtype, biases)

    def coded_input_grads(
        self, dy: Any, weights: Sequence[Any], dtype: torch.dtype
    ) -> Tensor | None:
        """See :meth:`opfuse.ops.grouped.Groups.coded_input_grads`."""
        return self._product(dy, weights, "columnwise", dtype, (), exact=True)

    def coded_weight_grads(self, dy: Any, x: Any, dtype: torch.dtype) -> Tensor | None:
        """See :meth:`opfuse.ops.grouped.Groups.coded_weight_grads`."""
        given = self._columnwise(dy, x)
        if given is None or dtype not in DTYPES:
            return None
        return library.coded_weight_grads(*given, dtype)

    def add_coded_weight_grads(self, dy: Any, x: Any, sums: Sums, beta: float) -> bool:
        """See :meth:`opfuse.ops.grouped.Groups.add_coded_weight_grads`."""
        given, into = self._columnwise(dy, x), self._sums(sums, beta)
        if given is None or into is None:
            return False
        library.add_coded_weight_grads(*given, into, adds=beta == 1)
        return True

    def _columnwise(self, dy: Any, x: Any) -> tuple[Any, ...] | None:
        """The columnwise codes with their scales, the ends, and the sizes of a product of codes.

        None: the kernels do not take them.
        """
        codes = [each.columnwise_data for each in (dy, x)]
        if self.ends is None or type(dy) is not type(x) or not _are_codes(codes):
            return None
        of_blocks = isinstance(x, GroupedMXTensor)
        scales = [each.columnwise_scale_inv if of_blocks else each.scale_inv for each in (dy, x)]
        operands = [library.Scaled(*pair) for pair in zip(codes, scales, strict=True)]
        return (*operands, self.ends, (dy.shape[:-1].numel(), dy.shape[-1], x.shape[-1]))

    def _sums(self, sums: Sums, beta: float) -> library.Matrices | None:
        """Where the kernels add to sums; None: they do not."""
        known = [sums] if isinstance(sums, Tensor) else [each for each in sums if each is not None]
        device = self._ends.device
        if beta not in (0, 1) or any(type(t) not in PLAIN or t.device != device for t in known):
            return None
        return library.sums_of(sums)

    def _product(
        self,
        x: Any,
        weights: Sequence[Any],
        copy: str,
        dtype: torch.dtype,
        biases: Sequence[Tensor],
        exact: bool = False,
    ) -> Tensor | None:
        """The product of rows with a copy of each weight; None: the kernels do not take them."""
        format_ = MXTensor if isinstance(x, GroupedMXTensor) else ScaledTensor
        known = all(isinstance(weight, format_) for weight in weights)
        codes = [getattr(weight, f"{copy}_data") for weight in weights] if known else []
        takes = bool(codes) and _are_codes([x.rowwise_data, *codes])
        if self.ends is None or dtype not in DTYPES or not takes:
            return None
        rows = _rows(x.rowwise_data)
        if format_ is MXTensor:
            if any(weight.swizzled for weight in weights):
                return None
            scales = [getattr(weight, f"{copy}_scale_inv") for weight in weights]
            matrices = library.Scaled(library.stacked(codes), library.stacked(scales))
            left = library.Scaled(rows, x.rowwise_scale_inv)
            return library.scaled_product(left, matrices, self.ends, dtype, biases)
        inverse = library.stacked([weight.scale_inv.reshape(1) for weight in weights]).reshape(-1)
        if self.by_torch and not biases and by_torch.takes(rows, codes, dtype):
            given = (rows, x.scale_inv), library.stacked(codes), inverse, self.ends
            return by_torch.coded_product(*given, exact=exact)
        given = inverse, self.ends, dtype, biases, self.config
        matrices_ = library.matrices_of(codes)
        return library.coded_product((rows, x.scale_inv), matrices_, *given, exact=exact)

    def input_grads(self, dy: Tensor, weights: Any) -> Tensor:
        """See :meth:`opfuse.ops.grouped.Groups.input_grads`."""
        matrices = library.matrices_of(weights).transposed()
        dx = library.product(_rows(dy), matrices, self._ends, config=self.config)
        return dx.view(*dy.shape[:-1], dx.shape[1])

    def weight_grads(self, dy: Tensor, x: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """See :meth:`opfuse.ops.grouped.Groups.weight_grads`."""
        whole = self.stacked_grads(dy, x, len(wanted))
        return [whole[i] if wants else None for i, wants in enumerate(wanted)]

    def stacked_grads(self, dy: Tensor, x: Tensor, count: int) -> Tensor:
        """See :meth:`opfuse.ops.grouped.Groups.stacked_grads`."""
        return library.weight_grads(_rows(dy), _rows(x), self._ends)

    def add_weight_grads(self, dy: Tensor, x: Tensor, sums: Sums, beta: float) -> bool:
        """See :meth:`opfuse.ops.grouped.Groups.add_weight_grads`; for sums in fp32."""
        into = self._sums(sums, beta)
        if into is not None:
            library.add_weight_grads(_rows(dy), _rows(x), self._ends, into, adds=beta == 1)
        return into is not None

    def row_sums(
        self, grad_output: Tensor, wanted: Sequence[bool], scales: Tensor | None = None
    ) -> list[Tensor | None]:
        """See :meth:`opfuse.ops.grouped.Groups.row_sums`."""
        scales = None if scales is None else scales.reshape(-1)
        whole = library.row_sums(_rows(grad_output), self._ends, scales)
        return [whole[i] if wants else None for i, wants in enumerate(wanted)]

    @property
    def _ends(self) -> Tensor:
        assert self.ends is not None
        return self.ends


class Activated(DeviceGroups):
    """Groups whose product ends with a scaled activation.

    Attributes:
        activation: The activation.
        keep: Whether its input is needed.
        result: Its output, once the product was computed.
    """

    activation: library.Activation
    keep = True
    result: Tensor | None = None

    def products(self, x: Tensor, weights: Any, biases: Sequence[Tensor]) -> Tensor:
        """The input of the activation, or if that is not needed, an empty tensor in its place."""
        given = library.matrices_of(weights), self._ends, self.activation, biases, self.keep
        y, hidden = library.activated(_rows(x), *given, config=self.config)
        self.result = y.view(*x.shape[:-1], y.shape[1])
        hidden = y.new_empty(0) if hidden is None else hidden
        return hidden.view(*x.shape[:-1], hidden.shape[1]) if hidden.ndim == 2 else hidden


class Gradients(DeviceGroups):
    """Groups whose gradient of the input goes on to that of the scaled activation before them.

    Attributes:
        activation: The activation.
        hidden: Its input.
        with_scales: Whether the gradient of its scales is needed.
        of_scales: That gradient.
    """

    activation: library.Activation
    hidden: Tensor
    with_scales = True
    done = False
    of_scales: Tensor | None = None

    def input_grads(self, dy: Tensor, weights: Any) -> Tensor:
        """The gradient of the activation's input."""
        given = library.matrices_of(weights), self._ends, self.activation
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1]).contiguous()
        of_hidden, of_scales = library.gradients(
            _rows(dy), *given, hidden, self.with_scales, config=self.config
        )
        self.done = True
        if of_scales is not None:
            self.of_scales = of_scales.view(self.hidden.shape[:-1])
        return of_hidden.view(self.hidden.shape)


class Maker:
    """Makes the groups of one call: the kernels' where they take the tensors, else the op's.

    Args:
        cls: The class of the groups.
        tensors: The other tensors that the kernels read.
        coded: Whether rows and matrices are quantized, and codes are multiplied.
        **given: Attributes of the groups.

    Attributes:
        made: The groups of the kernels, if there are some.
    """

    def __init__(
        self, cls: type[DeviceGroups], tensors: Sequence[Tensor], coded: bool = False, **given: Any
    ) -> None:
        self._cls, self._tensors, self._coded, self._given = cls, tensors, coded, given
        self.made: Any = None

    def __call__(
        self, x: Tensor, sizes: Tensor, features: Sequence[int], looped: bool = False
    ) -> Groups:
        """See :func:`opfuse.ops.grouped.groups_of`."""
        looped = torch.is_grad_enabled() if self._coded else looped
        if looped or not _takes(x, sizes, features, self._tensors):
            return groups_of(x, sizes, features, looped or self._coded)
        inner = math.prod(x.shape[1:-1])
        if sizes.is_cpu:  # where the kernels are interpreted
            sizes = groups_of(x, sizes, features, True).sizes
        self.made = self._cls(sizes, None, ends_of(sizes, x.shape[0], inner))
        vars(self.made).update(self._given)
        return self.made  # type: ignore[no-any-return]


def _takes(x: Tensor, sizes: Tensor, features: Sequence[int], tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels take a call."""
    return (
        all(type(t) in PLAIN and t.device == x.device for t in (x, sizes, *tensors))
        and all(t.dtype in DTYPES for t in tensors)
        and x.dtype in DTYPES
        and x.numel() > 0
        and math.prod(x.shape[:-1]) <= MOST_ROWS
        and all(0 < size < MOST_FEATURES for size in features)
    )


def _are_codes(tensors: Sequence[Any]) -> bool:
    """Whether these are plain tensors in FP8."""
    return all(type(tensor) is Tensor and tensor.dtype in CODES for tensor in tensors)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def configured(given: Mapping[str, Any] | None) -> Config | None:
    """A configuration of the kernels that was measured."""
    return None if given in (None, by_torch.CONFIGURATION) else Config(**given)
