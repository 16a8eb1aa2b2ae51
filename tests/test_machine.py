"""What this machine has for processes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtpipe import machine
from trtpipe.machine import MUCH, Heap, available_bytes, how_ended, private_bytes, usable_cores


def test_the_cores_of_a_process_are_those_that_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n", 2 << 20), ("MemTotal:  9 kB\n", None)],
)
def test_available_memory_is_what_linux_reports(text: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text if str(path) == "/proc/meminfo" else "")
    assert available_bytes() == size


def test_a_system_without_the_file_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert available_bytes() is None


def test_the_memory_of_a_process_is_what_it_shares_with_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "900 70 20 3 0 50 0\n")
    assert private_bytes() == 50 * mmap.PAGESIZE

    def absent(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert private_bytes() is None
    Heap().settle()


#: Fills glibc's heap with blocks that are all freed but for the last, behind which the heap cannot shrink.
HEAP = """
import ctypes, sys
from trtpipe.machine import Heap, private_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))
heap, began = Heap(), private_bytes()
blocks = [libc.malloc(1 << 20) for _ in range(int(sys.argv[1]))]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
full = private_bytes()
for block in blocks[:-1]:
    libc.free(block)
kept = private_bytes()
heap.settle()
print((kept - began) / (full - began), (private_bytes() - began) / (full - began))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps what is freed")
@pytest.mark.parametrize(("blocks", "returned"), [(4 * (MUCH >> 20), True), (MUCH >> 22, False)])
def test_a_process_that_grew_by_much_returns_what_it_freed(blocks: int, returned: bool) -> None:
    ran = subprocess.run([sys.executable, "-c", HEAP, str(blocks)], capture_output=True, text=True, check=True)
    before, after = map(float, ran.stdout.split())
    assert before > 0.9
    assert (after < 0.2) is returned


#: Fills and frees a block of 64 MiB eight times, and counts the pages that the system gave for it.
BLOCKS = """
import ctypes, resource, sys
from trtpipe import machine
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def fill():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
def faults():
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
with machine.freed_memory_reused():
    within = faults()
print(first, within, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc returns what is freed at once")
def test_what_is_freed_is_used_again_within_the_block() -> None:
    ran = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=True)
    before, within, behind = map(int, ran.stdout.split())
    assert within < before / 4
    assert behind > before / 2


def test_a_heap_that_is_used_again_is_returned_at_a_new_peak_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = []
    sizes = iter([size * MUCH for size in (0, 4, 1, 3, 3, 5, 1, 3, 3)])
    monkeypatch.setattr(machine, "private_bytes", lambda: next(sizes))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=returned.append))
    heap = Heap()
    grown = [(heap.settle(rising=True), len(returned))[1] for _ in range(4)]
    heap.settle()
    assert [*grown, len(returned)] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("garbage", [False, True])
def test_cycles_are_searched_where_they_may_hold_much(garbage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        pass

    cycle = Graph()
    cycle.itself = cycle  # type: ignore[attr-defined]
    held, sizes = weakref.ref(cycle), iter([0, MUCH + 1, 0])
    monkeypatch.setattr(machine, "private_bytes", lambda: next(sizes))
    heap = Heap()
    gc.disable()
    try:
        del cycle
        heap.settle(garbage=garbage)
        assert (held() is None) is garbage
    finally:
        gc.enable()


def test_how_every_signal_ended_a_process_is_said() -> None:
    """Those from 34 to 63 have no name; `ValueError` left exit code 1, that of a failed check."""
    said = [how_ended(-n) for n in range(1, 65)]
    assert {said[8], said[14], said[39]} == {"SIGKILL", "SIGTERM", "signal 40"}
    assert len(set(said)) == 64
    assert how_ended(3) == "exit code 3"
