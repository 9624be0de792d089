"""Which tests run: what no plugin changes, and what is left out unless every case is asked for."""

import gc
import itertools
import os
import sys
import zlib

ASKED = os.environ.get("OPFUSE_COSTLY") or os.environ.get("OPFUSE_THOROUGH") or ""
EVERY = ASKED not in ("", "0")
SHARE = 1.0 if EVERY else float(os.environ.get("OPFUSE_SHARE", 1))
"""Of the cases of a test that has more than a few, where another session runs all of them."""

FEW = {"tests/models/": 4, "transformers/tests/test_conformance.py": 30}
"""So many cases of these tests all run: they show what other plugins give a model."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HIDING = {"no_plugins", "register", "nothing_installed", "rounding"}
"""Fixtures with which no installed plugin is on: none is, or only what the test registers."""


def pytest_collection_modifyitems(config, items):
    """Mark what hides the installed plugins; leave out most cases of tests that are costly.

    What hides them gives the same with them: it is left out where all of them are there.
    """
    left_out, named = set(), any("::" in str(arg) for arg in config.args)
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        for item in cases:
            if not HIDING.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker("alone")
        mark = cases[0].get_closest_marker("costly")
        if mark is not None and not (named or EVERY):
            if "each" in mark.kwargs:
                cases[0].cls.most_cases = mark.kwargs["each"] // (3 if INTERPRETED else 1)
            left_out.update(set(cases) - set(_some(cases, *mark.args, **mark.kwargs)))
        elif SHARE < 1 and not named:
            few = next((count for path, count in FEW.items() if path in cases[0].nodeid), 1)
            left_out.update(set(cases) - set(_some(cases, SHARE, few=few)))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item):
    """Let each test draw the same numbers, whichever tests ran before it in its process."""
    if torch := sys.modules.get("torch"):
        has_gpu = torch.cuda.is_available()  # without one, torch formats the stack three times
        seed = torch.manual_seed if has_gpu else torch.default_generator.manual_seed
        seed(zlib.crc32(item.nodeid.encode()))


def pytest_collection_finish(session):
    """Let the garbage collector pass over what is imported: it took a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def pytest_sessionfinish(session):
    """Let the garbage collector find everything again, before libraries look for leaks."""
    gc.unfreeze()


def _some(cases, count, always=(), each=None, few=20):
    """Some of the cases of a test.

    Args:
        cases: All of them.
        count: So many, evenly apart. As a float, a share, by the hashes of their names, so that
            they stay the same when others come and go.
        always: Cases whose names end so run, too.
        each: So many chains are tested by each of a fusion's checks, and a third of them where
            kernels are interpreted; None: all.
        few: All of so many cases run, or fewer, if ``count`` is a share.
    """
    if isinstance(count, float):
        most = count * 2**32 if len(cases) > few else 2**32
        kept = [case for case in cases if zlib.crc32(case.nodeid.encode()) < most] or cases[:1]
    else:
        count = min(count, len(cases))
        kept = [cases[int((number + 0.5) * len(cases) / count)] for number in range(count)]
    ends = tuple(f"-{name}]" for name in always)
    return kept + [case for case in cases if ends and case.nodeid.endswith(ends)]
