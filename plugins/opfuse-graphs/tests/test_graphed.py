"""Graphed layers, with captures that run the layer again; and on a GPU, with graphs."""

import contextlib
import copy

import pytest
import torch
from opfuse_graphs import layers, replaying
from torch import nn

import opfuse
from opfuse import ops

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def recomputed(monkeypatch):
    """Without a GPU: a replay runs the call again, into the tensors of the first."""

    def capture(run, pool):
        first = run()

        def replay():
            with torch.enable_grad():
                again = run()
            for place, found in zip(first, again, strict=True):
                if place is not None:
                    place.data.copy_(found)

        return replay, first

    if not ON_GPU:
        monkeypatch.setattr(replaying, "capture", capture)
        monkeypatch.setattr(replaying, "beside", contextlib.nullcontext)
        monkeypatch.setattr(layers, "_DEVICE", "cpu")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.chain = opfuse.Sequential(
            ops.RMSNorm(width),
            ops.Linear(width, 4 * width),
            ops.GELU(),
            ops.Linear(4 * width, width),
        )
        self.scale = nn.Parameter(torch.ones(width))
        self.drop = nn.Dropout(0.0)
        self.gradient_checkpointing = False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, mask=None, pair=(None, None), cache=None):
        self.calls += 1  # as the statistics of a batch norm
        y = self.drop(self.chain(x) * self.scale)
        return x + (y if mask is None else y * mask) * pair[1]


class Model(nn.Module):
    def __init__(self, width=16, count=3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x, mask=None, cache=None):
        x = self.first(x)
        pair = torch.ones(1, device=x.device), torch.full((1,), 0.5, device=x.device)
        for layer in self.layers:
            x = layer(x, mask=mask, pair=pair, cache=cache)
        return x


