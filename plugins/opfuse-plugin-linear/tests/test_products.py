"""The Triton products: against fp64 in the interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

from opfuse_linear import cases, choice, products, tiles
from opfuse_triton import TARGETS, Config, functions_of, recording, target
from opfuse_triton.resources import read_resources

interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()  # exact for bf16, which Triton's own is not

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIZES = [(3, 64, 40), (129, 128, 264), (127, 77, 50), (1, 8, 8)]  # rows, depth, features
KERNELS = products.BY_TILES, products.BY_POINTERS
GELU, SWIGLU = ops.GELU(), ops.SwiGLU()


@contextlib.contextmanager
def tf32(allowed):
    """How fp32 is multiplied, which also decides which kernel takes it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def draw(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def launched(call):
    """The launches of a call, for an H100, on tensors that may be real."""
    with recording(90) as launches:
        call()
    return launches


@interpreted
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_match_fp64_with_and_without_tf32(dtype, sizes):
    for allowed in (True, False) if dtype is torch.float32 else (False,):
        with tf32(allowed):
            check_values(dtype, *sizes)


def check_values(dtype, rows, depth, features):
    x, w, up, bias, addend = draw(
        dtype, (rows, depth), (features, depth), (features, depth), (features,), (rows, features)
    )
    bias = bias.float()  # as where autocast casts
    wide = [t.double() for t in (x, w, up, addend)]
    product = F.linear(wide[0], wide[1], bias.to(dtype).double())
    y, hidden = products.multiply(x, (w,), (bias,), functions_of(GELU), keep=True)
    assert_close(hidden, product, gemm=True)
    assert_close(y, GELU.value(hidden.double()), gemm=True)
    y, hidden = products.multiply(x, (w,), (None,), addend=addend, scale=-0.5)
    assert hidden is None
    assert_close(y, wide[3] - 0.5 * wide[0] @ wide[1].T, gemm=True)
    y, hidden = products.multiply(x, (w, up), (bias, None), functions_of(SWIGLU), keep=True)
    other = wide[0] @ wide[2].T
    assert_close(hidden, torch.cat([product, other], -1), gemm=True)
    gate, other = hidden.double().chunk(2, -1)
    assert_close(y, F.silu(gate) * other, gemm=True)
    again, nothing = products.multiply(x, (w, up), (bias, None), functions_of(SWIGLU))
    assert nothing is None and torch.equal(again, y)


@interpreted
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dimensions_and_layouts(lead):
    x, w, addend = draw(torch.float32, (*lead, 2, 32), (48, 32), (*lead, 48))
    for left in (x[..., 0, :], x[..., 1, :].clone()):
        for weight in (w, w.t().contiguous().t()):
            y, _ = products.multiply(left, (weight,), (None,), addend=addend)
            assert y.is_contiguous()
            assert_close(y, left.double() @ weight.double().T + addend.double(), gemm=True)


@interpreted
@pytest.mark.parametrize("arch", TARGETS)
def test_every_configuration_gives_the_same(arch):
    dtype = torch.bfloat16
    x, w, up, bias = draw(dtype, (130, 208), (272, 208), (272, 208), (272,))
    product = F.linear(x.double(), w.double(), bias.double())
    with target(arch):
        for weights, biases, act in (((w,), (bias,), GELU), ((w, up), (bias, bias), SWIGLU)):
            offered = products.configurations(
                x.device, dtype, (130, 272, 208), gated=len(weights) == 2
            )
            assert 4 <= len(offered) <= 8
            for config in offered:
                y, hidden = products.multiply(
                    x, weights, biases, functions_of(act), keep=True, config=config
                )
                assert_close(hidden[:, :272], product, gemm=True, what=str(config))
                assert_close(y, act.forward_value(hidden.double()), gemm=True, what=str(config))


@interpreted
def test_an_operand_whose_columns_lie_far_apart():
    """Steps beyond 2^31 elements in all; of the memory, only what is touched exists."""
    depth, step = 32, 2**31 // 25
    x = torch.empty(depth * step, dtype=torch.bfloat16).as_strided((3, depth), (1, step))
    x.copy_(draw(torch.bfloat16, (3, depth))[0])
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(depth, 16), ops.GELU()).bfloat16()
    results = []
    for selection in ("linear", ""):
        with torch.no_grad(), opfuse.plugins.using(selection):
            results.append(chain(x))
    torch.testing.assert_close(*results, atol=1e-2, rtol=2e-2)


class Softsign(ops.Activation):
    """An activation of another package, with a number of its own."""

    slope = 2.0
    number_names = ("slope",)

    def value(self, x):
        return x / (1 + self.slope * x.abs())

    def derivative(self, x):
        return (1 + self.slope * x.abs()) ** -2

    def device_functions(self):
        return _softsign, _softsign_derivative


