"""Whether something that is installed gives device memory, which executing an engine takes; tried apart."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

from calib import strictjson
from trtpipe.errors import MissingError
from trtpipe.import_errors import IMPORT_S
from trtpipe.job.sections import Build
from trtpipe.machine import how_ended
from trtpipe.runtime.compatibility import elsewhere
from trtpipe.runtime.device import Device
from trtpipe.trt import driver
from trtpipe.trt.driver import INSTALL_ONE, memory_command

#: Asks for device memory as an engine's runner does, and prints lines of JSON: the name of each package before it is
#: asked, and, within a list, why there is none.
_TRY_MEMORY = """
import json, os, sys
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from trtpipe.errors import user_error
from trtpipe.trt.memory import open_memory
try:
    open_memory(asking=lambda package: print(json.dumps(package), file=out)).close()
except Exception as error:
    if (said := user_error(error)) is None:
        raise
    print(json.dumps([str(said)]), file=out)
"""


def no_memory() -> str:
    """Why nothing that is installed gives device memory, and what to install where that helps, tried in a process of
    its own, for `IMPORT_S` seconds at most; empty where something does."""
    command = (sys.executable, "-c", _TRY_MEMORY, json.dumps(sys.path))
    out, err = subprocess.PIPE, subprocess.DEVNULL
    try:
        ran = subprocess.run(command, stdout=out, stderr=err, check=False, timeout=IMPORT_S)
        printed, ended = ran.stdout, _how(ran.returncode)
    except subprocess.TimeoutExpired as late:
        printed, ended = late.stdout or b"", f"did not end within {IMPORT_S:g} s"
    lines = [strictjson.loads(line) for line in printed.splitlines()]
    if lines and isinstance(lines[-1], list):
        return str(lines[-1][0])
    return _ended(str(lines[-1]) if lines else "", ended) if ended else ""


def _how(code: int) -> str:
    """How a process ended that should not have: `ended its process (exit code 3)`; "" for 0."""
    if not code:
        return ""
    return f"ended its process ({how_ended(code)})"


def _ended(package: str, how: str) -> str:
    """What is said where asking for memory ended as `how` says; `package` was being asked, "" for none yet."""
    if package == "pycuda":  # asked last
        install = f"{INSTALL_ONE}{memory_command(driver.probe().cuda)}."
        step = f"Remove it, or have cuda-python, which is asked first. {install}"
        return f"device memory: asking pycuda for it {how}. {step}"
    if not package:
        return f"device memory: asking for it {how}. See what `python -m trtpipe --version` says."
    return f"device memory: asking {package} for it {how}. Remove it, or install a release that fits the NVIDIA driver."


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
