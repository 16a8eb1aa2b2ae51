"""Every way to run four networks on this machine's GPU, side by side: PyTorch's modes and the engines trtpipe builds.

    python benchmarks/gpu.py [--models resnet50 ...] [--batch 8] [--results benchmarks/results] [--dry-run]

Weights are random, samples are random crops of scikit-learn's two sample photos; the networks, FP16 and INT8 engines
are made by trtpipe's own line, for the TensorRT that is installed. Each network is measured in a process of its own, in
one run: every mode warms up, then rounds follow in which every mode runs once, and times are between CUDA events. What
cannot run is a row with the reason. Written after each network to <results>/<GPU>-<date>.md and .json; networks that
another run of that day measured stay in them. Ends with 3 where no GPU is. --dry-run goes the same way without one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_page
from filelock import FileLock
from photos import write_photos

from trtpipe.progress import Silent

if TYPE_CHECKING:
    from trtpipe.evaluation.bench import Bench
    from trtpipe.job.job import Job

ROOT = Path(__file__).resolve().parents[1]
#: timm name -> side of the input in pixels
MODELS = {
    "resnetv2_101x1_bit": 224,
    "tf_efficientnet_b4": 380,
    "resnet50": 224,
    "vit_base_patch16_224": 224,
}
TINY = {"tiny": 32}
#: The engines that are timed, by the names of their rows.
ENGINES = {
    "engine FP16": {"fp16_mode": True},
    "engine INT8": {"int8_mode": True, "fp16_mode": True},
    "engine FP8": {"fp8_mode": True, "fp16_mode": True},
}
CALIBRATION_SAMPLES, CHECK_SAMPLES = 64, 64


def main() -> int:
    """Measure every network, and write the table after each."""
    args = arguments()
    if args.one is not None:
        measure(args)
        return 0
    from trtpipe.trt import driver

    found = driver.probe()
    if found.problem and not args.dry_run:
        print(gpu_page.NO_GPU.format(found.problem), file=sys.stderr)
        return 3
    machine = gpu_page.machine()
    for name, bench in benches(args):
        paths = gpu_page.keep(args.results, args.machine or machine["name"], machine, bench)
        print(f"{name}: {sum(not r.skipped for r in bench.rows)} of {len(bench.rows)} modes measured, {paths[0]}",
              file=sys.stderr)  # fmt: skip
    print(paths[0].read_text(), end="")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *TINY], default=list(MODELS), metavar="MODEL",
                        help=f"of {', '.join([*MODELS, *TINY])}")  # fmt: skip
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100, help="timed runs of each mode")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds, for each network; 10 rounds at least")
    parser.add_argument("--without", nargs="*", default=[], metavar="GLOB", help="modes to leave out, like 'autocast*'")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--machine", help="what the files are named after; the GPU's name when left out")
    parser.add_argument("--together", action="store_true", help="prepare all networks at once; they are timed in turns")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which a network is given up")
    parser.add_argument("--dry-run", action="store_true", help="also where no GPU is: PyTorch's modes on the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-engine", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def benches(args: argparse.Namespace) -> Iterator[tuple[str, Bench]]:
    """Each network's table; with --together as they are done."""
    if not args.together:
        yield from ((name, in_own_process(name, args)) for name in args.models)
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(args.models)) as pool:
        args.meet = Path(folder)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(args.models))))
        running = {pool.submit(in_own_process, name, args): name for name in args.models}
        for done in as_completed(running):
            yield running[done], done.result()


class Together(Silent):
    """A reporter of a network that is prepared beside others: its rounds begin when all are ready, and one at a time.

    `meet` is the folder where they meet: `<network>.ready` is of one whose modes are ready, or whose process ended.
    """

    def __init__(self, name: str, meet: Path, networks: Collection[str]) -> None:
        self._own, self._all = meet / f"{name}.ready", [meet / f"{n}.ready" for n in networks]
        self._turn = FileLock(str(meet / "turn"))

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Wait behind the last mode."""
        if unit != "modes" or done != total:
            return
        self._own.touch()
        while not all(path.exists() for path in self._all):
            time.sleep(0.1)
        self._turn.acquire()  # until the process ends


def in_own_process(name: str, args: argparse.Namespace) -> Bench:
    """The network's table. Should its process die, it is measured again without the engines, whose rows say so."""
    from trtpipe.evaluation.bench import WARM_UP, Bench
    from trtpipe.report.bench_page import read_bench

    why = ""
    with tempfile.TemporaryDirectory() as folder:
        save = Path(folder, "bench.json")
        for _ in range(2):
            command = [sys.executable, __file__, "--one", name, "--save", str(save), "--batch", str(args.batch)]
            command += ["--rounds", str(args.rounds), "--seconds", str(args.seconds), "--no-engine", why]
            command += ["--without", *args.without]
            if args.meet is not None:
                command += ["--meet", str(args.meet), "--models", *args.models]
            ended = run(command, args.limit)
            if not ended:
                return read_bench(save)
            died = ended.startswith("the process ended with SIG")
            print(f"{name}: {ended}", file=sys.stderr)
            if not died or why:
                break
            why = f"{ended} while the engines were among the modes"
    if args.meet is not None:
        (args.meet / f"{name}.ready").touch()
    row = gpu_page.nothing_measured(ended)
    return Bench(f"{name}, batch {args.batch}", args.batch, 0, 0, WARM_UP, "eager FP32", os.cpu_count() or 1, (row,))


