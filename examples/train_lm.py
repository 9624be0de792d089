"""Train a small byte-level language model twice, fused and unfused, and compare.

The model is a transformer whose norms, projections and MLPs are ``opfuse.Sequential`` chains; only
attention and the embedding are plain PyTorch. It learns from English text that every Python
carries: the help topics of ``pydoc`` and the docstrings of the standard library. The fused run uses
the installed plugins, the unfused run none; both start from the same weights and see the same
batches, so their losses must agree, and the script fails if they do not. It prefers fusions that
save memory, and leaves out the plugin that compiles C++ for the first step, unless you ask for it.

With ``--recipe`` both runs use the plugins and ``torch.autocast`` to bf16, and the first quantizes
all linear layers but the last by that recipe. Where the device has no products of such numbers,
they are emulated. Then the validation losses must be close at the end.

    python examples/train_lm.py
    python examples/train_lm.py --steps 300 --plugins all --prefer speed
    python examples/train_lm.py --recipe fp8-current
    python examples/train_lm.py --steps 60 --save run.pt
    python examples/train_lm.py --steps 60 --resume run.pt
"""

import argparse
import ast
import collections
import contextlib
import importlib.util
import math
import os
import pathlib
import pydoc_data.topics
import statistics
import sys
import sysconfig
import time

if __name__ == "__main__":
    STARTED = time.monotonic()
    print("[  0 s] Loading PyTorch and opfuse", flush=True)  # which takes seconds

import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse.ops import GELU, AddExtraInput, Linear, MakeExtraOutput, RMSNorm

try:
    import matplotlib
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ModuleNotFoundError as error:
    print(f'This example needs {error.name}: pip install "opfuse[examples]"', file=sys.stderr)
    raise SystemExit(2) from None

SIZES = ("batch", "context", "width", "layers", "seed")  # what a checkpoint fixes
HEAD = 32  # features of one attention head
COMPILER = "opfuse-plugin-inductor"  # on a CPU the only plugin here that compiles
LEARNING_RATE, WARMUP = 2e-3, 20
EARLY, EARLY_LIMIT, END_LIMIT = 50, 1e-3, 1e-2  # how closely the losses must agree
RECIPES = {
    "fp8-delayed": 1e-2,
    "fp8-current": 1e-2,
    "fp8-block": 1e-2,
    "mxfp8": 1e-2,
    "nvfp4": 2e-2,
}
# ... and the validation losses at the end, with a recipe and without


# The model


