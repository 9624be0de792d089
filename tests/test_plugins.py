"""Plugins: found, selected, loaded, isolated from each other, and listed."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
from typing import ClassVar

import pytest
import torch
from fakes import OneByOne, make_plugin

import opfuse
from opfuse import Fusion, PluginWarning
from opfuse.core import plugins, settings
from opfuse.core.plugins import PluginManager
from opfuse.core.recipe_lookup import new_quantizer
from opfuse.core.records import PluginFilter, metadata


class A(opfuse.BasicOperation):
    saved_names = ()

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


class Quarter(opfuse.Recipe):
    pass


class Half(opfuse.Recipe):
    pass


class OneByOneTwice(OneByOne):
    calls: ClassVar = []


def fusion(name):
    return Fusion([A, A], OneByOneTwice, name=name)


def states():
    return {row["name"]: row["state"] for row in plugins.listing()}


# PluginFilter


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        (None, PluginFilter(None)),
        ("", PluginFilter(())),
        ("  ", PluginFilter(())),
        ("a,b", PluginFilter(("a", "b"))),
        (" a , b ,", PluginFilter(("a", "b"))),
        ("-a", PluginFilter(None, ("a",))),
        ("-a, -b", PluginFilter(None, ("a", "b"))),
    ],
)
def test_selections_parse_to_plugin_filters(text, selection):
    assert PluginFilter.parse(text) == selection


@pytest.mark.parametrize("text", ["a,-b", "-a,b", "-a,-b,c"])
def test_the_two_forms_do_not_mix(text):
    with pytest.raises(
        ValueError, match="mixes names to use and names to block: give 'a,b' or '-a,-b'"
    ):
        PluginFilter.parse(text)
    with pytest.raises(ValueError, match="mixes names"):
        plugins.using(text)


@pytest.mark.parametrize(
    ("text", "active"),
    [
        (None, ["a", "b", "c"]),
        ("", []),
        ("c,a", ["c", "a"]),
        ("-b", ["a", "c"]),
        ("Opfuse_Plugin.B", ["b"]),
        ("-opfuse-plugin-b,-c", ["a"]),
        ("c,opfuse-plugin-a", ["c", "a"]),
        ("C, A", ["c", "a"]),
        ("-B", ["a", "c"]),
    ],
)
def test_which_plugins_are_active(register, text, active):
    for name in "bca":
        register(name=name, distribution=f"opfuse-plugin-{name.upper()}")
    assert [record.name for record in plugins.manager.active(text)] == active
    with plugins.using(text):
        assert {name for name, state in states().items() if state == "loaded"} == set(active)
        assert {name for name, state in states().items() if state == "blocked"} == {*"abc"} - set(
            active
        )


@pytest.mark.parametrize("text", ["a,missing", "-missing"])
def test_names_that_are_absent_warn_once(register, text):
    register(name="a")
    plugins.manager._warned.discard("missing")
    with pytest.warns(
        PluginWarning, match="'missing', but no such plugin is installed, or yet registered in code"
    ):
        assert [record.name for record in plugins.manager.active(text)] == ["a"]
    assert [record.name for record in plugins.manager.active(text)] == ["a"]
    plugins.manager._warned.discard("missing")


def test_using_nests_and_is_of_one_thread(register):
    scope = settings.current
    with plugins.using("a"):
        with plugins.using(""):
            assert scope.selection == ""
        assert scope.selection == "a"
        again = plugins.using("-a")
        with contextlib.suppress(ZeroDivisionError), again, again:
            raise ZeroDivisionError
        assert scope.selection == "a"
    assert scope.selection is None


def test_a_blocked_plugin_is_not_loaded(register):
    record = register(name="a")
    record.load = lambda: pytest.fail("loaded though blocked")
    with plugins.using("-a"):
        assert states() == {"a": "blocked"}
        assert plugins.manager.sources(settings.current.selection) == ()


# Plugins that fail


def failing(stage, record, plugin):
    """Make the plugin of ``record`` fail at a stage."""

    def load():
        raise ImportError("no module named nowhere")

    if stage == "metadata":
        record.broken = ValueError("unreadable entry points")
    elif stage == "import":
        record.load = load
    elif stage == "registration":
        plugin.opfuse_imaginary_fusions = opfuse.hookimpl(lambda: [])
    elif stage == "arguments":
        plugin.opfuse_forward_fusions = opfuse.hookimpl(lambda surplus: [])
    elif stage == "hook call":
        plugin.opfuse_forward_fusions = opfuse.hookimpl(lambda: 1 / 0)
    elif stage == "not a list":
        plugin.opfuse_forward_fusions = opfuse.hookimpl(lambda: fusion("alone"))
    elif stage == "wrong item":
        plugin.opfuse_forward_fusions = opfuse.hookimpl(lambda: [fusion("good"), 3])
    elif stage == "recipes":
        plugin.opfuse_recipes = opfuse.hookimpl(lambda: {"quarter": Quarter()})
    elif stage == "no dict":
        plugin.opfuse_recipes = opfuse.hookimpl(lambda: [Quarter])


FAILURES = {
    "metadata": "metadata: ValueError: unreadable entry points",
    "import": "import: ImportError: no module named nowhere",
    "registration": "registration: TypeError: unknown hook opfuse_imaginary_fusions; opfuse.v1 has opfuse_backward_fus",
    "arguments": "registration: PluginValidationError: Plugin 'opfuse-plugin-bad:bad'",
    "hook call": "hook call: ZeroDivisionError: division by zero",
    "not a list": "hook call: TypeError: opfuse_forward_fusions must return a list of Fusion, got Fusion",
    "wrong item": "hook call: TypeError: opfuse_forward_fusions must return a list of Fusion, one item is int",
    "recipes": "hook call: TypeError: opfuse_recipes: 'quarter' must be a Recipe subclass, got ",
    "no dict": "hook call: TypeError: opfuse_recipes must return a dict of Recipe subclasses, got list",
}


@pytest.fixture
def broken(register, request):
    """One plugin that works and one that fails at the stage given."""
    register(name="good", forward_fusions=[fusion("good")])
    plugin = type("Plugin", (), {})()
    failing(
        request.param,
        register(plugin, name="bad", distribution="opfuse-plugin-bad", version="3.1"),
        plugin,
    )
    return FAILURES[request.param]


@pytest.mark.parametrize("broken", FAILURES, indirect=True)
def test_a_plugin_that_fails_is_told_and_the_rest_works(broken):
    with pytest.warns(PluginWarning) as caught:
        assert [source.name for source in plugins.manager.sources(settings.current.selection)] == [
            "good"
        ]
    (text,) = [str(warning.message) for warning in caught]
    assert text.startswith("opfuse plugin 'bad' (opfuse-plugin-bad 3.1) failed at " + broken)
    assert text.endswith("OPFUSE_PLUGINS=-bad silences this, OPFUSE_STRICT=1 raises it.")
    bad, good = plugins.listing()  # not told again
    assert (bad["name"], bad["state"], bad["fusions"], bad["hooks"]) == ("bad", "failed", {}, [])
    assert bad["error"].startswith(broken)
    assert (good["state"], good["error"]) == ("loaded", None)
    (call,) = opfuse.explain(opfuse.Sequential(A(), A()), torch.ones(2)).calls
    assert call.plan.forward[0].fusion == "good"


@pytest.mark.parametrize("broken", FAILURES, indirect=True)
def test_blocking_a_plugin_that_fails_silences_it(broken):
    with plugins.using("-bad"):
        assert states() == {"bad": "blocked", "good": "loaded"}


@pytest.mark.parametrize("broken", FAILURES, indirect=True)
def test_strict_mode_raises_the_error_of_a_plugin(broken, monkeypatch):
    monkeypatch.setenv("OPFUSE_STRICT", "1")
    with pytest.raises(Exception) as caught:
        plugins.listing()
    assert type(caught.value).__name__ in broken
    assert not isinstance(caught.value, PluginWarning)
    assert states() == {"bad": "failed", "good": "loaded"}


def test_a_quantizer_hook_that_fails_is_told(register):
    def quantizer(recipe, role):
        return 3

    register(name="bad", quantizer=quantizer, forward_fusions=[fusion("f")])
    plugins.listing()
    with pytest.warns(PluginWarning, match="opfuse_quantizer must return a Quantizer, got int"):
        with pytest.raises(RuntimeError, match="no plugin offers a quantizer for Quarter"):
            new_quantizer(Quarter(), opfuse.QuantizerRole("input"), None)
    assert states() == {"bad": "failed"}
    assert plugins.manager.sources(settings.current.selection) == ()


def test_a_plugin_may_use_ops_while_it_is_imported(register):
    record = register(name="a", forward_fusions=[fusion("f")])
    load = record.load

    def importing():
        opfuse.Sequential(A(), A())(torch.ones(2))
        return load()

    record.load = importing
    assert opfuse.Sequential(A(), A())(torch.ones(2)).tolist() == [4, 4]
    assert states() == {"a": "loaded"}
    assert [source.name for source in plugins.manager.sources(settings.current.selection)] == ["f"]


# What plugins give


def test_each_fusion_knows_its_plugin(register):
    register(
        name="b",
        distribution="dist-b",
        version="2",
        joint_fusions=[fusion("j")],
        forward_fusions=[fusion("f")],
    )
    register(name="a", distribution="dist-a", version="1", backward_fusions=[fusion("g")])
    found = [
        (s.passes, s.name, s.distribution, s.version)
        for s in plugins.manager.sources(settings.current.selection)
    ]
    assert found == [
        ("backward", "g", "dist-a", "1"),
        ("joint", "j", "dist-b", "2"),
        ("forward", "f", "dist-b", "2"),
    ]
    assert plugins.listing()[1] == {
        "name": "b",
        "distribution": "dist-b",
        "version": "2",
        "state": "loaded",
        "hooks": ["opfuse_forward_fusions", "opfuse_joint_fusions"],
        "fusions": {"j": ["joint"], "f": ["forward"]},
        "priorities": {},
        "error": None,
    }
    assert json.loads(json.dumps(plugins.listing())) == plugins.listing()


def test_recipes_come_from_the_selected_plugins(register):
    register(name="b", recipes={"quarter": Half, "half": Half})
    register(name="a", recipes={"quarter": Quarter})
    # of two with one name it is the first plugin's
    assert plugins.recipes() == {"quarter": Quarter, "half": Half}
    with plugins.using("b,a"):
        assert plugins.recipes()["quarter"] is Half
    with plugins.using("-b"):
        assert plugins.recipes() == {"quarter": Quarter}


@pytest.mark.parametrize("selection", [["linear"], 3, True])
def test_a_selection_is_a_string(selection):
    with pytest.raises(TypeError, match="expected plugins as one string"):
        plugins.using(selection)


def test_plugins_declare_options_with_defaults(register, monkeypatch):
    class Plugin:
        @staticmethod
        @opfuse.hookimpl
        def opfuse_options():
            return {
                "example.size": 4,
                "example.mode": "fast",
                "example.rate": 0.5,
                "example.any": None,
                "example.path": ("short", "long"),
            }

    record = plugins.register(Plugin, name="example")
    chain, x = opfuse.Sequential(opfuse.ops.Identity()), torch.ones(2)
    try:
        with opfuse.options(**{"example.size": 8, "example.rate": 1, "example.any": "x"}):
            chain(x)
        for name, value, kind in (
            ("size", "8", "int"),
            ("size", True, "int"),
            ("mode", 1, "str"),
            ("rate", None, "float"),
        ):
            text = f"option 'example.{name}' of the plugin example: expected {kind} such as .*, got {value!r}"
            with opfuse.options(**{f"example.{name}": value}), pytest.raises(TypeError, match=text):
                chain(x)
        with (
            opfuse.options(**{"example.sise": 8}),
            pytest.raises(
                ValueError,
                match=r"unknown option 'example.sise': the plugin example has example.size, exam",
            ),
        ):
            chain(x)
        with opfuse.options(**{"example.path": "long"}):
            chain(x)
        says = "option 'example.path' of the plugin example: expected 'short' or 'long', got 'lon'"
        with opfuse.options(**{"example.path": "lon"}), pytest.raises(ValueError, match=says):
            chain(x)
        with opfuse.options(**{"example.sise": 8}), plugins.using(""):
            chain(x)  # the plugin is off
    finally:
        plugins.remove(record)
    with opfuse.options(**{"exmple.size": 8}):
        with pytest.warns(
            PluginWarning, match="option 'exmple.size': no plugin exmple is installed"
        ):
            chain(x)
        chain(x + 1)  # said once


@pytest.mark.parametrize("options", [["example.size"], {"size": 4}, {"other.size": 4}])
def test_options_are_named_after_their_plugin(options):
    class Plugin:
        @staticmethod
        @opfuse.hookimpl
        def opfuse_options():
            return options

    record = plugins.register(Plugin, name="example")
    try:
        with pytest.warns(
            PluginWarning, match=r"opfuse_options must return a dict of 'example.<option>', got"
        ):
            (row,) = [row for row in plugins.listing() if row["name"] == "example"]
        assert row["state"] == "failed"
    finally:
        plugins.remove(record)


def test_hooks_are_called_once(register):
    calls = []

    def forward_fusions():
        calls.append(1)
        return [fusion("f")]

    register(forward_fusions=forward_fusions)
    chain = opfuse.Sequential(A(), A())
    for selection in (None, "test", "-x", "", None):
        plugins.manager._warned.add("x")
        with plugins.using(selection):
            chain(torch.ones(2))
    assert calls == [1]


def test_a_plugin_may_be_a_namespace_of_static_methods(register):
    class Plugin:
        @staticmethod
        @opfuse.hookimpl
        def opfuse_forward_fusions():
            return (fusion("f"),)

        helper = 3

    register(Plugin)
    assert plugins.listing()[0]["fusions"] == {"f": ["forward"]}


def test_an_unknown_optional_hook_is_ignored(register):
    class Plugin:
        @opfuse.hookimpl(optionalhook=True)
        def opfuse_of_the_future(self):
            return []

    register(Plugin())
    assert (plugins.listing()[0]["state"], plugins.listing()[0]["hooks"]) == ("loaded", [])


def test_two_distributions_with_one_entry_point_name(register):
    register(name="same", distribution="one", forward_fusions=[fusion("f1")])
    register(name="same", distribution="two", forward_fusions=[fusion("f2")])
    told = "both one and two have a plugin named 'same', .* OPFUSE_PLUGINS=-two turns one off"
    with pytest.warns(PluginWarning, match=told):
        listed = plugins.listing()
    assert [(r["distribution"], list(r["fusions"])) for r in listed] == [
        ("one", ["f1"]),
        ("two", ["f2"]),
    ]
    with plugins.using("two"):
        assert [source.name for source in plugins.manager.sources(settings.current.selection)] == [
            "f2"
        ]


def test_one_object_under_two_names(register):
    """The second is told, and the first goes on."""
    plugin = make_plugin(forward_fusions=[fusion("f")])
    register(plugin, name="first")
    register(plugin, name="second", distribution="another")
    told = r"'second' \(another 1.0\) failed at registration: ValueError: it is the plugin 'first' .*, which is loaded already"
    with pytest.warns(PluginWarning, match=told):
        assert states() == {"first": "loaded", "second": "failed"}
    assert [source.name for source in plugins.manager.sources(settings.current.selection)] == ["f"]


def test_what_is_no_plugin_is_refused_at_the_door():
    for plugin in (None, "opfuse_linear", 3):
        with pytest.raises(
            TypeError, match=f"expected a plugin, such as a module with .*, got {plugin!r}"
        ):
            plugins.register(plugin, name="mine")
    with pytest.raises(TypeError, match=r"expected a string as the plugin's name, got None"):
        plugins.register(make_plugin(), name=None)
    assert "mine" not in states()


@pytest.mark.parametrize("mark", ["tryfirst", "trylast", "wrapper", "hookwrapper"])
def test_marks_of_pluggy_without_effect_are_refused(register, mark):
    def forward_fusions():
        yield

    plugin = type("Plugin", (), {})()
    plugin.opfuse_forward_fusions = opfuse.hookimpl(**{mark: True})(forward_fusions)
    register(plugin)
    with pytest.warns(
        PluginWarning, match=f"opfuse_forward_fusions is marked {mark}, which has no"
    ):
        plugins.listing()


def test_registering_and_removing_replans(register):
    manager = plugins.manager
    generation = manager.generation
    record = register(name="a", forward_fusions=[fusion("f")])
    assert manager.generation > generation
    assert [source.name for source in manager.sources(settings.current.selection)] == ["f"]
    generation = manager.generation
    plugins.remove(record)
    assert manager.generation > generation
    assert manager.sources(settings.current.selection) == ()
    plugins.remove(record)


@pytest.mark.parametrize("selection", [None, ""])
def test_a_fusion_registered_in_code(register, selection):
    manager = plugins.manager
    chain = opfuse.Sequential(A(), A())
    kinds = {
        "forward": opfuse.register_forward_fusion,
        "backward": opfuse.register_backward_fusion,
        "joint": opfuse.register_forward_backward_fusion,
    }
    with plugins.using(selection):  # they are not plugins and stay on
        for kind, function in kinds.items():
            generation = manager.generation
            handle = function(fusion("code"))
            assert manager.generation > generation
            assert [
                (s.passes, s.name, s.distribution)
                for s in manager.sources(settings.current.selection)
            ] == [(kind, "code", None)]
            (call,) = opfuse.explain(chain, torch.ones(2, requires_grad=True)).calls  # replanned
            assert [step.fusion for step in call.plan.forward] == (
                [None] * 2 if kind == "backward" else ["code"]
            )
            assert [step.fusion for step in call.plan.backward] == (
                [None] * 2 if kind == "forward" else ["code"]
            )
            handle.unregister()
            handle.unregister()
            assert manager.sources(settings.current.selection) == ()
            assert chain(torch.ones(2)).tolist() == [4, 4]
    assert plugins.listing() == []


def test_only_fusions_and_functions_are_registered():
    with pytest.raises(
        TypeError, match=r"expected a Fusion or a function \(ops, \*, recipe\) -> ops, got 3"
    ):
        opfuse.register_forward_fusion(3)


# Installed plugins


def install(folder, distribution, entry_points, version="1.0", **modules):
    """A distribution as pip leaves it: metadata, and the modules it names."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    info.joinpath("entry_points.txt").write_text(textwrap.dedent(entry_points))
    for name, code in modules.items():
        folder.joinpath(f"{name}.py").write_text(textwrap.dedent(code))