def made(**kwargs):
    torch.manual_seed(0)
    model = Model(**kwargs).to(DEVICE)
    return model, torch.randn(4, 16, device=DEVICE)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def steps(model, batches, *, clear=True, around=contextlib.nullcontext):
    """Train; the losses and the gradients of each step."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        if clear:
            optimizer.zero_grad()
        with around():
            loss = model(batch).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *gradients(model)]
        if clear:
            optimizer.step()
    return found


def assert_same(expected, got):
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clear", [True, False], ids=["steps", "accumulated"])
def test_training_computes_the_same(clear):
    model, x = made()
    twin = copy.deepcopy(model)
    batches = [torch.randn_like(x) for _ in range(4)]
    assert opfuse.graphed(model, x) is model
    assert_same(steps(twin, batches, clear=clear), steps(model, batches, clear=clear))


def test_gradients_that_are_set_to_zero_in_place():
    model, x = made()
    twin = copy.deepcopy(model)
    opfuse.graphed(model, x)
    for each in (twin, model):
        steps(each, [x], clear=False)
        for param in each.parameters():
            param.grad.zero_()
        each(2 * x).sum().backward()
    assert_same(gradients(twin), gradients(model))


def test_what_is_not_training_runs_the_layer():
    model, x = made()
    expected = model(x[:2])
    opfuse.graphed(model, x)
    with torch.no_grad():
        assert_same([expected], [model(x[:2])])
    model.eval()
    assert_same([expected], [model(x[:2])])


def test_a_result_that_nothing_uses_and_an_argument_with_a_gradient():
    model, x = made(count=2)
    twin = copy.deepcopy(model)
    mask = torch.rand(16, device=DEVICE, requires_grad=True)
    other = mask.detach().clone().requires_grad_()
    opfuse.graphed(model, x, mask=mask)
    model(x, mask=mask).sum().backward()
    twin(x, mask=other).sum().backward()
    assert_same([other.grad, *gradients(twin)], [mask.grad, *gradients(model)])


def test_frozen_parameters_have_no_gradient():
    model, x = made()
    for layer in model.layers:
        layer.scale.requires_grad_(False)
    twin = copy.deepcopy(model)
    opfuse.graphed(model, x)
    for each in (twin, model):
        each(x).sum().backward()
    got = gradients(model)
    assert any(grad is None for grad in got)
    for a, b in zip(gradients(twin), got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_ungraphed_runs_the_layers_again():
    model, x = made()
    model.layers[0].forward = before = model.layers[0].forward
    opfuse.graphed(model, x)
    assert opfuse.ungraphed(model) is model
    assert vars(model.layers[0])["forward"] is before
    assert "forward" not in vars(model.layers[1])
    model(x[:1]).sum().backward()


def test_a_second_forward_before_the_backward_is_refused():
    model, x = made()
    opfuse.graphed(model, x)
    first = model(x).sum()
    model(x)
    with pytest.raises(RuntimeError, match=r"layers\.2 keeps what one backward needs"):
        first.backward()


def test_a_second_backward_is_refused():
    model, x = made()
    opfuse.graphed(model, x)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="keeps what one backward needs"):
        loss.backward()


def test_other_calls_are_refused():
    model, x = made()
    opfuse.graphed(model, x)
    for other in (x[:2], x.double(), x):
        mask = torch.ones(16, device=DEVICE) if other is x else None
        with pytest.raises((ValueError, RuntimeError), match=r"layers\.0 was captured|dtype"):
            model(other, mask=mask)
    with opfuse.options(prefer="memory"), pytest.raises(RuntimeError, match="captured under"):
        model(x)
    with (
        torch.autocast("cuda" if ON_GPU else "cpu", torch.bfloat16),
        pytest.raises((ValueError, RuntimeError), match="was captured"),
    ):
        model(x)


def _replace(model):
    model.layers[1].scale = nn.Parameter(torch.ones(16, device=DEVICE))


def _move(model):
    model.layers[1].scale.data = torch.ones(16, device=DEVICE)


def _freeze(model):
    model.layers[1].scale.requires_grad_(False)


def _number(model):
    model.layers[1].drop.p = 0.5


def _flag(model):
    model.layers[1].gradient_checkpointing = True


def _mode(model):
    model.layers[1].drop.eval()


def _module(model):
    model.layers[1].drop = nn.Identity()


def _own_forward(model):
    model.layers[1].drop.forward = lambda x: x


def _later_hook(model):
    model.layers[1].drop.register_forward_hook(lambda *_: None)


CHANGES = {
    _replace: "its scale was replaced", _move: "its scale was replaced",
    _freeze: "its scale was replaced", _number: "its drop.p changed",
    _flag: "its gradient_checkpointing changed", _mode: "its drop.training changed", _module: "its drop changed",
    _own_forward: "its drop.forward changed", _later_hook: "a module in it got hooks",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_that_changed_is_refused(change):
    model, x = made()
    opfuse.graphed(model, x)
    change(model)
    with pytest.raises(RuntimeError, match=rf"layers\.1 was captured before {CHANGES[change]}"):
        model(x)


def test_copies_and_files_are_refused():
    model, x = made()
    opfuse.graphed(model, x)
    with pytest.raises(TypeError, match="call opfuse.ungraphed"):
        copy.deepcopy(model)


def _eval(model):
    model.layers[0].eval()


def _hook(model):
    model.layers[0].chain.register_forward_hook(lambda *_: None)


def _checkpoints(model):
    model.layers[0].gradient_checkpointing = True


REFUSED = [
    (_eval, "in eval mode"), (_hook, "has forward_hooks"), (_checkpoints, "computes its forward"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_a_graph_cannot_hold_is_refused(change, said):
    model, x = made()
    change(model)
    with pytest.raises(RuntimeError, match=rf"graphed: layers\.0.*{said}"):
        opfuse.graphed(model, x)
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_samples_are_looked_at():
    model, x = made()
    with pytest.raises(ValueError, match="called with object"):
        opfuse.graphed(model, x, cache=object())
    with pytest.raises(ValueError, match="expected an nn.ModuleList"):
        opfuse.graphed(nn.Linear(16, 16).to(DEVICE), x)
    with pytest.raises(ValueError, match="called layers.0.chain 0 times"):
        model.layers[0].forward = lambda x, **_: x
        opfuse.graphed(model, x, layers=["layers.0.chain"])


def test_capturing_is_no_step():
    model, x = made()
    model(x)
    opfuse.graphed(model, x)
    assert [int(layer.calls) for layer in model.layers] == [1, 1, 1]


def test_a_report_sees_the_chains():
    model, x = made()
    expected = str(opfuse.explain(model, x))
    opfuse.graphed(model, x)
    assert "RMSNorm" in expected and str(opfuse.explain(model, x)) == expected


def test_twice_is_refused():
    model, x = made()
    opfuse.graphed(model, x)
    with pytest.raises(RuntimeError, match="is captured already"):
        opfuse.graphed(model, x)


def test_a_layer_that_cannot_be_captured_is_named(monkeypatch):
    model, x = made()

    def fails(run, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replaying, "capture", fails)
    with pytest.raises(RuntimeError, match=r"layers\.0 cannot be captured: operation"):
        opfuse.graphed(model, x)


@pytest.mark.parametrize("names", [False, True], ids=["", "names"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_under_a_recipe(recipe, names):
    """Scales advance once a step, as without graphs, and capturing changes none."""
    pytest.importorskip("opfuse_fp8", reason="it has the recipes")
    model, x = made()
    twin = copy.deepcopy(model)
    for each in (model, twin) if names else ():
        opfuse.assign_names(each)

    def around():
        return opfuse.autocast(recipe)

    batches = [torch.randn_like(x) for _ in range(4)]
    for each in (twin, model):
        steps(each, batches[:1], around=around)
    opfuse.graphed(model, x, recipe=recipe)
    assert_same(state_of(twin), state_of(model))
    expected = steps(twin, batches, around=around)
    assert_same(expected, steps(model, batches, around=around))
    assert_same(state_of(twin), state_of(model))
    with pytest.raises(RuntimeError, match="captured under"):
        model(x)
    with around(), pytest.raises(RuntimeError, match="outside of opfuse"):
        opfuse.graphed(twin, x)


def state_of(model):
    state = model.state_dict()
    return [state[key].clone() for key in sorted(state) if "quantizers" in key]
