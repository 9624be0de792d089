"""What the tests of the ops share: a harness that compares a chain with a reference in fp64."""

import types

import pytest
import torch

import opfuse
from opfuse.testing import tolerance


@pytest.fixture(autouse=True)
def _ops_alone(no_plugins, one_thread):
    """Of each test here."""


def assert_near(actual, expected, dtype=None, *, gemm=False, what="output"):
    """Compare with the tolerances of ``dtype``; an fp32 matrix product is allowed fp16's."""
    assert (actual is None) == (expected is None), f"{what}: {actual} against {expected}"
    if actual is None:
        return
    dtype = dtype or actual.dtype
    rtol, atol = tolerance(dtype, gemm=gemm)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def leaf(tensor, requires_grad=True):
    """The same values and strides as a leaf."""
    return tensor.detach().requires_grad_(requires_grad)


def exact(tensor, requires_grad=True, through=None):
    """The same values in fp64 as a leaf, rounded to ``through`` first."""
    return tensor.detach().to(through or tensor.dtype).double().requires_grad_(requires_grad)


def compare(
    op, reference, x, *extras, grad=None, dtype=None, gemm=False, through=None, autocast=None
):
    """Run ``op`` alone in a chain, and ``reference(x, params, *extras)`` in fp64 on the same rounded values.

    Args:
        op: The op.
        reference: Plain torch, differentiated by autograd; ``params`` is a dict.
        x, extras: Inputs; one that requires no grad is compared to get none.
        grad: Gradient of the output; default: random.
        dtype: Whose tolerances hold; default: the output's.
        gemm: Whether it multiplies matrices.
        through: What the reference rounds every input to first.
        autocast: Dtype to run under ``torch.autocast`` with.
    """
    inputs = [leaf(t, t.requires_grad) for t in (x, *extras)]
    params = dict(op.named_parameters())
    exact_inputs = [exact(t, t.requires_grad, through) for t in (x, *extras)]
    exact_params = {name: exact(p, p.requires_grad, through) for name, p in params.items()}
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = opfuse.Sequential(op)(*inputs)
    expected = reference(exact_inputs[0], exact_params, *exact_inputs[1:])
    assert y.shape == expected.shape
    assert y.requires_grad == expected.requires_grad
    dtype = dtype or y.dtype
    assert_near(y, expected, dtype, gemm=gemm)
    if not y.requires_grad:
        return y
    if grad is None:
        grad = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    y.backward(grad)
    expected.backward(grad.double())
    for number, (got, wanted) in enumerate(zip(inputs, exact_inputs, strict=True)):
        assert got.grad is None or got.grad.dtype is got.dtype
        assert_near(got.grad, wanted.grad, dtype, gemm=gemm, what=f"gradient of input {number}")
    for name, param in params.items():
        assert param.grad is None or param.grad.dtype is param.dtype
        assert_near(
            param.grad, exact_params[name].grad, dtype, gemm=gemm, what=f"gradient of {name}"
        )
        param.grad = None
    return y


@pytest.fixture
def near():
    return assert_near


@pytest.fixture(name="compare")
def _compare():
    return compare


@pytest.fixture
def call():
    """``call(op, x, *extras, **flags)``: both passes of a basic op outside a fuser, with what it left."""

    def run(
        op,
        x,
        *extras,
        input_requires_grad=True,
        param_requires_grad=True,
        requires_grad=True,
        owns=False,
    ):
        ctx = opfuse.OperationContext()
        ctx.params = tuple(op.get_parameter(name).detach() for name in op.param_names)
        flags = (
            param_requires_grad
            if isinstance(param_requires_grad, tuple)
            else (param_requires_grad,)
        )
        ctx.param_requires_grad = (
            flags if len(flags) == len(ctx.params) else flags * len(ctx.params)
        )
        ctx.requires_grad, ctx.input_requires_grad = requires_grad, input_requires_grad
        before = dict(vars(ctx))
        with torch.no_grad():
            output, extra_outputs = op.fuser_forward(
                [ctx],
                x,
                basic_op_extra_inputs=[extras],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[{}],
            )
        left = {
            name: value
            for name, value in vars(ctx).items()
            if name not in before or value is not before[name]
        }
        saved = left.pop("to_save", None)

        def backward(grad_output, *grad_extra_outputs):
            after = opfuse.OperationContext()
            vars(after).update(
                vars(ctx), params=(), to_save=None, saved_tensors=saved, owns_grad_output=owns
            )
            with torch.no_grad():
                grads = op.fuser_backward(
                    [after], grad_output, basic_op_grad_extra_outputs=[grad_extra_outputs]
                )
            dx, (grad_params,), (grad_extras,) = grads
            return dx, tuple(grad_params or ()), tuple(grad_extras)

        return types.SimpleNamespace(
            y=output, extra_outputs=extra_outputs[0], saved=saved, left=left, backward=backward
        )

    return run
