"""What is really compiled by Inductor: a dozen chains; and what only this plugin has: its cache, options, refusals.

``test_conformance.py`` runs the whole suite on graphs that are not compiled. Here, ``compiled`` marks what is.
"""

import copy
import logging
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from fakes import registered
from opfuse_inductor import conditions, kernels
from torch import nn

import opfuse
from opfuse import ops, testing
from opfuse.core.plugins import using
from opfuse.testing import recipes

SMALL = {"inductor.min_elements": 0}
TRACED = {**SMALL, "inductor.backend": "eager"}
FIND = ("inductor", "joint", "compiled run")


@pytest.fixture(autouse=True)
def _alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with using("inductor"):
        yield
    torch.set_num_threads(threads)


def residual():
    """Ops whose residual stays inside the run."""
    fork = ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False)
    return [fork, ops.RMSNorm(16), ops.GELU(), ops.AddExtraInput().set_extra_input_channel(0, "r")]


def step(chain, *inputs, seed=0, options=TRACED):
    """Outputs and gradients of one training step."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(seed)
    with opfuse.options(**options):
        result = chain(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    weights = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*leaves, *chain.parameters()], weights)]


def compare(chain, *inputs, options=TRACED, **tolerance):
    with using(""):
        expected = step(chain, *inputs)
    for got, want in zip(step(chain, *inputs, options=options), expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


# Compiled

CHAINS = {
    "norm": ((testing.Op(ops.RMSNorm, 16),), (torch.float32,)),
    "norm+glu": ((testing.Op(ops.RMSNorm, 16), testing.Op(ops.SwiGLU)), (torch.bfloat16,)),
    "add+fork+norm": (
        (
            testing.Op(ops.AddExtraInput),
            testing.Op(ops.MakeExtraOutput),
            testing.Op(ops.RMSNorm, 16),
        ),
        (torch.bfloat16,),
    ),
    "bias+act+scale+add": (
        (
            testing.Op(ops.Bias, 16),
            testing.Op(ops.GELU),
            testing.Op(ops.ConstantScale, 0.5),
            testing.Op(ops.AddExtraInput),
        ),
        (torch.float32,),
    ),
    "scaled": ((testing.Op(ops.ScaledSwiGLU),), (torch.float32,)),
}
CHECKS = (
    "output",
    "gradients",
    "aliasing",
    "grad_input",
    "repeatable",
    "follows_values",
    "nan_and_inf",
    "saved_bytes",
)


@pytest.mark.costly(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n, (_, dtypes) in CHAINS.items() for d in dtypes], ids=str
)
def test_compiled_chains_pass_the_conformance_checks(name, dtype):
    case = testing.Case(testing.find(*FIND), CHAINS[name][0], rows=(5,), dtype=dtype)
    with opfuse.options(**SMALL):
        for check in (
            *CHECKS,
            "unmodified_inputs",
            "unmodified_gradients",
            "released",
            "without_grad",
        ):
            testing.run(check, case)
        for rows in ((2, 3), (129,)):
            testing.run("gradients", case.with_(rows=rows))
        testing.run("gradients", case.with_(layout="strided"))


def test_compiled_with_a_residual_inside_and_more_rows_than_the_hint():
    chain, inputs = opfuse.Sequential(*residual()), (torch.randn(7, 16), torch.randn(4099, 16))
    for x in inputs:
        compare(chain, x, options=SMALL, rtol=1e-4, atol=1e-3)  # a sum over thousands of rows


@pytest.mark.costly(3)
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, 1e-14), (torch.float16, 2**-24)], ids=str
)
@pytest.mark.parametrize("make", [ops.SwiGLU, ops.GELU, ops.QGELU])
def test_all_numbers_of_half_precision(make, dtype, least):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    numbers = torch.where(numbers.abs() < 1e4, numbers, 0).view(-1, 16)
    x = torch.cat([numbers, torch.ones_like(numbers)], 1)
    chain = opfuse.Sequential(make())
    with using(""):
        expected = step(chain, x.double())
    for got, want in zip(step(chain, x, options=SMALL), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=least)


def test_another_process_reads_the_disk_cache(tmp_path):
    code = """
