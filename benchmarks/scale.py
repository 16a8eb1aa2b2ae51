"""How the cost of a build and of a night grows: with nodes, bytes of weights and images, with jobs and with workers.

    python benchmarks/scale.py [--only nodes weights images plan workers] [--write docs/scale.md]

Nodes, weights and images are whole builds, each in a process of its own. Planning is `trtpipe nightly --explain`, from
the command to the last line. Workers are simulated: the queue of `trtpipe.nightly.local` decides, and a clock of this
program runs instead of builds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from trtpipe.nightly.local import _Queue
    from trtpipe.nightly.pool import Slot

HERE = Path(__file__).resolve()
NODES, WEIGHTS_MB, IMAGES, JOBS, WORKERS = (
    (250, 500, 1000, 2000), (250, 500, 1000), (1000, 3000, 10000), (100, 300, 1000), (1, 2, 4, 8, 16)
)  # fmt: skip
#: Seconds that a job takes in a worker that has just had its model, and more in one that has not.
AGAIN_S, FIRST_S = (10.0, 60.0), (15.0, 45.0)
PAGE = """\
# How cost grows

Written by `benchmarks/scale.py` on a machine without a GPU ({cores} cores), {date}. Times are seconds, memory is GB:
the peak of the building process and, behind +, of the one in which TensorRT-RTX runs.

{tables}"""


def chain(blocks: int) -> Any:
    """`blocks` times a convolution of 8 channels, a batch norm, a ReLU and a residual sum; three nodes a block."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.1 * torch.relu(self.norm(self.conv(x)))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(blocks)), torch.nn.Flatten(), torch.nn.Linear(512, 10))


def wide(megabytes: int) -> Any:
    """Linear layers with this many MB of weights, most of them in layers of 64 MB."""
    import torch

    torch.manual_seed(0)
    layers = [m for _ in range(megabytes // 64) for m in (torch.nn.Linear(4096, 4096), torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4096), *layers, torch.nn.Linear(4096, 10))


def small() -> Any:
    """A network that costs little beside the decoding of its images."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )  # fmt: skip


def build(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """One build of a job in this process: its stages and peaks."""
    began = time.perf_counter()
    from trtpipe.job.load import read_job
    from trtpipe.pipeline.build import build
    from trtpipe.progress import Silent

    os.chdir(folder)
    Path("job.yaml").write_text(json.dumps(job))  # JSON is YAML
    built = build(read_job(Path("job.yaml")), folder / "out", Silent())
    mine, children = (resource.getrusage(w).ru_maxrss / 1e6 for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    whole = time.perf_counter() - began
    return {"whole": whole, "stages": dict(built.seconds), "memory": f"{mine:.1f} + {children:.1f}"}


def job(factory: str, size: int, precision: str, **arguments: Any) -> dict[str, Any]:
    """A job of one of the networks above, calibrated on and checked with arrays."""
    return {
        "name": "job",
        "model": {"factory": f"scale:{factory}", "args": arguments},
        "inputs": {
            "image": {"shape": ["N", 3 if factory != "chain" else 8, size, size], "N": {"min": 1, "opt": 8, "max": 8}}
        },
        "outputs": {"logits": {}},
        "precision": {"int8_mode": precision == "int8", "fp16_mode": precision != "fp32"},
        "build": {"target": "tensorrt_rtx"},
        "check": {"arrays": "check.npy", "batch_size": 8, "limits": {"cosine_min": 0.5}},
        **({"calibration": {"arrays": "check.npy", "batch_size": 8}} if precision == "int8" else {}),
    }


def child(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`build` in a process of its own."""
    command = [sys.executable, str(HERE), "--child", json.dumps(job), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(title: str, text: str, rows: list[dict[str, Any]]) -> str:
    """A section of the page; columns are the keys of all rows."""
    names = list(dict.fromkeys(k for r in rows for k in r))
    shown = [[f"{r.get(n, ''):.1f}" if isinstance(r.get(n), float) else str(r.get(n, "")) for n in names] for r in rows]
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join(['---:'] * len(names))} |"]
    return "\n".join([f"## {title}\n", text, "", *lines, *(f"| {' | '.join(r)} |" for r in shown), ""])


def nodes() -> str:
    """Builds of longer and longer networks."""
    rows = []
    for precision, count in itertools.product(("fp16", "int8"), NODES):
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder, "check.npy"), np.random.default_rng(0).normal(size=(16, 8, 8, 8)).astype(np.float32))
            made = child(job("chain", 8, precision, blocks=count // 4), Path(folder))
        rows.append({"nodes": count, "precision": precision, **_figures(made)})
    text = (
        "Convolution, scaling, ReLU and sum, again and again, on 16 inputs of 8 x 8 x 8. Export grows faster than the "
        "nodes, since a rule of onnxscript's optimizer walks the whole graph for each of them, and so does "
        "TensorRT-RTX's own compile."
    )
    return table("Nodes", text, rows)


def weights() -> str:
    """Builds of larger and larger networks."""
    rows = []
    for precision, count in itertools.product(("fp16", "int8"), WEIGHTS_MB):
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder, "check.npy"), np.random.default_rng(0).normal(size=(16, 3, 8, 8)).astype(np.float32))
            made = child(job("wide", 8, precision, megabytes=count), Path(folder))
        rows.append({"MB of weights": count, "precision": precision, **_figures(made)})
    return table("Weights", "Linear layers of 4096 x 4096, on 16 inputs.", rows)