def run(command: list[str], limit_s: float) -> str:
    """Run it to its end; empty when it went well, else how it ended."""
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"the process was ended after {limit_s:g} s"
    if code < 0:
        return f"the process ended with {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}; its messages are above" if code else ""


def measure(args: argparse.Namespace) -> None:
    """One network, in this process: a thin loop over `trtpipe bench`."""
    from trtpipe.cli.console import Console
    from trtpipe.pipeline.bench import bench_job
    from trtpipe.report.bench_page import bench_text

    def left_out(mode: str) -> str:
        if mode.startswith("ONNX Runtime"):
            return "it runs on the CPU, and `trtpipe bench` has it"
        if any(fnmatch.fnmatchcase(mode, glob) for glob in args.without):
            return "left out of this run"
        return args.no_engine or not_run() if mode.startswith("engine") else ""

    with tempfile.TemporaryDirectory() as name, Console(quiet=True).watching() as console:
        folder = Path(name)
        reporter = console if args.meet is None else Together(args.one, args.meet, args.models)
        write_photos(folder / "photos", 2 * max(CALIBRATION_SAMPLES, CHECK_SAMPLES), 384)
        jobs = {row: job(args.one, args.batch, precision, folder) for row, precision in ENGINES.items()}
        bench = bench_job(
            jobs["engine INT8"],
            reporter,
            rounds=args.rounds,
            seconds=args.seconds,
            samples=CHECK_SAMPLES,
            engines=jobs,
            left_out=left_out,
        )
    named = replace(bench, name=f"{args.one}, batch {args.batch}", environment={**bench.environment, **tensorrt()})
    args.save.write_text(bench_text(named))


def job(name: str, batch: int, precision: dict[str, bool], folder: Path) -> Job:
    """The network's job in one precision, for the TensorRT that is installed and the GPU that is here."""
    from trtpipe.job.load import read_job

    size = {**MODELS, **TINY}[name]
    data = {
        "images": str(folder / "photos"),
        "transform": {"resize": [size, size], "normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}},
        "batch_size": max(batch, 2),
    }
    content: dict[str, Any] = {
        "name": f"{name}-{'-'.join(precision)}",
        "model": {"factory": "random_models:create", "args": {"name": name, "size": size}},
        "inputs": {"image": {"shape": ["N", 3, size, size], "N": {"min": 1, "opt": batch, "max": max(batch, 2)}}},
        "outputs": {"logits": {}},
        "precision": precision,
        "calibration": {**data, "samples": CALIBRATION_SAMPLES, "corrections": False},
        "build": target(),
        "check": {**data, "samples": max(CHECK_SAMPLES, batch), "seed": 1, "limits": {"cosine_min": 0.8}},
    }
    path = folder / f"{content['name']}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return read_job(path)


def target() -> dict[str, Any]:
    """TensorRT where it is installed, else TensorRT-RTX; for this GPU's compute capability where RTX names it."""
    from trtpipe.trt import driver, flavour
    from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES

    if "tensorrt" in flavour.installed():
        return {"target": "tensorrt"}
    devices = driver.probe().devices
    here = [d.compute_capability for d in devices[:1] if d.compute_capability in RTX_COMPUTE_CAPABILITIES]
    return {"target": "tensorrt_rtx", "compute_capability": here}


def not_run() -> str:
    """Why the TensorRT that is installed runs no engine on this GPU, where that is known before one is built."""
    from trtpipe.trt import driver
    from trtpipe.trt.platforms import rtx_support

    devices = driver.probe().devices
    if target()["target"] == "tensorrt" or not devices:
        return ""
    support = rtx_support(devices[0].compute_capability)
    return support.why if support.runs is False else ""


def tensorrt() -> dict[str, str]:
    """The TensorRT whose engines were timed."""
    from trtpipe.trt import flavour

    wanted = target()["target"]
    found = {str(name): version for name, (_, version) in flavour.installed().items()}
    return {n: v for n, v in found.items() if n == wanted}


if __name__ == "__main__":
    sys.exit(main())
