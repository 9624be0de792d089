"""What every op promises the fuser and the authors of fusions: names, order and number of what it leaves."""

import inspect
import re

import pytest
import torch
from activations import ELEMENTWISE, GATED, SCALED
from sound import COLLECTIVES

import opfuse
from opfuse import ops

OPS = {
    "BasicLinear": (lambda: ops.BasicLinear(8, 4), ("input", "weight"), ()),
    "GroupedLinear": (
        lambda: ops.GroupedLinear(2, 8, 4),
        ("input", "split_sizes", "weight0", "weight1", "input0", "input1"),
        ("grad_input_buffer",),
    ),
    "Bias": (lambda: ops.Bias(8), (), ()),
    "ParallelLinear": (
        lambda: ops.ParallelLinear({"a": ops.Linear(8, 4), "b": ops.BasicLinear(8, 2)}),
        ("input", "a.weight", "b.weight"),
        (),
    ),
    "LayerNorm": (
        lambda: ops.LayerNorm(8),
        ("input", "weight", "mean", "rstd"),
        ("zero_centered_gamma",),
    ),
    "RMSNorm": (lambda: ops.RMSNorm(8), ("input", "weight", "rstd"), ("zero_centered_gamma",)),
    "L2Normalization": (ops.L2Normalization, ("input", "rstd"), ()),
    "ConstantScale": (lambda: ops.ConstantScale(2.0), (), ("scale",)),
    "RoPE": (lambda: ops.RoPE(8), ("positions",), ("rotation",)),
    "ApplyRoPE": (lambda: ops.ApplyRoPE(8), ("cos", "sin"), ("rotation",)),
    "CrossEntropy": (ops.CrossEntropy, ("input", "targets"), ("numbers",)),
    "LowRankLinear": (
        lambda: ops.LowRankLinear(8, 4, 2, dropout=0.5),
        ("input", "mask", "low", "weight", "lora_a", "lora_b"),
        ("scaling", "dropout"),
    ),
    "TokenLogProb": (ops.TokenLogProb, ("input", "targets"), ("numbers",)),
    "Identity": (ops.Identity, (), ()),
    "Reshape": (lambda: ops.Reshape((-1,)), (), ("input_shape",)),
    "Dropout": (lambda: ops.Dropout(0.5), ("mask",), ("p",)),
    "TrackedDropout": (lambda: ops.TrackedDropout(0.5, None), ("mask",), ("p",)),
    "Quantize": (ops.Quantize, (), ()),
    "AddExtraInput": (ops.AddExtraInput, (), ()),
    "MakeExtraOutput": (ops.MakeExtraOutput, (), ()),
    "Modulate": (ops.Modulate, ("input", "scale"), ("wanted",)),
    "SwapExtraInput": (ops.SwapExtraInput, (), ("like",)),
    **{cls.__name__: (cls, ("input",), ()) for cls in (*ELEMENTWISE, *GATED)},
    "SiTUGLU": (ops.SiTUGLU, ("input",), ("numbers",)),
    "ClampedSwiGLU": (ops.ClampedSwiGLU, ("input",), ("numbers",)),
    **{
        cls.__name__: (cls, ("input", "scales"), ("scales_requires_grad", "numbers"))
        for cls in SCALED
    },
}


def extras_of(op):
    if isinstance(op, ops.GroupedLinear):
        return [torch.tensor([1, 2])]
    if isinstance(op, (ops.CrossEntropy, ops.TokenLogProb)):
        return [torch.tensor([1, 7, 0])]
    if isinstance(op, (ops.RoPE, ops.ApplyRoPE)):
        return [torch.randn(8)] * 2 if op.num_extra_inputs == 2 else [torch.tensor(3)]
    if isinstance(op, ops.Modulate):
        return [torch.randn(8, requires_grad=True)] * 2
    scaled = isinstance(op, ops.ScaledActivation)
    return [torch.randn(3) if scaled else torch.randn(3, 8)] * op.num_extra_inputs


