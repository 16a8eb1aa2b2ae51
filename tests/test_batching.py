"""Samples are run in batches that one of the profiles takes, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.batching import Batching, by_profile, ranked_output, require_one_size
from trtpipe.errors import InputError
from trtpipe.values import DimRange, TensorSpec

DIMS = {"N": DimRange(1, 4, 8), "H": DimRange(1, 6, 12)}
INPUTS = (TensorSpec("x", "float32", ("N", "H"), DIMS), TensorSpec("y", "float32", ("N", 2), {"N": DIMS["N"]}))
ROWS = (TensorSpec("z", "float32", ("N", 3), {"N": DIMS["N"]}),)
WHOLE = (TensorSpec("z", "float32", (3,), batch_axis=None),)


def samples(count: int, height: int) -> dict[str, np.ndarray]:
    """Inputs of which sample k holds k."""
    number = np.arange(count, dtype=np.float32)[:, None]
    return {"x": np.repeat(number, height, 1), "y": np.repeat(number, 2, 1)}


@st.composite
def ranges(draw: st.DrawFn, dim: str) -> DimRange:
    whole = DIMS[dim]
    low, high = sorted(draw(st.tuples(*[st.integers(whole.min, whole.max)] * 2)))
    return DimRange(low, low, high)


PROFILES = st.lists(st.fixed_dictionaries({}, optional={d: ranges(d) for d in DIMS}), max_size=3)


@given(
    profiles=PROFILES, count=st.integers(1, 20), height=st.integers(1, 12), size=st.integers(1, 8), whole=st.booleans()
)
def test_every_sample_is_run_once_in_a_batch_that_a_profile_takes(
    profiles: list[dict[str, DimRange]], count: int, height: int, size: int, whole: bool
) -> None:
    how = Batching(INPUTS, WHOLE if whole else ROWS, size, profiles)
    batch = samples(count, height)
    takes = [
        [n for n in range(spec.at("min")[0], spec.at("max")[0] + 1) if not whole or n == size]
        for spec, _ in by_profile(INPUTS, profiles)
        if spec.at("min")[1] <= height <= spec.at("max")[1]
    ]
    legal = {n for sizes in takes for n in sizes}
    if not legal:
        with pytest.raises(InputError) as caught:
            list(how.pieces(batch))
        of = size if whole else "1 to 8"
        assert str(caught.value) == (
            f"inputs: must be of sizes that a profile of build.profiles takes in batches of {of} (got samples x "
            f"[{height}], y [2]). Change the sizes, or add a profile."
        )
        return
    seen: list[float] = []
    for piece, used in how.pieces(batch):
        rows = len(piece["x"])
        assert rows in legal
        assert used == rows or used < min(legal)  # filled up only where no smaller batch can be run
        assert (piece["x"][used:] == piece["x"][used - 1]).all()
        seen += piece["x"][:used, 0].tolist()
        assert len(piece["y"]) == rows
    assert seen == list(range(count))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("low", [1, 2, 4])
@pytest.mark.parametrize("count", range(1, 10))
def test_samples_that_fill_no_whole_batches_are_refused_where_an_output_is_of_its_batch(
    count: int, low: int, size: int
) -> None:
    dims = {"N": DimRange(low, 4, 8)}
    inputs = (TensorSpec("x", "float32", ("N", 2), dims),)
    Batching(inputs, ROWS, size).require_whole(count, "here")
    how, most = Batching(inputs, WHOLE, size), max(low, size)
    if low <= count <= most or count % most == 0:
        how.require_whole(count, "here")
        return
    with pytest.raises(InputError) as caught:
        how.require_whole(count, "here")
    of = f" of {most}" if low == most else f", {low} to {most} at once or a multiple of {most}"
    assert str(caught.value) == (
        f"here: output z has no batch axis: samples must fill whole batches{of} (got {count}). Give as many."
    )


def test_check_samples_of_two_sizes_are_refused() -> None:
    require_one_size(samples(2, 5), samples(3, 5), "sample c")
    with pytest.raises(InputError) as caught:
        require_one_size(samples(2, 5), samples(1, 6), "sample c")
    assert str(caught.value) == (
        "check: samples must be of one size (got [5] for input 'x' at first and [6] at sample c). Resize or crop them; "
        "other sizes that inputs declare are checked beside."
    )


@pytest.mark.parametrize(
    ("columns", "last", "expected"),
    [({"a": 4, "b": 5, "c": 9}, 4, "b"), ({"a": 4, "b": 5}, 5, "a"), ({"a": 1, "b": 5}, -1, "a"), ({}, 3, "")],
)
def test_labels_are_about_the_first_output_with_a_class_for_each(
    columns: dict[str, int], last: int, expected: str
) -> None:
    assert ranked_output(columns, last) == expected


@pytest.mark.parametrize("profiles", [((3, 4), (6, 8)), ((6, 8), (3, 4))])
def test_a_rest_is_filled_up_to_the_smallest_batch_that_any_profile_takes(
    profiles: tuple[tuple[int, int], ...],
) -> None:
    ranges = tuple({"N": DimRange(low, high, high)} for low, high in profiles)
    how = Batching((TensorSpec("x", "float32", ("N", 2), {"N": DimRange(3, 8, 8)}),), (), 8, ranges)
    pieces = [(len(piece["x"]), count) for piece, count in how.pieces(samples(2, 2))]
    assert pieces == [(3, 2)]


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        (("N", 3, "H"), 0, "[N, 3, H], H 2 to 9"),
        (("Q", "N"), 1, "[Q, N], Q 4 to 6"),
        (("Q",), None, "[Q], Q 4 to 6"),
        (("H", 5), None, "[H, 5], H 2 to 9"),
        ((8, 3), 0, "[8, 3]"),
    ],
)
def test_a_bindings_shape_is_said_without_the_range_of_its_batch(
    shape: tuple[int | str, ...], axis: int | None, expected: str
) -> None:
    every = {"N": DimRange(1, 4, 8), "H": DimRange(2, 4, 9), "Q": DimRange(4, 5, 6)}
    dims = {d: every[d] for d in shape if isinstance(d, str)}
    assert TensorSpec("x", "float32", shape, dims, axis).described == expected
