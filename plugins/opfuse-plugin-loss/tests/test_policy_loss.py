"""A linear, log-probabilities and a loss of rewards as one op: values, gradients, what is kept."""

import copy

import pytest
import torch
from opfuse_loss import chunks
from opfuse_loss.losses import GRPO

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.testing.machine import is_interpreting

if is_interpreting():
    pytest.skip("PyTorch's operations are tested here", allow_module_level=True)

NAME, WIDTH, CLASSES = "linear+log-probability+loss", 12, 50
KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
OLD = ("old_log_probs",)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(chunks, "LEAST_ROWS", 4)
    monkeypatch.setattr(chunks, "LOGITS", 4 * CLASSES)


def made(loss, *, bias=True, dtype=torch.float64, frozen=False, **options):
    """A chain with one batch, which has padding, and prompts that do not count."""
    linear = ops.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    linear.requires_grad_(not frozen)
    chain = opfuse.Sequential(linear, ops.TokenLogProb(**options), loss)
    shape = 4, 9
    x, tokens = torch.randn(*shape, WIDTH, dtype=dtype), torch.randint(0, CLASSES, shape)
    sequences = torch.arange(4)[:, None].expand(shape).clone()
    sequences[1:3, :3], tokens[0, -2:] = -1, -100
    given = {"sequences": sequences, "advantages": torch.tensor([1.0, -0.5, 0.3, -2.0])}
    for name in loss.input_names:
        given.setdefault(name, torch.rand(shape, dtype=torch.float64) - 4.5)
    if "importance_ratio" in given:
        given["importance_ratio"] += 5
    if "num_items" in given:
        given["num_items"] = torch.tensor(23.0)
    return chain, (x.requires_grad_(), tokens, *[given[name] for name in loss.input_names])


def step(chain, given, plugins="loss", fused=True, factor=1.7, name=NAME):
    """All outputs, and the gradients of all that needs one."""
    leaves = [given[0], *[param for param in chain.parameters() if param.requires_grad]]
    with opfuse.plugins.using(plugins):
        if plugins:
            steps = opfuse.explain(chain, *given).to_dict()["forward"]
            assert ([each["fusion"] for each in steps] == [name]) == fused
        y = chain(*given)
        y = y if isinstance(y, tuple) else (y,)
        return [*y, *torch.autograd.grad(y[0] * factor, leaves)]


