"""Parameters that live quantized, by the recipes of the kit: as tensors, in training, in checkpoints."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from opfuse_quantized import QuantizedWeight, model_init
from torch import nn

import opfuse
from opfuse import ops, testing
from opfuse.core import plugins
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE
from opfuse.core.settings import current
from opfuse.testing import recipes

pytestmark = pytest.mark.alone

PER_TENSOR, PER_BLOCK, DELAYED = TOYS = testing.PerTensor(), testing.PerBlock(), testing.Delayed()
recipe_of_each = pytest.mark.parametrize("recipe", TOYS, ids=lambda toy: type(toy).__name__)


@pytest.fixture(autouse=True)
def kit():
    with plugins.isolated(), recipes.offered(), plugins.using(recipes.NAME):
        yield


of_no_state = pytest.mark.filterwarnings("ignore:the checkpoint that was loaded")
"""For a checkpoint of a model that did not run yet: the first call says that its scales start over."""


def linear(recipe, inputs=48, outputs=40, seed=0, **given):
    """A linear whose weight lives quantized; its values from before are preserved."""
    torch.manual_seed(seed)
    with opfuse.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return ops.Linear(inputs, outputs, **given)


def unquantized(model):
    """The same in high precision, with the values from before."""
    weight = model.weight.get_high_precision_init_val()
    outputs, inputs = weight.shape
    twin = ops.Linear(inputs, outputs, bias=model.bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        twin.weight.copy_(weight)
        if model.bias is not None:
            twin.bias.copy_(model.bias)
    return twin


def batch(rows=16, width=48, seed=1, dtype=torch.float32):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(model, x, recipe):
    """The output of a step, and all gradients."""
    leaf = x.clone().requires_grad_()
    with opfuse.autocast(recipe) if recipe else opfuse.autocast(False):
        y = model(leaf)
    wanting = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, *wanting])]


def same(one, other):
    return len(one) == len(other) and all(
        type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def codes(param):
    return [part.clone().view(torch.uint8) for part in param.tensors()]


def cast(param, values):
    """What the quantizer of a parameter makes of values that it has seen, in its dtype."""
    quantizer = copy.deepcopy(param.quantizer)
    if quantizer.state_names:
        quantizer.discard()
        quantizer.quantize(values, BOTH)
        quantizer.advance()
    made = quantizer.quantize(values, BOTH)
    made.dtype = param.dtype
    return made.dequantize()


# What it is


@recipe_of_each
def test_a_weight_lives_quantized_and_nowhere_else(recipe):
    def bytes_alive():
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
        return sum(sizes.values())

    before = bytes_alive()
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.Linear(512, 256, bias=False)
    param = model.weight
    most = 2.07 if recipe == PER_BLOCK else 2.02  # with a scale for each 1 x 128 values
    assert 2 * param.numel() <= bytes_alive() - before <= most * param.numel()
    assert isinstance(param, QuantizedWeight) and isinstance(param, nn.Parameter)
    assert (param.dtype, param.shape, param.requires_grad) == (torch.float32, (256, 512), True)
    assert param.quantized.copies == BOTH and param.recipe == recipe
    assert next(iter(model.state_dict())) == "weight" and [*model.parameters()] == [param]
    assert not hasattr(param, "get_high_precision_init_val")


@recipe_of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_quantizer(recipe, dtype):
    model = linear(recipe, dtype=dtype)
    torch.manual_seed(0)
    drawn = ops.Linear(48, 40, dtype=dtype).weight.detach()
    assert torch.equal(model.weight.get_high_precision_init_val(), drawn)
    assert torch.equal(model.weight.detach().dequantize(), cast(model.weight, drawn))
    assert (model.weight.detach().dequantize().float() - drawn.float()).abs().max() < 0.01
    model.weight.clear_high_precision_init_val()
    assert model.weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (127, 3), (0, 5), (5, 0), (129, 257)], ids=str)
@recipe_of_each
def test_weights_of_any_shape_match_quantizing_at_each_call(recipe, shape):
    outputs, inputs = shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it draws nothing
        model = linear(recipe, inputs, outputs, bias=False)
        twin = unquantized(model)
    _share_scale(model, twin, recipe)
    x = batch(7, inputs)
    assert same(step(model, x, recipe), step(twin, x, recipe))
    assert model(x[0]).shape == (outputs,) and model(x[None, None]).shape == (1, 1, 7, outputs)


def _share_scale(model, twin, recipe):
    """Have the weight's quantizer of an unquantized twin know the values, as that which cast them."""
    if not model.weight.quantizer.state_names:
        return
    op = twin.basic_ops[0]
    op._quantizers.use(op, recipe)
    quantizer = op._quantizers.of(recipe)["weight"]
    quantizer.quantize(twin.weight.detach(), BOTH)
    quantizer.advance()


# Products


