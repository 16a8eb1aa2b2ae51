"""The file of TensorRT-RTX's runtime cache; the cache itself is a stand-in with the real one's methods."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtpipe.trt.driver import Gpu
from trtpipe.trt.kernel_cache import KernelCache, kernel_file


class RuntimeCache:
    """Holds `data`; takes a blob that begins with RTX."""

    def __init__(self):
        self.data = b""

    def deserialize(self, blob):
        if not blob.startswith(b"RTX"):
            return False
        self.data = blob
        return True

    def serialize(self):
        return memoryview(self.data)


class Config:
    def __init__(self):
        self.cache = None

    def create_runtime_cache(self):
        return RuntimeCache()

    def set_runtime_cache(self, cache):
        self.cache = cache
        return True


def attached(path):
    cache, config = KernelCache(path), Config()
    return cache, config, cache.attach(config)


def test_the_stand_ins_have_the_methods_of_the_real_ones():
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    for ours, real in ((RuntimeCache, trt.IRuntimeCache), (Config, trt.IRuntimeConfig)):
        assert {n for n in vars(ours) if not n.startswith("_")} <= set(dir(real))


def test_what_was_compiled_is_there_the_next_time(tmp_path):
    path = tmp_path / "a" / "kernels"
    cache, config, notes = attached(path)
    assert notes == ()
    config.cache.data = b"RTX kernels"
    assert cache.save() == ()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    _, again, _ = attached(path)
    assert again.cache.data == b"RTX kernels"


def test_one_cache_serves_every_context(tmp_path):
    cache, config, _ = attached(tmp_path / "kernels")
    other = Config()
    cache.attach(other)
    assert other.cache is config.cache


def test_the_file_is_written_where_it_changes_alone(tmp_path):
    path = tmp_path / "kernels"
    cache, config, _ = attached(path)
    assert cache.save() == ()
    assert not path.exists()
    config.cache.data = b"RTX 1"
    cache.save()
    path.unlink()
    cache.save()
    assert not path.exists()
    config.cache.data = b"RTX 2"
    cache.save()
    assert path.read_bytes() == b"RTX 2"


def test_a_blob_that_tensorrt_rtx_refuses_is_replaced(tmp_path):
    path = tmp_path / "kernels"
    path.write_bytes(b"of another driver")
    cache, config, notes = attached(path)
    assert (notes, config.cache.data) == ((), b"")
    config.cache.data = b"RTX new"
    cache.save()
    assert path.read_bytes() == b"RTX new"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_used(tmp_path, mode):
    path = tmp_path / "kernels"
    path.write_bytes(b"RTX evil")
    path.chmod(mode)
    _, config, notes = attached(path)
    assert config.cache.data == b""
    assert notes == (f"{path} is not used: another user owns it or may write to it",)


def test_a_file_of_another_user_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "kernels"
    path.write_bytes(b"RTX evil")
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    _, config, notes = attached(path)
    assert config.cache.data == b""
    assert len(notes) == 1


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    cache, config, notes = attached(tmp_path / "file" / "kernels")
    assert notes == (f"{tmp_path}/file/kernels cannot be read (Not a directory)",)
    config.cache.data = b"RTX 1"
    (note,) = cache.save()
    assert note.startswith(f"kernels compiled for this GPU cannot be kept in {tmp_path}/file/kernels (")


def test_engines_and_gpus_have_files_of_their_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    gpu, other = Gpu(0, "NVIDIA GeForce RTX 4090", "8.9", 1), Gpu(0, "NVIDIA L4", "8.9", 1)
    found = {kernel_file(engine, device) for engine in (b"a", b"b") for device in (gpu, other)}
    assert len(found) == 4
    assert kernel_file(b"a", gpu).name.endswith("-NVIDIA-GeForce-RTX-4090")
    assert {f.parent for f in found} == {Path("/cache/trtpipe/rtx-kernels")}
