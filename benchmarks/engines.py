"""What `executed: graph` is worth: engines run on this machine's GPU, against ONNX Runtime on the very same graph.

    ZOO=data/zoo python benchmarks/engines.py [--networks mobilenet_v2 ...] [--results benchmarks/results]

Each trained network of `zoo` goes down trtpipe's line once, calibrated with its defaults on the zoo's calibration
photographs, and is compiled in FP32, FP16, INT8 and FP8. Its engine and ONNX Runtime, which executes the graph that
was compiled as it is written, answer for the photographs that are held out; by TensorRT where that is installed, else
TensorRT-RTX. Written after each engine to <results>/engines-<GPU>-<date>.json and .md; networks that another run of
that day measured stay in them. Where no GPU is it ends with 3; --dry-run goes the same way without the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu
import gpu_page
import numpy as np
import torch
import zoo
from zoo_networks import Array

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.pipeline.prepared import PreparedJob, Stages

ROOT = Path(__file__).resolve().parents[1]
#: The line's precisions, by name.
PRECISIONS: dict[str, dict[str, bool]] = {
    "FP32": {},
    "FP16": {"fp16_mode": True},
    "INT8": {"int8_mode": True},
    "INT8 + FP16": {"int8_mode": True, "fp16_mode": True},
    "FP8 + FP16": {"fp8_mode": True, "fp16_mode": True},
}
BATCH = 8
COLUMNS = ("network", "precision", "engine to graph: relative L2", "largest", "SQNR dB", "same class", "graph to FP32",
           "engine to FP32", "right: FP32", "graph", "engine")  # fmt: skip


def main() -> int:
    """Measure every network, and write the table after each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(zoo.NETWORKS), default=list(zoo.NETWORKS))
    parser.add_argument("--samples", type=int, default=zoo.CALIBRATION_PHOTOS, help="photographs for calibration")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--dry-run", action="store_true", help="also where no GPU is: no engine is executed")
    args = parser.parse_args()
    from trtpipe.trt import driver

    problem = driver.probe().problem
    if problem and not args.dry_run:
        print(gpu_page.NO_GPU.format(problem), file=sys.stderr)
        return 3
    path = results_path("engines", args.results)
    for name in args.networks:
        others, rows = rows_of(path, without=name), []
        for row in measured(name, args.samples, executed=not problem):
            rows.append(row)
            write(path, [*others, *rows])
            path.with_suffix(".md").write_text(page(json.loads(path.read_text())))
    print(path.with_suffix(".md").read_text(), end="")
    return 0


def results_path(what: str, results: Path) -> Path:
    """<results>/<what>-<GPU>-<date>.json."""
    return gpu_page.dated(results, f"{what}-{gpu_page.machine()['name']}")


def rows_of(path: Path, *, without: str) -> list[dict[str, Any]]:
    """The rows that another run of the day wrote, but those of one network."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [r for r in rows if r["network"] != without]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows with the machine they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": gpu_page.machine(), "rows": rows}, indent=1) + "\n")


def measured(name: str, samples: int, *, executed: bool) -> Iterator[dict[str, Any]]:
    """A row for each precision of one network, when it is measured."""
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.pipeline.stages import calibrate, prepare
    from trtpipe.progress import Silent

    photos = zoo.split()
    paths = photos.labelled or photos.held_out
    images = zoo.batch(name, photos.held_out if zoo.NETWORKS[name].dense else paths)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "calibration.npy"), zoo.batch(name, photos.calibration[:samples]))
        np.save(Path(folder, "check.npy"), images)
        path = Path(folder, "job.yaml")
        path.write_text(json.dumps(content(name)))  # JSON is YAML
        job, stages = read_job(path), Stages(Silent())
        prepared = prepare(job, stages)
        table = calibrate(job, prepared, stages)
        labels = None if zoo.NETWORKS[name].dense else np.asarray(photos.labels)
        for precision in PRECISIONS:
            began = time.perf_counter()
            try:
                row = compared(job, prepared, table, precision, images, labels, stages, executed=executed)
            except Exception as error:  # noqa: BLE001  # whatever keeps a precision from running is its row's text
                row = {"ended": f"{type(error).__name__}: {error}"[:2000]}
            row = {"network": name, "precision": precision, **row, "seconds": time.perf_counter() - began}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def content(name: str) -> dict[str, Any]:
    """The network's job in INT8."""
    size = zoo.NETWORKS[name].size
    return {
        "name": name,
        "model": {"factory": "zoo:create", "args": {"name": name}},
        "inputs": {"image": {"shape": ["N", 3, size, size], "N": {"min": 1, "opt": BATCH, "max": BATCH}}},
        "outputs": {"out": {}},
        "precision": {"int8_mode": True, "fp16_mode": True},
        "calibration": {"arrays": "calibration.npy", "batch_size": BATCH},
        "build": {**gpu.target(), "tf32": False},
        "check": {"arrays": "check.npy", "batch_size": BATCH},
    }


