"""explain: every step of every call with its provenance, every refusal with its sentence."""

import json
import threading

import pytest
import torch
from torch import nn

import opfuse
from opfuse import Fusion
from opfuse.core import plugins, settings
from opfuse.ops import GELU, BasicLinear, Bias, Identity, Linear
from opfuse.report.explain import Explanation

WIDTH = 100
SOURCE = {"distribution": "opfuse-plugin-linear", "version": "0.1.0"}
NOBODY = {"fusion": None, "distribution": None, "version": None}


class Net(nn.Module):
    """A block called twice, a Sequential cut by a foreign module, an op called alone."""

    def __init__(self):
        super().__init__()
        self.block = opfuse.Sequential(Linear(8, 8), GELU())
        self.mixed = opfuse.Sequential(Linear(8, 8), GELU(), nn.Dropout(0.5), Linear(8, 8))
        self.head = Linear(8, 4)

    def forward(self, x, *, twice=True):
        x = self.block(x)
        return self.head(self.mixed(self.block(x) if twice else x))


@pytest.fixture
def linear(register, fused):
    """A plugin with fusions of all passes."""

    def when(ops, env):
        return "runs on a GPU, not on cpu"

    return register(
        name="linear",
        **SOURCE,
        forward_fusions=[
            Fusion(
                [BasicLinear, Bias, GELU], fused("ForwardLinearBiasGELU"), name="linear_bias_gelu"
            ),
            Fusion([BasicLinear, Bias], fused("LinearBias")),
            Fusion([GELU], fused("FastGELU"), when),
        ],
        backward_fusions=[Fusion([Bias, GELU], fused("BiasGELUGrad"))],
        joint_fusions=[Fusion([Identity, Identity], fused("Twice"))],
    )


def step(path, call, op, basic_ops, fusion=None):
    source = {"fusion": fusion, **SOURCE} if fusion else NOBODY
    row = {"path": path, "call": call, "op": op, "basic_ops": basic_ops, **source}
    return {**row, "casts": [], "note": "", "fallback": ""}


def refused(path, fusion, basic_ops, reason, lost_to=None):
    return {
        "path": path,
        "fusion": fusion,
        "pass": "forward",
        "basic_ops": basic_ops,
        "reason": reason,
        "distribution": SOURCE["distribution"],
        "lost_to": lost_to,
    }


def test_a_model_is_reported_call_by_call(linear):
    explanation = opfuse.explain(Net(), torch.randn(3, 8))
    data = explanation.to_dict()
    linear_bias_gelu = ["BasicLinear", "Bias", "GELU"]
    whole = ("ForwardLinearBiasGELU", linear_bias_gelu, "linear_bias_gelu")
    pair = ("LinearBias", ["BasicLinear", "Bias"], "LinearBias")
    calls = [
        ("block", 0, whole),
        ("block", 1, whole),
        ("mixed", 2, whole),
        ("mixed", 3, pair),
        ("head", 4, pair),
    ]
    # the inputs of Linear and of GELU
    assert [row.pop("saved_bytes") for row in data["forward"]] == [192, 192, 192, 96, 96]
    assert data["forward"] == [step(path, call, *what) for path, call, what in calls]
    grad = ("BiasGELUGrad", ["Bias", "GELU"], "BiasGELUGrad")
    unfused = [("Bias", ["Bias"]), ("BasicLinear", ["BasicLinear"])]
    assert data["backward"] == [
        step(path, call, *what)
        for path, call, (op, *_) in calls
        for what in ([grad, unfused[1]] if op == whole[0] else unfused)
    ]
    beaten = "overlaps linear_bias_gelu of opfuse-plugin-linear, which saves 4 tensor reads and writes against 2"
    assert data["refused"] == [
        row
        for path in ("block", "mixed")
        for row in (
            refused(path, "LinearBias", ["BasicLinear", "Bias"], beaten, SOURCE["distribution"]),
            refused(path, "FastGELU", ["GELU"], "runs on a GPU, not on cpu"),
        )
    ]
    assert json.loads(json.dumps(data)) == data


