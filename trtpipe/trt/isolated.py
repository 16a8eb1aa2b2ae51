"""A TensorRT-RTX build in a process of its own, whose bytes are the same every time.

TensorRT-RTX 1.7.1 numbers its internal variables in the order of memory addresses, so two builds of one graph differ in
some hundred bytes (observed: names like `__mye4414` in the plan). Here the builder runs in a new process with fixed
addresses: randomization is off (personality(2), ADDR_NO_RANDOMIZE), TensorRT's libraries are loaded before anything
whose size depends on this machine's paths and packages is as much as read, every gap that imports left is closed, and
the builder then works in a new thread, whose heap (glibc gives each thread its own) begins below all of it. That heap
is all the builder gets: glibc's cache of freed blocks for each thread is off, and so is Python's garbage collector,
since a thread that frees a block of the main heap would be given it again (with both on, 5 of 25 builds under other
module paths differed; so, none). The process has one CPU: libraries then start no thread for each core, and those that
there are, four for a moment in each build, take turns. In which order they free what the builder gave them is the
system's to decide: of some 700 builds of one graph on a busy machine some 50, most of them in a row, had other digits
in names of variables. A builder that crashes takes nothing with it.

Linux only, as TensorRT-RTX's wheels for it are. Where a sandbox forbids personality(2), the engine's notes say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from calib.types import JsonObject
from trtpipe import errors
from trtpipe.errors import BuildError, Cancelled, TrtpipeError
from trtpipe.job.sections import Build, Precision
from trtpipe.machine import how_ended
from trtpipe.progress import Progress, Silent
from trtpipe.trt import flavour
from trtpipe.trt.builder import build_engine
from trtpipe.trt.facts import engine_of, facts_of
from trtpipe.trt.monitor import PERCENT
from trtpipe.values import DimRange, Engine, OnnxModel, TensorSpec

#: The child's first lines. Numbers are ADDR_NO_RANDOMIZE (linux/personality.h), PR_SET_PDEATHSIG with SIGKILL
#: (linux/prctl.h) and M_MMAP_THRESHOLD (malloc.h): blocks up to 32 MiB then come from the thread's own heap. A
#: stdin that ends early is of a parent that was stopped: nothing is left to do or to say. What is read takes one block
#: of memory, in whatever pieces it comes.
_BOOTSTRAP = """
import ctypes, gc, os, struct, sys
gc.disable()
libc = ctypes.CDLL(None)
now = libc.personality(0xFFFFFFFF)
if now != -1 and not now & 0x0040000 and libc.personality(now | 0x0040000) != -1:
    os.execv(sys.executable, sys.orig_argv)
libc.prctl(1, 9)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
libc.mallopt(-3, 32 << 20)
def read(size):
    data, at = bytearray(size), 0
    with memoryview(data) as view:
        while at < size:
            with view[at:] as rest:
                more = stdin.readinto(rest)
            if not more:
                sys.exit()
            at += more
    return data
stdin = open(0, "rb", buffering=0, closefd=False)
writer, first, second = struct.unpack("3q", read(24))
for library in read(first).split(b"\\0") if first else ():
    ctypes.CDLL(os.fsdecode(bytes(library)), mode=ctypes.RTLD_GLOBAL)
