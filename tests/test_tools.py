"""Tools: plugins that wrap what runs, from a call to a step; a list of plugins leaves them alone."""

from typing import ClassVar

import pytest
import torch
from fakes import OneByOne

import opfuse
from opfuse import PluginWarning, ops, plugins
from opfuse.core.engine.facts import ToolFacts
from opfuse.core.settings import Option, current

X = torch.ones(2, 4)


class GELUs(OneByOne):
    calls: ClassVar = []


def state_of(name):
    return {row["name"]: row["state"] for row in plugins.listing(tools=True)}[name]


def tool(**hooks):
    made = type("Tool", (), {})()
    for hook, function in hooks.items():
        setattr(made, f"opfuse_{hook}", opfuse.hookimpl(function))
    return made


@pytest.fixture
def add(no_plugins):
    """Adds a tool for the test."""

    def register(name="mine", **hooks):
        return plugins.register(tool(**hooks), name=name, tool=True)

    return register


def noting(seen, what):
    def wrap(run):
        def noted(*args, **kwargs):
            seen.append(what)
            return run(*args, **kwargs)

        return noted

    return wrap


def test_a_call_a_pass_and_a_step_are_wrapped_in_this_order(add):
    seen = []
    for name in "ba":
        add(
            name,
            wrap_call=lambda run, name=name: noting(seen, f"call {name}")(run),
            wrap_pass=lambda run, pass_name, name=name: noting(seen, f"{pass_name} {name}")(run),
            wrap_step=lambda run, pass_name, name=name: noting(seen, f"{pass_name} step {name}")(
                run
            ),
        )
    chain = opfuse.Sequential(ops.GELU())
    y = chain(X.clone().requires_grad_())
    inner = ["forward step b", "forward step a"]  # the first name is the innermost
    assert seen == ["call b", "call a", "forward b", "forward a", *inner]
    seen.clear()
    y.sum().backward()
    assert seen == ["backward b", "backward a", "backward step b", "backward step a"]


def test_what_a_forward_leaves_reaches_its_backward(add):
    seen = []

    def wrap_pass(pass_name, run):
        def forward(*args):
            current.call = len(seen)
            seen.append("forward")
            return run(*args)

        def backward(ctx, *grads):
            seen.append(ctx.call)
            return run(ctx, *grads)

        return forward if pass_name == "forward" else backward

    add(wrap_pass=wrap_pass)
    chain, x = opfuse.Sequential(ops.GELU()), X.clone().requires_grad_()
    first, second = chain(x), chain(x)
    second.sum().backward()
    first.sum().backward()
    assert seen == ["forward", "forward", 1, 0]


def test_a_module_between_chains_and_an_op_with_hooks_are_wrapped(add):
    seen = []
    add(wrap_call=lambda module, run: None if module is None else noting(seen, module)(run))
    chain = opfuse.Sequential(ops.GELU(), torch.nn.Tanh(), hooked := ops.ReLU(), ops.GELU())
    hooked.register_forward_hook(lambda *args: None)
    expected = torch.nn.functional.gelu(
        torch.relu(torch.tanh(torch.nn.functional.gelu(X, approximate="tanh"))), approximate="tanh"
    )
    torch.testing.assert_close(chain(X), expected)
    assert seen == [chain[1], hooked]


def test_the_choice_of_fusions_is_wrapped(add):
    def wrap_choice(run):
        def choose(choice):
            for candidate in choice.candidates:
                choice.refused[candidate] = "it is Tuesday"
            return run(choice)

        return choose

    with plugins.isolated():
        opfuse.register_forward_fusion(opfuse.Fusion((ops.GELU, ops.GELU), GELUs))
        chain = opfuse.Sequential(ops.GELU(), ops.GELU())
        assert opfuse.explain(chain, X).calls[0].plan.forward[0].fusion == "GELUs"
        add(wrap_choice=wrap_choice)
        (call,) = opfuse.explain(chain, X).calls
        assert [step.fusion for step in call.plan.forward] == [None, None]
        assert [str(refused.reason) for refused in call.plan.refused] == ["it is Tuesday"]


class Told(ToolFacts):
    """Knows of small inputs, and asks for their size."""

    digest = "told"

    def fields(self, candidate, read):
        if read("rows") != 2:
            return None
        candidate.remark("it is small")
        return {"measured": 2.0}


def test_a_condition_is_told_what_a_tool_knows(add):
    seen = []

    def fits(ops, env):
        seen.append(env.measured)
        return True

    opfuse.register_forward_fusion(opfuse.Fusion((ops.GELU, ops.GELU), GELUs, fits))
    add(facts=lambda: Told())
    add("knows nothing", facts=lambda: None)
    chain = opfuse.Sequential(ops.GELU(), ops.GELU())
    for x in (X, X, torch.ones(8, 4), torch.ones(9, 4)):
        chain(x)
    assert seen == [2.0, None], "one plan for each size"
    (call,) = opfuse.explain(chain, X).calls
    assert (call.plan.table, call.plan.forward[0].note) == ("told", "it is small")