def test_notes_of_a_fused_op(register, fused):
    """What a fused op says about itself is reported below its chain, and does not make reports differ."""
    pair = fused("Pair", notes="compiled in 1.5 s")
    register(forward_fusions=[Fusion([Identity, Identity], pair)])
    chain = opfuse.Sequential(Identity(), Identity())
    explanation = opfuse.explain(chain, torch.randn(2))
    assert explanation.details.splitlines()[-1] == "  Identity + Identity: compiled in 1.5 s"
    assert "compiled in 1.5 s" not in str(explanation)
    pair.notes = ""
    assert opfuse.explain(chain, torch.randn(2)) == explanation
    assert "compiled in 1.5 s" not in opfuse.explain(chain, torch.randn(2)).details


def test_the_text_groups_calls_with_the_same_plan(linear):
    text = str(opfuse.explain(Net(), torch.randn(3, 8)))
    assert repr(opfuse.explain(Net(), torch.randn(3, 8))) == text
    assert text.splitlines() == [
        "5 calls of fusible ops: forward 5 fused, 0 separate; backward 3 fused, 7 separate.",
        "",
        "block, mixed: Sequential [Linear, GELU] (calls 0, 1, 2)",
        "  forward",
        "    BasicLinear + Bias + GELU  fused by linear_bias_gelu, opfuse-plugin-linear 0.1.0",
        "  backward",
        "    Bias + GELU  fused by BiasGELUGrad, opfuse-plugin-linear 0.1.0",
        "    not fused: BasicLinear",
        "",
        "mixed: Sequential [Linear] (call 3)",
        "  forward",
        "    BasicLinear + Bias  fused by LinearBias, opfuse-plugin-linear 0.1.0",
        "  backward, not fused: Bias, BasicLinear",
        "",
        "head: Linear (call 4)",
        "  forward",
        "    BasicLinear + Bias  fused by LinearBias, opfuse-plugin-linear 0.1.0",
        "  backward, not fused: Bias, BasicLinear",
        "",
        "refused",
        "  GELU: runs on a GPU, not on cpu (FastGELU, opfuse-plugin-linear)",
        "  1 candidate lost to others: see `.details`, on the command line `--details`",
    ]


def test_the_details_list_bytes_and_refusals(linear):
    lines = opfuse.explain(Net(), torch.randn(3, 8)).details.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert (
        lines[0]
        == "5 calls of fusible ops: forward 5 fused, 0 separate; backward 3 fused, 7 separate."
    )
    start = lines.index("block, mixed: Sequential [Linear, GELU] (calls 0, 1, 2)")
    assert lines[start + 1 :][:12] == [
        "  forward, keeps 192 bytes for the backward",
        "    BasicLinear + Bias + GELU  fused by linear_bias_gelu as ForwardLinearBiasGELU,",
        "                               opfuse-plugin-linear 0.1.0; keeps 192 bytes",
        "  backward",
        "    Bias + GELU  fused by BiasGELUGrad, opfuse-plugin-linear 0.1.0",
        "    BasicLinear  not fused",
        "  refused",
        "    1 candidate that lost to another one of the same plugin: see `to_dict()`",
        "    forward FastGELU, opfuse-plugin-linear, on GELU",
        "      runs on a GPU, not on cpu",
        "",
        "mixed: Sequential [Linear] (call 3)",
    ]
    assert "head: Linear (call 4)" in lines


def test_chains_alike_are_told_once(linear):
    model = nn.Sequential(*[opfuse.Sequential(Linear(8, 8), GELU()) for _ in range(24)])
    explanation = opfuse.explain(model, torch.randn(3, 8))
    for report, title in (
        (explanation.details, "0, 1, 2, ... 20 more"),
        (str(explanation), "0, ... 22 more"),
    ):
        lines = report.splitlines()
        assert f"{title} like these ..., 23: Sequential [Linear, GELU] (24 calls)" in lines
        assert len(lines) < 20


