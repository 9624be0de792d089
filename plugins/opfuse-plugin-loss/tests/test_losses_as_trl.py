"""Each loss and each variant that TRL's configurations name, against TRL's own code in fp64.

Its methods run unbound, on stand-ins for the trainer and for the models: no training, no download.
TRL adds up in the dtype of the log-probabilities, but casts to fp32 in places: here ``float`` gives fp64.
"""

import collections
import dataclasses
import os
import re
import types
import warnings

import pytest
import torch
from opfuse_loss import losses

import opfuse
from opfuse import ops
from opfuse.testing.machine import is_interpreting

if is_interpreting():
    pytest.skip("they launch no kernel", allow_module_level=True)

REASON = "the losses are compared with those of trl"
with warnings.catch_warnings():  # of the libraries among themselves
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl", reason=REASON)
    from trl.experimental.cpo import cpo_trainer
    from trl.experimental.orpo import orpo_trainer
    from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer

PAIRS, LENGTH, CLASSES = 3, 6, 5


@pytest.fixture(autouse=True)
def everything_in_fp64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    with opfuse.plugins.using(""):
        yield
    torch.set_default_dtype(torch.float32)


class Batch:
    """Sequences of different lengths behind prompts, as one padded tensor; one is empty."""

    def __init__(self, count=2 * PAIRS, lengths=(6, 3, 1, 4, 5, 2), seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.mask = torch.arange(LENGTH) < torch.tensor(lengths[:count])[:, None]
        self.sequences = torch.arange(count)[:, None].where(self.mask, -1)
        self.pairs = torch.arange(count).view(2, -1).t()

        def draw(low, high, *shape):
            return low + (high - low) * torch.rand(shape, generator=generator)

        self.x = (draw(-3, -0.1, count, LENGTH) * self.mask).requires_grad_()
        self.reference, self.old = (
            (self.x.detach() + draw(-0.6, 0.6, count, LENGTH)) * self.mask for _ in "12"
        )
        self.sampling = (self.old + draw(-0.3, 0.3, count, LENGTH)) * self.mask
        self.entropy = draw(0, 2, count, LENGTH).requires_grad_()
        self.log_sum_squares = draw(-3, 0, count, LENGTH)
        self.ratio = draw(0.5, 1.5, count, LENGTH).where(self.mask, 1.0)
        self.advantages = draw(-1, 1, count)
        self.advantages[0] = 0.0


def stub(**given):
    """A trainer of one process."""
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **_: x,
    )
    return types.SimpleNamespace(
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **given,
    )


class Model(torch.nn.Module):
    """Gives what TRL's own head gives."""

    is_gradient_checkpointing = False

    def __init__(self, batch, log_probs):
        super().__init__()
        self.batch, self.log_probs = batch, log_probs

    def forward(self, **unused):
        batch = self.batch
        return types.SimpleNamespace(
            log_probs=self.log_probs * batch.mask,
            entropy=batch.entropy,
            mean_logits=torch.zeros_like(self.log_probs),
            is_top1=batch.mask,
            log_sum_sq_probs=batch.log_sum_squares,
        )


def with_prompt(batch):
    """As TRL has sequences: the token before the first of the response belongs to the prompt."""
    mask = torch.cat([torch.zeros(len(batch.mask), 1, dtype=torch.bool), batch.mask], 1)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return {"completion_mask": mask.long(), "input_ids": ids, "attention_mask": mask.long()}


def compare(theirs, op, batch, *extras, leaves=("x",), tolerance=1e-12):
    """The loss and its gradients; the same batch packed, in another order, gives the same too."""
    leaves, close = (
        [getattr(batch, name) for name in leaves],
        {"rtol": tolerance, "atol": tolerance},
    )
    expected = torch.autograd.grad(theirs, leaves)
    order = torch.randperm(batch.x.numel(), generator=torch.Generator().manual_seed(1))
    rows = order if getattr(op, "ld_alpha", None) is None else order.sort().values
    rows = rows[batch.mask.flatten()[rows]]
    padded = batch.x, *extras
    packed = [t.flatten()[rows] if t.shape == batch.x.shape else t for t in padded]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # which must not matter
    try:
        for chain, given in ((opfuse.Sequential(op), padded), (op, packed)):
            found = chain(*given)
            mine, *numbers = found if isinstance(found, tuple) else [found]
            assert mine.shape == () and not any(number.requires_grad for number in numbers)
            torch.testing.assert_close(mine, theirs, **close)
            torch.testing.assert_close(torch.autograd.grad(mine, leaves), expected, **close)
    finally:
        torch.set_default_dtype(default)
    return dict(zip(op.metric_names, numbers, strict=True))


