"""Files that a user names: any name can be written, and nothing without an end is read to its end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from calib.data import open_source
from calib.files import as_text, open_regular, read_at_most, read_regular, replacing, text_at_most
from calib.samples import DataSpec, InputSpec


@given(st.binary(min_size=1, max_size=40))
def test_any_name_becomes_text_that_utf8_and_json_hold(raw: bytes) -> None:
    name = os.fsdecode(raw)
    text = as_text(name)
    assert json.loads(json.dumps(text, ensure_ascii=False).encode("utf-8")) == text
    assert as_text(text) == text
    if name.isprintable():
        assert text == name


def test_what_is_longer_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12\r\n3")
    assert read_at_most(path, 5) == b"12\r\n3"
    assert text_at_most(path, 5) == "12\n3"
    with pytest.raises(ValueError, match=r"^more than 4 bytes$"):
        read_at_most(path, 4)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        text_at_most(path, 4)


def test_neither_a_pipe_nor_a_device_is_read(tmp_path: Path) -> None:
    """One without a writer would be waited for, and /dev/zero has no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        for read in (open_regular, read_regular, lambda p: read_at_most(p, 4)):
            with pytest.raises(OSError, match="no regular file"):
                read(path)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_images_and_classes_of_any_name_are_drawn(tmp_path: Path) -> None:
    for name in (b"c\xff", b"d"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        for k in range(3):
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(os.fsdecode(os.path.join(folder, b"\xfe%d.png" % k)))
    source = open_source(DataSpec(images=str(tmp_path), samples=4), [InputSpec("x", "float32", (3, 4, 4))])
    assert len(source.ids) == 4
    assert all(as_text(i) == i for i in source.ids)
    assert source.classes == ("c\\udcff", "d")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with replacing(path) as sibling:
        sibling.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    for gone in (tmp_path / "gone" / "t.json", path / "t.json"):
        with pytest.raises(OSError, match=re.escape(repr(str(gone)))), replacing(gone) as sibling:
            sibling.write_bytes(b"")
    with pytest.raises(TypeError), replacing(path) as sibling:
        sibling.write_bytes("text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