PLUGIN = """
    from opfuse import Fusion, hookimpl
    from opfuse.ops import Identity

    @hookimpl
    def opfuse_forward_fusions():
        return [Fusion([Identity, Identity], lambda ops: None, name="pair")]
"""


def entry_point(name, module, group="opfuse.v1"):
    return f"""
        [console_scripts]
        other = other:main

        [{group}]
        {name} = {module}
    """


def run(code, *paths, **environ):
    """Run code in a new process where only ``paths`` hold plugins."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPFUSE_")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), **environ}
    blocks = "import sys\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", blocks], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


REPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as at_import:
    warnings.simplefilter("always")
    import opfuse
    early = [m for m in ("good", "bad", "future", "editable", "triton") if m in sys.modules]
assert not at_import, [str(w.message) for w in at_import]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rows = opfuse.plugins.listing()
texts = [str(w.message) for w in caught if issubclass(w.category, opfuse.PluginWarning)]
mine = {row["distribution"]: row for row in rows}
late = [m for m in ("good", "bad", "future", "editable", "triton") if m in sys.modules]
print(json.dumps({"rows": mine, "early": early, "late": late, "warnings": texts}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folders with installed plugins of every kind, as two entries of sys.path."""
    site, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    install(site, "Opfuse_Plugin.Good", entry_point("good", "good"), "1.2", good=PLUGIN)
    install(
        site,
        "opfuse-plugin-bad",
        entry_point("bad", "bad"),
        "0.3",
        bad="import nowhere_to_be_found",
    )
    install(
        site,
        "opfuse-plugin-future",
        entry_point("future", "future", "opfuse.v2"),
        future="raise SystemExit(9)",
    )
    install(site, "opfuse-plugin-twin", entry_point("good", "twin"), twin=PLUGIN)
    install(site, "unrelated", "\n[console_scripts]\nx = nowhere:x\n")
    install(source, "opfuse-plugin-editable", entry_point("editable", "editable"), editable=PLUGIN)
    # the other folder shadows this one
    install(source, "opfuse-plugin-good", entry_point("old", "old"), "0.1")
    return site, source


