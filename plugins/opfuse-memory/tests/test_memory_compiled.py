"""opfuse.plan_memory with torch.compile as a way: the same numbers and gradients, compiled once, within the budget."""

import contextlib
import copy
import functools
import gc
import json
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from opfuse_memory import MemoryPlan, actions, checking, compiling, costs
from opfuse_memory.plan import Choice
from opfuse_memory.units import Place, Unit
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse.report.calls import saved_bytes
from opfuse.report.replaced_forward import MEMORY
from opfuse.tuning.timing import Timing

pytestmark = [
    pytest.mark.alone,
    # Dynamo looks at it, and hides its warning, but not where warnings are errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

WIDTH, LAYERS = 16, 12
PARTS_FASTER, WHOLE_FASTER = 0.8, 0.5


class Layer(nn.Module):
    def __init__(self, index=0):
        super().__init__()
        self.layer_idx, self.factor = index, 1.0
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, scale=1.0, cache=None):
        y = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        return x + scale * self.factor * self.drop(y)


class Broken(Layer):
    """One that Dynamo cannot put into one graph."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Double(Layer):
    """One that computes something else when it is compiled."""

    def forward(self, x):
        return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)


class Model(nn.Module):
    def __init__(self, layers=LAYERS, cls=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(cls(index) for index in range(layers))
        self.double()

    def forward(self, x, **how):
        for layer in self.layers:
            x = layer(x, **how)
        return x.square().mean()


def an_input(rows=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def kept(model, x):
    return saved_bytes(lambda: model(x), model.parameters())


def gradients(model, x, run=None):
    torch.manual_seed(5)
    loss = (model if run is None else run)(x)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def partitioned(joint, *given, **how):
    compiling._KeepRandom()(joint.graph)
    return min_cut_rematerialization_partition(joint, *given, **how)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """The budgets of the graphs that were compiled: traced and partitioned, and then run op by op.

    Inductor would compile C++ for a minute. One test has it.
    """
    found = []
    how = {"fw_compiler": nop, "bw_compiler": nop, "partition_fn": partitioned}

    def compile_fx(*given):
        found.append(compiling.partitioner.activation_memory_budget)
        return aot_autograd(**how)(*given)

    monkeypatch.setattr(compiling, "compile_fx", compile_fx)
    torch._dynamo.reset()
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Both ways run; what is compiled is said to be faster, and all else slower."""
    whole, used = [PARTS_FASTER], []
    run = actions._run_compiled

    def run_compiled(of, *given):
        used.append(of)
        return run(of, *given)

    def seconds(way):
        used.clear(), way()
        return min([whole[0] if issubclass(of, Model) else PARTS_FASTER for of in used], default=2)

    def in_rounds(ways, device):
        took = [1.0, *map(seconds, ways[1:])]
        return [Timing(1 / each, 0.0, 1.0, each) for each in took]

    monkeypatch.setattr(actions, "_run_compiled", run_compiled)
    monkeypatch.setattr(costs, "in_rounds", in_rounds)
    return whole


def plan_of(layers=3, budget=0.5):
    """A plan by which each layer is compiled."""
    action, said = actions.Action("compile", budget=budget), ("Layer", "compile", 100, 0.0)
    paths = [f"layers.{index}" for index in range(layers)]
    choices = tuple(Choice(path, *said, ((path, False, action),)) for path in paths)
    return MemoryPlan(1000, 2000, 2000, 1000, 1.0, 0.0, choices=choices)


def attached(layers=3, cls=Layer):
    """A model with that plan, and one without."""
    model = Model(layers, cls)
    twin = copy.deepcopy(model)
    plan_of(layers).attach(model)
    return model, twin


# The contract


