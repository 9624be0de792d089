"""What a release checks, and that it refuses what is wrong."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location(
    "distributions", ROOT / "tests" / "release" / "distributions.py"
)
distributions = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(distributions)
NAME = "opfuse-quantized"

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The checkout, as it is released."""
    made = tmp_path_factory.mktemp("tree")
    distributions.copy(made)
    return made


def build(folder, out, *options):
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """The wheel and the sdist of a small package, by suffix."""
    return build(tree / "plugins" / NAME, tmp_path_factory.mktemp("dist"))


def faults(path, tree):
    return list(distributions.faults(path, tree / "plugins" / NAME))


def test_what_is_built_here_is_right(built, tree):
    assert not faults(built[".whl"], tree) and not faults(built[".gz"], tree)


def test_two_builds_are_the_same_bytes(built, tree, tmp_path):
    """Another folder, other times and other modes make no difference."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(tree / "plugins" / NAME, copy, copy_function=shutil.copyfile)
    shutil.copy(tree / ".gitignore", tmp_path)  # the backend looks for it above, too
    for path in copy.rglob("*.py"):
        path.chmod(0o600)
    build(copy, tmp_path / "out")
    dist = built[".whl"].parent
    assert not list(distributions.same(dist, tmp_path / "out"))
    (tmp_path / "out" / built[".gz"].name).write_bytes(b"")
    (found,) = distributions.same(dist, tmp_path / "out")
    assert found.startswith(built[".gz"].name)


def changed(wheel, to, *, without="", extra=None, said=None):
    """A wheel with a file less, a file more, or another line in its metadata."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to / wheel.name, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if said and name.endswith("METADATA"):
                data = data.decode().replace(*said).encode()
            if not without or not name.endswith(without):
                new.writestr(name, data)
        if extra:
            new.writestr(extra, "")
    return to / wheel.name


@pytest.mark.parametrize(
    "change, words",
    [
        ({"extra": "tests/test_x.py"}, "has tests/test_x.py"),
        ({"extra": "benchmarks/__init__.py"}, "has benchmarks/__init__.py"),
        ({"without": "py.typed"}, "lacks py.typed"),
        (
            {"without": "licenses/LICENSE"},
            "lacks opfuse_quantized-0.1.0.dist-info/licenses/LICENSE",
        ),
        ({"without": "opfuse_quantized/__init__.py"}, "lacks opfuse_quantized/__init__.py"),
        ({"said": ("License-Expression: Apache-2.0", "License: MIT")}, "says License-Expression"),
        ({"said": ("Version: 0.1.0", "Version: 0.1.1")}, "says Version: 0.1.1"),
        ({"said": ("\n# opfuse", "\n[more](docs/more.md)\n# opfuse")}, "links to docs/more.md"),
    ],
)
def test_a_wrong_wheel_is_refused(built, tree, tmp_path, change, words):
    found = faults(changed(built[".whl"], tmp_path, **change), tree)
    assert any(words in fault for fault in found), found


def test_a_wrong_sdist_is_refused(built, tree, tmp_path):
    whole, part = built[".gz"], tmp_path / built[".gz"].name
    with tarfile.open(whole) as old, tarfile.open(part, "w:gz") as new:
        for member in old.getmembers():
            if not member.name.endswith("LICENSE"):
                new.addfile(member, old.extractfile(member))
    assert faults(part, tree) == ["lacks LICENSE"]


def test_links_of_a_readme_lead_out_of_it():
    text = "[a](../../docs/a.md#b), ![p](docs/p.svg), [h](https://x.example/a), [i](#here)"
    base = distributions.SOURCE
    assert distributions.absolute(text, "plugins/one") == (
        f"[a]({base}/docs/a.md#b), ![p]({base}/plugins/one/docs/p.svg?raw=true), "
        "[h](https://x.example/a), [i](#here)"
    )


def test_every_link_of_every_readme_leads_to_a_file(tree):
    """What becomes an address of the host is a file of this repository."""
    count = 0
    for folder in distributions.folders(tree).values():
        text = (folder / "README.md").read_text(encoding="utf-8")
        for rest in text.split(f"]({distributions.SOURCE}/")[1:]:
            count += 1
            assert (ROOT / rest.partition(")")[0].partition("#")[0].partition("?")[0]).exists()
    assert count > 50


def projects():
    return [distributions.project(folder) for folder in distributions.folders(ROOT).values()]


def test_the_versions_agree():
    assert not list(distributions.disagreements(projects()))


@pytest.mark.parametrize(
    "name, key, value, words",
    [
        ("opfuse", "version", "0.2.0", "opfuse-triton needs opfuse<0.2,>=0.1, which is 0.2.0 here"),
        ("opfuse-quantized", "version", "0.0.9", "which is 0.0.9 here"),
        ("opfuse-triton", "dependencies", ["opfuse>=0.1"], "which would take 0.2 too"),
        ("opfuse-triton", "requires-python", ">=3.12", "opfuse-triton supports Python >=3.12"),
    ],
)
def test_versions_that_disagree_are_refused(name, key, value, words):
    known = projects()
    for each in known:
        if each["name"] == name:
            each[key] = value
    found = list(distributions.disagreements(known))
    assert any(words in each for each in found), found


def upload(tree, tmp_path, tag, files=("opfuse_quantized-0.1.0.tar.gz",)):
    for name in files:
        (tmp_path / name).write_text("")
    return "\n".join(distributions.upload(tree, tmp_path, tag))


def test_a_tag_that_names_no_release_is_refused(tree, tmp_path):
    assert "a tag is NAME-vVERSION" in upload(tree, tmp_path, "v0.1.0")
    said = upload(tree, tmp_path, f"{NAME}-v0.3.0")
    assert "opfuse-quantized is 0.1.0 in its pyproject.toml" in said
    assert "not with '0.3.0 (YEAR-MONTH-DAY)'" in said


def test_a_tag_releases_the_files_of_one_package(tree, tmp_path):
    ready, dist = tmp_path / "tree", tmp_path / "dist"
    dist.mkdir()
    shutil.copytree(tree / "plugins" / NAME, ready / "plugins" / NAME)
    shutil.copy(tree / "pyproject.toml", ready)
    for path in (ready / "plugins" / NAME).glob("*.*"):
        text = path.read_text(encoding="utf-8").replace("(unreleased)", "(2030-01-31)")
        path.write_text(text.replace(distributions.PLACEHOLDER, "host.example"), encoding="utf-8")
    files = [
        f"opfuse_{name}"
        for name in (
            "quantized-0.1.0.tar.gz",
            "quantized-0.1.0-py3-none-any.whl",
            "quantized-0.1.01.tar.gz",
            "triton-0.1.0.tar.gz",
        )
    ]
    assert not upload(ready, dist, f"{NAME}-v0.1.0", files)
    assert {path.name for path in (dist / "upload").iterdir()} == set(files[:2])


def test_nothing_is_released_while_the_host_is_a_placeholder(tree, tmp_path):
    if any(distributions.PLACEHOLDER in str(each["urls"]) for each in projects()):
        assert "which does not exist" in upload(tree, tmp_path, f"{NAME}-v0.1.0")


def test_the_command_fails_with_all_that_is_wrong(tmp_path, capsys):
    (tmp_path / "other").write_text("")
    assert distributions.main("check", str(ROOT), str(tmp_path))
    said = capsys.readouterr().err
    assert "lacks opfuse-0.1.0.tar.gz" in said and "has other, too" in said
    assert not distributions.main("same", str(tmp_path), str(tmp_path))
