"""What is kept, where the fusion is used, and what is said where it is not."""

import subprocess
import sys

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing import CubicActivation, assert_close, interpreter, recipes
from opfuse.testing.machine import is_interpreting

ROWS, WIDTH, INNER = 4, 6, 8
RECIPE = recipes.PerTensor(backward_override="high_precision")  # leaves the casts to the linears

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()


@pytest.fixture(autouse=True)
def alone():
    with opfuse.plugins.using("mlp"):
        yield


def linear(inputs=WIDTH, outputs=2 * INNER, bias=False):
    return ops.Linear(inputs, outputs, bias=bias)


def swiglu(*before, bias=False, first=None):
    torch.manual_seed(0)
    first = first or linear(bias=bias)
    return opfuse.Sequential(*before, first, ops.SwiGLU(), linear(INNER, WIDTH, bias))


def plain(*before):
    torch.manual_seed(0)
    first = linear(outputs=INNER, bias=True)
    return opfuse.Sequential(*before, first, ops.GELU(), linear(INNER, WIDTH, True))


def side_by_side():
    return ops.ParallelLinear(
        {"gate": linear(outputs=INNER, bias=True), "up": linear(outputs=INNER)}
    )


def batch(dtype=torch.float32, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x.to(dtype).requires_grad_(requires_grad)


def kept(chain, x, **settings):
    """How many numbers per row a forward keeps, parameters apart."""
    with opfuse.options(**{"prefer": "memory", **settings}):
        count = saved_bytes(lambda: chain(x), chain.parameters())
    return count / x.itemsize / ROWS


def fusions(chain, x, **settings):
    with opfuse.options(**{"prefer": "memory", **settings}):
        data = opfuse.explain(chain, x).to_dict()
    return [row["fusion"] for row in data["forward"] if row["fusion"]]


def grads(chain, x):
    wanted = [t for t in (x, *chain.parameters()) if t.requires_grad]
    return torch.autograd.grad(chain(x).square().sum(), wanted)


def check(chain, x):
    """The gradients against those of the separate ops in fp64."""
    with opfuse.options(prefer="memory"):
        got = grads(chain, x)
    with opfuse.plugins.using(""):
        truth = grads(chain.double(), x.detach().double().requires_grad_(x.requires_grad))
    for mine, expected in zip(got, truth, strict=True):
        assert_close(mine, expected, gemm=True)


# What is kept


@pytest.mark.parametrize(
    ("chain", "numbers"),
    [
        (swiglu(), WIDTH + 2 * INNER),
        (swiglu(bias=True), WIDTH + 2 * INNER),
        (swiglu(first=side_by_side()), WIDTH + 2 * INNER),
        (plain(), WIDTH + INNER),
        (swiglu(ops.RMSNorm(WIDTH)), WIDTH + 1 + 2 * INNER),
        (plain(ops.LayerNorm(WIDTH)), WIDTH + 2 + INNER),
        (swiglu(ops.RMSNorm(WIDTH), first=side_by_side()), WIDTH + 1 + 2 * INNER),
        # what is before computes the input of the first linear again
        (swiglu(ops.SiLU()), WIDTH + 2 * INNER),
        (swiglu(ops.SiLU(), first=side_by_side()), WIDTH + 2 * INNER),
        (plain(ops.GELU(approximate="none")), WIDTH + INNER),
        (swiglu(ops.SiLU(), ops.RMSNorm(WIDTH)), WIDTH + 1 + 2 * INNER),
    ],
)
def test_the_numbers_kept_per_row(chain, numbers):
    x = batch()
    assert kept(chain, x) == numbers
    assert kept(chain, x, prefer="speed") > numbers
    check(chain, x)


def test_an_activation_that_keeps_its_input_in_fp8_is_left_alone():
    pytest.importorskip("opfuse_fp8", reason="it casts the input")
    torch.manual_seed(0)
    act = ops.GELU(cache_quantized_input=True)
    chain = opfuse.Sequential(linear(outputs=INNER), act, linear(INNER, WIDTH))
    with opfuse.plugins.using("mlp,fp8"):
        x = batch()
        assert fusions(chain, x) == []
        with opfuse.options(prefer="memory"):
            (got,) = torch.autograd.grad(chain(x).square().sum(), [chain[2].weight])
            data = str(opfuse.explain(chain, x))
        with opfuse.plugins.using("fp8"):
            (expected,) = torch.autograd.grad(chain(x).square().sum(), [chain[2].weight])
    assert "kept in FP8" in data
    torch.testing.assert_close(got, expected)


# With adapters

RANK = 2


def adapter(inputs=WIDTH, outputs=2 * INNER, dropout=0.0, trained=("lora_a", "lora_b")):
    op = ops.LowRankLinear(inputs, outputs, RANK, scaling=0.5, dropout=dropout)
    torch.nn.init.normal_(op.lora_b)
    for name, param in op.named_parameters():
        param.requires_grad_(name in trained)
    return op


def with_adapters(*before, first=None, second=None, act=ops.SwiGLU):
    torch.manual_seed(0)
    first = (first or adapter)()
    second = (second or (lambda: adapter(INNER, WIDTH)))()
    return opfuse.Sequential(*before, first, act(), second)


def frozen(op):
    return op.requires_grad_(False)


@pytest.mark.parametrize(
    ("chain", "numbers"),
    [
        (with_adapters(), WIDTH + 2 * RANK),
        (with_adapters(ops.RMSNorm(WIDTH)), WIDTH + 1 + 2 * RANK),
        (with_adapters(ops.LayerNorm(WIDTH)), WIDTH + 2 + 2 * RANK),
        (with_adapters(second=lambda: frozen(linear(INNER, WIDTH))), WIDTH + RANK),
        (with_adapters(first=lambda: frozen(side_by_side())), 2 * INNER + RANK),
        (with_adapters(ops.RMSNorm(WIDTH), first=side_by_side), WIDTH + 1 + 2 * INNER + RANK),
        (with_adapters(first=lambda: adapter(trained=["lora_b"])), WIDTH + 2 * RANK),
        (with_adapters(first=lambda: adapter(trained=["weight"])), WIDTH + 2 * RANK),
    ],
)
def test_what_is_kept_with_adapters(chain, numbers):
    x = batch()
    assert next(filter(None, fusions(chain, x))).startswith(
        ("mlp, low rank", "parallel mlp, low rank")
    )
    assert kept(chain, x) == numbers
    assert kept(chain, x, prefer="speed") > numbers
    check(chain, x)


def test_a_bias_before_the_activation_is_no_product_to_compute_again():
    torch.manual_seed(0)
    chain = opfuse.Sequential(
        *(ops.RMSNorm(WIDTH), adapter(outputs=INNER), ops.Bias(INNER), ops.GELU()),
        *(adapter(INNER, WIDTH), ops.Bias(WIDTH)),
    )
    x = batch()
    assert kept(chain, x) == WIDTH + 1 + INNER + 2 * RANK
    check(chain, x)


@pytest.mark.parametrize("frozen_input", [False, True])
def test_adapters_with_dropout_give_the_gradients_of_the_separate_ops(frozen_input):
    torch.manual_seed(0)
    first, second = adapter(dropout=0.3), adapter(INNER, WIDTH, dropout=0.5)
    chain = opfuse.Sequential(ops.RMSNorm(WIDTH), first, ops.SwiGLU(), second).double()
    x = batch(torch.float64, not frozen_input)
    results = []
    for prefer, plugins in (("memory", "mlp"), ("speed", "")):
        torch.manual_seed(3)
        with opfuse.options(prefer=prefer), opfuse.plugins.using(plugins):
            results.append(grads(chain, x))
    torch.testing.assert_close(*results)


def test_adapters_under_autocast():
    chain, x = with_adapters(ops.RMSNorm(WIDTH)), batch()
    with torch.autocast("cpu", torch.bfloat16):
        with opfuse.options(prefer="memory"):
            got = grads(chain, x)
        with opfuse.plugins.using(""):
            expected = grads(chain, x)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_the_output_of_the_norm_is_kept_where_that_is_wanted():
    chain, x = swiglu(ops.RMSNorm(WIDTH)), batch()
    assert kept(chain, x, **{"mlp.keep_norm": True}) == 2 * WIDTH + 1 + 2 * INNER
    with opfuse.options(prefer="memory"):
        expected = grads(chain, x)
        with opfuse.options(**{"mlp.keep_norm": True}):
            found = grads(chain, x)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("frozen", "numbers"),
    [
        (("0.weight",), INNER),  # the output of the activation, half of its input
        (("1.weight",), 2 * INNER + WIDTH),
        (("0.weight", "1.weight"), 0),
        (("x", "0.weight", "1.weight"), 0),
    ],
)
def test_what_is_frozen_is_not_kept(frozen, numbers):
    x = batch(requires_grad=False)
    chain = opfuse.Sequential(*swiglu())
    for name in frozen:
        if name != "x":
            chain[{"0": 0, "1": 2}[name[0]]].weight.requires_grad_(False)
    assert kept(chain, x) == numbers
    assert bool(fusions(chain, x)) == (numbers > 0)


