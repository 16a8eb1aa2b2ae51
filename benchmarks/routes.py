"""The quickstart through each route: engine size, precision by layer, scales, and how far apart the routes are.

    python benchmarks/routes.py [--job configs/quickstart.yaml] [--write docs/routes.md]

Prints Markdown; --write puts it between the markers of a page. On a machine without a GPU, Torch-TensorRT and torch2trt
run through the harnesses of the tests, with the real TensorRT-RTX build; engines are then not executed. torch2trt is
measured where it can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.pipeline.prepared import PreparedJob

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

NOT = "not measured"
BEGIN, END = "<!-- begin: benchmarks/routes.py -->", "<!-- end: benchmarks/routes.py -->"
MODES = {
    "FP32": {"fp16_mode": False, "int8_mode": False},
    "FP16": {"fp16_mode": True, "int8_mode": False},
    "INT8": {"fp16_mode": False, "int8_mode": True},
    "INT8 + FP16": {"fp16_mode": True, "int8_mode": True},
}


@dataclass(frozen=True)
class Row:
    """One route in one mode. `scales` are the distinct float32 scales of its Q/DQ layers; `why` is said where there is
    no engine, `outputs` are the engine's answers where a GPU could run it."""

    route: str
    mode: str
    size_bytes: int | None
    layers: Counter[str]
    scales: np.ndarray[Any, Any]
    why: str = ""
    outputs: np.ndarray[Any, Any] | None = None


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--write", type=Path, help="a page with the two markers")
    args = parser.parse_args()
    text = page(measure(args.job))
    if args.write is None:
        print(text)
        return
    before, _, rest = args.write.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    args.write.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def measure(path: Path) -> list[Row]:
    """Every route in every mode, from one prepared model and one calibration table."""
    from trtpipe.job.load import read_job
    from trtpipe.pipeline import stages as pipeline
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.progress import Silent
    from trtpipe.trt import driver

    gpu = bool(driver.probe().devices)
    stages = Stages(Silent())
    job = read_job(path, ["build.compute_capability=[]"])
    prepared = pipeline.prepare(job, stages)
    table = pipeline.calibrate(job, prepared, stages)
    data = next(iter(prepared.check_source.batches(8))).arrays
    rows = []
    for mode, precision in MODES.items():
        overrides = [f"precision.{k}={str(v).lower()}" for k, v in precision.items()]
        for route in ("onnx", "torch_tensorrt", "torch2trt"):
            print(route, mode, file=sys.stderr)
            rows.append(one(path, overrides, route, mode, prepared, table, data, gpu))
    return rows


def one(
    path: Path,
    overrides: list[str],
    route: str,
    mode: str,
    prepared: PreparedJob,
    table: CalibrationTable | None,
    data: Any,
    gpu: bool,
) -> Row:
    """One route in one mode; whatever keeps it from being built is the row's `why`."""
    from trtpipe.errors import TrtpipeError
    from trtpipe.job.load import read_job
    from trtpipe.pipeline import stages as pipeline
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.progress import Silent

    stages = Stages(Silent())
    given = ["build.compute_capability=[]", *overrides, f"build.route={route}"]
    nothing = np.zeros(0, np.float32)
    if route == "torch2trt":
        given.append("build.target=tensorrt")
        if importlib.util.find_spec("torch2trt") is None:
            return Row(route, mode, None, Counter(), nothing, f"{NOT}: torch2trt is not installed")
        if not gpu and "FP16" in mode:
            return Row(route, mode, None, Counter(), nothing, f"{NOT}: its FP16 is a flag of TensorRT 8.6 to 10")
    job = read_job(path, given)
    quantized = pipeline.quantize(job, prepared, table, stages)
    try:
        with harness(route, gpu) as seen:
            engine = pipeline.compile_engine(job, prepared, quantized, stages)
            if route == "onnx" or seen is None:
                assert engine.graph is not None
                scales = onnx_scales(engine.graph.data)
            else:
                scales = network_scales(seen)
    except TrtpipeError as error:
        return Row(route, mode, None, Counter(), nothing, f"{NOT}: {str(error).splitlines()[0]}")
    layers: Counter[str] = Counter(layer.precision for layer in quantized.layers)
    outputs = None
    if gpu:
        from trtpipe.trt.runtime import EngineRunner

        with EngineRunner(engine.data) as runner:
            outputs = np.asarray(next(iter(runner.run(data).values())), np.float32)
    if route == "torch2trt" and "FP16" in mode:
        layers = Counter()  # TensorRT chose which run in FP16
    return Row(route, mode, len(engine.data), layers, scales, outputs=outputs)


def harness(route: str, gpu: bool) -> Any:
    """What stands in for a GPU while the route builds; for torch_tensorrt it also reads the network."""
    if route == "torch_tensorrt":
        from driverless import driverless

        return driverless()
    if route == "torch2trt" and not gpu:
        from torch2trt_on_rtx import torch2trt_on_rtx

        return torch2trt_on_rtx()
    return contextlib.nullcontext()


def network_scales(seen: Any) -> np.ndarray[Any, Any]:
    """The distinct scales in the network that TensorRT was given."""
    network = getattr(seen, "network", seen)
    parts = [s.reshape(-1) for s in network.scales.values()]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.float32)


def onnx_scales(data: bytes) -> np.ndarray[Any, Any]:
    """The distinct scales of the Q/DQ nodes of an ONNX file."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_from_string(data).graph
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Cast" and node.input[0] in values:
            values[node.output[0]] = values[node.input[0]]
    parts = [
        values[n.input[1]].astype(np.float32).reshape(-1)
        for n in graph.node
        if n.op_type in ("QuantizeLinear", "DequantizeLinear")
    ]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.float32)


def page(rows: list[Row]) -> str:
    """The tables, as Markdown."""
    import tensorrt_rtx

    from trtpipe.trt import driver

    found = driver.probe()
    gpu = found.devices[0].name if found.devices else "no GPU: engines were built, not executed"
    first = {r.mode: r for r in rows if r.route == "onnx"}
    lines = [
        f"Measured with {versions()}, TensorRT-RTX {tensorrt_rtx.__version__}, {platform.machine()}, {gpu}.",
        "",
        "| precision | route | engine, bytes | operations by precision | distinct scales "
        "| largest difference from onnx: of scales | of outputs |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        if row.size_bytes is None:
            lines.append(f"| {row.mode} | {row.route} | {row.why} | | | | |")
            continue
        layers = ", ".join(f"{n} {p}" for p, n in sorted(row.layers.items()))
        scales = difference(row.scales, first[row.mode].scales) if len(row.scales) else "no Q/DQ"
        outputs = NOT
        if row.outputs is not None and (reference := first[row.mode].outputs) is not None:
            outputs = f"{np.abs(row.outputs - reference).max():.3g}"
        lines.append(
            f"| {row.mode} | {row.route} | {row.size_bytes:,} | {layers} | {len(row.scales)} | {scales} | {outputs} |"
        )
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Which frontends took part."""
    import torch

    from trtpipe.routes.options import installed_frontend

    frontend = installed_frontend()
    named = f"{frontend.distribution} {frontend.version}" if frontend else "no Torch-TensorRT"
    there = importlib.util.find_spec("torch2trt") is not None
    return f"PyTorch {torch.__version__}, {named}, {'torch2trt' if there else 'no torch2trt'}"


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
    """The largest |a - b| of two sorted lists of scales."""
    if a.shape != b.shape:
        return f"{len(a)} against {len(b)} scales"
    return f"{np.abs(a - b).max():.3g}"


if __name__ == "__main__":
    main()