def test_the_numbers_stay_the_bytes_fit_and_layers_share_a_graph(graphs):
    model, x = Model(), an_input()
    twin = copy.deepcopy(model)
    plan = opfuse.plan_memory(model, x, budget=0.3, compiled=[0.0])
    assert graphs == [0.0, 0.0]  # of the layers, and of the model
    assert plan.kept == kept(model, x) <= plan.budget < plan.before
    assert any("compile with budget" in choice.option for choice in plan.choices)
    assert not plan.notes
    for _ in range(2):
        assert_same(gradients(model, x), gradients(twin, x))
    assert len(graphs) == 2


def test_another_shape_has_the_same_budget(graphs):
    model, twin = attached()
    gradients(model, an_input())
    assert graphs == [0.5]
    for rows in (7, 9, 24):
        assert_same(gradients(model, an_input(rows)), gradients(twin, an_input(rows)))
        assert kept(model, an_input(rows)) < 0.67 * kept(twin, an_input(rows))
    assert graphs == [0.5, 0.5]


@pytest.mark.parametrize("kind", [torch.float32, "autocast"])
def test_other_dtypes(kind):
    model, twin = attached(2)
    model.float(), twin.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        mine, theirs = (gradients(m, an_input().float()) for m in (model, twin))
    rtol, atol = (5e-2, 1e-2) if kind == "autocast" else (1e-4, 1e-6)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * float(b.abs().max()))


def test_the_whole_model_is_a_way(clock):
    clock[0] = WHOLE_FASTER
    model, x = Model(3), an_input()
    twin = copy.deepcopy(model)
    plan = opfuse.plan_memory(model, x, budget=0.7, compiled=[0.5])
    assert [choice.path for choice in plan.choices] == [""]
    assert plan.kept == kept(model, x) <= plan.budget and plan.measured == WHOLE_FASTER - 1
    assert_same(gradients(model, x), gradients(twin, x))
    assert any("compile with budget 0.5" in row["action"] for row in rows_of(model, x))


@pytest.mark.parametrize(("as_it_is", "noise"), [(0.0, 0.0), (0.0, 0.2), (0.2, 0.0)])
def test_what_noise_hides_goes_to_fewer_bytes(clock, monkeypatch, as_it_is, noise):
    """The noise of the model as it is, which does not fit, hides nothing of the others."""

    def in_rounds(*given, known=costs.in_rounds):
        first, *others = known(*given)
        return [first._replace(noise=as_it_is), *[each._replace(noise=noise) for each in others]]

    monkeypatch.setattr(costs, "in_rounds", in_rounds)
    clock[0] = PARTS_FASTER + 0.1
    plan = opfuse.plan_memory(Model(3).eval(), an_input(), budget=0.9, compiled=[0.0])
    assert ([choice.path for choice in plan.choices] == [""]) == (noise > 0)


def rows_of(model, x):
    return opfuse.explain(model, x).to_dict()["memory"]


def test_budgets_of_torch_compile_are_on_the_curve():
    plan = opfuse.plan_memory(Model(2), an_input(), compiled=[1.0, 0.5])
    (one, most, _), (half, less, _) = plan.compiled
    assert (one, half) == (1.0, 0.5) and less < most
    assert "torch.compile, budget 0.5" in str(plan)
    sizes, times = zip(*plan.curve, strict=True)
    assert list(sizes) == sorted(sizes) and list(times) == sorted(times, reverse=True)


def test_nothing_is_compiled_unless_asked(graphs):
    model, x = Model(2), an_input()
    opfuse.plan_memory(model, x, budget=0.5)
    model(x)
    assert not graphs


# What is around it


def test_a_copy_has_the_plan_and_shares_the_graph(graphs):
    model, twin = attached()
    x, copied = an_input(), copy.deepcopy(model)
    expected = gradients(twin, x)
    assert_same(gradients(model, x), expected)
    graphs.clear()
    assert_same(gradients(copied, x), expected)
    assert kept(copied, x) == kept(model, x) < kept(twin, x) and not graphs


