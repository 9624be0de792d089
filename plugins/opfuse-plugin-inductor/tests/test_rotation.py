"""Compiled rotations, as Inductor compiles them or as they were traced, against the ops, bit for bit."""

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.core.plugins import using

TRACED = {"inductor.min_elements": 0, "inductor.backend": "eager"}
COMPILED = {"inductor.min_elements": 0}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "halves": {},
    "neighbours": {"interleaved": True},
    "part": {"rotary_dim": 10},
    "part of neighbours": {"interleaved": True, "rotary_dim": 6},
}
SIZE, QUERIES, KEYS = 16, 6, 2


def pair(**kind):
    rotations = [ops.ApplyRoPE(SIZE, **kind) for _ in range(2)]
    for op in rotations:
        op.set_extra_input_name(0, "cos").set_extra_input_name(1, "sin")
    return opfuse.Sequential(rotations[0], ops.SwapExtraInput(), rotations[1])


def tables(shape, dtype, count=SIZE):
    """The two numbers of a pair differ."""
    angle = torch.randn(*shape, count, generator=torch.Generator().manual_seed(2))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def draw(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(chain, keys, queries, cos, sin, options):
    """Both outputs and both gradients; which are used is said by ``requires_grad``."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in (keys, queries)]
    plugins = "" if options is None else "inductor"
    with using(plugins), opfuse.options(**options or {}):
        given = leaves[0], cos, sin, *leaves[1:]
        if options is not None:
            (call,) = opfuse.explain(chain, *given).calls
            fused = [each.fusion for each in call.plan.forward]
            assert fused == ["compiled rotation", None, "compiled rotation"]
        outputs = chain(*given)
        used = [y for y in outputs if y.requires_grad]
        if used:
            grads = [draw(*y.shape, dtype=y.dtype, seed=5) for y in used]
            torch.autograd.backward(used, grads)
    return [*[y.detach() for y in outputs], *[leaf.grad for leaf in leaves]]


def assert_same(chain, *given, options=TRACED):
    for a, b in zip(step(chain, *given, options), step(chain, *given, None), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(a, b))


@pytest.mark.parametrize("of_tables", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_ops(kind, dtype, of_tables):
    lead, given = (2, 5), KINDS[kind]
    count = given.get("rotary_dim", SIZE)
    x = [draw(*lead, n, SIZE, dtype=dtype).requires_grad_() for n in (KEYS, QUERIES)]
    for shape, width in ((lead, count), ((1, 5), count // 2), ((5,), count), ((), count // 2)):
        assert_same(pair(**given), *x, *tables(shape, of_tables or dtype, width))


@pytest.mark.costly(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_that_inductor_compiles(kind, dtype):
    x = [draw(2, 33, n, SIZE, dtype=dtype).requires_grad_() for n in (KEYS, QUERIES)]
    given = tables((1, 33), dtype, KINDS[kind].get("rotary_dim", SIZE))
    assert_same(pair(**KINDS[kind]), *x, *given, options=COMPILED)


@pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
def test_what_needs_no_gradient(wants):
    x = [draw(3, 4, n, SIZE, dtype=torch.float32) for n in (KEYS, QUERIES)]
    for each, wanted in zip(x, wants, strict=True):
        each.requires_grad_(wanted)
    assert_same(pair(), *x, *tables((3, 4), torch.float32))


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_of_both(used):
    given = *tables((4,), torch.float32), draw(3, 4, QUERIES, SIZE, dtype=torch.float32)
    found = []
    for plugins in ("inductor", ""):
        x = draw(3, 4, KEYS, SIZE, dtype=torch.float32).requires_grad_()
        queries = given[2].clone().requires_grad_()
        with using(plugins), opfuse.options(**TRACED if plugins else {}):
            (pair()(x, *given[:2], queries)[used] ** 2).sum().backward()
        found.append([x.grad, queries.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_one_tensor_of_any_layout():
    chain = opfuse.Sequential(ops.ApplyRoPE(SIZE))
    cos, sin = tables((5,), torch.float32)
    for x in (
        draw(5, 3, SIZE, dtype=torch.float32),
        draw(3, 5, SIZE, dtype=torch.float32).transpose(0, 1),
        draw(5, 3, SIZE, 2, dtype=torch.float32)[..., 0],
        draw(1, 3, SIZE, dtype=torch.float32).expand(5, 3, SIZE),
    ):
        found = []
        for plugins in ("inductor", ""):
            leaf = x.detach().requires_grad_()
            with using(plugins), opfuse.options(**TRACED if plugins else {}):
                y = chain(leaf, cos, sin)
                y.backward(draw(3, 5, SIZE, dtype=torch.float32).transpose(0, 1))
            found.append((y.detach(), leaf.grad))
            strides = y.stride()
        assert all(map(torch.equal, *found)) and found[0][0].stride() == strides


@pytest.mark.parametrize("wrong", ["shape", "width", "gradient", "heads"])
def test_errors_are_those_of_the_op(wrong):
    chain, x = opfuse.Sequential(ops.ApplyRoPE(SIZE)), draw(5, 3, SIZE, dtype=torch.float32)
    cos, sin = tables((4,) if wrong == "shape" else (5,), torch.float32, 15 + (wrong != "width"))
    if wrong == "gradient":
        x.requires_grad_(), cos.requires_grad_()
    x = x[..., :-2] if wrong == "heads" else x
    texts = []
    for plugins in ("inductor", ""):
        with using(plugins), opfuse.options(**TRACED if plugins else {}):
            with pytest.raises((ValueError, RuntimeError)) as error:
                chain(x, cos, sin)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_few_elements_and_other_devices_are_declined():
    x, given = draw(5, 3, SIZE, dtype=torch.float32), tables((5,), torch.float32)
    with using("inductor"):
        (call,) = opfuse.explain(opfuse.Sequential(ops.ApplyRoPE(SIZE)), x, *given).calls
    assert "as fast" in str(call.plan) and not any(each.fusion for each in call.plan.forward)
