"""What the stages take from files that were made before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from calib.errors import CalibError
from calib.table import CalibrationTable
from trtpipe.pipeline.cache.reads import Read
from trtpipe.pipeline.stages import read_table


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