def test_behind_a_frozen_norm_its_output_is_kept_and_not_its_input():
    x = batch(requires_grad=False)
    chain = swiglu(ops.RMSNorm(WIDTH))
    chain[0].weight.requires_grad_(False)
    assert kept(chain, x) == WIDTH + 2 * INNER
    check(chain, x)


def test_under_autocast_what_is_kept_is_in_its_dtype_and_weights_are_not_cast():
    chain, x = swiglu(ops.RMSNorm(WIDTH)), batch()
    with torch.autocast("cpu", torch.bfloat16):
        # input and statistics in fp32, the input of the activation in bf16
        assert kept(chain, x) == WIDTH + 1 + INNER
        with opfuse.options(prefer="memory"):
            assert chain(x).dtype is torch.bfloat16
            found = grads(chain, x)
        with opfuse.plugins.using(""):
            expected = grads(chain, x)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


# A norm alone


NORMS = {
    "RMSNorm": lambda: ops.RMSNorm(WIDTH),
    "LayerNorm": lambda: ops.LayerNorm(WIDTH),
    "no bias": lambda: ops.LayerNorm(WIDTH, bias=False),
    "no parameters": lambda: ops.LayerNorm(WIDTH, elementwise_affine=False),
    "zero-centered": lambda: ops.RMSNorm(WIDTH, zero_centered_gamma=True),
}


