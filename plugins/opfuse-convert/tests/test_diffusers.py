"""Adaptive norms: the blocks of diffusers, and the same written in other ways."""

import copy
import os
import warnings

import pytest
import torch
from opfuse_convert import converted
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse.report.calls import saved_bytes

D, ROWS = 16, (2, 5)


def drawn(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def made(build, std=0.3):
    """A module with parameters that matter; those of an adaptive norm often begin at zero."""
    generator = torch.Generator().manual_seed(2)
    module = build().double().eval()
    for param in module.parameters():
        param.data = std * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return module


def step(module, given, dtype=torch.float64):
    """The outputs, and the gradients of the inputs and parameters, in fp64."""
    module = module.to(dtype)
    cast = [t.to(dtype) if t.is_floating_point() else t for t in given.values()]
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in cast]
    module.zero_grad()
    made = module(**dict(zip(given, leaves, strict=True)))
    made = getattr(made, "sample", made)
    outputs = [made] if isinstance(made, torch.Tensor) else [y for y in made if y is not None]
    grads = drawn(*[y.shape for y in outputs], dtype=dtype)
    torch.autograd.backward(outputs, grads)
    found = [*outputs, *[t.grad for t in (*leaves, *module.parameters())]]
    return [None if t is None else t.detach().double() for t in found]


