"""One calibration table, every number format: engine bytes, SQNR and share of operations, for one job.

    python benchmarks/formats.py                          the ViT example
    python benchmarks/formats.py --write docs/formats.md  and the table into that page
    python benchmarks/formats.py --job my.yaml --samples 8

The job is calibrated once, for INT8 and without corrections, most of which are its alone. Each row takes that
table, quantizes the same graph, has TensorRT-RTX compile it (which needs no GPU), and
runs the very same ONNX in ONNX Runtime on the check data: nothing here was executed on a GPU.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.table import CalibrationTable
from trtpipe.job.load import read_job
from trtpipe.job.sections import NOT_QUANTIZED
from trtpipe.pipeline import stages as line
from trtpipe.pipeline.prepared import Stages
from trtpipe.progress import Silent
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.isolated import build_isolated

if TYPE_CHECKING:
    from trtpipe.job.job import Job

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: benchmarks/formats.py -->", "<!-- end: benchmarks/formats.py -->"
#: Row: (the job's modes, compute capability).
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "FP16": ({}, "8.9"),
    "INT8": ({"int8_mode": True}, "8.9"),
    "FP8": ({"fp8_mode": True}, "8.9"),
    "FP8 and INT8": ({"fp8_mode": True, "int8_mode": True}, "8.9"),
    "INT4 weights": ({"weights": "int4"}, "8.9"),
    "INT4 weights, attention in FP8": ({"weights": "int4", "fp8_mode": True}, "8.9"),
    "NVFP4 weights": ({"weights": "nvfp4"}, "12.0"),
    "NVFP4": ({"nvfp4_mode": True}, "12.0"),
    "NVFP4, attention in FP8": ({"nvfp4_mode": True, "fp8_mode": True}, "12.0"),
}


@dataclass(frozen=True)
class Row:
    """One format: what was built for which GPU, how near it is, and its operations by precision."""

    name: str
    capability: str
    engine_bytes: int
    sqnr_db: float
    operations: dict[str, int]


def variant(job: Job, modes: dict[str, Any], capability: str) -> Job:
    """The job in other formats, for one compute capability."""
    build = job.build.model_copy(update={"target": "tensorrt_rtx", "compute_capability": (capability,)})
    precision = job.precision
    if not any(modes.values()):
        precision = precision.model_copy(update={"keep": type(precision.keep)()})
    return job.model_copy(update={"precision": precision.model_copy(update={**NOT_QUANTIZED, **modes}), "build": build})


def measured(job: Job, samples: int, names: list[str]) -> list[Row]:
    """Every row, from one calibration table that went through its file."""
    stages = Stages(Silent())
    prepared = line.prepare(job, stages)
    assert job.calibration is not None, "the job must be an INT8 job"
    calibration = job.calibration.model_copy(update={"corrections": False})
    made = line.calibrate(job.model_copy(update={"calibration": calibration}), prepared, stages)
    assert made is not None, "the job must be an INT8 job"
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder, "calibration.json"))
        table = CalibrationTable.load(Path(folder, "calibration.json"))
    batch = next(iter(prepared.check_source.batches(min(samples, job.check.batch_size)))).arrays
    count = len(next(iter(batch.values())))
    rows = []
    for name in names:
        modes, capability = ROWS[name]
        one = variant(job, modes, capability)
        quantized = line.quantize(one, prepared, table if one.precision.calibrated else None, stages)
        graph = to_onnx(quantized)
        with OrtRunner(graph.data, as_written=True) as runner:
            outputs = runner.run(batch)
        noise = signal = 0.0
        for output, wide in prepared.baseline.outputs.items():
            reference = wide[:count].astype(np.float64)
            signal += float(np.square(reference).sum())
            noise += float(np.square(outputs[output].astype(np.float64) - reference).sum())
        engine = build_isolated(graph, one.build, progress=Silent(), precision=one.precision)
        wanted = ("conv", "linear", "matmul", "bmm")
        kinds: collections.Counter[str] = collections.Counter(
            x.precision for x in quantized.layers if x.op.startswith(wanted)
        )
        rows.append(Row(name, capability, len(engine.data), 10 * math.log10(signal / noise), dict(kinds)))
        print(shown(rows[-1]), flush=True)
    return rows


def shown(row: Row) -> str:
    """A row of the table."""
    total = sum(row.operations.values())
    order = ("int8", "fp8", "int4", "nvfp4", "fp16", "bf16", "fp32")
    shares = ", ".join(f"{k.upper()} {row.operations[k] / total:.0%}" for k in order if k in row.operations)
    return f"| {row.name} | {row.capability} | {row.engine_bytes / 1e6:.1f} | {row.sqnr_db:.1f} | {shares} |"


def page(rows: list[Row], job: Job) -> str:
    """The table with what it was made of."""
    head = ["| | GPU | engine, MB | SQNR, dB | convolutions, linears and matmuls |", "|---|---|---|---|---|"]
    where = f"`configs/{job.name}.yaml`, all else in FP16, every row from one `calibration.json` without corrections:"
    return "\n".join([where, "", *head, *map(shown, rows)])


def main() -> None:
    """Print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "configs" / "vit-b16-int8.yaml")
    parser.add_argument("--samples", type=int, default=4, help="check samples that SQNR is measured on")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--write", type=Path, help="page whose marked part is replaced")
    arguments = parser.parse_args()
    job = read_job(arguments.job)
    rows = measured(job, arguments.samples, arguments.rows)
    if arguments.write:
        text = arguments.write.read_text()
        new = f"{BEGIN}\n{page(rows, job)}\n{END}"
        arguments.write.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: new, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
