"""Tests that need an NVIDIA GPU. Without one they are skipped with the reason, or fail under TRTPIPE_REQUIRE_GPU=1."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import pytest

from trtpipe.trt import driver, flavour

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The first GPU."""
    found = driver.probe()
    if found.problem:
        if os.environ.get("TRTPIPE_REQUIRE_GPU"):
            pytest.fail(f"an NVIDIA GPU must be here, as TRTPIPE_REQUIRE_GPU says (got: {found.problem})")
        pytest.skip(found.problem)
    return found.devices[0]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """A function that keeps what was measured as <name>.json, in TRTPIPE_RESULTS if that is set."""
    given = os.environ.get("TRTPIPE_RESULTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("results")
    if not folder.is_absolute():
        folder = ROOT / folder

    def keep(name, value):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "test-gpu.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, name: value}, indent=1) + "\n")

    return keep


@pytest.fixture(scope="session", params=["tensorrt", "tensorrt_rtx"])
def target(request, gpu):
    """Each TensorRT that is installed."""
    if request.param not in flavour.installed():
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(params=["torch", "cuda-python"])
def provider(request, gpu):
    """Each provider of device memory that works here."""
    from trtpipe.errors import MissingError
    from trtpipe.trt.memory import open_memory

    try:
        open_memory(request.param)
    except MissingError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def nothing_waits(gpu):
    """A context in which PyTorch raises where the host waits for the GPU; it announces the mode as a prototype."""
    torch = pytest.importorskip("torch")

    @contextlib.contextmanager
    def watched():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched
