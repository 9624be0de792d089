"""What the fused ops do around the kernels: where they decline, what they keep, in place, compiled."""

import importlib.util

import opfuse_norm
import pytest
import torch
from opfuse_triton import why_no_kernel

import opfuse
from opfuse import Environment, ops
from opfuse.testing import machine

INTERPRETING = machine.is_interpreting()
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
needs_interpreter = pytest.mark.skipif(not INTERPRETING, reason="it needs TRITON_INTERPRET=1")
without_interpreter = pytest.mark.skipif(INTERPRETING, reason="TRITON_INTERPRET is set")

if INTERPRETING:
    from opfuse.testing import interpreter

    interpreter.install()


def block(norm):
    return opfuse.Sequential(
        ops.AddExtraInput(), ops.MakeExtraOutput(), norm, ops.ConstantScale(2.0)
    )


def steps(model, *given, passes="forward"):
    (call,) = opfuse.explain(model, *given).calls
    return [step.fusion for step in getattr(call.plan, passes) if step.fusion]


@without_interpreter
def test_no_plan_on_a_cpu_differs():
    model, x = block(ops.RMSNorm(64)), torch.randn(4, 64, requires_grad=True)
    assert steps(model, x, x) == steps(model, x, x, passes="backward") == []
    (call,) = opfuse.explain(model, x, x).calls
    reasons = {refusal.reason for refusal in call.plan.refused}
    assert "its kernels run on a GPU, and this is cpu" in reasons


@without_interpreter
def test_twins_stand_in_and_say_so():
    model, x = block(ops.LayerNorm(64)), torch.randn(4, 64, requires_grad=True)
    with opfuse.options(**{"norm.twins": True}):
        report = opfuse.explain(model, x, x)
        assert steps(model, x, x) == ["add+norm"]
        assert steps(model, x, x, passes="backward") == ["norm+add"]
    assert "its kernels run on a GPU, and this is cpu" in str(report)


def test_where_no_kernel_runs(monkeypatch):
    why_not = why_no_kernel
    assert why_not(torch.device("cuda"), (9, 0)) == ""
    assert "8.0 or newer" in why_not(torch.device("cuda"), (7, 5))
    assert why_not(torch.device("mps")) == "its kernels run on a GPU, and this is mps"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not(torch.device("cuda"), (9, 0)).startswith("Triton is not installed")


def test_what_the_condition_refuses():
    (norm, _) = opfuse_norm.opfuse_forward_fusions()
    env = Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    assert norm.when((ops.RMSNorm(65536, device="meta"),), env) is True
    said = norm.when((ops.RMSNorm(65537, device="meta"),), env)
    assert said == "its kernels take up to 65536 features, and these are 65537"
    said = norm.when((ops.RMSNorm(8),), env._replace(dtype=torch.float64))
    assert said == "its kernels compute in fp32, and the ops in float64"


def test_on_a_gpu_they_are_used_where_the_model_says_that_they_pay(monkeypatch):
    from opfuse_norm import fused

    cuda = Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    norm = ops.RMSNorm(64, device="meta")
    fusions = *opfuse_norm.opfuse_forward_fusions(), *opfuse_norm.opfuse_backward_fusions()
    assert all(fusion.when((ops.AddExtraInput(), norm), cuda) is True for fusion in fusions)
    for name in ("norm", "add+norm", "norm backward", "norm+add backward"):
        monkeypatch.setitem(fused.PREDICTED.fusions, name, (1.05, ()))
    for fusion in fusions:
        said = fusion.when((norm,), cuda)
        assert "it was not measured on this GPU" in said and "1.05x" in said
        assert fusion.when((norm,), cuda._replace(measured=1.2)) is True


@needs_interpreter
def test_configurations_are_offered_and_used():
    (norm, _), (back, _) = (
        opfuse_norm.opfuse_forward_fusions(),
        opfuse_norm.opfuse_backward_fusions(),
    )
    env = Environment(CPU, None, torch.float32, features=512)
    for fusion in (norm, back):
        op = fusion.build((ops.RMSNorm(512),))
        op.planned(env)
        offered = op.configurations(env)
        assert 1 < len(offered) <= 8 and op.fallback == ""
        op.planned(env._replace(configuration=offered[-1]))
        assert getattr(op._norm, f"_{op._pass}").keywords["config"].to_dict() == offered[-1]


@needs_interpreter
def test_a_sum_in_place_is_seen_by_autograd():
    """The kernel writes into the extra input, as the op would, and counts its version up."""
    norm = ops.RMSNorm(64)
    model = opfuse.Sequential(ops.AddExtraInput(in_place=True), norm)
    x, extra = torch.randn(3, 64), torch.randn(3, 64)
    expected = x + extra
    version = extra._version
    assert steps(model, x, extra.clone()) == ["add+norm"]
    y = model(x, extra)
    assert torch.equal(extra, expected) and extra._version > version
    torch.testing.assert_close(y, norm(expected))


@needs_interpreter
@pytest.mark.parametrize(
    "norm", [ops.RMSNorm(64), ops.LayerNorm(64), ops.L2Normalization()], ids=str
)
def test_a_graph_of_torch_compile_has_one_operation_per_fusion(norm):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.code))
        return make_boxed_func(graph)

    def run(model):
        torch.manual_seed(0)
        x, extra = torch.randn(5, 64), torch.randn(5, 64)
        x.requires_grad_()
        norm.zero_grad()
        y, residual = model(x, extra)
        (y.square().sum() + residual.sum()).backward()
        return [y, x.grad, *[param.grad.clone() for param in norm.parameters()]]

    torch._dynamo.reset()
    model = block(norm)
    compiled = torch.compile(
        model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    for got, expected in zip(run(compiled), run(model), strict=True):
        torch.testing.assert_close(got, expected)
    forward, backward = graphs
    assert forward.count("opfuse_triton.norm_forward") == 1
    assert backward.count("opfuse_triton.norm_backward") == 1


@needs_interpreter
def test_the_torch_operations_are_what_they_declare():
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    for kind, given in (("rms", (weight, None)), ("layer", (weight, bias)), ("l2", (None, None))):
        args = x, x.clone(), *given, 1e-5, kind, 1, False, torch.bfloat16, True, True
        torch.library.opcheck(
            torch.ops.opfuse_triton.norm_forward.default,
            args,
            test_utils=("test_schema", "test_faketensor"),
        )
        mean = torch.zeros(4, 1) if kind == "layer" else None
        needs = True, given[0] is not None, given[1] is not None
        args = x, x.clone(), given[0], mean, torch.ones(4, 1), x.clone(), kind, 1, False, *needs
        torch.library.opcheck(
            torch.ops.opfuse_triton.norm_backward.default,
            args,
            test_utils=("test_schema", "test_faketensor"),
        )


def outcomes(model, *given):
    """What the model gives with the plugin and without, or the class of the error."""
    found = []
    for selection in ("norm", ""):
        with opfuse.plugins.using(selection):
            try:
                found.append(model(*given).detach())
            except Exception as error:
                found.append(type(error))
    return found


@needs_interpreter
@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("size", [1, 16])
def test_parameters_of_another_shape_are_the_ops_to_judge(norm, size):
    model = opfuse.Sequential(norm(64))
    for name, _ in list(model[0].named_parameters()):
        setattr(model[0], name, torch.nn.Parameter(torch.full((size,), 2.0)))
    fused, separate = outcomes(model, torch.randn(2, 64, requires_grad=True))
    same = isinstance(separate, torch.Tensor) and torch.equal(fused, separate)
    assert same or fused is separate is RuntimeError


@needs_interpreter
def test_a_sum_in_place_over_other_rows_is_refused_as_by_the_ops():
    memory = torch.arange(40.0).view(5, 8)
    model = opfuse.Sequential(ops.AddExtraInput(in_place=True), ops.RMSNorm(8))
    with torch.no_grad():
        assert outcomes(model, memory[0:3], memory[1:4]) == [RuntimeError, RuntimeError]