def _figures(made: dict[str, Any]) -> dict[str, Any]:
    from build_time import STAGES

    return {"whole": made["whole"], **{n: made["stages"].get(n, 0.0) for n in STAGES[:-1]}, "memory": made["memory"]}


def images() -> str:
    """Calibration with more and more images, decoded in this process and in two others."""
    from photos import write_photos

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder, "photos"), IMAGES[-1], 256)
        np.save(Path(folder, "check.npy"), np.zeros((8, 3, 224, 224), np.float32))
        for count, workers in itertools.product(IMAGES, (0, 2)):
            made = job("small", 224, "int8")
            transform = {"resize": 256, "center_crop": 224}
            made["calibration"] = {"images": "photos", "transform": transform, "samples": count, "workers": workers}
            made["calibration"] |= {"batch_size": 8, "corrections": False}
            made["check"] = {"arrays": "check.npy", "batch_size": 8}
            built = child(made, Path(folder))
            seconds = built["stages"]["calibrate"]
            row = {"images": count, "workers": workers, "calibrate": seconds, "images a second": count / seconds}
            rows.append(row | {"memory": built["memory"]})
    return table("Images", "Photographs of 256 x 256 (PNG) calibrate a network of one convolution.", rows)


def plan() -> str:
    """Planning of nights whose jobs are new, and of the same nights planned once more."""
    rows = []
    for count in JOBS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "jobs").mkdir()
            for data in ("calibration", "check"):
                (folder / data).mkdir()
                for k in range(512):
                    (folder / data / f"{k}.jpg").write_bytes(os.urandom(20_000))
            for k in range(count):
                (folder / f"{k}.safetensors").write_bytes(os.urandom(100_000))
                (folder / "jobs" / f"{k}.yaml").write_text(_night_job(k))
            command = [sys.executable, "-m", "trtpipe", "nightly", str(folder / "jobs"), "--explain"]
            command += ["-o", str(folder / "out"), "--cache", str(folder / "cache")]
            row: dict[str, Any] = {"jobs": count}
            time.sleep(2.1)  # files this young are not remembered
            for when in ("first", "again"):
                began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, check=True, capture_output=True, cwd=HERE.parents[1])
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                row[when] = time.perf_counter() - began
                row[f"{when}, CPU"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append(row)
    text = "One file a job, each with weights of its own, 512 images to calibrate and 512 to check shared by all."
    text += " `again` is when nothing has changed since. CPU is that of the process, its imports included."
    return table("Planning a night", text, rows)


def _night_job(k: int) -> str:
    made = job("small", 224, "int8")
    made |= {"name": f"job-{k}"}
    made["model"] = {"factory": "trtpipe.examples.networks:untrained", "args": {"of": "torchvision.models:resnet18"}}
    made["model"]["weights"] = f"../{k}.safetensors"
    for section in ("calibration", "check"):
        made[section] = {"images": f"../{section}", "transform": {"resize": 224}}
    return json.dumps(made, indent=1)


def workers() -> str:
    """A night of 300 jobs of 60 models on machines with more and more workers, 4 GB each, by a simulated clock."""
    rows = []
    for count in WORKERS:
        rows.append(simulated(count, 300, 60))
    text = (
        "300 jobs of 60 models, 0.1 to 2 GB of weights each. A job takes 10 to 60 s, and 15 to 45 s more in a worker "
        "whose last job had another model. The machine has 8 GB for each worker. `loads` are models loaded (60 at "
        "least), `idle` is the share of time in which workers had nothing to do or no memory for it, `deciding` what "
        "the queue itself took, in seconds of this machine."
    )
    return table("Workers, by a simulated clock", text, rows)


def simulated(workers: int, jobs: int, models: int) -> dict[str, Any]:
    """One night by a simulated clock."""
    from trtpipe.job.load import read_job
    from trtpipe.nightly.local import _Queue, expected_bytes
    from trtpipe.nightly.pool import Slot
    from trtpipe.nightly.task import BuildTask

    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = []
        for k in range(jobs):
            weights = folder / f"{k % models}.safetensors"
            if not weights.exists():
                with weights.open("wb") as stream:
                    stream.truncate(int(chance.uniform(0.1e9, 2e9) / 8))  # of FP32: PER_WEIGHT_BYTE counts the rest
            made = job("small", 224, "fp16") | {"name": f"job-{k}"}
            made["model"] |= {"weights": str(weights)}
            made["check"] = {"factory": "scale:small"}  # it is never called
            (folder / "job.yaml").write_text(json.dumps(made))
            tasks.append(BuildTask(made["name"], "", "", "", "", job=read_job(folder / "job.yaml")))
        took = {t.name: chance.uniform(*AGAIN_S) for t in tasks}
        loading = {t.job.model.weights: chance.uniform(*FIRST_S) for t in tasks}
        memory = workers * 8_000_000_000
        queue, slots = _Queue(tasks, memory, False), [Slot(f"cpu{i}", 1, None, folder / "log") for i in range(workers)]
        return _run(queue, slots, took, loading, expected_bytes)


def _run(
    queue: _Queue,
    slots: list[Slot],
    took: Mapping[str, float],
    loading: Mapping[Any, float],
    size: Callable[[Any], int],
) -> dict[str, Any]:
    from trtpipe.nightly.task import BuildTask

    ends: list[tuple[float, int, Any]] = []
    free, last = list(range(len(slots))), dict[int, Any]()
    now = busy = deciding = 0.0
    loads = most = 0
    while queue.waiting or ends:
        for k in list(free):
            began = time.process_time()
            task = queue.take(slots[k])
            deciding += time.process_time() - began
            if task is None:
                continue
            assert isinstance(task, BuildTask)
            model = task.job.model.weights
            seconds = took[task.name] + (0 if last.get(k) == model else loading[model])
            loads += last.get(k) != model
            last[k] = model
            free.remove(k)
            busy += seconds
            heapq.heappush(ends, (now + seconds, k, task))
        most = max(most, sum(size(t) for _, _, t in ends))
        now, k, task = heapq.heappop(ends)
        queue.ended(task)
        free.append(k)
    hours, total = now / 3600, now * len(slots)
    return {
        "workers": len(slots), "hours": f"{hours:.2f}", "busy hours": f"{busy / 3600:.2f}", "loads": loads,
        "idle": f"{1 - busy / total:.0%}", "memory, most": f"{most / 1e9:.1f}", "deciding": deciding,
    }  # fmt: skip


def main() -> None:
    """Print the page, or write it."""
    sections = {f.__name__: f for f in (nodes, weights, images, plan, workers)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(build(Path(given.child[1]), json.loads(given.child[0]))))
        return
    tables = "\n".join(sections[name]() for name in given.only)
    text = PAGE.format(cores=os.cpu_count(), date=time.strftime("%Y-%m-%d"), tables=tables)
    if given.write:
        given.write.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
