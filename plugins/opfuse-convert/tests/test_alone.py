"""The output of a part's chain that a chain of the module around it alone takes.

A norm at the end of the part may then keep it in place of its input. Whatever else could write to
it must train as in eager PyTorch.
"""

import copy
import threading

import pytest
import torch
from converting import WIDTH, an_input
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse.report.calls import saved_bytes
from opfuse.report.replaced_forward import KEPT_AS
from opfuse.testing import machine

pytest.importorskip("opfuse_norm")
pytestmark = pytest.mark.skipif(machine.is_interpreting(), reason="kernels go first there")


def scale(y):
    y.mul_(2)


def checked(x):
    """No chain can hold this, so the part has a chain of its own."""
    if bool(x.isnan().any()):
        raise ValueError("not a number")
    return x


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = checked(x)
        return self.norm(self.dense(x) + x)


class Pair(Part):
    def forward(self, x):
        x = checked(x)
        y = self.norm(self.dense(x) + x)
        return y, None


class Twice(Part):
    def forward(self, x):
        x = checked(x)
        y = self.norm(self.dense(x) + x)
        return y, y


class Keeping(Part):
    def forward(self, x):
        x = checked(x)
        y = self.norm(self.dense(x) + x)
        self.kept = [y]
        return y


class Capturing(Part):
    def forward(self, x):
        x = checked(x)
        self.get = lambda: y
        y = self.norm(self.dense(x) + x)
        return y


class Early(Part):
    early = True

    def forward(self, x):
        if self.early:
            x = checked(x)
            y = self.norm(self.dense(x) + x)
            return y
        return x


class Layer(nn.Module):
    """The layer of an encoder; those below have other forwards."""

    flag = False

    def __init__(self, part=Part):
        super().__init__()
        self.part = part()
        self.up, self.act, self.down = nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)

    def forward(self, x):
        h = self.part(x)
        return h + self.down(self.act(self.up(h)))


class Resting(Layer):
    def __init__(self):
        super().__init__()
        self.rest = nn.Identity()

    def forward(self, x):
        h = self.rest(self.part(x))
        return h + self.down(self.act(self.up(h)))


class Unpacking(Layer):
    def forward(self, x):
        h, _ = self.part(x)
        same = h
        return self.down(self.act(self.up(same))) + h


class Branching(Layer):
    def forward(self, x, scaled=False):
        h = self.part(x)
        if scaled:
            h.mul_(2)
        if self.flag:
            h.mul_(3)
        return h + self.down(self.act(self.up(h)))


class Ahead(Layer):
    def forward(self, x):
        h = self.part(x)
        h.mul_(2)
        return h + self.down(self.act(self.up(h)))


class Returning(Layer):
    def forward(self, x):
        h = self.part(x)
        y = self.down(self.act(self.up(h)))
        return y, h


class Later(Layer):
    def forward(self, x):
        h = self.part(x)
        later = h.view
        y = self.down(self.act(self.up(h)))
        return y, later


class View(Layer):
    def forward(self, x):
        h = self.part(x)
        part = h[:1]
        y = self.down(self.act(self.up(h)))
        return y, part


class Inside(Layer):
    def forward(self, x):
        h = self.part(x)
        both = [h, None]
        y = self.down(self.act(self.up(h)))
        return y, both[0]


class Closing(Layer):
    def forward(self, x):
        h = self.part(x)
        y = self.down(self.act(self.up(h)))
        return y, (lambda: h)()


class Storing(Layer):
    def forward(self, x):
        self.kept = h = self.part(x)
        y = self.down(self.act(self.up(h)))
        return y


class Other(Layer):
    def forward(self, x):
        h = self.part(x)
        y = self.down(self.act(self.up(h)))
        return y, h[:1]


class Second(Layer):
    """What the chain takes is not of the latest call."""

    def __init__(self):
        super().__init__()
        self.part, self.other = Part(), Part()

    def forward(self, x):
        h = self.part(x)
        more = self.other(x)
        y = self.down(self.act(self.up(h)))
        return y, more


