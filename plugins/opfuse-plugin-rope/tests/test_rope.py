"""The fused ops against fp64 of the separate ops: layouts, norms, what is shared, what is declined."""

import copy
import subprocess
import sys

import pytest
import torch
from opfuse_rope import fused

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter, machine

INTERPRETING = machine.is_interpreting()
GPU = torch.cuda.is_available() and not INTERPRETING
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DIM, HEADS, KV = 16, 3, 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = (
    {},
    {"interleaved": True},
    {"rotary_dim": 10},
    {"interleaved": True, "rotary_dim": 6},
    {"base": 500.0},
)

if INTERPRETING:
    interpreter.install()


@pytest.fixture(autouse=True)
def alone():
    with opfuse.plugins.using("rope"), opfuse.options(**{"rope.twins": not (INTERPRETING or GPU)}):
        yield


def norm(kind):
    torch.manual_seed(0)
    made = {
        "rms": lambda: ops.RMSNorm(DIM),
        "centered": lambda: ops.RMSNorm(DIM, zero_centered_gamma=True),
        "l2": lambda: ops.L2Normalization(eps=0.1),
        "plain": lambda: ops.RMSNorm(DIM, elementwise_affine=False),
    }[kind]()
    if getattr(made, "weight", None) is not None:
        with torch.no_grad():
            made.weight.normal_()
    return [made]


def rotation(kind, tables):
    if not tables:
        return ops.RoPE(DIM, **kind).set_extra_input_name(0, "positions")
    op = ops.ApplyRoPE(DIM, **{name: kind[name] for name in kind if name != "base"})
    return op.set_extra_input_name(0, "cos").set_extra_input_name(1, "sin")


def pair(kind, tables=False, first=(), second=()):
    chain = (*first, rotation(kind, tables), ops.SwapExtraInput(), *second, rotation(kind, tables))
    return opfuse.Sequential(*chain).to(DEVICE)


def draw(lead, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*lead, n, DIM, generator=generator).to(dtype) for n in (KV, HEADS)]
    return [tensor.to(DEVICE).requires_grad_() for tensor in tensors]


def angles(shape, kind, tables, whole=True):
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 5000, shape, generator=generator)
    if not tables:
        return [positions.to(DEVICE)]
    count = kind.get("rotary_dim", DIM)
    # in whole tables the two numbers of a pair differ
    angle = torch.randn(*shape, count if whole else count // 2, generator=generator)
    return [angle.cos().to(DEVICE), angle.sin().to(DEVICE)]


def results(chain, given, extras, dtype=None):
    """Outputs and gradients; in another dtype by the separate ops."""
    if dtype is not None:
        given = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in given]
    first, *others = given
    outputs = chain(first, *extras, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in (*given, *chain.parameters()) if t.requires_grad]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


def check(chain, given, extras):
    found = results(chain, given, extras)
    with opfuse.plugins.using(""):
        truth = results(
            copy.deepcopy(chain).double(),
            given,
            [e.double() if e.is_floating_point() else e for e in extras],
            torch.float64,
        )
    for got, expected in zip(found, truth, strict=True):
        # positions of thousands: angles in fp32 are off by half a millionth of that
        atol = 3e-3 if got.dtype is torch.float32 and extras[0].dtype is torch.int64 else None
        if atol:
            torch.testing.assert_close(got.double(), expected, atol=atol, rtol=1e-3)
        else:
            # of weights in fp32, from gradients that were rounded
            assert_close(got.to(given[0].dtype), expected, gemm=got.ndim == 1)


@pytest.mark.costly(20)
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_queries_and_keys(kind, dtype, tables):
    for lead, of_angles in (((2, 5), (5,)), ((2, 5), (2, 1)), ((7,), (7,))):
        chain, given = pair(kind, tables), draw(lead, dtype)
        extras = angles(of_angles, kind, tables, whole=lead == (7,))
        check(chain, given, extras)


