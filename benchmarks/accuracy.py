"""INT8 on trained networks: trtpipe, ModelOpt and ONNX Runtime from one FP32 graph and the same photographs.

    make bench-accuracy [PEER_PYTHON=peers/bin/python]      (benchmarks/fetch_zoo.py fetches the networks)
    python benchmarks/accuracy.py [--only mobilenet_v2 ...] [--results benchmarks/results]

Every way quantizes on the same 128 photographs, none of which is in an evaluation set; its graph is executed by ONNX
Runtime as it is written, no optimization, and compared with the FP32 network's outputs on photographs that are held
out, on labelled photographs and, for classifiers, on CIFAR-10. accuracy.json is written after each row, and rows that
are in it are not measured again: delete it to start over. docs/accuracy-zoo.md is made from it.

Peers need onnxruntime, which trtpipe's environment has, and modelopt, which wants one of its own: PEER_PYTHON is its
Python. What is not installed there is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import accuracy_page
import numpy as np
import peers
import zoo
from zoo_networks import Array

ROOT = Path(__file__).resolve().parents[1]
#: CIFAR-10 images that a classifier answers.
CIFAR_SAMPLES = 300
BATCH = 8
#: Calibration samples whose ranges decide what FP16 can hold.
RANGE_BATCHES = 8


@dataclass(frozen=True)
class Way:
    """One row: trtpipe by an algorithm, in a precision, for a target; or a method of another tool."""

    name: str
    algorithm: str = ""
    corrections: bool = False
    half: bool = False
    target: Literal["onnxruntime", "tensorrt", "tensorrt_rtx"] = "onnxruntime"
    peer: tuple[str, str] | None = None


NAMED = ("entropy_2", "entropy", "minmax", "percentile", "mse")
WAYS = (
    Way("trtpipe (default)", "auto", corrections=True),
    *(Way(f"{tool} {method}", peer=(tool, method)) for tool in peers.METHODS for method in peers.METHODS[tool]),
    Way("trtpipe auto, uncorrected", "auto"),
    *(Way(f"trtpipe {algorithm}, uncorrected", algorithm) for algorithm in NAMED),
    Way("trtpipe FP16", half=True, target="tensorrt_rtx"),
    Way("trtpipe INT8 + FP16, TensorRT", "auto", corrections=True, half=True, target="tensorrt"),
    Way("trtpipe INT8 + FP16, TensorRT-RTX", "auto", corrections=True, half=True, target="tensorrt_rtx"),
)


@dataclass(frozen=True)
class Sets:
    """File of the calibration images, evaluation inputs by set, and labels of the sets that have them."""

    calibration: Path
    evaluation: Mapping[str, Array]
    labels: Mapping[str, Array]


def make_sets(name: str, folder: Path) -> Sets:
    """The photographs of `zoo.split` and, for a classifier, CIFAR-10, as a network's inputs."""
    photos = zoo.split()
    calibration = folder / "calibration.npy"
    np.save(calibration, zoo.batch(name, photos.calibration))
    evaluation = {"held_out": zoo.batch(name, photos.held_out), "labelled": zoo.batch(name, photos.labelled)}
    labels = {"labelled": np.asarray(photos.labels)}
    if not zoo.NETWORKS[name].dense:
        evaluation["cifar10"], labels["cifar10"] = zoo.cifar10(name, CIFAR_SAMPLES)
    return Sets(calibration, evaluation, labels)