@recipe_of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_a_step_is_that_of_an_unquantized_model(recipe, dtype, frozen):
    model = linear(recipe, dtype=dtype)
    twin = unquantized(model)
    _share_scale(model, twin, recipe)
    for m in (model, twin):
        for name, param in m.named_parameters():
            param.requires_grad_(name != frozen)
    before, x = codes(model.weight), batch(dtype=dtype)
    assert same(step(model, x, recipe), step(twin, x, recipe))
    with torch.no_grad(), opfuse.autocast(recipe):
        assert torch.equal(model(x), twin(x))
    assert same(codes(model.weight), before)


@recipe_of_each
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_dequantizes_the_stored_weight(recipe, override):
    recipe = type(recipe)(backward_override=override)
    model, x = linear(recipe), batch()
    y, dx, dw, _ = step(model, x, recipe)
    dy = 2 * y
    assert torch.equal(dx, dy @ model.weight.detach().dequantize())
    kept = x if override == "high_precision" else None
    if kept is not None:
        assert torch.equal(dw, dy.t().mm(kept))


@recipe_of_each
def test_torch_autocast_gives_the_same_bits_as_an_unquantized_weight(recipe):
    model, x = linear(recipe), batch()
    twin = unquantized(model)
    _share_scale(model, twin, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = step(model, x, recipe), step(twin, x, recipe)
    assert got[0].dtype == torch.bfloat16 and same(got, want)


@recipe_of_each
@pytest.mark.parametrize("mixed", [False, True])
def test_without_a_recipe_it_is_dequantized(recipe, mixed):
    model, x = linear(recipe), batch()
    twin = unquantized(model)
    with torch.no_grad():
        twin.weight.copy_(model.weight)
    assert type(twin.weight) is nn.Parameter
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        assert same(step(model, x, None), step(twin, x, None))
    with opfuse.options(double_backward=True):
        grads = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        assert same(grads, torch.autograd.grad(twin(x).square().sum(), [*twin.parameters()]))


def test_another_recipe_is_refused():
    model, x = linear(PER_TENSOR), batch()
    expected = r"weight of BasicLinear is quantized by another recipe: it lives as PerTensor.*in force is PerBlock"
    with pytest.raises(RuntimeError, match=expected), opfuse.autocast(PER_BLOCK):
        model(x)
    with opfuse.autocast(PER_TENSOR):
        assert model(x).shape == (16, 40)


@recipe_of_each
def test_nothing_but_the_parameter_is_kept_of_it_for_the_backward(recipe):
    model, x, seen = linear(recipe, bias=False), batch().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        with opfuse.autocast(recipe):
            model(x)
    theirs = {part.data_ptr() for part in model.weight.tensors()}
    others = [t for t in seen if t.data_ptr() not in theirs]
    assert len(others) < len(seen)
    size = sum(t.numel() * t.element_size() for t in others)
    assert x.numel() < size <= 1.3 * x.numel()  # the input in one byte, and its scales
    with opfuse.autocast(recipe):
        kept = opfuse.explain(model, x).to_dict()["forward"]
    assert sum(row["saved_bytes"] for row in kept) == size


def test_a_change_between_forward_and_backward_is_an_error():
    for recipe in TOYS:
        model, x = linear(recipe), batch().requires_grad_()
        with opfuse.autocast(recipe):
            y = model(x)
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_grad_mode_off_builds_one_copy():
    for recipe in (PER_TENSOR, PER_BLOCK):
        with torch.no_grad():
            model = linear(recipe)
        assert model.weight.quantized.copies == ROWWISE
        x = batch()
        with torch.no_grad(), opfuse.autocast(recipe):
            assert torch.equal(model(x), linear(recipe)(x))
    with pytest.raises(RuntimeError, match="expected copies for .*build the model with grad mode"):
        step(model, x, PER_BLOCK)


# As a tensor


NEW = torch.randn(40, 48, generator=torch.Generator().manual_seed(3)) / 9
WRITES = {  # how, and what the values are then
    "copy_": (lambda p: p.copy_(NEW), lambda old: NEW),
    "from bf16": (lambda p: p.copy_(NEW.bfloat16()), lambda old: NEW.bfloat16()),
    "from int": (lambda p: p.copy_(NEW.int()), lambda old: NEW.int().float()),
    "from a row": (lambda p: p.copy_(NEW[0]), lambda old: NEW[:1].repeat(40, 1)),
    "transposed": (lambda p: p.copy_(NEW.t().contiguous().t()), lambda old: NEW),
    "mul_": (lambda p: p.mul_(2), lambda old: old * 2),
    "add_": (lambda p: p.add_(NEW, alpha=-0.5), lambda old: old.add(NEW, alpha=-0.5)),
    "itself": (lambda p: p.add_(p), lambda old: old + old),
    "foreach": (lambda p: torch._foreach_add_([p], [NEW]), lambda old: old + NEW),
    "data": (lambda p: setattr(p, "data", NEW), lambda old: NEW),
    "detach": (lambda p: p.detach().copy_(NEW), lambda old: NEW),
    "view": (lambda p: p.view(-1).copy_(NEW.view(-1)), lambda old: NEW),
    "rows": (lambda p: p[:7].copy_(NEW[:7]), lambda old: torch.cat([NEW[:7], old[7:]])),
    "index": (
        lambda p: p.__setitem__(3, 0.0),
        lambda old: old.index_fill(0, torch.tensor([3]), 0.0),
    ),
    "out": (lambda p: torch.mul(NEW, 3, out=p), lambda old: NEW * 3),
    "constant": (lambda p: nn.init.constant_(p, 0.25), lambda old: torch.full_like(old, 0.25)),
    "eye": (lambda p: nn.init.eye_(p), lambda old: torch.eye(40, 48)),
    "zeros": (lambda p: p.zero_(), torch.zeros_like),
}


@pytest.mark.parametrize("name", WRITES)
@recipe_of_each
def test_writing_quantizes_again_in_place(recipe, name):
    param = linear(recipe).weight
    write, values = WRITES[name]
    places = [part.data_ptr() for part in param.tensors()]
    old, version = param.detach().dequantize(), param.tensors()[0]._version
    want = cast(param, values(old))
    with torch.no_grad():
        write(param)
    assert torch.equal(param.detach().dequantize(), want) and not torch.equal(want, old)
    assert param.tensors()[0]._version > version
    assert [part.data_ptr() for part in param.tensors()] == places
    assert isinstance(param, nn.Parameter) and param.quantized.dtype == torch.float32


@recipe_of_each
def test_reading_gives_the_values(recipe):
    param = linear(recipe).weight
    values = param.detach().dequantize()
    reads = {
        "sum": lambda t: t.sum(),
        "t": lambda t: t.t(),
        "slice": lambda t: t[:5] + 0,
        "later rows": lambda t: t[5:9],
        "index": lambda t: t[3, 4],
        "float": lambda t: t.double() + 0,
        "bf16": lambda t: t.bfloat16() + 0,
        "norm": lambda t: torch.linalg.vector_norm(t),
        "product": lambda t: torch.nn.functional.linear(batch(), t),
        "cat": lambda t: torch.cat([t.view(-1), t.reshape(-1)]),
        "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
        "int": lambda t: t.mul(100).to(torch.int32),
        "equal": lambda t: t == t,
        "zeros": torch.zeros_like,
        "chunk": lambda t: torch.chunk(t, 3)[2],
    }
    for name, read in reads.items():
        got = read(param.detach())
        assert type(got) is torch.Tensor, name
        want = read(values)
        assert (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got, want), name
    assert param.is_floating_point() and param.is_leaf and not param.is_meta
    text = repr(param)
    assert "QuantizedWeight" in text and type(recipe).__name__ in text and "(40, 48)" in text


VIEWS = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "the first rows": lambda p: p[:8],
    "the transpose": lambda p: p.t(),
    "parts": lambda p: torch.stack(p.chunk(2)),
    "expand": lambda p: p.expand(2, -1, -1),
}