def normed(norm, **given):
    torch.manual_seed(0)
    chain = opfuse.Sequential(norm, linear(outputs=3, **given))
    with torch.no_grad():
        for param in norm.parameters():
            param.uniform_(0.5, 1.5)
    return chain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_the_output_of_a_norm_is_not_kept(kind, dtype):
    chain, x = normed(NORMS[kind](), bias=True).to(dtype), batch(dtype)
    statistics = (1 if "RMS" in kind or kind == "zero-centered" else 2) * 4 / x.itemsize
    assert fusions(chain, x) == ["recomputed norm"]
    assert kept(chain, x) == WIDTH + statistics
    assert kept(chain, x, prefer="speed") == 2 * WIDTH + statistics
    check(chain, x)


@pytest.mark.parametrize("frozen", ["x", "norm", "linear", "x and norm"])
def test_a_norm_of_which_part_is_frozen(frozen):
    chain, x = normed(ops.LayerNorm(WIDTH)), batch(requires_grad="x" not in frozen)
    chain[0].requires_grad_("norm" not in frozen)
    chain[1].requires_grad_("linear" not in frozen)
    kept_now, kept_else = kept(chain, x), kept(chain, x, prefer="speed")
    assert (kept_now < kept_else) == (frozen in ("x", "norm"))
    check(chain, x)