import torch, opfuse
from opfuse_inductor import kernels
from torch._dynamo.utils import counters
torch.set_num_threads(1)
chain, x = opfuse.Sequential(opfuse.ops.RMSNorm(24)), torch.randn(4, 24, requires_grad=True)
with opfuse.options(**{"inductor.min_elements": 0}):
    chain(x).sum().backward()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
(variants,) = [k._variants for k in kernels._cache.values() if "backward of RMSNorm" in getattr(k, "title", "")]
print(*[holds(rows) for rows in (4, 10**6) for holds, _ in variants])
"""
    environment = {
        **os.environ,
        "OPFUSE_PLUGINS": "inductor",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not done.returncode, done.stderr
        seen.append(done.stdout.split())
    # for many rows, the gradient of the weight is summed in another way
    assert seen[0][2:] == ["True", "False"]
    assert seen[1] == ["2", "0", "True", "False"]


# The cache


def test_models_of_equal_structure_and_all_row_counts_share_kernels():
    def plans():
        return [value for value in list(kernels._cache.values()) if isinstance(value, kernels.Plan)]

    kernels._cache.clear()
    first, second, other = (
        opfuse.Sequential(ops.RMSNorm(12, eps=eps), ops.SiLU()) for eps in (1e-3, 1e-3, 1e-4)
    )
    step(first, torch.randn(3, 12))
    count = len(plans())
    for chain, rows in (
        (first, (7,)),
        (second, (3,)),
        (second, (2, 5)),
        (copy.deepcopy(first), (4,)),
    ):
        step(chain, torch.randn(*rows, 12))
    # another class is no change to what these compute
    type("Another", (ops.SiLU,), {"value": lambda self, x: x})
    step(opfuse.Sequential(ops.RMSNorm(12, eps=1e-3), ops.SiLU()), torch.randn(3, 12))
    assert len(plans()) == count
    step(other, torch.randn(3, 12))
    assert len(plans()) == count + 1
    assert not [op for plan in plans() for op in plan._run.ops if op._parameters]


def test_layers_that_differ_in_name_alone_share_kernels():
    kernels._cache.clear()
    layers = [opfuse.Sequential(ops.RMSNorm(12), ops.SiLU(name="act" * n)) for n in range(3)]
    model = opfuse.assign_names(torch.nn.Sequential(*layers))
    step(model[0], torch.randn(3, 12))
    count = len(kernels._cache)
    for layer in layers[1:]:
        step(layer, torch.randn(3, 12))
    assert len(kernels._cache) == count


def test_another_activation_inside_of_an_op_is_another_kernel():
    x, scales = torch.randn(64, 32), torch.rand(64)
    for act in (ops.SwiGLU(), ops.GEGLU()):
        compare(opfuse.Sequential(ops.ScaledActivation(act)), x, scales)


def test_another_scale_needs_no_other_kernel():
    kernels._cache.clear()
    chain, x = opfuse.Sequential(ops.SiLU(), ops.ConstantScale(2.0)), torch.randn(3, 4)
    compare(chain, x)
    count = len(kernels._cache)
    chain[1].scale = -3.0
    compare(chain, x)
    assert len(kernels._cache) == count


def test_other_numbers_on_an_op_are_seen():
    chain, x = (
        opfuse.Sequential(ops.RMSNorm(8), ops.ClampedSwiGLU(limit=7.0)),
        torch.randn(3, 8) * 5,
    )
    compare(chain, x)
    chain[1].limit = 0.5
    chain[0].eps = 0.1
    compare(chain, x)


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(kernels, "CACHE_SIZE", 4)
    for eps in range(1, 5):
        step(opfuse.Sequential(ops.RMSNorm(4, eps=eps)), torch.randn(2, 4))
    assert len(kernels._cache) == 4


def test_threads_share_one_compiled_chain():
    chain = opfuse.Sequential(ops.RMSNorm(20), ops.SwiGLU(), ops.RMSNorm(10))
    x = torch.randn(9, 20)
    with using(""):
        expected = step(chain, x)
    results = []

    def work():
        with using("inductor"):
            results.append(step(chain, x))

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 6
    for result in results:
        torch.testing.assert_close(result, expected)


def test_a_model_that_has_run_can_be_pickled():
    chain, x = opfuse.Sequential(*residual()), torch.randn(3, 16)
    expected = step(chain, x)
    torch.testing.assert_close(step(pickle.loads(pickle.dumps(chain)), x), expected)


# What runs, and with which numbers


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_draws_what_the_op_draws(p):
    chain = opfuse.Sequential(ops.RMSNorm(16), ops.Dropout(p), ops.SiLU(), ops.Dropout(p))
    compare(chain, torch.randn(6, 16))
    compare(chain, torch.randn(2, 3, 16))
    compare(chain, torch.randn(16, 6).t())  # the op draws in another order: one by one
    chain.eval()
    compare(chain, torch.randn(6, 16))


@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 0), (1, 1)], ids=str)
def test_one_row_or_none_runs_one_by_one(rows, monkeypatch):
    monkeypatch.setattr(kernels, "Plan", None)
    compare(opfuse.Sequential(*residual()), torch.randn(*rows, 16))


def test_what_is_kept_for_the_backward():
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    def kept(chain, *inputs):
        saved.clear()
        with opfuse.options(**TRACED), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chain(*inputs)
        return [tuple(t.shape) for t in saved]

    x, extra = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16, requires_grad=True)
    assert kept(opfuse.Sequential(ops.RMSNorm(16), ops.SwiGLU(), ops.RMSNorm(8)), x) == [
        (3, 16),
        (3, 1),
        (3, 1),
        (16,),
        (8,),
    ]
    assert saved[0].data_ptr() == x.data_ptr()
    chain = opfuse.Sequential(ops.Bias(16), ops.GELU(), ops.ConstantScale(2.0), ops.AddExtraInput())
    assert kept(chain, x, extra) == [(3, 16), (16,)]
    assert saved[0].data_ptr() == x.data_ptr()
    assert kept(opfuse.Sequential(ops.ConstantScale(2.0), ops.AddExtraInput()), x, extra) == []
    assert kept(opfuse.Sequential(ops.SiLU(), ops.AddExtraInput(), ops.SiLU()), x, extra) == [
        (3, 16),
        (3, 16),
    ]
    chain = opfuse.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(16))
    assert kept(chain, x, extra) == [(3, 16), (3, 1), (16,)]
    with opfuse.options(**TRACED):
        _, h = chain(x, extra)
    # the sum is an output, and is not kept twice
    assert h.grad_fn.saved_tensors[0].data_ptr() == h.data_ptr()


def test_a_gradient_of_another_dtype_and_none_at_all():
    chain = opfuse.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8))
    for use in ((0,), (1,), (0, 1)):
        results = []
        for selection in ("", "inductor"):
            x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
            with using(selection), opfuse.options(**TRACED):
                outputs = chain(x)
            results.append(
                torch.autograd.grad([outputs[i] for i in use], x, [torch.ones(3, 8)] * len(use))[0]
            )
        torch.testing.assert_close(*results)


class Untraceable(ops.Activation):
    """Looks at its values."""

    def value(self, x):
        return x * 2 if x.max() > 0 else x

    def derivative(self, x):
        return torch.full_like(x, 2.0 if x.max() > 0 else 1.0)


class Table(ops.Activation):
    """Keeps a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def value(self, x):
        return x * self.factor

    def derivative(self, x):
        return torch.ones_like(x) * self.factor


