"""Workloads: a line of text is a chain of layers, and every provider builds that chain from it.

``"linear:1024x4096 gelu linear:4096x1024"`` is an MLP. ``matmul`` is a linear layer without a bias,
``product`` its matrix product alone, of operands that are quantized already. ``add`` takes an extra
input, ``fork`` gives an extra output, ``cast`` and ``castt`` round to FP8 with a fixed scale, the
second with a transposed copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FP8_SCALE = 32.0
GEMMS = ("linear", "matmul", "product")
GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu", "clampedswiglu")
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}


class Layer(NamedTuple):
    """A layer of a chain."""

    name: str
    sizes: tuple[int, ...]


def parse(chain: str) -> list[Layer]:
    """The layers of a chain."""
    parts = [part.partition(":") for part in chain.split()]
    return [
        Layer(name, tuple(int(size) for size in sizes.split("x") if size))
        for name, _, sizes in parts
    ]


def widths(chain: str, width: int) -> list[int]:
    """The features before each layer and after the last one; ``width`` where no layer says."""
    layers = parse(chain)
    first = next(
        (layer.sizes[0] * (1 + (layers[0].name in GATED)) for layer in layers if layer.sizes), width
    )
    found = [first]
    for layer in layers:
        last = found[-1] // 2 if layer.name in GATED else found[-1]
        found.append(layer.sizes[-1] if layer.sizes else last)
    return found


def flops(chain: str, rows: int, metric: str) -> int:
    """Of the matrix products: two in the backward for each one in the forward."""
    times = {"backward": 2, "forward+backward": 3}.get(metric, 1)
    return times * sum(2 * rows * math.prod(sizes) for name, sizes in parse(chain) if name in GEMMS)


class Bias(nn.Module):
    """A bias alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """Half of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Function(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


class SwiGLU(nn.Module):
    """``silu(a) b`` over the two halves."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b


