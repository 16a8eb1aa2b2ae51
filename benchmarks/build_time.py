"""Where the time of a build goes: each stage of `trtpipe build`, beside the parts that no tool can leave out.

    python benchmarks/build_time.py [--only resnet50-int8 ...] [--peer-python PYTHON] [--before OTHER.md]
                                    [--write docs/build-time.md]

Every figure comes from a process of its own, in one run on a machine that does nothing else. The parts: importing torch
and the network's package, one `torch.export`, one ONNX export, the bare forward passes over the same images, and
TensorRT-RTX on the ONNX file that trtpipe wrote. Other tools: `torch.onnx.export`, their quantization of that file
(`peers.py`) and TensorRT-RTX. Random weights, crops of two photographs, no GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photos import crops


@dataclass(frozen=True)
class Network:
    """A network of the table: `factory` as a job file names it, `args` for it, `channels` and `side` of its images."""

    factory: str
    args: dict[str, Any]
    channels: int
    side: int

    def made(self) -> Any:
        """The network, with random weights."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(**self.args).eval()

    def images(self, seed: int = 0) -> Any:
        """Its images, float32 [N, channels, side, side]."""
        return crops(IMAGES, self.side, seed)[:, : self.channels]


def of_timm(name: str, side: int) -> Network:
    """A network of timm's."""
    return Network("timm:create_model", {"model_name": name}, 3, side)


MODELS = {
    "quickstart": Network("trtpipe.examples.digits:resnet", {"num_classes": 10}, 1, 32),
    "resnet50": of_timm("resnet50", 224),
    "tf_efficientnet_b4": of_timm("tf_efficientnet_b4", 320),
    "vit_base_patch16_224": of_timm("vit_base_patch16_224", 224),
}
PRECISIONS: dict[str, dict[str, bool]] = {
    "fp32": {},
    "fp16": {"fp16_mode": True},
    "int8": {"int8_mode": True, "fp16_mode": True},
}
IMAGES = 16
BATCH = 8
OPSET = 20
STAGES = ("model", "baseline", "capture", "calibrate", "quantize", "export", "check", "compile", "bundle", "other")
ROWS = tuple(f"{name}-{precision}" for name in MODELS for precision in PRECISIONS)
PAGE = """\
# What a build costs

Written by `benchmarks/build_time.py` on a machine without a GPU ({machine}), {date}. {images} images calibrate and
{images} are checked, random weights, default settings. Seconds; `whole` is from the command to the bundle, `parts` the
sum of what no tool can leave out, measured in the same run: importing torch and the network's package, one
`torch.export`, one ONNX export, the bare forward passes over the images ({images} for the baseline, {images} for the
graph, {images} more for INT8), TensorRT-RTX on the ONNX file that trtpipe wrote.
`ratio` is whole / parts. Memory is the peak of the building process and
of the one in which TensorRT-RTX runs, in GB; `calibration` is that of a process that only calibrates: the
bare network, and hooks that count what its layers give. INT8 rows calibrate and correct by default settings;
`corrections off` shows the rest. `compile` is what is left of it when the graph is checked: both run at once.
ModelOpt (its ONNX tool) and ONNX Runtime calibrate by entropy here; by the exact maxima both take less
([accuracy-zoo.md](accuracy-zoo.md) has the seconds of each).
What the rest is: [architecture](architecture.md#where-the-time-of-a-build-goes).

| job | whole | parts | ratio | memory | calibration | ModelOpt, entropy | ONNX Runtime, entropy |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{rows}

## Stages

| job | {stages} |
| --- | {rule} |
{by_stage}

## Parts

| job | {parts} |
| --- | {parts_rule} |
{by_part}
{before}"""
#: The same of another checkout.
BEFORE = """
## Before

The same program with an earlier checkout, in one run on one machine. That may be another one than above: ratios can be
compared then, and seconds only with their own parts.

{tables}
"""


def job(name: str, precision: str, corrections: bool) -> dict[str, Any]:
    """The job file's content."""
    network = MODELS[name]
    size = network.side
    made: dict[str, Any] = {
        "name": "job",
        "model": {"factory": network.factory, "args": network.args},
        "inputs": {"image": {"shape": ["N", network.channels, size, size], "N": {"min": 1, "opt": BATCH, "max": 16}}},
        "outputs": {"logits": {}},
        "precision": PRECISIONS[precision],
        "build": {"target": "tensorrt_rtx"},
        "check": {"arrays": "check.npy", "batch_size": BATCH, "limits": {"cosine_min": 0.5}},
    }
    if precision == "int8":
        made["calibration"] = {"arrays": "calibration.npy", "batch_size": BATCH}
        if not corrections:
            made["calibration"]["corrections"] = False
    return made


