"""What a host reads agrees with what is here: workflows, versions of torch and Python, the placeholder."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import types

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.alone

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OF_NEW = ROOT / "opfuse/cli/scaffold/template/any/.github/workflows/check.yml"
WORKFLOWS = [*sorted(ROOT.glob(".github/workflows/*.yml")), OF_NEW]


def jobs(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps(path):
    return [step for job in jobs(path).values() for step in job["steps"]]


def pythons():
    classifiers = PROJECT["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_names_no_host(path):
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    used = re.findall(r"uses: (.*)", text)
    assert used and len(used) == sum("uses" in step for step in steps(path))
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path):
    """Each command is shell, and names a session of nox or a file that exists."""
    sessions = {
        *re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    }
    for command in [step["run"] for step in steps(path) if "run" in step]:
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert not checked.returncode, checked.stderr
        for name in re.findall(r"nox -s (\w+)", command):
            assert name in sessions, command
        for name in re.findall(r"bash (\S+)|-c (constraints\S+)", command):
            assert (ROOT / "".join(name)).is_file(), command


def test_only_the_upload_may_have_an_identity():
    for path in WORKFLOWS:
        whole = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert "id-token" not in whole["permissions"]
        for name, job in jobs(path).items():
            if "id-token" in job.get("permissions", {}):
                assert name in ("publish", "deploy") and job["environment"]
                assert not any("run" in step for step in job["steps"])


def test_the_window_of_torch_is_the_same_everywhere():
    window = PROJECT["tool"]["opfuse"]["torch"]
    assert window == sorted(window, key=lambda minor: int(minor.partition(".")[2]))
    matrix = jobs(ROOT / ".github/workflows/tests.yml")["torch"]["strategy"]["matrix"]
    assert matrix == {"torch": window[-3:], "python": pythons()}
    supported, older = ", ".join(window[-3:]), ", ".join(window[:-3])
    page = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
    row = f"| 0.1 | {supported} | {older} | {pythons()[0]} to {pythons()[-1]} |"
    assert row in page and PROJECT["project"]["version"].startswith("0.1.")
    assert f"torch>={window[0]}" in PROJECT["project"]["dependencies"]
    assert PROJECT["project"]["requires-python"] == f">={pythons()[0]}"
    (pinned,) = re.findall(
        r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned in window[-3:]


def test_every_package_is_for_the_same_pythons():
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for each in pythons():
            assert f"Programming Language :: Python :: {each}" in project["classifiers"], path
        assert project["requires-python"] == PROJECT["project"]["requires-python"], path


@pytest.mark.parametrize(
    "form", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[0-9]*.yml")), ids=lambda p: p.stem
)
def test_an_issue_asks_for_the_doctor(form):
    fields = {each["id"]: each for each in yaml.safe_load(form.read_text(encoding="utf-8"))["body"]}
    assert "opfuse doctor" in fields["doctor"]["attributes"]["label"]


def test_the_placeholder_is_explained_where_it_is_used():
    page = (ROOT / "docs" / "release.md").read_text(encoding="utf-8")
    explained = "opfuse has no host yet. **`opfuse.example` stands for it everywhere**" in page
    assert explained == ("opfuse.example" in str(PROJECT["project"]["urls"]))


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["project"]["version"]


def test_the_changelog_begins_with_the_version():
    for folder in [ROOT, *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]:
        version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        heading = re.search(r"^## (.*)$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
        assert re.fullmatch(rf"{re.escape(version)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading), (
            folder
        )


def test_which_cases_of_a_costly_test_run():
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    root = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(root)
    item = type("Item", (types.SimpleNamespace,), {"__hash__": object.__hash__})
    cases = [item(nodeid=f"test_a.py::test_b[{n}-{n % 4}]") for n in range(400)]
    assert [cases.index(case) for case in root._some(cases[:12], 4)] == [1, 4, 7, 10]
    assert root._some(cases[:2], 4) == cases[:2] and root._some(cases, 0) == []
    fourth = root._some(cases, 0.25)
    assert 60 < len(fourth) < 140 and root._some(cases[:20], 0.25) == cases[:20]
    assert root._some(cases[:200], 0.25) == [case for case in cases[:200] if case in fourth]
    suite = type("TestSuite", (), {"most_cases": None})
    marks = pytest.mark.costly(0.25, each=7).mark
    for case in cases:
        case.cls, case.get_closest_marker = suite, lambda name: marks
    ran, hook = list(cases), types.SimpleNamespace(pytest_deselected=lambda items: None)
    root.EVERY = root.INTERPRETED = False  # of this copy of the module
    config = types.SimpleNamespace(args=["tests"], hook=hook)
    root.pytest_collection_modifyitems(config, ran)
    assert ran == fourth and suite.most_cases == 7
    root.SHARE, ran = 0.5, cases[:90]
    for case in cases:
        case.get_closest_marker = lambda name: None
    root.pytest_collection_modifyitems(config, ran)
    assert 20 < len(ran) < 70 and root._some(cases[:5], 1e-9, few=4) == cases[:1]
    always = root._some(cases, 0.25, always=["3"])
    assert all(case in always for case in cases if case.nodeid.endswith("-3]"))
