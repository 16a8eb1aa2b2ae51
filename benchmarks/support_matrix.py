"""trtpipe with each supported release of PyTorch: three examples and the tests that touch it most. No GPU.

    python benchmarks/support_matrix.py [--only 2.6.0 ...] [--environments DIR] [--keep]

Makes an environment for each release in turn (5 GB, removed afterwards unless --keep; one that is there is used as it
is), with whichever Python of `RELEASES` is here. Writes support.json and docs/support.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Release:
    """A release of PyTorch with the packages that fit it, and the Python that it is tried with.

    `forced`: its torchvision is one for another release, which pip would refuse.
    """

    torch: str
    torchvision: str
    torchao: str
    python: str
    forced: bool = False


RELEASES = (
    Release("2.6.0", "0.21.0", "0.13.0", "3.10"),
    Release("2.8.0", "0.23.0", "0.13.0", "3.12"),
    Release("2.11.0", "0.26.0", "0.17.0", "3.12"),
    Release("2.14.1", "0.29.2", "0.18.0", "3.11"),
    Release("2.15.0", "0.29.2", "0.18.0", "3.13", forced=True),
)
JOBS = ("quickstart", "vit-b16-int8", "two-inputs")
#: The ViT of the example with 2 layers of 256 instead of 12 of 768: the same operations in a tenth of the time.
SMALLER = {
    "vit-b16-int8": "model.args={of: 'torchvision.models:VisionTransformer', image_size: 224, patch_size: 16, "
    "num_layers: 2, num_heads: 4, hidden_dim: 256, mlp_dim: 512}"
}
TESTS = (
    "tests/model/test_capture.py",
    "tests/quantization/test_quantize.py",
    "tests/routes/test_onnx_route.py",
    "tests/calib/test_observers.py",
)
#: The extras of trtpipe that the examples and tests need.
EXTRAS = "build,rtx,examples,dev"
PAGE = """\
# Supported releases of PyTorch

PyTorch {oldest} to {newest}, Python 3.10 to 3.13. Written by `benchmarks/support_matrix.py`: each row is an environment
of its own on a machine without a GPU, in which three examples were built for TensorRT-RTX {rtx} and their graphs
checked in ONNX Runtime (the ViT with 2 layers of 256 instead of 12 of 768), and {tests} test files that touch PyTorch
were run. Releases between the rows were not run, nor was Torch-TensorRT with any other than 2.14.

| torch | torchvision | torchao | Python | {jobs} | tests |
| --- | --- | --- | --- | {rules} | --- |
"""
NOTES = """
## What differs

- Before 2.7, PT2E quantization is PyTorch's own and torchao is not needed; from 2.7 on it is torchao's.
- Before 2.7, the ONNX exporter fixes dynamic dimensions of the program that it is given, so it is given a copy.
- Before 2.7, `trtpipe bench` leaves out PyTorch's own INT8 mode.
- Before 2.13, torch.export does not show of a pooling behind a strided convolution that it takes any height and width:
  a job that declares these as dynamic is refused.
- Before 2.9, exported programs have no guards on their inputs that could be left out.
- The example's random weights are others from 2.14 on, hence another cosine.
- Every other release of PyTorch is refused, with the range.
- Up to 0.29.0, torchvision names the one PyTorch that it was built for, and pip refuses any other; later ones ask for
  2.14 or newer. None was built for 2.15 when this was written: 0.29.2 was installed beside it, with `--no-deps`.

## Is the engine the same?

The operations and their precisions are the same (the digest is of both); the files' bytes are not.

| example | {torches} |
| --- | {rules} |
"""


def main() -> int:
    """Run the matrix, print a line a release, and write the results and their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [r.torch for r in RELEASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--environments", type=Path, help="folder of the environments; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="leave the environments that are made here")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/support.md")
    given = parser.parse_args()
    path = given.results / "support.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for release in (r for r in RELEASES if r.torch in given.only):
            folder = (given.environments or Path(scratch)) / release.torch
            made = not folder.exists()
            if made:
                make(release, folder)
            rows[release.torch] = row = measured(folder / "bin" / "python", Path(scratch, "out", release.torch))
            print(release.torch, json.dumps(row), flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({n: rows[n] for n in names if n in rows}, indent=1) + "\n")
            if made and not given.keep:
                shutil.rmtree(folder)
    if set(names) <= set(rows):
        given.page.write_text(document(rows))
    return int(any(j["verdict"] != "passed" for row in rows.values() for j in row["jobs"].values()))


def make(release: Release, folder: Path) -> None:
    """An environment of this release with everything that the examples and tests need, and trtpipe from here."""
    python = shutil.which(f"python{release.python}") or sys.executable
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    pinned = [f"torch=={release.torch}", f"torchao=={release.torchao}"]
    vision = f"torchvision=={release.torchvision}"
    if release.forced:  # first those that need no torchvision, then the one that pip would refuse
        subprocess.run([*pip, *pinned, *requirements()], check=True)
        subprocess.run([*pip, "--no-deps", vision, "timm", ROOT], check=True)
    else:
        subprocess.run([*pip, *pinned, vision, f"{ROOT}[{EXTRAS}]"], check=True)