def test_what_is_known_of_a_fusion_replaces_that_it_trades_time(add):
    fusion = opfuse.Fusion((ops.GELU, ops.GELU), GELUs, declares=("trades_time",))
    opfuse.register_forward_fusion(fusion)
    chain = opfuse.Sequential(ops.GELU(), ops.GELU())
    (call,) = opfuse.explain(chain, X).calls
    assert 'which prefer="memory" asks for' in call.plan.refused[0].reason
    add(facts=lambda: Told())
    assert opfuse.explain(chain, X).calls[0].plan.forward[0].fusion == "GELUs"


def test_a_tool_chooses_in_another_way_and_says_why(add):
    class Others(GELUs):
        pass

    for fused, benefit in ((GELUs, 2), (Others, 1)):
        fusion = opfuse.Fusion((ops.GELU, ops.GELU), fused, benefit=benefit)
        opfuse.register_forward_fusion(fusion)

    def wrap_choice(run):
        def choose(choice):
            choice.cover = lambda free: [step for step in free if step.source.name == "Others"]
            choice.explain = lambda loser, winners: "which comes last by name"
            return run(choice)

        return choose

    add(wrap_choice=wrap_choice)
    (call,) = opfuse.explain(opfuse.Sequential(ops.GELU(), ops.GELU()), X).calls
    assert call.plan.forward[0].fusion == "Others"
    (refused,) = call.plan.refused
    assert refused.reason == "overlaps Others, which comes last by name"
    assert refused.lost_to == ""


def test_what_a_tool_knows_is_checked(add):
    opfuse.register_forward_fusion(opfuse.Fusion((ops.GELU, ops.GELU), GELUs))
    record = add(facts=lambda: {"measured": 2.0})
    with pytest.warns(PluginWarning, match="opfuse_facts must return a ToolFacts, got dict"):
        opfuse.Sequential(ops.GELU(), ops.GELU())(X)
    assert record.state == "failed"


@pytest.mark.parametrize("text", ["", "others", None])
def test_a_list_of_plugins_leaves_tools_alone(add, text):
    seen = []
    add(wrap_call=noting(seen, "call"))
    plugins.manager._warned.add("others")
    with plugins.using(text):
        opfuse.Sequential(ops.GELU())(X)
    assert seen == ["call"]


def test_a_minus_switches_a_tool_off(add):
    seen = []
    add(wrap_call=noting(seen, "call"))
    with plugins.using("-mine"):
        opfuse.Sequential(ops.GELU())(X)
        assert state_of("mine") == "blocked"
    assert not seen


def doubled(value):
    if not isinstance(value, int):
        raise TypeError(f"option twice expected a number, got {value!r}")
    return 2 * value


def test_a_tool_declares_options_with_plain_names(add):
    entered = []
    add(options=lambda: {"twice": Option(doubled, entered.append)})
    with opfuse.options(twice=4):
        assert dict(current.options) == {"twice": 8} and entered == [8]
        opfuse.Sequential(ops.GELU())(X)
    with pytest.raises(TypeError, match="option twice expected a number, got 'x'"):
        opfuse.options(twice="x")
    with pytest.raises(
        ValueError, match=r"unknown option 'thrice': known are \[.*'debug'.*'twice'"
    ):
        opfuse.options(thrice=1)


def test_what_its_option_raises_ends_the_block(add):
    def refuse(value):
        raise opfuse.CallRefusedError("not today")

    add(options=lambda: {"day": Option(str, refuse)})
    with pytest.raises(opfuse.CallRefusedError, match="not today"), opfuse.options(day=1):
        raise AssertionError
    assert not dict(current.options)


def test_an_option_of_a_tool_that_is_off_or_absent_is_refused(add, monkeypatch):
    with plugins.using("-debug"):
        with pytest.raises(
            RuntimeError,
            match="option debug needs the tool debug: the selection of plugins '-debug'",
        ):
            opfuse.options(debug=True)
    with opfuse.options(debug=True), plugins.using("-debug"):
        with pytest.raises(RuntimeError, match="option debug needs the tool debug"):
            opfuse.Sequential(ops.GELU())(X)
    monkeypatch.setattr(plugins.manager, "packages", {"option sleep": "opfuse-sleep"})
    with pytest.raises(
        ImportError, match="option sleep needs the package opfuse-sleep, which is not"
    ):
        opfuse.options(sleep=1)


def test_a_tool_refuses_a_call(add):
    def wrap_pass(program, run):
        raise opfuse.CallRefusedError(f"{program.chain.title}: not today")

    add(wrap_pass=wrap_pass)
    chain = opfuse.Sequential(ops.GELU())
    for _ in range(2):
        with pytest.raises(opfuse.CallRefusedError, match=r"chain \[GELU\]: not today"):
            chain(X)


@pytest.mark.parametrize("hook", ["wrap_call", "wrap_choice", "wrap_pass", "wrap_step"])
def test_a_tool_that_fails_is_told_and_the_rest_works(add, hook):
    record = add(**{hook: lambda: 1 / 0})
    chain = None
    with pytest.warns(
        PluginWarning, match="plugin 'mine' .* failed at hook call: ZeroDivisionError"
    ):
        chain = opfuse.Sequential(ops.GELU())
        y = chain(X)
    torch.testing.assert_close(y, torch.nn.functional.gelu(X, approximate="tanh"))
    assert record.state == "failed"


