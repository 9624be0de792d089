"""Losses of preferences and rewards: gradients, dtypes, shapes, what is refused.

Their values are compared with TRL's in ``test_losses_as_trl.py``.
"""

import re
import subprocess
import sys

import pytest
import torch
from opfuse_loss import losses
from torch.nn.functional import logsigmoid

import opfuse
from opfuse import ops
from opfuse.testing.machine import is_interpreting

if is_interpreting():
    pytest.skip("they launch no kernel", allow_module_level=True)

COUNT, SHAPE = 4, (3, 4)
PAIRS = torch.arange(COUNT).view(2, -1).t()
MARGIN = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]
OTHERS = ["nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired"]
GRPO = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
OLD = ("old_log_probs",)


@pytest.fixture(autouse=True)
def ops_alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with opfuse.plugins.using(""):
        yield
    torch.set_num_threads(threads)


def cases():
    for kind in (*MARGIN, *OTHERS):
        given = {"label_smoothing": 0.2, "beta": 0.7, "ld_alpha": 0.3}
        weighs = kind in (*MARGIN, *OTHERS[:5])
        yield f"DPO {kind}", lambda k=kind, g=given, w=weighs: losses.DPO(k, use_weighting=w, **g)
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        given = {"f_divergence_type": divergence, "loss_weights": [2.0, 0.5]}
        yield f"DPO {divergence}", lambda g=given: losses.DPO(["sigmoid", "ipo"], **g)
    yield "KTO", lambda: losses.KTO(beta=0.7, desirable_weight=1.3)
    yield "KTO apo", lambda: losses.KTO("apo_zero_unpaired", undesirable_weight=0.4)
    yield "ORPO", lambda: losses.ORPO(beta=0.7)
    for kind in ("sigmoid", "hinge", "ipo", "simpo"):
        given = {"beta": 0.7, "label_smoothing": 0.2, "cpo_alpha": 0.3 * (kind == "simpo")}
        name = f"CPO {kind}" + " and sft" * (kind == "simpo")
        yield name, lambda k=kind, g=given: losses.CPO(k, **g, alpha=0.4 * (k == "ipo"))
    for kind in GRPO:
        for level in ("token", "sequence"):
            given = {
                "beta": 0.3, "delta": 1.5, "given": (*OLD, "importance_ratio"),
                "entropy_coef": 0.2, "top_entropy_quantile": 0.6, "max_completion_length": 5,
                "importance_sampling_level": level, "off_policy_mask_threshold": 0.3,
                "metrics": kind != "sapo", "epsilon_high": 1.2 if kind == "cispo" else None,
            }  # fmt: skip
            yield f"GRPO {kind} {level}", lambda k=kind, g=given: losses.GRPO(k, **g)


CASES = dict(cases())