def requirements() -> list[str]:
    """What pyproject.toml lists for `EXTRAS`, without torch and what needs torchvision's release."""
    text = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(dependencies|build|rtx|examples|dev|fleet) = \[(.*?)\]$", text, re.M | re.S)
    listed = [
        name for _, block in blocks for name in re.findall(r'^\s*"([^"]+)"|\["([^"]+)"', block, re.M) for name in name
    ]
    return [n for n in listed if n and not re.match(r"torch|timm|trtpipe", n)]


def measured(python: Path, out: Path) -> dict[str, Any]:
    """Versions, each example's verdict and figures, and the result of the tests, of one environment."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=settings, check=False)

    names = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnxruntime", "tensorrt_rtx")
    asked = ran(
        "-c",
        "import json, platform, sys; from trtpipe.packages import version; "
        "print(json.dumps({'python': platform.python_version()} | {n: version(n) for n in sys.argv[1:]}))",
        *names,
    )
    row: dict[str, Any] = {"versions": json.loads(asked.stdout), "jobs": {}}
    if not (ROOT / "data/digits/resnet.safetensors").exists():
        ran("-m", "trtpipe.examples.digits", "make", "data/digits")
    for job in JOBS:
        smaller = ["--set", SMALLER[job]] if job in SMALLER else []
        done = ran("-m", "trtpipe", "build", f"configs/{job}.yaml", "-q", "--diagnose", "0", "-o", str(out), *smaller)
        row["jobs"][job] = described(done, out / job)
    tests = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *TESTS)
    row["tests"] = next(
        (line for line in reversed(tests.stdout.splitlines()) if "passed" in line or "failed" in line), ""
    )
    row["tests"] = re.sub(r",? *\d+ warnings?| in [\d.]+s.*", "", row["tests"])
    row["failed"] = re.findall(r"^FAILED (\S+)", tests.stdout, re.M)
    return row


def described(done: subprocess.CompletedProcess[str], bundle: Path) -> dict[str, Any]:
    """The verdict of a build; of a bundle also its check's figures and a digest of the precisions of its operations."""
    verdict = {0: "passed", 1: "FAILED"}.get(done.returncode, f"exit {done.returncode}")
    if done.returncode > 1:
        return {"verdict": verdict, "error": done.stderr.strip().splitlines()[-1]}
    manifest = json.loads((bundle / "manifest.json").read_text())
    layers = sorted((one["module"], one["op"], one["precision"]) for one in manifest["layers"])
    return {
        "verdict": verdict,
        "figures": {f"{m['output']}.{m['name']}": m["value"] for m in manifest["check"]["metrics"]},
        "operations": len(layers),
        "int8": sum(one[2] == "int8" for one in layers),
        "precisions": hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:12],
    }


def document(rows: dict[str, Any]) -> str:
    """The page."""
    from trtpipe.model.torch_versions import OLDEST, UNKNOWN

    last = rows[RELEASES[-1].torch]["versions"]
    text = PAGE.format(
        oldest=".".join(map(str, OLDEST)),
        newest=f"{UNKNOWN[0]}.{UNKNOWN[1] - 1}",
        rtx=last["tensorrt_rtx"],
        tests=len(TESTS),
        jobs=" | ".join(JOBS),
        rules=" | ".join("---" for _ in JOBS),
    )
    for release in RELEASES:
        row = rows[release.torch]
        found = row["versions"]
        cells = [found[n] for n in ("torch", "torchvision", "torchao", "python")]
        cells[2] += "" if release.torch != "2.6.0" else " (not used)"
        text += "| " + " | ".join([*cells, *(_verdict(row["jobs"][job]) for job in JOBS), row["tests"]]) + " |\n"
    text += NOTES.format(torches=" | ".join(r.torch for r in RELEASES), rules=" | ".join("---" for _ in RELEASES))
    for job in JOBS:
        text += f"| {job} | " + " | ".join(_same(rows[r.torch]["jobs"][job]) for r in RELEASES) + " |\n"
    return text


def _verdict(job: dict[str, Any]) -> str:
    cosine = next((v for n, v in job.get("figures", {}).items() if n.endswith(".cosine")), None)
    verdict: str = job["verdict"]
    return verdict if cosine is None else f"{verdict}, cosine {float(cosine):.6f}"


def _same(job: dict[str, Any]) -> str:
    if "precisions" not in job:
        verdict: str = job["verdict"]
        return verdict
    return f"{job['int8']} of {job['operations']} in INT8, `{job['precisions'][:6]}`"


if __name__ == "__main__":
    sys.exit(main())
