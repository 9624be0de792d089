"""What PyTorch does around a chain: each works fused and unfused, and gives what torch.nn gives."""

from __future__ import annotations

import copy
import functools
import io
import itertools

import fusing
import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.testing import FusionSuite

pytestmark = pytest.mark.alone  # its fusions are those of a variant, and no plugin is on

ROWS, WIDTH = 6, 16


@pytest.fixture(params=list(fusing.VARIANTS), autouse=True)
def variant(request):
    with fusing.fusions(request.param):
        yield request.param


def pair():
    """A chain and the torch.nn model it must equal."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(WIDTH, 32),
        nn.GELU("tanh"),
        nn.Linear(32, 32),
        nn.GELU("tanh"),
        nn.Linear(32, WIDTH),
    )
    chain = opfuse.Sequential(
        ops.Linear(WIDTH, 32), ops.GELU(), ops.Linear(32, 32), ops.GELU(), ops.Linear(32, WIDTH)
    )
    chain.load_state_dict(plain.state_dict())
    return chain, plain


def data(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def train_step(fn, params, x=None):
    """Output, input gradient and parameter gradients of one step."""
    x = (data() if x is None else x).clone().requires_grad_()
    y = fn(x)
    y.float().square().sum().backward()
    result = [y.detach(), x.grad, *[p.grad for p in params]]
    for p in params:
        p.grad = None
    return result


def check(got, expected, atol=1e-5, rtol=1e-4):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=atol, rtol=rtol, check_dtype=False)


def both(fn, **tolerance):
    """Run ``fn(model)`` on the chain and on the torch.nn model and compare."""
    chain, plain = pair()
    check(fn(chain), fn(plain), **tolerance)


def step(model):
    return train_step(model, list(model.parameters()))


def test_each_variant_fuses_as_it_should(variant):
    chain, _ = pair()
    chain(data().requires_grad_())
    plan = str(chain._module_groups[0]._last[1].plan)
    expected = {
        "unfused": (),
        "fused": ("LinearBias", "ActivationBias"),
        "joint": ("JointLinearGelu",),
    }[variant]
    for name in ("LinearBias", "ActivationBias", "JointLinearGelu"):
        assert (name in plan) == (name in expected)


def test_an_eager_step_matches_torch():
    both(step)


# torch.compile and torch.export


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("warm", "dynamic"),
    [*itertools.product((False, True), repeat=2)]
    if FusionSuite.thorough
    else [(False, True), (True, False)],
)
def test_a_compiled_step_matches_torch(warm, dynamic):
    def compiled(model):
        if warm:
            step(model)
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
        return train_step(compiled, list(model.parameters()))

    chain, plain = pair()
    check(compiled(chain), step(plain))


def test_compile_over_row_counts():
    torch._dynamo.utils.counters.clear()
    chain, plain = pair()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    for rows in (6, 5, 4, 3, 7):
        check(
            train_step(compiled, list(chain.parameters()), data(rows)),
            train_step(plain, list(plain.parameters()), data(rows)),
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # raised inside torch
def test_compiled_autograd_matches_torch_twice():
    chain, plain = pair()
    for _ in range(2):  # the second time the contexts of the first are there to be used
        for model in (chain, plain):
            model.zero_grad()
            loss = model(data()).square().sum()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                loss.backward()
        check([p.grad for p in chain.parameters()], [p.grad for p in plain.parameters()])


def test_a_compiled_call_without_grad_matches_torch():
    chain, plain = pair()
    with torch.no_grad():
        check([torch.compile(chain, fullgraph=True, backend="aot_eager")(data())], [plain(data())])


def test_one_op_compiles_alone():
    chain, plain = pair()
    compiled = torch.compile(chain[0], fullgraph=True, backend="aot_eager")
    check(train_step(compiled, list(chain[0].parameters())), step(plain[0]))


def test_compile_follows_changes_to_the_chain():
    chain, plain = pair()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    compiled(data())
    for model in (chain, plain):
        model[0].weight.requires_grad_(False)
    check(train_step(compiled, list(chain.parameters())), step(plain))
    torch.manual_seed(2)
    replacement = nn.Linear(WIDTH, 32)
    plain[0] = replacement
    chain[0] = ops.Linear(WIDTH, 32)
    chain[0].load_state_dict(replacement.state_dict())
    check(train_step(compiled, list(chain.parameters())), step(plain))
    state = {name: torch.full_like(value, 0.1) for name, value in plain.state_dict().items()}
    chain.load_state_dict(state, assign=True)
    plain.load_state_dict(state, assign=True)
    check(train_step(compiled, list(chain.parameters())), step(plain))


def test_a_compiled_chain_follows_hooks():
    def double(module, args, output):
        return output * 2

    chain, plain = pair()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    compiled(data())
    for model in (chain, plain):
        handle = model[1].register_forward_hook(double)
        model.handle = handle
    check(train_step(compiled, list(chain.parameters())), step(plain))
    chain.handle.remove(), plain.handle.remove()
    check(train_step(compiled, list(chain.parameters())), step(plain))


def test_compile_sees_hooks_of_ops_without_parameters():
    chain = opfuse.Sequential(ops.GELU(), ops.SiLU())
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
        before = compiled(data())
        chain[1].register_forward_hook(lambda module, args, output: output * 2)
        torch.testing.assert_close(compiled(data()), 2 * before)


@pytest.mark.costly(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_chain_matches_torch(strict, dynamic):
    chain, plain = pair()
    shapes = ({0: torch.export.Dim("rows", min=2)},) if dynamic else None
    program = torch.export.export(chain.eval(), (data(),), dynamic_shapes=shapes, strict=strict)
    rows, exported = data(9 if dynamic else ROWS), program.module()
    params = dict(exported.named_parameters())
    named = [params[name] for name, _ in chain.named_parameters()]
    check(train_step(exported, named, rows), train_step(plain, list(plain.parameters()), rows))


# Recomputation, copies, files


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_matches_torch(reentrant):
    both(
        lambda model: train_step(
            lambda x: checkpoint(model, x, use_reentrant=reentrant), list(model.parameters())
        )
    )


def test_checkpoint_inside_a_compiled_region():
    def region(model):
        inner = functools.partial(checkpoint, model, use_reentrant=False)
        compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
        return train_step(compiled, list(model.parameters()))

    both(region)


def test_a_deepcopy_matches_torch_and_shares_no_parameter():
    chain, plain = pair()
    step(chain)
    twin = copy.deepcopy(chain)
    check(step(twin), step(plain))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in chain.parameters()}
    twin[0].weight.data.zero_()
    assert chain[0].basic_ops[0].weight.abs().sum() > 0


def test_a_copy_outdates_no_plan_and_is_in_no_fuser():
    chain = opfuse.Sequential(opfuse.ops.MakeExtraOutput(), opfuse.ops.Linear(4, 4))
    x = torch.randn(3, 4)
    chain(x)
    before = opfuse.FusibleOperation.changes
    twin = copy.deepcopy(chain)
    assert opfuse.FusibleOperation.changes == before
    twin[0].set_extra_output_channel(0, "copied", output_to_caller=False)
    assert isinstance(twin(x), torch.Tensor) and isinstance(chain(x), tuple)


def test_channels_of_a_shallow_copy_are_its_own():
    fork, add = opfuse.ops.MakeExtraOutput(), opfuse.ops.AddExtraInput()
    x = torch.randn(3, 4)
    opfuse.Sequential(fork, add)(x, x)
    mine, its = copy.copy(fork), copy.copy(add)
    mine.set_extra_output_channel(0, "copied", output_to_caller=False)
    its.set_extra_input_channel(0, "copied")
    torch.testing.assert_close(opfuse.Sequential(mine, its)(x), 2 * x)
    assert fork.extra_output_channels == add.extra_input_channels == (None,)
    assert len(opfuse.Sequential(fork, add)(x, x)) == 2


def test_save_the_whole_module():
    chain, plain = pair()
    step(chain)
    file = io.BytesIO()
    torch.save(chain, file)
    file.seek(0)
    check(step(torch.load(file, weights_only=False)), step(plain))


def test_state_dict_loads_both_ways_as_weights_only():
    chain, plain = pair()
    assert [name for name, _ in chain.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    file = io.BytesIO()
    torch.save(chain.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state, strict=True)
    chain.load_state_dict(plain.state_dict(), strict=True)


# Parameters


@pytest.mark.costly(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("index", [0, 2])
def test_weight_norm_on_linear(compiled, index):
    def run(model):
        parametrizations.weight_norm(model[index])
        fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        return train_step(fn, list(model.parameters()))

    both(run)


@pytest.mark.costly(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_weight_norm_on_layer_norm(compiled):
    def run(model):
        parametrizations.weight_norm(model[0], dim=None)
        fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        return train_step(fn, list(model.parameters()))

    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU())
    plain = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"))
    plain.load_state_dict(chain.state_dict())
    check(run(chain), run(plain))


def test_spectral_norm_in_eager():
    def run(model):
        torch.manual_seed(3)
        parametrizations.spectral_norm(model[0])
        return step(model) + step(model)

    both(run)


def test_spectral_norm_under_compile_is_refused():
    chain, _ = pair()
    parametrizations.spectral_norm(chain[0])
    with pytest.raises(RuntimeError, match="spectral_norm on weight updates its state"):
        torch.compile(chain, fullgraph=True, backend="aot_eager")(data())


def test_tied_weights_get_both_gradients():
    def run(model):
        model[4].weight = model[0].weight
        return step(model)

    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 8)
    )
    chain = opfuse.Sequential(
        ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)
    )
    chain.load_state_dict(plain.state_dict())
    for model in (chain, plain):
        model[4].weight = model[0].weight
    x = torch.randn(3, 8)
    check(
        train_step(chain, list(chain.parameters()), x),
        train_step(plain, list(plain.parameters()), x),
    )


def test_assigned_and_replaced_parameters_get_gradients():
    def run(model):
        step(model)
        state = {name: torch.full_like(value, 0.05) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        first = step(model)
        model[0].weight = nn.Parameter(torch.full_like(model[0].weight, 0.2))
        return first + step(model)

    both(run)


def test_meta_init_and_to_empty():
    chain, plain = pair()
    with torch.device("meta"):
        empty = opfuse.Sequential(*[copy_of(op) for op in chain])
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    empty.load_state_dict(plain.state_dict())
    check(step(empty), step(plain))


def copy_of(op):
    return (
        ops.Linear(op.basic_ops[0].in_features, op.basic_ops[0].out_features)
        if isinstance(op, ops.Linear)
        else ops.GELU()
    )


def test_functional_call_matches_torch():
    chain, plain = pair()
    state = {name: value * 2 for name, value in chain.state_dict().items()}
    check(
        [torch.func.functional_call(chain, state, (data(),))],
        [torch.func.functional_call(plain, state, (data(),))],
    )


def test_frozen_parameters_match_torch():
    def run(model):
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        model[4].weight.requires_grad_(False)
        return [*step(model), model(data()).detach()]

    both(run)


def test_nothing_before_the_first_trainable_op_is_saved(variant):
    if variant == "joint":
        pytest.skip("a joint fusion saves what it likes")
    chain, _ = pair()
    for p in list(chain.parameters())[:-2]:
        p.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        chain(data())
    assert [tuple(t.shape) for t in saved] == [(ROWS, 32)]


# Autograd


def test_retain_graph_allows_a_second_backward():
    def run(model):
        x = data().requires_grad_()
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    both(run)


def test_two_branches_sharing_an_input():
    def run(model):
        x = data().requires_grad_()
        (model(x) + model[0](x).sum()).square().sum().backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    both(run)


def test_inference_mode_matches_torch():
    chain, plain = pair()
    with torch.inference_mode():
        check([chain(data())], [plain(data())])
    check(step(chain), step(plain))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_matches_torch(compiled):
    def run(model):
        fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fn(data())
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        return [y.detach().float(), *[p.grad for p in model.parameters()]]

    both(run, atol=0.1, rtol=0.05)


def test_grad_scaler_skips_the_steps_that_overflow():
    """Under fp16 autocast: the same scales, the same skipped steps, and the same parameters."""
    runs = []
    for model in pair():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=1)
        optimizer, scales = torch.optim.SGD(model.parameters(), lr=1e-3), []
        before = [param.detach().clone() for param in model.parameters()]
        skipped = []
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                y = model(data())
            scaler.scale(y.square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            same = zip(before, model.parameters(), strict=True)
            skipped.append(all(torch.equal(old, new) for old, new in same))
        runs.append((scales, skipped, [param.detach() for param in model.parameters()]))
    (scales, skipped, params), (_, expected, others) = runs
    assert runs[0][0] == runs[1][0] and min(scales) < 2.0**22
    assert skipped == expected and skipped[0] and not skipped[-1]
    check(params, others, atol=1e-3, rtol=1e-2)


def test_a_backward_inside_autocast_matches_torch():
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train_step(model, list(model.parameters()))

    both(run, atol=0.1, rtol=0.05)


def test_the_incoming_gradient_is_never_modified():
    chain, _ = pair()
    grad = torch.randn(ROWS, WIDTH)
    kept = grad.clone()
    x = data().requires_grad_()
    chain(x).backward(grad)
    assert torch.equal(grad, kept)


def test_create_graph_is_refused_without_double_backward():
    chain, _ = pair()
    x = data().requires_grad_()
    with pytest.raises(RuntimeError, match="double_backward=True"):
        torch.autograd.grad(chain(x).square().sum(), x, create_graph=True)


def test_create_graph_raises_where_the_incoming_gradient_needs_no_gradient():
    chain, _ = pair()
    x = data().requires_grad_()
    with pytest.raises(RuntimeError, match="double_backward=True"):
        torch.autograd.grad(chain(x).sum(), x, create_graph=True)


def test_gradient_penalty_with_the_option():
    def run(model):
        x = data().requires_grad_()
        with opfuse.options(double_backward=True):
            y = model(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    both(run, atol=1e-4)


def test_functorch_per_sample_gradients():
    def run(model):
        def loss(params, row):
            return torch.func.functional_call(model, params, (row,)).square().sum()

        params = {name: p.detach() for name, p in model.named_parameters()}
        return list(torch.func.vmap(torch.func.grad(loss), (None, 0))(params, data()).values())

    both(run, atol=1e-4)


def test_functorch_jvp_and_jacrev():
    def run(model):
        return [
            torch.func.jvp(model, (data(),), (torch.ones(ROWS, WIDTH),))[1],
            torch.func.jacrev(lambda row: model(row))(data()[0]),
        ]

    both(run, atol=1e-4)


def test_functorch_names_an_op_it_cannot_differentiate():
    class Opaque(ops.Identity):
        differentiable = False

    with pytest.raises(RuntimeError, match=r"op 0 \(Opaque\)"):
        torch.func.grad(lambda x: opfuse.Sequential(Opaque())(x).sum())(data())


def test_gradients_switched_on_inside_of_inference_mode():
    chain = opfuse.Sequential(ops.Linear(8, 8), ops.GELU())
    x = torch.randn(3, 8, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        y = chain(x * 2)
        expected = torch.nn.functional.gelu(
            torch.nn.functional.linear(x * 2, chain[0].weight, chain[0].bias), approximate="tanh"
        )
    assert not y.requires_grad
    torch.testing.assert_close(y, expected)
