"""Corrections beside the table: kept whole, read back, refused when they are others."""

import json

import numpy as np
import pytest
from test_table import made

from calib.corrections import Corrections, Step, corrections_path
from calib.errors import CalibError
from calib.table import CalibrationTable

STEPS = (
    Step(name="equalization", kept=True, before_db=12.0, after_db=16.25, detail="3 groups of channels"),
    Step(name="bias", kept=False, before_db=16.25, after_db=9.0),
)
ARRAYS = {"scale:0:conv.weight": np.array([1.0, 2.0], np.float32), "levels:conv.weight": np.array([[-3, 127]], np.int8)}


@pytest.fixture
def saved(tmp_path):
    made().corrected({"conv1:input": 1.25}, Corrections(STEPS, ARRAYS)).save(tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def test_what_is_read_is_what_was_written(saved):
    table = CalibrationTable.load(saved)
    assert table.amax["conv1:input"] == 1.25
    assert table.amax[":output"] == made().amax[":output"]
    assert table.corrections.steps == STEPS
    assert {k: v.tolist() for k, v in table.corrections.arrays.items()} == {k: v.tolist() for k, v in ARRAYS.items()}
    assert table.digest == json.loads(saved.read_text())["digest"]


def test_the_audit_is_of_the_changed_threshold(saved):
    before, after = made().audit.tensors, CalibrationTable.load(saved).audit.tensors
    assert after["conv1:input"].clipped > before["conv1:input"].clipped
    assert after[":output"] == before[":output"]


def test_a_step_says_what_it_gained():
    assert str(STEPS[0]) == "equalization: kept, 12.0 to 16.2 dB on unseen samples (3 groups of channels)"
    assert str(STEPS[1]) == "bias: rejected, 16.2 to 9.0 dB on unseen samples"


def test_a_table_without_corrections_is_of_version_1_and_names_none(tmp_path):
    made().save(tmp_path / "calibration.json")
    raw = json.loads((tmp_path / "calibration.json").read_text())
    assert raw["version"] == 1
    assert "corrections" not in raw


def test_a_reader_of_version_1_refuses_a_table_with_corrections(saved):
    assert json.loads(saved.read_text())["version"] == 2


def test_steps_that_were_all_rejected_need_no_file(tmp_path):
    made().corrected({}, Corrections(STEPS[1:], {})).save(tmp_path / "calibration.json")
    assert not corrections_path(tmp_path / "calibration.json").exists()
    assert CalibrationTable.load(tmp_path / "calibration.json").corrections.steps == STEPS[1:]


def test_a_missing_file_is_refused(saved):
    corrections_path(saved).unlink()
    with pytest.raises(CalibError, match=r"calibration\.json needs its corrections beside it \(got No such file"):
        CalibrationTable.load(saved)


def test_another_file_is_refused(saved):
    path = corrections_path(saved)
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(CalibError, match=r"these are not the corrections of calibration\.json: the digest differs"):
        CalibrationTable.load(saved)


def test_a_changed_step_is_seen(saved):
    saved.write_text(saved.read_text().replace('"after_db": 9.0', '"after_db": 19.0'))
    with pytest.raises(CalibError, match="must be as it was written"):
        CalibrationTable.load(saved)


def test_shards_with_corrections_are_not_merged():
    one = made(samples=("a",)).corrected({}, Corrections(STEPS, ARRAYS))
    with pytest.raises(CalibError, match=r"merge: a shard has corrections, which cannot be merged"):
        CalibrationTable.merge([one, made(samples=("b",))])


def test_another_algorithm_keeps_the_corrections():
    table = made().corrected({}, Corrections(STEPS, ARRAYS))
    found = table.recomputed("minmax").corrections
    assert (found.steps, found.arrays) == (STEPS, ARRAYS)


def test_steps_that_moved_thresholds_are_undone_by_those_of_another_algorithm():
    steps = tuple(
        Step(name=n, kept=True, before_db=1.0, after_db=2.0, detail="x") for n in ("ranges", "thresholds", "rounding")
    )
    table = made().corrected({}, Corrections(steps, {}))
    found = table.recomputed("mse").corrections
    assert [(s.name, s.kept) for s in found.steps] == [("ranges", False), ("thresholds", False), ("rounding", True)]
    assert [s.detail for s in found.steps] == ["x; undone by thresholds of mse"] * 2 + ["x"]


def test_the_bytes_of_the_file_are_not_kept_beside_the_arrays():
    held = Corrections(STEPS, ARRAYS)
    assert held.sha256
    assert held.packed
    assert not any(isinstance(value, bytes) for value in vars(held).values())
