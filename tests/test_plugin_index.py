"""The plugin index: its page is that of the reports, and the reports are of the plugins that are here."""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys

import pytest

from opfuse.cli import declared

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "plugin-index"
HERE = {path.parent.name: path for path in ROOT.glob("plugins/opfuse-plugin-*/pyproject.toml")}


def report_of(name):
    return json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def index():
    """The module that makes the page."""
    path = ROOT / "docs" / "plugin_index.py"
    spec = importlib.util.spec_from_file_location("plugin_index", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_reports(index):
    page = (ROOT / "docs" / "plugin-index.md").read_text(encoding="utf-8")
    assert page.partition("\n")[2] == index.page(), "run docs/generate.py"
    for host in ("pypi", "anaconda.org", "conda-forge", "github.com"):
        assert host not in page.lower()


def test_every_plugin_of_this_repository_is_listed():
    assert HERE.keys() <= {path.stem for path in REPORTS.glob("*.json")}


@pytest.mark.parametrize("name", sorted(HERE))
def test_a_report_is_of_the_version_here(name):
    project, report = tomllib.loads(HERE[name].read_text())["project"], report_of(name)
    assert (report["version"], report["summary"], report["licence"], report["homepage"]) == (
        *(project["version"], project["description"]),
        *(project["license"], project["urls"]["Homepage"]),
    )
    assert report["requires"]["python"] == project["requires-python"]
    assert f"opfuse{report['requires']['opfuse']}" in project["dependencies"]


@pytest.mark.parametrize("name", sorted(HERE))
def test_a_report_is_of_the_fusions_here(name):
    """Names, passes, patterns and defaults, hooks and ranges, as the installed plugin has them."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: the session together has it")
    report, now = report_of(name), declared.describe(found)
    for plugin in report["plugins"]:
        for fusion in plugin["fusions"]:
            assert fusion.pop("used") is not None and fusion.pop("checks")["failed"] == {}
    assert now["failures"] == []
    for key in ("plugins", "requires", "contract", "distribution"):
        assert report[key] == now[key], f"run: python -m nox -s index -- {name[14:]}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 0}, "expected a report of schema 1"),
        ({"distribution": "opfuse-plugin-other"}, "the report is of opfuse-plugin-other"),
        ({"failures": ["forward x: output: wrong"]}, "with failures is not listed: forward x"),
    ],
)
def test_what_is_not_listed(index, tmp_path, monkeypatch, change, said):
    name = sorted(HERE)[0]
    (tmp_path / f"{name}.json").write_text(json.dumps(report_of(name) | change))
    monkeypatch.setattr(index, "HERE", tmp_path)
    with pytest.raises(ValueError, match=said):
        index.page()


def test_a_row_hides_nothing(index):
    """Limits, what was skipped and what a suite changes are on the page; quick ones say so."""
    report = report_of(sorted(HERE)[0])
    (fusion, *_) = report["plugins"][0]["fusions"]
    fusion["checks"]["limits"] = {"output": "five | percent *off*"}
    fusion["checks"]["skipped"] = {"compile": "no compiler"}
    report["conformance"]["changes"] = {"TestMine": ["chains"]}
    report["conformance"]["checks"] = "runs, output, gradients"
    text = index.section(report)
    assert f"- {fusion['pass']} {fusion['name']}: output: five \\| percent \\*off\\*" in text
    assert "- compile: no compiler" in text and "`TestMine`: `chains`" in text
    assert index.row(report)[6].endswith(", quick")
    report["hardware"] = []
    assert index.row(report)[7] == "no"