if products.triton is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _softsign(x, slope):
        return x / (1.0 + slope * tl.abs(x))

    @triton.jit
    def _softsign_derivative(x, slope):
        d = 1.0 + slope * tl.abs(x)
        return 1.0 / (d * d)


ACTIVATIONS = [
    ops.GELU(approximate="none"), ops.ReLU(), ops.SiLU(), Softsign(), ops.GEGLU(), ops.SiTUGLU(),
    ops.ClampedSwiGLU(limit=1.0),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: type(act).__name__)
def test_a_linear_and_each_activation_fuse_into_one_step(act):
    chain = opfuse.Sequential(ops.Linear(24, 32), act)
    x, dy = draw(torch.float32, (5, 24), (5, 16 if act.gated else 32))
    results = []
    for selection in ("linear", ""):
        with opfuse.plugins.using(selection):
            leaf = x.clone().requires_grad_()
            y = chain(leaf)
            given = [leaf, *chain.parameters()]
            results.append([y, *torch.autograd.grad(y, given, dy)])
            if selection:
                step = opfuse.explain(chain, leaf).to_dict()["forward"][0]
                assert step["fusion"] == "linear+bias+activation"
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@interpreted
def test_the_fused_ops_launch_what_they_promise(monkeypatch):
    seen = []
    multiply = products.multiply
    monkeypatch.setattr(
        products, "multiply", lambda *given, **more: seen.append(more) or multiply(*given, **more)
    )
    x = torch.randn(4, 16, requires_grad=True)
    gated = ops.ParallelLinear([torch.nn.Linear(16, 24), torch.nn.Linear(16, 24, bias=False)])
    chains = {
        "kept": (ops.Linear(16, 24), ops.SiLU()),
        "gated": (ops.BasicLinear(16, 24), ops.SwiGLU()),
        "side by side": (gated, ops.SwiGLU()),
    }
    for name, made in chains.items():
        seen.clear()
        chain = opfuse.Sequential(*made)
        with opfuse.plugins.using("linear"):
            chain(x).sum().backward()
            assert [more["keep"] for more in seen] == [True], name
            with torch.no_grad():
                chain(x)
        assert [more["keep"] for more in seen] == [True, False], name
    for middle, scale in ((ops.ConstantScale(0.5), 0.5), (ops.Bias(24), 1.0)):
        seen.clear()
        chain = opfuse.Sequential(ops.BasicLinear(16, 24), middle, ops.AddExtraInput())
        with opfuse.plugins.using("linear"):
            chain(x, torch.randn(4, 24))
        assert [more["scale"] for more in seen] == [scale]


