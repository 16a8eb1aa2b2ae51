from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trtpipe
from trtpipe.job.sections import Precision
from trtpipe.trt.platforms import (
    BY_CAPABILITY,
    PLATFORMS,
    RTX_COMPUTE_CAPABILITIES,
    RTX_SEEN,
    SOURCE_URLS,
    PlatformName,
    refusals,
    rtx_support,
    same_capability,
    unable,
)


def test_every_platform_has_its_name_and_its_abilities():
    assert set(PLATFORMS) == set(PlatformName.__args__)
    for name, platform in PLATFORMS.items():
        assert platform.name == name
        assert "fp32" in platform.precisions


def test_every_ability_has_a_source():
    for abilities in BY_CAPABILITY.values():
        assert len(abilities.sources) >= 2
        assert set(abilities.sources) <= set(SOURCE_URLS)
    assert all(url.startswith("https://") for url in SOURCE_URLS.values())


#: NVIDIA's words, read from its tables: (platform, compute capability, FP16, INT8, DLA).
MATRIX = [
    ("jetson_nano", "5.3", True, False, False), ("jetson_tx2", "6.2", True, False, False),
    ("jetson_xavier_nx", "7.2", True, True, True), ("jetson_agx_xavier", "7.2", True, True, True),
    ("jetson_orin_nano", "8.7", True, True, False), ("jetson_orin_nx", "8.7", True, True, True),
    ("jetson_agx_orin", "8.7", True, True, True), ("jetson_thor", "11.0", True, True, False),
    ("t4", "7.5", True, True, False), ("a10", "8.6", True, True, False), ("a100", "8.0", True, True, False),
    ("l4", "8.9", True, True, False), ("h100", "9.0", True, True, False), ("b200", "10.0", True, True, False),
    ("rtx_50", "12.0", True, True, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "capability", "fp16", "int8", "dla"), MATRIX)
def test_the_matrix(name, capability, fp16, int8, dla):
    platform = PLATFORMS[name]
    found = (platform.compute_capability, "fp16" in platform.precisions, "int8" in platform.precisions, platform.dla)
    assert found == (capability, fp16, int8, dla)


def test_bf16_from_ampere_and_fp8_from_ada_on():
    for capability, abilities in BY_CAPABILITY.items():
        number = tuple(map(int, capability.split(".")))
        assert ("bf16" in abilities.precisions) == (number >= (8, 0))
        assert ("fp8" in abilities.precisions) == (number >= (8, 9))


def test_int8_of_a_jetson_nano():
    assert refusals(PLATFORMS["jetson_nano"], Precision(int8_mode=True, fp16_mode=True)) == (
        ("precision.int8_mode", "precision.int8_mode: Jetson Nano (compute capability 5.3) must compute in INT8 (got a "
         "platform with FP32, FP16). Use precision.fp16_mode."),
        ("build.platform", "build.platform: Jetson Nano must have TensorRT 8.6 or later (got JetPack 4.6 as its last, "
         "with TensorRT 8.2). Use a Jetson Orin or Thor."),
    )  # fmt: skip


@pytest.mark.parametrize("name", PLATFORMS)
def test_what_ends_before_tensorrt_8_6_is_refused_whatever_it_is_asked(name):
    found = [path for path, _ in refusals(PLATFORMS[name], Precision())]
    assert found == (
        ["build.platform"] if name in ("jetson_nano", "jetson_tx2", "jetson_xavier_nx", "jetson_agx_xavier") else []
    )


def test_fp16_and_bf16():
    (message,) = (m for _, m in unable("P4", "6.1", Precision(fp16_mode=True)))
    assert message.endswith("must compute in FP16 (got a platform with FP32, INT8). Use precision.int8_mode.")
    (message,) = (m for _, m in unable("T4", "7.5", Precision(bf16_mode=True)))
    assert message.endswith("must compute in BF16 (got a platform with FP32, FP16, INT8). Use precision.fp16_mode.")


def test_an_unknown_gpu_is_believed():
    assert unable("Next", "13.0", Precision(int8_mode=True)) == ()


def test_thor_has_two_numbers():
    assert same_capability("10.1", "11.0")
    assert same_capability("8.7", "8.7")
    assert not same_capability("8.6", "8.7")


SEEN = {"9.0": (True, ""), "10.0": (False, "INVALID, unsupported")}


@pytest.mark.parametrize(
    ("capability", "runs", "why"),
    [
        ("8.9", True, "TensorRT-RTX builds for compute capability 8.9"),
        ("9.0", True, "TensorRT-RTX does not name compute capability 9.0; a portable engine runs there"),
        ("10.0", False, "TensorRT-RTX does not name compute capability 10.0; a portable engine does not run there "
         "(INVALID, unsupported)"),
        ("10.3", None, "TensorRT-RTX does not name compute capability 10.3; whether a portable engine runs there is "
         "not known"),
    ],
)  # fmt: skip
def test_whether_rtx_engines_run(monkeypatch, capability, runs, why):
    monkeypatch.setattr("trtpipe.trt.platforms.RTX_SEEN", SEEN)
    found = rtx_support(capability)
    assert (found.runs, found.why) == (runs, why)


def test_what_was_seen_is_of_capabilities_that_rtx_does_not_name():
    assert not set(RTX_SEEN) & set(RTX_COMPUTE_CAPABILITIES)
    assert rtx_support("10.3").runs is RTX_SEEN.get("10.3", (None, ""))[0]


def written_out(module: ast.Module) -> list[int]:
    """The lines of a module that say, or compare with, the oldest compute capability of portable engines."""
    documented = {id(n.value) for n in ast.walk(module) if isinstance(n, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(module)
        if (isinstance(node, ast.Tuple) and ast.unparse(node) == "(8, 0)")
        or (
            isinstance(node, ast.Constant)
            and id(node) not in documented
            and (node.value == 8.0 and isinstance(node.value, float))
            | (isinstance(node.value, str) and len(node.value) > 3 and bool(re.search(r"(?<![\d.])8\.0\b", node.value)))
        )
    ]


def test_the_oldest_gpu_of_portable_engines_is_named_once():
    root = Path(trtpipe.__file__).parent
    there = {str(p.relative_to(root)) for p in root.rglob("*.py") if written_out(ast.parse(p.read_text()))}
    # The table itself; 2:4 sparsity, in a room below it; what a manifest's schema says.
    assert there == {"trt/platforms.py", "job/build_options.py", "bundle/manifest.py"}
    for line in ('f"from 8.0 on (got {x})"', "parse_version(x) < (8, 0)", "float(x) < 8.0"):
        assert written_out(ast.parse(line)) == [1]
    assert not written_out(ast.parse('x = {"8.0": 2, "10.8.0": "TensorRT 10.8.0 and 8"}'))
