"""RoPE and ApplyRoPE against a rotation of complex numbers in fp64: layouts, parts, shapes, what is refused."""

import re

import pytest
import torch

import opfuse
from opfuse import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DIM = 8
LEADS = {
    "one": ((), ()),
    "sequence": ((5,), (5,)),
    "batch": ((2, 5), (2, 5)),
    "one for all of a batch": ((2, 5), (5,)),
    "broadcast": ((2, 5), (2, 1)),
    "empty": ((0,), (0,)),
}
KINDS = [
    {},
    {"interleaved": True},
    {"rotary_dim": 4},
    {"interleaved": True, "rotary_dim": 6, "base": 500.0},
    {"rotary_dim": 0},
]


def reference(x, positions, *, base=10000.0, interleaved=False, rotary_dim=None):
    """As complex numbers times a number of length 1."""
    count = x.shape[-1] if rotary_dim is None else rotary_dim
    turned, rest = x[..., :count], x[..., count:]
    frequencies = base ** (-torch.arange(0, count, 2, dtype=torch.float64) / max(1, count))
    angles = (positions.double().unsqueeze(-1) * frequencies).unsqueeze(-2)
    if interleaved:
        pairs = turned.unflatten(-1, (-1, 2))
    else:
        pairs = torch.stack((turned[..., : count // 2], turned[..., count // 2 :]), -1)
    y = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.ones_like(angles), angles)
    y = torch.view_as_real(y)
    y = y.flatten(-2) if interleaved else torch.cat((y[..., 0], y[..., 1]), -1)
    return torch.cat((y, rest), -1)


def draw(lead, of_positions, dtype=torch.float64, heads=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), torch.randint(0, 50, of_positions, generator=generator)


def of_transformers(positions, kind, dtype):
    """Cosines and sines as ``transformers`` lays them out."""
    count = kind.get("rotary_dim", DIM)
    frequencies = kind.get("base", 10000.0) ** (-torch.arange(0, count, 2, dtype=torch.float64) / max(1, count))  # fmt: skip
    angles = positions.double().unsqueeze(-1) * frequencies
    angles = angles.repeat_interleave(2, -1) if kind.get("interleaved") else torch.cat((angles, angles), -1)  # fmt: skip
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply(kind):
    return ops.ApplyRoPE(DIM, **{name: kind[name] for name in kind if name != "base"})


@pytest.mark.parametrize("given", ["positions", "cos and sin"])
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients_match_transformers(near, kind, dtype, lead, given):
    x, positions = draw(*LEADS[lead], dtype)
    wide = x.detach().double().requires_grad_()
    if given == "positions":
        y = opfuse.Sequential(ops.RoPE(DIM, **kind))(x, positions)
    else:
        tables = of_transformers(positions, kind, torch.float64 if dtype is torch.float64 else torch.float32)  # fmt: skip
        y = opfuse.Sequential(apply(kind))(x, *tables)
    expected = reference(wide, positions, **kind)
    assert y.dtype is dtype and y.shape == x.shape
    near(y, expected)
    weight = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    (dx,) = torch.autograd.grad(y, x, weight)
    assert dx.dtype is dtype
    near(dx, torch.autograd.grad(expected, wide, weight.double())[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_half_tables_are_the_same(kind):
    x, positions = draw((5,), (5,))
    cos, sin = of_transformers(positions, kind, torch.float64)
    count = kind.get("rotary_dim", DIM) // 2
    part = slice(0, None, 2) if kind.get("interleaved") else slice(0, count)
    assert torch.equal(apply(kind)(x, cos, sin), apply(kind)(x, cos[..., part], sin[..., part]))


def test_as_the_rotation_of_llama():
    """``q cos + rotate_half(q) sin``, of heads before the sequence."""
    x, positions = draw((2, 5), (2, 5), torch.float32)
    cos, sin = of_transformers(positions, {}, torch.float32)
    q = x.transpose(1, 2)
    half = torch.cat((-q[..., DIM // 2 :], q[..., : DIM // 2]), -1)
    expected = (q * cos.unsqueeze(1) + half * sin.unsqueeze(1)).transpose(1, 2)
    torch.testing.assert_close(ops.ApplyRoPE(DIM)(x, cos, sin), expected)
    torch.testing.assert_close(ops.RoPE(DIM)(x, positions), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_whole_tables_may_differ_within_a_pair(kind, near):
    x, _ = draw((2, 5), (2, 5))
    count, woven = kind.get("rotary_dim", DIM), kind.get("interleaved")
    cos, sin = torch.randn(2, 2, 5, count, dtype=torch.float64)
    turned = x[..., :count]
    if woven:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-turned[..., count // 2 :], turned[..., : count // 2]), -1)
    turned = turned * cos.unsqueeze(-2) + other * sin.unsqueeze(-2)
    expected = torch.cat((turned, x[..., count:]), -1)
    y, dy = apply(kind)(x, cos, sin), torch.randn_like(expected)
    near(y, expected)
    near(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])


def test_positions_and_tables_are_shared_by_their_names():
    x, positions = draw((5,), (5,))
    first, second = (ops.RoPE(DIM).set_extra_input_name(0, "positions") for _ in range(2))
    chain = opfuse.Sequential(first, second)
    torch.testing.assert_close(chain(x, positions), reference(reference(x, positions), positions))


def test_the_backward_keeps_no_input_and_rotates_as_its_forward_did(call):
    x, positions = draw((5,), (5,))
    kept = opfuse.report.calls.saved_bytes(lambda: ops.RoPE(DIM)(x, positions), [positions])
    assert kept == 0
    op = ops.RoPE(DIM)
    expected = torch.autograd.grad(op(x, positions).square().mul(0.5).sum(), x)[0]
    torch.testing.assert_close(expected, x.detach())  # a rotation keeps lengths
    y = op(x, positions)
    op.base, op.interleaved = 7.0, True
    torch.testing.assert_close(torch.autograd.grad(y.square().mul(0.5).sum(), x)[0], x.detach())


@pytest.mark.costly(3)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("given", ["positions", "cos and sin"])
def test_compiled_and_under_autocast(given, autocast):
    x, positions = draw((2, 5), (5,), torch.float32)
    op = ops.RoPE(DIM, rotary_dim=4) if given == "positions" else ops.ApplyRoPE(DIM, rotary_dim=4)
    extras = [positions] if given == "positions" else of_transformers(positions, {"rotary_dim": 4}, torch.float32)  # fmt: skip
    chain = opfuse.Sequential(ops.Linear(DIM, DIM), op)
    results = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(x, *extras)
        assert y.dtype is (torch.bfloat16 if autocast else torch.float32)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *chain.parameters()])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_first_and_second_derivatives_match_the_reference(kind):
    x, positions = draw((2,), (2,))
    assert torch.autograd.gradcheck(lambda x: ops.RoPE(DIM, **kind)(x, positions), x)
    with opfuse.options(double_backward=True):
        y = ops.RoPE(DIM, **kind)(x, positions)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    expected = reference(x, positions, **kind).pow(3).sum()
    (wanted,) = torch.autograd.grad(expected, x, create_graph=True)
    torch.testing.assert_close(*[torch.autograd.grad(g.sum(), x)[0] for g in (first, wanted)])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rotary_dim": 3}, ValueError, "expected an even rotary_dim of at most 8"),
        ({"rotary_dim": 10}, ValueError, "expected an even rotary_dim of at most 8, the head_dim"),
        ({"base": 0}, ValueError, "expected a base above 0, got 0"),
        ({"base": "x"}, TypeError, "expected a real number as base"),
        ({"interleaved": 1}, TypeError, "expected a bool as interleaved, got 1"),
    ],
)
def test_arguments_that_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.RoPE(DIM, **options)


def test_calls_that_are_refused():
    x, positions = draw((2, 5), (2, 5), torch.float32)
    cos, sin = of_transformers(positions, {}, torch.float32)
    with pytest.raises(TypeError, match="expected an integer tensor"):
        ops.RoPE(DIM)(x, positions.float())
    with pytest.raises(ValueError, match=r"expected positions that fit the dimensions \(2, 5\)"):
        ops.RoPE(DIM)(x, positions[:, :4])
    with pytest.raises(ValueError, match="takes|expected 8 features"):
        ops.RoPE(DIM)(x[..., :6], positions)
    with pytest.raises(ValueError, match=r"expected 8 or 4 features in sin, got shape \(2, 5, 6\)"):
        ops.ApplyRoPE(DIM)(x, cos, sin[..., :6])
    with pytest.raises(RuntimeError, match="gives no gradient of cos, and it requires grad"):
        ops.ApplyRoPE(DIM)(x, cos.requires_grad_(), sin)
    with torch.no_grad():
        ops.ApplyRoPE(DIM)(x, cos, sin)
