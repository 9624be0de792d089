"""Who runs a workload: opfuse, PyTorch, and the peers.

Each is built from the same chain, or left out with a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuse
from opfuse.core.quantization import Usage
from opfuse.core.recipe_lookup import new_quantizer

from . import hand
from .chains import FP8_SCALE, PLAIN, Cast, Layer, Work, parse, plain, widths
from .steps import alone

MAX_TUNED = 4
"""GEMM chains that ``compile-max`` tunes in a run, since each takes minutes."""

PASSES = {"inference": ("forward",), "forward": ("forward",), "backward": ("backward",)}


class Skip(Exception):
    """Why a provider does not run a case."""


class NotBuilt(Skip):
    """opfuse has nothing for it yet."""


@dataclasses.dataclass
class Built:
    """A provider's form of a chain.

    Attributes:
        model: Takes the inputs, gives the outputs.
        context: Makes the context to call it in.
        config: What a reader should know of it.
        reference: The right outputs, where they are not the chain's: those of operands that are
            quantized already.
    """

    model: Any
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    reference: list[Tensor] | None = None

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters()) if isinstance(self.model, nn.Module) else []


class Hand(nn.Module):
    """A function of the inputs, with a model's parameters."""

    def __init__(self, function: Callable[..., Any], model: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@contextlib.contextmanager
def _medium():
    wanted = {torch.backends.cuda.matmul: "tf32", torch.backends.mkldnn.matmul: "bf16"}
    before = {products: products.fp32_precision for products in wanted}
    try:
        for products, precision in wanted.items():
            products.fp32_precision = precision
        yield
    finally:
        for products, precision in before.items():
            products.fp32_precision = precision


def eager(work: Work, case: Any, compiling: bool = False, medium: bool = False) -> Built:
    """PyTorch's own modules.

    With ``compiling`` they run under ``torch.compile`` as it comes. With ``medium`` their matrix
    products have medium precision.
    """
    if medium and case.dtype != "fp32":
        raise Skip("medium precision is for fp32")
    model = work.fill(plain(work.chain))
    model = torch.compile(model, fullgraph=True, dynamic=False) if compiling else model
    return Built(model, _medium if medium else contextlib.nullcontext)


def separate(work: Work, case: Any) -> Built:
    """Each layer compiled on its own: one good kernel for each."""
    model = work.fill(plain(work.chain))
    return Built(
        nn.Sequential(*[torch.compile(layer, fullgraph=True, dynamic=False) for layer in model])
    )


_tuned: set[str] = set()


def compile_max(work: Work, case: Any) -> Built:
    """``torch.compile`` in its strongest honest form.

    It is tuned, with TMA and mixed reductions, without CUDA graphs.
    """
    from torch._inductor import config, list_mode_options

    if work.device.type != "cuda":
        raise Skip("what it tunes is for GPUs")
    if work.gemms and len(_tuned | {work.chain}) > MAX_TUNED:
        raise Skip(f"tunes at most {MAX_TUNED} GEMM chains in a run")
    _tuned.update([work.chain] * work.gemms)
    wanted = {"triton.enable_persistent_tma_matmul", "triton.mix_order_reduction"} & set(
        config.get_config_copy()
    )
    options = list_mode_options("max-autotune-no-cudagraphs") | dict.fromkeys(wanted, True)
    model = torch.compile(
        work.fill(plain(work.chain)), fullgraph=True, dynamic=False, options=options
    )
    return Built(model, config={"options": options})


OPS = {"linear": "Linear", "bias": "Bias", "gelu": "GELU", "swiglu": "SwiGLU", "rmsnorm": "RMSNorm"}
OPS |= {
    "layernorm": "LayerNorm",
    "l2norm": "L2Normalization",
    "qgelu": "QGELU",
    "relu": "ReLU",
    "srelu": "SReLU",
}
OPS |= {
    "silu": "SiLU",
    "glu": "GLU",
    "geglu": "GEGLU",
    "qgeglu": "QGEGLU",
    "reglu": "ReGLU",
    "sreglu": "SReGLU",
}
OPS |= {"situglu": "SiTUGLU", "clampedswiglu": "ClampedSwiGLU"}
OPS |= {"identity": "Identity", "add": "AddExtraInput", "fork": "MakeExtraOutput"}


def table(ops: Any) -> dict[str, Callable[..., Any]]:
    """The layers of a chain in fusible ops: opfuse's, or Transformer Engine's of the same names."""
    matmul = functools.partial(ops.Linear, bias=False)
    named = {name: getattr(ops, of) for name, of in OPS.items() if hasattr(ops, of)}
    return named | {"matmul": matmul, "product": matmul, "scale": lambda: ops.ConstantScale(0.5)}


def recipe_of(name: str) -> opfuse.Recipe:
    """A recipe out of a plugin, by the name of its class."""
    for cls in opfuse.plugins.recipes().values():
        if cls.__name__ == name:
            return cls()
    raise NotBuilt(f"no plugin offers the recipe {name}")


def with_opfuse(work: Work, case: Any, selection: str | None = None) -> Built:
    """Chains of opfuse with every plugin installed, or with the selected ones.

    Without a selection, one of the plugins must fuse something here.
    """
    recipe = recipe_of(case.recipe) if case.recipe else None
    *body, last = parse(work.chain)
    casts = last.name in ("cast", "castt")
    if casts:  # it is for a linear next to it that wants the quantized tensor
        wide = case.width if case.metric == "backward" else widths(work.chain, case.width)[-1]
        linear = Layer("matmul", (wide, wide))
        body = [linear, *body] if case.metric == "backward" else [*body, linear]
    layers = body if casts else [*body, last]
    model = opfuse.Sequential(*[table(opfuse.ops)[name](*sizes) for name, sizes in layers])

    @contextlib.contextmanager
    def context():
        with opfuse.plugins.using(selection), opfuse.autocast(recipe is not None, recipe=recipe):
            yield

    with context():
        if casts:
            model = model.to(work.device, work.dtype)
            return Built(
                _quantizing(model, work, case), context, {"checked": case.metric != "backward"}
            )
        work.fill(model)
        steps = opfuse.explain(model, *work.inputs[0]).to_dict()
        wanted = PASSES.get(case.metric.split()[0], ("forward", "backward"))
        fused = [
            f"{direction} {step['fusion']}"
            for direction in wanted
            for step in steps[direction]
            if step["fusion"]
        ]
        if not fused and selection is None and not case.unfused:
            raise NotBuilt("no plugin fuses anything here")
        if last.name != "product":
            return Built(model, context, {"fused": fused})
        step = alone(model, work.inputs[0], opfuse.ops.BasicLinear)
        (ctx,) = step.ctxs
        quantize, quantize_weight = ctx.quantizers["input"], ctx.quantizers["weight"]
        ctx.params = (quantize_weight(ctx.params[0]),)
        made = product(
            work, quantize, step.call, ctx.params[0].dequantize(), lambda x: x.dequantize()
        )
        return dataclasses.replace(made, context=context, config={"fused": fused})


def _quantizing(model: opfuse.Sequential, work: Work, case: Any) -> nn.Module:
    """The cast alone, or the step that ends in it."""
    names = [layer.name for layer in parse(work.chain)]
    if len(names) == 1:
        role = opfuse.QuantizerRole("linear", "input")
        env = opfuse.Environment(work.device, None, work.dtype)
        quantizer = new_quantizer(recipe_of(case.recipe), role, env)
        usage = Usage(True, names == ["castt"])
        return Hand(lambda x: quantizer.quantize(x, usage))
    op = {"rmsnorm": opfuse.ops.RMSNorm, "swiglu": opfuse.ops.SwiGLU}[names[0]]
    backward = case.metric == "backward"
    step = alone(model, work.inputs[0], op, backward=backward)
    if step.quantizer is None:
        raise NotBuilt(f"no plugin writes the result of {op.__name__} quantized")
    return Hand((lambda x: step.call(work.grads[0])) if backward else step.call)


def product(
    work: Work, quantize: Any, multiply: Any, weight: Tensor, dequantize: Callable[[Any], Tensor]
) -> Built:
    """A product by a quantized weight alone.

    Inputs are quantized beforehand; the arguments of the model only say which one is meant.
    """
    ready = {id(x): quantize(x.detach()) for (x,) in work.inputs}
    first = dequantize(ready[id(work.inputs[0][0])]).double()
    return Built(
        Hand(lambda x: multiply(ready[id(x)])), reference=[first @ weight.detach().double().t()]
    )


def liger(work: Work, case: Any) -> Built:
    """Liger's Triton kernels in place of norms, residual norms and SwiGLU.

    They do not overwrite their inputs, so that passes repeat.
    """
    if work.device.type != "cuda":
        raise Skip("its kernels need a GPU")
    need("liger_kernel")
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def norm(size: int) -> nn.Module:
        inner = nn.RMSNorm(size, eps=1e-5)
        return Hand(
            lambda x: LigerRMSNormFunction.apply(x, inner.weight, 1e-5, 0.0, "llama", False), inner
        )

    mine = {"rmsnorm": norm, "swiglu": lambda: Hand(LigerFusedGateUpSiLUMulFunction.apply)}
    names = [layer.name for layer in parse(work.chain)]
    if not set(mine) & set(names):
        raise Skip("it has no kernel for a layer of this chain")
    if names == ["add", "fork", "rmsnorm"]:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as AddNorm

        model = work.fill(plain(work.chain))
        (weight,) = model.parameters()
        options = 1e-5, 0.0, "llama", False
        return Built(Hand(lambda x, extra: AddNorm.apply(x, extra, weight, *options), model))
    return Built(work.fill(plain(work.chain, PLAIN | mine)))


def torchao(work: Work, case: Any, recipe: str = "tensorwise") -> Built:
    """The FP8 training or casts of torchao, compiled."""
    need("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    if work.chain in ("cast", "castt"):

        def cast(x):
            y = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())
            return (
                (y._data, y._data.t().contiguous(), y._scale)
                if work.chain == "castt"
                else (y._data, y._scale)
            )

        model, x = (
            Hand(torch.compile(cast, fullgraph=True, dynamic=False)),
            work.inputs[0][0].detach(),
        )
        *_, scale = model(x)  # its own, where the other casts have a fixed one
        return Built(model, reference=[x.double() * scale / FP8_SCALE])
    if not case.recipe or not work.gemms:
        raise Skip("it converts FP8 linear layers, and there is none")
    model = convert_to_float8_training(
        work.fill(plain(work.chain)), config=Float8LinearConfig.from_recipe_name(recipe)
    )
    return Built(torch.compile(model, fullgraph=True, dynamic=False), config={"recipe": recipe})


def te(work: Work, case: Any) -> Built:
    """Transformer Engine's fuser."""
    if work.device.type != "cuda":
        raise Skip("it needs CUDA")
    need("transformer_engine")
    import transformer_engine.pytorch as te_pytorch
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import ops

    model = work.fill(
        ops.Sequential(*[table(ops)[name](*sizes) for name, sizes in parse(work.chain)])
    )
    if not case.recipe:
        return Built(model)
    context = functools.partial(te_pytorch.autocast, recipe=getattr(recipes, case.recipe)())
    return Built(model, context, {"recipe": case.recipe})


def library(work: Work, case: Any) -> Built:
    """What PyTorch calls itself, by hand: a GEMM with GELU in its epilogue, or scaled in FP8."""
    names, params = [layer.name for layer in parse(work.chain)], work.params
    if names == ["linear", "gelu"] and case.metric == "inference":
        weight, bias = params
        return Built(Hand(lambda x: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)))
    if names != ["product"] or not case.recipe or work.device.type != "cuda":
        raise Skip("PyTorch has no such call for this chain")
    if case.recipe == "Float8BlockScaling":
        return _blockwise(work)
    cast, one = Cast(), torch.full_like(params[0][0, 0], 1 / FP8_SCALE, dtype=torch.float32)
    weight = cast(params[0])[0]
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    multiply = functools.partial(torch._scaled_mm, mat2=weight.t(), **options)
    return product(
        work,
        lambda x: cast(x)[0],
        multiply,
        weight.double() / FP8_SCALE,
        lambda y: y.double() / FP8_SCALE,
    )


