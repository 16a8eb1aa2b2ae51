"""What sensitivity and tuning cost on ResNet-50: forward-pass equivalents, evaluations, seconds.

    python benchmarks/tuning.py [--samples 32] [--size 224] [--no-tune]

timm's ResNet-50 with random weights (nothing is downloaded), its batch norms set by one pass over the photos, which are
random crops of scikit-learn's two sample photos. Work is counted in multiply-accumulates and in operations executed,
since seconds depend on what else the machine does. Ends with 1 when sensitivity takes over 80 forward passes over its
samples, or tuning over 10 full evaluations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MOST_PASSES, MOST_EVALUATIONS = 80, 10

JOB = """\
name: resnet50
model: {factory: "tuning:resnet50", args: {size: SIZE}}
inputs:
  image: {dtype: float32, shape: [N, 3, SIZE, SIZE], N: {min: 1, opt: 8, max: 32}}
outputs:
  logits: {dtype: float32}
precision: {fp16_mode: true, int8_mode: true}
calibration: {arrays: calib.npz, batch_size: 8, algorithm: entropy_2}
build: {target: onnxruntime}
check: {arrays: check.npz, batch_size: 8, limits: {sqnr_db_min: LIMIT}}
"""


def photos(count: int, seed: int, size: int) -> np.ndarray[Any, Any]:
    """float32 [count, 3, size, size]: normalised random crops of the two photos, half of them mirrored."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(seed)
    images = [image.astype(np.float32) / 255 for image in load_sample_images().images]
    crops = []
    for k in range(count):
        image = images[k % len(images)]
        top, left = (int(rng.integers(0, extent - size + 1)) for extent in image.shape[:2])
        crop = image[top : top + size, left : left + size]
        crops.append((crop[:, ::-1] if rng.random() < 0.5 else crop).transpose(2, 0, 1))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return np.ascontiguousarray((np.stack(crops) - mean[:, None, None]) / std[:, None, None], np.float32)


def resnet50(size: int) -> Any:
    """ResNet-50, seeded, with batch norms that fit the photos and residual branches that do something."""
    import timm
    import torch

    torch.manual_seed(0)
    model = timm.create_model("resnet50", pretrained=False, zero_init_last=False)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.from_numpy(photos(8, 2, size)))
    return model.eval()


def main() -> int:
    """Measure, print, judge."""
    from trtpipe.batching import Batching
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.pipeline.stages import calibrate, prepare
    from trtpipe.pipeline.tune import tune_from
    from trtpipe.progress import Silent
    from trtpipe.quantization.diagnose import diagnose, first_samples
    from trtpipe.quantization.partial import Partial
    from trtpipe.report.tune_page import page

    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="pixels; the share of each module hardly depends on it")
    parser.add_argument("--limit", default="0", help="sqnr_db_min of the budget; 0: 3 dB above what plain INT8 has")
    parser.add_argument("--no-tune", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "calib.npz", image=photos(options.samples, 0, options.size))
        np.savez(folder / "check.npz", image=photos(options.samples, 1, options.size))
        path = folder / "job.yaml"
        text = JOB.replace("SIZE", str(options.size))
        path.write_text(text.replace("LIMIT", "1"))
        job = read_job(path)
        stages = Stages(Silent())
        prepared = prepare(job, stages)
        table = calibrate(job, prepared, stages)
        assert table is not None
        machine = Partial(prepared.captured.graph)
        began = time.perf_counter()
        how = Batching(prepared.inputs, prepared.outputs, job.batch_size(job.check))
        for sample in first_samples(prepared.check_source, how, options.samples):
            machine.finish(0, machine.inputs(sample.inputs), {})
        bare = time.perf_counter() - began
        found = diagnose(
            job, prepared.captured, prepared.check_source, table.amax, Silent(), prepared.needed_ranges(job.precision)
        )
        print(f"{options.size} x {options.size} pixels")
        print(f"modules {len(found.modules)}, samples {found.samples}, GMACs a sample {found.macs / 1e9:.2f}")
        print(f"bare forward pass over them: {bare:.1f} s")
        print(f"sensitivity: {found.passes:.1f} passes by MACs, {found.node_passes:.1f} by operations executed")
        sys.stdout.flush()
        print(f"             {found.seconds:.1f} s, {found.seconds / bare:.1f} bare passes by the clock")
        for m in found.modules[:5]:
            print(f"  {m.module:<24} {m.source:<28} {m.sqnr_db:.1f} dB, own {m.own_sqnr_db:.1f} dB")
        good = max(found.passes, found.node_passes) <= MOST_PASSES
        if not options.no_tune:
            limit = float(options.limit)
            if not limit:
                path.write_text(text.replace("LIMIT", "200"))
                plain = tune_from(
                    read_job(path), prepared, table, folder / "plain", stages, evaluations=1
                ).tuned.trials[0]
                limit = round((plain.value("sqnr_db") or 0.0) + 3, 1)
            path.write_text(text.replace("LIMIT", str(limit)))
            began = time.perf_counter()
            result = tune_from(read_job(path), prepared, table, folder / "out", stages)
            print(f"tune: {len(result.tuned.trials)} evaluations, {time.perf_counter() - began:.0f} s")
            print(page("resnet50", result.tuned, read_job(path).check.limits))
            good = good and len(result.tuned.trials) <= MOST_EVALUATIONS
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