def compare(chain, given, **near):
    torch.testing.assert_close(step(chain, given), step(chain, given, ""), **near)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_tokens(kind, frozen):
    """Gradients against those of the separate ops in fp64, which are tested against TRL's."""
    high = 1.2 if kind == "cispo" else None
    for bias, more in ((True, {}), (False, {"temperature": 0.7, "softcap": 3.0})):
        for loss in (
            GRPO(kind, epsilon_high=high, max_completion_length=9),
            GRPO(
                kind, beta=0.3, delta=1.5, epsilon_high=high, max_completion_length=9, metrics=True,
                given=(*OLD, "importance_ratio", "num_items"),
            ),
        ):  # fmt: skip
            compare(*made(loss, bias=bias, frozen=frozen, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    chain, given = made(GRPO(beta=0.1, given=OLD), dtype=dtype)
    near = dict.fromkeys(("rtol", "atol"), 2e-2 if dtype is torch.bfloat16 else 1e-5)
    got = step(chain, given)
    assert [t.dtype for t in got] == [torch.float32, *[dtype] * 3]
    exact = copy.deepcopy(chain).double()
    wide = given[0].detach().double().requires_grad_(), *given[1:]
    want = step(exact, wide, "")
    for mine, truth in zip(got, want, strict=True):
        largest = truth.detach().abs().max().item()
        torch.testing.assert_close(mine.double() / largest, truth.double() / largest, **near)


def test_autocast():
    chain, given = made(GRPO(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = step(chain, given), step(chain, given, "")
    assert [t.dtype for t in got] == [t.dtype for t in want]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def test_what_is_trained():
    for names in (["weight"], ["bias"], []):
        chain, given = made(GRPO())
        for name, param in chain[0].named_parameters():
            param.requires_grad_(name in names)
        compare(chain, given)
    chain, given = made(GRPO())
    given[0].requires_grad_(False)
    results = []
    for plugins in ("", "loss"):
        with opfuse.plugins.using(plugins):
            results.append(torch.autograd.grad(chain(*given), [*chain.parameters()]))
    torch.testing.assert_close(*results)


def test_without_a_gradient_it_gives_the_loss():
    chain, given = made(GRPO(importance_sampling_level="sequence", metrics=True))
    results = []
    for plugins in ("", "loss"):
        with opfuse.plugins.using(plugins), torch.no_grad():
            results.append(chain(*given))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"importance_sampling_level": "sequence"}, "its ratios are of whole sequences"),
        ({"loss_type": "vespo"}, "its weights are of whole sequences"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold masks whole sequences"),
    ],
)
def test_losses_of_sequences_are_left(options, why):
    chain, given = made(GRPO(**options))
    with opfuse.plugins.using("loss"):
        assert why in " ".join(str(opfuse.explain(chain, *given).details).split())
    torch.testing.assert_close(step(chain, given, fused=False), step(chain, given, ""))


def test_numbers_that_change_after_planning_are_heard():
    chain, given = made(GRPO(given=OLD))
    step(chain, given)
    chain[-1].epsilon = 0.05
    compare(chain, given)
    chain[-1].off_policy_mask_threshold = -0.5
    with opfuse.plugins.using("loss"):
        leaves = [given[0], *chain.parameters()]
        got = torch.autograd.grad(chain(*given), leaves)
    with opfuse.plugins.using(""):
        torch.testing.assert_close(got, torch.autograd.grad(chain(*given), leaves))


def test_it_keeps_gradients_and_no_logits():
    """As linear+loss: the gradients of the input, the weight and the bias."""
    chain, given = made(GRPO(), dtype=torch.float32)
    with opfuse.plugins.using("loss"):
        kept = saved_bytes(lambda: chain(*given))
    assert kept == 4 * (given[0].numel() + sum(param.numel() for param in chain.parameters()))


def test_fp16_is_left_where_it_has_a_backward():
    chain, given = made(GRPO(), dtype=torch.float16)
    with opfuse.plugins.using("loss"):
        assert "too small for fp16" in " ".join(str(opfuse.explain(chain, *given).details).split())


@pytest.mark.parametrize("adapter_alone", [False, True])
def test_a_linear_with_an_adapter(adapter_alone):
    _, given = made(GRPO(given=OLD, metrics=True))
    linear = ops.LowRankLinear(WIDTH, CLASSES, 3, scaling=1.7, dtype=torch.float64)
    torch.nn.init.normal_(linear.lora_b)
    linear.weight.requires_grad_(not adapter_alone)
    for bias in ([], [ops.Bias(CLASSES, dtype=torch.float64)]):
        loss = GRPO(given=OLD, metrics=True)
        chain = opfuse.Sequential(linear, *bias, ops.TokenLogProb(), loss)
        results = step(chain, given, name=f"{NAME}, low rank"), step(chain, given, "")
        torch.testing.assert_close(*results)
    few = given[0][:1, :WIDTH], *[each[:1] for each in given[1:]]  # an adapter's gradient is small
    step(chain, few, fused=adapter_alone, name=f"{NAME}, low rank")


def test_a_bad_token_and_an_input_that_requires_grad_are_refused():
    chain, given = made(GRPO(given=OLD))
    with opfuse.plugins.using("loss"):
        with pytest.raises(IndexError, match="out of bounds"):
            chain(given[0], given[1].clone().fill_(CLASSES), *given[2:])
        old = given[-1].clone().requires_grad_()
        with pytest.raises(ValueError, match="old_log_probs that requires no grad"):
            chain(*given[:-1], old)