@recipe_of_each
@pytest.mark.parametrize("name", VIEWS)
def test_views_in_inference_mode(recipe, name):
    held = linear(recipe).weight
    expected = VIEWS[name](held).clone()
    with torch.inference_mode():
        made = VIEWS[name](held)
    assert not made.is_inference() or name == "parts"  # a view of a tensor that is none
    torch.testing.assert_close(made.clone(), expected, rtol=0, atol=0)


@recipe_of_each
@of_no_state
def test_writes_and_checkpoints_in_inference_mode(recipe):
    model, twin = linear(recipe), linear(recipe)
    with torch.no_grad():
        twin.weight[3] = 0.5
    with torch.inference_mode():
        model.weight[3] = 0.5
        saved = model.state_dict()
    assert saved.keys() == twin.state_dict().keys()
    torch.testing.assert_close(dict(saved), dict(twin.state_dict()), rtol=0, atol=0)
    other = linear(recipe, seed=1)
    with torch.inference_mode():
        other.load_state_dict(saved)
        other.weight.data = model.weight.data
    torch.testing.assert_close(other.weight.clone(), twin.weight.clone(), rtol=0, atol=0)
    got, expected = step(other, batch(), recipe), step(twin, batch(), recipe)  # it still trains
    assert all(map(torch.equal, got, expected))


@recipe_of_each
def test_copies_have_their_own_weight_and_quantizer(recipe):
    model = linear(recipe)
    step(model, batch(), recipe)
    param, before = model.weight, codes(model.weight)
    param.main_grad = torch.zeros(40, 48)
    pickled = pickle.loads(pickle.dumps(model))
    assert isinstance(pickled.weight, nn.Parameter) and pickled.weight.requires_grad
    for twin in (copy.deepcopy(model), pickled):
        assert same(codes(twin.weight), before) and torch.equal(
            twin.weight.main_grad, param.main_grad
        )
        assert twin.weight.quantizer is not param.quantizer
        assert twin.weight.quantizer is twin.basic_ops[0]._quantizers.of(recipe)["weight"]
        assert same(step(twin, batch(), recipe), step(copy.deepcopy(model), batch(), recipe))
        with torch.no_grad():
            twin.weight.mul_(3)
    clone, other = param.detach().clone(), linear(recipe, seed=5).weight
    states = [getattr(param.quantizer, name).clone() for name in param.quantizer.state_names]
    with torch.no_grad():
        clone.zero_()
        copied = copy.deepcopy(other).detach().copy_(param)
    assert same(codes(copied), before) and same(codes(param), before)
    names = param.quantizer.state_names
    assert all(
        torch.equal(getattr(param.quantizer, n), s) for n, s in zip(names, states, strict=True)
    )