def test_an_op_that_cannot_be_traced_runs_one_by_one():
    chain = opfuse.Sequential(ops.RMSNorm(8), Untraceable())
    with pytest.warns(
        opfuse.PluginWarning,
        match="runs .RMSNorm, Untraceable. one by one, since they cannot be traced",
    ):
        compare(chain, torch.randn(3, 8))


def test_a_subclass_of_tensor_runs_one_by_one(monkeypatch):
    class Mine(torch.Tensor):
        pass

    monkeypatch.setattr(kernels, "Plan", None)
    with opfuse.options(**TRACED):
        assert opfuse.Sequential(ops.RMSNorm(8))(torch.randn(3, 8).as_subclass(Mine)).shape == (
            3,
            8,
        )


# Where it stands


def refusal(*chain, **changes):
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32, requires_grad=True)
    return conditions.pays(chain, env._replace(**changes))


def test_each_refusal_gives_its_reason(monkeypatch):
    norm, cuda = ops.RMSNorm(8), {"device": torch.device("cuda"), "capability": (9, 0)}
    assert refusal(norm) is True
    assert "torch.compile is tracing" in refusal(norm, compiling=True)
    assert "for cpu and cuda" in refusal(norm, device=torch.device("mps"))
    assert "one pass over memory" in refusal(ops.ReLU())
    assert refusal(ops.GELU()) is True  # it takes as long as three passes
    assert "0 passes" in refusal(ops.Dropout(0.5).eval(), ops.Identity())
    assert refusal(ops.Dropout(0.5)) is True
    assert refusal(ops.Bias(8), ops.GELU()) is True
    assert "5 passes" in refusal(norm, options={"inductor.min_passes": 6})
    with opfuse.plugins.using("inductor"), opfuse.options(**{"inductor.backend": "tvm"}):
        with pytest.raises(ValueError, match="expected 'inductor' or 'eager', got 'tvm'"):
            opfuse.Sequential(ops.GELU())(torch.ones(2))
    assert "normalizes over 2 dimensions" in refusal(ops.RMSNorm((4, 8)))
    assert "has tensors of its own" in refusal(norm, Table())
    untidy = Untraceable()
    untidy.table = nn.Identity
    assert "Untraceable.table is not a plain number" in refusal(norm, untidy)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "'no-such-compiler' is not found" in refusal(norm)
    monkeypatch.setattr(conditions.importlib.util, "find_spec", lambda name: None)
    assert "Inductor needs Triton on a GPU" in refusal(norm, **cuda)
    monkeypatch.undo()
    monkeypatch.setattr(conditions.importlib.util, "find_spec", lambda name: object())
    assert refusal(norm, **cuda) is True
    assert "one pass over memory" in refusal(ops.GELU(), **cuda)
    assert "this GPU has 6.1" in refusal(norm, **{**cuda, "capability": (6, 1)})