def compare(build, given, ops, std=0.3):
    """Convert a module, and compare it in each dtype with the one that was not converted."""
    module = made(build, std)
    other = copy.deepcopy(module)
    report = opfuse.convert(other)
    assert [row.ops for row in report.converted if "Modulate" in row.ops] == ops, str(report)
    exact = step(module, given)
    for got, wanted in zip(step(other, given), exact, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    ran = [path for path, why in converted(other).items() if not why]
    assert len(ran) >= len(ops), converted(other)
    for dtype, size in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        # parameters and inputs are rounded, and then both compute with the same
        twins = [copy.deepcopy(each).to(dtype) for each in (module, other)]
        rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
        reference = step(copy.deepcopy(twins[0]).double(), rounded)
        for mine, own, wanted in zip(
            step(twins[1], rounded, dtype), step(twins[0], rounded, dtype), reference, strict=True
        ):
            if wanted is not None:
                most = 2 * (own - wanted).norm() + size * (wanted.norm() + 0.1)
                assert (mine - wanted).norm() <= most
    return report


MODULATED = ("LayerNorm", "Modulate")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, at import
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import diffusers
        from diffusers.models import attention, normalization
        from diffusers.models.transformers import transformer_flux
    except ImportError:
        diffusers = None

needs_diffusers = pytest.mark.skipif(diffusers is None, reason="diffusers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

NORMS = {
    "zero": (lambda: normalization.AdaLayerNormZero(D), {"x": (*ROWS, D), "emb": (2, D)}),
    "zero, single": (
        lambda: normalization.AdaLayerNormZeroSingle(D),
        {"x": (*ROWS, D), "emb": (2, D)},
    ),
    "continuous": (
        lambda: normalization.AdaLayerNormContinuous(D, D, elementwise_affine=False),
        {"x": (*ROWS, D), "conditioning_embedding": (2, D)},
    ),
    "continuous, affine": (
        lambda: normalization.AdaLayerNormContinuous(D, D),
        {"x": (*ROWS, D), "conditioning_embedding": (2, D)},
    ),
    "of a dimension": (
        lambda: normalization.AdaLayerNorm(D, chunk_dim=1),
        {"x": (*ROWS, D), "temb": (2, D)},
    ),
}


@needs_diffusers
@pytest.mark.parametrize("name", NORMS)
def test_adaptive_norms(name):
    build, shapes = NORMS[name]
    compare(build, dict(zip(shapes, drawn(*shapes.values()), strict=True)), [MODULATED])


@needs_diffusers
def test_an_adaptive_norm_of_embeddings():
    given = {"x": drawn((*ROWS, D))[0], "timestep": torch.tensor(3)}
    compare(lambda: normalization.AdaLayerNorm(D, num_embeddings=10), given, [MODULATED])


WHOLE = (*MODULATED, "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias")

BLOCKS = {
    "PixArt": (
        lambda: attention.BasicTransformerBlock(
            D,
            2,
            8,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            activation_fn="gelu-approximate",
        ),
        {"hidden_states": (*ROWS, D), "timestep": (2, 6 * D)},
        [(*WHOLE, *MODULATED)],
    ),
    "Flux": (
        lambda: transformer_flux.FluxTransformerBlock(D, 2, 8),
        {"hidden_states": (*ROWS, D), "encoder_hidden_states": (2, 3, D), "temb": (2, D)},
        [(*WHOLE, *MODULATED), MODULATED, MODULATED],
    ),
    "Flux, single": (
        lambda: transformer_flux.FluxSingleTransformerBlock(D, 2, 8),
        {"hidden_states": (*ROWS, D), "encoder_hidden_states": (2, 3, D), "temb": (2, D)},
        [MODULATED],
    ),
    "SD3": (
        lambda: attention.JointTransformerBlock(D, 2, 8),
        {"hidden_states": (*ROWS, D), "encoder_hidden_states": (2, 3, D), "temb": (2, D)},
        [(*WHOLE, *MODULATED), MODULATED, MODULATED],
    ),
    "SD3, the last one": (
        lambda: attention.JointTransformerBlock(D, 2, 8, context_pre_only=True),
        {"hidden_states": (*ROWS, D), "encoder_hidden_states": (2, 3, D), "temb": (2, D)},
        [WHOLE, MODULATED, MODULATED],
    ),
}


@needs_diffusers
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    """A chain begins at a norm, and ends with a feed-forward; the other norm has a chain, too."""
    build, shapes, ops = BLOCKS[name]
    given = dict(zip(shapes, drawn(*shapes.values()), strict=True))
    compare(build, given, ops)


FEED_FORWARDS = {
    "gelu": "GELU",
    "gelu-approximate": "GELU",
    "linear-silu": "SiLU",
    "geglu": "GEGLUGateLast",
    "swiglu": "SwiGLUGateLast",
}
"""The activation of each kind; those of diffusers have the gate in the second half."""


def feed_forward(kind, dropout=0.0, final=False):
    return attention.FeedForward(D, dropout=dropout, activation_fn=kind, final_dropout=final)


@needs_diffusers
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_feed_forwards(kind, final):
    """Its own forward has positional arguments that it ignores, and asks for a keyword."""
    module = made(lambda: feed_forward(kind, 0.5, final))
    other = copy.deepcopy(module)
    report = opfuse.convert(other)
    ops = {row.cls: row.ops for row in report.converted}["FeedForward"]
    linear = "BasicLinear", "Bias"
    assert ops == (*linear, FEED_FORWARDS[kind], "Dropout", *linear, *["Dropout"] * final)
    given = {"hidden_states": drawn((*ROWS, D))[0]}
    for training in (False, True, False):
        found = []
        for each in (module, other):
            torch.manual_seed(3)
            found.append(step(each.train(training), given))
        for got, wanted in zip(*reversed(found), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        assert converted(other)[""] == ""
    with pytest.warns(FutureWarning, match="scale"):
        expected = module(given["hidden_states"], scale=2.0)
    with pytest.warns(FutureWarning, match="scale"):
        torch.testing.assert_close(other(given["hidden_states"], scale=2.0), expected)
    seen = []
    other.net[0].proj.register_forward_hook(lambda *of: seen.append(of[-1]))
    torch.testing.assert_close(other(**given), module(**given))
    assert len(seen) == 1 and "hooks" in converted(other)[""]
    opfuse.revert(other)
    torch.testing.assert_close(other(**given), module(**given))


@needs_diffusers
def test_a_whole_dit():
    given = {
        "hidden_states": drawn((2, 4, 8, 8))[0],
        "timestep": torch.tensor([1, 9]),
        "class_labels": torch.tensor([3, 4]),
    }
    report = compare(
        lambda: diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
        ),
        given,
        [WHOLE, MODULATED] * 2,
        std=0.1,  # larger errors of bf16 would grow from block to block
    )
    assert {row.cls for row in report.converted} >= {"BasicTransformerBlock", "FeedForward"}


@needs_diffusers
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            lambda: normalization.AdaLayerNormZero(D, norm_type="fp32_layer_norm"),
            "norm: no op computes what FP32LayerNorm does",
        ),
        (
            lambda: normalization.AdaLayerNormContinuous(D, D, norm_type="rms_norm"),
            "norm: RMSNorm cannot be recognised: it asks whether a value is None",
        ),
    ],
)
def test_what_is_left_says_why(build, why):
    report = opfuse.convert(build())
    assert not report.converted and [row.reason for row in report.left] == [why]