@recipe_of_each
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32], ids=str
)
def test_to_and_dequantize_give_the_same_numbers(recipe, dtype):
    param = linear(recipe, dtype=torch.bfloat16).weight
    with torch.no_grad():
        param.mul_(100)
    plain = param.dequantize(dtype)
    assert type(plain) is torch.Tensor and plain.dtype == dtype
    to = param.detach().to(dtype)
    assert torch.equal(plain, to.dequantize() if dtype.is_floating_point else to)
    if dtype == torch.float32:  # rounded once, not to bfloat16 before
        assert not torch.equal(plain, param.dequantize().float())
        plain.sum().backward()
        assert param.grad.dtype == torch.bfloat16 and param.grad.eq(1).all()


@recipe_of_each
def test_to_another_dtype_or_device(recipe):
    model = linear(recipe)
    param, before, values = model.weight, codes(model.weight), model.weight.detach().dequantize()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        model.to(dtype)
        assert model.weight is param and model.bias.dtype == dtype == param.dtype
        assert isinstance(param, nn.Parameter) and same(codes(param), before)
        assert torch.equal(param.detach().dequantize(), values.to(dtype))
        assert step(model, batch(dtype=dtype), recipe)[2].dtype == dtype
    model.cpu()
    assert type(model.weight) is QuantizedWeight
    moved = param.detach().to("meta")
    assert moved.is_meta and all(part.is_meta for part in moved.tensors())


@recipe_of_each
@pytest.mark.parametrize("device", ["cpu", "meta"])
@of_no_state
def test_to_empty_stays_quantized(recipe, device):
    source = linear(recipe)
    checkpoint, model = saved(source), linear(recipe, seed=4)
    model.to(device).to_empty(device="cpu")
    assert isinstance(model.weight, QuantizedWeight) and isinstance(model.weight, nn.Parameter)
    assert not model.weight.is_meta
    for given in ({"weight": checkpoint["weight"], "bias": checkpoint["bias"]}, checkpoint):
        model.load_state_dict(given)
        got = model.weight.detach().dequantize()
        assert (got - source.weight.detach()).norm() < 0.05 * got.norm()
    assert same(codes(model.weight), codes(source.weight))
    assert same(step(model, batch(), recipe), step(source, batch(), recipe))
    assert type(torch.empty_like(model.weight)) is torch.Tensor


def test_state_that_was_left_on_the_meta_device_is_not_made_up():
    model = linear(DELAYED)
    step(model, batch(), DELAYED)
    model.to("meta")
    with pytest.raises(RuntimeError, match="cannot leave the meta device by to_empty.*build the"):
        model.to_empty(device="cpu")


# Training