def test_the_norm_that_is_computed_again_uses_the_numbers_of_its_forward():
    chain, x = normed(ops.RMSNorm(WIDTH)), batch()
    found = []
    for later in (False, True):
        with opfuse.options(prefer="memory"):
            loss = chain(x).square().sum()
        chain[0].eps = 0.5 if later else chain[0].eps
        found.append(torch.autograd.grad(loss, list(chain.parameters())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_norm_is_computed_again_under_autocast():
    chain, x = normed(ops.LayerNorm(WIDTH)), batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert kept(chain, x) == WIDTH + 2  # input and statistics in fp32
        assert kept(chain, x, prefer="speed") == WIDTH + 2 + WIDTH / 2 + WIDTH * 3 / 2 / ROWS
        with opfuse.options(prefer="memory"):
            found = grads(chain, x)
        with opfuse.plugins.using(""):
            expected = grads(chain, x)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_where_a_norm_is_not_computed_again():
    chain, x = normed(ops.LayerNorm(WIDTH)), batch()

    def said(**settings):
        settings = {"prefer": "memory", **settings}
        with opfuse.options(**settings):
            assert not fusions(chain, x, **settings)
            return " ".join(opfuse.explain(chain, x).details.split())

    assert 'trades time for memory, which prefer="memory" asks for' in said(prefer="speed")
    assert "the option mlp.keep_norm keeps it" in said(**{"mlp.keep_norm": True})
    with torch.no_grad():
        assert "no backward follows" in said()
    assert kept(torch.compile(chain, backend="aot_eager", fullgraph=True), x) > 0


def test_a_norm_whose_output_nobody_spares_keeps_no_more():
    class Spared(opfuse.FusedOperation):
        """An activation that is computed again, as other plugins have some."""

        recomputes = True

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            (ctx,) = basic_op_ctxs
            y = self.basic_ops[0].op_forward(ctx, input_)
            if ctx.may_recompute and ctx.input_requires_grad:
                ctx.recomputable_output = y
            return y, [()]

        def fuser_recompute(self, basic_op_ctxs):
            return self.basic_ops[0].forward_value(*basic_op_ctxs[0].saved_tensors)

    def keeps_no_more(*chain):
        chain = opfuse.Sequential(*chain)
        assert kept(chain, batch()) <= kept(chain, batch(), prefer="speed")
        check(chain, batch())

    for behind in ((), (ops.Dropout(0.0), linear()), (ops.ReLU(),)):
        keeps_no_more(ops.LayerNorm(WIDTH), *behind)
    handle = opfuse.register_forward_fusion(opfuse.Fusion((ops.GELU,), Spared, name="spared"))
    others = {row["name"] for row in opfuse.plugins.listing()} - {"mlp"}
    without = ",".join(f"-{name}" for name in sorted(others))
    with opfuse.plugins.using(without or None):  # a plugin that is named would come first
        keeps_no_more(linear(outputs=WIDTH), ops.GELU(), ops.LayerNorm(WIDTH), linear())
    handle.unregister()


# The backward


@pytest.mark.parametrize("chain", [swiglu(ops.RMSNorm(WIDTH)), plain()])
def test_a_second_backward_gives_the_same(chain):
    with opfuse.options(prefer="memory"):
        loss = chain(batch()).square().sum()
    first, second = [
        torch.autograd.grad(loss, list(chain.parameters()), retain_graph=True) for _ in range(2)
    ]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_where_the_loss_does_not_use_the_output_parameters_have_no_gradient():
    chain = opfuse.Sequential(ops.MakeExtraOutput(), *swiglu(ops.RMSNorm(WIDTH)))
    x = batch()
    assert fusions(chain, x) == ["mlp"]
    with opfuse.options(prefer="memory"):
        _, extra = chain(x)
    found = torch.autograd.grad(extra.sum(), [x, *chain.parameters()], allow_unused=True)
    assert torch.equal(found[0], torch.ones_like(x)) and set(found[1:]) == {None}


def test_parameters_and_numbers_are_read_at_every_call():
    first, last = linear(), linear(INNER, WIDTH)
    chain, x = opfuse.Sequential(ops.RMSNorm(WIDTH), first, ops.ClampedSwiGLU(), last), batch()
    with opfuse.options(prefer="memory"):
        grads(chain, x)
    for param in chain.parameters():
        param.data = -1.5 * param.data  # no version counter moves
    chain[0].eps, chain[2].limit = 0.5, 0.25
    assert fusions(chain, x) == ["mlp"]
    check(chain, x)


def test_the_backward_uses_the_numbers_of_its_forward():
    chain, x = swiglu(ops.RMSNorm(WIDTH)), batch()
    chain = opfuse.Sequential(chain[0], chain[1], ops.ClampedSwiGLU(limit=0.25), chain[3])
    found = []
    for later in (False, True):
        with opfuse.options(prefer="memory"):
            loss = chain(x).square().sum()
        if later:
            chain[0].eps, chain[2].limit = 0.5, 7.0
        found.append(torch.autograd.grad(loss, [x, *chain.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# Where it is used


def test_by_default_the_ops_run_one_by_one_and_the_report_says_why():
    chain, x = swiglu(), batch()
    assert fusions(chain, x, prefer="speed") == []
    report = " ".join(str(opfuse.explain(chain, x)).split())
    assert 'it trades time for memory, which prefer="memory" asks for (mlp' in report
    assert fusions(chain, x) == ["mlp"]
    with torch.no_grad():
        assert fusions(chain, x) == []


def test_an_activation_that_may_give_something_else_is_not_computed_again():
    chain = opfuse.Sequential(linear(), CubicActivation(), linear(2 * INNER, WIDTH))
    assert fusions(chain, batch()) == []
    with opfuse.options(prefer="memory"):
        report = " ".join(opfuse.explain(chain, batch()).details.split())
    assert "CubicActivation does not declare itself deterministic" in report


def test_where_the_kernel_does_not_run_the_report_says_why():
    with opfuse.options(prefer="memory"):
        text = " ".join(str(opfuse.explain(swiglu(), batch())).split())
        wider = " ".join(str(opfuse.explain(swiglu().double(), batch().double())).split())
    if is_interpreting():
        assert "fallback" not in text
        assert "its kernels compute in fp32, and the ops in float64" in wider
    else:
        assert "by PyTorch's operations: its kernels run on a GPU, and this is cpu" in text


def test_under_a_recipe_the_linears_quantize():
    chain, x = swiglu(), batch()
    with recipes.offered(), opfuse.plugins.using(f"mlp,{recipes.NAME}"):
        with opfuse.options(prefer="memory"), opfuse.autocast(RECIPE):
            report = " ".join(opfuse.explain(chain, x).details.split())
    assert "PerTensor quantizes the linears, and this fusion multiplies plain tensors" in report


@pytest.mark.skipif(not is_interpreting(), reason="without the kernel it is left to the compiler")
@pytest.mark.parametrize(
    ("chain", "numbers"),
    [(swiglu(ops.RMSNorm(WIDTH)), WIDTH + 1 + 2 * INNER), (plain(), WIDTH + INNER)],
)
def test_a_compiled_mlp_keeps_as_little_and_gives_the_same_gradients(chain, numbers):
    x = batch()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    assert kept(compiled, x) == numbers
    with opfuse.options(prefer="memory"):
        assert fusions(chain, x) == ["mlp"]
        found = torch.autograd.grad(compiled(x).square().sum(), list(chain.parameters()))
        expected = torch.autograd.grad(chain(x).square().sum(), list(chain.parameters()))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_importing_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, opfuse; before = set(sys.modules); import opfuse_mlp; "
        "new = set(sys.modules) - before; assert new == {'opfuse_mlp'}, new; "
        "opfuse_mlp.opfuse_joint_fusions(); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
