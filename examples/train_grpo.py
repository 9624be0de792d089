"""Train a tiny Llama by rewards, with GRPO: with chains of opfuse, and in eager PyTorch.

The model has random weights and the reward is a rule, so nothing is downloaded::

    pip install opfuse opfuse-plugin-loss transformers
    python examples/train_grpo.py

Each step draws a group of responses to each prompt, rates them, and takes a few updates. The chain
goes from hidden states to the loss and never holds the logits of all tokens, if a plugin fuses it.
In fp64 both runs give the same curve.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import torch
    import transformers
    from opfuse_loss import losses
except ModuleNotFoundError as error:
    sys.exit(f"This example needs {error.name}: pip install transformers opfuse-plugin-loss")

import opfuse
from opfuse.ops import BasicLinear, TokenLogProb

WORDS, END = 32, 0
PROMPTS, GROUP, PROMPT, LENGTH = 4, 8, 4, 12
BETA, EPSILON, UPDATES = 0.02, 0.2, 2


class Batch(NamedTuple):
    """Responses to rate and to learn from.

    Attributes:
        ids: ``(responses, PROMPT + LENGTH)``, each prompt with a response.
        kept: ``(responses, LENGTH)``, True up to the end of a response.
        advantages: ``(responses,)``, how much better than its group each response is.
        old, reference: ``(responses, LENGTH)``, log-probabilities of both models before the update.
    """

    ids: torch.Tensor
    kept: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of the responses."""
        return self.ids[:, PROMPT:]


Loss = Callable[[Any, Batch], torch.Tensor]


def tiny_model(dtype: torch.dtype) -> Any:
    """A Llama of two layers."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT + LENGTH,
        pad_token_id=END,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def hidden_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The hidden states that predict the tokens of the responses, and no others."""
    return model.model(ids[:, :-1]).last_hidden_state[:, PROMPT - 1 :]


def draw(model: Any, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The prompts, each with a response drawn token by token."""
    ids = prompts
    for _ in range(LENGTH):
        p = model(ids).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    return ids


def reward_of(tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The rule: which part of a response is even, and a little for its length."""
    even = (tokens % 2 == 0) & kept
    return even.sum(1) / kept.sum(1) + 0.02 * kept.sum(1)


def log_probs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the responses' tokens in eager PyTorch, which holds all logits."""
    log_p = model.lm_head(hidden_of(model, ids)).log_softmax(-1)
    return log_p.gather(-1, ids[:, PROMPT:, None])[..., 0]


def eager(model: Any, batch: Batch) -> torch.Tensor:
    """The loss, written out."""
    log_p = log_probs_of(model, batch.ids)
    ratio, advantages = (log_p - batch.old).exp(), batch.advantages[:, None]
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    of_token = -torch.minimum(ratio * advantages, clipped * advantages)
    d = batch.reference - log_p
    of_token = of_token + BETA * ratio * (d.exp() - d - 1)
    return (of_token * batch.kept).sum() / batch.kept.sum()


def with_chain(model: Any) -> Loss:
    """The loss as one chain from the hidden states on, with the parameters of the model's head."""
    loss = losses.GRPO(beta=BETA, epsilon=EPSILON, given=["old_log_probs"])
    chain = opfuse.Sequential(BasicLinear.reading(model.lm_head), TokenLogProb(), loss)

    def function(model: Any, batch: Batch) -> torch.Tensor:
        sequences = torch.arange(len(batch.ids))[:, None].where(batch.kept, -1)
        inputs = batch.tokens, sequences, batch.advantages, batch.reference, batch.old
        with opfuse.options(prefer="memory"):  # compute logits twice rather than hold them
            return chain(hidden_of(model, batch.ids), *inputs)

    return function


def step(model: Any, reference: Any, generator: torch.Generator) -> tuple[Batch, float]:
    """Draw responses and rate them; the batch and the mean reward."""
    prompts = torch.randint(1, WORDS, (PROMPTS, PROMPT), generator=generator)
    with torch.no_grad():
        ids = draw(model, prompts.repeat_interleave(GROUP, 0), generator)
        tokens = ids[:, PROMPT:]
        kept = (tokens == END).cumsum(1) - (tokens == END).long() == 0
        rewards = reward_of(tokens, kept)
        groups = rewards.view(PROMPTS, GROUP)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()
        old, theirs = log_probs_of(model, ids), log_probs_of(reference, ids)
    return Batch(ids, kept, advantages.to(old.dtype), old, theirs), rewards.mean().item()


def train(model: Any, loss_of: Loss, steps: int, seed: int) -> list[tuple[float, float]]:
    """The mean reward and the loss of each step."""
    reference = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for _ in range(steps):
        batch, reward = step(model, reference, generator)
        for _ in range(UPDATES):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append((reward, loss.item()))
    return curve


def main() -> int:
    """Train twice from the same weights, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--without", action="store_true", help="train in eager PyTorch alone")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = tiny_model(getattr(torch, options.dtype))
    other = copy.deepcopy(model)
    curves = {"eager": train(other, eager, options.steps, options.seed)}
    if not options.without:
        curves["opfuse"] = train(model, with_chain(model), options.steps, options.seed)
    print("step" + "".join(f"  {name + ' reward':>15} {'loss':>10}" for name in curves))
    for number, numbers in enumerate(zip(*curves.values(), strict=True), 1):
        print(f"{number:4}" + "".join(f"  {r:15.4f} {loss:10.6f}" for r, loss in numbers))
    if options.without:
        return 0
    pairs = list(zip(*curves.values(), strict=True))
    apart = max((abs(mine[1] - theirs[1]) for theirs, mine in pairs), default=0.0)
    same = all(theirs[0] == mine[0] for theirs, mine in pairs)
    print(f"rewards: {'the same' if same else 'DIFFERENT'}; losses: at most {apart:.1e} apart")
    return 0 if same and apart < (1e-9 if options.dtype == "float64" else 1e-3) else 1


if __name__ == "__main__":
    sys.exit(main())