def test_detach_leaves_no_trace():
    model, twin = attached(3)
    x = an_input()
    gradients(model, x)
    MemoryPlan.detach(model)
    assert kept(model, x) == kept(twin, x)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in twin.modules()]
    gone = weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert gone() is None


def test_a_plan_is_data():
    plan = plan_of()
    data = json.loads(json.dumps(plan.to_dict()))
    assert MemoryPlan.from_dict(data) == plan
    for row in data["choices"]:  # as it was before a way was compiled
        row["actions"] = [[path, chain, "recompute", ""] for path, chain, *_ in row["actions"]]
    old = MemoryPlan.from_dict(data)
    assert old.choices[0].actions == (("layers.0", False, actions.Action("recompute")),)


def test_an_outer_compile_decides(graphs):
    model, twin = attached(2)
    graphs.clear()
    outer = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(gradients(model, an_input(), outer), gradients(twin, an_input()))
    assert not graphs


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_user_checkpoints_it_himself(reentrant):
    model, twin = attached(2)
    grads = []
    for each in (model, twin):
        torch.manual_seed(5)
        checkpoint(each, an_input(), use_reentrant=reentrant).backward()
        grads.append([param.grad for param in each.parameters()])
    assert_same(*grads)


def test_hooks(graphs):
    """Dynamo does not look at hooks when it asks whether a graph holds: inside, nothing is compiled."""
    model, twin = attached(3)
    x, seen = an_input(), []
    gradients(model, x)
    for each in (model, twin):
        each.layers[0].register_forward_hook(lambda m, args, y: y * 2)
        each.layers[1].up.register_forward_hook(lambda m, args, y: y * 3)
        each.layers[2].register_full_backward_hook(lambda m, *grads: seen.append(grads))
    assert_same(gradients(model, x), gradients(twin, x))
    assert len(seen) == 2 and graphs == [0.5]
    whys = [vars(layer)[MEMORY].fallback for layer in model.layers]
    assert whys == ["", "its up has a forward hook", ""]
    with torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: None):
        assert_same(gradients(model, x), gradients(twin, x))


def test_layers_that_differ_share_no_graph():
    model, twin = attached(3)
    for each in (model, twin):
        each.layers[1].factor, each.layers[2].drop.p = 3.0, 0.5
    assert_same(gradients(model, an_input()), gradients(twin, an_input()))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("first", ["plan", "shards"])
def test_parameters_that_are_sharded(mesh, first):
    model, x = Model(3), an_input()
    twin = copy.deepcopy(model)
    if first == "plan":
        plan_of(3).attach(model)
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh)
    if first == "shards":
        plan_of(3).attach(model)
    for _ in range(2):
        torch.manual_seed(5)
        loss = model(x)
        loss.backward()
        assert_same([loss.detach()], gradients(twin, x)[:1])
    assert not any(vars(m)[MEMORY].fallback for m in model.modules() if MEMORY in vars(m))
    for param, grad in zip(model.parameters(), gradients(twin, x)[2:], strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), 2 * grad, rtol=1e-10, atol=1e-12)


def test_tensor_parallelism_puts_hooks_into_a_layer(mesh):
    model, twin = attached(2)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = an_input()
    model.eval(), twin.eval()  # a DTensor drops out other numbers
    mine, theirs = (gradients(m, x) for m in (model, twin))
    mine = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in mine]
    assert_same(mine, theirs)
    assert vars(model.layers[0])[MEMORY].fallback.startswith("its up has a forward")


def test_fsdp_puts_hooks_into_a_model(mesh):
    model, x = Model(2), an_input()
    twin = copy.deepcopy(model)
    actions.attach([(model, False, actions.Action("compile", budget=0.5))])
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(5)
    assert_same([model(x).detach()], gradients(twin, x)[:1])
    assert "layers.0 has a forward" in vars(model)[MEMORY].fallback


# What cannot be compiled