def test_too_small_is_declined_while_planning():
    norm = ops.RMSNorm(64)
    assert refusal(norm, features=64) is True  # not asked about rows yet
    assert refusal(norm, features=64, rows=256) is True
    assert refusal(norm, rows=2) is True  # nobody knows how wide
    assert "with 128 rows or a few more of 64 features" in refusal(norm, features=64, rows=128)
    assert refusal(norm, features=64, rows=1, options=SMALL) is True
    chain = opfuse.Sequential(norm)
    found = []
    for rows in (2, 256, 300, 511, 4, 512):
        with torch.no_grad(), opfuse.options(**{"inductor.backend": "eager"}):
            (call,) = opfuse.explain(chain, torch.randn(rows, 64)).calls
        found.append(call.plan.forward[0].fusion is not None)
    assert found == [False, True, True, True, False, True]


def kept(chain, *inputs):
    """Numbers of elements that one forward keeps, parameters excluded."""
    found, known = [], {p.data_ptr() for p in chain.parameters()}
    with (
        opfuse.options(**TRACED),
        torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, id),
    ):
        chain(*inputs)
    return sorted(t.numel() for t in found if t.data_ptr() not in known)


def bias_gelu():
    return [ops.Bias(16), ops.GELU()]


def normed_residual():
    return [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(16)]


