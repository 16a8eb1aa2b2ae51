"""build.profiles are parts of the inputs' ranges, and together take every size that these declare."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import good_folder, write

from trtpipe.job.rules import _profiles
from trtpipe.job.sections import Build, Input
from trtpipe.pipeline.validate import validate
from trtpipe.values import DimRange

ONE, REST = "{N: {min: 1, opt: 1, max: 1}}", "{N: {min: 2, opt: 8, max: 32}}"


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        (f"[{ONE}, {REST}]", None),
        (f"[{REST}, {ONE}]", None),
        (
            f"[{ONE}]",
            "build.profiles: must together take every size that inputs declares for N, 1 to 32 (got none for 2).",
        ),
        (
            f"[{REST}]",
            "build.profiles: must together take every size that inputs declares for N, 1 to 32 (got none for 1).",
        ),
        (
            "[{N: {min: 1, opt: 4, max: 64}}]",
            "build.profiles[0].N: must lie within the input's range 1 to 32 (got 1 to 64). "
            "Widen the input's range or narrow the profile.",
        ),
        (
            "[{H: {min: 1, opt: 1, max: 1}}]",
            "build.profiles[0].H: must be a dynamic dimension of the inputs, N (got H). "
            "Give it a range under inputs first.",
        ),
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_every_command_says_it_at_its_line(tmp_path: Path, profiles: str, said: str | None, here: bool) -> None:
    path = write(good_folder(tmp_path), ("build:\n", f"build:\n  profiles: {profiles}\n"))
    found = validate(path, here=here)
    assert [p.message.startswith(str(said)) for p in found] == ([] if said is None else [True])
    assert all(p.line is not None for p in found)


def test_static_inputs_have_none(tmp_path: Path) -> None:
    static = Input(shape=(8, 3))
    (broken,) = _profiles(Build(profiles=({"N": DimRange(1, 1, 1)},)), {"x": static})
    assert (broken.must, broken.got) == ("be given only for inputs with dynamic dimensions", "1")
    assert broken.hint == "Leave it out, or give a dimension of the inputs a range."


def test_one_out_of_order_hides_no_other_problem(tmp_path: Path) -> None:
    options = (
        "  profiles:\n  - {N: {min: 1, opt: 4, max: 32}}\n  - {N: {min: 5, opt: 3, max: 32}}\n  route: torch2trt\n"
    )
    path = write(good_folder(tmp_path), ("build:\n", f"build:\n{options}"))
    found = validate(path, here=False)
    said = {p.message.partition(":")[0]: p for p in found}
    wrong = said["build.profiles[1].N"]
    assert wrong.message == "build.profiles[1].N: must have min <= opt <= max (got 5, 3, 32)."
    assert wrong.line == 1 + next(k for k, line in enumerate(path.read_text().splitlines()) if "min: 5" in line)
    assert "build.target" in said or "build.route" in said


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=5))
def test_a_gap_is_the_least_size_that_no_profile_takes(parts: list[tuple[int, int]]) -> None:
    spans = [(low, min(12, low + more)) for low, more in parts]
    build = Build(profiles=tuple({"N": DimRange(low, low, high)} for low, high in spans))
    (problem, *others) = [*_profiles(build, {"x": Input(shape=("N", 3), N={"min": 1, "opt": 4, "max": 12})}), None]  # type: ignore[call-arg]
    missing = [n for n in range(1, 13) if not any(low <= n <= high for low, high in spans)]
    assert (problem is None) == (not missing)
    if problem is not None:
        assert others == [None]
        assert problem.got == f"none for {missing[0]}"
        assert problem.hint == "Add a profile, or declare only what the profiles take."
