"""Which distribution provides a module, and its version, by package metadata alone: nothing is imported here.

One module may come from several distributions: `import tensorrt` from tensorrt, tensorrt-cu12, tensorrt-cu13 or only
their bindings, `import onnxruntime` from onnxruntime or onnxruntime-gpu. Versions are therefore read here, by module.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

try:
    from calib.once import kept
except (Exception, SystemExit):  # noqa: BLE001  # another file hides calib: `import_errors` says so

    def kept(function: Callable[..., T], *given: Hashable) -> T:
        """What a function gives, each time anew."""
        return function(*given)


if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

#: trtpipe's two packages and their folders; not by `calib.user_code.OURS`, which another calib may hide (`hider`).
OWN_FOLDERS = {name: Path(__file__).resolve().parent.with_name(name) for name in ("calib", "trtpipe")}

#: Distributions that bring a module, most complete first. A module that is not here comes from one of its own name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    # NVIDIA's bindings alone are enough where the libraries come from the system, as on a Jetson
    "tensorrt": (
        *("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
        *("tensorrt-bindings", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings", "tensorrt-cu11-bindings"),
        *("tensorrt-lean", "tensorrt-lean-cu13", "tensorrt-lean-cu12"),
    ),
    "tensorrt_rtx": (
        *("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
        *("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
    ),
    "onnxruntime": (
        *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml", "onnxruntime-rocm"),
        *("onnxruntime-training", "onnxruntime-qnn", "ort-nightly", "ort-nightly-gpu"),
    ),
    "torch_tensorrt": ("torch-tensorrt", "torch-tensorrt-rtx"),
    "onnx": ("onnx", "onnx-weekly"),
    "onnxscript": ("onnxscript", "onnxscript-preview"),
    "onnx_ir": ("onnx-ir",),
    "PIL": ("pillow", "pillow-simd"),
    "yaml": ("pyyaml",),
    "pydantic_core": ("pydantic-core",),
    "cuda": ("cuda-python", "cuda-bindings"),
}

#: Distributions without a module that change what one computes: the libraries that TensorRT's bindings load.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt-libs", "tensorrt-cu13-libs", "tensorrt-cu12-libs", "tensorrt-cu11-libs"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu12-libs"),
}

#: What a job needs to be captured, calibrated and exported, whatever its target.
CAPTURE = ("torch", "torchao", "onnx", "onnxscript", "onnxruntime")
#: What a job of images needs beside.
IMAGES = ("torchvision",)
#: What a build needs beside: to count on the CPU, to choose what stays wide, for its report, and what others bring.
BUILDING = ("numba", "networkx", "jinja2", "sympy", "ml_dtypes", "onnx_ir", "markupsafe")
#: Of these, what is judged together: which torchao goes with which torch.
JUDGED_TOGETHER = ("torch", "torchao")
#: The extra of trtpipe that installs a module.
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys((*CAPTURE, *IMAGES, *BUILDING, "matplotlib"), "build"),
    "cuda": "edge",
    **dict.fromkeys(("dask", "distributed", "fsspec"), "fleet"),
    **dict.fromkeys(("sklearn", "timm"), "examples"),
    "pycocotools": "coco",
    "tensorrt_rtx": "rtx",
}
#: The release of Torch-TensorRT whose arguments are known; it is for the PyTorch of the same number.
TORCH_TENSORRT = "2.14"
#: What installs a Jetson's TensorRT.
JETPACKS = "apt install python3-libnvinfer"
#: Between why something cannot be used and the command that repairs it.
RUN = " Run: "
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
    return pip_install({d: text for core, text in _core().items() for d in (core, *_modules_of(core))}[name])


def lacking() -> tuple[str, ...]:
    """The distributions that trtpipe cannot do without and that are not installed."""
    return tuple(name for name in _core() if not any(map(package, _modules_of(name) or (name,))))


def core_modules() -> tuple[str, ...]:
    """The modules of the distributions that trtpipe cannot do without."""
    return modules_of(_core())


def modules_of(distributions: Iterable[str]) -> tuple[str, ...]:
    """The modules that these may bring, as `DISTRIBUTIONS` has it."""
    return tuple(module for name in distributions for module in _modules_of(name) or (name,))


def _modules_of(distribution: str) -> tuple[str, ...]:
    """The modules of `DISTRIBUTIONS` that it may bring."""
    return tuple(module for module, names in DISTRIBUTIONS.items() if distribution in names)


def _core() -> Mapping[str, str]:
    """What trtpipe's own metadata requires always: `numpy` to `numpy>=1.24`; nothing where it is not installed. Read
    without `packaging`, which is one of them."""
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0]: text for text in _required() if ";" not in text}


def _required() -> Sequence[str]:
    return _read(metadata.requires, __package__) or ()


def _read(function: Callable[[str], T], distribution: str) -> T | None:
    """What a function of `importlib.metadata` says of a distribution; None where that is not installed."""
    return kept(_said, function, distribution)


def _said(function: Callable[[str], T], distribution: str) -> T | None:
    with suppress(metadata.PackageNotFoundError):
        return function(distribution)
    return None


def pip_install(requirement: str, instead: Iterable[str] = ()) -> str:
    """The command that installs one requirement by itself, as a device needs no more; in the place of distributions
    that hold the same files, where there are any."""
    away = " ".join(instead)
    return f"{f'pip uninstall -y {away} && ' if away else ''}pip install {shlex.quote(requirement)}"


def reinstall_command(module: str) -> str:
    """The command that installs anew what brings a module; of torchvision, the release that is of the PyTorch here."""
    installed = package(module)
    name = module if installed is None else installed.distribution
    again = _COMMANDS.get(name, f"pip install {name}").replace("pip install", "pip install --force-reinstall", 1)
    if name == "torchvision" and (torch := package("torch")) is not None:
        again = f"pip install --force-reinstall --no-deps '{_torchvision_for(torch.version)}'"
        built = torch.version.partition("+")[2]
        if built and installed is not None and installed.version.partition("+")[2] != built:  # PyPI's have no such part
            again += f" --index-url https://download.pytorch.org/whl/{built}"
    return again


def _torchvision_for(torch: str) -> str:
    """The torchvision of a release of PyTorch, whose numbers go up together: 0.21 is 2.6's, and 0.29 that of 2.14 and,
    until there is one, of later ones (docs/support.md). Installed by itself it leaves PyTorch as it is."""
    minor = re.match(r"2\.(\d+)", torch)
    return f"torchvision==0.{min(int(minor[1]) + 15, 29)}.*" if minor else "torchvision"


def unfit(module: str) -> str | None:
    """Why the installed release of a module is none that trtpipe's own metadata asks for, and what to do; None where it
    is, where none is installed, and where that metadata says nothing of it or other modules decide too
    (`JUDGED_TOGETHER`)."""
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion

    installed = package(module)
    wanted = None if installed is None else _asked(tuple(_required())).get(canonicalize_name(installed.distribution))
    if installed is None or wanted is None or module in JUDGED_TOGETHER:
        return None
    try:
        if wanted.contains(installed.version, prereleases=True):
            return None
    except InvalidVersion:
        return None
    fitting = pip_install(f"{installed.distribution}{wanted}")
    return f"{installed.distribution} must be {wanted} (got {installed.version}).{RUN}{fitting}"


@functools.cache
def _asked(required: tuple[str, ...]) -> Mapping[str, SpecifierSet]:
    """Releases of other distributions that the `build` extra among requirements names, by their canonical names."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    listed = map(Requirement, required)
    built = [r for r in listed if r.marker is not None and r.marker.evaluate({"extra": "build"})]
    return {canonicalize_name(r.name): r.specifier for r in built}