RECOMPUTED = {  # what is kept: the input, one number a row, ...
    "norm": (lambda: [ops.RMSNorm(16)], 0, [5, 80]),
    "fork, norm": (lambda: [ops.MakeExtraOutput(), ops.RMSNorm(16)], 0, [5, 80]),
    "bias, gelu": (bias_gelu, 0, [80]),
    "add, fork, norm": (normed_residual, 1, [5, 80]),
    "glu": (lambda: [ops.SwiGLU()], 0, [80]),
    "norm, scale": (lambda: [ops.RMSNorm(16), ops.ConstantScale(2.0)], 0, [5, 80]),
    "dropout": (lambda: [ops.RMSNorm(16), ops.Dropout(0.5)], 0, [5, 80, 80]),
    # the sum is kept, here and in the next one
    "add behind": (lambda: [ops.GELU(), ops.ConstantScale(2.0), ops.AddExtraInput()], 1, [80, 80]),
    "residual": (residual, 0, [5, 80, 80]),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_linear_behind_a_run_does_not_keep_its_input(name):
    make, extras, sizes = RECOMPUTED[name]
    run = make()
    chain = opfuse.Sequential(*run, ops.Linear(8 if name == "glu" else 16, 3))
    inputs = [torch.randn(5, 16, requires_grad=True) for _ in range(1 + extras)]
    assert kept(chain, *inputs) == sizes
    compare(chain, *inputs)
    compare(chain, *[torch.randn(2, 3, 16) for _ in inputs])
    if name == "dropout":
        chain.eval()
        compare(chain, *inputs)


def test_a_linear_behind_a_compiled_run():
    chain = opfuse.Sequential(
        ops.RMSNorm(16), ops.Linear(16, 32), ops.GELU(), ops.ConstantScale(0.5), ops.Linear(32, 4)
    )
    for shape in ((7, 16), (2, 5, 16)):
        compare(chain, torch.randn(shape), options=SMALL)
    with opfuse.options(**SMALL):
        text = " ".join(
            opfuse.explain(chain, torch.randn(7, 16, requires_grad=True)).details.split()
        )
    assert text.count("an op after it does not keep its input") == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: [ops.RMSNorm(64).requires_grad_(False), ops.SiLU(), ops.Linear(64, 8)],
        lambda: [ops.L2Normalization(), ops.SiLU(), ops.GELU(), ops.Linear(64, 8)],
        lambda: [ops.Bias(64), ops.GELU(), ops.Linear(64, 8)],
    ],
)
def test_a_gradient_that_the_chain_owns_is_overwritten_where_that_compiles(make):
    chain = opfuse.Sequential(*make())
    for p in chain[0].parameters():
        p.requires_grad_(True)
    compare(chain, torch.randn(9, 64), options=SMALL, rtol=1e-4, atol=1e-5)


def test_what_does_not_compile_runs_as_it_was_traced(monkeypatch):
    def broken(self, hint):
        raise RuntimeError("no such instruction")

    chain, x = opfuse.Sequential(ops.Bias(44), ops.GELU(), ops.Linear(44, 2)), torch.randn(3, 44)
    monkeypatch.setattr(kernels.CompiledKernel, "_compile", broken)
    with pytest.warns(
        opfuse.PluginWarning, match="does not compile the .* of Bias.*no such instruction"
    ):
        compare(chain, x, options=SMALL)
    with opfuse.options(**SMALL):
        text = " ".join(opfuse.explain(chain, x.requires_grad_()).details.split())
    assert "Inductor does not compile this, which runs as traced: forward, backward" in text


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="Inductor has no probes here")
def test_a_compiler_that_does_not_know_the_processor_is_asked_what_it_knows(monkeypatch):
    from torch._inductor import compile_fx, config, cpu_vec_isa

    tried, original = [], compile_fx.compile_fx_inner

    def compile_fx_inner(*args):
        tried.append((config.cpp.vec_isa_ok, cpu_vec_isa.valid_vec_isa_list.cache_info().currsize))
        cpu_vec_isa.valid_vec_isa_list()
        if config.cpp.vec_isa_ok:
            raise RuntimeError("no such instruction")
        return original(*args)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(kernels, "_skips_probes", True)
    chain = opfuse.Sequential(ops.Bias(45), ops.GELU(), ops.Linear(45, 2))
    compare(chain, torch.randn(3, 45), options=SMALL)
    # what was taken for granted is forgotten, for whoever else compiles in this process
    assert tried[0][0] and tried[1] == (None, 0)
    assert {skips for skips, _ in tried[1:]} == {None}


class Slope(opfuse.ops.Activation):
    """Its numbers are where a user may put them."""

    shared = 1.0

    def __init__(self, slope):
        super().__init__()
        self._slope = slope

    def value(self, x):
        return x * self._slope * self.shared

    def derivative(self, x):
        return torch.full_like(x, self._slope * self.shared)


