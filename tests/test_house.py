"""How the house stands: who may know whom, and how large a file and a function may be."""

import ast
import functools
import io
import pathlib
import tokenize

import pytest

pytestmark = pytest.mark.alone

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = (  # the lowest first; a module knows those of its own floor and of the floors below
    ("errors", "precision", "settings"),
    ("grammar",),
    ("quantization",),
    ("environment",),
    ("debug", "op_context"),
    ("fusible",),
    ("op",),
    ("extra_inputs", "overrides"),
    ("ops",),
    ("triton",),
    ("authoring", "converter", "fusion", "tolerance"),
    ("hookspecs",),
    ("records",),
    ("plugins",),
    ("recipes", "tables"),
    ("engine.chain",),
    ("engine.edges", "engine.plan"),
    ("engine.step",),
    ("engine.measured",),
    ("engine.calls", "engine.choose", "engine.pool"),
    ("engine.program",),
    ("engine.checks", "engine.extras"),
    ("engine.saved",),
    ("engine.execute",),
    ("engine.planner",),
    ("engine.cutting",),
    ("engine.fuser",),
    ("contexts", "prepare", "ranks", "sequential"),
    ("conversion",),
    ("report",),
    ("tuning",),
    ("scaffold", "testing"),
    ("",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
EXCEPTIONS = {("fusible", "engine.fuser")}
"""``op(x)`` makes a fuser of its own, at its first call."""


def module_of(path):
    parts = path.relative_to(ROOT / "opfuse").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_of(path): path
    for path in sorted((ROOT / "opfuse").rglob("*.py"))
    if "template" not in path.relative_to(ROOT).parts
}


def imports_of(path, package):
    """What a file imports, at its head and in its functions: absolute module names, with the names taken from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)


@functools.cache
def arrows():
    """Pairs of modules of the core, the first of which imports the second."""
    found = set()
    for module, path in SOURCES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for base, name in imports_of(path, f"opfuse.{package}".rstrip(".")):
            if base.partition(".")[0] != "opfuse":
                continue
            inner = base.partition(".")[2]
            whole = f"{inner}.{name}".lstrip(".")
            found.add((module, whole if whole in SOURCES else inner))
    return {(a, b) for a, b in found if a != b}


def floor(module):
    """On which floor a module is: the floor of the longest name that it begins with."""
    fits = [
        (len(name), i) for i, names in enumerate(FLOORS) for name in names if within(module, name)
    ]
    assert fits, f"{module} has no floor"
    return max(fits)[1]


def within(module, name):
    return module == name or (name and module.startswith(f"{name}."))


def test_no_arrow_runs_up():
    up = {(a, b) for a, b in arrows() if floor(b) > floor(a)}
    assert up == EXCEPTIONS


def test_nothing_here_imports_what_is_for_authors_of_kernels():
    users = {a for a, b in arrows() if within(b, "triton") and not within(a, "triton")}
    assert not users and "triton.kernels" in SOURCES


def test_there_is_no_circle():
    known = {module: {b for a, b in arrows() - EXCEPTIONS if a == module} for module in SOURCES}
    known |= {module: known[module] - {""} for module in known}
    while known:
        leaves = {module for module, below in known.items() if not below & known.keys() - {module}}
        # a package knows what is in it
        assert leaves, f"a circle: {sorted(known)}"
        known = {module: below - leaves for module, below in known.items() if module not in leaves}


def test_every_floor_is_lived_on():
    assert {name for names in FLOORS for name in names} <= {
        *SOURCES,
        *(m.partition(".")[0] for m in SOURCES),
    }


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("plugins/*/src")), ids=lambda path: path.parent.name
)
def test_a_plugin_imports_nothing_private(path):
    for file in path.rglob("*.py"):
        for base, name in imports_of(file, f"{file.parent.name}"):
            if base.partition(".")[0] in (
                "opfuse",
                *(p.name for p in ROOT.glob("plugins/*/src/*")),
            ):
                parts = [*base.split("."), *([name] if name else [])]
                private = [
                    part for part in parts if part.startswith("_") and not part.startswith("__")
                ]
                assert not private, f"{file.name} imports {base}.{name}"
                mine = (
                    base.startswith("opfuse.")
                    or base == "opfuse"
                    or base.partition(".")[0] == file.parent.name
                )
                assert mine, f"{file.name} imports another plugin: {base}"


# Sizes, in lines of code: without docstrings, comments and blank lines

# of the engine 350 are for casts between ops, 320 to choose by what was measured, and 80 for inputs that are computed again; of the ops 510 are for groups of rows, whose product
# torch has for one dtype on two kinds of GPU, and which are quantized one by one, and 400 for the parameters of other modules,
# which change where the op does not see it, 150 for the loss, whose options torch has in part, and 170 for rotary embeddings in two layouts; of the kit 600 are for recipes and for what is cast;
# of the report 20 are for what a recipe quantizes
MOST = {
    "engine": 2760,
    "ops": 3030,
    "report": 540,
    "testing": 3800,
    "tuning": 865,
    "conversion": 1900,
}
LONGER = {  # functions of more than 40 lines, and why
    "run_forward": "the loop of every call",
    "run_backward": "the loop of every call",
    "_replace": "the functions that it puts in place of Triton's",
    "draw": "a picture from top to bottom",
    "_chain": "a picture from top to bottom",
    "make_chains": "the order in which cases are made is the point",
    "_compare_context": "one comparison for each thing that a forward leaves",
}


@functools.cache
def code_of(path):
    """The numbers of a file's lines of code, and its functions as ``(name, lines)``."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        for child in (
            getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ()
        ):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                lines -= set(range(child.lineno, child.end_lineno + 1))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    spans = [(node.name, set(range(node.lineno, node.end_lineno + 1))) for node in functions]
    return lines, [(name, len(lines & span)) for name, span in spans]


def test_files_and_functions_are_short():
    long = []
    for module, path in SOURCES.items():
        lines, functions = code_of(path)
        if len(lines) > 350:
            long.append((module, len(lines)))
        long += [(name, size) for name, size in functions if size > 40 and name not in LONGER]
    assert not long


@pytest.mark.parametrize("folder", MOST)
def test_a_folder_keeps_to_its_budget(folder):
    sizes = [len(code_of(p)[0]) for module, p in SOURCES.items() if within(module, folder)]
    assert sum(sizes) <= MOST[folder]


def test_a_kernel_library_becomes_a_plugin_in_under_200_lines():
    files = (ROOT / "plugins" / "opfuse-plugin-liger" / "src").rglob("*.py")
    assert sum(len(code_of(path)[0]) for path in files) < 200
