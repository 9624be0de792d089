"""``GroupedLinear(accumulate_into_main_grad=True)``: the kernels add to ``main_grad`` in fp32."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, testing
from opfuse.testing import assert_close, interpreter, machine
from opfuse.testing.recipes import offered

pytest.importorskip("triton")
from opfuse_moe.cases import multiplies_codes
from opfuse_triton import TARGETS, Kernel, current_target, target

INTERPRETING = machine.is_interpreting()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
SIZES, IN, OUT = (5, 0, 66, 1), 48, 32

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETING, reason="no GPU, and Triton does not interpret"
    ),
]
if INTERPRETING:
    interpreter.install()


@pytest.fixture(autouse=True)
def _few_programs():
    """Few programs are interpreted for a GPU of one multiprocessor."""
    if not INTERPRETING:
        yield
        return
    with target(dataclasses.replace(TARGETS[90], multiprocessors=1)):
        yield


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched, with what they do to the matrices."""
    found, launch = Counter(), Kernel.launch

    def counting(self, *given, **more):
        found[self.name, more.get("ADDS")] += 1
        return launch(self, *given, **more)

    monkeypatch.setattr(Kernel, "launch", counting)
    return found


class Written(TorchDispatchMode):
    """Counts PyTorch's operations that write into tensors of some memory."""

    keeps_no_tensors = True

    def __init__(self, tensors):
        super().__init__()
        self.memory = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        if func._schema.is_mutable and isinstance(first, torch.Tensor):
            self.count += first.untyped_storage()._cdata in self.memory
        return func(*args, **(kwargs or {}))


def made(layout, dtype, main, *, bias=False):
    """An op on the device, and its weights with their sums."""
    torch.manual_seed(0)
    if layout == "one parameter":
        held = torch.nn.Module()
        held.weight = torch.nn.Parameter(torch.randn(4, OUT, IN).to(DEVICE, dtype))
        op = ops.GroupedLinear.reading(held, accumulate_into_main_grad=True)
        weights = [held.weight]
    else:
        op = ops.GroupedLinear(
            *(4, IN, OUT), bias=bias, dtype=dtype, device=DEVICE, accumulate_into_main_grad=True
        )
        weights = [op.get_parameter(f"weight{i}") for i in range(4)]
    whole = torch.ones(4, OUT, IN, device=DEVICE, dtype=main)
    for i, weight in enumerate(weights):
        mine = whole if layout == "one parameter" else whole[i]
        weight.main_grad = mine.clone() if layout == "a list" else mine
    return op, weights


def run(chain, dtype, *extras, plugins="moe", inner=()):
    """A step, and the gradient of each matrix of a ``GroupedLinear`` alone, in fp64."""
    torch.manual_seed(1)
    x, dy = [torch.randn(sum(SIZES), *inner, width).to(DEVICE, dtype) for width in (IN, OUT)]
    x.requires_grad_()
    with opfuse.plugins.using(plugins):
        chain(x, torch.tensor(SIZES, device=DEVICE), *extras).backward(dy)
    each = zip(x.detach().double().split(SIZES), dy.double().split(SIZES), strict=True)
    return [dy.flatten(0, -2).T @ x.flatten(0, -2) for x, dy in each]


def sums(weights):
    found = [weight.main_grad for weight in weights]
    return [*found[0]] if found[0].ndim == 3 else found


layouts = pytest.mark.parametrize("layout", ["a list", "in a row", "one parameter"])


@layouts
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_adds_to_main_grad(layout, dtype, overwrite, launched):
    op, weights = made(layout, dtype, torch.float32, bias=True)
    for weight in weights:
        weight.overwrite_main_grad = overwrite
        weight.grad_added_to_main_grad = False
        if overwrite:
            weight.main_grad.fill_(torch.nan)
    with Written(sums(weights)) as written:
        exact = run(op, dtype, inner=(2,))
    for total, wanted in zip(sums(weights), exact, strict=True):
        assert_close(total, wanted + (not overwrite))  # of fp32: the product was not rounded
    assert launched["grouped_wgrad", not overwrite] == 1
    assert written.count == INTERPRETING  # the interpreter copies its argument back
    assert all(w.grad_added_to_main_grad and not w.grad.any() for w in weights)