sys.path[:] = [os.fsdecode(bytes(place)) for place in read(second).split(b"\\0")]
from trtpipe.trt.isolated import serve
serve(read, writer, now != -1 and bool(now & 0x0040000))
"""
#: From <linux/mman.h>.
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000
#: Shared libraries and mappings lie within the last 64 GiB below the stack.
_GRANULE_BITS = 36
_LOOKS = 8
_MAPS = Path("/proc/self/maps")
_POLL_S = 0.05
RANDOMIZED = (
    "addresses could not be fixed here (personality(2) is forbidden, or there is no /proc): "
    "the engine's bytes may differ from build to build"
)


def build_isolated(
    model: OnnxModel, build: Build, *, progress: Progress, precision: Precision | None = None, judged: bool = True
) -> Engine:
    """`builder.build_engine` in a new process; the same graph, options and TensorRT-RTX give the same bytes.

    Args:
        model: a checked ONNX file.
        build: target tensorrt_rtx.
        progress: receives the percentage built; polled for cancellation.
        precision: the job's.
        judged: as of `build_engine`.

    Raises:
        TrtpipeError: as `build_engine` does.
        BuildError: also when the builder's process dies.
        Cancelled: when the user stops it.
    """
    with Isolated() as builder:
        builder.start(model, build, precision=precision, judged=judged)
        return builder.finish(progress)


class Isolated:
    """The builder's process. It loads TensorRT-RTX from when the context is entered, builds from `start` on while this
    process does something else, and ends with the context, whatever it is doing then."""

    def __enter__(self) -> Isolated:
        reader, writer = os.pipe()
        self._results = os.fdopen(reader, "rb")
        self._done: JsonObject = {}
        self._sender: threading.Thread | None = None
        # where TensorRT is found, and what CUDA may see: whoever chose a GPU chose it for the builder too
        kept = {n: v for n, v in os.environ.items() if n == "LD_LIBRARY_PATH" or n.startswith("CUDA_")}
        self._child = subprocess.Popen(
            [sys.executable, "-s", "-S", "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(writer,),
            env={**kept, "PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
            cwd="/",
            start_new_session=True,  # an interrupt of the terminal is for us to pass on
        )
        try:
            self._describe(writer)
        except BaseException:  # stopped here, the context is not entered, and so not left
            self.__exit__()
            raise
        finally:
            os.close(writer)
        return self

    def _describe(self, writer: int) -> None:
        """Tell the process where it answers and where its modules are."""
        libraries = _libraries()
        # as the system has them, in which no path holds a NUL: the two processes may have different encodings
        first, second = (
            b"\0".join(map(os.fsencode, some)) for some in (libraries, (p or os.getcwd() for p in sys.path))
        )
        self._send(struct.pack("3q", writer, len(first), len(second)), first, second)

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        if self._sender is not None:
            self._sender.join()
        self._results.close()
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()

    def start(self, model: OnnxModel, build: Build, *, precision: Precision | None = None, judged: bool = True) -> None:
        """Begin to build; arguments as of `build_isolated`."""
        request = {
            "build": build.model_dump(mode="json"),
            "precision": None if precision is None else precision.model_dump(mode="json"),
            "judged": judged,
            "opset": model.opset,
            "precisions": model.precisions,
            "inputs": [dataclasses.asdict(s) for s in model.inputs],
            "outputs": [dataclasses.asdict(s) for s in model.outputs],
        }
        self._model = model
        # A pipe holds little, and the process may still be loading.
        text = json.dumps(request).encode()
        sizes = struct.pack("2q", len(text), len(model.data))
        self._sender = threading.Thread(target=self._send, args=(sizes, text, model.data))
        self._sender.start()

    def _send(self, *parts: bytes) -> None:
        """To the process. One that has died is noticed where its results are read."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for part in parts:
                self._child.stdin.write(part)
            self._child.stdin.flush()

    def look(self, progress: Progress) -> None:
        """Pass on what it has reported so far, without waiting; errors as of `build_isolated`."""
        while not self._done and self._reported(0, progress):
            pass

    def finish(self, progress: Progress) -> Engine:
        """The engine, as soon as it is built; arguments and errors as of `build_isolated`."""
        while not self._done:
            self._reported(_POLL_S, progress)
        about, model = self._done, self._model
        data = self._results.read(about["size"])
        if len(data) != about["size"]:
            raise _died(self._child)
        progress.step(100, 100, PERCENT)
        return engine_of(about["engine"], data, inputs=model.inputs, outputs=model.outputs, graph=model)

    def _reported(self, timeout_s: float, progress: Progress) -> bool:
        """Wait for one message of the process and pass it on; whether there was one."""
        ready, _, _ = select.select([self._results], [], [], timeout_s)
        if progress.cancelled():
            raise Cancelled("build: cancelled by the user; nothing was written.")
        if not ready:
            return False
        line = self._results.readline()
        if not line:
            raise _died(self._child)
        kind, content = json.loads(line)
        if kind == "step":
            progress.step(content, 100, PERCENT)
        elif kind == "note":
            progress.note(content)
        elif kind == "error":
            raise getattr(errors, content[0])(content[1])
        else:
            self._done = content
        return True


