"""Delayed scales in one buffer: what advances, in how many launches, and what never goes stale.

``test_recipes.py`` has the formula. ``TRITON_INTERPRET=1 python -m pytest`` runs the kernel.
"""

import copy
import io
from collections import Counter
from types import SimpleNamespace

import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import delayed
from opfuse_fp8.delayed import held, update_delayed
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, ROWWISE
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
needs_kernels = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if is_interpreting():
    interpreter.install()

STATE = fp8.DelayedQuantizer.state_names


def quantizers(count=5, history=4, **given):
    """Of inputs and gradients, in both formats, with margins of their own."""
    return [
        fp8.DelayedQuantizer(
            E5M2 if i % 3 == 2 else E4M3, is_grad=i % 3 == 2, margin=i % 4, history=history, **given
        )
        for i in range(count)
    ]


def see(some, step):
    """Let quantizers cast, those of gradients in every second step; one sees infinity, one NaN."""
    for i, quantizer in enumerate(some):
        if quantizer.is_grad and step % 2:
            continue
        values = torch.tensor([1.5 + i, -0.25 * step * i])
        values[0] = {(1, 2): torch.inf, (3, 1): torch.nan}.get((i, step), values[0])
        quantizer.quantize(values, BOTH)


def states(some):
    return [getattr(quantizer, name).clone() for quantizer in some for name in STATE]


def same(some, others):
    return all(map(torch.equal, states(some), states(others)))


def capture(patch):
    """As while a CUDA graph is captured."""
    for module in (delayed, fp8.quantizers, opfuse.core.quantization.state):
        patch.setattr(module, "is_captured", lambda device: True)


def holds(quantizer):
    """Whether the state of a quantizer is a row of a buffer."""
    rows, loose = held([quantizer])
    assert (len(rows), len(loose)) in ((1, 0), (0, 1))
    return bool(rows)


def rows_of(some):
    return [quantizer._shared for quantizer in some]


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("history", [1, 2, 5])
def test_quantizers_advance_together_as_each_would_alone(history, most_recent):
    together, alone = (quantizers(history=history, most_recent=most_recent) for _ in range(2))
    for step in range(7):
        for some in (together, alone):
            see(some, step)
        update_delayed(together, None)
        for quantizer in alone:
            update_delayed([quantizer], None)
        assert same(together, alone), step
    assert len({id(buffer) for buffer, _ in rows_of(together)}) == 1
    assert len({id(buffer) for buffer, _ in rows_of(alone)}) == len(alone)


def test_a_quantizer_that_is_left_out_stays():
    """As one of an op that did not run, or that belongs to two models in blocks of their own."""
    some, others = quantizers(6), quantizers(6)
    blocks = [some, some[:4], some[2:], some[3:4], some, some[::-1]]
    twins = [others, others[:4], others[2:], others[3:4], others, others]
    for step, (block, twin) in enumerate(zip(blocks, twins, strict=True)):
        see(some, step), see(others, step)
        update_delayed([*block, block[0]], None)  # one that is named twice advances once
        for quantizer in twin:
            update_delayed([quantizer], None)
        assert same(some, others), step
    assert len({id(buffer) for buffer, _ in rows_of(some)}) == 1


def test_state_stays_where_it_is():
    """A CUDA graph that casts or advances reads the same addresses."""
    some = quantizers(4)
    see(some, 0), update_delayed(some, None)
    before = [getattr(quantizer, name) for quantizer in some for name in STATE]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in before)
    for step, block in enumerate((some, some[1:], [*some, *quantizers(2)], some)):
        see(some, step), update_delayed(block, None)
    after = [getattr(quantizer, name) for quantizer in some for name in STATE]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_what_is_replaced_is_read_from_where_it_is():
    """A move, a new margin, and a copy of the model: nothing advances in their old place."""
    some, others = quantizers(4), quantizers(4)
    for quantizers_ in (some, others):
        see(quantizers_, 0), update_delayed(quantizers_, None)
    some[0].amax_history = some[0].amax_history.clone()  # as nn.Module.to sets a new tensor
    some[1].scale = some[1].scale.clone()
    for quantizers_ in (some, others):
        quantizers_[3].margin = 5
        see(quantizers_, 2), update_delayed(quantizers_, None)
    assert same(some, others)
    file = io.BytesIO()
    torch.save(some, file)
    assert file.tell() < 20_000
    file.seek(0)
    for copied in (copy.deepcopy(some), torch.load(file, weights_only=False)):
        assert same(copied, some) and not any(rows_of(copied))
        before = states(some)
        see(copied, 3), update_delayed(copied, None)
        assert all(map(torch.equal, before, states(some)))
        assert not same(copied, some)