def test_discovery_of_installed_plugins(site):
    report = json.loads(run(REPORT, *site).stdout)
    assert report["early"] == []
    assert report["late"] == ["good", "editable"]
    rows = report["rows"]
    states = {
        name: row["state"]
        for name, row in rows.items()
        if "good" in name.lower() or "plugin" in name
    }
    for name, state in {
        "Opfuse_Plugin.Good": "loaded",
        "opfuse-plugin-bad": "failed",
        "opfuse-plugin-future": "incompatible",
        "opfuse-plugin-twin": "loaded",
        "opfuse-plugin-editable": "loaded",
    }.items():
        assert states[name] == state, rows[name]
    assert "unrelated" not in rows
    assert "opfuse-plugin-good" not in rows
    assert rows["Opfuse_Plugin.Good"]["version"] == "1.2"
    assert rows["Opfuse_Plugin.Good"]["fusions"] == {"pair": ["forward"]}
    assert rows["opfuse-plugin-twin"]["name"] == "good"
    assert (
        rows["opfuse-plugin-future"]["error"]
        == "written for opfuse.v2, this opfuse speaks opfuse.v1"
    )
    assert rows["opfuse-plugin-bad"]["error"] == (
        "import: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    )
    assert [text for text in report["warnings"] if "plugin named" in text] == [
        "both Opfuse_Plugin.Good and opfuse-plugin-twin have a plugin named 'good', and both are in use; "
        "OPFUSE_PLUGINS=-opfuse-plugin-twin turns one off"
    ]
    (told,) = [text for text in report["warnings"] if "nowhere_to_be_found" in text]
    assert told.startswith("opfuse plugin 'bad' (opfuse-plugin-bad 0.3) failed at import: ")


HOOKS = """
    from opfuse.core.hookspecs import hookspec

    @hookspec
    def opfuse_extras(count):
        ...
"""

IMPLEMENTS = """
    from opfuse import hookimpl

    @hookimpl{}
    def opfuse_extras({}):
        return [7]
"""

ASKED = """
    import json, warnings
    import opfuse
    from opfuse.core.plugins import manager
    assert "hooks_of_extras" not in sys.modules
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opfuse.plugins.using("one"):
            rows = [row for row in opfuse.plugins.listing() if row["name"] == "one"]
    (record,) = [record for record in manager.records if record.name == "one"]
    told = [str(w.message) for w in caught if issubclass(w.category, opfuse.PluginWarning)]
    answer = manager.ask(record, "opfuse_extras", int, each=True, count=1)
    print(json.dumps([rows[0]["state"], rows[0]["hooks"], told, answer]))
"""


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("of", ["installed", "missing", "broken"])
def test_a_hook_of_another_package(tmp_path, of, optional):
    """It is like a hook of opfuse; where the package is missing, an optional one is ignored."""
    code = IMPLEMENTS.format("(optionalhook=True)" if optional else "", "count")
    install(tmp_path, "opfuse-plugin-one", entry_point("one", "one"), one=code)
    if of != "missing":
        hooks = HOOKS if of == "installed" else "import nowhere_to_be_found"
        points = entry_point("extras", "hooks_of_extras", "opfuse.hookspecs")
        install(tmp_path, "opfuse-extras", points, "0.4", hooks_of_extras=hooks)
    state, has, told, answer = json.loads(run(ASKED, tmp_path).stdout)
    if of == "broken":
        assert told.pop(0).startswith(
            "the hooks hooks_of_extras of opfuse-extras 0.4 are not known: ModuleNotFoundError: "
        )
    if of == "installed":
        assert (state, has, told, answer) == ("loaded", ["opfuse_extras"], [], [7])
    elif optional:
        assert (state, has, told, answer) == ("loaded", [], [], [7])
    else:
        assert state == "failed" and "unknown hook opfuse_extras; opfuse.v1 has " in told.pop()
        assert told == []


def test_the_arguments_of_a_hook_of_another_package_are_checked(tmp_path):
    code = IMPLEMENTS.format("(optionalhook=True)", "size")
    install(tmp_path, "opfuse-plugin-one", entry_point("one", "one"), one=code)
    points = entry_point("extras", "hooks_of_extras", "opfuse.hookspecs")
    install(tmp_path, "opfuse-extras", points, hooks_of_extras=HOOKS)
    state, _, (told,), _ = json.loads(run(ASKED, tmp_path).stdout)
    assert state == "failed" and "registration: PluginValidationError" in told


def test_what_a_package_adds_to_opfuse(tmp_path):
    points = "[opfuse.attributes]\nextra = adding:extra\nlost = nowhere_to_be_found:lost\n"
    install(tmp_path, "opfuse-adding", points, adding="extra = [1]")
    install(tmp_path, "opfuse-later", "[opfuse.attributes]\nextra = later:extra\n")
    code = """
        import opfuse
        assert "adding" not in sys.modules and {"extra", "lost"} <= {*dir(opfuse)}
        assert opfuse.extra == [1] and opfuse.extra is opfuse.extra and "adding" in sys.modules
        try: opfuse.lost
        except ModuleNotFoundError as error: assert "nowhere_to_be_found" in str(error)
        assert not hasattr(opfuse, "nothing")
        from opfuse import *
        assert "extra" not in globals()
    """
    run(code, tmp_path)


@pytest.mark.parametrize(
    ("selection", "state"), [(None, "loaded"), ("fast", "loaded"), ("-quick", "blocked")]
)
def test_two_entry_points_that_name_one_module(tmp_path, selection, state):
    points = "[opfuse.v1]\nquick = speedy\nfast = speedy\n"
    hook = "    @hookimpl\n    def opfuse_options():\n        return {'quick.size': 4}\n"
    install(tmp_path, "opfuse-plugin-speedy", points, speedy=PLUGIN + hook)
    environ = {} if selection is None else {"OPFUSE_PLUGINS": selection}
    report = json.loads(run(REPORT, tmp_path, **environ).stdout)
    row = report["rows"]["opfuse-plugin-speedy"]
    assert (row["name"], row["state"]) == ("fast", state)
    assert not [text for text in report["warnings"] if "speedy" in text]
    assert row["fusions"] == ({"pair": ["forward"]} if state == "loaded" else {})


def test_nothing_is_imported_when_everything_is_blocked(site):
    report = json.loads(run(REPORT, *site, OPFUSE_PLUGINS="").stdout)
    assert report["late"] == []
    assert report["warnings"] == []
    assert report["rows"]["opfuse-plugin-bad"]["state"] == "blocked"
    assert report["rows"]["opfuse-plugin-future"]["state"] == "incompatible"


def test_two_plugins_of_one_name_of_which_one_is_used_warn_of_nothing(site):
    report = json.loads(run(REPORT, *site, OPFUSE_PLUGINS="-opfuse-plugin-twin,-bad").stdout)
    assert report["rows"]["Opfuse_Plugin.Good"]["state"] == "loaded" and report["warnings"] == []


def test_a_selection_by_environment(site):
    report = json.loads(run(REPORT, *site, OPFUSE_PLUGINS="opfuse.plugin.good").stdout)
    assert report["late"] == ["good"]
    assert {name for name, row in report["rows"].items() if row["state"] == "loaded"} == {
        "Opfuse_Plugin.Good"
    }


def test_importing_opfuse_imports_no_plugin_and_no_triton(site):
    code = """
        import torch
        before = set(sys.modules)
        import opfuse
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not new & {"good", "bad", "twin", "editable", "triton", "click"}, new
        assert not any(name.startswith("opfuse_") for name in new), new
        assert "triton" not in sys.modules
    """
    run(code, *site)


def test_a_manager_of_its_own(tmp_path, monkeypatch):
    install(
        tmp_path, "opfuse-plugin-mine", entry_point("mine", "mine"), mine="raise AssertionError"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    manager = PluginManager()
    manager.discover()
    (record,) = manager.records
    assert (record.name, record.distribution, record.version, record.state) == (
        "mine",
        "opfuse-plugin-mine",
        "1.0",
        "found",
    )
    assert "mine" not in sys.modules


def test_a_distribution_without_a_name(tmp_path, monkeypatch):
    info = tmp_path / "opfuse_plugin_lost-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\n")
    info.joinpath("entry_points.txt").write_text("[opfuse.v1]\nlost = lost")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    manager = PluginManager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of importlib.metadata
        manager.discover()
    (record,) = manager.records
    assert record.distribution == "opfuse_plugin_lost-1.0.dist-info"


def test_a_distribution_with_broken_metadata(tmp_path, monkeypatch):
    install(tmp_path, "opfuse-plugin-garbled", "\n[opfuse.v1]\nthis is no entry point\n", "0.2")
    install(tmp_path, "opfuse-plugin-mine", entry_point("mine", "beside"), beside=PLUGIN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = list(metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    manager = PluginManager()
    manager.discover()  # tells nothing yet
    assert manager.generation == 0
    with pytest.warns(
        PluginWarning,
        match=r"'opfuse-plugin-garbled' \(opfuse-plugin-garbled 0.2\) failed at metadata: ",
    ):
        assert [record.name for record in manager.active(None)] == ["mine"]
    assert [record.state for record in manager.records] == ["loaded", "failed"]


def test_an_interrupted_load_is_tried_again(register):
    class Interrupted:
        times = 0

        @opfuse.hookimpl
        def opfuse_forward_fusions(self):
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt
            return []

    register(Interrupted(), name="interrupted")
    with opfuse.plugins.using("interrupted"):
        with pytest.raises(KeyboardInterrupt):
            opfuse.plugins.listing()
        assert [row["state"] for row in opfuse.plugins.listing()] == ["loaded"]


def test_a_plugin_that_exits_is_a_failure(register):
    class Exits:
        @opfuse.hookimpl
        def opfuse_forward_fusions(self):
            raise SystemExit(3)

    register(Exits(), name="exits", distribution="opfuse-plugin-exits", version="4")
    with opfuse.plugins.using("exits"):
        with pytest.warns(
            opfuse.PluginWarning,
            match=r"opfuse-plugin-exits 4\) failed at hook call: SystemExit: 3",
        ):
            assert [row["state"] for row in opfuse.plugins.listing()] == ["failed"]