@pytest.mark.parametrize("nested", [False, True])
def test_a_deep_model_fits_a_screen(linear, nested):
    blocks = [
        opfuse.Sequential(Linear(8, 8), GELU(), Identity(), Linear(8, 8), Bias(8), GELU())
        for _ in range(12)
    ]
    model = (opfuse.Sequential if nested else nn.Sequential)(*blocks)
    explanation = opfuse.explain(model, torch.randn(3, 8))
    assert len(str(explanation).splitlines()) < 20
    assert "(12 times)" in str(explanation) or not nested
    assert sum(len(step["basic_ops"]) for step in explanation.to_dict()["forward"]) == 12 * 8
    assert len(explanation.details.splitlines()) > 100 or not nested


def test_each_reason_is_told_once(register, fused):
    def when(ops, env):
        return f"{type(ops[0]).__name__} is not for it" if len(ops) > 1 else "not today"

    one = [Fusion([cls], fused(name="Shy"), when) for cls in (GELU, Identity, BasicLinear, Bias)]
    register(forward_fusions=[*one, Fusion([GELU, Identity], fused("Pair"), when)])
    chain = opfuse.Sequential(GELU(), Identity(), GELU(), Identity(), Linear(2, 2))
    lines = str(opfuse.explain(chain, torch.randn(2))).splitlines()
    assert lines[lines.index("refused") + 1 :] == [
        "  GELU + Identity: GELU is not for it (Pair, opfuse-plugin-test)",
        "  GELU; Identity; BasicLinear; 1 more: not today (Shy, opfuse-plugin-test)",
    ]


def test_calls_have_the_path_of_their_module(register):
    chain = opfuse.Sequential(Identity(), GELU())
    x = torch.randn(2, 3)

    def paths(model):
        return [call.path for call in opfuse.explain(model, x).calls]

    assert paths(chain) == [""]
    assert (
        str(opfuse.explain(chain, x))
        .splitlines()[3]
        .startswith("the model: Sequential [Identity, GELU]")
    )
    assert paths(GELU()) == [""]
    assert paths(nn.Sequential(nn.Sequential(chain), Identity())) == ["0.0", "1"]
    # one module: its first name, as named_modules has it
    assert paths(nn.Sequential(chain, chain)) == ["0", "0"]
    # the nested chain's ops are the outer one's
    assert paths(opfuse.Sequential(chain, nn.ReLU(), GELU())) == ["", ""]
    handle = chain.register_forward_hook(lambda *args: None)
    assert paths(opfuse.Sequential(chain, nn.ReLU(), GELU())) == ["0", ""]
    handle.remove()
    assert paths(lambda x: chain(chain(x))) == ["", ""]
    assert paths(opfuse.OperationFuser([GELU()])) == [""]
    assert (
        str(opfuse.explain(lambda x: chain(x), x)).splitlines()[3]
        == "chain [Identity, GELU] (call 0)"
    )


def test_an_op_with_hooks_cuts_the_chain(linear):
    chain = opfuse.Sequential(GELU(), Linear(8, 8), GELU())
    x = torch.randn(2, 8)
    whole = opfuse.explain(chain, x)
    handle = chain[1].register_forward_hook(lambda *args: None)
    cut = opfuse.explain(chain, x)
    assert [(call.path, call.ops, call.cut) for call in cut.calls] == [
        ("", ("GELU",), "cut at Linear, which has forward hooks"),
        ("1", ("Linear",), "on its own, for it has forward hooks"),
        ("", ("GELU",), "cut at Linear, which has forward hooks"),
    ]
    assert "  cut at Linear, which has forward hooks" in str(cut).splitlines()
    assert "  on its own, for it has forward hooks" in str(cut).splitlines()
    handle.remove()
    assert opfuse.explain(chain, x) == whole
    chain[1].basic_ops[1].register_full_backward_hook(lambda *args: None)
    assert [(call.path, call.cut) for call in opfuse.explain(chain, x.requires_grad_()).calls] == [
        ("", "cut at Bias, which has backward hooks"),
        ("1.basic_ops.1", "on its own, for it has backward hooks"),
        ("", "cut at Bias, which has backward hooks"),
    ]


