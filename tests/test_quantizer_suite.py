"""The suite for quantizers: a sound one passes, and each test finds the fault that it is for."""

import pytest
import torch
import toy_recipe
from toy_recipe import DelayedInt8, Int8Quantizer

import opfuse
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE
from opfuse.testing import QuantizerSuite

pytestmark = pytest.mark.alone

ROLE, DTYPE = "input", torch.float32


class Sound(Int8Quantizer):
    """With ``out``."""

    def quantize(self, tensor, usage, out=None):
        made = super().quantize(tensor, usage)
        if out is None:
            return made
        for there, new in zip(out.tensors(), made.tensors(), strict=True):
            if there is not None:
                there.copy_(new)
        return out


class TestInt8(QuantizerSuite):
    """An integer format of a third party, in 40 lines."""

    recipes = (DelayedInt8(),)
    limits = {  # noqa: RUF012
        "test_not_finite": "int8 has no NaN"
    }

    def make(self, recipe, role):
        return Sound(None)

    test_a_checkpoint_resumes_to_the_bit = None  # below, with a plugin


class GivesBoth(Sound):
    def with_scale(self, tensor, usage, scale):
        return super().with_scale(tensor, BOTH, scale)


class Coarse(Sound):
    def with_scale(self, tensor, usage, scale):
        return super().with_scale((tensor / scale / 32).round() * scale * 32, usage, scale)


class ForgetsTheShape(Sound):
    def with_scale(self, tensor, usage, scale):
        if tensor.ndim > 2:
            tensor = tensor.flip(0)
        return super().with_scale(tensor, usage, scale)


class DividesByNothing(Sound):
    def with_scale(self, tensor, usage, scale):
        return super().with_scale(tensor, usage, scale * tensor.abs().max() / tensor.abs().max())


class Overflows(Sound):
    def quantize(self, tensor, usage, out=None):
        return super().quantize(tensor, usage, out) if tensor.abs().max() < 1e30 else super(
        ).quantize(tensor * 1e20, usage, out)  # fmt: skip

    def with_scale(self, tensor, usage, scale):
        made = super().with_scale(tensor.nan_to_num(), usage, scale)
        if tensor.isinf().any():
            made.scale_inv = made.scale_inv * torch.inf
        return made


class IgnoresOut(Sound):
    def quantize(self, tensor, usage, out=None):
        return super().quantize(tensor, usage)


class LendsItsScale(Sound):
    def quantize(self, tensor, usage, out=None):
        torch.maximum(self.amax, tensor.abs().max().float(), out=self.amax)
        return self.with_scale(tensor, usage, self.scale)


class TakesTheNewScale(Sound):
    def requantize(self, tensor, scales, usage):
        return self.with_scale(tensor, usage, self.scale.clone())


class RecordsElsewhere(Sound):
    """Moves its scale where it casts."""

    def quantize(self, tensor, usage, out=None):
        made = super().quantize(tensor, usage, out)
        self.scale.copy_(torch.maximum(self.scale, tensor.abs().max() / 127))
        return made


class KeepsTheLast(Sound):
    def quantize(self, tensor, usage, out=None):
        made = super().quantize(tensor, usage, out)
        self.amax.copy_(tensor.abs().max())
        return made


class SharesItsState(Sound):
    def __deepcopy__(self, memo):
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin


class LosesOverflows(Sound):
    pass


FAULTS = [
    (GivesBoth, "copies", ("rowwise", DTYPE)),
    (Coarse, "round_trip", ("both", DTYPE)),
    (ForgetsTheShape, "shapes", ()),
    (DividesByNothing, "zeros", ("both",)),
    (Overflows, "extremes", (DTYPE,)),
    (IgnoresOut, "out", ("both",)),
    (LendsItsScale, "owns_its_scales", ()),
    (TakesTheNewScale, "again", ("both",)),
    (RecordsElsewhere, "what_evaluation_sees_is_not_recorded", ()),
    (KeepsTheLast, "a_step_is_one_update", ()),
    (SharesItsState, "copies_of_it_are_apart", ()),
    (LosesOverflows, "not_finite", ()),
]


@pytest.mark.parametrize(
    "quantizer, name, given", FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_finds_its_fault(quantizer, name, given):
    class Suite(QuantizerSuite):
        recipes = (DelayedInt8(),)

        def make(self, recipe, role):
            return quantizer(None)

    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        getattr(Suite(), f"test_{name}")(DelayedInt8(), ROLE, *given)


def test_every_test_has_a_fault():
    tests = {
        name.removeprefix("test_") for name in vars(QuantizerSuite) if name.startswith("test_")
    }
    others = {"recipes", "a_checkpoint_resumes_to_the_bit"}  # of the plugin, and of a layer
    assert tests - others == {name for _, name, _ in FAULTS}


@pytest.mark.parametrize("states", [("scale", "amax"), ("amax",)], ids=["sound", "undeclared"])
def test_the_suite_fails_if_state_is_not_declared(register, states):
    """What is not declared is not saved."""

    class Quantizer(Sound):
        state_names = states

    class Plugin:
        opfuse_recipes = staticmethod(toy_recipe.opfuse_recipes)

        @staticmethod
        @opfuse.hookimpl
        def opfuse_quantizer(recipe, role, env):
            return Quantizer(env.device)

    class Suite(QuantizerSuite):
        recipes = (DelayedInt8(),)

    register(Plugin())
    if len(states) == 2:
        Suite().test_a_checkpoint_resumes_to_the_bit(DelayedInt8())
        return
    with pytest.raises(AssertionError):
        Suite().test_a_checkpoint_resumes_to_the_bit(DelayedInt8())


def test_the_usages_are_three():
    assert {ROWWISE, COLUMNWISE, BOTH} == {*opfuse.testing.quantizers.USAGES.values()}