def over_halves(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A function of the two halves of the features."""
    return lambda: Function(lambda x: function(*x.chunk(2, -1)))


def clamped(a: Tensor, b: Tensor) -> Tensor:
    """The gated activation of gpt-oss."""
    a = a.clamp(max=7.0)
    return a * torch.sigmoid(1.702 * a) * (b.clamp(-7.0, 7.0) + 1)


class Cast(nn.Module):
    """Round to FP8, and collect the largest magnitude, as delayed scaling does.

    The reference, in fp64, passes unchanged.
    """

    def __init__(self, transpose: bool = False) -> None:
        super().__init__()
        self.transpose = transpose

    def forward(self, x: Tensor) -> Any:
        if x.dtype is torch.float64:
            return x
        y = (x * FP8_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (y, x.abs().amax(), y.t().contiguous()) if self.transpose else (y, x.abs().amax())


class Branches(nn.Module):
    """A chain with extra inputs and outputs; ``add`` and ``fork`` are None in it."""

    def __init__(self, chain: str, modules: Iterable[nn.Module | None]) -> None:
        super().__init__()
        self.names = [layer.name for layer in parse(chain)]
        self.inner = nn.ModuleList([module or nn.Identity() for module in modules])

    def forward(self, x: Tensor, *extras: Tensor) -> Any:
        given, outputs = iter(extras), []
        for name, module in zip(self.names, self.inner, strict=True):
            if name == "add":
                x = x + next(given)
            elif name == "fork":
                outputs.append(x)
            else:
                x = module(x)
        return (x, *outputs) if outputs else x


PLAIN: dict[str, Callable[..., Any]] = {
    "linear": nn.Linear,
    "matmul": (without_bias := lambda k, n: nn.Linear(k, n, bias=False)),
    "product": without_bias,
    "bias": Bias,
    "gelu": lambda: nn.GELU("tanh"),
    "swiglu": SwiGLU,
    "rmsnorm": lambda size: nn.RMSNorm(size, eps=1e-5),
    "layernorm": nn.LayerNorm,
    "l2norm": lambda: Function(lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "qgelu": lambda: Function(lambda x: x * torch.sigmoid(1.702 * x)),
    "srelu": lambda: Function(lambda x: torch.relu(x).square()),
    "glu": over_halves(lambda a, b: torch.sigmoid(a) * b),
    "geglu": over_halves(lambda a, b: F.gelu(a, approximate="tanh") * b),
    "qgeglu": over_halves(lambda a, b: a * torch.sigmoid(1.702 * a) * b),
    "reglu": over_halves(lambda a, b: torch.relu(a) * b),
    "sreglu": over_halves(lambda a, b: torch.relu(a).square() * b),
    "situglu": over_halves(
        lambda a, b: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
    ),
    "clampedswiglu": over_halves(clamped),
    "scale": Scale,
    "identity": nn.Identity,
    "cast": Cast,
    "castt": lambda: Cast(transpose=True),
    "add": lambda: None,
    "fork": lambda: None,
}


def plain(chain: str, table: Mapping[str, Callable[..., Any]] = PLAIN) -> nn.Module:
    """The chain in PyTorch's own modules, or in those of another table."""
    layers = parse(chain)
    modules = [table[name](*sizes) for name, sizes in layers]
    return (
        Branches(chain, modules)
        if {"add", "fork"} & {layer.name for layer in layers}
        else nn.Sequential(*modules)
    )


class Work:
    """A chain's parameters and inputs on a device, drawn once for all providers.

    The numbers are normal, never zeros.

    Args:
        chain: The chain.
        rows: Of the input.
        width: Features of the input, where the chain does not say.
        dtype: A name in ``DTYPES``.
        device: Where.
        sets: How many sets of inputs, for timers that rotate.
    """

    def __init__(
        self, chain: str, rows: int, width: int, dtype: str, device: torch.device, sets: int = 1
    ) -> None:
        self.chain, self.rows, self.dtype, self.device = chain, rows, DTYPES[dtype], device
        self.generator = torch.Generator(device).manual_seed(0)
        at = widths(chain, width)
        names = [layer.name for layer in parse(chain)]
        with torch.device("meta"):
            shapes_only = plain(chain)
        self.params = [self._param(like) for like in shapes_only.parameters()]
        shapes = [at[0], *(at[i] for i, name in enumerate(names) if name == "add")]
        self.inputs = [
            [self._normal(rows, n).requires_grad_() for n in shapes] for _ in range(sets)
        ]
        self.grads = [
            self._normal(rows, n)
            for n in (at[-1], *(at[i] for i, n in enumerate(names) if n == "fork"))
        ]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def _param(self, like: nn.Parameter) -> Tensor:
        return (
            self._normal(*like.shape) / math.sqrt(like.shape[-1])
            if like.ndim > 1
            else 1 + self._normal(*like.shape)
        )

    def fill(self, model: nn.Module) -> nn.Module:
        """Give a provider's model the parameters."""
        model = model.to(device=self.device, dtype=self.dtype)
        with torch.no_grad():
            for mine, value in zip(model.parameters(), self.params, strict=True):
                mine.copy_(value)
        return model

    @property
    def gemms(self) -> int:
        """How many matrix products the forward has."""
        return sum(layer.name in GEMMS for layer in parse(self.chain))

    def results(
        self, model: Callable[..., Any], params: list[Tensor], inputs: list[Tensor], backward: bool
    ) -> list[Tensor]:
        """The outputs, and with a backward the gradients of inputs and parameters.

        Without a backward, gradients stay on or off as they are.
        """
        if not backward:
            return [
                comparable(y.detach() if isinstance(y, Tensor) else y)
                for y in several(model(*inputs))
            ]
        outputs = several(model(*inputs))
        grads = [grad.to(outputs[0].dtype) for grad in self.grads]
        return [*outputs, *torch.autograd.grad(outputs, [*inputs, *params], grads)]

    def reference(self, backward: bool) -> list[Tensor]:
        """The same in fp64 and PyTorch's own operations."""
        with self.device:
            model = self.fill(plain(self.chain)).double()
        inputs = [x.detach().double().requires_grad_() for x in self.inputs[0]]
        with torch.set_grad_enabled(backward):
            return self.results(model, list(model.parameters()), inputs, backward)


def several(outputs: Any) -> tuple[Any, ...]:
    """Outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def comparable(y: Any) -> Tensor:
    """An output as a plain tensor: FP8 and quantized tensors by the values that they represent."""
    if isinstance(y, Tensor):
        return y.float() / FP8_SCALE if y.dtype is torch.float8_e4m3fn else y
    return y.dequantize()


def error(results: list[Tensor], reference: list[Tensor]) -> float:
    """The largest relative Frobenius error.

    It is infinite with NaN, with another shape than the reference, and with too few results.
    """
    pairs = list(zip(results, reference, strict=False))  # a cast gives more than the reference
    if len(results) < len(reference) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    with torch.no_grad():
        errors = [float((a.double() - b).norm() / (b.norm() + 1e-30)) for a, b in pairs]
    return max(math.inf if math.isnan(e) else e for e in errors)
