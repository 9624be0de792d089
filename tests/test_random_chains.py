"""Random chains under random covers: the same outputs and gradients as plain torch, and nothing else is touched."""

import chains
import fusing
import pytest
import torch

from opfuse import ops
from opfuse.testing import FusionSuite

# each chain runs with no plugin on, under fusions registered here
pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("one_thread")]

SEEDS = range(150 if FusionSuite.thorough else 60)
COVERS = {**{f"any {kind}": (kind,) for kind in chains.KINDS}, "any": tuple(chains.KINDS)}
SETTINGS = [*fusing.VARIANTS, *COVERS, "competing"]


def setting(name, seed):
    if name in fusing.VARIANTS:
        return fusing.fusions(name)
    if name == "competing":
        return chains.covers(seed, style=chains.patterns)
    return chains.covers(seed, COVERS[name])


def same(got, expected, what):
    torch.testing.assert_close(
        got, expected, rtol=1e-8, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_random_chains_match_their_reference(name):
    fused = 0
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        expected, wanted = drawn.reference()
        weights = drawn.weights(expected)
        with setting(name, seed):
            outputs = drawn.forward()
            chains.backward(outputs, weights)
        chains.backward(expected, weights)
        same([y.detach() for y in outputs], [y.detach() for y in expected], f"seed {seed}, outputs")
        assert [y.requires_grad for y in outputs] == [y.requires_grad for y in expected], seed
        for number, (leaf, other) in enumerate(zip(drawn.leaves(), wanted, strict=True)):
            assert (leaf.grad is None) == (other.grad is None), (seed, number)
            if leaf.grad is not None:
                same(leaf.grad, other.grad, f"seed {seed}, gradient {number}")
        fused += any(type(op).__module__ in ("chains", "fusing") for op in steps_of(drawn))
    assert (
        fused > len(SEEDS) / 3
        if name not in fusing.VARIANTS
        else bool(fused) == (name != "unfused")
    )


NUMBERS = {
    ops.Dropout: {"p": 0.9},
    ops.ConstantScale: {"scale": 7.0},
    ops.ClampedSwiGLU: {"limit": 3.0, "alpha": 0.5, "glu_linear_offset": 2.0},
    ops.SiTUGLU: {"beta1": 0.5, "beta2": 0.7},
}


@pytest.mark.parametrize("name", [*fusing.VARIANTS, "any", "competing"])
def test_the_backward_uses_the_numbers_of_the_forward(name):
    changed = 0
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        expected, wanted = drawn.reference()
        weights = drawn.weights(expected)
        with setting(name, seed):
            outputs = drawn.forward()
            for op in drawn.chain.modules():
                for number, value in NUMBERS.get(type(op), {}).items():
                    setattr(op, number, value)
                    changed += 1
            chains.backward(outputs, weights)
        chains.backward(expected, weights)
        for number, (leaf, other) in enumerate(zip(drawn.leaves(), wanted, strict=True)):
            if leaf.grad is not None:
                same(leaf.grad, other.grad, f"seed {seed}, gradient {number}")
    assert changed > 50


def steps_of(drawn):
    for group in drawn.chain._module_groups:
        program = getattr(group, "_last", (None, None))[1]  # None, or a Cut, if an op has hooks
        for name in ("forward", "backward"):
            yield from (step.op for step in getattr(program, name, ()))


@pytest.mark.parametrize("name", ["unfused", "any"])
def test_without_grad_it_is_the_same(name):
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        with setting(name, seed):
            expected = drawn.forward()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    outputs = drawn.forward()
                assert all(map(torch.equal, outputs, expected)), seed


@pytest.mark.parametrize("name", ["unfused", "any", "competing"])
def test_gradients_and_saved_tensors_are_left_alone(name):
    for seed in SEEDS:
        drawn, saved = chains.RandomChain(seed), []

        def keep(tensor, saved=saved):
            saved.append((tensor, tensor.clone()))
            return tensor

        with setting(name, seed):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                outputs = drawn.forward()
            inputs = [(t, t.detach().clone()) for t in drawn.leaves()]
            weights = drawn.weights(outputs)
            given = [(w, w.clone()) for w in weights]
            chains.backward(outputs, weights)
        for tensor, before in (*saved, *given, *inputs):
            assert torch.equal(tensor, before), seed


@pytest.mark.parametrize("name", ["unfused", "joint", "any"])
def test_some_outputs_are_not_used(name):
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        expected, wanted = drawn.reference()
        chosen = [
            number
            for number in range(len(expected))
            if number % 2 == seed % 2 and expected[number].requires_grad
        ]
        if not chosen or len(expected) == 1:
            continue
        weights = drawn.weights(expected)
        with setting(name, seed):
            outputs = drawn.forward()
            chains.backward([outputs[n] for n in chosen], [weights[n] for n in chosen])
        chains.backward([expected[n] for n in chosen], [weights[n] for n in chosen])
        for number, (leaf, other) in enumerate(zip(drawn.leaves(), wanted, strict=True)):
            # one autograd function gives zeros where torch gives None
            zero = torch.zeros_like(leaf)
            assert other.grad is None or leaf.grad is not None
            same(
                zero if leaf.grad is None else leaf.grad,
                zero if other.grad is None else other.grad,
                f"seed {seed}, gradient {number}",
            )


@pytest.mark.parametrize("name", ["unfused", "any"])
def test_gradients_add_up_over_two_steps(name):
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        expected, wanted = drawn.reference()
        weights = drawn.weights(expected)
        chains.backward(expected, weights)
        with setting(name, seed):
            for _ in range(2):
                chains.backward(drawn.forward(), drawn.weights(expected))
        for number, (leaf, other) in enumerate(zip(drawn.leaves(), wanted, strict=True)):
            if leaf.requires_grad:
                same(leaf.grad, 2 * other.grad, f"seed {seed}, gradient {number}")
