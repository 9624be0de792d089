"""What is measured: every case with its goals, in order of priority.

A goal is a ratio of two providers in one run. ``stretch`` is what would be worth telling, ``bound`` what the hardware
or the arithmetic allows. Widths are those of models: Llama-3-8B unless a comment says another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

LLAMA = "matmul:4096x28672 swiglu matmul:14336x4096"
MLP = "linear:1024x4096 gelu linear:4096x1024"
DENSE = [  # rows, K x N
    (8192, "4096x28672"),
    (8192, "14336x4096"),
    (8192, "4096x6144"),
    (8192, "4096x4096"),
    (50432, "1024x4096"),  # ViT-L
    (50432, "4096x1024"),
    (16384, "1024x6144"),  # Qwen3-0.6B
    (8192, "2048x16384"),  # Llama-3.2-1B
    (8192, "8192x2048"),
    (15872, "4096x12288"),  # Transformer Engine's example
    (16384, "1600x6400"),  # GPT-2 XL: not a multiple of 128
]
TITLES = {
    "M1": "bias + GELU, forward",
    "M2": "bias + GELU, backward: gradient and its column sum",
    "M3": "SwiGLU, forward",
    "M4": "SwiGLU, backward",
    "M5": "RMSNorm, forward",
    "M6": "RMSNorm, backward",
    "M7": "add + RMSNorm, forward",
    "M8": "add + RMSNorm, backward",
    "M9": "cast to FP8, without and with a transposed copy",
    "M10": "RMSNorm + cast with a transposed copy",
    "M11": "SwiGLU + cast with a transposed copy, forward and backward",
    "G1": "plain matrix product against PyTorch's library",
    "G2": "linear + bias + GELU, inference",
    "G3": "the same against tuned torch.compile and PyTorch's fused call",
    "G4": "linear + bias + GELU, forward of a training step",
    "G5": "linear + residual add",
    "G6": "gate and up projection + SwiGLU",
    "G7": "SwiGLU MLP of Llama-3-8B, forward and backward",
    "G8": "SwiGLU MLP of 1024 features, forward and backward",
    "G9": "GELU MLPs of ViT-L and GPT-2, forward and backward",
    "F1": "FP8 matrix product, one scale a tensor",
    "F2": "FP8 matrix product, one scale a block",
    "F3": "SwiGLU MLP in FP8 against bf16",
    "F4": "the same against torchao",
    "F5": "the same against Transformer Engine",
    "F6": "MXFP8 linear where the hardware has none",
    "P1": "what a SwiGLU MLP saves for its backward",
    "P2": "peak memory of a SwiGLU MLP",
    "O1": "Python of a chain of four Identity, over an empty autograd function",
    "O2": "Linear + GELU + Linear on tiny tensors, over torch.nn",
    "O3": "tiny chains over Transformer Engine's fuser",
    "O4": "host time of a Triton launch",
    "O5": "capture in a CUDA graph",
    "O6": "plugin hooks called by a planned step",
    "O7": "first forward of a process",
    "C1": "GELU MLP 1024-4096-1024, forward and backward",
    "C2": "bias + GELU, backward in place",
    "C3": "RMSNorm, add + RMSNorm and SwiGLU, forward and backward",
    "C4": "bytes saved, against what the ops declare",
    "L1": "never slower than the same ops one by one",
}
RECIPES = {"DelayedScaling": (1.50, 1.56, 1.62), "Float8CurrentScaling": (1.42, 1.48, 1.55)}
RECIPES["Float8BlockScaling"] = (1.25, 1.29, 1.33)


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a ratio should reach.

    Attributes:
        versus: A provider; "sol": the share of the copy's bandwidth; "": the subject's own number.
        goal, stretch, bound: The numbers.
        subject: Whose.
        cost: Smaller is better: the subject over the other. Else how many times faster the subject is.
        exact: It must be equal.
        id: The goal's id, where it is not the case's.
    """

    versus: str
    goal: float
    stretch: float | None = None
    bound: float | None = None
    subject: str = "opfuse"
    cost: bool = False
    exact: bool = False
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload and one number of it.

    Attributes:
        id: Of its goals.
        chain: See :mod:`benchmarks.chains`.
        rows: Of the input.
        metric: inference, forward, backward, forward+backward, saved bytes, peak bytes, or one of these after
            "host ", the wall time of a GPU program.
        goals: What it is held to.
        suites: Where it belongs.
        width: Features of the input, where the chain does not say.
        dtype: A name in ``chains.DTYPES``.
        traffic: Bytes a row that must move, for the share of the bandwidth.
        recipe: Class of a quantization recipe.
        unfused: Whether opfuse counts without any fusion.
        special: A function in :mod:`benchmarks.special`, where it is no pass of the chain.
        rounds: How many; 0: the run's.
    """

    id: str
    chain: str
    rows: int
    metric: str
    goals: tuple[Goal, ...] = ()
    suites: tuple[str, ...] = ("gpu-full",)
    width: int = 0
    dtype: str = "bf16"
    traffic: int = 0
    recipe: str = ""
    unfused: bool = False
    special: str = ""
    rounds: int = 0

    @property
    def name(self) -> str:
        """What the case is called beside its id."""
        size = f" of {self.rows}" + (f"x{self.width}" if self.width else "")
        parts = [self.metric, self.chain, self.dtype + size, self.recipe]
        return ", ".join(part for part in parts if part)

    @property
    def ids(self) -> set[str]:
        """Of the case and of its goals."""
        return {self.id} | {goal.id for goal in self.goals if goal.id}


QUICK = ("gpu-quick", "gpu-full")
CPU = ("cpu",)


def sol(goal: float, stretch: float | None = None, bound: float = 1.0) -> Goal:
    """A share of the copy's bandwidth."""
    return Goal("sol", goal, stretch, bound)


