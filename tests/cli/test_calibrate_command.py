"""`trtpipe calibrate` on a network of two convolutions."""

import json

import numpy as np
import pytest

from calib.table import CalibrationTable
from calib.table_files import histograms_path
from trtpipe.cli.main import main

NETWORK = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3), torch.nn.Flatten())
"""
JOB = """
name: small
model: {factory: small_network_to_calibrate:make}
inputs: {x: {shape: [N, 1, 8, 8], N: {min: 1, opt: 2, max: 8}}}
outputs: {y: {}}
precision: {int8_mode: true}
calibration: {arrays: x.npy, batch_size: 4, algorithm: minmax}
build: {target: onnxruntime}
check: {arrays: other.npy}
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "small_network_to_calibrate.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    for name in ("x.npy", "other.npy"):
        np.save(tmp_path / name, rng.normal(size=(10, 1, 8, 8)).astype(np.float32))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_the_table_is_written_and_its_audit_printed(job, capsys):
    folder = job.parent / "tables"
    assert main(["calibrate", str(job), "-o", str(folder)]) == 0
    path = folder / "small.calibration.json"
    table = CalibrationTable.load(path, histograms=True)
    assert sorted(p.name for p in folder.iterdir()) == [histograms_path(path).name, path.name]
    most = float(np.abs(np.load(job.parent / "x.npy")).max())
    assert table.amax["0:input"] == most
    assert set(table.digests) == {"weights", "graph", "data"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 samples in 3 batches of up to 4, minmax"
    assert lines[1].split() == ["tensor", "amax", "seen", "up", "to", "clipped", "SQNR", "dB", "halves"]
    assert lines[2].split()[:5] == ["0:input", f"{most:.4g}", f"{most:.4g}", "0.00", "%"]
    assert lines[-1].startswith("small: ")


def test_json(job, capsys):
    assert main(["calibrate", str(job), "--json", "-o", str(job.parent)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    table = CalibrationTable.load(job.parent / "small.calibration.json")
    assert found["digest"] == table.digest
    assert found["audit"]["tensors"].keys() == table.amax.keys()


def test_the_table_fits_its_own_job(job):
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.stages import Stages, calibrate, prepare
    from trtpipe.progress import Silent

    assert main(["calibrate", str(job), "-q", "-o", str(job.parent)]) == 0
    job.write_text(JOB.replace("arrays: x.npy, batch_size: 4", "table: small.calibration.json"))
    again = read_job(job)
    stages = Stages(Silent())
    table = calibrate(again, prepare(again, stages), stages)
    assert table == CalibrationTable.load(job.parent / "small.calibration.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("arrays: x.npy, batch_size: 4", "table: t.json", "t.json: is JSON, but no calibration table"),
        (
            "calibration: {arrays: x.npy, batch_size: 4, algorithm: minmax}\n",
            "",
            "calibration: the job has no calibration data",
        ),
    ],
)
def test_jobs_that_cannot_be_calibrated(job, capsys, old, new, message):
    text = JOB.replace(old, new).replace("precision: {int8_mode: true}", "precision: {int8_mode: false}")
    (job.parent / "t.json").write_text("{}")
    job.write_text(text)
    assert main(["calibrate", str(job), "-o", str(job.parent)]) == 2
    assert message in capsys.readouterr().err


def test_a_table_that_no_build_of_its_job_reads_is_said_to_be_so(job, capsys):
    """TensorRT's own calibrator finds the ranges of an implicit one."""
    text = JOB.replace("target: onnxruntime", "target: tensorrt, quantization: implicit")
    job.write_text(text.replace("N: {min: 1, opt: 2, max: 8}", "N: {min: 1, opt: 4, max: 8}"))
    assert main(["calibrate", str(job), "-q", "-o", str(job.parent)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "small: note: with build.quantization: implicit the engine gets the ranges that TensorRT's own calibrator "
        "finds, and no build reads this table"
    ]


def test_pictures_that_are_no_samples_are_said_to_be_so(job, capsys):
    """No report of a build does: half of the data could be missing from a table."""
    from PIL import Image

    for place in ("photos/a/1.png", "photos/a/2.png", "photos/3.png", "photos/a/.4.png"):
        path = job.parent / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 3).save(path)
    job.write_text(JOB.replace("arrays: x.npy, ", "images: photos, transform: {grayscale: true}, "))
    assert main(["calibrate", str(job), "-o", str(job.parent)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "2 samples in 1 batches of up to 4, minmax"
    assert "calibration.images: pictures are beside the class folders and not read" in said.err
    assert "hidden" in said.err