def rotate(x):
    """Rotary positions (Su et al. 2021): every pair of features is turned by an angle.

    The angle grows with the position. Takes and gives ``(batch, length, heads, HEAD)``.
    """
    angles = torch.outer(torch.arange(x.shape[1]), 1e4 ** -torch.linspace(0, 1, HEAD // 2))[:, None]
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Block(nn.Module):
    """Attention and an MLP, each added to what came in.

    The heads of the attention share keys and values (Ainslie et al. 2023).
    """

    def __init__(self, width):
        super().__init__()
        heads = width // HEAD
        self.heads = [heads, math.gcd(heads, 2), math.gcd(heads, 2)]  # of queries, keys and values
        self.qkv = opfuse.Sequential(
            RMSNorm(width), Linear(width, HEAD * sum(self.heads), bias=False)
        )
        # The residual comes from outside this chain, as an extra input of the call.
        self.project = opfuse.Sequential(Linear(width, width), AddExtraInput())
        # Here both ends of the residual are in one chain, and a channel joins them.
        self.mlp = opfuse.Sequential(
            MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
            RMSNorm(width),
            Linear(width, 4 * width),
            GELU(),
            Linear(4 * width, width),
            AddExtraInput().set_extra_input_channel(0, "residual"),
        )

    def forward(self, x):
        """Takes and gives ``(batch, length, width)``."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD)).split(self.heads, 2)
        # a view of v would keep q and k for the backward too
        heads = rotate(q), rotate(k), v.contiguous()
        q, k, v = (t.transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.project(attended.transpose(1, 2).flatten(2), x)
        return self.mlp(x)


class LanguageModel(nn.Module):
    """From bytes to the logits of the byte that follows each."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = opfuse.Sequential(RMSNorm(width), Linear(width, 256, bias=False))

    def forward(self, tokens):
        """Takes ``(batch, length)``, gives ``(batch, length, 256)``."""
        return self.head(self.blocks(self.embedding(tokens)))


# The text


def documented(tree):
    """What may have a docstring, in the order of ``ast.walk``, which also enters expressions."""
    todo = collections.deque([tree])
    while todo:
        node = todo.popleft()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        inside = ast.stmt, ast.excepthandler, ast.match_case
        todo.extend(each for each in ast.iter_child_nodes(node) if isinstance(each, inside))


def documents():
    """The help topics, and for each file of the standard library its docstrings."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        docstrings = map(ast.get_docstring, documented(ast.parse(path.read_bytes())))
        yield "\n\n".join(filter(None, docstrings))


def load_text():
    """The bytes to train on, and those to validate on: every tenth document."""
    parts = [[], []]
    for number, document in enumerate(documents()):
        parts[number % 10 == 9].append(document)
    return [torch.tensor(list("\n\n".join(part).encode()), dtype=torch.uint8) for part in parts]


def draw_batch(text, args, generator):
    """Random stretches of text, and the same one byte on."""
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    stretches = text[starts + torch.arange(args.context + 1)].long()
    return stretches[:, :-1], stretches[:, 1:]


def loss_of(logits, targets):
    """Cross entropy, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# One training run


class Run:
    """A model, its optimizer and its order of batches, trained in one way.

    Args:
        args: The sizes and the seed; if they name a recipe, ``torch.autocast`` to bf16 is on.
        selection: Which plugins.
        recipe: What to quantize by, or None.
    """

    def __init__(self, args, selection, recipe=None):
        torch.manual_seed(args.seed)
        self.args, self.selection, self.recipe = args, selection, recipe
        self.model = opfuse.assign_names(LanguageModel(args.width, args.layers))
        self.forward = (
            self.model
            if args.compile == "none"
            else torch.compile(self.model, backend=args.compile)
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95)
        )
        self.generator = torch.Generator().manual_seed(args.seed)
        self.losses, self.seconds = [], []

    @contextlib.contextmanager
    def way(self):
        """What the forward runs under."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(opfuse.plugins.using(self.selection))
            stack.enter_context(opfuse.options(prefer=self.args.prefer))
            if self.args.recipe:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if self.recipe:
                # the last layer stays as it is, for its rounding errors go straight into the loss
                stack.enter_context(opfuse.autocast(self.recipe, skip=["head"]))
            yield

    def step(self, text):
        """One optimizer step.

        The learning rate depends on no last step, so that any run can be continued.
        """
        started = time.perf_counter()
        number = len(self.losses) + 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(number / WARMUP, 1)
        inputs, targets = draw_batch(text, self.args, self.generator)
        with self.way():
            loss = loss_of(self.forward(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)

    def typical(self):
        """Seconds of the median step, without the first few, which plan and warm up."""
        return statistics.median(self.seconds[min(5, len(self.seconds) // 2) :])

    def tokens_per_second(self):
        """From the typical step."""
        return self.args.batch * self.args.context / self.typical()

    @torch.no_grad()
    def validate(self, text, batches=10):
        """The mean loss over batches that are the same for every run."""
        generator = torch.Generator().manual_seed(0)
        with self.way():
            drawn = [draw_batch(text, self.args, generator) for _ in range(batches)]
            return statistics.fmean(
                loss_of(self.model(inputs), targets).item() for inputs, targets in drawn
            )

    def saved_bytes(self, inputs):
        """The memory that one forward pass keeps for its backward.

        Parameters do not count, and shared memory counts once.
        """
        parameters = {
            parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()
        }
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                # holding it keeps its address from being used again
                kept[storage.data_ptr()] = storage
            return tensor.detach()

        with self.way(), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            self.forward(inputs)
        return sum(storage.nbytes() for storage in kept.values())

    @torch.no_grad()
    def generate(self, length=160, temperature=0.7):
        """Text that begins with "The ", each byte drawn from the model's distribution."""
        generator = torch.Generator().manual_seed(self.args.seed)
        tokens = torch.tensor([list(b"The ")])
        for _ in range(length):
            with opfuse.plugins.using(self.selection):
                logits = self.model(tokens[:, -self.args.context :])[:, -1]
            token = torch.multinomial(
                torch.softmax(logits / temperature, -1), 1, generator=generator
            )
            tokens = torch.cat([tokens, token], 1)
        return "".join(
            chr(byte) if 32 <= byte < 127 or byte == 10 else "?" for byte in tokens[0].tolist()
        )

    def state(self):
        """Everything the next step depends on, and the losses so far: tensors and plain numbers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "losses": self.losses,
        }

    def load(self, state):
        """Go on where the run with this state stood."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.losses = list(state["losses"])


def save(path, runs, args):
    """Write a checkpoint; the file is complete at every moment."""
    checkpoint = {"settings": {name: getattr(args, name) for name in SIZES}}
    checkpoint["runs"] = {name: run.state() for name, run in runs.items()}
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)


