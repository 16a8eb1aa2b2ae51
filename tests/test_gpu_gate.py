"""What `make test-gpu` promises on a machine without a GPU: a failure that says so, where plain pytest skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtpipe.trt import driver

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("required", [False, True])
def test_without_a_gpu(required):
    if not driver.probe().problem:
        pytest.skip("a GPU is here")
    environment = {k: v for k, v in os.environ.items() if k != "TRTPIPE_REQUIRE_GPU"}
    environment |= {"TRTPIPE_REQUIRE_GPU": "1"} if required else {}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if required:
        assert ran.returncode == 1
        assert "an NVIDIA GPU must be here, as TRTPIPE_REQUIRE_GPU says (got: libcuda.so.1" in ran.stdout
    else:
        assert ran.returncode == 0
        assert "skipped" in ran.stdout
        assert "libcuda.so.1, the NVIDIA driver's library, is not on this machine" in ran.stdout