def memory_bound() -> Iterator[Case]:
    """M1-M11."""
    rows, gelu, n = 8192, "bias:16384 gelu", 14336
    goals = sol(0.92, 0.97), Goal("eager", 1.8, bound=2.0)
    yield Case("M1", gelu, rows, "inference", goals, QUICK, traffic=4 * 16384)
    goals = sol(0.88, 0.93), Goal("eager", 1.22, bound=1.33)
    yield Case("M2", gelu, rows, "backward", goals, QUICK, traffic=6 * 16384)
    goals = sol(0.92, 0.97), Goal("eager", 1.55, bound=1.67), Goal("liger", 1.0)
    yield Case("M3", "swiglu", rows, "inference", goals, QUICK, 2 * n, traffic=6 * n)
    goals = sol(0.88, 0.93), Goal("eager", 1.55, bound=1.8), Goal("liger", 1.0)
    yield Case("M4", "swiglu", rows, "backward", goals, QUICK, 2 * n, traffic=10 * n)
    for h in (4096, 2048, 8192):
        suites, norm, both = QUICK if h == 4096 else ("gpu-full",), f"rmsnorm:{h}", f"add fork rmsnorm:{h}"
        yield Case("M5", norm, rows, "inference", (sol(0.92, 0.96), Goal("compile", 1.0)), suites, traffic=4 * h)
        goals = sol(0.85, 0.90), Goal("liger", 2.0, 3.0, 3.5), Goal("compile", 0.97)
        yield Case("M6", norm, rows, "backward", goals, suites, traffic=6 * h)
        goals = sol(0.90, 0.95), Goal("eager", 1.15, bound=1.25)
        yield Case("M7", both, rows, "inference", goals, suites, traffic=8 * h)
        goals = sol(0.85, 0.90), Goal("eager", 1.35, bound=1.5)
        yield Case("M8", both, rows, "backward", goals, suites, traffic=8 * h)
    options = {"suites": QUICK, "recipe": "DelayedScaling"}
    for w in (4096, 16384):
        goals = sol(0.90, 0.94), Goal("torchao", 1.0)
        yield Case("M9", "cast", rows, "inference", goals, width=w, traffic=3 * w, **options)
        goals = sol(0.85, 0.90), Goal("torchao", 1.0)
        yield Case("M9", "castt", rows, "inference", goals, width=w, traffic=4 * w, **options)
    goals = sol(0.85, 0.90), Goal("separate", 1.7, bound=2.0)
    yield Case("M10", "rmsnorm:4096 castt", rows, "inference", goals, traffic=4 * 4096, **options)
    options |= {"width": 2 * n}
    yield Case("M11", "swiglu castt", rows, "inference", (sol(0.85, 0.90),), traffic=6 * n, **options)
    yield Case("M11", "swiglu castt", rows, "backward", (sol(0.80, 0.87),), traffic=10 * n, **options)