def train(runs, text, steps):
    """Train the runs in turns, step by step.

    Whatever else this machine does then slows them alike.
    """
    with tqdm(total=steps, desc="training", unit="step") as progress:
        for _ in range(steps):
            for run in runs.values():
                run.step(text)
            progress.set_postfix(
                {name: f"{run.losses[-1]:.3f}" for name, run in runs.items()}, refresh=False
            )
            progress.update()


# What is said at the end


def differences(fused, unfused):
    """The relative difference of each number in one list to that in the other."""
    fused, unfused = (
        torch.tensor(fused, dtype=torch.float64),
        torch.tensor(unfused, dtype=torch.float64),
    )
    return (fused - unfused).abs() / unfused


def close(runs, validation):
    """Print how far apart both runs end; returns whether the limit of the recipe allows it."""
    (name, _), (other, _) = runs.items()
    apart = validation[name] / validation[other] - 1
    good = abs(apart) <= RECIPES[name]  # false for nan
    print(
        f"\nThe validation losses with and without {name} are {'close' if good else 'NOT CLOSE'}: "
        f"{apart:+.2%} (limit {RECIPES[name]:.0%})"
    )
    return good


def agree(runs, validation):
    """Print how far apart the losses of both runs are; returns whether the limits allow it."""
    fused, unfused = runs["fused"].losses, runs["unfused"].losses
    early = differences(fused[:EARLY], unfused[:EARLY]).max().item()
    ends = [
        [losses[-1], validation[name]] for name, losses in (("fused", fused), ("unfused", unfused))
    ]
    end = differences(*ends).max().item()
    good = early <= EARLY_LIMIT and end <= END_LIMIT  # false for nan
    print(
        f"\nFused and unfused losses {'agree' if good else 'DO NOT AGREE'}. "
        "Largest relative difference:"
    )
    print(f"  first {min(EARLY, len(fused))} steps  {early:.1e} (limit {EARLY_LIMIT:.0e})")
    print(f"  at the end      {end:.1e} (limit {END_LIMIT:.0e}), of training and validation loss")
    return good


def table(runs, validation, kept):
    """Print the numbers of every run, one column each; ``kept`` are bytes for the backward."""
    rows = {
        "validation loss, nats per byte": [f"{validation[name]:.4f}" for name in runs],
        "training, tokens per second": [f"{run.tokens_per_second():,.0f}" for run in runs.values()],
        "the first step, seconds": [f"{run.seconds[0]:.1f}" for run in runs.values()],
        "saved activations, bytes": [f"{bytes_:,}" for bytes_ in kept],
    }
    print(f"\n{'':32}" + "".join(f"{name:>16}" for name in runs))
    for title, cells in rows.items():
        print(f"{title:32}" + "".join(f"{cell:>16}" for cell in cells))