@needs_diffusers
@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_feed_forwards_in_each_dtype(kind):
    report = compare(lambda: feed_forward(kind), {"hidden_states": drawn((*ROWS, D))[0]}, [])
    assert "FeedForward" in {row.cls for row in report.converted}


@needs_diffusers
@pytest.mark.parametrize(
    ("kind", "eager", "numbers"), [("gelu-approximate", 9, 5), ("geglu", 17, 9)]
)
def test_what_a_feed_forward_keeps(kind, eager, numbers):
    """Multiples of its width: its input, and the input of the activation."""
    pytest.importorskip("opfuse_mlp", reason="opfuse-plugin-mlp computes the rest again")
    module, (x,) = made(lambda: feed_forward(kind)), drawn((*ROWS, D))

    def kept():
        count = saved_bytes(lambda: module(x.requires_grad_()), module.parameters())
        return count / x.nbytes

    assert kept() == eager
    opfuse.convert(module)
    with opfuse.options(prefer="memory"):
        assert kept() == numbers


@needs_diffusers
@pytest.mark.parametrize("before", [0.0, 0.5])
def test_a_dropout_whose_probability_changes(before):
    """One of probability 0 is in no chain."""
    module, (x,) = made(lambda: feed_forward("gelu", before)).train(), drawn((*ROWS, D))
    opfuse.convert(module)
    own = opfuse.revert(copy.deepcopy(module))
    for p in (before, 0.25, 0.0):
        found = []
        for each in (module, own):
            each.net[1].p = p
            torch.manual_seed(3)
            found.append(each(x))
        torch.testing.assert_close(*found)
        assert (converted(module)[""] == "") == (bool(before) or not p)


