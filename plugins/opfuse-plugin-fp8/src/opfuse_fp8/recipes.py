"""Recipes: which tensors are cast to FP8, and with what scales, under Transformer Engine's names.

A recipe is a frozen value, part of a plan's key. Keywords that do not exist are errors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling

import opfuse
from opfuse import Quantizer, QuantizerRole, Recipe

from . import hardware
from .delayed import update_delayed
from .hardware import Hardware, Support, how
from .nvfp4 import (
    LESS_OF_SCALES,
    MAE,
    MOST_OF_SCALES,
    MSE,
    SIGNS,
    NVFP4Quantizer,
    StochasticNVFP4Quantizer,
    update_counting,
)
from .quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXQuantizer,
    RefusingQuantizer,
    named,
)

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "make",
    "support",
]

_TENSORS = "none", "weights", "activations", "all"
_SHARED = "shared_weight_scale"
WEIGHT = "linear", "weight"
"""Of the role of a weight: that of a linear, or one of several side by side."""
_FACTORIES: dict[str, Callable[[QuantizerRole], Quantizer]] = {}


class Format(str, Enum):
    """Which dtype a tensor gets.

    ``E4M3`` and ``E5M2``: every tensor gets that one. ``HYBRID``: gradients get E5M2, which has
    more range, and all others E4M3, which has more precision. ``E2M1``: FP4, which
    :class:`NVFP4BlockScaling` alone knows.
    """

    E2M1 = "E2M1"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    def dtype(self, role: QuantizerRole) -> torch.dtype:
        """The FP8 dtype of a tensor."""
        is_grad = role.tensor_type == "grad_output"
        e5m2 = self is Format.E5M2 or (self is Format.HYBRID and is_grad)
        return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class _FP8Recipe(opfuse.Recipe):
    """The base of the FP8 recipes.

    Attributes:
        fp8_dpa: Attention in FP8: only False, since opfuse has no attention op.
        fp8_mha: As ``fp8_dpa``.
        scales: How tensors are scaled: ``"tensor"``, ``"block"``, ``"mx"``, ``"nvfp4"``; or ``""``.
    """

    scales: ClassVar[str] = ""
    _choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # of a field that has only some values
    _formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.HYBRID)
    fp8_dpa: bool = dataclasses.field(default=False, kw_only=True)
    fp8_mha: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse invalid fields."""
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                self._refuse(field.name, "True or False", value)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                self._refuse(field.name, "an integer", value)
            if field.type == "Format":
                if not isinstance(value, Format):
                    formats = (Format.E2M1,) if field.name == "fp4_format" else self._formats
                    self._refuse(field.name, " or ".join(map(str, formats)), value)
                if (value is Format.E2M1) != (field.name == "fp4_format"):
                    fits = "Format.E2M1" if field.name == "fp4_format" else "an FP8 format"
                    raise ValueError(
                        f"{type(self).__name__}.{field.name}: expected {fits}, got {value!s}"
                    )
                if value is Format.E5M2:
                    raise ValueError(
                        f"{type(self).__name__}: E5M2 for every tensor has two bits of mantissa, "
                        f"too few to train with; expected Format.E4M3 or Format.HYBRID"
                    )
        for name, choices in self._choices.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{type(self).__name__}.{name}: expected {' or '.join(map(repr, choices))}, "
                    f"got {value!r}"
                )
        if self.fp8_dpa or self.fp8_mha:
            raise ValueError(
                f"{type(self).__name__}: fp8_dpa and fp8_mha are about attention, for which opfuse "
                f"has no op; expected False"
            )

    def to_json(self, name: str = "") -> str:
        """See :meth:`opfuse.Recipe.to_json`; as before the field, where it is False."""
        text = super().to_json(name)
        fields = {k: v for k, v in json.loads(text).items() if (k, v) != (_SHARED, False)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def support(cls, device: torch.device) -> tuple[str, str]:
        """How the recipe runs on a device, see :meth:`opfuse.Recipe.support`."""
        return how(cls, Hardware.of(device))

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """A new quantizer for a tensor of a role."""
        raise NotImplementedError

    def _swizzles(self, device: Any) -> bool:
        """Whether a product on the device reads swizzled scales; a stored weight has no device."""
        return device is not None and not hardware.why_no_gemm(self.scales, Hardware.of(device))

    def _refuse(self, name: str, expected: str, value: Any) -> None:
        raise TypeError(f"{type(self).__name__}.{name}: expected {expected}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class DelayedScaling(_FP8Recipe):
    """One scale per tensor, from the largest magnitudes (amax) of earlier steps.

    At the end of the outermost :class:`opfuse.autocast` block of a step, ``scale = (max / amax) /
    2^margin``, where ``max`` is the largest number of the dtype. It starts at 1, and stays where
    the amax is 0 or not finite. A value is stored as ``x * scale``, saturated.

    Attributes:
        margin: How many powers of two are left free above the amax: -126 to 127, so that
            ``2^margin`` is a number of float32.
        fp8_format: The dtypes.
        amax_history_len: Over how many steps the amax is taken.
        amax_compute_algo: ``"max"`` over these steps, or ``"most_recent"``.
        scaling_factor_compute_algo: Only None: a function is no value; write a
            :class:`CustomRecipe`.
        reduce_amax: Whether the amax is taken over the ``amax_reduction_group`` of the block.
        backward_override: Only None: the backward is quantized too.
        shared_weight_scale: Whether the weights of a :class:`opfuse.ops.ParallelLinear` have one
            scale, and one history, as those of a fused linear; see :class:`Float8CurrentScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    shared_weight_scale: bool = dataclasses.field(default=False, kw_only=True)
    scales = "tensor"
    _choices: ClassVar = {"amax_compute_algo": ("max", "most_recent")}

    def __post_init__(self) -> None:
        """Refuse invalid fields."""
        for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
            if callable(getattr(self, name)):
                raise TypeError(
                    f"DelayedScaling.{name}: a function cannot be part of a plan's key or of a "
                    f"checkpoint; write a quantizer of your own and a CustomRecipe"
                )
        super().__post_init__()
        if self.scaling_factor_compute_algo is not None:
            self._refuse("scaling_factor_compute_algo", "None", self.scaling_factor_compute_algo)
        if not -126 <= self.margin <= 127:
            raise ValueError(
                f"DelayedScaling.margin: expected -126 to 127, so that 2^margin is a number of "
                f"float32, got {self.margin}"
            )
        if self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling.amax_history_len: expected at least 1, got {self.amax_history_len}"
            )
        if self.backward_override is not None:
            raise ValueError(
                f"DelayedScaling: expected backward_override=None, got {self.backward_override!r}: "
                f"the scales of gradients follow from gradients that were cast"
            )

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """See :meth:`_FP8Recipe.new_quantizer`."""
        return DelayedQuantizer(
            self.fp8_format.dtype(role),
            is_grad=role.tensor_type == "grad_output",
            history=self.amax_history_len,
            margin=self.margin,
            most_recent=self.amax_compute_algo == "most_recent",
            device=device,
        )

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """Advance the scales by one step, see :meth:`opfuse.Recipe.update`."""
        update_delayed(quantizers, group if self.reduce_amax else None)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(_FP8Recipe):
    """One scale per tensor, from its own largest magnitude: ``scale = max / amax``.

    Where the amax is 0 or not finite the scale is 1.

    Attributes:
        use_power_2_scales: Whether scales are rounded down to powers of two.
        fp8_format: The dtypes.
        shared_weight_scale: Whether the weights of a :class:`opfuse.ops.ParallelLinear` have one
            scale, from the largest magnitude of all. It saves launches: their output and the
            gradient of their input are one product each. A value of E4M3 keeps its three bits of
            mantissa down to 2^-15 of the largest magnitude, so that as long as no weight is some
            thousand times smaller than another, errors are about as large as with a scale for each.
            Values below 2^-15 lose bits, and those below 2^-19 become 0. Quantized parameters keep
            their own scales.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    shared_weight_scale: bool = dataclasses.field(default=False, kw_only=True)
    scales = "tensor"

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """See :meth:`_FP8Recipe.new_quantizer`."""
        return CurrentQuantizer(self.fp8_format.dtype(role), self.use_power_2_scales)


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(_FP8Recipe):
    """A scale for each block: 1 x 128 of inputs and gradients, 128 x 128 of weights.

    Attributes:
        use_f32_scales: Whether scales may be any number; otherwise they are rounded down to powers
            of two.
        fp8_format: The dtypes.
        x_block_scaling_dim: 1 or 2: blocks of 1 x 128 or of 128 x 128 for inputs.
        w_block_scaling_dim: The same for weights.
        grad_block_scaling_dim: The same for gradients.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    scales = "block"
    _choices: ClassVar = {f"{name}_block_scaling_dim": (1, 2) for name in ("x", "w", "grad")}

    def __post_init__(self) -> None:
        """Refuse invalid fields."""
        super().__post_init__()
        if self.w_block_scaling_dim == 2 and 2 in (
            self.x_block_scaling_dim,
            self.grad_block_scaling_dim,
        ):
            raise ValueError(
                "Float8BlockScaling: expected at most one operand of a product with blocks of "
                "128 x 128, got w_block_scaling_dim=2 and another; no GEMM multiplies two of them"
            )

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        """Whether the blocks of inputs are of one row."""
        return self.x_block_scaling_dim == 1

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """See :meth:`_FP8Recipe.new_quantizer`."""
        dtype = self.fp8_format.dtype(role)
        return BlockQuantizer(dtype, self.block(role), power_of_2=not self.use_f32_scales)

    def block(self, role: QuantizerRole) -> tuple[int, int]:
        """The block of a tensor."""
        dims = {"weight": self.w_block_scaling_dim, "grad_output": self.grad_block_scaling_dim}
        return (128, 128) if dims.get(role.tensor_type, self.x_block_scaling_dim) == 2 else (1, 128)


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(_FP8Recipe):
    """OCP microscaling: a power of two for each 32 values along what a product sums over.

    Attributes:
        margin: Only 0, as in the OCP format.
        fp8_format: The dtypes.
        enable_2d_quantization: Whether a weight has one scale for 32 x 32 values, so that both of
            its copies have the same values.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    scales = "mx"
    batch_invariant = True
    _choices: ClassVar = {"margin": (0,)}

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """See :meth:`_FP8Recipe.new_quantizer`."""
        square = self.enable_2d_quantization and role.tensor_type == "weight"
        dtype = self.fp8_format.dtype(role)
        return MXQuantizer(dtype, square, who=named(role), swizzles=self._swizzles(device))


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(_FP8Recipe):
    """FP4 with two levels of scales: an E4M3 number for each 16 values, and one for the tensor.

    Three techniques make it good enough to train with. A weight has one scale for 16 x 16 values,
    so both of its copies have the same values. Gradients are rounded up or down at
    random, so that their mean is right. And what the gradient of a weight is computed from is
    mixed first: a Hadamard transform of each 16 rows spreads outliers.

    Attributes:
        disable_rht: Whether nothing is mixed.
        disable_stochastic_rounding: Whether gradients are rounded to the nearest, too.
        disable_2d_quantization: Whether weights have a scale for each 1 x 16 values, as others do.
        row_scaled_activation: Only False: the format has one scale for the whole tensor.
        nvfp4_4over6: Whose blocks may have their largest magnitude at 4 in place of 6, where that
            has the lower error: "none", "weights", "activations" or "all". Gradients never do, and
            inputs only with ``disable_rht=True``.
        nvfp4_4over6_e4m3_use_256: Of which of these tensors the largest scale of a block is 256 in
            place of 448: the same four.
        nvfp4_4over6_err_mode: The error: "MAE", its mean magnitude, or "MSE", its mean square.
        fp4_format: Only E2M1, the dtype of values.
        fp8_format: Only E4M3, the dtype of the scales of blocks.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    _formats = (Format.E4M3,)
    _choices: ClassVar = {
        "nvfp4_4over6": _TENSORS,
        "nvfp4_4over6_e4m3_use_256": _TENSORS,
        "nvfp4_4over6_err_mode": (MAE, MSE),
    }
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    scales = "nvfp4"

    def __post_init__(self) -> None:
        """Refuse invalid fields."""
        super().__post_init__()
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling.nvfp4_4over6: expected disable_rht=True with "
                f"{self.nvfp4_4over6!r}: a Hadamard transform is not combined with it"
            )
        only = {
            "row_scaled_activation": "the format has one scale for a tensor, none for a row",
            "fp8_format": "the scales of blocks are E4M3",
        }
        if self.nvfp4_4over6 == "none":
            why = "it changes nothing without nvfp4_4over6"
            only |= {f"nvfp4_4over6_{name}": why for name in ("e4m3_use_256", "err_mode")}
        for name, why in only.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default:
                raise ValueError(
                    f"NVFP4BlockScaling.{name}: expected {default!s}, got {value!s}: {why}"
                )

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """See :meth:`_FP8Recipe.new_quantizer`."""
        is_weight, is_grad = role.tensor_type == "weight", role.tensor_type == "grad_output"
        square = is_weight and not self.disable_2d_quantization
        signs = None if is_weight or self.disable_rht else SIGNS
        given: Any = {"square": square, "signs": signs, "what": named(role)}
        given["swizzles"] = self._swizzles(device)
        if is_grad and not self.disable_stochastic_rounding:
            return StochasticNVFP4Quantizer(**given, name=role.name, device=device)
        these = "all", "weights" if is_weight else "activations"
        if not is_grad and self.nvfp4_4over6 in these:
            less = self.nvfp4_4over6_e4m3_use_256 in these
            given["most_of_scales"] = LESS_OF_SCALES if less else MOST_OF_SCALES
            given["four_over_six"] = self.nvfp4_4over6_err_mode
        return NVFP4Quantizer(**given)

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """Count the steps of stochastic rounding, see :meth:`opfuse.Recipe.update`."""
        update_counting(quantizers, group)


@dataclasses.dataclass(frozen=True)
class CustomRecipe(opfuse.Recipe):
    """Quantizers that a function makes.

    Attributes:
        qfactory: ``qfactory(role)`` gives a new :class:`opfuse.Quantizer` for a tensor of a role.
        name: The recipe's name in checkpoints. In a process, one name means one function.
    """

    qfactory: Callable[[QuantizerRole], Quantizer]
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse invalid fields."""
        if not callable(self.qfactory):
            raise TypeError(f"CustomRecipe.qfactory: expected a function, got {self.qfactory!r}")
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(
                f"CustomRecipe expected name='...', by which checkpoints know it, got {self.name!r}"
            )
        if not is_compiling() and _FACTORIES.setdefault(self.name, self.qfactory) != self.qfactory:
            raise ValueError(
                f"CustomRecipe: the name {self.name!r} means another function already, "
                f"{_FACTORIES[self.name]!r}; give this one another name"
            )
        super().__post_init__()

    def to_json(self, name: str = "") -> str:
        """The recipe as JSON text: its name identifies its function."""
        fields = {"recipe": name or "CustomRecipe", "name": self.name}
        return json.dumps(fields | {"backward_override": self.backward_override}, sort_keys=True)

    def new_quantizer(self, role: QuantizerRole, device: Any) -> Quantizer:
        """The quantizer that the function returns; errors in it are the caller's to see."""
        try:
            made = self.qfactory(role)
        except Exception as error:
            return RefusingQuantizer(error)
        if isinstance(made, Quantizer):
            return made
        return RefusingQuantizer(
            TypeError(
                f"CustomRecipe {self.name!r}: qfactory expected to give a Quantizer for {role}, "
                f"got {made!r}; IdentityQuantizer() leaves a tensor as it is"
            )
        )

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """Advance the scales of the delayed quantizers among them, and count others' steps."""
        update_counting(quantizers, group)


BY_NAME: dict[str, type[opfuse.Recipe]] = {
    "fp8-delayed": DelayedScaling,
    "fp8-current": Float8CurrentScaling,
    "fp8-block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "fp8-custom": CustomRecipe,
}
"""What names the plugin offers."""


def make(
    recipe: Recipe, role: QuantizerRole, device: Any, siblings: Sequence[Quantizer] = ()
) -> Quantizer | None:
    """A quantizer for a tensor of a role; None: the recipe is another plugin's.

    It is a new one, or the first of its siblings, if the recipe wants one scale for weights.
    """
    if siblings and getattr(recipe, "shared_weight_scale", False) and role[:2] == WEIGHT:
        return siblings[0]
    if isinstance(recipe, (_FP8Recipe, CustomRecipe)):
        return recipe.new_quantizer(role, device)
    return None


def support(device: torch.device | str | Hardware = "cpu") -> dict[str, Support]:
    """How each recipe runs on a device, by the recipe's name.

    Args:
        device: A device, or what one would be.

    Returns:
        What the products of a linear with a multiple of 16 features do. Others, and tensors that a
        recipe leaves as they are, are emulated.
    """
    here = device if isinstance(device, Hardware) else Hardware.of(device)
    return {name: how(cls, here) for name, cls in BY_NAME.items()}