def _libraries() -> list[str]:
    """TensorRT-RTX's shared libraries, as its wheel keeps them; none where the system's are used."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return [str(path) for folder in folders for path in sorted(Path(folder).glob("*.so*"))]


def _died(child: subprocess.Popen[bytes]) -> BuildError:
    how = how_ended(child.wait())
    return BuildError(
        f"build: TensorRT-RTX's process ended without an engine ({how}). What it printed is above; "
        "set build.log_level to verbose to see what it was doing."
    )


class _Messages(Silent):
    """Sends a child's progress to its parent, one JSON line each."""

    def __init__(self, results: BinaryIO) -> None:
        self._results = results

    def send(self, kind: str, value: object) -> None:
        """One message."""
        self._results.write(json.dumps([kind, value]).encode() + b"\n")
        self._results.flush()

    def step(self, done: int, total: int | None, unit: str) -> None:
        """The percentage built."""
        self.send("step", done)

    def note(self, message: str) -> None:
        """A message of TensorRT."""
        self.send("note", message)


def serve(read: Callable[[int], bytearray], descriptor: int, fixed: bool) -> None:
    """Read the request from stdin, by `read`, build in a new thread, and write the engine to `descriptor`."""
    results = os.fdopen(descriptor, "wb")
    messages = _Messages(results)
    text, size = struct.unpack("2q", read(16))
    request = json.loads(bytes(read(text)))
    data = bytes(read(size))

    def spec(raw: JsonObject) -> TensorSpec:
        dims = {n: DimRange(**r) for n, r in raw["dims"].items()}
        return TensorSpec(**{**raw, "shape": tuple(raw["shape"]), "dims": dims})

    model = OnnxModel(
        data,
        request["opset"],
        tuple(spec(s) for s in request["inputs"]),
        tuple(spec(s) for s in request["outputs"]),
        precisions=tuple(request["precisions"]),
    )
    build = Build.model_validate_json(json.dumps(request["build"]))
    raw = request["precision"]
    precision = None if raw is None else Precision.model_validate_json(json.dumps(raw))

    def run() -> None:
        try:
            engine = build_engine(model, build, progress=messages, precision=precision, judged=request["judged"])
        except TrtpipeError as error:
            messages.send("error", [type(error).__name__, str(error)])
            return
        except BaseException:
            traceback.print_exc()
            raise
        noted = engine if settled else dataclasses.replace(engine, notes=(*engine.notes, RANDOMIZED))
        header = {"size": len(engine.data), "engine": facts_of(noted)}
        messages.send("done", header)
        results.write(engine.data)
        results.flush()

    try:
        flavour.load(build.target)
    except TrtpipeError as error:
        messages.send("error", [type(error).__name__, str(error)])
        return
    settled = fixed and _close_gaps()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _close_gaps() -> bool:
    """Reserve all free addresses above a round one below the lowest mapping; what is mapped later lies below that.

    Where imports put their memory then no longer matters. Reserved pages cost nothing: they cannot be touched.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE

    def close(free: int, first: int) -> bool:
        return bool(libc.mmap(free, first - free, 0, flags, -1, 0) == free)

    # Reading the map takes memory itself, which may lie where a gap was seen: look again.
    try:
        return any(all(close(*gap) for gap in _gaps()) for _ in range(_LOOKS))
    except OSError:
        return False


def _gaps() -> list[tuple[int, int]]:
    """Free spans [first, last) between a round address and the highest mapping, the stack's surroundings left out."""
    spans = []
    for line in _MAPS.read_text().splitlines():
        first, last = (int(a, 16) for a in line.split()[0].split("-"))
        if not line.endswith(("[stack]", "[vsyscall]")):
            spans.append((first, last))
    top = max(spans)[0] >> _GRANULE_BITS
    free = top << _GRANULE_BITS
    gaps = []
    for first, last in sorted(s for s in spans if s[0] >> _GRANULE_BITS == top):
        if first > free:
            gaps.append((free, first))
        free = max(free, last)
    return gaps
