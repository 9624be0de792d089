"""The LayerNorm that keeps its output: its gradients, what it keeps, and where the op runs instead."""

import math

import opfuse_norm
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing import machine

pytestmark = pytest.mark.skipif(machine.is_interpreting(), reason="kernels go first there")
FUSION = "norm by output"
OFF, ALWAYS = {"norm.by_output": "never"}, {"norm.by_output": "always"}


@pytest.fixture(autouse=True)
def _this_plugin_alone():
    """At the end of a chain too, where the caller gets the output."""
    with opfuse.plugins.using("norm"), opfuse.options(**ALWAYS):
        yield


def drawn(shape=48, dtype=torch.float32, spread=0.5, **how):
    """A norm whose parameters are not those that it starts with."""
    torch.manual_seed(0)
    norm = ops.LayerNorm(shape, **how).to(dtype)
    for name, param in norm.named_parameters():
        start = 1.0 if name == "weight" and not how.get("zero_centered_gamma") else 0.0
        param.data.uniform_(start - spread, start + spread)
    return norm


def fusions(model, x):
    (call,) = opfuse.explain(model, x).calls
    return [step.fusion for step in call.plan.backward if step.fusion]


def gradients(model, x, dy):
    """The output, and the gradients of the input and of all parameters."""
    model.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = model(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[param.grad for param in model.parameters()]]


def exact(model, x, dy):
    """The same in fp64."""
    norm = model
    twin = ops.LayerNorm(
        norm.normalized_shape, eps=norm.eps, elementwise_affine=norm.weight is not None,
        bias=norm.bias is not None, zero_centered_gamma=norm.zero_centered_gamma,
    ).double()  # fmt: skip
    for mine, its in zip(twin.parameters(), norm.parameters(), strict=True):
        mine.data.copy_(its)
        mine.requires_grad_(its.requires_grad)
    with opfuse.options(**OFF):
        return gradients(twin, x.double().requires_grad_(x.requires_grad), dy.double())


