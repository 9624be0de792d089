"""Forwards in which several chains replace statements."""

import copy

import pytest
import torch
from opfuse_convert import converted
from torch import nn
from torch.nn import functional as F

import opfuse

WIDTH, ROWS = 16, (2, 6)
NORM, MLP = ("LayerNorm", "Modulate"), ("BasicLinear", "Bias", "GELU", "BasicLinear", "Bias")


class Block(nn.Module):
    """Two norms that are modulated, with something between that is not in the grammar."""

    def __init__(self, affine=False):
        super().__init__()
        norms = [nn.LayerNorm(WIDTH, elementwise_affine=affine) for _ in range(2)]
        self.norm1, self.norm2 = norms
        self.condition = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixes = 1

    def forward(self, x, c):
        scale1, shift1, scale2, shift2 = self.condition(c)[:, None].chunk(4, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        for number in range(self.mixes):
            x = x + number * h.roll(1, 1) + h.cumsum(1)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + self.fc2(F.gelu(self.fc1(y)))


def drawn():
    generator = torch.Generator().manual_seed(1)
    shapes = (*ROWS, WIDTH), (ROWS[0], WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def step(module, given):
    """The output, and the gradients of inputs and parameters."""
    leaves = [t.detach().requires_grad_() for t in given]
    module.zero_grad()
    y = module(*leaves)
    y.square().sum().backward()
    return [y.detach(), *[t.grad for t in (*leaves, *module.parameters())]]


def pair(cls=Block, *args, ops=(*NORM, *MLP, "AddExtraInput", *NORM)):
    torch.manual_seed(0)
    own = cls(*args).double()
    module = copy.deepcopy(own)
    report = opfuse.convert(module)
    fork = "MakeExtraOutput"
    assert tuple(op for op in report.converted[0].ops if op != fork) == ops, str(report)
    return module, own


def chains_of(module, given):
    """What the chains of a module are made of that a call runs, in the order of the call."""
    seen = []

    class Recorder(type(opfuse.core.settings.Recorder())):
        def record(self, fuser, program, given):
            seen.append(len(program.plan.forward))
            super().record(fuser, program, given)

    with Recorder():
        module(*given)
    return len(seen)


@pytest.mark.parametrize("affine", [False, True])
def test_each_chain_runs(affine):
    module, own = pair(Block, affine)
    given = drawn()
    torch.testing.assert_close(step(module, given), step(own, given), rtol=1e-10, atol=1e-10)
    assert converted(module)[""] == "" and chains_of(module, given) == 2
    calls = opfuse.explain(module, *given).calls
    assert [call.owner for call in calls] == ["Block"] * 2
    torch.testing.assert_close(step(module.eval(), given), step(own.eval(), given))
    assert module.state_dict().keys() == own.state_dict().keys()
    opfuse.revert(module)
    torch.testing.assert_close(module(*given), own(*given))
    assert chains_of(module, given) == 0


def test_hooks_stop_the_chain_of_the_module_that_has_them():
    module, own = pair()
    given, seen = drawn(), []
    for name, count in (("norm1", 1), ("fc1", 0)):
        module.get_submodule(name).register_forward_hook(lambda *of: seen.append(of[-1]))
        torch.testing.assert_close(step(module, given), step(own, given))
        assert chains_of(module, given) == count
        assert converted(module) == {"": f"{name} has forward hooks"}
        assert f"{name} has forward hooks" in str(opfuse.explain(module, *given))
    assert len(seen) == 3 * (1 + 2)


def test_what_a_chain_depends_on_may_change():
    module, own = pair()
    given = drawn()
    module(*given)
    for each in (module, own):
        each.norm1.eps = 0.5
    torch.testing.assert_close(step(module, given), step(own, given))
    assert chains_of(module, given) == 1
    opfuse.convert(module)
    torch.testing.assert_close(step(module, given), step(own, given))


def test_copies_have_chains_of_their_own():
    module, own = pair()
    given, twin = drawn(), copy.deepcopy(module)
    with torch.no_grad():
        twin.condition.weight.mul_(2)
    torch.testing.assert_close(step(module, given), step(own, given))
    opfuse.revert(own.load_state_dict(twin.state_dict()) and own)
    torch.testing.assert_close(step(twin, given), step(own, given))
    assert chains_of(twin, given) == 2


def test_in_a_graph_of_torch_compile():
    module, own = pair()
    given = drawn()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with opfuse.options(chains_under_compile=True):
        torch.testing.assert_close(step(compiled, given), step(own, given))


@pytest.mark.alone  # measurements write into a table, which is that of the test
def test_each_chain_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    module, own = pair()
    given = drawn()
    assert "wrong" not in str(opfuse.tune(module, *given))
    (path,) = tmp_path.glob("*.json")
    assert path.read_text(encoding="utf-8").count('"whole"') == 2
    torch.testing.assert_close(step(module, given), step(own, given))


def test_other_shapes_for_one_of_them():
    module, own = pair()
    x, c = drawn()
    for of in (c, c[:1]):
        torch.testing.assert_close(step(module, (x, of)), step(own, (x, of)))


class TwoMLPs(Block):
    """The chains of both would have quantizers."""

    def forward(self, x, c):
        h = self.fc2(F.gelu(self.fc1(x)))
        h = h.cumsum(1)
        return self.condition(F.gelu(h))


class OneNorm(Block):
    """Both need the same norm."""

    def forward(self, x, c):
        scale, shift = self.condition(c)[:, None, : 2 * WIDTH].chunk(2, -1)
        h = self.norm1(x) * (1 + scale) + shift
        h = h.cumsum(1)
        h = self.norm1(h) * (1 + scale) + shift
        return h.cumsum(1)


@pytest.mark.parametrize(("cls", "ops"), [(TwoMLPs, MLP), (OneNorm, NORM)])
def test_there_is_one_chain(cls, ops):
    module, own = pair(cls, ops=ops)
    given = drawn()
    got, expected = step(module, given), step(own, given)
    for one, other in zip(got, expected, strict=True):
        assert one is other is None or torch.allclose(one, other)
    assert chains_of(module, given) == 1


class InBranches(Block):
    """One in each branch, and one after."""

    def forward(self, x, c):
        scale, shift = self.condition(c)[:, None, : 2 * WIDTH].chunk(2, -1)
        if x.mean() > 0:
            x = self.norm1(x) * (1 + scale) + shift
        else:
            x = self.norm2(x) * (1 + scale) + shift
        x = x.cumsum(1)
        return x + self.fc2(F.gelu(self.fc1(F.silu(x))))


@pytest.mark.parametrize("sign", [1, -1])
def test_chains_in_branches(sign):
    module, own = pair(InBranches, ops=("SiLU", *MLP, "AddExtraInput", *NORM, *NORM))
    x, c = drawn()
    given = sign * x.abs(), c
    for one, other in zip(step(module, given), step(own, given), strict=True):
        assert one is other is None or torch.allclose(one, other)
    assert chains_of(module, given) == 2