def test_private_and_shared_numbers_of_an_activation_are_seen(monkeypatch):
    x = torch.randn(3, 16)
    for slope in (0.1, 0.9):
        chain = opfuse.Sequential(ops.RMSNorm(16), Slope(slope))
        compare(chain, x)
    chain[1]._slope = 0.5
    compare(chain, x)
    monkeypatch.setattr(Slope, "shared", 3.0)
    compare(chain, x)
    scaled = [opfuse.Sequential(ops.ScaledActivation(Slope(slope))) for slope in (0.1, 0.9)]
    for each in scaled:
        compare(each, x, torch.rand(3))


class Shared(ops.Activation):
    """What it reads is on its class, and may change there."""

    factors = [1.0]  # noqa: RUF012  # that is the point

    def value(self, x):
        return self.factors[0] * x * x

    def derivative(self, x):
        return 2 * self.factors[0] * x


def test_objects_of_an_activation_are_refused():
    act = Slope(lambda: 3.0)
    assert "Slope._slope is not a plain number" in refusal(act)
    assert "Slope._slope is not a plain number" in refusal(ops.ScaledActivation(act))
    assert "Shared.factors is not a plain number" in refusal(Shared())


def test_an_output_is_computed_again_with_the_scale_of_its_forward():
    chain = opfuse.Sequential(ops.RMSNorm(16), ops.ConstantScale(2.0), ops.Linear(16, 4))
    x, grads = torch.randn(5, 16), []
    for selection in ("inductor", ""):
        chain[1].scale = 2.0
        with using(selection), opfuse.options(**TRACED):
            y = chain(x)
            chain[1].scale = 5.0
            grads.append(torch.autograd.grad(y.sum(), chain[2].weight)[0])
    torch.testing.assert_close(*grads)


def test_no_width_and_no_compiler_named(monkeypatch):
    compare(opfuse.Sequential(ops.SiLU(), ops.GELU()), torch.randn(4, 0))
    monkeypatch.setenv("CXX", "")
    assert conditions.cpp_compiler() in ("g++", "clang++", None)