@interpreted
@pytest.mark.parametrize("case", [c for c in cases.CASES if c.gemms], ids=lambda case: case.name)
def test_each_tile_is_stored_once(case):
    """Tiles are read again by other programs, from the cache; what is written is written once."""
    from ledger import counting
    from opfuse_triton.recorded import storage_of

    for shape in case.small:
        with counting() as launches:
            given = case.run(**case.inputs(shape, "cpu"))
        (launch,) = launches
        outputs = given if isinstance(given, tuple) else (given,)
        operands = [operand for operand in case.tensors(**shape).values() if operand.output]
        pairs = zip(outputs, operands, strict=True)
        wanted = {storage_of(y): y.nbytes for y, operand in pairs if operand.role == "full"}
        written = launch.total("written")
        assert {place: written.pop(place) for place in wanted} == wanted
        sums = 4 * -(-shape["rows"] // tiles.LEAST_HEIGHT) * outputs[0].shape[-1]
        assert sum(written.values()) <= (sums if len(wanted) < len(operands) else 0)


def test_tensors_that_the_kernels_do_not_take():
    x, w, bias = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    assert products.takes(x, (w,), (bias,)) and products.takes(x[0], (w,), (None,))
    assert products.takes(x, (w,), (bias,), torch.ones(4, 6))

    class Mine(torch.Tensor):
        pass

    for given in (
        (x.as_subclass(Mine), (w,), (bias,)),
        (x.double(), (w.double(),), (None,)),
        (x, (w.bfloat16(),), (bias,)),
        (x[:0], (w,), (bias,)),
        (x, (w[:0],), (bias[:0],)),
        (x, (w[:, :4],), (bias,)),
        (x, (w,), (bias[:4],)),
        (x, (w,), (bias,), torch.ones(6)),
        (x, (w.to("meta"),), (bias,)),
        (x.to_sparse(), (w,), (bias,)),
    ):
        assert not products.takes(*given)


# Which kernel, with what


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_tiles_move_where_tma_can_move_them():
    def kernel(x, w, arch=90, dtype=torch.bfloat16):
        with recording(arch) as launches:
            products.multiply(x.to(dtype), (w.to(dtype),), (None,), functions_of(GELU))
        return launches[0].kernel

    x, w, by_tiles, pointers = meta(512, 256), meta(128, 256), *KERNELS
    assert kernel(x, w) is kernel(x, w, 100) is by_tiles
    assert kernel(x, w, 80) is kernel(x, w, "gfx942") is pointers
    assert kernel(meta(512, 260)[:, :256], w) is pointers  # rows begin at multiples of 8 bytes
    assert kernel(meta(512, 264)[:, :256], w) is by_tiles
    assert kernel(meta(512, 264)[:, 1:257], w) is pointers
    assert kernel(meta(256, 512).t(), w) is kernel(x, meta(256, 128).t()) is pointers
    assert kernel(x, meta(129, 256)) is pointers  # rows of the output
    for allowed, expected in ((True, by_tiles), (False, pointers)):
        with tf32(allowed):
            assert kernel(x, w, dtype=torch.float32) is expected


@pytest.mark.parametrize("value", ["ieee", "tf32", "bf16", "none"])
@pytest.mark.parametrize("home", [torch.backends, torch.backends.cuda.matmul], ids=["all", "cuda"])
def test_the_newer_settings_decide_as_the_older_do(home, value):
    """Once these were used, what reads the older ones raises; CUDA has no product in bf16."""
    x, w = (meta(*shape, dtype=torch.float32) for shape in ((512, 256), (128, 256)))
    try:
        try:
            home.fp32_precision = value
        except RuntimeError as error:  # torch's own refusal
            assert value == "bf16" and "does not support" in str(error)
        run = lambda: products.multiply(x, (w,), (None,), functions_of(GELU))  # noqa: E731
        (launch,) = launched(run)
        with target(90):
            config, *_ = products.configurations(x.device, x.dtype, (512, 128, 256), gated=False)
    finally:
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    assert launch.kernel is (products.BY_TILES if value == "tf32" else products.BY_POINTERS)
    assert ("PARTS" in config["constants"]) is (value == "tf32")


def test_the_grid_is_persistent():
    for rows in (8192, 128):
        run = lambda rows=rows: products.multiply(  # noqa: E731
            meta(rows, 1024), (meta(1024, 1024),), (None,), functions_of(GELU)
        )
        (launch,) = launched(run)
        count = math.prod(
            -(-n // launch.config[k]) for n, k in ((rows, "BLOCK_M"), (1024, "BLOCK_N"))
        )
        assert launch.grid == (min(132, count),)


def test_a_configuration_of_the_other_kernel_is_not_taken():
    tall = Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 1}, num_warps=4)
    given = (meta(512, 256),), (meta(128, 256),)
    for left, taken in ((meta(512, 257)[:, :256], True), (given[0][0], False)):
        run = lambda left=left: products.multiply(  # noqa: E731
            left, given[1], (None,), functions_of(GELU), config=tall.to_dict()
        )
        (launch,) = launched(run)
        assert (launch.config == tall) == taken


# Compiled


def compile_for(arch, act=None, *, config=None, keep=True, sizes=(8192, 1024, 4096)):
    rows, depth, features = sizes
    count = 2 if act is not None and act.gated else 1
    with recording(arch) as launches:
        products.multiply(
            meta(rows, depth),
            (meta(features, depth),) * count,
            (meta(features),) * count,
            None if act is None else functions_of(act),
            addend=meta(rows, features) if act is None else None,
            keep=keep and act is not None,
            config=config,
        )
    found = launches[0].compile()
    return found, read_resources(found)


@pytest.mark.costly(5)
@compiled
@pytest.mark.parametrize("act", [None, GELU, SWIGLU], ids=["add", "GELU", "SwiGLU"])
@pytest.mark.parametrize("arch", TARGETS)
def test_it_compiles_to_matrix_instructions(arch, act, monkeypatch, tmp_path):
    _, found = compile_for(arch, act)
    wanted = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}.get(arch, "mfma")
    assert set(found.matrix) == {wanted} and not found.spilled
    assert found.shared <= TARGETS[arch].shared_memory
    assert (found.tma > 0) == (arch in (90, 100))


WHOLE = 128, 256, 128, 8, 8, 3, False, 1  # the epilogue works on a whole tile at once
HALVES = 128, 256, 128, 8, 8, 4, False, 2
ERF, SQUARED = ops.GELU(approximate="none"), ops.SReLU()


