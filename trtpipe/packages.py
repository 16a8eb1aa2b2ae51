"""Which distribution provides a module, and its version, by package metadata alone: nothing is imported here. Whether a
module can be imported is tried in a process of its own.

One module may come from several distributions: `import tensorrt` from tensorrt, tensorrt-cu12, tensorrt-cu13 or only
their bindings, `import onnxruntime` from onnxruntime or onnxruntime-gpu. Versions are therefore read here, by module.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

#: Distributions that bring a module, most complete first. A module that is not here comes from one of its own name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "tensorrt": (
        "tensorrt",
        "tensorrt-cu13",
        "tensorrt-cu12",
        "tensorrt-cu11",
        # NVIDIA's bindings alone are enough where the libraries come from the system, as on a Jetson
        "tensorrt-bindings",
        "tensorrt-cu13-bindings",
        "tensorrt-cu12-bindings",
        "tensorrt-cu11-bindings",
        "tensorrt-lean",
        "tensorrt-lean-cu13",
        "tensorrt-lean-cu12",
    ),
    "tensorrt_rtx": (
        "tensorrt-rtx",
        "tensorrt-rtx-cu13",
        "tensorrt-rtx-cu12",
        "tensorrt-rtx-cu13-bindings",
        "tensorrt-rtx-cu12-bindings",
    ),
    "onnxruntime": (
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-openvino",
        "onnxruntime-directml",
        "onnxruntime-rocm",
        "ort-nightly",
        "ort-nightly-gpu",
    ),
    "torch_tensorrt": ("torch-tensorrt", "torch-tensorrt-rtx"),
    "onnx": ("onnx", "onnx-weekly"),
    "onnxscript": ("onnxscript", "onnxscript-preview"),
    "onnx_ir": ("onnx-ir",),
    "PIL": ("pillow", "pillow-simd"),
    "yaml": ("pyyaml",),
    "cuda": ("cuda-python", "cuda-bindings"),
}

#: Distributions without a module that change what one computes: the libraries that TensorRT's bindings load.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt-libs", "tensorrt-cu13-libs", "tensorrt-cu12-libs", "tensorrt-cu11-libs"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu12-libs"),
}

#: What a job needs to be captured, calibrated and exported, whatever its target.
CAPTURE = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnxruntime")
#: What a build needs beside: to count on the CPU, to choose what stays wide, and for its report.
BUILDING = ("numba", "networkx", "jinja2")
#: Of these, what is judged together: which torchao goes with which torch.
JUDGED_TOGETHER = ("torch", "torchao")
#: The extra of trtpipe that installs a module.
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(CAPTURE, "build"),
    **dict.fromkeys((*BUILDING, "matplotlib"), "build"),
    **dict.fromkeys(("cuda", "pycuda"), "edge"),
    **dict.fromkeys(("dask", "distributed", "fsspec"), "fleet"),
    **dict.fromkeys(("sklearn", "timm"), "examples"),
    "pycocotools": "coco",
    "tensorrt_rtx": "rtx",
}
#: The release of Torch-TensorRT whose arguments are known; it is for the PyTorch of the same number.
TORCH_TENSORRT = "2.14"
#: What installs a Jetson's TensorRT.
JETPACKS = "apt install python3-libnvinfer"
#: How what has no extra, or several, is installed.
_COMMANDS: Mapping[str, str] = {
    "tensorrt": f"pip install 'trtpipe[trt11]' (or [trt10]; on a Jetson: {JETPACKS})",
    "torch-tensorrt": f"pip install 'torch-tensorrt=={TORCH_TENSORRT}.*'",
    # It requires a release of TensorRT-RTX that cannot build INT8 convolutions, hence --no-deps.
    "torch-tensorrt-rtx": f"pip install --no-deps torch-tensorrt-rtx=={TORCH_TENSORRT}.0 dllist",
    "torch2trt": "pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt",
}


def install_command(name: str) -> str:
    """The command that installs a module or distribution of `EXTRAS`, of this module, or that trtpipe cannot do
    without; KeyError for another."""
    if name in _COMMANDS:
        return _COMMANDS[name]
    if name in EXTRAS:
        return f"pip install 'trtpipe[{EXTRAS[name]}]'"
    return pip_install({d: str(r) for r in _requirements() for d in (r.name, *_modules_of(r.name))}[name])


def lacking() -> tuple[str, ...]:
    """The distributions that trtpipe cannot do without and that are not installed."""
    return tuple(r.name for r in _requirements() if not any(map(package, _modules_of(r.name) or (r.name,))))


def _modules_of(distribution: str) -> tuple[str, ...]:
    """The modules of `DISTRIBUTIONS` that it may bring."""
    return tuple(module for module, names in DISTRIBUTIONS.items() if distribution in names)


def _requirements(extra: str = "") -> tuple[Requirement, ...]:
    """What trtpipe's own metadata requires always, or for an extra alone; nothing where it is not installed."""
    from packaging.requirements import Requirement

    try:
        listed = map(Requirement, metadata.requires(__package__) or ())
    except metadata.PackageNotFoundError:
        return ()
    if extra:
        return tuple(r for r in listed if r.marker is not None and r.marker.evaluate({"extra": extra}))
    return tuple(r for r in listed if r.marker is None)