def test_without_gradients_there_is_no_backward(linear):
    chain = opfuse.Sequential(Linear(8, 8), GELU())
    with torch.no_grad():
        explanation = opfuse.explain(chain, torch.randn(2, 8))
    assert explanation.to_dict()["backward"] == []
    assert "  backward: none, grad mode is off" in str(explanation).splitlines()
    explanation = opfuse.explain(chain.requires_grad_(False), torch.randn(2, 8))
    assert explanation.to_dict()["backward"] == []
    assert "  backward: none, nothing here needs a gradient" in str(explanation).splitlines()


# Why nothing is fused


def first_lines(model, *inputs):
    return str(opfuse.explain(model, *inputs)).splitlines()


def test_a_model_without_ops_gives_an_empty_report():
    assert str(opfuse.explain(nn.Linear(2, 2), torch.randn(1, 2))).startswith(
        "No opfuse op was called"
    )
    names = ("forward", "backward", "refused", "sent", "own_forward", "memory", "quantized")
    assert opfuse.explain(abs, 3).to_dict() == {name: [] for name in names}


def test_nothing_is_fused_and_why(register, fused):
    model = opfuse.Sequential(GELU(), GELU())
    x = torch.randn(2, 8)
    assert first_lines(model, x)[:5] == [
        "1 call of fusible ops: forward 0 fused, 2 separate; backward 0 fused, 0 separate.",
        "Nothing is fused: no plugin is installed and no fusion is registered.",
        "",
        "the model: Sequential [GELU, GELU] (call 0)",
        "  forward, not fused: GELU (2 times)",
    ]
    record = register(name="empty")
    assert first_lines(model, x)[1] == "Nothing is fused: the plugins in use offer no fusion."
    with plugins.using("-empty"):
        assert (
            first_lines(model, x)[1]
            == "Nothing is fused: every plugin is blocked by the selection '-empty'."
        )
    record.state = "failed"
    plugins.manager.changed()
    assert (
        first_lines(model, x)[1]
        == "Nothing is fused: no plugin could be loaded, see `opfuse plugins`."
    )
    register(name="other", forward_fusions=[Fusion([Bias, GELU], fused())])
    assert first_lines(model, x)[3] == "  nothing is fused: no plugin offers a fusion for these ops"
    register(
        name="shy",
        forward_fusions=[Fusion([GELU, GELU], fused("Shy"), lambda ops, env: "not today")],
    )
    lines = first_lines(model, x)
    assert lines[3] == "  nothing is fused: every candidate was refused"
    assert lines[-2:] == ["refused", "  GELU + GELU: not today (Shy, opfuse-plugin-test)"]
    with opfuse.options(double_backward=True):
        text = "Nothing is fused: the option double_backward runs the ops one by one."
        assert first_lines(model, x)[1] == text


def test_functorch_runs_the_ops_one_by_one(register, fused):
    pair = fused("Pair")
    register(forward_fusions=[Fusion([GELU, GELU], pair)])
    model = opfuse.Sequential(GELU(), GELU())
    found = []

    def loss(x):
        found.append(opfuse.explain(model, x))
        return model(x).sum()

    x = torch.randn(3)
    grad = torch.func.grad(loss)(x)
    leaf = x.clone().requires_grad_()
    nn.functional.gelu(
        nn.functional.gelu(leaf, approximate="tanh"), approximate="tanh"
    ).sum().backward()
    torch.testing.assert_close(grad, leaf.grad)
    assert pair.calls == []
    assert (
        str(found[0]).splitlines()[1]
        == "Nothing is fused: functorch transforms run the ops one by one."
    )


def test_fusion_limit_and_conflicts_are_told(register, fused):
    register(
        forward_fusions=[
            Fusion([GELU, Identity], fused("First")),
            Fusion([Identity, GELU], fused("Second")),
        ]
    )
    model = opfuse.Sequential(GELU(), Identity(), GELU())
    (refusal,) = opfuse.explain(model, torch.randn(2)).to_dict()["refused"]
    assert (
        refusal["reason"]
        == "overlaps First of opfuse-plugin-test, which saves as much and comes first by name"
    )
    with opfuse.options(fusion_limit=0):
        reasons = [
            row["reason"] for row in opfuse.explain(model, torch.randn(2)).to_dict()["refused"]
        ]
    assert reasons[0] == "beyond the limit of 0 fusions"


