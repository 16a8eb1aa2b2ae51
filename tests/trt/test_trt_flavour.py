from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trtpipe.errors import InputError, MissingError
from trtpipe.trt import flavour
from trtpipe.trt.flavour import CAPABILITIES, expected, installed, load, look, title
from trtpipe.version_numbers import parse_version


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_a_release_is_the_same_however_many_of_its_zeros_are_written(name):
    """Those that anything begins or ends with, as a user may write them."""
    edges = {edge for c in CAPABILITIES for span in c.spans(name) for edge in span if edge}
    for edge in edges:
        full = ".".join(map(str, parse_version(edge)))
        short = re.sub(r"(\.0)+$", "", full)
        assert expected(name, short) == expected(name, edge) == expected(name, full), edge


def test_titles():
    assert title("tensorrt", "10.3.0") == "TensorRT 10.3.0"
    assert title("tensorrt_rtx", "1.7.1.116") == "TensorRT-RTX 1.7.1.116"


#: From NVIDIA's release notes by way of observation: (capability, release, whether it has it).
KNOWN = [
    ("weak_typing", "8.6.1", True), ("weak_typing", "10.16.1.11", True), ("weak_typing", "11.0.0", False),
    ("strong_typing", "8.6.1", False), ("strong_typing", "10.3.0", True), ("strong_typing", "11.4.0.106", True),
    ("implicit_quantization", "10.16.1.11", True), ("implicit_quantization", "11.4.0.106", False),
    ("editable_timing_cache", "10.7.0", False), ("editable_timing_cache", "10.8.0", True),
    ("hardware_same_cc", "10.8.0", False), ("hardware_same_cc", "10.9.0", True),
    ("dla", "10.3.0", True), ("dla", "11.0.0", False), ("dla", "11.3.9", False), ("dla", "11.4.0.106", True),
    ("bindings_api", "8.6.1", True), ("bindings_api", "10.3.0", False),
    ("compute_capability", "11.4.0.106", False),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "version", "has"), KNOWN)
def test_the_record(capability, version, has):
    assert (capability in expected("tensorrt", version)) is has


def test_rtx_by_looking_is_rtx_by_the_record():
    pytest.importorskip("tensorrt_rtx")
    found = load("tensorrt_rtx")
    assert found.capabilities == expected("tensorrt_rtx", found.version)
    assert found.has("compute_capability")
    assert not found.has("timing_cache")
    with pytest.raises(KeyError):
        found.has("no such thing")


def test_looking_believes_the_module_and_not_the_version():
    module = types.SimpleNamespace(BuilderFlag=types.SimpleNamespace(STRIP_PLAN=1))
    assert look(module, "tensorrt", "8.6.1") >= {"strip_plan"}
    assert "strip_plan" not in look(types.SimpleNamespace(), "tensorrt", "10.3.0")


def test_a_name_that_rtx_ignores_is_no_capability():
    module = types.SimpleNamespace(IBuilderConfig=types.SimpleNamespace(create_timing_cache=1))
    assert "timing_cache" not in look(module, "tensorrt_rtx", "1.7.1")
    assert "timing_cache" in look(module, "tensorrt", "10.3.0")


def test_capabilities_have_one_row_each():
    names = [c.name for c in CAPABILITIES]
    assert len(names) == len(set(names))


def test_installed_asks_metadata_alone(monkeypatch):
    have = {"tensorrt-cu12-bindings": "10.3.0", "tensorrt-rtx": "1.7.1.116"}

    def version(name):
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed() == {
        "tensorrt": ("tensorrt-cu12-bindings", "10.3.0"),
        "tensorrt_rtx": ("tensorrt-rtx", "1.7.1.116"),
    }


def test_no_module_is_imported_by_importing_ours():
    code = (
        "import sys, trtpipe.trt.builder, trtpipe.trt.runtime, trtpipe.trt.options\n"
        "trtpipe.trt.flavour.installed()\n"
        "print(sorted({'torch', 'onnx', 'tensorrt', 'tensorrt_rtx', 'cuda', 'pycuda'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_no_tensorrt_target():
    with pytest.raises(
        InputError, match=r"build\.target: a TensorRT target must be tensorrt or tensorrt_rtx \(got onnx"
    ):
        load("onnxruntime")


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_a_library_that_does_not_load(monkeypatch, kind):
    def broken(name):
        raise kind("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(flavour.importlib, "import_module", broken)
    with pytest.raises(
        MissingError, match=r"tensorrt is installed and cannot be imported \(\w+: libnvinfer\.so\.10: cannot open"
    ):
        load("tensorrt")


def test_what_an_uninstalled_tensorrt_leaves_is_no_tensorrt(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    with pytest.raises(MissingError) as caught:
        load("tensorrt")
    assert str(caught.value).startswith(
        "build.target: tensorrt is installed and cannot be imported (ImportError: it has no __version__). "
    )


def test_the_ranges_of_releases_are_those_of_the_extras() -> None:
    """pyproject.toml, the commands that install a release, and what is refused."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = {
        name: tuple(
            (low, high) for _, low, high in re.findall(rf'^({extra}) = \["{package}>=([\d.]+),<([\d.]+)"\]', text, re.M)
        )
        for name, extra, package in (("tensorrt", "trt1[01]", "tensorrt"), ("tensorrt_rtx", "rtx", "tensorrt-rtx"))
    }
    assert {name: tuple(sorted(spans)) for name, spans in flavour.INSTALLED_SPANS.items()} == {
        name: tuple(sorted(spans)) for name, spans in extras.items()
    }
    assert flavour.oldest("tensorrt_rtx") == extras["tensorrt_rtx"][0][0]
    for name, newest in flavour.NEWEST_MAJOR.items():
        assert max(parse_version(high) for _, high in extras[name])[0] == newest + (name == "tensorrt")
