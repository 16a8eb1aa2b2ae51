"""What this machine has for processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtpipe.machine import available_bytes, usable_cores


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