def blocks(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """FP8 with a scale for each ``rows`` x 128, and the scales."""
    tiles = x.unflatten(0, (-1, rows)).unflatten(-1, (-1, 128)).float()
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    return (tiles / scale).to(torch.float8_e4m3fn).view_as(x), scale[:, 0, :, 0]


def unblocked(y: Tensor, scale: Tensor) -> Tensor:
    """The values that :func:`blocks` represents."""
    return y.double() * scale.repeat_interleave(len(y) // len(scale), 0).repeat_interleave(128, 1)


def _blockwise(work: Work) -> Built:
    """Inputs with a scale for each 1x128, a weight with one for each 128x128."""
    w, scale_w = blocks(work.params[0], 128)
    step, kinds = functools.partial(F.scaled_mm, output_dtype=torch.bfloat16), F.ScalingType

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = blocks(x, 1)
        # the library wants the scales of a column next to each other
        return y, scale.t().contiguous().t()

    def multiply(x: tuple[Tensor, Tensor]) -> Tensor:
        return step(x[0], w.t(), x[1], kinds.BlockWise1x128, scale_w.t(), kinds.BlockWise128x128)

    return product(work, quantize, multiply, unblocked(w, scale_w), lambda x: unblocked(*x))


def by_hand(work: Work, case: Any) -> Built:
    """A single op as an autograd function."""
    names = [layer.name for layer in parse(work.chain)]
    function = hand.alone(names[0]) if len(names) == 1 else None
    if function is None:
        raise Skip("nobody wrote this chain by hand")
    model = work.fill(plain(work.chain))
    return Built(Hand(lambda x: function(x, *model.parameters()), model))


class Bare(torch.autograd.Function):
    """The floor of a chain's cost in Python: an autograd function that does nothing."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def bare(work: Work, case: Any) -> Built:
    """An autograd function that does nothing, for a chain that does nothing."""
    return Built(Bare.apply)


def need(module: str) -> None:
    """Skip without a peer."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module} is not installed")


PROVIDERS: dict[str, Callable[[Work, Any], Built]] = {
    "opfuse": with_opfuse,
    "opfuse-off": functools.partial(with_opfuse, selection=""),
    "eager": eager,
    "eager-medium": functools.partial(eager, medium=True),
    "compile": functools.partial(eager, compiling=True),
    "compile-medium": functools.partial(eager, compiling=True, medium=True),
    "compile-max": compile_max,
    "separate": separate,
    "liger": liger,
    "torchao": torchao,
    "torchao-rowwise": functools.partial(torchao, recipe="rowwise"),
    "te": te,
    "library": library,
    "bare": bare,
    "hand": by_hand,
}
