"""An activation that is computed again, in fp32 by default: what is kept, its gradients, and where it declines."""

import contextlib

import opfuse_mlp
import pytest
import torch
from opfuse_mlp import activation

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing import assert_close, recipes

ROWS, WIDTH, INNER = 6, 5, 12
ACTIVATIONS = {"GELU by erf": lambda: ops.GELU(approximate="none"), "SiLU": ops.SiLU}


@pytest.fixture(autouse=True)
def alone():
    with opfuse.plugins.using("mlp"):
        yield


@contextlib.contextmanager
def where_memory_is_asked_for():
    """The fusion by itself: others of its plugin go first then."""
    registered = opfuse.register_forward_backward_fusion(*activation.JOINT)
    try:
        with opfuse.plugins.using(""), opfuse.options(prefer="memory"):
            yield
    finally:
        registered.unregister()


def mlp(act, *behind, dtype=torch.float32):
    torch.manual_seed(0)
    chain = ops.Linear(WIDTH, INNER), act, *behind, ops.Linear(INNER, WIDTH)
    return opfuse.Sequential(*chain).to(dtype)


def batch(dtype=torch.float32, requires_grad=True):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_(requires_grad)


def kept(chain, x):
    """How many numbers per row a forward keeps."""
    return saved_bytes(lambda: chain(x), chain.parameters()) / x.itemsize / ROWS


def grads(chain, x):
    wanted = [t for t in (x, *chain.parameters()) if t.requires_grad]
    return torch.autograd.grad(chain(x).square().sum(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_output_is_not_kept_and_the_gradients_are_the_same_bits(kind, dtype):
    chain, x = mlp(ACTIVATIONS[kind](), dtype=dtype), batch(dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    assert kept(chain, x) == WIDTH + (2 if half else 1) * INNER
    with where_memory_is_asked_for() if half else contextlib.nullcontext():
        assert kept(chain, x) == WIDTH + INNER
        found = grads(chain, x)
    with opfuse.plugins.using(""):
        assert kept(chain, x) == WIDTH + 2 * INNER
        expected = grads(chain, x)
        truth = grads(chain.double(), x.detach().double().requires_grad_())
    for mine, its, right in zip(found, expected, truth, strict=True):
        assert torch.equal(mine, its)
        if dtype is torch.float32:
            assert_close(mine, right, gemm=True)


@pytest.mark.parametrize("frozen", ["first", "last", "input and first", "all but the last bias"])
def test_what_is_frozen_is_not_computed_again(frozen):
    chain, x = mlp(ops.SiLU()), batch(requires_grad="input" not in frozen)
    chain[0].requires_grad_("first" not in frozen and "all" not in frozen)
    chain[2].requires_grad_("last" not in frozen)
    if "bias" in frozen:
        chain[2].bias.requires_grad_()
    with opfuse.plugins.using(""):
        least, expected = kept(chain, x), grads(chain, x)
    assert kept(chain, x) <= least
    for mine, its in zip(grads(chain, x), expected, strict=True):
        assert torch.equal(mine, its)


def test_under_autocast_it_is_computed_again_in_the_same_dtype():
    chain, x = mlp(ops.GELU(approximate="none")), batch()
    with torch.autocast("cpu", torch.bfloat16):
        by_default = kept(chain, x)
        with opfuse.plugins.using(""):
            assert kept(chain, x) == by_default
            with opfuse.options(prefer="memory"):  # which casts weights again
                before, expected = kept(chain, x), grads(chain, x)
        with where_memory_is_asked_for():
            now, found = kept(chain, x), grads(chain, x)
    assert before - now == INNER / 2
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(("p", "later"), [(0.0, 0.0), (0.5, 0.5), (0.0, 0.5), (0.5, 0.0)])
def test_a_dropout_that_drops_nothing_is_part_of_it(p, later):
    """Its probability may change after the plan was made."""
    drop = ops.Dropout(p)
    chain, x = mlp(ops.SiLU(), drop), batch()
    chain(x)
    drop.p = later
    masks = INNER / x.itemsize if later else 0
    found = []
    for plugins in ("mlp", ""):
        torch.manual_seed(2)
        with opfuse.plugins.using(plugins):
            numbers = kept(chain, x)
            torch.manual_seed(2)
            found.append(grads(chain, x))
        once = plugins == "mlp" and not (p or later)
        assert numbers == WIDTH + INNER * (1 if once else 2) + masks or (p and not later)
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
    with torch.no_grad():
        assert torch.equal(chain.eval()(x), mlp(ops.SiLU())(x))


def test_a_second_backward_and_a_checkpoint_give_the_same():
    from torch.utils.checkpoint import checkpoint

    chain, x = mlp(ops.SiLU()), batch()
    loss = chain(x).square().sum()
    once = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*once, *torch.autograd.grad(loss, x))
    again = checkpoint(chain, x, use_reentrant=False).square().sum()
    assert torch.equal(*once, *torch.autograd.grad(again, x))


def test_where_it_declines():
    (fusion,) = [f for f in opfuse_mlp.opfuse_joint_fusions() if f.name == "recomputed activation"]
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32, requires_grad=True)
    recipe = recipes.PerTensor()
    for change, said in (
        ({"requires_grad": False}, "no backward follows"),
        ({"device": torch.device("cuda")}, "on CPUs only"),
        ({"compiling": True}, "torch.compile"),
        ({"recipe": recipe}, "quantizes what a linear keeps"),
    ):
        assert said in fusion.when((ops.SiLU(),), env._replace(**change))
    for act in (ops.SiLU(), ops.GELU(approximate="none")):
        assert fusion.when((act,), env) is True
    assert "no fast kernel" in fusion.when((ops.GELU(),), env)
    assert "FP8" in fusion.when((ops.SiLU(cache_quantized_input=True),), env)
