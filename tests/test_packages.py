"""Versions come from what is imported, whichever distribution brought it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trtpipe import import_errors, packages
from trtpipe.packages import Package
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import environment, fingerprint, this_machine
from trtpipe.runtime import doctor
from trtpipe.runtime.device import this_device
from trtpipe.trt import flavour


def install(site: Path, distribution: str, version: str, module: str | None = None) -> None:
    """Lay out what a wheel leaves behind: its metadata and, where it has one, its module."""
    files = [f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA"]
    if module is not None:
        (site / module).mkdir(exist_ok=True)
        (site / module / "__init__.py").write_text(f"__version__ = {version!r}\n")
        files.append(f"{module}/__init__.py")
    info = site / Path(files[0]).parent
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that packages are installed in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


#: Every distribution of every module that more than one can bring.
BRINGS = [(module, name) for module, names in packages.DISTRIBUTIONS.items() for name in names]


@pytest.mark.parametrize(("module", "distribution"), BRINGS)
def test_a_module_has_a_version_whichever_distribution_brings_it(site: Path, module: str, distribution: str) -> None:
    assert packages.version(module) is None
    install(site, distribution, "2.15.0.dev20261101+cu130", module)
    assert packages.package(module) == Package(distribution, "2.15.0.dev20261101+cu130")


@pytest.mark.parametrize(
    "distribution", [n for module, n in BRINGS if module in ("tensorrt", "tensorrt_rtx", "onnxruntime")]
)
def test_an_upgrade_is_seen_whatever_brought_the_old_one(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    """The fingerprint, the manifest's environment, this device and doctor all see it."""
    module = next(m for m, n in BRINGS if n == distribution)

    def seen(version: str) -> tuple[object, ...]:
        site = tmp_path_factory.mktemp(version)
        install(site, distribution, version, module)
        monkeypatch.setattr(sys, "path", [str(site)])
        found = doctor.examine()
        shown = found.packages["onnxruntime"] if module == "onnxruntime" else found.tensorrts[module]
        assert shown is not None
        assert version in shown
        assert this_device().versions[module] == version
        assert environment()[distribution] == version
        return fingerprint("0" * 64, module, "onnx"), shown

    assert not set(seen("10.3.0")) & set(seen("10.3.1"))


def test_an_upgrade_of_the_libraries_alone_changes_the_fingerprint(site: Path) -> None:
    install(site, "tensorrt-cu12-bindings", "10.3.0", "tensorrt")
    install(site, "tensorrt-cu12-libs", "10.3.0")
    before = fingerprint("0" * 64, "tensorrt", "onnx")
    (site / "tensorrt_cu12_libs-10.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt-cu12-libs\nVersion: 10.3.1\n"
    )
    assert fingerprint("0" * 64, "tensorrt", "onnx") != before


def test_of_several_distributions_the_one_that_holds_the_module_counts(site: Path) -> None:
    """After `pip install -U tensorrt-cu12-bindings` the metapackage still says what it once was."""
    install(site, "tensorrt", "10.3.0")
    install(site, "tensorrt-cu12", "10.3.0")
    install(site, "tensorrt-cu12-bindings", "10.16.1.11", "tensorrt")
    assert flavour.installed() == {"tensorrt": ("tensorrt-cu12-bindings", "10.16.1.11")}


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "before one that is installed"])
@pytest.mark.parametrize("module", ["tensorrt", "tensorrt_rtx", "onnxruntime", "torch_tensorrt", "torch2trt"])
def test_a_compiler_that_no_distribution_brought_counts_by_its_files(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, module: str, installed: bool
) -> None:
    """A folder on PYTHONPATH, or a source tree: its version, if it has one, stays the same when its files change."""

    def seen() -> dict[str, str]:
        return dict(this_machine(Digests()).versions)

    if installed:
        install(site, packages.distributions(module)[0], "10.3.0", module)
        assert f"files of {module}" not in seen()
    bare = tmp_path_factory.mktemp("bare")
    (bare / module / "inside").mkdir(parents=True)
    (bare / module / "__init__.py").write_text("")
    binding = bare / module / "inside" / "binding.so"
    binding.write_bytes(b"10.3.0")
    monkeypatch.setattr(sys, "path", [str(bare), str(site)])
    first = seen()
    (bare / module / "__pycache__").mkdir()
    (bare / module / "__pycache__" / "x.pyc").write_bytes(b"written when it is first imported")
    assert seen() == first
    binding.write_bytes(b"10.3.1")
    assert {name for name, value in seen().items() if first[name] != value} == {f"files of {module}"}


def test_a_bare_compiler_changes_the_fingerprint(site: Path) -> None:
    (site / "tensorrt").mkdir()
    (site / "tensorrt" / "__init__.py").write_text("one")
    before = fingerprint("0" * 64, "tensorrt", "onnx")
    (site / "tensorrt" / "__init__.py").write_text("two")
    assert fingerprint("0" * 64, "tensorrt", "onnx") != before


def test_a_package_of_the_system_without_a_file_list_is_no_bare_one(site: Path) -> None:
    install(site, "tensorrt", "10.3.0", "tensorrt")
    next(site.glob("*/RECORD")).unlink()
    assert packages.brought("tensorrt", site / "tensorrt" / "__init__.py")
    assert not packages.brought("tensorrt", site / "elsewhere" / "tensorrt" / "__init__.py")


def test_without_the_file_lists_the_most_complete_counts(site: Path) -> None:
    install(site, "tensorrt", "8.6.1")
    install(site, "tensorrt-bindings", "8.6.1", "tensorrt")
    for record in site.glob("*/RECORD"):
        record.unlink()
    assert packages.package("tensorrt") == Package("tensorrt", "8.6.1")


