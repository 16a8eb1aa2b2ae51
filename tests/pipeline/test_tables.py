"""Tables read from files, and what is said of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import get_args

import pytest

from calib.audit import Audit
from calib.corrections import Corrections, Step
from calib.errors import CalibError
from calib.table import CalibrationTable
from trtpipe.job.sections import Correction, Precision
from trtpipe.pipeline.cache.reads import Read
from trtpipe.pipeline.tables import overlap_warnings, read_table, table_notes


def test_a_corrected_table_is_none_for_a_job_without_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(
        algorithm="mse", percentile=99.99, corrections=SimpleNamespace(steps=(1, 2)), require=lambda *_: None
    )
    monkeypatch.setattr(CalibrationTable, "load", lambda path: table)
    calibration = SimpleNamespace(table="a.json", algorithm="auto", percentile=99.99, corrections=True)
    assert read_table(calibration, {}) is table  # type: ignore[arg-type]
    calibration.corrections = False
    with pytest.raises(CalibError) as caught:
        read_table(calibration, {})  # type: ignore[arg-type]
    assert str(caught.value) == (
        "a.json: must be without corrections for calibration.corrections: false (got 2 steps). Leave the key out, or "
        "calibrate again."
    )


def test_a_read_of_an_unknown_kind_is_none_of_ours() -> None:
    assert Read.from_plain(["file", "/a"]) == Read("file", "/a")
    with pytest.raises(ValueError, match=r"kind must be .*file.* \(got 'smell'\)"):
        Read.from_plain(["smell", "/a"])


MODES = ({"int8_mode": True}, {"fp8_mode": True}, {"nvfp4_mode": True}, {"weights": "int4"})


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("modes", [m for n in range(1, 5) for m in itertools.combinations(MODES, n)], ids=str)
def test_a_job_is_not_told_of_what_its_formats_do_not_use(modes: tuple[dict[str, object], ...], kept: bool) -> None:
    """INT8's thresholds and corrections are no matter of FP8 and 4 bits; the data and changes of the graph are."""
    precision = Precision.model_validate({k: v for m in modes for k, v in m.items()})
    skipped, threshold = "1 bad samples were skipped; first: x.png: no image", "a:input: percentile leaves 3.0 dB"
    audit = Audit(
        batches=1, batch_size=1, coverage=None, skipped=("x.png: no image",), tensors={}, warnings=(threshold, skipped)
    )
    steps = tuple(Step(name=n, kept=kept, before_db=20.0, after_db=21.0) for n in get_args(Correction))
    table = CalibrationTable("mse", 99.99, {"a:input": 1.0}, {}, {}, "", audit, corrections=Corrections(steps, {}))
    notes = table_notes(SimpleNamespace(precision=precision), table)  # type: ignore[arg-type]
    if precision.int8_mode:
        assert notes == (threshold, skipped, *(f"calibration: {s}" for s in steps))
    else:
        assert notes == (skipped, *(f"calibration: {s}" for s in steps[:2] if kept))


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_check_samples_that_the_table_was_made_from_are_named(shared: int) -> None:
    """By content, whatever they were called, and as often for a table that was read as for one that was made."""
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors={}, warnings=())
    calibrated = {f"train/{i}.png": f"{i:064x}" for i in range(5)}
    table = CalibrationTable("mse", 99.99, {}, {}, calibrated, "", audit)
    digests = (*list(calibrated.values())[:shared], *(f"{i:064x}" for i in range(100, 104 - shared)))
    check = SimpleNamespace(ids=("a", "b", "c", "d"), sample_digests=digests, sample_count=4)
    assert overlap_warnings(None, check) == ()  # type: ignore[arg-type]
    assert overlap_warnings(table, check) == (  # type: ignore[arg-type]
        ()
        if not shared
        else (f"{shared} of 4 check samples were calibrated on too (first: a); the check is the weaker for it",)
    )
