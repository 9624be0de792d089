"""Fine-tune a Llama-like model of Hugging Face with opfuse underneath, by transformers' Trainer.

The model is a tiny one with random weights, so nothing is downloaded::

    pip install opfuse opfuse-plugin-transformers transformers accelerate
    python examples/finetune_llama.py

One line is new: ``opfuse.convert(model)``. The Trainer and its arguments stay as they are. With
``--lora`` only adapters are trained, by peft.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    sys.exit(f"This example needs {error.name}: pip install transformers accelerate")

import opfuse


def tiny_model() -> Any:
    """A Llama of two layers, for tokens that are bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def examples(count: int, length: int) -> list[dict[str, Any]]:
    """Pieces of a text that repeats itself."""
    text = b"Attention is a sum of values, weighted by how well a query fits their keys. " * 40
    starts = torch.randint(len(text) - length, (count,)).tolist()
    rows = [torch.tensor(list(text[start : start + length])) for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def with_lora(model: Any) -> Any:
    """The same model, frozen, with an adapter on each linear layer."""
    try:
        import peft
    except ModuleNotFoundError:
        sys.exit("This example needs peft: pip install peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def main() -> None:
    """Train, and print what was converted and how the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--bf16", action="store_true", help="under torch.autocast")
    options = parser.parse_args()
    transformers.set_seed(0)
    model = tiny_model()
    if options.lora:
        model = with_lora(model)
    print(opfuse.convert(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            bf16=options.bf16,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        data: Any = examples(8 * options.steps, 64)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    reasons = opfuse.converted(model).values()
    print(f"chains ran in {sum(not why for why in reasons)} of {len(reasons)} converted modules")
    for why in sorted({why for why in reasons if why}):
        print(f"  not in the others: {why}")


if __name__ == "__main__":
    main()
