"""What is to survive a loss of power is on the disk before the name leads to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import shipping

from trtpipe import atomic
from trtpipe.bundle.archive import pack


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Each flush, with the name and the size of what is flushed, and each move, with its new name, as they come."""
    done: list[tuple[str, str, int]] = []

    def flushing(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("flush", path.name, path.stat().st_size if path.is_file() else 0))

    def moving(real: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
        def moved(source: Path, target: Path) -> object:
            done.append(("move", Path(target).name, 0))
            return real(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", flushing)
    for where, name in ((os, "rename"), (os, "replace"), (atomic, "exchange")):
        monkeypatch.setattr(where, name, moving(getattr(where, name)))
    return done


@pytest.mark.parametrize("replaced", [False, True])
def test_a_bundle_is_flushed_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, steps: list[tuple[str, str, int]], replaced: bool
) -> None:
    if replaced:
        shipping.bundle(tmp_path / "c", notes=("old",))
        steps.clear()
    shipping.bundle(tmp_path / "c")
    *files, folder, move, parent = steps
    assert sorted(files) == sorted(("flush", path.name, path.stat().st_size) for path in (tmp_path / "c").iterdir())
    assert folder[0] == "flush"
    assert folder[1].startswith(".c.trtpipe-new-")
    assert (move, parent) == (("move", "c", 0), ("flush", tmp_path.name, 0))


def test_an_archive_is_flushed_before_it_gets_its_name(tmp_path: Path, steps: list[tuple[str, str, int]]) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    steps.clear()
    archive = tmp_path / "c.trtb"
    pack(bundle.path, archive)
    flush, move = steps
    assert (flush[0], flush[2]) == ("flush", archive.stat().st_size)
    assert move == ("move", "c.trtb", 0)