def test_a_release_that_trtpipes_metadata_leaves_out_is_named(monkeypatch):
    monkeypatch.setattr(packages, "package", lambda module: packages.Package(module, "0.15.0"))
    asked = {"torchvision": SpecifierSet(">=0.21,<0.31"), "torchao": SpecifierSet(">=0.20")}
    monkeypatch.setattr(packages, "_asked", lambda required: asked)
    assert packages.unfit("torchvision") == (
        "torchvision must be <0.31,>=0.21 (got 0.15.0). Run: pip install 'torchvision<0.31,>=0.21'"
    )
    assert packages.unfit("onnx") is None
    assert packages.unfit("torchao") is None  # PyTorch's release decides over it: before 2.7 it is not used at all
    monkeypatch.setattr(packages, "package", lambda module: packages.Package(module, "0.29.2+cu130"))
    assert packages.unfit("torchvision") is None


@pytest.mark.parametrize("module", [*packages.CAPTURE, *packages.IMAGES, *packages.BUILDING])
def test_a_release_too_old_is_refused_whatever_form_its_name_has(module, monkeypatch):
    """`onnx_ir` is the distribution onnx-ir, and pyproject.toml may write either."""
    names = packages.DISTRIBUTIONS.get(module, (module,))
    monkeypatch.setattr(packages, "package", lambda module: packages.Package(names[0], "0.0.1"))
    if module in packages.JUDGED_TOGETHER:
        assert packages.unfit(module) is None
    else:
        assert f"{names[0]} must be >=" in str(packages.unfit(module)).replace("must be <0.31,>=", "must be >=")


def test_too_little_address_space_is_no_damage():
    said = import_errors.broken("torch", "ImportError: libtorch_cpu.so: failed to map segment from shared object")
    assert said.endswith("There is too little memory or address space for it: see `free -m` and `ulimit -v`.")


def test_what_trtpipe_itself_requires_has_its_command(monkeypatch):
    """An installation that lacks it is no bug: `main` says what to install, and `doctor` promises nothing."""
    assert packages.lacking() == ()
    assert packages.install_command("PIL") == "pip install 'pillow>=10.0'"
    assert packages.not_installed("yaml") == "yaml is not installed. Run: pip install 'pyyaml>=6.0'"
    installed = packages._installed
    absent = {"pillow", "pillow-simd"}
    monkeypatch.setattr(packages, "_installed", lambda names: installed(n for n in names if n not in absent))
    assert packages.lacking() == ("pillow",)
    bare = "pillow is here without package metadata (dist-info), by which its release is known"
    assert {(a.possible, a.reason) for a in doctor.examine().abilities} == {(False, bare)}
    monkeypatch.setattr(packages, "present", lambda module: False)
    found = doctor.examine()
    assert {(a.possible, a.reason) for a in found.abilities} == {(False, "pillow is not installed")}
    assert found.commands == ("pip install 'pillow>=10.0'",)


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        ("2.6.0", "pip install --force-reinstall --no-deps 'torchvision==0.21.*'"),
        ("2.11.0+cu130", "pip install --force-reinstall --no-deps 'torchvision==0.26.*' --index-url "
         "https://download.pytorch.org/whl/cu130"),
        ("2.13.0+cpu", "pip install --force-reinstall --no-deps 'torchvision==0.28.*' --index-url "
         "https://download.pytorch.org/whl/cpu"),
        ("2.14.1", "pip install --force-reinstall --no-deps 'torchvision==0.29.*'"),
        ("2.15.0", "pip install --force-reinstall --no-deps 'torchvision==0.29.*'"),
    ],
)  # fmt: skip
def test_a_torchvision_of_another_pytorch_is_replaced_by_the_one_that_fits(torch, command, monkeypatch):
    """By itself: the newest one with what it needs would replace PyTorch. From where the same build of both is."""
    known = {"torch": Package("torch", torch), "torchvision": Package("torchvision", "0.20.0")}
    monkeypatch.setattr(packages, "package", known.get)
    said = import_errors.broken("torchvision", RuntimeError("operator torchvision::nms does not exist"))
    assert said.endswith(f"packages that it needs. Run: {command}")


@pytest.mark.parametrize(
    ("lacked", "command"),
    [
        ("sympy", "pip install 'trtpipe[build]'"),
        ("numpy", "pip install 'numpy>=1.24'"),
        ("mpmath", "pip install mpmath"),  # which another package needs
    ],
)
def test_a_package_that_lacks_another_is_not_installed_again(lacked, command, monkeypatch):
    """pip says that what is there is there; torchao and torchvision name nothing that they need."""
    monkeypatch.setattr(import_errors, "package", lambda module: None if module == lacked else Package(module, "1.0"))
    monkeypatch.setattr(import_errors, "present", lambda module: module != lacked)
    for module in ("torchao", "torchvision"):
        said = import_errors.broken(module, ModuleNotFoundError(f"No module named '{lacked}'"))
        assert said == f"{module} cannot be imported, as {lacked} is not installed. Run: {command}"
    assert "is installed and cannot be imported" in import_errors.broken("torchao", "No module named 'torchao.x'")


def test_all_that_a_build_needs_is_asked_for_before_it():
    """By the metadata of trtpipe: what is left out comes with another, or is imported where a job asks for it."""
    listed = map(Requirement, packages._required())
    named = {r.name for r in listed if r.marker is not None and r.marker.evaluate({"extra": "build"})}
    asked = {name.replace("_", "-") for name in (*packages.CAPTURE, *packages.IMAGES, *packages.BUILDING)}
    assert {name.replace("_", "-") for name in named} - asked == {"matplotlib", "protobuf"}
