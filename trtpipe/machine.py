"""What this machine has for processes: the cores that this one may use, and memory."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """The cores that this process may run on; all that there are where the system cannot say. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Memory in bytes that can be used without swapping; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(fields[1]) * 1024 if fields else None