def gained(runs, kept, good, compiler):
    """Say in words what the first run gained, and then how much; ``compiler`` is a state."""
    (name, run), (other, base) = runs.items()
    smaller, faster = kept[0] / kept[1], base.typical() / run.typical()
    memory = "keeps less memory for" if smaller < 0.99 else "keeps as much memory for"
    speed = "is faster" if faster > 1.02 else "is slower" if faster < 0.98 else "is as fast"
    same = "learns as well" if run.recipe else "learns the same"
    losses = same if good else "DOES NOT LEARN THE SAME"
    print(f"\nThe {name} run {losses}, {memory} its backward, and {speed} after the first step:")
    print(f"{smaller:.2f} of the bytes of the {other} run, {faster:.2f} times its tokens a second.")
    lost, won = run.seconds[0] - base.seconds[0], base.typical() - run.typical()
    if lost >= 1 and len(run.seconds) >= 10:
        many = f"{math.ceil(lost / won):,} steps win" if won > 0 else "no step wins"
        print(f"Plans and kernels made its first step {lost:.0f} s longer; {many} that back.")
    if compiler == "blocked":
        print(
            f"{COMPILER} is not in it: it compiles C++ for the first step, and then keeps\n"
            "as little in less time. To see that, add: --plugins all --prefer speed"
        )


def plot(runs, path):
    """Draw the loss curves, and below them how far apart they are, which the eye does not see."""
    matplotlib.rcParams["axes.grid"] = True
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, *below = figure.subplots(
        len(runs), 1, sharex=True, squeeze=False, height_ratios=[3, 1][: len(runs)]
    )[:, 0]
    for (name, run), style in zip(
        runs.items(), ({"lw": 1.5, "zorder": 3}, {"lw": 5, "alpha": 0.4}), strict=False
    ):
        top.plot(
            range(1, len(run.losses) + 1),
            run.losses,
            label=f"{name}, last {run.losses[-1]:.3f}",
            **style,
        )
    top.set(
        title="Byte-level language model on Python's own documentation",
        ylabel="training loss, nats per byte",
    )
    top.legend()
    for axes in below:
        one, other = runs.values()
        apart = differences(one.losses, other.losses)
        axes.plot(
            range(1, len(apart) + 1),
            apart,
            color="C3",
            lw=1.5,
            label="relative difference of the two",
        )
        if not one.recipe:
            label = f"limit, first {EARLY} steps"
            axes.hlines(EARLY_LIMIT, 1, min(EARLY, len(apart)), color="k", ls=":", label=label)
        axes.set_yscale("symlog", linthresh=1e-8)  # zero has a place
        axes.set(ylim=(0, 10), yticks=[0, 1e-8, 1e-6, 1e-4, 1e-2, 1], ylabel="relative difference")
        axes.legend(loc="upper left", ncols=2, fontsize="small")
    (below or [top])[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)


# The command line


def say(what):
    """Print what goes on from here, and how many seconds are gone."""
    print(f"[{time.monotonic() - STARTED:3.0f} s] {what}", flush=True)


