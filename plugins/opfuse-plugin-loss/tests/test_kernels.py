"""The kernel of the loss against its twin in fp64, compiled for GPUs that need not be there, and counted."""

import pytest
import torch
from opfuse_loss import chunks
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops.cross_entropy import LossNumbers
from opfuse.testing import assert_close, interpreter

pytest.importorskip("triton", reason="Triton is not installed")

import compiled
import triton
import triton.language as tl
from opfuse_loss import cases
from opfuse_loss.kernels import softmax
from opfuse_triton import TARGETS, current_target, is_interpreting
from opfuse_triton.checking import check_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (
    LossNumbers(),
    LossNumbers(ignore_index=2, label_smoothing=0.2, z_loss=0.05, softcap=2.0),
    LossNumbers(z_loss=0.01, reduction="none"),
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
runs = pytest.mark.skipif(
    DEVICE == "cpu" and not is_interpreting(), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="a process that interprets cannot compile")

if is_interpreting():
    interpreter.install()


def arguments(dtype, rows, classes, ignored=-100, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, classes, generator=generator) * scale).to(DEVICE, dtype)
    targets = torch.randint(0, classes, (rows,), generator=generator).to(DEVICE)
    targets[1::3] = ignored
    weights = torch.rand(rows, generator=generator).to(DEVICE)
    return logits, targets, torch.where(targets == ignored, 0.0, weights)


@runs
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_match_fp64(dtype, numbers):
    for rows, classes in ((1, 3), (3, 129), (5, 5000)):
        logits, targets, weights = arguments(dtype, rows, classes, numbers.ignore_index)
        expected = logits.double()
        truth, expected = chunks.softmax_gradient(expected, targets, weights.double(), numbers)
        losses = softmax.softmax_in_place(logits, targets, weights, numbers)
        assert_close(losses, truth)
        assert_close(logits, expected)


@runs
@pytest.mark.parametrize("kernel", [softmax.SOFTMAX, softmax.LOSS, softmax.GRADIENT], ids=repr)
def test_every_configuration_gives_the_same(kernel):
    logits, targets, weights = arguments(torch.bfloat16, 3, 20000, 2)
    found = kernel.candidates(current_target(torch.device(DEVICE)), {"classes": 20000})
    results = []
    assert len(found) > 1
    for config in found:
        with kernel.pinned(config):
            given = logits.clone()
            losses = softmax.softmax_in_place(given, targets, weights, NUMBERS[1])
            apart, sums = softmax.row_losses(logits, targets, NUMBERS[1], keep=True)
            gradient = softmax.row_gradients(logits, targets, weights, sums, NUMBERS[1])
        results.append((given, losses, apart, gradient))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@triton.jit
