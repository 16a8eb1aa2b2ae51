"""PyTorch's stages of a build on this machine's GPU and on its CPU: how far apart they are, and how long they take.

    ZOO=data/zoo python benchmarks/devices.py [--networks mobilenet_v2 ...] [--samples 32] [--results FOLDER]

For each trained network of `zoo`: the baseline's outputs, amax of every activation and the ranges for FP16, computed
on both devices from the same photographs. Written to <results>/devices-<GPU>-<date>.json. Ends with 3 where no GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import gpu_page
import numpy as np
import zoo


def main() -> int:
    """Measure every network, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(zoo.NETWORKS), default=list(zoo.NETWORKS))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--results", type=Path, default=engines.ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    from trtpipe.trt import driver

    if problem := driver.probe().problem:
        print(gpu_page.NO_GPU.format(problem), file=sys.stderr)
        return 3
    path = engines.results_path("devices", args.results)
    for name in args.networks:
        rows = engines.rows_of(path, without=name)
        engines.write(path, [*rows, compared(name, args.samples)])
    print(path.read_text(), end="")
    return 0


def compared(name: str, samples: int) -> dict[str, Any]:
    """Both devices' figures of one network and the largest differences between them."""
    found = {device: stages(name, samples, device) for device in ("cpu", "cuda")}
    here, there = found["cpu"], found["cuda"]
    row: dict[str, Any] = {"network": name, "samples": samples, "tensors": len(here["amax"])}
    row["seconds"] = {device: one["seconds"] for device, one in found.items()}
    largest = float(np.abs(here["outputs"]).max())
    row["outputs_max_abs_of_largest"] = float(np.abs(there["outputs"] - here["outputs"]).max()) / largest
    for key in ("amax", "ranges"):
        assert there[key].keys() == here[key].keys()
        off = {k: abs(there[key][k] / v - 1) for k, v in here[key].items() if v}
        row[f"{key}_largest_relative"] = max(off.values(), default=0.0)
        row[f"{key}_of_it"] = max(off, key=off.__getitem__, default="")
    return row


def stages(name: str, samples: int, device: str) -> dict[str, Any]:
    """Outputs [S, ...], amax and ranges by name, and seconds by stage, on one device."""
    from trtpipe.job.load import read_job
    from trtpipe.model.computing import VARIABLE
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.pipeline.stages import calibrate, prepare
    from trtpipe.progress import Silent

    os.environ[VARIABLE] = device
    photos = zoo.split()
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "calibration.npy"), zoo.batch(name, photos.calibration[:samples]))
        np.save(Path(folder, "check.npy"), zoo.batch(name, photos.held_out[:samples]))
        content = engines.content(name)
        content["calibration"]["corrections"] = False
        Path(folder, "job.yaml").write_text(json.dumps(content))
        job = read_job(Path(folder, "job.yaml"))
        made, seconds = Stages(Silent()), {}

        def timed(step: str, make: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            value = make()
            seconds[step] = round(time.perf_counter() - began, 2)
            return value

        prepared = timed("prepare", lambda: prepare(job, made))
        table = timed("calibrate", lambda: calibrate(job, prepared, made))
        ranges = timed("ranges", lambda: prepared.ranges)
        assert prepared.device.startswith(device)
        return {"outputs": prepared.baseline.outputs["out"], "amax": table.amax, "ranges": ranges, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
