"""What a graph of a forward cannot hold, or what changes behind it: the module's own forward runs."""

import collections
import contextlib
import copy
import functools
import random

import pytest
import torch
from converting import WIDTH, Gated, RootMean, an_input, assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import opfuse

pytestmark = pytest.mark.alone

SCALE = 1.0
LOG = []


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.number, self.act, self.seen = 1.0, F.silu, [0]
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.drawn = random.Random(0)

    def hidden(self, x):
        return self.b(F.silu(self.a(x)))


def model_of(forward):
    """A class of its own with this forward."""
    return type(forward.__name__, (Base,), {"forward": forward})


def asks_for_the_class_of_a_child(self, x):
    for layer in self.layers:
        x = layer(x)
        if isinstance(layer, nn.Linear):
            x = F.relu(x)
    return x


def asks_for_the_class_of_a_value(self, x):
    y = self.hidden(x)
    return 2 * y if isinstance(y, torch.Tensor) else y


def asks_for_identity(self, x):
    y = self.hidden(x)
    return y if x.dtype is torch.float32 else 2 * y


def asks_a_result_for_none(self, x):
    y = self.hidden(x)
    return y if y is None else 2 * y


def enters_a_context(self, x):
    with contextlib.nullcontext():
        return self.hidden(x)


def catches(self, x):
    try:
        return self.hidden(x)
    except ValueError:
        return x


def logs(self, x):
    LOG.append(1)
    return self.hidden(x)


def writes_into_a_list(self, x):
    self.seen[0] += 1
    return self.hidden(x)


def sets_an_attribute_of_a_child(self, x):
    self.a.calls = 1
    return self.hidden(x)


def takes_any_number(self, x, *more, scale=None):
    y = self.hidden(x)
    return y * more[0] if more else y


def gives_an_ordered_dict(self, x):
    return collections.OrderedDict(y=self.hidden(x))


def draws_of_its_own(self, x):
    return self.hidden(x) if self.drawn.random() < 0.5 else x


def takes_a_shape_apart(self, x):
    rows, _ = x.shape
    return self.hidden(x) * rows / rows


BESIDE_CHAINS = [
    asks_for_the_class_of_a_child,
    asks_for_the_class_of_a_value,
    asks_for_identity,
    asks_a_result_for_none,
    enters_a_context,
    catches,
    logs,
    writes_into_a_list,
    sets_an_attribute_of_a_child,
    takes_any_number,
    gives_an_ordered_dict,
    draws_of_its_own,
    takes_a_shape_apart,
]


@pytest.mark.parametrize("forward", BESIDE_CHAINS, ids=lambda forward: forward.__name__)
def test_the_author_s_code_runs_around_chains(forward):
    model = model_of(forward)()
    twin = copy.deepcopy(model)
    LOG.clear()
    opfuse.convert(model)
    assert not LOG and model.seen == [0]
    for x in (an_input(5), an_input(5).double().detach(), an_input(5)):
        model.to(x.dtype), twin.to(x.dtype)
        found = []
        for each in (model, twin):
            LOG.clear()
            y = each(x)
            found.append((type(y), y["y"] if isinstance(y, dict) else y, [*LOG], [*each.seen]))
        (kind, mine, *rest), (other, theirs, *others) = found
        assert kind is other and rest == others
        torch.testing.assert_close(mine, theirs)


def by_argument(self, x, approximate="none"):
    return self.b(F.gelu(self.a(x), approximate=approximate))


def by_mode(self, x):
    return self.b(F.gelu(self.a(x), approximate="tanh" if self.training else "none"))


def by_which_residual(self, x, post=False):
    normed = self.norm(x)
    return (normed if post else x) + self.hidden(normed)


def test_chains_differ_by_the_constants_of_their_ops():
    for forward, kwargs in (
        (by_argument, {"approximate": "tanh"}),
        (by_which_residual, {"post": True}),
    ):
        model = model_of(forward)()
        twin = copy.deepcopy(model)
        assert opfuse.convert(model).converted
        assert_same(model, twin, an_input())
        assert_same(model, twin, an_input(), **kwargs)
    model = model_of(by_mode)()
    twin = copy.deepcopy(model)
    assert opfuse.convert(model).converted
    for training in (True, False):
        assert_same(model.train(training), twin.train(training), an_input())


