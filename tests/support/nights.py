"""A small world for nights: a net whose weights are written by hand, data that it classifies, and job files.

Images are flat grey with noise; the class is the brightness. The first channel carries the brightness through both
convolutions, and the linear layer gives -(m - c)^2 up to a constant for each class brightness c.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import trtpipe

ROOT = Path(trtpipe.__file__).resolve().parent.parent
LEVELS = np.array([0.2, 0.5, 0.8], np.float32)

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""

JOB = """
name: {name}
model: {{factory: "net:net", weights: {weights}}}
inputs: {{image: {{dtype: float32, shape: [N, 1, 16, 16], N: {{min: 1, opt: 4, max: 8}}}}}}
outputs: {{logits: {{dtype: float32}}}}
calibration: {{arrays: calib.npz, batch_size: 8, algorithm: minmax}}
check: {{arrays: val.npz, batch_size: 8, limits: {{cosine_min: 0.9, top1_agreement_min: 0.9}}}}
"""


def weights(scale=1.0, broken=False):
    """The state dict; `broken` takes the last two classes for each other."""
    rng = np.random.default_rng(7)
    first = rng.normal(0, 0.05, (4, 1, 3, 3)).astype(np.float32)
    second = rng.normal(0, 0.05, (4, 4, 3, 3)).astype(np.float32)
    first[0], second[0] = 0, 0
    first[0, 0, 1, 1] = second[0, 0, 1, 1] = 1
    linear = np.zeros((3, 4), np.float32)
    linear[:, 0] = 2 * LEVELS * scale
    bias = -(LEVELS**2) * scale
    if broken:
        linear, bias = linear[[0, 2, 1]], bias[[0, 2, 1]]
    zeros = np.zeros(4, np.float32)
    return {"0.weight": first, "0.bias": zeros, "2.weight": second, "2.bias": zeros, "6.weight": linear, "6.bias": bias}


def write_weights(path, **kwargs):
    from safetensors.numpy import save_file

    save_file(weights(**kwargs), path)


def data(path, seed, samples=24):
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % 3
    images = LEVELS[labels][:, None, None, None] + rng.normal(0, 0.02, (samples, 1, 16, 16))
    np.savez(path, image=images.astype(np.float32), labels=labels)


def make_world(folder, count=1):
    """Net, data and weights w0 ... in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET)
    data(folder / "calib.npz", 1)
    data(folder / "val.npz", 2)
    for k in range(count):
        write_weights(folder / f"w{k}.safetensors", scale=1.0 + 0.25 * k)
    return folder


def write_job(folder, name, extra="build: {target: onnxruntime}\n", weight="w0.safetensors"):
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(name=name, weights=weight) + extra)
    return path


def environment(*packages):
    """Of a subprocess: this trtpipe, one thread each, and folders of packages that hide those installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*packages, ROOT))), "OMP_NUM_THREADS": "1"}


def start(*arguments, cwd=None, packages=(), **kwargs):
    """`trtpipe ...` as a process of its own."""
    command = [sys.executable, "-m", "trtpipe", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
    return subprocess.Popen(command, env=environment(*packages), cwd=cwd, text=True, **pipes)


def run(*arguments, cwd=None, expect=0):
    """stdout of `trtpipe ...`, which must end with the exit code expected."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate()
    assert process.returncode == expect, f"exit code {process.returncode}\n{out}\n{err}"
    return out


def running(folder):
    """Command lines of the processes whose current folder is `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if (process / "cwd").resolve() == folder.resolve():
                    found.append((process / "cmdline").read_text())
    return found


def night(folder, *arguments, expect=0, jobs=("jobs",)):
    """The report of `trtpipe nightly` in `folder` as JSON."""
    import json

    where = ("-o", "out", "--cache", "cache")
    return json.loads(run("nightly", *jobs, *where, "--json", *arguments, cwd=folder, expect=expect))


#: `trtpipe nightly` in a process that notes what it does. Files are remembered however young they are.
WATCHED = """
import json, resource, sys
from trtpipe.cli.main import main
from trtpipe.pipeline.cache import digests

digested, close = [], digests.Digests.close
digests.Digests.close = lambda self: digested.append(self.read) or close(self)
digests.RACY_NS = 0
code = main(["nightly", "jobs", "-o", "out", "--cache", "cache", "--json"])
heavy = [m for m in ("torch", "onnx", "onnxruntime", "tensorrt_rtx", "torchvision") if m in sys.modules]
processes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
done = {"exit_code": code, "heavy": heavy, "processes": processes, "digested": sum(digested)}
print(json.dumps(done), file=sys.stderr)
"""
#: What it notes where nothing has changed since the last one.
NOTHING = {"exit_code": 0, "heavy": [], "processes": False, "digested": 0}


def watched_night(folder):
    """The report of a night in `folder`, and what was done for it: heavy packages imported, whether processes were
    started, how many files were read for their digests."""
    import json

    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout), json.loads(done.stderr.splitlines()[-1])


def outcomes(report):
    """Outcome by name."""
    return {o["name"]: o["outcome"] for o in report["outcomes"]}


def fingerprints(report):
    """Manifest's fingerprint by name."""
    return {o["name"]: o["fingerprint"] for o in report["outcomes"]}


def check_bundle(path):
    """Read a bundle, which checks every digest in it."""
    from trtpipe.bundle.format import read_bundle

    return read_bundle(path)


def two_at_once(folder, names):
    """The reports of two nights in `folder` that share jobs, bundles and cache: one of them builds each job."""
    import json

    command = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--workers", "1", "--json")
    both = [start(*command, "--history", f"h{i}.sqlite", cwd=folder) for i in range(2)]
    reports = []
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        reports.append(json.loads(out))
    for name in names:
        assert sorted(outcomes(r)[name] for r in reports) == ["built", "reused"]
        check_bundle(folder / "out" / name)
    return reports