def draw(op, shape=SHAPE, count=COUNT, dtype=torch.float64, seed=0):
    """Log-probabilities, and the extra inputs of an op by name."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low, high, shape=shape):
        values = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * values).to(dtype)

    x = numbers(-2, -0.1)
    sequences = torch.randint(-1, count, shape, generator=generator) if count else None
    if sequences is None:
        sequences = torch.full(shape, -1)
    elif x.numel() >= count and isinstance(op, losses.ORPO):
        sequences.view(-1)[:count] = torch.arange(count)  # each has a response
    responses = torch.randint(0, 2, shape, generator=generator).bool()
    responses.view(-1)[:count] = True
    known = {
        "sequences": sequences,
        "pairs": torch.arange(count).view(2, -1).t(),
        "responses": responses,
        "desirable": torch.arange(count) % 3 == 0,
        "kl": torch.tensor(0.2, dtype=dtype),
        "num_items": torch.tensor(7.0, dtype=dtype),
        "advantages": numbers(-1, 1, (count,)),
        "importance_ratio": numbers(0.5, 1.5),
        "entropy": numbers(0, 2),
    }
    near = {"reference", "old_log_probs", "sampling_log_probs", "log_sum_squares"}
    known |= {name: (x + numbers(-0.6, 0.6)).clamp(max=-0.01) for name in sorted(near)}
    return x.requires_grad_(), {name: known[name] for name in op.input_names}


def loss_of(op, x, given):
    found = op(x, *given.values())
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    op = CASES[name]()
    x, given = draw(op)
    leaves = [x]
    if "entropy" in given:
        leaves.append(given["entropy"].requires_grad_())

    def function(*leaves):
        return loss_of(op, leaves[0], {**given, **dict(zip(["entropy"], leaves[1:], strict=False))})

    # w of VESPO and of WPO, the clipped ratio of CISPO and the masks are constants by definition
    constant = op.__dict__.get("_weighs") or "cispo" in name or "vespo" in name
    assert constant or torch.autograd.gradcheck(function, leaves)
    found = torch.autograd.grad(function(*leaves), leaves)
    with opfuse.options(double_backward=True):  # then autograd differentiates the forward itself
        expected = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
        torch.testing.assert_close(found, expected)
        assert not expected[0].requires_grad or torch.autograd.grad(
            expected[0].square().sum(), x, allow_unused=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_computed_in_fp32(name, dtype):
    op = CASES[name]()
    x, given = draw(op, dtype=dtype)
    exact = x.detach().double().requires_grad_()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    mine, reference = loss_of(op, x, given), loss_of(op, exact, wide)
    assert mine.dtype is torch.float32
    torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-5)
    (dx,), (expected,) = torch.autograd.grad(mine, x), torch.autograd.grad(reference, exact)
    assert dx.dtype is dtype
    rtol, atol = opfuse.testing.tolerance(dtype)
    torch.testing.assert_close(dx.double(), expected, rtol=rtol, atol=atol)


def test_a_scaled_loss_keeps_gradients_that_fp16_could_not_hold():
    op = losses.GRPO()
    x = torch.full((4096,), -1.0, dtype=torch.float16, requires_grad=True)
    given = torch.zeros(4096, dtype=torch.int64), torch.tensor([1e-5])
    (dx,) = torch.autograd.grad(op(x, *given) * 2.0**24, x)
    torch.testing.assert_close(dx.float(), torch.full((4096,), -1e-5 * 2**12), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (127,), (2, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "ORPO"])
def test_shapes_and_sequences_without_tokens(name, shape):
    op = CASES[name]()
    x, given = draw(op, shape)
    mine = loss_of(op, x, given)
    apart = ("pairs", "advantages", "desirable", "kl", "num_items")
    flat = {n: t if n in apart else t.flatten() for n, t in given.items()}
    expected = loss_of(op, x.flatten(), flat)
    assert mine.shape == () and torch.equal(mine.isnan(), expected.isnan())
    assert "sft" in name or mine.isfinite()
    torch.testing.assert_close(mine, expected, equal_nan=True)
    (dx,) = torch.autograd.grad(mine, x)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x)[0], equal_nan=True)
    assert dx[given["sequences"] < 0].eq(0).all() or "sft" in name


@pytest.mark.parametrize("name", [name for name in CASES if "sft" not in name and name != "ORPO"])
def test_tokens_that_do_not_count_may_be_anything(name):
    op = CASES[name]()
    x, given = draw(op)
    out = given["sequences"] < 0
    assert out.any()
    (expected,) = torch.autograd.grad(loss_of(op, x, given), x)
    spoilt = {n: t for n, t in given.items()}
    for n, tensor in given.items():
        if tensor.is_floating_point() and tensor.shape == x.shape:
            spoilt[n] = tensor.masked_fill(out, float("nan"))
    y = x.detach().masked_fill(out, -torch.inf).requires_grad_()
    mine = loss_of(op, y, spoilt)
    torch.testing.assert_close(mine, loss_of(op, x, given))
    torch.testing.assert_close(torch.autograd.grad(mine, y)[0], expected)


@pytest.mark.parametrize("name", CASES)
def test_no_token_counts(name):
    op = CASES[name]()
    x, given = draw(op)
    given["sequences"] = torch.full_like(given["sequences"], -1)
    mine = loss_of(op, x, given)
    if name == "ORPO" or "sft" in name:
        assert mine.isnan()  # a mean over nothing
    else:
        assert torch.autograd.grad(mine, x)[0].eq(0).all() and mine.isfinite()
    if name.startswith("GRPO"):
        assert mine.item() == 0


@pytest.mark.parametrize("name", CASES)
def test_no_sequence(name):
    op = CASES[name]()
    x, given = draw(op, count=0)
    mine = loss_of(op, x, given)
    assert mine.item() == 0 if name.startswith("GRPO") else mine.isnan()


@pytest.mark.parametrize("name", CASES)
def test_layouts(name):
    op = CASES[name]()
    x, given = draw(op)
    expected = loss_of(op, x, given)
    y = torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_()
    turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in given.items()}
    mine = loss_of(op, y, turned)
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(torch.autograd.grad(mine, y), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(dtype):
    op = losses.GRPO(beta=0.2, given=OLD)
    x, given = draw(op, dtype=dtype)
    expected = loss_of(op, x, given)
    with torch.autocast("cpu", torch.bfloat16):
        mine = loss_of(op, x, given)
    assert mine.dtype is torch.float32 and torch.equal(mine, expected)
    torch.testing.assert_close(torch.autograd.grad(mine, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name):
    op = CASES[name]()
    x, given = draw(op)
    expected = loss_of(op, x, given)
    with torch.no_grad():
        mine = loss_of(op, x, given)
    assert torch.equal(mine, expected) and not mine.requires_grad
    assert torch.equal(loss_of(op, x.detach(), given), expected)


@pytest.mark.parametrize("apart", [1e-3, 8.0, 20.0, 30.0])
def test_the_divergence_of_a_token_far_from_the_reference_loses_no_digits(apart):
    """Its slope is ``-c d``, of which both parts may be as large as ``exp(d)``."""
    op, given = losses.GRPO(beta=1.0), {"sequences": torch.zeros(1).long()}
    given |= {"advantages": torch.zeros(1), "reference": torch.tensor([-1.0])}
    x = torch.tensor([-1.0 - apart], requires_grad=True)
    (grad,) = torch.autograd.grad(loss_of(op, x, given), x)
    torch.testing.assert_close(grad.item(), -(-1.0 - x.item()), rtol=1e-5, atol=0)


def test_metrics_have_no_gradient():
    op = losses.GRPO(beta=0.2, metrics=True)
    x, given = draw(op)
    loss, *numbers = op(x, *given.values())
    assert loss.requires_grad and not any(number.requires_grad for number in numbers)
    assert op.metric_names == ("kl", "clip_low", "clip_high", "clip_region") and op.metrics
    with opfuse.options(double_backward=True):
        assert not any(number.requires_grad for number in op(x, *given.values())[1:])
    assert losses.GRPO().metric_names == () and losses.GRPO().num_extra_outputs == 0


def test_a_metric_that_goes_through_a_channel_brings_no_gradient():
    loss = losses.KTO(metrics=True).set_extra_output_channel(2, "margin")
    chain = opfuse.Sequential(
        ops.TokenLogProb(), loss, ops.AddExtraInput().set_extra_input_channel(0, "margin")
    )
    _, given = draw(loss)
    logits = torch.randn(*SHAPE, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, SHAPE)
    found, *_ = chain(logits, tokens, *given.values())
    alone = opfuse.Sequential(ops.TokenLogProb(), losses.KTO())
    expected = alone(logits, tokens, *given.values())
    torch.testing.assert_close(
        torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_keeps_one_tensor_of_the_tokens(level):
    op = losses.GRPO(beta=0.2, given=OLD, importance_sampling_level=level)
    x, given = draw(op)
    loss = loss_of(op, x, given)
    kept = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    assert [tensor.shape for tensor in kept] == [x.shape]
    assert op.saved_names == ("gradient", "entropy_gradient") and op.differentiable


def test_one_chain_from_hidden_states_with_the_entropy_by_a_channel():
    torch.manual_seed(0)
    loss = losses.GRPO(entropy_coef=0.3, top_entropy_quantile=0.5, beta=0.2)
    loss.set_extra_input_channel(loss.input_names.index("entropy"), "entropy")
    head = ops.Linear(6, 9, dtype=torch.float64)
    log_probs = ops.TokenLogProb(entropy=True)
    log_probs.set_extra_output_channel(0, "entropy", output_to_caller=False)
    chain = opfuse.Sequential(head, log_probs, loss)
    hidden = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 9, (3, 4))
    _, given = draw(loss)
    sequences, advantages, reference = list(given.values())[:3]
    mine = chain(hidden, tokens, sequences, advantages, reference)
    log_p = torch.nn.functional.linear(hidden, head.weight, head.bias).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    x = log_p.gather(-1, tokens[..., None])[..., 0]
    counted = sequences >= 0
    top = counted & (entropy >= entropy[counted].quantile(0.5))
    ratio, d = (x - x.detach()).exp(), reference - x
    of_token = -ratio * advantages[sequences] * top + 0.2 * (d.exp() - d - 1) * ratio
    expected = (of_token * counted).sum() / counted.sum() - 0.3 * entropy[top].mean()
    torch.testing.assert_close(mine, expected)
    leaves = [hidden, *head.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(mine, leaves), torch.autograd.grad(expected, leaves)
    )
    report = opfuse.explain(chain, hidden, tokens, sequences, advantages, reference)
    assert "GRPO" in str(report) and "TokenLogProb" in str(report)


def test_pairs_are_weighted_by_the_rows_of_the_op_before():
    torch.manual_seed(0)
    loss, rows = losses.DPO(beta=0.5, use_weighting=True), ops.TokenLogProb(log_sum_squares=True)
    loss.set_extra_input_channel(loss.input_names.index("log_sum_squares"), "squares")
    rows.set_extra_output_channel(0, "squares", output_to_caller=False)
    logits = torch.randn(*SHAPE, 9, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 9, SHAPE)
    _, given = draw(loss)
    mine = opfuse.Sequential(rows, loss)(logits, tokens, *list(given.values())[:3])
    log_p = logits.log_softmax(-1)
    x, ids = log_p.gather(-1, tokens[..., None])[..., 0], given["sequences"]
    aligned = (x - (2 * log_p).exp().sum(-1).log()).detach()
    counted = [ids == i for i in range(COUNT)]
    weights = torch.stack([(aligned * own).sum() / own.sum().clamp(min=1) for own in counted]).exp()
    r = torch.stack([((x - given["reference"]) * own).sum() for own in counted])
    expected = (-logsigmoid(0.5 * (r[:2] - r[2:])) * weights[:2] * weights[2:]).mean()
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(
        torch.autograd.grad(mine, logits), torch.autograd.grad(expected, logits)
    )


def test_two_models_at_once():
    """The policy and a frozen reference, each a chain, on a padded batch of which only responses count."""
    torch.manual_seed(0)
    policy, frozen = (ops.Linear(6, 9, bias=False, dtype=torch.float64) for _ in "12")
    frozen.requires_grad_(False)
    chain = opfuse.Sequential(policy, ops.TokenLogProb(), losses.DPO(beta=0.5))
    hidden, others = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    hidden.requires_grad_()
    tokens = torch.randint(0, 9, (4, 5))
    tokens[:, :2] = -100
    kept = tokens != -100
    with torch.no_grad():
        reference = opfuse.Sequential(frozen, ops.TokenLogProb())(others, tokens)
    sequences = torch.arange(4)[:, None].where(kept, -1)
    mine = chain(hidden, tokens, sequences, PAIRS, reference)

    def sums(hidden, weight):
        log_p = (hidden @ weight.t()).log_softmax(-1)
        return (log_p.gather(-1, tokens.clamp(min=0)[..., None])[..., 0] * kept).sum(-1)

    ratios = sums(hidden, policy.weight) - sums(others, frozen.weight)
    expected = -logsigmoid(0.5 * (ratios[:2] - ratios[2:])).mean()
    torch.testing.assert_close(mine, expected)
    leaves = [hidden, policy.weight]
    torch.testing.assert_close(
        torch.autograd.grad(mine, leaves), torch.autograd.grad(expected, leaves)
    )
    rows = kept.flatten().nonzero()[:, 0]  # only the rows of responses go through the head
    few = [t.flatten()[rows] for t in (tokens, sequences)]
    again = chain(hidden.flatten(0, 1)[rows], few[0], few[1], PAIRS, reference.flatten()[rows])
    torch.testing.assert_close(again, expected)


def test_a_sequence_of_several_pairs():
    op = losses.DPO(beta=0.5)
    x, given = draw(op)
    given["pairs"] = torch.tensor([[0, 1], [0, 2], [0, 3]])
    ids = given["sequences"]
    ratio = x - given["reference"]
    r = torch.stack([(ratio * (ids == i)).sum() for i in range(4)])
    expected = -logsigmoid(0.5 * (r[0] - r[1:])).mean()
    mine = loss_of(op, x, given)
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(torch.autograd.grad(mine, x), torch.autograd.grad(expected, x))


@pytest.mark.costly(3)
@pytest.mark.parametrize(
    "name", ["DPO sigmoid", "DPO aot", "KTO", "ORPO", "CPO hinge", "GRPO dapo token"]
)
def test_compiled_it_matches_eager(name):
    torch._dynamo.reset()
    op = CASES[name]()
    x, given = draw(op)
    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        found = function(x, *given.values())
        found = list(found) if isinstance(found, tuple) else [found]
        results.append([*found, *torch.autograd.grad(found[0], x)])
    torch.testing.assert_close(*results)


def test_a_size_that_the_compiler_does_not_know_is_compared():
    """Of one input and not of another, as after calls of other shapes."""
    torch._dynamo.reset()
    op = losses.GRPO(given=OLD)
    x, given = draw(op)
    torch._dynamo.maybe_mark_dynamic(given["old_log_probs"], [0, 1])
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, *given.values()), loss_of(op, x, given))


def test_numbers_may_change():
    op = losses.GRPO(epsilon=0.1, given=OLD, beta=0.3)
    x, given = draw(op)
    before = loss_of(op, x, given)
    op.epsilon, op.beta = 0.4, 0.0
    expected = losses.GRPO(epsilon=0.4, given=OLD)
    less = {name: given[name] for name in expected.input_names}
    torch.testing.assert_close(loss_of(op, x, given), loss_of(expected, x, less))
    assert before != loss_of(op, x, given)
    with pytest.raises(AttributeError):
        op.loss_type = "grpo"


REFUSED = [
    (lambda: losses.DPO("ppo"), ValueError, "DPO expected loss_type to be one of sigmoid, "),
    (lambda: losses.DPO([]), ValueError, "expected at least one loss_type, got none"),
    (lambda: losses.DPO(beta=0.0), ValueError, "DPO expected beta in (0, inf), got 0.0"),
    (lambda: losses.DPO(beta="1"), TypeError, "expected a real number as beta, got '1'"),
    (lambda: losses.DPO(ld_alpha=1.5), ValueError, "expected ld_alpha in [0, 1], got 1.5"),
    (lambda: losses.DPO("exo_pair"), ValueError, "label_smoothing in (0, 1) for exo_pair, got 0.0"),
    (
        lambda: losses.DPO("robust", label_smoothing=0.5),
        ValueError,
        "label_smoothing below 0.5 for robust, got 0.5",
    ),
    (
        lambda: losses.DPO("bco_pair", f_divergence_type="forward_kl"),
        ValueError,
        "expected a loss_type of the margin for forward_kl, got bco_pair",
    ),
    (
        lambda: losses.DPO("aot", use_weighting=True),
        ValueError,
        "expected a loss_type that keeps pairs for use_weighting, got aot",
    ),
    (
        lambda: losses.DPO(["sft", "ipo"], loss_weights=[1.0]),
        ValueError,
        "expected 2 loss_weights, one for each loss_type, got 1",
    ),
    (lambda: losses.DPO(f_divergence_type="tv"), ValueError, "f_divergence_type to be one of"),
    (lambda: losses.DPO(metrics=1), TypeError, "expected a bool as metrics, got 1"),
    (lambda: losses.KTO("dpo"), ValueError, "KTO expected loss_type to be one of kto, apo_zero_"),
    (lambda: losses.KTO(desirable_weight=-1), ValueError, "desirable_weight in [0, inf), got -1.0"),
    (lambda: losses.ORPO(beta=-1), ValueError, "ORPO expected beta in [0, inf), got -1.0"),
    (
        lambda: losses.CPO("aot"),
        ValueError,
        "CPO expected loss_type to be one of sigmoid, hinge, ipo",
    ),
    (lambda: losses.CPO(beta=0), ValueError, "CPO expected beta in (0, inf), got 0.0"),
    (lambda: losses.CPO(cpo_alpha=-1), ValueError, "CPO expected cpo_alpha in [0, inf), got -1.0"),
    (lambda: losses.GRPO("ppo"), ValueError, "GRPO expected loss_type to be one of grpo, bnpo, "),
    (lambda: losses.GRPO(given=["ref"]), ValueError, "given to be one of old_log_probs, "),
    (lambda: losses.GRPO(given="num_items"), ValueError, "expected given to be one of"),
    (
        lambda: losses.GRPO(importance_sampling_level="batch"),
        ValueError,
        "importance_sampling_level to be one of token, sequence, got 'batch'",
    ),
    (lambda: losses.GRPO("dr_grpo"), ValueError, "a max_completion_length for dr_grpo, got None"),
    (lambda: losses.GRPO(delta=0), ValueError, "expected delta in (0, inf), got 0.0"),
    (lambda: losses.GRPO(epsilon=None), TypeError, "expected a real number as epsilon"),
    (
        lambda: losses.GRPO(epsilon=float("nan")),
        ValueError,
        "expected epsilon in [0, inf), got nan",
    ),
    (lambda: losses.GRPO(top_entropy_quantile=2), ValueError, "top_entropy_quantile in [0, 1]"),
    (lambda: losses.GRPO(vespo_lambda_neg=0), ValueError, "vespo_lambda_neg in [0.0001, inf)"),
    (
        lambda: setattr(losses.GRPO(), "beta", 0.1),
        ValueError,
        "expected beta to stay 0.0, as there is no extra input for it, got 0.1",
    ),
    (
        lambda: setattr(losses.GRPO(), "entropy_coef", 0.1),
        ValueError,
        "expected entropy_coef to stay 0.0, as there is no extra input for it, got 0.1",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_numbers_that_are_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


BAD = [
    ("DPO sigmoid", {"pairs": torch.zeros(2, 3).long()}, "pairs of shape (*, 2), got (2, 3)"),
    (
        "DPO sigmoid",
        {"sequences": torch.zeros(12).long()},
        "sequences of shape (3, 4) for log-prob",
    ),
    ("DPO sigmoid", {"reference": torch.zeros(4)}, "reference of shape (3, 4) for log-prob"),
    ("KTO", {"desirable": torch.ones(2, 2).bool()}, "desirable of shape (*), got (2, 2)"),
    ("KTO", {"kl": torch.ones(1)}, "kl of shape (), got (1,)"),
    ("GRPO dapo token", {"advantages": torch.ones(3, 4)}, "advantages of shape (*), got (3, 4)"),
    (
        "KTO",
        {"reference": torch.zeros(SHAPE, requires_grad=True)},
        "reference that requires no grad, since it gets none: compute it under torch.no_grad()",
    ),
]


@pytest.mark.parametrize(("name", "wrong", "message"), BAD, ids=[each[2] for each in BAD])
def test_inputs_that_are_refused(name, wrong, message):
    op = CASES[name]()
    x, given = draw(op)
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_of(op, x, {**given, **wrong})


def test_inputs_of_another_kind_or_number_are_refused():
    op = losses.KTO()
    x, given = draw(op)
    with pytest.raises(TypeError, match="expected a bool tensor, got torch.int64"):
        loss_of(op, x, {**given, "desirable": given["desirable"].long()})
    with pytest.raises(ValueError, match="expected 4 extra inputs, got 2"):
        op(x, *list(given.values())[:2])


@pytest.mark.parametrize("name", ["DPO sigmoid", "KTO", "ORPO", "CPO hinge", "GRPO dapo token"])
def test_a_number_of_a_sequence_out_of_range_is_refused(name):
    op = CASES[name]()
    x, given = draw(op)
    given["sequences"] = given["sequences"].clone()
    given["sequences"][0, 0] = COUNT
    with pytest.raises((IndexError, RuntimeError), match="(?i)index .*out of|out of range"):
        loss_of(op, x, given)
    if "pairs" in given:
        x, given = draw(op)
        given["pairs"] = given["pairs"] - 1
        with pytest.raises((IndexError, RuntimeError), match="(?i)index .*out of|out of range"):
            loss_of(op, x, given)


def test_the_plugin_loads_without_them():
    code = (
        "import sys, opfuse; before = set(sys.modules); import opfuse_loss; "
        "assert set(sys.modules) - before == {'opfuse_loss'}; "
        "from opfuse_loss import losses; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