def test_nothing_moves_while_a_graph_is_captured(monkeypatch):
    """It would be moved again at each replay: also the copies that fit a quantized parameter."""
    some, others = quantizers(4), quantizers(4)
    for quantizers_ in (some, others):
        see(quantizers_, 0), update_delayed(quantizers_[:2], None)
        see(quantizers_, 1)
    tensors = [getattr(quantizer, name) for quantizer in some for name in STATE]
    with monkeypatch.context() as patch:
        capture(patch)
        update_delayed(some, None)
        update_delayed([some[1], some[3]], None)
    update_delayed(others, None)
    update_delayed([others[1], others[3]], None)
    assert same(some, others)
    after = [getattr(quantizer, name) for quantizer in some for name in STATE]
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    buffer, _ = some[0]._shared
    assert buffer._captured and not buffer._selections


@pytest.mark.parametrize("when", ["cast", "unrecorded", "update", "after a step"])
def test_what_a_graph_reads_stays_where_it_is(monkeypatch, when):
    """Also if it is captured before the first update, or the margin changes after it."""
    some, others = quantizers(4), quantizers(4)
    if when == "after a step":
        for quantizers_ in (some, others):
            see(quantizers_, 0), update_delayed(quantizers_, None)
    tensors = [getattr(quantizer, name) for quantizer in some for name in STATE]
    with monkeypatch.context() as patch:
        capture(patch)
        if when == "update":
            update_delayed(some, None)
        else:
            see([q.unrecorded() for q in some] if when == "unrecorded" else some, 2)
    if when == "update":
        update_delayed(others, None)
    elif when != "unrecorded":
        see(others, 2)
    for step in range(3, 6):
        for quantizers_ in (some, others):
            quantizers_[1].margin = step
            see(quantizers_, step), update_delayed(quantizers_, None)
        assert same(some, others), step
    after = [getattr(quantizer, name) for quantizer in some for name in STATE]
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    for copied in copy.deepcopy(some):  # no graph reads a copy
        update_delayed([copied], None)
        assert holds(copied)


def test_a_tensor_that_replaced_one_of_a_graph_moves(monkeypatch):
    (quantizer,) = quantizers(1)
    with monkeypatch.context() as patch:
        capture(patch)
        quantizer.quantize(torch.ones(2), BOTH)
    for name in STATE:
        setattr(quantizer, name, getattr(quantizer, name).clone())
    update_delayed([quantizer], None)
    assert holds(quantizer)


def test_state_that_a_graph_would_make_again_is_refused(monkeypatch):
    chain, x = opfuse.Sequential(ops.Linear(16, 16)), torch.randn(16, 16)
    for recipe in (fp8.DelayedScaling(), fp8.NVFP4BlockScaling()):
        with monkeypatch.context() as patch:
            capture(patch)
            with pytest.raises(RuntimeError, match=r"has state.*run the step once before"):
                with opfuse.autocast(recipe=recipe):
                    chain(x)
        with opfuse.autocast(recipe=recipe):
            chain(x)
        with monkeypatch.context() as patch:
            capture(patch)
            with opfuse.autocast(recipe=recipe):
                chain(x)