@dataclass
class Line:
    """trtpipe's line for one network, cut before the check: what several rows need is made once.

    `seconds` are of each step that was made.
    """

    name: str
    sets: Sets
    seconds: dict[str, float] = field(default_factory=dict)

    def job(self, way: Way) -> Any:
        """The row's job."""
        from trtpipe.job.job import Job

        size = zoo.NETWORKS[self.name].size
        data = {"arrays": str(self.sets.calibration)}
        return Job.model_validate(
            {
                "name": self.name,
                "model": {"factory": "zoo:create", "args": {"name": self.name}},
                "inputs": {"image": {"shape": ("N", 3, size, size), "N": {"min": 1, "opt": BATCH, "max": 64}}},
                "outputs": {"out": {}},
                "precision": {"int8_mode": bool(way.algorithm), "fp16_mode": way.half},
                "calibration": {**data, "batch_size": BATCH} if way.algorithm else None,
                "build": {"target": way.target},
                "check": data,
            }
        )

    def timed(self, name: str, step: Any) -> Any:
        """What a step returns; its seconds are kept. It uses memory as a stage of a build does."""
        from trtpipe.machine import freed_memory_reused

        began = time.perf_counter()
        with freed_memory_reused():
            made = step()
        self.seconds[name] = round(time.perf_counter() - began, 1)
        return made

    @cached_property
    def captured(self) -> Any:
        """The hub graph."""
        from trtpipe.model.capture import capture
        from trtpipe.model.load import load_model

        return self.timed("capture", lambda: capture(load_model(self.job(WAYS[0]))))

    def source(self) -> Any:
        """The calibration samples."""
        from trtpipe.model.data import open_calibration

        return open_calibration(self.job(WAYS[0]))

    @cached_property
    def table(self) -> Any:
        """The table of one pass, with its histograms."""
        from trtpipe.progress import Silent
        from trtpipe.quantization.calibrate import calibrate

        return self.timed(
            "calibrate",
            lambda: calibrate(
                self.captured,
                self.source(),
                batch_size=BATCH,
                algorithm="auto",
                percentile=99.99,
                digests={"weights": self.name, "graph": self.captured.digest},
                progress=Silent(),
            ),
        )

    def corrected(self, way: Way) -> tuple[Any, Any]:
        """The graph corrected for the operations that its precision has in INT8 on each target, and its table."""
        from trtpipe.job.sections import CORRECTIONS
        from trtpipe.progress import Silent
        from trtpipe.quantization.corrections import edits
        from trtpipe.quantization.corrections.correct import correct
        from trtpipe.quantization.placements import placements

        table = self.timed(
            "correct",
            lambda: correct(
                self.captured,
                self.table,
                self.source(),
                which=CORRECTIONS,
                batch_size=BATCH,
                progress=Silent(),
                placements=placements(self.job(way), self.captured),
            ),
        )
        changed = table.corrections is not None and table.corrections.arrays
        return edits.corrected(self.captured, table.corrections.arrays) if changed else self.captured, table

    @cached_property
    def ranges(self) -> dict[str, float]:
        """Largest values of every tensor, for FP16."""
        import torch

        from trtpipe.quantization.precision import observe_ranges

        images = np.load(self.sets.calibration, mmap_mode="r")
        batches = ([torch.from_numpy(images[k * BATCH : (k + 1) * BATCH].copy())] for k in range(RANGE_BATCHES))
        found: dict[str, float] = self.timed("ranges", lambda: observe_ranges(self.captured, batches))
        return found

    def made(self, way: Way) -> tuple[bytes, dict[str, Any]]:
        """The row's ONNX graph, and what is known of it."""
        from trtpipe.progress import Silent
        from trtpipe.quantization.payoff import keep_of
        from trtpipe.quantization.precision import half_dtype
        from trtpipe.quantization.quantize import quantize
        from trtpipe.routes.onnx import to_onnx
        from trtpipe.trt.isolated import build_isolated

        job, captured, table = self.job(way), self.captured, None
        if way.corrections:
            captured, table = self.corrected(way)
        elif way.algorithm:
            table = self.table if way.algorithm == "auto" else self.table.recomputed(way.algorithm)
        quantized = quantize(
            captured,
            int8=table is not None,
            half=half_dtype("fp16" if way.half else None),
            keep=keep_of(job, captured),
            amax={} if table is None else table.amax,
            ranges=self.ranges if way.half else {},
        )
        model = to_onnx(quantized)
        steps = {"calibrate", "correct"} if way.corrections else {"calibrate"} if table is not None else set()
        facts: dict[str, Any] = {
            "seconds": sum(self.seconds[s] for s in steps),
            "int8_operations": sum(layer.precision == "int8" for layer in quantized.layers),
        }
        if way.corrections and table is not None and table.corrections is not None:
            facts["steps"] = [str(step) for step in table.corrections.steps]
        if way.target == "tensorrt_rtx":
            engine = build_isolated(model, job.build, progress=Silent(), precision=job.precision)
            facts["engine_bytes"] = len(engine.data)
        return model.data, facts


