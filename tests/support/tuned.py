"""Tables of a folder, and measurements that a test prescribes, in place of those of a clock."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

from opfuse.tuning import table as tables
from opfuse.tuning.table import Measurement
from opfuse.tuning.trial import Trial


@contextlib.contextmanager
def tables_in(folder):
    """The tuning tables of a folder, for a block."""
    try:
        with mock.patch.dict(os.environ, OPFUSE_TUNING=str(folder)):
            tables.reload()
            yield
    finally:
        tables.reload()


class Prescribed:
    """Lets ``opfuse.tune`` find what is given, by fusion and by pass, for a ``with`` block.

    A number is a speed; the separate ops take 1 ms. ``default`` is that of all others.
    """

    def __init__(self, default=1.0, **found):
        self.default, self.found, self.asked = default, found, []

    def measure(self, trial):
        source = trial._candidate.source
        self.asked.append(f"{source.name} {source.passes}")
        given = self.found.get(f"{source.name}_{source.passes}", self.found.get(source.name))
        given = self.default if given is None else given
        if isinstance(given, Measurement):
            return given
        return Measurement(given, 0.0, 1e-3 - 1e-3 / given)

    def __enter__(self):
        self._patch = mock.patch.object(Trial, "measure", lambda trial: self.measure(trial))
        self._patch.__enter__()
        return self

    def __exit__(self, *exc_info):
        self._patch.__exit__(*exc_info)