class Looping(Layer):
    def forward(self, x):
        y = x
        for _ in range(2):
            h = self.part(y)
            y = h + self.down(self.act(self.up(h)))
        return y, h


class Around(Layer):
    def forward(self, x):
        h = checkpoint(self.part, x, use_reentrant=False)
        return h + self.down(self.act(self.up(h)))


@pytest.fixture
def lent(monkeypatch):
    """The parts whose norms kept their output."""
    from opfuse_convert.converted_forward import ConvertedForward

    found, run = [], ConvertedForward._through_inner

    def through(self, module, given):
        found.append(module)
        return run(self, module, given)

    monkeypatch.setattr(ConvertedForward, "_through_inner", through)
    return found


@pytest.fixture(autouse=True)
def _norms():
    with opfuse.plugins.using("norm"):
        yield


def both(layer):
    torch.manual_seed(0)
    for norm in [each for each in layer.modules() if isinstance(each, nn.LayerNorm)]:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    twin = copy.deepcopy(layer)
    report = opfuse.convert(twin)
    assert {"", "part"} <= {row.path for row in report.converted}, str(report)
    return layer, twin


def trained(layer, *args, **kwargs):
    """The output and the gradients of a step."""
    layer.zero_grad()
    x = an_input(dtype=layer.up.weight.dtype)
    y = layer(x, *args, **kwargs)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *[param.grad for param in layer.parameters()]]


def compare(layer, twin, *args, **kwargs):
    pairs = zip(trained(twin, *args, **kwargs), trained(layer, *args, **kwargs), strict=True)
    for mine, its in pairs:
        torch.testing.assert_close(mine, its, rtol=2e-5, atol=2e-5)


def kept(layer):
    return saved_bytes(lambda: layer(an_input()), layer.parameters())


@pytest.mark.parametrize(
    "layer", [Layer(), Unpacking(Pair), Branching(), Around()], ids=lambda x: str(type(x))
)
def test_a_norm_keeps_its_output_where_a_chain_alone_takes_it(layer, lent):
    """So the module around it keeps one tensor less, and the numbers are those of fp64."""
    layer, twin = both(layer)
    before = kept(layer)
    assert before - kept(twin) >= an_input().nbytes / 2 or type(layer) is Around
    assert lent == ([] if type(layer) is Around else [twin.part])
    compare(layer, twin)
    for mine, exact in zip(trained(twin), trained(layer.double()), strict=True):
        assert (mine - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_the_first_step_of_a_copy_has_the_bits_of_the_next(lent):
    _, converted = both(Layer())
    twin = copy.deepcopy(converted)
    first, second = trained(twin), trained(twin)
    assert lent == [twin.part] * 2 and all(map(torch.equal, first, second))


def test_a_chain_may_begin_with_a_module_that_does_nothing():
    compare(*both(Resting()))


@pytest.mark.parametrize("part", [Twice, Keeping, Capturing, Early])
def test_a_part_that_may_give_it_to_others_keeps_the_input(part, lent):
    layer, twin = both((Unpacking if part is Twice else Layer)(part))
    compare(layer, twin)
    assert not lent


@pytest.mark.parametrize("kind", [Ahead, Storing])
def test_a_write_before_the_chain_trains(kind, lent):
    layer, twin = both(kind())
    compare(layer, twin)
    assert not lent


@pytest.mark.parametrize("kind", [Returning, Inside, Closing, Later, View, Other, Looping, Second])
def test_what_others_get_too_may_be_written_where_eager_trains(kind, lent):
    """The linear layer that keeps it is frozen, so eager PyTorch keeps nothing of it."""
    layer, twin = both(kind())
    for each in (layer, twin):
        each.up.weight.requires_grad_(False)

    results = []
    for each in (layer, twin):
        x = an_input()
        y, more = each(x)
        scale(more(-1) if callable(more) else more)
        torch.manual_seed(1)
        results.append(torch.autograd.grad(y, [x, each.part.norm.weight], torch.randn_like(y)))
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-5, atol=2e-5)
    assert not lent


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_a_branch_that_writes_runs_as_it_is(how, lent):
    layer, twin = both(Branching())
    compare(layer, twin)
    assert lent == [twin.part]
    for each in (layer, twin) if how == "attribute" else ():
        each.flag = True
    compare(layer, twin, **({"scaled": True} if how == "argument" else {}))
    assert len(lent) == 1