class Tripled(Gated):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Monitored(Gated):
    def __init__(self):
        super().__init__()
        self.monitor = Monitor()

    def forward(self, x):
        self.monitor(x)
        return super().forward(x)


class Monitor(nn.Module):
    calls = 0

    def forward(self, x):
        Monitor.calls += 1


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


@pytest.mark.parametrize("inner", [Tripled, Monitored])
def test_what_a_child_does_beside_its_forward_stays(inner):
    model = Outer(inner())
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    Monitor.calls = 0
    assert_same(model, twin, an_input())
    assert Monitor.calls == (2 if inner is Monitored else 0)


def reads_a_number_in_a_helper(self, x):
    return self.scaled(self.hidden(x))


def reads_a_number_in_a_lambda(self, x):
    scaled = lambda y: y * self.number  # noqa: E731
    return scaled(self.hidden(x))


def reads_a_function(self, x):
    return self.b(self.act(self.a(x)))


def reads_a_global(self, x):
    return self.hidden(x) * SCALE


def test_what_a_forward_reads_may_change(monkeypatch):
    helped = model_of(reads_a_number_in_a_helper)
    helped.scaled = lambda self, x: x * self.number
    for cls, change in (
        (helped, lambda m: setattr(m, "number", 5.0)),
        (model_of(reads_a_number_in_a_lambda), lambda m: setattr(m, "number", 5.0)),
        (model_of(reads_a_function), lambda m: setattr(m, "act", F.relu)),
        (model_of(reads_a_global), lambda m: monkeypatch.setitem(globals(), "SCALE", 4.0)),
    ):
        model = cls()
        twin = copy.deepcopy(model)
        assert opfuse.convert(model).converted
        assert_same(model, twin, an_input())
        assert opfuse.converted(model)[""] == ""
        change(model), change(twin)
        assert_same(model, twin, an_input())


class Long(Base):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    "held", [{}, [], (), "", nn.ModuleList(), nn.Sequential(), Long(), {"a": 1}, nn.Identity()]
)
def test_what_is_empty_counts_as_false(held):
    def forward(self, x):
        y = self.a(x)
        y = F.silu(y) if self.held else F.relu(y)
        return self.b(y)

    module = model_of(forward)()
    module.held = held
    x = an_input()
    expected = module(x)
    opfuse.convert(module)
    torch.testing.assert_close(module(x), expected)


def test_a_list_that_gets_empty():
    def forward(self, x):
        y = self.a(x)
        y = F.silu(y) if self.layers else F.relu(y)
        return self.b(y)

    module, x = model_of(forward)(), an_input()
    opfuse.convert(module)
    for _ in range(3):
        own = copy.deepcopy(module)
        opfuse.revert(own)
        torch.testing.assert_close(module(x), own(x))
        del module.layers[-1:]


def test_another_layer_and_other_shapes():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
    opfuse.convert(model)
    model(an_input())
    model.append(nn.Linear(WIDTH, 3))
    assert model(an_input()).shape[-1] == 3
    assert "the order of what is in it was" in opfuse.converted(model)[""]
    assert opfuse.convert(model).converted  # again, as it is now
    assert model(an_input()).shape[-1] == 3 and opfuse.converted(model)[""] == ""
    gated = Gated()
    opfuse.convert(gated)
    for name in ("gate", "up"):
        layer = getattr(gated, name)
        layer.weight = nn.Parameter(layer.weight[:16].detach().clone())
    gated.down.weight = nn.Parameter(gated.down.weight[:, :16].detach().clone())
    twin = copy.deepcopy(gated)
    assert_same(gated, opfuse.revert(twin), an_input())
    prune.l1_unstructured(gated.up, "weight", 0.5)
    gated(an_input())


