"""Tables of shards, added to the table of one run."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_table import RECIPE, counted, made, sha

from calib.errors import CalibError
from calib.histogram import Histogram
from calib.table import CalibrationTable, make_table


@settings(deadline=None, max_examples=15)
@example([[0.0], [-0.0]])
@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), min_size=2, max_size=4))
def test_merged_shards_equal_the_whole(shards):
    def table(parts, names):
        whole = Histogram.of(np.concatenate([np.array(p, np.float32) for p in parts]))
        halves = (Histogram.empty(), whole)
        return make_table({"c:input": halves}, "entropy_2", 99.99, {"weights": "w"}, {n: sha(n) for n in names}, RECIPE,
                          len(parts), 1, {"cat": len(parts)}, ())  # fmt: skip

    names = [f"sample {i}" for i in range(len(shards))]
    merged = CalibrationTable.merge([table([part], [name]) for part, name in zip(shards, names, strict=True)])
    assert merged == table(shards, names)
    assert merged.histograms == table(shards, names).histograms


def test_shards_that_do_not_belong_together_are_refused():
    with pytest.raises(CalibError, match=r"at least one table is needed"):
        CalibrationTable.merge([])
    overlap = r"^merge: each sample must be in one shard \(got 'b' in two\)\. Shard the data without overlap\."
    with pytest.raises(CalibError, match=overlap):
        CalibrationTable.merge([made(), made(samples=("b", "c"))])
    other = dataclasses.replace(made(samples=("b", "c")), samples={"b": sha("another"), "c": sha("c")})
    with pytest.raises(CalibError, match=r"\(got 'b' in two\)\. They differ: give each shard's files other names\."):
        CalibrationTable.merge([made(), other])
    others = [
        (made(samples=("c",), digests={"weights": "w2", "graph": "g1"}), "weights"),
        (made(samples=("c",), algorithm="mse"), "algorithm"),
        (made(samples=("c",), recipe="other"), "recipe"),
        (made(samples=("c",), data=counted(0, ("conv1:input",))), "tensors"),
    ]
    for other, name in others:
        with pytest.raises(CalibError, match=rf"shards must be of one job \(got different {name}\)"):
            CalibrationTable.merge([made(), other])


def test_merging_without_labels_has_no_coverage():
    assert CalibrationTable.merge([made(), made(samples=("c",), coverage=None)]).audit.coverage is None
    both = CalibrationTable.merge([made(), made(samples=("c",), coverage={"cat": 0, "emu": 3})])
    assert both.audit.coverage == {"cat": 1, "dog": 1, "emu": 3}