def test_refusals_alike_are_counted(register, fused):
    register(forward_fusions=[Fusion([GELU], fused("Shy"), lambda ops, env: "not today")])
    explanation = opfuse.explain(opfuse.Sequential(GELU(), Identity(), GELU()), torch.randn(2))
    assert (
        "    forward Shy, opfuse-plugin-test, on GELU (2 times)" in explanation.details.splitlines()
    )
    assert str(explanation).splitlines()[-1] == "  GELU: not today (Shy, opfuse-plugin-test)"
    assert len(explanation.to_dict()["refused"]) == 2


def test_fusions_registered_in_code(register, fused):
    handle = opfuse.register_forward_fusion(Fusion([GELU, GELU], fused("Mine")))
    explanation = opfuse.explain(opfuse.Sequential(GELU(), GELU()), torch.randn(2))
    handle.unregister()
    row = explanation.to_dict()["forward"][0]
    assert (row["fusion"], row["distribution"], row["version"]) == ("Mine", None, None)
    assert "    GELU + GELU  fused by Mine, registered in code" in str(explanation).splitlines()


# What a run leaves


def test_two_runs_give_equal_plans(linear):
    model, x = Net(), torch.randn(3, 8)
    first, second = opfuse.explain(model, x), opfuse.explain(model, x)
    assert first == second == opfuse.explain(Net(), x)
    assert hash(first) == hash(second)
    assert [call.plan for call in first.calls] == [call.plan for call in second.calls]
    assert first != opfuse.explain(model, x, twice=False)
    assert isinstance(first, Explanation)


def test_random_numbers_and_the_scope_are_as_before(linear):
    model, x = Net(), torch.randn(3, 8)
    expected = torch.random.get_rng_state()
    opfuse.explain(model, x)
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert not settings.current.recorders

    def broken(x):
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        opfuse.explain(broken, x)
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert not settings.current.recorders


def test_grad_and_autocast_modes_are_the_callers(linear):
    seen = []

    def model(x):
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.is_inference_mode_enabled(),
            )
        )

    opfuse.explain(model, 1)
    with torch.no_grad(), torch.autocast("cpu"):
        opfuse.explain(model, 1)
    with torch.inference_mode():
        opfuse.explain(model, 1)
    assert seen == [(True, False, False), (False, True, False), (False, False, True)]
    assert opfuse.explain(Net(), torch.randn(1, 8), twice=False).calls[-1].path == "head"


def test_no_gradient_is_left(linear):
    model, x = Net(), torch.randn(3, 8, requires_grad=True)
    opfuse.explain(model, x)
    assert x.grad is None
    assert all(param.grad is None for param in model.parameters())


def test_explain_may_run_inside_explain(linear):
    inner = []

    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = opfuse.Sequential(Linear(8, 8), GELU())

        def forward(self, x):
            inner.append(opfuse.explain(self.chain, x))
            return self.chain(x)

    outer = opfuse.explain(Curious(), torch.randn(2, 8))
    assert [call.path for call in inner[0].calls] == [""]
    # the inner run is a call of the model too
    assert [call.path for call in outer.calls] == ["chain", "chain"]


def test_threads_may_explain_at_the_same_time(linear):
    models = [opfuse.Sequential(*[GELU() for _ in range(n + 1)]) for n in range(4)]
    barrier, found = threading.Barrier(4), {}

    def run(n):
        barrier.wait()
        for _ in range(5):
            found.setdefault(n, []).append(opfuse.explain(models[n], torch.ones(2)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: {call.ops for e in runs for call in e.calls} for n, runs in found.items()} == {
        n: {("GELU",) * (n + 1)} for n in range(4)
    }
    assert all(len(e.calls) == 1 for runs in found.values() for e in runs)


def test_explain_is_refused_while_tracing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"opfuse.explain cannot be traced by torch.compile"):
        opfuse.explain(GELU(), torch.ones(2))