def pip_install(requirement: str, instead: Iterable[str] = ()) -> str:
    """The command that installs one requirement by itself, as a device needs no more; in the place of distributions
    that hold the same files, where there are any."""
    away = " ".join(instead)
    return f"{f'pip uninstall -y {away} && ' if away else ''}pip install {shlex.quote(requirement)}"


def unfit(module: str) -> str | None:
    """Why the installed release of a module is none that trtpipe's own metadata asks for, and what to do; None where it
    is, where none is installed, and where that metadata says nothing of it or other modules decide too
    (`JUDGED_TOGETHER`)."""
    from packaging.version import InvalidVersion

    installed, asked = package(module), _asked()
    if installed is None or installed.distribution not in asked or module in JUDGED_TOGETHER:
        return None
    wanted = asked[installed.distribution]
    try:
        if wanted.contains(installed.version, prereleases=True):
            return None
    except InvalidVersion:
        return None
    fitting = pip_install(f"{installed.distribution}{wanted}")
    return f"{installed.distribution} must be {wanted} (got {installed.version}). Run: {fitting}"


def _asked() -> Mapping[str, SpecifierSet]:
    """Releases of other distributions that trtpipe's `build` extra names."""
    return {r.name: r.specifier for r in _requirements("build")}


def not_installed(*modules: str) -> str:
    """`torch and onnx are not installed. Run: pip install 'trtpipe[build]'`, of modules that one command installs."""
    *most, last = modules
    listed = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return f"{listed} not installed. Run: {install_command(last)}"


def broken(module: str, reason: object) -> str:
    """Why a module that is installed cannot be used, and what repairs it; `reason` is the error of its import."""
    installed = package(module)
    name = module if installed is None else installed.distribution
    again = _COMMANDS.get(name, f"pip install {name}").replace("pip install", "pip install --force-reinstall", 1)
    if name == "torchvision" and (torch := package("torch")) is not None:
        again = f"pip install --force-reinstall --no-deps '{_torchvision_for(torch.version)}'"
    said = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
    cannot = f"{module} is installed and cannot be imported ({said})."
    if "failed to map segment" in said or "Cannot allocate memory" in said:
        return f"{cannot} There is too little memory or address space for it: see `free -m` and `ulimit -v`."
    if re.search(r"\bdriver\b", said, re.IGNORECASE):  # the same package again would be no better
        return f"{cannot} It does not fit the NVIDIA driver: update that, or install a release for its CUDA."
    return f"{cannot} It is damaged, or does not fit the packages that it needs. Run: {again}"


def _torchvision_for(torch: str) -> str:
    """The torchvision of a release of PyTorch, whose numbers go up together: 0.21 is 2.6's, and 0.29 that of 2.14 and,
    until there is one, of later ones (docs/support.md). Installed by itself it leaves PyTorch as it is."""
    minor = re.match(r"2\.(\d+)", torch)
    return f"torchvision==0.{min(int(minor[1]) + 15, 29)}.*" if minor else "torchvision"


