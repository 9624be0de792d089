"""Formats of quantized tensors: what is laid out by hand, as the documentation says, comes back exactly.

The references quantize in fp64 and place every byte by index arithmetic of their own.
"""

import copy
import dataclasses
import math

import pytest
import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor, NVFP4Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from opfuse.core.quantization.formats import QuantizedTensor, ScaledTensor, Usage

pytestmark = pytest.mark.alone  # a format knows no chain

ROWWISE, COLUMNWISE, BOTH = Usage(), Usage(False, True), Usage(True, True)
E4M3, E5M2, E2M1X2 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def ceil(a, b):
    return (a + b - 1) // b


def grid(matrix):
    """Row and column number of every element."""
    rows, columns = matrix.shape
    return torch.arange(rows)[:, None].expand(rows, columns), torch.arange(columns).expand(
        rows, columns
    )


def placed(size, offsets, values, fill=0):
    """One-dimensional storage with each value at its offset."""
    storage = torch.full((size,), fill, dtype=values.dtype)
    storage[offsets.reshape(-1)] = values.reshape(-1)
    return storage


def cut(matrix, height, width, largest):
    """The scale of each block in fp64, such that its largest value becomes ``largest``."""
    rows, columns = matrix.shape
    scales = torch.ones(ceil(rows, height), ceil(columns, width), dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = matrix[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = block.abs().max() / largest
    return scales


# Each lays a matrix out, with its blocks along the rows, and gives its fields and the values that they represent


def blocks(matrix, height, dtype=E4M3):
    (rows, columns), (r, c) = matrix.shape, grid(matrix)
    scales = cut(matrix, height, 128, LARGEST[dtype]).float()
    each = scales[r // height, c // 128].double()
    codes = (matrix / each).to(dtype)
    data = placed(rows * columns, r * columns + c, codes.view(torch.uint8)).view(dtype)
    down, along = scales.shape
    i, j = grid(scales)
    if height == 1:
        scale = placed(along * rows, j * rows + i, scales).view(along, rows)
    else:  # what is in the padding must not matter
        wide = ceil(along, 4) * 4
        scale = placed(down * wide, i * wide + j, scales, float("nan")).view(down, wide)
    return {"data": data, "scale_inv": scale}, codes.double() * each


def mx(matrix, dtype=E4M3):
    (rows, columns), (r, c) = matrix.shape, grid(matrix)
    exponents = cut(matrix, 1, 32, LARGEST[dtype]).log2().ceil()
    each = torch.exp2(exponents[r, c // 32])
    codes = (matrix / each).to(dtype)
    data = placed(rows * columns, r * columns + c, codes.view(torch.uint8)).view(dtype)
    i, j = grid(exponents)
    scale = placed(rows * (columns // 32), i * (columns // 32) + j, (exponents + 127).byte())
    scale = scale.view(torch.float8_e8m0fnu).view(rows, columns // 32)
    return {"data": data, "scale_inv": scale}, codes.double() * each


def nvfp4(matrix):
    (rows, columns), (r, c) = matrix.shape, grid(matrix)
    over_all = torch.tensor([matrix.abs().max() / (448 * 6) if matrix.numel() else 1.0]).float()
    scales = (cut(matrix, 1, 16, 6.0) / over_all.double()).to(E4M3)
    each = scales.double()[r, c // 16] * over_all.double()
    steps = torch.tensor(E2M1, dtype=torch.float64)
    number = ((matrix / each).abs()[..., None] - steps).abs().argmin(-1)
    values = steps[number].copysign(matrix)
    codes = (number + 8 * (matrix < 0)).byte()
    data = torch.zeros(rows * columns // 2, dtype=torch.uint8)
    for nibble in (0, 1):  # the low one first
        here = c % 2 == nibble
        data[(r * (columns // 2) + c // 2)[here]] |= codes[here] << (4 * nibble)
    i, j = grid(scales)
    scale = placed(rows * (columns // 16), i * (columns // 16) + j, scales.view(torch.uint8))
    scale = scale.view(E4M3).view(rows, columns // 16)
    fields = {"data": data.view(E2M1X2), "scale_inv": scale, "tensor_scale_inv": over_all}
    return fields, values * each


TWO_COPIES = {
    "1x128": (lambda m: blocks(m, 1), BlockScaledTensor, {"block": (1, 128)}),
    "1x128 e5m2": (lambda m: blocks(m, 1, E5M2), BlockScaledTensor, {"block": (1, 128)}),
    "128x128": (lambda m: blocks(m, 128), BlockScaledTensor, {"block": (128, 128)}),
    "mx": (mx, MXTensor, {}),
    "mx e5m2": (lambda m: mx(m, E5M2), MXTensor, {}),
    "nvfp4": (nvfp4, NVFP4Tensor, {}),
}
SCALED = {"e4m3": E4M3, "e5m2": E5M2, "int8": torch.int8, "fp32": torch.float32}
FORMATS = [*TWO_COPIES, *SCALED]
RAGGED = [name for name in FORMATS if not name.startswith(("mx", "nvfp4"))]


def as_matrix(x):
    return x.double().reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def scaled(x, dtype, usage):
    matrix = as_matrix(x)
    (rows, columns), (r, c) = matrix.shape, grid(matrix)
    largest = LARGEST.get(dtype, 127.0)
    scale = torch.tensor([matrix.abs().max() / largest if matrix.numel() else 1.0]).float()
    codes = matrix / scale.double()
    codes = codes.to(dtype) if dtype.is_floating_point else codes.round().to(dtype)
    copies = {
        "rowwise_data": placed(rows * columns, r * columns + c, codes.float()).view(x.shape),
        "columnwise_data": placed(rows * columns, c * rows + r, codes.float()).view(columns, rows),
    }
    wanted = {
        name: copies[name].to(dtype) for name, here in zip(copies, usage, strict=True) if here
    }
    quantized = ScaledTensor(x.shape, x.dtype, None, **wanted, scale_inv=scale)
    return quantized, codes.double() * scale.double()


def quantized(name, x, usage=BOTH):
    """A quantized tensor, and what its two copies are expected to give."""
    if name in SCALED:
        made, values = scaled(x, SCALED[name], usage)
        values = values.float().to(x.dtype).view(x.shape)
        return made, {ROWWISE: values, COLUMNWISE: values}
    lay_out, cls, options = TWO_COPIES[name]
    fields, expected, matrix = dict(options), {}, as_matrix(x)
    for which, name_, here in zip((ROWWISE, COLUMNWISE), Usage._fields, usage, strict=True):
        if not here:
            continue
        source = matrix if which == ROWWISE else matrix.t()
        parts, values = lay_out(source)
        packed = 2 if cls is NVFP4Tensor else 1
        lead = x.shape[:-1] if which == ROWWISE else source.shape[:1]
        whole = x.dim() or which == COLUMNWISE
        parts["data"] = parts["data"].view((*lead, source.shape[1] // packed) if whole else ())
        fields |= {f"{name_}_{part}": tensor for part, tensor in parts.items()}
        values = values if which == ROWWISE else values.t()
        expected[which] = values.float().to(x.dtype).reshape(x.shape)
    return cls(x.shape, x.dtype, None, **fields), expected


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert torch.equal(got.signbit(), expected.signbit())
    assert got.is_contiguous()


def check(name, shape, usage=BOTH, dtype=torch.float32):
    made, expected = quantized(name, torch.randn(shape).to(dtype), usage)
    for which, values in expected.items():
        if getattr(made.usage, "rowwise" if which == ROWWISE else "columnwise"):
            equal(made.dequantize(which), values)
    assert name in SCALED or made.usage == usage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64), (2, 2, 16, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_both_copies_come_back(name, shape, dtype):
    check(name, shape, dtype=dtype)


@pytest.mark.parametrize(
    "shape", [(), (1,), (300,), (1, 1), (3, 130), (127, 5), (129, 257), (3, 5, 129)]
)
@pytest.mark.parametrize("name", RAGGED)
def test_any_size_works_with_the_last_block_shorter(name, shape):
    check(name, shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0,), (64, 0)])
def test_empty_tensors_keep_their_shape(name, shape):
    check(name, shape, ROWWISE if shape == (0,) and name not in RAGGED else BOTH)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in RAGGED])
def test_whole_blocks_are_needed_along_the_block_only(name):
    block = 16 if name == "nvfp4" else 32
    check(name, (96,), ROWWISE)
    check(name, (127, 64), ROWWISE)
    check(name, (64, 33), COLUMNWISE)
    _, cls, options = TWO_COPIES[name]
    for copy_, sides, field in (
        ("rowwise", "columns", "data"),
        ("columnwise", "rows", "scale_inv"),
    ):
        fields = {f"{copy_}_{field}": torch.ones(1), **options}
        shape = (64, 33) if copy_ == "rowwise" else (33, 64)
        with pytest.raises(
            ValueError, match=f"multiple of {block} {sides} for a {copy_} copy, got 33"
        ):
            cls(shape, torch.float32, None, **fields)


@pytest.mark.parametrize("usage", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("name", FORMATS)
def test_one_copy_dequantizes_and_names_the_missing_copy(name, usage):
    made, expected = quantized(name, torch.randn(64, 96), usage)
    equal(made.dequantize(usage), expected[usage])
    other = COLUMNWISE if usage == ROWWISE else ROWWISE
    if name in SCALED:  # the values of both copies are the same
        assert made.usage == BOTH
        equal(made.dequantize(other), expected[other])
        return
    assert made.usage == usage
    missing, here = ("columnwise", "rowwise") if usage == ROWWISE else ("rowwise", "columnwise")
    with pytest.raises(
        ValueError, match=f"{type(made).__name__}.*the {missing} copy.*only {here}_data"
    ):
        made.dequantize(other)


@pytest.mark.parametrize("shape", [(64, 96), (256, 640)])
@pytest.mark.parametrize("name", FORMATS)
def test_only_surplus_columns_of_scales_are_padding(name, shape):
    """The layouts by hand put NaN there; everything else is what it was."""
    made, _ = quantized(name, torch.randn(shape))
    for field, tensor in zip(made.tensor_names, made.tensors(), strict=True):
        used = made.without_padding(field)
        if name == "128x128" and field.endswith("scale_inv"):
            rows, columns = shape if field.startswith("rowwise") else shape[::-1]
            assert used.shape == (ceil(rows, 128), ceil(columns, 128))
            assert not used.isnan().any() and tensor[:, used.shape[1] :].isnan().all()
        else:
            assert used is tensor


@pytest.mark.parametrize("usage", [BOTH, Usage(False, False)])
@pytest.mark.parametrize("name", FORMATS)
def test_exactly_one_copy_is_read(name, usage):
    made, _ = quantized(name, torch.randn(32, 32))
    with pytest.raises(ValueError, match="exactly one copy"):
        made.dequantize(usage)


def test_rowwise_is_the_default():
    assert Usage() == (True, False)
    made, expected = quantized("1x128", torch.randn(4, 256))
    equal(made.dequantize(), expected[ROWWISE])


def test_float64_data_are_computed_in_float64():
    data = torch.randn(3, 5, dtype=torch.float64)
    scale = torch.tensor(0.1)
    made = ScaledTensor(data.shape, torch.float64, None, data, scale_inv=scale)
    equal(made.dequantize(), data * scale.double())


def test_every_e2m1_code_dequantizes_in_both_nibbles():
    """All 16 codes, in the low and in the high nibble."""
    codes = torch.arange(16).repeat_interleave(2)  # each twice, so in both nibbles
    data = (codes[0::2] | codes[1::2] << 4).byte().view(E2M1X2).view(1, 16)
    one = torch.ones(1, 2).to(E4M3)
    made = NVFP4Tensor(
        (1, 32), torch.float32, None, data, one, rowwise_tensor_scale_inv=torch.ones(())
    )
    values = torch.tensor([*E2M1, *(-value for value in E2M1)]).repeat_interleave(2)
    equal(made.dequantize(), values.view(1, 32))


def test_the_first_value_is_in_the_low_nibble():
    data = torch.tensor([[0x21] + [0] * 7], dtype=torch.uint8).view(E2M1X2)
    one = torch.ones(1, 1).to(E4M3)
    made = NVFP4Tensor(
        (1, 16), torch.float32, None, data, one, rowwise_tensor_scale_inv=torch.ones(1)
    )
    assert made.dequantize()[0, :3].tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("signs", [0, 0xD7E8, 0xFFFF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformed_copy_comes_back(signs, dtype):
    """The codes are those of mixed rows; the other copy knows nothing of it."""
    x = torch.randn(64, 32)
    made, _ = quantized("nvfp4", x)
    scales = made.columnwise_scale_inv.double().repeat_interleave(16, 1)
    codes = dataclasses.replace(made, dtype=torch.float64).dequantize(COLUMNWISE).t() / scales
    codes = (2 * codes / made.columnwise_tensor_scale_inv).round().view(32, 4, 16) / 2
    bits = [bin(i & j).count("1") for i in range(16) for j in range(16)]
    hadamard = torch.tensor([(-1.0) ** count for count in bits], dtype=torch.float64).view(16, 16)
    flips = torch.tensor([-1.0 if signs >> i & 1 else 1.0 for i in range(16)], dtype=torch.float64)
    undone = ((codes @ hadamard.t()) / 4 * flips).reshape(32, 64) * scales
    expected = (undone.float() * made.columnwise_tensor_scale_inv).t().to(dtype)
    mixed = dataclasses.replace(made, columnwise_signs=signs, dtype=dtype)
    torch.testing.assert_close(mixed.dequantize(COLUMNWISE), expected, rtol=0, atol=0)
    assert torch.equal(mixed.dequantize(), made.dequantize().to(dtype))
    for kept in (mixed.without_data(), mixed.only(COLUMNWISE), mixed.rebuild(mixed.tensors())):
        assert kept.columnwise_signs == signs


@pytest.mark.parametrize("name", ["mx", "nvfp4"])
def test_swizzled_scales_are_never_read_as_plain_ones(name):
    """By their formula; each layout is refused where the other is announced."""
    x = torch.randn(160, 416, generator=torch.Generator().manual_seed(0))
    plain, expected = quantized(name, x)
    cls, (flat_size, block) = type(plain), {"mx": (4096, 13), "nvfp4": (7168, 26)}[name]
    given = {}
    for way, scale in (("rowwise", plain.rowwise_scale_inv), ("columnwise", plain.columnwise_scale_inv)):  # fmt: skip
        (rows, blocks), (r, c) = scale.shape, grid(scale)
        across = ceil(blocks, 4)
        at = 512 * (r // 128 * across + c // 4) + 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4
        flat = placed(512 * ceil(rows, 128) * across, at, scale.view(torch.uint8), 255)
        given[f"{way}_scale_inv"] = flat.view(scale.dtype)
    others = {n: getattr(plain, n) for n in plain.tensor_names if n not in given}
    made = cls(x.shape, x.dtype, None, **others, **given, swizzled=True)
    for usage, values in expected.items():
        equal(made.dequantize(usage), values)
        equal(made.only(usage).rebuild(made.only(usage).tensors()).dequantize(usage), values)
    for each in plain.tensor_names:
        equal(made.without_padding(each).view(torch.uint8), getattr(plain, each).view(torch.uint8))
    with pytest.raises(ValueError, match=rf"expected shape \(160, {block}\), got \({flat_size},\)"):
        cls(x.shape, x.dtype, None, **others, **given)
    with pytest.raises(ValueError, match=rf"expected shape \({flat_size},\), got \(160, {block}\)"):
        cls(x.shape, x.dtype, None, *plain.tensors(), swizzled=True)


def test_every_e8m0_scale_dequantizes_exactly():
    exponents = torch.arange(255)
    scale = exponents.byte().view(torch.float8_e8m0fnu).view(255, 1)
    made = MXTensor((255, 32), torch.float64, None, torch.ones(255, 32).to(E4M3), scale)
    expected = torch.exp2(exponents.double() - 127)[:, None].expand(255, 32).contiguous()
    equal(made.dequantize(), expected)
    nan = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert (
        MXTensor((1, 32), torch.float32, None, torch.ones(1, 32).to(E4M3), nan)
        .dequantize()
        .isnan()
        .all()
    )


# Saving and restoring


@pytest.mark.parametrize("name", FORMATS)
def test_rebuild_accepts_only_its_own_component_tensors(name):
    made, expected = quantized(name, torch.randn(2, 16, 64))
    tensors = made.tensors()
    assert len(tensors) == len(made.tensor_names)
    assert all(
        tensor is getattr(made, n) for n, tensor in zip(made.tensor_names, tensors, strict=True)
    )
    again = made.rebuild([tensor.clone() for tensor in tensors])
    assert type(again) is type(made) and again is not made
    assert (again.shape, again.dtype, again.quantizer) == (made.shape, made.dtype, None)
    for which, values in expected.items():
        equal(again.dequantize(which), values)
    with pytest.raises(ValueError, match=f"expected {len(tensors)} tensors .*, got 1"):
        made.rebuild(tensors[:1])
    with pytest.raises(ValueError, match="expected"):
        made.rebuild(tensors[::-1])


@pytest.mark.parametrize("name", FORMATS)
def test_without_data_leaves_a_shell_that_can_be_rebuilt(name):
    made, expected = quantized(name, torch.randn(32, 32))
    shell = made.without_data()
    assert {n for n in made.tensor_names if getattr(shell, n) is None} == set(made.data_names)
    assert shell.usage == Usage(False, False)
    assert "data" not in repr(shell)
    with pytest.raises(ValueError, match="rowwise copy"):
        shell.dequantize()
    assert made.usage == BOTH  # untouched
    full = shell.rebuild(made.tensors())
    equal(full.dequantize(), expected[ROWWISE])
    assert shell.rebuild([None] * len(made.tensor_names)).tensors() == (None,) * len(
        made.tensor_names
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_deepcopy_shares_no_component_tensor(name):
    made, expected = quantized(name, torch.randn(32, 32))
    other = copy.deepcopy(made)
    for tensor in made.tensors():
        tensor.view(torch.uint8).zero_()
    for which, values in expected.items():
        equal(other.dequantize(which), values)


def test_names_and_repr_list_the_component_tensors():
    made, _ = quantized("nvfp4", torch.randn(32, 48), ROWWISE)
    assert repr(made) == (
        "<NVFP4Tensor: (32, 48) of torch.float32; rowwise_data float4_e2m1fn_x2 (32, 24), "
        "rowwise_scale_inv float8_e4m3fn (32, 3), rowwise_tensor_scale_inv float32 (1,)>"
    )
    for cls in (ScaledTensor, BlockScaledTensor, MXTensor, NVFP4Tensor):
        assert set(cls.data_names) < set(cls.tensor_names)
        assert set(cls.tensor_names) <= {field.name for field in dataclasses.fields(cls)}
    with pytest.raises(TypeError, match="abstract"):
        QuantizedTensor(torch.Size(), torch.float32, None)


# Compilation, and no look at data


@pytest.mark.costly(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "1x128", "128x128", "mx", "nvfp4"])
def test_building_and_dequantizing_compile_in_one_graph(name, dynamic):
    def build(x, tensors):
        options = {"block": block} if block else {}
        made = cls(x.shape, x.dtype, None, *tensors, **options)
        made = made.without_data().rebuild(made.tensors())
        return made.dequantize(), made.dequantize(COLUMNWISE)

    torch._dynamo.reset()
    compiled = torch.compile(build, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in ((32, 64), (64, 160)):
        x = torch.randn(shape)
        made, expected = quantized(name, x)
        cls, block = type(made), getattr(made, "block", None)
        for got, values in zip(compiled(x, made.tensors()), expected.values(), strict=True):
            equal(got, values)


@pytest.mark.parametrize("name", FORMATS)
def test_no_data_is_read(name):
    made, _ = quantized(name, torch.randn(32, 64))
    meta = made.rebuild([tensor.to("meta") for tensor in made.tensors()])
    for which in (ROWWISE, COLUMNWISE):
        values = meta.dequantize(which)
        assert (values.shape, values.device.type) == (made.shape, "meta")


# What torch's GEMM takes: the fields as they are, at most seen transposed


def multiply(names, which, kinds, swizzle, transposed):
    """What ``scaled_mm`` says to the fields of two copies on a GPU, without one."""
    sizes = ((256, 384), (128, 384)) if which == "rowwise" else ((384, 256), (384, 128))
    usage = ROWWISE if which == "rowwise" else COLUMNWISE
    made = [quantized(name, torch.randn(s), usage)[0] for name, s in zip(names, sizes, strict=True)]
    with FakeTensorMode():
        (a, scale_a), (b, scale_b) = (
            [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                for t in (getattr(one, f"{which}_data"), getattr(one, f"{which}_scale_inv"))
            ]
            for one in made
        )
        if transposed:
            scale_a, scale_b = scale_a.t(), scale_b.t()
        return scaled_mm(
            a, b.t(), scale_a, kinds[0], scale_b, kinds[1], swizzle_a=swizzle, swizzle_b=swizzle
        )


@pytest.mark.parametrize("which", ["rowwise", "columnwise"])
@pytest.mark.parametrize("names", [("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")])
def test_torch_takes_blocks_as_they_are(names, which):
    kinds = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
    kinds = [kinds[name] for name in names]
    assert multiply(names, which, kinds, SwizzleType.NO_SWIZZLE, True).shape == (256, 128)


@pytest.mark.parametrize("which", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["mx", "nvfp4"])
def test_torch_takes_mx_and_nvfp4_data_as_they_are(name, which):
    """And scales of this size, once they are swizzled."""
    kind = {"mx": ScalingType.BlockWise1x32, "nvfp4": ScalingType.BlockWise1x16}[name]
    y = multiply((name, name), which, (kind, kind), SwizzleType.SWIZZLE_32_4_4, False)
    assert y.shape == (256, 128)


def test_torch_multiplies_scaled_tensors_as_they_are():
    (a, _), (b, _) = (quantized("e4m3", torch.randn(rows, 64)) for rows in (32, 48))
    kind = ScalingType.TensorWise
    y = scaled_mm(
        a.rowwise_data, b.rowwise_data.t(), a.scale_inv, kind, b.scale_inv, kind,
        output_dtype=torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(y, a.dequantize() @ b.dequantize().t())
    x, _ = quantized("e4m3", torch.randn(32, 64))
    y = scaled_mm(
        a.columnwise_data, x.columnwise_data.t(), a.scale_inv, kind, x.scale_inv, kind,
        output_dtype=torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(y, a.dequantize().t() @ x.dequantize())


# Wrong layouts are refused


def bad(name, field, change, message, error=ValueError):
    return pytest.param(name, field, change, message, error, id=f"{name}-{field}-{message[:24]}")


WRONG = [
    bad("e4m3", "rowwise_data", lambda t: t.view(-1), r"expected shape \(64, 96\), got \(6144,\)"),
    bad("e4m3", "rowwise_data", lambda t: t[:, ::2].repeat(1, 2).t().contiguous().t(), "expected a contiguous tensor, got strides"),
    bad("e4m3", "rowwise_data", lambda t: t.view(torch.uint8), "got torch.uint8; view bytes"),
    bad("e4m3", "rowwise_data", lambda t: t.view(E2M1X2), "got torch.float4_e2m1fn_x2"),
    bad("e4m3", "rowwise_data", lambda t: t.view(torch.float8_e8m0fnu), "got torch.float8_e8m0fnu"),
    bad("e4m3", "rowwise_data", lambda t: t.view(E5M2), "both copies .* one dtype"),
    bad("e4m3", "columnwise_data", lambda t: t.t().contiguous(), r"expected shape \(96, 64\)"),
    bad("e4m3", "columnwise_data", lambda t: t.t().contiguous().t(), "contiguous"),
    bad("e4m3", "scale_inv", lambda t: None, "expected scale_inv along with rowwise_data, got None"),
    bad("e4m3", "scale_inv", lambda t: t.double(), "one of torch.float32, got torch.float64"),
    bad("e4m3", "scale_inv", lambda t: t.repeat(2), r"expected shape \(1,\), got \(2,\)"),
    bad("e4m3", "scale_inv", lambda t: t.view(1, 1), r"expected shape \(1,\), got \(1, 1\)"),
    bad("e4m3", "scale_inv", lambda t: 0.5, "expected a tensor or None, got float", TypeError),
    bad("e4m3", "scale_inv", lambda t: t.to("meta"), "on one device, got cpu and meta"),
    bad("e4m3", "dtype", lambda t: E4M3, "dtype of the original tensor"),
    bad("1x128", "rowwise_scale_inv", lambda t: t.t().contiguous(), r"expected shape \(1, 64\), got \(64, 1\)"),
    bad("1x128", "columnwise_scale_inv", lambda t: t.half(), "got torch.float16"),
    bad("1x128", "columnwise_scale_inv", lambda t: None, "columnwise_scale_inv along with columnwise_data"),
    bad("1x128", "columnwise_data", lambda t: t.view(64, 96), r"expected shape \(96, 64\)"),
    bad("1x128", "rowwise_data", lambda t: t.float(), "got torch.float32"),
    bad("1x128", "block", lambda t: (128, 1), r"expected a block of .* got \(128, 1\)"),
    bad("1x128", "block", lambda t: (128, 128), r"expected shape \(1, 4\), got \(1, 64\)"),
    bad("128x128", "rowwise_scale_inv", lambda t: t[:, :1], r"expected shape \(1, 4\), got \(1, 1\)"),
    bad("mx", "rowwise_scale_inv", lambda t: t.view(torch.uint8), "got torch.uint8; view bytes"),
    bad("mx", "rowwise_scale_inv", lambda t: t.float(), "got torch.float32"),
    bad("mx", "columnwise_scale_inv", lambda t: t.t().contiguous(), r"expected shape \(96, 2\), got \(2, 96\)"),
    bad("mx", "columnwise_data", lambda t: t.t().contiguous(), r"expected shape \(96, 64\), got \(64, 96\)"),
    bad("mx", "rowwise_data", lambda t: t.view(torch.int8), "got torch.int8"),
    bad("nvfp4", "rowwise_data", lambda t: t.view(torch.uint8), "got torch.uint8; view bytes"),
    bad("nvfp4", "rowwise_data", lambda t: t.repeat(1, 2), r"expected shape \(64, 48\), got \(64, 96\)") ,
    bad("nvfp4", "rowwise_scale_inv", lambda t: t.view(torch.float8_e8m0fnu), "got torch.float8_e8m0fnu"),
    bad("nvfp4", "columnwise_scale_inv", lambda t: t.t().contiguous(), r"expected shape \(96, 4\)"),
    bad("nvfp4", "columnwise_tensor_scale_inv", lambda t: None, "columnwise_tensor_scale_inv along with"),
    bad("nvfp4", "rowwise_tensor_scale_inv", lambda t: t.half(), "got torch.float16"),
    bad("nvfp4", "columnwise_signs", lambda t: 1 << 16, "None or 16 bits, got 65536"),
    bad("nvfp4", "columnwise_signs", lambda t: True, "None or 16 bits, got True"),
    bad("nvfp4", "shape", lambda t: (96, 64), r"for a tensor of shape \(96, 64\): expected shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field", "change", "message", "error"), WRONG)
def test_a_wrong_layout_is_refused(name, field, change, message, error):
    made, _ = quantized(name, torch.randn(64, 96))
    with pytest.raises(error, match=message) as told:
        dataclasses.replace(made, **{field: change(getattr(made, field))})
    assert type(made).__name__ in str(told.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_tuple_is_a_shape(name):
    made, _ = quantized(name, torch.randn(32, 32))
    assert type(dataclasses.replace(made, shape=(32, 32)).shape) is torch.Size
