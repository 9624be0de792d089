"""Training steps of real models: eager, converted, and compiled, in time and in bytes kept.

python -m benchmarks --suite models --out models.json
python -m benchmarks --suite models --models llama,gpt2 --dtypes bf16 --ways converted,memory
python -m benchmarks --suite models --ways compile,converted-compile --cold --out cold.json
python -m benchmarks --suite models --ways budget-0.5,compile-0.5
python -m benchmarks --suite models --models llama,qwen3 --ways converted,memory --adapters fp32
python -m benchmarks --suite models --together --ways budget-0.5-compiled,budget-least-compiled
python -m benchmarks --suite models --models bert,roberta,clip --dtypes fp32 --ways untuned
python -m benchmarks --suite models --models dit,sd3,flux --ways untuned,untuned-memory

The models are those of transformers and diffusers, with random weights: two layers of width 512,
512 tokens (a ViT: 4 images of 197 patches). For each model and dtype one process tunes the
converted model, into a table of its own. Then each way is timed in a process of its own, in rounds
with eager: at least 20, until half the width of a 95 % interval of the median speed is at most
0.02. ``--together`` times all ways of a model and dtype in the same rounds of one process: so they
can be compared with each other, and plans share what they compiled and measured. A step is a
forward with the loss, and the backward. Bytes are what the forward keeps for the backward, apart
from parameters. With one thread the time is CPU time of the process. The models of a process share
their weights, so that it does not matter where these lie in memory. ``first_s`` is the first call
with its backward, on the clock; it is of interest with ``--cold``, where no process finds anything
compiled. ``budget-0.5`` is the converted model with the plan of ``opfuse.plan_memory(budget=0.5)``;
beside it models with a cache are told not to use it. In ``budget-0.5-compiled`` the plan may also
compile layers or the model, with one of ``SHARES``; ``budget-least`` is the lowest budget that is
possible. ``untuned`` is the converted model as it is before ``opfuse.tune``, and ``untuned-memory``
the same under ``prefer="memory"``. With ``--adapters fp32`` PEFT puts adapters of rank 16 on all
linear layers but the head, and they alone train; eager is then eager PEFT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WIDTH, LAYERS, TOKENS, VOCABULARY = 512, 2, 512, 2048
MODELS = ("llama", "gpt2", "vit", "bert", "mixtral")
ENCODERS = ("roberta", "modernbert", "clip", "siglip", "wav2vec2")
DIFFUSION = ("dit", "pixart", "sd3", "flux")
MORE = ("qwen3", "mistral", *ENCODERS, *DIFFUSION)
"""Models that run if they are named."""
DTYPES = ("fp32", "bf16", "autocast")
WAYS = ("converted", "memory", "compile", "compile-0.8", "compile-0.5", "converted-compile")
OTHERS = (
    "untuned, untuned-memory, compile-0.35, budget-0.5, budget-0.5-compiled, budget-least-compiled"
)
KNOWN = r"untuned(-memory)?|compile-(0|1|[01]\.\d+)|budget-(least|1|0\.\d+)(-compiled)?"
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.0)
"""The budgets with which a plan of ``budget-0.5-compiled`` may compile."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and measure, each in a process of its own; or be one of these."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("models", MODELS), ("dtypes", DTYPES), ("ways", WAYS)):
        parser.add_argument(f"--{name}", default=",".join(default), help="names, with commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="empty caches for every process")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--together", action="store_true", help="all ways in the same rounds")
    parser.add_argument(
        "--adapters",
        choices=["", "fp32", "bf16"],
        default="",
        help="PEFT's LoRA, rank 16, on all linear layers but the head, in this dtype",
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for way in options.ways.split(","):
        if way not in WAYS and not re.fullmatch(KNOWN, way):
            parser.error(f"no way {way!r}: expected {', '.join(WAYS)}, or one such as {OTHERS}")
    if options.part is not None:
        print(json.dumps(run(options)))
        return
    import torch

    from benchmarks.record import about  # imports torch

    result = about("models", torch.device("cpu")) | {"threads": options.threads, "rows": []}
    result |= {"adapters": options.adapters, "dropout": options.dropout}
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
            result["rows"] += measured(model, dtype, options)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(model: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model in one dtype."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"OPFUSE_TUNING": folder}
        ways = [options.ways] if options.together else options.ways.split(",")
        tuned = any(not way.startswith("untuned") for way in ways)
        for part in (*["tune"] * tuned, *ways):
            command = [sys.executable, __file__, "--part", part, "--threads", str(options.threads)]
            command += ["--models", model, "--dtypes", dtype]
            command += ["--adapters", options.adapters, "--dropout", str(options.dropout)]
            if options.cold:
                environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, part)
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{model} {dtype} {part}: failed", file=sys.stderr)
                continue
            for row in json.loads(done.stdout.splitlines()[-1]):
                rows.append({"model": model, "dtype": dtype} | row)
                told = "{way:22} {speed:.3f}x +-{noise:.3f}, {saved_mb:.1f} MB of {eager_mb:.1f}"
                print(f"{model:8} {dtype:8} " + told.format(**row), flush=True)
    return rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one process does: tune, or time ways against eager."""
    import torch

    import opfuse
    from opfuse.tuning import timing

    model, inputs, cast = prepared(options)
    if options.part == "tune":
        opfuse.convert(model)
        with cast:
            opfuse.tune(lambda: loss_of(model(**inputs)))
        return []
    ways = ["eager", *options.part.split(",")]
    if any(way.startswith("budget") for way in ways):
        model.config.use_cache = False  # a plan runs no layer again that writes into a cache
    ready = {way: Ready(way, model, inputs, cast) for way in ways}
    found = timing.in_rounds([each.step for each in ready.values()], torch.device("cpu"))
    rows = []
    for way, took in [*zip(ways, found, strict=True)][1:]:
        times = {"ms": took.second * 1e3, "eager_ms": took.first * 1e3}
        kept = {"eager_mb": ready["eager"].kept, "saved_mb": ready[way].kept}
        rows.append({"way": way, "speed": took.speed, "noise": took.noise, **times, **kept})
        rows[-1] |= ready[way].found
    return rows


class Ready:
    """A way that has run once.

    Attributes:
        model: Its model.
        step: Runs a step.
        kept: MiB that a forward keeps.
        found: What else a row says of it.
    """

    def __init__(self, way: str, model: Any, inputs: dict[str, Any], cast: Any) -> None:
        import copy

        import torch
        from torch._dynamo import config as dynamo
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        import opfuse
        from opfuse.report.calls import saved_bytes

        same: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model, self._inputs, self._cast = copy.deepcopy(model, same), inputs, cast
        self._way = way
        if way != "eager" and not way.startswith("compile"):
            opfuse.convert(self.model)
        if way.startswith("budget"):
            with cast:
                print(planned(self.model, inputs, way), file=sys.stderr, flush=True)
        self._called: Callable[..., Any] = self.model
        if way.startswith(("compile", "converted-compile")):
            budget = float(way.rpartition("-")[2]) if way[-1].isdigit() else 1.0

            def within(graph: Any, given: Any) -> Any:  # one of its own: ways share no graph
                with config.patch(activation_memory_budget=budget):
                    return compile_fx(graph, given)

            dynamo.recompile_limit = 64  # for code that all ways have
            self._called = torch.compile(self.model, backend=within)
        start = time.perf_counter()
        self.step()
        first = time.perf_counter() - start
        self.kept = saved_bytes(self._forward, self.model.parameters()) / 2**20
        whys = opfuse.converted(self.model)
        self.found = {
            "first_s": first,
            "modules": len(whys),
            "as_chains": sum(not why for why in whys.values()),
            "own_forward": sorted(set(filter(None, whys.values()))),
        }

    def _forward(self) -> Any:
        import opfuse

        how: Any = contextlib.nullcontext()
        if self._way.startswith("untuned"):
            how = opfuse.plugins.using("-tuning")
        prefer: Any = "memory" if self._way.endswith("memory") else "speed"
        with how, opfuse.options(prefer=prefer), self._cast:
            return loss_of(self._called(**self._inputs))

    def step(self) -> None:
        """A forward with the loss, and the backward."""
        self.model.zero_grad(set_to_none=True)
        self._forward().backward()


def loss_of(output: Any) -> Any:
    """The loss of a model, or a sum over what a model without one gives."""
    found = getattr(output, "loss", None)
    return output[0].float().square().mean() if found is None else found


def planned(model: Any, inputs: dict[str, Any], way: str) -> Any:
    """The plan of a way such as ``budget-0.5-compiled``, attached."""
    import opfuse

    _, budget, *compiled = way.split("-")
    how = inputs | {"compiled": SHARES if compiled else ()}
    if budget != "least":
        return opfuse.plan_memory(model, budget=float(budget), **how)
    try:
        return opfuse.plan_memory(model, budget="1", **how)
    except ValueError as error:  # it says what is possible
        least = str(error).partition("bytes is ")[2].split()[0]
        return opfuse.plan_memory(model, budget=least, **how)


def prepared(options: argparse.Namespace) -> tuple[Any, dict[str, Any], Any]:
    """The model in its dtype, its inputs, and the autocast block of a step."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, inputs = built(options.models)
    if options.dtypes == "bf16":
        model = model.to(torch.bfloat16)
    if getattr(options, "adapters", ""):  # other scripts have no such option
        model = adapted(model, options.adapters, options.dropout)
    if options.dtypes == "bf16":
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    cast = torch.autocast("cpu", torch.bfloat16, enabled=options.dtypes == "autocast")
    return model, inputs, cast


def adapted(model: Any, dtype: str, dropout: float) -> Any:
    """The model with adapters of rank 16 on all linear layers but the head; they alone train."""
    import peft
    import torch

    how: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    config = peft.LoraConfig(**how, lora_dropout=dropout, init_lora_weights=False)
    made = peft.get_peft_model(model, config, autocast_adapter_dtype=dtype == "fp32")
    if dtype == "bf16":
        for name, param in made.named_parameters():
            param.data = param.data.to(torch.bfloat16) if "lora_" in name else param.data
    return made


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and the inputs of a step."""
    import torch
    import transformers as t

    x = torch.randint(1, VOCABULARY, (1, TOKENS))
    text = {"input_ids": x, "labels": x}
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    common |= {"hidden_size": WIDTH, "num_attention_heads": 8}
    few = {"num_key_value_heads": 2, "max_position_embeddings": TOKENS}
    wide = {"intermediate_size": 4 * WIDTH}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**common, **few, intermediate_size=1376)), text
    if name == "qwen3":
        config = t.Qwen3Config(**common, **few, head_dim=64, intermediate_size=1376)
        return t.Qwen3ForCausalLM(config), text
    if name == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**common, **few, intermediate_size=1376)), text
    if name == "mixtral":
        config = t.MixtralConfig(**common, **few, intermediate_size=688, num_local_experts=4)
        return t.MixtralForCausalLM(config), text
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**common, **wide, **still)), text
    if name == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8, "n_positions": TOKENS}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, **sizes, **drops)), text
    if name == "vit":
        del common["vocab_size"]
        common |= {"hidden_size": 384, "num_attention_heads": 6}
        config = t.ViTConfig(**common, **still, intermediate_size=1536)
        images = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.tensor([0, 1, 0, 1])}
        return t.ViTForImageClassification(config), images
    if name in ENCODERS:
        return encoder(name, common | wide, still, x)
    if name in DIFFUSION:
        return diffusion(name)
    raise SystemExit(f"no model {name!r}: there are {', '.join((*MODELS, *MORE))}")


def diffusion(name: str) -> tuple[Any, dict[str, Any]]:
    """The same for one of ``DIFFUSION``: two latent images of 256 patches, or one of 512."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import diffusers
    import torch

    sizes = {"num_layers": LAYERS, "num_attention_heads": 8, "attention_head_dim": WIDTH // 8}
    inputs = {"hidden_states": torch.randn(2, 4, 32, 32), "timestep": torch.tensor([1, 9])}
    latent = sizes | {"in_channels": 4, "sample_size": 32, "patch_size": 2}
    words = {"encoder_hidden_states": torch.randn(2, 64, WIDTH)}
    if name == "dit":
        inputs |= {"class_labels": torch.tensor([3, 4])}
        return diffusers.DiTTransformer2DModel(**latent, out_channels=8), inputs
    if name == "pixart":
        latent |= {"cross_attention_dim": WIDTH, "caption_channels": WIDTH, "out_channels": 8}
        made = diffusers.PixArtTransformer2DModel(**latent, use_additional_conditions=False)
        return made, inputs | words
    several = {"joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH}
    if name == "sd3":
        latent |= several | {"caption_projection_dim": WIDTH, "pos_embed_max_size": 32}
        pooled = {"pooled_projections": torch.randn(2, WIDTH)}
        return diffusers.SD3Transformer2DModel(**latent, out_channels=4), inputs | words | pooled
    sizes |= several | {"num_single_layers": LAYERS, "in_channels": 16, "patch_size": 1}
    flux = diffusers.FluxTransformer2DModel(**sizes, axes_dims_rope=(16, 24, 24))
    inputs = {"hidden_states": torch.randn(1, TOKENS, 16), "timestep": torch.tensor([0.5])}
    inputs |= {"encoder_hidden_states": words["encoder_hidden_states"][:1]}
    inputs |= {"pooled_projections": torch.randn(1, WIDTH)}
    places = {"img_ids": torch.zeros(TOKENS, 3), "txt_ids": torch.zeros(64, 3)}
    return flux, inputs | places


def encoder(name: str, sizes: Any, still: Any, x: Any) -> tuple[Any, dict[str, Any]]:
    """The same for one of ``ENCODERS``: text, images of 197 patches, or two seconds of sound."""
    import torch
    import transformers as t

    text, images = {"input_ids": x, "labels": x}, torch.randn(2, 3, 224, 224)
    if name == "roberta":
        config = t.RobertaConfig(**sizes, **still, max_position_embeddings=TOKENS + 2)
        return t.RobertaForMaskedLM(config), text
    if name == "modernbert":
        sizes = sizes | {"intermediate_size": 3 * WIDTH // 2, "num_hidden_layers": LAYERS + 1}
        ends = {f"{key}_token_id": 0 for key in ("pad", "bos", "eos", "cls", "sep")}
        return t.ModernBertForMaskedLM(t.ModernBertConfig(**sizes, **ends)), text
    del sizes["vocab_size"]
    if name == "clip":
        config = t.CLIPVisionConfig(**sizes, patch_size=16)
        return t.CLIPVisionModelWithProjection(config), {"pixel_values": images}
    if name == "siglip":
        config = t.SiglipConfig(vision_config=sizes | {"patch_size": 16})
        labels = torch.tensor([0, 1])
        return t.SiglipForImageClassification(config), {"pixel_values": images, "labels": labels}
    drops = ("hidden", "attention", "activation", "feat_proj", "final")
    none = {f"{key}_dropout": 0.0 for key in drops} | {"layerdrop": 0.0, "mask_time_prob": 0.0}
    model = t.Wav2Vec2Model(t.Wav2Vec2Config(**sizes, **none, conv_dim=(64,) * 7))
    model.freeze_feature_encoder()  # as its own recipes do
    return model, {"input_values": torch.randn(5, 33000)}


if __name__ == "__main__":
    main()