def test_a_pass_of_the_user_runs_too(monkeypatch):
    found = []

    def compile_fx(graph, inputs):
        found.extend(inductor.joint_custom_post_pass)
        return graph

    monkeypatch.setattr(compiling, "compile_fx", compile_fx)
    model, twin = attached(1)
    with inductor.patch(joint_custom_post_pass=print):
        assert_same(gradients(model, an_input()), gradients(twin, an_input()))
    assert found[0] is print and len(found) == 2


LOGGER = logging.getLogger(__name__)


class Warns(Layer):
    """One that logs, through a method that another package gave to loggers."""

    def forward(self, x):
        LOGGER.warning_once("a note")
        return super().forward(x)


def test_what_logs_is_one_graph(graphs, monkeypatch):
    once = functools.lru_cache(None)(lambda logger, message: logger.warning(message))
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    compiling.compiled.cache_clear()
    model, twin = attached(2, Warns)
    assert_same(gradients(model, an_input()), gradients(twin, an_input()))
    assert [vars(layer)[MEMORY].fallback for layer in model.layers] == ["", ""]
    assert graphs == [0.5]


@pytest.mark.parametrize(
    ("cls", "why"), [(Broken, "it cannot be compiled: Unsupported"), (Double, "is wrong by")]
)
def test_what_cannot_be_compiled_is_no_way(cls, why):
    model, x = Model(2, cls), an_input()
    plan = opfuse.plan_memory(model, x, budget=0.6, compiled=[1.0, 0.5])
    assert plan.kept == kept(model, x) <= plan.budget
    assert not any("compile" in choice.option for choice in plan.choices)
    assert any(f"{cls.__name__} is not compiled with budget 1: " in n for n, _ in plan.notes)
    assert any(why in note for note, _ in plan.notes) and not plan.compiled


def test_a_layer_that_cannot_be_compiled_later_runs_as_it_is():
    model, twin = attached(2, Broken)
    for _ in range(2):
        assert_same(gradients(model, an_input()), gradients(twin, an_input()))
    assert any(
        "it ran as it is: it cannot be compiled" in r["action"] for r in rows_of(model, an_input())
    )


@pytest.fixture
def by_inductor(monkeypatch, graphs):
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "compile_fx", compile_fx)


def test_inductor_drops_out_the_same_numbers_once(by_inductor):
    """At a budget of 0 itself its backward would drop out other numbers than its forward."""
    model, x = Model(2), an_input()
    twin = copy.deepcopy(model)
    plan_of(2, 0.0).attach(model)
    assert_same(gradients(model, x), gradients(twin, x))
    assert kept(model, x) < 0.67 * kept(twin, x)
    assert not any(vars(layer)[MEMORY].fallback for layer in model.layers)


def test_without_a_compiler_for_cpp(by_inductor):
    with inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        model, twin = attached(2)
        assert_same(gradients(model, an_input()), gradients(twin, an_input()))
        assert vars(model.layers[0])[MEMORY].fallback.startswith("it cannot be compiled")
        fresh = opfuse.plan_memory(Model(2), an_input(), budget=0.5, compiled=[0.5])
    assert "is not compiled with budget 0.5" in str(fresh)


def test_a_cache_among_the_arguments(graphs):
    model, _ = attached(1)
    graphs.clear()
    model(an_input(), cache=object())
    assert vars(model.layers[0])[MEMORY].fallback.startswith("it is called with a object")
    assert not graphs


@pytest.mark.parametrize(
    "how",
    [
        *({"compiled": wrong} for wrong in (0.5, [1.5], ["0.5"], [True], [float("nan")])),
        {"compiled": [0.5], "measure": False},
    ],
)
def test_budgets_that_are_none(how):
    with pytest.raises(ValueError, match="expected as compiled shares from 0 to 1, and measure"):
        opfuse.plan_memory(Model(1), an_input(), **how)