def compare(model, x, dy, tolerance):
    for mine, right in zip(gradients(model, x, dy), exact(model, x, dy), strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            scale = right.abs().amax().item() if right.numel() else 1.0
            error = (mine.double() - right).abs().amax().item() if right.numel() else 0.0
            assert error <= tolerance * max(scale, 1e-30)


HOW = [{}, {"bias": False}, {"elementwise_affine": False}, {"zero_centered_gamma": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("rows", [(7,), (3, 5), (0,), (1,)], ids=str)
def test_gradients_are_those_of_fp64(how, rows):
    model = drawn(37, torch.float32, 0.4, **how)
    x = (3 * torch.randn(*rows, 37) + 1).requires_grad_()
    assert fusions(model, x) == [FUSION]
    compare(model, x, torch.randn(*rows, 37), 1e-5)


def test_several_dimensions_and_inputs_that_are_not_dense():
    model = drawn((4, 6))
    for x in (torch.randn(5, 4, 6), torch.randn(4, 5, 6).transpose(0, 1)):
        x.requires_grad_()
        assert fusions(model, x) == [FUSION]
        compare(model, x, torch.randn(5, 6, 4).transpose(1, 2), 1e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "all"])
def test_frozen_parts_get_no_gradient(frozen):
    model, x = drawn(), torch.randn(9, 48)
    x.requires_grad_(frozen not in ("input",))
    for name, param in model.named_parameters():
        param.requires_grad_(frozen not in (name, "all"))
    compare(model, x, torch.randn(9, 48), 1e-5)


def kept(model, x):
    return saved_bytes(lambda: model(x), model.parameters())


def test_what_is_kept_is_what_the_linear_keeps():
    norm = drawn()
    model = opfuse.Sequential(norm, ops.BasicLinear(48, 16))
    x = torch.randn(32, 48, requires_grad=True)
    statistics, rows = 32 * 4, x.nbytes
    assert kept(model, x) == rows + statistics + 2 * 48 * 4  # what it divides by, and adds
    with opfuse.options(**OFF):
        assert kept(model, x) == 2 * rows + 2 * statistics


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_the_op_runs_where_a_value_cannot_be_divided(name):
    """A weight of zero says nothing of the values behind it, and a large bias too little."""
    model, x = drawn(), torch.randn(32, 48, requires_grad=True)
    getattr(model, name).data[5] = 0.0 if name == "weight" else 1e4
    chain = opfuse.Sequential(model, ops.BasicLinear(48, 16))
    with opfuse.options(**OFF):
        expected = kept(chain, x)
    assert kept(chain, x) == expected
    compare(model, x, torch.randn(32, 48), 1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e-6])
def test_rows_that_hardly_vary_are_as_precise_as_the_op(scale):
    """Beside eps the variance is small, and so are the normalized values beside the bias."""
    model, x = drawn(), (scale * torch.randn(32, 48)).requires_grad_()
    compare(model, x, torch.randn(32, 48), 1e-5)


def test_nan_in_a_weight_is_no_error():
    model, x = drawn(), torch.randn(4, 48, requires_grad=True)
    model.weight.data[3] = float("nan")
    found = gradients(model, x, torch.ones(4, 48))
    with opfuse.options(**OFF):
        right = gradients(model, x, torch.ones(4, 48))
    torch.testing.assert_close(found, right, equal_nan=True)


def test_an_output_that_was_overwritten_is_refused():
    """By default it may be overwritten, since PyTorch keeps the input of a norm."""
    model, x = drawn(), torch.randn(4, 48, requires_grad=True)
    y = model(x)
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    for where in ("inside", "never"):
        with opfuse.options(**{"norm.by_output": where}):
            y = model(x)
            y += 1
            y.sum().backward()


@pytest.mark.parametrize("frozen", ["nothing", "linear", "input"])
def test_by_default_it_is_kept_where_a_linear_would_keep_it(frozen):
    model = opfuse.Sequential(drawn(), ops.BasicLinear(48, 16))
    model[1].requires_grad_(frozen != "linear")
    x, dy = torch.randn(32, 48, requires_grad=frozen != "input"), torch.randn(32, 16)
    found = {}
    for where in ("inside", "never"):
        with opfuse.options(**{"norm.by_output": where}):
            found[where] = kept(model, x), gradients(model, x, dy)
    (now, mine), (before, its) = found.values()
    assert (before - now > x.nbytes / 2) == (frozen != "linear")
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_autocast_gives_what_the_op_gives():
    model, x = drawn(), torch.randn(16, 48, requires_grad=True)
    chain = opfuse.Sequential(model, ops.Linear(48, 16))
    dy = torch.randn(16, 16)
    found = []
    for options in (ALWAYS, OFF):
        with torch.autocast("cpu", torch.bfloat16), opfuse.options(**options):
            found.append(gradients(chain, x, dy.bfloat16()))
    for mine, its in zip(*found, strict=True):
        assert (mine.double() - its.double()).norm() <= 2e-2 * its.double().norm()


def test_where_it_declines():
    (fusion,) = [f for f in opfuse_norm.opfuse_joint_fusions() if f.name == FUSION]
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32, requires_grad=True)
    for change, said in (
        ({"requires_grad": False}, "no backward follows"),
        ({"device": torch.device("cuda")}, "on the host"),
        ({"dtype": torch.float16}, "float16"),
        ({"compiling": True}, "torch.compile"),
        ({"options": OFF}, "norm.by_output"),
    ):
        assert said in fusion.when((drawn(),), env._replace(**change))
    assert fusion.when((drawn(),), env) is True


def test_nothing_changes_without_a_backward():
    model, x = drawn(), torch.randn(4, 48)
    with opfuse.options(**OFF):
        right = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), right)
    assert torch.equal(model.eval()(x), right)


class Checkpointed(torch.nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_it_again(reentrant):
    model, x, dy = drawn(), torch.randn(8, 48, requires_grad=True), torch.randn(8, 48)
    right = gradients(model, x, dy)
    found = gradients(Checkpointed(model, reentrant), x, dy)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_opfuse_tune_leaves_it_to_the_whole_chain():
    env = opfuse.Environment(
        torch.device("cpu"), None, torch.float32, requires_grad=True, measured=math.inf
    )
    (fusion,) = [f for f in opfuse_norm.opfuse_joint_fusions() if f.name == FUSION]
    assert "compares whole chains" in fusion.when((drawn(),), env)
