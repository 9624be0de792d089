"""The kernels that ``python -m benchmarks.ledger launches`` counts, and the most that there may be."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import opfuse

for package in ("triton", "opfuse_norm", "opfuse_activation", "opfuse_linear", "opfuse_triton"):
    pytest.importorskip(package)
opfuse_fp8 = pytest.importorskip("opfuse_fp8")
launches = pytest.importorskip("ledger.launches")

SMALL = launches.Sizes(rows=256, width=256, hidden=768, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def eager():
    return launches.count(launches.step_of(launches.EagerMLP(SMALL), SMALL))


@pytest.fixture(scope="module")
def chain():
    return launches.step_of(launches.chain(SMALL), SMALL)


def all_of(found):
    return found.torch + found.triton


def test_what_counts_as_a_kernel():
    x, w = (torch.empty(4, 8, device="meta", requires_grad=True) for _ in range(2))

    def step():
        y = F.rms_norm(x.view(2, 2, 8), (8,), w[0]).reshape(4, 8) @ w.t()
        torch.empty_like(y).copy_(y)
        torch.ones(3) + 1, torch.empty(0, device="meta") + 1  # on the CPU, and of nothing
        q = x.view(1, 1, 4, 8)
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    found = launches.count(step)
    assert not found.triton and not found.scales
    assert found.torch == {
        "native_layer_norm": 1,
        "mm": 1,
        "copy_": 1,
        "_scaled_dot_product_flash_attention": 1,
        "_scaled_dot_product_flash_attention_backward": 3,
        **{"sum": 1, "ones_like": 1},
        **{"add": 2, "add_": 1},  # three gradients of one tensor, and that of the step before
    }


def test_eager_pytorch_is_counted_by_hand(eager):
    """Forward: norm, 3 products, SiLU, a product, a sum. Backward: the same, twice as many products."""
    assert eager.torch == {
        **{"mm": 9, "silu": 1, "silu_backward": 1, "mul": 3, "add": 3},
        **{"native_layer_norm": 1, "native_layer_norm_backward": 2},
    }


def test_no_gradient_is_copied_because_a_launch_was_recorded(chain):
    """Autograd takes a gradient as it is, unless something else holds it."""
    assert not launches.count(chain).torch["copy_"]


@pytest.mark.parametrize("measured", [False, True])
def test_a_chain_launches_no_more_than_eager_pytorch(eager, chain, measured):
    found = launches.count(chain, measured=measured)
    assert {"norm_forward", "norm_backward", "activation_backward_kernel"} <= found.triton.keys()
    assert all_of(found).total() <= 12 < all_of(eager).total() == 20
    assert "linear_activation_kernel" not in found.triton


def test_a_block_launches_no_more_than_eager_pytorch():
    pytest.importorskip("transformers")
    pytest.importorskip("opfuse_transformers")
    pytest.importorskip("opfuse_rope")
    eager, converted = (
        all_of(launches.count(launches.llama(SMALL, convert=convert))) for convert in (False, True)
    )
    assert converted["rope_kernel"] == 2
    assert converted.total() <= 39 < eager.total() == 115
    assert eager["mm"] == converted["mm"] + converted["addmm"] == 21
    assert converted["addmm"] == 1  # in the gradients of the inputs of gate and up
    with opfuse.options(**{"transformers.projections": "chained"}):
        chained = all_of(launches.count(launches.llama(SMALL, convert=True)))
    assert chained.total() <= 37 and chained["addmm"] == 3  # and of q, k and v


def test_a_model_launches_no_more_than_eager_pytorch_around_its_blocks():
    pytest.importorskip("transformers")
    pytest.importorskip("opfuse_transformers")
    eager, converted = (
        launches.count(launches.around_blocks(convert=way)) for way in (False, True)
    )
    assert not eager.triton and converted.triton["loss_kernel"] == 1
    assert eager.torch["mm"] == converted.torch["mm"] == 3  # of the head
    assert all_of(converted).total() < all_of(eager).total()


def test_under_delayed_fp8_a_chain_launches_no_more_than_eager_pytorch(eager, chain):
    """Each weight is cast by one kernel, as are two tensors that nothing else casts."""
    found = launches.count(chain, opfuse_fp8.DelayedScaling())
    assert found.torch["_scaled_mm_v2"] == 6 and not found.torch["mm"]
    assert found.triton["cast_forward"] == 4
    assert {"norm_rows", "cast_backward"} <= found.triton.keys()
    assert all_of(found).total() <= 17 < all_of(eager).total() == 20
    assert found.scales == {"advance_scales": 1} and found.triton["advance_scales"] == 1


def test_under_delayed_fp8_a_block_launches_no_more_than_eager_pytorch():
    """Linears side by side are one product: of 7 weights, in 4 forwards, 7 and 7 gradients."""
    pytest.importorskip("transformers")
    pytest.importorskip("opfuse_transformers")
    pytest.importorskip("opfuse_rope")
    found = launches.count(launches.llama(SMALL, convert=True), opfuse_fp8.DelayedScaling())
    # which the test above counts; the backward is in the block, so gradients have two buffers
    assert all_of(found).total() <= 59 < 115
    assert not found.torch["clone"]  # the products read parts of a gradient where they are
    assert found.torch["_scaled_mm_v2"] == 18 and not found.torch["mm"]
    assert found.scales == {"advance_scales": 1}


def test_weights_that_share_a_scale_are_one_operand():
    """A product for two outputs and two gradients of their inputs, and nothing around them."""
    pytest.importorskip("transformers")
    pytest.importorskip("opfuse_transformers")
    pytest.importorskip("opfuse_rope")
    recipe = opfuse_fp8.DelayedScaling(shared_weight_scale=True)
    found = launches.count(launches.llama(SMALL, convert=True), recipe)
    assert all_of(found).total() <= 47 and found.scales == {"advance_scales": 1}
    assert found.torch["_scaled_mm_v2"] == 15 and found.triton["cast_forward"] == 13
    assert not {"repeat", "clone", "add_", "_to_copy"} & found.torch.keys()
    assert found.torch["cat"] == 1  # of the gradients of queries, keys and values


def test_nothing_stays_pretended(chain):
    launches.count(chain)
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)
    x = torch.empty(2, 8, device="meta")
    assert x.is_meta and not x.is_cuda
    with opfuse.plugins.using(""):
        model = opfuse.Sequential(opfuse.ops.GELU())
        assert "GELU" in str(opfuse.explain(model, torch.ones(2, 8)))


# The experts of a mixture


def test_experts_move_each_tensor_once_and_launch_as_often_for_any_number_of_them():
    experts = pytest.importorskip("ledger.experts")
    pytest.importorskip("opfuse_moe")
    sizes = experts.Sizes(tokens=512, width=256, hidden=128, experts=4, chosen=2)
    assert sizes.of_groups.tolist() == [0, 341, 341, 342]
    rows, wide = 1024 * 256 * 2, 1024 * 2 * 128 * 2  # bytes; the activation's output has half
    up, down = 4 * 256 * 256 * 2, 4 * 256 * 128 * 2
    products = rows + up + wide + wide // 2 + (wide // 2 + down + rows)
    products += (rows + down + wide + wide) + (rows + wide // 2 + down)
    products += (wide + up + rows) + (wide + rows + up)
    found = experts.measure(experts.experts_step(sizes))
    assert found.triton == 6 and 1 <= found.bytes / products <= 1.02
    apart = experts.measure(experts.experts_step(sizes), plugins="-moe,-inductor,-liger")
    assert apart.bytes > found.bytes

    recipe, counts = opfuse_fp8.DelayedScaling(), {}
    for number in (4, 8):
        step = experts.experts_step(sizes._replace(experts=number), looped=True)
        for plugins in (experts.OTHERS, "-moe,-inductor,-liger"):
            counts[number, plugins] = experts.measure(step, recipe, plugins=plugins).torch
    assert counts[4, experts.OTHERS] == counts[8, experts.OTHERS] < 60
    assert counts[8, "-moe,-inductor,-liger"] > 1.8 * counts[4, "-moe,-inductor,-liger"]


@pytest.mark.parametrize("into", ["one", "list"])
def test_experts_add_to_main_grad_by_the_product(into):
    """It reads and writes 4 bytes for each number; else 2 are written, read, and added to these."""
    experts = pytest.importorskip("ledger.experts")
    pytest.importorskip("opfuse_moe")
    sizes = experts.Sizes(tokens=512, width=256, hidden=128, experts=4, chosen=2)
    plain = experts.measure(experts.experts_step(sizes))
    by, after = [
        experts.measure(experts.experts_step(sizes, into=into, adds=adds)) for adds in (True, False)
    ]
    numbers, parameters = 4 * 3 * 128 * 256, 2 if into == "one" else 8
    assert by.bytes - plain.bytes == (4 + 4 - 2) * numbers
    assert after.bytes - by.bytes == (2 + 2) * numbers
    assert (by.torch, after.torch) == (plain.torch, plain.torch + parameters)
    assert by.triton == after.triton == 6


def test_sorting_moves_the_rows_of_all_experts():
    """Gathered, gathered back, summed; and the same backwards."""
    experts = pytest.importorskip("ledger.experts")
    sizes = experts.Sizes(tokens=512, width=256, hidden=128, experts=4, chosen=2)
    found = experts.measure(experts.sorting_step(sizes))
    assert found.triton == 0 and found.bytes > 8 * 1024 * 256 * 2