def not_installed(*modules: str) -> str:
    """`torch and onnx are not installed. Run: pip install 'trtpipe[build]'`, of modules that one command installs."""
    return f"{absence(*modules)}.{RUN}{install_command(modules[-1])}"


def absence(*modules: str) -> str:  # or distributions
    """`torch and onnx are not installed`; of a module that is there all the same, that its metadata is what lacks."""
    by_name = {name: _modules_of(name) or (name,) for name in modules}
    bare = [n for n, own in by_name.items() if not any(map(package, own)) and any(map(present, own))]
    absent = [name for name in modules if name not in bare]
    said = [f"{_listed_as(absent)} not installed"] if absent else []
    if bare:
        said.append(f"{_listed_as(bare)} here without package metadata (dist-info), by which its release is known")
    return ", and ".join(said)


def without(module: str) -> str:
    """What a module that no metadata tells of is: not installed, or there without."""
    return "here without package metadata (dist-info)" if present(module) else "not installed"


def _listed_as(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


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
    return next((p for p in packages if len(packages) > 1 and _holds(p.distribution, module)), packages[0])


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


def bringing(module: str) -> dict[str, str]:
    """Version of every installed distribution that brings a top-level module, by name: cv2 comes from opencv-python."""
    from packaging.utils import canonicalize_name

    listed = map(canonicalize_name, _by_module(tuple(sys.path)).get(module, ()))
    return versions(dict.fromkeys((*listed, *distributions(module))))


@functools.cache
def _by_module(path: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    return metadata.packages_distributions()


def present(module: str) -> bool:
    """Whether `import module` gives more than a folder of that name, as an uninstallation leaves one behind."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # by whoever keeps it from being imported
        return False
    return spec is not None and spec.origin is not None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Version of each of these distributions that is installed."""
    return {p.distribution: p.version for p in _installed(names)}


def _installed(distributions: Iterable[str]) -> tuple[Package, ...]:
    found = ((n, _running() if n == __package__ else _read(metadata.version, n)) for n in distributions)
    return tuple(Package(name, version) for name, version in found if version is not None)


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
        if (found := _read(metadata.distribution, name)) is None:
            continue
        if found.files is None:  # a system's package, whose manager keeps the list
            site = Path(str(found.locate_file("")))
            listed = [site / path.parent.name / path.name, site / path.name]
        else:
            listed = [Path(str(f.locate())) for f in _first_files(name, module)]
        if any(one.resolve() == path.resolve() for one in listed):
            return True
    return False


def hider(module: str) -> Path | None:
    """The file that `import module` runs in the place of an installed package of that name (of calib and trtpipe: of
    the one beside this file), of Python's own module, or of one that trtpipe names and that is not installed; None
    where no file hides it.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None) or PathFinder.find_spec(module)
    if spec is None or not spec.has_location:
        return None
    path = Path(str(spec.origin))
    if module in OWN_FOLDERS:
        return path if path.resolve().parent != OWN_FOLDERS[module].resolve() else None
    if module in sys.stdlib_module_names:
        return path if not path.resolve().is_relative_to(Path(os.__file__).resolve().parent) else None
    if brought(module, path):
        return None
    if installed := _installed(DISTRIBUTIONS.get(module, (module,))):  # one that lists no such file is a source tree
        found = (metadata.distribution(p.distribution) for p in installed)
        return path if any(d.files is None or _first_files(d.name, module) for d in found) else None
    return path if path.name == f"{module}.py" and (module in EXTRAS or module in core_modules()) else None


def listed_files(module: str) -> list[metadata.PackagePath]:
    """What the installed distributions that may bring a module list, with the sizes they had."""
    return [file for name in DISTRIBUTIONS.get(module, (module,)) for file in _read(metadata.files, name) or ()]


def _first_files(distribution: str, module: str) -> list[metadata.PackagePath]:
    """What importing the package or module `module` runs first, as far as a distribution lists it."""
    alone = {module + suffix for suffix in all_suffixes()}
    return [
        f
        for f in _read(metadata.files, distribution) or ()
        if (f.parts[0] == module and len(f.parts) == 2 and f.name.startswith("__init__.")) or str(f) in alone
    ]