def products() -> Iterator[Case]:
    """G1-G9."""
    goals = Goal("eager", 1.03, 1.05, 1.075), Goal("liger", 1.00, 1.02, 1.043), Goal("compile", 0.99, 1.01)
    yield Case("G7", LLAMA, 8192, "forward+backward", goals, QUICK)
    gelu = {"4096x16384": 8192, "2048x8192": 8192, "1024x4096": 50432, "768x3072": 16384}
    fast = [(1.05, 1.08, 1.10), (1.12, 1.16, 1.19), (1.22, 1.30, 1.38), (1.28, 1.40, 1.51)]
    stored = [(1.03, 1.05), (1.07, 1.10), (1.14, 1.18), (1.18, 1.22)]
    for (size, rows), free, kept in zip(gelu.items(), fast, stored, strict=True):
        others = Goal("compile-max", 1.0, id="G3"), Goal("library", 0.97, id="G3")
        yield Case("G2", f"linear:{size} gelu", rows, "inference", (Goal("eager", *free), *others), QUICK)
        goal = Goal("eager", kept[0], 1 + 0.8 * (kept[1] - 1), kept[1])
        yield Case("G4", f"linear:{size} gelu", rows, "forward", (goal,), QUICK)
    for size, goal in {"4096x4096": (1.07, 1.11, 1.14), "14336x4096": (1.02, 1.03, 1.04)}.items():
        yield Case("G5", f"matmul:{size} add", 8192, "inference", (Goal("eager", *goal),), QUICK)
    goals = Goal("eager", 1.06, 1.10, 1.12), Goal("liger", 1.02, 1.05, 1.07)
    yield Case("G6", "matmul:4096x28672 swiglu", 8192, "inference", goals, QUICK)
    goals = Goal("eager", 1.14, 1.20, 1.24), Goal("liger", 1.06, 1.10, 1.14)
    yield Case("G6", "matmul:2048x12288 swiglu", 8192, "inference", goals)
    goals = Goal("eager", 1.12, 1.20, 1.30), Goal("liger", 1.03, 1.08, 1.17), Goal("compile", 1.02)
    yield Case("G8", "matmul:1024x6144 swiglu matmul:3072x1024", 16384, "forward+backward", goals, QUICK)
    yield Case("G9", MLP, 50432, "forward+backward", (Goal("eager", 1.08, 1.13, 1.20),), QUICK)
    small = "linear:768x3072 gelu linear:3072x768"
    yield Case("G9", small, 16384, "forward+backward", (Goal("eager", 1.10, 1.17, 1.27),))
    for i, (rows, size) in enumerate(DENSE):
        goals = (Goal("eager", 0.90, 0.95),)
        yield Case("G1", f"matmul:{size}", rows, "inference", goals, QUICK if i < 4 else ("gpu-full",))


def fp8() -> Iterator[Case]:
    """F1-F6."""
    for recipe, numbers in RECIPES.items():
        goals = [Goal("eager", *numbers), Goal("te", 0.97, 1.02, id="F5")]
        if recipe == "Float8CurrentScaling":
            goals += [Goal(peer, 1.03, 1.08, id="F4") for peer in ("torchao", "torchao-rowwise")]
        yield Case("F3", LLAMA, 8192, "forward+backward", tuple(goals), QUICK, recipe=recipe)
    options = {"recipe": "DelayedScaling", "suites": QUICK}
    for rows, size in ((4096, "4096x4096"), (8192, "8192x8192")):
        yield Case("F1", f"matmul:{size}", rows, "inference", (Goal("library", 0.95, 1.0),), **options)
    options = {"recipe": "Float8BlockScaling"}
    for rows, size in ((16640, "5120x8192"), (8192, "7168x4096"), (8192, "2048x7168")):
        yield Case("F2", f"matmul:{size}", rows, "inference", (Goal("library", 0.75, 0.85, 1.5),), **options)
    options = {"recipe": "MXFP8BlockScaling"}
    yield Case("F6", "matmul:4096x4096", 4096, "inference", (Goal("eager", 0.80, 0.95),), **options)


def memory() -> Iterator[Case]:
    """P1, P2, C4."""
    goals = Goal("eager", 0.55, 0.50, 0.53, cost=True), Goal("liger", 0.72, None, 0.70, cost=True)
    yield Case("P1", LLAMA, 8192, "saved bytes", goals, QUICK)
    small = "matmul:512x3584 swiglu matmul:1792x512"
    yield Case("P1", small, 128, "saved bytes", goals[:1], CPU)
    yield Case("P2", LLAMA, 8192, "peak bytes", (Goal("eager", 0.75, 0.65, cost=True),), QUICK)
    norm = f"rmsnorm:256 {small.replace('512', '256')}"
    chains = ["linear:256x1024 gelu linear:1024x256", norm, "add fork rmsnorm:256", "linear:256x512 scale add"]
    for chain in chains:
        goals = tuple(Goal("plan", 1.0, exact=True, cost=True, subject=who) for who in ("opfuse-off", "opfuse"))
        yield Case("C4", chain, 64, "saved bytes", goals, CPU, special="saved_as_planned")