def memory_gb() -> float:
    """Peak of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def line(folder: Path, row: str) -> dict[str, Any]:
    """One build by trtpipe, in this process: stages and peaks."""
    began = time.perf_counter()
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.build import build
    from trtpipe.progress import Silent

    name, precision, *off = row.rsplit("-", 2) if row.endswith("-off") else row.rsplit("-", 1)
    path = folder / "job.yaml"
    path.write_text(json.dumps(job(name, precision, not off)))  # JSON is YAML
    os.chdir(folder)
    built = build(read_job(path), folder / row, Silent())
    seconds = dict(built.seconds)
    whole = time.perf_counter() - began
    gc.freeze()  # as a command does at its end
    return {
        "whole": whole,
        "stages": {**seconds, "other": whole - sum(seconds.values())},
        "memory": [memory_gb(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6],
        "sqnr_db": next(m.value for m in built.report.metrics if m.name == "sqnr_db"),
        "onnx": str(built.bundle.path / "model.onnx"),
    }


@contextmanager
def timed(name: str, into: dict[str, float]) -> Iterator[None]:
    """Seconds of the block."""
    began = time.perf_counter()
    yield
    into[name] = time.perf_counter() - began


def loaded(name: str) -> tuple[Any, Any, Any]:
    """The network, its images and the batch as a dynamic dimension."""
    import torch

    images = torch.from_numpy(MODELS[name].images())
    return MODELS[name].made(), images, ({0: torch.export.Dim("N", min=1, max=16)},)


def parts(row: str, onnx: str) -> dict[str, Any]:
    """What no tool can leave out, in this process."""
    seconds: dict[str, float] = {}
    name, precision = row.rsplit("-", 1)
    with timed("import", seconds):
        import torch

        importlib.import_module(MODELS[name].factory.partition(":")[0])
    model, images, dynamic = loaded(name)
    with timed("export", seconds), torch.no_grad():
        program = torch.export.export(model, (images[:BATCH],), dynamic_shapes=dynamic)
    with timed("ONNX export", seconds):
        torch.onnx.export(program, (images[:BATCH],), dynamo=True, opset_version=OPSET, verbose=False)
    passes = 2 + (precision == "int8")
    with timed("forward", seconds), torch.inference_mode():
        for _ in range(passes):
            for start in range(0, IMAGES, BATCH):
                model(images[start : start + BATCH])
    with timed("TensorRT-RTX", seconds):
        compiled(onnx)
    return {"seconds": seconds, "memory": memory_gb()}


def calibrated(row: str, folder: str) -> dict[str, Any]:
    """The peak of a process that calibrates and does nothing else: hooks on the eager network."""
    import numpy as np
    import torch

    from calib.observers import HistogramObserver

    model, observers = MODELS[row.rsplit("-", 1)[0]].made(), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            observers[name] = HistogramObserver()
            module.register_forward_pre_hook(lambda _, inputs, o=observers[name]: o.observe(inputs[0]))
    images = np.load(Path(folder, "calibration.npy"))
    with torch.inference_mode():
        for start in range(0, IMAGES, BATCH):
            model(torch.from_numpy(images[start : start + BATCH]))
    return {"memory": memory_gb(), "amax": max(o.histogram.max for o in observers.values())}


def compiled(onnx: str) -> None:
    """TensorRT-RTX alone, with trtpipe's settings and in this process."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, logger)
    assert parser.parse_from_file(onnx), parser.get_error(0).desc()
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    shape = tuple(definition.get_input(0).shape)[1:]
    profile.set_shape(definition.get_input(0).name, (1, *shape), (BATCH, *shape), (16, *shape))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(definition, config) is not None


def exported(row: str, out: str) -> dict[str, Any]:
    """The FP32 file that other tools begin with."""
    import torch

    model, images, dynamic = loaded(row.rsplit("-", 1)[0])
    arguments: dict[str, Any] = {"dynamo": True, "opset_version": OPSET, "verbose": False, "dynamic_shapes": dynamic}
    torch.onnx.export(model, (images[:BATCH],), out, external_data=False, **arguments)
    return {}