def test_skipped_modules_are_called():
    model = Outer(Gated())
    calls = []
    model.inner.register_forward_hook(lambda *_: calls.append(1))
    handle = next(iter(model.inner._forward_hooks))
    report = opfuse.convert(model, skip="inner")
    assert "inner is to be left alone" in str(report) and not report.converted
    model(an_input())
    assert calls == [1] and handle is not None


@pytest.mark.parametrize("layers", ["norm relu", "linear norm", "residual relu"])
def test_dtypes_under_autocast_are_those_of_torch(layers):
    made = {
        "norm relu": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
        "linear norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        "residual relu": lambda: nn.Sequential(Outer(Gated()), nn.ReLU()),
    }
    model = made[layers]()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(an_input()).dtype is twin(an_input()).dtype
        assert_same(model, twin, an_input(), rtol=4e-2)


def test_broadcasting_meta_tensors_and_integers():
    narrow = Outer(nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, 1)))
    twin = copy.deepcopy(narrow)
    opfuse.convert(narrow)
    assert_same(narrow, twin, an_input())
    relu = nn.Sequential(nn.ReLU(), nn.Identity(), nn.ReLU())
    opfuse.convert(relu)
    assert relu(torch.tensor([-1, 2])).tolist() == [0, 2]
    gated = Gated()
    opfuse.convert(gated)
    assert gated.to("meta")(an_input().to("meta")).is_meta


def test_the_first_call_may_be_under_vmap():
    model, x = Gated(), an_input()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    torch.testing.assert_close(torch.vmap(model)(x), twin(x))


def test_numbers_that_change_each_call_are_followed():
    def scaled(self, x, t):
        return self.hidden(x) * t

    model = model_of(scaled)()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    for t in range(60):
        torch.testing.assert_close(model(an_input(), t / 7), twin(an_input(), t / 7))
        assert opfuse.converted(model)[""] == ""


def test_instances_of_a_converted_class_are_modules_like_others():
    model = RootMean()
    opfuse.convert(model)
    other = type(model)()
    assert torch.equal(copy.deepcopy(other)(an_input()), other(an_input()))
    assert opfuse.convert(other).converted and opfuse.converted(other)


def test_a_class_that_hears_of_its_subclasses_is_left_alone():
    class Registered(Base):
        known = {}  # noqa: RUF012

        def __init_subclass__(cls):
            Registered.known[cls.__name__] = cls

        def forward(self, x):
            return self.hidden(x)

    report = opfuse.convert(Registered())
    assert not report.converted and "__init_subclass__" in str(report)


def clipped(limit, x):
    return F.silu(x).clamp(max=limit)


class Partial(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = functools.partial(clipped, 7.0)

    def forward(self, x):
        return self.function(x)


class OwnGradient(nn.Module):
    def forward(self, x):
        return Clipping.apply(x)


class Clipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, dy):
        return (dy * (ctx.saved_tensors[0] > 0)).clamp(-3, 3)


class AbsoluteNorm(RootMean):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.abs()


class LimitedNorm(RootMean):
    def forward(self, x):
        wide = x.float().clamp(-1e6, 1e6)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class LimitedWeight(RootMean):
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight.clamp(-10, 10)


class WithoutNaN(RootMean):
    def forward(self, x):
        x = torch.where(torch.isnan(x), torch.zeros_like(x), x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Switched(RootMean):
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight * (self.weight < 100)


class SwitchedByPower(RootMean):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * (self.weight * (1 - 1 / (1 + 2 ** (40 - self.weight))))


class SoftlyLimited(RootMean):
    def forward(self, x):
        x = x.float()
        x = x * torch.rsqrt(1 + (x / 1e8) ** 2)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SoftlyLimitedWeight(RootMean):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * (self.weight / (1 + (self.weight / 1e5) * (self.weight / 1e5)))


class SoftlyLimitedByName(RootMean):
    def forward(self, x):
        x = x.float()
        x = torch.mul(x, other=torch.rsqrt(1 + (x / 1e8) ** 2))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class WithoutGradient(nn.Module):
    def forward(self, x):
        return torch.where(x > 1000, x.detach(), F.relu(x))


class Gap(nn.Module):
    def forward(self, x):
        return torch.where((x > 2e4) * (x < 1e30), torch.zeros_like(x), F.relu(x))


class FlatLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x.reshape((-1,) + x.shape[1:][-2:]) @ self.weight  # noqa: RUF005


ALMOST = [Partial, OwnGradient, AbsoluteNorm, LimitedNorm, LimitedWeight, WithoutNaN, Switched]
ALMOST += [SwitchedByPower, SoftlyLimited, SoftlyLimitedWeight, SoftlyLimitedByName]
ALMOST += [WithoutGradient, Gap, FlatLinear]


@pytest.mark.parametrize("cls", ALMOST)
def test_what_almost_is_an_op_is_not_taken_for_it(cls):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), cls(), nn.Linear(WIDTH, WIDTH))
    assert not opfuse.convert(model).converted


