"""INT8 on trained networks: trtpipe, ModelOpt and ONNX Runtime from one FP32 graph and the same photographs.

    make bench-accuracy [PEER_PYTHON=/opt/modelopt/bin/python]      (benchmarks/fetch_zoo.py fetches the networks)
    python benchmarks/accuracy.py [--only mobilenet_v2 ...] [--results benchmarks/results]

Every way quantizes on the same 128 photographs, none of which is in an evaluation set; its graph is executed by ONNX
Runtime as it is written, no optimization, and compared with the FP32 network's outputs on photographs that are held
out, on labelled photographs and, for classifiers, on CIFAR-10. `accuracy.json` is written after each row, and rows that
are in it are not measured again: delete it to start over. docs/accuracy-zoo.md is made from it.

The networks of CHOSEN_ON were looked at while trtpipe's defaults were chosen, the others were not. Peers need
onnxruntime, which trtpipe's environment has, and modelopt, which wants one of its own: PEER_PYTHON is its Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accuracy_page
import numpy as np
import peers
import zoo

ROOT = Path(__file__).resolve().parents[1]
#: CIFAR-10 images that a classifier answers.
CIFAR_SAMPLES = 300
BATCH = 8
INT8 = {"int8_mode": True}
HALF = {"int8_mode": True, "fp16_mode": True}
ALGORITHMS = ("entropy_2", "entropy", "minmax", "percentile", "mse")


@dataclass(frozen=True)
class Way:
    """One way to quantize: trtpipe with parts of a job, or another tool by one of its methods."""

    name: str
    precision: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    target: str = "onnxruntime"
    peer: tuple[str, str] | None = None


FP32 = Way("FP32")
OFF = {"corrections": []}
WAYS = (
    Way("trtpipe, default", INT8),
    Way("trtpipe auto, no corrections", INT8, OFF),
    *(Way(f"trtpipe {a}, no corrections", INT8, {"algorithm": a, **OFF}) for a in ALGORITHMS),
    Way("trtpipe, default, FP16 allowed, for TensorRT", HALF),
    Way("trtpipe, default, FP16 allowed, for TensorRT-RTX", HALF, target="tensorrt_rtx"),
    *(Way(f"{tool} {method}", peer=(tool, method)) for tool in peers.METHODS for method in peers.METHODS[tool]),
)


@dataclass(frozen=True)
class Sets:
    """What a network is calibrated and evaluated on: file of the calibration images, and inputs by set."""

    calibration: Path
    evaluation: Mapping[str, zoo.Array]
    labels: Mapping[str, zoo.Array]


def make_sets(name: str, folder: Path) -> Sets:
    """The photographs of `zoo.split` and, for a classifier, CIFAR-10, as arrays of that network's inputs."""
    photos = zoo.split()
    calibration = folder / "calibration.npy"
    np.save(calibration, zoo.batch(name, photos.calibration))
    evaluation = {"held_out": zoo.batch(name, photos.held_out), "labelled": zoo.batch(name, photos.labelled)}
    labels = {"labelled": np.asarray(photos.labels)}
    if not zoo.NETWORKS[name].dense:
        evaluation["cifar10"], labels["cifar10"] = zoo.cifar10(name, CIFAR_SAMPLES)
    return Sets(calibration, evaluation, labels)


def job(name: str, way: Way, sets: Sets, folder: Path) -> Path:
    """The job file of one way of trtpipe's."""
    size = zoo.NETWORKS[name].size
    content = {
        "name": "built",
        "model": {"factory": "zoo:create", "args": {"name": name}},
        "inputs": {"image": {"shape": ["N", 3, size, size], "N": {"min": 1, "opt": BATCH, "max": 64}}},
        "outputs": {"out": {}},
        "precision": dict(way.precision),
        "build": {"target": way.target},
        "check": {"arrays": str(sets.calibration), "samples": 2, "limits": {"cosine_min": 0.0}},
    }
    if way.precision:
        content["calibration"] = {"arrays": str(sets.calibration), "batch_size": BATCH, **way.calibration}
    path = folder / "job.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def build(name: str, way: Way, sets: Sets, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A function from inputs to outputs, and what is known of how it was made: seconds, engine_bytes."""
    from trtpipe.api import build as run
    from trtpipe.api import load

    built = run(job(name, way, sets, folder), folder / "out")
    model = load(folder / "out/built", graph=True)
    manifest = built.bundle.manifest
    int8 = sum(layer.precision == "int8" for layer in manifest.layers)
    facts: dict[str, Any] = {"stages": {k: round(v, 1) for k, v in built.seconds.items()}, "int8_layers": int8}
    if way.target != "onnxruntime":
        facts["engine_bytes"] = manifest.files[manifest.engine_file].size
    return model, facts