def by_peer(way: Way, fp32: Path, sets: Sets, folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The graph of another tool, made by a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed, or is not installed there.
    """
    assert way.peer is not None
    out = folder / "peer.onnx"
    python = os.environ.get("PEER_PYTHON", sys.executable)
    program = str(Path(__file__).with_name("peers.py"))
    command = [python, program, *way.peer, str(fp32), str(sets.calibration), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return out.read_bytes(), json.loads(done.stdout.splitlines()[-1])


def outputs(data: bytes, sets: Sets) -> dict[str, Array]:
    """float64 outputs by set of an ONNX file that is executed as it is written; FP16 results are rounded to FP16."""
    from trtpipe.runtime.onnxruntime import OrtRunner

    def batches(x: Array) -> Iterator[Array]:
        for k in range(0, len(x), BATCH):
            yield next(iter(runner.run({"image": x[k : k + BATCH]}).values()))

    with OrtRunner(data, as_written=True) as runner:
        return {key: np.concatenate(list(batches(x))).astype(np.float64) for key, x in sets.evaluation.items()}


def figures(name: str, got: Mapping[str, Array], fp32: Mapping[str, Array], sets: Sets) -> dict[str, Any]:
    """SQNR in dB by set; of classifiers the agreement with FP32 over all sets and the accuracy by set, as counts."""
    found: dict[str, Any] = {"sqnr_db": {}}
    for key, reference in fp32.items():
        noise = float(((got[key] - reference) ** 2).sum())
        found["sqnr_db"][key] = 10 * float(np.log10((reference**2).sum() / noise)) if noise else None
    if zoo.NETWORKS[name].dense:
        found["mae"] = {key: float(np.abs(got[key] - reference).mean()) for key, reference in fp32.items()}
        return found
    equal = np.concatenate([got[key].argmax(1) == reference.argmax(1) for key, reference in fp32.items()])
    found["agreement"] = [int(equal.sum()), len(equal)]
    right = {
        "labelled": got["labelled"].argmax(1) == sets.labels["labelled"],
        "cifar10": zoo.cifar10_scores(got["cifar10"]).argmax(1) == sets.labels["cifar10"],
    }
    found["correct"] = {key: [int(r.sum()), len(r)] for key, r in right.items()}
    return found


def measure(name: str, ways: tuple[Way, ...], results: accuracy_page.Results) -> None:
    """Measure a network in every way that is not in the results yet."""
    missing = [w for w in ways if not results.has(name, w.name)]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sets = make_sets(name, folder)
        line = Line(name, sets)
        fp32 = folder / "fp32.onnx"
        fp32.write_bytes(line.made(Way("FP32"))[0])
        reference = outputs(fp32.read_bytes(), sets)
        results.add(name, "FP32", figures(name, reference, reference, sets))
        for way in missing:
            try:
                data, facts = line.made(way) if way.peer is None else by_peer(way, fp32, sets, folder)
            except subprocess.CalledProcessError as error:
                reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"{name:20} {way.name:36} not measured: {reason}", flush=True)
                continue
            results.add(name, way.name, figures(name, outputs(data, sets), reference, sets) | facts)
            print(results.line(name, way.name), flush=True)


def main() -> None:
    """Print a row as it is done; write the results and their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=zoo.NETWORKS, default=list(zoo.NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=[w.name for w in WAYS], help="rows; all when absent")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/accuracy-zoo.md")
    args = parser.parse_args()
    results = accuracy_page.Results(args.results / "accuracy.json")
    for name in args.only:
        measure(name, tuple(w for w in WAYS if args.ways is None or w.name in args.ways), results)
    args.page.write_text(accuracy_page.document(results))


if __name__ == "__main__":
    main()