def overhead() -> Iterator[Case]:
    """O1-O7."""
    tiny = {"width": 16, "dtype": "fp32", "rounds": 40}
    identity, mlp = " ".join(["identity"] * 4), "linear:16x16 gelu linear:16x16"
    for metric, floor, off, on in (
        ("forward", (12 / 4.3, 9 / 4.3, 1.0), 1.7, (1.25, 1.05, 1.04)),
        ("forward+backward", (28 / 17, 23 / 17, 1.0), 1.4, (1.15, 1.0, 0.96)),
    ):
        yield Case("O1", identity, 4, metric, (Goal("bare", *floor, subject="opfuse-off", cost=True),), CPU, **tiny)
        goals = Goal("eager", *on, cost=True), Goal("eager", off, subject="opfuse-off", cost=True)
        yield Case("O2", mlp, 4, metric, goals, CPU, **tiny)
        goals = (Goal("te", 0.6, 0.4, cost=True),)
        for chain in (identity, mlp):
            yield Case("O3", chain, 4, f"host {metric}", goals, QUICK, unfused=True, **tiny)
    options = {"width": 16, "dtype": "fp32", "unfused": True}
    goals = (Goal("", 0, cost=True),)
    yield Case("O6", mlp, 4, "hook calls", goals, CPU, special="hook_calls", **options)
    yield Case("O4", "", 1, "us a launch", (Goal("", 5.0, 3.5, 2.2, cost=True),), QUICK, special="launch")
    for chain in (LLAMA, "linear:1024x4096 gelu", "add fork rmsnorm:4096"):
        yield Case("O5", chain, 512, "captured", (Goal("", 1, exact=True),), QUICK, special="captured", unfused=True)
    for state, goal in (("warm", (0.5, 0.3)), ("empty", (15.0, 8.0))):
        goals = (Goal("", *goal, cost=True),)
        yield Case("O7", LLAMA, 512, f"seconds, {state} cache", goals, QUICK, special="cold_start")


def cpu() -> Iterator[Case]:
    """C1-C3, and L1: a fusion is never slower than the same ops one by one."""
    both = "forward+backward"
    for rows in (1024, 4096):
        goals = Goal("eager", 2.0, 2.1, 2.1), Goal("eager-medium", 1.0, 1.05, 1.06), Goal("compile", 0.99, 1.02)
        yield Case("C1", MLP, rows, both, goals, CPU, dtype="fp32", rounds=5)
        goals = Goal("eager", 1.0, 1.10, 1.12), Goal("compile", 0.99, 1.02)
        yield Case("C1", MLP, rows, both, goals, CPU, rounds=5)
    for dtype, numbers in {"fp32": (2.3, 2.6, 2.6), "bf16": (2.3, 2.7, 2.7)}.items():
        goals, options = (Goal("eager", *numbers),), {"dtype": dtype, "special": "in_place"}
        yield Case("C2", "bias:4096 gelu", 4096, "backward in place", goals, CPU, **options)
    chains = {"rmsnorm:1024": (6, 10, 12.9), "add fork rmsnorm:1024": (5, 6, 6.2), "swiglu": (2.2, 2.5, 2.5)}
    for chain, numbers in chains.items():
        goals = Goal("eager", *numbers), Goal("compile", 1.0)
        yield Case("C3", chain, 4096, both, goals, CPU, width=1024 * (1 + (chain == "swiglu")))
    never_slower = (Goal("opfuse-off", 0.97),)
    for rows, k, n in ((16, 64, 256), (128, 256, 1024), (1024, 256, 1024), (1024, 1024, 4096)):
        for dtype in ("fp32", "bf16"):
            mlp, add = f"linear:{k}x{n} gelu linear:{n}x{k}", f"linear:{n}x{k} add"
            for chain in (mlp, add, f"matmul:{n}x{k} scale add"):
                for metric in ("inference", "forward", both):
                    yield Case("L1", chain, rows, metric, never_slower, CPU, dtype=dtype, rounds=9)


CASES = [*overhead(), *memory(), *products(), *memory_bound(), *fp8(), *cpu()]
"""Every case, the most important first."""