# The same, as others write it


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """A block without its attention, as in the code of the paper."""

    def __init__(self, norm=lambda: nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)):
        super().__init__()
        self.norm2 = norm()
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 3 * D))

    def forward(self, x, c):
        shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(3, dim=1)
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))

    def mlp(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


MLP = ("BasicLinear", "Bias", "GELU", "BasicLinear", "Bias")


@pytest.mark.parametrize("norm", ["LayerNorm", "LayerNorm affine", "RMSNorm"])
def test_a_block_as_in_the_paper(norm):
    cls, *affine = norm.split()
    norms = lambda: getattr(nn, cls)(D, eps=1e-6, elementwise_affine=bool(affine))  # noqa: E731
    x, c = drawn((*ROWS, D), (2, D))
    compare(lambda: DiTBlock(norms), {"x": x, "c": c}, [(cls, "Modulate", *MLP)])


class Forward(nn.Module):
    """A norm, and a linear that gives scale and shift."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.norm = nn.LayerNorm(D, elementwise_affine=False, eps=eps)
        self.linear = nn.Linear(D, 2 * D)


class Reversed(Forward):
    def forward(self, x, c):
        scale, shift = self.linear(c).chunk(2, -1)
        return shift[:, None, :] + (scale[:, None, :] + 1) * self.norm(x)


class ByFunctions(Forward):
    def forward(self, x, c):
        scale, shift = torch.chunk(self.linear(c), 2, -1)
        return torch.add(
            torch.mul(self.norm(x), torch.add(torch.unsqueeze(scale, 1), 1.0)), shift.unsqueeze(1)
        )


class ViewsBefore(Forward):
    def forward(self, x, c):
        scale, shift = self.linear(c)[:, None].chunk(2, -1)
        h = self.norm(x)
        return h * (1 + scale) + shift


class OneValue(Forward):
    def forward(self, x, c):
        scale = self.linear(c).chunk(2, -1)[0][:, None]
        return self.norm(x) * (1 + scale) + scale


@pytest.mark.parametrize("cls", [Reversed, ByFunctions, ViewsBefore, OneValue])
def test_other_ways_to_write_it(cls):
    x, c = drawn((*ROWS, D), (2, D))
    compare(cls, {"x": x, "c": c}, [MODULATED])


class TwoViews(Forward):
    """Two views of one value."""

    def forward(self, x, c):
        scale = self.linear(c).chunk(2, -1)[0]
        return self.norm(x) * (1 + scale[:, None]) + scale[None]


class Shared(Forward):
    """What the norm's output is multiplied with is used once more."""

    def forward(self, x, c):
        scale, shift = self.linear(c).chunk(2, -1)
        factor = 1 + scale[:, None]
        return (self.norm(x) * factor + shift[:, None]) * factor


class OfItself(Forward):
    """Scale and shift are views of the input."""

    def forward(self, x, c):
        y = self.norm(x)
        return y * (1 + x[0:1, 0:1].squeeze(0)[None]) + x[0, 0].squeeze(0)


class PlusTwo(Forward):
    def forward(self, x, c):
        scale, shift = self.linear(c).chunk(2, -1)
        return self.norm(x) * (2 + scale[:, None]) + shift[:, None]


@pytest.mark.parametrize("cls", [TwoViews, Shared, OfItself, PlusTwo])
def test_what_looks_like_it_gives_the_same(cls):
    """Whether or not there is a chain."""
    x, c = drawn((2, 2, D), (2, D))
    module = made(cls)
    other = copy.deepcopy(module)
    opfuse.convert(other)
    given = {"x": x, "c": c}
    for got, wanted in zip(step(other, given), step(module, given), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


class LongShift(nn.Module):
    """What is added to the product comes out of a longer chain."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x, c):
        return x * (1 + c[:, None]) + self.fc2(F.silu(self.fc1(x)))


def test_a_product_before_a_longer_chain_is_a_residual():
    x, c = drawn((*ROWS, D), (2, D))
    report = compare(LongShift, {"x": x, "c": c}, [])
    assert [row.ops[-3:] for row in report.converted] == [("BasicLinear", "Bias", "AddExtraInput")]


def test_a_scale_that_enlarges_the_input_is_left_to_the_forward():
    module = made(Reversed)
    opfuse.convert(module)
    x, c = drawn((1, 5, D), (3, D))
    scale, shift = module.linear(c).chunk(2, -1)
    expected = shift[:, None] + (scale[:, None] + 1) * F.layer_norm(x, (D,), eps=1e-6)
    torch.testing.assert_close(module(x, c), expected)
    assert converted(module) == {"": "the tensors that it adds differ in shape"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_of_another_dtype_is_left_to_the_forward(dtype):
    module = made(Reversed).to(dtype)
    module.linear.double()
    opfuse.convert(module)
    x, c = drawn((*ROWS, D), (2, D))
    assert module(x.to(dtype), c).dtype is torch.float64
    assert "differ in dtype" in converted(module)[""]


def test_other_shapes_after_a_first_call():
    """The choice is remembered for the shapes that matter."""
    module, (x, c) = made(Reversed), drawn((2, 5, D), (2, D))
    opfuse.convert(module)
    own = copy.deepcopy(module)
    opfuse.revert(own)
    for rows, of in (((2, 5), 2), ((2, 7), 2), ((1, 5), 3), ((2, 5), 1), ((4, 5), 4), ((1, 5), 1)):
        x, c = drawn((*rows, D), (of, D))
        torch.testing.assert_close(module(x, c), own(x, c))
        fits = of in (1, rows[0])
        assert (converted(module)[""] == "") == fits


def test_a_weight_that_a_norm_gets_later():
    module = made(Reversed)
    opfuse.convert(module)
    x, c = drawn((*ROWS, D), (2, D))
    before = module(x, c)
    module.norm.weight = nn.Parameter(torch.full((D,), 2.0, dtype=torch.float64))
    assert not torch.allclose(module(x, c), before)
    assert "weight" in converted(module)[""]


def test_hooks_on_the_norm_see_its_output():
    module, seen = made(Reversed), []
    opfuse.convert(module)
    module.norm.register_forward_hook(lambda *given: seen.append(given[-1]))
    x, c = drawn((*ROWS, D), (2, D))
    module(x, c)
    assert len(seen) == 1 and "hooks" in converted(module)[""]


def test_in_a_graph_of_torch_compile():
    """The chain is in the graph, and so are the views of what it takes."""
    module, (x, c) = made(Reversed), drawn((*ROWS, D), (2, D))
    own = copy.deepcopy(module)
    opfuse.convert(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with opfuse.options(chains_under_compile=True):
        got = step(compiled, {"x": x, "c": c})
    for one, other in zip(got, step(own, {"x": x, "c": c}), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.alone  # measurements write into a table, which is that of the test
def test_a_report_and_tuning_take_what_the_chain_takes(tmp_path, monkeypatch):
    """Both run the chain by itself, with the views."""
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    module, (x, c) = made(Reversed), drawn((*ROWS, D), (2, D))
    opfuse.convert(module)
    assert "Modulate" in str(opfuse.explain(module, x, c))
    assert "wrong" not in str(opfuse.tune(module, x, c))
