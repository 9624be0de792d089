"""Which ops a recipe is for: ``autocast(skip=...)``, and ``calibrating``, which only looks."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import threading

import pytest
import torch
from rounding import Rounding, rounding  # noqa: F401
from torch import nn

import opfuse
from opfuse import ops
from opfuse.core.settings import current

RECIPE = Rounding(levels=8)
STATELESS = Rounding()


def model():
    torch.manual_seed(0)
    block = opfuse.Sequential(ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8))
    made = nn.Sequential()
    made.add_module("block", block)
    made.add_module("head", opfuse.Sequential(ops.Linear(8, 4)))
    return opfuse.assign_names(made), (4 * torch.randn(4, 8)).requires_grad_()


def casts(explanation):
    rows = explanation.to_dict()
    return [[len(row["casts"]) for row in rows[name]] for name in ("forward", "backward")]


def test_a_skipped_op_is_as_without_a_recipe_in_both_passes():
    made, x = model()
    names, parts = ["block.0", "block.2", "head.0"], [*made[0], *made[1]]
    for skip in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(4)):
        with opfuse.autocast(STATELESS, skip=skip):
            y = made(x)
        got = torch.autograd.grad(y.square().sum(), [x, *made.parameters()])
        h = x
        for op in parts:
            with opfuse.autocast(not {op.name} & {*skip}, recipe=STATELESS):
                h = op(h)
        assert torch.equal(y, h)
        wanted = torch.autograd.grad(h.square().sum(), [x, *made.parameters()])
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("pattern", ["block", "block.*", "b*", "*"])
def test_a_pattern_takes_all_below_a_module(pattern):
    made, x = model()
    with opfuse.autocast(STATELESS, skip=[pattern]):
        report = opfuse.explain(made, x)
    rows = report.to_dict()["forward"]
    noted = [row["path"] for row in rows if f"skip names it, by '{pattern}'" in row["note"]]
    assert noted == ["block"] * 2 + ["head"] * (pattern == "*")
    assert sum(row["op"].startswith("Cast") for row in rows) == (pattern != "*")


def test_what_is_skipped_has_no_quantizers():
    made, x = model()
    with opfuse.autocast(RECIPE, skip=["head"]):
        made(x)
    assert {key.split(".")[0] for key in made.state_dict() if "quantizers" in key} == {"block"}


def test_a_name_that_changes_is_looked_at_again():
    chain, x = opfuse.Sequential(ops.Linear(8, 8, name="first")), torch.randn(4, 8)
    plain = chain(x)
    with opfuse.autocast(STATELESS, skip=["first"]):
        assert torch.equal(chain(x), plain)
        chain[0].name = "other"
        with pytest.raises(ValueError, match="'first' matches no op"):
            chain(x)
    with opfuse.autocast(STATELESS, skip=["other"]):
        assert torch.equal(chain(x), plain)


def test_a_fusion_is_told_no_recipe_where_all_is_skipped():
    made, x = model()
    told = []

    def when(ops, env):
        told.append(env.recipe)
        return "only asks"

    fusion = opfuse.Fusion((ops.BasicLinear, ops.Bias), opfuse.FusedOperation, when=when)
    registration = opfuse.register_forward_fusion(fusion)
    with opfuse.autocast(STATELESS, skip=["head"]):
        made(x)
    registration.unregister()
    assert told == [STATELESS, STATELESS, None]


def test_bad_patterns_are_refused():
    made, _ = model()
    with pytest.raises(ValueError, match="'hed' matches no op of a prepared model.*'head.0'"):
        with opfuse.autocast(STATELESS, skip=["head", "hed"]):
            raise AssertionError
    for bad in ("head", [made[1]], [None]):
        with pytest.raises(TypeError, match="autocast: expected a list of patterns as skip, got"):
            opfuse.autocast(STATELESS, skip=bad)
    assert current.recipe is None and current.skip == ()  # the refused block left nothing behind


def test_an_inner_block_has_its_own_patterns():
    made, x = model()
    plain = made[1](x)
    with opfuse.autocast(STATELESS, skip=["head"]):
        assert torch.equal(made[1](x), plain)
        with opfuse.autocast(STATELESS):
            assert not torch.equal(made[1](x), plain)
        assert torch.equal(made[1](x), plain)


def test_skip_works_under_compile():
    made, x = model()

    @torch.compile(fullgraph=True, backend="eager")
    def run(x, skip):
        with opfuse.autocast(STATELESS, skip=skip):
            return made(x)

    for skip in (("head",), ("block",), ()):
        with opfuse.autocast(STATELESS, skip=skip):
            wanted = made(x)
        assert torch.equal(run(x, skip), wanted)
    with pytest.raises(Exception, match="'hed' matches no op"):
        run(x, ("hed",))


# Calibrating


def scales(made):
    found = {k: v for k, v in made.state_dict().items() if "quantizers" in k and "recipe" not in k}
    return {re.sub(r"quantizers\.\w{8}", "quantizers.0", key): v for key, v in found.items()}


@pytest.mark.parametrize("grad", [True, False])
def test_calibrating_gives_the_scales_of_a_quantized_step(grad):
    (one, x), (other, _) = model(), model()
    plain = one(x)
    with torch.set_grad_enabled(grad):
        with opfuse.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            y = one(x)
        # what is not quantized differs from what is, in the second linear: so chain by chain
        assert torch.equal(y, plain)
    first = [key for key in scales(one) if "input" in key or "weight" in key]
    with opfuse.autocast(RECIPE):
        other(x)
    found, wanted = scales(one), scales(other)
    assert found.keys() == wanted.keys()
    for key in first:
        if key.startswith("block.0") or "weight" in key:
            assert torch.equal(found[key], wanted[key]), key
    amax = found["block.2.basic_ops.0.quantizers.0.input.amax"]
    with opfuse.plugins.using(""):
        hidden = made_hidden(one, x)
    assert amax.item() == pytest.approx(hidden.abs().max().item())


def made_hidden(made, x):
    return made[0][1](made[0][0](x)).detach()


def test_calibrating_sees_gradients_too_and_changes_none():
    made, x = model()
    wanted = torch.autograd.grad(made(x).square().sum(), [x, *made.parameters()])
    for _ in range(2):
        with opfuse.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            y = made(x)
        got = torch.autograd.grad(y.square().sum(), [x, *made.parameters()])
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    amax = scales(made)["head.0.basic_ops.0.quantizers.0.grad_output.amax"]
    assert amax.item() == pytest.approx((2 * y).abs().max().item()) and amax > 1


def test_calibrating_goes_with_skip_and_with_recipes_without_state():
    made, x = model()
    with opfuse.autocast(enabled=False, calibrating=True, recipe=RECIPE, skip=["head"]):
        made(x)
    assert {key.split(".")[0] for key in scales(made)} == {"block"}
    with opfuse.autocast(enabled=False, calibrating=True, recipe=STATELESS):
        assert torch.equal(made(x), made(x))


def test_a_pattern_for_a_part_of_an_op_is_refused():
    both = {"gate_proj": ops.Linear(8, 8), "up_proj": ops.Linear(8, 8)}
    made = opfuse.assign_names(nn.ModuleDict({"mlp": opfuse.Sequential(ops.ParallelLinear(both))}))
    x = torch.randn(4, 8)
    with opfuse.autocast(STATELESS, skip=["*.gate_proj"]):
        with pytest.raises(ValueError, match="a part of ParallelLinear 'mlp.0': skip all of it"):
            made["mlp"](x)
    with opfuse.autocast(STATELESS, skip=["mlp.0"]):
        assert torch.equal(made["mlp"](x), opfuse.Sequential(*made["mlp"])(x))


def test_only_names_of_ops_that_are_there_and_quantized_count():
    made, x = model()
    for name in ("block.1", "head_of_another_model"):  # a ReLU; nothing
        with pytest.raises(ValueError, match=f"'{name}' matches no op"):
            with opfuse.autocast(STATELESS, skip=[name]):
                raise AssertionError
    around = nn.ModuleDict({"inner": made})
    opfuse.assign_names(around)  # the ops have other names now
    twin = copy.deepcopy(around)
    del made, around
    gc.collect()
    with opfuse.autocast(STATELESS, skip=["inner.head"]):
        twin["inner"](x)


def test_preparing_renames_all_or_none():
    chain, x = opfuse.Sequential(ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8)), torch.randn(4, 8)
    with opfuse.autocast(STATELESS):
        chain(x)
    with pytest.raises(RuntimeError, match="know it as '', not '0'"):
        opfuse.assign_names(chain)
    assert [op.name for op in chain.modules() if isinstance(op, opfuse.FusibleOperation)] == [
        ""
    ] * 7


@pytest.mark.parametrize(
    ("given", "error"),
    [({"skip": None}, "a list of patterns as skip, got None"), ({"calibrating": "yes"}, "a bool")],
)
def test_bad_arguments_of_autocast_are_refused(given, error):
    with pytest.raises(TypeError, match=f"autocast: expected {error}"):
        opfuse.autocast(STATELESS, **given)


def test_what_calibrating_saw_is_no_cast_to_use_again():
    (made, x), (other, _) = model(), model()
    with opfuse.autocast(enabled=False, calibrating=True, recipe=STATELESS, weights="cached"):
        plain = made(x)
    with opfuse.autocast(STATELESS, weights="cached"):
        quantized = made(x)
    with opfuse.autocast(STATELESS):
        assert torch.equal(quantized, other(x)) and not torch.equal(quantized, plain)
    with opfuse.autocast(enabled=False, calibrating=True, recipe=STATELESS, weights="cached"):
        assert torch.equal(made(x), plain)


@pytest.mark.parametrize(
    "blocks",
    [
        lambda: (opfuse.options(prefer="memory"), opfuse.options(double_backward=True)),
        lambda: (opfuse.plugins.using(""), opfuse.plugins.using("-a")),
        lambda: (opfuse.autocast(Rounding()), opfuse.autocast(enabled=False)),
    ],
    ids=["options", "plugins", "recipes"],
)
def test_blocks_that_end_in_another_order_are_refused(blocks):
    """Otherwise the settings of one would stay."""
    before = current.values
    outer, inner = blocks()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="expected blocks to end in the reverse order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert current.values == before and current.block is None


def test_a_block_that_ends_in_another_thread_is_refused():
    block, found = opfuse.options(prefer="memory"), []

    def end():
        with pytest.raises(RuntimeError, match="in the thread that began them"):
            block.__exit__(None, None, None)
        found.append(current.options)

    block.__enter__()
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    block.__exit__(None, None, None)
    assert found == [()] and current.options == ()


def test_blocks_of_different_settings_may_cross():
    before = current.values
    options, plugins = opfuse.options(prefer="memory"), opfuse.plugins.using("")
    options.__enter__()
    plugins.__enter__()
    options.__exit__(None, None, None)
    assert current.values == before._replace(selection="")
    plugins.__exit__(None, None, None)
    assert current.values == before