@layouts
@pytest.mark.parametrize("main", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_added_to_afterwards(layout, main, launched):
    op, weights = made(layout, torch.float32, main)
    with Written(sums(weights)) as written:
        exact = run(op, torch.float32)
    for total, wanted in zip(sums(weights), exact, strict=True):
        assert_close(total.to(torch.float32 if main is torch.float64 else main), wanted + 1)
    assert launched["grouped_wgrad", False] == 1 and written.count == len(weights)


@pytest.mark.parametrize("frozen", [(0,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_frozen_weights_keep_their_sums(frozen, launched):
    op, weights = made("a list", torch.bfloat16, torch.float32)
    for i in frozen:
        weights[i].requires_grad_(False)
    exact = run(op, torch.bfloat16)
    for i, weight in enumerate(weights):
        assert_close(weight.main_grad, 1 + exact[i] * (i not in frozen))
        assert i not in frozen or weight.main_grad.eq(1).all()
    assert launched["grouped_wgrad", True] == (len(frozen) < 4)
    assert not launched["grouped_wgrad", False]


def test_a_weight_of_two_groups_is_added_to_twice():
    """Afterwards: two tiles would read and write the same numbers at once."""
    op, _ = made("a list", torch.float32, torch.float32)
    op.weight2 = op.weight0
    exact = run(op, torch.float32)
    assert_close(op.weight0.main_grad, 1 + exact[0] + exact[2])


def test_two_weights_with_one_sum_are_added_to_afterwards():
    op, weights = made("a list", torch.float32, torch.float32)
    weights[3].main_grad = weights[0].main_grad
    exact = run(op, torch.float32)
    assert_close(weights[0].main_grad, 1 + exact[0] + exact[3])


@pytest.mark.parametrize("plugins", ["moe", ""])
def test_experts_with_an_activation_between(plugins, launched):
    found = []
    for accumulates in (True, False):
        torch.manual_seed(0)
        up = ops.GroupedLinear(4, IN, 2 * OUT, accumulate_into_main_grad=accumulates)
        down = ops.GroupedLinear(4, OUT, OUT, bias=False, accumulate_into_main_grad=accumulates)
        chain = opfuse.Sequential(up, ops.ScaledSwiGLU(), down).to(DEVICE)
        for op in (up, down):
            op.set_extra_input_name(0, "split_sizes")
            for i in range(4):
                weight = op.get_parameter(f"weight{i}")
                weight.main_grad = torch.zeros_like(weight)
        scales = torch.rand(sum(SIZES), device=DEVICE)
        run(chain, torch.float32, scales, plugins=plugins)
        params = dict(chain.named_parameters())
        found.append([p.grad if p.grad is not None else p.main_grad for p in params.values()])
        if plugins:
            assert launched["grouped_wgrad", accumulates] == 2
    for one, other in zip(*found, strict=True):
        assert_close(one, other.double())


@pytest.mark.skipif(
    not INTERPRETING
    and (DEVICE == "cpu" or not multiplies_codes(current_target(torch.device(DEVICE)))),
    reason="no GPU that multiplies FP8 codes, and Triton does not interpret",
)
@pytest.mark.parametrize("layout", ["a list", "one parameter"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("frozen", [False, True])
def test_products_of_codes_add_too(layout, overwrite, frozen, launched):
    found = []
    for plugins in ("moe,opfuse-testing", "opfuse-testing"):
        op, weights = made(layout, torch.float32, torch.float32)
        for weight in weights:
            weight.overwrite_main_grad = overwrite
        if frozen:
            weights[0].requires_grad_(False)
        with offered(), opfuse.plugins.using(plugins), opfuse.autocast(testing.PerTensor()):
            run(op, torch.float32, plugins=plugins)
        found.append(sums(weights))
    for one, other in zip(*found, strict=True):
        assert_close(one, other.double())
    everything = frozen and layout == "one parameter"
    assert launched["grouped_coded_wgrad", not overwrite] == (not everything)
