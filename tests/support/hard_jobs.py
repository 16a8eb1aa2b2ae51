"""Jobs around the network of `hard`, on small random images as arrays; corrections would repair its outlier."""

import shutil
from pathlib import Path

import numpy as np

from trtpipe.job.load import read_job

TEXT = """\
name: hard
model:
  factory: hard:net
  args: {{outlier: {outlier}}}
inputs:
  image: {{dtype: float32, shape: [N, 3, 16, 16], N: {{min: 1, opt: 4, max: 16}}}}
outputs:
  logits: {{dtype: float32}}
precision: {{fp16_mode: {fp16}, int8_mode: true, placement: all}}
calibration: {{arrays: calib.npz, batch_size: 16, algorithm: {algorithm}, corrections: false}}
build: {{target: onnxruntime}}
check:
  arrays: check.npz
  limits: {limits}
"""


def write(folder, *, outlier=1000.0, algorithm="minmax", limits="{sqnr_db_min: 20}", fp16="false", samples=48):
    """The job's path in `folder`, with its network and data beside it; labels are drawn at random."""
    rng = np.random.default_rng(0)
    shutil.copy(Path(__file__).with_name("hard.py"), folder / "hard.py")
    for name, count in (("calib", 32), ("check", samples)):
        # a smooth pattern of its own for each sample, so that samples differ and activations look like those of photos
        coarse = rng.standard_normal((count, 3, 4, 4)).astype(np.float32)
        images = np.kron(coarse, np.ones((4, 4), np.float32)) + 0.1 * rng.standard_normal((count, 3, 16, 16))
        np.savez(folder / f"{name}.npz", image=images.astype(np.float32), labels=rng.integers(0, 5, count))
    path = folder / "job.yaml"
    path.write_text(TEXT.format(outlier=outlier, algorithm=algorithm, limits=limits, fp16=fp16))
    return path


def job(folder, **choices):
    """The same, loaded."""
    return read_job(write(folder, **choices))