def compared(
    job: Job,
    prepared: PreparedJob,
    table: CalibrationTable | None,
    precision: str,
    images: Array,
    labels: Any,
    stages: Stages,
    *,
    executed: bool,
) -> dict[str, Any]:
    """The figures of one precision."""
    from trtpipe.evaluation import metrics
    from trtpipe.pipeline.stages import compile_engine, quantize
    from trtpipe.runtime.onnxruntime import OrtRunner
    from trtpipe.trt.runtime import EngineRunner

    modes = {"int8_mode": False, "fp16_mode": False, "fp8_mode": False, **PRECISIONS[precision]}
    one = job.model_copy(update={"precision": job.precision.model_copy(update=modes)})
    used = table if one.precision.calibrated else None
    engine = compile_engine(one, prepared, quantize(one, prepared, used, stages), stages)
    assert engine.graph is not None
    batches = [images[k : k + BATCH] for k in range(0, len(images), BATCH)]
    with OrtRunner(engine.graph.data, as_written=True) as graph:
        wanted = np.concatenate([graph.run({"image": b})["out"] for b in batches])
    with torch.inference_mode():
        baseline = torch.cat([prepared.loaded.module(torch.from_numpy(b))[0] for b in batches]).numpy()
    row: dict[str, Any] = {"samples": len(images), "engine_bytes": len(engine.data)}
    row["graph_to_baseline_relative_l2"] = metrics.relative_l2(baseline, wanted)
    if labels is not None:
        row["baseline_right"] = int((baseline.argmax(1) == labels).sum())
        row["graph_right"] = int((wanted.argmax(1) == labels).sum())
    if not executed:
        return row
    with EngineRunner(engine.data) as runner:
        got = np.concatenate([runner.run({"image": b})["out"] for b in batches])
        row["notes"] = list(runner.notes)
    row["relative_l2"] = metrics.relative_l2(wanted, got)
    row["max_abs"] = metrics.max_abs(wanted, got)
    row["sqnr_db"] = metrics.sqnr_db(wanted, got)
    row["engine_to_baseline_relative_l2"] = metrics.relative_l2(baseline, got)
    if labels is not None:
        row["same_class"] = int((got.argmax(1) == wanted.argmax(1)).sum())
        row["engine_right"] = int((got.argmax(1) == labels).sum())
    return row


def page(written: dict[str, Any]) -> str:
    """The table with what it was made on."""
    about, rows = written["machine"], written["rows"]
    head = f"# Engines against their graphs: {about['name']}\n\n" + "; ".join(f"{k} {v}" for k, v in about.items())
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        if "ended" in row:
            lines.append(f"| {row['network']} | {row['precision']} | {row['ended'].splitlines()[0]} |" + " |" * 8)
            continue
        cells = [row["network"], row["precision"]]
        for key, shown in (
            ("relative_l2", "{:.2g}"),
            ("max_abs", "{:.2g}"),
            ("sqnr_db", "{:.1f}"),
            ("same_class", "{}"),
            ("graph_to_baseline_relative_l2", "{:.2g}"),
            ("engine_to_baseline_relative_l2", "{:.2g}"),
            ("baseline_right", "{}"),
            ("graph_right", "{}"),
            ("engine_right", "{}"),
        ):
            value = shown.format(row[key]) if key in row else "-"
            cells.append(f"{value} of {row['samples']}" if key in ("same_class",) and key in row else value)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([head, "", *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