HOOKS = {
    "of the part": lambda layer, hook: layer.part.register_forward_hook(lambda m, x, y: hook(y)),
    "before the linear": lambda layer, hook: layer.up.register_forward_pre_hook(
        lambda m, x: hook(x[0])
    ),
    "on every module": lambda layer, hook: nn.modules.module.register_module_forward_hook(
        lambda m, x, y: hook(y) if m is layer.part else None
    ),
    "backward": lambda layer, hook: layer.part.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_may_write_to_it(kind, lent):
    layer, twin = both(Layer())
    handles = [HOOKS[kind](each, scale) for each in (layer, twin)]
    try:
        compare(layer, twin)
    finally:
        for handle in handles:
            handle.remove()
    assert not lent
    compare(layer, twin)
    assert lent == [twin.part]


def test_what_replaces_the_call_may_write_to_it(lent):
    layer, twin = both(Layer())
    for each in (layer, twin):
        own = each.part.forward
        each.part.forward = lambda x, own=own: own(x).mul_(2)
    compare(layer, twin)
    assert not lent


class Writing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_see_what_the_module_does(lent):
    layer, twin = both(Layer())
    with Writing():
        compare(layer, twin)
    assert not lent


@pytest.mark.parametrize("which", ["part", ""])
def test_both_have_to_be_converted(which, lent):
    layer = Layer()
    twin = copy.deepcopy(layer)
    opfuse.convert(twin, skip="part*" if which == "" else ())
    if which == "part":
        opfuse.revert(twin)
        opfuse.convert(twin.part)
    compare(layer, twin)
    assert not lent


def test_a_part_that_is_called_by_others_keeps_the_input(lent):
    layer, twin = both(Layer())
    compare(layer, twin)
    replaced = vars(twin.part)[KEPT_AS]
    for off in (True, False):  # while it is off, the chain does not hear of who takes its output
        replaced.off = off
        if off:
            compare(layer, twin)
    y = twin.part(an_input())
    scale(y)
    y.sum().backward()
    assert lent == [twin.part]


def test_another_thread_may_write_to_what_it_gets(lent, monkeypatch):
    """It calls the part while the layer does."""
    from opfuse_convert.converted_forward import ConvertedForward

    layer, twin = both(Layer())
    compare(layer, twin)
    run, caught, threads = ConvertedForward._through_chain, [], []

    def write():
        x = an_input()
        y = twin.part(x)
        scale(y)
        try:
            torch.autograd.grad(y.sum(), x)
        except RuntimeError as error:
            caught.append(error)

    def meanwhile(self, module, given):
        if module is twin.part and not threads:
            threads.append(threading.Thread(target=write))
            threads[0].start()
            threads[0].join()
        return run(self, module, given)

    monkeypatch.setattr(ConvertedForward, "_through_chain", meanwhile)
    compare(layer, twin)
    assert threads and not caught and lent == [twin.part] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_layer(reentrant, lent):
    layer, twin = both(Layer())
    right = trained(layer)
    x = an_input()
    y = checkpoint(twin, x, use_reentrant=reentrant)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    for mine, its in zip(
        [y.detach(), x.grad, *[p.grad for p in twin.parameters()]], right, strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=2e-5, atol=2e-5)
    assert len(lent) == 2


def test_copies_and_changes_after_conversion(lent):
    layer, twin = both(Layer())
    again = copy.deepcopy(twin)
    compare(layer, again)
    compare(layer, again)
    assert again.part in lent
    for each in (layer, again):
        each.part.norm.eps = 1e-2
    lent.clear()
    compare(layer, again)
    assert not lent


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of a graph that is cut
def test_a_compiled_module_runs_its_own_forward(lent):
    layer, twin = both(Layer())
    compiled = torch.compile(twin, backend="eager")
    torch.testing.assert_close(compiled(an_input()), layer(an_input()))
    assert not lent