def test_an_option_whose_tool_fails_while_planning_is_not_lost(add):
    add(options=lambda: {"safe": Option(bool)}, wrap_pass=lambda: 1 / 0)
    with opfuse.options(safe=True):
        chain = opfuse.Sequential(ops.GELU())
        with pytest.warns(PluginWarning):
            with pytest.raises(
                RuntimeError, match="option safe needs the tool mine: hook call: Zero"
            ):
                chain(X)
        with pytest.raises(
            ValueError, match=r"unknown option 'safe'.*not in use: mine \(hook call"
        ):
            chain(X)


def test_a_tool_offers_no_fusions_and_a_plugin_wraps_nothing(add):
    add(forward_fusions=lambda: [])
    with pytest.warns(
        PluginWarning, match="opfuse_forward_fusions: .* entry point in group opfuse.v1"
    ):
        assert state_of("mine") == "failed"
    plugins.register(tool(wrap_call=lambda: None), name="wrapping")
    with pytest.warns(PluginWarning, match="opfuse_wrap_call: .* in group opfuse.tools.v1"):
        assert plugins.manager.active(None) == []


def wrapping(run):
    return lambda *args, **kwargs: run(*args, **kwargs)


def test_any_callable_may_wrap_a_step(add):
    add("aaa", wrap_step=wrapping)  # the innermost, which has no attributes of a method
    chain, x = opfuse.Sequential(ops.Linear(4, 4), ops.GELU()), X.clone().requires_grad_()
    with opfuse.options(debug=True):
        chain(x).sum().backward()
    with torch.no_grad(), opfuse.options(invariant="batch"):
        assert chain(X)[:1].equal(chain(X[:1]))


def test_calls_follow_the_selection_and_what_is_registered(add):
    seen = []
    chain = opfuse.Sequential(ops.GELU(), torch.nn.Tanh())
    chain(X)
    record = add(wrap_call=noting(seen, "call"))
    chain(X)
    assert seen == ["call"] * 2
    with plugins.using("-mine"):
        chain(X)
        fresh = opfuse.Sequential(ops.GELU())
        fresh(X)
    assert seen == ["call"] * 2
    fresh(X)
    plugins.remove(record)
    chain(X), fresh(X)
    assert seen == ["call"] * 3


def test_a_nested_chain_with_a_forward_of_its_own_is_a_module(add):
    class Centered(opfuse.Sequential):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    seen = []
    add(wrap_call=lambda module, run: None if module is None else noting(seen, module)(run))
    chain = opfuse.Sequential(ops.GELU(), Centered(ops.GELU()))
    chain(X)
    assert seen == [chain[1]]


@pytest.mark.parametrize("chosen", [None, 3, "candidates", "others"])
def test_a_choice_among_fusions_is_checked(add, chosen):
    def wrap_choice(run):
        return lambda choice: {"candidates": choice.candidates, "others": [3]}.get(chosen, chosen)

    with plugins.isolated():
        for name in "ab":
            fusion = opfuse.Fusion((ops.GELU, ops.GELU), GELUs, name=name)
            opfuse.register_forward_fusion(fusion)
        add(wrap_choice=wrap_choice)
        with pytest.raises((TypeError, RuntimeError), match="a tool's opfuse_wrap_choice"):
            opfuse.Sequential(ops.GELU(), ops.GELU())(X)


def test_a_tool_that_fails_where_a_backward_is_written_is_not_left_out(add):
    def wrap_step(pass_name):
        if pass_name == "backward":
            raise ZeroDivisionError

    add(options=lambda: {"watch": Option(bool)}, wrap_step=wrap_step)
    with opfuse.options(watch=True):
        y = opfuse.Sequential(ops.GELU())(X.clone().requires_grad_())
    with pytest.warns(PluginWarning) as told:
        with pytest.raises(RuntimeError, match="option watch needs the tool mine: hook call"):
            y.sum().backward()
    assert len(told) == 1


@pytest.mark.parametrize("name", ["invariant", "fusion_limit", "same"])
def test_an_option_has_one_tool(add, name):
    options = {"options": lambda: {name: Option(str)}}
    add("aaa", **options)
    if name == "same":
        add("bbb", **options)
    with pytest.warns(PluginWarning, match=f"the option '{name}' is of "):
        plugins.listing(tools=True)


def test_a_backward_is_wrapped_in_graphs_too(add):
    def wrap_pass(pass_name, run):
        if pass_name == "backward":
            return lambda ctx, *grads: run(ctx, *[2 * grad for grad in grads])

    add(wrap_pass=wrap_pass)
    chain, grads = opfuse.Sequential(ops.GELU()), []
    for call in (chain, torch.compile(chain, backend="aot_eager")):
        x = X.clone().requires_grad_()
        grads += torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(*grads)


def test_debug_takes_one_value_of_any_stride(add):
    with opfuse.options(debug=True):
        assert opfuse.Sequential(ops.Linear(1, 3))(torch.randn(2)[::2]).shape == (3,)
