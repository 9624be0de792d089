"""What is checked and built.

``python -m nox`` runs the defaults; ``python -m nox -l`` lists all there is to run.

torch is large, so it is installed once, with pip, into ``.nox/base-*``. Every session has a small
virtual environment of its own next to it, which sees the packages of the base through a ``.pth``
file and holds the wheels under test: what is installed in one session is not there in another.
Nothing is imported from this checkout; the wheels are.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["everything"]
nox.options.default_venv_backend = "virtualenv"

ROOT = pathlib.Path(__file__).parent.resolve()
CONSTRAINTS = ROOT / "constraints.txt"
OF_NEW = ROOT / "opfuse/cli/scaffold/template"
WORKFLOW_OF_NEW = OF_NEW / "any/.github/workflows/check.yml"
DISTRIBUTIONS = str(ROOT / "tests" / "release" / "distributions.py")
BIN = "Scripts" if os.name == "nt" else "bin"
ALONE = ["--no-seed"]  # a virtual environment without pip: the base's pip installs into it
CORE_ALONE = [f"--ignore={ROOT / 'tests' / 'models'}"]  # whole models take minutes: together
UNSET = (
    *("OPFUSE_PLUGINS", "OPFUSE_STRICT", "OPFUSE_FUSION_LIMIT", "PYTHONPATH"),
    "PYTHONDONTWRITEBYTECODE",  # each of hundreds of processes would compile what it imports
)

PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH: list[str] = PROJECT["tool"]["opfuse"]["torch"]
PACKAGES = {
    path.parent.name: nox.project.load_toml(path)["project"]
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))
}
TOOLKITS = [ROOT / "plugins" / name for name in PACKAGES if not name.startswith("opfuse-plugin-")]
KIT = [ROOT / "plugins" / name for name in ("opfuse-distributed", "opfuse-reproducible")]
NAMES = {name.removeprefix("opfuse-").removeprefix("plugin-"): name for name in PACKAGES}
PLUGINS = {short for short, name in NAMES.items() if name == f"opfuse-plugin-{short}"}
DEFAULTS = ["tests", "together", *(f"plugin({short})" for short in NAMES)]  # long ones first
DEFAULTS += ["strangers", "lint", "types", "docs", "build"]
LANES = 2
IN_A_LANE = "OPFUSE_NOX_LANE"  # set for sessions that ``everything`` runs

SECONDS: dict[str, float] = {}
WHEELS: dict[pathlib.Path, str] = {}  # built in this run
BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(os.path.join(sys.argv[1], os.path.basename(folder)))
"""