@pytest.mark.costly(20)
@pytest.mark.parametrize("first", ["rms", "centered", "l2", "plain"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_with_norms(kind, dtype, first):
    second = {"rms": "centered", "l2": "rms"}.get(first)
    chain = pair(kind, True, norm(first), norm(second) if second else ())
    check(chain, draw((2, 5), dtype), angles((5,), kind, True))
    alone = opfuse.Sequential(*norm(first), rotation(kind, True)).to(DEVICE)
    check(alone, draw((5,), dtype)[:1], angles((5,), kind, True))


def test_a_weight_with_gaps():
    gaps = norm("rms")
    gaps[0].weight = torch.nn.Parameter(torch.randn(2 * DIM, device=DEVICE)[::2])
    chain = opfuse.Sequential(*gaps, rotation({}, True), ops.SwapExtraInput(), rotation({}, True))
    check(chain, draw((2, 5), torch.float32), angles((5,), {}, True))


def plan(chain, *given):
    data = opfuse.explain(chain, *given).to_dict()
    return [[row["fusion"] for row in data[passes]] for passes in ("forward", "backward")]


def test_one_fusion_takes_both_passes():
    chain, (keys, queries) = pair({}, False, norm("rms"), norm("rms")), draw((2, 5), torch.float32)
    extras = angles((5,), {}, False)
    assert plan(chain, keys, *extras, queries) == [["rope of queries and keys"]] * 2
    single = opfuse.Sequential(rotation({}, False))
    assert plan(single, queries, *extras) == [["rope"]] * 2


@pytest.mark.parametrize("frozen", ["keys", "queries", "weights", "all but weights"])
def test_what_is_frozen(frozen):
    chain, given = pair({}, True, norm("rms"), norm("rms")), draw((2, 5), torch.float32)
    for name, tensor in zip(("keys", "queries"), given, strict=True):
        tensor.requires_grad_(frozen not in (name, "all but weights"))
    if frozen == "weights":
        chain.requires_grad_(False)
    check(chain, given, angles((5,), {}, True))
    with torch.no_grad():
        y, _ = chain(given[0], *angles((5,), {}, True), given[1])
    assert not y.requires_grad


def test_a_loss_of_one_output_alone():
    chain, (keys, queries) = pair({}, True, norm("rms")), draw((2, 5), torch.float32)
    cos, sin = angles((5,), {}, True)
    for which in (0, 1):
        fused = chain(keys, cos, sin, queries)[which].square().sum()
        with opfuse.plugins.using(""):
            separate = chain(keys, cos, sin, queries)[which].square().sum()
        wanted = [keys, queries, *chain.parameters()]
        found = [torch.autograd.grad(y, wanted, allow_unused=True) for y in (fused, separate)]
        for got, expected in zip(*found, strict=True):
            got, expected = (torch.zeros(()) if g is None else g for g in (got, expected))
            torch.testing.assert_close(*torch.broadcast_tensors(got, expected))


def test_layouts_of_tensors():
    """Parts of a wider product, heads before the sequence, and what the kernels do not take."""
    wide = torch.randn(2, 5, HEADS + KV + KV, DIM, device=DEVICE)
    parts = wide[:, :, HEADS : HEADS + KV], wide[:, :, :HEADS]
    turned = [torch.randn(2, n, 5, DIM, device=DEVICE).transpose(1, 2) for n in (KV, HEADS)]
    spread = [torch.randn(2, 5, n, 2 * DIM, device=DEVICE)[..., ::2] for n in (KV, HEADS)]
    empty = [torch.randn(0, 5, n, DIM, device=DEVICE) for n in (KV, HEADS)]
    chain, extras = pair({}, True, norm("rms"), norm("rms")), angles((5,), {}, True)
    for given in (parts, turned, spread, empty):
        check(chain, [t.detach().requires_grad_() for t in given], extras)


def test_different_angles_and_tokens():
    chain = opfuse.Sequential(ops.RoPE(DIM), ops.SwapExtraInput(), ops.RoPE(DIM, base=77.0))
    keys, queries = draw((5,), torch.float32)
    positions = torch.arange(5, device=DEVICE), torch.arange(9, 12, device=DEVICE)
    y, first = chain(keys, positions[0], queries[:3], positions[1])
    with opfuse.plugins.using(""):
        torch.testing.assert_close(y, chain[2](queries[:3], positions[1]))
        torch.testing.assert_close(first, chain[0](keys, positions[0]))
    ones_between = torch.randn(2, 1, 5, 1, DIM, device=DEVICE).expand(2, 3, 5, 1, DIM)
    tables = angles((2, 1, 5), {}, True)
    check(opfuse.Sequential(rotation({}, True)), [ones_between.clone().requires_grad_()], tables)


def test_the_backward_uses_the_numbers_of_its_forward():
    op, (x, _) = ops.RoPE(DIM), draw((5,), torch.float32)
    positions = torch.arange(5, device=DEVICE)
    y = opfuse.Sequential(op)(x, positions)
    op.base, op.interleaved = 7.0, True
    (dx,) = torch.autograd.grad(y.square().mul(0.5).sum(), x)
    torch.testing.assert_close(dx, x.detach())  # a rotation keeps lengths


def test_bad_input_is_refused_by_the_ops():
    chain, (keys, queries) = pair({}, True), draw((2, 5), torch.float32)
    cos, sin = angles((5,), {}, True)
    with pytest.raises(ValueError, match="ApplyRoPE expected cos that fit the dimensions"):
        chain(keys, cos[:4], sin[:4], queries)
    with pytest.raises(RuntimeError, match="gives no gradient of cos, and it requires grad"):
        chain(keys, cos.clone().requires_grad_(), sin, queries)


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (ops.RoPE(2048), "heads of up to 1024 features, and these have 2048"),
        (ops.RoPE(8, rotary_dim=0), "nothing is rotated"),
        (ops.RMSNorm((2, 8), device="meta"), "several dimensions together"),
        (None, "the ops in float64"),
    ],
)
def test_what_is_declined(op, says):
    from opfuse_rope import fused

    env = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    env = env._replace(dtype=torch.float64) if op is None else env
    assert says in fused._why_not((op or ops.RoPE(8),), env)
    compiling = env._replace(compiling=True, dtype=torch.bfloat16)
    assert fused._why_not((ops.RoPE(8),), compiling).startswith("torch.compile fuses")


def test_a_norm_before_a_rotation_is_worth_more_than_one_by_itself():
    """The fusion of both wins over one of the norm, which saves six passes, and one of the rotation."""
    env = opfuse.Environment(torch.device("cuda"), None, torch.bfloat16)
    norm, rope = ops.RMSNorm(8), ops.RoPE(8)
    for fusion in (*fused.FORWARD, *fused.BACKWARD):
        alone = fusion.benefit_of((rope,), env)
        assert fusion.benefit_of((norm, rope), env) > alone + 6


def test_importing_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, opfuse; before = set(sys.modules); import opfuse_rope; "
        "new = set(sys.modules) - before; assert new == {'opfuse_rope'}, new; "
        "opfuse_rope.opfuse_forward_fusions(); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