STEPS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", STEPS)
@recipe_of_each
def test_an_optimizer_step_is_that_of_the_values_and_a_cast(recipe, name):
    model = linear(recipe)
    plain = [nn.Parameter(p.detach().clone() + 0) for p in model.parameters()]
    ours, theirs = STEPS[name]([*model.parameters()]), STEPS[name](plain)
    for number in range(3):
        for p, q in zip(model.parameters(), plain, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            q.grad = p.grad.clone()
            q.data.copy_(p.detach())
        theirs.step()
        want = cast(model.weight, plain[0].detach())
        ours.step()
        assert torch.equal(model.weight.detach().dequantize(), want)
        assert torch.equal(model.bias, plain[1])
    states = ours.state[model.weight].values()
    assert all(type(value) is torch.Tensor for value in states if value is not None)
    restored = STEPS[name]([*copy.deepcopy(model).parameters()])
    restored.load_state_dict(copy.deepcopy(ours.state_dict()))


@recipe_of_each
def test_gradients_are_plain(recipe):
    model, x = linear(recipe), batch()
    for _ in range(2):  # accumulated
        with opfuse.autocast(recipe):
            model(x).sum().backward()
    assert type(model.weight.grad) is torch.Tensor and model.weight.grad.dtype == torch.float32
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert total > 1 and torch.linalg.vector_norm(model.weight.grad) <= 1
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(vector[: 40 * 48].view(40, 48), model.weight.detach().dequantize())
    values = batch(40, seed=7)
    want = cast(model.weight, values)
    nn.utils.vector_to_parameters(
        torch.cat([values.view(-1), model.bias.detach()]), model.parameters()
    )
    assert torch.equal(model.weight.detach().dequantize(), want)
    model.zero_grad()
    assert model.weight.grad is None
    model.requires_grad_(False)
    assert not model.weight.requires_grad


def test_main_grad_accumulates_as_for_an_unquantized_weight():
    model, x = linear(PER_BLOCK, accumulate_into_main_grad=True), batch()
    model.weight.main_grad = torch.zeros(40, 48)
    for _ in range(2):
        with opfuse.autocast(PER_BLOCK):
            model(x).square().sum().backward()
    twin = linear(PER_BLOCK)
    with opfuse.autocast(PER_BLOCK):
        twin(x).square().sum().backward()
    assert model.weight.grad is None
    assert torch.equal(model.weight.main_grad, 2 * twin.weight.grad)


@recipe_of_each
def test_parameters_are_drawn_anew(recipe):
    model = linear(recipe)
    torch.manual_seed(4)
    model.reset_parameters()
    torch.manual_seed(4)
    drawn = ops.Linear(48, 40)
    assert torch.equal(
        model.weight.detach().dequantize(), cast(model.weight, drawn.weight.detach())
    )
    assert torch.equal(model.bias, drawn.bias)


def test_a_delayed_scale_follows_what_is_written():
    model, x = linear(DELAYED), batch()
    quantizer = model.weight.quantizer
    first = model.weight.get_high_precision_init_val().abs().max()
    assert torch.equal(model.weight.scale_inv, first.reshape(1) / 448)  # the codes fit the values
    assert quantizer.scale == 1 and quantizer.seen == first  # the scale begins as TE's
    for _ in range(3):  # nothing is cast, so nothing is recorded
        casts = quantizer.casts.clone()
        with opfuse.autocast(DELAYED):
            model(x)
            assert torch.equal(quantizer.casts, casts)
        assert torch.equal(quantizer.scale, model.weight.scale_inv)
    assert model.basic_ops[0]._quantizers.of(DELAYED)["weight"] is quantizer
    with torch.no_grad():
        model.weight.mul_(4)
    assert quantizer.seen > 3.5 * first
    assert torch.equal(model.weight.scale_inv, quantizer.seen / 448)
    assert quantizer.scale < model.weight.scale_inv  # it follows at the next update
    assert model.weight.detach().dequantize().abs().max() > 3.5 * first
    with opfuse.autocast(DELAYED):
        model(x)
    assert torch.equal(quantizer.scale, model.weight.scale_inv)
    for factor in (2, 0.01, 0.9):
        with torch.no_grad():
            model.weight.mul_(factor)
        with opfuse.autocast(DELAYED):
            model(x)
    largest = model.weight.detach().dequantize().abs().max()
    assert torch.allclose(quantizer.scale, largest / 448, rtol=0.2), "earlier maxima are forgotten"


@pytest.mark.parametrize("write", ["copy_", "load"])
def test_values_that_a_delayed_scale_holds_exactly_stay_exact(write):
    model, scale = linear(DELAYED), torch.full((1,), 1.0)
    eighths = torch.randint(-15, 16, (40, 48)) / 8  # 4 bits: codes of E4M3 as they are
    for values, exact in ((eighths, True), (eighths / 3, False)):
        with torch.no_grad():
            if write == "copy_":
                model.weight.copy_(values)
            else:
                model.load_state_dict({"weight": values, "bias": model.bias})
        assert torch.equal(model.weight.detach().dequantize(), values) == exact
        assert torch.equal(model.weight.scale_inv, scale) == exact


@pytest.mark.parametrize(("std", "at_1", "here"), [(None, 0.062, 0.026), (0.0025, 0.226, 0.026)])
def test_what_a_scale_of_1_would_cost(std, at_1, here):
    torch.manual_seed(0)
    weight = ops.Linear(4096, 64).weight.detach() if std is None else std * torch.randn(64, 4096)
    plain = weight.to(torch.float8_e4m3fn).float()
    with opfuse.quantized_model_init(recipe=DELAYED):
        param = ops.BasicLinear(4096, 64).weight
    with torch.no_grad():
        param.copy_(weight)
    for got, loss in ((plain, at_1), (param.detach().dequantize(), here)):
        assert (got - weight).norm() / weight.norm() == pytest.approx(loss, rel=0.05)


@pytest.mark.parametrize("grad", [True, False])
@recipe_of_each
def test_what_is_written_is_not_clipped(recipe, grad):
    target = torch.randn(40, 48, generator=torch.Generator().manual_seed(5))
    for write in (
        lambda p: p.copy_(target),
        lambda p: setattr(p, "data", target),
        lambda p: p.zero_().add_(target),
        lambda p: p.view(-1).copy_(target.view(-1)),
        lambda p: p.detach()[:].copy_(target),
    ):
        model = linear(recipe)
        with torch.no_grad():
            write(model.weight)
        with torch.set_grad_enabled(grad), opfuse.autocast(recipe):
            got = model(batch())
        want = batch() @ target.t() + model.bias
        assert (model.weight.detach() - target).norm() < 0.05 * target.norm()
        assert (got - want).norm() < 0.06 * want.norm()


@recipe_of_each
def test_what_is_written_into_a_copy_moves_no_scale(recipe):
    for copied in (lambda p: p.to(torch.bfloat16), torch.clone, lambda p: p.to("cpu", copy=True)):
        model = linear(recipe)
        param, before = model.weight, codes(model.weight)
        state = [getattr(param.quantizer, name).clone() for name in param.quantizer.state_names]
        made = copied(param.detach())
        assert isinstance(made, QuantizedWeight)
        made.fill_(500.0)
        assert (made.dequantize() == 500).all() and same(codes(param), before)
        for name, value in zip(param.quantizer.state_names, state, strict=True):
            assert torch.equal(getattr(param.quantizer, name), value)


def test_a_checkpoint_has_the_state_of_the_quantizer_that_the_parameter_has_now():
    model = linear(DELAYED)
    train(model, DELAYED)
    model.to(torch.bfloat16)  # which gives it a quantizer of its own
    with torch.no_grad():
        model.weight.mul_(3)
    checkpoint = saved(model)
    key = next(key for key in checkpoint if key.endswith("weight.scale") and "quantizers" in key)
    assert torch.equal(checkpoint[key], model.weight.quantizer.scale)


def test_what_a_write_recorded_outlives_a_block_that_fails():
    model = linear(DELAYED)
    with torch.no_grad():
        model.weight.mul_(2)
    seen = model.weight.quantizer.seen.clone()
    with pytest.raises(ZeroDivisionError), opfuse.autocast(DELAYED):
        model(batch())
        raise ZeroDivisionError
    assert seen > 0 and torch.equal(model.weight.quantizer.seen, seen)
    assert model.basic_ops[0]._quantizers.of(DELAYED)["input"].seen == -1


def test_a_weight_of_two_ops_advances_once():
    model = opfuse.Sequential(linear(DELAYED, 48, 48), ops.GELU(), linear(DELAYED, 48, 48))
    model[2].weight = model[0].weight
    with opfuse.autocast(DELAYED):
        model(batch())
    quantizers = [model[i].basic_ops[0]._quantizers.of(DELAYED)["weight"] for i in (0, 2)]
    assert quantizers[0] is quantizers[1]
    assert quantizers[0].count == 1  # for what it saw when it was built


# Checkpoints


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model, recipe, steps=2, start=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(start, start + steps):
        with opfuse.autocast(recipe):
            y = model(batch(seed=number))
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 2])
@recipe_of_each
@of_no_state
def test_a_run_goes_on_to_the_bit(recipe, steps):
    model = linear(recipe)
    train(model, recipe, steps)
    checkpoint, again = saved(model), linear(recipe, seed=9)
    assert all(type(value) is torch.Tensor for value in checkpoint.values())
    again.load_state_dict(checkpoint)
    assert same(codes(again.weight), codes(model.weight))
    for m in (model, again):
        train(m, recipe, 3, start=5)
    assert same(codes(again.weight), codes(model.weight))
    assert same([*saved(again).values()], [*saved(model).values()])


