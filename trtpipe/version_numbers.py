"""Versions of packages as numbers that can be compared."""

from __future__ import annotations


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