def run(call, name, **flags):
    op = OPS[name][0]()
    return op, call(op, torch.randn(3, 8), *extras_of(op), **flags)


def test_all_ops_are_covered():
    basic = {name for name in ops.__all__ if issubclass(getattr(ops, name), opfuse.BasicOperation)}
    bases = {"Activation", "GatedActivation", "ScaledActivation"}
    assert basic - set(OPS) == bases | {"Cast"}, "OPS of this file lacks an op"
    theirs = {*opfuse.plugins.manager.entry_points["opfuse.ops"]}  # of other packages
    assert theirs >= COLLECTIVES
    assert sorted({*ops.__all__, *theirs}) == sorted(
        name for name in dir(ops) if inspect.isclass(getattr(ops, name))
    )


@pytest.mark.parametrize("name", OPS)
def test_each_op_declares_what_it_saves_and_takes(name):
    build, saved_names, context_names = OPS[name]
    op = build()
    assert op.saved_names == saved_names
    assert op.context_names == context_names
    assert op.differentiable
    assert op.grad_input in ("fresh", "same", "shared")
    strict = ("BasicLinear", "GroupedLinear", "ParallelLinear", "LowRankLinear")
    strict = (*strict, "AddExtraInput", "Modulate")
    assert op.params_in_compute_dtype == (name in strict)
    assert op.feature_ratio == dict.fromkeys(
        ["Reshape", "CrossEntropy", "TokenLogProb", "SwapExtraInput"]
    ).get(name, 2 if "GLU" in name else None if op.in_features else 1)


@pytest.mark.parametrize("name", OPS)
def test_forward_leaves_what_is_declared(call, name):
    op, ran = run(call, name)
    assert set(ran.left) == set(op.context_names)
    assert len(ran.saved or ()) == len(op.saved_names)
    # without a recipe no group has an input of its own, nor does the caller give a buffer
    without = [n for n, t in zip(op.saved_names, ran.saved or (), strict=False) if t is None]
    assert without == (["input0", "input1"] if name == "GroupedLinear" else [])
    if not op.saved_names and not op.context_names:
        assert ran.saved is None  # the context is shared between calls


@pytest.mark.parametrize("name", OPS)
def test_forward_leaves_nothing_without_grad(call, name):
    _, ran = run(call, name, requires_grad=False)
    assert not ran.left and ran.saved is None


@pytest.mark.parametrize("name", OPS)
def test_backward_gives_what_is_asked_for(call, name):
    op, ran = run(call, name)
    grad = torch.randn_like(ran.y)
    dx, grads, grad_extras = ran.backward(grad, *[None] * op.num_extra_outputs)
    assert dx.shape == (3, 8)
    assert [g.shape for g in grads] == [op.get_parameter(key).shape for key in op.param_names]
    assert len(grad_extras) == op.num_extra_inputs
    if op.saved_names and name not in ("Dropout", "TrackedDropout"):
        _, ran = run(call, name, input_requires_grad=False)
        assert len(ran.saved) == len(op.saved_names)
        assert ran.backward(grad)[0] is None
    if grads:
        _, ran = run(call, name, param_requires_grad=False)
        dx, frozen, _ = ran.backward(grad)
        assert dx is not None and list(frozen) == [None] * len(grads)


@pytest.mark.parametrize("name", OPS)
def test_forward_and_backward_write_nothing_on_the_op(call, name):
    op = OPS[name][0]()
    before = dict(vars(op))
    ran = call(op, torch.randn(3, 8), *extras_of(op))
    ran.backward(torch.randn_like(ran.y), *[None] * op.num_extra_outputs)
    assert vars(op) == before


@pytest.mark.parametrize("name", OPS)
def test_each_op_and_its_passes_have_docstrings(name):
    op = OPS[name][0]
    cls = type(op())
    assert cls.__doc__
    for method in ("op_forward", "op_backward", "fuser_forward", "fuser_backward"):
        assert getattr(cls, method).__doc__