def test_few_selections_of_rows_are_kept():
    some = quantizers(delayed.MOST_SELECTIONS + 5)
    update_delayed(some, None)
    for quantizer in some:
        update_delayed([quantizer], None)
    assert len(some[0]._shared[0]._selections) == delayed.MOST_SELECTIONS


def test_a_group_takes_the_maxima_in_the_order_of_the_model(monkeypatch):
    def start_collective(group, what, start, amaxes, op):
        assert op == torch.distributed.ReduceOp.MAX and group == "a group"
        seen.append(amaxes.tolist())
        amaxes.copy_(amaxes + 1)
        return SimpleNamespace(wait=list)

    monkeypatch.setattr(delayed, "start_collective", start_collective)
    monkeypatch.setattr(delayed, "Group", str)
    some, seen = quantizers(4), []
    update_delayed(some[2:], None)  # two buffers
    some[1].quantize(torch.tensor([3.0]), BOTH)
    some[2].quantize(torch.tensor([8.0]), BOTH)
    update_delayed(some, "a group")
    assert seen == [[-1, 3, 8, -1]]
    assert [quantizer.amax_history[-1].item() for quantizer in some] == [0, 4, 9, 0]


# The kernel


@needs_kernels
@pytest.mark.parametrize("length", [1, 2, 3, 127, 1024, 1025, 2050])
def test_the_kernel_gives_the_bits_of_the_twin(length):
    from opfuse_fp8.kernels import scales as kernels

    generator = torch.Generator().manual_seed(length)
    given = [-1.0, 0.0, 1e-44, 3.0, torch.inf, torch.nan, 1e-30, 60000.0]
    amaxes = torch.tensor([*given, *given])
    histories = torch.rand(16, length, generator=generator) * 1e-3
    histories[:, 0] = 0
    histories[9, -1], histories[10, -1], histories[11] = torch.inf, torch.nan, 0.0
    facts = torch.tensor([[448.0, 1.0, 0.0], [57344.0, 8.0, 1.0], [448.0, 2.0**-126, 0.0]])
    facts = facts.repeat(6, 1)[:16].contiguous()
    counts = torch.arange(16, dtype=torch.int32)
    state = torch.rand(16, generator=generator), amaxes, histories, counts
    for rows in (None, torch.tensor([1, 4, 15])):
        for most_recent in (False, True):
            mine, other = ([tensor.clone() for tensor in state] for _ in range(2))
            kernels.advance(*mine, facts, rows, most_recent=most_recent)
            delayed.advance(*other, facts, rows, most_recent=most_recent)
            for one, two in zip(mine, other, strict=True):
                assert torch.equal(one.view(torch.int32), two.view(torch.int32))
            assert (mine[3] - counts).sum() == (rows is None) * 2 + (rows is not None)


# What a step launches

_FREE = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh", "set_")


