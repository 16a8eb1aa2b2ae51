"""The files that job files of these tests name."""

import pytest
from jobs import good_folder


@pytest.fixture
def folder(tmp_path):
    good_folder(tmp_path)
    for name in ("w.pickle", "m.ts", "m.pt2", "x.npy", "x.npz", "t.json"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path