TORCHS = {
    "GELU": {"approximate"},
    "LayerNorm": {"elementwise_affine", "bias"},
    "RMSNorm": {"elementwise_affine"},
}
"""Names of torch.nn's in addition to them."""

SIGNATURES = {
    "BasicLinear": "in_features out_features device dtype tensor_parallel_mode tensor_parallel_group "
    "sequence_parallel rng_state_tracker_function accumulate_into_main_grad userbuffers_options",
    "Linear": "in_features out_features bias device dtype tensor_parallel_mode tensor_parallel_group "
    "sequence_parallel rng_state_tracker_function accumulate_into_main_grad",
    "GroupedLinear": "num_groups in_features out_features bias device dtype rng_state_tracker_function "
    "accumulate_into_main_grad single_grouped_weight single_grouped_bias delay_wgrad_compute scale_bias",
    "Bias": "size device dtype tensor_parallel tensor_parallel_group",
    "Quantize": "forward backward",
    "LayerNorm": "normalized_shape eps device dtype zero_centered_gamma sm_margin "
    "sequence_parallel_group",
    "RMSNorm": "normalized_shape eps device dtype zero_centered_gamma sm_margin "
    "sequence_parallel_group",
    "L2Normalization": "eps seq_length micro_batch_size",
    "GELU": "cache_quantized_input",
    "GLU": "cache_quantized_input",
    "SwiGLU": "cache_quantized_input glu_interleave_size",
    "SiTUGLU": "beta1 beta2 cache_quantized_input glu_interleave_size",
    "ClampedSwiGLU": "limit alpha glu_linear_offset cache_quantized_input glu_interleave_size",
    "ScaledSwiGLU": "glu_interleave_size activation_recompute_in_mlp",
    "ScaledSReLU": "activation_recompute_in_mlp",
    "AddExtraInput": "in_place",
    "MakeExtraOutput": "in_place",
    "ConstantScale": "scale",
    "Reshape": "shape",
    "Dropout": "p",
    "AllGather": "process_group dim",  # opfuse's own are dim and sequence_parallel_group
    "AllReduce": "process_group reduce_in_backward",
    "ReduceScatter": "process_group dim",
}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ops.RMSNorm(64, 1e-6),
            "RMSNorm expected eps as a keyword: RMSNorm(64, eps=1e-06)",
        ),
        (
            lambda: ops.LayerNorm(64, 1e-6, sm_margin=1),
            "LayerNorm expected eps as a keyword: LayerNorm(64, eps=1e-06, sm_margin=1)",
        ),
        (
            lambda: ops.Linear(4, 4, False),
            "Linear expected bias as a keyword: Linear(4, 4, bias=False)",
        ),
        (
            lambda: ops.GELU("none"),
            "GELU expected approximate as a keyword: GELU(approximate='none')",
        ),
        (
            lambda: ops.SiTUGLU(1, 2),
            "expected beta1 and beta2 as keywords: SiTUGLU(beta1=1, beta2=2)",
        ),
        (
            lambda: ops.RMSNorm(4, epsilon=1),
            "RMSNorm: got an unexpected keyword argument 'epsilon', expected RMSNorm(",
        ),
        (
            lambda: ops.Linear(4),
            "Linear: missing a required argument: 'out_features', expected Linear(in_features, ",
        ),
        (
            lambda: ops.ReLU(1, 2),
            "ReLU: too many positional arguments, expected ReLU(*, cache_quantized_input=False)",
        ),
        (lambda: ops.RMSNorm("x"), "RMSNorm expected a whole number as normalized_shape, got 'x'"),
    ],
)
def test_arguments_that_do_not_fit(build, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        build()


def test_an_error_inside_a_constructor_stays_as_it_is():
    class Broken(ops.Identity):
        def __init__(self, size):
            super().__init__()
            len(size)

    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        Broken(3)


@pytest.mark.parametrize("name", SIGNATURES)
def test_keyword_names_are_transformer_engines(name):
    names = set(inspect.signature(getattr(ops, name)).parameters)
    assert names - TORCHS.get(name, set()) == set(SIGNATURES[name].split())


NUMBERS = {
    "scale": lambda: ops.ConstantScale(2.0), "p": lambda: ops.Dropout(0.5), "beta1": ops.SiTUGLU,
    "beta2": ops.SiTUGLU, "limit": ops.ClampedSwiGLU, "alpha": ops.ClampedSwiGLU,
    "glu_linear_offset": ops.ClampedSwiGLU, "eps": lambda: ops.RMSNorm(4),
    "base": lambda: ops.RoPE(4), "label_smoothing": ops.CrossEntropy, "z_loss": ops.CrossEntropy,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_no_tensor(name):
    """A tensor would get no gradient, or change in place where neither kernels nor the backward see it."""
    op = NUMBERS[name]()
    learned = torch.zeros((), requires_grad=True).exp()
    for value in (learned, torch.tensor(2.0), torch.ones(3), "2", None, True):
        with pytest.raises(
            TypeError, match=rf"{type(op).__name__} expected a real number as {name}"
        ):
            setattr(op, name, value)
    with pytest.raises(TypeError, match="a Tensor, whose gradient would be lost"):
        setattr(op, name, learned)
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError):
        setattr(op, name, numpy.full((), 0.5))
    setattr(op, name, numpy.float32(0.5))
    assert type(getattr(op, name)) is float and getattr(op, name) == 0.5


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_class_is_no_tensor_either(name):
    """An op that lost its own reads that of its class, where a tensor would get no gradient."""
    cls = type(NUMBERS[name]())
    refused = rf"{cls.__name__} expected a real number as {name}, got a Tensor, whose gradient"
    for value in (torch.ones((), requires_grad=True), torch.ones(()).exp()):
        with pytest.raises(TypeError, match=refused):
            setattr(cls, name, value)
        with pytest.raises(TypeError, match="Derived" + refused):
            type(f"Derived{cls.__name__}", (cls,), {name: value})
    assert not hasattr(cls, name)
    derived = type(f"Derived{cls.__name__}", (cls,), {name: 0.25})
    setattr(derived, name, 0.5)
    setattr(derived, name, property(lambda self: 0.75))


class Shifts(ops.Identity):
    """Adds what its class has."""

    grad_input = "same"
    differentiable = True
    saved_names = ()

    def op_forward(self, ctx, input_):
        return input_ + self.shift

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def test_a_tensor_of_a_class_that_would_lose_its_gradient(monkeypatch):
    op, x = Shifts(), torch.ones(3, requires_grad=True)
    monkeypatch.setattr(Shifts, "shift", torch.ones(3), raising=False)
    assert op(x).eq(2).all()
    monkeypatch.setattr(Shifts, "shift", torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match=r"\(Shifts\) .*has the tensor 'shift'.* would get none"):
        op(x)
    with torch.no_grad():
        assert op(x).eq(2).all()
    with opfuse.options(double_backward=True):
        op(x).sum().backward()
    assert Shifts.shift.grad.eq(1).all()


def test_an_argument_of_a_later_release_is_refused_wherever_it_is_passed_on():
    class Parallel(ops.BasicLinear):
        def __init__(self):
            super().__init__(4, 4, userbuffers_options={})

    with pytest.raises(NotImplementedError, match="Parallel: userbuffers_options=.* later"):
        Parallel()


def test_the_form_of_a_gelu_in_geglu_is_fixed():
    with pytest.raises(RuntimeError, match="GEGLU.approximate is fixed, and is 'tanh'"):
        ops.GEGLU().approximate = "none"
    with pytest.raises(ValueError, match="GEGLU expected approximate to be 'tanh' or 'none'"):
        ops.GEGLU(approximate="erf")
