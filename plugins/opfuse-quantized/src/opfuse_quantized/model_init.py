"""``quantized_model_init``: ops that are built in its block store their weights quantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuse.core.quantization import BOTH, ROWWISE, QuantizedParameter, Quantizer, Recipe
from opfuse.core.quantization.state import quantizer_names, roles
from opfuse.core.recipe_lookup import new_quantizer, offered, why_off
from opfuse.core.settings import current
from opfuse.recipes.autocast import DEFAULT_RECIPE

from .codes import settled
from .weight import QuantizedWeight


class _Request(NamedTuple):
    """The settings of a block; called with each new op.

    Attributes:
        recipe: The recipe.
        preserve: Whether to keep the original values on the CPU.
    """

    recipe: Recipe
    preserve: bool

    def __call__(self, op: Any) -> None:
        """Quantize the weights of a new op.

        These are the parameters with the name of one of its quantizers, or numbered if there is
        only one. On the meta device nothing is quantized.
        """
        if not op.num_quantizers("forward"):
            return
        for name, role in zip(quantizer_names(op, "forward"), roles(op, "forward"), strict=True):
            name = name if name in op._parameters else f"{name}0"
            param = op._parameters.get(name)
            if param is None or param.is_meta or isinstance(param, QuantizedParameter):
                continue
            role = role._replace(
                name=role.name or current.new_op_name
            )  # the outer op has no name yet
            made = self._quantized(param, new_quantizer(self.recipe, role, None))
            op.register_parameter(name, made)

    def _quantized(self, param: Tensor, quantizer: Quantizer) -> nn.Parameter:
        """Make a quantized Parameter.

        A scale computed from earlier maxima fits the values at once; the scale of the quantizer
        starts as usual, and follows at the next update.

        Args:
            param: The Parameter that it replaces.
            quantizer: The recipe's quantizer for this tensor.

        Raises:
            ValueError: The recipe cannot quantize its shape.
        """
        usage = BOTH if torch.is_grad_enabled() else ROWWISE
        with torch.no_grad():
            try:
                quantized = settled(quantizer, self.recipe, param.detach(), usage)
            except ValueError as error:
                raise ValueError(
                    f"quantized_model_init: {error}; while an op is built, autocast(skip=[...]) "
                    f"does not help: build it outside of the block, or in one with enabled=False"
                ) from error
            made = QuantizedWeight(quantized, self.recipe)
        new: Any = nn.Parameter(made, param.requires_grad)
        if self.preserve:
            new._init_val = param.detach().cpu().clone()
        return new  # type: ignore[no-any-return]


class quantized_model_init:
    """Store the weights of linears that are built in a ``with`` block quantized.

    Each such parameter is a :class:`opfuse_quantized.QuantizedWeight`: it is stored as a
    quantizer of the recipe casts it, in the copies that products read, and nowhere in high
    precision. Under ``autocast`` of the same recipe it is used without a cast; without a recipe it
    is dequantized in every call; under another recipe the call is refused. An optimizer step
    computes in the dtype that the weight was built with, and quantizes the result. A small update
    may be rounded away, so let the optimizer keep its own weights.

    A weight gets both copies with grad mode on, and only the one for the forward with it off. The
    role that a recipe sees has the name that the op's constructor got. Nothing is quantized on the
    meta device, nor are parameters that an op reads from another module.

    Args:
        enabled: False turns it off inside an enclosing block. A value other than a bool is taken as
            the recipe.
        recipe: The recipe, or its name, as for :class:`opfuse.autocast`. None: ``"fp8-delayed"``.
        preserve_high_precision_init_val: Keep the original values on the CPU. The parameters then
            have ``get_high_precision_init_val()``, for the weights of an optimizer, and
            ``clear_high_precision_init_val()``, which frees them.

    Raises:
        TypeError: The recipe is neither a :class:`Recipe` nor a name, or is given twice;
            ``preserve_...`` is not a bool.
        ValueError: A recipe that no installed plugin offers; a weight whose shape the recipe cannot
            quantize.
    """

    def __init__(
        self,
        enabled: bool | Recipe | str = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if not isinstance(enabled, bool):
            if recipe is not None:
                raise TypeError(f"quantized_model_init: got two recipes, {enabled!r}, {recipe!r}")
            recipe, enabled = enabled, True
        if not isinstance(preserve_high_precision_init_val, bool):
            raise TypeError(
                f"quantized_model_init: preserve_high_precision_init_val expected a bool, got "
                f"{preserve_high_precision_init_val!r}"
            )
        self._asked = None
        if enabled:
            found = offered(DEFAULT_RECIPE if recipe is None else recipe, type(self).__name__)
            self._asked = _Request(found, preserve_high_precision_init_val)
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        asked = self._asked
        if asked is not None and why_off(asked.recipe, current.selection):
            asked = None  # the plugin is off; the user was warned
        self._outside.append(current.model_init)
        current.model_init = asked

    def __exit__(self, *exc_info: object) -> None:
        current.model_init = self._outside.pop()