def check_metrics(numbers, logged, names):
    for mine, theirs in names.items():
        assert numbers[mine].item() == pytest.approx(logged[theirs][-1], rel=1e-12, abs=1e-12), mine


def helps(config):
    """What a configuration of TRL says of its fields."""
    return {each.name: each.metadata.get("help", "") for each in dataclasses.fields(config)}


# DPO

REWARDS = {
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
    "chosen_log_prob": "logps/chosen",
    "rejected_log_prob": "logps/rejected",
}
OF_MARGIN = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]
LOSS_TYPES = [
    *OF_MARGIN, "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
]  # fmt: skip


def dpo(batch, given):
    options = {
        "beta": 0.1, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5, "ld_alpha": None, "use_weighting": False, **given,
    }  # fmt: skip
    types_ = options.pop("loss_type")
    weights = options.pop("loss_weights", None)
    tau = options.pop("discopop_tau", 0.05)
    self = stub(
        model=Model(batch, batch.x),
        ref_model=Model(batch, batch.reference),
        loss_types=types_,
        loss_weights=weights or [1.0] * len(types_),
        precompute_ref_logps=False,
        args=types.SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=tau),
        **options,
    )
    loss = dpo_trainer.DPOTrainer._compute_loss(self, self.model, with_prompt(batch), False)
    return loss, self._metrics["train"]


def compare_dpo(given, batch=None, **how):
    batch = batch or Batch()
    theirs, logged = dpo(batch, given)
    op = losses.DPO(**given, metrics=True)
    extras = [batch.log_sum_squares] if op.use_weighting else []
    numbers = compare(
        theirs, op, batch, batch.sequences, batch.pairs, batch.reference, *extras, **how
    )
    if not how:
        check_metrics(numbers, logged, REWARDS)


def test_it_has_every_variant_of_theirs():
    of_dpo = helps(trl.DPOConfig)
    words = of_dpo["loss_type"].partition("If multiple")[0]
    assert set(re.findall(r"`'(\w+)'`", words)) == set(LOSS_TYPES)
    words = of_dpo["f_divergence_type"].partition("Only the loss types")[0]
    assert set(re.findall(r"`(\w+)`", words)) == {"reverse_kl", *DIVERGENCES}
    fields = {each.name: each for each in dataclasses.fields(trl.KTOConfig)}
    assert set(fields["loss_type"].metadata["choices"]) == {"kto", "apo_zero_unpaired"}
    words = helps(trl.GRPOConfig)["loss_type"].partition(". 'grpo'")[0]
    assert set(re.findall(r"'(\w+)'", words)) == set(GRPO_TYPES)


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_dpo(kind, beta):
    smoothing = 0.2 if kind in ("exo_pair", "robust", "aot", "aot_unpaired") else 0.0
    compare_dpo({"loss_type": [kind], "beta": beta, "label_smoothing": smoothing})


