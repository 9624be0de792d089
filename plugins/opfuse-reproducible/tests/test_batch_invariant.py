"""``options(invariant="batch")``: a row has the same bits whatever else is in the batch; the rest is refused."""

import contextlib

import pytest
import torch
from opfuse_reproducible import invariant
from torch import nn

import opfuse
from opfuse import Fusion, ops
from opfuse.ops._common import RowwiseOperation

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (FP32, BF16, FP16, FP64)
BLOCK = invariant.BLOCK


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fixed():
    torch.manual_seed(0)


@contextlib.contextmanager
def mode():
    with torch.no_grad(), opfuse.options(invariant="batch"):
        yield


def bits(y):
    return y.contiguous().view(torch.uint8)


def assert_same_bits(one, other):
    one, other = [y if isinstance(y, tuple) else (y,) for y in (one, other)]
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        assert torch.equal(bits(a), bits(b))


def rows_of(outputs, index):
    return tuple(y[index] for y in (outputs if isinstance(outputs, tuple) else (outputs,)))


def check(call, tensors, exact=None):
    """Every row alone, at other places and beside others; the values against the plain call in fp64."""
    count = len(tensors[0])
    with mode():
        whole = call(*tensors)
        places = sorted({0, 1, count // 2, count - 1} & {*range(count)})
        for i in places:
            assert_same_bits(
                call(*[t[i : i + 1] for t in tensors]), rows_of(whole, slice(i, i + 1))
            )
        for index in (
            torch.randperm(count),
            torch.arange(count // 2, count),
            torch.zeros(70).long(),
        ):
            if count:
                assert_same_bits(call(*[t[index] for t in tensors]), rows_of(whole, index))
        if count:  # other rows may hold anything
            changed = [t.clone() for t in tensors]
            changed[0][1:] = float("inf")
            assert_same_bits(rows_of(call(*changed), slice(0, 1)), rows_of(whole, slice(0, 1)))
    expected = exact()
    outputs = whole if isinstance(whole, tuple) else (whole,)
    eps = torch.finfo(tensors[0].dtype).eps
    for y, truth in zip(
        outputs, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        assert y.shape == truth.shape
        scale = truth.abs().max().item() if truth.numel() else 0.0
        torch.testing.assert_close(y.double(), truth.double(), rtol=0, atol=16 * eps * (scale + 1))


def mlp(width):
    return opfuse.Sequential(
        ops.RMSNorm(width), ops.Linear(width, 6 * width), ops.SwiGLU(), ops.Linear(3 * width, 5)
    )


MAKERS = {
    "BasicLinear": lambda n: ops.BasicLinear(n, 33),
    "Linear": lambda n: ops.Linear(n, 1),
    "wide Linear": lambda n: ops.Linear(n, 1100),
    "ParallelLinear": lambda n: ops.ParallelLinear(
        [ops.Linear(n, 8), ops.Linear(n, 3, bias=False)]
    ),
    "LowRankLinear": lambda n: ops.LowRankLinear(n, 24, 3, dropout=0.5).eval(),
    "LayerNorm": lambda n: ops.LayerNorm(n),
    "LayerNorm without parameters": lambda n: ops.LayerNorm(n, elementwise_affine=False),
    "RMSNorm": lambda n: ops.RMSNorm(n, zero_centered_gamma=True),
    "L2Normalization": lambda n: ops.L2Normalization(),
    "GELU": lambda n: ops.GELU(),
    "GELU, erf": lambda n: ops.GELU(approximate="none"),
    "QGELU": lambda n: ops.QGELU(),
    "ReLU": lambda n: ops.ReLU(),
    "SReLU": lambda n: ops.SReLU(),
    "SiLU": lambda n: ops.SiLU(),
    "ConstantScale": lambda n: ops.ConstantScale(0.3),
    "Identity": lambda n: ops.Identity(),
    "Dropout": lambda n: ops.Dropout(0.5).eval(),
    "chain": mlp,
}
GATED = [ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.SiTUGLU]
GATED += [ops.ClampedSwiGLU]


def made(maker, width, dtype):
    """The op, and the same in fp64."""
    op = maker(width)
    with torch.no_grad():
        for param in op.parameters():
            param.copy_(torch.randn(param.shape) / max(1, param.shape[-1]) ** 0.5)
    op = op.to(dtype)
    twin = maker(width).double()
    twin.load_state_dict(op.state_dict())
    return op, twin


def check_op(maker, width, dtype, count):
    op, twin = made(maker, width, dtype)
    x = 2 * torch.randn(count, width, dtype=FP64).to(dtype)
    with torch.no_grad():
        check(op, [x], lambda: twin(x.double()))


@pytest.mark.costly(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_a_row_keeps_its_bits(name, dtype, no_plugins):
    for width in (1, 3, 127, 1000):
        check_op(MAKERS[name], width, dtype, 2 * BLOCK + 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", GATED)
def test_a_row_of_a_gated_activation_keeps_its_bits(cls, dtype, no_plugins):
    for width in (2, 254, 1030):
        check_op(lambda n: cls(), width, dtype, BLOCK + 1)


@pytest.mark.parametrize("name", ["GELU", "QGELU", "SiLU", "RMSNorm", "wide Linear", "chain"])
def test_a_row_keeps_its_bits_where_threads_share_a_block(name, no_plugins):
    """Torch's own loops give what the last vector of a thread's share lacks other bits."""
    with threads(3):
        for dtype in (FP32, FP64):
            check_op(MAKERS[name], 1026, dtype, BLOCK + 1)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_number_of_rows(count, no_plugins):
    check_op(mlp, 12, FP32, count)


def test_dimensions_and_layouts_do_not_matter(no_plugins):
    op = mlp(16)
    x = torch.randn(3, 5, 16)
    with mode():
        whole = op(x)
        assert whole.shape == (3, 5, 5)
        assert_same_bits(op(x[1, 2]), whole[1, 2])
        assert_same_bits(op(x.transpose(0, 1)), whole.transpose(0, 1))
        assert_same_bits(op(torch.randn(16, 15).copy_(x.view(15, 16).t()).t()), whole.view(15, 5))
        unaligned = torch.empty(15 * 16 + 1)[1:].view(15, 16).copy_(x.view(15, 16))
        assert_same_bits(op(unaligned), whole.view(15, 5))
        assert op(x[:, :0]).shape == (3, 0, 5)


def test_under_autocast(no_plugins):
    op, x = mlp(16), torch.randn(70, 16)
    with mode(), torch.autocast("cpu", dtype=BF16):
        assert_same_bits(op(x[69]), op(x)[69])
        assert op(x).dtype is BF16


@pytest.mark.parametrize("dtype", DTYPES)
def test_extra_tensors_are_cut_like_the_input(dtype, no_plugins):
    chain = opfuse.Sequential(
        ops.MakeExtraOutput(),
        ops.Linear(6, 300),
        ops.SiLU(),
        ops.Linear(300, 6),
        ops.AddExtraInput(),
    ).to(dtype)
    twin = opfuse.Sequential(
        ops.MakeExtraOutput(),
        ops.Linear(6, 300),
        ops.SiLU(),
        ops.Linear(300, 6),
        ops.AddExtraInput(),
    ).double()
    twin.load_state_dict(chain.state_dict())
    x, extra = torch.randn(2, 70, 6, dtype=FP64).to(dtype)
    with torch.no_grad():
        check(chain, [x, extra], lambda: twin(x.double(), extra.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_and_log_probabilities_of_rows(dtype, no_plugins):
    for width in (5, 127, 1001):
        targets = torch.randint(width, (BLOCK + 6,))
        x = 2 * torch.randn(BLOCK + 6, 7, dtype=FP64).to(dtype)
        for last in (
            lambda: ops.CrossEntropy(
                reduction="none", label_smoothing=0.1, z_loss=1e-3, softcap=9.0
            ),
            lambda: ops.TokenLogProb(
                temperature=0.7, logsumexp=True, entropy=True, log_sum_squares=True
            ),
        ):
            head, exact = opfuse.Sequential(ops.Linear(7, width), last()).to(dtype), None
            exact = opfuse.Sequential(ops.Linear(7, width), last()).double()
            exact.load_state_dict(head.state_dict())
            with torch.no_grad():
                check(head, [x, targets], lambda: exact(x.double(), targets))  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_rows(dtype, no_plugins):
    """A row of an expert has the same bits however many others the expert gets."""

    def make():
        return opfuse.Sequential(
            ops.GroupedLinear(3, 6, 80), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 40, 6, bias=False)
        )

    experts, twin = make().to(dtype), make().double()
    twin.load_state_dict(experts.state_dict())
    x, scales = torch.randn(140, 6, dtype=FP64).to(dtype), torch.rand(140)
    sizes = torch.tensor([2, 0, 138])
    with mode():
        y = experts(x, sizes, scales, sizes)
        one = torch.tensor([0, 0, 1])
        assert_same_bits(experts(x[2:3], one, scales[2:3], one), y[2:3])
        assert_same_bits(experts(x[-1:], one, scales[-1:], one), y[-1:])
        one = torch.tensor([1, 0, 0])
        assert_same_bits(experts(x[1:2], one, scales[1:2], one), y[1:2])
        empty = torch.tensor([0, 0, 0])
        assert experts(x[:0], empty, scales[:0], empty).shape == (0, 6)
    with torch.no_grad():
        truth = twin(x.double(), sizes, scales.double(), sizes)
    atol = 16 * torch.finfo(dtype).eps * truth.abs().max().item()
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=atol)


def test_sizes_of_groups_that_do_not_fit_are_refused(no_plugins):
    experts = ops.GroupedLinear(2, 4, 4)
    with mode(), pytest.raises(RuntimeError, match=r"sizes of groups for 3 rows, got \[\[1, 1\]\]"):
        experts(torch.randn(3, 4), torch.tensor([1, 1]))


def test_exact_ops_run_as_a_whole(no_plugins):
    """Each of their operations is rounded once, whatever the shape; a row may have several dimensions."""
    rope = opfuse.Sequential(ops.ApplyRoPE(8), ops.Reshape((-1, 32)))
    x, cos, sin = torch.randn(2, 5, 4, 8), torch.rand(5, 4), torch.rand(5, 4)
    with mode():
        assert_same_bits(rope(x, cos, sin), rope(x.double().float(), cos, sin))
        assert_same_bits(rope(x[:1], cos, sin), rope(x, cos, sin)[:5])
    with torch.no_grad():
        plain = rope(x, cos, sin)
        assert_same_bits(plain, plain)
        with mode():
            assert_same_bits(rope(x, cos, sin), plain)
            report = opfuse.explain(rope, x, cos, sin)
    assert "runs these ops one by one" in str(report)


# Refusals


class Centered(RowwiseOperation):
    """Declares what it does not keep: it mixes rows."""

    batch_invariant = ("rows",)
    saved_names = ()

    def op_forward(self, ctx, input_):
        return input_ - input_.mean(0)

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class Placed(Centered):
    """Declares what it does not keep: it treats the last row of eight in another way."""

    batch_invariant = ("rows",)
    saved_names = ()

    def op_forward(self, ctx, input_):
        y = input_ / 3
        y[7::8] = input_[7::8] * (1 / 3)
        return y


class Undeclared(Placed):
    def op_forward(self, ctx, input_):
        return input_ * 2


class Doubled(ops.GELU):
    """An activation that others wrote: its formula might look at all rows."""

    def value(self, x):
        return x * x.amax()


@pytest.mark.parametrize("op", [Centered(), Placed()])
def test_a_promise_that_is_not_kept_is_found(op, no_plugins):
    with mode(), pytest.raises(RuntimeError, match="other bits at another place, or beside"):
        op(torch.randn(3, 8))


@pytest.mark.parametrize(
    "op",
    [
        Undeclared(),
        Doubled(),
        ops.RoPE(8),
        ops.Dropout(0.5),
        ops.LayerNorm((2, 8)),
        ops.CrossEntropy(),
        ops.AddExtraInput(in_place=True),
        opfuse.Sequential(ops.Linear(8, 8), ops.Reshape((2, -1))),
    ],
)
def test_an_op_that_does_not_promise_it_is_refused_by_name(op, no_plugins):
    name = type(op[-1] if isinstance(op, opfuse.Sequential) else op).__name__
    extras = (
        [torch.zeros(2, dtype=torch.long)]
        if op.__class__.__name__ in ("RoPE", "CrossEntropy")
        else []
    )
    extras += [torch.zeros(2, 8)] if name == "AddExtraInput" else []
    with mode(), pytest.raises(RuntimeError, match=rf"\({name}\) does not promise"):
        op(torch.randn(2, 8), *extras)


def test_evaluation_makes_dropout_the_identity(no_plugins):
    chain = opfuse.Sequential(ops.Linear(8, 8), ops.Dropout(0.5))
    with mode():
        with pytest.raises(RuntimeError, match=r"op 2 \(Dropout\) does not promise"):
            chain(torch.randn(2, 8))
        assert chain.eval()(torch.randn(2, 8)).shape == (2, 8)


def test_a_gradient_is_refused(no_plugins):
    op, x = ops.Linear(4, 4), torch.randn(2, 4)
    with opfuse.options(invariant="batch"):
        with pytest.raises(
            RuntimeError, match=r"for the forward alone: call it under torch.no_grad"
        ):
            op(x)
        op.requires_grad_(False)
        assert op(x).shape == (2, 4)


def test_hooks_and_foreign_modules_are_refused(no_plugins):
    chain = opfuse.Sequential(ops.Linear(4, 4), ops.GELU())
    handle = chain[1].register_forward_hook(lambda *_: None)
    with mode(), pytest.raises(RuntimeError, match="GELU has forward hooks, and promises nothing"):
        chain(torch.randn(2, 4))
    handle.remove()
    chain.append(nn.Tanh())
    with mode(), pytest.raises(RuntimeError, match="Tanh is no op, and promises nothing"):
        chain(torch.randn(2, 4))
    del chain[2]
    with mode():
        chain(torch.randn(2, 4))


def test_compiling_is_refused(no_plugins):
    chain = opfuse.Sequential(ops.Linear(4, 4), ops.GELU())
    compiled = torch.compile(chain, backend="eager")
    with mode(), pytest.raises(Exception, match="torch.compile, functorch"):
        compiled(torch.randn(2, 4))


def test_functorch_is_refused(no_plugins):
    with mode(), pytest.raises(RuntimeError, match="torch.compile, functorch"):
        torch.func.vmap(ops.GELU())(torch.randn(2, 4))


def test_keywords_and_extras_of_another_shape_are_refused(no_plugins):
    chain = opfuse.Sequential(ops.GroupedLinear(1, 4, 4))
    with mode(), pytest.raises(RuntimeError, match="keyword arguments may be about all rows"):
        chain(torch.randn(2, 4), torch.tensor([2]), op_kwargs={0: {"output": torch.empty(2, 4)}})
    with mode(), pytest.raises(RuntimeError, match=r"leading dimensions \(2,\) of the input"):
        opfuse.Sequential(ops.Linear(4, 4), ops.AddExtraInput())(torch.randn(2, 4), torch.randn(4))


def test_the_value_of_the_option():
    with pytest.raises(ValueError, match="invariant must be 'batch', got 'rows'"):
        opfuse.options(invariant="rows")
    with pytest.raises(TypeError, match="invariant must be of type str"):
        opfuse.options(invariant=True)


# Fusions


def test_a_fusion_that_does_not_promise_it_is_not_used(register, fused):
    plain, promised = fused("Plain"), fused("Promised")
    register(
        forward_fusions=[
            Fusion((ops.GELU, ops.GELU), plain),
            Fusion((ops.SiLU, ops.SiLU), promised, declares=("batch_invariant",)),
        ]
    )
    chain = opfuse.Sequential(ops.GELU(), ops.GELU(), ops.SiLU(), ops.SiLU())
    x = torch.randn(70, 8)
    with mode():
        y = chain(x)
        assert_same_bits(chain(x[69]), y[69])
        report = opfuse.explain(chain, x)
    assert not plain.calls and promised.calls
    assert 'it does not promise the bits of a row that invariant="batch" asks for' in str(report)
    (refusal,) = {r.reason for call in report.calls for r in call.plan.refused}
    assert refusal.startswith("it does not promise")
    assert {step.fusion for call in report.calls for step in call.plan.forward} == {
        None,
        "Promised",
    }
    with torch.no_grad():
        chain(x)
    assert plain.calls


def test_a_fusion_whose_promise_is_not_kept_is_found(register, fused):
    class Mixing(fused("Mixing")):
        def fuser_forward(self, ctxs, x, **given):
            y, extras = super().fuser_forward(ctxs, x, **given)
            return y - y.mean(0), extras

    register(forward_fusions=[Fusion((ops.GELU,), Mixing, declares=("batch_invariant",))])
    with mode(), pytest.raises(RuntimeError, match="other bits at another place, or beside"):
        ops.GELU()(torch.randn(3, 8))


def test_a_plan_does_not_depend_on_the_rows(register, fused):
    """What asks for the number of rows always gets that of a block."""
    asked = []

    def when(ops, env):
        asked.append(env.rows)
        return env.rows is None or env.rows >= BLOCK or "too few rows"

    wide = fused("Wide")
    register(
        forward_fusions=[
            Fusion((ops.GELU,), wide, when, needs=("rows",), declares=("batch_invariant",))
        ]
    )
    op = ops.GELU()
    with mode():
        op(torch.randn(1, 8))
        op(torch.randn(1000, 8))
    assert {*asked} == {None, BLOCK} and wide.calls


def test_random_numbers_are_left_alone(no_plugins):
    state = torch.get_rng_state()
    with mode():
        ops.GELU()(torch.zeros(3, 8))
    assert torch.equal(state, torch.get_rng_state())


def test_a_recipe_has_to_promise_it(register):
    from fakes import make_plugin

    from opfuse.core.quantization.formats import ScaledTensor
    from opfuse.testing import PerTensor

    class Quantizer(opfuse.Quantizer):
        def quantize(self, tensor, usage, out=None):
            scale = torch.ones(1, dtype=torch.float32)
            return ScaledTensor(
                tensor.shape, tensor.dtype, self, tensor.to(torch.int8), None, scale
            )

    register(make_plugin(recipes={"per-tensor": PerTensor}, quantizer=lambda: Quantizer()))
    with mode(), opfuse.autocast(PerTensor()):
        with pytest.raises(RuntimeError, match="PerTensor does not promise that it casts a row"):
            ops.Linear(4, 4)(torch.randn(2, 4))
