"""The chain of a converted module measured against the module's own operations, and who runs then."""

from __future__ import annotations

import copy

import fp32
import pytest
import torch
from converting import WIDTH, Gated, an_input, assert_same
from fake_gpu import FakeGPU
from opfuse_convert import guard
from torch import nn
from torch.utils.checkpoint import checkpoint
from tuned import tables_in

import opfuse
from opfuse import ops
from opfuse.tuning import parts, whole
from opfuse.tuning import table as tables
from opfuse.tuning.comparing import differ, in_fp64
from opfuse.tuning.timing import Timing

pytestmark = pytest.mark.alone  # its fixture hides the plugins


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A folder of its own for the tables."""
    with tables_in(tmp_path / "tables"), opfuse.plugins.using(""):
        yield


def speed(monkeypatch, value):
    """Both ways run, and this is how many times as fast the chain is said to be."""

    def compare(own, chain, device, **how):
        own[0](), chain[0]()
        return Timing(value, 0.0, value, 1.0)

    monkeypatch.setattr(whole, "compare", compare)


def tuned(model, x, **options):
    with opfuse.options(**options):
        return [r for r in opfuse.tune(model, x).results if r.passes == "whole"]


@pytest.mark.parametrize(("value", "runs"), [(1.0, True), (0.995, True), (0.9, False)])
def test_a_slower_chain_is_declined(monkeypatch, value, runs):
    model = Gated()
    reference = copy.deepcopy(model)
    opfuse.convert(model)
    speed(monkeypatch, value)
    (result,) = tuned(model, an_input())
    assert result.found.speed == value and not result.found.wrong
    assert_same(model, reference, an_input())
    why = opfuse.converted(model)[""]
    assert (why == "") is runs and (runs or "0.90x the speed of the separate ops" in why)
    with opfuse.options(prefer="memory"):  # it keeps less
        model(an_input())
    assert result.found.saved_bytes > 0 and opfuse.converted(model)[""] == ""


def test_the_time_is_that_of_speed_and_the_bytes_are_those_of_memory(monkeypatch):
    seen = []
    saved_bytes = whole.saved_bytes

    def preferred():
        return dict(opfuse.core.settings.current.options)["prefer"]

    def compare(own, chain, device, **how):
        seen.append(("time", preferred()))
        return Timing(0.9, 0.0, 1.0, 1.0)

    def count(forward, params):
        seen.append(("bytes", preferred()))
        return saved_bytes(forward, params) * (1 if preferred() == "speed" else 0)

    monkeypatch.setattr(whole, "compare", compare)
    monkeypatch.setattr(whole, "saved_bytes", count)
    model = Gated()
    opfuse.convert(model)
    for prefer in ("speed", "memory"):
        seen.clear()
        (result,) = tuned(model, an_input(), prefer=prefer)
        assert seen == [("bytes", "memory"), *[("bytes", "speed")] * 2, ("time", "speed")]
        assert result.found.saved_bytes > 0
    model(an_input())
    assert "0.90x the speed" in opfuse.converted(model)[""]
    with opfuse.options(prefer="memory"):
        model(an_input())
    assert opfuse.converted(model)[""] == ""


def test_on_a_gpu_one_reference_and_inputs_in_turns(monkeypatch):
    """Both plans are compared with one result in fp64, for gradients that are drawn once."""
    exact = []

    def in_fp64(*given):
        compute = whole_in_fp64(*given)
        return lambda dys: exact.append(dys) or compute(dys)

    whole_in_fp64 = whole.in_fp64
    monkeypatch.setattr(whole, "in_fp64", in_fp64)
    model = Gated()
    opfuse.convert(model)
    with FakeGPU() as gpu:
        gpu.cache = 4 * sum(p.nbytes for p in model.parameters())
        (result,) = tuned(model, an_input())
    assert not result.found.wrong and len(exact) == 1 and gpu.told("draw") == 1
    sets = {d[1] for d in gpu.did if d[0] in ("events", "capture")}
    assert len(sets) == 1 and 2 < min(sets) <= 8


def test_a_wrong_chain_never_runs(monkeypatch):
    model = Gated()
    reference = copy.deepcopy(model)
    opfuse.convert(model)
    speed(monkeypatch, 2.0)
    right = ops.ParallelLinear.product
    monkeypatch.setattr(ops.ParallelLinear, "product", lambda *given: 1.04 * right(*given))
    (result,) = tuned(model, an_input())
    assert "differs from the module: its output is wrong by" in result.found.wrong
    assert_same(model, reference, an_input())
    assert "is wrong by" in opfuse.converted(model)[""]
    with opfuse.options(prefer="memory"):
        assert_same(model, reference, an_input())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp64_decides_who_is_right(dtype):
    """Of two that round, neither is the truth: the sum over many rows differs by more than one rounding."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH).to(dtype)
    x = torch.randn(4096, WIDTH).to(dtype).requires_grad_()
    wanted = [x, *linear.parameters()]

    class Rough(torch.autograd.Function):
        """The gradient of the bias, rounded after each of some rows."""

        @staticmethod
        def forward(ctx, y, bias):
            return y + bias

        @staticmethod
        def backward(ctx, dy):
            total = torch.zeros_like(dy[0])
            for part in dy.split(64):
                total = total + part.sum(0)
            return dy, total

    def rough(module, x):
        return Rough.apply(x @ module.weight.t(), module.bias)

    def fine(module, x):
        return module(x)

    def wrong(module, x):
        return 1.05 * module(x)

    exact = in_fp64(linear, rough, [x], wanted)
    truth = in_fp64(copy.deepcopy(linear).double(), fine, [x.double()], [])([])[0]
    dys = [torch.randn(4096, WIDTH).to(dtype)]
    torch.testing.assert_close(exact(dys)[0], truth)

    def found(way, exact):
        ways = (lambda x: rough(linear, x)), (lambda x: way(linear, x))
        return differ(*ways, [x], wanted, exact=exact, dtype=dtype)

    assert found(fine, exact) == "" and "is wrong by" in found(wrong, exact)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_in_half_precision_with_many_rows(monkeypatch, autocast):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated(bias=True)

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(3)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = Block().to(dtype)
    opfuse.convert(model)
    speed(monkeypatch, 1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = tuned(model, an_input(3000, dtype=dtype))
    assert results and not [r.found.wrong for r in results if r.found.wrong]


def test_gradients_of_all_parameters_are_compared_and_timed(monkeypatch):
    """Those too that the chain reads through a view."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 5)
            self.bias = nn.Parameter(torch.randn(3 * WIDTH))

        def forward(self, x):
            out = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
            return out.view(*x.shape[:-1], 3 * WIDTH)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = Transposed(), nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.up(x)))

    seen = []
    grad = torch.autograd.grad

    def watch(outputs, inputs, *args, **kwargs):
        seen.append([*inputs])
        return grad(outputs, inputs, *args, **kwargs)

    model = MLP()
    assert opfuse.convert(model).converted
    speed(monkeypatch, 1.0)
    monkeypatch.setattr(torch.autograd, "grad", watch)
    tuned(model, an_input())
    params = {id(param) for param in model.parameters()}
    assert sum(params < {id(tensor) for tensor in of} for of in seen) >= 4  # compared, and timed


@pytest.mark.parametrize("frozen", ["", "norm", "all", "no_grad"])
def test_what_needs_no_gradient_is_measured_too(monkeypatch, frozen):
    """Operations in fp64 take no other parameters: those that are frozen, and buffers, widen as well."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    model[1].register_buffer("unused", torch.ones(2))
    opfuse.convert(model)
    speed(monkeypatch, 1.0)
    for module in {"norm": [model[0]], "all": [model]}.get(frozen, []):
        module.requires_grad_(False)
    with torch.set_grad_enabled(frozen != "no_grad"):
        report = opfuse.tune(model, an_input().detach())
    assert not report.unmeasured and not report.wrong
    assert [r.passes for r in report.results].count("whole") == 1


class MoCo(nn.Module):
    """A momentum encoder without gradients, which each forward moves."""

    def __init__(self):
        super().__init__()
        self.query, self.key = Gated(), Gated().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
                b.lerp_(a, 0.5)
        return self.query(x), self.key(x.detach())


def test_an_output_without_a_gradient_beside_one_with(monkeypatch):
    model = MoCo()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    opfuse.convert(model)
    speed(monkeypatch, 1.0)
    report = opfuse.tune(model, an_input())
    assert not report.unmeasured and not report.wrong
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_differ_asks_for_the_gradients_that_the_module_has():
    x = torch.randn(3, 4, requires_grad=True)

    def both(x):
        return 2 * x, (3 * x).detach()

    def first_alone(x):
        return (2 * x).detach(), 3 * x

    assert differ(both, lambda x: (2 * x, 3 * x), (x,), [x]) == ""
    assert "needs no gradient" in differ(both, first_alone, (x,), [x])


# Under torch.compile


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(parts, "BACKEND", "aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize(("value", "runs"), [(1.2, True), (1.0, False), (0.9, False)])
def test_a_chain_is_in_a_graph_where_it_was_measured_faster_there(monkeypatch, traced, value, runs):
    model = Gated()
    reference = copy.deepcopy(model)
    opfuse.convert(model)
    calls = []
    call = opfuse.Sequential.forward
    monkeypatch.setattr(
        opfuse.Sequential, "forward", lambda *given: calls.append(1) or call(*given)
    )
    line = "under torch.compile: {}, other modules run their own forward"

    def in_graph():
        calls.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same(compiled, reference, an_input())
        ran = bool(calls)
        report = str(opfuse.convert(model, an_input()))
        return ran, line.format("the chains of Gated x 1") in report

    speed(monkeypatch, 3.0)
    tuned(model, an_input())  # an entry of eager calls does not count
    assert in_graph() == (False, False)
    speed(monkeypatch, value)
    results = [
        r for r in opfuse.tune(model, an_input(), compiled=True).results if r.passes == "whole"
    ]
    assert [r.found.speed for r in results] == [value] and not results[0].found.wrong
    assert in_graph() == (runs, runs)
    calls.clear()
    exported = torch.export.export(model, (an_input().detach(),), strict=True)
    assert not calls, "what is exported runs elsewhere"
    torch.testing.assert_close(exported.module()(an_input()), reference(an_input()))


def test_modules_of_one_class_are_compiled_once(traced):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.ModuleList([Gated() for _ in range(4)])
    opfuse.convert(model)
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)
        layer(an_input())
    assert len(graphs) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_inside_of_a_declined_chain_is_measured_too(monkeypatch, traced, compiled):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    model = Outer()
    opfuse.convert(model)
    for value, expected in [(0.7, ["Outer", "Gated"]), (1.3, ["Outer"])]:
        speed(monkeypatch, value)
        results = opfuse.tune(model, an_input(), compiled=compiled).results
        found = [r.fusion.removeprefix("conversion of ") for r in results if r.passes == "whole"]
        assert found == expected
        tables.path_for(torch.device("cpu")).unlink()
        tables.reload()
    assert not any(opfuse.converted(model).values())


def test_a_graph_has_a_chain_only_if_it_is_faster_for_all_rows(monkeypatch, traced):
    model, calls = Gated(), []
    opfuse.convert(model)
    for rows, value in ((4, 0.995), (64, 1.5)):
        speed(monkeypatch, value)
        opfuse.tune(model, an_input(rows), compiled=True)
    call = opfuse.Sequential.forward
    monkeypatch.setattr(
        opfuse.Sequential, "forward", lambda *given: calls.append(1) or call(*given)
    )
    torch.compile(model, backend="aot_eager", fullgraph=True)(an_input(4))
    assert not calls
    with opfuse.options(prefer="memory"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(an_input(4))
    assert not calls


@pytest.mark.parametrize("change", ["frozen", "deterministic", "precision", "older setting"])
def test_a_decision_is_for_what_the_entry_is_for(monkeypatch, change):
    model = Gated()
    opfuse.convert(model)
    speed(monkeypatch, 0.5)
    tuned(model, an_input())

    def changed(way):
        if change == "frozen":
            model.up.weight.requires_grad_(not way)
        elif change == "deterministic":
            torch.use_deterministic_algorithms(way)
        elif change == "precision":
            torch.backends.fp32_precision = "bf16" if way else "none"
        else:
            torch.set_float32_matmul_precision("medium" if way else "highest")
        model(an_input())
        return opfuse.converted(model)[""]

    with fp32.restored():
        try:
            whys = [changed(way) for way in (False, True, False)]
        finally:
            changed(False)
    assert whys[0] == whys[2] and "0.50x" in whys[0] and whys[1] == ""


def test_a_declined_chain_asks_no_more_than_a_table(monkeypatch):
    """A chain that does not run need not know whether the module is as it was."""
    model, asked = Gated(), []
    opfuse.convert(model)
    speed(monkeypatch, 0.5)
    tuned(model, an_input())
    why_not = guard.Guard.why_not
    monkeypatch.setattr(guard.Guard, "why_not", lambda self: asked.append(1) or why_not(self))
    for _ in range(3):
        assert torch.equal(model(an_input()), Gated.forward(model, an_input()))
    assert not asked and "0.50x" in opfuse.converted(model)[""]
    with opfuse.options(prefer="memory"):  # another kind of call
        model(an_input())
        assert asked and not opfuse.converted(model)[""]
    model.up.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(model(an_input()), Gated.forward(model, an_input()))
    with opfuse.options(prefer="memory"):
        assert torch.equal(model(an_input()), Gated.forward(model, an_input()))
    assert opfuse.converted(model)[""] == "up has forward hooks"


def test_checkpointing_a_module_whose_chain_is_declined(monkeypatch):
    """The forward asks and its recomputation does not: both keep the same tensors."""
    model = nn.Sequential(Gated())
    reference = copy.deepcopy(model)
    opfuse.convert(model)
    speed(monkeypatch, 0.5)
    x = an_input().requires_grad_()
    tuned(model, x)
    for _ in range(70):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        (grad,) = torch.autograd.grad(reference(x).sum(), want)
        torch.testing.assert_close(got.grad, 70 * grad, rtol=1e-4, atol=1e-4)