class Launches(TorchDispatchMode):
    """Counts kernels and PyTorch's operations: in the update of the scales, and in casts."""

    keeps_no_tensors = True

    def __init__(self, patch):
        super().__init__()
        self.counts, self._place, self._inside = Counter(), "", 0
        from opfuse_fp8 import fused, fused_norms
        from opfuse_triton import Kernel

        launch = Kernel.launch

        def counted(kernel, *args, **given):
            self._add(kernel.name)
            self._inside += 1  # the interpreter's own operations
            try:
                return launch(kernel, *args, **given)
            finally:
                self._inside -= 1

        patch.setattr(Kernel, "launch", counted)
        for cls, name, place in (
            (fp8.DelayedScaling, "update", "scales"),
            (fused.CastAlone, "fuser_forward", "casts"),
            (fused.ForwardActivationCast, "fuser_forward", "casts"),
            (fused.BackwardCast, "fuser_backward", "casts"),
            (fused_norms.ForwardNormCast, "fuser_forward", "casts"),
        ):
            patch.setattr(cls, name, self._placed(getattr(cls, name), place))

    def _placed(self, function, place):
        def call(*args, **given):
            before, self._place = self._place, place
            try:
                return function(*args, **given)
            finally:
                self._place = before

        return call

    def _add(self, name):
        if not self._inside and self._place:
            self.counts[self._place, name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(_FREE):
            self._add(name)
        return func(*args, **(kwargs or {}))


def block(layers, width=32):
    """The linears of Llama blocks: query, key and value; out; gate and up; down."""

    def linears(**sizes):
        return ops.ParallelLinear({n: ops.Linear(width, s, bias=False) for n, s in sizes.items()})

    def layer():
        inner = opfuse.Sequential(ops.RMSNorm(width), linears(q=width, k=width, v=width))
        mlp = [ops.RMSNorm(width), linears(gate=64, up=64), ops.SwiGLU()]
        out, down = ops.Linear(width, width, bias=False), ops.Linear(64, width, bias=False)
        return torch.nn.ModuleList([inner, opfuse.Sequential(out, *mlp, down)])

    model = torch.nn.ModuleList([layer() for _ in range(layers)]).to(torch.bfloat16)
    opfuse.assign_names(model)
    return model


def launches(layers, monkeypatch):
    """What a third step launches."""
    torch.manual_seed(0)
    model, x = block(layers), torch.randn(32, 32).to(torch.bfloat16).requires_grad_()

    def step():
        with opfuse.autocast("fp8-delayed"):
            y = x
            for inner, rest in model:
                y = rest(inner(y)[..., :32].contiguous())
        y.backward(torch.ones_like(y))

    with opfuse.plugins.using("fp8"), monkeypatch.context() as patch:
        step(), step()
        with Launches(patch) as seen:
            step()
    return seen.counts


@needs_kernels
def test_a_step_launches_two_kernels_for_its_scales_and_nothing_small_around_casts(monkeypatch):
    """For one layer and for two. Before, each quantizer took 25, and each cast 4 more."""
    for layers in (1, 2):
        found = launches(layers, monkeypatch)
        assert {n: c for (place, n), c in found.items() if place == "scales"} == {
            "advance_scales": 2  # after the forward, and after the backward
        }
        casts = {name: count for (place, name), count in found.items() if place == "casts"}
        kernels = {"cast_forward", "cast_backward", "norm_rows", "transpose_codes"}
        assert casts.keys() <= kernels, casts
        assert sum(casts.values()) - casts["transpose_codes"] == 8 * layers


@pytest.mark.skipif(is_interpreting(), reason="the kernel runs")
def test_without_kernels_the_operations_do_not_depend_on_how_many_there_are(monkeypatch):
    counts = [launches(layers, monkeypatch) for layers in (1, 2)]
    of_scales = [{k: v for k, v in found.items() if k[0] == "scales"} for found in counts]
    assert of_scales[0] == of_scales[1]
    assert sum(of_scales[0].values()) <= 60


def test_buffers_hold_what_they_say():
    (quantizer,) = quantizers(1)
    assert not holds(quantizer)
    update_delayed([quantizer], None)
    assert holds(quantizer)
    assert not holds(copy.copy(quantizer))


def test_a_quantizer_with_a_way_of_its_own_to_advance_is_refused():
    class Own(fp8.DelayedQuantizer):
        def advance(self):
            self.scale.fill_(2.0)

    with pytest.raises(TypeError, match=r"Own has its own advance\(\), which nothing calls"):
        fp8.DelayedScaling().update([Own(torch.float8_e4m3fn)], None)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_no_copy_of_earlier_values_stays_in_a_place_that_is_written(recipe):
    first, then = torch.randn(2, 128, 128)
    known = fp8.opfuse_recipes()[recipe]()
    quantizer = fp8.make(known, opfuse.QuantizerRole("linear", "input"), "cpu")
    place = quantizer.quantize(first, BOTH)
    quantizer.quantize(3 * then, ROWWISE, out=place)
    fresh = fp8.make(known, opfuse.QuantizerRole("linear", "input"), "cpu").quantize(3 * then, BOTH)
    for mine, expected in zip(place.tensors(), fresh.tensors(), strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))