def parse_arguments():
    """The options, and the checkpoint to go on from, if any; its settings are then the defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, what in (
        ("steps", 40, "optimizer steps to train, after those of --resume"),
        ("batch", 4, "stretches of text in a batch"),
        ("context", 128, "bytes in a stretch"),
        ("width", 256, f"features of a byte; a multiple of {HEAD}"),
        ("layers", 4, "blocks of attention and MLP"),
        ("seed", 0, "of the weights, the batches and the sample"),
        ("threads", 1, "CPU threads"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what)
    others = "-inductor" if importlib.util.find_spec("opfuse_inductor") else "all"
    parser.add_argument(
        "--plugins",
        type=lambda text: None if text == "all" else text,
        default=os.environ.get("OPFUSE_PLUGINS", others),
        metavar="SELECTION",
        help="plugins of the fused run, as in OPFUSE_PLUGINS (--plugins=-a: all but a), or all",
    )
    parser.add_argument(
        "--prefer",
        choices=("memory", "speed"),
        default="memory",
        help="what fusions are chosen for",
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, help="quantize by it, and compare with bf16 instead of unfused"
    )
    parser.add_argument(
        "--skip-unfused", action="store_true", help="train the first run only, and compare nothing"
    )
    parser.add_argument(
        "--compile", choices=("none", "inductor"), default="none", help="torch.compile both models"
    )
    out = pathlib.Path(__file__).with_name("out")
    parser.add_argument(
        "--out", type=pathlib.Path, default=out, metavar="DIR", help="where plot and plan go"
    )
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="FILE", help="write a checkpoint after the last step"
    )
    parser.add_argument(
        "--resume",
        type=pathlib.Path,
        metavar="FILE",
        help="go on from a checkpoint, with its sizes",
    )
    args = parser.parse_args()
    try:
        opfuse.plugins.using(args.plugins)  # refuses a malformed selection
        checkpoint = torch.load(args.resume, weights_only=True) if args.resume else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if checkpoint:
        parser.set_defaults(**checkpoint["settings"])
        args = parser.parse_args()
        for name, value in checkpoint["settings"].items():
            if getattr(args, name) != value:
                parser.error(f"--{name} {getattr(args, name)}: {args.resume} was made with {value}")
        for name in names_of(args):
            if name not in checkpoint["runs"]:
                held = ", ".join(checkpoint["runs"])
                parser.error(f"{args.resume} holds no {name} run, only {held}: see --skip-unfused")
    if (
        min(args.steps, args.batch, args.context, args.layers, args.threads) < 1
        or args.width < 1
        or args.width % HEAD
    ):
        parser.error(f"sizes, steps and threads start at 1, and the width is a multiple of {HEAD}")
    return args, checkpoint


def names_of(args):
    """What the runs are called: the one that this is about, and the one to compare it with."""
    names = (args.recipe, "bf16") if args.recipe else ("fused", "unfused")
    return names[: 1 if args.skip_unfused else 2]


def main():
    """Train, compare, report; returns the exit status."""
    args, checkpoint = parse_arguments()
    torch.set_num_threads(args.threads)
    for folder in (args.out, *([args.save.parent] if args.save else [])):
        folder.mkdir(parents=True, exist_ok=True)  # now, rather than a failure after the training
    runs = {}
    for name in names_of(args):
        selection = "" if name == "unfused" else args.plugins
        try:
            runs[name] = Run(args, selection, name if name == args.recipe else None)
            with runs[name].way():
                pass
        except ValueError as error:  # no plugin offers the recipe
            print(error, file=sys.stderr)
            return 2
        if checkpoint:
            runs[name].load(checkpoint["runs"][name])
    name, first = next(iter(runs.items()))
    say("Reading the text: Python's own documentation")
    training, validating = load_text()
    size = sum(parameter.numel() for parameter in first.model.parameters())
    print(
        f"{size:,} parameters; {len(training):,} bytes to train on, "
        f"{len(validating):,} to validate on."
    )
    with first.way():
        plugins = {row["distribution"]: row["state"] for row in opfuse.plugins.listing()}
    if not plugins:
        print("No opfuse plugin is installed: nothing will be fused.")
    if plugins.get(COMPILER) == "loaded":
        print(f"The first step takes long: {COMPILER} compiles C++, unless an earlier run did.")
    say(f"Training {args.steps} steps, each {' and '.join(runs)}")
    train(runs, training, args.steps)
    if args.save:
        save(args.save, runs, args)

    inputs, _ = draw_batch(training, args, torch.Generator().manual_seed(0))
    with first.way():
        plan = opfuse.explain(first.model, inputs)
    (args.out / "plan.txt").write_text(f"{plan.details}\n", encoding="utf-8")
    say("Computing the losses on validation text, and then a sample")
    validation = {name: run.validate(validating) for name, run in runs.items()}
    print(
        f"\nThe plan of the {name} run\n\n{plan}\n\n"
        f"A sample of the {name} run\n\n{first.generate()}"
    )
    kept = [run.saved_bytes(inputs) for run in runs.values()]
    table(runs, validation, kept)
    compare = close if args.recipe else agree
    good = args.skip_unfused or compare(runs, validation)
    plot(runs, args.out / "loss.png")
    print(f"\nLoss curves: {args.out / 'loss.png'}\nPlan in detail: {args.out / 'plan.txt'}")
    if args.save:
        print(f"Checkpoint: {args.save}")
    if not args.skip_unfused:
        gained(runs, kept, good, plugins.get(COMPILER))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
