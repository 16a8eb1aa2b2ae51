"""Versions of packages as numbers that can be compared."""

from __future__ import annotations


def of_cuda(number: int) -> str:
    """CUDA's own number of a version as text: 13000 is "13.0", 12040 is "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def sm(compute_capability: str) -> str:
    """A compute capability as NVIDIA writes it behind "sm": "8.9" is "89"."""
    return compute_capability.replace(".", "")


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a version's release: "10.16.1.11" is (10, 16, 1, 11), "10.3.0.post1" is (10, 3, 0).

    At least three of them, so that 10, 10.0 and 10.0.0 are the same release; none for a text that is no version (PEP
    440).
    """
    from packaging.version import InvalidVersion, Version

    try:
        numbers = Version(text).release
    except InvalidVersion:
        return ()
    return numbers + (0,) * (3 - len(numbers))