def shares(x, y, softcap, BLOCK: tl.constexpr):
    """``capped_share`` of a block of numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, softmax.capped_share(tl.load(x + at), softcap))


@runs
def test_a_soft_cap_is_off_by_a_few_roundings_of_the_cap():
    near, far = torch.logspace(-9, 2, 1 << 15), torch.linspace(-12.0, 12.0, 1 << 15)
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan]).repeat(1 << 8)
    x = 30 * torch.cat((near, -near, far, special)).to(DEVICE)
    y = torch.empty_like(x)
    shares[(len(x) // 1024,)](x, y, 30.0, BLOCK=1024)
    truth = torch.tanh(x.double() / 30)
    torch.testing.assert_close(y.double(), truth, atol=7e-7, rtol=0.0, equal_nan=True)
    assert not y[x == 0].any() and y[x.isinf()].abs().eq(1).all()


@runs
def test_infinite_and_far_logits():
    logits, targets, weights = arguments(torch.float32, 4, 5000, scale=0.0)
    targets[:] = 7
    logits[0, :4999] = -torch.inf  # all of the first block
    logits[1] = -200.0
    logits[1, 4998] = 200.0
    logits[2, 4100] = torch.inf
    expected = logits.clone()
    truth, expected = chunks.softmax_gradient(expected, targets, weights, NUMBERS[0])
    losses = softmax.softmax_in_place(logits, targets, weights, NUMBERS[0])
    torch.testing.assert_close(losses, truth, equal_nan=True)
    assert losses[2].isnan() and expected[2].isnan().all()
    torch.testing.assert_close(logits, expected, equal_nan=True)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_launches_it(monkeypatch, dtype):
    seen, launch = [], softmax.SOFTMAX.launch
    monkeypatch.setattr(softmax.SOFTMAX, "launch", lambda *a, **k: seen.append(1) or launch(*a, **k))  # fmt: skip
    monkeypatch.setattr(chunks, "LOGITS", 1)
    chain = opfuse.Sequential(ops.Linear(4, 60), ops.CrossEntropy()).to(DEVICE, dtype)
    x = torch.randn(130, 4, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 60, (130,), device=DEVICE)
    with opfuse.plugins.using("loss"):
        chain(x, targets)
        assert not seen
        with opfuse.options(prefer="memory"):
            y = chain(x, targets)
    assert len(seen) == 2
    leaves = [x, *chain.parameters()]
    logits = F.linear(x.double(), chain[0].weight.double(), chain[0].bias.double())
    expected = F.cross_entropy(logits, targets)
    wanted = torch.autograd.grad(expected, leaves)
    for got, want in zip(torch.autograd.grad(y, leaves), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    apart = torch.stack((targets, targets), -1)[:, 0]
    assert not apart.is_contiguous()
    with opfuse.plugins.using("loss"), opfuse.options(prefer="memory"):
        torch.testing.assert_close(chain(x, apart), y)
    with pytest.raises(IndexError, match="Target 60 is out of bounds"):
        with opfuse.plugins.using("loss"):
            chain(x, targets.clamp(min=60))


@compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_the_kernels_compile_for_the_architecture(arch):
    if arch != next(iter(TARGETS)):
        compiled.skip_if_reported("loss")
    numbers = len(cases.CASES) - 3, len(cases.CASES) - 1  # those with all options
    rows = [row for n in numbers for row in check_case("loss", "opfuse_loss.cases:CASES", n, arch)]
    assert {row.kernel for row in rows} == {"softmax_kernel", "loss_kernel", "gradient_kernel"}
    assert not [sentence for row in rows for sentence in row.refusals]


@pytest.mark.skipif(not is_interpreting(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("case", cases.CASES[-4:-2], ids=lambda case: case.name)
def test_it_reads_twice_and_writes_once(case):
    from ledger import counting

    for shape in case.small:
        given = case.inputs(shape, "cpu")
        with counting() as launches:
            case.run(**given)
        (launch,) = launches
        size = given["logits"].nbytes
        assert sum(launch.total("written").values()) == size + 4 * shape["rows"]
        assert 2 * size <= sum(launch.total("read").values()) <= 2 * size + 16 * shape["rows"]


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("run on a GPU, and this is mps", {"device": torch.device("mps")}),
        ("takes no float64", {"dtype": torch.float64}),
        ("compute capability 8.0", {"capability": (7, 5)}),
    ],
)
def test_where_it_cannot_run_on_a_gpu_the_fusion_declines(said, changes):
    from opfuse_loss.fused import JOINT

    env = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    chain = ops.BasicLinear(8, 16), ops.CrossEntropy()
    for fusion in JOINT[1:]:
        assert fusion.when(chain, env) is True
        assert said in fusion.when(chain, env._replace(**changes))


def test_on_a_gpu_nothing_is_used_unless_memory_is_preferred_or_it_was_measured():
    from opfuse_loss.fused import JOINT

    chain = ops.BasicLinear(8, 16), ops.CrossEntropy()
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    assert [
        f.name for f in JOINT if f.when(chain, cuda) is True and "trades_time" not in f.declares
    ] == []
    assert [f.name for f in JOINT if f.when(chain, cuda) is True] == [
        "linear+loss, on a GPU",
        "linear+loss, computed again",
    ]
    assert "trades time for memory" in JOINT[0].when(chain, cuda)
    cpu = opfuse.Environment(torch.device("cpu"), None, torch.bfloat16, requires_grad=True)
    before = [
        f.name for f in JOINT if f.when(chain, cpu) is True and "trades_time" not in f.declares
    ]
    assert before == ([] if is_interpreting() else ["linear+loss"])
