"""Products in FP8: what they compute, how they call PyTorch, where they stand, and what is said elsewhere."""

import copy
import math
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import exact_nvfp4 as nv  # from the folder just added
import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import gemm, hardware, products
from opfuse_quantized.swizzle import swizzled, unswizzled
from test_nvfp4 import expected as copies_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

import opfuse
from opfuse import QuantizerRole, ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
RECIPES = {"fp8-delayed": 1, "fp8-current": 1, "fp8-block": 4, "mxfp8": 32, "nvfp4": 16}
"""The recipes, and what the sizes of their tensors are multiples of."""
NATIVE = {"fp8.products": "native"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H100 = hardware.Hardware("cuda", (9, 0), "sm_90", (12, 9))


def decoded(scale, kind, swizzle, outer, inner):
    """The scale of each value of a matrix ``(outer, inner)``, by PyTorch's text about its layout."""
    if kind is ScalingType.TensorWise:
        assert scale.numel() == 1 and scale.dtype is torch.float32
        return scale.double().reshape(1, 1).expand(outer, inner)
    if kind is ScalingType.RowWise:
        assert scale.shape == (outer, 1) and scale.is_contiguous()
        return scale.double().expand(outer, inner)
    blocks = math.ceil(inner / (32 if kind is ScalingType.BlockWise1x32 else 128))
    if kind is ScalingType.BlockWise1x128:
        assert scale.shape == (outer, blocks) and scale.stride(0) == 1
        assert scale.stride(1) in ((outer,) if blocks > 1 else (outer, 1))
        return scale.double().repeat_interleave(128, 1)[:, :inner]
    if kind is ScalingType.BlockWise128x128:
        wide, down = 4 * math.ceil(blocks / 4), math.ceil(outer / 128)
        assert scale.shape == (wide, down) and scale.stride(0) == 1
        assert down == 1 or scale.stride(1) == wide
        each = scale.t().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return each[:outer, :inner]
    if isinstance(kind, list):
        assert kind == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        scale, over_all = scale
        assert scale.dtype is E4M3
        over_all = decoded(over_all, kind[1], swizzle[1], outer, inner)
        return untiled(scale, outer, math.ceil(inner / 16)).repeat_interleave(16, 1) * over_all
    assert swizzle is SwizzleType.SWIZZLE_32_4_4 and scale.dtype is torch.float8_e8m0fnu
    return untiled(scale, outer, blocks).repeat_interleave(32, 1)


def untiled(scale, outer, blocks):
    """Scales in tiles of 128 rows and 4 columns as a matrix, without what fills up the tiles."""
    assert scale.is_contiguous()
    across = math.ceil(blocks / 4)
    assert scale.numel() == 128 * math.ceil(outer / 128) * 4 * across
    flat, each = scale.flatten().double(), torch.empty(outer, blocks, dtype=torch.float64)
    for r in range(outer):
        for c in range(blocks):
            tile = (r // 128) * across + c // 4
            each[r, c] = flat[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4]
    return each


def numbers(codes):
    """Codes as fp64; of FP4 two in a byte, of which the first is in the low half."""
    if codes.dtype is not E2M1:
        return codes.double()
    return torch.from_numpy(nv.values(nv.unpacked(codes.view(torch.uint8).numpy())))


class ScaledMM:
    """Stands in for ``scaled_mm`` of a GPU: refuses what that refuses, and computes in fp64."""

    def __init__(self):
        self.calls, self.strided = [], 0

    def __call__(self, a, b, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b, **given):
        kinds = [kind_a] if kind_a == kind_b else [kind_a, kind_b]
        for matrix in (a, b.t()) if a.numel() and b.numel() else ():
            apart, each = matrix.stride()
            assert each == 1 and apart % 16 == 0 and matrix.data_ptr() % 16 == 0
            tensor_wise = kinds == [ScalingType.TensorWise]
            assert apart >= matrix.shape[1] if tensor_wise else apart == matrix.shape[1]
            self.strided += apart > matrix.shape[1]
        codes = E2M1 if isinstance(kind_a, list) else E4M3
        if kinds not in ([ScalingType.TensorWise], [ScalingType.RowWise]):
            assert a.dtype is b.dtype is codes and not given["use_fast_accum"]
            assert kinds != [ScalingType.BlockWise128x128]
        assert {a.dtype, b.dtype} != {E5M2}
        (m, k), n, bias = a.shape, b.shape[1], given["bias"]
        assert bias is None or bias.dtype is given["output_dtype"] is not torch.float32
        assert k % 16 == 0 and n % 16 == 0  # bytes of a row, which begins at a multiple of 16
        k *= 2 if codes is E2M1 else 1
        left = numbers(a) * decoded(scale_a, kind_a, swizzle_a, m, k)
        if kind_b is ScalingType.RowWise:
            assert a.dtype is b.dtype is E4M3 and given["output_dtype"] is torch.bfloat16
            scale_b = scale_b.t()
        right = numbers(b.t()) * decoded(scale_b, kind_b, swizzle_b, n, k)
        kind_a, kind_b = (kind[0] if isinstance(kind, list) else kind for kind in (kind_a, kind_b))
        self.calls.append((kind_a, kind_b, given["use_fast_accum"]))
        return (left @ right.t() + (0 if bias is None else bias.double())).to(given["output_dtype"])


def on_a_gpu(monkeypatch):
    """The products of a GPU, all of them, on the CPU."""
    stand_in = ScaledMM()
    monkeypatch.setattr(gemm.F, "scaled_mm", stand_in)
    monkeypatch.setattr(hardware, "why_no_gemm", lambda kind, here: "")
    return stand_in


gpu = pytest.fixture(on_a_gpu)


CURRENT = "fp8-delayed", "fp8-current"


def on_cpu(recipe):
    return recipe in CURRENT


def linears(kind, inputs, outputs, bias, dtype=torch.float32):
    torch.manual_seed(0)
    if kind == "linear":
        return opfuse.Sequential(ops.Linear(inputs, outputs, bias=bias)).to(dtype)
    named = {"gate": ops.Linear(inputs, outputs, bias=bias), "up": ops.BasicLinear(inputs, outputs)}
    return opfuse.Sequential(ops.ParallelLinear(named)).to(dtype)


def stands_for(recipe, role, tensor):
    """Both copies of a quantized tensor in fp64, before they are rounded to a compute dtype."""
    known = fp8.opfuse_recipes()[recipe]() if isinstance(recipe, str) else recipe
    made = fp8.make(known, QuantizerRole("linear", role), "cpu").quantize(tensor.detach(), BOTH)
    return made.widened(ROWWISE).double(), made.widened(COLUMNWISE).double()


def expected(recipe, model, x, dy):
    """Output and gradients in fp64, from the quantized tensors: of the input, weights and biases."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = {n.rpartition(".")[0]: p for n, p in model.named_parameters() if n.endswith("bias")}
    names = [n.rpartition(".")[0] for n, _ in model.named_parameters() if n.endswith("weight")]
    xr, xc = (t.reshape(-1, x.shape[-1]) for t in stands_for(recipe, "input", x))
    dr, dc = (t.reshape(-1, dy.shape[-1]) for t in stands_for(recipe, "grad_output", dy))
    plain = dy.double().reshape(-1, dy.shape[-1])
    y, dx, dw, db, start = [], 0, [], [], 0
    for name, weight in zip(names, weights, strict=True):
        here = slice(start, start + weight.shape[0])
        wr, wc = stands_for(recipe, "weight", weight)
        bias = biases.get(name)
        y.append(xr @ wr.T + (0 if bias is None else bias.detach().double()))
        dx = dx + dr[:, here] @ wc
        dw.append(dc[:, here].T @ xc)
        if bias is not None:
            db.append(plain[:, here].sum(0))
        start = here.stop
    return torch.cat(y, -1).view(dy.shape), dx.view(x.shape), dw, db


def run(model, x, dy, recipe, mode="native", selection="fp8"):
    """Output and gradients: of the input, of the weights, of the biases."""
    params = dict(model.named_parameters())
    order = sorted(params, key=lambda name: name.endswith("bias"))
    leaf = x.clone().requires_grad_()
    with opfuse.plugins.using(selection), opfuse.options(**{"fp8.products": mode}):
        with opfuse.autocast(recipe):
            y = model(leaf)
        grads = torch.autograd.grad(y, [leaf, *[params[name] for name in order]], dy)
    return [y.detach(), *grads]


def fusions(model, x, recipe, mode="native"):
    """The fusions of the plan, forward and backward, and the sentences about those refused."""
    with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.products": mode}):
        with opfuse.autocast(recipe):
            data = opfuse.explain(model, x.clone().requires_grad_()).to_dict()
    taken = [row["fusion"] for name in ("forward", "backward") for row in data[name]]
    return [name for name in taken if name], {row["reason"] for row in data["refused"]}


def data(shape, features, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator).to(dtype)
    return x, torch.randn(*shape[:-1], features, generator=generator).to(dtype)


def close(mine, truth, rtol):
    most = truth.abs().max() if truth.numel() else 0
    assert ((mine.double() - truth).abs() <= rtol * (truth.abs() + most / 4)).all()


def check(got, right, dtype, depth):
    """Exact but for the order of the sums in fp32, and one rounding of the result."""
    y, dx, dw, db = right
    eps = torch.finfo(dtype).eps / 2
    for mine, truth in zip(got, [y, dx, *dw, *db], strict=True):
        assert mine.dtype is dtype and mine.shape == truth.shape
        if truth.numel():
            atol = 2**-22 * depth * truth.abs().max().item()
            torch.testing.assert_close(mine.double(), truth, rtol=eps * 1.01, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "parallel"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_products_of_codes_on_a_cpu(recipe, kind, bias, dtype):
    """PyTorch's own, and those that are emulated, by one reference; odd shapes too."""
    for shape in ((3, 7), (1, 7), (127, 33), (2, 3, 7), (7,), (2, 1, 2, 7), (0, 7)):
        model = linears(kind, shape[-1], 5, bias, dtype)
        x, dy = data(shape, 5 if kind == "linear" else 10, dtype)
        right = expected(recipe, model, x, dy)
        if kind == "linear" and bias:  # one by one, the product is rounded before the bias comes
            check(run(model, x, dy, recipe), right, dtype, 128)
            continue
        for mode in ("native", "emulated"):
            check(
                run(linears(kind, shape[-1], 5, bias, dtype), x, dy, recipe, mode),
                right,
                dtype,
                128,
            )


@pytest.mark.parametrize("kind", ["linear", "parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_a_gpu(gpu, recipe, kind):
    """Every layout, with blocks that are not whole, as a GPU would get it."""
    least = 32 if recipe == "mxfp8" else 16
    wide = 288 if kind == "linear" else 128
    shapes = [(least, 64, 128), (96, 160, wide), (160, 64, 128)]
    shapes += [(48, 208, 80), (0, 32, 64)] if recipe == "nvfp4" else []
    for rows, inputs, outputs in shapes:
        # zeros fill up what is summed over
        rows = rows if recipe in ("mxfp8", "nvfp4") else rows + 4
        for bias in (False, True):
            model = linears(kind, inputs, outputs, bias, torch.bfloat16)
            x, dy = data(
                (rows, inputs), outputs if kind == "linear" else 2 * outputs, torch.bfloat16
            )
            right = expected(recipe, model, x, dy)
            got = run(model, x, dy, recipe)
            if kind == "linear" and bias and not on_cpu(recipe):  # the bias comes after a rounding
                close(got[0], right[0], 2**-7)
                got[0] = right[0].to(torch.bfloat16)
            check(got, right, torch.bfloat16, 512)
            taken, _ = fusions(model, x, recipe)
            assert len(taken) == 2 and all(name.startswith("fp8") for name in taken)


@pytest.mark.parametrize("kind", ["linear", "parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_products_on_a_gpu_match_the_expected_values(recipe, kind):
    """What the hardware gives, with as many bits as its sums have."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    how, why = fp8.support("cuda")[recipe]
    if how != "native":
        pytest.skip(why)
    model = linears(kind, 256, 512, True, torch.bfloat16)
    x, dy = data((96, 256), 512 if kind == "linear" else 1024, torch.bfloat16)
    y, dx, dw, db = expected(recipe, model, x, dy)
    model, x = model.cuda(), x.cuda()
    got = run(model, x, dy.cuda(), recipe, "auto")
    for mine, right in zip(got, [y, dx, *dw, *db], strict=True):
        assert (mine.cpu().double() - right).norm() <= 2**-7 * right.norm()
    taken, _ = fusions(model, x, recipe, "auto")
    assert sum("linear" in name for name in taken) == 2  # casts may be fused besides


def test_sums_of_fewer_bits_are_of_a_forward_with_one_scale(gpu):
    half, fp32 = torch.bfloat16, torch.float32
    for recipe, dtype, fast in (
        ("fp8-current", half, True),
        ("fp8-delayed", half, True),
        ("fp8-delayed", fp32, False),  # whose results would show it
        ("fp8-block", half, False),
    ):
        gpu.calls.clear()
        model = linears("linear", 64, 32, False, dtype)
        run(model, *data((16, 64), 32, dtype), recipe)
        assert [call[2] for call in gpu.calls] == [fast, False, False]
    one, two = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    assert [call[:2] for call in gpu.calls] == [(one, two), (one, two), (one, one)]


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
@pytest.mark.parametrize("kind", ["linear", "parallel"])
def test_only_what_is_needed_is_multiplied(gpu, kind, frozen):
    model = linears(kind, 32, 16, True, torch.bfloat16)
    x, dy = data((16, 32), 16 if kind == "linear" else 32, torch.bfloat16)
    first = next(iter(model.parameters()))
    first.requires_grad_(frozen == "input")
    x.requires_grad_(frozen == "weight")
    with opfuse.plugins.using("fp8"), opfuse.options(**NATIVE), opfuse.autocast("fp8-current"):
        y = model(x)
    count = 1 if kind == "linear" else 2
    assert len(gpu.calls) == count  # one scale per tensor, on a GPU without products by row
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(y, wanted, dy)
    assert all(grad.isfinite().all() for grad in grads)
    more = {"input": count, "weight": 2 * count - 1, "both": count - 1}[frozen]
    assert len(gpu.calls) == count + more
    with torch.no_grad(), opfuse.plugins.using("fp8"), opfuse.autocast("fp8-current"):
        with opfuse.options(**NATIVE):
            assert torch.equal(model(x), y)


def test_products_of_nvfp4_are_those_of_its_definition(gpu):
    """What numpy makes of the values, multiplied in fp64, up to one rounding; all techniques or none.

    Nothing of the plugin is on that side. The emulated products differ by their sums in fp32.
    """
    none = {f"disable_{name}": True for name in ("rht", "stochastic_rounding", "2d_quantization")}
    four = {"disable_rht": True, "nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"}
    for given, (rows, inputs, outputs) in zip(
        ({}, none, four), ((48, 208, 80), (160, 64, 144), (16, 16, 16)), strict=True
    ):
        recipe = fp8.NVFP4BlockScaling(**given)
        model = linears("linear", inputs, outputs, False)
        x, dy = data((rows, inputs), outputs, torch.float32)
        weight = next(model.parameters()).detach()
        x1, w1, d1 = [
            copies_of(recipe, role, tensor)
            for role, tensor in (("input", x), ("weight", weight), ("grad_output", dy))
        ]
        gpu.calls.clear()
        got = run(model, x, dy, recipe)
        assert [call[0] for call in gpu.calls] == [ScalingType.BlockWise1x16] * 3
        emulated = run(linears("linear", inputs, outputs, False), x, dy, recipe, "emulated")
        pairs = (x1[0], w1[0]), (d1[0], w1[1]), (d1[1], x1[1])
        for native, other, pair in zip(got, emulated, pairs, strict=True):
            right = torch.from_numpy(nv.block_product(*pair))
            most = right.abs().max().item()
            torch.testing.assert_close(native.double(), right, rtol=2**-23, atol=1e-12 * most)
            torch.testing.assert_close(other.double(), right, rtol=1e-5, atol=2**-22 * most)


def test_transformed_values_are_multiplied_with_such_alone(gpu):
    """The product of codes would be another one, without an error."""
    x = torch.randn(32, 32)
    mixed, plain, other = [
        gemm.GemmOperand.of(fp8.NVFP4Quantizer(signs=signs).quantize(x, BOTH), COLUMNWISE)
        for signs in (0xD7E8, None, 0x00FF)
    ]
    assert gemm.multiply(mixed, mixed, torch.float32).shape == (32, 32)
    for wrong in (plain, other):
        with pytest.raises(ValueError, match="needs the same signs in both operands, got 55272"):
            gemm.multiply(mixed, wrong, torch.float32)


SIDES = {"fp8-block": (128, 256, 96), "mxfp8": (32, 96, 64)}
"""Sizes of linears side by side, of which all blocks but the last are whole."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scales", ["1 x 128 weights", *RECIPES])
def test_linears_side_by_side_are_one_product(gpu, monkeypatch, scales, biased):
    """Each weight has its own scales, and results are rounded once; with two levels no two join."""
    recipe = scales if scales in RECIPES else "fp8-block"
    given = fp8.opfuse_recipes()[recipe]()
    if scales not in RECIPES:
        given = fp8.Float8BlockScaling(w_block_scaling_dim=1)
    sizes, has_bias = SIDES.get(recipe, (48, 16, 80)), (biased, False, biased)
    torch.manual_seed(0)
    pairs = enumerate(zip(sizes, has_bias, strict=True))
    named = {f"l{i}": ops.Linear(160, size, bias=bias) for i, (size, bias) in pairs}
    with torch.no_grad():
        for i, linear in enumerate(named.values()):
            linear.weight.mul_(10.0**i)  # whose scales differ
    model = opfuse.Sequential(ops.ParallelLinear(named)).to(torch.bfloat16)
    x, dy = data((64, 160), sum(sizes), torch.bfloat16)
    monkeypatch.setattr(hardware, "scales_rows", lambda here: True)
    got = run(model, x, dy, given)
    kinds = [call[:2] for call in gpu.calls]
    by_block, by_tensor = scales not in (*CURRENT, "nvfp4"), scales in CURRENT
    assert len(kinds) == (1 if by_block or by_tensor else 3) + (1 if by_block else 3) + 3
    rows = (ScalingType.RowWise, ScalingType.RowWise)
    assert not by_tensor or (kinds[0], kinds.count(rows)) == (rows, 1)
    check(got, expected(given, model, x, dy), torch.bfloat16, 512)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_real_width_match_the_expected_values(recipe, request):
    if not on_cpu(recipe):
        request.getfixturevalue("gpu")
    model = linears("linear", 1024, 1056, False, torch.bfloat16)
    x, dy = data((32, 1024), 1056, torch.bfloat16)
    check(run(model, x, dy, recipe), expected(recipe, model, x, dy), torch.bfloat16, 2048)


def test_swizzled_scales_by_their_formula():
    rows, columns = 130, 6
    scale = torch.arange(rows * columns).remainder(251).to(torch.uint8).view(rows, columns)
    got = swizzled(scale.view(torch.float8_e8m0fnu))
    assert got.dtype is torch.float8_e8m0fnu and got.numel() == 256 * 8
    flat, expected_sum = got.view(torch.uint8), 0
    for r in range(rows):
        for c in range(columns):
            place = 512 * (r // 128 * 2 + c // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
            assert flat[place] == scale[r, c]
            expected_sum += int(scale[r, c])
    assert int(flat.long().sum()) == expected_sum  # all others are zero
    assert torch.equal(unswizzled(got, rows, columns).view(torch.uint8), scale)


@pytest.mark.parametrize("usage", [ROWWISE, COLUMNWISE], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("form", ["mx", "nvfp4"])
def test_parts_of_an_operand_that_was_swizzled(form, usage):
    """Those of the one that was not: along tiles, and within them."""
    x = torch.randn(320, 416) * torch.logspace(-3, 3, 416)
    makes, kind = {
        "mx": (
            lambda swizzles: fp8.MXQuantizer(E4M3, swizzles=swizzles),
            ScalingType.BlockWise1x32,
        ),
        "nvfp4": (
            lambda swizzles: fp8.NVFP4Quantizer(swizzles=swizzles),
            ScalingType.BlockWise1x16,
        ),
    }[form]
    wanted, got = (
        gemm.GemmOperand.of(makes(swizzles).quantize(x, usage), usage) for swizzles in (False, True)
    )
    first = lambda operand: operand.scaling()[0] if form == "mx" else operand.scaling()[0][0]  # noqa: E731
    assert got.swizzled and first(got) is got.scale, "swizzled before the product"
    last = len(got.data), got.depth
    assert last == ((320, 416) if usage.rowwise else (416, 320))
    for start, stop in ((0, 128), (128, 256), (256, None), (32, 96), (96, 288), (0, None)):
        parts = [
            (one.outer(start, stop or last[0]), one.inner(start, stop or last[1]))
            for one in (got, wanted)
        ]
        for mine, other in zip(*parts, strict=True):
            assert mine.kind is kind and mine.over_all is got.over_all
            assert torch.equal(mine.data.view(torch.uint8), other.data.view(torch.uint8))
            scales = [first(one).view(torch.uint8) for one in (mine, other)]
            assert torch.equal(*scales), (start, stop)


def test_parts_of_a_single_row_of_scales():
    """As a kernel lays it out. PyTorch refuses the stride of the whole, which counts as contiguous."""
    made = fp8.BlockQuantizer(E4M3, (1, 128)).quantize(torch.randn(64, 256), COLUMNWISE)
    whole = gemm.GemmOperand.of(made, COLUMNWISE)
    as_launched = torch.empty_strided((1, 256), (256, 1)).copy_(whole.scale)
    part = whole._replace(scale=as_launched).outer(0, 128)
    same = decoded(*part.scaling(), 128, 64)
    assert torch.equal(same, as_launched.double()[0, :128, None].expand(128, 64))


def part_of_codes(rows, wide, start, stop, dtype=E5M2, shift=0):
    """Columns of a matrix of codes that begins ``shift`` bytes after a multiple of 16, as an operand."""
    torch.manual_seed(0)
    memory = torch.randn(rows * wide + shift).to(dtype)
    codes = memory[shift:].view(rows, wide)
    operand = gemm.GemmOperand(codes, torch.tensor([0.37]), ScalingType.TensorWise)
    return operand.inner(start, stop), codes[:, start:stop]


@pytest.mark.parametrize(
    "rows, wide, start, stop, shift, stays",
    [
        (24, 96, 0, 32, 0, True),
        (24, 96, 16, 48, 0, True),
        (24, 96, 48, 96, 0, True),
        (1, 96, 48, 96, 0, True),
        (24, 96, 0, 96, 0, True),  # the whole
        (24, 96, 10, 42, 6, True),  # what counts is where it begins in memory
        (24, 96, 8, 40, 0, False),
        (24, 96, 1, 33, 0, False),
        (24, 96, 16, 48, 1, False),
        (24, 100, 16, 48, 0, False),  # the second row does not begin at a multiple of 16
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_stay_where_they_are_if_a_product_reads_them_there(
    rows, wide, start, stop, shift, stays, dtype
):
    """With PyTorch's product for CPUs, to the bit of that of a copy; gradients may be E5M2."""
    for codes in (E5M2, E4M3):
        part, there = part_of_codes(rows, wide, start, stop, codes, shift)
        assert (part.data.data_ptr() == there.data_ptr()) is stays
        assert part.data.is_contiguous() or stays
        right = torch.randn(40, stop - start).to(E4M3)
        right = gemm.GemmOperand(right, torch.tensor([1.3]), ScalingType.TensorWise)
        copied = part._replace(data=there.clone(memory_format=torch.contiguous_format))
        got, wanted = (gemm.multiply(left, right, dtype) for left in (part, copied))
        assert got.dtype is dtype and torch.equal(got, wanted)
        exact = there.double() @ right.data.double().t() * 0.37 * 1.3
        close(got, exact, 2**-7)


def test_which_codes_a_product_does_not_read_in_place():
    codes = torch.randn(32, 64).to(E4M3)
    assert gemm.is_read_in_place(codes) and gemm.is_read_in_place(codes[:, 16:32])
    assert not gemm.is_read_in_place(codes.t()), "the values of a row do not follow each other"
    assert not gemm.is_read_in_place(codes[:1].expand(32, 64)), "rows are in one place"
    wide = torch.randn(32, 64).bfloat16()
    assert gemm.is_read_in_place(wide[:, 8:16]) and not gemm.is_read_in_place(wide[:, 4:12])
    traced = torch.compile(gemm.is_read_in_place, backend="eager", fullgraph=True)
    assert traced(codes) and not traced(codes[:, 16:32]), "it is not known where they begin"


@pytest.mark.parametrize("sizes, strided", [((48, 16, 80), 3), ((16, 128), 2), ((64,), 0)])
@pytest.mark.parametrize("recipe", CURRENT)
def test_no_gradient_of_linears_side_by_side_is_copied(gpu, monkeypatch, recipe, sizes, strided):
    """Nor is any bit another than with copies."""
    model = opfuse.Sequential(
        ops.ParallelLinear([ops.Linear(160, size, bias=False) for size in sizes])
    ).to(torch.bfloat16)
    x, dy = data((64, 160), sum(sizes), torch.bfloat16)
    other = copy.deepcopy(model)
    got = run(model, x, dy, recipe)
    assert gpu.strided == strided
    monkeypatch.setattr(gemm, "is_read_in_place", lambda codes: codes.is_contiguous())
    assert all(map(torch.equal, got, run(other, x, dy, recipe))) and gpu.strided == strided
    check(got, expected(recipe, model, x, dy), torch.bfloat16, 512)


@pytest.mark.parametrize("recipe", [fp8.MXFP8BlockScaling(), fp8.NVFP4BlockScaling()], ids=str)
def test_scales_are_swizzled_where_a_product_reads_them(monkeypatch, recipe):
    """By the quantizers of an op that runs there; a stored weight is made for no device."""
    roles = [QuantizerRole("linear", kind) for kind in ("input", "weight", "grad_output")]
    for arch, swizzles in ((100, True), (90, False)):
        where = hardware.Hardware("cuda", (arch // 10, 0), f"sm_{arch}", (13, 0))
        monkeypatch.setattr(hardware.Hardware, "of", classmethod(lambda cls, device, x=where: x))
        made = [fp8.make(recipe, role, torch.device("meta")) for role in roles]
        assert [quantizer.swizzles for quantizer in made] == [swizzles] * 3
        assert not fp8.make(recipe, roles[1], None).swizzles


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_pytorch_takes_the_layouts_of_a_gpu(recipe):
    """Its own function for shapes, which refuses scales of another layout; there is no GPU."""
    depth = 208 if recipe == "nvfp4" else 256  # whose last 16 are filled up to 32
    sizes = {"input": (256, depth), "weight": (384, depth)}
    made = {
        role: fp8.make(fp8.opfuse_recipes()[recipe](), QuantizerRole("linear", role), "cpu")
        for role in sizes
    }
    operands = [
        gemm.GemmOperand.of(made[role].quantize(torch.randn(size), BOTH), ROWWISE)
        for role, size in sizes.items()
    ]
    if recipe != "nvfp4":
        operands.append(gemm.GemmOperand.stacked(operands[1:] * 2))
    with FakeTensorMode():
        left, *rights = [
            operand._replace(
                **{
                    name: torch.empty(part.shape, dtype=part.dtype, device="cuda")
                    for name in ("data", "scale", "over_all")
                    if (part := getattr(operand, name)) is not None
                }
            )
            for operand in operands
        ]
        made = [gemm.multiply(left, right, torch.bfloat16) for right in rights]
        if recipe == "fp8-current":  # rows further apart than they are long
            part = torch.empty_strided((256, 256), (768, 1), dtype=E4M3, device="cuda")
            made.append(gemm.multiply(left._replace(data=part), rights[0], torch.bfloat16))
    for y, width in zip(made, (384, 768, 384), strict=False):
        assert (y.shape, y.dtype, y.device.type) == ((256, width), torch.bfloat16, "cuda")


def test_what_is_no_operand():
    quantizer = fp8.CurrentQuantizer(E4M3)
    made = quantizer.quantize(torch.randn(4, 32), ROWWISE)
    assert torch.equal(
        gemm.GemmOperand.of(made, COLUMNWISE).data.float(), made.rowwise_data.float().t()
    )
    block = fp8.BlockQuantizer(E4M3, (1, 128)).quantize(torch.randn(4, 32), ROWWISE)
    with pytest.raises(ValueError, match="a product needs the columnwise copy, got <BlockScaled"):
        gemm.GemmOperand.of(block, COLUMNWISE)
    with pytest.raises(TypeError, match="no product of Tensor"):
        gemm.GemmOperand.of(torch.randn(4, 4), ROWWISE)


# Where they stand


def environment(recipe, device="cuda", dtype=torch.bfloat16, **given):
    known = {"capability": (9, 0), "architecture": "sm_90"} if device == "cuda" else {}
    known |= {"row_alignment": 128, "requires_grad": True}
    made = fp8.opfuse_recipes()[recipe]() if isinstance(recipe, str) else recipe
    return opfuse.Environment(
        torch.device(device), dtype=dtype, recipe=made, **{"capability": None, **known, **given}
    )


SM_100 = {"capability": (10, 0), "architecture": "sm_100"}
LINEAR, ODD, BIAS = ops.BasicLinear(64, 32), ops.BasicLinear(64, 40), ops.Bias(32)
HYBRID = fp8.Float8BlockScaling(fp8_format=fp8.Format.HYBRID)
OVERRIDE = fp8.Float8CurrentScaling(backward_override="dequantized")
SIDE = ops.ParallelLinear([ops.Linear(64, 48), ops.Linear(64, 128)])


@pytest.fixture
def cuda_13(monkeypatch):
    monkeypatch.setattr(hardware, "_built_with", lambda: (13, 0))


@pytest.mark.parametrize(
    "ops_, env, says",
    [
        ((LINEAR,), environment("fp8-current"), None),
        ((LINEAR, BIAS), environment("fp8-delayed"), None),
        ((LINEAR,), environment("fp8-current", row_alignment=1), None),
        ((LINEAR,), environment("fp8-block"), None),
        ((LINEAR,), environment("mxfp8", **SM_100), None),
        ((LINEAR,), environment("fp8-current", architecture="gfx950"), None),
        ((LINEAR,), environment("fp8-current", "cpu", measured=math.inf), None),
        ((LINEAR,), environment("fp8-current", "cpu"), "emulated: no FP8 GEMM on cpu"),
        ((LINEAR,), environment("fp8-block", "cpu", measured=1.5), "no FP8 GEMM on cpu"),
        ((LINEAR,), environment("mxfp8"), "on sm_100 and sm_103, and this is sm_90"),
        ((LINEAR,), environment("nvfp4", capability=(10, 3), architecture="sm_103"), None),
        ((LINEAR,), environment("nvfp4"), "NVFP4 on sm_100 and sm_103, and this is sm_90"),
        ((LINEAR,), environment("nvfp4", "cpu"), "emulated: no FP4 GEMM on cpu"),
        ((LINEAR,), environment("nvfp4", architecture="gfx950"), "no FP4 GEMM for these scales on"),
        ((ODD,), environment("nvfp4", **SM_100), "an FP4 GEMM takes out_features .* pad it to 48"),
        ((LINEAR,), environment("nvfp4", compiling=True, **SM_100), "Inductor lowers no product"),
        ((LINEAR,), environment("mxfp8", compiling=True, **SM_100), "Inductor lowers no product"),
        ((LINEAR,), environment("fp8-current", architecture="gfx942"), "another encoding"),
        ((LINEAR,), environment("fp8-current", dtype=torch.float64), "does not give float64"),
        ((ODD,), environment("fp8-current"), "BasicLinear has 40: pad it to 48"),
        ((LINEAR,), environment("fp8-block", row_alignment=2), "rows are a multiple of 4"),
        ((LINEAR, BIAS), environment("fp8-block"), "tensors with one scale only"),
        ((LINEAR, BIAS), environment("fp8-current", dtype=torch.float32), "no bias to a result"),
        ((SIDE,), environment("fp8-block"), r"splits a block of 128 of the gradient.*\(48, 128\)"),
        (
            (LINEAR,),
            environment("fp8-current", options={"fp8.products": "emulated"}),
            "as the option fp8.products says",
        ),
        (
            (LINEAR,),
            environment(fp8.CustomRecipe(lambda role: None, name=f"made up in {__name__}")),
            "has no product for what CustomRecipe quantizes to",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_where_a_forward_runs(cuda_13, ops_, env, says):
    answer = products.forward_runs(ops_, env)
    assert answer is True if says is None else found_in(says, answer)


def found_in(pattern, text):
    return isinstance(text, str) and re.search(pattern, text)


def test_where_a_backward_runs(cuda_13):
    said = [
        products.backward_runs((LINEAR,), environment(recipe))
        for recipe in ("fp8-current", "fp8-block", HYBRID, OVERRIDE)
    ]
    assert said[:2] == [True, True]
    assert "Format.HYBRID has gradients in E5M2" in said[2]
    assert "backward_override='dequantized'" in said[3]
    assert products.backward_runs((LINEAR,), environment("nvfp4", **SM_100)) is True


def test_inductor_lowers_no_product_with_swizzled_scales():
    """Which is why products under ``torch.compile`` are emulated; once it does, they need not be."""
    torch._dynamo.reset()
    codes = torch.randn(128, 128).to(E4M3)
    scale = torch.full((512,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    operand = gemm.GemmOperand(codes, scale, ScalingType.BlockWise1x32, True)
    compiled = torch.compile(lambda one: gemm.multiply(one, one, torch.bfloat16), fullgraph=True)
    with pytest.raises(Exception, match="does not (yet )?support (non-trivial )?swizzle|Dynamo"):
        compiled(operand)


def test_the_plan_says_what_is_emulated_and_why():
    model = linears("linear", 32, 16, True)
    x, _ = data((4, 32), 16, torch.float32)
    taken, said = fusions(model, x, "fp8-current", "auto")
    assert not taken and said & {"emulated: no FP8 GEMM on cpu"}
    taken, _ = fusions(model, x, "fp8-current")
    assert taken == ["fp8 linear+bias", "fp8 linear"]
    with opfuse.plugins.using("fp8"):  # nothing about it without a recipe
        plain = opfuse.explain(model, x.clone().requires_grad_()).to_dict()
    assert not plain["refused"]


def test_a_product_goes_before_what_saves_a_pass():
    model = linears("linear", 32, 16, True)
    x, _ = data((4, 32), 16, torch.float32)
    with opfuse.options(**NATIVE), opfuse.autocast("fp8-current"):
        rows = opfuse.explain(model, x).to_dict()["forward"]
    assert [row["fusion"] for row in rows if row["fusion"]] == ["fp8 linear+bias"]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_with_autocast_and_a_reused_weight(recipe):
    """The dtype is autocast's; weights cast once serve several calls."""
    model = linears("linear", 32, 16, True)
    x, _ = data((2, 3, 32), 16, torch.bfloat16)
    runs = []
    for mode in ("native", "emulated"):
        with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.products": mode}):
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                with opfuse.autocast("fp8-current"):
                    y = model(x.float())
                with opfuse.autocast("fp8-current", weights="cached"):
                    assert torch.equal(model(x.float()), y)
        assert y.dtype is torch.bfloat16
        runs.append(y)
    close(runs[0], runs[1].double(), 2**-7)


def test_a_compiled_linear_gives_the_same_bits():
    torch._dynamo.reset()
    model = linears("linear", 32, 16, True)
    x, dy = data((4, 32), 16, torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    recipe = fp8.Float8CurrentScaling()
    got, right = run(compiled, x, dy, recipe), run(model, x, dy, recipe)
    assert all(torch.equal(one, other) for one, other in zip(got, right, strict=True))


# How each recipe runs


@pytest.mark.parametrize(
    "here, native",
    [
        ("cpu", ()),
        (hardware.Hardware("cuda", (8, 0), "sm_80", (12, 9)), ()),
        (hardware.Hardware("cuda", (8, 9), "sm_89", (12, 9)), ("fp8-delayed", "fp8-current")),
        (H100, ("fp8-delayed", "fp8-current", "fp8-block")),
        (H100._replace(cuda=(12, 6)), ("fp8-delayed", "fp8-current")),
        (H100._replace(cuda=(11, 8)), ()),
        (
            hardware.Hardware("cuda", (10, 0), "sm_100", (12, 9)),
            ("fp8-delayed", "fp8-current", "mxfp8", "nvfp4"),
        ),
        (hardware.Hardware("cuda", (10, 3), "sm_103", (12, 6)), ("fp8-delayed", "fp8-current")),
        (hardware.Hardware("cuda", (12, 0), "sm_120", (12, 9)), ("fp8-delayed", "fp8-current")),
        (hardware.Hardware("cuda", (9, 4), "gfx942"), ()),
        (hardware.Hardware("cuda", (9, 5), "gfx950"), ("fp8-delayed", "fp8-current")),
        (hardware.Hardware("cuda", (9, 0), "gfx90a"), ()),
    ],
    ids=str,
)
def test_how_each_recipe_runs(here, native):
    found = fp8.support(here)
    assert found.keys() == fp8.opfuse_recipes().keys()
    assert {name for name, (how, _) in found.items() if how == "native"} == {*native}
    others = [said for name, said in found.items() if name not in native]
    assert all(said.how == "emulated" and said.why for said in others)


def test_where_no_recipe_runs():
    for how, why in fp8.support("mps").values():
        assert (how, why) == ("cannot run", "PyTorch has no FP8 dtypes on mps")


def test_another_value_of_the_option_is_refused():
    chain, x = opfuse.Sequential(ops.Linear(16, 16)), torch.ones(16, 16)
    says = r"option 'fp8.products' of the plugin fp8: expected 'auto' or 'native' or 'emulated', got 'nativ'"
    with opfuse.plugins.using("fp8"), opfuse.options(**{"fp8.products": "nativ"}):
        with pytest.raises(ValueError, match=says):
            chain(x)


@pytest.mark.parametrize("made", ["strided", "at an odd place", "expanded"])
def test_a_bias_that_cublas_would_misread_is_copied(made, monkeypatch):
    """PyTorch checks neither strides nor alignment of it: on an H100 it was another bias, or an error."""
    given = torch.randn(65, dtype=torch.bfloat16)
    bias = {
        "strided": given[:64].view(32, 2)[:, 1],
        "at an odd place": given[1:33],
        "expanded": given[:1].expand(32),
    }[made]
    codes = torch.randn(32, 32).to(torch.float8_e4m3fn)
    operand = gemm.GemmOperand(codes, torch.ones(1), ScalingType.TensorWise)
    seen = []
    monkeypatch.setattr(gemm.F, "scaled_mm", lambda *_, bias, **__: seen.append(bias))
    gemm.multiply(operand, operand, torch.bfloat16, bias=bias)
    (passed,) = seen
    assert torch.equal(passed, bias) and passed.is_contiguous() and passed.data_ptr() % 16 == 0


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_multiplied_in_fp8_while_quantizers_calibrate(recipe, grad):
    torch.manual_seed(0)
    chain, x = opfuse.Sequential(ops.Linear(32, 64), ops.Linear(64, 32)), torch.randn(16, 32)
    with opfuse.options(**NATIVE), torch.set_grad_enabled(grad):
        plain = chain(x)
        with opfuse.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = chain(x)
            told = str(opfuse.explain(chain, x))
        with opfuse.autocast(recipe):
            quantized = chain(x)
    assert torch.equal(y, plain) and not torch.equal(quantized, plain)
    assert "nothing is quantized where quantizers calibrate" in told
    if grad:
        y.sum().backward()
