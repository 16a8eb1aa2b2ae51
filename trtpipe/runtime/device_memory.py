"""Whether something that is installed gives device memory, which executing an engine takes; tried apart."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

from trtpipe.errors import MissingError
from trtpipe.import_errors import IMPORT_S
from trtpipe.job.sections import Build
from trtpipe.runtime.compatibility import elsewhere
from trtpipe.runtime.device import Device
from trtpipe.trt import driver

#: Asks for device memory as an engine's runner does, and prints why there is none.
_TRY_MEMORY = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from trtpipe.errors import MissingError
from trtpipe.trt.memory import open_memory
try:
    open_memory().close()
except MissingError as error:
    print(error, file=out)
"""


def no_memory(limit_s: float = IMPORT_S) -> str:
    """Why nothing that is installed gives device memory, and what to install where that helps, tried in a process of
    its own, for `limit_s` seconds at most; empty where something does."""
    command = (sys.executable, "-c", _TRY_MEMORY, json.dumps(sys.path))
    out, err = subprocess.PIPE, subprocess.DEVNULL
    try:
        ran = subprocess.run(command, stdout=out, stderr=err, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"device memory: asking for it did not end within {limit_s:g} s"
    return ran.stdout.strip() or (f"device memory: asking for it ended with {ran.returncode}" if ran.returncode else "")


def lacking_memory(build: Build, device: Device) -> str:
    """As `no_memory`, where the engine that `build` asks for is one that `device`, this machine, can execute; else
    empty. Where something gives memory, that is tried once."""
    target = build.target
    able = device.compute_capability is not None and target in device.versions
    if target == "onnxruntime" or not able or elsewhere(build, device):
        return ""
    try:
        _require_memory(os.environ.get(driver.VISIBLE))
    except MissingError as error:
        if target == "tensorrt":  # which builds on the GPU
            return str(error)
        return f"{error} Or let the graph be checked: set {driver.VISIBLE} to nothing."
    return ""


@functools.cache
def _require_memory(visible: str | None) -> None:
    """Try `no_memory` with the GPUs that are visible.

    Raises:
        MissingError: it says why; that is not kept, as a GPU that is full now may have room later.
    """
    if why := no_memory():
        raise MissingError(why)