@recipe_of_each
def test_unquantized_checkpoints_load_and_back(recipe):
    plain, other = nn.Linear(48, 40), ops.Linear(48, 40)
    with torch.no_grad():
        plain.weight.mul_(50)  # another magnitude than that of the parameter before
    for checkpoint in (other.state_dict(), plain.state_dict()):
        model = linear(recipe)
        model.load_state_dict(checkpoint)
        values = model.weight.detach().dequantize()
        worst = (values - checkpoint["weight"]).abs().max() / checkpoint["weight"].abs().max()
        assert worst < 0.05 and isinstance(model.weight, QuantizedWeight)
        assert torch.equal(values, cast(model.weight, checkpoint["weight"]))
    for other in (ops.Linear(48, 40), linear(PER_BLOCK if recipe is PER_TENSOR else PER_TENSOR)):
        other.load_state_dict(saved(model))
        want = values if type(other.weight) is nn.Parameter else cast(other.weight, values)
        assert torch.equal(other.weight.detach() + 0, want)
    missing, unexpected = plain.load_state_dict(saved(model), strict=False)
    assert not missing and all("quantized.weight." in key for key in unexpected)
    assert torch.equal(plain.weight, values)


def test_what_a_checkpoint_may_not_hold():
    model = linear(PER_TENSOR)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict(ops.Linear(48, 41).state_dict())
    checkpoint = saved(model)
    del checkpoint["quantized.weight.scale_inv"]
    model.load_state_dict(checkpoint)  # by its values
    assert torch.equal(model.weight.detach().dequantize(), cast(model.weight, checkpoint["weight"]))
    kept = model.state_dict(keep_vars=True)
    assert kept["weight"] is model.weight
    model.load_state_dict(saved(linear(PER_TENSOR, seed=2)), assign=True)
    assert isinstance(model.weight, QuantizedWeight) and isinstance(model.weight, nn.Parameter)
    model.load_state_dict(ops.Linear(48, 40).state_dict(), assign=True)
    assert isinstance(model.weight, nn.Parameter)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("format", torch.tensor([1, 2], dtype=torch.uint8), "expected JSON as bytes"),
        ("format", None, "expected JSON as bytes, got nothing"),
        ("rowwise_data", torch.zeros(3), "of shape .40, 48., got torch.float32 of shape .3,"),
        ("rowwise_data", torch.zeros(40, 48), "expected torch.float8_e4m3fn of shape"),
        ("scale_inv", 3.0, "expected a tensor, got float"),
        ("state.history", torch.zeros(5), "expected torch.float32 of shape .2,"),
        ("of_another_kind", torch.zeros(3), "is not known here: expected only rowwise_data"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_entry_that_does_not_fit_is_an_error_that_names_it(entry, value, words, strict):
    model = linear(DELAYED)
    checkpoint, key = saved(model), f"quantized.weight.{entry}"
    checkpoint[key] = value
    if value is None:
        del checkpoint[key]
    with pytest.raises(RuntimeError, match=f"{key}.*{words}"):
        model.load_state_dict(checkpoint, strict=strict)
    other = linear(PER_TENSOR)
    if entry != "format":  # of another recipe they are nobody's affair
        other.load_state_dict(checkpoint)
        assert torch.equal(
            other.weight.detach().dequantize(), cast(other.weight, checkpoint["weight"])
        )


@recipe_of_each
def test_values_that_were_edited_win_over_the_codes(recipe):
    source = linear(recipe)
    checkpoint = saved(source)
    edited = {
        "all": torch.ones(40, 48),
        "doubled": checkpoint["weight"] * 2,
        "one": checkpoint["weight"].clone().index_fill_(0, torch.tensor([3]), 0.25),
    }
    for values in edited.values():
        model = linear(recipe, seed=4)
        model.load_state_dict({**checkpoint, "weight": values})
        got = model.weight.detach().dequantize()
        assert (got - values).norm() < 0.05 * values.norm()
        assert torch.equal(got, cast(model.weight, values))
    for dtype in (torch.bfloat16, torch.float64):  # rounded, and by another model: not edited
        model = linear(recipe, seed=4, dtype=dtype)
        model.load_state_dict(checkpoint)
        assert same(codes(model.weight), codes(source.weight))
        model = linear(recipe, seed=4)
        model.load_state_dict({**checkpoint, "weight": checkpoint["weight"].to(dtype)})
        assert same(codes(model.weight), codes(source.weight))


@recipe_of_each
def test_a_state_dict_is_of_one_moment(recipe):
    model = linear(recipe)
    before, checkpoint = codes(model.weight), model.state_dict()
    with torch.no_grad():
        model.weight.mul_(4)
    quantized, plain = linear(recipe, seed=4), ops.Linear(48, 40)
    quantized.load_state_dict(checkpoint)
    plain.load_state_dict(checkpoint)
    assert same(codes(quantized.weight), before)
    assert torch.equal(quantized.weight.detach().dequantize(), plain.weight)


# The block


def test_which_blocks_quantize_what():
    with opfuse.quantized_model_init(PER_TENSOR):
        with opfuse.quantized_model_init(enabled=False):
            assert type(ops.Linear(4, 4).weight) is nn.Parameter
        with pytest.raises(ZeroDivisionError), opfuse.quantized_model_init("testing-PerBlock"):
            inner = ops.BasicLinear(4, 4)
            raise ZeroDivisionError
        model = opfuse.Sequential(ops.Linear(4, 4), ops.LayerNorm(4), nn.Linear(4, 4))
        meta = ops.Linear(4, 4, device="meta")
        grouped = ops.GroupedLinear(2, 4, 4)
        parallel = ops.ParallelLinear([ops.Linear(4, 4), nn.Linear(4, 4)])
        of = ops.Linear.of(nn.Linear(4, 4))
        reading = ops.BasicLinear.reading(model[0])
    assert inner.weight.recipe == PER_BLOCK and model[0].weight.recipe == PER_TENSOR
    assert type(grouped.weight1) is QuantizedWeight and type(grouped.bias0) is nn.Parameter
    plain = model[1].weight, model[2].weight, meta.weight, of.weight
    assert {type(param) for param in plain} == {nn.Parameter}
    assert type(ops.Linear(4, 4).weight) is nn.Parameter
    assert reading.weight is model[0].weight
    linears = [*parallel.children()]
    assert [type(one.weight) for one in linears] == [QuantizedWeight, nn.Parameter]
    x = batch(3, 4)
    want = torch.cat([x @ one.weight.detach().t() + one.bias for one in linears], -1)
    torch.testing.assert_close(parallel(x), want)
    with opfuse.autocast(PER_TENSOR):
        assert torch.equal(reading(x), model[0].basic_ops[0](x))


def test_what_a_block_refuses():
    with pytest.raises(TypeError, match="quantized_model_init: got two recipes"):
        opfuse.quantized_model_init(PER_TENSOR, recipe=PER_BLOCK)
    with pytest.raises(TypeError, match="quantized_model_init: expected an opfuse.Recipe"):
        opfuse.quantized_model_init(recipe=3)
    with pytest.raises(ValueError, match="no plugin offers a recipe 'fp9'"):
        opfuse.quantized_model_init("fp9")
    with pytest.raises(TypeError, match="preserve_.* expected a bool, got 'no'"):
        opfuse.quantized_model_init(PER_TENSOR, preserve_high_precision_init_val="no")
    with plugins.using(""), pytest.warns(opfuse.PluginWarning, match="is off"):
        plugins.manager._warned.clear()
        with opfuse.quantized_model_init(PER_TENSOR):
            assert type(ops.Linear(4, 4).weight) is nn.Parameter


def test_errors_name_the_op():
    model = opfuse.Sequential(linear(PER_TENSOR, name="head"))
    with pytest.raises(RuntimeError, match="^weight of BasicLinear 'head' is quantized by another"):
        with opfuse.autocast(PER_BLOCK):
            model(batch())


def test_a_size_that_the_recipe_cannot_take(monkeypatch):
    def refuse(*args):
        raise ValueError("expected a multiple of 32: leave the op out by autocast(skip=[...])")

    monkeypatch.setattr(recipes._PerTensor, "quantize", refuse)
    with pytest.raises(ValueError, match="multiple of 32.*build it outside of the block"):
        linear(PER_TENSOR)
    assert not current.new_op_name


def test_a_recipe_sees_the_name_of_the_op_around(monkeypatch):
    seen, new_quantizer = [], model_init.new_quantizer

    def watched(recipe, role, env):
        seen.append(role)
        return new_quantizer(recipe, role, env)

    monkeypatch.setattr(model_init, "new_quantizer", watched)
    with opfuse.quantized_model_init(PER_TENSOR):
        ops.Linear(8, 8, name="abc")
        ops.BasicLinear(8, 8, name="inner")
        ops.Linear(8, 8)
    assert [(role.tensor_type, role.name) for role in seen] == [
        ("weight", name) for name in ("abc", "inner", "")
    ]


def test_explain_names_the_weights_that_live_quantized():
    torch.manual_seed(0)
    with opfuse.quantized_model_init(DELAYED):
        model = opfuse.Sequential(ops.BasicLinear(8, 8, name="first"), ops.Linear(8, 8))
    opfuse.assign_names(model)  # before its quantizers know a name
    x = batch(4, 8)
    with opfuse.autocast(DELAYED):
        text = str(opfuse.explain(model, x))
    assert "BasicLinear: weight lives quantized, by Delayed" in text
    assert "is dequantized in every call" in " ".join(str(opfuse.explain(model, x)).split())


def test_torch_compile_refuses_with_a_sentence():
    model = torch.compile(linear(PER_TENSOR), backend="eager")
    with pytest.raises(Exception, match="which torch.compile does not look into"):
        model(batch())


@recipe_of_each
def test_recomputed_in_a_checkpoint(recipe):
    model, x = linear(recipe), batch().requires_grad_()
    twin = copy.deepcopy(model)
    with opfuse.autocast(recipe):
        y = torch.utils.checkpoint.checkpoint(
            model, x, use_reentrant=False, context_fn=opfuse.checkpoint_contexts
        )
    y.square().sum().backward()
    assert same([y.detach(), x.grad, model.weight.grad], step(twin, x.detach(), recipe)[:3])
    assert same(codes(model.weight), codes(twin.weight))


def test_the_other_copy_is_read_where_there_is_no_rowwise_one():
    param = linear(PER_BLOCK).weight
    only = QuantizedWeight(param.quantized.only(COLUMNWISE), PER_BLOCK)
    assert only.quantized.copies == COLUMNWISE
    assert torch.equal(only.dequantize(), param.quantized.dequantize(COLUMNWISE))


def test_an_op_with_several_weights_uses_their_quantizers():
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=testing.Delayed()):
        both = [ops.Linear(32, 32, bias=False) for _ in range(2)]
    chain, x = opfuse.Sequential(ops.ParallelLinear(both)), torch.randn(8, 32)
    with opfuse.autocast(testing.Delayed()):
        chain(x)
    known = chain[0]._quantizers.of(testing.Delayed())
    for i, linear in enumerate(both):
        assert known[f"weight{i}"] is linear.weight.quantizer
        before = linear.weight.quantizer.scale.clone()
        with torch.no_grad():
            linear.weight.mul_(2)
        with opfuse.autocast(testing.Delayed()):
            chain(x)
        assert not torch.equal(linear.weight.quantizer.scale, before)
        with opfuse.autocast(testing.Delayed()):
            report = opfuse.explain(chain, x)  # which leaves the scale as it was
    rows = report.to_dict()["quantized"][0]["tensors"]
    assert [row["where"] for row in rows[1:3]] == ["lives quantized"] * 2
