"""Tensors of more than 2^31 elements, in Triton's interpreter: their last rows are all that there is.

A launch begins at a later program, and what it reads and writes there is moved to a small tensor.
"""

import importlib

import pytest
import torch

from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

pytestmark = [
    pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's
]

if is_interpreting():
    interpreter.install()

LAST = 2**31  # the row that 32 bits do not hold


@pytest.fixture
def beginning_at(monkeypatch):
    """Call it with the first program, and for each tensor how many elements there are before it."""
    np = pytest.importorskip("numpy")
    module = importlib.import_module("triton.runtime.interpreter")
    builder = type(module.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def begin(program, *tensors):
        def moved(ptrs, mask):
            at, known = np.array(ptrs.data, dtype=np.uint64), ~np.array(mask.data, dtype=bool)
            at, known = np.broadcast_arrays(at, known)
            at, known = at.copy(), known.copy()
            for tensor, before in tensors:
                shift = np.uint64(before * tensor.itemsize)
                start = np.uint64(tensor.data_ptr()) + shift
                here = (at >= start) & (at < start + np.uint64(tensor.nbytes)) & ~known
                at[here] -= shift
                known |= here
            assert known.all(), "an address outside of all tensors"
            return module.TensorHandle(at, ptrs.dtype)

        def own(self, axis):
            found = self.grid_idx[axis] + (program if axis == 0 else 0)
            return module.TensorHandle(np.array([found], dtype=np.int32), module.tl.int32)

        monkeypatch.setattr(builder, "create_get_program_id", own)
        monkeypatch.setattr(
            builder, "create_masked_load", lambda s, p, m, *rest: load(s, moved(p, m), m, *rest)
        )
        monkeypatch.setattr(
            builder,
            "create_masked_store",
            lambda s, p, v, m, *rest: store(s, moved(p, m), v, m, *rest),
        )

    return begin


@pytest.mark.parametrize("rows", [100, 600])
def test_dropout_of_many_rows(beginning_at, rows):
    from opfuse_triton.norms import dropout

    tile, features, seed = 512, 3, torch.tensor([77])
    before = LAST - tile
    x, extra = torch.ones(rows, features), torch.zeros(rows, features)
    y = torch.full_like(x, -1.0)
    apart = before * features
    beginning_at(before // tile, (x, apart), (extra, apart), (y, apart), (seed, 0))
    numbers = 0.25 * 2**24, 1 / 0.75
    dropout.dropout_kernel[(-(-rows // tile),)](
        x, extra, y, seed, before + rows, features, *numbers, ROWS=tile, BLOCK=4
    )
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(y.bool().double().mean() - 0.75) < 0.1


def test_dropout_of_a_row_with_many_numbers(beginning_at):
    """Its columns are no dimension of the grid, which would have 65535 programs at most."""
    from opfuse_triton.norms import dropout

    features, tile, seed = 600, 512, torch.tensor([77])
    before = LAST - tile
    x, y = torch.ones(features), torch.full((features,), -1.0)
    beginning_at(before // tile, (x, before), (y, before), (seed, 0))
    numbers = 0.25 * 2**24, 1 / 0.75
    dropout.dropout_kernel[(2,)](
        x, None, y, seed, 1, before + features, *numbers, ROWS=1, BLOCK=tile
    )
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_norms_of_more_rows_than_a_program_counts_are_computed_by_pytorch():
    from opfuse_triton.norms import MOST_ROWS, RMS, Norm, library

    norm = Norm(RMS, 1, False)
    for rows, taken in ((MOST_ROWS, True), (MOST_ROWS + 1, False)):
        x = torch.empty(rows, 32, dtype=torch.bfloat16, device="meta")
        assert library.takes(norm, x, None) is taken
        assert library.takes(Norm(RMS, 2, False), x.view(-1, 4, 8)) is taken