@dataclass(frozen=True)
class Package:
    """An installed distribution and its version, local part included, like "2.15.0.dev20261101+cu130"."""

    distribution: str
    version: str


def package(module: str) -> Package | None:
    """The distribution that `import module` takes the module from; None where none is installed.

    Where several are installed, as after an upgrade of the bindings alone, it is the one that holds the module's file.
    """
    packages = _installed(DISTRIBUTIONS.get(module, (module,)))
    if not packages:
        return None
    owner = next((p for p in packages if len(packages) > 1 and _holds(p.distribution, module)), packages[0])
    return owner


def version(module: str) -> str | None:
    """The version of the distribution that `import module` takes the module from."""
    installed = package(module)
    return None if installed is None else installed.version


def cuda_major(module: str) -> int | None:
    """The major of CUDA that what is installed of a module is built for, as the distributions' names say it; None where
    none does."""
    named = re.findall(r"-cu(\d+)", " ".join(p.distribution for p in _installed(distributions(module))))
    return max(map(int, named), default=None)


def distributions(module: str) -> tuple[str, ...]:
    """Every distribution that could bring a module, or the libraries that it loads, installed or not."""
    return *DISTRIBUTIONS.get(module, (module,)), *LIBRARIES.get(module, ())


def versions(names: Iterable[str]) -> dict[str, str]:
    """Version of each of these distributions that is installed."""
    return {p.distribution: p.version for p in _installed(names)}


def _installed(distributions: Iterable[str]) -> tuple[Package, ...]:
    installed = []
    for name in distributions:
        try:
            installed.append(Package(name, _running() if name == __package__ else metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(installed)


def _running() -> str:
    """The version of trtpipe that runs: the metadata of an editable installation stays behind its source."""
    return str(sys.modules[__package__].__version__)


def _holds(distribution: str, module: str) -> bool:
    """Whether a distribution installed the module itself, and does not only depend on one that did."""
    return bool(_first_files(distribution, module))


def brought(module: str, path: Path) -> bool:
    """Whether a distribution has installed `path`, the file that `import module` would run; a folder on PYTHONPATH and
    a source tree are nobody's, and their version, if they have one, says nothing of their content.
    """
    for name in DISTRIBUTIONS.get(module, (module,)):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.files is None:  # a system's package, whose manager keeps the list
            listed = [Path(str(found.locate_file(""))) / path.parent.name / path.name]
        else:
            listed = [Path(str(f.locate())) for f in _first_files(name, module)]
        if any(one.resolve() == path.resolve() for one in listed):
            return True
    return False


def _first_files(distribution: str, module: str) -> list[metadata.PackagePath]:
    """What importing the package `module` runs first, as far as a distribution lists it."""
    try:
        listed = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return []
    return [f for f in listed if f.parts[0] == module and len(f.parts) == 2 and f.name.startswith("__init__.")]


#: Imports each module named, and prints a line of JSON for each: null, or its error.
_TRY_IMPORTS = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
for module in sys.argv[2:]:
    try:
        importlib.import_module(module)
        print("null", file=out)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=out)
"""


def import_failures(modules: Sequence[str]) -> Mapping[str, str]:
    """Why modules that are installed cannot be imported, by module; tried in a process of its own."""
    failed: dict[str, str] = {}
    left = list(modules)
    while left:
        command = (sys.executable, "-c", _TRY_IMPORTS, json.dumps(sys.path), *left)
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        answers = [json.loads(line) for line in ran.stdout.splitlines()]
        failed |= {module: answer for module, answer in zip(left, answers, strict=False) if answer}
        if len(answers) < len(left):  # the next one took the process with it
            failed[left[len(answers)]] = f"it ended the process (exit code {ran.returncode})"
        left = left[len(answers) + 1 :]
    return failed


def unimportable(module: str) -> str | None:
    """Why a module that is installed cannot be used, as `broken` says it; None where it can be imported, which is tried
    once."""
    return _unimportable(module, tuple(sys.path))


@functools.cache
def _unimportable(module: str, path: tuple[str, ...]) -> str | None:
    failed = import_failures((module,))
    return broken(module, failed[module]) if failed else None
