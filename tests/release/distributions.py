"""What a release is built from, and what must be true of its files.

    python tests/release/distributions.py copy TREE          the checkout, as it is released
    python tests/release/distributions.py check TREE DIST    what was built from it
    python tests/release/distributions.py same DIST OTHER    byte for byte
    python tests/release/distributions.py upload TREE DIST TAG   the files that a tag releases

Each prints what is wrong, all of it, and then fails.
"""

import email
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACEHOLDER = "opfuse.example"
"""The host of this project in URLs, until there is one. The top-level domain exists nowhere."""
SOURCE = f"https://{PLACEHOLDER}/source"
"""Where a reader of a README finds the files next to it."""
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
CHANGES = re.compile(r"^## (.*)$", re.MULTILINE)


def folders(tree):
    """The folders of the packages of a checkout, by name; the core first."""
    found = [tree, *sorted(path.parent for path in tree.glob("plugins/*/pyproject.toml"))]
    return {project(folder)["name"]: folder for folder in found}


def project(folder):
    """The table ``project`` of a folder's pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def copy(tree):
    """Copy what git knows, or would add, into an empty folder, with READMEs that stand alone."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    for folder in folders(tree).values():
        readme = folder / "README.md"
        where = folder.relative_to(tree).as_posix()
        readme.write_text(absolute(readme.read_text("utf-8"), where), "utf-8", newline="\n")


def absolute(text, where):
    """A README whose links to files next to it say where these are; pictures as they are."""

    def replaced(match):
        picture, label, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(where, path))
        return f"{picture}{label}({SOURCE}/{target}{anchor or ''}{'?raw=true' * bool(picture)})"

    return LINK.sub(replaced, text)


def disagreements(projects):
    """Where what a package needs of another is not what that one is, or might not stay so."""
    versions = {each["name"]: Version(each["version"]) for each in projects}
    for each in projects:
        if each["requires-python"] != projects[0]["requires-python"]:
            yield f"{each['name']} supports Python {each['requires-python']}, the core another"
        for needed in map(Requirement, each["dependencies"]):
            if needed.name not in versions:
                continue
            here = versions[needed.name]
            following = f"{here.major}.{here.minor + 1}" if here.major == 0 else f"{here.major + 1}"
            if not needed.specifier.contains(here, prereleases=True):
                yield f"{each['name']} needs {needed}, which is {here} here"
            if needed.specifier.contains(following):
                yield f"{each['name']} needs {needed}, which would take {following} too"


def faults(path, folder):
    """What is wrong with a wheel or an sdist that was built from a folder."""
    known = project(folder)
    stem = f"{known['name'].replace('-', '_')}-{known['version']}"
    inside = [p for p in (folder / "src", folder / "opfuse") if p.is_dir()]
    source = inside[0] if inside[0].name == "src" else folder
    files = {p.relative_to(source).as_posix() for p in inside[0].rglob("*") if p.is_file()}
    if path.suffix == ".whl":
        info = f"{stem}.dist-info"
        written = ["METADATA", "WHEEL", "RECORD", "licenses/LICENSE"]
        written += ["entry_points.txt"] * bool({"entry-points", "scripts"} & {*known})
        expected = files | {f"{info}/{name}" for name in written}
        with zipfile.ZipFile(path) as archive:
            found = set(archive.namelist())
            metadata = archive.read(f"{info}/METADATA").decode()
    else:
        beside = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
        prefix = source.relative_to(folder).as_posix()
        expected = beside | {posixpath.normpath(f"{prefix}/{name}") for name in files}
        with tarfile.open(path) as archive:
            found = {name.partition("/")[2] for name in archive.getnames()}
            found.discard(".gitignore")  # by which the backend knows what belongs to it
            metadata = archive.extractfile(f"{stem}/PKG-INFO").read().decode()
    yield from (f"has {name}, which is not part of it" for name in sorted(found - expected))
    yield from (f"lacks {name}" for name in sorted(expected - found))
    if not any(name.endswith("py.typed") for name in found):
        yield "lacks py.typed"
    yield from wrong_metadata(metadata, known)


def wrong_metadata(text, known):
    """What is wrong with the metadata of a file, beside what pyproject.toml says."""
    has = email.message_from_string(text)
    wanted = {
        "Name": known["name"],
        "Version": known["version"],
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": known["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for key, value in wanted.items():
        if has[key] != value:
            yield f"says {key}: {has[key]} in its metadata, not {value}"
    for key in ("Homepage", "Documentation", "Changelog", "Issues"):
        if key not in known.get("urls", {}):
            yield f"has no URL {key}"
    for match in LINK.finditer(has.get_payload()):
        yield f"has a README that links to {match[3]}, which is not there on a package's page"


def check(tree, dist):
    """Everything that is wrong with the files of a folder, which must have all packages."""
    known = folders(tree)
    yield from disagreements([project(folder) for folder in known.values()])
    expected = {}
    for name, folder in known.items():
        stem = f"{name.replace('-', '_')}-{project(folder)['version']}"
        expected |= {f"{stem}-py3-none-any.whl": folder, f"{stem}.tar.gz": folder}
    found = {path.name for path in dist.iterdir()}
    yield from (f"{dist} lacks {name}" for name in sorted(expected.keys() - found))
    yield from (f"{dist} has {name}, too" for name in sorted(found - expected.keys()))
    for name in sorted(expected.keys() & found):
        yield from (f"{name} {fault}" for fault in faults(dist / name, expected[name]))


def same(dist, other):
    """Which files of two folders are not the same bytes."""
    for name in sorted({path.name for folder in (dist, other) for path in folder.iterdir()}):
        ours, theirs = dist / name, other / name
        if not (ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes()):
            yield f"{name} is not the same in {other}"


def upload(tree, dist, tag):
    """Move the files that a tag ``NAME-vVERSION`` releases into DIST/upload; what forbids it."""
    name, _, version = tag.rpartition("-v")
    folder = folders(tree).get(name)
    if folder is None:
        yield f"{tag}: a tag is NAME-vVERSION, with the name of a package here"
        return
    known = project(folder)
    if known["version"] != version:
        yield f"{tag}: {name} is {known['version']} in its pyproject.toml"
    heading = CHANGES.search((folder / "CHANGELOG.md").read_text(encoding="utf-8"))[1]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        yield f"{tag}: CHANGELOG.md begins with {heading!r}, not with '{version} (YEAR-MONTH-DAY)'"
    if PLACEHOLDER in "".join(known["urls"].values()):
        yield f"{tag}: the URLs are still at {PLACEHOLDER}, which does not exist"
    (dist / "upload").mkdir()
    for path in sorted(dist.glob(f"{name.replace('-', '_')}-{version}[-.]*")):
        shutil.move(path, dist / "upload")


def main(command, *arguments):
    """Run one of the commands; fail with what is wrong."""
    *paths, last = arguments
    given = [*map(pathlib.Path, paths), last if command == "upload" else pathlib.Path(last)]
    wrong = list(
        {"copy": copy, "check": check, "same": same, "upload": upload}[command](*given) or ()
    )
    print("\n".join(wrong) or f"{command}: nothing is wrong", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