class FirstRows(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.shape[0] == 1 else F.silu(x)


class FiveDimensions(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.ndim == 5 else F.silu(x)


class ManyElements(nn.Module):
    def forward(self, x):
        if x.numel() > 10_000:
            return F.relu(x)
        return F.silu(x)


class FiveByTruth(nn.Module):
    def forward(self, x):
        return F.relu(x) if not (x.dim() - 5) else F.silu(x)


class Counts(nn.Module):
    def forward(self, x):
        many = x.ndim == 5
        return F.silu(x) * (1 - many) + F.relu(x) * many


class Clamps(nn.Module):
    def forward(self, x):
        return F.silu(x).clamp(max=1e9 / x.numel() ** 3)


class Listed(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.ndim in (5, 6) else F.silu(x)


class ByHelper(nn.Module):
    def forward(self, x):
        return either(x, x.size(0) < 2)


def either(x, few):
    return F.relu(x) if few else F.silu(x)


class OfDtype(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.dtype == torch.float8_e4m3fn else F.silu(x)


class ChannelsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        if x.ndim == 5:
            x = x.permute(0, 2, 3, 4, 1)
        y = F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-6)
        return y.permute(0, 4, 1, 2, 3) if x.ndim == 5 else y


ASKING = [FirstRows, FiveDimensions, ManyElements, FiveByTruth, Counts, Clamps, Listed, ByHelper]
SHAPES = [(1, 5), (3,), (1,), (2, WIDTH, 2, 2), (4096,)]


@pytest.mark.parametrize("cls", [*ASKING, OfDtype, ChannelsNorm])
def test_what_asks_for_a_shape_or_dtype_is_not_taken_for_an_op(cls):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), cls(), nn.Linear(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    report = opfuse.convert(model)
    assert not report.converted
    assert "its input" in str(report)
    for rows in SHAPES:
        assert_same(model, twin, an_input(*rows))


class OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)


class WideLinear(OwnLinear):
    def forward(self, x):
        return x.float() @ self.weight.float()


class AskingLinear(OwnLinear):
    def forward(self, x):
        y = torch.matmul(x, self.weight)
        return 2 * y if self.weight.dtype == torch.bfloat16 else y


@pytest.mark.parametrize("cls", [WideLinear, AskingLinear])
def test_a_linear_layer_that_computes_otherwise_in_another_dtype_is_left(cls):
    model = nn.Sequential(nn.LayerNorm(WIDTH), cls(), nn.SiLU())
    twin = copy.deepcopy(model)
    assert not opfuse.convert(model).converted
    for each in (model, twin):
        each.bfloat16()
    assert_same(model, twin, an_input(dtype=torch.bfloat16))


class OfWeightsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        weight = self.weight * 2 if self.weight.T.sum() > 1e6 else self.weight
        return F.rms_norm(x, (WIDTH,), weight, 1e-6)


def test_a_norm_that_asks_for_the_values_of_its_weight_is_left():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OfWeightsValues(), nn.SiLU())
    assert not opfuse.convert(model).converted


class OfWeightsDtype(nn.Module):
    """A norm that asks its weight alone, and uses a size."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        square = x.float().pow(2).sum(-1, keepdim=True) / x.shape[-1]
        x = x * torch.rsqrt(square + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16) and self.weight.ndim == 1:
            x = x.to(self.weight.dtype)
        return self.weight * x.view(*x.shape[:-1], x.shape[-1])


def test_a_norm_may_ask_its_weight_and_use_a_size():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OfWeightsDtype(), nn.Linear(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    assert "RMSNorm" in str(opfuse.convert(model))
    for rows in SHAPES:
        assert_same(model, twin, an_input(*rows))


def drops_in_place(self, x):
    h = self.norm(self.b(self.a(x)))
    F.dropout(h, 0.5, self.training, True)
    return F.silu(h)


def adds_what_it_dropped_from(self, x):
    h = self.norm(self.b(self.a(x)))
    y = F.dropout(h, 0.5, self.training, True)
    return y + h


def drops_in_place_by_name(self, x):
    h = self.norm(self.b(self.a(x)))
    return F.dropout(h, p=0.5, training=self.training, inplace=True) + h


def normalizes_into_another(self, x):
    h = self.b(F.silu(self.a(x))).detach()
    F.normalize(x.detach(), 2.0, -1, 1e-12, h)
    return self.norm(h)


def clamps_in_place(self, x):
    h = self.norm(self.b(self.a(x)))
    F.hardtanh(h, -0.1, 0.1, True)
    return F.silu(h)


WRITING = [drops_in_place, adds_what_it_dropped_from, drops_in_place_by_name]
WRITING += [normalizes_into_another, clamps_in_place]


@pytest.mark.parametrize("forward", WRITING, ids=lambda forward: forward.__name__)
def test_a_function_that_is_told_to_write_does(forward):
    model = model_of(forward)()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    outputs = []
    for each in (model, twin):
        torch.manual_seed(1)
        outputs.append(each(an_input()))
    torch.testing.assert_close(*outputs)


def drops_always(self, x):
    return self.b(F.dropout(F.relu(self.a(x)), p=0.5))


def drops_never(self, x):
    return self.b(F.dropout(F.relu(self.a(x)), p=0.5, training=False))


@pytest.mark.parametrize("forward", [drops_always, drops_never])
@pytest.mark.parametrize("first", [True, False], ids=["training", "evaluation"])
def test_a_dropout_that_does_not_follow_the_mode_does_as_it_says(forward, first):
    model = model_of(forward)().train(first)
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    for training in (True, False, True):
        outputs = []
        for each in (model, twin):
            each.train(training)
            torch.manual_seed(1)
            outputs.append(each(an_input()))
        torch.testing.assert_close(*outputs)


def test_a_replica_computes_with_its_own_parameters():
    model = Gated()
    opfuse.convert(model)
    model(an_input())
    replica = model._replicate_for_data_parallel()  # as DataParallel makes one for each device
    replica._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    torch.nn.init.zeros_(replica.down.weight)
    assert not replica(an_input()).any() and model(an_input()).any()


def reads_more_of_a_child(self, x, scaled=False):
    y = self.hidden(x)
    return y * self.norm.eps if scaled else y


def test_what_another_way_reads_of_a_child_may_change():
    model = model_of(reads_more_of_a_child)()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    for eps in (0.5, 2.0):
        model.norm.eps = twin.norm.eps = eps
        assert_same(model, twin, an_input())
        assert_same(model, twin, an_input(), scaled=True)


@pytest.mark.parametrize("layout", ["nested", "csr", "mkldnn"])
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_are_not_dense_run_the_own_forward(layout):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    reference = copy.deepcopy(model)
    opfuse.convert(model)
    x = torch.rand(3, 4)
    if layout == "nested":
        given = torch.nested.nested_tensor([x, x[:2]])
    else:
        given = x.to_sparse_csr() if layout == "csr" else x.to_mkldnn()
    with torch.no_grad():
        got, expected = model(given), reference(given)
    if layout == "nested":
        got, expected = got.to_padded_tensor(0.0), expected.to_padded_tensor(0.0)
    torch.testing.assert_close(got.to_dense(), expected.to_dense())
    assert opfuse.converted(model)[""] == "its input is sparse or nested"
