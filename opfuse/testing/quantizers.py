"""The suite that tests the quantizers of a recipe against the contract."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ..core.quantization import (
    BOTH,
    COLUMNWISE,
    ROWWISE,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from ..core.recipe_lookup import new_quantizer
from ..core.sequential import Sequential
from ..ops import Linear
from ..recipes.autocast import autocast
from .suite import Suite
from .tensors import same_bits

USAGES = {"rowwise": ROWWISE, "columnwise": COLUMNWISE, "both": BOTH}
ROLES = ("input", "weight", "grad_output")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizerSuite(Suite):
    """Tests every quantizer of some recipes against the contract.

    Subclass it in the plugin's tests, under a name that pytest collects::

        from opfuse.testing import QuantizerSuite

        class TestQuantizers(QuantizerSuite):
            recipes = (MyRecipe(), MyRecipe(bits=4))

    Attributes:
        recipes: The recipes.
        rtol: How far a value may be from what its code represents, relative to the value.
        atol: The same, relative to the largest magnitude of the tensor.
        multiple: Rows and columns of the tensors are multiples of this.
        limits: What the format cannot do, and why: test -> reason. A test that passes is a failure.
    """

    recipes: ClassVar[Sequence[Recipe]] = ()
    rtol: ClassVar[float] = 2**-4
    atol: ClassVar[float] = 2**-6
    multiple: ClassVar[int] = 32
    limits: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _limited(self, request: pytest.FixtureRequest) -> None:
        reason = self.limits.get(getattr(request.node, "originalname", ""))
        if reason:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per recipe, and per role, usage and dtype where it takes one."""
        lists: dict[str, Sequence[Any]] = {"recipe": self.recipes, "role": ROLES, "dtype": DTYPES}
        for name, values in (lists | {"way": [*USAGES]}).items():
            if name in metafunc.fixturenames:
                # a recipe may hold a function, whose text has an address
                numbered = [f"{type(value).__name__}{i}" for i, value in enumerate(values)]
                metafunc.parametrize(name, values, ids=numbered if name == "recipe" else str)

    def make(self, recipe: Recipe, role: str) -> Quantizer:
        """A new quantizer, as the plugin makes it."""
        return new_quantizer(recipe, QuantizerRole("linear", role), None)

    def draw(self, rows: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """A matrix with a number of rows and columns times ``multiple``, the same every time."""
        shape = rows * self.multiple, 2 * self.multiple
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    def settled(self, recipe: Recipe, role: str, tensor: Tensor) -> Quantizer:
        """A quantizer whose state has seen a tensor, as after some steps."""
        quantizer = self.make(recipe, role)
        for _ in range(2 if quantizer.pending_names else 0):
            quantizer.quantize(tensor, BOTH)
            recipe.update([quantizer], None)
        return quantizer

    # What it makes

    def test_recipes(self) -> None:
        """There is one to test."""
        assert self.recipes, f"{type(self).__name__}.recipes is empty"

    def test_copies(self, recipe: Recipe, role: str, way: str, dtype: torch.dtype) -> None:
        """The copies that are asked for, no others; logical shape and dtype; ``x`` as it was."""
        x = self.draw(dtype=dtype)
        before = x.clone()
        made = self.make(recipe, role).quantize(x, USAGES[way])
        assert isinstance(made, QuantizedTensor), f"got {type(made).__name__}"
        assert (made.shape, made.dtype) == (x.shape, dtype), f"got {made!r}"
        assert made.copies == USAGES[way], f"asked for {way}, got {made!r}"
        assert not any(t is not None and t.requires_grad for t in made.tensors())
        assert torch.equal(x, before), "quantize changes the tensor that it is given"

    def test_round_trip(self, recipe: Recipe, role: str, way: str, dtype: torch.dtype) -> None:
        """Each copy represents the values, up to ``rtol`` and ``atol``."""
        x = self.draw(4, dtype)
        made = self.settled(recipe, role, x).quantize(x, USAGES[way])
        for usage in (ROWWISE, COLUMNWISE):
            if made.copies.covers(usage):
                got, wide = made.dequantize(usage).double(), x.double()
                allowed = self.rtol * wide.abs() + self.atol * wide.abs().max()
                worst = ((got - wide).abs() / allowed).max().item()
                assert worst <= 1, f"{usage}: {worst:.3g} times as far as rtol and atol allow"

    def test_shapes(self, recipe: Recipe, role: str) -> None:
        """One to four dimensions, not contiguous: the codes are those of the matrix."""
        x = self.draw(4)
        columns = x.shape[-1]
        quantizer = self.settled(recipe, role, x)
        expected = quantizer.quantize(x, BOTH).dequantize()
        for same in (x.reshape(2, -1, columns), x.reshape(1, 2, -1, columns), x.t().clone().t()):
            made = quantizer.quantize(same, BOTH)
            assert made.shape == same.shape
            got = made.dequantize()
            assert torch.equal(got.reshape(-1, columns), expected), tuple(same.shape)
        assert quantizer.quantize(x[:0], BOTH).dequantize().shape == (0, columns)

    def test_zeros(self, recipe: Recipe, role: str, way: str) -> None:
        """Zeros stay zeros and do not become NaN, even if only zeros were seen."""
        x = torch.zeros_like(self.draw())
        for quantizer in (self.make(recipe, role), self.settled(recipe, role, x)):
            made = quantizer.quantize(x, USAGES[way])
            usages = [usage for usage in (ROWWISE, COLUMNWISE) if made.copies.covers(usage)]
            assert all(torch.equal(made.dequantize(usage), x) for usage in usages)

    def test_not_finite(self, recipe: Recipe, role: str) -> None:
        """NaN and infinity stay not finite, and everything else stays finite, in later steps too.

        If they became numbers, a GradScaler would not see an overflow.
        """
        for value in (torch.nan, torch.inf, -torch.inf):
            x = self.draw()
            quantizer = self.settled(recipe, role, x)
            x[0, 0] = value
            got = quantizer.quantize(x, BOTH).dequantize()
            assert not got[0, 0].isfinite(), f"{value} becomes {got[0, 0]}"
            if quantizer.pending_names:
                recipe.update([quantizer], None)
            assert quantizer.quantize(self.draw(), BOTH).dequantize().isfinite().all()

    def test_extremes(self, recipe: Recipe, role: str, dtype: torch.dtype) -> None:
        """Numbers near both ends of the dtype stay finite; the largest itself may round up."""
        x = self.draw(dtype=dtype)
        info = torch.finfo(dtype)
        for values in (x.sign() * info.max / 2, x.sign() * info.tiny, x.sign() * info.tiny / 8):
            for quantizer in (self.make(recipe, role), self.settled(recipe, role, values)):
                assert quantizer.quantize(values, BOTH).dequantize().isfinite().all()

    def test_out(self, recipe: Recipe, role: str, way: str) -> None:
        """``out`` gets the same values, and is returned."""
        x, usage = self.draw(), USAGES[way]
        quantizer = self.settled(recipe, role, x)
        expected, out = quantizer.quantize(x, usage), quantizer.quantize(-2 * x, usage)
        kept = out.tensors()
        assert quantizer.quantize(x, usage, out) is out
        assert _equal(out, expected), "out= gives another result"
        assert all(a is b for a, b in zip(kept, out.tensors(), strict=True)), "out= is not written"

    # State

    def test_owns_its_scales(self, recipe: Recipe, role: str) -> None:
        """Tensors that it made keep their values when its state changes."""
        x = self.draw()
        quantizer = self.settled(recipe, role, x)
        made = quantizer.quantize(x, BOTH)
        before = made.dequantize()
        for name in quantizer.state_names:
            getattr(quantizer, name).fill_(7)
        assert torch.equal(made.dequantize(), before), "a scale is the quantizer's state"

    def test_again(self, recipe: Recipe, role: str, way: str) -> None:
        """A repeated cast has the same bits, and records nothing."""
        x, usage = self.draw(), USAGES[way]
        quantizer = self.settled(recipe, role, x)
        made = quantizer.quantize(x, usage)
        if not quantizer.requantizes:
            pytest.skip("its inputs are kept, since it has state and no requantize")
        if quantizer.pending_names:
            recipe.update([quantizer], None)
            quantizer.quantize(3 * x, BOTH)
            recipe.update([quantizer], None)
        before = _state(quantizer)
        assert _equal(quantizer.requantize(x, made.without_data(), usage), made)
        assert _same(_state(quantizer), before), "requantize changes the state"

    def test_what_evaluation_sees_is_not_recorded(self, recipe: Recipe, role: str) -> None:
        """``unrecorded()`` casts alike, and leaves the state; ``discard()`` forgets."""
        x = self.draw()
        quantizer = self.settled(recipe, role, x)
        before = _state(quantizer)
        made = quantizer.unrecorded().quantize(100 * x, BOTH)
        assert _same(_state(quantizer), before), "a call with grad mode off changes the state"
        assert _equal(made, quantizer.quantize(100 * x, BOTH))
        quantizer.discard()
        assert _same(_state(quantizer), before), "discard leaves a record"

    def test_a_step_is_one_update(self, recipe: Recipe, role: str) -> None:
        """Two casts of a step are one, with the larger maximum; then the pending state is empty."""
        x = self.draw()
        one, two = (self.settled(recipe, role, x) for _ in range(2))
        if not one.pending_names:
            pytest.skip("it has no state that advances")
        one.quantize(4 * x, BOTH)
        for values in (x, 4 * x, 2 * x):
            two.quantize(values, BOTH)
        for quantizer in (one, two):
            recipe.update([quantizer], None)
            assert all((getattr(quantizer, n) == -1).all() for n in quantizer.pending_names)
        assert _same(_state(one), _state(two))

    def test_copies_of_it_are_apart(self, recipe: Recipe, role: str) -> None:
        """A deepcopy has its own state."""
        x = self.draw()
        quantizer = self.settled(recipe, role, x)
        twin, before = copy.deepcopy(quantizer), _state(quantizer)
        twin.quantize(9 * x, BOTH)
        assert _same(_state(quantizer), before)

    def test_a_checkpoint_resumes_to_the_bit(self, recipe: Recipe) -> None:
        """In a linear layer over steps, saved and loaded with ``weights_only=True``."""
        x = self.draw()
        models = [Sequential(Linear(x.shape[-1], x.shape[-1])) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())

        def step(model: Any, scale: float) -> list[Tensor]:
            leaf = (scale * x).requires_grad_()
            with autocast(recipe):
                y = model(leaf)
            return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]

        for number in range(3):
            step(models[0], number + 1.0)
        file = io.BytesIO()
        torch.save(models[0].state_dict(), file)
        file.seek(0)
        models[1].load_state_dict(torch.load(file, weights_only=True))
        for number in range(3):
            one, other = (step(model, 5.0 - number) for model in models)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _state(quantizer: Quantizer) -> list[Tensor]:
    return [getattr(quantizer, name).clone() for name in quantizer.state_names]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _equal(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return whether two have the same bits in the same copies."""
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(a is b if a is None or b is None else same_bits(a, b) for a, b in pairs)
