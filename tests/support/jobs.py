"""Texts of job files."""

from pathlib import Path

GOOD = """\
name: digits
model:
  factory: torch.nn:Identity
  args: {}
  weights: w.safetensors
inputs:
  image: {dtype: float32, shape: [N, 1, 32, 32], N: {min: 1, opt: 8, max: 32}}
outputs:
  logits: {dtype: float32}
precision:
  fp16_mode: true
  int8_mode: true
calibration:
  images: calib
  transform: {resize: [32, 32], grayscale: true, normalize: {mean: [0.5], std: [0.5]}}
  algorithm: entropy_2
build:
  compute_capability: [8.6, 12.0]
check:
  images: val
  limits: {cosine_min: 0.99}
"""

#: Its input, as it stands there.
INPUT = "{dtype: float32, shape: [N, 1, 32, 32], N: {min: 1, opt: 8, max: 32}}"


def good_folder(folder: Path) -> Path:
    """`folder` with the files that `GOOD` names."""
    for name in ("calib", "val"):
        (folder / name / "0").mkdir(parents=True)
        (folder / name / "0" / "a.png").write_bytes(b"")
    (folder / "w.safetensors").write_bytes(b"")
    return folder


def write(folder: Path, *edits: tuple[str, str]) -> Path:
    """The job file `GOOD` in `folder`, with each text, which is there once, replaced by another."""
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "job.yaml"
    path.write_text(text)
    return path
