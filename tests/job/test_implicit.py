"""With implicit quantization TensorRT's own calibrators find the ranges: what they cannot do is an error of the job."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from jobs import good_folder, write

from calib.algorithms import BASES, Algorithm
from trtpipe.pipeline.validate import validate

IMPLICIT = ("  compute_capability: [8.6, 12.0]", "  target: tensorrt\n  quantization: implicit")
SAMPLES = (
    "  images: calib\n  transform: {resize: [32, 32], grayscale: true, normalize: {mean: [0.5], std: [0.5]}}\n"
    "  algorithm: entropy_2\n"
)


@pytest.mark.parametrize("route", ["onnx", "torch2trt"])
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_its_algorithms_are_tensorrts(tmp_path: Path, algorithm: str, route: str) -> None:
    edit = (IMPLICIT[0], f"{IMPLICIT[1]}\n  route: {route}")
    path = write(good_folder(tmp_path), edit, ("algorithm: entropy_2", f"algorithm: {algorithm}"))
    found = [p.message for p in validate(path, here=False) if p.message.startswith("calibration.algorithm")]
    assert found == (
        []
        if algorithm in ("auto", *BASES)
        else [
            "calibration.algorithm: must be one of entropy_2, entropy, minmax, percentile with build.quantization "
            f"implicit, as TensorRT has no other (got {algorithm}). Use explicit."
        ]
    )


@pytest.mark.parametrize("route", ["onnx", "torch2trt"])
def test_it_reads_no_table(tmp_path: Path, route: str) -> None:
    folder = good_folder(tmp_path)
    (folder / "c.json").write_text("{}")
    path = write(folder, (IMPLICIT[0], f"{IMPLICIT[1]}\n  route: {route}"), (SAMPLES, "  table: c.json\n"))
    found = [p.message for p in validate(path, here=False) if p.message.startswith("calibration.table")]
    assert (
        "calibration.table: must be left out with build.quantization implicit, where TensorRT calibrates by itself "
        f"(got {folder / 'c.json'}). Give samples, or use explicit."
    ) in found