def test_other_fusions_take_precedence():
    class Theirs(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [()]

    chain, x = (
        opfuse.Sequential(ops.RMSNorm(8), ops.SiLU(), ops.ConstantScale(2.0)),
        torch.randn(2, 8),
    )
    with registered("forward", opfuse.Fusion((ops.SiLU,), Theirs, name="theirs")):
        # by name, the plugin would have precedence
        with using(None), torch.no_grad(), opfuse.options(**TRACED):
            plan = opfuse.explain(chain, x).calls[0].plan
    assert [step.fusion for step in plan.forward] == ["compiled run", "theirs", None]


# What it says


@pytest.fixture
def said():
    """What the plugin logs."""
    log, heard, handler = logging.getLogger("opfuse.inductor"), [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield heard
    log.setLevel(before)
    log.removeHandler(handler)


def test_a_compilation_is_announced_and_reported(monkeypatch, said):
    chain, x = (
        opfuse.Sequential(ops.RMSNorm(28), ops.SwiGLU()),
        torch.randn(3, 28, requires_grad=True),
    )
    monkeypatch.setattr(kernels, "PATIENCE", 0.0)
    with opfuse.options(**TRACED):
        assert "nothing was compiled" in opfuse.explain(chain, x[:1]).details
        chain(x).sum().backward()
        report = opfuse.explain(chain, x)
    assert any("compiling the forward of RMSNorm + SwiGLU" in each for each in said)
    assert any("compiled the backward of RMSNorm + SwiGLU in " in each for each in said)
    assert "RMSNorm + SwiGLU: time spent tracing and compiling in this" in report.details
    assert ", backward " in report.calls[0].notes[0]


# Autocast, and numbers that change between the passes

FORK = lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False)  # noqa: E731
JOIN = lambda: ops.AddExtraInput().set_extra_input_channel(0, "r")  # noqa: E731
UNDER_AUTOCAST = {
    "a linear behind": (lambda: [ops.RMSNorm(16), ops.Linear(16, 8)], torch.bfloat16),
    "an activation behind": (lambda: [ops.RMSNorm(16), ops.SwiGLU()], torch.bfloat16),
    "nothing behind": (lambda: [ops.Bias(16), ops.L2Normalization()], torch.float32),
    # None: the input's
    "pre-norm": (lambda: [FORK(), ops.RMSNorm(16), ops.Linear(16, 16), ops.GELU(), JOIN()], None),
    "post-norm": (
        lambda: [FORK(), ops.Linear(16, 16), ops.GELU(), JOIN(), ops.RMSNorm(16)],
        torch.float32,
    ),
    "a fork behind": (
        lambda: [ops.RMSNorm(16), FORK(), ops.Linear(16, 16), JOIN(), ops.RMSNorm(16)],
        torch.float32,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_norms_under_autocast_match_the_unfused_chain(name, dtype):
    make, given = UNDER_AUTOCAST[name]
    chain, x = opfuse.Sequential(*make()), torch.randn(6, 16).to(dtype)
    results = []
    for selection in ("", "inductor", None):
        with using(selection), torch.autocast("cpu", torch.bfloat16):
            results.append(step(chain, x))
    expected, *others = results
    assert expected[0].dtype is (given or dtype)
    for got in (pair for other in others for pair in zip(other, expected, strict=True)):
        torch.testing.assert_close(*got, rtol=0.03, atol=0.03 * got[1].abs().max().item())


@pytest.mark.parametrize(
    "options", [TRACED, {"inductor.min_elements": 10**9}], ids=["traced", "one by one"]
)
def test_the_backward_uses_the_numbers_of_the_forward(options):
    scaled = ops.ScaledClampedQGeGLU(limit=0.5)
    chain = opfuse.Sequential(
        ops.Bias(32), ops.ClampedSwiGLU(limit=0.5), ops.ConstantScale(3.0), ops.Dropout(0.5), scaled
    )
    x, scales = torch.randn(6, 32), torch.randn(6)
    with using(""):
        expected = step(chain, x, scales, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, scales)]
    torch.manual_seed(3)
    with opfuse.options(**options):
        y = chain(*leaves)
    for op in (chain[1], scaled.activation):
        op.limit, op.alpha, op.glu_linear_offset = 5.0, 0.1, 3.0
    chain[2].scale, chain[3].p = -1.0, 0.9
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    found = [y, *torch.autograd.grad(y, [*leaves, *chain.parameters()], weights)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("act", [ops.GELU, ops.SwiGLU, ops.RMSNorm])
def test_under_a_recipe_the_run_before_a_cast_is_compiled_and_computed_again(act, monkeypatch):
    """The input of the linear is cast: neither it nor its cast is kept, and the bits are the same."""
    cast = []
    plain = opfuse.Quantizer.__call__

    def quantize(self, tensor, *usage):
        cast.append(tensor)
        return plain(self, tensor, *usage)

    monkeypatch.setattr(opfuse.Quantizer, "__call__", quantize)
    monkeypatch.setattr(
        opfuse.Quantizer, "requantize", lambda q, tensor, scales, usage: quantize(q, tensor, usage)
    )
    results = []
    with recipes.offered():
        for plugins in (recipes.NAME, f"inductor,{recipes.NAME}"):
            torch.manual_seed(0)
            made = act(512) if act is ops.RMSNorm else act()
            width = 256 if act is ops.SwiGLU else 512
            chain = opfuse.Sequential(ops.Linear(512, 512), made, ops.Linear(width, 512))
            x = torch.randn(128, 512, requires_grad=True)
            cast.clear()
            with using(plugins), opfuse.autocast(recipes.PerTensor()):
                y = chain(x)
                saved = sum(t.numel() for t in y.grad_fn.saved_tensors if t is not None)
            given = [t for t in cast if t.shape == (128, width) and isinstance(t, torch.Tensor)][-1]
            cast.clear()
            y.square().sum().backward()
            results.append((saved, y, x.grad, *[p.grad for p in chain.parameters()]))
    assert results[0][0] - results[1][0] > 0.9 * 128 * width  # less what it saves instead
    for expected, got in zip(results[0][1:], results[1][1:], strict=True):
        assert (got - expected).norm() < 1e-2 * expected.norm()  # a few codes are one step off
    again = [t for t in cast if t.shape == (128, width) and isinstance(t, torch.Tensor)]
    assert any(torch.equal(t, given) for t in again)
