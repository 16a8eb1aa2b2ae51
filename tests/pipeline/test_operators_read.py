"""What is read through operators of libraries, and extended attributes."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torchvision.io  # registers torch.ops.image

from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.native import TORCHS
from trtpipe.pipeline.cache.reads import Read, Reads
from trtpipe.pipeline.cache.recorder import Recorder

assert torchvision.io


@pytest.fixture
def library():
    """Operators of a library, in native code as far as the recorder knows."""
    operators = torch.library.Library("tt_native", "DEF")
    for name, arguments in (("load", "str[] names"), ("scale", "Tensor x, *, str mode"), ("double", "Tensor x")):
        operators.define(f"{name}({arguments}) -> int")
        operators.impl(name, lambda *args, **kwargs: 0, "CompositeExplicitAutograd")
    yield torch.ops.tt_native
    operators._destroy()


def test_files_that_operators_of_a_library_take_are_recorded_and_other_text_is_noted(library, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    recorder, x = Recorder(tmp_path), torch.ones(1)
    with recorder:
        library.load([str(tmp_path / "a"), str(tmp_path / "b")])
        library.double(x)
        library.scale(x, mode="part-")
        with pytest.raises(RuntimeError):
            torch.ops.image.read_file(str(tmp_path / "none"))
        with torch.profiler.record_function("text of PyTorch's own"):
            torch.nn.functional.interpolate(torch.ones(1, 1, 2, 2), scale_factor=2, mode="nearest")
    assert recorder.reads.items == (Read("file", "a"), Read("file", "b"))
    assert recorder.reads.notes == (
        "the job's code called tt_native::scale with 'part-': what that operator read is not watched",
        f"the job's code called image::read_file with '{tmp_path}/none': what that operator read is not watched",
    )
    recorder.close()


def test_what_an_operator_writes_it_has_not_read(tmp_path):
    path = tmp_path / "a"
    recorder = Recorder(tmp_path)
    with recorder:
        for _ in range(2):
            torch.ops.image.write_file(str(path), torch.zeros(4, dtype=torch.uint8))
    assert (recorder.reads, recorder.changed()) == (Reads(), ())
    assert recorder.written == {"read a"}
    recorder.close()


def test_operators_are_as_before_where_nothing_is_recorded(tmp_path):
    kinds = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)
    before = [kind.__call__ for kind in kinds]
    recorder = Recorder(tmp_path)
    with recorder:
        assert [kind.__call__ for kind in kinds] != before
    assert [kind.__call__ for kind in kinds] == before
    recorder.close()


def test_namespaces_of_pytorchs_own_operators_with_text():
    script = (
        "import torch, torch.onnx; print(*{s.name.partition('::')[0] for s in torch._C._jit_get_all_schemas()"
        " if any('str' in str(a.type) for a in s.arguments)})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"_test"} <= TORCHS


@pytest.mark.parametrize("way", ["os.getxattr(name, 'user.x')", "os.listxattr(name)", "os.listxattr(fd)"])
def test_extended_attributes_are_recorded(way, tmp_path):
    path = tmp_path / "a"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    recorder = Recorder(tmp_path)
    with recorder, contextlib.suppress(OSError):  # it has none, or its file system
        eval(way, {"name": str(path), "fd": fd, "os": os})
    os.close(fd)
    assert recorder.reads.items == (Read("attributes", "a"),)
    recorder.close()


def test_a_changed_attribute_is_a_changed_value(tmp_path, monkeypatch):
    attributes = {"user.x": b"1", "user.y": b"2"}
    monkeypatch.setattr(os, "listxattr", lambda path: list(attributes))
    monkeypatch.setattr(os, "getxattr", lambda path, name: attributes[name])
    seen = [Read("attributes", "a").value(tmp_path, Digests())]
    attributes["user.x"] = b"2"
    seen.append(Read("attributes", "a").value(tmp_path, Digests()))
    del attributes["user.y"]
    seen.append(Read("attributes", "a").value(tmp_path, Digests()))
    assert len(set(seen)) == 3
