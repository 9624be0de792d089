"""The recipe of a third party on the page "Write a recipe": an integer format in 40 lines."""

import pathlib
import re
import sys
import types

import pytest
import torch

import opfuse
from opfuse import ops

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "write-a-recipe.md"
FILES = dict(
    re.findall(r"^```python\n(?=# (\w+)\.py\n)(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
)


def module(name):
    """A file of the page, as a module."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(FILES[name], f"{name}.py", "exec"), vars(made))
    return made


delayed = module("opfuse_delayed_int8")
int8 = module("opfuse_int8")
suite = module("test_int8").TestInt8
del sys.modules["opfuse_delayed_int8"], sys.modules["opfuse_int8"], sys.modules["test_int8"]


@pytest.fixture(autouse=True)
def installed(register):
    register(int8, name="int8")
    register(delayed, name="delayed-int8")


class TestInt8(suite):
    """The page's own test, without limits and with the tolerances of the kit."""


class TestDelayedInt8(suite):
    """The page's quantizer with state."""

    recipes = (delayed.DelayedInt8(), delayed.DelayedInt8(steps=1))


def test_a_delayed_scale_follows_the_steps_before():
    quantizer = delayed.DelayedInt8Quantizer(2, False, None)
    scales = []
    for largest in (127.0, 254.0, torch.inf, 63.5, 63.5):
        quantizer.quantize(torch.tensor([[largest, 1.0]]), opfuse.core.quantization.BOTH)
        delayed.DelayedInt8().update([quantizer], None)
        scales.append(quantizer.scale.item())
    assert scales == [1.0, 2.0, 2.0, 0.5, 0.5]


def test_it_is_40_lines():
    lines = [line for line in FILES["opfuse_int8"].splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (127, 64), (2, 3, 5), (0, 8), (7,)])
def test_the_int8_codes_of_the_page_are_exact(shape, dtype):
    """Of any shape: the nearest of 255 steps, of two the even one, in both copies."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = int8.Int8Quantizer().quantize(x, opfuse.core.quantization.BOTH)
    matrix = x.double().reshape(-1, shape[-1])
    scale = (matrix.abs().max().float() / 127).double() if x.numel() else torch.tensor(1.0)
    codes = (matrix.float() / scale.float()).double().round().to(torch.int8)
    assert made.scale_inv.item() == scale.item()
    assert torch.equal(made.rowwise_data.reshape(-1, shape[-1]), codes)
    assert torch.equal(made.columnwise_data, codes.t())


def test_a_linear_multiplies_what_the_codes_stand_for():
    """Output and gradients against fp64, and the checkpoint of a plain layer loads and back."""
    op, x, dy = ops.Linear(24, 40, bias=False), torch.randn(12, 24), torch.randn(12, 40)
    q = int8.Int8Quantizer()
    stands_for = [q.quantize(t.detach(), opfuse.core.quantization.BOTH).dequantize().double() for t in (x, op.weight, dy)]  # fmt: skip
    x.requires_grad_()
    with opfuse.autocast("int8"):
        y = op(x)
    dx, dw = torch.autograd.grad(y, [x, op.weight], dy)
    xq, wq, dyq = stands_for
    for got, right in ((y, xq @ wq.T), (dx, dyq @ wq), (dw, dyq.T @ xq)):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    assert op.state_dict().keys() == {"weight"}
    with opfuse.autocast("int8"):
        text = str(opfuse.explain(op, x))
    assert "Int8Quantizer" in text