def session(data: bytes) -> Any:
    """A function that executes an ONNX file as it is written."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    made = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    name = made.get_inputs()[0].name
    return lambda x: made.run(None, {name: x})[0]


def outputs(run: Any, sets: Sets) -> dict[str, zoo.Array]:
    """float64 outputs by set."""
    return {
        key: np.concatenate([run(x[k : k + BATCH]) for k in range(0, len(x), BATCH)]).astype(np.float64)
        for key, x in sets.evaluation.items()
    }


def figures(name: str, got: Mapping[str, zoo.Array], fp32: Mapping[str, zoo.Array], sets: Sets) -> dict[str, Any]:
    """SQNR in dB by set; of classifiers the agreement with FP32 over all sets and the accuracy by set, as counts."""
    found: dict[str, Any] = {"sqnr_db": {}}
    for key, reference in fp32.items():
        noise = float(((got[key] - reference) ** 2).sum())
        found["sqnr_db"][key] = 10 * np.log10(float((reference**2).sum()) / noise) if noise else None
    if zoo.NETWORKS[name].dense:
        found["mae"] = {key: float(np.abs(got[key] - reference).mean()) for key, reference in fp32.items()}
        return found
    equal = [got[key].argmax(1) == reference.argmax(1) for key, reference in fp32.items()]
    found["agreement"] = [int(sum(e.sum() for e in equal)), sum(len(e) for e in equal)]
    right = {
        "labelled": got["labelled"].argmax(1) == sets.labels["labelled"],
        "cifar10": zoo.cifar10_scores(got["cifar10"]).argmax(1) == sets.labels["cifar10"],
    }
    found["correct"] = {key: [int(r.sum()), len(r)] for key, r in right.items()}
    return found


def peer(way: Way, fp32: Path, sets: Sets, folder: Path) -> tuple[Any, dict[str, Any]]:
    """As `build`, by another tool in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed, or is not installed there.
    """
    assert way.peer is not None
    python = os.environ.get("PEER_PYTHON", sys.executable)
    program = str(Path(__file__).with_name("peers.py"))
    out = folder / "peer.onnx"
    command = [python, program, *way.peer, str(fp32), str(sets.calibration), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return session(out.read_bytes()), json.loads(done.stdout.splitlines()[-1])


def measure(name: str, ways: tuple[Way, ...], page: accuracy_page.Results) -> None:
    """Measure a network every way that is not in the results yet."""
    missing = [w for w in ways if not page.has(name, w.name)]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sets = make_sets(name, folder)
        exact, _ = build(name, FP32, sets, folder)
        data = exact_graph(folder)
        fp32 = folder / "fp32.onnx"
        fp32.write_bytes(data)
        reference = outputs(session(data), sets)
        page.add(name, FP32.name, figures(name, reference, reference, sets))
        for way in missing:
            began = time.perf_counter()
            try:
                model, facts = peer(way, fp32, sets, folder) if way.peer is not None else build(name, way, sets, folder)
            except subprocess.CalledProcessError as error:
                reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"{name:20} {way.name:48} not measured: {reason}", flush=True)
                continue
            facts.setdefault("seconds", time.perf_counter() - began)
            run = model if way.peer is not None else session_of(way, model, folder)
            page.add(name, way.name, figures(name, outputs(run, sets), reference, sets) | facts)
            print(accuracy_page.line(name, way.name, page.row(name, way.name)), flush=True)


def exact_graph(folder: Path) -> bytes:
    """The ONNX file of the bundle that was built last for target onnxruntime."""
    return (folder / "out/built/model.onnx").read_bytes()


def session_of(way: Way, model: Any, folder: Path) -> Any:
    """How a bundle's graph is executed: INT8 beside FP32 like any tool's; FP16 with its results rounded, by trtpipe."""
    if way.precision == INT8:
        return session(exact_graph(folder))
    return lambda x: next(iter(model.run({"image": x}).values()))


def main() -> None:
    """Measure, print a row as it is done, and write the results and their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=zoo.NETWORKS, default=list(zoo.NETWORKS))
    parser.add_argument("--ways", nargs="+", default=[w.name for w in WAYS], help="names of rows")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/accuracy-zoo.md")
    args = parser.parse_args()
    page = accuracy_page.Results(
        args.results / "accuracy.json", {"machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    )
    for name in args.only:
        measure(name, tuple(w for w in WAYS if w.name in args.ways), page)
    args.page.write_text(accuracy_page.document(page))


if __name__ == "__main__":
    main()