def timed(**options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A session whose seconds are noted, failed or not, once its empty environment is there."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(session: nox.Session, **parameters: str) -> None:
            started = time.monotonic()
            try:
                function(session, **parameters)
            finally:
                SECONDS[session.name] = time.monotonic() - started

        return nox.session(run, **options)

    return register


@atexit.register
def print_seconds() -> None:
    """Print the table of sessions, behind what nox says itself."""
    for name, seconds in SECONDS.items() if IN_A_LANE not in os.environ else ():
        print(f"{name:24}{seconds:8.1f} s", file=sys.stderr)


@timed(python=False)
def everything(session: nox.Session) -> None:
    """All tests and checks: two sessions at a time, each with half of the cores.

    Each is a nox of its own, so that one installs while the other tests. What a session prints
    comes when it ends.
    """
    wheel_of(session, ROOT)  # all of them, and the base: before two sessions want them

    def run(name: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        started = time.monotonic()
        session.log(f"{name} begins")
        command = [sys.executable, "-m", "nox", "-f", __file__, "-s", name, "--", *session.posargs]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, IN_A_LANE: "1"},
        )
        SECONDS[name] = time.monotonic() - started
        return name, done

    failed = []
    with concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
        for each in concurrent.futures.as_completed([lanes.submit(run, name) for name in DEFAULTS]):
            name, done = each.result()
            print(done.stdout, flush=True)
            if done.returncode:
                failed.append(name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def folders(name: str) -> list[pathlib.Path]:
    """A package of this repository, and those that it depends on, and they in turn."""
    needed = [re.split(r"[^a-z0-9-]", each)[0] for each in PACKAGES[name]["dependencies"]]
    found = [folder for each in needed if each in PACKAGES for folder in folders(each)]
    return [ROOT / "plugins" / name, *dict.fromkeys(found)]


def group(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups."""
    return nox.project.dependency_groups(PROJECT, *names)


def torch_of(session: nox.Session) -> str:
    """The minor of torch that a session's name asks for; "" for the one in constraints.txt."""
    return session.name.removeprefix("torch-") if session.name.startswith("torch-") else ""


def constraints(session: nox.Session) -> pathlib.Path:
    """The versions to install: those in constraints.txt, but what another torch decides itself."""
    minor = torch_of(session)
    if not minor:
        return CONSTRAINTS
    kept = re.sub(r"^(torch|torchao|setuptools)==.*\n", "", CONSTRAINTS.read_text(), flags=re.M)
    path = ROOT / ".nox" / f"constraints-torch-{minor}.txt"
    path.write_text(f"{kept}torch=={minor}.*\n")
    return path


def base(session: nox.Session) -> str:
    """The Python of the environment that holds torch, the test tools and the build backend.

    The environment is made when it is needed, one for each minor of torch. The demo has one without
    test tools, which take most of the time, unless the other is there.
    """
    version, minor, versions = sys.version_info, torch_of(session), constraints(session)
    home = ROOT / ".nox" / (f"base-{version[0]}.{version[1]}" + f"-torch-{minor}" * bool(minor))
    is_small = session.name == "demo" and not (home / "installed").is_file()
    home = home.with_name(home.name + "-demo" * is_small)
    needed = {*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]}
    examples = PROJECT["project"]["optional-dependencies"]["examples"]
    requirements = sorted(needed | {*(examples if is_small else group("test"))})
    python = home / BIN / "python"
    stamp = home / "installed"
    wanted = hashlib.sha256(
        json.dumps([sys.version, requirements, versions.read_text()]).encode()
    ).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        making = [sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(home)]
        session.run(*making, external=True)
        pip = [str(python), "-m", "pip", "install", "--no-compile", "-c", str(versions)]
        session.run(*pip, *requirements, external=True)
        if not is_small:  # in tests a warning is an error, and torchao has one when it is compiled
            others = r"^(?!.*[/\\]torchao[/\\])"
            compiling = ["-W", "ignore", "-m", "compileall", "-qq", "-x", others, str(home)]
            session.run(str(python), *compiling, external=True, success_codes=[0, 1])
        stamp.write_text(wanted)
    return str(python)


def wheel_of(session: nox.Session, package: pathlib.Path) -> str:
    """The wheel of a package of this repository, from .nox/wheels.

    All are built once in a run, by one process: pip would start three for each.
    """
    if not WHEELS:
        home = ROOT / ".nox" / "wheels"
        packages = [ROOT, *(ROOT / "plugins" / name for name in PACKAGES)]
        if IN_A_LANE not in os.environ:
            shutil.rmtree(home, ignore_errors=True)
            command = [base(session), "-c", BUILD, str(home), *map(str, packages)]
            session.run(*command, external=True, log=False)
        WHEELS.update((each, str(*(home / each.name).iterdir())) for each in packages)
    return WHEELS[package]


def install(session: nox.Session, *what: str | pathlib.Path, into: str | None = None) -> str:
    """Install into an environment of its own, next to the base; returns its Python.

    A folder is a package of this repository. Later commands run outside the checkout.

    ``session.install`` would need a pip, and a torch, in every environment.
    """
    pip = base(session)
    python = into or str(pathlib.Path(session.bin) / "python")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, shared = (
        session.run(which, "-c", show, silent=True, external=True, log=False).strip()
        for which in (python, pip)
    )
    pathlib.Path(own, "zz_base.pth").write_text(shared + "\n")
    command = [pip, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    wanted = [wheel_of(session, each) if isinstance(each, pathlib.Path) else each for each in what]
    command += ["--no-build-isolation", "-c", str(constraints(session))]
    session.run(*command, *wanted, external=True)
    session.env.update({**dict.fromkeys(UNSET), "OPFUSE_TUNING": ""})
    session.env["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / ".nox" / "inductor")  # of all sessions
    session.chdir(ROOT)  # create_tmp starts from here
    session.chdir(session.create_tmp())
    return python


def pytest(session: nox.Session, *where: pathlib.Path, options: Sequence[str] = ()) -> None:
    """Run the tests in some folders against what is installed, with a process per core.

    In ``everything`` a session has half of the cores. What is installed must not be the checkout.
    """
    check = (  # found, not imported, which would import torch
        "import importlib.util, pathlib, sys; found = importlib.util.find_spec('opfuse').origin; "
        "sys.exit(pathlib.Path(sys.argv[1]) in pathlib.Path(found).parents)"
    )
    session.run("python", "-c", check, str(ROOT / "opfuse"))
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    workers = min(cores // (LANES if IN_A_LANE in os.environ else 1), 8)
    session.env["OMP_NUM_THREADS"] = "1"
    # one process needs none that distributes its tests, which would import torch as well
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    session.run(
        "python", "-m", "pytest", *config, *parallel, *options, *map(str, where), *session.posargs
    )


def show_plugins(session: nox.Session, python: str = "python") -> None:
    """List the installed plugins; fail unless exactly those of this repository are loaded."""
    text = session.run(
        python, "-m", "opfuse", "plugins", "--json", silent=True, stderr=None, external=True
    )
    rows = json.loads(text)
    session.log(
        "plugins: "
        + ", ".join(f"{row['distribution']} {row['version']} {row['state']}" for row in rows)
    )
    expected = {*(f"opfuse-plugin-{name}" for name in PLUGINS), *(each.name for each in KIT)}
    expected.add("opfuse")  # which has a tool
    if {row["distribution"] for row in rows if row["state"] == "loaded"} != expected:
        session.error(f"expected {sorted(expected)} to be loaded, got:\n{text}")


def install_all(session: nox.Session) -> None:
    """Install every package of this repository, and what its examples need."""
    core = f"{wheel_of(session, ROOT)}[examples]"
    install(session, core, *(ROOT / "plugins" / name for name in PACKAGES))


def install_and_show_all(session: nox.Session) -> None:
    """Install and list every package of this repository."""
    install_all(session)
    show_plugins(session)


@timed(venv_params=ALONE)
def tests(session: nox.Session) -> None:
    """The core's tests, with no plugin installed.

    The toolkits are there, for what pages show of them and for the plugin that ``opfuse new``
    writes. Tests of whole models take minutes, and run in ``together``.
    """
    install(session, ROOT, *TOOLKITS)
    pytest(session, ROOT / "tests", options=CORE_ALONE)


@timed(venv_params=ALONE)
@nox.parametrize("name", [nox.param(name, id=name) for name in NAMES])
def plugin(session: nox.Session, name: str) -> None:
    """The tests of one plugin or toolkit, with the core, its kit, and no other plugin installed."""
    install(session, ROOT, *{*KIT, *folders(NAMES[name])})
    folder = ROOT / "plugins" / NAMES[name]
    pytest(session, folder / "tests")
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("src/**/*.py")]
    own = any(re.search(r"import triton|get\(.TRITON_INTERPRET", text) for text in sources)
    if own or any("opfuse_triton" in text for text in sources):
        session.env["TRITON_INTERPRET"] = "1"  # read when Triton is imported: a process of its own
        # the toolkit's kernels have tests of their own, so here is only how they are called
        which = "not test_plugin" if own else "kernel or output or drop"
        pytest(session, folder / "tests", options=["-k", which])


@timed(venv_params=ALONE)
def together(session: nox.Session) -> None:
    """The core's tests again, with every plugin installed, but those that hide the plugins.

    Fusing never changes the answer. Of a test with several cases a tenth run: see conftest.py.
    """
    install_and_show_all(session)
    session.env["OPFUSE_SHARE"] = "0.1"
    # what a converted model of a library gains comes from other plugins
    models = ROOT / "plugins" / "opfuse-plugin-transformers"
    where = [ROOT / "tests", *(folder / "tests" for folder in (*TOOLKITS, models))]
    pytest(session, *where, options=["-m", "not alone"])


def other_torch(session: nox.Session) -> None:
    """The core's tests and each plugin's, with one of the minors of torch in TORCH.

    What that torch lacks itself skips a test, for a reason that tests/support/known_limits.py
    states. pip takes the build of torch that it finds: on Linux the large CUDA build, unless you
    point it at the CPU build. The session goes on where one of them fails.
    """
    failed = []
    for name in ("opfuse", *sorted(PACKAGES)):
        needed = {*KIT, *folders(name)} if name in PACKAGES else TOOLKITS
        python = install(session, ROOT, *needed)
        session.env["PYTHONPATH"] = str(ROOT / "tests" / "support")
        where = ROOT / "plugins" / name / "tests" if name in PACKAGES else ROOT / "tests"
        try:
            pytest(session, where, options=["-p", "known_limits", *CORE_ALONE])
        except nox.command.CommandFailed:
            failed.append(name)
        if name.startswith("opfuse-plugin-"):  # no plugin is tested beside another
            pip = [base(session), "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes"]
            session.run(*pip, name, external=True)
    if failed:
        session.error(f"tests failed: {', '.join(failed)}")


for minor in TORCH:
    timed(name=f"torch-{minor}", venv_params=ALONE)(other_torch)


@timed(venv_params=ALONE)
def strangers(session: nox.Session) -> None:
    """The README's plugin and a broken one, each installed with pip from a folder of its own."""
    folder = pathlib.Path(session.create_tmp()) / "addmm"
    folder.mkdir(exist_ok=True)
    for block in (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1::2]:
        language, _, code = block.partition("\n")
        name = code.partition("\n")[0].removeprefix("# ")
        if language in ("toml", "python") and name in ("pyproject.toml", "opfuse_addmm.py"):
            (folder / name).write_text(code, encoding="utf-8")
    install(session, ROOT, str(folder), str(ROOT / "tests" / "strangers" / "broken"))
    session.run("python", str(ROOT / "tests" / "strangers" / "check.py"))


@timed(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff, and the schemas of files for a host. Needs no torch, so it has a plain environment."""
    session.install("--quiet", "-c", str(CONSTRAINTS), *group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    hosted = ROOT / ".github"
    for schema, files in {
        "github-workflows": [*sorted(hosted.glob("workflows/*.yml")), WORKFLOW_OF_NEW],
        "github-issue-forms": sorted(hosted.glob("ISSUE_TEMPLATE/[0-9]*.yml")),
        "github-issue-config": [hosted / "ISSUE_TEMPLATE" / "config.yml"],
        "citation-file-format": [ROOT / "CITATION.cff"],
    }.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files))
    with tempfile.TemporaryDirectory() as folder:  # what `opfuse new` writes, for ruff as it comes
        for kind in sorted({path.name for path in OF_NEW.iterdir()} - {"any", "kernel"}):
            written = pathlib.Path(folder, kind)
            has_kernel = (OF_NEW / kind / "src/opfuse_NAME/kernels.py").exists()
            for part in ("any", *["kernel"] * has_kernel, kind):
                shutil.copytree(OF_NEW / part, written, dirs_exist_ok=True)
            (written / "src/opfuse_NAME").rename(written / "src/opfuse_hasty")
            for path in written.rglob("*.py"):
                path.write_text(path.read_text().replace("opfuse_NAME", "opfuse_hasty"))
            session.chdir(written)
            session.run("ruff", "check", "--isolated", "--no-cache")
        session.chdir(ROOT)


@timed(venv_params=ALONE, reuse_venv=True)
def types(session: nox.Session) -> None:
    """Mypy, strict on the core, the toolkits and the losses."""
    install(session, *group("types"))
    session.chdir(ROOT)
    session.run("python", "-m", "mypy", *session.posargs)


@timed(venv_params=ALONE)
def docs(session: nox.Session) -> None:
    """The documentation, into docs/_build; a warning is an error.

    The reference has the ops of the toolkits, and the losses of the plugin that has them.
    """
    losses = ROOT / "plugins" / "opfuse-plugin-loss"
    install(session, ROOT, *TOOLKITS, losses, *group("docs"))
    out = ROOT / "docs" / "_build"
    session.run(
        "python",
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-E",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(out),
    )
    session.log(f"open {out / 'index.html'}")


def build_all(session: nox.Session, folder: pathlib.Path, *options: str) -> list[pathlib.Path]:
    """Build the core and every package into an empty folder; returns the wheels.

    They are built from a copy of what git knows, so nothing else can get into them, and with the
    time of the last commit, so that anybody gets the same bytes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    python = install(session, "build")
    tree = pathlib.Path(session.create_tmp()) / f"{folder.name}-tree"
    shutil.rmtree(tree, ignore_errors=True)
    session.run(python, DISTRIBUTIONS, "copy", str(tree), silent=True)
    show = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    session.env["SOURCE_DATE_EPOCH"] = session.run(*show, silent=True, external=True).strip()
    command = ["python", "-m", "build", "--no-isolation", "--outdir", str(folder), *options]
    for package in (tree, *(tree / "plugins" / name for name in PACKAGES)):
        session.run(*command, str(package), silent=True)
    session.log("built " + ", ".join(path.name for path in sorted(folder.iterdir())))
    if not options:
        session.run(python, DISTRIBUTIONS, "check", str(tree), str(folder))
    return sorted(folder.glob("*.whl"))


def fresh_python(session: nox.Session) -> str:
    """The Python of another environment, which is empty: not even pip is in it."""
    home = pathlib.Path(session.bin).parent / "fresh"
    command = ["-m", "virtualenv", "--quiet", "--clear", "--no-seed", str(home)]
    session.run(sys.executable, *command, external=True)
    return str(home / BIN / "python")


@timed(venv_params=ALONE)
def build(session: nox.Session) -> None:
    """Source distributions and wheels of the core and of every plugin, into dist/.

    The wheels are then installed and tried, as on a machine without a network.
    """
    wheels = build_all(session, ROOT / "dist")
    python = install(session, *map(str, wheels), into=fresh_python(session))
    show_plugins(session, python)
    script = shutil.copy(ROOT / "benchmarks" / "from_wheels.py", session.create_tmp())
    for wheel in wheels:
        shutil.copy(wheel, session.create_tmp())
    session.run(python, script, "--help", silent=True, external=True)


@timed(venv_params=ALONE)
def release(session: nox.Session) -> None:
    """Everything of a release but the upload; ``-- TAG`` for the release of one package.

    Builds twice and compares, checks the files, and installs each package by its name, from a
    folder with torch and nothing else, into an empty environment. There it must do what the README
    promises. A tag is ``NAME-vVERSION``. Its files are then in dist/upload/.
    """
    status = ["git", "-C", str(ROOT), "status", "--porcelain"]
    if session.posargs and session.run(*status, silent=True, external=True):
        session.error("the checkout has changes: a release is built from a commit")
    folder, again = ROOT / "dist", pathlib.Path(session.create_tmp()) / "again"
    build_all(session, folder)
    install(session, "twine")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, folder.iterdir()))
    mask = os.umask(0o077)  # how files lie on a machine must not matter
    try:
        build_all(session, again)
    finally:
        os.umask(mask)
    session.run("python", DISTRIBUTIONS, "same", str(folder), str(again))

    house = ROOT / "build" / "release"
    house.mkdir(parents=True, exist_ok=True)
    for path in house.glob("opfuse*"):
        path.unlink()
    tables = [PROJECT["project"], *PACKAGES.values()]
    needed = {each for table in tables for each in table["dependencies"]}
    names = sorted(each for each in needed if not each.startswith("opfuse"))
    pip = [base(session), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    download = ["download", "--only-binary=:all:", "--dest", str(house), "-c", str(CONSTRAINTS)]
    session.run(*pip, *download, *names, external=True)
    for wheel in folder.glob("*.whl"):
        shutil.copy(wheel, house)
    session.env["PIP_CONFIG_FILE"] = os.devnull  # with --isolated: no other place is searched
    for name in ("opfuse", *PACKAGES):
        python = fresh_python(session)
        command = ["--isolated", "--python", python, "install", "--no-compile", "--no-index"]
        session.run(*pip, *command, "--find-links", str(house), name, external=True)
        session.run(python, str(ROOT / "tests" / "release" / "smoke.py"), name, external=True)
    if session.posargs:  # what else forbids it is said last, behind a whole rehearsal
        session.run("python", DISTRIBUTIONS, "upload", str(ROOT), str(folder), *session.posargs)


@timed(venv_params=ALONE)
def wheelhouse(session: nox.Session) -> None:
    """Wheels for a machine with a GPU and no network, into build/wheelhouse/ or a folder you name.

    That machine has torch and Triton. The folder has the rest, and a script that installs it and
    measures.
    """
    folder = ROOT / (session.posargs or ["build/wheelhouse"])[0]
    if folder.is_dir() and not {path.suffix for path in folder.iterdir()} <= {".whl", ".py"}:
        session.error(f"{folder} has other files, and would be emptied: name another folder")
    build_all(session, folder, "--wheel")
    needed = [re.split(r"[^a-z0-9-]", each)[0] for each in PROJECT["project"]["dependencies"]]
    names = [*sorted({*needed} - {"torch"}), "zipp", "liger-kernel"]  # what one needs; a peer
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [base(session), "-m", "pip", *download, "-c", str(CONSTRAINTS), *names]
    session.run(*command, external=True)
    shutil.copy(ROOT / "benchmarks" / "from_wheels.py", folder)
    session.log(f"copy {folder} to the machine, and run there: python from_wheels.py")


@timed(venv_params=ALONE)
def demo(session: nox.Session) -> None:
    """The main job: train a small language model with every plugin installed."""
    install_all(session)  # listing them would import torch once more
    session.chdir(ROOT)
    session.run("python", str(ROOT / "examples" / "train_lm.py"), *session.posargs)


@timed(venv_params=ALONE)
def models(session: nox.Session) -> None:
    """Converted models of known families, in every order of what else is done to them.

    It takes many minutes, so the other sessions have one tiny model of each family.
    """
    install_and_show_all(session)
    session.env["OPFUSE_MODELS"] = "all"
    pytest(session, ROOT / "tests" / "models")


@timed(venv_params=ALONE)
def checkpoints(session: nox.Session) -> None:
    """Every fusion and model under selective checkpointing, with each operation saved in turn.

    It takes many minutes, so elsewhere a few cases of each fusion save one operation each.
    """
    install_and_show_all(session)
    session.env["OPFUSE_THOROUGH"] = "1"
    where = ROOT / "tests" / "test_overwriting.py", ROOT / "tests" / "models" / "test_orders.py"
    suites = sorted(ROOT.glob("plugins/*/tests/test_conformance.py"))
    pytest(session, *where, *suites, options=["-k", "held_results or overwriting or selective"])


@timed(venv_params=ALONE)
def check_all(session: nox.Session) -> None:
    """Compile every configuration of every kernel for every GPU, and write the report.

    It takes minutes, so the plugins' tests compile one configuration of each.
    """
    install_and_show_all(session)
    report = ROOT / "benchmarks" / "results" / "kernels.json"
    session.run("python", "-m", "opfuse_triton", "check", "--all", "--report", str(report))


@timed(venv_params=ALONE)
def index(session: nox.Session) -> None:
    """Check each plugin for the plugin index, and write the reports; ``-- NAME ...`` for some.

    The conformance suites of all take many minutes.
    """
    install_and_show_all(session)
    measured = ROOT / "benchmarks" / "results" / "h100-kernels.json"
    for name in session.posargs or sorted(PLUGINS):
        # kernels without a twin that runs on a CPU
        env = {"TRITON_INTERPRET": "1"} if name in ("liger", "moe") else {}
        env["OPFUSE_COSTLY"] = "1"  # every check, see conftest.py
        env["PYTEST_ADDOPTS"] = "-o faulthandler_timeout=1800"  # of tests that compile much
        dist = f"opfuse-plugin-{name}"
        given = ["--tests", str(ROOT / "plugins" / dist / "tests"), "--results", str(measured)]
        command = ["python", "-m", "opfuse", "check-plugin", dist, *given, "--json"]
        report = session.run(*command, silent=True, stderr=None, env=env)
        path = ROOT / "docs" / "plugin-index" / f"{dist}.json"
        path.write_text(report, encoding="utf-8", newline="\n")
    session.log("now: python docs/generate.py")


@timed(venv_params=ALONE)
def gpu(session: nox.Session) -> None:
    """The plugins' tests in the tier that needs a GPU, every plugin by itself."""
    for name in PACKAGES:
        session.log(name)
        install(session, ROOT, *folders(name))
        session.env["OPFUSE_COSTLY"] = "1"
        pytest(session, ROOT / "plugins" / name / "tests", options=["-k", "gpu"])
