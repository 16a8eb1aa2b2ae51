"""What a job gives and does not use is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtpipe.job.load import read_jobs

JOB = """
name: a
model: {{factory: "net:net"}}
inputs: {{x: {{shape: [1, 3, 8, 8]}}}}
outputs: {{y: {{}}}}
precision: {{{precision}}}
calibration: {{images: photos, transform: {{resize: 8}}{calibration}}}
build: {{target: {target}}}
check: {check}
"""


@pytest.mark.parametrize(
    ("precision", "calibration", "target", "check", "notes"),
    [
        ("", "", "onnxruntime", "{arrays: x.npy}",
         ("calibration: not used, since precision.int8_mode and precision.fp16_mode are false",)),
        ("", "", "onnxruntime", "{images: photos}",
         ("calibration: only its transform and its class folders, where it has any, are used, by the check, since "
          "precision.int8_mode and precision.fp16_mode are false",)),
        ("", "", "onnxruntime", "{images: photos, transform: {resize: 8}}",
         ("calibration: only its class folders, where it has any, are used, by the check, since "
          "precision.int8_mode and precision.fp16_mode are false",)),
        ("", "", "onnxruntime", "{images: photos, labels: names.txt}",
         ("calibration: only its transform is used, by the check, since precision.int8_mode and precision.fp16_mode "
          "are false",)),
        ("", "", "onnxruntime", "{images: photos, labels: names.txt, transform: {resize: 8}}",
         ("calibration: not used, since precision.int8_mode and precision.fp16_mode are false",)),
        ("fp16_mode: true", ", algorithm: mse, corrections: false", "onnxruntime", "{images: photos}",
         ("calibration.algorithm: not used, since precision.int8_mode is false",)),
        ("fp16_mode: true", ", algorithm: mse, corrections: true", "onnxruntime", "{images: photos}",
         ("calibration.algorithm, calibration.corrections: not used, since precision.int8_mode is false",)),
        ("fp16_mode: true", ", corrections: false", "onnxruntime", "{images: photos}", ()),
        ("fp16_mode: true", "", "onnxruntime", "{images: photos}", ()),
        ("int8_mode: true", "", "onnxruntime", "{images: photos}", ()),
        ("int8_mode: true", ", algorithm: minmax, corrections: true", "tensorrt, quantization: implicit",
         "{images: photos}", ("calibration.corrections: not used, since build.quantization is implicit",)),
        ("fp8_mode: true", ", corrections: true", 'tensorrt_rtx, compute_capability: ["8.9"]', "{images: photos}",
         ("calibration.corrections: not used, since precision.int8_mode is false",)),
        ("nvfp4_mode: true", ", algorithm: percentile, percentile: 50", 'tensorrt_rtx, compute_capability: ["12.0"]',
         "{images: photos}",
         ("calibration.algorithm, calibration.percentile: of the table alone, no scale of this job, since "
          "precision.int8_mode is false",)),
        ("fp8_mode: true, int8_mode: true", ", algorithm: mse", 'tensorrt_rtx, compute_capability: ["8.9"]',
         "{images: photos}", ()),
    ],
)  # fmt: skip
def test_what_the_calibration_section_gives_in_vain(
    precision: str, calibration: str, target: str, check: str, notes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(precision=precision, calibration=calibration, target=target, check=check))
    assert read_jobs(path, paths_exist=False)[0].unused() == notes


@pytest.mark.parametrize("precision", ["weights: int4", "fp16_mode: true"])
def test_a_table_that_nothing_reads_is_said_to_be_so_by_every_format_that_would_read_it(
    precision: str, tmp_path: Path
) -> None:
    text = JOB.format(
        precision=precision, calibration="", target='tensorrt_rtx, compute_capability: ["8.9"]',
        check="{images: photos, transform: {resize: 8}}",
    )  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("{images: photos, transform: {resize: 8}}", "{table: t.json}", 1))
    assert read_jobs(path, paths_exist=False)[0].unused() == (
        "calibration.table: not used, since precision has none of int8_mode, fp8_mode and nvfp4_mode",
    )


@pytest.mark.parametrize(
    ("precision", "held"),
    [
        ("fp8_mode: true", "equalization and smoothing"),
        ("fp8_mode: true, weights: int4", "equalization and smoothing"),
        ("fp8_mode: true, int8_mode: true", "they"),
        ("int8_mode: true", "they"),
    ],
)
def test_what_of_a_tables_corrections_is_used(precision: str, held: str, tmp_path: Path) -> None:
    text = JOB.format(
        precision=precision, calibration="", target='tensorrt_rtx, compute_capability: ["8.9"]', check="{arrays: x.npy}"
    )
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("images: photos, transform: {resize: 8}", "table: t.json, corrections: [bias]"))
    assert read_jobs(path, paths_exist=False)[0].unused() == (
        f"calibration.corrections: {held} are used where calibration.table holds them, and none is made",
    )