def peer(tool: str, row: str, folder: Path, python: str) -> float | None:
    """Seconds of the other tool's chain; None where it fails."""
    began = time.perf_counter()
    fp32, quantized = folder / "fp32.onnx", folder / f"{tool}.onnx"
    here = Path(__file__).resolve().parent
    calibration = str(folder / "calibration.npy")
    try:
        child("exported", row, str(fp32))
        quantize = [python, str(here / "peers.py"), tool, "entropy", str(fp32), calibration, str(quantized)]
        subprocess.run(quantize, check=True, capture_output=True)
        child("compiled", row, str(quantized))
    except subprocess.CalledProcessError as error:
        print(f"{row} by {tool}: {(error.stderr or b'')[-500:]!r}", file=sys.stderr)
        return None
    return time.perf_counter() - began


def child(what: str, row: str, *arguments: str) -> dict[str, Any]:
    """A figure by this program in a process of its own."""
    command = [sys.executable, __file__, "--child", what, row, *arguments]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process": time.perf_counter() - began}


def measure(row: str, peer_python: str | None) -> dict[str, Any]:
    """All figures of one job."""
    import numpy as np

    name, precision = row.rsplit("-", 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed, part in enumerate(("calibration", "check")):
            np.save(folder / f"{part}.npy", MODELS[name].images(seed))
        whole = child("line", row, str(folder))
        figures: dict[str, Any] = {"row": row, "line": whole, "parts": child("parts", row, whole["onnx"])}
        if precision == "int8":
            figures["calibrated"] = child("calibrated", row, str(folder))
            figures["off"] = child("line", f"{row}-off", str(folder))
            figures["onnxruntime"] = peer("onnxruntime", row, folder, sys.executable)
            figures["modelopt"] = peer("modelopt", row, folder, peer_python) if peer_python else None
    return figures


def page(found: list[dict[str, Any]], before: str = "") -> str:
    """The docs page; `before` is another such page, whose tables are shown too."""
    rows, stages, parts_of = [], [], []
    names = [n for n in STAGES if any(n in f["line"]["stages"] for f in found)]
    pieces = list(dict.fromkeys(p for f in found for p in f["parts"]["seconds"]))
    for f in found:
        irreducible = sum(f["parts"]["seconds"].values())
        for label, key in ((f["row"], "line"), (f"{f['row']}, corrections off", "off")):
            if key not in f:
                continue
            whole, memory = f[key]["process"], " + ".join(f"{m:.1f}" for m in f[key]["memory"])
            others = [f"{f[t]:.1f}" if f.get(t) else "" for t in ("modelopt", "onnxruntime")]
            bare = f"{f['calibrated']['memory']:.1f}" if "calibrated" in f else ""
            rows.append(
                f"| {label} | {whole:.1f} | {irreducible:.1f} | {whole / irreducible:.2f} | {memory} | {bare} | "
                f"{' | '.join(others)} |"
            )
            stages.append(f"| {label} | " + " | ".join(f"{f[key]['stages'].get(s, 0):.1f}" for s in names) + " |")
        parts_of.append(f"| {f['row']} | " + " | ".join(f"{f['parts']['seconds'][p]:.1f}" for p in pieces) + " |")
    return PAGE.format(
        machine=f"{os.cpu_count()} cores", date=time.strftime("%Y-%m-%d"), images=IMAGES, rows="\n".join(rows),
        stages=" | ".join(names), rule=" | ".join(["---:"] * len(names)), by_stage="\n".join(stages),
        parts=" | ".join(pieces), parts_rule=" | ".join(["---:"] * len(pieces)), by_part="\n".join(parts_of),
        before=BEFORE.format(tables=tables_of(before)) if before else "",
    )  # fmt: skip


def tables_of(page: str) -> str:
    """The tables of a page, its headings one level down; an earlier one's are left out."""
    own = page.partition(BEFORE.partition("{")[0])[0]
    return own[own.index("| job |") :].replace("\n## ", "\n### ").strip()


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--peer-python", help="the Python that has ModelOpt")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--before", type=Path, help="a page that this program wrote of another checkout")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, row, *arguments = given.child
        if what == "line":
            result = line(Path(arguments[0]), row)
        elif what == "compiled":
            compiled(arguments[0])
            result = {}
        else:
            result = {"parts": parts, "exported": exported, "calibrated": calibrated}[what](row, *arguments)
        print(json.dumps(result))
        return
    found = []
    for row in given.only:
        found.append(measure(row, given.peer_python))
        f = found[-1]
        irreducible = sum(f["parts"]["seconds"].values())
        print(f"{row}: {f['line']['process']:.1f} s, parts {irreducible:.1f} s", file=sys.stderr, flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    text = page(found, given.before.read_text() if given.before else "")
    if given.write:
        given.write.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
