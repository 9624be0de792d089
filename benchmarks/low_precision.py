"""How well the example trains under each recipe, compared with bf16: losses over seeds, and curves.

python benchmarks/low_precision.py --out losses.json --plot curves.svg
python benchmarks/low_precision.py --recipes bf16,fp8-current,nvfp4 --seeds 0 --steps 20
python benchmarks/low_precision.py --draw losses.json --plot curves.svg

Every run trains the model of ``examples/train_lm.py``, with batches of 16: under
``torch.autocast`` to bf16, the same without a recipe and with each one. Runs of one seed start from
the same weights and see the same batches. The last linear layer is left in bf16. What is compared
is the loss on validation text at the end, as the mean over seeds. Runs of several processes are put
together by --add.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BASE = "bf16"


def example() -> Any:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=None, help="names; default: all that the example has")
    parser.add_argument("--seeds", default="0,1,2", help="numbers, with commas between them")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    for name, what in (
        ("out", "write all numbers"),
        ("add", "keep the runs of this file, and add to them"),
        ("plot", "draw the curves"),
        ("draw", "train nothing, draw this file"),
    ):
        parser.add_argument(f"--{name}", type=pathlib.Path, metavar="FILE", help=what)
    return parser.parse_args()


def train(script: Any, name: str, seed: int, steps: int, text: Any) -> dict[str, Any]:
    """One run: its losses, and how many products were quantized."""
    import opfuse

    recipe = None if name == BASE else name
    args = argparse.Namespace(batch=16, context=128, width=256, layers=4, seed=seed, recipe=name)
    args.compile, args.prefer = "none", "speed"
    run = script.Run(args, None, recipe)
    script.train({f"{name}, seed {seed}": run}, text[0], steps)
    inputs, _ = script.draw_batch(text[0], args, script.torch.Generator().manual_seed(0))
    validation = run.validate(text[1], batches=20)
    with run.way():
        rows = opfuse.explain(run.model, inputs).to_dict()["quantized"]
    return {
        "recipe": name,
        "seed": seed,
        "validation": validation,
        "products": sum(row["products"] for row in rows),
        "quantized": sum(row["quantized"] for row in rows),
        "losses": run.losses,
    }


def summary(result: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """A line for each recipe: the mean over its seeds, next to that of bf16."""
    losses: dict[str, dict[int, float]] = {}
    for run in result["runs"]:
        losses.setdefault(run["recipe"], {})[run["seed"]] = run["validation"]
    lines = []
    for name, by_seed in losses.items():
        values = [*by_seed.values()]
        base = statistics.fmean(losses[BASE][seed] for seed in by_seed)
        mean, spread = statistics.fmean(values), max(values) - min(values)
        runs = [run for run in result["runs"] if run["recipe"] == name]
        products, quantized = (sum(run[key] for run in runs) for key in ("products", "quantized"))
        line = f"{name:12} {mean:.4f}  {len(values)} seeds differ by {spread / mean:.2%}"
        if name != BASE:
            apart = mean / base - 1
            good = abs(apart) <= limits[name] and quantized >= 0.9 * products
            line += f"  {apart:+.2%} of {BASE} (limit {limits[name]:.0%})"
            line += f"  {quantized / products:.0%} of products" + ("" if good else "  <-- missed")
        lines.append(line)
    return lines


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """The training loss of each recipe over the steps, and its distance from bf16 below."""
    import torch
    from matplotlib.figure import Figure

    curves: dict[str, dict[int, Any]] = {}
    for run in result["runs"]:
        curves.setdefault(run["recipe"], {})[run["seed"]] = torch.tensor(run["losses"])
    means = {name: average([*runs.values()]) for name, runs in curves.items()}
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for name, mean in means.items():
        steps = range(1, len(mean) + 1)
        style: dict[str, Any] = {"color": "k", "lw": 2} if name == BASE else {"lw": 1.2}
        top.plot(steps, mean, label=name, **style)
        base = average([curves[BASE][seed] for seed in curves[name]])
        below.plot(steps, 100 * (mean / base - 1), label=name, **style)
    seeds = len(next(iter(curves.values())))
    top.set(title=f"The example's training loss, mean of {seeds} seeds", ylabel="nats per byte")
    below.set(xlabel="step", ylabel=f"% above {BASE}")
    top.legend(ncols=2)
    for axes in (top, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def average(runs: list[Any], width: int = 5) -> Any:
    """The mean over runs, and over neighbours, which noise of single batches does not move."""
    values = sum(runs[1:], runs[0]) / len(runs)
    return values.unfold(0, width, 1).mean(-1) if len(values) >= width else values


def main() -> None:
    """Train, or read; print, write and draw."""
    options = arguments()
    script = example()
    if options.draw:
        result = json.loads(options.draw.read_text())
    else:
        from benchmarks.record import about

        script.torch.set_num_threads(options.threads)
        result = about("low precision", script.torch.device("cpu")) | {"runs": []}
        result |= {"threads": options.threads, "steps": options.steps}
        if options.add:
            result["runs"] = json.loads(options.add.read_text())["runs"]
        names = options.recipes.split(",") if options.recipes else [BASE, *script.RECIPES]
        text = script.load_text()
        for seed in map(int, options.seeds.split(",")):
            for name in names:
                result["runs"].append(train(script, name, seed, options.steps, text))
                if options.out:  # after each, since all together take an hour
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if any(run["recipe"] == BASE for run in result["runs"]):
        print("\n".join(summary(result, script.RECIPES)))
        if options.plot:
            draw(result, options.plot)


if __name__ == "__main__":
    main()