DIVERGENCES = ["forward_kl", "js_divergence", "alpha_divergence"]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", OF_MARGIN)
def test_dpo_with_another_divergence(kind, divergence, monkeypatch):
    given = {"loss_type": [kind], "f_divergence_type": divergence, "beta": 0.7}
    given |= {"label_smoothing": 0.2} if kind in ("exo_pair", "robust") else {}
    if divergence != "alpha_divergence":
        return compare_dpo(given)
    # TRL knows no limit for the exponents in fp64
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(torch.float32))
    torch.set_default_dtype(torch.float32)
    compare_dpo(given, tolerance=1e-5)
    compare_dpo({**given, "f_alpha_divergence_coef": 1.0}, tolerance=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_dpo_with_less_weight_of_the_longer_part(kind, alpha):
    compare_dpo({"loss_type": [kind], "ld_alpha": alpha, "label_smoothing": 0.1})


IN_PLACE = ["hinge", "sft"]  # TRL's weights overwrite what their backward needs
APART = ["aot", "aot_unpaired", *IN_PLACE]


@pytest.mark.parametrize("kind", [kind for kind in LOSS_TYPES if kind not in APART])
def test_dpo_with_weighted_pairs(kind):
    compare_dpo({"loss_type": [kind], "use_weighting": True, "label_smoothing": 0.1})


@pytest.mark.parametrize("kind", IN_PLACE)
def test_dpo_with_weighted_pairs_that_theirs_cannot(kind, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__imul__", torch.Tensor.__mul__)
    compare_dpo({"loss_type": [kind], "use_weighting": True})


def test_dpo_of_several_losses():
    given = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    compare_dpo(given)
    compare_dpo({**given, "ld_alpha": 0.5, "loss_weights": None})
    weighted = {"loss_type": given["loss_type"][:2], "use_weighting": True, "ld_alpha": 0.5}
    compare_dpo(weighted)
    compare_dpo({"loss_type": ["discopop"], "discopop_tau": 0.3})


def test_dpo_with_an_empty_sequence():
    for kind in LOSS_TYPES:
        smoothing = 0.1 if kind in ("exo_pair", "robust") else 0.0
        batch = Batch(lengths=(6, 0, 1, 0, 5, 2))
        compare_dpo({"loss_type": [kind], "label_smoothing": smoothing}, batch)


# KTO


@pytest.mark.parametrize("kinds", [[1, 0, 1, 1, 0, 0], [1] * 6, [0] * 6], ids=str)
@pytest.mark.parametrize("kl", [0.4, -0.4])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind, kl, kinds):
    batch, given = Batch(), {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    model, reference = Model(batch, batch.x), Model(batch, batch.reference)
    self = stub(
        model=model,
        ref_model=reference,
        precompute_ref_logps=False,
        calculate_KL=kind == "kto",
        loss_type=kind,
        args=types.SimpleNamespace(gradient_checkpointing_kwargs=None),
        _compute_kl_logps=lambda which, _: torch.full((6,), kl if which is model else 0.0),
        **given,
    )
    desirable = torch.tensor(kinds).bool()
    inputs = {**with_prompt(batch), "label": desirable}
    theirs = kto_trainer.KTOTrainer._compute_loss(self, model, inputs, False)
    op = losses.KTO(kind, **given, metrics=True)
    extras = [torch.tensor(kl)] if kind == "kto" else []
    numbers = compare(theirs, op, batch, batch.sequences, desirable, batch.reference, *extras)
    logged = self._metrics["train"]
    names = {mine: theirs for mine, theirs in REWARDS.items() if theirs in logged}
    assert len(names) == (5 if 0 < sum(kinds) < 6 else 2)
    check_metrics(numbers, logged, names)


# ORPO


def of_pairs():
    """Logits, a batch of pairs with prompts, and its two sides one above the other."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for side, lengths in {"chosen": (7, 4, 5), "rejected": (6, 7, 3)}.items():
        ids = torch.randint(0, CLASSES, (PAIRS, 7), generator=generator)
        inside = torch.arange(7) < torch.tensor(lengths)[:, None]
        batch[f"{side}_input_ids"] = ids.where(inside, 0)
        batch[f"{side}_attention_mask"] = inside.long()
        batch[f"{side}_labels"] = ids.where(inside & (torch.arange(7) >= 2), -100)
    logits = torch.randn(2 * PAIRS, 7, CLASSES, generator=generator).requires_grad_()
    both = {
        name: torch.cat([batch[f"chosen_{name}"], batch[f"rejected_{name}"]])[:, 1:]
        for name in ("input_ids", "attention_mask", "labels")
    }
    return logits, batch, both


def of_trainer(cls, logits, batch, methods, **given):
    """What the methods of a trainer make of logits: the loss, and what is logged."""
    self = stub(**given, is_encoder_decoder=False, padding_value=0, pad_token_id=0)
    for name in ("concatenated_forward", *methods):
        setattr(self, name, types.MethodType(getattr(cls, name), self))
    self.concatenated_inputs, self.get_batch_logps = cls.concatenated_inputs, cls.get_batch_logps
    result = types.SimpleNamespace(logits=logits)
    return cls.get_batch_loss_metrics(self, lambda *_, **__: result, batch)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo(beta):
    logits, batch, both = of_pairs()
    trainer = orpo_trainer.ORPOTrainer
    theirs, logged = of_trainer(trainer, logits, batch, ["odds_ratio_loss"], beta=beta)
    op = losses.ORPO(beta=beta, metrics=True)
    sequences = torch.arange(2 * PAIRS)[:, None].where(both["attention_mask"].bool(), -1)
    pairs = torch.arange(2 * PAIRS).view(2, -1).t()
    chain = opfuse.Sequential(ops.TokenLogProb(), op)
    responses = both["labels"] != -100
    mine, *numbers = chain(logits[:, :-1], both["input_ids"], sequences, pairs, responses)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(mine, logits), torch.autograd.grad(theirs, logits)
    )
    names = {
        **REWARDS, "nll": "nll_loss", "log_odds_ratio": "log_odds_ratio",
        "log_odds_margin": "log_odds_chosen",
    }  # fmt: skip
    for name, number in zip(op.metric_names, numbers, strict=True):
        assert number.item() == pytest.approx(logged[names[name]], rel=1e-12)


# CPO and SimPO


@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("cpo_alpha", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo(kind, cpo_alpha, alpha):
    logits, batch, both = of_pairs()
    given = {"beta": 0.6, "label_smoothing": 0.1, "simpo_gamma": 0.3, "cpo_alpha": cpo_alpha}
    given |= {"alpha": alpha, "loss_type": kind}
    theirs, logged = of_trainer(cpo_trainer.CPOTrainer, logits, batch, ["cpo_loss"], **given)
    responses = both["labels"] != -100
    sequences = torch.arange(2 * PAIRS)[:, None].where(responses, -1)
    pairs = torch.arange(2 * PAIRS).view(2, -1).t()
    chain = opfuse.Sequential(ops.TokenLogProb(), losses.CPO(**given, metrics=True))
    mine, *numbers = chain(logits[:, :-1], both["input_ids"], sequences, pairs)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(mine, logits), torch.autograd.grad(theirs, logits)
    )
    names = {**REWARDS, "nll": "nll_loss"}
    for name, number in zip(chain[1].metric_names, numbers, strict=True):
        if name != "nll" or cpo_alpha:
            assert number.item() == pytest.approx(logged[names[name]], rel=1e-12)


# GRPO

GRPO_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
CLIPPED = {
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_region": "clip_ratio/region_mean",
}
VARIANTS = {
    "plain": {},
    "on policy": {"given": ()},
    "reference": {"beta": 0.3},
    "reference as in the paper": {"beta": 0.3, "use_bias_correction_kl": False},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.3},
    "two sides": {"delta": 1.35, "epsilon_high": 0.2},
    "a low cap": {"delta": 1.1, "epsilon_high": 0.3},
    "off policy": {"off_policy_mask_threshold": 0.02},
    "drawn elsewhere": {
        "off_policy_mask_threshold": 0.02,
        "given": ("old_log_probs", "sampling_log_probs", "importance_ratio"),
        "beta": 0.1,
    },
    "some tokens": {"top_entropy_quantile": 0.4, "beta": 0.1},
    "one token": {"top_entropy_quantile": 0.0},
    "entropy": {"entropy_coef": 0.3},
    "entropy of some": {"entropy_coef": 0.3, "top_entropy_quantile": 0.4},
    "temperatures": {
        "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.5, "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 1.0, "vespo_k_neg": 0.5, "vespo_lambda_neg": 0.3,
    },
    "all": {
        "given": ("num_items", "importance_ratio", "sampling_log_probs", "old_log_probs"),
        "beta": 0.2, "delta": 1.4, "off_policy_mask_threshold": 0.05, "entropy_coef": 0.1,
        "top_entropy_quantile": 0.5, "epsilon_high": 0.28,
    },
}  # fmt: skip
DEFAULTS = {each.name: each.default for each in dataclasses.fields(trl.GRPOConfig)}


def grpo(batch, kind, level, options):
    value = {**DEFAULTS, **options}
    cls, given = grpo_trainer.GRPOTrainer, options["given"]
    items = torch.tensor(17.0) if "num_items" in given else batch.mask.sum()
    inputs = {
        "prompt_ids": torch.zeros(len(batch.x), 1).long(),
        "prompt_mask": torch.ones(len(batch.x), 1).long(),
        "completion_ids": torch.zeros(batch.x.shape).long(),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "num_items_in_batch": items,
        "ref_per_token_logps": batch.reference,
    }
    inputs |= {"old_per_token_logps": batch.old} if "old_log_probs" in given else {}
    inputs |= {"sampling_per_token_logps": batch.sampling} if "sampling_log_probs" in given else {}
    inputs |= {"importance_sampling_ratio": batch.ratio} if "importance_ratio" in given else {}
    high = value["epsilon_high"]
    self = stub(
        model=Model(batch, batch.x),
        args=types.SimpleNamespace(**{**value, "steps_per_generation": 1}),
        loss_type=kind,
        importance_sampling_level=level,
        epsilon_low=value["epsilon"],
        epsilon_high=value["epsilon"] if high is None else high,
        max_completion_length=9,
        use_vllm="importance_ratio" in given,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(value["entropy_coef"]),
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.x, batch.entropy, None),
        vllm_importance_sampling_correction=True,
        **{
            name: value[name]
            for name in (
                "beta", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef",
            )
        },
    )  # fmt: skip
    self.get_high_entropy_mask = types.MethodType(cls.get_high_entropy_mask, self)
    self.get_off_policy_mask, self.get_gamma_weights = (
        cls.get_off_policy_mask,
        cls.get_gamma_weights,
    )
    return cls._compute_loss(self, self.model, inputs), self._metrics["train"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", GRPO_TYPES)
def test_grpo(kind, level, name):
    batch, options = Batch(), {"given": ("old_log_probs",), **VARIANTS[name]}
    if kind == "cispo" and options.get("epsilon_high") is None:
        options["epsilon_high"] = 1.2
    theirs, logged = grpo(batch, kind, level, options)
    op = losses.GRPO(
        kind, importance_sampling_level=level, max_completion_length=9, metrics=True, **options
    )
    known = {
        "sequences": batch.sequences,
        "advantages": batch.advantages,
        "reference": batch.reference,
        "old_log_probs": batch.old,
        "sampling_log_probs": batch.sampling,
        "importance_ratio": batch.ratio,
        "num_items": torch.tensor(17.0),
        "entropy": batch.entropy if op.entropy_coef else batch.entropy.detach(),
    }
    leaves = ["x", "entropy"] if op.entropy_coef else ["x"]
    extras = [known[each] for each in op.input_names]
    numbers = compare(theirs, op, batch, *extras, leaves=leaves)
    names = {"kl": "kl", "entropy": "entropy"} if "entropy" in numbers else {"kl": "kl"}
    names = {mine: theirs for mine, theirs in names.items() if mine in numbers}
    if kind == "cispo":
        names["clip_high"] = "cispo_clip_ratio"
    elif kind == "vespo":
        names["weight"] = "vespo/phi_seq_mean"
    elif kind != "sapo":
        names |= CLIPPED
    assert set(names) == set(numbers)
    check_metrics(numbers, logged, names)


@pytest.mark.parametrize("kind", GRPO_TYPES)
def test_grpo_with_empty_sequences(kind):
    batch, options = Batch(lengths=(6, 0, 1, 0, 5, 2)), {"given": ("old_log_probs",), "beta": 0.1}
    theirs, _ = grpo(batch, kind, "token", {**options, "epsilon_high": 1.5})
    op = losses.GRPO(kind, max_completion_length=9, epsilon_high=1.5, **options)
    compare(theirs, op, batch, batch.sequences, batch.advantages, batch.reference, batch.old)


def test_defaults_are_theirs():
    import inspect

    for cls, config in ((losses.DPO, trl.DPOConfig), (losses.KTO, trl.KTOConfig)):
        theirs = {each.name: each.default for each in dataclasses.fields(config)}
        for name, mine in inspect.signature(cls).parameters.items():
            if name not in ("metrics", "loss_type"):
                assert mine.default == theirs[name], name
    for name, mine in inspect.signature(losses.GRPO).parameters.items():
        if name not in ("metrics", "given"):
            assert name == "max_completion_length" or mine.default == DEFAULTS[name], name