@compiled
@pytest.mark.parametrize(
    ("act", "row", "spills"),
    [(ERF, HALVES, True), (GELU, HALVES, False), (SQUARED, WHOLE, False)],
    ids=["erf", "tanh", "SReLU, which takes the most registers"],
)
def test_large_tiles_that_keep_the_input_are_taken_where_they_do_not_spill(act, row, spills):
    assert (row in tiles._BY_TILES[90, False]) and functions_of(act) is not None
    sizes, config = (8192, 4096, 4096), tiles._config(row, 2)
    found = {}
    with target(90):
        for keep in (True, False):
            found[keep] = choice.configurations(
                (ops.BasicLinear(4096, 4096, device="meta"), act),
                environment(measured=math.inf, requires_grad=keep),
            )
    assert config.to_dict() in found[False]
    assert (config.to_dict() in found[True]) == (not spills)
    _, resources = compile_for(90, act, config=config, sizes=sizes)
    assert bool(resources.spilled) == spills


def test_every_activation_of_one_value_is_known_to_be_light_or_not():
    of = [functions_of(act).value for act in cases._KEPT.values()]
    assert {f.__name__ for f in of} == {*(f.__name__ for f in tiles.LIGHT), "gelu_erf"}
    single = [
        cls for cls in (getattr(ops, name) for name in ops.__all__)
        if isinstance(cls, type) and issubclass(cls, ops.Activation) and not cls.gated
        and cls is not ops.Activation and functions_of(cls()) is not None
    ]  # fmt: skip
    assert {*single} == {type(act) for act in cases._KEPT.values()}


@compiled
@pytest.mark.skipif(not tiles.CAN_SPECIALIZE, reason="this Triton's compiler cannot specialize")
@pytest.mark.parametrize("arch", [90, 100])
def test_a_specialized_configuration_really_is(arch):
    offered = products.configurations
    with target(arch):
        found = offered(torch.device("meta"), torch.bfloat16, (8192, 4096, 1024), gated=False)
    specialized = next(config for config in found if config["constants"]["SPECIALIZE"])
    kernel, resources = compile_for(arch, GELU, config=specialized)
    assert resources.warps > specialized["num_warps"] and not resources.spilled
    assert "setmaxnreg" in kernel.asm["ptx"]


# Where it is used


def environment(**changes):
    on_gpu = {"device": torch.device("cuda"), "capability": (9, 0), "dtype": torch.bfloat16}
    base = opfuse.Environment(torch.device("cpu"), None, torch.float32)
    return base._replace(**on_gpu | changes)


LINEAR = ops.BasicLinear(16, 24)
TILES = Config({"BLOCK_M": 64}, num_warps=4).to_dict()


def test_a_product_is_used_only_where_it_was_measured():
    chain = LINEAR, GELU
    unmeasured = choice.refusal(chain, environment())
    assert "it was not measured on this GPU" in unmeasured and "1.07x as fast" in unmeasured
    assert choice.refusal(chain, environment(measured=math.inf)) == ""
    slow = choice.refusal(chain, environment(measured=1.0))
    assert slow == "opfuse tune found no Triton product faster than the library's"
    assert choice.refusal(chain, environment(measured=1.2, configuration=TILES)) == ""
    assert choice.product(chain, environment(measured=math.inf)) is None
    assert choice.product(chain, environment(measured=1.2, configuration=TILES)) is not None


@pytest.mark.parametrize(
    "said, chain, changes",
    [
        ("under torch.compile", (LINEAR, GELU), {"compiling": True}),
        ("takes no float64", (LINEAR, GELU), {"dtype": torch.float64}),
        ("run on a GPU, and this is meta", (LINEAR, GELU), {"device": torch.device("meta")}),
        ("compute capability 8.0", (LINEAR, GELU), {"capability": (7, 5)}),
        ("Softsign has no device", (LINEAR, type("Softsign", (Softsign,), {"value": abs})()), {}),
        ("one after the other", (LINEAR, ops.SwiGLU(glu_interleave_size=2)), {}),
        ("two halves", (ops.BasicLinear(16, 23), SWIGLU), {}),
        ("a gate and what", (ops.ParallelLinear([LINEAR, LINEAR]), GELU), {}),
        ("a gate and what", (ops.ParallelLinear([LINEAR, ops.Linear(16, 8)]), SWIGLU), {}),
    ],
)
def test_each_refusal_gives_its_reason(said, chain, changes):
    assert said in choice.refusal(chain, environment(measured=math.inf, **changes))


@compiled
def test_on_a_cpu_it_needs_the_interpreter():
    said = choice.refusal((LINEAR, GELU), environment(device=torch.device("cpu")))
    assert said == "its kernels run on a GPU, and this is cpu"


def test_tune_measures_at_most_eight_configurations():
    env = environment(measured=math.inf)
    with target(90):
        for chain in ((LINEAR, GELU), (LINEAR, SWIGLU), (LINEAR, ops.AddExtraInput())):
            offered = choice.configurations(chain, env)
            assert 1 <= len(offered) <= 8
            assert all(Config(**config).to_dict() == config for config in offered)
        assert choice.configurations((LINEAR, GELU), env._replace(compiling=True)) == ()