@pytest.mark.parametrize(
    ("op", "given", "draws"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (), False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (0.0,), False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (0.1,), True),
        (torch.ops.aten.native_dropout.default, (), True),
        (torch.ops.aten.mm.default, (), False),
    ],
)
def test_what_draws_random_numbers(op, given, draws):
    graph = torch.fx.Graph()
    node = graph.call_function(op, (*[graph.placeholder(name) for name in "qkv"], *given))
    assert compiling._draws(node) is draws


# What is compared


class Shifted(nn.Module):
    """A softmax, whose gradient of a shift is noise, in some ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.shift = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.ones(1))
        self.way = ""
        self.bfloat16()

    def forward(self, x):
        h = x @ self.weight
        h = (h.float() if self.way == "wide" else h) + self.shift
        return h.softmax(-1).to(x.dtype) + (0.01 * self.shift if self.way == "wrong" else 0)


@pytest.mark.parametrize("way", ["wide", "wrong"])
def test_noise_is_told_from_a_gradient_that_is_wrong(monkeypatch, way):
    module = Shifted()
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    unit = Unit(Place("", module), (x,), {})

    @contextlib.contextmanager
    def acting():
        with costs.acting(((unit.place, actions.Action(prefer="speed")),)):
            module.way = way
            yield
            module.way = ""

    monkeypatch.setattr(checking, "_choose", lambda *given: False)
    why = checking.why_not(unit, acting)
    assert "its gradient is wrong" in why if way == "wrong" else not why
    monkeypatch.setattr(checking, "_DRAWS", 0)
    assert "its gradient is wrong" in checking.why_not(unit, acting)


class Routed(nn.Module):
    """Two experts, and a router that is off by a little, in some dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.one, self.two = (nn.Linear(32, n, bias=False) for n in (1, 32, 32))
        self.off, self.where = 0.0, ()
        self.bfloat16()

    def forward(self, x):
        score = self.gate(x) + self.off * (x.dtype in self.where)
        return torch.where(score > 0, self.one(x), self.two(x))


@pytest.mark.parametrize(
    ("off", "where", "same"),
    [
        (0.005, {torch.bfloat16}, True),
        (0.005, {torch.bfloat16, torch.float32}, False),  # it computes something else
        (0.5, {torch.bfloat16}, False),  # too often
        (0.0, {torch.bfloat16}, True),
    ],
)
def test_another_rounding_may_choose_otherwise(off, where, same):
    module = Routed()
    x = torch.randn(512, 32).bfloat16().requires_grad_()
    unit = Unit(Place("", module), (x,), {})

    @contextlib.contextmanager
    def acting():
        with costs.acting(((unit.place, actions.Action(prefer="speed")),)):
            module.off, module.where = off, where
            yield
            module.off = 0.0

    why = checking.why_not(unit, acting)
    assert not why if same else "its output is wrong" in why
    assert off != 0.005 or not torch.equal(module(x), _in(acting, module, x))


def _in(acting, module, x):
    with acting():
        return module(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y * torch.nan,
        lambda y: y.detach() + 3 * (y - y.detach()),
        lambda y: y + ((y - y) * 0).sqrt() * 0,
        lambda y: torch.cat([y[:-1], y[-1:] * 1e30]),
        lambda y: y * 1.05,
        lambda y: torch.cat([y[:-20], y[-20:] * 0]),
    ],
)
def test_what_is_wrong_in_few_bits_alone_is_not_another_choice(change):
    module, state = Routed(), []
    x = torch.randn(512, 32).bfloat16().requires_grad_()
    unit, forward = Unit(Place("", module), (x,), {}), module.forward
    module.off, module.where = 0.005, {torch.bfloat16}

    def changed(x):
        return change(forward(x)) if state and x.dtype is torch.bfloat16 else forward(x)

    module.forward = changed

    @contextlib.contextmanager
    def acting():
        with costs.acting(((unit.place, actions.Action(prefer="speed")),)):
            state.append(True)
            yield
            state.clear()

    assert checking.why_not(unit, acting)
