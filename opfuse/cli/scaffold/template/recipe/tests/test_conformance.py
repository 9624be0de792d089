"""opfuse's own checks of every quantizer of the recipe."""

from opfuse.testing import QuantizerSuite

from opfuse_NAME.recipes import Int8


class TestConformance(QuantizerSuite):
    recipes = (Int8(),)
